use kv_core::{OnGpu, Place};

struct OnDisk;

impl Place for OnDisk {
    type Other = OnGpu;
    const NAME: &'static str = "disk";
}

fn main() {}

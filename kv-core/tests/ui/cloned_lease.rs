use kv_core::{Lease, OnGpu};

fn copy(lease: &Lease<OnGpu>) -> Lease<OnGpu> {
    lease.clone()
}

fn main() {}

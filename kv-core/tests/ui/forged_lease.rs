use kv_core::{Lease, OnGpu, RecordKey};

fn forge(key: RecordKey) -> Lease<OnGpu> {
    Lease {
        machine: 1,
        index: 0,
        key,
        place: core::marker::PhantomData,
    }
}

fn main() {}

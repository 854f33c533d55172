use kv_core::{Choice, Lease, Machine, OnHost};

fn parked(machine: &Machine, lease: &Lease<OnHost>) {
    let _table = machine.table(lease, Choice::new(0));
}

fn main() {}

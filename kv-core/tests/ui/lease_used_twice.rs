use kv_core::{Fence, GroupId, Machine, Time};

fn twice(machine: &mut Machine) {
    let lease = machine.allocate(GroupId::new(1), 1).unwrap();
    let _first = machine.swap_out(Time::ZERO, lease, Fence::NONE);
    let _second = machine.swap_out(Time::ZERO, lease, Fence::NONE);
}

fn main() {}

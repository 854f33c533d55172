use kv_core::{Fence, GroupId, Machine, Time};

fn not_on_the_host(machine: &mut Machine) {
    let lease = machine.allocate(GroupId::new(1), 1).unwrap();
    let _ticket = machine.swap_in(Time::ZERO, lease, Fence::NONE);
}

fn main() {}

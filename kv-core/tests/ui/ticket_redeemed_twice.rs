use kv_core::{Machine, OnGpu, Ticket};

fn twice(machine: &mut Machine, ticket: Ticket<OnGpu>) {
    let _first = machine.redeem(ticket);
    let _second = machine.redeem(ticket);
}

fn main() {}

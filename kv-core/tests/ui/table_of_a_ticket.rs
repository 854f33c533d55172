use kv_core::{Choice, Machine, OnHost, Ticket};

fn half_restored(machine: &Machine, ticket: &Ticket<OnHost>) {
    let _table = machine.table(ticket, Choice::new(0));
}

fn main() {}

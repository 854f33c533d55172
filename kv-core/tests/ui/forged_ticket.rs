use kv_core::{OnHost, RecordKey, Ticket, TicketId};

fn forge(key: RecordKey, id: TicketId) -> Ticket<OnHost> {
    Ticket::new(1, 0, key, id)
}

fn main() {}

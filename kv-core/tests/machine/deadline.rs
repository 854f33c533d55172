//! Flights that don't end, that end twice, and that end against what was said before.

use kv_core::{
    Accepted, Completion, CopyFault, Deadlines, Direction, Event, Gone, HostSide, MachineConfig,
    Outcome, Redeemed, Span, Time,
};

use crate::rig::{C0, Rig, completion, config};

fn timed(base: Span, factor: u32, assumed_rate: u64) -> Rig {
    Rig::with(MachineConfig {
        deadlines: Deadlines {
            base,
            factor,
            assumed_rate,
        },
        ..config(8, HostSide::Slots(8))
    })
}

#[test]
fn the_deadline_is_the_base_and_a_multiple_of_the_expected_time() {
    let block_bytes = config(1, HostSide::Slots(0)).block_bytes;
    // One block a second, tenfold.
    let mut rig = timed(Span::from_secs(30), 10, block_bytes);
    assert_eq!(rig.machine.poll_timeout(), None);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    let due = Time::ZERO + Span::from_secs(30 + 2 * 10);
    assert_eq!(rig.machine.poll_timeout(), Some(due));
    // Just before, nothing happens; then it is given up.
    rig.machine
        .handle_timeout(Time::from_nanos(due.as_nanos() - 1));
    assert_eq!(rig.stats().flights, 1);
    rig.now = due;
    rig.machine.handle_timeout(due);
    rig.pump();
    assert_eq!((rig.stats().flights, rig.stats().out.unknown), (0, 1));
    assert_eq!(rig.settled().fault, Some(CopyFault::Deadline));
    assert_eq!(rig.machine.poll_timeout(), None);
    assert!(matches!(
        rig.machine.redeem(ticket),
        Ok(Redeemed::Gone(Gone::Unknown))
    ));
}

#[test]
fn a_measured_rate_takes_the_place_of_the_assumed_one() {
    let mut rig = timed(Span::from_secs(1), 10, 1);
    let block_bytes = rig.stats().block_bytes;
    assert_eq!(rig.machine.rate(Direction::Out), 1);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    rig.later(Span::from_secs(2));
    rig.end(Outcome::Done);
    assert_eq!(rig.machine.rate(Direction::Out), block_bytes);
    assert_eq!(
        rig.machine.rate(Direction::In),
        1,
        "each direction by itself"
    );
    drop(ticket);
    let lease = rig.group(2, 8);
    let started = rig.now;
    let ticket = rig.out(lease);
    assert_eq!(
        rig.machine.poll_timeout(),
        Some(started + Span::from_secs(1 + 2 * 10))
    );
    drop(ticket);
}

#[test]
fn i14_lost_memory_never_returns_whatever_is_said_later() {
    for direction in [Direction::Out, Direction::In] {
        let mut rig = timed(Span::from_secs(1), 0, 1);
        let lease = rig.group(1, 8);
        if direction == Direction::Out {
            let ticket = rig.out(lease);
            rig.later(Span::from_secs(2));
            rig.machine.handle_timeout(rig.now);
            assert!(matches!(rig.machine.redeem(ticket), Ok(Redeemed::Gone(_))));
        } else {
            let lease = rig.park(lease);
            let ticket = rig.back(lease);
            rig.later(Span::from_secs(2));
            rig.machine.handle_timeout(rig.now);
            assert!(matches!(rig.machine.redeem(ticket), Ok(Redeemed::Gone(_))));
        }
        let command = rig.commands.remove(0);
        rig.pump();
        let lost = Event::Lost {
            blocks: 2,
            slots: 2,
        };
        assert!(rig.events.contains(&lost));
        for (late, outcome) in (1..).zip([Outcome::Done, Outcome::Failed, Outcome::Unknown]) {
            let report = completion(&command, rig.now, outcome);
            assert_eq!(rig.report(&report), Accepted::Stale);
            let stats = rig.stats();
            assert_eq!(stats.stale_completions, late, "I13");
            assert_eq!((stats.gpu.lost, stats.host.lost), (2, 2));
        }
        // Nobody ever gets one of them.
        let lost: Vec<_> = command.moves().iter().map(|step| step.block).collect();
        let lease = rig.group(2, 6 * 4);
        assert_eq!(rig.stats().gpu.free, 0);
        assert!(
            rig.machine
                .table(&lease, C0)
                .iter()
                .all(|block| !lost.contains(block))
        );
    }
}

#[test]
fn i14_a_tombstone_at_its_deadline_is_lost_too() {
    let mut rig = timed(Span::from_secs(1), 0, 1);
    let lease = rig.group(1, 8);
    let ticket = rig.out(lease);
    rig.cancel(ticket);
    rig.later(Span::from_secs(1));
    rig.machine.handle_timeout(rig.now);
    rig.pump();
    assert_eq!((rig.stats().gpu.lost, rig.stats().host.lost), (2, 2));
    assert_eq!(
        (rig.stats().cancelled, rig.stats().groups.cancel_pending),
        (1, 0)
    );
}

#[test]
fn i13_repeats_and_contradictions_are_counted_and_change_nothing() {
    for first in [Outcome::Done, Outcome::Failed, Outcome::Unknown] {
        for second in [Outcome::Done, Outcome::Failed, Outcome::Unknown] {
            let mut rig = Rig::new(4, 4);
            let lease = rig.group(1, 8);
            let ticket = rig.out(lease);
            let (command, accepted) = rig.end(first);
            assert_eq!(accepted, Accepted::Flight);
            let before = rig.stats();
            let echo = completion(&command, rig.now, second);
            assert_eq!(rig.report(&echo), Accepted::Stale, "{first:?}, {second:?}");
            let mut after = rig.stats();
            after.stale_completions -= 1;
            assert_eq!(after, before, "{first:?}, {second:?}");
            assert_eq!(rig.events.last(), Some(&Event::StaleCompletion));
            // The ticket yields what the first report said.
            let yielded = rig.machine.redeem(ticket).unwrap();
            assert!(matches!(
                (first, yielded),
                (Outcome::Done, Redeemed::Moved(_))
                    | (Outcome::Failed, Redeemed::Stayed(_))
                    | (Outcome::Unknown, Redeemed::Gone(Gone::Unknown))
            ));
        }
    }
}

#[test]
fn i13_pieces_that_were_never_issued_end_nothing() {
    let mut rig = Rig::capped(8, 8, 2);
    let lease = rig.group(1, 16);
    let ticket = rig.out(lease);
    let command = &rig.commands[0];
    let forged = Completion {
        id: kv_core::CommandId::for_testing(ticket.id(), 3),
        ..completion(command, rig.now, Outcome::Done)
    };
    assert_eq!(rig.report(&forged), Accepted::Stale);
    let forged = Completion {
        id: kv_core::CommandId::for_testing(kv_core::TicketId::for_testing(1), 0),
        ..forged
    };
    assert_eq!(rig.report(&forged), Accepted::Stale);
    assert_eq!(rig.stats().stale_completions, 2);
    rig.end_all();
    assert!(matches!(rig.machine.redeem(ticket), Ok(Redeemed::Moved(_))));
}

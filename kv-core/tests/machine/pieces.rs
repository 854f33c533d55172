//! Flights that are larger than the in-flight cap.

use kv_core::{Accepted, Fence, Outcome, Redeemed, Refusal, Refused, Span, SubmitRefusal};

use crate::rig::{Rig, completion, keep};

#[test]
fn i03_the_cap_holds_at_every_instant() {
    for cap in 1..=5 {
        let mut rig = Rig::capped(16, 16, cap);
        let lease = rig.group(1, 11 * 4);
        let ticket = rig.out(lease);
        let block_bytes = rig.stats().block_bytes;
        let (mut most, mut moved) = (0, 0);
        while !rig.commands.is_empty() {
            most = most.max(rig.stats().inflight_bytes / block_bytes);
            let (command, _) = rig.end(Outcome::Done);
            moved += command.moves().len();
        }
        assert_eq!(moved, 11);
        assert!(most <= cap && most >= cap.min(2), "{most} of {cap}");
        assert_eq!(rig.stats().inflight_bytes, 0);
        let Ok(Redeemed::Moved(lease)) = rig.machine.redeem(ticket) else {
            panic!("it has moved")
        };
        let lease = rig.restore(lease);
        rig.release(lease);
        rig.assert_empty();
    }
}

#[test]
fn i03_pieces_never_share_a_block_and_cover_all() {
    let mut rig = Rig::capped(16, 16, 3);
    let lease = rig.group(1, 10 * 4);
    let expected: Vec<_> = rig.machine.table(&lease, crate::rig::C0).to_vec();
    let ticket = rig.out(lease);
    let mut blocks = Vec::new();
    let mut next_piece = 0;
    while !rig.commands.is_empty() {
        let (command, accepted) = rig.end(Outcome::Done);
        assert_eq!(command.id().piece(), next_piece);
        next_piece += 1;
        blocks.extend(command.moves().iter().map(|step| step.block));
        let over = blocks.len() == expected.len();
        let right = if over {
            Accepted::Flight
        } else {
            Accepted::Piece
        };
        assert_eq!(accepted, right);
    }
    assert_eq!(blocks, expected);
    drop(ticket);
}

/// A flight of six pieces of which the fourth ends otherwise; the group afterwards.
fn fourth_of_six(outcome: Outcome) -> (Rig, u32) {
    let mut rig = Rig::capped(8, 8, 2);
    let lease = rig.group(1, 24);
    let ticket = rig.out(lease);
    for piece in 0..6 {
        if piece == 3 {
            let (_, accepted) = rig.end(outcome);
            assert_eq!(accepted, Accepted::Piece, "the fifth is still under way");
            let stats = rig.stats();
            assert_eq!((stats.gpu.evicting, stats.host.filling), (6, 6));
        } else if !rig.commands.is_empty() {
            rig.end(Outcome::Done);
        }
    }
    assert!(rig.commands.is_empty());
    let issued = u32::try_from(rig.stats().out.bytes / rig.stats().block_bytes).unwrap();
    match (outcome, rig.machine.redeem(ticket).unwrap()) {
        (Outcome::Failed, Redeemed::Stayed(lease)) => {
            assert_eq!(rig.machine.blocks(&lease), 6);
            rig.release(lease);
        }
        (Outcome::Unknown, Redeemed::Gone(_)) => {}
        (outcome, other) => panic!("{outcome:?} gave {other:?}"),
    }
    (rig, issued)
}

#[test]
fn s09_after_one_failed_piece_the_rest_is_not_issued_and_all_is_cleaned_up() {
    let (rig, arrived) = fourth_of_six(Outcome::Failed);
    assert_eq!(arrived, 4, "the first three and the fifth");
    rig.assert_empty();
}

#[test]
fn i14_only_the_piece_that_nobody_can_vouch_for_is_lost() {
    let (rig, arrived) = fourth_of_six(Outcome::Unknown);
    assert_eq!(arrived, 4);
    let stats = rig.stats();
    assert_eq!((stats.gpu.lost, stats.gpu.free), (1, 7));
    assert_eq!((stats.host.lost, stats.host.free), (1, 7));
}

#[test]
fn i14_at_the_deadline_pieces_that_were_reported_are_not_lost() {
    let mut rig = Rig::capped(8, 8, 2);
    let lease = rig.group(1, 24);
    let ticket = rig.out(lease);
    rig.end(Outcome::Done);
    rig.end(Outcome::Done);
    rig.later(Span::from_secs(1_000));
    rig.machine.handle_timeout(rig.now);
    rig.pump();
    let stats = rig.stats();
    assert_eq!(
        (stats.gpu.lost, stats.host.lost),
        (2, 2),
        "the two under way"
    );
    assert_eq!((stats.inflight_bytes, stats.gpu.free), (0, 6));
    drop(ticket);
}

#[test]
fn a_cancelled_flight_issues_nothing_further() {
    let mut rig = Rig::capped(8, 8, 2);
    let lease = rig.group(1, 24);
    let ticket = rig.out(lease);
    assert_eq!(rig.commands.len(), 2);
    rig.cancel(ticket);
    rig.end_all();
    assert_eq!(rig.stats().out.bytes, 2 * rig.stats().block_bytes);
    rig.assert_empty();
}

#[test]
fn a_command_handed_back_by_a_busy_backend_is_dropped_when_its_flight_stops() {
    let mut rig = Rig::capped(8, 8, 2);
    let lease = rig.group(1, 24);
    let ticket = rig.out(lease);
    let busy = rig.commands.remove(1);
    let why = SubmitRefusal::Busy;
    rig.machine
        .handle_refused(rig.now, Refused { why, back: busy });
    rig.check();
    rig.machine.cancel(rig.now, ticket).unwrap();
    assert!(rig.machine.poll_command().is_none());
    rig.end(Outcome::Done);
    rig.assert_empty();
}

#[test]
fn i12_a_second_flight_waits_for_the_budget() {
    let mut rig = Rig::capped(8, 8, 3);
    let first = rig.group(1, 8);
    let second = rig.group(2, 8);
    let ticket = rig.out(first);
    let block_bytes = rig.stats().block_bytes;
    let mut back = None;
    let now = rig.now;
    let why = rig.refused(|machine| {
        machine
            .swap_out(now, second, Fence::NONE)
            .map_err(|refused| keep(refused, &mut back))
    });
    let (needed, free) = (2 * block_bytes, block_bytes);
    assert_eq!(why, Refusal::Inflight { needed, free });
    assert_eq!(rig.stats().inflight_backpressure, 1);
    let (command, _) = rig.end(Outcome::Done);
    assert_eq!(
        rig.report(&completion(&command, now, Outcome::Done)),
        Accepted::Stale
    );
    let second = rig.park(back.unwrap());
    rig.release(second);
    let Ok(Redeemed::Moved(lease)) = rig.machine.redeem(ticket) else {
        panic!("it has moved")
    };
    rig.release(lease);
    rig.assert_empty();
}

//! The client's stream: a swap can't be seen in it, and nobody but a completion wakes the engine.

use kv_core::testing::Rng;
use kv_core::{Choice, Outcome, Span, Time};
use kv_model::oracle::{OracleConfig, OracleScript, ScriptEnd};
use kv_scheduler::{FinishReason, Next, Request, RequestId, TokenId};

use crate::world::{Copies, STEP, Seen, Setup, VOCAB, World, request};

/// "hi", the four bytes of an emoji one by one, then a stop string in four pieces.
const SCRIPT: [u32; 9] = [500, 501, 502, 503, 504, 505, 506, 507, 508];
const SUBJECT: RequestId = RequestId(1);

fn subject() -> Request {
    request(SUBJECT.0, 2, 32, 24)
}

fn toy_oracle() -> OracleConfig {
    let script = OracleScript::new(ScriptEnd::Hashed).choice(Choice::new(0), SCRIPT.map(TokenId));
    OracleConfig {
        vocab: VOCAB,
        script: Some(script),
        ..OracleConfig::default()
    }
}

/// What a server does when the text of choice 0 ends with the stop string.
fn stop_at_the_end_of_the_script(world: &mut World) {
    let seen = world.seen(SUBJECT);
    let text: Vec<u32> = seen.choices[0].iter().map(|token| token.0).collect();
    if text.ends_with(&SCRIPT[5..]) && seen.finish[0].is_none() {
        world.stop(SUBJECT, Choice::new(0));
    }
}

/// With ample memory.
fn undisturbed() -> Seen {
    let mut setup = Setup::new(64, 0);
    setup.oracle = toy_oracle();
    let mut world = World::new(setup);
    world.submit(subject());
    while !world.engine.is_idle() {
        world.pass();
        stop_at_the_end_of_the_script(&mut world);
    }
    world.seen.remove(&SUBJECT).unwrap()
}

/// The subject is made to leave after every token: whenever it runs, somebody newer takes all
/// blocks that are left and then wants two more.
fn swapped_after_every_token() -> World {
    let mut setup = Setup::new(16, 64);
    setup.oracle = toy_oracle();
    setup.copies = Copies::Held;
    setup.engine.victim = kv_scheduler::VictimPolicy::Oldest;
    let mut world = World::new(setup);
    world.submit(subject());
    // Two blocks of the subject's prompt; all others are the first pusher's.
    world.submit(request(100, 2, 16 * 14, 2));
    let mut next_pusher = 101;
    let mut paused_long = false;
    while !world.seen(SUBJECT).is_over() {
        let machine = world.machine();
        let comes_back = machine.groups.swap_in_in_flight == 1;
        let runs = (world.stats().running, world.stats().swapped) == (1, 0);
        let seen = world.seen(SUBJECT);
        if (comes_back || runs) && world.stats().waiting == 0 {
            // As large as what is free beside the blocks that the subject is going to need.
            let unfinished = seen.finish.iter().filter(|finish| finish.is_none());
            let block_is_full = (32 + seen.choices[1].len() - 1).is_multiple_of(16);
            let needed = if block_is_full { unfinished.count() } else { 0 };
            let spare = machine.gpu.free - u32::try_from(needed).unwrap();
            world.submit(request(next_pusher, 2, 16 * spare, 2));
            next_pusher += 1;
        }
        if let Some(copy) = world.pending().first() {
            if comes_back && !paused_long && world.seen(SUBJECT).choices[1].len() == 14 {
                paused_long = true;
                world.now = copy.submitted_at + Span::from_secs(30);
            }
            world.end_copy(Outcome::Done);
        }
        world.pass();
        stop_at_the_end_of_the_script(&mut world);
    }
    assert!(paused_long);
    world.finish();
    world
}

#[test]
fn s13_i10_the_stream_does_not_show_the_swap() {
    let right = undisturbed();
    assert_eq!(right.choices[0], SCRIPT.map(TokenId));
    assert_eq!(
        right.finish,
        [Some(FinishReason::Stop), Some(FinishReason::Length)]
    );
    assert_eq!(right.choices[1].len(), 24);

    let world = swapped_after_every_token();
    let seen = world.seen(SUBJECT);
    assert_eq!(seen.text(), right.text());
    assert_eq!(seen.failed, None);
    let machine = world.machine();
    // 24 tokens of the longer choice, all but the last followed by a swap.
    assert_eq!((machine.out.done, machine.back_in.done), (23, 23));
    assert!(
        seen.pauses
            .iter()
            .any(|&pause| pause >= Span::from_secs(30))
    );
    assert_eq!(world.stats().recomputed_tokens, 0);
    assert_eq!(machine.gpu.lost, 0);
    world.assert_empty();
}

#[test]
fn s13_a_stop_while_the_group_is_away_is_kept() {
    for (away, done) in [(true, false), (true, true), (false, true)] {
        let mut world = World::new(Setup {
            copies: Copies::Held,
            ..Setup::new(8, 16)
        });
        world.submit(request(1, 1, 64, 64));
        let pair = request(2, 2, 16, 48);
        let id = world.submit(pair.clone());
        world.pass_until(|world| world.machine().out.started == 1);
        if done {
            world.end_copy(Outcome::Done);
            world.pass();
        }
        if !away {
            world.pass_until(|world| world.machine().back_in.started == 1);
        }
        let seen = world.seen(id).clone();
        world.stop(id, Choice::new(0));
        world.setup.copies = Copies::After(Span::ZERO);
        world.finish();
        let whole = crate::world::reference(&world.setup, &pair);
        let after = world.seen(id);
        assert_eq!(after.choices[0], seen.choices[0], "nothing after the stop");
        assert_eq!(after.finish[0], Some(FinishReason::Stop));
        assert_eq!(after.choices[1], whole.choices[1]);
        world.assert_text(&request(1, 1, 64, 64));
        world.assert_empty();
    }
}

#[test]
fn stopping_every_choice_ends_the_request_wherever_it_is() {
    let mut world = World::new(Setup {
        copies: Copies::Held,
        ..Setup::new(8, 16)
    });
    world.submit(request(1, 1, 64, 64));
    let id = world.submit(request(2, 2, 16, 48));
    world.pass_until(|world| world.machine().out.started == 1);
    for choice in [0, 1] {
        world.stop(id, Choice::new(choice));
    }
    // Twice, and for choices and requests that never were: nothing.
    world.engine.stop(world.now, id, Choice::new(0));
    world.engine.stop(world.now, RequestId(1), Choice::new(7));
    assert_eq!(world.engine.live_requests(), 1);
    assert_eq!(world.machine().groups.cancel_pending, 1);
    world.end_copy(Outcome::Done);
    world.finish();
    assert_eq!(world.stats().finished, 2);
    assert_eq!(world.stats().cancelled, 0);
    world.assert_text(&request(1, 1, 64, 64));
    world.assert_empty();
}

#[test]
fn a_stop_token_ends_a_choice_with_stop() {
    let mut setup = Setup::new(32, 0);
    setup.oracle = toy_oracle();
    let mut world = World::new(setup);
    let mut asked = subject();
    asked.stop_tokens = vec![TokenId(SCRIPT[3])];
    let id = world.submit(asked);
    world.finish();
    let seen = world.seen(id);
    assert_eq!(
        seen.choices[0],
        SCRIPT[..4].iter().copied().map(TokenId).collect::<Vec<_>>()
    );
    assert_eq!(seen.finish[0], Some(FinishReason::Stop));
    assert_eq!(seen.finish[1], Some(FinishReason::Length));
}

/// When the copy back ends, seen from the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    BeforeTheLoopParks,
    AfterIt,
    FailsOnce,
}

/// One request that was made to leave, and no other traffic; the driver parks whenever the engine
/// says so, and only the bell or the engine's own time gets it going again.
fn alone_on_the_host(rng: &mut Rng, ends: Ends) {
    let mut world = World::new(Setup {
        copies: Copies::Held,
        ..Setup::new(6, 6)
    });
    let pusher = world.submit(request(2, 1, 64, 32));
    let left_at = 1 + rng.below(8);
    for _ in 0..left_at {
        world.pass();
    }
    // It leaves at its eighth token, when its first block is full.
    let id = world.submit(request(1, 1, 9, 30));
    world.pass_until(|world| world.machine().out.started == 1);
    // The other one goes; from now on there is one request in the house.
    world.cancel(pusher);
    let mut woken = true;
    let mut parked = 0;
    let mut ended_at: Option<Time> = None;
    let mut failures = u32::from(ends == Ends::FailsOnce);
    let mut wait_until = None;
    let tokens = world.seen(id).tokens();
    for _ in 0..200 {
        if world.seen(id).tokens() > tokens {
            break;
        }
        // The copy goes on for a while, unless it must end before the loop parks.
        let early = ends == Ends::BeforeTheLoopParks;
        if !world.pending().is_empty() && (early || !woken) {
            if !early {
                world.now = world.now + Span::from_nanos(rng.below(40_000_000));
            }
            let back = world.pending()[0].direction == kv_core::Direction::In;
            let fails = back && failures > 0;
            failures -= u32::from(fails);
            world.end_copy(if fails {
                Outcome::Failed
            } else {
                Outcome::Done
            });
            assert!(world.bell.take(), "a completion rings the bell");
            woken = true;
            if back && !fails {
                ended_at = Some(world.now);
            }
        }
        if !woken {
            let until: Time = wait_until.expect("I08: nobody would ever wake the engine");
            world.now = world.now.max(until);
        }
        woken = match world.step() {
            Next::Again => {
                world.now = world.now + STEP;
                true
            }
            Next::Wait(until) => {
                parked += 1;
                wait_until = until;
                world.bell.take()
            }
        };
    }
    assert!(world.seen(id).tokens() > tokens, "{ends:?}: no token");
    let token_at = *world.seen(id).token_at.last().unwrap();
    let waited = token_at.since(ended_at.expect("it came back by a copy"));
    assert!(waited <= Span::from_millis(100), "{ends:?}: {waited:?}");
    assert!(parked > 0 || ends == Ends::BeforeTheLoopParks);
    assert_eq!(failures, 0);
}

#[test]
fn s10_nobody_else_wakes_the_engine() {
    let mut rng = Rng::new(10);
    for round in 0..10_000 {
        let ends = [Ends::BeforeTheLoopParks, Ends::AfterIt, Ends::FailsOnce][round % 3];
        alone_on_the_host(&mut rng, ends);
    }
}

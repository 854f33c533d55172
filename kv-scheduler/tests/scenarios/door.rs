//! What is refused at the door, with nothing changed.

use kv_core::Span;
use kv_scheduler::{Rejection, RequestId};

use crate::world::{Setup, World, request};

#[test]
fn s08_never_fits_and_exactly_fits() {
    let mut world = World::new(Setup::new(49, 49));
    for id in 1..=5 {
        let (needed, blocks) = (66, 49);
        assert_eq!(
            world.refuse(request(id, 1, 1_002, 50)),
            Rejection::NeverFits { needed, blocks }
        );
    }
    let (needed, blocks) = (50, 49);
    assert_eq!(
        world.refuse(request(6, 1, 751, 50)),
        Rejection::NeverFits { needed, blocks }
    );
    let exact = world.submit(request(7, 1, 734, 50));
    let small: Vec<_> = (10..20)
        .map(|id| world.submit(request(id, 1, 16, 16)))
        .collect();
    world.finish();
    assert_eq!(world.seen(exact).tokens(), 50);
    world.assert_text(&request(7, 1, 734, 50));
    for id in small {
        assert_eq!(world.seen(id).tokens(), 16);
        world.assert_text(&request(id.0, 1, 16, 16));
    }
    world.assert_empty();
    assert_eq!((world.stats().rejected, world.stats().accepted), (6, 11));
}

#[test]
fn s08_a_request_that_needs_every_block_uses_every_block() {
    let mut world = World::new(Setup::new(49, 0));
    let exact = world.submit(request(7, 1, 734, 50));
    let mut most = 0;
    world.pass_until(|world| {
        most = most.max(world.machine().gpu.allocated);
        world.engine.is_idle()
    });
    assert_eq!(most, 49);
    assert_eq!(world.seen(exact).tokens(), 50);
}

#[test]
fn i12_each_rejection_changes_nothing() {
    let mut setup = Setup::new(8, 8);
    setup.engine.max_waiting = 2;
    setup.engine.max_n = 3;
    setup.engine.max_seq_len = 100;
    let mut world = World::new(setup);
    let mut empty = request(5, 1, 16, 16);
    empty.prompt.clear();
    assert_eq!(world.refuse(empty), Rejection::EmptyPrompt);
    assert_eq!(world.refuse(request(5, 1, 16, 0)), Rejection::NoTokens);
    assert_eq!(
        world.refuse(request(5, 0, 16, 16)),
        Rejection::Choices { n: 0, max: 3 }
    );
    assert_eq!(
        world.refuse(request(5, 4, 16, 16)),
        Rejection::Choices { n: 4, max: 3 }
    );
    assert_eq!(
        world.refuse(request(5, 1, 85, 16)),
        Rejection::TooLong {
            prompt: 85,
            max_tokens: 16,
            max: 100
        }
    );
    assert_eq!(
        world.refuse(request(5, 3, 48, 50)),
        Rejection::NeverFits {
            needed: 3 + 3 * 4,
            blocks: 8
        }
    );
    world.submit(request(1, 1, 16, 16));
    assert_eq!(world.refuse(request(1, 1, 16, 16)), Rejection::DuplicateId);
    world.submit(request(2, 1, 16, 16));
    assert_eq!(
        world.refuse(request(3, 1, 16, 16)),
        Rejection::QueueFull { waiting: 2, max: 2 }
    );
    // In the middle of things as well.
    world.pass();
    assert_eq!(world.refuse(request(2, 1, 16, 16)), Rejection::DuplicateId);
    world.engine.drain();
    assert_eq!(world.refuse(request(3, 1, 16, 16)), Rejection::Draining);
    world.finish();
    for id in [1, 2] {
        world.assert_text(&request(id, 1, 16, 16));
    }
    world.assert_empty();
}

#[test]
fn more_choices_than_run_at_a_time_are_refused() {
    let mut setup = Setup::new(64, 0);
    setup.engine.max_batch_size = 4;
    let mut world = World::new(setup);
    assert_eq!(
        world.refuse(request(1, 5, 16, 16)),
        Rejection::Choices { n: 5, max: 4 }
    );
    let id = world.submit(request(1, 4, 16, 16));
    world.finish();
    assert_eq!(world.seen(id).tokens(), 64);
}

#[test]
fn an_id_can_be_used_again_at_once() {
    let mut world = World::new(Setup::new(8, 8));
    world.submit(request(1, 1, 16, 16));
    world.pass();
    world.cancel(RequestId(1));
    world.submit(request(1, 1, 20, 8));
    world.finish();
    world.assert_text(&request(1, 1, 20, 8));
    assert!(!world.engine.cancel(world.now, RequestId(1)), "it is over");
    let closed = world.engine.shutdown(world.now, Span::ZERO);
    assert_eq!((closed.unconfirmed, closed.leaked_bytes), (0, 0));
}

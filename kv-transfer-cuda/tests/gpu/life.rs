//! Life and death of backends and commands: stalled streams, drop, close, fallback.

use core::time::Duration;
use std::sync::Arc;

use kv_core::{
    Backend, BlockId, CopyFault, DigestWork, Direction, Fence, Layout, Outcome, SlotIndex, Span,
    SubmitRefusal,
};
use kv_transfer_cuda::{
    CudaConfig, CudaError, Fallback, GpuMemory, Opened, PathChoice, StepFences, buried, open,
};

use crate::rig::{Flag, HOLD, LIMIT, Rig, clock, device, foreign_pool, hold, pattern};

fn layout() -> Layout {
    Layout::stacked(4, 512, 16, 4, 64, 2).expect("blocks of 64 KiB")
}

fn block_bytes() -> usize {
    usize::try_from(layout().block_bytes()).expect("small")
}

/// Holds the executor's stream; the fence is over when the flag is raised.
fn stalled(rig: &Rig) -> (Flag, Fence) {
    let flag = Flag::new();
    hold(&rig.stream, &flag, HOLD);
    (flag, rig.fence())
}

/// The seed's `submission returns before completion`, for many commands on a stalled stream, and
/// what the kernels are told about them stays theirs although more are queued behind.
#[test]
fn submit_returns_while_the_stream_is_stalled_and_keeps_every_command_apart() {
    let mut config = CudaConfig::new(512);
    config.path = PathChoice::Ring;
    let mut rig = Rig::new(layout(), &config);
    for block in 0..512 {
        let bytes = pattern(block.into(), block_bytes());
        rig.memory
            .write_block(BlockId::new(block), &bytes)
            .expect("a sound context");
    }
    let (flag, fence) = stalled(&rig);
    let mut slow = Vec::new();
    let tickets: Vec<_> = (0..512)
        .map(|i| {
            let start = clock();
            let ticket = rig.submit(Direction::Out, &[(i, 511 - i)], fence, DigestWork::Skip);
            if start.elapsed() > HOLD / 4 {
                slow.push((i, start.elapsed()));
            }
            ticket
        })
        .collect();
    // The step ends by itself only after its limit.
    assert!(
        slow.is_empty(),
        "submits that waited for the step: {slow:?}"
    );
    let mut ended = Vec::new();
    rig.backend.poll(&mut ended);
    assert!(
        ended.is_empty(),
        "a copy ended before the step it comes after"
    );
    flag.raise();
    for ticket in tickets {
        assert_eq!(rig.wait(ticket).outcome, Outcome::Done);
    }
    for block in 0..512 {
        let slot = SlotIndex::new(511 - block);
        let bytes = rig.backend.slot_bytes(slot).expect("at rest");
        assert!(
            bytes == pattern(block.into(), block_bytes()),
            "block {block}"
        );
    }
}

#[test]
fn a_large_command_on_a_stalled_stream_does_not_hold_submit_either() {
    let layout = Layout::stacked(32, 256, 16, 8, 128, 2).expect("512 MiB in blocks of 2 MiB");
    let mut rig = Rig::new(layout, &CudaConfig::new(256));
    let (flag, fence) = stalled(&rig);
    let moves: Vec<_> = (0..256).map(|i| (i, 255 - i)).collect();
    let first = rig.submit(Direction::Out, &moves, fence, DigestWork::Skip);
    let second = rig.submit(Direction::Out, &moves, fence, DigestWork::Skip);
    flag.raise();
    for ticket in [first, second] {
        let ended = rig.wait(ticket);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(ended.bytes, 512 << 20);
    }
}

/// The seed's `retire keeps staging alive`, and clause 5.
#[test]
fn dropping_a_backend_in_flight_keeps_its_memory_and_does_not_wait() {
    let rig = Rig::new(layout(), &CudaConfig::new(512));
    let mut rig = rig;
    let incoming = pattern(1, block_bytes());
    rig.memory
        .write_block(BlockId::new(0), &incoming)
        .expect("a sound context");
    rig.finish(Direction::Out, &[(0, 0)]);
    let (flag, fence) = stalled(&rig);
    rig.submit(Direction::In, &[(1, 0)], fence, DigestWork::Skip);
    rig.submit(Direction::Out, &[(0, 1)], fence, DigestWork::Skip);
    let before = buried();
    let Rig {
        backend,
        memory,
        stream,
        ..
    } = rig;
    drop(backend);
    let after = buried();
    assert!(
        after.commands >= before.commands + 2,
        "{before:?} {after:?}"
    );
    assert!(after.backends > before.backends);
    flag.raise();
    stream.synchronize().expect("a sound context");
    device().synchronize().expect("a sound context");
    // The copy in ran to its end, from slots that were still there.
    let found = memory.read_block(BlockId::new(1)).expect("a sound context");
    assert!(found == incoming);
}

/// The seed's `shutdown retires before releasing`: a close with room to wait leaves nothing.
#[test]
fn i11_close_waits_for_what_is_under_way() {
    let layout = Layout::stacked(32, 256, 16, 8, 128, 2).expect("512 MiB in blocks of 2 MiB");
    let mut rig = Rig::new(layout, &CudaConfig::new(256));
    let moves: Vec<_> = (0..256).map(|i| (i, i)).collect();
    // The copy of several milliseconds is under way as a whole or queued in part when the close
    // comes; both are accounted for.
    let ticket = rig.submit(Direction::Out, &moves, Fence::NONE, DigestWork::Skip);
    let closed = rig.backend.close(Span::from(LIMIT));
    assert_eq!((closed.unconfirmed, closed.leaked_bytes), (0, 0));
    let ended = rig.wait(ticket);
    match ended.outcome {
        Outcome::Done => assert_eq!(ended.bytes, 512 << 20),
        Outcome::Failed => assert_eq!(ended.fault, Some(CopyFault::Closed)),
        Outcome::Unknown => panic!("{ended:?}"),
    }
    let command = rig.command(Direction::Out, &[(0, 0)], Fence::NONE, DigestWork::Skip);
    let now = rig.now();
    let refused = rig.backend.submit(now, command).expect_err("closed");
    assert_eq!(refused.why, SubmitRefusal::Closed);
}

#[test]
fn close_gives_up_at_its_limit_and_says_what_is_left() {
    let mut rig = Rig::new(layout(), &CudaConfig::new(512));
    let (flag, fence) = stalled(&rig);
    rig.submit(Direction::Out, &[(0, 0), (1, 1)], fence, DigestWork::Skip);
    let closed = rig.backend.close(Span::from_millis(20));
    assert_eq!(closed.unconfirmed, 1);
    assert_eq!(closed.leaked_bytes, 2 * layout().block_bytes());
    flag.raise();
    rig.stream.synchronize().expect("a sound context");
    device().synchronize().expect("a sound context");
    let mut ended = Vec::new();
    rig.backend.poll(&mut ended);
    assert!(ended.is_empty(), "what was given up does not end");
}

#[test]
fn i09_foreign_memory_is_moved_where_it_is() {
    let small = Layout::latent(7, 24, 16, 576, 2).expect("valid");
    let bytes = usize::try_from(small.block_bytes()).expect("small");
    let mut rig = Rig::over(foreign_pool(small), &CudaConfig::new(24));
    for block in 0..24 {
        let bytes = pattern(block.into(), bytes);
        rig.memory
            .write_block(BlockId::new(block), &bytes)
            .expect("a sound context");
    }
    let out: Vec<_> = (0..12).map(|i| (i, 23 - i)).collect();
    rig.finish(Direction::Out, &out);
    let back: Vec<_> = (0..12).map(|i| (12 + i, 23 - i)).collect();
    rig.finish(Direction::In, &back);
    for block in 0..12 {
        let found = rig
            .memory
            .read_block(BlockId::new(block + 12))
            .expect("a sound context");
        assert!(found == pattern(block.into(), bytes), "block {block}");
    }
}

#[test]
fn i15_without_a_pinned_pool_the_blocking_backend_is_taken_with_the_reason() {
    let memory = Arc::new(GpuMemory::allocate(&device(), layout()).expect("room on the GPU"));
    let fences = Arc::new(StepFences::new(&device()).expect("events"));
    let mut config = CudaConfig::new(512);
    // More slabs than the budget of device memory allows.
    config.staging_in.slab_bytes = 1 << 30;
    let refused = open(&memory, &fences, &config, Fallback::Refuse);
    assert!(matches!(refused, Err(CudaError::Config { .. })));
    let opened = open(&memory, &fences, &config, Fallback::Blocking).expect("the blocking one");
    let Opened::Blocking { backend, reason } = opened else {
        panic!("{opened:?}")
    };
    assert!(reason.to_string().contains("staging takes"), "{reason}");
    assert_eq!(backend.slots_ready(), u32::MAX);
}

#[test]
fn slots_become_usable_while_the_pool_grows() {
    let layout = Layout::stacked(32, 64, 16, 8, 128, 2).expect("blocks of 2 MiB");
    let mut config = CudaConfig::new(2_048);
    config.arena.chunk_bytes = 64 << 20;
    let memory = Arc::new(GpuMemory::allocate(&device(), layout).expect("room on the GPU"));
    let fences = Arc::new(StepFences::new(&device()).expect("events"));
    let backend = kv_transfer_cuda::CudaBackend::new(memory, fences, &config).expect("a backend");
    let first = backend.slots_ready();
    assert!(first >= 32, "the first chunk is ready at once: {first}");
    assert_eq!(
        backend.wait_slots(Span::from(Duration::from_secs(60))),
        Ok(2_048)
    );
    assert_eq!(backend.slots_ready(), 2_048);
}

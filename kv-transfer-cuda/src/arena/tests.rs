//! The pool grows, stops growing and gives back, with a page-lock that only counts.

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use core::time::Duration;
use std::sync::Arc;

use kv_core::SlotIndex;
use parking_lot::Mutex;

use super::{Geometry, HostArena, PageLock, grow};
use crate::CudaError;
use crate::config::ArenaConfig;
use crate::error::DriverError;

const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Counts what is locked, and refuses from the n-th time on.
#[derive(Clone, Default)]
struct Ledger {
    locked: Arc<Mutex<Vec<usize>>>,
    refuse_from: Option<usize>,
}

impl PageLock for Ledger {
    fn lock(&self, address: NonNull<u8>, bytes: usize) -> Result<(), DriverError> {
        assert!(bytes > 0);
        let mut locked = self.locked.lock();
        if self.refuse_from.is_some_and(|most| locked.len() >= most) {
            return Err(DriverError {
                call: "lock",
                code: 2,
                name: String::from("OUT"),
            });
        }
        locked.push(address.as_ptr().addr());
        Ok(())
    }

    fn unlock(&self, address: NonNull<u8>) {
        let mut locked = self.locked.lock();
        let place = locked.iter().position(|&at| at == address.as_ptr().addr());
        locked.swap_remove(place.expect("unlocked once, after it was locked"));
    }
}

fn config(slots: u32) -> ArenaConfig {
    let touch_threads = NonZeroUsize::new(3).expect("not 0");
    ArenaConfig {
        slots,
        chunk_bytes: 4 * MIB,
        touch_threads,
        flag: "--pool",
    }
}

#[test]
fn slots_do_not_overlap_nor_cross_a_chunk() {
    for slot_bytes in [1, 100, 4096, MIB, 3 * MIB, 4 * MIB] {
        let geometry = Geometry::new(slot_bytes, &config(23)).expect("fits");
        let mut end = 0;
        for slot in 0..23 {
            let (offset, chunk) = geometry.place(slot);
            assert!(
                offset >= end,
                "slot {slot} of {slot_bytes} bytes overlaps the one before"
            );
            end = offset + slot_bytes;
            let start = u64::from(chunk) * geometry.chunk_stride;
            let inside = start <= offset && end <= start + geometry.chunk_bytes(chunk);
            assert!(inside, "slot {slot} of {slot_bytes} bytes leaves its chunk");
        }
        assert!(end <= geometry.mapped_bytes());
    }
}

#[test]
fn a_slot_that_is_larger_than_a_chunk_is_refused() {
    assert!(matches!(
        Geometry::new(5 * MIB, &config(1)),
        Err(CudaError::Config { .. })
    ));
}

#[test]
fn the_pool_becomes_ready_and_gives_everything_back() {
    let ledger = Ledger::default();
    let arena = HostArena::reserve(MIB, &config(18), Box::new(ledger.clone())).expect("mapped");
    assert_eq!(arena.slots_ready(), 0);
    grow(&arena, &config(18), "no such device").expect("the first chunk");
    assert!(
        arena.slots_ready() >= 4,
        "the first chunk is ready when `grow` returns"
    );
    assert_eq!(arena.wait_grown(LIMIT), Ok(18));
    assert_eq!(ledger.locked.lock().len(), 5);
    for slot in 0..18 {
        let slot = SlotIndex::new(slot);
        // SAFETY: no copy runs, and no other thread knows the arena.
        unsafe { arena.with_bytes_mut(slot, |bytes| bytes.fill(7)) };
        // SAFETY: as above.
        let sum = unsafe { arena.with_bytes(slot, |b| b.iter().map(|&x| u64::from(x)).sum()) };
        assert_eq!(7 * MIB, sum);
    }
    drop(arena);
    // The growing threads may hold the arena for a moment longer; they end without it.
    assert!(ledger.locked.lock().len() <= 5);
}

#[test]
fn a_failure_at_the_first_chunk_takes_nothing() {
    let ledger = Ledger {
        refuse_from: Some(0),
        ..Ledger::default()
    };
    let arena = HostArena::reserve(MIB, &config(18), Box::new(ledger.clone())).expect("mapped");
    let error = grow(&arena, &config(18), "no such device").expect_err("refused");
    let named = matches!(error, CudaError::MemoryLimit { flag: "--pool", .. });
    assert!(named || error.driver_code() == Some(2), "{error}");
    assert_eq!(arena.slots_ready(), 0);
    assert!(ledger.locked.lock().is_empty());
}

#[test]
fn a_failure_later_keeps_the_slots_that_are_ready() {
    let ledger = Ledger {
        refuse_from: Some(2),
        ..Ledger::default()
    };
    let arena = HostArena::reserve(MIB, &config(18), Box::new(ledger.clone())).expect("mapped");
    grow(&arena, &config(18), "no such device").expect("the first chunk");
    assert!(arena.wait_grown(LIMIT).is_err());
    assert!(arena.failure().is_some());
    assert_eq!(arena.slots_ready(), 8);
    assert_eq!(ledger.locked.lock().len(), 2);
}

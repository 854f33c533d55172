//! Host slots.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::runs::Runs;
use crate::{HostSlots, SlotIndex};

/// What the host side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostSide {
    /// Ordinary memory that the blocking backend takes from the system as it needs it: no pool,
    /// no cap, and all host counters read 0.
    Pageable,
    /// A slab of that many equal slots.
    Slots(u32),
}

/// Who holds a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nobody can yet: the backend is still setting it up.
    Unready,
    /// Nobody.
    Free,
    /// A flight out.
    Filling,
    /// A parked record, or the flight that brings it back.
    Parked,
    /// A record that is on the GPU too, with the same bytes.
    Clean,
    /// Nobody, for ever.
    Lost,
}

/// Which record holds a clean copy, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CleanOwner {
    pub(crate) record: u32,
    pub(crate) cell: u32,
}

/// All host slots.
#[derive(Debug)]
pub(crate) struct HostPool {
    pageable: bool,
    states: Vec<SlotState>,
    free: Runs,
    /// Clean copies in the order in which they became clean. An entry is out of date when its
    /// stamp is not the slot's.
    clean: VecDeque<(SlotIndex, u64)>,
    stamps: Vec<u64>,
    owners: Vec<CleanOwner>,
    last_stamp: u64,
    counts: HostSlots,
    /// Slots that a pageable backend may drop its buffers of.
    forgotten: Vec<SlotIndex>,
}

const NO_OWNER: CleanOwner = CleanOwner {
    record: u32::MAX,
    cell: u32::MAX,
};

impl HostPool {
    pub(crate) fn new(side: HostSide) -> Self {
        let (pageable, slots) = match side {
            HostSide::Pageable => (true, 0),
            HostSide::Slots(slots) => (false, slots),
        };
        let n = slots as usize;
        Self {
            pageable,
            states: vec![SlotState::Unready; n],
            free: Runs::default(),
            clean: VecDeque::new(),
            stamps: vec![0; n],
            owners: vec![NO_OWNER; n],
            last_stamp: 0,
            counts: HostSlots {
                total: slots,
                unready: slots,
                ..HostSlots::default()
            },
            forgotten: Vec::new(),
        }
    }

    /// The counts; all zero on a pageable host side.
    pub(crate) fn counts(&self) -> HostSlots {
        if self.pageable {
            HostSlots::default()
        } else {
            self.counts
        }
    }

    /// Slots below `ready` have been set up.
    pub(crate) fn set_ready(&mut self, ready: u32) {
        if self.pageable {
            return;
        }
        let now = self.counts.total - self.counts.unready;
        let ready = ready.min(self.counts.total);
        for slot in (now..ready).map(SlotIndex::new) {
            self.set(slot, SlotState::Unready, SlotState::Free);
            self.free.insert(slot);
        }
    }

    /// How many slots can be had if other records give up their clean copies; `own` of the clean
    /// ones are not to be touched.
    pub(crate) const fn available(&self, own: u32) -> u32 {
        if self.pageable {
            u32::MAX
        } else {
            self.counts.free + self.counts.clean - own
        }
    }

    /// Takes `n` free slots for a flight out, neighbours wherever there are any. Fewer only if
    /// there aren't as many.
    pub(crate) fn take(&mut self, n: u32) -> Vec<SlotIndex> {
        while self.pageable && self.counts.free < n {
            self.grow();
        }
        let mut slots = Vec::with_capacity(n as usize);
        let mut missing = n;
        while missing > 0 {
            let Some((start, length)) = self.free.take(missing) else {
                break;
            };
            missing -= length;
            slots.extend((start.value()..start.value() + length).map(SlotIndex::new));
        }
        for &slot in &slots {
            self.set(slot, SlotState::Free, SlotState::Filling);
        }
        if self.pageable {
            // Their buffers are written again; there is nothing to drop.
            self.forgotten
                .retain(|slot| self.states[slot.value() as usize] == SlotState::Free);
        }
        let HostSlots {
            total,
            free,
            unready,
            ..
        } = self.counts;
        self.counts.peak = self.counts.peak.max(total - free - unready);
        slots
    }

    /// Free slots.
    pub(crate) const fn free(&self) -> u32 {
        self.counts.free
    }

    /// On a pageable host side there is always one more.
    fn grow(&mut self) {
        let slot = SlotIndex::new(self.counts.total);
        self.states.push(SlotState::Free);
        self.stamps.push(0);
        self.owners.push(NO_OWNER);
        self.counts.total += 1;
        self.counts.free += 1;
        self.free.insert(slot);
    }

    /// The clean copy that became clean first and doesn't belong to `except`.
    pub(crate) fn oldest_clean(&mut self, except: u32) -> Option<(SlotIndex, CleanOwner)> {
        let mut kept = Vec::new();
        let mut found = None;
        while let Some((slot, stamp)) = self.clean.pop_front() {
            let place = slot.value() as usize;
            if self.stamps[place] != stamp || self.states[place] != SlotState::Clean {
                continue;
            }
            kept.push((slot, stamp));
            if self.owners[place].record != except {
                found = Some((slot, self.owners[place]));
                break;
            }
        }
        for entry in kept.into_iter().rev() {
            self.clean.push_front(entry);
        }
        found
    }

    /// Hands a slot from one kind of holder to another.
    pub(crate) fn pass(&mut self, slot: SlotIndex, from: SlotState, to: SlotState) {
        assert!(
            to != SlotState::Clean,
            "{slot:?} becomes clean with `set_clean` only"
        );
        self.set(slot, from, to);
        if from == SlotState::Clean {
            self.stamps[slot.value() as usize] = 0;
            self.owners[slot.value() as usize] = NO_OWNER;
        }
        if to == SlotState::Free {
            self.free.insert(slot);
            if self.pageable {
                self.forgotten.push(slot);
            }
        }
    }

    /// The slot's bytes equal those of a block that `owner` has on the GPU.
    pub(crate) fn set_clean(&mut self, slot: SlotIndex, owner: CleanOwner) {
        self.set(slot, SlotState::Parked, SlotState::Clean);
        self.last_stamp += 1;
        self.stamps[slot.value() as usize] = self.last_stamp;
        self.owners[slot.value() as usize] = owner;
        self.clean.push_back((slot, self.last_stamp));
        if self.clean.len() > 64 + 2 * self.counts.clean as usize {
            let (stamps, states) = (&self.stamps, &self.states);
            self.clean.retain(|&(slot, stamp)| {
                let place = slot.value() as usize;
                stamps[place] == stamp && states[place] == SlotState::Clean
            });
        }
    }

    pub(crate) const fn is_pageable(&self) -> bool {
        self.pageable
    }

    pub(crate) fn take_forgotten(&mut self) -> Vec<SlotIndex> {
        core::mem::take(&mut self.forgotten)
    }

    fn set(&mut self, slot: SlotIndex, from: SlotState, to: SlotState) {
        use SlotState as S;
        let state = &mut self.states[slot.value() as usize];
        assert!(
            *state == from,
            "{slot:?} is {state:?}, not {from:?}, and can't become {to:?}"
        );
        let legal = matches!(
            (from, to),
            (S::Unready, S::Free)
                | (S::Free, S::Filling)
                | (S::Filling, S::Free | S::Parked | S::Lost)
                | (S::Parked, S::Free | S::Clean | S::Lost)
                | (S::Clean, S::Free | S::Parked)
        );
        assert!(legal, "{slot:?} can't go from {from:?} to {to:?}");
        *state = to;
        *self.count(from) -= 1;
        *self.count(to) += 1;
    }

    const fn count(&mut self, state: SlotState) -> &mut u32 {
        match state {
            SlotState::Unready => &mut self.counts.unready,
            SlotState::Free => &mut self.counts.free,
            SlotState::Filling => &mut self.counts.filling,
            SlotState::Parked => &mut self.counts.parked,
            SlotState::Clean => &mut self.counts.clean,
            SlotState::Lost => &mut self.counts.lost,
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn states(&self) -> &[SlotState] {
        &self.states
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn free_slots(&self) -> Vec<SlotIndex> {
        self.free.iter().collect()
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn owner(&self, slot: SlotIndex) -> CleanOwner {
        self.owners[slot.value() as usize]
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) const fn raw_counts(&self) -> HostSlots {
        self.counts
    }
}

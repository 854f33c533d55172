//! The machine over the real backend: many swaps and cancels, and nothing is left.

use kv_core::testing::Rng;
use kv_core::{
    Backend, Checksum, Choice, Fence, GroupId, HostSide, Layout, Lease, Machine, MachineConfig,
    OnGpu, OnHost, Place, Redeemed, Ticket,
};
use kv_transfer_cuda::CudaConfig;

use crate::rig::{Rig, device, rounds};

const GROUPS: u64 = 4;

/// Bytes of this process's own memory, from the kernel's count of resident pages.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = text
        .split_whitespace()
        .nth(1)
        .expect("a field")
        .parse()
        .expect("a number");
    pages * 4096
}

struct World {
    machine: Machine,
    rig: Rig,
    rng: Rng,
}

impl World {
    fn new(checksum: Checksum) -> Self {
        let layout = Layout::stacked(4, 64, 16, 2, 64, 2).expect("blocks of 32 KiB");
        let mut config = MachineConfig::new(&layout, HostSide::Slots(64), 1 << 20);
        config.checksum = checksum;
        let mut machine = Machine::new(config).expect("valid");
        let rig = Rig::new(layout, &CudaConfig::new(64));
        machine.handle_slots_ready(rig.backend.slots_ready());
        Self {
            machine,
            rig,
            rng: Rng::new(7),
        }
    }

    /// Hands out commands and takes completions until nothing flies.
    fn settle(&mut self) {
        loop {
            let now = self.rig.now();
            while let Some(command) = self.machine.poll_command() {
                if let Err(refused) = self.rig.backend.submit(now, command) {
                    self.machine.handle_refused(now, refused);
                }
            }
            if self.machine.stats().flights == 0 {
                break;
            }
            for completion in self.rig.wait_any() {
                let now = self.rig.now();
                self.machine.handle_completion(now, completion);
            }
        }
        while self.machine.poll_event().is_some() {}
    }

    /// Cancels the ticket, or keeps it, as the dice fall.
    fn maybe_cancel<P: Place>(&mut self, ticket: Ticket<P>) -> Option<Ticket<P>> {
        if self.rng.below(2) == 0 {
            return Some(ticket);
        }
        // Sometimes before the commands were handed out, sometimes after.
        if self.rng.below(2) == 0 {
            let now = self.rig.now();
            while let Some(command) = self.machine.poll_command() {
                if let Err(refused) = self.rig.backend.submit(now, command) {
                    self.machine.handle_refused(now, refused);
                }
            }
        }
        self.machine.cancel(self.rig.now(), ticket).expect("live");
        None
    }

    fn moved<P: Place>(&mut self, ticket: Ticket<P>) -> Lease<P::Other> {
        match self.machine.redeem(ticket).expect("settled") {
            Redeemed::Moved(lease) => lease,
            Redeemed::Stayed(_) | Redeemed::Gone(_) => panic!("a copy did not arrive"),
        }
    }

    fn round(&mut self) -> u32 {
        let mut swaps = 0;
        let mut out: Vec<Ticket<OnGpu>> = Vec::new();
        for group in 0..GROUPS {
            // A cancelled id is free again at once, although its flight may still be under way.
            let lease = self.machine.allocate(GroupId::new(group), 1).expect("free");
            let tokens = 1 + u32::try_from(self.rng.below(96)).expect("small");
            self.machine
                .append(&lease, Choice::new(0), tokens)
                .expect("room");
            let ticket = self
                .machine
                .swap_out(self.rig.now(), lease, Fence::NONE)
                .expect("room");
            swaps += 1;
            out.extend(self.maybe_cancel(ticket));
        }
        self.settle();
        let mut back: Vec<Ticket<OnHost>> = Vec::new();
        for ticket in out {
            let lease = self.moved(ticket);
            let ticket = self
                .machine
                .swap_in(self.rig.now(), lease, Fence::NONE)
                .expect("room");
            swaps += 1;
            back.extend(self.maybe_cancel(ticket));
        }
        self.settle();
        for ticket in back {
            let lease = self.moved(ticket);
            self.machine.release(lease).expect("live");
        }
        swaps
    }

    fn assert_nothing_is_held(&self) {
        let stats = self.machine.stats();
        assert_eq!(stats.gpu.free, stats.gpu.total, "{stats:?}");
        assert_eq!(stats.host.free, stats.host.total, "{stats:?}");
        assert_eq!(stats.inflight_bytes, 0, "{stats:?}");
        assert_eq!(stats.stale_completions, 0, "{stats:?}");
    }
}

fn soak(checksum: Checksum, swaps_wanted: u32) {
    let mut world = World::new(checksum);
    let mut swaps = 0;
    for _ in 0..100 {
        swaps += world.round();
    }
    let (free_before, _) = device().memory_bytes().expect("a sound context");
    let resident_before = resident_bytes();
    while swaps < swaps_wanted {
        swaps += world.round();
        world.assert_nothing_is_held();
    }
    let (free_after, _) = device().memory_bytes().expect("a sound context");
    let grown = resident_bytes().saturating_sub(resident_before);
    assert!(grown < 2 << 20, "{grown} bytes more after {swaps} swaps");
    // Other tests of this process may allocate at the same time; a leak per swap would be large.
    assert!(
        free_before.saturating_sub(free_after) < 1 << 30,
        "{free_before} {free_after}"
    );
}

/// The seed's `repeated cycles have no leak`, many times over.
#[test]
fn i11_swaps_and_cancels_leave_nothing_behind() {
    soak(Checksum::Off, rounds(100_000));
}

#[test]
fn i11_swaps_and_cancels_with_digests_leave_nothing_behind() {
    soak(Checksum::On, rounds(20_000));
}

//! Swap cycles without end: groups leave, come back and are cancelled at any moment, ids are used
//! again at once, and nothing is left of it.
//!
//! `KV_SOAK_CYCLES=n` runs that many cycles; `cargo xtask sim --soak` runs a million.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use std::collections::VecDeque;

use kv_core::testing::Rng;
use kv_core::{
    Choice, Command, Completion, Fence, GroupId, HostSide, Layout, Lease, Machine, MachineConfig,
    OnGpu, OnHost, Outcome, Redeemed, Span, Ticket, Time,
};

const IDS: u64 = 12;
const WARM_CYCLES: u64 = 10_000;

/// Where one id's group is.
enum Place {
    Nowhere,
    Gpu(Lease<OnGpu>),
    Out(Ticket<OnGpu>),
    Host(Lease<OnHost>),
    In(Ticket<OnHost>),
}

struct Soak {
    machine: Machine,
    rng: Rng,
    places: Vec<Place>,
    commands: VecDeque<Command>,
    /// Completions that were reported once already.
    old: VecDeque<Completion>,
    now: Time,
    cycles: u64,
    cancelled_in_flight: u64,
}

fn completion(command: &Command, outcome: Outcome, now: Time) -> Completion {
    Completion {
        id: command.id(),
        outcome,
        fault: None,
        bytes: if outcome == Outcome::Done {
            command.bytes()
        } else {
            0
        },
        submitted_at: now,
        completed_at: now,
        digests: Vec::new(),
    }
}

impl Soak {
    fn new() -> Self {
        let layout = Layout::latent(2, 64, 4, 3, 1).unwrap();
        let cap = 24 * layout.block_bytes();
        let config = MachineConfig::new(&layout, HostSide::Slots(48), cap);
        let mut machine = Machine::new(config).unwrap();
        machine.handle_slots_ready(48);
        Self {
            machine,
            rng: Rng::new(1),
            places: (0..IDS).map(|_| Place::Nowhere).collect(),
            commands: VecDeque::new(),
            old: VecDeque::new(),
            now: Time::ZERO,
            cycles: 0,
            cancelled_in_flight: 0,
        }
    }

    fn turn(&mut self) {
        self.now = self.now + Span::from_micros(10);
        let id = self.rng.index(self.places.len());
        let cancels = self.rng.chance(80);
        let place = std::mem::replace(&mut self.places[id], Place::Nowhere);
        self.places[id] = self.go_on(id, place, cancels);
        while let Some(command) = self.machine.poll_command() {
            self.commands.push_back(command);
        }
        while self.commands.len() > 6 || (!self.commands.is_empty() && self.rng.chance(500)) {
            self.end_one();
        }
        while self.machine.poll_event().is_some() {}
    }

    fn go_on(&mut self, id: usize, place: Place, cancels: bool) -> Place {
        let (machine, now) = (&mut self.machine, self.now);
        match place {
            Place::Nowhere => {
                let lease = machine.allocate(GroupId::new(id as u64), 2).unwrap();
                let prompt = 1 + u32::try_from(self.rng.below(12)).unwrap();
                if machine.append(&lease, Choice::new(0), prompt).is_ok() {
                    machine
                        .fork(&lease, Choice::new(0), Choice::new(1))
                        .unwrap();
                }
                Place::Gpu(lease)
            }
            Place::Gpu(lease) if cancels => {
                machine.release(lease).unwrap();
                Place::Nowhere
            }
            Place::Gpu(lease) => {
                // A choice that is full or refused for lack of blocks stays as it is.
                let choice = Choice::new(u32::try_from(self.rng.below(2)).unwrap());
                if machine.tokens(&lease, choice) < 24 {
                    let _refused_is_fine = machine.append(&lease, choice, 1);
                }
                match machine.swap_out(now, lease, Fence::NONE) {
                    Ok(ticket) => Place::Out(ticket),
                    Err(refused) => Place::Gpu(refused.back),
                }
            }
            Place::Out(ticket) if cancels => {
                machine.cancel(now, ticket).unwrap();
                self.cancelled_in_flight += 1;
                Place::Nowhere
            }
            Place::In(ticket) if cancels => {
                machine.cancel(now, ticket).unwrap();
                self.cancelled_in_flight += 1;
                Place::Nowhere
            }
            Place::Host(lease) if cancels => {
                machine.release(lease).unwrap();
                Place::Nowhere
            }
            Place::Out(ticket) => match machine.redeem(ticket) {
                Ok(Redeemed::Moved(lease)) => Place::Host(lease),
                Ok(Redeemed::Stayed(lease)) => Place::Gpu(lease),
                Ok(Redeemed::Gone(_)) => Place::Nowhere,
                Err(pending) => Place::Out(pending.back),
            },
            Place::Host(lease) => match machine.swap_in(now, lease, Fence::NONE) {
                Ok(ticket) => Place::In(ticket),
                Err(refused) => Place::Host(refused.back),
            },
            Place::In(ticket) => match machine.redeem(ticket) {
                Ok(Redeemed::Moved(lease)) => {
                    self.cycles += 1;
                    Place::Gpu(lease)
                }
                Ok(Redeemed::Stayed(lease)) => Place::Host(lease),
                Ok(Redeemed::Gone(_)) => Place::Nowhere,
                Err(pending) => Place::In(pending.back),
            },
        }
    }

    /// Ends a command, not always the oldest, not always well, and now and then an old one again.
    fn end_one(&mut self) {
        let at = self.rng.index(self.commands.len());
        let command = self.commands.remove(at).unwrap();
        let outcome = if self.rng.chance(30) {
            Outcome::Failed
        } else {
            Outcome::Done
        };
        let done = completion(&command, outcome, self.now);
        self.machine.handle_completion(self.now, done.clone());
        self.old.push_back(done);
        if self.old.len() > 64 {
            self.old.pop_front();
        }
        if self.rng.chance(50) {
            let again = self.old[self.rng.index(self.old.len())].clone();
            self.machine.handle_completion(self.now, again);
        }
    }

    fn end(mut self) {
        while !self.commands.is_empty() {
            self.end_one();
        }
        for place in std::mem::take(&mut self.places) {
            match place {
                Place::Nowhere => {}
                Place::Gpu(lease) => self.machine.release(lease).unwrap(),
                Place::Host(lease) => self.machine.release(lease).unwrap(),
                Place::Out(ticket) => self.machine.cancel(self.now, ticket).unwrap(),
                Place::In(ticket) => self.machine.cancel(self.now, ticket).unwrap(),
            }
        }
        self.machine.drain();
        self.machine.audit().unwrap();
        let stats = self.machine.stats();
        assert!(self.machine.is_drained(), "{stats:?}");
        assert_eq!(stats.gpu.free, stats.gpu.total, "I11");
        assert_eq!(stats.host.free, stats.host.total, "I11");
        assert!(self.cancelled_in_flight > 0 && stats.stale_completions > 0);
    }
}

/// Resident memory in KiB, where the system says it.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn i11_nothing_is_left_of_many_cycles_and_i17_nothing_grows() {
    let cycles = std::env::var("KV_SOAK_CYCLES").map_or(50_000, |n| n.parse().unwrap());
    let mut soak = Soak::new();
    let mut warm = None;
    let mut turns = 0u64;
    while soak.cycles < cycles {
        soak.turn();
        turns += 1;
        if turns.is_multiple_of(10_000) {
            soak.machine.audit().unwrap();
        }
        assert!(
            turns < 200 * (cycles + 1_000),
            "I08: {:?}",
            soak.machine.stats()
        );
        if warm.is_none() && soak.cycles >= WARM_CYCLES {
            warm = resident_kib();
        }
    }
    if let (Some(warm), Some(now)) = (warm, resident_kib()) {
        assert!(
            now <= warm + 2_048,
            "{warm} KiB after {WARM_CYCLES} cycles, {now} at the end"
        );
    }
    soak.end();
}

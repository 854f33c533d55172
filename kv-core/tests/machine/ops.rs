//! Operations in any order, with everything counted again after each. Indices are taken modulo
//! what exists, so that every shortened list is a legal one.

use kv_core::{
    Choice, Command, Fence, GroupId, Lease, Machine, OnGpu, OnHost, Outcome, Place, Redeemed,
    Refusal, Span, Stats, Ticket,
};
use proptest::prelude::*;

use crate::rig::{Rig, completion};

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate {
        id: u64,
        choices: u32,
    },
    Append {
        lease: usize,
        choice: u32,
        tokens: u32,
    },
    Fork {
        lease: usize,
        from: u32,
        to: u32,
    },
    ReleaseChoice {
        lease: usize,
        choice: u32,
    },
    SwapOut {
        lease: usize,
    },
    SwapIn {
        lease: usize,
    },
    ReleaseGpu {
        lease: usize,
    },
    ReleaseHost {
        lease: usize,
    },
    CancelOut {
        ticket: usize,
    },
    CancelIn {
        ticket: usize,
    },
    End {
        command: usize,
        outcome: Outcome,
    },
    Repeat {
        ended: usize,
        outcome: Outcome,
    },
    Busy {
        command: usize,
    },
    Pump {
        commands: usize,
    },
    Redeem,
    Later {
        millis: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let index = 0..64usize;
    let outcome = prop_oneof![
        12 => Just(Outcome::Done),
        3 => Just(Outcome::Failed),
        1 => Just(Outcome::Unknown),
    ];
    prop_oneof![
        3 => (0..6u64, 1..4u32).prop_map(|(id, choices)| Op::Allocate { id, choices }),
        6 => (index.clone(), 0..4u32, 0..10u32)
            .prop_map(|(lease, choice, tokens)| Op::Append { lease, choice, tokens }),
        2 => (index.clone(), 0..3u32, 0..3u32)
            .prop_map(|(lease, from, to)| Op::Fork { lease, from, to }),
        1 => (index.clone(), 0..3u32)
            .prop_map(|(lease, choice)| Op::ReleaseChoice { lease, choice }),
        4 => index.clone().prop_map(|lease| Op::SwapOut { lease }),
        4 => index.clone().prop_map(|lease| Op::SwapIn { lease }),
        1 => index.clone().prop_map(|lease| Op::ReleaseGpu { lease }),
        1 => index.clone().prop_map(|lease| Op::ReleaseHost { lease }),
        1 => index.clone().prop_map(|ticket| Op::CancelOut { ticket }),
        1 => index.clone().prop_map(|ticket| Op::CancelIn { ticket }),
        6 => (index.clone(), outcome.clone())
            .prop_map(|(command, outcome)| Op::End { command, outcome }),
        1 => (index.clone(), outcome).prop_map(|(ended, outcome)| Op::Repeat { ended, outcome }),
        1 => index.prop_map(|command| Op::Busy { command }),
        6 => (1..4usize).prop_map(|commands| Op::Pump { commands }),
        4 => Just(Op::Redeem),
        1 => (1..20_000u64).prop_map(|millis| Op::Later { millis }),
    ]
}

/// All handles that the holder has.
struct Holder {
    rig: Rig,
    gpu: Vec<Lease<OnGpu>>,
    host: Vec<Lease<OnHost>>,
    out: Vec<Ticket<OnGpu>>,
    back: Vec<Ticket<OnHost>>,
    ended: Vec<Command>,
    lost: (u32, u32),
}

fn take<T>(list: &mut Vec<T>, index: usize) -> Option<T> {
    let index = index.checked_rem(list.len())?;
    Some(list.swap_remove(index))
}

impl Holder {
    fn apply(&mut self, op: Op) {
        let now = self.rig.now;
        match op {
            Op::Allocate { .. }
            | Op::Append { .. }
            | Op::Fork { .. }
            | Op::ReleaseChoice { .. } => {
                self.grow(&op);
            }
            Op::SwapOut { lease } => {
                if let Some(lease) = take(&mut self.gpu, lease) {
                    match self.unchanged(|machine| machine.swap_out(now, lease, Fence::NONE)) {
                        Ok(ticket) => self.out.push(ticket),
                        Err(refused) => self.gpu.push(refused.back),
                    }
                }
            }
            Op::SwapIn { lease } => {
                if let Some(lease) = take(&mut self.host, lease) {
                    match self.unchanged(|machine| machine.swap_in(now, lease, Fence::NONE)) {
                        Ok(ticket) => self.back.push(ticket),
                        Err(refused) => self.host.push(refused.back),
                    }
                }
            }
            Op::ReleaseGpu { lease } => {
                if let Some(lease) = take(&mut self.gpu, lease) {
                    self.rig.release(lease);
                }
            }
            Op::ReleaseHost { lease } => {
                if let Some(lease) = take(&mut self.host, lease) {
                    self.rig.release(lease);
                }
            }
            Op::CancelOut { ticket } => {
                if let Some(ticket) = take(&mut self.out, ticket) {
                    self.rig.machine.cancel(now, ticket).unwrap();
                }
            }
            Op::CancelIn { ticket } => {
                if let Some(ticket) = take(&mut self.back, ticket) {
                    self.rig.machine.cancel(now, ticket).unwrap();
                }
            }
            Op::End { .. } | Op::Repeat { .. } | Op::Busy { .. } | Op::Pump { .. } => {
                self.backend(&op);
            }
            Op::Redeem => self.redeem_all(),
            Op::Later { millis } => {
                self.rig.later(Span::from_millis(millis));
                self.rig.machine.handle_timeout(self.rig.now);
            }
        }
        self.check();
    }

    fn grow(&mut self, op: &Op) {
        match *op {
            Op::Allocate { id, choices } => {
                let id = GroupId::new(id);
                if let Ok(lease) = self.unchanged(|machine| machine.allocate(id, choices)) {
                    self.gpu.push(lease);
                }
            }
            Op::Append {
                lease,
                choice,
                tokens,
            } => self.with_lease(lease, |machine, lease| {
                machine.append(lease, Choice::new(choice), tokens).map(drop)
            }),
            Op::Fork { lease, from, to } => self.with_lease(lease, |machine, lease| {
                machine.fork(lease, Choice::new(from), Choice::new(to))
            }),
            Op::ReleaseChoice { lease, choice } => self.with_lease(lease, |machine, lease| {
                machine.release_choice(lease, Choice::new(choice))
            }),
            _ => unreachable!("the other operations don't grow anything"),
        }
    }

    fn backend(&mut self, op: &Op) {
        let now = self.rig.now;
        match *op {
            Op::End { command, outcome } => {
                if let Some(command) = take(&mut self.rig.commands, command) {
                    let done = completion(&command, now, outcome);
                    self.rig.machine.handle_completion(now, done);
                    self.ended.push(command);
                }
            }
            Op::Repeat { ended, outcome } => {
                if let Some(command) = take(&mut self.ended, ended) {
                    let before = self.rig.stats();
                    let echo = completion(&command, now, outcome);
                    self.rig.machine.handle_completion(now, echo);
                    let mut after = self.rig.stats();
                    after.stale_completions -= 1;
                    assert_eq!(before, after, "I13");
                }
            }
            Op::Busy { command } => {
                if let Some(back) = take(&mut self.rig.commands, command) {
                    let why = kv_core::SubmitRefusal::Busy;
                    // What was given up meanwhile is nobody's any more.
                    self.rig
                        .machine
                        .handle_refused(now, kv_core::Refused { why, back });
                }
            }
            Op::Pump { commands } => {
                for _ in 0..commands {
                    self.rig.commands.extend(self.rig.machine.poll_command());
                }
            }
            _ => unreachable!("the other operations aren't the backend's"),
        }
    }

    fn with_lease(
        &mut self,
        index: usize,
        request: impl FnOnce(&mut Machine, &Lease<OnGpu>) -> Result<(), Refusal>,
    ) {
        if let Some(lease) = take(&mut self.gpu, index) {
            // Refused or not: both are checked.
            self.unchanged(|machine| request(machine, &lease)).ok();
            self.gpu.push(lease);
        }
    }

    /// I12: if it is refused, nothing but the counters of refusals may have changed.
    fn unchanged<T, E>(
        &mut self,
        request: impl FnOnce(&mut Machine) -> Result<T, E>,
    ) -> Result<T, E> {
        let quiet = |stats: Stats| Stats {
            host_backpressure: 0,
            inflight_backpressure: 0,
            ..stats
        };
        let before = quiet(self.rig.stats());
        let result = request(&mut self.rig.machine);
        if result.is_err() {
            assert_eq!(before, quiet(self.rig.stats()), "I12");
        }
        result
    }

    fn redeem_all(&mut self) {
        for ticket in std::mem::take(&mut self.out) {
            match self.rig.machine.redeem(ticket) {
                Ok(Redeemed::Moved(lease)) => self.host.push(lease),
                Ok(Redeemed::Stayed(lease)) => self.gpu.push(lease),
                Ok(Redeemed::Gone(_)) => {}
                Err(refused) => self.out.push(refused.back),
            }
        }
        for ticket in std::mem::take(&mut self.back) {
            match self.rig.machine.redeem(ticket) {
                Ok(Redeemed::Moved(lease)) => self.gpu.push(lease),
                Ok(Redeemed::Stayed(lease)) => self.host.push(lease),
                Ok(Redeemed::Gone(_)) => {}
                Err(refused) => self.back.push(refused.back),
            }
        }
    }

    fn check(&mut self) {
        self.rig.machine.audit().unwrap();
        let stats = self.rig.stats();
        let cap = self.rig.machine.config().inflight_bytes_max;
        assert!(stats.inflight_bytes <= cap, "I03");
        let lost = (stats.gpu.lost, stats.host.lost);
        assert!(lost.0 >= self.lost.0 && lost.1 >= self.lost.1, "I14");
        self.lost = lost;
        while self.rig.machine.poll_event().is_some() {}
    }

    /// Ends everything and gives everything up: only what is lost may be missing.
    fn finish(mut self) {
        loop {
            self.rig.commands.extend(self.rig.machine.poll_command());
            let Some(command) = take(&mut self.rig.commands, 0) else {
                break;
            };
            let done = completion(&command, self.rig.now, Outcome::Done);
            self.rig.machine.handle_completion(self.rig.now, done);
            self.check();
        }
        self.redeem_all();
        assert!(
            self.out.is_empty() && self.back.is_empty(),
            "every flight settles"
        );
        self.release_all();
        self.rig.machine.drain();
        assert!(self.rig.machine.is_drained(), "I11");
        let stats = self.rig.stats();
        assert_eq!(stats.gpu.free + stats.gpu.lost, stats.gpu.total, "I11");
        assert_eq!(stats.host.free + stats.host.lost, stats.host.total, "I11");
        assert_eq!(stats.inflight_bytes, 0);
    }

    fn release_all(&mut self) {
        fn release<P: Place>(rig: &mut Rig, leases: &mut Vec<Lease<P>>) {
            for lease in leases.drain(..) {
                rig.release(lease);
            }
        }
        release(&mut self.rig, &mut self.gpu);
        release(&mut self.rig, &mut self.host);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn i01_to_i04_and_i11_to_i14_hold_after_any_operations(
        ops in prop::collection::vec(op(), 1..160),
        gpu in 1..14u32,
        slots in 0..14u32,
        cap in 1..9u64,
        checked in any::<bool>(),
    ) {
        let mut rig = Rig::capped(gpu, slots, cap);
        if checked {
            let config = *rig.machine.config();
            rig = Rig::with(kv_core::MachineConfig {
                checksum: kv_core::Checksum::On,
                ..config
            });
        }
        let mut holder = Holder {
            rig,
            gpu: Vec::new(),
            host: Vec::new(),
            out: Vec::new(),
            back: Vec::new(),
            ended: Vec::new(),
            lost: (0, 0),
        };
        for op in ops {
            holder.apply(op);
        }
        holder.finish();
    }
}

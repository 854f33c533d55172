//! A machine, the commands that it handed out, and completions made by hand.

use kv_core::{
    Accepted, Checksum, Choice, Command, Completion, CopyFault, Digest, DigestWork, Event, Fence,
    GroupId, HostSide, Layout, Lease, Machine, MachineConfig, OnGpu, OnHost, Outcome, Place,
    Redeemed, Refusal, Refused, Settled, Span, Stats, Ticket, Time,
};

pub(crate) const BLOCK_TOKENS: u32 = 4;
pub(crate) const C0: Choice = Choice::new(0);

pub(crate) fn config(gpu_blocks: u32, host: HostSide) -> MachineConfig {
    let layout = Layout::stacked(2, gpu_blocks, BLOCK_TOKENS, 1, 2, 2).unwrap();
    MachineConfig::new(&layout, host, 1 << 30)
}

pub(crate) struct Rig {
    pub(crate) machine: Machine,
    pub(crate) now: Time,
    /// Handed out and not over, oldest first.
    pub(crate) commands: Vec<Command>,
    pub(crate) events: Vec<Event>,
}

impl Rig {
    pub(crate) fn new(gpu_blocks: u32, slots: u32) -> Self {
        Self::with(config(gpu_blocks, HostSide::Slots(slots)))
    }

    /// At most that many blocks in flight.
    pub(crate) fn capped(gpu_blocks: u32, slots: u32, blocks: u64) -> Self {
        let config = config(gpu_blocks, HostSide::Slots(slots));
        Self::with(MachineConfig {
            inflight_bytes_max: blocks * config.block_bytes,
            ..config
        })
    }

    pub(crate) fn checked(gpu_blocks: u32, slots: u32) -> Self {
        Self::with(MachineConfig {
            checksum: Checksum::On,
            ..config(gpu_blocks, HostSide::Slots(slots))
        })
    }

    pub(crate) fn with(config: MachineConfig) -> Self {
        let mut machine = Machine::new(config).unwrap();
        machine.handle_slots_ready(u32::MAX);
        let rig = Self {
            machine,
            now: Time::ZERO,
            commands: Vec::new(),
            events: Vec::new(),
        };
        rig.check();
        rig
    }

    /// I01 to I04 by counting again.
    pub(crate) fn check(&self) {
        self.machine.audit().unwrap();
        let (stats, cap) = (self.stats(), self.machine.config().inflight_bytes_max);
        assert!(stats.inflight_bytes <= cap, "I03: {stats:?}");
        let commands: u64 = self.commands.iter().map(Command::bytes).sum();
        assert!(
            commands <= stats.inflight_bytes || stats.flights == 0,
            "I03"
        );
    }

    pub(crate) fn stats(&self) -> Stats {
        self.machine.stats()
    }

    pub(crate) fn later(&mut self, span: Span) {
        self.now = self.now + span;
    }

    /// A group of one choice with that many tokens.
    pub(crate) fn group(&mut self, id: u64, tokens: u32) -> Lease<OnGpu> {
        let lease = self.machine.allocate(GroupId::new(id), 1).unwrap();
        assert_eq!(self.machine.append(&lease, C0, tokens).unwrap(), None);
        self.check();
        lease
    }

    pub(crate) fn out(&mut self, lease: Lease<OnGpu>) -> Ticket<OnGpu> {
        let ticket = self.machine.swap_out(self.now, lease, Fence::NONE).unwrap();
        self.pump();
        ticket
    }

    pub(crate) fn back(&mut self, lease: Lease<OnHost>) -> Ticket<OnHost> {
        let ticket = self.machine.swap_in(self.now, lease, Fence::NONE).unwrap();
        self.pump();
        ticket
    }

    /// Takes all commands that there are.
    pub(crate) fn pump(&mut self) {
        while let Some(command) = self.machine.poll_command() {
            self.commands.push(command);
            self.check();
        }
        while let Some(event) = self.machine.poll_event() {
            self.events.push(event);
        }
        self.check();
    }

    /// Ends the oldest command.
    pub(crate) fn end(&mut self, outcome: Outcome) -> (Command, Accepted) {
        let command = self.commands.remove(0);
        let accepted = self.report(&completion(&command, self.now, outcome));
        (command, accepted)
    }

    pub(crate) fn report(&mut self, completion: &Completion) -> Accepted {
        let accepted = self.machine.handle_completion(self.now, completion.clone());
        self.pump();
        accepted
    }

    pub(crate) fn end_all(&mut self) {
        while !self.commands.is_empty() {
            self.end(Outcome::Done);
        }
    }

    /// Out and settled.
    pub(crate) fn park(&mut self, lease: Lease<OnGpu>) -> Lease<OnHost> {
        let ticket = self.out(lease);
        self.end_all();
        match self.machine.redeem(ticket).unwrap() {
            Redeemed::Moved(lease) => lease,
            other => panic!("it should be on the host: {other:?}"),
        }
    }

    /// Back and settled.
    pub(crate) fn restore(&mut self, lease: Lease<OnHost>) -> Lease<OnGpu> {
        let ticket = self.back(lease);
        self.end_all();
        match self.machine.redeem(ticket).unwrap() {
            Redeemed::Moved(lease) => lease,
            other => panic!("it should be on the GPU: {other:?}"),
        }
    }

    pub(crate) fn release<P: Place>(&mut self, lease: Lease<P>) {
        self.machine.release(lease).unwrap();
        self.check();
    }

    pub(crate) fn cancel<P: Place>(&mut self, ticket: Ticket<P>) {
        self.machine.cancel(self.now, ticket).unwrap();
        self.pump();
    }

    /// The last flight that settled.
    pub(crate) fn settled(&self) -> Settled {
        let settled = self.events.iter().rev().find_map(|event| match event {
            Event::Settled(settled) => Some(*settled),
            _ => None,
        });
        settled.expect("a flight has settled")
    }

    /// I11: nothing is held any more.
    pub(crate) fn assert_empty(&self) {
        let stats = self.stats();
        assert_eq!(stats.gpu.free, stats.gpu.total, "I11: {stats:?}");
        assert_eq!(stats.host.free, stats.host.total, "I11: {stats:?}");
        assert_eq!(stats.groups, kv_core::GroupStates::default(), "I11");
        assert_eq!((stats.flights, stats.inflight_bytes), (0, 0), "I11");
        self.check();
    }

    /// Runs a request that must be refused: I12, nothing but the backpressure counters may change.
    pub(crate) fn refused<T>(
        &mut self,
        request: impl FnOnce(&mut Machine) -> Result<T, Refusal>,
    ) -> Refusal {
        let before = format!("{:?}", Quiet(&self.machine, self.stats()));
        let Err(why) = request(&mut self.machine) else {
            panic!("it should be refused");
        };
        self.check();
        assert_eq!(
            before,
            format!("{:?}", Quiet(&self.machine, self.stats())),
            "I12: {why}"
        );
        assert!(
            self.machine.poll_command().is_none(),
            "I12: no command comes of it"
        );
        self.pump();
        why
    }
}

/// What may not change: all gauges and counters but those that count refusals.
struct Quiet<'a>(&'a Machine, Stats);

impl std::fmt::Debug for Quiet<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = Stats {
            host_backpressure: 0,
            inflight_backpressure: 0,
            ..self.1
        };
        write!(f, "{stats:?} {:?}", self.0.poll_timeout())
    }
}

/// Splits a refusal with a handle: the handle must have come back.
pub(crate) fn keep<T>(refused: Refused<T, Refusal>, back: &mut Option<T>) -> Refusal {
    *back = Some(refused.back);
    refused.why
}

/// The end of a command, as a faithful backend reports it.
pub(crate) fn completion(command: &Command, now: Time, outcome: Outcome) -> Completion {
    let done = outcome == Outcome::Done;
    let digests = match command.digest() {
        DigestWork::Compute if done => command
            .moves()
            .iter()
            .map(|step| Digest::of(&step.slot.value().to_le_bytes()))
            .collect(),
        DigestWork::Compute | DigestWork::Skip | DigestWork::Verify(_) => Vec::new(),
    };
    Completion {
        id: command.id(),
        outcome,
        fault: (!done).then_some(CopyFault::Injected),
        bytes: if done { command.bytes() } else { 0 },
        submitted_at: now,
        completed_at: now,
        digests,
    }
}

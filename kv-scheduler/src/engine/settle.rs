//! What backend and machine report: flights that are over, and who moves because of it.

use kv_core::{Backend, Choice, Event, Gone, OnGpu, OnHost, Redeemed, Settled, Ticket, Time};

use super::{Engine, GroupIndex};
use crate::Executor;
use crate::group::Phase;

/// Events that are kept for [`Engine::drain_events`].
const EVENTS_MAX: usize = 16_384;

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Settles everything that is over; returns how many flights settled.
    pub(super) fn settle(&mut self, now: Time) -> u32 {
        self.trim_events();
        self.machine.handle_slots_ready(self.backend.slots_ready());
        self.take_completions(now);
        self.machine.handle_timeout(now);
        let first = self.events.len();
        self.collect_events();
        self.judge_backend(now);
        let mut settled = 0;
        for at in first..self.events.len() {
            if let Event::Settled(flight) = self.events[at] {
                settled += 1;
                self.flight_over(now, &flight);
            }
        }
        settled
    }

    /// Gives swapping up for good when too much memory is lost. What is parked is computed again:
    /// a backend that loses blocks can't be trusted to bring others back.
    fn judge_backend(&mut self, now: Time) {
        let kv_core::Stats { gpu, host, .. } = self.machine.stats();
        let too_much = |lost: u32, total: u32| {
            u64::from(lost) * 1_000 > u64::from(total) * u64::from(self.config.lost_permille_max)
        };
        if too_much(gpu.lost, gpu.total) || too_much(host.lost, host.total) {
            self.stats.swap_given_up = true;
            let parked: Vec<GroupIndex> = self.parked.iter().collect();
            for index in parked {
                self.drop_kv(now, index);
            }
        }
    }

    /// Events feed histograms; who doesn't collect them must not lose memory.
    fn trim_events(&mut self) {
        if self.events.len() >= EVENTS_MAX {
            self.stats.dropped_events += (EVENTS_MAX / 2) as u64;
            self.events.drain(..EVENTS_MAX / 2);
        }
    }

    pub(super) fn take_completions(&mut self, now: Time) {
        let mut completions = std::mem::take(&mut self.completions);
        self.backend.poll(&mut completions);
        for completion in completions.drain(..) {
            self.machine.handle_completion(now, completion);
        }
        self.completions = completions;
    }

    pub(super) fn collect_events(&mut self) {
        while let Some(event) = self.machine.poll_event() {
            self.events.push(event);
        }
    }

    /// Hands the machine's commands to the backend.
    pub(super) fn pump(&mut self, now: Time) {
        let forgotten = self.machine.poll_forgotten();
        if !forgotten.is_empty() {
            self.backend.forget(&forgotten);
        }
        while let Some(command) = self.machine.poll_command() {
            if let Err(refused) = self.backend.submit(now, command) {
                let busy = refused.why == kv_core::SubmitRefusal::Busy;
                self.machine.handle_refused(now, refused);
                if busy {
                    // It comes again after the next completion.
                    break;
                }
            }
        }
    }

    fn flight_over(&mut self, now: Time, flight: &Settled) {
        // A tombstone's ticket is in nobody's hands.
        let Some(index) = self.by_ticket.remove(&flight.ticket) else {
            return;
        };
        self.moving -= 1;
        let phase = std::mem::replace(&mut self.group_mut(index).phase, Phase::Moving);
        match phase {
            Phase::OutInFlight(ticket) => self.out_over(now, index, ticket),
            Phase::InInFlight(ticket) => self.in_over(now, index, ticket),
            Phase::Waiting
            | Phase::RecomputePending
            | Phase::Running(_)
            | Phase::HostResident(_)
            | Phase::Moving => unreachable!("a ticket belongs to a group that is under way"),
        }
    }

    fn out_over(&mut self, now: Time, index: GroupIndex, ticket: Ticket<OnGpu>) {
        match self.machine.redeem(ticket).expect("its flight has settled") {
            Redeemed::Moved(lease) => {
                let group = self.group_mut(index);
                group.phase = Phase::HostResident(lease);
                group.evict_failures = 0;
                self.park(index);
                self.drop_orphaned_prompt(now, index);
            }
            Redeemed::Stayed(lease) => {
                let backoff = self.config.retry_backoff;
                let group = self.group_mut(index);
                group.phase = Phase::Running(lease);
                group.not_before = now + backoff.saturating_mul(1 << group.evict_failures.min(16));
                group.evict_failures += 1;
                let arrival = group.arrival;
                self.running.insert(arrival, index);
                self.release_finished(index);
            }
            Redeemed::Gone(Gone::Corrupt | Gone::Unknown) => self.drop_kv(now, index),
        }
    }

    fn in_over(&mut self, now: Time, index: GroupIndex, ticket: Ticket<OnHost>) {
        let max_retries = self.config.max_retries;
        let backoff = self.config.retry_backoff;
        match self.machine.redeem(ticket).expect("its flight has settled") {
            Redeemed::Moved(lease) => {
                let pass = self.pass;
                let group = self.group_mut(index);
                group.phase = Phase::Running(lease);
                group.resume_failures = 0;
                group.touched_in_pass = pass;
                group.expected_blocks = 0;
                group.running_since = now;
                let arrival = group.arrival;
                self.running.insert(arrival, index);
                self.stats.resumed += 1;
                self.release_finished(index);
            }
            Redeemed::Stayed(lease) => {
                let group = self.group_mut(index);
                group.phase = Phase::HostResident(lease);
                group.not_before = now + backoff.saturating_mul(1 << group.resume_failures.min(16));
                group.resume_failures += 1;
                let give_up = group.resume_failures > max_retries;
                // It keeps its place.
                let (priority, order) = (group.request.priority, group.parked_order);
                self.parked.insert(priority, order, index);
                if give_up {
                    self.drop_kv(now, index);
                }
            }
            Redeemed::Gone(Gone::Corrupt | Gone::Unknown) => self.drop_kv(now, index),
        }
    }

    /// Puts a group behind all others that are parked.
    fn park(&mut self, index: GroupIndex) {
        self.last_parked += 1;
        let order = self.last_parked;
        let group = self.group_mut(index);
        group.parked_order = order;
        let priority = group.request.priority;
        self.parked.insert(priority, order, index);
    }

    /// The prompt that all choices share was run by one that has ended while its group was away:
    /// what is parked is nobody's, and another choice starts the prompt anew.
    pub(super) fn drop_orphaned_prompt(&mut self, now: Time, index: GroupIndex) {
        let group = self.group(index);
        let orphaned = !group.forked && group.choices.iter().any(|choice| choice.finish.is_some());
        if orphaned && matches!(group.phase, Phase::HostResident(_)) {
            self.drop_kv(now, index);
        }
    }

    /// Choices that ended while their group was away still have a table.
    fn release_finished(&mut self, index: GroupIndex) {
        let Self {
            machine, groups, ..
        } = self;
        let Some(group) = &groups[index] else { return };
        let Phase::Running(lease) = &group.phase else {
            return;
        };
        for (choice, state) in (0u32..).map(Choice::new).zip(&group.choices) {
            if state.finish.is_some() && machine.tokens(lease, choice) > 0 {
                machine
                    .release_choice(lease, choice)
                    .expect("a choice with tokens has a table");
            }
        }
    }
}

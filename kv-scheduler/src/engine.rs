//! The engine: one pass settles, resumes, makes room, runs a step and hands out tokens.
//!
//! It owns machine, backend and executor, and is driven by one thread that calls
//! [`Engine::step`] until it says to wait.

mod admit;
#[cfg(any(test, feature = "testing"))]
mod audit;
mod batch;
mod line;
mod rate;
mod room;
mod settle;
mod step;

use std::collections::BTreeMap;

use kv_core::{Backend, Choice, Closed, Event, Fence, GroupId, Machine, Refused, Span, Time};

use crate::config::EngineConfigError;
use crate::group::{Group, Phase, blocks_needed, count};
use crate::queue::Queue;
use crate::{EngineConfig, EngineStats, Executor, Rejection, Request, RequestId};

/// Index of a group in the engine's list.
pub(crate) type GroupIndex = usize;

/// Serves requests over a paged KV cache that may be too small for them.
#[derive(Debug)]
pub struct Engine<E, B> {
    config: EngineConfig,
    machine: Machine,
    executor: E,
    backend: B,
    groups: Vec<Option<Group>>,
    unused_groups: Vec<GroupIndex>,
    by_id: BTreeMap<RequestId, GroupIndex>,
    /// Tickets of groups that are under way.
    by_ticket: BTreeMap<kv_core::TicketId, GroupIndex>,
    /// New requests, by arrival.
    waiting: Queue,
    /// Groups on the GPU, by arrival.
    running: BTreeMap<u64, GroupIndex>,
    /// Groups on the host, in the order in which they were parked.
    parked: Queue,
    /// Groups to be computed again, by arrival.
    recompute: Queue,
    /// Groups on their way, in either direction.
    moving: u32,
    last_arrival: u64,
    last_parked: u64,
    /// Live requests by priority.
    priorities: BTreeMap<i32, u32>,
    pass: u64,
    /// End of the last step.
    fence: Fence,
    draining: bool,
    prefill: rate::PrefillRate,
    events: Vec<Event>,
    completions: Vec<kv_core::Completion>,
    stats: EngineStats,
    #[cfg(any(test, feature = "testing"))]
    room: audit::RoomLog,
}

impl<E: Executor, B: Backend> Engine<E, B> {
    /// Puts an engine together.
    ///
    /// # Errors
    ///
    /// [`EngineConfigError`] names the setting that can't work.
    pub fn new(
        config: EngineConfig,
        machine: Machine,
        executor: E,
        backend: B,
    ) -> Result<Self, EngineConfigError> {
        config.validate()?;
        let mut machine = machine;
        machine.handle_slots_ready(backend.slots_ready());
        Ok(Self {
            config,
            machine,
            executor,
            backend,
            groups: Vec::new(),
            unused_groups: Vec::new(),
            by_id: BTreeMap::new(),
            by_ticket: BTreeMap::new(),
            waiting: Queue::new(),
            running: BTreeMap::new(),
            parked: Queue::new(),
            recompute: Queue::new(),
            moving: 0,
            last_arrival: 0,
            last_parked: 0,
            priorities: BTreeMap::new(),
            pass: 0,
            fence: Fence::NONE,
            draining: false,
            prefill: rate::PrefillRate::default(),
            events: Vec::new(),
            completions: Vec::new(),
            stats: EngineStats::default(),
            #[cfg(any(test, feature = "testing"))]
            room: audit::RoomLog::default(),
        })
    }

    /// Takes a request, or refuses it with nothing changed.
    ///
    /// # Errors
    ///
    /// [`Rejection`] says why, with the numbers; the request comes back.
    #[expect(
        clippy::result_large_err,
        reason = "the request goes back to its owner, once per request at most"
    )]
    pub fn submit(
        &mut self,
        now: Time,
        request: Request,
    ) -> Result<(), Refused<Request, Rejection>> {
        if let Err(why) = self.check(&request) {
            self.stats.rejected += 1;
            return Err(Refused { why, back: request });
        }
        self.last_arrival += 1;
        let (id, priority) = (request.id, request.priority);
        let group = Some(Group::new(request, self.last_arrival, now));
        let index = if let Some(index) = self.unused_groups.pop() {
            self.groups[index] = group;
            index
        } else {
            self.groups.push(group);
            self.groups.len() - 1
        };
        self.by_id.insert(id, index);
        self.waiting.insert(priority, self.last_arrival, index);
        *self.priorities.entry(priority).or_default() += 1;
        self.stats.accepted += 1;
        Ok(())
    }

    fn check(&self, request: &Request) -> Result<(), Rejection> {
        if self.draining {
            return Err(Rejection::Draining);
        }
        if self.by_id.contains_key(&request.id) {
            return Err(Rejection::DuplicateId);
        }
        if request.prompt.is_empty() {
            return Err(Rejection::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Rejection::NoTokens);
        }
        let (n, max) = (request.n, self.config.max_n.min(self.config.max_batch_size));
        if n == 0 || n > max {
            return Err(Rejection::Choices { n, max });
        }
        let (prompt, max_tokens) = (request.prompt.len() as u64, u64::from(request.max_tokens));
        let max = u64::from(self.config.max_seq_len);
        if prompt.saturating_add(max_tokens) > max {
            return Err(Rejection::TooLong {
                prompt,
                max_tokens,
                max,
            });
        }
        let block_tokens = u64::from(self.machine.config().block_tokens);
        let needed = blocks_needed(prompt, n.into(), max_tokens, block_tokens);
        let blocks = u64::from(self.usable_blocks());
        if needed > blocks {
            return Err(Rejection::NeverFits { needed, blocks });
        }
        let (waiting, max) = (count(self.waiting.len()), self.config.max_waiting);
        if max > 0 && waiting >= max {
            return Err(Rejection::QueueFull { waiting, max });
        }
        Ok(())
    }

    /// Blocks of the pool that are not lost.
    fn usable_blocks(&self) -> u32 {
        let gpu = self.machine.stats().gpu;
        gpu.total - gpu.lost
    }

    /// Gives a request up, wherever it is; says whether it was there. Never waits.
    pub fn cancel(&mut self, now: Time, id: RequestId) -> bool {
        let Some(&index) = self.by_id.get(&id) else {
            return false;
        };
        self.remove(now, index);
        self.stats.cancelled += 1;
        true
    }

    /// Ends one choice, as if it had emitted a stop token. Call it before the next step; unknown
    /// requests and choices that are over already are ignored.
    pub fn stop(&mut self, now: Time, id: RequestId, choice: Choice) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        if choice.value() < self.group(index).request.n {
            self.finish_choice(now, index, choice, crate::FinishReason::Stop);
        }
    }

    /// Refuses new requests from now on; the ones that are there go on. Idempotent.
    pub const fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether no request is there.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Gives every request up, waits for running copies at most `limit`, and closes the backend.
    /// What is not confirmed then is lost and counted, never freed. Idempotent.
    pub fn shutdown(&mut self, now: Time, limit: Span) -> Closed {
        self.drain();
        let indices: Vec<_> = self.by_id.values().copied().collect();
        for index in indices {
            self.remove(now, index);
            self.stats.cancelled += 1;
        }
        self.machine.drain();
        let closed = self.backend.close(limit);
        self.take_completions(now);
        self.machine.abandon_flights(now);
        self.collect_events();
        closed
    }

    /// The machine under the engine, to look at.
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The executor under the engine, to look at.
    pub const fn executor(&self) -> &E {
        &self.executor
    }

    /// The backend under the engine.
    pub const fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Gauges and counters of engine and machine.
    #[must_use]
    pub fn stats(&self) -> (EngineStats, kv_core::Stats) {
        let mut stats = self.stats;
        stats.waiting = count(self.waiting.len());
        stats.running = count(self.running.len());
        stats.swapped = count(self.parked.len()) + self.moving;
        stats.recompute_pending = count(self.recompute.len());
        (stats, self.machine.stats())
    }

    /// Moves everything that the machine reported since the last call to the end of `events`.
    /// Only the newest ones are kept for who calls this too seldom; the rest is counted.
    pub fn drain_events(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.events);
    }

    fn group(&self, index: GroupIndex) -> &Group {
        self.groups[index]
            .as_ref()
            .expect("queues name live groups")
    }

    fn group_mut(&mut self, index: GroupIndex) -> &mut Group {
        self.groups[index]
            .as_mut()
            .expect("queues name live groups")
    }

    /// The machine's name for a request's group.
    const fn group_id(id: RequestId) -> GroupId {
        GroupId::new(id.0)
    }

    /// Takes a group out of the queue that it is in and frees what it holds.
    fn remove(&mut self, now: Time, index: GroupIndex) {
        self.leave(now, index);
        if let Some(group) = self.groups[index].take() {
            self.by_id.remove(&group.id());
            let priority = group.request.priority;
            if let Some(live) = self.priorities.get_mut(&priority) {
                *live -= 1;
                if *live == 0 {
                    self.priorities.remove(&priority);
                }
            }
            self.unused_groups.push(index);
        }
    }

    /// Takes a group out of its place; what it held is given back to the machine.
    fn leave(&mut self, now: Time, index: GroupIndex) {
        let group = self.group_mut(index);
        let (arrival, parked_order) = (group.arrival, group.parked_order);
        let priority = group.request.priority;
        let phase = std::mem::replace(&mut group.phase, Phase::Moving);
        let foreign = "the engine holds handles of its own machine only";
        match phase {
            Phase::Waiting => {
                self.waiting.remove(priority, arrival);
            }
            Phase::RecomputePending => {
                self.recompute.remove(priority, arrival);
            }
            Phase::Running(lease) => {
                self.running.remove(&arrival);
                self.machine.release(lease).expect(foreign);
            }
            Phase::HostResident(lease) => {
                self.parked.remove(priority, parked_order);
                self.machine.release(lease).expect(foreign);
            }
            Phase::OutInFlight(ticket) => {
                self.moving -= 1;
                self.by_ticket.remove(&ticket.id());
                self.machine.cancel(now, ticket).expect(foreign);
            }
            Phase::InInFlight(ticket) => {
                self.moving -= 1;
                self.by_ticket.remove(&ticket.id());
                self.machine.cancel(now, ticket).expect(foreign);
            }
            Phase::Moving => {}
        }
    }

    /// Drops a group's KV; it will be computed again from its tokens.
    fn drop_kv(&mut self, now: Time, index: GroupIndex) {
        self.leave(now, index);
        let group = self.group_mut(index);
        group.phase = Phase::RecomputePending;
        group.forked = group.unfinished_count() == 1;
        group.resume_failures = 0;
        group.evict_failures = 0;
        group.not_before = Time::ZERO;
        if kv_core::PlantedFault::EmitTwice.is_on() {
            for choice in group
                .choices
                .iter_mut()
                .filter(|choice| choice.finish.is_none())
            {
                if choice.history.len() > group.request.prompt.len() {
                    choice.history.pop();
                }
            }
        }
        let (arrival, priority) = (group.arrival, group.request.priority);
        self.recompute.insert(priority, arrival, index);
    }
}

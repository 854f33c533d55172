//! An engine whose groups are swapped out every few tokens, needed or not.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use kv_core::{Backend, Choice, Closed, Event, Span, Time};
use kv_scheduler::{Engine, EngineStats, Executor, Next, Output, Rejection, Request, RequestId};

use crate::engine_thread::Core;

/// Swaps a group out once it has had so many tokens since the last time; if that can't be done
/// now, after its next token.
pub(crate) struct ForcedSwaps<E, B> {
    engine: Engine<E, B>,
    every: NonZeroU32,
    /// Tokens of each live request, all choices together, since it was swapped out last.
    tokens: BTreeMap<RequestId, u32>,
}

impl<E: Executor, B: Backend> ForcedSwaps<E, B> {
    pub(crate) const fn new(engine: Engine<E, B>, every: NonZeroU32) -> Self {
        Self {
            engine,
            every,
            tokens: BTreeMap::new(),
        }
    }

    /// Swaps out whoever is due among those that had tokens; answers whether anybody was.
    fn force(&mut self, now: Time, outputs: &[Output]) -> bool {
        for output in outputs {
            match output {
                Output::Token { request, .. } => {
                    if let Some(tokens) = self.tokens.get_mut(request) {
                        *tokens = tokens.saturating_add(1);
                    }
                }
                Output::Failed { request, .. } => {
                    self.tokens.remove(request);
                }
                _ => {}
            }
        }
        let mut forced = false;
        for output in outputs {
            let Output::Token { request, .. } = output else {
                continue;
            };
            let Some(tokens) = self.tokens.get_mut(request) else {
                continue;
            };
            if *tokens >= self.every.get() && self.engine.force_swap(now, *request) {
                *tokens = 0;
                forced = true;
            }
        }
        forced
    }
}

impl<E: Executor + Send + 'static, B: Backend + Send + 'static> Core for ForcedSwaps<E, B> {
    fn submit(&mut self, now: Time, request: Request) -> Result<(), Rejection> {
        let id = request.id;
        Core::submit(&mut self.engine, now, request)?;
        self.tokens.insert(id, 0);
        Ok(())
    }

    fn cancel(&mut self, now: Time, id: RequestId) -> bool {
        self.tokens.remove(&id);
        self.engine.cancel(now, id)
    }

    fn stop(&mut self, now: Time, id: RequestId, choice: Choice) {
        self.engine.stop(now, id, choice);
    }

    fn step(&mut self, now: Time, outputs: &mut Vec<Output>) -> Next {
        let before = outputs.len();
        let next = self.engine.step(now, outputs);
        let forced = self.force(now, outputs.get(before..).unwrap_or_default());
        if self.engine.is_idle() {
            self.tokens.clear();
        }
        if forced { Next::Again } else { next }
    }

    fn drain(&mut self) {
        self.engine.drain();
    }

    fn is_idle(&self) -> bool {
        self.engine.is_idle()
    }

    fn shutdown(&mut self, now: Time, limit: Span) -> Closed {
        self.engine.shutdown(now, limit)
    }

    fn stats(&self) -> (EngineStats, kv_core::Stats) {
        self.engine.stats()
    }

    fn drain_events(&mut self, events: &mut Vec<Event>) {
        self.engine.drain_events(events);
    }
}

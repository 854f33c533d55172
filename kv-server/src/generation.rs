//! One call on its way through the engine: all its prompts, until every choice has ended.

use std::sync::Arc;

use kv_model::detokenize::StopStrings;
use kv_scheduler::{Request, RequestId, SamplingParams, TokenId};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::engine_thread::{EngineHandle, Health, Piece, Submission, TextRules, Update};
use crate::error::ApiError;
use crate::state::AppState;

/// What a call wants from the engine.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) prompts: Vec<PlannedPrompt>,
    /// Choices of each prompt.
    pub(crate) n: u32,
    pub(crate) stops: Arc<StopStrings>,
    pub(crate) stop_tokens: Vec<TokenId>,
    pub(crate) sampling: SamplingParams,
    /// Lower is more urgent.
    pub(crate) priority: i32,
}

/// One prompt of a call.
#[derive(Clone, Debug)]
pub(crate) struct PlannedPrompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) max_tokens: u32,
}

impl Plan {
    /// Tokens of all prompts, each counted once.
    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompts
            .iter()
            .map(|prompt| prompt.tokens.len() as u64)
            .sum()
    }

    /// Choices of the whole call.
    pub(crate) fn choices(&self) -> u32 {
        u32::try_from(self.prompts.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(self.n)
    }

    /// Room for one update per token and one last word per prompt.
    fn updates_max(&self) -> usize {
        let tokens = self.prompts.iter().map(|prompt| {
            let tokens = u64::from(prompt.max_tokens) * u64::from(self.n) + 1;
            usize::try_from(tokens).unwrap_or(Semaphore::MAX_PERMITS)
        });
        tokens
            .fold(0, usize::saturating_add)
            .min(Semaphore::MAX_PERMITS)
    }
}

/// A call that the engine has accepted. Dropping it cancels what is not finished.
#[derive(Debug)]
pub(crate) struct Generation {
    engine: EngineHandle,
    ids: Vec<RequestId>,
    updates: mpsc::Receiver<Update>,
    /// Choices that have not ended.
    open: u32,
}

impl Generation {
    /// Submits all prompts and waits for the engine's answers.
    ///
    /// # Errors
    ///
    /// The first refusal; nothing of the call runs then.
    pub(crate) async fn start(state: &AppState, plan: Plan) -> Result<Self, ApiError> {
        state.check_open()?;
        let count = u32::try_from(plan.prompts.len()).unwrap_or(u32::MAX);
        let at_the_door = state
            .door
            .try_acquire_many(count)
            .map_err(|_| state.door_full())?;
        let (sender, updates) = mpsc::channel(plan.updates_max());
        let rules = TextRules {
            text: Arc::clone(&state.text),
            stops: Arc::clone(&plan.stops),
        };
        let open = plan.choices();
        let mut generation = Self {
            engine: state.engine.clone(),
            ids: Vec::new(),
            updates,
            open,
        };
        let mut answers = Vec::new();
        let mut first_index = 0;
        for prompt in plan.prompts {
            let (answer, answered) = oneshot::channel();
            let id = state.next_id();
            let request = Request {
                id,
                prompt: prompt.tokens,
                n: plan.n,
                max_tokens: prompt.max_tokens,
                stop_tokens: plan.stop_tokens.clone(),
                sampling: plan.sampling.clone(),
                priority: plan.priority,
            };
            generation.ids.push(id);
            generation.engine.submit(Submission {
                request,
                rules: rules.clone(),
                first_index,
                updates: sender.clone(),
                answer,
            });
            answers.push(answered);
            first_index += plan.n;
        }
        for answered in answers {
            match answered.await {
                Ok(Ok(())) => {}
                Ok(Err(rejection)) => return Err(rejection.into()),
                Err(_) => return Err(generation.gone()),
            }
        }
        drop(at_the_door);
        Ok(generation)
    }

    /// The next token, or why there are no more; `None` when every choice has ended.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        if self.open == 0 {
            return None;
        }
        match self.updates.recv().await {
            Some(Update::Piece(piece)) => {
                if piece.finish.is_some() {
                    self.open -= 1;
                }
                Some(Ok(piece))
            }
            Some(Update::Failed) => {
                self.cancel();
                Some(Err(ApiError::failed()))
            }
            Some(Update::Abandoned) | None => {
                self.open = 0;
                Some(Err(self.gone()))
            }
        }
    }

    /// Why the engine says nothing more.
    fn gone(&self) -> ApiError {
        match self.engine.health() {
            Health::Dead => ApiError::engine_dead(),
            Health::Draining => ApiError::shutting_down(),
            Health::Degraded
            | Health::Failing(_)
            | Health::Healthy
            | Health::Stuck(_)
            | Health::Wedged => ApiError::failed(),
        }
    }

    fn cancel(&mut self) {
        if self.open > 0 {
            self.open = 0;
            for &id in &self.ids {
                self.engine.cancel(id);
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel();
    }
}

//! The thread around engines that misbehave in ways in which the real one doesn't.

use std::time::Duration;

use kv_model::chat::ChatTemplate;
use kv_model::detokenize::StopStrings;
use kv_model::tokenizer::OracleTokenizer;
use kv_scheduler::{FinishReason, Sampled, SamplingParams, TokenId};
use tokio::time::timeout;

use kv_core::{Choice, Closed, Event, Span, Time};
use kv_scheduler::{Next, Output};
use kv_telemetry::Ended;

use super::*;
use crate::text::Text;

/// Longer than anything here takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// What a scripted engine does in a step while it has a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// One token after the other, the last of them with the second step.
    Finish,
    /// Nothing, and nothing to wait for.
    Nothing,
    Panic,
}

#[derive(Debug)]
struct Scripted {
    deed: Deed,
    requests: Vec<RequestId>,
    tokens: u32,
    draining: bool,
    stepped: Sender<()>,
}

impl Core for Scripted {
    fn submit(&mut self, _: Time, request: Request) -> Result<(), Rejection> {
        if self.draining {
            return Err(Rejection::Draining);
        }
        self.requests.push(request.id);
        Ok(())
    }

    fn cancel(&mut self, _: Time, id: RequestId) -> bool {
        let before = self.requests.len();
        self.requests.retain(|&request| request != id);
        self.requests.len() < before
    }

    fn stop(&mut self, _: Time, _: RequestId, _: Choice) {}

    fn step(&mut self, _: Time, outputs: &mut Vec<Output>) -> Next {
        self.stepped.send(()).expect("the test listens");
        let Some(&request) = self.requests.first() else {
            return Next::Wait(None);
        };
        match self.deed {
            Deed::Panic => panic!("planted"),
            Deed::Nothing => Next::Wait(None),
            Deed::Finish => {
                self.tokens += 1;
                let finish = (self.tokens == 2).then_some(FinishReason::Length);
                if finish.is_some() {
                    self.requests.clear();
                }
                let sampled = Sampled {
                    token: TokenId(u32::from(b'a')),
                    logprobs: None,
                };
                let choice = Choice::new(0);
                outputs.push(Output::Token {
                    request,
                    choice,
                    sampled,
                    finish,
                });
                Next::Again
            }
        }
    }

    fn drain(&mut self) {
        self.draining = true;
    }

    fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    fn shutdown(&mut self, _: Time, _: Span) -> Closed {
        Closed::default()
    }

    fn stats(&self) -> (EngineStats, kv_core::Stats) {
        Default::default()
    }

    fn drain_events(&mut self, _: &mut Vec<Event>) {}
}

struct Deaf;

impl Observer for Deaf {
    fn turn(&mut self, _: &Turn<'_>) {}

    fn output(&mut self, _: Time, _: &Output) {}

    fn accepted(&mut self, _: Time, _: RequestId) {}

    fn over(&mut self, _: Time, _: RequestId, _: Ended) {}
}

fn start(deed: Deed) -> (EngineHandle, Waker, Receiver<()>) {
    let (stepped, steps) = unbounded();
    let core = Scripted {
        deed,
        requests: Vec::new(),
        tokens: 0,
        draining: false,
        stepped,
    };
    let port = EnginePort::new(Clock::start());
    let waker = port.waker();
    (
        port.start(core, Deaf, Arc::default()).unwrap(),
        waker,
        steps,
    )
}

type Answer = oneshot::Receiver<Result<(), Rejection>>;

fn submit(handle: &EngineHandle, id: u64) -> (Answer, mpsc::Receiver<Update>) {
    let tokenizer = Arc::new(OracleTokenizer::new(1));
    let text = Arc::new(Text::new(tokenizer, ChatTemplate::plain()));
    let stops = Arc::new(StopStrings::default());
    let (updates, received) = mpsc::channel(10);
    let (answer, answered) = oneshot::channel();
    handle.submit(Submission {
        request: Request {
            id: RequestId(id),
            prompt: vec![TokenId(1)],
            n: 1,
            max_tokens: 2,
            stop_tokens: Vec::new(),
            sampling: SamplingParams::default(),
            priority: 0,
        },
        rules: TextRules { text, stops },
        first_index: 0,
        updates,
        answer,
    });
    (answered, received)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    timeout(LIMIT, what).await.expect("nothing hangs")
}

/// Looks again and again, up to the limit.
fn eventually(what: impl Fn() -> bool) {
    let clock = Clock::start();
    while !what() {
        assert!(
            clock.now().since(Time::ZERO).as_duration() < LIMIT,
            "it never came to that"
        );
        thread::yield_now();
    }
}

#[tokio::test]
async fn a_panic_is_told_to_everybody() {
    let (handle, waker, _steps) = start(Deed::Panic);
    let (answer, mut updates) = submit(&handle, 1);
    assert_eq!(within(answer).await, Ok(Ok(())));
    assert_eq!(within(updates.recv()).await, Some(Update::Abandoned));
    within(handle.ended()).await;
    assert_eq!(handle.health(), Health::Dead);
    let (answer, _updates) = submit(&handle, 2);
    assert!(within(answer).await.is_err(), "nobody is there to take it");
    waker.wake();
}

#[tokio::test]
async fn drained_means_finished() {
    let (handle, _waker, _steps) = start(Deed::Finish);
    let (answer, mut updates) = submit(&handle, 1);
    handle.drain();
    assert_eq!(handle.health(), Health::Draining);
    assert_eq!(within(answer).await, Ok(Ok(())));
    within(handle.ended()).await;
    let mut pieces = Vec::new();
    while let Some(Update::Piece(piece)) = within(updates.recv()).await {
        pieces.push((piece.text, piece.finish));
    }
    assert_eq!(
        pieces,
        [
            ("a".to_owned(), None),
            ("a".to_owned(), Some(Finish::Length))
        ]
    );
}

#[tokio::test]
async fn aborted_means_told() {
    let (handle, _waker, _steps) = start(Deed::Nothing);
    let (answer, mut updates) = submit(&handle, 1);
    assert_eq!(within(answer).await, Ok(Ok(())));
    handle.abort();
    assert_eq!(within(updates.recv()).await, Some(Update::Abandoned));
    within(handle.ended()).await;
    assert_eq!(handle.health(), Health::Draining);
}

#[tokio::test]
async fn i08_work_that_waits_for_nothing_is_unhealthy() {
    let (handle, _waker, _steps) = start(Deed::Nothing);
    let (answer, _updates) = submit(&handle, 1);
    assert_eq!(within(answer).await, Ok(Ok(())));
    eventually(|| handle.health() == Health::Wedged);
    handle.cancel(RequestId(1));
    eventually(|| handle.health() == Health::Healthy);
    handle.drain();
    within(handle.ended()).await;
}

#[tokio::test]
async fn s10_a_wake_up_ends_the_wait_and_many_are_one() {
    let (handle, waker, steps) = start(Deed::Nothing);
    steps.recv_timeout(LIMIT).expect("the first turn");
    waker.wake_by_ref();
    steps.recv_timeout(LIMIT).expect("a turn for the wake-up");
    for _ in 0..1000 {
        waker.wake_by_ref();
    }
    steps.recv_timeout(LIMIT).expect("a turn for the wake-ups");
    handle.drain();
    within(handle.ended()).await;
    assert!(handle.backlog() <= 1, "wake-ups don't pile up");
    drop(waker);
}

#[tokio::test]
async fn a_client_that_left_before_the_answer_is_cancelled() {
    let (handle, _waker, steps) = start(Deed::Nothing);
    steps.recv_timeout(LIMIT).expect("the first turn");
    let (answer, updates) = submit(&handle, 1);
    drop((answer, updates));
    handle.drain();
    within(handle.ended()).await;
}

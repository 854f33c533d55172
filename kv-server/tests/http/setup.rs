//! Servers in this process, and executors that wait for the test or fail on purpose.

use std::sync::Arc;
use std::time::Duration;

use kv_model::oracle::OracleConfig;
use kv_model::tokenizer::OracleTokenizer;
use kv_scheduler::{Batch, ExecuteError, Executor, StepOutput};
use kv_server::config::{Config, Invocation};
use kv_server::{Ended, Model, Server};
use parking_lot::{Condvar, Mutex};

use crate::client::{Client, LIMIT, within};

/// A server and a client for it.
#[derive(Debug)]
pub(crate) struct Fixture {
    pub(crate) client: Client,
    pub(crate) server: Server,
}

/// The configuration that these flags make, on a free port.
pub(crate) fn config(flags: &[&str]) -> Config {
    let fixed = ["kv-server", "--model", "oracle", "--port", "0"];
    let args = fixed.iter().chain(flags).map(|&arg| arg.to_owned());
    match Config::load(args, []).expect("a good configuration") {
        Invocation::Serve(config) => *config,
        Invocation::Print(text) => panic!("{text}"),
    }
}

impl Fixture {
    pub(crate) async fn start(flags: &[&str]) -> Self {
        let server = Server::start(&config(flags)).await.expect("it starts");
        Self {
            client: Client {
                address: server.address(),
            },
            server,
        }
    }

    pub(crate) async fn with(flags: &[&str], model: Model) -> Self {
        let server = Server::start_with(&config(flags), model)
            .await
            .expect("it starts");
        Self {
            client: Client {
                address: server.address(),
            },
            server,
        }
    }

    /// Waits until nobody is served, checks that nothing is held, and closes.
    pub(crate) async fn end(self) {
        self.client.until_idle().await;
        assert_eq!(within(self.server.shut_down(LIMIT)).await, Ended::Finished);
    }
}

/// The oracle with its usual words.
pub(crate) fn oracle(flags: &[&str]) -> Model {
    let tokenizer = OracleTokenizer::new(512);
    let oracle = tokenizer.oracle_config();
    custom(flags, tokenizer, oracle)
}

/// The oracle with any vocabulary and script.
pub(crate) fn custom(flags: &[&str], tokenizer: OracleTokenizer, oracle: OracleConfig) -> Model {
    Model::oracle_with(&config(flags), tokenizer, oracle).expect("a good oracle")
}

/// Lets an executor run so many steps and no more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<Steps>, Condvar)>);

#[derive(Debug, Default)]
struct Steps {
    allowed: u64,
    arrived: u64,
}

impl Gate {
    /// Puts the gate in front of a model.
    pub(crate) fn guard(&self, model: Model) -> Model {
        let executor = Gated {
            gate: self.clone(),
            inner: model.executor,
        };
        Model {
            executor: Box::new(executor),
            ..model
        }
    }

    /// Lets that many more steps run.
    pub(crate) fn allow(&self, steps: u64) {
        let mut state = self.0.0.lock();
        state.allowed = state.allowed.saturating_add(steps);
        self.0.1.notify_all();
    }

    /// Lets everything run.
    pub(crate) fn open(&self) {
        self.allow(u64::MAX);
    }

    /// Waits until so many steps have come to the gate, the ones that went through included.
    pub(crate) async fn arrived(&self, steps: u64) {
        within(async {
            while self.0.0.lock().arrived < steps {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    fn pass(&self) {
        let mut state = self.0.0.lock();
        state.arrived += 1;
        let closed = |state: &mut Steps| state.allowed == 0;
        let wait = self.0.1.wait_while_for(&mut state, closed, LIMIT);
        assert!(!wait.timed_out(), "the test forgot the gate");
        state.allowed -= 1;
    }
}

struct Gated {
    gate: Gate,
    inner: Box<dyn Executor + Send>,
}

impl Executor for Gated {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        self.gate.pass();
        self.inner.execute(batch)
    }
}

/// What a bad executor does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Once.
    Error,
    /// So many times from then on.
    Errors(u64),
    Panic,
}

/// Works until that step, fails in it, and works again if it can.
pub(crate) fn faulty(model: Model, step: u64, fault: Fault) -> Model {
    let executor = Faulty {
        inner: model.executor,
        step,
        fault,
    };
    Model {
        executor: Box::new(executor),
        ..model
    }
}

struct Faulty {
    inner: Box<dyn Executor + Send>,
    step: u64,
    fault: Fault,
}

impl Executor for Faulty {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        if self.step == 0 {
            match &mut self.fault {
                Fault::Errors(left) if *left > 1 => *left -= 1,
                _ => self.step = u64::MAX,
            }
            return match self.fault {
                Fault::Error | Fault::Errors(_) => Err(ExecuteError {
                    what: "planted".to_owned(),
                }),
                Fault::Panic => panic!("planted"),
            };
        }
        self.step -= 1;
        self.inner.execute(batch)
    }
}

/// A grace that is over at once.
pub(crate) const NO_GRACE: Duration = Duration::ZERO;

//! One arm: a server of its own, the whole load at once, and a look at what is left afterwards.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::client::{Answer, Client};
use super::load::{BLOCK_TOKENS, Load, Request};
use super::stats::Stats;
use crate::clock;
use crate::server::Server;

/// After the last answer, everything must be given back within this time.
const IDLE_LIMIT: Duration = Duration::from_secs(20);

/// Between two looks at whether the server is idle.
const IDLE_LOOK: Duration = Duration::from_millis(50);

/// An idle server ends within this time.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// What the server does when memory is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// It never is.
    Ample,
    /// Groups are moved beside decoding.
    Async,
    /// Groups are dropped and computed again.
    Recompute,
    /// Groups are moved while everything waits.
    Sync,
}

impl Mode {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ample => "ample",
            Self::Async => "async",
            Self::Recompute => "recompute",
            Self::Sync => "sync",
        }
    }

    const fn flag(self) -> &'static str {
        match self {
            Self::Ample | Self::Async => "async",
            Self::Recompute => "off",
            Self::Sync => "sync",
        }
    }
}

/// How to run one arm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arm<'a> {
    pub(super) mode: Mode,
    pub(super) gpu_blocks: u32,
    /// Most sequences at the same time.
    pub(super) batch: u32,
    /// For each call.
    pub(super) limit: Duration,
    /// Further flags for the server.
    pub(super) further: &'a [String],
}

/// What came of it.
#[derive(Debug)]
pub(super) struct ArmResult {
    pub(super) mode: Mode,
    pub(super) gpu_blocks: u32,
    /// In the order of the requests.
    pub(super) answers: Vec<Result<Answer>>,
    /// In the ample arm: the whole answer to each request, also where the client left.
    pub(super) references: Vec<Answer>,
    /// From the first request to the last answer.
    pub(super) wall: Duration,
    /// After the load, when the server was idle.
    pub(super) stats: Stats,
    /// Whether a step was made to fail: requests may fail with it.
    pub(super) may_fail: bool,
    /// The server's last lines, in case something went wrong.
    pub(super) log: String,
}

impl Arm<'_> {
    /// Starts the server, sends everything at once, waits until the server is idle, stops it.
    pub(super) fn run(&self, program: &Path, model: &str, load: &Load) -> Result<ArmResult> {
        let server = Server::start(program, &self.flags(model))?;
        let result = self.measure(&server, load).map_err(|error| {
            let log = server.log();
            error.context(log)
        })?;
        server.stop(STOP_LIMIT)?;
        Ok(result)
    }

    fn flags(&self, model: &str) -> Vec<String> {
        let flags = [
            ("--model", model.to_owned()),
            ("--gpu-blocks", self.gpu_blocks.to_string()),
            ("--block-tokens", BLOCK_TOKENS.to_string()),
            ("--max-batch-size", self.batch.to_string()),
            ("--max-waiting-requests", "0".to_owned()),
            ("--kv-swap-mode", self.mode.flag().to_owned()),
        ];
        flags
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .chain(self.further.iter().cloned())
            .collect()
    }

    /// Whether the server was told to do that.
    fn has(&self, flag: &str) -> bool {
        let is = |arg: &String| arg.split('=').next() == Some(flag);
        self.further.iter().any(is)
    }

    fn measure(&self, server: &Server, load: &Load) -> Result<ArmResult> {
        let client = Client::new(server.base(), self.limit);
        let start = clock::now();
        let answers = send_all(&client, &load.requests);
        let wall = start.elapsed();
        let stats = wait_until_idle(&client, self.has("--fault-lose-copy"))?;
        let references = match self.mode {
            Mode::Ample => references(&client, load, &answers)?,
            Mode::Async | Mode::Recompute | Mode::Sync => Vec::new(),
        };
        let log = server.log();
        let Self {
            mode, gpu_blocks, ..
        } = *self;
        Ok(ArmResult {
            mode,
            gpu_blocks,
            answers,
            references,
            wall,
            stats,
            may_fail: self.has("--fault-step-error"),
            log,
        })
    }
}

/// All at once, each from a thread and over a connection of its own.
fn send_all(client: &Client, requests: &[Request]) -> Vec<Result<Answer>> {
    thread::scope(|scope| {
        let threads: Vec<_> = requests
            .iter()
            .map(|request| {
                let client = client.clone();
                scope.spawn(move || client.chat(request))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(anyhow!("the client panicked")))
            })
            .collect()
    })
}

/// The statistics of the idle server, or the last ones seen when it doesn't become idle.
/// `may_lose` says that a copy was lost on purpose: its memory is not a leak.
fn wait_until_idle(client: &Client, may_lose: bool) -> Result<Stats> {
    let start = clock::now();
    loop {
        let mut stats = Stats::read(client)?;
        if may_lose {
            stats.forgive_lost();
        }
        if stats.leaks().is_empty() || start.elapsed() > IDLE_LIMIT {
            return Ok(stats);
        }
        // The server tells nobody that it became idle, so that one has to look.
        thread::park_timeout(IDLE_LOOK);
    }
}

/// The whole answers: those that came, and new ones where the client had left.
fn references(client: &Client, load: &Load, answers: &[Result<Answer>]) -> Result<Vec<Answer>> {
    let mut references = Vec::new();
    for (index, (request, answer)) in load.requests.iter().zip(answers).enumerate() {
        let answer = match answer {
            Err(error) => return Err(anyhow!("request {index} failed: {error:#}")),
            Ok(_) if request.cancel_after.is_some() => client
                .chat(&request.patient())
                .with_context(|| format!("request {index}, sent again"))?,
            Ok(answer) => answer.clone(),
        };
        references.push(answer);
    }
    Ok(references)
}

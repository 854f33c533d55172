//! One run: an engine, clients that send a load, and virtual time.

use std::rc::Rc;

use kv_core::{HostSide, Layout, LayoutError, Machine, MachineConfig, Span, Time};
use kv_scheduler::{
    Engine, EngineConfig, EngineConfigError, Next, Output, Request, RequestId, SamplingParams,
    TokenId,
};
use serde::Serialize;

use crate::arms::{Arm, Mode};
use crate::cost::{StepCost, span};
use crate::link::LinkCost;
use crate::load::Load;
use crate::model::{ModelledBackend, ModelledExecutor, Shared, Way};
use crate::report::{Client, Outcome, Slo};

/// Passes in a row that emit no token and end no copy before a run is given up.
const BARREN_PASSES_MAX: u32 = 100_000;

/// What all arms of a comparison share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) step: StepCost,
    pub(crate) link: LinkCost,
    pub(crate) geometry: Geometry,
    pub(crate) engine: EngineConfig,
    pub(crate) slo: Slo,
    /// Virtual time after which the run is cut off.
    pub(crate) time_limit: Span,
    /// Whether the engine's invariants are checked after every pass. Slow.
    pub(crate) audit: bool,
}

/// Memory on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Geometry {
    /// GPU blocks of every arm but the ample one.
    pub(crate) blocks: u32,
    /// GPU blocks of the ample arm.
    pub(crate) ample_blocks: u32,
    /// Tokens per block.
    pub(crate) block_tokens: u32,
    /// Host slots of the arms that have a pool.
    pub(crate) host_slots: u32,
    /// Most bytes on their way at a time.
    pub(crate) inflight_bytes_max: u64,
    /// What the machine takes for the link's rate until it measured a copy; `None` leaves its own
    /// assumption.
    pub(crate) assumed_bytes_per_second: Option<u64>,
}

/// A run that could not be started, or went wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The geometry can't be laid out.
    #[error("the KV pool: {0}")]
    Layout(#[from] LayoutError),
    /// The machine refuses its settings.
    #[error("the machine: {0}")]
    Machine(#[from] kv_core::ConfigError),
    /// The engine refuses its settings.
    #[error("the engine: {0}")]
    Engine(#[from] EngineConfigError),
    /// Nothing happens any more although requests are there.
    #[error("nothing happens any more after {seconds:.3} s: {what}")]
    Stuck {
        /// When.
        seconds: f64,
        /// The engine's gauges.
        what: String,
    },
    /// An invariant does not hold.
    #[error("after {seconds:.3} s: {what}")]
    Audit {
        /// When.
        seconds: f64,
        /// Which, and where.
        what: String,
    },
}

/// Runs one arm to its end, or to the time limit.
///
/// # Errors
///
/// [`RunError`]; what the engine refuses or fails is counted, not an error.
pub(crate) fn simulate(arm: &Arm, load: &Load, setting: &Setting) -> Result<Outcome, RunError> {
    let mut world = World::new(arm, load, setting)?;
    while world.goes_on() {
        world.send();
        world.pass()?;
    }
    Ok(world.outcome(arm))
}

#[derive(Debug)]
struct World<'a> {
    setting: &'a Setting,
    load: &'a Load,
    shared: Rc<Shared>,
    engine: Engine<ModelledExecutor, ModelledBackend>,
    /// One per request sent so far.
    clients: Vec<Client>,
    open: usize,
    outputs: Vec<Output>,
    gaps_micros: Vec<(u32, u32)>,
    barren_passes: u32,
    passes: u64,
    busiest_waiting: u32,
}

impl<'a> World<'a> {
    fn new(arm: &Arm, load: &'a Load, setting: &'a Setting) -> Result<Self, RunError> {
        let geometry = setting.geometry;
        let blocks = match arm.mode {
            Mode::Ample => geometry.ample_blocks,
            Mode::Async | Mode::Recompute | Mode::Sync => geometry.blocks,
        };
        let (way, host) = match arm.mode {
            Mode::Sync => (Way::Blocking, HostSide::Pageable),
            Mode::Ample | Mode::Async | Mode::Recompute => {
                (Way::Beside, HostSide::Slots(geometry.host_slots))
            }
        };
        // One plane that holds all of a block: the machine asks for bytes, not for rows.
        let token_bytes = setting.step.kv_bytes_per_token;
        let layout = Layout::latent(1, blocks, geometry.block_tokens, token_bytes, 1)?;
        let mut machine = MachineConfig::new(&layout, host, geometry.inflight_bytes_max);
        if let Some(rate) = geometry.assumed_bytes_per_second {
            machine.deadlines.assumed_rate = rate;
        }
        let machine = Machine::new(machine)?;
        let shared = Rc::new(Shared::new(setting.link));
        let executor = ModelledExecutor::new(
            Rc::clone(&shared),
            setting.step,
            setting.link,
            geometry.block_tokens,
        );
        let backend = ModelledBackend::new(Rc::clone(&shared), setting.link, way);
        let engine = Engine::new(arm.config(setting.engine), machine, executor, backend)?;
        Ok(Self {
            setting,
            load,
            shared,
            engine,
            clients: Vec::with_capacity(load.jobs.len()),
            open: 0,
            outputs: Vec::new(),
            gaps_micros: Vec::new(),
            barren_passes: 0,
            passes: 0,
            busiest_waiting: 0,
        })
    }

    fn goes_on(&self) -> bool {
        let over = self.clients.len() == self.load.jobs.len() && self.engine.is_idle();
        !over && self.shared.now().since(Time::ZERO) < self.setting.time_limit
    }

    /// When the next request is due, if clients may send one.
    fn next_due(&self) -> Option<Time> {
        let room = self.load.concurrency.is_none_or(|most| self.open < most);
        let job = self.load.jobs.get(self.clients.len()).filter(|_| room)?;
        Some(Time::ZERO + job.at)
    }

    /// Sends everything that is due.
    fn send(&mut self) {
        let now = self.shared.now();
        while let Some(due) = self.next_due().filter(|&due| due <= now) {
            let id = self.clients.len() as u64;
            let job = self.load.jobs[self.clients.len()];
            // A closed loop sends when a place is free, a trace at its own times.
            let sent_at = if self.load.concurrency.is_some() {
                now
            } else {
                due
            };
            let request = Request {
                id: RequestId(id),
                prompt: vec![TokenId(0); job.input_tokens as usize],
                n: 1,
                max_tokens: job.output_tokens,
                stop_tokens: Vec::new(),
                sampling: SamplingParams::default(),
                priority: 0,
            };
            let accepted = self.engine.submit(now, request).is_ok();
            self.clients.push(Client::new(sent_at, accepted));
            self.open += usize::from(accepted);
        }
    }

    fn pass(&mut self) -> Result<(), RunError> {
        let started = self.shared.now();
        let steps_before = self.engine.executor().log().micros.len();
        let next = self.engine.step(started, &mut self.outputs);
        self.passes += 1;
        if self.engine.executor().log().micros.len() == steps_before {
            self.shared.pass(span(self.setting.step.pass_seconds));
        }
        let tokens = self.hand_out();
        self.watch(tokens)?;
        if let Next::Wait(until) = next {
            self.wait(until)?;
        }
        Ok(())
    }

    /// Gives the outputs of a pass to the clients; says how many tokens they were.
    fn hand_out(&mut self) -> usize {
        let now = self.shared.now();
        let mut tokens = 0;
        for output in self.outputs.drain(..) {
            match output {
                Output::Token {
                    request, finish, ..
                } => {
                    tokens += 1;
                    let client = client(&mut self.clients, request);
                    if let Some(gap) = client.take_token(now, finish.is_some()) {
                        let micros = u32::try_from(gap.as_nanos() / 1_000).unwrap_or(u32::MAX);
                        let client = u32::try_from(request.0).unwrap_or(u32::MAX);
                        self.gaps_micros.push((micros, client));
                    }
                    self.open -= usize::from(finish.is_some());
                }
                Output::Resumed { request, pause } => {
                    client(&mut self.clients, request).resume(pause);
                }
                Output::Failed { request, .. } => {
                    client(&mut self.clients, request).fail();
                    self.open -= 1;
                }
                _ => (),
            }
        }
        tokens
    }

    /// Looks for engines that go round in circles, and for broken invariants if asked to.
    fn watch(&mut self, tokens: usize) -> Result<(), RunError> {
        self.barren_passes = if tokens > 0 {
            0
        } else {
            self.barren_passes + 1
        };
        let (stats, _) = self.engine.stats();
        self.busiest_waiting = self.busiest_waiting.max(stats.waiting);
        if self.barren_passes > BARREN_PASSES_MAX {
            return Err(self.stuck());
        }
        if self.setting.audit {
            let audit = self.engine.audit();
            audit.map_err(|what| RunError::Audit {
                seconds: self.seconds(),
                what,
            })?;
        }
        Ok(())
    }

    /// Sleeps until something happens by itself.
    fn wait(&self, until: Option<Time>) -> Result<(), RunError> {
        let news = self.shared.link.borrow().next_news();
        let wakes = [until, news, self.next_due()];
        match wakes.into_iter().flatten().min() {
            Some(time) => {
                self.shared.pass_until(time);
                Ok(())
            }
            None if self.engine.is_idle() => Ok(()),
            None => Err(self.stuck()),
        }
    }

    fn seconds(&self) -> f64 {
        self.shared
            .now()
            .since(Time::ZERO)
            .as_duration()
            .as_secs_f64()
    }

    fn stuck(&self) -> RunError {
        let (engine, machine) = self.engine.stats();
        RunError::Stuck {
            seconds: self.seconds(),
            what: format!("{engine:?} {:?} {:?}", machine.gpu, machine.host),
        }
    }

    fn outcome(mut self, arm: &Arm) -> Outcome {
        let now = self.shared.now();
        for client in &mut self.clients {
            client.close(now);
        }
        let (engine, machine) = self.engine.stats();
        let log = self.engine.executor().log().clone();
        let held = self.engine.backend_mut().held();
        let busy = self.shared.link.borrow().busy();
        let total = now.since(Time::ZERO);
        Outcome::new(
            arm,
            &self.setting.slo,
            &crate::report::Run {
                total,
                clients: self.clients,
                gaps_micros: self.gaps_micros,
                log,
                engine,
                machine,
                held,
                busy,
                passes: self.passes,
                busiest_waiting: self.busiest_waiting,
            },
        )
    }
}

fn client(clients: &mut [Client], request: RequestId) -> &mut Client {
    let index = usize::try_from(request.0).expect("ids are indices into this list");
    &mut clients[index]
}

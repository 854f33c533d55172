//! `docs/failure-modes.md`, row by row: make the failure happen, look, compare.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of a test stop at the first surprise"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::host::PlainMemory;
use kv_core::testing::{Pending, SimBackend, SimConfig, SimControl};
use kv_core::{
    Checksum, Direction, HostSide, Layout, Machine, MachineConfig, Outcome, Span, SubmitRefusal,
    Time,
};
use kv_model::oracle::{Oracle, OracleConfig};
use kv_scheduler::{
    Batch, Engine, EngineConfig, ExecuteError, Executor, Next, Output, Request, RequestId,
    RowFault, SamplingParams, StepOutput, TokenId,
};

/// What happens to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Contradicted,
    Done,
    Ends(Outcome),
    Flipped,
    Never,
    Repeated,
}

/// What happens to the step in which the younger request is at its tenth token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StepFate {
    #[default]
    Done,
    RowFails,
    StepFails,
}

/// A failure: what happens to the n-th copy of a direction, and to one step.
#[derive(Clone, Copy)]
struct Failure {
    copy: fn(Direction, u32) -> Fate,
    step: StepFate,
    busy: bool,
    checksum: Checksum,
}

const HEALTHY: Failure = Failure {
    copy: |_, _| Fate::Done,
    step: StepFate::Done,
    busy: false,
    checksum: Checksum::Off,
};

/// The failures by their names in the document.
fn failures() -> BTreeMap<&'static str, Failure> {
    use Direction::{In, Out};
    let copy = |copy| Failure { copy, ..HEALTHY };
    let ends = |step| Failure { step, ..HEALTHY };
    BTreeMap::from([
        ("nothing fails", HEALTHY),
        (
            "the backend is busy once",
            Failure {
                busy: true,
                ..HEALTHY
            },
        ),
        (
            "a copy out fails once",
            copy(|way, nth| fails(way == Out && nth == 0)),
        ),
        ("every copy out fails", copy(|way, _| fails(way == Out))),
        (
            "a copy in fails once",
            copy(|way, nth| fails(way == In && nth == 0)),
        ),
        ("every copy in fails", copy(|way, _| fails(way == In))),
        (
            "nobody knows how a copy out ended",
            copy(|way, _| unknown(way == Out)),
        ),
        (
            "nobody knows how a copy in ended",
            copy(|way, _| unknown(way == In)),
        ),
        ("a copy out never ends", copy(|way, _| never(way == Out))),
        ("a copy in never ends", copy(|way, _| never(way == In))),
        ("a copy ends twice", copy(|_, _| Fate::Repeated)),
        (
            "a copy ends twice with contradicting outcomes",
            copy(|_, _| Fate::Contradicted),
        ),
        (
            "a host byte is damaged, digests on",
            Failure {
                copy: |way, _| if way == In { Fate::Flipped } else { Fate::Done },
                checksum: Checksum::On,
                ..HEALTHY
            },
        ),
        ("one row of a step fails", ends(StepFate::RowFails)),
        ("a whole step fails", ends(StepFate::StepFails)),
    ])
}

const fn fails(fails: bool) -> Fate {
    if fails {
        Fate::Ends(Outcome::Failed)
    } else {
        Fate::Done
    }
}

const fn unknown(unknown: bool) -> Fate {
    if unknown {
        Fate::Ends(Outcome::Unknown)
    } else {
        Fate::Done
    }
}

const fn never(never: bool) -> Fate {
    if never { Fate::Never } else { Fate::Done }
}

#[derive(Debug)]
struct Model {
    oracle: Oracle,
    fate: StepFate,
}

impl Executor for Model {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        let mut output = self.oracle.execute(batch)?;
        let tenth = |row: &kv_scheduler::BatchRow<'_>| {
            row.request == YOUNGER && row.samples.iter().any(|sample| sample.output.len() == 9)
        };
        let Some(at) = batch.rows.iter().position(tenth) else {
            return Ok(output);
        };
        match self.fate {
            StepFate::Done => {}
            StepFate::RowFails => {
                output.rows[at] = Err(RowFault {
                    what: "planted".into(),
                })
            }
            StepFate::StepFails => {
                return Err(ExecuteError {
                    what: "planted".into(),
                });
            }
        }
        Ok(output)
    }
}

const OLDER: RequestId = RequestId(1);
const YOUNGER: RequestId = RequestId(2);

fn request(id: RequestId, prompt: u32, max_tokens: u32) -> Request {
    let first = u32::try_from(id.0).unwrap() * 1_000;
    Request {
        id,
        prompt: (first..first + prompt).map(TokenId).collect(),
        n: 1,
        max_tokens,
        stop_tokens: Vec::new(),
        sampling: SamplingParams::default(),
        priority: 0,
    }
}

/// What a row of the document says, and what was seen.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    flights_out: u64,
    flights_in: u64,
    lost: u32,
    computed_again: bool,
    client: String,
}

type Texts = BTreeMap<RequestId, Vec<TokenId>>;

struct Run {
    engine: Engine<Model, SimBackend>,
    control: SimControl,
    failure: Failure,
    counts: BTreeMap<Direction, u32>,
    given_up: Vec<kv_core::CommandId>,
    now: Time,
    texts: Texts,
    failed: Vec<RequestId>,
}

impl Run {
    /// The younger of two requests has to leave with 5 blocks at its 49th token, and if they are
    /// lost, the pool still holds each request alone.
    fn new(blocks: u32, failure: Failure) -> Self {
        let layout = Layout::per_layer(2, blocks, 16, 1, 4, 2).unwrap();
        let mut config = MachineConfig::new(&layout, HostSide::Slots(8), 1 << 20);
        config.checksum = failure.checksum;
        config.deadlines.base = Span::from_millis(500);
        let memory = Arc::new(PlainMemory::new(layout));
        let oracle = Oracle::new(Arc::clone(&memory), OracleConfig::default()).unwrap();
        let backend = SimBackend::new(memory, SimConfig::new(8));
        let control = backend.control();
        let settings = EngineConfig {
            lookahead_tokens: 0,
            resume_slack_tokens: 0,
            lost_permille_max: 1_000,
            ..EngineConfig::default()
        };
        let model = Model {
            oracle,
            fate: failure.step,
        };
        let machine = Machine::new(config).unwrap();
        let engine = Engine::new(settings, machine, model, backend).unwrap();
        Self {
            engine,
            control,
            failure,
            counts: BTreeMap::new(),
            given_up: Vec::new(),
            now: Time::ZERO,
            texts: BTreeMap::new(),
            failed: Vec::new(),
        }
    }

    fn end_copy(&mut self, copy: &Pending) {
        if self.given_up.contains(&copy.id) {
            return;
        }
        let nth = self.counts.entry(copy.direction).or_default();
        let fate = (self.failure.copy)(copy.direction, *nth);
        *nth += 1;
        let (control, now) = (&self.control, self.now);
        match fate {
            Fate::Never => self.given_up.push(copy.id),
            Fate::Ends(outcome) => {
                control.complete(copy.id, now, outcome).unwrap();
            }
            Fate::Done | Fate::Repeated | Fate::Contradicted | Fate::Flipped => {
                if fate == Fate::Flipped {
                    control.flip_host_bit(copy.moves[1].slot, 77);
                }
                control.complete(copy.id, now, Outcome::Done).unwrap();
                if fate == Fate::Repeated {
                    control.repeat(copy.id).unwrap();
                }
                if fate == Fate::Contradicted {
                    control.contradict(copy.id).unwrap();
                }
            }
        }
    }

    fn go(&mut self) -> &Texts {
        for request in [request(OLDER, 64, 64), request(YOUNGER, 32, 64)] {
            self.engine.submit(self.now, request).unwrap();
        }
        if self.failure.busy {
            self.control.refuse_next(SubmitRefusal::Busy);
        }
        let mut outputs = Vec::new();
        for _ in 0..10_000 {
            let next = self.engine.step(self.now, &mut outputs);
            self.engine.audit().unwrap();
            for output in outputs.drain(..) {
                match output {
                    Output::Token {
                        request, sampled, ..
                    } => {
                        self.texts.entry(request).or_default().push(sampled.token);
                    }
                    Output::Failed { request, .. } => self.failed.push(request),
                    _ => {}
                }
            }
            if self.engine.is_idle() {
                return &self.texts;
            }
            self.now = match next {
                Next::Again => self.now + Span::from_millis(10),
                Next::Wait(until) => until
                    .unwrap_or(self.now)
                    .min(self.now + Span::from_millis(10)),
            };
            self.now = self.now + Span::from_nanos(1);
            for copy in self.control.pending() {
                self.end_copy(&copy);
            }
        }
        panic!("I08: {:?}", self.engine.stats());
    }
}

fn observe(failure: Failure, expected: &Texts) -> Row {
    let mut run = Run::new(13, failure);
    run.go();
    let (stats, machine) = run.engine.stats();
    assert!(!run.failed.contains(&OLDER) || failure.step == StepFate::StepFails);
    let same = |id| run.texts.get(&id) == expected.get(&id);
    let client = if run.failed.contains(&YOUNGER) {
        assert!(
            expected[&YOUNGER].starts_with(&run.texts[&YOUNGER]),
            "I10: before the error"
        );
        "error"
    } else if same(YOUNGER) && same(OLDER) {
        "same"
    } else {
        "ANOTHER TEXT"
    };
    assert_eq!(
        machine.gpu.lost, machine.host.lost,
        "a flight loses both sides"
    );
    Row {
        flights_out: machine.out.started,
        flights_in: machine.back_in.started,
        lost: machine.gpu.lost,
        computed_again: stats.recomputed_tokens > 0,
        client: client.into(),
    }
}

fn documented() -> BTreeMap<String, Row> {
    let document = include_str!("../../docs/failure-modes.md");
    let rows = document
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1);
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let row = Row {
            flights_out: cells[1].parse().unwrap(),
            flights_in: cells[2].parse().unwrap(),
            lost: cells[3].parse().unwrap(),
            computed_again: cells[4] == "yes",
            client: cells[5].into(),
        };
        (cells[0].to_owned(), row)
    })
    .collect()
}

#[test]
fn i10_every_row_of_the_failure_table_is_what_happens() {
    let mut ample = Run::new(64, HEALTHY);
    let expected = ample.go().clone();
    assert_eq!(ample.engine.stats().1.out.started, 0);
    let failures = failures();
    let seen: BTreeMap<String, Row> = failures
        .iter()
        .map(|(name, &failure)| ((*name).to_owned(), observe(failure, &expected)))
        .collect();
    assert_eq!(
        seen,
        documented(),
        "left: seen, right: docs/failure-modes.md"
    );
}

//! Decides by a seed when and how the commands of a simulated backend end.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{Pending, Rng, SimControl, SimError};
use crate::{CommandId, Outcome, Span, Time};

/// Chances out of 1,000, and how long copies take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Odds {
    /// A command ends as `Failed`, some of its blocks moved.
    pub failed: u32,
    /// A command ends as `Unknown`, some of its blocks moved.
    pub unknown: u32,
    /// A command never ends.
    pub never: u32,
    /// The end of a command is reported twice.
    pub repeated: u32,
    /// The end of a command is contradicted afterwards.
    pub contradicted: u32,
    /// Shortest copy.
    pub span_min: Span,
    /// Longest copy.
    pub span_max: Span,
}

impl Odds {
    /// Every copy is done after 1 to 20 ms.
    #[must_use]
    pub const fn calm() -> Self {
        Self {
            failed: 0,
            unknown: 0,
            never: 0,
            repeated: 0,
            contradicted: 0,
            span_min: Span::from_millis(1),
            span_max: Span::from_millis(20),
        }
    }

    /// Everything that can go wrong does, often.
    #[must_use]
    pub const fn stormy() -> Self {
        Self {
            failed: 80,
            unknown: 30,
            never: 20,
            repeated: 50,
            contradicted: 50,
            span_min: Span::ZERO,
            span_max: Span::from_millis(200),
        }
    }
}

/// How often each thing happened; a run that must meet faults asserts that it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met {
    /// Commands that ended as `Done`.
    pub done: u64,
    /// Commands that ended as `Failed`.
    pub failed: u64,
    /// Commands that ended as `Unknown`.
    pub unknown: u64,
    /// Commands that will never end.
    pub never: u64,
    /// Reports that were repeated.
    pub repeated: u64,
    /// Reports that were contradicted.
    pub contradicted: u64,
}

/// Drives a [`SimControl`] through virtual time.
#[derive(Debug)]
pub struct Fates {
    rng: Rng,
    odds: Odds,
    met: Met,
    decided: BTreeMap<CommandId, Fate>,
}

#[derive(Clone, Copy, Debug)]
struct Fate {
    /// `None`: never.
    due: Option<Time>,
    /// `Done`, or how it breaks off and after how many blocks.
    broken: Option<(Outcome, usize)>,
}

impl Fates {
    /// The same seed and the same commands give the same ends.
    #[must_use]
    pub const fn new(seed: u64, odds: Odds) -> Self {
        Self {
            rng: Rng::new(seed),
            odds,
            met: Met {
                done: 0,
                failed: 0,
                unknown: 0,
                never: 0,
                repeated: 0,
                contradicted: 0,
            },
            decided: BTreeMap::new(),
        }
    }

    /// Other odds for commands that are not decided yet.
    pub const fn set_odds(&mut self, odds: Odds) {
        self.odds = odds;
    }

    /// What happened so far.
    #[must_use]
    pub const fn met(&self) -> Met {
        self.met
    }

    /// Ends every command that is due; says how many reports were made.
    ///
    /// A command whose step is not over then ends at a later call.
    pub fn run(&mut self, now: Time, control: &SimControl) -> usize {
        let pending = control.pending();
        self.decide(&pending);
        let mut due: Vec<(Time, CommandId)> = self
            .decided
            .iter()
            .filter_map(|(&id, fate)| fate.due.filter(|&due| due <= now).map(|due| (due, id)))
            .collect();
        due.sort_unstable();
        due.into_iter()
            .map(|(due, id)| self.end(control, id, due))
            .sum()
    }

    /// When the next command that [`run`](Self::run) has seen is due. In the past if its step is
    /// still under way.
    #[must_use]
    pub fn next_due(&self) -> Option<Time> {
        self.decided.values().filter_map(|fate| fate.due).min()
    }

    fn decide(&mut self, pending: &[Pending]) {
        self.decided
            .retain(|id, _| pending.iter().any(|command| command.id == *id));
        for command in pending {
            if self.decided.contains_key(&command.id) {
                continue;
            }
            let fate = self.draw(command);
            self.met.never += u64::from(fate.due.is_none());
            self.decided.insert(command.id, fate);
        }
    }

    /// Draws the same number of times for every command, so that other odds for one thing leave
    /// the rest of a world as it was.
    fn draw(&mut self, command: &Pending) -> Fate {
        let Odds {
            span_min, span_max, ..
        } = self.odds;
        let width = span_max
            .as_nanos()
            .saturating_sub(span_min.as_nanos())
            .saturating_add(1);
        let span = Span::from_nanos(span_min.as_nanos() + self.rng.below(width));
        let blocks = self.rng.index(command.moves.len() + 1);
        let never = self.rng.chance(self.odds.never);
        let failed = self.rng.chance(self.odds.failed);
        let unknown = self.rng.chance(self.odds.unknown);
        let broken = match (unknown, failed) {
            (true, _) => Some((Outcome::Unknown, blocks)),
            (false, true) => Some((Outcome::Failed, blocks)),
            (false, false) => None,
        };
        Fate {
            due: (!never).then_some(command.submitted_at + span),
            broken,
        }
    }

    fn end(&mut self, control: &SimControl, id: CommandId, now: Time) -> usize {
        let fate = self.decided[&id];
        let ended = match fate.broken {
            None => control.complete(id, now, Outcome::Done),
            Some((outcome, blocks)) => control.break_off(id, now, outcome, blocks),
        };
        let outcome = match ended {
            Ok(outcome) => outcome,
            Err(SimError::FenceOpen(_)) => return 0,
            Err(SimError::NoSuchCommand(_)) => {
                self.decided.remove(&id);
                return 0;
            }
        };
        self.decided.remove(&id);
        match outcome {
            Outcome::Done => self.met.done += 1,
            Outcome::Failed => self.met.failed += 1,
            Outcome::Unknown => self.met.unknown += 1,
        }
        let mut reports = 1;
        if self.rng.chance(self.odds.repeated) && control.repeat(id).is_ok() {
            self.met.repeated += 1;
            reports += 1;
        }
        if self.rng.chance(self.odds.contradicted) && control.contradict(id).is_ok() {
            self.met.contradicted += 1;
            reports += 1;
        }
        reports
    }
}

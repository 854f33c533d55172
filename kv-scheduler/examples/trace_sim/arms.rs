//! What is compared: modes and settings of the engine.

use std::fmt;

use kv_core::Span;
use kv_scheduler::{EngineConfig, SwapPolicy, VictimPolicy};
use serde::Serialize;

/// What happens to who has to leave, and how much memory there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// As much memory as anybody wants.
    Ample,
    /// Swapped over the link while others decode.
    Async,
    /// Computed again.
    Recompute,
    /// Swapped through pageable memory while the engine waits.
    Sync,
}

/// One engine to be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arm {
    pub(crate) mode: Mode,
    pub(crate) victim: VictimPolicy,
    pub(crate) lookahead_tokens: u32,
    pub(crate) resume_slack_tokens: u32,
    pub(crate) watermark_permille: u32,
    pub(crate) slice: Option<Span>,
    pub(crate) max_swaps: u32,
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.mode {
            Mode::Ample => return f.write_str("ample"),
            Mode::Async => "async",
            Mode::Recompute => "recompute",
            Mode::Sync => "sync",
        };
        let victim = match self.victim {
            VictimPolicy::Newest => "newest",
            VictimPolicy::Oldest => "oldest",
            VictimPolicy::Cost => "cost",
        };
        write!(
            f,
            "{mode} {victim} look={} slack={} mark={}",
            self.lookahead_tokens, self.resume_slack_tokens, self.watermark_permille
        )?;
        if let Some(slice) = self.slice {
            write!(
                f,
                " slice={}",
                humantime::format_duration(slice.as_duration())
            )?;
            if self.max_swaps < u32::MAX {
                write!(f, " swaps<={}", self.max_swaps)?;
            }
        }
        Ok(())
    }
}

impl Arm {
    /// The settings of its engine; `base` has what all arms share.
    pub(crate) const fn config(&self, base: EngineConfig) -> EngineConfig {
        let swap = match self.mode {
            Mode::Recompute => SwapPolicy::Off,
            Mode::Ample | Mode::Async | Mode::Sync => SwapPolicy::On,
        };
        EngineConfig {
            swap,
            victim: self.victim,
            lookahead_tokens: self.lookahead_tokens,
            resume_slack_tokens: self.resume_slack_tokens,
            watermark_permille: self.watermark_permille,
            slice: self.slice,
            max_swaps: self.max_swaps,
            ..base
        }
    }
}

/// The values to be tried; the first of each list is the base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choices {
    pub(crate) modes: Vec<Mode>,
    pub(crate) victims: Vec<VictimPolicy>,
    pub(crate) lookaheads: Vec<u32>,
    pub(crate) slacks: Vec<u32>,
    pub(crate) watermarks: Vec<u32>,
    pub(crate) slices: Vec<Option<Span>>,
    pub(crate) max_swaps: Vec<u32>,
}

impl Choices {
    /// Every combination. Slices move groups, so they are left out where nothing is moved.
    pub(crate) fn grid(&self) -> Vec<Arm> {
        let mut arms = Vec::new();
        for &mode in &self.modes {
            let first = arms.len();
            for &victim in &self.victims {
                for &lookahead_tokens in &self.lookaheads {
                    for &resume_slack_tokens in &self.slacks {
                        for &watermark_permille in &self.watermarks {
                            for &slice in &self.slices {
                                for &max_swaps in &self.max_swaps {
                                    arms.push(Arm {
                                        mode,
                                        victim,
                                        lookahead_tokens,
                                        resume_slack_tokens,
                                        watermark_permille,
                                        slice,
                                        max_swaps,
                                    });
                                }
                            }
                        }
                    }
                }
            }
            match mode {
                Mode::Ample => arms.truncate(first + 1),
                Mode::Recompute => drop_repeats(&mut arms, |arm| arm.slice = None),
                Mode::Async | Mode::Sync => (),
            }
        }
        // Without slices nobody asks how often somebody was moved for their sake.
        drop_repeats(&mut arms, |_| ());
        arms
    }

    /// The base of each mode, and each further value alone.
    pub(crate) fn star(&self) -> Vec<Arm> {
        let grid = self.grid();
        let differences = |arm: &Arm| {
            let changed = [
                self.victims.first() != Some(&arm.victim),
                self.lookaheads.first() != Some(&arm.lookahead_tokens),
                self.slacks.first() != Some(&arm.resume_slack_tokens),
                self.watermarks.first() != Some(&arm.watermark_permille),
                self.slices.first() != Some(&arm.slice),
                arm.slice.is_some() && self.max_swaps.first() != Some(&arm.max_swaps),
            ];
            changed.into_iter().filter(|&changed| changed).count()
        };
        grid.into_iter()
            .filter(|arm| differences(arm) <= 1)
            .collect()
    }
}

/// Changes every arm, brings what has no meaning without slices to one value, and keeps the first
/// of equal arms.
fn drop_repeats(arms: &mut Vec<Arm>, change: impl Fn(&mut Arm)) {
    let mut kept: Vec<Arm> = Vec::with_capacity(arms.len());
    for mut arm in arms.drain(..) {
        if arm.mode == Mode::Recompute {
            change(&mut arm);
        }
        if arm.slice.is_none() {
            arm.max_swaps = u32::MAX;
        }
        if !kept.contains(&arm) {
            kept.push(arm);
        }
    }
    *arms = kept;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices() -> Choices {
        Choices {
            modes: vec![Mode::Ample, Mode::Recompute, Mode::Async],
            victims: vec![VictimPolicy::Newest, VictimPolicy::Cost],
            lookaheads: vec![4],
            slacks: vec![16],
            watermarks: vec![0, 20],
            slices: vec![None, Some(Span::from_millis(500))],
            max_swaps: vec![10, u32::MAX],
        }
    }

    fn names(arms: &[Arm]) -> Vec<String> {
        arms.iter().map(Arm::to_string).collect()
    }

    #[test]
    fn the_star_changes_one_thing_at_a_time() {
        assert_eq!(
            names(&choices().star()),
            [
                "ample",
                "recompute newest look=4 slack=16 mark=0",
                "recompute newest look=4 slack=16 mark=20",
                "recompute cost look=4 slack=16 mark=0",
                "async newest look=4 slack=16 mark=0",
                "async newest look=4 slack=16 mark=0 slice=500ms swaps<=10",
                "async newest look=4 slack=16 mark=20",
                "async cost look=4 slack=16 mark=0",
            ]
        );
    }

    #[test]
    fn the_grid_has_every_combination_once() {
        let grid = choices().grid();
        // Ample once; two victims and two marks; the same with no slice and with two bounds.
        assert_eq!(grid.len(), 1 + 4 + 4 * 3);
        let mut names = names(&grid);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), grid.len());
    }

    #[test]
    fn an_arm_sets_its_engine_up() {
        let mut arm = choices().grid()[1];
        arm.victim = VictimPolicy::Cost;
        let config = arm.config(EngineConfig::default());
        assert_eq!(
            (config.swap, config.victim),
            (SwapPolicy::Off, VictimPolicy::Cost)
        );
        assert!(config.validate().is_ok());
    }
}

//! The oracle, with steps that fail now and then.

use kv_core::testing::Rng;
use kv_model::oracle::Oracle;
use kv_scheduler::{Batch, ExecuteError, Executor, RowFault, StepOutput};

/// Chances out of 1,000.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepOdds {
    pub(crate) step_fails: u32,
    pub(crate) row_fails: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepFaults {
    pub(crate) steps: u64,
    pub(crate) rows: u64,
}

#[derive(Debug)]
pub(crate) struct FaultyOracle {
    pub(crate) oracle: Oracle,
    pub(crate) rng: Rng,
    pub(crate) odds: StepOdds,
    pub(crate) faults: StepFaults,
}

impl Executor for FaultyOracle {
    fn execute(&mut self, batch: &Batch<'_>) -> Result<StepOutput, ExecuteError> {
        let mut output = self.oracle.execute(batch)?;
        if self.rng.chance(self.odds.step_fails) {
            self.faults.steps += 1;
            return Err(ExecuteError {
                what: "planted".into(),
            });
        }
        for row in &mut output.rows {
            if self.rng.chance(self.odds.row_fails) {
                self.faults.rows += 1;
                *row = Err(RowFault {
                    what: "planted".into(),
                });
            }
        }
        Ok(output)
    }
}

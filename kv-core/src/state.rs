//! The life of a record as one table.

use core::fmt;

/// Where a record is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordState {
    /// All bytes on the GPU, in the group's block tables.
    GpuResident,
    /// A flight to the host is under way.
    SwapOutInFlight,
    /// All bytes on the host, no GPU block held.
    HostResident,
    /// A flight to the GPU is under way; host bytes still count.
    SwapInInFlight,
    /// Cancelled while a flight was under way: a tombstone.
    CancelPending,
    /// Over; nothing is held any more.
    Cancelled,
    /// The bytes are gone; the group has to be computed again.
    Failed,
}

/// What can happen to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stimulus {
    /// A flight to the host was accepted.
    SubmitOut,
    /// That flight ended well.
    OutDone,
    /// That flight surely ended, without result.
    OutFailed,
    /// A flight to the GPU was accepted.
    SubmitIn,
    /// That flight ended well.
    InDone,
    /// That flight surely ended, without result.
    InFailed,
    /// The host bytes are damaged.
    Corrupt,
    /// Nobody can say how the flight ended.
    Unknown,
    /// The holder gave the group up.
    Cancel,
    /// The flight of a cancelled record is over, in whatever way.
    Retire,
}

impl RecordState {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::GpuResident,
        Self::SwapOutInFlight,
        Self::HostResident,
        Self::SwapInInFlight,
        Self::CancelPending,
        Self::Cancelled,
        Self::Failed,
    ];

    /// The state after `stimulus`, or `None` if it can't happen in this state.
    ///
    /// Giving up twice is allowed, and settles nothing twice.
    #[must_use]
    pub const fn on(self, stimulus: Stimulus) -> Option<Self> {
        use Stimulus as S;
        match (self, stimulus) {
            (Self::GpuResident, S::SubmitOut) => Some(Self::SwapOutInFlight),
            (Self::SwapOutInFlight, S::OutDone) | (Self::SwapInInFlight, S::InFailed) => {
                Some(Self::HostResident)
            }
            (Self::SwapOutInFlight, S::OutFailed) | (Self::SwapInInFlight, S::InDone) => {
                Some(Self::GpuResident)
            }
            (Self::HostResident, S::SubmitIn) => Some(Self::SwapInInFlight),
            (Self::SwapInInFlight, S::Corrupt)
            | (Self::SwapOutInFlight | Self::SwapInInFlight, S::Unknown) => Some(Self::Failed),
            (Self::SwapOutInFlight | Self::SwapInInFlight | Self::CancelPending, S::Cancel) => {
                Some(Self::CancelPending)
            }
            (
                Self::GpuResident | Self::HostResident | Self::Failed | Self::Cancelled,
                S::Cancel,
            )
            | (Self::CancelPending, S::Retire) => Some(Self::Cancelled),
            _ => None,
        }
    }
}

impl Stimulus {
    /// All stimuli.
    pub const ALL: [Self; 10] = [
        Self::SubmitOut,
        Self::OutDone,
        Self::OutFailed,
        Self::SubmitIn,
        Self::InDone,
        Self::InFailed,
        Self::Corrupt,
        Self::Unknown,
        Self::Cancel,
        Self::Retire,
    ];
}

/// The whole table as Markdown, for the documentation.
#[derive(Clone, Copy, Debug)]
pub struct StateTable;

impl fmt::Display for StateTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| state |")?;
        for stimulus in Stimulus::ALL {
            write!(f, " {stimulus:?} |")?;
        }
        write!(f, "\n|---|")?;
        for _ in Stimulus::ALL {
            write!(f, "---|")?;
        }
        for state in RecordState::ALL {
            write!(f, "\n| {state:?} |")?;
            for stimulus in Stimulus::ALL {
                match state.on(stimulus) {
                    Some(next) => write!(f, " {next:?} |")?,
                    None => write!(f, " – |")?,
                }
            }
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_what_the_documentation_says() {
        let documented = include_str!("../../docs/state-table.md");
        let table = alloc::format!("{StateTable}");
        assert!(
            documented.contains(&table),
            "docs/state-table.md is stale; it should contain:\n{table}"
        );
    }

    #[test]
    fn nothing_leaves_the_end() {
        for stimulus in Stimulus::ALL {
            let next = RecordState::Cancelled.on(stimulus);
            assert!(next.is_none_or(|state| state == RecordState::Cancelled));
        }
    }

    #[test]
    fn i04_a_flight_ends_only_by_its_own_outcome() {
        use RecordState as R;
        for state in [R::SwapOutInFlight, R::SwapInInFlight] {
            for stimulus in Stimulus::ALL {
                let settles = !matches!(stimulus, Stimulus::Cancel);
                if let Some(next) = state.on(stimulus) {
                    assert_eq!(settles, next != R::CancelPending, "{state:?} {stimulus:?}");
                }
            }
        }
        assert_eq!(
            R::CancelPending.on(Stimulus::Cancel),
            Some(R::CancelPending)
        );
    }
}

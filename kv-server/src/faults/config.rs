//! The flags of fault injection.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use super::FaultPlan;
use crate::config::{ConfigError, Layers, SwapMode, kind};

/// Without this switch every other flag here is refused.
const SWITCH: &str = "fault-injection";

/// Every other flag of fault injection.
const FLAGS: [&str; 7] = [
    "fault-copy-delay-ms",
    "fault-fail-copy",
    "fault-lose-copy",
    "fault-repeat-completion",
    "fault-flip-host-bit",
    "fault-step-error",
    "fault-force-swap-every",
];

/// What shall go wrong, or `None` if nothing may.
///
/// # Errors
///
/// A fault without the switch, a value that is not allowed, or forced swaps with nowhere to go.
pub(crate) fn plan(layers: &Layers, mode: SwapMode) -> Result<Option<FaultPlan>, ConfigError> {
    if !layers.read(SWITCH, "true or false", kind::switch)? {
        return match FLAGS.into_iter().find(|flag| layers.is_given(flag)) {
            Some(flag) => Err(layers.wrong(flag, "left out unless --fault-injection is given")),
            None => Ok(None),
        };
    }
    if layers.is_given("fault-force-swap-every") && mode == SwapMode::Off {
        let allowed = "left out when --kv-swap-mode is off";
        return Err(layers.wrong("fault-force-swap-every", allowed));
    }
    Ok(Some(FaultPlan {
        copy_delay: layers.read(
            "fault-copy-delay-ms",
            "a whole number of milliseconds from 0 to 600000",
            |text| kind::number(0..=600_000)(text).map(Duration::from_millis),
        )?,
        fail_copies: layers
            .optional("fault-fail-copy", |layers, name| {
                layers.read(name, "whole numbers from 1, such as `3` or `1,2,5`", list)
            })?
            .unwrap_or_default(),
        lose_copy: ordinal(layers, "fault-lose-copy")?,
        repeat_completion: ordinal(layers, "fault-repeat-completion")?,
        flip_host_bit: ordinal(layers, "fault-flip-host-bit")?,
        step_error: ordinal(layers, "fault-step-error")?,
        force_swap_every: layers
            .optional("fault-force-swap-every", Layers::count)?
            .and_then(NonZeroU32::new),
    }))
}

fn ordinal(layers: &Layers, name: &str) -> Result<Option<NonZeroU64>, ConfigError> {
    layers.optional(name, |layers, name| {
        layers.read(name, "a whole number from 1", |text| text.parse().ok())
    })
}

fn list(text: &str) -> Option<BTreeSet<u64>> {
    let number = |text: &str| text.trim().parse::<NonZeroU64>().ok().map(NonZeroU64::get);
    text.split(',').map(number).collect()
}

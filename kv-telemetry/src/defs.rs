//! Every series: name, unit, labels with their values, buckets, help. Nothing else names one.
//!
//! Labels have a fixed set of values, so that no series depends on what clients send; there is no
//! place for an id, a token or a text.

/// What a series is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only goes up.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size; the upper bounds of its buckets.
    Histogram(&'static [f64]),
    /// Always 1; its labels say something that doesn't change.
    Info,
}

/// A label and its values, in the order in which they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// All values it can have. Empty for an info, whose values are known at run time.
    pub values: &'static [&'static str],
}

/// One series, or one per combination of label values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Def {
    /// Its name without the unit.
    pub base: &'static str,
    /// Its unit, if it has one.
    pub unit: Option<&'static str>,
    /// What it is.
    pub kind: Kind,
    /// What tells its lines apart.
    pub labels: &'static [Label],
    /// What it says, one sentence without the full stop.
    pub help: &'static str,
}

impl Def {
    /// Name of the family: with the unit, without what the kind adds.
    #[must_use]
    pub fn family(&self) -> String {
        match self.unit {
            Some(unit) => format!("{}_{unit}", self.base),
            None => self.base.to_owned(),
        }
    }

    /// Name to ask for: with what the kind adds.
    #[must_use]
    pub fn series(&self) -> String {
        let family = self.family();
        match self.kind {
            Kind::Counter => format!("{family}_total"),
            Kind::Info => format!("{family}_info"),
            Kind::Gauge | Kind::Histogram(_) => family,
        }
    }
}

/// Seconds of a copy or of a request's life.
const LONG_SECONDS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0,
    300.0,
];

/// Seconds of something that should be over at once.
const SHORT_SECONDS: &[f64] = &[
    0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.5, 1.0, 5.0,
];

/// Seconds of a step, of a copy on a fast link, or between two tokens.
const STEP_SECONDS: &[f64] = &[
    0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0,
];

/// 64 KiB to 16 GiB, by fours.
const FLIGHT_BYTES: &[f64] = &[
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
    17_179_869_184.0,
];

/// Seen from the GPU.
const DIRECTION: Label = Label {
    name: "direction",
    values: &["out", "in"],
};

const OUTCOME: Label = Label {
    name: "outcome",
    values: &["done", "failed", "unknown"],
};

const ENDED: Label = Label {
    name: "outcome",
    values: &["finished", "cancelled", "failed"],
};

macro_rules! defs {
    ($($(#[$doc:meta])* $name:ident = $kind:expr, $base:literal, $unit:expr, [$($label:expr),*], $help:literal;)*) => {
        $(
            $(#[$doc])*
            pub(crate) const $name: Def = Def {
                base: $base,
                unit: $unit,
                kind: $kind,
                labels: &[$($label),*],
                help: $help,
            };
        )*

        /// Every series, in the order in which it is shown.
        pub const ALL: &[Def] = &[$($name),*];
    };
}

const fn label(name: &'static str, values: &'static [&'static str]) -> Label {
    Label { name, values }
}

defs! {
    // The process.
    BUILD = Kind::Info, "kv_build", None,
        [label("version", &[]), label("commit", &[])],
        "What is running";
    SWAP_MODE = Kind::Info, "kv_swap_mode", None,
        [label("mode", &[]), label("configured", &[]), label("fallback", &[])],
        "How groups are swapped, what was asked for, and why it is not that";
    HEALTH = Kind::Gauge, "kv_server_health", Some("states"),
        [label("state", &["starting", "ready", "draining", "unhealthy"])],
        "1 for the state that the server is in";
    HTTP_RESPONSES = Kind::Counter, "kv_http", Some("responses"),
        [
            label("route", &["chat", "completions", "models", "health", "metrics", "admin", "other"]),
            label("class", &["2xx", "4xx", "5xx", "other"])
        ],
        "Answers that were begun";

    // GPU and host memory.
    GPU_BLOCKS = Kind::Gauge, "kv_gpu", Some("blocks"),
        [label("state", &["free", "allocated", "evicting", "restoring", "lost"])],
        "GPU blocks by what they are used for";
    GPU_CAPACITY = Kind::Gauge, "kv_gpu_capacity", Some("blocks"), [],
        "GPU blocks in the pool";
    HOST_SLOTS = Kind::Gauge, "kv_host", Some("slots"),
        [label("state", &["free", "unready", "parked", "filling", "clean", "lost"])],
        "Host slots by what they are used for";
    HOST_CAPACITY = Kind::Gauge, "kv_host_capacity", Some("slots"), [],
        "Host slots in the pool, 0 without a pool";
    HOST_PEAK = Kind::Gauge, "kv_host_peak", Some("slots"), [],
        "Most host slots that were ever taken at the same time";
    HOST_USED_BYTES = Kind::Gauge, "kv_host_used", Some("bytes"), [],
        "Host memory in slots that are parked, filling, clean or lost";
    HOST_CAPACITY_BYTES = Kind::Gauge, "kv_host_capacity", Some("bytes"), [],
        "Host memory of the pool, 0 without a pool";
    BLOCK_BYTES = Kind::Gauge, "kv_block_size", Some("bytes"), [],
        "Payload of one block";

    // Swaps.
    GROUP_RECORDS = Kind::Gauge, "kv_group", Some("records"),
        [label("state", &[
            "gpu_resident",
            "swap_out_in_flight",
            "host_resident",
            "swap_in_in_flight",
            "cancel_pending",
            "failed"
        ])],
        "Groups by where their KV is";
    FLIGHTS = Kind::Gauge, "kv_swap_unsettled", Some("flights"), [],
        "Flights that are not settled";
    INFLIGHT_BYTES = Kind::Gauge, "kv_swap_inflight", Some("bytes"), [],
        "Payload that is submitted and not settled";
    SWAP_STARTED = Kind::Counter, "kv_swap_started", Some("flights"), [DIRECTION],
        "Flights that were accepted";
    SWAP_SETTLED = Kind::Counter, "kv_swap_settled", Some("flights"), [DIRECTION, OUTCOME],
        "Flights that are over";
    SWAP_BYTES = Kind::Counter, "kv_swap_payload", Some("bytes"), [DIRECTION],
        "Payload that arrived";
    SWAP_CANCELLED = Kind::Counter, "kv_swap_cancelled", Some("flights"), [],
        "Flights whose group was cancelled meanwhile";
    SWAP_REFUSALS = Kind::Counter, "kv_swap_backpressure", Some("refusals"),
        [label("cause", &["host_slots", "inflight_bytes"])],
        "Swaps that were refused and changed nothing";
    SWAP_FAULTS = Kind::Counter, "kv_swap_copy", Some("faults"),
        [label("fault", &[
            "closed",
            "digest_mismatch",
            "device",
            "fence_timeout",
            "broken_contract",
            "panicked",
            "injected",
            "other"
        ])],
        "Flights that did not end as done, by reason";
    CHECKSUM_FAILURES = Kind::Counter, "kv_swap_checksum", Some("failures"), [],
        "Host bytes that did not have their digest and were kept from the GPU";
    STALE_COMPLETIONS = Kind::Counter, "kv_swap_stale", Some("completions"), [],
        "Completions that were dead, repeated or contradictory";
    CLEAN_KEPT = Kind::Counter, "kv_swap_clean_kept", Some("blocks"), [],
        "Blocks that did not move because the host had their bytes already";
    CLEAN_RECLAIMED = Kind::Counter, "kv_swap_clean_reclaimed", Some("slots"), [],
        "Clean copies that were given up because slots were needed";
    COPY_SECONDS = Kind::Histogram(STEP_SECONDS), "kv_swap_copy", Some("seconds"),
        [DIRECTION, OUTCOME],
        "From the request of a swap to the end of its last copy";
    NOTICE_SECONDS = Kind::Histogram(SHORT_SECONDS), "kv_swap_notice", Some("seconds"),
        [DIRECTION],
        "From the end of a swap's last copy to the moment at which the engine heard of it";
    FLIGHT_PAYLOAD = Kind::Histogram(FLIGHT_BYTES), "kv_swap_flight", Some("bytes"), [DIRECTION],
        "Payload of a flight that is done";

    // The engine.
    QUEUES = Kind::Gauge, "kv_queued", Some("requests"),
        [label("queue", &["waiting", "running", "swapped", "recompute_pending"])],
        "Requests by where they are";
    REQUESTS_ACCEPTED = Kind::Counter, "kv_accepted", Some("requests"), [],
        "Requests that the engine took";
    REQUESTS_REJECTED = Kind::Counter, "kv_rejected", Some("requests"), [],
        "Requests that the engine refused at the door";
    REQUESTS_ENDED = Kind::Counter, "kv_ended", Some("requests"), [ENDED],
        "Requests that are over";
    TOKENS = Kind::Counter, "kv_generated", Some("tokens"), [],
        "Tokens that were emitted";
    PREFILL_TOKENS = Kind::Counter, "kv_prefilled", Some("tokens"), [],
        "Prompt tokens that were computed for the first time";
    RECOMPUTED_TOKENS = Kind::Counter, "kv_recomputed", Some("tokens"), [],
        "Tokens that were computed again after a preemption";
    PREEMPTIONS = Kind::Counter, "kv_preempted", Some("groups"),
        [label("by", &["swap", "recompute"])],
        "Groups that had to leave the GPU";
    RESUMED = Kind::Counter, "kv_resumed", Some("groups"), [],
        "Groups that came back from the host";
    STALLED_ROWS = Kind::Counter, "kv_stalled", Some("rows"), [],
        "Rows of running sequences that sat out a step because no block was free";
    STEPS = Kind::Counter, "kv_engine", Some("steps"), [],
        "Steps that were executed";
    STUCK_PASSES = Kind::Counter, "kv_engine_stuck", Some("passes"), [],
        "Passes after which nothing could ever have happened, always 0 unless there is a bug";
    DROPPED_EVENTS = Kind::Counter, "kv_engine_dropped", Some("events"), [],
        "Events that were not collected in time, so that other series miss them";
    SWAP_GIVEN_UP = Kind::Gauge, "kv_swap_given_up", Some("engines"), [],
        "1 once so much memory is lost that the engine swaps nothing any more, else 0";
    STEP_SPAN = Kind::Histogram(STEP_SECONDS), "kv_engine_step", Some("seconds"), [],
        "One step, from the schedule to the tokens";
    HOST_STALL = Kind::Histogram(SHORT_SECONDS), "kv_engine_host_stall", Some("seconds"), [],
        "Time in a step during which the engine thread was held up by swapping";

    // Requests.
    QUEUE_SECONDS = Kind::Histogram(LONG_SECONDS), "kv_request_queue", Some("seconds"), [],
        "From acceptance to a place on the GPU";
    FIRST_TOKEN_SECONDS = Kind::Histogram(LONG_SECONDS), "kv_request_first_token",
        Some("seconds"), [],
        "From acceptance to the first token";
    INTER_TOKEN_SECONDS = Kind::Histogram(STEP_SECONDS), "kv_request_inter_token",
        Some("seconds"), [],
        "Between two tokens of a choice, pauses included";
    PAUSE_SECONDS = Kind::Histogram(LONG_SECONDS), "kv_request_pause", Some("seconds"), [],
        "From being picked as a victim to the next token";
    REQUEST_SECONDS = Kind::Histogram(LONG_SECONDS), "kv_request_duration", Some("seconds"),
        [ENDED],
        "From acceptance to the end";
}

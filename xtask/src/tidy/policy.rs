//! What the rules allow. A change here is a change of the design, and reviewed as one.

/// What one crate of the workspace may depend on.
#[derive(Debug)]
pub(super) struct Allowed {
    pub(super) name: &'static str,
    /// Crates of the workspace: the arrows of `docs/architecture.md`.
    pub(super) workspace: &'static [&'static str],
    /// Further crates of the workspace, for its tests only.
    pub(super) workspace_dev: &'static [&'static str],
    /// Crates from outside, for the crate itself.
    pub(super) external: &'static [&'static str],
    /// Further crates from outside, for its tests, benches and build script only.
    pub(super) external_dev: &'static [&'static str],
}

/// All crates of the workspace.
pub(super) const CRATES: &[Allowed] = &[
    Allowed {
        name: "kv-core",
        workspace: &[],
        workspace_dev: &[],
        external: &["bytemuck", "parking_lot", "thiserror", "xxhash-rust"],
        external_dev: &["criterion", "expect-test", "proptest", "trybuild"],
    },
    Allowed {
        name: "kv-store-ext",
        workspace: &["kv-core"],
        workspace_dev: &[],
        external: &["thiserror"],
        external_dev: &[],
    },
    Allowed {
        name: "kv-telemetry",
        workspace: &["kv-core"],
        workspace_dev: &[],
        external: &["prometheus-client"],
        external_dev: &["expect-test"],
    },
    Allowed {
        name: "kv-transfer-cuda",
        workspace: &["kv-core"],
        workspace_dev: &[],
        external: &[
            "crossbeam-channel",
            "cudarc",
            "parking_lot",
            "rustix",
            "serde_json",
            "thiserror",
        ],
        external_dev: &["proptest", "xxhash-rust"],
    },
    Allowed {
        name: "kv-scheduler",
        workspace: &["kv-core"],
        // Its scenarios are played on the oracle.
        workspace_dev: &["kv-model"],
        external: &["thiserror"],
        external_dev: &["criterion", "humantime", "serde", "serde_json", "xflags"],
    },
    Allowed {
        name: "kv-model",
        workspace: &["kv-core", "kv-scheduler", "kv-transfer-cuda"],
        workspace_dev: &[],
        external: &[
            "half",
            "minijinja",
            "minijinja-contrib",
            "parking_lot",
            "serde",
            "thiserror",
            "tokenizers",
            "xxhash-rust",
        ],
        external_dev: &["proptest"],
    },
    Allowed {
        name: "kv-server",
        workspace: &[
            "kv-core",
            "kv-model",
            "kv-scheduler",
            "kv-store-ext",
            "kv-telemetry",
            "kv-transfer-cuda",
        ],
        workspace_dev: &[],
        external: &[
            "axum",
            "bytes",
            "bytesize",
            "clap",
            "crossbeam-channel",
            "futures-util",
            "http-body-util",
            "hyper",
            "hyper-util",
            "parking_lot",
            "rlimit",
            "serde",
            "serde_json",
            "thiserror",
            "tokio",
            "toml",
            "tracing",
            "tracing-subscriber",
        ],
        external_dev: &["expect-test"],
    },
    Allowed {
        name: "xtask",
        workspace: &[],
        workspace_dev: &[],
        external: &[
            "anyhow",
            "serde_json",
            "sha2",
            "signal-hook",
            "ureq",
            "xflags",
            "xxhash-rust",
        ],
        external_dev: &[],
    },
];

/// Licences that code from outside may have; any one choice of an `OR` is enough.
pub(super) const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Where `unsafe` may be at all. Each file that has some is accounted for in [`UNSAFE_LEDGER`].
pub(super) const UNSAFE_PLACES: &[&str] = &["kv-model/src/llama/kernels.rs", "kv-transfer-cuda"];

/// The page that accounts for every file with `unsafe`, in a section with its path as heading.
pub(super) const UNSAFE_LEDGER: &str = "docs/unsafe.md";

/// Folders of programs that must not compile. Their expected messages show what stands on which
/// line, and their names say what they are for: they need no header.
pub(super) const MISUSE: &[&str] = &["kv-core/tests/ui"];

/// Most lines of a source file.
pub(super) const LINES_MAX: usize = 900;

/// Folders in which time is an argument and nothing is random or runs by itself.
pub(super) const PURE: &[&str] = &["kv-core/src", "kv-scheduler/src"];

/// Inside [`PURE`]: what stands behind the features `host` and `testing`.
pub(super) const IMPURE: &[&str] = &[
    "kv-core/src/host",
    "kv-core/src/host.rs",
    "kv-core/src/testing",
    "kv-core/src/testing.rs",
];

/// What pure code doesn't name.
pub(super) const IMPURE_WORDS: &[&str] = &[
    "Instant",
    "SystemTime",
    "getrandom",
    "rand",
    "std::fs",
    "std::io",
    "std::net",
    "std::sync",
    "std::thread",
    "thread_local",
    "unsafe",
];

/// The invariants, as `docs/invariants.md` numbers them.
pub(super) const INVARIANTS: core::ops::RangeInclusive<u32> = 1..=17;

/// The page that states [`INVARIANTS`].
pub(super) const INVARIANTS_PAGE: &str = "docs/invariants.md";

/// Acceptance scenarios that must have a test, as `docs/testing.md` numbers them.
pub(super) const SCENARIOS: &[u32] = &[1, 2, 4, 7, 8, 9, 10, 12, 13, 16, 17, 18];

/// Code that stands for code that isn't there, or a test that doesn't run.
pub(super) const UNFINISHED: &[&str] = &["#[ignore", "todo!", "unimplemented!"];

/// Places of one machine. Put together from parts, so that this file passes its own rule.
pub(super) const MACHINE_PATHS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Us", "ers/"),
    concat!("/tm", "p/"),
];

/// Hosts of package registries: builds and texts name packages, not where they come from.
pub(super) const REGISTRY_HOSTS: &[&str] = &[
    concat!("crates", ".io"),
    concat!("py", "pi.org"),
    concat!("python", "hosted.org"),
    concat!("npm", "js.org"),
    concat!("npm", "js.com"),
    concat!("debian", ".org"),
];

//! The command line.

xflags::xflags! {
    /// Repository tasks.
    cmd xtask {
        /// Everything that CI does, in order; stops at the first failure.
        cmd ci {}

        /// Builds the API documentation with warnings as errors, and checks the links of all pages.
        cmd docs {}

        /// Brings the default model into `models/`, once.
        cmd model {}

        /// Runs the simulated worlds of kv-scheduler.
        cmd sim {
            /// Replay this one world.
            optional --seed seed: u64
            /// How many worlds to run.
            optional --worlds worlds: u64
            /// Run new worlds for so long instead.
            optional --minutes minutes: u64
        }

        /// Checks the rules of this repository that the compiler does not check.
        cmd tidy {}
    }
}

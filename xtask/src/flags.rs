//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

xflags::xflags! {
    /// Repository tasks.
    cmd xtask {
        /// Everything that CI does, in order; stops at the first failure.
        cmd ci {
            /// Only the step of that name
            optional --only step: String
        }

        /// Builds the API documentation with warnings as errors, and checks the links of all pages.
        cmd docs {}

        /// What needs a GPU.
        cmd gpu {
            /// Builds the GPU tests and the benchmark as programs to carry to a machine with one
            cmd build {}
        }

        /// Brings the default model into `models/`, once.
        cmd model {}

        /// Sends the same requests to a server with ample memory and to three that are short of it,
        /// and compares every text.
        cmd pressure {
            /// A GGUF file, or `oracle`. Default: the default model
            optional --model model: String
            /// How many requests. Default: 24
            optional --requests requests: u32
            /// Write the numbers to this file too
            optional --json file: PathBuf
            /// Seed of the load. Default: 1
            optional --seed seed: u64
            /// A built kv-server, instead of building one
            optional --server path: PathBuf
            /// A further flag for the servers that swap, such as `--fault-fail-copy=1,2`; one word
            repeated --server-arg arg: String
        }

        /// Turns the CUDA kernels into text that the driver compiles.
        cmd ptx {}

        /// Serves the default model on this machine's CPUs, with a KV cache of a few hundred blocks.
        cmd serve {
            /// After `--`: further flags of kv-server
            repeated args: OsString
        }

        /// Runs the engine in simulated worlds, each made by one seed.
        cmd sim {
            /// Replay this one world.
            optional --seed seed: u64
            /// How many worlds to run.
            optional --worlds worlds: u64
            /// Run new worlds for so long instead.
            optional --minutes minutes: u64
            /// Instead: plant known faults, one by one, and show that each is caught
            optional --self-test
            /// Instead: a million swap cycles in one process
            optional --soak
            /// Instead: compare policies over a trace of requests, in virtual time
            optional --trace file: PathBuf
            /// After `--`, with --trace: further flags of that comparison
            repeated args: OsString
        }

        /// Checks the rules of this repository that the compiler does not check.
        cmd tidy {}
    }
}

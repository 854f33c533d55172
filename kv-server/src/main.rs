//! OpenAI-compatible server over the swapping engine. See `kv-server --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kv_server::run()
}

//! OpenAI-compatible server over the swapping engine. See `kv-server --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kv_server::run()
}

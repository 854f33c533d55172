//! Repository tasks. `cargo xtask --help` lists them.
//!
//! Nothing in here depends on another crate of the workspace: a task starts what it needs as a
//! process, so that a broken crate can't break the tool that says so.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool talks through them"
)]

mod ci;
mod clock;
mod docs;
mod flags;
mod gpu;
mod interrupt;
mod markdown;
mod model;
mod pressure;
mod process;
mod ptx;
mod python;
mod repo;
mod serve;
mod server;
mod sim;
mod tidy;

use std::process::ExitCode;

use flags::{GpuCmd, Xtask, XtaskCmd};

fn main() -> ExitCode {
    let result = match Xtask::from_env_or_exit().subcommand {
        XtaskCmd::Ci(flags) => ci::run(&flags),
        XtaskCmd::Docs(_) => docs::run(),
        XtaskCmd::Gpu(flags) => match flags.subcommand {
            GpuCmd::Build(_) => gpu::build(),
        },
        XtaskCmd::Model(_) => model::run(),
        XtaskCmd::Pressure(flags) => pressure::run(&flags),
        XtaskCmd::Ptx(_) => ptx::run(),
        XtaskCmd::Serve(flags) => serve::run(&flags),
        XtaskCmd::Sim(flags) => sim::run(&flags),
        XtaskCmd::Tidy(_) => tidy::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! The program: reads its configuration, serves until a signal comes, says how it ended.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use tokio::runtime;

use crate::app::{Ended, Server, StartError};
use crate::assembly::AssemblyError;
use crate::config::{Config, Invocation};
use crate::shutdown::Signals;

/// The configuration is wrong.
const WRONG: u8 = 2;

/// The server could not be started, or failed.
const FAILED: u8 = 1;

/// A second signal ended the server at once: 128 and the number of SIGINT.
const INTERRUPTED: u8 = 130;

/// Threads that serve connections; the model has threads of its own.
const HTTP_THREADS: usize = 2;

/// Threads that prepare long requests.
const PREPARE_THREADS: usize = 2;

/// Runs the program with the process's arguments and environment.
#[must_use]
pub fn run() -> ExitCode {
    let environment = std::env::vars_os().filter_map(|(name, value)| {
        Some((
            name.into_string().ok()?,
            value.to_string_lossy().into_owned(),
        ))
    });
    let args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    match Config::load(args, environment) {
        Ok(Invocation::Print(text)) => {
            say(&mut io::stdout(), text.trim_end());
            ExitCode::SUCCESS
        }
        Ok(Invocation::Serve(config)) => serve(&config),
        Err(error) => fail(&error, WRONG),
    }
}

fn serve(config: &Config) -> ExitCode {
    start_log(config);
    if let Some(faults) = &config.faults {
        tracing::warn!(
            ?faults,
            "FAULT INJECTION IS ON: this server fails on purpose; don't serve people with it"
        );
    }
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let built = runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .max_blocking_threads(PREPARE_THREADS)
        .thread_name("http")
        .enable_all()
        .build();
    let runtime = match built {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error, FAILED),
    };
    let code = runtime.block_on(serve_until_signal(config));
    // What is left runs no longer than the process.
    runtime.shutdown_background();
    code
}

async fn serve_until_signal(config: &Config) -> ExitCode {
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => return fail(&error, FAILED),
    };
    let server = tokio::select! {
        server = Server::start(config) => server,
        _ = signals.next() => return ExitCode::from(INTERRUPTED),
    };
    let server = match server {
        Ok(server) => server,
        Err(error) => return fail(&error, exit_code(&error)),
    };
    tracing::info!("no GPU is used: the GPU pool is plain memory");
    say(
        &mut io::stdout(),
        &format!("listening on http://{}", server.address()),
    );
    let name = signals.next().await;
    tracing::info!(
        signal = name,
        grace_s = config.shutdown_grace.as_secs_f64(),
        "shutting down: running requests may finish; a second signal ends at once"
    );
    tokio::select! {
        ended = server.shut_down(config.shutdown_grace) => {
            match ended {
                Ended::Finished => tracing::info!("every request was finished"),
                Ended::GaveUp => tracing::warn!("requests were given up; their clients were told"),
                Ended::LeftBehind => tracing::error!("the engine was left in the middle of a step"),
            }
            ExitCode::SUCCESS
        }
        _ = signals.next() => ExitCode::from(INTERRUPTED),
    }
}

/// Whether the configuration or the world is to blame.
const fn exit_code(error: &StartError) -> u8 {
    match error {
        StartError::Assembly(
            AssemblyError::Flag { .. } | AssemblyError::Model { .. } | AssemblyError::Settings(_),
        ) => WRONG,
        StartError::Assembly(AssemblyError::Backend(_) | AssemblyError::Thread(_))
        | StartError::Listen { .. } => FAILED,
    }
}

fn start_log(config: &Config) {
    let filter = tracing_subscriber::EnvFilter::new(&config.log);
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    if log.try_init().is_err() {
        say(
            &mut io::stderr(),
            "kv-server: somebody else has set up a log already",
        );
    }
}

/// Says what is wrong, with its causes, and gives the exit code.
fn fail(error: &dyn Error, code: u8) -> ExitCode {
    let mut text = format!("kv-server: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Some errors say their cause themselves.
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    say(&mut io::stderr(), &text);
    ExitCode::from(code)
}

/// Writes a line; a closed pipe is nobody's problem.
fn say(to: &mut dyn Write, line: &str) {
    if writeln!(to, "{line}").and_then(|()| to.flush()).is_err() {
        tracing::debug!("nobody reads what the server says");
    }
}

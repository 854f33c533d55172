//! Running other programs, each for a limited time.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How long a program that was told to end may take to do so.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Runs a program that writes to our own output.
///
/// # Errors
///
/// If it can't be started, ends with another status than 0, or runs longer than `limit`.
pub(crate) fn run(command: &mut Command, limit: Duration) -> Result<()> {
    let name = describe(command);
    let child = command
        .spawn()
        .with_context(|| format!("starting `{name}`"))?;
    check(&name, wait(child, &name, limit)?)
}

/// Runs a program and returns what it wrote to its standard output.
///
/// # Errors
///
/// As [`run`], or if the output is not UTF-8.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<String> {
    let name = describe(command);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting `{name}`"))?;
    let mut stdout = child.stdout.take().context("a piped output is there")?;
    let reader = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    check(&name, wait(child, &name, limit)?)?;
    let text = reader
        .join()
        .ok()
        .with_context(|| format!("reading from `{name}`"))?;
    text.with_context(|| format!("reading from `{name}`"))
}

/// Whether a program can be started and says that all is well.
pub(crate) fn works(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    run(quiet, Duration::from_secs(60)).is_ok()
}

/// What a process can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// To end at once.
    Kill,
    /// To end in good order.
    Terminate,
}

/// Sends a signal to a process, which may be gone already.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let name = match signal {
        Signal::Kill => "KILL",
        Signal::Terminate => "TERM",
    };
    // The shell's own `kill`: a program of that name is not on every machine, and a failure means
    // that the process is gone, which is what was asked for.
    let kill = format!("kill -{name} {pid} 2>/dev/null || true");
    if let Err(error) = Command::new("sh").arg("-c").arg(kill).status() {
        eprintln!("process {pid} could not be sent SIG{name}: {error}");
    }
}

/// The command line, as a person would type it.
pub(crate) fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

fn check(name: &str, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{name}` failed: {status}");
    }
    Ok(())
}

fn wait(mut child: Child, name: &str, limit: Duration) -> Result<ExitStatus> {
    let pid = child.id();
    let (sender, ended) = mpsc::channel();
    let waiter = thread::spawn(move || sender.send(child.wait()));
    match ended.recv_timeout(limit) {
        Ok(status) => status.with_context(|| format!("waiting for `{name}`")),
        Err(RecvTimeoutError::Timeout) => {
            signal(pid, Signal::Terminate);
            let gone = ended.recv_timeout(LAST_WORDS).is_ok();
            let after = if gone {
                "was ended"
            } else {
                "did not end when told to"
            };
            bail!("`{name}` took more than {} s and {after}", limit.as_secs())
        }
        Err(RecvTimeoutError::Disconnected) => {
            bail!("waiting for `{name}`: {:?}", waiter.join().err())
        }
    }
}

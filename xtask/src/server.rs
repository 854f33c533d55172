//! A `kv-server` as a child process: started, watched, stopped, and killed on every other way out.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::process::Signal;
use crate::{interrupt, process, repo};

/// Building it may take this long.
const BUILD_LIMIT: Duration = Duration::from_mins(30);

/// Loading a model and opening a port may take this long.
const START_LIMIT: Duration = Duration::from_mins(2);

/// How many of its last lines are kept.
const LOG_LINES: usize = 60;

/// What stands before the address in the first line of its output.
const ADDRESS: &str = "listening on ";

/// How the server is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// For use and for measurements.
    Release,
    /// As the tests are built, so that CI builds nothing for it alone.
    Test,
}

/// Builds the server and says where it is.
///
/// # Errors
///
/// If it can't be built.
pub(crate) fn build(profile: Profile) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(repo::root())
        .args(["build", "--quiet", "--locked", "--bin", "kv-server"]);
    let folder = match profile {
        Profile::Release => {
            cargo.args(["--release", "--package", "kv-server"]);
            "release"
        }
        Profile::Test => {
            cargo.args(["--profile", "test", "--workspace", "--all-features"]);
            "debug"
        }
    };
    process::run(&mut cargo, BUILD_LIMIT)?;
    Ok(repo::target().join(folder).join("kv-server"))
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    base: String,
    log: Log,
    /// Ends when the process has closed its outputs.
    output: Receiver<Line>,
}

/// A line of the standard output.
type Line = String;

/// The last lines that it wrote, oldest first.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<VecDeque<String>>>);

impl Log {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines
            .iter()
            .fold(String::new(), |text, line| text + "\n    " + line)
    }
}

impl Server {
    /// Starts it on a free port of the loopback address and waits until it listens.
    ///
    /// # Errors
    ///
    /// If it ends or says nothing in time; its last words are in the text.
    pub(crate) fn start(program: &Path, args: &[String]) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .args(["--host", "127.0.0.1", "--port", "0"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let name = process::describe(&command);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting `{name}`"))?;
        interrupt::watch(child.id());
        let log = Log::default();
        let (sender, output) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            let sender = sender.clone();
            read_lines(stdout, log.clone(), move |line| drop(sender.send(line)));
        }
        if let Some(stderr) = child.stderr.take() {
            // Held for as long as lines may come, so that the end of `output` is the end of both.
            read_lines(stderr, log.clone(), move |_| _ = &sender);
        }
        let mut server = Self {
            child,
            base: String::new(),
            log,
            output,
        };
        server.base = server
            .wait_for_address()
            .with_context(|| format!("`{name}`"))?;
        Ok(server)
    }

    fn wait_for_address(&self) -> Result<String> {
        match self.output.recv_timeout(START_LIMIT) {
            Ok(line) => address(&line)
                .with_context(|| format!("the server's first line names no address: {line}")),
            Err(RecvTimeoutError::Timeout) => {
                bail!(
                    "no address within {} s{}",
                    START_LIMIT.as_secs(),
                    self.log()
                )
            }
            Err(RecvTimeoutError::Disconnected) => bail!("ended at once{}", self.log()),
        }
    }

    /// `http://127.0.0.1:PORT`.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Its last lines, for a message about something that went wrong.
    pub(crate) fn log(&self) -> String {
        format!("\n  last lines of the server:{}", self.log.text())
    }

    /// Asks it to end in good order.
    ///
    /// # Errors
    ///
    /// If it doesn't end within `limit`, or with another status than 0.
    pub(crate) fn stop(mut self, limit: Duration) -> Result<()> {
        process::signal(self.child.id(), Signal::Terminate);
        loop {
            match self.output.recv_timeout(limit) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!(
                        "the server was still there {} s after SIGTERM",
                        limit.as_secs()
                    )
                }
            }
        }
        interrupt::forget(self.child.id());
        let status = self.child.wait().context("waiting for the server")?;
        if !status.success() {
            return Err(anyhow!("the server ended with {status}{}", self.log()));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        interrupt::forget(self.child.id());
        // Both do nothing if `stop` has reaped it.
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("the server could not be killed: {error}");
        }
    }
}

/// The base of all addresses, from the first line of the server's output.
pub(crate) fn address(line: &str) -> Option<String> {
    let (_, address) = line.split_once(ADDRESS)?;
    let address = address.split_whitespace().next()?.trim_end_matches('/');
    address.starts_with("http://").then(|| address.to_owned())
}

/// Copies lines into the log, and hands them on, until the other end is closed.
fn read_lines(from: impl Read + Send + 'static, log: Log, hand_on: impl Fn(Line) + Send + 'static) {
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            log.push(line.clone());
            hand_on(line);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_in_the_first_line() {
        let expected = Some("http://127.0.0.1:8000".to_owned());
        assert_eq!(address("listening on http://127.0.0.1:8000"), expected);
        assert_eq!(
            address("listening on http://127.0.0.1:8000/ (oracle)"),
            expected
        );
        assert_eq!(address("ready"), None);
    }

    #[test]
    fn a_program_that_ends_at_once_is_reported_with_its_words() {
        let error = Server::start(Path::new("sh"), &[]).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("ended at once") && text.contains("host"),
            "{text}"
        );
    }
}

//! `cargo xtask serve`: the default model, a release build, and the server in the foreground.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::flags::Serve;
use crate::interrupt::OnSignal;
use crate::server::{self, Profile};
use crate::{interrupt, model};

/// What differs from the server's own defaults; a flag of the same name after `--` replaces one.
///
/// The pool holds some 5,000 tokens, so that a handful of long chats already swaps.
const DEFAULTS: [[&str; 2]; 2] = [["--kv-swap-mode", "async"], ["--gpu-blocks", "320"]];

/// Runs the server until it ends by itself or is told to.
///
/// # Errors
///
/// If the model can't be brought, the server can't be built, or it ends with an error.
pub(crate) fn run(flags: &Serve) -> Result<()> {
    let mut command = Vec::new();
    if !has_flag(&flags.args, "--model") {
        model::run()?;
        command.extend(["--model".into(), model::path().into_os_string()]);
    }
    for [flag, value] in DEFAULTS {
        if !has_flag(&flags.args, flag) {
            command.extend([OsString::from(flag), value.into()]);
        }
    }
    command.extend(flags.args.iter().cloned());
    println!("serve: building kv-server");
    let program = server::build(Profile::Release)?;
    interrupt::forward_to_children(OnSignal::Terminate)?;
    let mut child = Command::new(&program)
        .args(&command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    interrupt::watch(child.id());
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            println!("{line}");
            if let Some(base) = server::address(&line) {
                println!("{}", invitation(&base));
            }
        }
    }
    interrupt::forget(child.id());
    let status = child.wait().context("waiting for kv-server")?;
    if !status.success() {
        bail!("kv-server ended with {status}");
    }
    Ok(())
}

fn has_flag(args: &[OsString], flag: &str) -> bool {
    args.iter().filter_map(|arg| arg.to_str()).any(|arg| {
        arg.strip_prefix(flag)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// A command to paste into another terminal.
fn invitation(base: &str) -> String {
    let body = r#"{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0}"#;
    format!(
        "\nTry it from another terminal:\n\n\
         curl -s {base}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n\
         Ctrl-C ends the server; it finishes or tells every client first.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_found_in_both_spellings() {
        let args = ["--model=oracle", "--gpu-blocks", "64"].map(OsString::from);
        assert!(has_flag(&args, "--model"));
        assert!(has_flag(&args, "--gpu-blocks"));
        assert!(!has_flag(&args, "--gpu"));
        assert!(!has_flag(&args, "--kv-swap-mode"));
    }
}

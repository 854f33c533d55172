//! Measures the CUDA backend against the link of the machine it runs on.
//!
//! `kv-transfer-cuda-bench [--json FILE] [--only SECTION,…] [--commit TEXT]`; sections are
//! `line`, `grid`, `small`, `submit`, `wake`, `pool`, `peer`, `decode`, `priority` and `tune`, all
//! but the last two by default. Every ratio is to a contiguous copy measured in the same run.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool talks through them"
)]

mod contiguous;
mod decode;
mod grid;
mod report;
mod small;
mod stand;

use std::fs;

use kv_transfer_cuda::Device;

use report::Report;

type Failure = Box<dyn std::error::Error>;

const SECTIONS: [&str; 8] = [
    "line", "grid", "small", "submit", "wake", "pool", "peer", "decode",
];

struct Flags {
    json: Option<String>,
    commit: String,
    sections: Vec<String>,
}

fn flags() -> Result<Flags, Failure> {
    let mut flags = Flags {
        json: None,
        commit: String::from("unknown"),
        sections: SECTIONS.iter().map(|name| String::from(*name)).collect(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--json" => flags.json = Some(value),
            "--commit" => flags.commit = value,
            "--only" => flags.sections = value.split(',').map(String::from).collect(),
            _ => return Err(format!("unknown option {word}").into()),
        }
    }
    Ok(flags)
}

fn main() -> Result<(), Failure> {
    let flags = flags()?;
    let device = Device::open(0)?;
    let mut report = Report::new(device.facts(), &flags.commit);
    let line = contiguous::line(&device)?;
    report.line(&line);
    for section in &flags.sections {
        eprintln!("measuring {section}");
        match section.as_str() {
            "line" => {}
            "grid" => grid::grid(&device, &line, &mut report)?,
            "small" => small::small(&device, &mut report)?,
            "submit" => small::submit(&device, &mut report)?,
            "wake" => small::wake(&device, &mut report)?,
            "pool" => small::pool(&device, &mut report)?,
            "peer" => grid::peer(&device, &mut report)?,
            "decode" => decode::decode(&device, &mut report)?,
            "priority" => decode::priority(&device, &mut report)?,
            "tune" => decode::tune(&device, &line, &mut report)?,
            other => return Err(format!("no section {other}").into()),
        }
    }
    report.print();
    if let Some(file) = flags.json {
        fs::write(file, report.json()?)?;
    }
    Ok(())
}

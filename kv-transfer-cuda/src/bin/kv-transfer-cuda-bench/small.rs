//! What concerns single commands: small groups, the cost of a submit, the wake-up, the pool.

use core::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use kv_core::{Backend, Direction, Layout, Span};
use kv_transfer_cuda::{CudaBackend, CudaConfig, Device, GpuMemory, Notice, StepFences};
use serde_json::json;

use super::Failure;
use super::contiguous::{Noticed, watch};
use super::report::{Report, median, quantile};
use super::stand::{Slots, Stand, clock};

const MIB: u64 = 1 << 20;

/// Groups of P4: payload, blocks, rows of a block.
const GROUPS: [(u64, u32, u32); 4] = [
    (MIB, 16, 32),
    (2 * MIB, 1, 32),
    (4 * MIB, 64, 32),
    (32 * MIB, 512, 32),
];

const REPEATS: usize = 200;

/// Small groups end to end beside one contiguous copy of as many bytes.
pub(crate) fn small(device: &Device, report: &mut Report) -> Result<(), Failure> {
    println!(
        "\nsmall groups, us p50/p99: payload, blocks | direction slots notice | swap | contiguous"
    );
    for (bytes, blocks, rows) in GROUPS {
        let values = u32::try_from(bytes / u64::from(blocks) / u64::from(rows) / 64)?;
        let line = Noticed::new(device, bytes)?;
        for notice in [Notice::Sleep, Notice::SpinBriefly { micros_max: 200 }] {
            let pool = Layout::stacked(rows, blocks * 4, 16, 1, values, 2)?;
            let mut config = CudaConfig::new(blocks * 4);
            config.notice = notice;
            let mut stand = Stand::new(device, pool, &config)?;
            for slots in [Slots::InARow, Slots::Shuffled] {
                for direction in [Direction::Out, Direction::In] {
                    let [mut swap, mut copy] = [const { Vec::new() }; 2];
                    for _ in 0..REPEATS {
                        copy.push(line.measure(&[direction], bytes)?);
                        let moves = stand.moves(blocks, slots);
                        let command = stand.command(direction, &moves);
                        swap.push(stand.measure(vec![command])?);
                    }
                    let ratio = median(&mut swap) / median(&mut copy);
                    let us = |samples: &mut [f64], share| quantile(samples, share) / 1e3;
                    println!(
                        "{:>3} MiB {blocks:>4} | {direction:?} {slots:?} {notice:?} | \
                         {:.1}/{:.1} | {:.1}/{:.1} | x{ratio:.3}",
                        bytes / MIB,
                        us(&mut swap, 0.5),
                        us(&mut swap, 0.99),
                        us(&mut copy, 0.5),
                        us(&mut copy, 0.99),
                    );
                    report.row(
                        "small",
                        &json!({
                            "bytes": bytes, "blocks": blocks,
                            "direction": format!("{direction:?}"),
                            "slots": format!("{slots:?}"), "notice": format!("{notice:?}"),
                            "swap_p50_us": us(&mut swap, 0.5), "swap_p99_us": us(&mut swap, 0.99),
                            "copy_p50_us": us(&mut copy, 0.5), "copy_p99_us": us(&mut copy, 0.99),
                        }),
                    );
                    if notice == Notice::Sleep {
                        let limit = if bytes > 4 * MIB { 1.08 } else { 1.25 };
                        let what = format!(
                            "{} MiB, {blocks} blocks, {direction:?}, {slots:?}",
                            bytes / MIB
                        );
                        report.at_most("P4", what, ratio, limit);
                    }
                }
            }
        }
    }
    Ok(())
}

/// What a submit costs the calling thread: 512 MiB in 256 blocks.
pub(crate) fn submit(device: &Device, report: &mut Report) -> Result<(), Failure> {
    let pool = Layout::stacked(32, 256, 16, 8, 128, 2)?;
    let mut stand = Stand::new(device, pool, &CudaConfig::new(256))?;
    for slots in [Slots::InARow, Slots::Shuffled] {
        for direction in [Direction::Out, Direction::In] {
            let mut samples = Vec::new();
            for _ in 0..100 {
                let moves = stand.moves(256, slots);
                let command = stand.command(direction, &moves);
                let start = clock();
                stand.submit(command)?;
                samples.push(start.elapsed().as_nanos() as f64 / 1e3);
                stand.wait(1)?;
            }
            let (p50, p99) = (median(&mut samples), quantile(&mut samples, 0.99));
            println!("submit of 512 MiB, {direction:?}, {slots:?}: {p50:.1}/{p99:.1} us p50/p99");
            report.row(
                "submit",
                &json!({
                    "direction": format!("{direction:?}"), "slots": format!("{slots:?}"),
                    "p50_us": p50, "p99_us": p99,
                }),
            );
            let what = format!("submit of 512 MiB, {direction:?}, {slots:?}, us p50");
            report.at_most("P5", what, p50, 50.0);
        }
    }
    Ok(())
}

/// From one thread waking another to that one running: what no way of noticing can beat.
fn unpark_floor() -> Result<[f64; 2], Failure> {
    let mut samples = Vec::new();
    for _ in 0..500 {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let sleeper = thread::spawn(move || {
            thread::park();
            let _told = sender.send(clock());
        });
        // Long enough for it to be asleep, as the engine is.
        let begun = clock();
        while begun.elapsed().as_micros() < 300 {
            std::hint::spin_loop();
        }
        let rung = clock();
        sleeper.thread().unpark();
        let awake = receiver.recv()?;
        sleeper.join().map_err(|_| "the sleeper died")?;
        samples.push(awake.saturating_duration_since(rung).as_nanos() as f64 / 1e3);
    }
    Ok([median(&mut samples), quantile(&mut samples, 0.99)])
}

/// From the last byte being on the host to the engine thread seeing the completion.
///
/// Another thread spins on the last word of the slot and notes when it changes.
pub(crate) fn wake(device: &Device, report: &mut Report) -> Result<(), Failure> {
    let [p50, p99] = unpark_floor()?;
    println!("one thread waking another: {p50:.1}/{p99:.1} us p50/p99");
    report.row("unpark", &json!({"p50_us": p50, "p99_us": p99}));
    for notice in [Notice::Sleep, Notice::SpinBriefly { micros_max: 200 }] {
        let pool = Layout::stacked(32, 64, 16, 1, 256, 2)?;
        let bytes = usize::try_from(pool.block_bytes())?;
        let mut config = CudaConfig::new(64);
        config.notice = notice;
        let mut stand = Stand::new(device, pool, &config)?;
        let mut samples = Vec::new();
        for round in 0..500u64 {
            let moves = stand.moves(1, Slots::InARow);
            let content = (round + 1).to_ne_bytes().repeat(bytes / 8);
            stand.memory.write_block(moves[0].block, &content)?;
            let last = stand.backend.slot_address(moves[0].slot) + bytes as u64 - 8;
            let watcher = thread::spawn(move || watch(last, round + 1));
            // The watcher is up before the copy starts: it takes some microseconds.
            let begun = clock();
            while begun.elapsed().as_micros() < 200 {
                std::hint::spin_loop();
            }
            let command = stand.command(Direction::Out, &moves);
            stand.submit(command)?;
            stand.wait(1)?;
            let seen = clock();
            let arrived = watcher.join().map_err(|_| "the watcher died")?;
            samples.push(seen.saturating_duration_since(arrived).as_nanos() as f64 / 1e3);
        }
        let (p50, p99) = (median(&mut samples), quantile(&mut samples, 0.99));
        println!("wake-up, {notice:?}: {p50:.1}/{p99:.1} us p50/p99");
        report.row(
            "wake",
            &json!({"notice": format!("{notice:?}"), "p50_us": p50, "p99_us": p99}),
        );
        report.at_most(
            "P6",
            format!("copy done to engine sees it, {notice:?}, us p99"),
            p99,
            50.0,
        );
    }
    Ok(())
}

/// How long a pinned pool of 16 GiB takes, twice: a virtual machine may get its own memory only
/// when it is first touched.
pub(crate) fn pool(device: &Device, report: &mut Report) -> Result<(), Failure> {
    pool_once(device, report, "first time in this machine")?;
    wait_given_back()?;
    pool_once(device, report, "second time")?;
    wait_given_back()
}

/// Waits until the pool before, which is given back on a thread of its own, is gone.
fn wait_given_back() -> Result<(), Failure> {
    let begun = clock();
    while begun.elapsed().as_secs() < 30 {
        let text = std::fs::read_to_string("/proc/self/statm")?;
        let pages: u64 = text.split_whitespace().nth(1).ok_or("no field")?.parse()?;
        if pages * 4096 < 4096 * MIB {
            return Ok(());
        }
        thread::yield_now();
    }
    Err("a pool is not given back".into())
}

fn pool_once(device: &Device, report: &mut Report, attempt: &str) -> Result<(), Failure> {
    let layout = Layout::stacked(32, 64, 16, 8, 128, 2)?;
    let memory = Arc::new(GpuMemory::allocate(device, layout)?);
    let mut config = CudaConfig::new(8_192);
    config.arena.touch_threads = NonZeroUsize::new(16).ok_or("16 is not 0")?;
    let (free_before, _) = device.memory_bytes()?;
    let start = clock();
    let fences = Arc::new(StepFences::new(device)?);
    let backend = CudaBackend::new(memory, fences, &config)?;
    let first = start.elapsed().as_secs_f64();
    let slots_first = backend.slots_ready();
    backend.wait_slots(Span::from_secs(120))?;
    let whole = start.elapsed().as_secs_f64();
    let (free_after, _) = device.memory_bytes()?;
    let taken = free_before.saturating_sub(free_after);
    println!(
        "pool of 16 GiB: {slots_first} slots after {first:.3} s, all after {whole:.3} s; staging \
         {} MiB, GPU memory taken {} MiB",
        backend.staging_bytes() / MIB,
        taken / MIB
    );
    println!("of this: {:?}", backend.pool_times());
    println!("costs found at start: {:?}", backend.findings());
    report.row(
        "pool",
        &json!({
            "first_slots": slots_first, "first_s": first, "whole_s": whole,
            "staging_bytes": backend.staging_bytes(), "gpu_bytes_taken": taken,
            "times": format!("{:?}", backend.pool_times()),
            "findings": format!("{:?}", backend.findings()),
        }),
    );
    report.at_most(
        "P7",
        format!("16 GiB pinned pool ready, s, {attempt}"),
        whole,
        1.0,
    );
    let mib = config.staging_bytes() as f64 / MIB as f64;
    report.at_most(
        "P8",
        String::from("device memory for staging, MiB"),
        mib,
        96.0,
    );
    Ok(())
}

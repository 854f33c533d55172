//! Scattered swaps of every size beside the line, and the cells of a peer's table.

use std::collections::BTreeMap;

use kv_core::{Direction, Layout};
use kv_transfer_cuda::{CudaConfig, Device};
use serde_json::json;

use super::Failure;
use super::contiguous::{Line, Noticed};
use super::report::{Report, gb_per_s, median, quantile};
use super::stand::{Slots, Stand};

/// Payload of a command at most, bytes.
const BYTES_MAX: u64 = 1 << 30;

/// From this payload on the rate targets hold, bytes.
const TARGET_BYTES_MIN: u64 = 64 << 20;

const ROWS: [u32; 5] = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 1 << 20];
const BLOCKS: [u32; 6] = [1, 4, 16, 64, 256, 1_024];

/// A layout with 16 tokens per block and rows of that length.
fn layout(kind: &str, row_bytes: u32, blocks: u32) -> Result<Layout, Failure> {
    Ok(match kind {
        "stacked" => Layout::stacked(32, blocks, 16, 1, row_bytes / 64, 2)?,
        "per layer" => Layout::per_layer(32, blocks, 16, 1, row_bytes / 32, 2)?,
        _ => Layout::latent(61, blocks, 16, 576, 2)?,
    })
}

/// Blocks of the largest command for a block size, out of the list.
fn largest(block_bytes: u64) -> u32 {
    let fits = |blocks: &&u32| u64::from(**blocks) * block_bytes <= BYTES_MAX;
    BLOCKS.iter().rev().find(fits).copied().unwrap_or(1)
}

/// Shares of the line in the cells that the targets are about: out, in, both.
type Shares = [Vec<f64>; 3];

/// Nanoseconds of contiguous copies by payload: out, in, both.
struct Contiguous {
    copies: Noticed,
    known: BTreeMap<u64, [f64; 3]>,
}

const WAYS: [&[Direction]; 3] = [
    &[Direction::Out],
    &[Direction::In],
    &[Direction::Out, Direction::In],
];

impl Contiguous {
    fn of(&mut self, bytes: u64) -> Result<[f64; 3], Failure> {
        if let Some(known) = self.known.get(&bytes) {
            return Ok(*known);
        }
        let mut found = [0.0; 3];
        for (found, way) in found.iter_mut().zip(WAYS) {
            let mut samples = Vec::new();
            for _ in 0..8 {
                samples.push(self.copies.measure(way, bytes)?);
            }
            *found = median(&mut samples[1..]);
        }
        self.known.insert(bytes, found);
        Ok(found)
    }
}

pub(crate) fn grid(device: &Device, line: &Line, report: &mut Report) -> Result<(), Failure> {
    println!(
        "\nGB/s end to end (share of one contiguous copy of as many bytes, noticed alike)\n\
         layout, row bytes, blocks, payload MiB, slots | out | in | both"
    );
    let copies = Noticed::new(device, BYTES_MAX)?;
    let mut contiguous = Contiguous {
        copies,
        known: BTreeMap::new(),
    };
    let mut shares = [const { [const { Vec::new() }; 3] }; 2];
    for kind in ["stacked", "per layer", "latent"] {
        for row_bytes in ROWS {
            if kind == "latent" && row_bytes != ROWS[0] {
                continue;
            }
            cells(
                device,
                (kind, row_bytes),
                (&mut contiguous, line),
                report,
                &mut shares,
            )?;
        }
    }
    for (shares, name) in shares.iter_mut().zip(["slots in a row", "slots shuffled"]) {
        let ways = ["out", "in", "both"].into_iter().zip(shares);
        for ((way, shares), (id, limit)) in ways.zip([("P1", 0.98), ("P1", 0.98), ("P2", 0.95)]) {
            for (cell, share) in [("median", median(shares)), ("worst", quantile(shares, 0.0))] {
                let what = format!("{way} sustained / line, {cell} cell, {name}");
                report.at_least(id, what, share, limit);
            }
        }
    }
    println!(
        "line of this run: {:.1} {:.1} {:.1}",
        line.out, line.back_in, line.both
    );
    Ok(())
}

fn cells(
    device: &Device,
    (kind, row_bytes): (&str, u32),
    (contiguous, line): (&mut Contiguous, &Line),
    report: &mut Report,
    shares: &mut [Shares; 2],
) -> Result<(), Failure> {
    let most = largest(layout(kind, row_bytes, 1)?.block_bytes());
    // Room for both directions at once.
    let pool = layout(kind, row_bytes, most * 2)?;
    let (block_bytes, row_bytes) = (pool.block_bytes(), pool.row_groups()[0].row_bytes);
    let mut stand = Stand::new(device, pool, &CudaConfig::new(most * 2))?;
    for blocks in BLOCKS.into_iter().filter(|&blocks| blocks <= most) {
        let bytes = u64::from(blocks) * block_bytes;
        let plain = contiguous.of(bytes)?;
        for (slots, shares) in [Slots::InARow, Slots::Shuffled]
            .into_iter()
            .zip(&mut *shares)
        {
            let nanos = cell(&mut stand, blocks, slots, bytes)?;
            let share = [0, 1, 2].map(|way| plain[way] / nanos[way]);
            let rate = [0, 1, 2].map(|way| gb_per_s(bytes * [1, 1, 2][way], nanos[way]));
            println!(
                "{kind:<9} {row_bytes:>8} {blocks:>5} {:>8.1} {slots:<8?} | \
                 {:>5.2} ({:.3}) | {:>5.2} ({:.3}) | {:>6.2} ({:.3})",
                bytes as f64 / f64::from(1 << 20),
                rate[0],
                share[0],
                rate[1],
                share[1],
                rate[2],
                share[2],
            );
            report.row(
                "grid",
                &json!({
                    "layout": kind, "row_bytes": row_bytes, "blocks": blocks, "bytes": bytes,
                    "slots": format!("{slots:?}"), "gb_per_s_out_in_both": rate,
                    "share_of_contiguous": share,
                }),
            );
            if bytes >= TARGET_BYTES_MIN {
                let sustained = sustained(&mut stand, blocks, slots, bytes, line)?;
                println!(
                    "{:>44} sustained / line | {:.3} | {:.3} | {:.3}",
                    "", sustained[0], sustained[1], sustained[2]
                );
                report.row(
                    "sustained",
                    &json!({
                        "layout": kind, "row_bytes": row_bytes, "blocks": blocks,
                        "slots": format!("{slots:?}"), "share_of_line": sustained,
                    }),
                );
                for (shares, share) in shares.iter_mut().zip(sustained) {
                    shares.push(share);
                }
            }
        }
    }
    Ok(())
}

/// Rates of commands of that size, one behind the other for about 2 GiB, as shares of the line:
/// out, in, both. Nobody sleeps, so that wake-ups are no part of it.
fn sustained(
    stand: &mut Stand,
    blocks: u32,
    slots: Slots,
    bytes: u64,
    line: &Line,
) -> Result<[f64; 3], Failure> {
    let commands = usize::try_from((BYTES_MAX * 2).div_ceil(bytes))?;
    let mut shares = [0.0; 3];
    for (share, (way, line)) in
        shares
            .iter_mut()
            .zip(WAYS.into_iter().zip([line.out, line.back_in, line.both]))
    {
        let mut samples = Vec::new();
        for _ in 0..5 {
            let moves = stand.moves(blocks * 2, slots);
            let halves: Vec<_> = moves.chunks(blocks as usize).collect();
            let mut all = Vec::new();
            for _ in 0..commands {
                // The directions move different blocks, as a machine would have it.
                for (direction, half) in way.iter().zip(&halves) {
                    all.push(stand.command(*direction, half));
                }
            }
            let total = bytes * all.len() as u64;
            samples.push(gb_per_s(total, stand.measure_awake(all)?));
        }
        *share = median(&mut samples) / line;
    }
    Ok(shares)
}

/// Nanoseconds of one command out, one in, and one of each at once.
fn cell(stand: &mut Stand, blocks: u32, slots: Slots, bytes: u64) -> Result<[f64; 3], Failure> {
    let repeats = if bytes < 16 << 20 { 25 } else { 7 };
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..=repeats {
        let moves = stand.moves(blocks * 2, slots);
        let (left, right) = moves.split_at(blocks as usize);
        let command = stand.command(Direction::Out, left);
        samples[0].push(stand.measure(vec![command])?);
        let command = stand.command(Direction::In, left);
        samples[1].push(stand.measure(vec![command])?);
        let pair = vec![
            stand.command(Direction::Out, right),
            stand.command(Direction::In, left),
        ];
        samples[2].push(stand.measure(pair)?);
    }
    // The first one warms up.
    Ok(samples.map(|mut samples| median(&mut samples[1..])))
}

/// Rows, blocks, and the best of the peer's ways out and in, GB/s, as measured on an H200.
const PEER: [(u32, u32, f64, f64); 6] = [
    (4 << 10, 16, 3.5, 3.5),
    (4 << 10, 256, 25.9, 26.6),
    (32 << 10, 1, 1.7, 1.7),
    (32 << 10, 16, 27.4, 26.9),
    (32 << 10, 256, 43.0, 43.0),
    (128 << 10, 256, 50.8, 45.8),
];

/// The cells of the peer's awaited call: 32 layers, two planes, packed host blocks.
pub(crate) fn peer(device: &Device, report: &mut Report) -> Result<(), Failure> {
    println!(
        "\nend to end, 32 layers x 2 planes: row bytes, blocks | out in GB/s | peer's awaited"
    );
    for (row_bytes, blocks, peer_out, peer_in) in PEER {
        let pool = layout("per layer", row_bytes, blocks * 2)?;
        let bytes = u64::from(blocks) * pool.block_bytes();
        let mut stand = Stand::new(device, pool, &CudaConfig::new(blocks))?;
        let [mut out, mut back_in] = [const { Vec::new() }; 2];
        for _ in 0..12 {
            let moves = stand.moves(blocks, Slots::InARow);
            let command = stand.command(Direction::Out, &moves);
            out.push(stand.measure(vec![command])?);
            let command = stand.command(Direction::In, &moves);
            back_in.push(stand.measure(vec![command])?);
        }
        let out = gb_per_s(bytes, median(&mut out[1..]));
        let back_in = gb_per_s(bytes, median(&mut back_in[1..]));
        println!(
            "{row_bytes:>8} {blocks:>5} | {out:>6.2} {back_in:>6.2} | {peer_out:>5.1} {peer_in:>5.1}"
        );
        report.row(
            "peer",
            &json!({"row_bytes": row_bytes, "blocks": blocks, "out": out, "in": back_in}),
        );
        let cell = format!("{row_bytes} B x {blocks}");
        report.at_least("KVBM", format!("out, {cell}, GB/s"), out, peer_out);
        report.at_least("KVBM", format!("in, {cell}, GB/s"), back_in, peer_in);
    }
    Ok(())
}

//! Scattered swaps of every size beside the line, and the cells of a peer's table.

use kv_core::{Direction, Layout};
use kv_transfer_cuda::{CudaConfig, Device};
use serde_json::json;

use super::Failure;
use super::contiguous::Line;
use super::report::{Report, gb_per_s, median};
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

/// The worst ratios to the line among the cells that the targets are about.
struct Worst {
    out: f64,
    back_in: f64,
    both: f64,
}

pub(crate) fn grid(device: &Device, line: &Line, report: &mut Report) -> Result<(), Failure> {
    println!("\nGB/s end to end: layout, row bytes, blocks, payload MiB | out in both | slots");
    for slots in [Slots::InARow, Slots::Shuffled] {
        let mut worst = Worst {
            out: f64::INFINITY,
            back_in: f64::INFINITY,
            both: f64::INFINITY,
        };
        for kind in ["stacked", "per layer", "latent"] {
            for row_bytes in ROWS {
                if kind == "latent" && row_bytes != ROWS[0] {
                    continue;
                }
                cells(device, line, report, (kind, row_bytes, slots), &mut worst)?;
            }
        }
        let name = if slots == Slots::InARow {
            "slots in a row"
        } else {
            "slots shuffled"
        };
        report.at_least(
            "P1",
            format!("scattered out / line, worst, {name}"),
            worst.out,
            0.98,
        );
        report.at_least(
            "P1",
            format!("scattered in / line, worst, {name}"),
            worst.back_in,
            0.98,
        );
        report.at_least(
            "P2",
            format!("both ways / duplex line, worst, {name}"),
            worst.both,
            0.95,
        );
    }
    Ok(())
}

fn cells(
    device: &Device,
    line: &Line,
    report: &mut Report,
    (kind, row_bytes, slots): (&str, u32, Slots),
    worst: &mut Worst,
) -> Result<(), Failure> {
    let one = layout(kind, row_bytes, 1)?;
    let most = largest(one.block_bytes());
    // Room for both directions at once.
    let pool = layout(kind, row_bytes, most * 2)?;
    let block_bytes = pool.block_bytes();
    let mut stand = Stand::new(device, pool, &CudaConfig::new(most * 2))?;
    for blocks in BLOCKS {
        let bytes = u64::from(blocks) * block_bytes;
        if blocks > most {
            continue;
        }
        let repeats = if bytes < 16 << 20 { 30 } else { 5 };
        let [mut out, mut back_in, mut both] = [const { Vec::new() }; 3];
        for _ in 0..=repeats {
            let moves = stand.moves(blocks * 2, slots);
            let (left, right) = moves.split_at(blocks as usize);
            let command = stand.command(Direction::Out, left);
            out.push(stand.measure(vec![command])?);
            let command = stand.command(Direction::In, left);
            back_in.push(stand.measure(vec![command])?);
            let pair = vec![
                stand.command(Direction::Out, right),
                stand.command(Direction::In, left),
            ];
            both.push(stand.measure(pair)?);
        }
        // The first one warms up.
        let rate =
            |samples: &mut Vec<f64>, factor| gb_per_s(bytes * factor, median(&mut samples[1..]));
        let (out, back_in, both) = (rate(&mut out, 1), rate(&mut back_in, 1), rate(&mut both, 2));
        println!(
            "{kind:<9} {row_bytes:>8} {blocks:>5} {:>8.1} | {out:>6.2} {back_in:>6.2} {both:>6.2} | {slots:?}",
            bytes as f64 / f64::from(1 << 20)
        );
        report.row(
            "grid",
            &json!({
                "layout": kind, "row_bytes": row_bytes, "blocks": blocks, "bytes": bytes,
                "slots": format!("{slots:?}"), "out": out, "in": back_in, "both": both,
            }),
        );
        if bytes >= TARGET_BYTES_MIN {
            worst.out = worst.out.min(out / line.out);
            worst.back_in = worst.back_in.min(back_in / line.back_in);
            worst.both = worst.both.min(both / line.both);
        }
    }
    Ok(())
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

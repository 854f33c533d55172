//! What copies do to decoding that runs at the same time: matrix products as a model has them.

#![expect(unsafe_code, reason = "calls into cuBLAS")]

use core::ffi::c_void;
use core::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use cudarc::cublas::sys as cublas;
use kv_core::testing::Rng;
use kv_core::{Direction, Layout};
use kv_transfer_cuda::{
    CudaConfig, Device, DeviceBytes, PathChoice, SlabCaching, Stream, StreamPriority,
};
use serde_json::json;

use super::Failure;
use super::contiguous::{Line, Steady};
use super::report::{Report, gb_per_s, median};
use super::stand::{Slots, Stand, clock};

const WIDTH: u64 = 8_192;
const WEIGHTS: u64 = WIDTH * WIDTH * 2;
const SETS: usize = 16;

/// Products of `WIDTH` × `WIDTH` weights with `WIDTH` × `rows` activations, brain floats.
struct Products {
    handle: cublas::cublasHandle_t,
    stream: Stream,
    weights: Vec<DeviceBytes>,
    input: DeviceBytes,
    output: DeviceBytes,
}

fn answered(call: &str, status: cublas::cublasStatus_t) -> Result<(), Failure> {
    if status == cublas::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        Ok(())
    } else {
        Err(format!("{call}: {status:?}").into())
    }
}

/// Brain floats between -1 and 1, so that the units toggle as with real weights.
fn values(bytes: u64) -> Result<Vec<u8>, Failure> {
    let mut random = vec![0u8; usize::try_from(bytes)?];
    Rng::new(3).fill(&mut random);
    for pair in random.chunks_exact_mut(2) {
        // Sign and mantissa stay random; the exponent becomes one below 1.
        pair[1] = (pair[1] & 0x80) | 0x3f;
        pair[0] &= 0x7f;
    }
    Ok(random)
}

impl Products {
    fn new(device: &Device, rows_max: u64) -> Result<Self, Failure> {
        device.bind()?;
        // SAFETY: only tries to open a library by its well-known name.
        if !unsafe { cublas::is_culib_present() } {
            return Err("cuBLAS could not be opened".into());
        }
        let stream = Stream::new(device, StreamPriority::High)?;
        let mut handle: cublas::cublasHandle_t = ptr::null_mut();
        // SAFETY: a context is current; the place is valid.
        let status = unsafe { cublas::cublasCreate_v2(&raw mut handle) };
        answered("cublasCreate", status)?;
        // SAFETY: handle and stream are alive and of one context.
        let status = unsafe { cublas::cublasSetStream_v2(handle, stream.handle().cast()) };
        answered("cublasSetStream", status)?;
        let random = values(WEIGHTS)?;
        let filled = |bytes: u64| -> Result<DeviceBytes, Failure> {
            let memory = DeviceBytes::new(device, bytes)?;
            memory.write(0, &random[..usize::try_from(bytes)?])?;
            Ok(memory)
        };
        let weights = (0..SETS)
            .map(|_| filled(WEIGHTS))
            .collect::<Result<_, _>>()?;
        let input = filled(WIDTH * rows_max * 2)?;
        let output = DeviceBytes::new(device, WIDTH * rows_max * 2)?;
        device.synchronize()?;
        Ok(Self {
            handle,
            stream,
            weights,
            input,
            output,
        })
    }

    /// Nanoseconds for so many products, the weights in turn.
    fn measure(&self, rows: u64, products: usize) -> Result<f64, Failure> {
        use cublas::cudaDataType_t::CUDA_R_16BF as BF16;
        let (one, zero) = (1f32, 0f32);
        let (width, n) = (i32::try_from(WIDTH)?, i32::try_from(rows)?);
        let start = clock();
        for product in 0..products {
            // SAFETY: the matrices are as large as the sizes say and outlive the wait below; the
            // scalars are read during the call, as the default pointer mode has it.
            let status = unsafe {
                cublas::cublasGemmEx(
                    self.handle,
                    cublas::cublasOperation_t::CUBLAS_OP_T,
                    cublas::cublasOperation_t::CUBLAS_OP_N,
                    width,
                    n,
                    width,
                    (&raw const one).cast::<c_void>(),
                    self.weights[product % SETS].address() as *const c_void,
                    BF16,
                    width,
                    self.input.address() as *const c_void,
                    BF16,
                    width,
                    (&raw const zero).cast::<c_void>(),
                    self.output.address() as *mut c_void,
                    BF16,
                    width,
                    cublas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    cublas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
            answered("cublasGemmEx", status)?;
        }
        self.stream.synchronize()?;
        Ok(start.elapsed().as_nanos() as f64)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once, nothing runs. An error can't be acted upon.
        let _destroyed = unsafe { cublas::cublasDestroy_v2(self.handle) };
    }
}

/// Swaps without a pause, on an engine thread of their own, until dropped.
struct Swaps {
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Blocks of a command.
const BLOCKS: u32 = 128;

impl Swaps {
    fn start(
        device: &Device,
        directions: &'static [Direction],
        config: impl Fn(&mut CudaConfig) + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let bytes = Arc::new(AtomicU64::new(0));
        let (stopped, moved, device) = (Arc::clone(&stop), Arc::clone(&bytes), device.clone());
        let thread = thread::spawn(move || {
            let run = || -> Result<(), Failure> {
                // Rows of 32 KiB, blocks of 1 MiB.
                let pool = Layout::stacked(32, BLOCKS * 4, 16, 8, 64, 2)?;
                let block_bytes = pool.block_bytes();
                let mut settings = CudaConfig::new(BLOCKS * 4);
                config(&mut settings);
                let mut stand = Stand::new(&device, pool, &settings)?;
                let moves = stand.moves(BLOCKS * 4, Slots::InARow);
                let parts: Vec<_> = moves.chunks(BLOCKS as usize).map(<[_]>::to_vec).collect();
                let queue = |stand: &mut Stand, turn: usize| -> Result<(), Failure> {
                    let direction = directions[turn % directions.len()];
                    let part = &parts[turn % parts.len()];
                    let command = stand.command(direction, part);
                    stand.submit(command)
                };
                // Two commands per direction are always under way, on different blocks.
                let mut turn = 0;
                let ahead = 2 * directions.len();
                let mut open = 0;
                while !stopped.load(Ordering::Relaxed) {
                    while open < ahead {
                        queue(&mut stand, turn)?;
                        turn += 1;
                        open += 1;
                    }
                    let ended = stand.ended_by_now()?;
                    open -= ended;
                    let done = ended as u64 * u64::from(BLOCKS) * block_bytes;
                    moved.fetch_add(done, Ordering::Relaxed);
                    if ended == 0 {
                        thread::park();
                    }
                }
                stand.wait(open)
            };
            if let Err(error) = run() {
                eprintln!("swaps stopped: {error}");
            }
        });
        Self {
            stop,
            bytes,
            thread: Some(thread),
        }
    }
}

impl Drop for Swaps {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Time relative to the products alone, and what was copied meanwhile, GB/s.
#[derive(Clone, Copy, Debug)]
struct Beside {
    slowdown: f64,
    rate: f64,
}

fn beside(
    products: &Products,
    (rows, count, alone): (u64, usize, f64),
    bytes: impl Fn() -> u64,
) -> Result<Beside, Failure> {
    // The copies are running when their first bytes have moved.
    let begun = clock();
    while bytes() == 0 {
        if begun.elapsed().as_secs() > 20 {
            return Err("no copy ever ran".into());
        }
        thread::yield_now();
    }
    let [mut times, mut rates] = [const { Vec::new() }; 2];
    for _ in 0..7 {
        let before = bytes();
        let nanos = products.measure(rows, count)?;
        times.push(nanos);
        rates.push(gb_per_s(bytes() - before, nanos));
    }
    Ok(Beside {
        slowdown: median(&mut times) / alone,
        rate: median(&mut rates),
    })
}

fn alone(products: &Products, rows: u64, count: usize) -> Result<f64, Failure> {
    let mut times = Vec::new();
    for _ in 0..8 {
        times.push(products.measure(rows, count)?);
    }
    Ok(median(&mut times[1..]))
}

/// Directions by name, and what a swap may cost beyond the contiguous copy.
const WAYS: [(&str, &[Direction], f64); 3] = [
    ("out", &[Direction::Out], 0.02),
    ("in", &[Direction::In], 0.02),
    ("both", &[Direction::Out, Direction::In], 0.05),
];

fn contiguous(
    device: &Device,
    products: &Products,
    work: (u64, usize, f64),
    directions: &[Direction],
) -> Result<Beside, Failure> {
    let steady: Vec<_> = directions
        .iter()
        .map(|&direction| Steady::start(device, direction))
        .collect::<Result<_, _>>()?;
    beside(products, work, || steady.iter().map(Steady::bytes).sum())
}

/// Products alone, beside contiguous copies and beside swaps.
pub(crate) fn decode(device: &Device, report: &mut Report) -> Result<(), Failure> {
    let products = Products::new(device, 4_096)?;
    // The first swaps of a process run on cold clocks.
    let _warm = rate(device, Direction::Out, Slots::InARow, |_| {})?;
    println!("\nproducts beside copies, time / alone (GB/s): rows, direction | contiguous | swaps");
    for (rows, count) in [(64, 1_024), (4_096, 32)] {
        let base = alone(&products, rows, count)?;
        println!(
            "{count} products of {rows} rows alone: {:.2} ms",
            base / 1e6
        );
        for (name, directions, margin) in WAYS {
            let plain = contiguous(device, &products, (rows, count, base), directions)?;
            let swaps = Swaps::start(device, directions, |_| {});
            let moved = Arc::clone(&swaps.bytes);
            let ours = beside(&products, (rows, count, base), || {
                moved.load(Ordering::Relaxed)
            })?;
            drop(swaps);
            println!(
                "{rows:>5} {name:<4} | x{:.3} ({:.1}) | x{:.3} ({:.1})",
                plain.slowdown, plain.rate, ours.slowdown, ours.rate
            );
            report.row(
                "decode",
                &json!({
                    "rows": rows, "direction": name, "alone_ns": base,
                    "contiguous": plain.slowdown, "contiguous_rate": plain.rate,
                    "swaps": ours.slowdown, "swaps_rate": ours.rate,
                }),
            );
            if rows == 64 {
                let what = format!("decode beside swaps {name} - beside contiguous");
                report.at_most("P3", what, ours.slowdown - plain.slowdown, margin);
            }
        }
    }
    Ok(())
}

/// What the priority of the packing kernels does to short and to long products.
pub(crate) fn priority(device: &Device, report: &mut Report) -> Result<(), Failure> {
    let products = Products::new(device, 4_096)?;
    let _warm = rate(device, Direction::Out, Slots::InARow, |_| {})?;
    println!("\npriority of packing: time / alone (GB/s)");
    for (rows, count) in [(64, 1_024), (4_096, 32)] {
        let work = (rows, count, alone(&products, rows, count)?);
        for (name, directions, _) in WAYS {
            for priority in [StreamPriority::Low, StreamPriority::High] {
                let set = move |config: &mut CudaConfig| config.pack_priority = priority;
                let swaps = Swaps::start(device, directions, set);
                let moved = Arc::clone(&swaps.bytes);
                let ours = beside(&products, work, || moved.load(Ordering::Relaxed))?;
                drop(swaps);
                println!(
                    "{rows:>5} {name:<4} {priority:?}: x{:.3} ({:.1})",
                    ours.slowdown, ours.rate
                );
                report.row(
                    "priority",
                    &json!({
                        "rows": rows, "direction": name, "priority": format!("{priority:?}"),
                        "slowdown": ours.slowdown, "rate": ours.rate,
                    }),
                );
            }
        }
    }
    Ok(())
}

/// Caching, MiB per slab, slabs, copy streams, grid.
type Setting = (SlabCaching, u64, u32, u32, u32);

use SlabCaching::{EvictLast, Persisting, Plain};

const SETTINGS_OUT: [Setting; 7] = [
    (Plain, 8, 3, 1, 64),
    (EvictLast, 8, 3, 1, 64),
    (EvictLast, 8, 2, 1, 64),
    (EvictLast, 12, 2, 1, 64),
    (EvictLast, 16, 2, 1, 64),
    (EvictLast, 6, 2, 1, 64),
    (Persisting, 4, 3, 1, 64),
];

const SETTINGS_IN: [Setting; 5] = [
    (Plain, 16, 3, 1, 64),
    (EvictLast, 8, 2, 1, 64),
    (EvictLast, 16, 2, 1, 64),
    (EvictLast, 16, 3, 1, 64),
    (EvictLast, 16, 3, 1, 24),
];

/// Settings side by side: what they do to decoding and to the rate.
pub(crate) fn tune(device: &Device, line: &Line, report: &mut Report) -> Result<(), Failure> {
    let products = Products::new(device, 64)?;
    let work = (64, 1_024, alone(&products, 64, 1_024)?);
    // The first swaps of a process run on cold clocks.
    let _warm = rate(device, Direction::Out, Slots::InARow, |_| {})?;
    println!(
        "\nsettings: time / alone (GB/s) beside decode | long command alone / line, slots in a row and shuffled"
    );
    for ((name, directions, _), settings) in WAYS.iter().zip([&SETTINGS_OUT[..], &SETTINGS_IN[..]])
    {
        let plain = contiguous(device, &products, work, directions)?;
        println!(
            "{name} contiguous: x{:.3} ({:.1})",
            plain.slowdown, plain.rate
        );
        for &(caching, mib, slabs, streams, grid) in settings {
            let set = move |config: &mut CudaConfig| {
                for staging in [&mut config.staging_out, &mut config.staging_in] {
                    staging.slab_bytes = mib << 20;
                    staging.slabs = slabs;
                    staging.copy_streams = streams;
                }
                config.slab_caching = caching;
                config.grid_max = grid;
                config.path = PathChoice::Ring;
            };
            let swaps = Swaps::start(device, directions, set);
            let moved = Arc::clone(&swaps.bytes);
            let ours = beside(&products, work, || moved.load(Ordering::Relaxed))?;
            drop(swaps);
            let line = line_of(line, directions[0]);
            let ratio = rate(device, directions[0], Slots::InARow, set)? / line;
            let apart = rate(device, directions[0], Slots::Shuffled, set)? / line;
            println!(
                "{name} {caching:?} {slabs} x {mib} MiB, {streams} streams, grid {grid}: \
                 x{:.3} ({:.1}) | {ratio:.3} {apart:.3}",
                ours.slowdown, ours.rate
            );
            report.row(
                "tune",
                &json!({
                    "direction": name, "caching": format!("{caching:?}"), "slab_mib": mib,
                    "slabs": slabs, "streams": streams, "grid": grid, "slowdown": ours.slowdown,
                    "rate_beside": ours.rate, "of_line": ratio, "of_line_shuffled": apart,
                }),
            );
        }
    }
    Ok(())
}

fn line_of(line: &Line, direction: Direction) -> f64 {
    match direction {
        Direction::In => line.back_in,
        Direction::Out => line.out,
    }
}

/// Rate of single commands of 1 GiB in rows of 2 KiB, GB/s.
fn rate(
    device: &Device,
    direction: Direction,
    slots: Slots,
    set: impl Fn(&mut CudaConfig),
) -> Result<f64, Failure> {
    let pool = Layout::stacked(32, 16_384, 16, 1, 32, 2)?;
    let bytes = 16_384 * pool.block_bytes();
    let mut config = CudaConfig::new(16_384);
    set(&mut config);
    let mut stand = Stand::new(device, pool, &config)?;
    let mut times = Vec::new();
    for _ in 0..5 {
        let moves = stand.moves(16_384, slots);
        let command = stand.command(direction, &moves);
        times.push(stand.measure_awake(vec![command])?);
    }
    Ok(gb_per_s(bytes, median(&mut times[1..])))
}

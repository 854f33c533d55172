//! Whether the machine has the memory that is asked for: a pool that can't exist is refused with
//! its flag's name instead of ending the process.

use std::fs;

use kv_core::Layout;

use super::AssemblyError;

/// Refuses a pool in plain memory that is larger than the machine's memory.
pub(super) fn for_pool(layout: &Layout) -> Result<(), AssemblyError> {
    let (blocks, block_bytes) = (u64::from(layout.blocks()), layout.block_bytes());
    match total_bytes() {
        Some(total) if blocks.saturating_mul(block_bytes) > total => Err(AssemblyError::Flag {
            flag: "gpu-blocks",
            value: blocks.to_string(),
            allowed: format!(
                "at most {}: a block has {block_bytes} bytes, the machine has {total}",
                total / block_bytes
            ),
        }),
        _ => Ok(()),
    }
}

/// Refuses a host pool that is larger than the machine's memory.
pub(super) fn for_host(bytes: u64) -> Result<(), AssemblyError> {
    match total_bytes() {
        Some(total) if bytes > total => Err(AssemblyError::Flag {
            flag: "kv-swap-host-memory-bytes",
            value: bytes.to_string(),
            allowed: format!("at most the machine's memory, which is {total} bytes"),
        }),
        _ => Ok(()),
    }
}

/// The machine's memory; `None` where the system doesn't say.
fn total_bytes() -> Option<u64> {
    parse(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_own_words_are_understood() {
        assert_eq!(
            parse("MemTotal:       24512345 kB\nMemFree: 1 kB\n"),
            Some(24_512_345 << 10)
        );
        assert_eq!(parse("MemFree: 1 kB\n"), None);
    }
}

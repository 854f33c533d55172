//! Which way a command should take: what each way costs, by what was measured at construction.

use kv_core::Layout;

use crate::config::PathChoice;
use crate::copy::RAMP_BYTES;

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Through the staging ring.
    Ring,
    /// One copy per row.
    Rows,
}

/// What a short measurement found in one direction. Times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// One byte of a long copy.
    pub byte_ns: f64,
    /// What each of many copies costs beyond its bytes.
    pub copy_ns: f64,
    /// What a kernel that packs a slab takes, per byte.
    pub pack_byte_ns: f64,
    /// What a kernel that packs next to nothing takes.
    pub pack_ns: f64,
}

impl Default for Costs {
    /// What an H200 on PCIe 5 showed; used if too little memory is at hand to measure.
    fn default() -> Self {
        Self {
            byte_ns: 0.018,
            copy_ns: 600.0,
            pack_byte_ns: 0.001,
            pack_ns: 4_000.0,
        }
    }
}

/// What a layout means for the ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    /// Rows of a block.
    rows: u64,
    block_bytes: u64,
}

impl Ways {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self {
            rows: u64::from(layout.rows_per_block()),
            block_bytes: layout.block_bytes(),
        }
    }

    /// The cheapest way for so many blocks, or the one that was asked for.
    ///
    /// The bytes themselves take as long on either way, so that only what comes on top counts: a
    /// copy per row, or a copy per slot and the time until the first piece is packed. The direct
    /// way wins a tie: it takes less from the GPU's memory than the ring does.
    #[expect(
        clippy::cast_precision_loss,
        reason = "an estimate; no count here comes near 2 to the 52nd"
    )]
    pub(crate) fn choose(&self, choice: PathChoice, costs: &Costs, blocks: usize) -> Path {
        match choice {
            PathChoice::Ring => return Path::Ring,
            PathChoice::Rows => return Path::Rows,
            PathChoice::Measured => {}
        }
        let blocks = blocks as f64;
        let first_piece = (blocks * self.block_bytes as f64).min(RAMP_BYTES as f64);
        let ring = blocks * costs.copy_ns + costs.pack_ns + first_piece * costs.pack_byte_ns;
        let rows = blocks * self.rows as f64 * costs.copy_ns;
        if rows <= ring { Path::Rows } else { Path::Ring }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Layout;

    use super::{Costs, Path, Ways};
    use crate::config::PathChoice;

    #[test]
    fn scattered_rows_take_the_ring_and_blocks_in_one_piece_do_not() {
        let choose = |layout: &Layout, blocks| {
            Ways::new(layout).choose(PathChoice::Measured, &Costs::default(), blocks)
        };
        let small = Layout::stacked(32, 256, 16, 1, 32, 2).expect("rows of 2 KiB");
        assert_eq!(choose(&small, 256), Path::Ring);
        assert_eq!(choose(&small, 1), Path::Ring);
        let one = Layout::stacked(1, 256, 256, 8, 128, 2).expect("one row of 1 MiB");
        assert_eq!(choose(&one, 256), Path::Rows);
        let few = Layout::stacked(4, 256, 256, 8, 128, 2).expect("four rows of 1 MiB");
        assert_eq!(choose(&few, 1), Path::Rows);
        assert_eq!(choose(&few, 256), Path::Ring);
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let layout = Layout::stacked(4, 8, 16, 8, 64, 2).expect("valid");
        let ways = Ways::new(&layout);
        assert_eq!(
            ways.choose(PathChoice::Ring, &Costs::default(), 1),
            Path::Ring
        );
        assert_eq!(
            ways.choose(PathChoice::Rows, &Costs::default(), 8),
            Path::Rows
        );
    }
}

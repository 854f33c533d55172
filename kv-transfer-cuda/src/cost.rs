//! Which way a command should take: what each way costs, by what was measured at construction.

use kv_core::Layout;

use crate::config::PathChoice;

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// One two-dimensional copy per block and row group.
    Planes,
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
    /// What each row of a two-dimensional copy costs beyond its bytes.
    pub row_ns: f64,
    /// What a kernel that packs a slab costs before the first copy can start.
    pub pack_ns: f64,
}

impl Default for Costs {
    /// What an H200 on PCIe 5 showed; used if nothing could be measured.
    fn default() -> Self {
        Self {
            byte_ns: 0.018,
            copy_ns: 2_200.0,
            row_ns: 350.0,
            pack_ns: 9_000.0,
        }
    }
}

/// What a layout means for the ways, worked out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    /// Rows of a block.
    rows: u64,
    /// Two-dimensional copies per block, or `None` if a row stride is too long for one.
    planes: Option<u64>,
    block_bytes: u64,
}

impl Ways {
    pub(crate) fn new(layout: &Layout, pitch_bytes_max: i32) -> Self {
        let most = u64::try_from(pitch_bytes_max).unwrap_or(0);
        let groups = layout.row_groups();
        let fits = groups
            .iter()
            .all(|group| group.rows == 1 || group.row_stride <= most);
        Self {
            rows: u64::from(layout.rows_per_block()),
            planes: fits.then_some(groups.len() as u64),
            block_bytes: layout.block_bytes(),
        }
    }

    /// The cheapest way for so many blocks, or the one that was asked for.
    ///
    /// A direct way wins a tie: it takes less from the GPU's memory than the ring does.
    pub(crate) fn choose(&self, choice: PathChoice, costs: &Costs, blocks: usize) -> Path {
        match choice {
            PathChoice::Ring => Path::Ring,
            PathChoice::Rows => Path::Rows,
            PathChoice::Planes if self.planes.is_some() => Path::Planes,
            PathChoice::Planes => Path::Rows,
            PathChoice::Measured => self.cheapest(costs, blocks),
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "an estimate; no count here comes near 2 to the 52nd"
    )]
    fn cheapest(&self, costs: &Costs, blocks: usize) -> Path {
        let blocks = blocks as f64;
        // Slots are assumed to be apart: where they are neighbours the ring is cheaper still.
        let ring = costs.pack_ns + blocks * costs.copy_ns;
        let bytes_ns = blocks * self.block_bytes as f64 * costs.byte_ns;
        let rows = blocks * self.rows as f64 * costs.copy_ns;
        let planes = self.planes.map_or(f64::INFINITY, |groups| {
            blocks * (groups as f64 * costs.copy_ns + self.rows as f64 * costs.row_ns)
        });
        let best_direct = rows.min(planes);
        // A hundredth of the whole is noise.
        if best_direct <= ring + bytes_ns * 0.01 {
            if rows <= planes {
                Path::Rows
            } else {
                Path::Planes
            }
        } else {
            Path::Ring
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Layout;

    use super::{Costs, Path, Ways};
    use crate::config::PathChoice;

    const PITCH_MAX: i32 = i32::MAX;

    fn ways(layout: &Layout) -> Ways {
        Ways::new(layout, PITCH_MAX)
    }

    #[test]
    fn small_rows_take_the_ring_and_single_long_rows_do_not() {
        let small = Layout::stacked(32, 256, 16, 1, 32, 2).expect("rows of 2 KiB");
        let choose = |layout: &Layout, blocks| {
            ways(layout).choose(PathChoice::Measured, &Costs::default(), blocks)
        };
        assert_eq!(choose(&small, 256), Path::Ring);
        assert_eq!(choose(&small, 16), Path::Ring);
        let one = Layout::stacked(1, 256, 256, 8, 128, 2).expect("one row of 1 MiB");
        assert_eq!(choose(&one, 256), Path::Rows);
    }

    #[test]
    fn a_stride_beyond_the_longest_pitch_rules_two_dimensional_copies_out() {
        let layout = Layout::stacked(4, 4096, 256, 8, 128, 2).expect("layers of 4 GiB");
        assert_eq!(ways(&layout).planes, None);
        let asked = ways(&layout).choose(PathChoice::Planes, &Costs::default(), 4);
        assert_eq!(asked, Path::Rows);
    }
}

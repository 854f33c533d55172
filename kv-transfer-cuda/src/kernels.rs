//! The kernels, as text that the driver turns into code of the GPU at hand.
//!
//! `cargo xtask ptx` makes the text from `kernels/copy.cu`; a test compares the hash of the source
//! that the text carries with the source.

use core::ffi::CStr;

use crate::plan::Width;

/// PTX of `kernels/copy.cu`, NUL-terminated.
pub(crate) const PTX: &CStr = {
    let text = concat!(include_str!("../kernels/copy.ptx"), "\0");
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text has no NUL inside"),
    }
};

/// Most blocks that one launch may name: they travel in the parameters of the kernel.
pub(crate) const BLOCKS_MAX: usize = 960;

/// Most blocks of the variants for few blocks, whose parameters are quicker to pass.
pub(crate) const FEW_BLOCKS_MAX: usize = 48;

/// Threads of a thread block.
///
/// Few, so that a thread block finds room beside those of a matrix product.
pub(crate) const THREADS: u32 = 128;

/// Segments that one thread block copies at a time.
pub(crate) const WARPS: u32 = THREADS / 32;

/// Which way a kernel packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Pool to slab.
    Gather,
    /// Slab to pool.
    Scatter,
}

/// One of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel(usize);

impl Kernel {
    /// In the order of [`Kernel::index`].
    pub(crate) const ALL: [Self; 8] = [
        Self(0),
        Self(1),
        Self(2),
        Self(3),
        Self(4),
        Self(5),
        Self(6),
        Self(7),
    ];

    const NAMES: [&CStr; 8] = [
        c"gather_16_few",
        c"gather_16",
        c"gather_4",
        c"gather_1",
        c"scatter_16_few",
        c"scatter_16",
        c"scatter_4",
        c"scatter_1",
    ];

    /// The kernel for accesses of that width to so many blocks, and how many ids its parameters
    /// hold.
    pub(crate) const fn choose(packing: Packing, width: Width, blocks: usize) -> (Self, usize) {
        let first = match packing {
            Packing::Gather => 0,
            Packing::Scatter => 4,
        };
        match width {
            Width::Sixteen if blocks <= FEW_BLOCKS_MAX => (Self(first), FEW_BLOCKS_MAX),
            Width::Sixteen => (Self(first + 1), BLOCKS_MAX),
            Width::Four => (Self(first + 2), BLOCKS_MAX),
            Width::One => (Self(first + 3), BLOCKS_MAX),
        }
    }

    pub(crate) const fn index(self) -> usize {
        self.0
    }

    pub(crate) const fn name(self) -> &'static CStr {
        Self::NAMES[self.0]
    }
}

#[cfg(test)]
mod tests {
    use super::{Kernel, PTX};

    #[test]
    fn the_texts_were_made_from_the_sources_beside_them() {
        let tests = include_str!("../tests/gpu/kernels.ptx");
        made_from(tests, include_str!("../tests/gpu/kernels.cu"));
        let text = PTX.to_str().expect("PTX is ASCII");
        made_from(text, include_str!("../kernels/copy.cu"));
    }

    fn made_from(text: &str, source: &str) {
        let hash = format!(
            "xxh3={:016x}",
            xxhash_rust::xxh3::xxh3_64(source.as_bytes())
        );
        let head: String = text.lines().take(4).collect();
        assert!(
            head.contains(&hash),
            "run `cargo xtask ptx`: {hash} is not in {head}"
        );
    }

    #[test]
    fn every_kernel_is_in_the_text() {
        let text = PTX.to_str().expect("PTX is ASCII");
        for kernel in Kernel::ALL {
            let name = kernel.name().to_str().expect("names are ASCII");
            assert!(text.contains(&format!(".entry {name}(")), "{name}");
        }
    }
}

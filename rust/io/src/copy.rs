//! Copy kernels: move bytes and take their CRC-32 in the same pass.
//!
//! Owns: the choice of kernel, and the portable one that works everywhere.
//! Must not: look at foreign memory for anything but the copy; the CRC is of the bytes that arrived.
//! Invariant: every kernel gives what `portable()` gives. On return all stores are visible to other processes in
//! program order (a kernel with non-temporal stores ends with a store fence), because the arena publishes with one
//! release store after it.

use std::sync::OnceLock;

use crate::foreign::{ForeignBytes, ForeignBytesMut};

/// Bytes handled at a time: the second look, for the CRC, finds them in the cache.
const BLOCK_BYTES: usize = 128 << 10;

/// A way to copy and check.
pub trait CopyKernel: Send + Sync {
    /// Copies `src` to `dst` and returns the CRC-32 of what `dst` now holds. Panics if the lengths differ.
    fn copy_crc(&self, dst: &mut [u8], src: ForeignBytes<'_>) -> u32;
    /// Copies `src` to `dst` and returns the CRC-32 of `src`. Panics if the lengths differ.
    fn copy_out_crc(&self, dst: ForeignBytesMut<'_>, src: &[u8]) -> u32;
    /// The CRC-32 of `bytes`.
    fn crc(&self, bytes: &[u8]) -> u32;
    /// Whether `src` still holds `bytes`.
    fn equals(&self, bytes: &[u8], src: ForeignBytes<'_>) -> bool;
    /// Its name, for the log.
    fn name(&self) -> &'static str;
}

#[derive(Debug)]
struct Portable;

impl CopyKernel for Portable {
    fn copy_crc(&self, dst: &mut [u8], src: ForeignBytes<'_>) -> u32 {
        assert_eq!(dst.len(), src.len(), "source and target of a copy have one length");
        let mut crc = crc32fast::Hasher::new();
        let mut start = 0;
        for block in dst.chunks_mut(BLOCK_BYTES) {
            src.slice(start..start + block.len()).copy_to(block);
            crc.update(block);
            start += block.len();
        }
        crc.finalize()
    }

    fn copy_out_crc(&self, dst: ForeignBytesMut<'_>, src: &[u8]) -> u32 {
        assert_eq!(dst.len(), src.len(), "source and target of a copy have one length");
        let mut crc = crc32fast::Hasher::new();
        let mut start = 0;
        for block in src.chunks(BLOCK_BYTES) {
            crc.update(block);
            dst.slice(start..start + block.len()).copy_from(block);
            start += block.len();
        }
        crc.finalize()
    }

    fn crc(&self, bytes: &[u8]) -> u32 {
        crc32fast::hash(bytes)
    }

    fn equals(&self, bytes: &[u8], src: ForeignBytes<'_>) -> bool {
        src.equals(bytes)
    }

    fn name(&self) -> &'static str {
        "portable"
    }
}

/// The kernel that runs on every machine.
pub fn portable() -> &'static dyn CopyKernel {
    &Portable
}

/// The fastest kernel of this machine. The variable `RELIGHT_CPU`, read once, names one instead; a name that this
/// machine does not have means the portable one.
pub fn best() -> &'static dyn CopyKernel {
    static CHOICE: OnceLock<&'static dyn CopyKernel> = OnceLock::new();
    *CHOICE.get_or_init(|| choose(std::env::var("RELIGHT_CPU").ok().as_deref()))
}

/// The kernels of this machine, fastest first.
fn kernels() -> [&'static dyn CopyKernel; 1] {
    [portable()]
}

fn choose(wish: Option<&str>) -> &'static dyn CopyKernel {
    match wish {
        None => kernels()[0],
        Some(name) => kernels().into_iter().find(|kernel| kernel.name() == name).unwrap_or_else(portable),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn blocks_and_their_edges_are_copied_and_summed_exactly() {
        for kernel in kernels() {
            for len in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 777] {
                let source = bytes(len);
                let mut image = vec![0; len];
                let crc = kernel.copy_crc(&mut image, ForeignBytes::from_cells(&source));
                assert_eq!((crc, &image), (crc32fast::hash(&source), &source));
                let mut back = vec![0_u8; len];
                let cells = Cell::from_mut(back.as_mut_slice()).as_slice_of_cells();
                assert_eq!(kernel.copy_out_crc(ForeignBytesMut::from_cells(cells), &image), crc);
                assert_eq!(back, source);
                assert!(kernel.equals(&image, ForeignBytes::from_cells(&source)));
            }
        }
    }

    proptest! {
        #[test]
        fn every_kernel_gives_what_the_portable_one_gives(data in proptest::collection::vec(any::<u8>(), 0..3000), skip in 0_usize..64) {
            let source = &data[skip.min(data.len())..];
            for kernel in kernels() {
                let mut copy = vec![0; source.len()];
                prop_assert_eq!(kernel.copy_crc(&mut copy, ForeignBytes::from_cells(source)), crc32fast::hash(source));
                prop_assert_eq!(&copy[..], source);
                prop_assert_eq!(kernel.crc(source), crc32fast::hash(source));
            }
        }
    }

    #[test]
    fn an_unknown_wish_means_the_portable_kernel() {
        assert_eq!(choose(Some("abacus")).name(), "portable");
        assert_eq!(choose(Some("portable")).name(), "portable");
    }
}

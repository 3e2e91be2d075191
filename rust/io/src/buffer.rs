//! Heap memory aligned to a page, for windows of a streamed image and for direct I/O.
//!
//! Owns: allocation and release with one layout.
//! Must not: grow; a window has the size it was made with.
//! Invariant: `start` is a live allocation of exactly `len` initialised bytes, aligned to `ALIGN`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::io::Errno;

/// The alignment of every buffer: a page, which direct I/O asks for.
pub const ALIGN: usize = 4096;

/// Zeroed bytes, aligned to a page.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory alone, as a Vec does.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references only read, as with a Vec.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `len` zeroed bytes.
    ///
    /// # Errors
    /// Out of memory: these are the large pieces, so a process near its limit meets it here and must not abort.
    ///
    /// # Panics
    /// If `len` is beyond what an address can reach.
    pub fn new(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(|| io::Error::from(Errno::NOMEM))?;
        Ok(Self { start, len })
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {len} bytes is beyond the address space"),
        }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            let layout = Self::layout(self.len);
            // SAFETY: `start` came from `alloc_zeroed` with this very layout and is released once, here.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` holds `len` initialised bytes that we own; for `len` 0 a dangling pointer is allowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_writable() {
        for len in [0, 1, 4095, 4096, 1 << 20] {
            let mut buffer = AlignedBuf::new(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
            if len > 0 {
                assert_eq!(buffer.as_ptr().align_offset(ALIGN), 0);
            }
        }
    }
}

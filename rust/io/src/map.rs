//! A file, or a part of it, mapped for reading.
//!
//! Owns: the mapping and its release.
//! Must not: hand out `&[u8]`: another process may change a file, and a reference promises that nobody does. The bytes
//! are foreign memory: they are copied, and the copy is checked.
//! Invariant: the mapping lies inside the file as it was when mapped. Whoever cuts a file that is mapped makes reads
//! beyond its new end kill the process (SIGBUS); relight never cuts a committed file.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use crate::foreign::ForeignBytes;

const PAGE_BYTES: u64 = 4096;

/// A mapping of a file for reading.
#[derive(Debug)]
pub struct FileMapping {
    base: *mut c_void,
    mapped_len: usize,
    skip: usize,
    len: usize,
}

// SAFETY: the mapping is plain memory that belongs to this value; it may be used and released by any thread.
unsafe impl Send for FileMapping {}
// SAFETY: it is only read, through volatile reads.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps `start..start + len` of `file`.
    pub fn new(file: &File, start: u64, len: usize) -> io::Result<Self> {
        let end = start.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end > file.metadata()?.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if len == 0 {
            return Ok(Self { base: ptr::null_mut(), mapped_len: 0, skip: 0, len });
        }
        let skip = (start % PAGE_BYTES) as usize;
        let mapped_len = len.checked_add(skip).ok_or(io::ErrorKind::InvalidInput)?;
        let offset = start - skip as u64;
        // SAFETY: a null hint lets the kernel choose free addresses, so no memory in use is replaced.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), mapped_len, ProtFlags::READ, MapFlags::SHARED, file, offset) }?;
        Ok(Self { base, mapped_len, skip, len })
    }

    /// The bytes.
    pub fn bytes(&self) -> ForeignBytes<'_> {
        if self.len == 0 {
            return ForeignBytes::from_cells::<u8>(&[]);
        }
        let start = self.base.cast::<u8>().wrapping_add(self.skip);
        // SAFETY: `start..start + len` lies in the mapping, which lives as long as `self` is borrowed.
        unsafe { ForeignBytes::from_raw(start, self.len) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        if self.mapped_len > 0 {
            // SAFETY: base and length are those of our own mapping, released once; `bytes` borrowed `self`, so nobody
            // still holds its addresses. A failure would leave the mapping in place, which harms nobody.
            let _ = unsafe { rustix::mm::munmap(self.base, self.mapped_len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;

    #[test]
    fn any_part_of_a_file_can_be_mapped_and_none_beyond() {
        let dir = tempfile::tempdir().unwrap();
        let file = file::create_new(&dir.path().join("image")).unwrap();
        let bytes: Vec<u8> = (0..20_000_u32).map(|i| (i % 253) as u8).collect();
        file::write_all_at(&file, 0, &bytes).unwrap();
        for (start, len) in [(0, 20_000), (1, 5), (4096, 4096), (8191, 11_809), (20_000, 0), (3, 0)] {
            let mapping = FileMapping::new(&file, start as u64, len).unwrap();
            assert!(mapping.bytes().equals(&bytes[start..start + len]), "{start}+{len}");
        }
        assert_eq!(FileMapping::new(&file, 1, 20_000).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

//! The memory of a region, and the few ways in which it is touched.
//!
//! Owns: the mapping, its bounds checks and its release.
//! Must not: know slots or extents; who may touch which range when is argued by the callers.
//! Invariant: `base..base + len` is mapped readable and writable for as long as the value lives.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Shared memory of `len` bytes.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory that belongs to this value; it may be used and released by any thread.
unsafe impl Send for Mapping {}
// SAFETY: the safe methods are atomic or bounds-checked copies of ranges that their callers own; the others say what
// they ask for.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the whole of a file that is `len` bytes long.
    pub(crate) fn of_file(file: &File, len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint lets the kernel choose free addresses, so no memory in use is replaced.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) }?;
        Ok(Self { base: base.cast(), len })
    }

    /// Memory without a file. Shared, so that a fork does not copy it page by page when this process writes on, and not
    /// counted against the overcommit limit before it is used.
    pub(crate) fn anonymous(len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a null hint lets the kernel choose free addresses, so no memory in use is replaced.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        Ok(Self { base: base.cast(), len })
    }

    /// The address of a range.
    ///
    /// # Panics
    /// If the range reaches beyond the mapping.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(len));
        assert!(end.is_some_and(|end| end <= self.len), "{offset}+{len} reaches beyond a mapping of {}", self.len);
        self.base.wrapping_add(offset as usize)
    }

    /// The atomic word at `offset`. Words live in the slot table, which is only ever touched as words and records.
    pub(crate) fn word(&self, offset: u64) -> &AtomicU64 {
        let address = self.at(offset, size_of::<u64>()).cast::<u64>();
        assert!(address.is_aligned(), "a state word is aligned");
        // SAFETY: in bounds and aligned, checked above; mapped as long as `self` is borrowed; every access to it in
        // this process goes through this method, so all are atomic.
        unsafe { AtomicU64::from_ptr(address) }
    }

    /// Copies bytes out.
    ///
    /// # Safety
    /// Nobody writes the range meanwhile.
    pub(crate) unsafe fn read(&self, offset: u64, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: the source is in bounds and not written (the caller's promise); the target is another object, since
        // no safe code holds a reference into the mapping's table or into a range that the caller owns.
        unsafe { ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) }
    }

    /// Copies bytes in.
    ///
    /// # Safety
    /// Nobody else reads or writes the range meanwhile.
    pub(crate) unsafe fn write(&self, offset: u64, source: &[u8]) {
        let target = self.at(offset, source.len());
        // SAFETY: the target is in bounds and the caller's alone; the source is another object, as in `read`.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) }
    }

    /// The bytes of a range.
    ///
    /// # Safety
    /// Nobody writes the range for as long as the reference lives.
    pub(crate) unsafe fn slice(&self, offset: u64, len: usize) -> &[u8] {
        let start = self.at(offset, len);
        // SAFETY: in bounds, mapped as long as `self` is borrowed, every byte value is valid; not written (the caller).
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// The bytes of a range, for writing.
    ///
    /// # Safety
    /// Nobody else reads or writes the range for as long as the reference lives.
    #[allow(clippy::mut_from_ref, reason = "disjoint ranges of one mapping have different owners; see Safety")]
    pub(crate) unsafe fn slice_mut(&self, offset: u64, len: usize) -> &mut [u8] {
        let start = self.at(offset, len);
        // SAFETY: in bounds, mapped as long as `self` is borrowed, every byte value is valid; the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    /// Gives the memory of a range back to the system; it reads as zeroes.
    ///
    /// # Safety
    /// Nobody reads or writes the range meanwhile, or counts on what is in it.
    pub(crate) unsafe fn discard(&self, offset: u64, len: usize) -> io::Result<()> {
        let start = self.at(offset, len).cast::<c_void>();
        // SAFETY: the range is ours, in bounds, and nobody counts on its contents (the caller's promise).
        unsafe { rustix::mm::madvise(start, len, Advice::LinuxRemove) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of our own mapping, released once; every reference into it borrowed `self`.
        // A failure would leave the mapping in place, which harms nobody.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

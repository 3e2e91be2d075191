//! Memory that belongs to the caller and that other threads may be changing while we look.
//!
//! Owns: the only ways in which relight touches such memory.
//! Must not: make a reference to a foreign byte (`&[u8]` promises that nobody writes), or decide anything on a byte
//! that was read twice. Copies are made first; checksums and decisions look at the copy.
//! Invariant: every access is a volatile read or write inside the range that the constructor was given.

use std::any::TypeId;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

const WORD: usize = size_of::<u64>();

/// Readable memory of the caller, alive for `'a`.
#[derive(Clone, Copy)]
pub struct ForeignBytes<'a> {
    start: *const u8,
    len: usize,
    alive: PhantomData<&'a [Cell<u8>]>,
}

/// Writable memory of the caller, alive for `'a`.
#[derive(Clone, Copy)]
pub struct ForeignBytesMut<'a> {
    start: *mut u8,
    len: usize,
    alive: PhantomData<&'a [Cell<u8>]>,
}

// SAFETY: the range stays valid for `'a` whichever thread looks, and every access is volatile: what a concurrent writer
// does changes the value that is read, not what the program may do (see `copy_to`).
unsafe impl Send for ForeignBytes<'_> {}
// SAFETY: as for Send; there is no state besides the address and the length.
unsafe impl Sync for ForeignBytes<'_> {}
// SAFETY: as for ForeignBytes; two threads that write the same range mix bytes, which the memory of a tensor allows.
unsafe impl Send for ForeignBytesMut<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for ForeignBytesMut<'_> {}

impl<'a> ForeignBytes<'a> {
    /// The memory of a slice of one-byte cells (`Cell<u8>`, an atomic byte, a foreign library's cell), or of plain bytes.
    /// The bytes must be initialised, which every such type but `MaybeUninit` says by itself.
    ///
    /// # Panics
    /// If `C` is not one byte, or is `MaybeUninit<u8>`.
    pub fn from_cells<C: 'static>(cells: &'a [C]) -> Self {
        assert_eq!(size_of::<C>(), 1, "a cell of foreign memory is one byte");
        assert_ne!(TypeId::of::<C>(), TypeId::of::<MaybeUninit<u8>>(), "foreign memory must be initialised");
        Self { start: cells.as_ptr().cast(), len: cells.len(), alive: PhantomData }
    }

    /// The memory at `start`.
    ///
    /// # Safety
    /// `start..start + len` is readable and initialised for `'a`, whoever else writes it.
    pub(crate) unsafe fn from_raw(start: *const u8, len: usize) -> Self {
        Self { start, len, alive: PhantomData }
    }

    /// A range of it.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        let (offset, len) = checked(range, self.len);
        Self { start: self.start.wrapping_add(offset), len, alive: PhantomData }
    }

    /// Number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Copies all bytes to `target`. If they change meanwhile, each target byte is some value that its source had.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(self, target: &mut [u8]) {
        assert_eq!(self.len, target.len(), "source and target of a copy have one length");
        let head = self.start.align_offset(WORD).min(self.len);
        let (first, rest) = target.split_at_mut(head);
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = self.byte(i);
        }
        let words = rest.len() / WORD;
        let (middle, last) = rest.split_at_mut(words * WORD);
        for (i, word) in middle.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&self.word(head + i * WORD).to_ne_bytes());
        }
        for (i, byte) in last.iter_mut().enumerate() {
            *byte = self.byte(head + words * WORD + i);
        }
    }

    /// Whether all bytes equal `other`, each looked at once.
    pub fn equals(self, other: &[u8]) -> bool {
        if self.len != other.len() {
            return false;
        }
        let head = self.start.align_offset(WORD).min(self.len);
        let words = (self.len - head) / WORD;
        let end = head + words * WORD;
        let (first, rest) = other.split_at(head);
        let (middle, last) = rest.split_at(words * WORD);
        first.iter().enumerate().all(|(i, byte)| *byte == self.byte(i))
            && middle.chunks_exact(WORD).enumerate().all(|(i, word)| *word == self.word(head + i * WORD).to_ne_bytes())
            && last.iter().enumerate().all(|(i, byte)| *byte == self.byte(end + i))
    }

    /// One byte; `at` is below `len`.
    fn byte(self, at: usize) -> u8 {
        debug_assert!(at < self.len);
        // SAFETY: `at < len`, so the address lies in memory that is readable for `'a`; a byte has no alignment and no
        // invalid value. Volatile: the memory is outside this program's objects and may change under the read.
        unsafe { self.start.wrapping_add(at).read_volatile() }
    }

    /// Eight bytes; `start + at` is aligned to eight and `at + 8` is at most `len`.
    fn word(self, at: usize) -> u64 {
        let address = self.start.wrapping_add(at).cast::<u64>();
        debug_assert!(at + WORD <= self.len && address.is_aligned());
        // SAFETY: all eight bytes lie in memory that is readable for `'a`, the address is aligned by the caller's
        // `align_offset`, and a u64 has no invalid value. Volatile: as in `byte`.
        unsafe { address.read_volatile() }
    }
}

impl<'a> ForeignBytesMut<'a> {
    /// The memory of a slice of cells.
    pub fn from_cells(cells: &'a [Cell<u8>]) -> Self {
        Self { start: cells.as_ptr().cast_mut().cast(), len: cells.len(), alive: PhantomData }
    }

    /// A range of it.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        let (offset, len) = checked(range, self.len);
        Self { start: self.start.wrapping_add(offset), len, alive: PhantomData }
    }

    /// Number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The same memory for reading.
    pub fn as_foreign(self) -> ForeignBytes<'a> {
        ForeignBytes { start: self.start, len: self.len, alive: PhantomData }
    }

    /// Fills all bytes from `source`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(self, source: &[u8]) {
        assert_eq!(self.len, source.len(), "source and target of a copy have one length");
        let head = self.start.align_offset(WORD).min(self.len);
        let (first, rest) = source.split_at(head);
        let (middle, last) = rest.split_at(rest.len() / WORD * WORD);
        for (i, byte) in first.iter().enumerate() {
            self.put_byte(i, *byte);
        }
        for (i, word) in middle.chunks_exact(WORD).enumerate() {
            let mut bytes = [0; WORD];
            bytes.copy_from_slice(word);
            self.put_word(head + i * WORD, u64::from_ne_bytes(bytes));
        }
        for (i, byte) in last.iter().enumerate() {
            self.put_byte(head + middle.len() + i, *byte);
        }
    }

    /// Sets one byte; `at` is below `len`.
    fn put_byte(self, at: usize, value: u8) {
        debug_assert!(at < self.len);
        // SAFETY: `at < len`, so the address lies in memory that the caller's cells let us write for `'a`.
        unsafe { self.start.wrapping_add(at).write_volatile(value) }
    }

    /// Sets eight bytes; `start + at` is aligned to eight and `at + 8` is at most `len`.
    fn put_word(self, at: usize, value: u64) {
        let address = self.start.wrapping_add(at).cast::<u64>();
        debug_assert!(at + WORD <= self.len && address.is_aligned());
        // SAFETY: all eight bytes lie in memory that the caller's cells let us write for `'a`, and the address is
        // aligned by the caller's `align_offset`.
        unsafe { address.write_volatile(value) }
    }
}

/// Offset and length of `range`, which must lie in `0..len`.
fn checked(range: Range<usize>, len: usize) -> (usize, usize) {
    assert!(range.start <= range.end && range.end <= len, "range {range:?} reaches beyond {len} foreign bytes");
    (range.start, range.end - range.start)
}

impl fmt::Debug for ForeignBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignBytes({} bytes)", self.len)
    }
}

impl fmt::Debug for ForeignBytesMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignBytesMut({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    #[test]
    fn every_alignment_and_length_is_copied_in_and_out_exactly() {
        let bytes = pattern(64);
        for start in 0..17 {
            for end in start..64 {
                let source = ForeignBytes::from_cells(&bytes).slice(start..end);
                let mut copy = vec![0xaa; end - start];
                source.copy_to(&mut copy);
                assert_eq!(copy, bytes[start..end]);
                assert!(source.equals(&copy));

                let mut target = vec![0xee_u8; 64];
                let cells = Cell::from_mut(target.as_mut_slice()).as_slice_of_cells();
                ForeignBytesMut::from_cells(cells).slice(start..end).copy_from(&copy);
                assert_eq!(target[start..end], copy);
                assert!(target[..start].iter().chain(&target[end..]).all(|byte| *byte == 0xee));
            }
        }
    }

    #[test]
    fn one_changed_byte_anywhere_is_unequal() {
        let bytes = pattern(41);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            assert!(!ForeignBytes::from_cells(&bytes).equals(&other), "byte {at}");
        }
        assert!(!ForeignBytes::from_cells(&bytes).equals(&bytes[1..]));
    }

    #[test]
    fn memory_that_another_thread_writes_can_be_copied() {
        use std::sync::atomic::{AtomicU8, Ordering};
        let cells: Vec<AtomicU8> = (0..4096).map(|_| AtomicU8::new(1)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| cells.iter().for_each(|cell| cell.store(2, Ordering::Relaxed)));
            let mut copy = vec![0; cells.len()];
            ForeignBytes::from_cells(&cells).copy_to(&mut copy);
            assert!(copy.iter().all(|byte| matches!(byte, 1 | 2)));
        });
    }

    #[test]
    #[should_panic(expected = "reaches beyond")]
    fn a_range_beyond_the_end_is_refused() {
        let _ = ForeignBytes::from_cells(&[0_u8; 4]).slice(2..5);
    }

    #[test]
    #[should_panic(expected = "one byte")]
    fn wide_cells_are_refused() {
        let _ = ForeignBytes::from_cells(&[0_u16; 4]);
    }
}

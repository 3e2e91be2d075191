//! Images in a region: one writer, then any number of readers.
//!
//! Owns: the two ways to reach an extent, as types: `FillingImage` writes, `WholeImage` reads, never both.
//! Must not: outlive its region's mapping (each holds the region), or free a slot that a handle still reads.
//! Invariant: a `WholeImage` exists only after `publish`, or after adoption has checked record and meta bytes.

use std::fmt;
use std::sync::Arc;

use super::layout::{DATA_OFFSET, PAGE_BYTES, Record};
use super::protocol::{self, Phase, State};
use super::{ArenaError, Content, Inner, Slot, record_offset, word_offset};

/// An image that is being written. Dropped without `publish`, it frees its room.
pub struct FillingImage {
    inner: Arc<Inner>,
    slot: usize,
    generation: u64,
    extent_offset: u64,
    extent_len: u64,
    image_len: usize,
    published: bool,
}

impl FillingImage {
    pub(super) fn new(
        inner: Arc<Inner>,
        slot: usize,
        generation: u64,
        extent_offset: u64,
        extent_len: u64,
        image_len: usize,
    ) -> Self {
        Self { inner, slot, generation, extent_offset, extent_len, image_len, published: false }
    }

    /// The bytes of the image. What is in them at first is not said.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the extent is this value's alone from `alloc` to `publish` or drop (the book gave it out once), the
        // image's range lies in it, and `&mut self` makes this the only reference.
        unsafe { self.inner.mapping.slice_mut(DATA_OFFSET + self.extent_offset, self.image_len) }
    }

    /// The bytes of the image so far.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`; `&self` excludes a writer.
        unsafe { self.inner.mapping.slice(DATA_OFFSET + self.extent_offset, self.image_len) }
    }

    /// Its slot in the region.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Declares the image whole, with `meta` to say what it is. From here on it survives the process.
    pub fn publish(mut self, meta: &[u8]) -> Result<WholeImage, ArenaError> {
        let inner = &self.inner;
        inner.check_pid()?;
        let meta_offset = (self.image_len as u64).next_multiple_of(PAGE_BYTES);
        let capacity = (self.extent_len - meta_offset) as usize;
        let Some(meta_len) = u32::try_from(meta.len()).ok().filter(|_| meta.len() <= capacity) else {
            return Err(ArenaError::MetaTooLong { len: meta.len(), capacity });
        };
        // SAFETY: the extent is ours alone, the meta bytes lie in it behind the image, and `self` is owned: no
        // reference to the image's bytes is left.
        unsafe { inner.mapping.write(DATA_OFFSET + self.extent_offset + meta_offset, meta) }
        let mut book = inner.book();
        book.published += 1;
        let record = Record {
            extent_offset: self.extent_offset,
            extent_len: self.extent_len,
            image_len: self.image_len as u64,
            meta_len,
            meta_crc: crc32fast::hash(meta),
            order: book.published,
        };
        // SAFETY: the slot's record is written by the one `FillingImage` of the slot; other processes that look at it
        // do so through the file and compare the state word before and after.
        unsafe { inner.mapping.write(record_offset(self.slot), &record.encode(self.generation)) }
        protocol::publish(inner.mapping.word(word_offset(self.slot)), self.generation);
        let content = Content { record, generation: self.generation };
        book.slots[self.slot] = Slot { content: Some(content), handles: 1, ..Slot::default() };
        drop(book);
        let whole = WholeImage::new(Arc::clone(inner), self.slot, content);
        self.published = true;
        Ok(whole)
    }
}

impl Drop for FillingImage {
    fn drop(&mut self) {
        if self.published || self.inner.check_pid().is_err() {
            return;
        }
        let mut book = self.inner.book();
        protocol::free(self.inner.mapping.word(word_offset(self.slot)), self.generation);
        book.extents.give_back(self.extent_offset);
        book.slots[self.slot] = Slot::default();
    }
}

impl fmt::Debug for FillingImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FillingImage(slot {}, {} bytes)", self.slot, self.image_len)
    }
}

/// A handle of a whole image. Clones are handles of the same image; its room is not used again while one lives.
/// Dropping the handles does not free the image: it stays in the region for a successor, until `release`.
pub struct WholeImage {
    inner: Arc<Inner>,
    slot: usize,
    content: Content,
}

impl WholeImage {
    /// The caller has counted the handle.
    pub(super) fn new(inner: Arc<Inner>, slot: usize, content: Content) -> Self {
        Self { inner, slot, content }
    }

    /// The bytes of the image.
    pub fn bytes(&self) -> &[u8] {
        let record = &self.content.record;
        // SAFETY: a whole image is not written: its slot is freed only when no handle lives, and the record's ranges
        // were checked against the region when it was made or adopted.
        unsafe { self.inner.mapping.slice(DATA_OFFSET + record.extent_offset, record.image_len as usize) }
    }

    /// What was said about it at `publish`.
    pub fn meta(&self) -> &[u8] {
        let record = &self.content.record;
        let start = DATA_OFFSET + record.extent_offset + record.meta_offset();
        // SAFETY: as in `bytes`.
        unsafe { self.inner.mapping.slice(start, record.meta_len as usize) }
    }

    /// Its slot in the region.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Counts the images published in its region: later ones are higher.
    pub fn order(&self) -> u64 {
        self.content.record.order
    }

    /// Bytes that it takes in the region, meta and padding included.
    pub fn extent_bytes(&self) -> u64 {
        self.content.record.extent_len
    }

    /// Whether it is persisted elsewhere.
    pub fn is_done(&self) -> bool {
        // Acquire: pairs with the store in `mark_done`.
        let word = protocol::ReadWord::load_acquire(self.inner.mapping.word(word_offset(self.slot)));
        State::of(word).is_some_and(|state| state.phase == Phase::Done)
    }

    /// Notes, for this process and its successor, that it is persisted elsewhere.
    pub fn mark_done(&self) {
        if self.inner.check_pid().is_ok() {
            protocol::mark_done(self.inner.mapping.word(word_offset(self.slot)), self.content.generation);
        }
    }

    /// Lets the room be used again as soon as no handle is left. From here on `Region::images` leaves it out, but a
    /// successor still finds it until then.
    pub fn release(&self) {
        if self.inner.check_pid().is_ok() {
            self.inner.book().slots[self.slot].released = true;
        }
    }
}

impl Clone for WholeImage {
    fn clone(&self) -> Self {
        if self.inner.check_pid().is_ok() {
            self.inner.book().slots[self.slot].handles += 1;
        }
        Self { inner: Arc::clone(&self.inner), slot: self.slot, content: self.content }
    }
}

impl Drop for WholeImage {
    fn drop(&mut self) {
        // A forked child has copies of its parent's handles; the parent counts its own.
        if self.inner.check_pid().is_ok() {
            self.inner.let_go(self.slot);
        }
    }
}

impl fmt::Debug for WholeImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WholeImage(slot {}, {} bytes)", self.slot, self.content.record.image_len)
    }
}

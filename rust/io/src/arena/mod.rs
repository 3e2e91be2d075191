//! The arena: images in shared memory that outlive the process.
//!
//! Owns: regions, their slots and extents; who may touch which bytes; what a successor may believe.
//! Must not: know what an image or its meta bytes mean (the engine does), or ever hand out an image that is not whole.
//! Invariant: an extent belongs to one `FillingImage` (which alone writes it) or to any number of `WholeImage`s (which
//! only read it) or to nobody; a slot's word says "whole" exactly as long as its extent holds what its record says.
//!
//! Trust. A region file is refused unless it is a plain file of this user with mode 0600 that was not reached through a
//! link: in `/dev/shm` everybody may plant names. Its header and every slot record carry a CRC and are bounds-checked:
//! damage makes a slot vanish, not a read go astray. Against processes of the same user there is no defence: they can
//! as well write into this process.
//!
//! Ownership. The owner holds the file's record lock (`lock.rs`: it dies with the process, and forked DataLoader
//! workers neither inherit nor drop it; an orphaned worker that still maps the region does not keep a successor out).
//! Pid and start time stand in the region besides: for people, and as a second opinion. If a library closed a
//! descriptor of the file behind our back, the lock would be gone though the owner lives; a successor that gets the
//! lock therefore still refuses while the noted process is alive. Two successors at once: the lock has one winner.
//!
//! Memory. The file is sparse; an extent's range is reserved (fallocate) before a byte of it is touched, so a full
//! /dev/shm is an error and never SIGBUS. Reserved memory is kept for the next image.

mod error;
mod extents;
mod image;
mod inspect;
mod layout;
mod mapping;
mod open;
pub mod protocol;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use error::ArenaError;
pub use image::{FillingImage, WholeImage};
pub use inspect::{RegionView, SlotView};

use crate::file;
use crate::lock::FileLock;
use extents::Extents;
use layout::{DATA_OFFSET, OWNER_BYTES, OWNER_OFFSET, PAGE_BYTES, Record, SLOT_BYTES, SLOTS, TABLE_OFFSET};
use mapping::Mapping;
use protocol::Phase;

/// Where a region's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// A file that outlives the process.
    Shared,
    /// Memory that goes with the process.
    Private,
}

/// Bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionUsage {
    /// The most that images can take.
    pub capacity_bytes: u64,
    /// Taken by images now.
    pub used_bytes: u64,
    /// Not taken, in all gaps together.
    pub free_bytes: u64,
    /// Memory behind the region, in use or kept for the next image.
    pub reserved_bytes: u64,
    /// The most that images ever took.
    pub peak_bytes: u64,
}

/// A region that this process owns. Clones are the same region; it is given up when the last clone and the last image
/// are gone (its file stays, unless `unlink`ed).
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

struct Inner {
    mapping: Mapping,
    /// `None`: private memory.
    file: Option<(PathBuf, FileLock)>,
    capacity: u64,
    /// The owner. A forked child has this value too and must not touch the region.
    pid: u32,
    /// Slots that looked torn when the region was adopted.
    torn: usize,
    book: Mutex<Book>,
}

struct Book {
    extents: Extents,
    slots: Vec<Slot>,
    published: u64,
}

#[derive(Clone, Default)]
struct Slot {
    /// What it holds; `None` for a free slot and for one that is being filled.
    content: Option<Content>,
    /// A `FillingImage` has it.
    filling: bool,
    /// `WholeImage`s of it.
    handles: usize,
    /// To be freed with the last handle.
    released: bool,
}

#[derive(Clone, Copy, Debug)]
struct Content {
    record: Record,
    generation: u64,
}

impl Region {
    /// Makes a region of `capacity` bytes (rounded up to a page) in `dir`, as `/dev/shm`. Nothing is reserved but its
    /// tables.
    pub fn create(dir: &Path, capacity: u64) -> Result<Self, ArenaError> {
        open::create(dir, capacity)
    }

    /// Makes a region that goes with the process.
    pub fn private(capacity: u64) -> Result<Self, ArenaError> {
        open::private(capacity)
    }

    /// Takes over the region of a dead process. `Owned` if its owner lives or somebody was faster.
    pub fn adopt(path: &Path) -> Result<Self, ArenaError> {
        open::adopt(path)
    }

    /// Looks at a region without taking it; its owner may be at work.
    pub fn inspect(path: &Path) -> Result<RegionView, ArenaError> {
        inspect::inspect(path)
    }

    /// The regions of this user in `dir`, sorted by name. What others planted there is left out.
    pub fn list(dir: &Path) -> Result<Vec<PathBuf>, ArenaError> {
        open::list(dir)
    }

    /// Removes the region of a dead process, readable or not.
    pub fn remove(path: &Path) -> Result<(), ArenaError> {
        open::remove(path)
    }

    /// Takes a slot and room for an image, with memory behind it.
    pub fn alloc(&self, image_len: u64, meta_capacity: usize) -> Result<FillingImage, ArenaError> {
        let inner = &self.inner;
        inner.check_pid()?;
        let (need, image) = extent_len(image_len, meta_capacity)
            .zip(usize::try_from(image_len).ok())
            .ok_or(ArenaError::TooLarge { need: u64::MAX, capacity: inner.capacity })?;
        if need > inner.capacity {
            return Err(ArenaError::TooLarge { need, capacity: inner.capacity });
        }
        let mut book = inner.book();
        let slot = book
            .slots
            .iter()
            .position(|slot| slot.content.is_none() && !slot.filling)
            .ok_or(ArenaError::NoSlot { slots: SLOTS })?;
        let free = book.extents.free_bytes();
        let start = book.extents.take(need).ok_or(ArenaError::Full { need, free })?;
        if let Err(source) = inner.reserve(&mut book.extents, start, need) {
            book.extents.give_back(start);
            return Err(ArenaError::NoMemory { need, source });
        }
        book.slots[slot] = Slot { filling: true, ..Slot::default() };
        drop(book);
        let generation = protocol::begin(inner.mapping.word(word_offset(slot)));
        Ok(FillingImage::new(Arc::clone(inner), slot, generation, start, need, image))
    }

    /// All whole images, oldest first, those that were made elsewhere in this process included.
    pub fn images(&self) -> Vec<WholeImage> {
        if self.inner.check_pid().is_err() {
            return Vec::new();
        }
        let mut book = self.inner.book();
        let mut images = Vec::new();
        for (index, slot) in book.slots.iter_mut().enumerate().filter(|(_, slot)| !slot.released) {
            if let Some(content) = slot.content {
                slot.handles += 1;
                images.push(WholeImage::new(Arc::clone(&self.inner), index, content));
            }
        }
        images.sort_by_key(WholeImage::order);
        images
    }

    /// Gives memory that no image uses back to the system; returns the bytes.
    pub fn trim(&self) -> u64 {
        if self.inner.check_pid().is_err() {
            return 0;
        }
        let mut book = self.inner.book();
        let before = book.extents.reserved_bytes();
        for gap in book.extents.gaps().collect::<Vec<_>>() {
            // SAFETY: nobody uses a gap, and nobody can take it while the book is locked.
            let result = unsafe { self.inner.mapping.discard(DATA_OFFSET + gap.start, (gap.end - gap.start) as usize) };
            if result.is_ok() {
                book.extents.note_released(gap);
            }
        }
        before - book.extents.reserved_bytes()
    }

    /// Its bytes now.
    pub fn usage(&self) -> RegionUsage {
        let book = self.inner.book();
        RegionUsage {
            capacity_bytes: self.inner.capacity,
            used_bytes: book.extents.used_bytes(),
            free_bytes: book.extents.free_bytes(),
            reserved_bytes: book.extents.reserved_bytes(),
            peak_bytes: book.extents.peak_bytes(),
        }
    }

    /// Where its memory is.
    pub fn kind(&self) -> RegionKind {
        if self.inner.file.is_some() { RegionKind::Shared } else { RegionKind::Private }
    }

    /// Its file, for shared ones.
    pub fn path(&self) -> Option<&Path> {
        self.inner.file.as_ref().map(|(path, _)| path.as_path())
    }

    /// Slots whose contents were not whole or not believable when the region was adopted.
    pub fn torn(&self) -> usize {
        self.inner.torn
    }

    /// Removes its file. The memory stays usable until the last image is gone.
    pub fn unlink(&self) -> Result<(), ArenaError> {
        self.inner.check_pid()?;
        let Some((path, _)) = &self.inner.file else { return Ok(()) };
        match std::fs::remove_file(path) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                Err(open::failed("remove the region", path)(cause))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?}, {} bytes, {:?})", self.kind(), self.inner.capacity, self.path())
    }
}

impl Inner {
    fn book(&self) -> MutexGuard<'_, Book> {
        // Poisoned: a panic between two lines of bookkeeping is not known to leave it wrong, and images must be freed.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a forked child, before any lock: the parent's other threads, and with them the holder of the book, are
    /// not there in the child.
    fn check_pid(&self) -> Result<(), ArenaError> {
        if self.pid == std::process::id() { Ok(()) } else { Err(ArenaError::Forked { pid: self.pid }) }
    }

    /// Puts memory behind the parts of an extent that have none.
    fn reserve(&self, extents: &mut Extents, start: u64, len: u64) -> std::io::Result<()> {
        for part in extents.unreserved(start..start + len) {
            if let Some((_, lock)) = &self.file
                && !file::reserve(lock.file(), DATA_OFFSET + part.start, part.end - part.start)?
            {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::Unsupported,
                    "the file system of the memory tier cannot reserve memory; choose a tmpfs as /dev/shm",
                ));
            }
            extents.note_reserved(part);
        }
        Ok(())
    }

    fn write_owner(&self, owner: [u8; OWNER_BYTES]) {
        // SAFETY: the owner record is written by the owner of the region alone, at the start and the end of its life
        // when no other thread uses the region. Other processes only look at it through the file.
        unsafe { self.mapping.write(OWNER_OFFSET, &owner) }
    }

    /// One handle of a slot less; frees it with the last one, if it was released.
    fn let_go(&self, index: usize) {
        let mut book = self.book();
        let slot = &mut book.slots[index];
        slot.handles -= 1;
        self.free_if_unused(&mut book, index);
    }

    fn free_if_unused(&self, book: &mut Book, index: usize) {
        let slot = &book.slots[index];
        if let Some(content) = slot.content.filter(|_| slot.released && slot.handles == 0) {
            // The word first: once the extent is back in the book, the next image may overwrite it.
            protocol::free(self.mapping.word(word_offset(index)), content.generation);
            book.extents.give_back(content.record.extent_offset);
            book.slots[index] = Slot::default();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_pid().is_ok() {
            // Given up: a successor need not ask whether this process still lives.
            self.write_owner([0; OWNER_BYTES]);
        }
    }
}

/// Where a slot's state word lies.
fn word_offset(slot: usize) -> u64 {
    TABLE_OFFSET + slot as u64 * SLOT_BYTES
}

/// Where a slot's record lies.
fn record_offset(slot: usize) -> u64 {
    word_offset(slot) + size_of::<u64>() as u64
}

/// Bytes of an extent for an image and its meta bytes, at least a page; `None` beyond what a number holds.
fn extent_len(image_len: u64, meta_capacity: usize) -> Option<u64> {
    let meta = u64::from(u32::try_from(meta_capacity).ok()?);
    let len = image_len.checked_next_multiple_of(PAGE_BYTES)?.checked_add(meta)?;
    len.max(1).checked_next_multiple_of(PAGE_BYTES)
}

/// Whether a slot in this phase has contents.
fn has_content(phase: Phase) -> bool {
    matches!(phase, Phase::Whole | Phase::Done)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;

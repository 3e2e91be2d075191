//! A look at a region whose owner may be at work.
//!
//! Owns: reading through the file, with copies and a second look at each state word.
//! Must not: map the region, take its lock, or drop one that this process holds.
//! Invariant: an image in the view was whole at the moment its slot was read.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::layout::{DATA_OFFSET, RECORD_BYTES, Record, SLOTS};
use super::open::{check_file, check_header, failed, is_alive, maker_pid, read_owner, refused};
use super::protocol::{self, Phase, ReadWord, State};
use super::{ArenaError, record_offset, word_offset};
use crate::{file, lock};

/// What a look at a region shows.
#[derive(Clone, Debug)]
pub struct RegionView {
    /// Its file.
    pub path: PathBuf,
    /// Its owner, dead or alive; `None` if it was given up.
    pub pid: Option<u32>,
    /// Whether somebody owns it.
    pub alive: bool,
    /// Whether that is not who made it, but a successor that has adopted it.
    pub adopted: bool,
    /// The most that images can take.
    pub capacity_bytes: u64,
    /// Memory behind it.
    pub reserved_bytes: u64,
    /// Its whole images, oldest first.
    pub images: Vec<SlotView>,
    /// Slots that are being filled, or whose contents are not believable.
    pub torn: usize,
}

/// One whole image.
#[derive(Clone, Debug)]
pub struct SlotView {
    /// Its slot in the region.
    pub slot: usize,
    /// Bytes of the image.
    pub image_len: u64,
    /// What was said about it at `publish`.
    pub meta: Vec<u8>,
    /// Whether it is persisted elsewhere.
    pub done: bool,
    /// Counts the images published in the region.
    pub order: u64,
}

pub(super) fn inspect(path: &Path) -> Result<RegionView, ArenaError> {
    let metadata = std::fs::symlink_metadata(path).map_err(failed("look at the region", path))?;
    check_file(&metadata).map_err(|why| refused(path, why))?;
    lock::without_losing_locks(path, |file, held_here| Ok(view(file, path, held_here)))
        .map_err(failed("open the region", path))?
}

/// The pid noted in a region, for an error message.
pub(super) fn owner_pid(path: &Path) -> Option<u32> {
    let owner = lock::without_losing_locks(path, |file, _| Ok(read_owner(file, path).ok().flatten()));
    owner.ok().flatten().map(|owner| owner.pid)
}

fn view(file: &File, path: &Path, held_here: bool) -> Result<RegionView, ArenaError> {
    let metadata = file.metadata().map_err(failed("look at the region", path))?;
    check_file(&metadata).map_err(|why| refused(path, why))?;
    let header = check_header(file, path)?;
    let owner = read_owner(file, path)?;
    let locked = held_here || lock::is_held_elsewhere(file).map_err(failed("ask for the lock of", path))?;
    let alive = locked || owner.is_some_and(is_alive);
    let mut view = RegionView {
        path: path.to_owned(),
        pid: owner.map(|owner| owner.pid),
        alive,
        adopted: alive && owner.is_some_and(|owner| maker_pid(path) != Some(owner.pid)),
        capacity_bytes: header.capacity,
        reserved_bytes: metadata.blocks() * 512,
        images: Vec::new(),
        torn: 0,
    };
    for slot in 0..SLOTS {
        let word = FileWord { file, offset: word_offset(slot), failed: Cell::new(false) };
        let found = protocol::read(&word, |state| slot_view(file, slot, state, header.capacity));
        match found {
            Some((state, Some(mut image))) => {
                image.done = state.phase == Phase::Done;
                view.images.push(image);
            }
            // Whole, but not believable.
            Some((_, None)) => view.torn += 1,
            // Free, being filled, or replaced while we looked.
            None => {
                let now = State::of(word.load_relaxed());
                view.torn += usize::from(!now.is_some_and(|state| state.phase == Phase::Free));
            }
        }
        if word.failed.get() {
            return Err(failed("read the region", path)(std::io::ErrorKind::UnexpectedEof.into()));
        }
    }
    view.images.sort_by_key(|image| image.order);
    Ok(view)
}

fn slot_view(file: &File, slot: usize, state: State, capacity: u64) -> Option<SlotView> {
    let mut bytes = [0; RECORD_BYTES];
    file::read_exact_at(file, record_offset(slot), &mut bytes).ok()?;
    let record = Record::decode(&bytes, state, capacity)?;
    let mut meta = vec![0; record.meta_len as usize];
    file::read_exact_at(file, DATA_OFFSET + record.extent_offset + record.meta_offset(), &mut meta).ok()?;
    let good = crc32fast::hash(&meta) == record.meta_crc;
    good.then_some(SlotView { slot, image_len: record.image_len, meta, done: false, order: record.order })
}

/// A state word, read through the file. Each read is a system call, which the compiler cannot move and which orders
/// against the next one; the record's CRC, which covers the generation, backs it up.
struct FileWord<'a> {
    file: &'a File,
    offset: u64,
    failed: Cell<bool>,
}

impl ReadWord for FileWord<'_> {
    fn load_acquire(&self) -> u64 {
        let mut bytes = [0; 8];
        if file::read_exact_at(self.file, self.offset, &mut bytes).is_err() {
            self.failed.set(true);
            return 0;
        }
        // The owner writes a native word; regions do not travel between machines.
        u64::from_ne_bytes(bytes)
    }

    fn load_relaxed(&self) -> u64 {
        self.load_acquire()
    }

    fn fence_acquire() {}
}

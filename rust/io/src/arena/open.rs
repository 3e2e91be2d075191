//! Regions come and go: made, adopted, listed, removed.
//!
//! Owns: names, modes and trust of region files; the order in which a new one becomes visible.
//! Must not: believe anything in a file before its lock is held and its header checked.
//! Invariant: a name that ends in `.region` has a whole header: the file is made under another name, locked, filled and
//! renamed. A process killed before leaves a file that the next `create` removes.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::OFlags;

use super::extents::Extents;
use super::layout::{
    DATA_OFFSET, HEADER_BYTES, Header, OWNER_BYTES, OWNER_OFFSET, Owner, PAGE_BYTES, RECORD_BYTES, Record, SLOTS,
};
use super::mapping::Mapping;
use super::protocol::{self, ReadWord, State};
use super::{ArenaError, Book, Content, Inner, Region, Slot, has_content, record_offset, word_offset};
use crate::lock::FileLock;
use crate::{file, limits};

const SUFFIX: &str = ".region";
const UNFINISHED: &str = ".region.new";
/// Names tried before giving up; a second one is needed only if somebody guesses random numbers.
const NAMES_MAX: usize = 16;

/// Turns a system error into ours.
pub(super) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::Io { what, path: path.to_owned(), source }
}

pub(super) fn refused(path: &Path, why: &'static str) -> ArenaError {
    ArenaError::Refused { path: path.to_owned(), why }
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn own_record() -> Owner {
    let pid = std::process::id();
    // 0 where /proc is not there: then the lock alone protects us.
    Owner { pid, start_time: limits::process_start_time(pid).unwrap_or(0) }
}

fn own_boot_id() -> [u8; 36] {
    let mut field = [0; 36];
    let id = limits::boot_id().unwrap_or_default();
    for (byte, letter) in field.iter_mut().zip(id.bytes()) {
        *byte = letter;
    }
    field
}

fn header_for(capacity: u64) -> Result<Header, ArenaError> {
    let too_large = ArenaError::TooLarge { need: capacity, capacity: 1 << 60 };
    let capacity = capacity.checked_next_multiple_of(PAGE_BYTES).filter(|capacity| *capacity <= 1 << 60);
    Ok(Header { capacity: capacity.ok_or(too_large)?, uid: uid(), boot_id: own_boot_id() })
}

pub(super) fn create(dir: &Path, capacity: u64) -> Result<Region, ArenaError> {
    let header = header_for(capacity)?;
    remove_unfinished(dir)?;
    for _ in 0..NAMES_MAX {
        let stem =
            format!("relight-{}-{}-{:016x}", uid(), std::process::id(), nonce().map_err(failed("name a region", dir))?);
        let temporary = dir.join(format!("{stem}{UNFINISHED}"));
        let path = dir.join(format!("{stem}{SUFFIX}"));
        let Some(lock) = FileLock::create_new(&temporary, 0o600).map_err(failed("make a region", &temporary))? else {
            continue;
        };
        let made = fill_new(&lock, &header, &temporary).and_then(|mapping| {
            file::rename(&temporary, &path).map_err(failed("name the region", &path))?;
            Ok(mapping)
        });
        return match made {
            Ok(mapping) => Ok(region(mapping, Some((path, lock)), header.capacity, 0, empty_book(header.capacity))),
            Err(cause) => {
                // The first error is the one to tell; what is left the next `create` removes.
                let _ = fs::remove_file(&temporary);
                Err(cause)
            }
        };
    }
    Err(failed("make a region", dir)(io::ErrorKind::AlreadyExists.into()))
}

/// Gives a new file its length, its tables and their memory.
fn fill_new(lock: &FileLock, header: &Header, path: &Path) -> Result<Mapping, ArenaError> {
    // The length first: reserving would make the file no longer than the tables.
    file::set_len(lock.file(), header.file_len()).map_err(failed("size the region", path))?;
    let tables = super::layout::TABLE_OFFSET + super::layout::TABLE_BYTES as u64;
    match file::reserve(lock.file(), 0, tables) {
        Ok(true) => {}
        Ok(false) => return Err(refused(path, "its file system cannot reserve memory; choose a tmpfs as /dev/shm")),
        Err(source) => return Err(ArenaError::NoMemory { need: tables, source }),
    }
    file::write_all_at(lock.file(), OWNER_OFFSET, &own_record().encode()).map_err(failed("write the region", path))?;
    file::write_all_at(lock.file(), 0, &header.encode()).map_err(failed("write the region", path))?;
    Mapping::of_file(lock.file(), header.file_len()).map_err(failed("map the region", path))
}

pub(super) fn private(capacity: u64) -> Result<Region, ArenaError> {
    let header = header_for(capacity)?;
    let mapping =
        Mapping::anonymous(header.file_len()).map_err(|source| ArenaError::NoMemory { need: capacity, source })?;
    Ok(region(mapping, None, header.capacity, 0, empty_book(header.capacity)))
}

fn region(mapping: Mapping, file: Option<(PathBuf, FileLock)>, capacity: u64, torn: usize, book: Book) -> Region {
    let pid = std::process::id();
    Region { inner: Inner { mapping, file, capacity, pid, torn, book: Mutex::new(book) }.into() }
}

fn empty_book(capacity: u64) -> Book {
    Book { extents: Extents::new(capacity), slots: vec![Slot::default(); SLOTS], published: 0 }
}

pub(super) fn adopt(path: &Path) -> Result<Region, ArenaError> {
    let lock = lock_of_dead(path)?;
    let header = check_header(lock.file(), path)?;
    let owner = read_owner(lock.file(), path)?;
    if let Some(owner) = owner.filter(|owner| is_alive(*owner) && owner.pid != std::process::id()) {
        return Err(ArenaError::Owned { path: path.to_owned(), pid: Some(owner.pid) });
    }
    let mapping = Mapping::of_file(lock.file(), header.file_len()).map_err(failed("map the region", path))?;
    let (book, torn) = believe(&mapping, header.capacity);
    let region = region(mapping, Some((path.to_owned(), lock)), header.capacity, torn, book);
    region.inner.write_owner(own_record().encode());
    let mut book = region.inner.book();
    let contents: Vec<Record> = book.slots.iter().filter_map(|slot| Some(slot.content?.record)).collect();
    for record in contents {
        // Memory is there already; this only notes it, and makes sure of it should the file have been tampered with.
        region
            .inner
            .reserve(&mut book.extents, record.extent_offset, record.extent_len)
            .map_err(|source| ArenaError::NoMemory { need: record.extent_len, source })?;
    }
    drop(book);
    region.give_back_gaps();
    Ok(region)
}

impl Region {
    /// What the dead process had reserved beside its images is of no use to its successor.
    fn give_back_gaps(&self) {
        let Some((_, lock)) = &self.inner.file else { return };
        for gap in self.inner.book().extents.gaps() {
            // A failure costs memory until the region is removed, nothing else.
            let _ = file::release(lock.file(), DATA_OFFSET + gap.start, gap.end - gap.start);
        }
    }
}

/// Takes what can be believed into the book; all other slots become free. Returns how many looked torn.
fn believe(mapping: &Mapping, capacity: u64) -> (Book, usize) {
    let mut book = empty_book(capacity);
    let mut torn = 0;
    for index in 0..SLOTS {
        let word = mapping.word(word_offset(index));
        let raw = word.load_acquire();
        if raw == 0 {
            continue;
        }
        let state = State::of(raw);
        let content = state.filter(|state| has_content(state.phase)).and_then(|state| {
            let mut bytes = [0; RECORD_BYTES];
            // SAFETY: the region's lock is held and its old owner is dead: nobody writes its tables.
            unsafe { mapping.read(record_offset(index), &mut bytes) };
            let record = Record::decode(&bytes, state, capacity)?;
            let meta_start = DATA_OFFSET + record.extent_offset + record.meta_offset();
            // SAFETY: as above; the range was checked against the capacity by `decode`.
            let meta = unsafe { mapping.slice(meta_start, record.meta_len as usize) };
            let good = crc32fast::hash(meta) == record.meta_crc
                && book.extents.occupy(record.extent_offset, record.extent_len);
            good.then_some(Content { record, generation: state.generation })
        });
        match content {
            Some(content) => {
                book.published = book.published.max(content.record.order);
                book.slots[index].content = Some(content);
            }
            None => {
                let is_free = state.is_some_and(|state| state.phase == protocol::Phase::Free);
                torn += usize::from(!is_free);
                protocol::free(word, raw >> 8);
            }
        }
    }
    (book, torn)
}

pub(super) fn list(dir: &Path) -> Result<Vec<PathBuf>, ArenaError> {
    names(dir, SUFFIX)
}

/// Who made the region: its name says so for ever, while the owner in its header changes with each adoption.
pub(super) fn maker_pid(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.split('-').nth(2)?.parse().ok()
}

/// Files of this user in `dir` that are named as regions are.
fn names(dir: &Path, suffix: &str) -> Result<Vec<PathBuf>, ArenaError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(failed("list regions", dir)(cause)),
    };
    let prefix = format!("relight-{}-", uid());
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed("list regions", dir))?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(suffix)) {
            // Not followed if it is a link. What vanishes meanwhile is left out.
            if entry.metadata().is_ok_and(|metadata| check_file(&metadata).is_ok()) {
                paths.push(entry.path());
            }
        }
    }
    paths.sort();
    Ok(paths)
}

pub(super) fn remove(path: &Path) -> Result<(), ArenaError> {
    let lock = lock_of_dead(path)?;
    // A damaged region may be removed; one whose header is good still says who its owner is.
    if let Some(owner) = read_owner(lock.file(), path)?.filter(|owner| is_alive(*owner))
        && owner.pid != std::process::id()
        && check_header(lock.file(), path).is_ok()
    {
        return Err(ArenaError::Owned { path: path.to_owned(), pid: Some(owner.pid) });
    }
    fs::remove_file(path).map_err(failed("remove the region", path))
}

/// Removes what processes left that died while they made a region.
fn remove_unfinished(dir: &Path) -> Result<(), ArenaError> {
    for path in names(dir, UNFINISHED)? {
        // Locked: its maker is at work. Any failure here concerns a few KiB of somebody dead; ours goes on.
        if let Ok(Some(_lock)) = FileLock::try_existing(&path, OFlags::empty()) {
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Takes the lock of a region file that is to be trusted.
fn lock_of_dead(path: &Path) -> Result<FileLock, ArenaError> {
    let before = fs::symlink_metadata(path).map_err(failed("look at the region", path))?;
    check_file(&before).map_err(|why| refused(path, why))?;
    // Nonblocking: a fifo planted after our look must not stop us.
    let lock = FileLock::try_existing(path, OFlags::NONBLOCK).map_err(failed("open the region", path))?;
    let Some(lock) = lock else {
        let pid = super::inspect::owner_pid(path);
        return Err(ArenaError::Owned { path: path.to_owned(), pid });
    };
    // Again, of what was opened.
    let metadata = lock.file().metadata().map_err(failed("look at the region", path))?;
    check_file(&metadata).map_err(|why| refused(path, why))?;
    Ok(lock)
}

/// Whether a file can be a region of this user, or why not.
pub(super) fn check_file(metadata: &fs::Metadata) -> Result<(), &'static str> {
    if !metadata.file_type().is_file() {
        return Err("it is no plain file");
    }
    if metadata.uid() != uid() {
        return Err("it belongs to another user");
    }
    if metadata.mode() & 0o077 != 0 {
        return Err("others than its owner may open it");
    }
    if metadata.nlink() > 1 {
        return Err("it has a second name");
    }
    Ok(())
}

/// The header of a region file, checked against the file.
pub(super) fn check_header(file: &File, path: &Path) -> Result<Header, ArenaError> {
    let mut bytes = [0; HEADER_BYTES];
    match file::read_exact_at(file, 0, &mut bytes) {
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => return Err(refused(path, "it is cut off")),
        other => other.map_err(failed("read the region", path))?,
    }
    let header = Header::decode(&bytes).map_err(|why| refused(path, why))?;
    if header.uid != uid() {
        return Err(refused(path, "it was made by another user"));
    }
    if header.boot_id != own_boot_id() {
        // A memory_dir on a disk outlives the machine; what the memory held at the power cut does not.
        return Err(refused(path, "it is from before the machine was started"));
    }
    let metadata = file.metadata().map_err(failed("look at the region", path))?;
    if metadata.len() < header.file_len() {
        return Err(refused(path, "it is cut off"));
    }
    Ok(header)
}

pub(super) fn read_owner(file: &File, path: &Path) -> Result<Option<Owner>, ArenaError> {
    let mut bytes = [0; OWNER_BYTES];
    match file::read_exact_at(file, OWNER_OFFSET, &mut bytes) {
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        other => other.map_err(failed("read the region", path)).map(|()| Owner::decode(&bytes)),
    }
}

/// Whether the noted process still runs. A start time of 0 was not known and proves nothing.
pub(super) fn is_alive(owner: Owner) -> bool {
    owner.start_time != 0 && limits::process_start_time(owner.pid) == Some(owner.start_time)
}

/// A number that others cannot guess, so that they cannot take the name first.
fn nonce() -> io::Result<u64> {
    let mut bytes = [0; 8];
    io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

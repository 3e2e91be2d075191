//! The disk as a seam: primitive calls, so that a crash can be placed between any two.
//!
//! Owns: the contract that every disk keeps (`testkit::disk_conformance!` proves it for each form).
//! Must not: combine calls. "Write, sync, rename, sync the directory" is engine code (`publish`).

mod nowhere;
mod posix;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use nowhere::{Nowhere, is_memory_only};
pub use posix::PosixDisk;

/// Bytes of a piece of an image, where the disk has no better number.
const PIECE_BYTES: usize = 4 << 20;

/// What a name in a directory is. Links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A link to nothing.
    Dangling,
    /// A socket, a device or the like.
    Other,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name, without the directory.
    pub name: String,
    /// What it is.
    pub kind: EntryKind,
}

/// What the disk says about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Its kind.
    pub kind: EntryKind,
    /// Bytes, for a file.
    pub len: u64,
    /// A number that changes when the content is replaced (inode and change time on POSIX), for caches.
    pub version: u64,
}

/// A file system, as the engine sees it.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Makes a new file for writing; `AlreadyExists` if the name is taken. Mode as `open` with 0666 and the umask.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file for reading.
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file for reading and writing, as the history does; never a published checkpoint file.
    fn modify_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Atomic for readers, replaces `to`; survives a power cut only after `sync_dir` of the directories.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file; survives a power cut only after `sync_dir`.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Makes one directory; `AlreadyExists` if the name is taken. Mode as `mkdir` with 0777 and the umask.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// The names in a directory, in any order. A name that vanishes meanwhile, or is not Unicode, is left out.
    fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;
    /// Looks at a path, following links.
    fn metadata(&self, path: &Path) -> io::Result<Metadata>;
    /// The names in this directory are durable on return.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Takes the exclusive advisory lock of the file at `path` (made if absent) and writes `holder` into it, for the
    /// error message of whoever waits. `WouldBlock` if another holder keeps it beyond `wait`. Death releases it.
    /// On return the locked file is the one at `path`: a name that was removed or replaced meanwhile is opened again.
    fn lock(&self, path: &Path, holder: &str, wait: Duration) -> io::Result<Box<dyn DiskLock>>;
    /// Bytes that this user may still write below `path`, where the file system says.
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>>;
    /// The absolute path with links resolved. The path must exist, or be a link: where that leads may be free.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf>;
    /// Where the file system of `path` is mounted, for messages about what it cannot do; None where that is unknown.
    fn mount_point(&self, path: &Path) -> Option<PathBuf> {
        let _ = path;
        None
    }
}

/// An open file. After any error it is dead: give it up, remove it, never write or sync it again.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// Writes all of `bytes` at `offset`; short writes are continued.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`, in pieces, in any order and as many at once as the disk likes; `written` is told
    /// the bytes of each piece that is done. The bytes of an image: a driver with a queue keeps it full from here.
    fn write_pieces(&mut self, mut offset: u64, bytes: &[u8], written: &mut dyn FnMut(u64)) -> io::Result<()> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.write_at(offset, piece)?;
            offset += piece.len() as u64;
            written(piece.len() as u64);
        }
        Ok(())
    }
    /// Fills all of `buffer` from `offset`; `UnexpectedEof` if the file ends before.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Reserves room for `len` bytes where the file system can, so that a full disk shows before the first byte.
    fn reserve(&mut self, len: u64) -> io::Result<()>;
    /// The bytes are durable on return.
    fn sync(&mut self) -> io::Result<()>;
    /// Bytes in the file.
    fn len(&self) -> io::Result<u64>;
    /// Whether the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// An advisory lock; dropped = released.
pub trait DiskLock: Send + fmt::Debug {}

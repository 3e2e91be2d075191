//! No disk at all: the persistent tier of a root that lives in the memory tier alone.
//!
//! Owns: that such a root is an empty directory to whoever reads, and that nothing is ever written.
//! Must not: touch a file system.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{DirEntry, Disk, DiskFile, DiskLock, EntryKind, Metadata};

/// What the name of a root without a persistent tier begins with.
pub(crate) const MEMORY_PREFIX: &str = "memory:";

/// Whether this is the name of a root without a persistent tier.
pub(crate) fn is_memory_only(root: &Path) -> bool {
    root.as_os_str().as_encoded_bytes().starts_with(MEMORY_PREFIX.as_bytes())
}

/// Reads as an empty root; every write is refused as "no room", since memory had none when a write is tried.
#[derive(Debug)]
pub(crate) struct Nowhere {
    root: PathBuf,
}

impl Nowhere {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }
}

fn refused<T>() -> io::Result<T> {
    let why = "the memory tier has no room and no storage path is set; set one, or raise the memory limit";
    Err(io::Error::new(io::ErrorKind::StorageFull, why))
}

fn absent<T>() -> io::Result<T> {
    Err(io::ErrorKind::NotFound.into())
}

impl Disk for Nowhere {
    fn create_file(&self, _: &Path) -> io::Result<Box<dyn DiskFile>> {
        refused()
    }

    fn open_file(&self, _: &Path) -> io::Result<Box<dyn DiskFile>> {
        absent()
    }

    fn modify_file(&self, _: &Path) -> io::Result<Box<dyn DiskFile>> {
        absent()
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        refused()
    }

    fn remove_file(&self, _: &Path) -> io::Result<()> {
        absent()
    }

    fn create_dir(&self, _: &Path) -> io::Result<()> {
        refused()
    }

    fn remove_dir(&self, _: &Path) -> io::Result<()> {
        absent()
    }

    fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        if path == self.root { Ok(Vec::new()) } else { absent() }
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        if path == self.root { Ok(Metadata { kind: EntryKind::Directory, len: 0, version: 0 }) } else { absent() }
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, _: &Path, _: &str, _: Duration) -> io::Result<Box<dyn DiskLock>> {
        refused()
    }

    fn free_bytes(&self, _: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.to_path_buf())
    }
}

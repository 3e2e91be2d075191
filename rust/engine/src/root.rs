//! A root: the directory that holds tags.
//!
//! Owns: opening it, and what its parts share (disk, clock, limits, the cache of manifests, the names last seen in it).
//! Must not: read or write a tag itself (`catalog`, `generation`, `commit` and `retention` do).

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use relight_format::manifest::Manifest;
use relight_format::names;

use crate::clock::Clock;
use crate::disk::{DirEntry, Disk, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::generation::TagStore;
use crate::history::History;
use crate::layout;
use crate::publish;

/// How a root is opened.
#[derive(Clone, Copy, Debug)]
pub struct RootOptions {
    /// Makes the directory, and those above it, if it is absent.
    pub create: bool,
    /// How long to wait for a tag that another process is changing.
    pub lock_wait: Duration,
}

impl Default for RootOptions {
    fn default() -> Self {
        Self { create: true, lock_wait: Duration::from_secs(30) }
    }
}

/// A manifest as it was read, and how to tell that it was replaced since.
#[derive(Clone)]
pub(crate) struct Cached {
    pub(crate) version: u64,
    pub(crate) len: u64,
    pub(crate) manifest: Arc<Manifest>,
}

/// One directory that holds tags. Cheap to clone; clones share their cache.
#[derive(Clone)]
pub struct RootStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) path: PathBuf,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lock_wait: Duration,
    pub(crate) cache: Mutex<HashMap<PathBuf, Cached>>,
    /// What the last listing found, each name after what it is where case is ignored.
    names: Mutex<BTreeSet<(String, String)>>,
    /// Renaming was seen to work here.
    renames: AtomicBool,
}

impl fmt::Debug for RootStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RootStore").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

impl RootStore {
    /// Opens the root at `path`; links are resolved once, here.
    ///
    /// # Errors
    /// NotFound if it is absent and `create` is off, InvalidArgument if it is no directory, else what the disk says.
    pub fn open(disk: Arc<dyn Disk>, clock: Arc<dyn Clock>, path: &Path, options: RootOptions) -> Result<Self> {
        if options.create {
            make_dirs(disk.as_ref(), path)?;
        }
        let resolved = disk.canonical(path).map_err(|cause| Error::io("open the root", path, cause))?;
        let found = disk.metadata(&resolved).map_err(|cause| Error::io("open the root", path, cause))?;
        if found.kind != EntryKind::Directory {
            let message = format!("{} is not a directory; a root is a directory that holds tags", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, message).at(path));
        }
        let inner = Inner {
            path: resolved,
            disk,
            clock,
            lock_wait: options.lock_wait,
            cache: Mutex::new(HashMap::new()),
            names: Mutex::new(BTreeSet::new()),
            renames: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The absolute path, links resolved.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The tag `tag`, for writing; nothing is made yet.
    ///
    /// # Errors
    /// InvalidArgument if the name cannot be a tag.
    pub fn tag(&self, tag: &str) -> Result<TagStore> {
        check_tag(tag)?;
        Ok(TagStore::new(self.clone(), tag))
    }

    /// The root's history of saves, loads and failures.
    pub fn history(&self) -> History {
        History::new(self.clone())
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.inner.disk
    }

    /// Remembers the names that a listing of the root found.
    pub(crate) fn learn_names(&self, entries: &[DirEntry]) {
        let names = entries.iter().map(|entry| (names::fold_case(&entry.name), entry.name.clone())).collect();
        // a panic elsewhere leaves the set whole: each change is one assignment
        *self.inner.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// Whether the last listing found names that differ from this one in case only, but not this one.
    pub(crate) fn knows_case_twin(&self, name: &str) -> bool {
        let folded = names::fold_case(name);
        let names = self.inner.names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alike = names.range((folded.clone(), String::new())..).take_while(|(other, _)| *other == folded);
        let found = alike.next().is_some();
        found && !names.contains(&(folded, name.to_owned()))
    }

    /// Makes the root and its own directory, which holds the locks, if they are gone.
    pub(crate) fn make_own(&self) -> Result<()> {
        let disk = self.disk().as_ref();
        make_dirs(disk, self.path())?;
        make_dir(disk, &layout::root_own(self.path()))
    }

    /// As `make_own`, and sees once that the file system can publish.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.make_own()?;
        let disk = self.disk().as_ref();
        if !self.inner.renames.load(Ordering::Relaxed) {
            let root_lock = self.lock("probing the file system")?;
            publish::probe_rename(disk, &layout::root_own(self.path()))?;
            drop(root_lock);
            // Relaxed: a second probe by another thread does no harm
            self.inner.renames.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes the root's lock; only for the moment of a change of names, never while bytes are written.
    pub(crate) fn lock(&self, purpose: &str) -> Result<Box<dyn crate::disk::DiskLock>> {
        let holder = format!("pid {} ({purpose})", std::process::id());
        let what = format!("root {}", self.path().display());
        crate::tag_lock::take(
            self.disk().as_ref(),
            &layout::root_lock(self.path()),
            &what,
            &holder,
            self.inner.lock_wait,
        )
    }
}

/// Whether `tag` can be a tag, as an error of the engine.
pub fn check_tag(tag: &str) -> Result<()> {
    names::check_tag(tag).map_err(|cause| Error::new(ErrorKind::InvalidArgument, cause.to_string()).of_tag(tag))
}

/// Makes one directory; one that is there already is no error.
pub(crate) fn make_dir(disk: &dyn Disk, path: &Path) -> Result<()> {
    match disk.create_dir(path) {
        Ok(()) => Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => match disk.metadata(path) {
            Ok(found) if found.kind == EntryKind::Directory => Ok(()),
            Err(missing) if missing.kind() != io::ErrorKind::NotFound => {
                Err(Error::io("make the directory", path, missing))
            }
            Ok(_) | Err(_) => {
                let message =
                    format!("{} is in the way: it is no directory, or a link to nothing; remove it", path.display());
                Err(Error::new(ErrorKind::InvalidArgument, message).at(path))
            }
        },
        Err(cause) => Err(Error::io("make the directory", path, cause)),
    }
}

/// Makes a directory and those above it. Each new name is durable on return.
pub(crate) fn make_dirs(disk: &dyn Disk, path: &Path) -> Result<()> {
    match disk.metadata(path) {
        Ok(_) => return Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
        Err(cause) => return Err(Error::io("make the directory", path, cause)),
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if parent != path {
        make_dirs(disk, parent)?;
    }
    make_dir(disk, path)?;
    publish::sync_dir(disk, parent)
}

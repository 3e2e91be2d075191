//! Publish: bytes become a name in one step, whole and durable.
//!
//! Owns: the order write, sync the file, rename, sync the directory; the names of temporary files; every rename.
//! Must not: decide what is published (commit does) or who may (locks do).
//! Invariant: a published name leads to bytes that were durable before the name was; a file that met an error is
//! given up, never written or synced again.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::disk::{Disk, DiskFile, DiskLock, EntryKind};
use crate::error::{Error, ErrorKind, Result};

/// How the name of every temporary file begins.
pub const TEMP_PREFIX: &str = ".relight-tmp-";

/// How many temporary names of one path are looked at for what dead writers left.
const SLOTS_SWEPT: u32 = 4;
/// How many writers may save to one path at the same moment.
const SLOTS_MAX: u32 = 64;

/// Whether `name` is a temporary file of relight.
pub fn is_temp(name: &str) -> bool {
    name.starts_with(TEMP_PREFIX)
}

/// A file under way: bytes go to a temporary name in the target's directory until `finish`.
/// Dropped before that, the temporary file is removed.
pub struct PendingFile {
    disk: Arc<dyn Disk>,
    temp: PathBuf,
    target: PathBuf,
    /// None once the file met an error or was finished.
    file: Option<Box<dyn DiskFile>>,
    /// The temporary name is still there.
    temp_exists: bool,
    /// Keeps the temporary name ours, where no tag lock or generation lock does.
    slot: Option<Slot>,
    /// The process that made it: a forked child has a copy, and must not remove what its parent writes.
    pid: u32,
}

/// A held temporary name of a path: its lock file tells a living writer from a dead one.
struct Slot {
    lock_path: PathBuf,
    _lock: Box<dyn DiskLock>,
}

impl fmt::Debug for PendingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingFile").field("target", &self.target).finish_non_exhaustive()
    }
}

impl PendingFile {
    /// A file for `<directory>/<name>`, in a directory where the caller alone may write temporary names.
    pub(crate) fn in_directory(disk: &Arc<dyn Disk>, directory: &Path, name: &str) -> Result<Self> {
        let temp = temp_path(directory, name);
        let target = directory.join(name);
        remove_if_there(disk.as_ref(), &temp)?;
        let file = disk.create_file(&temp).map_err(|cause| Error::io(format!("create {name}"), &target, cause))?;
        Ok(Self {
            disk: Arc::clone(disk),
            temp,
            target,
            file: Some(file),
            temp_exists: true,
            slot: None,
            pid: std::process::id(),
        })
    }

    /// A file for `path` itself, in a directory that belongs to anybody; a link is followed, so that it stays a link.
    /// Temporary files that dead writers left for this path are removed.
    pub fn for_path(disk: &Arc<dyn Disk>, path: &Path) -> Result<Self> {
        let target = match disk.canonical(path) {
            Ok(resolved) => resolved,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => path.to_path_buf(),
            Err(cause) => return Err(Error::io("save the file", path, cause)),
        };
        let name = match target.file_name().map(|name| name.to_string_lossy().into_owned()) {
            Some(name) if !is_directory(disk.as_ref(), &target)? => name,
            _ => {
                let message = format!("cannot save to {}: it is a directory; name a file in it", path.display());
                return Err(Error::new(ErrorKind::InvalidArgument, message).at(path));
            }
        };
        let directory = directory_of(&target);
        let short = short_name(&name);
        let slot_of = |number: u32| {
            let temp = directory.join(format!("{TEMP_PREFIX}{short:08x}-{number}"));
            let lock_path = directory.join(format!("{TEMP_PREFIX}{short:08x}-{number}.lock"));
            (temp, lock_path)
        };
        let mut held = None;
        for number in 0..SLOTS_MAX {
            let (temp, lock_path) = slot_of(number);
            if held.is_some() {
                if number >= SLOTS_SWEPT {
                    break;
                }
                sweep_slot(disk.as_ref(), &temp, &lock_path);
            } else {
                match disk.lock(&lock_path, &format!("pid {}", std::process::id()), Duration::ZERO) {
                    Ok(lock) => held = Some((temp, Slot { lock_path, _lock: lock })),
                    Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                    Err(cause) => return Err(Error::create(&target, &directory, cause)),
                }
            }
        }
        let Some((temp, slot)) = held else {
            let message =
                format!("cannot save {}: {SLOTS_MAX} other writers are saving to it; save again", target.display());
            return Err(Error::new(ErrorKind::Conflict, message).at(target));
        };
        let mut pending = Self {
            disk: Arc::clone(disk),
            temp,
            target,
            file: None,
            temp_exists: false,
            slot: Some(slot),
            pid: std::process::id(),
        };
        remove_if_there(disk.as_ref(), &pending.temp)?;
        let file =
            disk.create_file(&pending.temp).map_err(|cause| Error::create(&pending.target, &directory, cause))?;
        pending.file = Some(file);
        pending.temp_exists = true;
        Ok(pending)
    }

    /// Where the bytes will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Reserves room for `len` bytes, so that a full disk shows before the first byte.
    pub fn reserve(&mut self, len: u64) -> Result<()> {
        self.with_file("reserve room for", |file| file.reserve(len))
    }

    /// Writes all of `bytes` at `offset`. After an error the file is dead and its temporary name removed.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.with_file("write", |file| file.write_at(offset, bytes))
    }

    /// As `write_at`, for many bytes: `written` is told of each piece that is done.
    pub(crate) fn write_pieces(&mut self, offset: u64, bytes: &[u8], written: &mut dyn FnMut(u64)) -> Result<()> {
        self.with_file("write", |file| file.write_pieces(offset, bytes, written))
    }

    /// The bytes become durable, then the name leads to them. The name itself is durable once the directory is synced.
    pub fn finish(mut self) -> Result<()> {
        self.with_file("sync", |file| file.sync())?;
        self.rename_to_target()
    }

    /// As `finish`, and the name is durable on return.
    pub fn finish_durable(mut self) -> Result<()> {
        self.with_file("sync", |file| file.sync())?;
        self.rename_to_target()?;
        sync_dir(self.disk.as_ref(), &directory_of(&self.target))
    }

    /// Replaces the name in one step but asks for no durability: after a power cut the file may be empty.
    pub fn finish_without_sync(mut self) -> Result<()> {
        self.rename_to_target()
    }

    fn rename_to_target(&mut self) -> Result<()> {
        if self.file.take().is_none() {
            return Err(self.dead());
        }
        rename(self.disk.as_ref(), &self.temp, &self.target)?;
        self.temp_exists = false;
        Ok(())
    }

    fn with_file(&mut self, verb: &str, call: impl FnOnce(&mut dyn DiskFile) -> io::Result<()>) -> Result<()> {
        let Some(file) = self.file.as_mut() else { return Err(self.dead()) };
        let Err(cause) = call(file.as_mut()) else { return Ok(()) };
        // After a failed write or sync the kernel may have dropped the dirty pages: a second sync of this file would
        // say that all is well. So the file is given up here.
        self.discard();
        let name = self.target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut error = Error::io(format!("{verb} {name}"), &self.target, cause);
        if error.kind == ErrorKind::StorageFull
            && let Ok(Some(free)) = self.disk.free_bytes(&directory_of(&self.target))
        {
            error.message.push_str(&format!(" ({free} bytes are free there)"));
        }
        Err(error)
    }

    fn dead(&self) -> Error {
        let message = format!("{} met an error before; save it again, to a new file", self.target.display());
        Error::new(ErrorKind::StorageUnavailable, message).at(&self.target)
    }

    fn discard(&mut self) {
        self.file = None;
        if self.temp_exists {
            // best effort: whoever saves here next removes it
            let _ = self.disk.remove_file(&self.temp);
            self.temp_exists = false;
        }
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.discard();
        if let Some(slot) = self.slot.take() {
            // removed while the lock is held; a waiter finds the name gone and makes its own
            let _ = self.disk.remove_file(&slot.lock_path);
        }
    }
}

/// The temporary name of `<directory>/<name>`, where a lock leaves it to one writer.
pub(crate) fn temp_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{TEMP_PREFIX}{:08x}", short_name(name)))
}

/// Publishes `bytes` as `<directory>/<name>`, durable on return. The caller holds the lock of this directory.
pub(crate) fn publish(disk: &Arc<dyn Disk>, directory: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let mut pending = PendingFile::in_directory(disk, directory, name)?;
    pending.write_at(0, bytes)?;
    pending.finish_durable()
}

/// The one rename of the engine. Not durable before the directories are synced.
pub(crate) fn rename(disk: &dyn Disk, from: &Path, to: &Path) -> Result<()> {
    disk.rename(from, to).map_err(|cause| rename_error(disk, from, to, cause))
}

/// The names in `directory` are durable on return.
pub(crate) fn sync_dir(disk: &dyn Disk, directory: &Path) -> Result<()> {
    disk.sync_dir(directory).map_err(|cause| Error::io("sync the directory", directory, cause))
}

/// Removes a file; one that is not there is no error.
pub(crate) fn remove_if_there(disk: &dyn Disk, path: &Path) -> Result<()> {
    match disk.remove_file(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, cause)),
        _ => Ok(()),
    }
}

/// Whether renaming works in `directory`; asked before the first byte of a checkpoint is written there.
pub(crate) fn probe_rename(disk: &dyn Disk, directory: &Path) -> Result<()> {
    let from = directory.join(format!("{TEMP_PREFIX}probe"));
    let to = directory.join(format!("{TEMP_PREFIX}probe-renamed"));
    remove_if_there(disk, &from)?;
    disk.create_file(&from).map_err(|cause| Error::io("create a file", &from, cause))?;
    let renamed = rename(disk, &from, &to);
    let left = if renamed.is_ok() { &to } else { &from };
    let removed = remove_if_there(disk, left);
    renamed.and(removed)
}

fn rename_error(disk: &dyn Disk, from: &Path, to: &Path, cause: io::Error) -> Error {
    let unsupported = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::PERM, Errno::XDEV].map(Errno::raw_os_error);
    if !cause.raw_os_error().is_some_and(|code| unsupported.contains(&code)) {
        return Error::io(format!("rename {}", from.display()), to, cause);
    }
    let directory = directory_of(to);
    let mount = disk.mount_point(&directory).unwrap_or(directory);
    // EPERM is also what a sticky or immutable directory says: then it is a matter of permissions
    let kind = if cause.kind() == io::ErrorKind::PermissionDenied {
        ErrorKind::StorageDenied
    } else {
        ErrorKind::InvalidArgument
    };
    let message = format!(
        "cannot publish {}: the file system mounted at {} refuses to rename files ({cause}). relight publishes a \
         checkpoint by one atomic rename, so that it is whole or invisible: save to a local or network file system",
        to.display(),
        mount.display()
    );
    Error::new(kind, message).at(to).because(cause)
}

/// Removes what a dead writer left in a slot; leaves that of a living one alone.
fn sweep_slot(disk: &dyn Disk, temp: &Path, lock_path: &Path) {
    if disk.metadata(lock_path).is_err() && disk.metadata(temp).is_err() {
        return;
    }
    if let Ok(_lock) = disk.lock(lock_path, "", Duration::ZERO) {
        // best effort: the slot is looked at again by the next save to this path
        let _ = disk.remove_file(temp);
        let _ = disk.remove_file(lock_path);
    }
}

fn is_directory(disk: &dyn Disk, path: &Path) -> Result<bool> {
    match disk.metadata(path) {
        Ok(found) => Ok(found.kind == EntryKind::Directory),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(cause) => Err(Error::io("save the file", path, cause)),
    }
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// A short stand-in for a name that may be as long as the file system allows. Two names of one directory that share it
/// share the temporary names too, which the locks keep apart.
fn short_name(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |mixed: u32, byte| (mixed ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

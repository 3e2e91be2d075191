//! The real disk: a POSIX file system.
//!
//! Owns: the translation of `Disk` into system calls; a call that a signal broke off is made again, and a path whose
//! handle was stale is looked up again.
//! Must not: touch the umask or a mode (a plain open and mkdir give what the user's umask says); combine calls.
//! Invariant: a descriptor that met an error is never written or synced again; locks do not pass through exec.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::{Errno, retry_on_intr};

use super::{DirEntry, Disk, DiskFile, DiskLock, EntryKind, Metadata};

/// The file system of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct PosixDisk;

/// How often a lock that is taken is asked for again. `flock` itself knows no time limit.
const LOCK_POLL: Duration = Duration::from_millis(5);

/// How often a path is looked up again whose handle was stale.
const LOOKUPS_MAX: u32 = 3;

impl Disk for PosixDisk {
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        // std opens with 0666 and O_CLOEXEC
        let file = again(|| OpenOptions::new().read(true).write(true).create_new(true).open(path))?;
        Ok(Box::new(PosixFile { file }))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = again(|| {
            let file = File::open(path)?;
            match file.metadata()?.is_dir() {
                true => Err(io::Error::from(io::ErrorKind::IsADirectory)),
                false => Ok(file),
            }
        })?;
        Ok(Box::new(PosixFile { file }))
    }

    fn modify_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = again(|| OpenOptions::new().read(true).write(true).open(path))?;
        Ok(Box::new(PosixFile { file }))
    }

    #[allow(clippy::disallowed_methods, reason = "this is the real form of the Disk seam")]
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        again(|| fs::rename(from, to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        again(|| fs::remove_file(path))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        again(|| fs::create_dir(path))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        again(|| fs::remove_dir(path))
    }

    fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in again(|| fs::read_dir(path))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let kind = match entry.file_type() {
                Ok(kind) if kind.is_file() => EntryKind::File,
                Ok(kind) if kind.is_dir() => EntryKind::Directory,
                Ok(kind) if kind.is_symlink() => match fs::metadata(entry.path()) {
                    Ok(found) => kind_of(&found),
                    Err(_) => EntryKind::Dangling,
                },
                Ok(_) => EntryKind::Other,
                // removed since the directory was read, perhaps by another host
                Err(cause) if is_gone(&cause) => continue,
                Err(cause) => return Err(cause),
            };
            entries.push(DirEntry { name, kind });
        }
        Ok(entries)
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let found = again(|| fs::metadata(path))?;
        let kind = kind_of(&found);
        let len = if kind == EntryKind::File { found.len() } else { 0 };
        Ok(Metadata { kind, len, version: version_of(&found) })
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let directory = again(|| File::open(path))?;
        match directory.sync_all() {
            // what network file systems say that write names through and have nothing left to sync for a directory
            Err(cause) if cause.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(()),
            other => other,
        }
    }

    fn lock(&self, path: &Path, holder: &str, wait: Duration) -> io::Result<Box<dyn DiskLock>> {
        let mut waited = Duration::ZERO;
        loop {
            let file = again(|| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path))?;
            match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
                Ok(()) => {
                    // whoever held it before may have removed the file: a lock on that one excludes nobody
                    if is_at(&file, path)? {
                        // It is only for messages: on a full disk the lock must still be had, or nothing could be
                        // deleted there.
                        let _ = write_holder(&file, holder);
                        return Ok(Box::new(PosixLock { file, pid: std::process::id() }));
                    }
                }
                Err(Errno::WOULDBLOCK) if waited >= wait => return Err(io::Error::from(io::ErrorKind::WouldBlock)),
                Err(Errno::WOULDBLOCK) => {
                    let nap = LOCK_POLL.min(wait - waited);
                    pause(nap);
                    waited += nap;
                }
                Err(cause) => return Err(cause.into()),
            }
        }
    }

    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        let found = retry_on_intr(|| rustix::fs::statvfs(path))?;
        Ok(Some(found.f_bavail.saturating_mul(found.f_frsize)))
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        match again(|| fs::canonicalize(path)) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => dangling_target(path).ok_or(cause),
            other => other,
        }
    }

    fn mount_point(&self, path: &Path) -> Option<PathBuf> {
        let mut point = path.ancestors().find_map(|above| fs::canonicalize(above).ok())?;
        let device = fs::metadata(&point).ok()?.dev();
        while let Some(parent) = point.parent() {
            if fs::metadata(parent).ok()?.dev() != device {
                break;
            }
            point = parent.to_path_buf();
        }
        Some(point)
    }
}

#[derive(Debug)]
struct PosixFile {
    file: File,
}

impl DiskFile for PosixFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn reserve(&mut self, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        // KEEP_SIZE: a file that shows its final length before its bytes are there would look whole
        match retry_on_intr(|| rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, len)) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(cause) => Err(cause.into()),
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

#[derive(Debug)]
struct PosixLock {
    file: File,
    pid: u32,
}

impl DiskLock for PosixLock {}

impl Drop for PosixLock {
    fn drop(&mut self) {
        // A forked child shares the lock of its parent. If the child unlocked its copy, the parent would go on writing
        // unprotected; if the parent only closed its own, the child would hold the lock for as long as it lives.
        if std::process::id() == self.pid {
            // an error changes nothing: closing the file is the second way to release it
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// Makes a call on a path again that a signal broke off, or that met a stale handle.
fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut lookups_left = LOOKUPS_MAX;
    loop {
        match call() {
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            // another host changed the directory: NFS says so once, and the next look finds what is there now
            Err(cause) if cause.raw_os_error() == Some(Errno::STALE.raw_os_error()) && lookups_left > 0 => {
                lookups_left -= 1;
            }
            other => return other,
        }
    }
}

/// Where the link at `path` leads, although nothing is there yet: what is saved to it goes there, and it stays a link.
fn dangling_target(path: &Path) -> Option<PathBuf> {
    const LINKS_MAX: usize = 40; // as the kernel
    let mut target = path.parent()?.join(fs::read_link(path).ok()?);
    for _ in 1..LINKS_MAX {
        let Ok(next) = fs::read_link(&target) else { break };
        target = target.parent()?.join(next);
    }
    let parent = target.parent()?;
    let directory = fs::canonicalize(parent).unwrap_or_else(|_| parent.to_path_buf());
    Some(directory.join(target.file_name()?))
}

fn is_gone(cause: &io::Error) -> bool {
    cause.kind() == io::ErrorKind::NotFound || cause.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

fn kind_of(found: &fs::Metadata) -> EntryKind {
    if found.is_file() {
        EntryKind::File
    } else if found.is_dir() {
        EntryKind::Directory
    } else {
        EntryKind::Other
    }
}

/// Inode and change time, mixed so that each bit of either shows.
fn version_of(found: &fs::Metadata) -> u64 {
    let mut mixed = 0xcbf2_9ce4_8422_2325_u64;
    for word in [found.dev(), found.ino(), found.ctime().cast_unsigned(), found.ctime_nsec().cast_unsigned()] {
        mixed = (mixed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    mixed
}

/// Whether the open `file` is what the name `path` leads to.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match again(|| fs::metadata(path)) {
        Ok(named) => Ok(held.ino() == named.ino() && held.dev() == named.dev()),
        Err(cause) if is_gone(&cause) => Ok(false),
        Err(cause) => Err(cause),
    }
}

fn write_holder(mut file: &File, holder: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all(holder.as_bytes())
}

#[allow(clippy::disallowed_methods, reason = "flock has no time limit: the real form of the Disk seam asks again")]
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

//! Locks of a tag and of a root: who may change what is committed.
//!
//! Owns: the wait for a lock and the error that names its holder.
//! Must not: be held while bytes of a checkpoint are written (the generation's own lock is, which excludes nobody).
//! Invariant: locks are taken in the order tag, root, history; so no two writers wait for each other.

use std::io;
use std::path::Path;
use std::time::Duration;

use relight_format::manifest::Writer;

use crate::disk::{Disk, DiskLock};
use crate::error::{Error, ErrorKind, Result};

/// What a waiter reads about the holder of a lock.
pub(crate) fn holder_text(writer: &Writer) -> String {
    format!("pid {} on host {} (rank {})", writer.pid, writer.host, writer.rank)
}

/// A held lock of a tag: who has one may change what is committed in that tag, and nobody else does meanwhile.
#[derive(Debug)]
pub(crate) struct TagLock {
    _lock: Box<dyn DiskLock>,
}

impl TagLock {
    /// Waits for the lock of `tag` at `path`.
    pub(crate) fn take(disk: &dyn Disk, path: &Path, tag: &str, holder: &str, wait: Duration) -> Result<Self> {
        let lock = take(disk, path, &format!("tag {tag}"), holder, wait).map_err(|error| error.of_tag(tag))?;
        Ok(Self { _lock: lock })
    }

    /// The lock, if nobody holds it.
    pub(crate) fn try_take(disk: &dyn Disk, path: &Path, holder: &str) -> Result<Option<Self>> {
        Ok(try_take(disk, path, holder)?.map(|lock| Self { _lock: lock }))
    }
}

/// Takes the lock at `path`, which protects `what` ("tag global_step5").
pub(crate) fn take(
    disk: &dyn Disk,
    path: &Path,
    what: &str,
    holder: &str,
    wait: Duration,
) -> Result<Box<dyn DiskLock>> {
    match disk.lock(path, holder, wait) {
        Ok(lock) => Ok(lock),
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
            let other = read_holder(disk, path).unwrap_or_else(|| "another process".to_owned());
            let message = format!(
                "{what} is being changed by {other}, for longer than {:.1} s; let one process write it, or save again",
                wait.as_secs_f64()
            );
            Err(Error::new(ErrorKind::Conflict, message).at(path))
        }
        Err(cause) if cause.kind() == io::ErrorKind::Unsupported => {
            let mount = disk.mount_point(path).unwrap_or_else(|| path.to_path_buf());
            let message = format!(
                "cannot lock {what}: the file system mounted at {} has no file locks ({cause}). relight needs them to \
                 keep writers apart: save to a local or network file system",
                mount.display()
            );
            Err(Error::new(ErrorKind::InvalidArgument, message).at(path).because(cause))
        }
        Err(cause) => Err(Error::io(format!("lock {what}"), path, cause)),
    }
}

/// Takes the lock at `path` if nobody holds it.
pub(crate) fn try_take(disk: &dyn Disk, path: &Path, holder: &str) -> Result<Option<Box<dyn DiskLock>>> {
    match disk.lock(path, holder, Duration::ZERO) {
        Ok(lock) => Ok(Some(lock)),
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(cause) => Err(Error::io("lock", path, cause)),
    }
}

fn read_holder(disk: &dyn Disk, path: &Path) -> Option<String> {
    const HOLDER_BYTES_MAX: u64 = 512;
    let file = disk.open_file(path).ok()?;
    let len = file.len().ok()?.min(HOLDER_BYTES_MAX);
    let mut text = vec![0; usize::try_from(len).ok()?];
    file.read_at(0, &mut text).ok()?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

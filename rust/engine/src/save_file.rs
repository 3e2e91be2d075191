//! Save to a path: the blocking form, without memory tier, tag or history.
//!
//! Owns: what `relight.save` promises: old file or new file, whole, and durable on return.
//! Must not: keep more than two windows of the image; touch the old file before the new one is durable.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use relight_io::copy;
use serde::Serialize;

use crate::clock::Clock;
use crate::disk::{Disk, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::plan::ImagePlan;
use crate::publish::PendingFile;
use crate::stage::Copier;
use crate::stream::{End, stream_image};
use crate::wait::Interrupt;

/// The least chunk: below it, checksums cost more than they tell.
pub(crate) const CHUNK_BYTES_MIN: u64 = 64 << 10;

/// What kind of memory holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Shared memory: it outlives the process.
    Shared,
    /// Memory of the process: it dies with it.
    Private,
    /// None: written through windows.
    None,
}

impl MemoryKind {
    /// Its word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Private => "private",
            Self::None => "none",
        }
    }
}

/// What staging, or a blocking write, of one file did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageReport {
    /// Length of the image.
    pub bytes: u64,
    /// CRC-32 of the whole image.
    pub crc32: u32,
    /// All of the call.
    pub seconds: f64,
    /// Of it, waiting for room in the memory tier.
    pub wait_seconds: f64,
    /// Written through windows, not kept in memory.
    pub streamed: bool,
    /// Where the image is now.
    pub memory: MemoryKind,
}

/// How a file is written.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions {
    /// Compare the sources with the copy once all is copied.
    pub compare: bool,
    /// Threads that copy.
    pub copy_threads: usize,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Return only when a power cut cannot take the file back.
    pub durable: bool,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { compare: false, copy_threads: 2, chunk_bytes: 4 << 20, durable: true }
    }
}

/// Writes the image of `plan` as `path`: temporary name in the same directory, sync, rename, sync of the directory.
///
/// A link is followed and stays a link. A file with other hard links is replaced under this name only: the other
/// names keep the old content.
///
/// # Errors
/// `path` is then byte for byte what it was, and the temporary file is gone (or removed by the next save, after a
/// kill). `Torn` if `compare` finds a difference.
pub fn save_file(
    disk: &Arc<dyn Disk>,
    clock: &Arc<dyn Clock>,
    path: &Path,
    plan: &ImagePlan<'_>,
    options: &SaveOptions,
    interrupt: Interrupt<'_>,
) -> Result<StageReport> {
    check_chunk_bytes(options.chunk_bytes)?;
    check_target(disk.as_ref(), path)?;
    let started = clock.monotonic();
    let mut file = PendingFile::for_path(disk, path)?;
    let target = file.target().to_path_buf();
    let need = plan.total_len();
    let copier = Copier {
        kernel: copy::best(),
        threads: options.copy_threads,
        chunk_bytes: options.chunk_bytes,
        clock: clock.as_ref(),
        interrupt,
    };
    let end = if options.durable { End::Durable } else { End::NoSync };
    let sums = file
        .reserve(need)
        .and_then(|()| stream_image(plan, copier, file, end, options.compare))
        .map_err(|error| with_need(error, disk.as_ref(), &target, need))?;
    Ok(StageReport {
        bytes: need,
        crc32: sums.crc32,
        seconds: seconds_since(clock.as_ref(), started),
        wait_seconds: 0.0,
        streamed: true,
        memory: MemoryKind::None,
    })
}

/// Refuses what a rename would destroy: a directory, a device (`/dev/null`), a pipe.
pub(crate) fn check_target(disk: &dyn Disk, path: &Path) -> Result<()> {
    let what = match disk.metadata(path).map(|found| found.kind) {
        Ok(EntryKind::Directory) => "a directory",
        Ok(EntryKind::Other) => "no plain file",
        // A new name, or an error that the creation of the file will meet too and say better.
        Ok(EntryKind::File | EntryKind::Dangling) | Err(_) => return Ok(()),
    };
    let text = format!("cannot save to {}: it is {what}; give the path of a file", path.display());
    Err(Error::new(ErrorKind::InvalidArgument, text).at(path))
}

pub(crate) fn check_chunk_bytes(chunk_bytes: u64) -> Result<()> {
    if chunk_bytes >= CHUNK_BYTES_MIN && chunk_bytes.is_multiple_of(4096) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidArgument,
        format!("chunk_bytes is {chunk_bytes}; give a multiple of 4096, at least {CHUNK_BYTES_MIN}"),
    ))
}

pub(crate) fn seconds_since(clock: &dyn Clock, start: Duration) -> f64 {
    clock.monotonic().saturating_sub(start).as_secs_f64()
}

/// Says of a full disk how much was needed and how much there is, on the target's own file system.
pub(crate) fn with_need(mut error: Error, disk: &dyn Disk, target: &Path, need: u64) -> Error {
    if error.kind != ErrorKind::StorageFull {
        return error;
    }
    let directory = target.parent().unwrap_or(Path::new("/"));
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let free = match disk.free_bytes(directory) {
        Ok(Some(free)) => format!("{} has {free} bytes free", directory.display()),
        _ => format!("{} is full", directory.display()),
    };
    // The system's own words stay: quota, file size limit and full disk are different cures.
    let cause = error.source.as_ref().map(|cause| format!(" ({cause})")).unwrap_or_default();
    error.message = format!("{name} needs {need} bytes, {free}{cause}. Free space, lower keep, or choose another path");
    error.at(target)
}

//! Thin, complete file calls.
//!
//! Owns: what POSIX leaves to the caller: short writes are continued, EINTR is retried, every descriptor is close-on-exec.
//! Must not: combine steps of a commit, or retry a failed write or sync (after an error a file is dead).
//! Calls go through the C library, so that tests can inject faults by a preloaded one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

/// Bytes reserved in one call: bounded, so that a signal (whose interrupted call starts over) costs little.
const RESERVE_STEP_BYTES: u64 = 64 << 20;

/// Repeats a call that a signal interrupted.
pub(crate) fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

/// Opens `path` with `flags` (close-on-exec is added); `mode` counts if it is made.
pub(crate) fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<OwnedFd> {
    retry(|| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode)))
}

/// Makes a new file for writing and reading; `AlreadyExists` if the name is taken. Mode 0666 with the umask.
pub fn create_new(path: &Path) -> io::Result<File> {
    open(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, 0o666).map(File::from)
}

/// Opens an existing file for reading.
pub fn open_read(path: &Path) -> io::Result<File> {
    open(path, OFlags::RDONLY, 0).map(File::from)
}

/// Writes all of `bytes` at `offset`.
pub fn write_all_at(file: &File, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = retry(|| rustix::io::pwrite(file, bytes, offset))?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

/// Fills all of `buffer` from `offset`; `UnexpectedEof` if the file ends before.
pub fn read_exact_at(file: &File, mut offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        let read = retry(|| rustix::io::pread(file, &mut *buffer, offset))?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer = &mut buffer[read..];
        offset += read as u64;
    }
    Ok(())
}

/// Reserves storage for `start..start + len` and makes the file at least that long. `Ok(false)` where the file system
/// cannot reserve: the caller goes on without.
pub fn reserve(file: &File, start: u64, len: u64) -> io::Result<bool> {
    let end = start.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
    let mut at = start;
    while at < end {
        let step = RESERVE_STEP_BYTES.min(end - at);
        match retry(|| rustix::fs::fallocate(file, FallocateFlags::empty(), at, step)) {
            Ok(()) => at += step,
            Err(cause) if cause.kind() == io::ErrorKind::Unsupported => return Ok(false),
            Err(cause) => return Err(cause),
        }
    }
    Ok(true)
}

/// Gives the storage of `start..start + len` back; the range reads as zeroes.
pub fn release(file: &File, start: u64, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    retry(|| rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len))
}

/// Sets the length of the file.
pub fn set_len(file: &File, len: u64) -> io::Result<()> {
    retry(|| rustix::fs::ftruncate(file, len))
}

/// Data and metadata of the file are durable on return.
pub fn sync(file: &File) -> io::Result<()> {
    retry(|| rustix::fs::fsync(file))
}

/// Data of the file, and the metadata needed to read it, are durable on return.
pub fn sync_data(file: &File) -> io::Result<()> {
    retry(|| rustix::fs::fdatasync(file))
}

/// The names in the directory are durable on return. File systems that have no such call need none.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    let directory = open(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
    match retry(|| rustix::fs::fsync(&directory)) {
        Err(cause) if cause.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(()),
        other => other,
    }
}

/// Moves `from` to `to`, replacing it, atomically for readers.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    retry(|| rustix::fs::rename(from, to))
}

/// Bytes that this user may still write below `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = retry(|| rustix::fs::statvfs(path))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_end_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = create_new(&path).unwrap();
        assert!(reserve(&file, 0, 10_000).unwrap());
        assert_eq!(file.metadata().unwrap().len(), 10_000);
        write_all_at(&file, 5000, b"relight").unwrap();
        sync(&file).unwrap();
        sync_data(&file).unwrap();
        sync_dir(dir.path()).unwrap();
        let file = open_read(&path).unwrap();
        let mut back = [0; 7];
        read_exact_at(&file, 5000, &mut back).unwrap();
        assert_eq!(&back, b"relight");
        assert_eq!(read_exact_at(&file, 9999, &mut back).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(free_bytes(dir.path()).unwrap() > 0);
    }

    #[test]
    fn a_taken_name_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        create_new(&path).unwrap();
        assert_eq!(create_new(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn released_ranges_read_as_zeroes_and_give_their_storage_back() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let file = create_new(&dir.path().join("image")).unwrap();
        write_all_at(&file, 0, &vec![1; 1 << 20]).unwrap();
        sync(&file).unwrap();
        let before = file.metadata().unwrap().blocks();
        release(&file, 0, 1 << 20).unwrap();
        sync(&file).unwrap();
        assert!(file.metadata().unwrap().blocks() < before);
        let mut byte = [9];
        read_exact_at(&file, 77, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }
}

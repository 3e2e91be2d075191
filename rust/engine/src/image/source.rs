//! Where the bytes of an image come from.
//!
//! Owns: positional reads that are whole or an error, and the error of a file that ends too soon.
//! Must not: know what the bytes mean.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use relight_io::buffer::AlignedBuf;

use crate::disk::DiskFile;
use crate::error::{Error, ErrorKind, Result};

/// Bytes in memory that do not change while this lives.
pub trait ImageBytes: Send + Sync {
    /// The bytes of the image.
    fn bytes(&self) -> &[u8];
}

impl ImageBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

pub(super) enum Source {
    File(Box<dyn DiskFile>),
    Memory(Arc<dyn ImageBytes>),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => write!(f, "File({file:?})"),
            Self::Memory(bytes) => write!(f, "Memory({} bytes)", bytes.bytes().len()),
        }
    }
}

impl Source {
    /// Fills `into` from `offset`.
    pub(super) fn read(&self, path: &Path, offset: u64, into: &mut [u8]) -> Result<()> {
        match self {
            Self::File(file) => file.read_at(offset, into).map_err(|cause| failed(path, offset, into.len(), cause)),
            Self::Memory(bytes) => {
                into.copy_from_slice(within(bytes.bytes(), path, offset, into.len())?);
                Ok(())
            }
        }
    }

    /// `count` bytes from `offset`: where they are, or through `buffer`, which is made as large as the first use needs.
    pub(super) fn view<'v>(
        &'v self,
        path: &Path,
        offset: u64,
        count: usize,
        buffer: &'v mut Buffer,
    ) -> Result<&'v [u8]> {
        match self {
            Self::File(file) => {
                let into = buffer.of_len(count).map_err(|cause| Error::no_memory(count as u64, cause).at(path))?;
                file.read_at(offset, into).map_err(|cause| failed(path, offset, count, cause))?;
                Ok(into)
            }
            Self::Memory(bytes) => within(bytes.bytes(), path, offset, count),
        }
    }
}

/// The buffer of one reading thread: page-aligned, grown to its largest use, which the pieces bound.
#[derive(Debug, Default)]
pub(super) struct Buffer(Option<AlignedBuf>);

impl Buffer {
    fn of_len(&mut self, len: usize) -> io::Result<&mut [u8]> {
        if self.0.as_ref().is_none_or(|buffer| buffer.len() < len) {
            self.0 = None; // never both at once
        }
        let buffer = match self.0.take() {
            Some(buffer) => buffer,
            None => AlignedBuf::new(len.next_power_of_two())?,
        };
        Ok(&mut self.0.insert(buffer)[..len])
    }
}

fn within<'b>(bytes: &'b [u8], path: &Path, offset: u64, count: usize) -> Result<&'b [u8]> {
    let start = usize::try_from(offset).ok();
    start
        .and_then(|start| bytes.get(start..start.checked_add(count)?))
        .ok_or_else(|| failed(path, offset, count, io::ErrorKind::UnexpectedEof.into()))
}

fn failed(path: &Path, offset: u64, count: usize, cause: io::Error) -> Error {
    if cause.kind() != io::ErrorKind::UnexpectedEof {
        return Error::io(format_args!("read {count} bytes at offset {offset}"), path, cause);
    }
    // The length was checked when it was opened.
    let message = format!(
        "{} is corrupt: it ended before offset {} while it was read: another process has cut it short; {}",
        path.display(),
        offset + count as u64,
        super::WAY_OUT
    );
    Error::new(ErrorKind::Corrupt, message).at(path).because(cause)
}

//! Image: one readable torch.save archive, in a file or in the memory tier.
//!
//! Owns: what a reader is told of an archive, and that no byte of an entry is handed out as good unless its checksum
//! says so.
//! Must not: find the file of a tag (`catalog` does); unpickle; write.
//! Invariant: memory used for reading is bounded by the number of threads, not by the file.
//!
//! What a caller can tell apart when an image does not open:
//! - `Corrupt`: the bytes are not what was written (cut short, overwritten, flipped).
//! - `InvalidArgument`, the message holding [`LEGACY`]: torch.save's formats before zip; `torch.load` reads them.
//! - `InvalidArgument`, the message holding [`FOREIGN_ZIP`]: a zip that torch.save did not write.
//!
//! An entry that a foreign tool has compressed (`stored` is false) is listed; reading it is `InvalidArgument`, the
//! message holding [`COMPRESSED`].

mod check;
mod fill;
mod source;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use relight_format::crc::Crc;
use relight_format::manifest::FileRecord;
use relight_format::zip::{Archive, ArchiveEntry, FileKind, ParseError, ZipError};

use crate::clock::Clock;
use crate::disk::{Disk, DiskFile, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::wait::Interrupt;

pub use fill::FillTarget;
pub use source::ImageBytes;

use source::Source;

/// In the message for a file of torch.save's formats before zip.
pub const LEGACY: &str = "torch.save's legacy format";
/// In the message for a zip archive that torch.save did not write.
pub const FOREIGN_ZIP: &str = "a zip archive that torch.save did not write";
/// In the message for an entry that is not stored as it is.
pub const COMPRESSED: &str = "compressed by a foreign tool";

/// Bytes that one thread reads and checks at a time.
const PIECE_BYTES: u64 = 2 << 20;

/// Where an image's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In the memory tier.
    Memory,
    /// In a file.
    Persistent,
}

impl Tier {
    /// The word of this tier.
    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Persistent => "persistent",
        }
    }
}

/// How a long read behaves.
#[derive(Clone, Copy)]
pub struct ReadOptions<'c> {
    /// Threads that read, the caller's included.
    pub threads: usize,
    /// Times the polls of `interrupt`.
    pub clock: &'c dyn Clock,
    /// Asked about every 100 ms on the caller's thread; its error ends the read.
    pub interrupt: Interrupt<'c>,
}

impl fmt::Debug for ReadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadOptions").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// One readable archive.
#[derive(Debug)]
pub struct Image {
    source: Source,
    /// Where its bytes are: a file, or `memory:<tag>/<file>`.
    path: PathBuf,
    tag: Option<String>,
    tier: Tier,
    len: u64,
    archive: Archive,
    record: Option<FileRecord>,
    /// For each chunk of the record, whether a read has found it good: a second read of a part of it need not.
    good_chunks: Vec<AtomicBool>,
}

impl Image {
    /// Opens the file at `path`. With the manifest's `record` its length must be as recorded, and parts of an entry can
    /// be checked by the chunks' checksums.
    ///
    /// # Errors
    /// As the module's header says; NotFound and the like from the disk.
    pub fn open_file(disk: &dyn Disk, path: &Path, record: Option<&FileRecord>) -> Result<Self> {
        let found = disk.metadata(path).map_err(|cause| Error::io("open", path, cause))?;
        if found.kind != EntryKind::File {
            let message =
                format!("{} is not a file; give the path of a file that torch.save or relight wrote", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, message).at(path));
        }
        let file = disk.open_file(path).map_err(|cause| Error::io("open", path, cause))?;
        // Of the open file, not of the name: that may be another file by now.
        let len = file.len().map_err(|cause| Error::io("open", path, cause))?;
        Self::open(Source::File(file), path.to_owned(), Tier::Persistent, len, record.cloned())
    }

    /// Opens an image in memory, which is kept for as long as this object lives. `label` says what it is, as
    /// `<tag>/<file>`.
    ///
    /// # Errors
    /// As the module's header says.
    pub fn from_memory(bytes: Arc<dyn ImageBytes>, label: &str, record: Option<FileRecord>) -> Result<Self> {
        let len = bytes.bytes().len() as u64;
        Self::open(Source::Memory(bytes), PathBuf::from(format!("memory:{label}")), Tier::Memory, len, record)
    }

    /// The image in a file that is open already, as the catalogue hands it out: whatever is committed or deleted since
    /// then, these are the bytes that `record` speaks of.
    ///
    /// # Errors
    /// As the module's header says.
    pub fn of_file(file: Box<dyn DiskFile>, path: &Path, record: &FileRecord) -> Result<Self> {
        let len = file.len().map_err(|cause| Error::io("open", path, cause))?;
        Self::open(Source::File(file), path.to_owned(), Tier::Persistent, len, Some(record.clone()))
    }

    fn open(source: Source, path: PathBuf, tier: Tier, len: u64, record: Option<FileRecord>) -> Result<Self> {
        if let Some(record) = record.as_ref().filter(|record| record.bytes != len) {
            return Err(wrong_length(&path, len, record));
        }
        let parsed = Archive::parse(len, &mut |offset, count| {
            let mut bytes = vec![0; count]; // bounded by the parser
            source.read(&path, offset, &mut bytes).map(|()| bytes)
        });
        let archive = parsed.map_err(|error| match error {
            ParseError::Read(error) => error,
            ParseError::Zip(error) => unreadable(&path, record.as_ref(), error),
        })?;
        let good_chunks = record.iter().flat_map(|record| &record.chunks).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { source, path, tag: None, tier, len, archive, record, good_chunks })
    }

    /// Names the tag, for messages.
    #[must_use]
    pub fn of_tag(mut self, tag: impl Into<String>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// Where its bytes are.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// The file, or `memory:<tag>/<file>`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the archive.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes; never true of an image that opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The folder that all entries lie in.
    pub fn stem(&self) -> &str {
        &self.archive.stem
    }

    /// The entries, in the order of the archive.
    pub fn entries(&self) -> &[ArchiveEntry] {
        &self.archive.entries
    }

    /// Whether the entries have checksums: torch.save can be told to leave them out, then nothing can be verified.
    pub fn has_checksums(&self) -> bool {
        self.archive.has_checksums
    }

    /// What the manifest says of the file, where there is one.
    pub fn record(&self) -> Option<&FileRecord> {
        self.record.as_ref()
    }

    /// All bytes of entry `index`, checked against its checksum.
    ///
    /// # Errors
    /// Corrupt, naming file, entry and offset; InvalidArgument for an index that is not there or a compressed entry.
    pub fn read(&self, index: usize) -> Result<Vec<u8>> {
        let entry = self.stored_entry(index)?;
        let mut bytes = Vec::new();
        // The length is bounded by the file's, which may be far more than there is memory.
        let count = usize::try_from(entry.len).ok().filter(|count| bytes.try_reserve_exact(*count).is_ok());
        let Some(count) = count else {
            let message = format!("no memory for the {} bytes of {}; read it in parts", entry.len, self.name_of(entry));
            return Err(self.error(ErrorKind::InvalidArgument, message));
        };
        bytes.resize(count, 0);
        self.source.read(&self.path, entry.data_offset, &mut bytes).map_err(|error| self.tagged(error))?;
        let mut crc = Crc::new();
        crc.update(&bytes);
        self.check_entry(entry, crc.value())?;
        Ok(bytes)
    }

    fn stored_entry(&self, index: usize) -> Result<&ArchiveEntry> {
        let count = self.archive.entries.len();
        let Some(entry) = self.archive.entries.get(index) else {
            let message = format!("{} has no entry {index}, only {count}", self.path.display());
            return Err(self.error(ErrorKind::InvalidArgument, message));
        };
        if !entry.stored {
            let message = format!("{} is {COMPRESSED}; torch.load may read it", self.name_of(entry));
            return Err(self.error(ErrorKind::InvalidArgument, message));
        }
        Ok(entry)
    }

    /// Corrupt unless `crc` is what the archive says of the entry, or it says nothing.
    fn check_entry(&self, entry: &ArchiveEntry, crc: u32) -> Result<()> {
        if crc == entry.crc32 || !self.archive.has_checksums {
            return Ok(());
        }
        Err(self.corrupt(entry_problem(entry, crc)))
    }

    /// `entry data/0 of /ckpt/model.pt`.
    fn name_of(&self, entry: &ArchiveEntry) -> String {
        format!("entry {} of {}", entry.name, self.path.display())
    }

    fn corrupt(&self, fact: impl fmt::Display) -> Error {
        let message = format!("{} is corrupt: {fact}; {WAY_OUT}", self.path.display());
        self.error(ErrorKind::Corrupt, message)
    }

    fn error(&self, kind: ErrorKind, message: String) -> Error {
        self.tagged(Error::new(kind, message).at(&self.path))
    }

    fn tagged(&self, error: Error) -> Error {
        match &self.tag {
            Some(tag) => error.of_tag(tag),
            None => error,
        }
    }
}

/// What to do about a damaged file.
const WAY_OUT: &str = "load another checkpoint, or put an intact copy of this file in its place";

/// `entry data/0 (offset 4096, 12 bytes) has checksum 00000000, written was 11111111`.
fn entry_problem(entry: &ArchiveEntry, crc: u32) -> String {
    format!(
        "entry {} (offset {}, {} bytes) has checksum {crc:08x}, written was {:08x}",
        entry.name, entry.data_offset, entry.len, entry.crc32
    )
}

fn wrong_length(path: &Path, len: u64, record: &FileRecord) -> Error {
    let what = if len < record.bytes { "it was cut short" } else { "it was overwritten" };
    let message = format!(
        "{} is corrupt: it has {len} bytes, its manifest says {}: {what}; {WAY_OUT}",
        path.display(),
        record.bytes
    );
    Error::new(ErrorKind::Corrupt, message).at(path)
}

/// The error for bytes that are no readable archive. What a manifest speaks of was one when it was written.
fn unreadable(path: &Path, record: Option<&FileRecord>, error: ZipError) -> Error {
    let shown = path.display();
    let (kind, message) = match (&error, record) {
        (ZipError::NotZip(FileKind::LegacyPickle | FileKind::LegacyTar), None) => {
            (ErrorKind::InvalidArgument, format!("{shown} is in {LEGACY}, not a zip archive; load it with torch.load"))
        }
        (ZipError::NotTorch(why), None) => (
            ErrorKind::InvalidArgument,
            format!("{shown} is {FOREIGN_ZIP}: {why}; give a file that torch.save or relight wrote"),
        ),
        (ZipError::NotZip(_), None) => {
            (ErrorKind::Corrupt, format!("{shown} is not a file of torch.save, or its beginning is damaged; {WAY_OUT}"))
        }
        (ZipError::Unsupported { .. }, None) => (ErrorKind::InvalidArgument, format!("{shown}: {error}")),
        _ => (ErrorKind::Corrupt, format!("{shown} is corrupt: {error}; {WAY_OUT}")),
    };
    Error::new(kind, message).at(path).because(error)
}

//! History: `checkpointHistories.csv`, one line for each thing that happened to a checkpoint.
//!
//! Owns: the file, its one writer at a time, its header.
//! Must not: cost a save anything (its errors are returned, callers log them); be synced (it is a record, no promise).
//! Invariant: the file begins with the header, unless it is not ours; each record is one line.

use std::io;
use std::path::PathBuf;

use relight_format::history::{COLUMNS, FILE_NAME, HEADER, HistoryRecord};

use crate::cleanup::{look_again, read_whole};
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, ErrorKind, Result};
use crate::layout;
use crate::root::RootStore;
use crate::tag_lock;

/// The history of a root.
#[derive(Clone, Debug)]
pub struct History {
    root: RootStore,
}

impl History {
    pub(crate) fn new(root: RootStore) -> Self {
        Self { root }
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.root.path().join(FILE_NAME)
    }

    /// Appends one line, and the header before it where it is missing. A line that a killed writer left half stays
    /// alone on its line.
    ///
    /// # Errors
    /// Conflict if another process holds the history for longer than the limit; else what the disk says.
    pub fn append(&self, record: &HistoryRecord) -> Result<()> {
        self.root.make_own()?;
        let disk = self.root.disk().as_ref();
        let lock_path = layout::history_lock(self.root.path());
        let holder = format!("pid {}", std::process::id());
        let _lock = tag_lock::take(disk, &lock_path, "the history", &holder, self.root.inner.lock_wait)?;
        self.write(disk, &line_of(record)?).map_err(|cause| Error::io("write the history", &self.path(), cause))
    }

    /// All records, oldest first: the fields of [`COLUMNS`]. Lines that are not whole are left out.
    ///
    /// # Errors
    /// What the disk says; a history that is not there has no records.
    pub fn records(&self) -> Result<Vec<Vec<String>>> {
        let path = self.path();
        let text = match look_again(|| read_whole(self.root.disk().as_ref(), &path)) {
            Ok(text) => text,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(cause) => return Err(Error::io("read the history", &path, cause)),
        };
        let text = String::from_utf8_lossy(&text);
        // line by line: a quote that a torn line left open must not swallow the lines after it
        let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        Ok(whole.filter(|line| *line != HEADER).filter_map(fields_of).collect())
    }

    fn write(&self, disk: &dyn Disk, line: &[u8]) -> io::Result<()> {
        let path = self.path();
        let mut file = match disk.modify_file(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => disk.create_file(&path)?,
            other => other?,
        };
        let header = format!("{HEADER}\n").into_bytes();
        let len = file.len()?;
        let begin = read_part(file.as_ref(), 0, len.min(header.len() as u64))?;
        let mut text = Vec::new();
        if len < header.len() as u64 && header.starts_with(&begin) {
            // new, or its first writer died within the header
            text.extend_from_slice(&header);
            text.extend_from_slice(line);
            return file.write_at(0, &text);
        }
        let tail_len = len.min(TAIL_BYTES);
        let tail = read_part(file.as_ref(), len - tail_len, tail_len)?;
        let torn = tail.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        if !torn.is_empty() {
            if torn.iter().filter(|byte| **byte == b'"').count() % 2 == 1 {
                text.push(b'"'); // closes the field, for readers that look for its end over many lines
            }
            text.push(b'\n');
        }
        if begin != header {
            let all = read_part(file.as_ref(), 0, len)?;
            if !all.split(|byte| *byte == b'\n').any(|line| line == HEADER.as_bytes()) {
                text.extend_from_slice(&header); // a history of Nebula: its lines stay, ours say what they are
            }
        }
        text.extend_from_slice(line);
        file.write_at(len, &text)
    }
}

/// How far back from the end a line may have begun that a writer left half.
const TAIL_BYTES: u64 = 64 << 10;

fn read_part(file: &dyn DiskFile, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?];
    file.read_at(offset, &mut bytes)?;
    Ok(bytes)
}

fn line_of(record: &HistoryRecord) -> Result<Vec<u8>> {
    let cannot = |cause: String| Error::new(ErrorKind::InvalidArgument, format!("cannot write the history: {cause}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(record.fields()).map_err(|cause| cannot(cause.to_string()))?;
    writer.into_inner().map_err(|cause| cannot(cause.to_string()))
}

fn fields_of(line: &str) -> Option<Vec<String>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(line.as_bytes());
    let record = reader.records().next()?.ok()?;
    (record.len() == COLUMNS.len()).then(|| record.iter().map(str::to_owned).collect())
}

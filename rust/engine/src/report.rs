//! Report: what is in memory, ours and that of others, for people and tools.
//!
//! Owns: the shape of these reports.
//! Must not: take a lock of a region or change one, but for `remove_region`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use relight_format::record::{SlotRecord, Target};
use relight_io::arena::{ArenaError, Region, RegionView};
use serde::Serialize;

use crate::core::State;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::memory_dir;
use crate::save_file::MemoryKind;
use crate::staged::{Entry, Fate};

/// A checkpoint, or a file by itself, in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InMemory {
    /// Its root; none for a file by itself.
    pub root: Option<String>,
    /// Its tag; for a file by itself its path.
    pub tag: String,
    /// Its step.
    pub step: Option<i64>,
    /// Its files.
    pub files: Vec<String>,
    /// Of its images.
    pub bytes: u64,
    /// `staged`, `persisted`, `failed`, or `incomplete` for one whose save was not finished.
    pub state: &'static str,
}

/// The memory tier of this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// What kind of memory images go to first.
    pub kind: MemoryKind,
    /// Where shared memory is made.
    pub dir: String,
    /// The file of the shared region.
    pub region: Option<String>,
    /// The budget; 0 before the first save.
    pub capacity_bytes: u64,
    /// Bytes of images now, those of adopted regions included.
    pub used_bytes: u64,
    /// Bytes of memory behind them.
    pub reserved_bytes: u64,
    /// The most that was ever used.
    pub peak_bytes: u64,
    /// What it holds, oldest first.
    pub checkpoints: Vec<InMemory>,
    /// Why it is not shared memory, or less than was asked for.
    pub reason: Option<String>,
}

impl MemoryReport {
    pub(crate) fn of(state: &State) -> Self {
        let tier = &state.tier;
        Self {
            kind: tier.kind(),
            dir: tier.dir.display().to_string(),
            region: tier.shared.as_ref().and_then(Region::path).map(|path| path.display().to_string()),
            capacity_bytes: tier.budget,
            used_bytes: tier.used_bytes(),
            reserved_bytes: tier.reserved_bytes(),
            peak_bytes: tier.peak_bytes,
            checkpoints: state.staged.entries().iter().map(in_memory).collect(),
            reason: tier.reason.clone(),
        }
    }
}

fn in_memory(entry: &Entry) -> InMemory {
    let staged = &entry.staged;
    InMemory {
        root: staged.root().map(|root| root.display().to_string()),
        tag: staged.tag().map_or_else(|| staged.place().display().to_string(), |record| record.tag.clone()),
        step: staged.tag().and_then(|record| record.step),
        files: staged.images.iter().map(|image| image.record.file.clone()).collect(),
        bytes: staged.bytes(),
        state: match entry.fate {
            Fate::Waiting => "staged",
            Fate::Persisted => "persisted",
            Fate::Failed => "failed",
            Fate::OnlyHere => "memory only",
        },
    }
}

/// A region of this user on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RegionReport {
    /// Its file.
    pub path: String,
    /// The process that made or adopted it.
    pub pid: Option<u32>,
    /// Whether that process lives.
    pub alive: bool,
    /// Whether that is a successor, at work on what a dead process left.
    pub adopted: bool,
    /// The most that images can take.
    pub capacity_bytes: u64,
    /// Memory behind it.
    pub reserved_bytes: u64,
    /// What it holds.
    pub checkpoints: Vec<InMemory>,
    /// Images that are not whole.
    pub torn: usize,
}

/// The regions of this user; what cannot be read is left out.
pub fn regions(dir: Option<&Path>) -> Result<Vec<RegionReport>> {
    let paths = Region::list(&memory_dir(dir)).map_err(arena_error)?;
    // One that vanishes or is refused meanwhile is not a region to report.
    Ok(paths.iter().filter_map(|path| Region::inspect(path).ok()).map(|view| report(&view)).collect())
}

/// Removes a region whose owner is dead, with what is staged in it.
pub fn remove_region(path: &Path) -> Result<()> {
    Region::remove(path).map_err(arena_error)
}

fn arena_error(cause: ArenaError) -> Error {
    let (kind, path): (ErrorKind, Option<PathBuf>) = match &cause {
        ArenaError::Owned { path, .. } => (ErrorKind::Conflict, Some(path.clone())),
        ArenaError::Refused { path, .. } => (ErrorKind::InvalidArgument, Some(path.clone())),
        ArenaError::Io { path, source, .. } => {
            let kind = Error::io("", path, std::io::Error::from(source.kind())).kind;
            (kind, Some(path.clone()))
        }
        _ => (ErrorKind::StorageUnavailable, None),
    };
    let error = Error::new(kind, cause.to_string()).because(cause);
    match path {
        Some(path) => error.at(path),
        None => error,
    }
}

fn report(view: &RegionView) -> RegionReport {
    let mut found: BTreeMap<(Option<String>, String, u64), InMemory> = BTreeMap::new();
    for slot in &view.images {
        let Ok(record) = SlotRecord::parse(&slot.meta) else { continue };
        let (root, tag, share) = match &record {
            SlotRecord::Image(image) => match &image.target {
                Target::Tag { root, tag } => (Some(root.clone()), tag.clone(), image.share),
                Target::File(target) => (None, target.path.clone(), image.share),
            },
            SlotRecord::Tag(seal) => (Some(seal.root.clone()), seal.tag.clone(), seal.share),
        };
        let entry = found.entry((root.clone(), tag.clone(), share)).or_insert_with(|| InMemory {
            root,
            tag,
            step: None,
            files: Vec::new(),
            bytes: 0,
            state: "incomplete",
        });
        let state = if slot.done { "persisted" } else { "staged" };
        match record {
            SlotRecord::Image(image) => {
                entry.bytes += image.bytes;
                entry.files.push(image.file);
                if matches!(image.target, Target::File(_)) {
                    entry.state = state;
                }
            }
            SlotRecord::Tag(seal) => {
                entry.step = seal.step;
                entry.state = state;
            }
        }
    }
    RegionReport {
        path: view.path.display().to_string(),
        pid: view.pid,
        alive: view.alive,
        adopted: view.adopted,
        capacity_bytes: view.capacity_bytes,
        reserved_bytes: view.reserved_bytes,
        checkpoints: found.into_values().collect(),
        torn: view.torn,
    }
}

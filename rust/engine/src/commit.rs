//! Commit: turns durable parts into one visible manifest.
//!
//! Owns: the order parts, manifest, moves, complete.txt; the answer to "are all parts in?".
//! Must not: write a user's bytes (`generation` does), rename (`publish` does), decide what is newest (`order` does).
//! Invariant: no reader is shown a tag whose files are not all durable; an error before the manifest's rename leaves
//! the earlier checkpoint, one after it the new one.

use std::collections::BTreeMap;
use std::sync::Arc;

use relight_format::manifest::{FileRecord, Manifest, Part, SCHEMA_VERSION, Writer};
use relight_format::names;
use serde_json::Value;

use crate::cleanup;
use crate::clock;
use crate::disk::EntryKind;
use crate::error::{Error, ErrorKind, Result};
use crate::generation::Generation;
use crate::publish::PendingFile;

/// The parts of all ranks of one generation. Made only by [`CompleteParts::check`]: to hold one is to know that every
/// rank has reported, which is what a commit asks for.
#[derive(Clone, Debug)]
pub struct CompleteParts {
    files: Vec<FileRecord>,
}

impl CompleteParts {
    /// Sees that `parts` are exactly those of ranks 0 to `world_size` - 1 of one generation of one tag.
    ///
    /// # Errors
    /// Conflict naming the ranks that are missing; InvalidArgument if parts do not belong together, or if two ranks
    /// wrote different bytes under one name.
    pub fn check(mut parts: Vec<Part>, world_size: u32) -> Result<Self> {
        parts.sort_by_key(|part| part.rank);
        let Some(first) = parts.first() else {
            return Err(Error::new(ErrorKind::InvalidArgument, "no rank has reported a part; seal at least one share"));
        };
        let (tag, generation) = (first.tag.clone(), first.generation);
        let refuse = |kind, message: String| Err(Error::new(kind, message).of_tag(&tag));
        for part in &parts {
            if part.tag != tag || part.generation != generation || part.world_size != world_size {
                let message = format!(
                    "the part of rank {} is of tag {}, generation {}, {} ranks; expected tag {tag}, generation \
                     {generation}, {world_size} ranks",
                    part.rank, part.tag, part.generation, part.world_size
                );
                return refuse(ErrorKind::InvalidArgument, message);
            }
        }
        if let Some(twice) = parts.windows(2).find(|pair| pair[0].rank == pair[1].rank) {
            return refuse(ErrorKind::InvalidArgument, format!("rank {} has reported twice", twice[0].rank));
        }
        let missing: Vec<_> = (0..world_size).filter(|rank| !parts.iter().any(|part| part.rank == *rank)).collect();
        if !missing.is_empty() {
            let message = format!("tag {tag} is not complete: ranks {missing:?} of {world_size} have not reported");
            return refuse(ErrorKind::Conflict, message);
        }
        let mut files: BTreeMap<&str, &FileRecord> = BTreeMap::new();
        for file in parts.iter().flat_map(|part| &part.files) {
            match files.get(file.path.as_str()) {
                // the lowest rank's record stands: parts are in the order of ranks
                Some(other) if other.crc32 == file.crc32 && other.bytes == file.bytes => {}
                Some(other) => {
                    let message = format!(
                        "ranks {} and {} have written different bytes to {} of tag {tag}; give each its own file name",
                        other.rank, file.rank, file.name
                    );
                    return refuse(ErrorKind::InvalidArgument, message);
                }
                None => {
                    files.insert(&file.path, file);
                }
            }
        }
        let files = files.into_values().cloned().collect();
        Ok(Self { files })
    }

    /// The files of all ranks, by their name on disk.
    pub fn files(&self) -> &[FileRecord] {
        &self.files
    }
}

/// What a commit says about the checkpoint, apart from its files.
#[derive(Clone, Debug)]
pub struct CommitFacts {
    /// The segment of saves; see `relight_format::order`.
    pub run: u64,
    /// The number of the commit in its root.
    pub sequence: u64,
    /// The training step, where there is one.
    pub step: Option<i64>,
    /// How many ranks wrote it.
    pub world_size: u32,
    /// When the last share was staged, RFC 3339 UTC.
    pub staged_at: String,
    /// Whether the user marked it as the best.
    pub best: bool,
    /// The processes that wrote this generation.
    pub writers: Vec<Writer>,
    /// The user's own JSON.
    pub meta: Value,
}

/// A checkpoint that is committed.
#[derive(Debug)]
pub struct Committed {
    /// What readers see now.
    pub manifest: Manifest,
    /// What went wrong after the commit, when files went to their plain names. The checkpoint is whole and is loaded
    /// all the same; the next save to the tag, or `TagStore::settle`, finishes it.
    pub unsettled: Option<Error>,
}

impl Generation {
    /// Publishes the generation: from here on readers see its files and those of earlier generations that it does not
    /// replace.
    ///
    /// # Errors
    /// Conflict if another process changes the tag for longer than the limit, or has removed the generation's files;
    /// InvalidArgument if names collide; else what the disk says. What was committed before stays then.
    pub fn commit(mut self, parts: CompleteParts, facts: CommitFacts) -> Result<Committed> {
        self.try_commit(&parts, &facts)
    }

    /// As `commit`, and after an error the generation can be committed again: for files of which there is no copy
    /// elsewhere to begin a new generation with.
    ///
    /// # Errors
    /// As `commit`.
    pub fn try_commit(&mut self, parts: &CompleteParts, facts: &CommitFacts) -> Result<Committed> {
        let committed = self.publish_manifest(parts, facts);
        committed.map_err(|error| self.explain(error))
    }

    fn publish_manifest(&mut self, parts: &CompleteParts, facts: &CommitFacts) -> Result<Committed> {
        let tag = self.tag().to_owned();
        let paths = self.paths().clone();
        let disk = Arc::clone(self.disk());
        let lock = self.store().lock(self.writer())?;
        // Another process may have committed, or died, since this generation began: its files count, and what it left
        // half done is finished first.
        let current = cleanup::settle(&disk, &paths, &lock)?.manifest;
        if let Some(done) = current.as_ref().filter(|current| is_commit_of(current, parts, facts)) {
            // An earlier try got through although it met an error; `settle` has synced its name since.
            return Ok(Committed { manifest: done.clone(), unsettled: None });
        }
        self.check_files(&parts.files)?;
        let manifest = merge(&tag, self.number(), current, parts, facts.clone(), clock::rfc3339(self.clock().wall()));
        let bytes = manifest.to_bytes().map_err(|cause| {
            Error::new(ErrorKind::InvalidArgument, format!("cannot commit {tag}: {cause}")).of_tag(&tag).because(cause)
        })?;
        for file in &parts.files {
            let plain = paths.plain(&file.path);
            if disk.metadata(&plain).is_ok_and(|found| found.kind == EntryKind::Directory) {
                let message = format!("cannot commit {}: {} is a directory; rename one", file.name, plain.display());
                return Err(Error::new(ErrorKind::InvalidArgument, message).at(plain).of_tag(&tag));
            }
        }
        let mut pending = PendingFile::in_directory(&disk, &paths.own, names::MANIFEST)?;
        pending.write_at(0, &bytes)?;
        // From here on the manifest may be there even if an error says otherwise, so nobody but the next writer, who
        // looks, removes our files.
        self.keep_files();
        pending.finish_durable()?;
        let unsettled = cleanup::settle_manifest(&disk, &paths, &manifest, Some(self.number()), &lock).err();
        Ok(Committed { manifest, unsettled: unsettled.map(|error| error.of_tag(&tag)) })
    }
}

/// Whether `manifest` is what a commit of these parts publishes.
fn is_commit_of(manifest: &Manifest, parts: &CompleteParts, facts: &CommitFacts) -> bool {
    (manifest.run, manifest.sequence) == (facts.run, facts.sequence)
        && parts.files.iter().all(|file| manifest.file(&file.name) == Some(file))
}

fn merge(
    tag: &str,
    number: u64,
    current: Option<Manifest>,
    parts: &CompleteParts,
    facts: CommitFacts,
    committed_at: String,
) -> Manifest {
    let mut files: BTreeMap<String, FileRecord> = BTreeMap::new();
    // A second generation may have begun before this one and committed first: the numbers of commits still rise.
    let generation = current.as_ref().map_or(number, |earlier| number.max(earlier.generation + 1));
    let earlier = current.map_or(Vec::new(), |earlier| earlier.files);
    for file in earlier.into_iter().chain(parts.files.iter().cloned()) {
        files.insert(file.path.clone(), file);
    }
    Manifest {
        schema_version: SCHEMA_VERSION,
        tag: tag.to_owned(),
        generation,
        run: facts.run,
        sequence: facts.sequence,
        step: facts.step,
        world_size: facts.world_size,
        created_by: concat!("relight ", env!("CARGO_PKG_VERSION")).to_owned(),
        staged_at: facts.staged_at,
        committed_at,
        best: facts.best,
        files: files.into_values().collect(),
        writers: facts.writers,
        meta: facts.meta,
    }
}

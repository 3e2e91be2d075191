//! Tags: a root as its users see it, the memory tier and the persistent tier as one.
//!
//! Owns: which tier answers; what `latest` and `list` say while a save is on its way to the disk.
//! Must not: decide an order (`order` does) or what is whole (`catalog` and the memory tier's seals do).
//! Invariant: a checkpoint that moves from memory to disk is seen in one of them at every moment.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use relight_format::history::HistoryRecord;
use relight_format::manifest::{FileRecord, Manifest};
use relight_format::order::{self, CheckpointKey};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::catalog::{Checkpoint, Problem};
use crate::core::RootState;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::image::{Image, ImageBytes, ReadOptions, Tier};
use crate::share::{BeginOptions, Share};
use crate::staged::{Entry, Fate, StagedImage};
use crate::verify::{TagReport, verify_tag};
use crate::wait::{Interrupt, lock};

/// A file of a listed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ListedFile {
    /// Its true name.
    pub name: String,
    /// Its name on disk.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the whole file.
    pub crc32: u32,
    /// How it is encoded; `none` is a plain torch.save file.
    pub codec: String,
    /// The rank that wrote it.
    pub rank: u32,
}

/// A checkpoint of a root, wherever it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Listed {
    /// Its tag.
    pub tag: String,
    /// Its step.
    pub step: Option<i64>,
    /// The segment of saves that it belongs to.
    pub run: u64,
    /// Its number in the root.
    pub sequence: u64,
    /// The generation of its last commit; none while it is only in memory.
    pub generation: Option<u64>,
    /// Where this very state of it can be read, nearest first.
    #[serde(serialize_with = "words")]
    pub tiers: Vec<Tier>,
    /// Always true of ours.
    pub complete: bool,
    /// Not written by relight: nothing is known of it but its name.
    pub foreign: bool,
    /// A newer run rolled back past it.
    pub left_behind: bool,
    /// Marked as the best.
    pub best: bool,
    /// Of all its files.
    pub bytes: u64,
    /// RFC 3339 UTC; none while it is only in memory.
    pub committed_at: Option<String>,
    /// RFC 3339 UTC.
    pub staged_at: Option<String>,
    /// How many ranks wrote it.
    pub world_size: u32,
    /// The user's own JSON.
    pub meta: Value,
    /// Its directory.
    pub path: String,
    /// Its files.
    pub files: Vec<ListedFile>,
}

fn words<S: Serializer>(tiers: &[Tier], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(tiers.iter().map(|tier| tier.word()))
}

impl Listed {
    fn key(&self) -> Option<CheckpointKey> {
        (!self.foreign).then(|| CheckpointKey::new(self.step, self.run, self.sequence))
    }

    fn of_disk(checkpoint: &Checkpoint) -> Self {
        let path = checkpoint.path.display().to_string();
        match checkpoint.manifest.as_deref() {
            Some(manifest) => Self::of_manifest(manifest, path),
            None => Self::blank(&checkpoint.tag, path),
        }
    }

    fn blank(tag: &str, path: String) -> Self {
        Self {
            tag: tag.to_owned(),
            step: relight_format::names::step_of_tag(tag),
            run: 0,
            sequence: 0,
            generation: None,
            tiers: vec![Tier::Persistent],
            complete: false,
            foreign: true,
            left_behind: false,
            best: false,
            bytes: 0,
            committed_at: None,
            staged_at: None,
            world_size: 1,
            meta: Value::Null,
            path,
            files: Vec::new(),
        }
    }

    fn of_manifest(manifest: &Manifest, path: String) -> Self {
        Self {
            step: manifest.step,
            run: manifest.run,
            sequence: manifest.sequence,
            generation: Some(manifest.generation),
            complete: true,
            foreign: false,
            best: manifest.best,
            bytes: manifest.bytes(),
            committed_at: Some(manifest.committed_at.clone()),
            staged_at: Some(manifest.staged_at.clone()),
            world_size: manifest.world_size,
            meta: manifest.meta.clone(),
            files: manifest.files.iter().map(ListedFile::of).collect(),
            ..Self::blank(&manifest.tag, path)
        }
    }

    /// Adds what memory holds of the same tag: nearer, and newer where its number is higher.
    fn merge(&mut self, entry: &Entry) {
        let Some(record) = entry.staged.tag() else { return };
        if self.sequence > record.sequence {
            return;
        }
        if self.sequence == record.sequence && !self.foreign {
            self.tiers = vec![Tier::Memory, Tier::Persistent];
            return;
        }
        self.step = record.step;
        self.run = record.run;
        self.sequence = record.sequence;
        self.tiers = vec![Tier::Memory];
        self.complete = true;
        self.foreign = false;
        self.best = record.best;
        self.committed_at = None;
        self.staged_at = Some(record.sealed_at.clone());
        self.world_size = record.world_size;
        self.meta = record.meta.clone();
        for image in &entry.staged.images {
            let file = ListedFile::of(&image.record.as_file(0, record.writer.rank));
            match self.files.iter_mut().find(|known| known.name == file.name) {
                Some(known) => *known = file,
                None => self.files.push(file),
            }
        }
        self.bytes = self.files.iter().map(|file| file.bytes).sum();
    }
}

impl ListedFile {
    fn of(record: &FileRecord) -> Self {
        Self {
            name: record.name.clone(),
            path: record.path.clone(),
            bytes: record.bytes,
            crc32: record.crc32,
            codec: record.codec.clone(),
            rank: record.rank,
        }
    }
}

/// One directory that holds tags. Clones are the same root.
#[derive(Clone, Debug)]
pub struct Root {
    engine: Engine,
    state: Arc<RootState>,
}

impl Root {
    pub(crate) fn new(engine: Engine, state: Arc<RootState>) -> Self {
        Self { engine, state }
    }

    /// Absolute, links resolved.
    pub fn path(&self) -> &Path {
        self.state.store.path()
    }

    /// Opens a save of `tag` for this rank; writes nothing yet.
    ///
    /// # Errors
    /// InvalidArgument if `tag` cannot name a directory, or differs from another in case only.
    pub fn begin(&self, tag: &str, options: BeginOptions) -> Result<Share> {
        // Here, and not only when it is persisted: a mistake of the caller is said to the caller.
        let store = self.state.store.tag(tag)?;
        {
            let state = lock(&self.engine.core().state);
            let staged = state.staged.visible(self.path()).filter_map(|entry| entry.staged.tag());
            store.refuse_twin_among(staged.map(|record| record.tag.as_str()))?;
        }
        Share::begin(self.engine.clone(), Arc::clone(&self.state), tag, options)
    }

    /// All checkpoints, oldest first by the latest rule, those that are only in memory so far included; foreign ones
    /// come first.
    pub fn list(&self) -> Result<Vec<Listed>> {
        // Memory first: what is committed between the two looks is then seen on the disk.
        let mut listed: BTreeMap<String, Listed> = BTreeMap::new();
        let in_memory: Vec<_> = {
            let state = lock(&self.engine.core().state);
            let visible = state.staged.visible(self.path());
            visible.map(|entry| Entry { staged: Arc::clone(&entry.staged), fate: entry.fate }).collect()
        };
        for checkpoint in self.state.store.list()? {
            listed.insert(checkpoint.tag.clone(), Listed::of_disk(&checkpoint));
        }
        for entry in &in_memory {
            let Some(record) = entry.staged.tag() else { continue };
            // Persisted, and not in the root any more: somebody deleted it.
            if entry.fate == Fate::Persisted && !listed.contains_key(&record.tag) {
                continue;
            }
            let path = self.path().join(&record.tag).display().to_string();
            listed.entry(record.tag.clone()).or_insert_with(|| Listed::blank(&record.tag, path)).merge(entry);
        }
        let mut listed: Vec<Listed> = listed.into_values().collect();
        listed.sort_by(|a, b| (a.key(), &a.tag).cmp(&(b.key(), &b.tag)));
        let keys: Vec<CheckpointKey> = listed.iter().filter_map(Listed::key).collect();
        let ours = listed.iter_mut().filter(|checkpoint| !checkpoint.foreign);
        for (checkpoint, left_behind) in ours.zip(order::left_behind(&keys)) {
            checkpoint.left_behind = left_behind;
        }
        Ok(listed)
    }

    /// The newest complete checkpoint, memory included; never a foreign one.
    pub fn latest(&self) -> Result<Option<String>> {
        Ok(self.list()?.pop().filter(|newest| !newest.foreign).map(|newest| newest.tag))
    }

    /// One file of a checkpoint: from memory where that has the newest state of it, else from the root; or from the
    /// tier that is asked for.
    pub fn open_image(&self, tag: &str, file: &str, tier: Option<Tier>) -> Result<Image> {
        let staged = if tier == Some(Tier::Persistent) { None } else { self.find_in_memory(tag, file) };
        if let Some((image, sequence, fate)) = staged {
            if tier == Some(Tier::Memory) || self.is_newest(tag, file, &image, sequence, fate)? {
                return memory_image(&image, tag);
            }
        } else if tier == Some(Tier::Memory) {
            let text = format!("{file} of {tag} is not in memory; read it from the persistent tier");
            return Err(Error::new(ErrorKind::NotFound, text).of_tag(tag));
        }
        let (opened, located) = self.state.store.open_file(tag, file)?;
        Ok(Image::of_file(opened, &located.path, &located.record)?.of_tag(tag))
    }

    fn find_in_memory(&self, tag: &str, file: &str) -> Option<(Arc<StagedImage>, u64, Fate)> {
        let state = lock(&self.engine.core().state);
        let newest_first = state.staged.visible(self.path()).rev();
        let mut found = newest_first.filter_map(|entry| {
            let record = entry.staged.tag().filter(|record| record.tag == tag)?;
            Some((Arc::clone(entry.staged.image(file)?), record.sequence, entry.fate))
        });
        found.next()
    }

    /// Whether no commit of another process, or deletion, has overtaken what memory holds.
    fn is_newest(&self, tag: &str, file: &str, image: &StagedImage, sequence: u64, fate: Fate) -> Result<bool> {
        match self.state.store.resolve(tag, file) {
            Ok(located) => Ok(located.manifest.sequence <= sequence
                || (located.record.crc32 == image.record.crc32 && located.record.bytes == image.record.bytes)),
            // Persisted and gone again: it was deleted. Damaged on the disk or out of reach: memory has it whole.
            Err(error) => Ok(matches!(fate, Fate::Waiting | Fate::OnlyHere) || error.kind != ErrorKind::NotFound),
        }
    }

    /// Reads every byte of a committed checkpoint and compares it with the manifest.
    pub fn verify(&self, tag: &str, interrupt: Interrupt<'_>) -> Result<TagReport> {
        let core = self.engine.core();
        let options = ReadOptions { threads: core.options.copy_threads, clock: core.clock.as_ref(), interrupt };
        verify_tag(&self.state.store, tag, &options)
    }

    /// Directories that look like checkpoints of relight but are not whole. A save in flight is none.
    pub fn problems(&self) -> Result<Vec<Problem>> {
        let in_flight: Vec<String> = {
            let state = lock(&self.engine.core().state);
            let jobs = state.jobs().filter(|job| job.staged.root() == Some(self.path()));
            jobs.filter_map(|job| job.staged.tag().map(|record| record.tag.clone())).collect()
        };
        let mut problems = self.state.store.problems()?;
        problems.retain(|problem| !in_flight.contains(&problem.tag));
        Ok(problems)
    }

    /// Deletes a checkpoint, on disk and in memory; waits for saves of it that are under way.
    pub fn delete(&self, tag: &str, interrupt: Interrupt<'_>) -> Result<()> {
        let core = self.engine.core();
        let path = self.path();
        core.wait(None, interrupt, |state| (!state.jobs().any(|job| job.is_of_tag(path, tag))).then_some(()))?;
        let deleted = self.state.store.delete(tag);
        let in_memory = {
            let mut state = lock(&core.state);
            let of_tag = |entry: &Entry| {
                entry.staged.root() == Some(path) && entry.staged.tag().is_some_and(|record| record.tag == tag)
            };
            let gone = match &deleted {
                Err(error) if error.kind != ErrorKind::NotFound => Vec::new(),
                _ => state.staged.evict_where(of_tag),
            };
            !gone.is_empty()
        };
        core.changed.notify_all();
        match deleted {
            // It was only in memory, because its persist failed.
            Err(error) if error.kind == ErrorKind::NotFound && in_memory => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                core.append_history(&self.state, &core.history_line("delete", tag, "", 0, 0, 0.0, ""));
                Ok(())
            }
        }
    }

    /// Saves from here on are a new run: a checkpoint was loaded into training.
    pub fn start_run(&self, resumed_from: Option<&str>) -> Result<()> {
        if let Some(tag) = resumed_from {
            crate::root::check_tag(tag)?;
        }
        self.state.start_run();
        Ok(())
    }

    /// Retention leaves `tag` alone until as many `unpin`s.
    pub fn pin(&self, tag: &str) {
        *lock(&self.state.pins).entry(tag.to_owned()).or_insert(0) += 1;
    }

    /// Takes one `pin` back.
    pub fn unpin(&self, tag: &str) {
        let mut pins = lock(&self.state.pins);
        if let Some(count) = pins.get_mut(tag) {
            *count -= 1;
            if *count == 0 {
                pins.remove(tag);
            }
        }
    }

    /// Adds a line to the history, with the time of now.
    pub fn history_append(&self, mut line: HistoryRecord) -> Result<()> {
        line.time = self.engine.core().now_text();
        self.state.store.history().append(&line)
    }
}

/// A reader of an image in memory; its room is not used again while the reader lives.
pub(crate) fn memory_image(image: &Arc<StagedImage>, tag: &str) -> Result<Image> {
    let bytes: Arc<dyn ImageBytes> = Arc::clone(image) as Arc<dyn ImageBytes>;
    let label = format!("{tag}/{}", image.record.file);
    Ok(Image::from_memory(bytes, &label, Some(image.record.as_file(0, 0)))?.of_tag(tag))
}

impl ImageBytes for StagedImage {
    fn bytes(&self) -> &[u8] {
        self.image.bytes()
    }
}

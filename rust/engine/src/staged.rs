//! Staged: the catalogue of what is complete in memory.
//!
//! Owns: which images are whole and what for, which of them may go, and in which order.
//! Must not: touch a disk; free an image that is not persisted, unless it failed and its room is needed.
//! Invariant: an image is freed at most once, and never while a reader holds it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use relight_format::order::CheckpointKey;
use relight_format::record::{ImageRecord, TagRecord};
use relight_io::arena::WholeImage;

use crate::save_file::MemoryKind;

/// One image in memory, with what it says of itself.
#[derive(Debug)]
pub(crate) struct StagedImage {
    pub(crate) record: ImageRecord,
    pub(crate) image: WholeImage,
    pub(crate) memory: MemoryKind,
}

/// What a set of images is for.
#[derive(Debug)]
pub(crate) enum Purpose {
    /// One rank's share of a tag. `seal` is the slot that makes it complete for a successor.
    Tag { root: PathBuf, record: Box<TagRecord>, seal: Option<WholeImage> },
    /// One file by itself.
    File { path: PathBuf },
}

/// A set of images that is persisted as one.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) purpose: Purpose,
    pub(crate) images: Vec<Arc<StagedImage>>,
    /// The region of a dead process that it was found in.
    pub(crate) adopted: Option<u64>,
    /// Other files of the share are on disk already: it is whole only once it is committed.
    pub(crate) partial: bool,
}

impl Staged {
    pub(crate) fn bytes(&self) -> u64 {
        self.images.iter().map(|image| image.record.bytes).sum()
    }

    pub(crate) fn root(&self) -> Option<&Path> {
        match &self.purpose {
            Purpose::Tag { root, .. } => Some(root),
            Purpose::File { .. } => None,
        }
    }

    /// The root, or the file itself.
    pub(crate) fn place(&self) -> &Path {
        match &self.purpose {
            Purpose::Tag { root, .. } => root,
            Purpose::File { path } => path,
        }
    }

    pub(crate) fn tag(&self) -> Option<&TagRecord> {
        match &self.purpose {
            Purpose::Tag { record, .. } => Some(record),
            Purpose::File { .. } => None,
        }
    }

    /// What a person calls it.
    pub(crate) fn name(&self) -> String {
        match &self.purpose {
            Purpose::Tag { root, record, .. } => format!("{} of {}", record.tag, root.display()),
            Purpose::File { path } => path.display().to_string(),
        }
    }

    pub(crate) fn key(&self) -> Option<CheckpointKey> {
        self.tag().map(|tag| CheckpointKey::new(tag.step, tag.run, tag.sequence))
    }

    /// Whether a reader holds one of its images.
    fn is_read(&self) -> bool {
        self.images.iter().any(|image| Arc::strong_count(image) > 1)
    }

    /// The image of this file.
    pub(crate) fn image(&self, file: &str) -> Option<&Arc<StagedImage>> {
        self.images.iter().find(|image| image.record.file == file)
    }

    /// Tells a successor that nothing is left to persist.
    pub(crate) fn mark_persisted(&self) {
        for image in &self.images {
            image.image.mark_done();
        }
        // Last: a seal that is done over images that are not would be no harm, the reverse neither, but the seal counts.
        if let Purpose::Tag { seal: Some(seal), .. } = &self.purpose {
            seal.mark_done();
        }
    }

    /// Gives the memory back; an image that is being read goes when its reader does.
    fn release(&self) {
        // The seal first: after a kill in between, a seal without its images would be a tag that cannot be read.
        if let Purpose::Tag { seal: Some(seal), .. } = &self.purpose {
            seal.release();
        }
        for image in &self.images {
            image.image.release();
        }
    }
}

/// What became of a set of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Not persisted yet: stays, whatever happens.
    Waiting,
    /// Persisted: stays as the fastest copy until its room is needed.
    Persisted,
    /// Could not be persisted: stays for a successor until its room is needed or a newer commit made it useless.
    Failed,
    /// Of a root that has no persistent tier: stays until newer ones have taken its place.
    OnlyHere,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) staged: Arc<Staged>,
    pub(crate) fate: Fate,
}

/// What is complete in memory, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    entries: Vec<Entry>,
}

impl Catalogue {
    pub(crate) fn insert(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// Puts what a dead process left before what this one has saved since, behind what was adopted earlier.
    pub(crate) fn insert_adopted(&mut self, entry: Entry) {
        let own = self.entries.iter().position(|entry| entry.staged.adopted.is_none()).unwrap_or(self.entries.len());
        self.entries.insert(own, entry);
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What readers of this root may see, oldest first. A failed one is not shown: it is no checkpoint.
    pub(crate) fn visible<'c>(&'c self, root: &'c Path) -> impl DoubleEndedIterator<Item = &'c Entry> {
        self.of_root(root).filter(|entry| entry.fate != Fate::Failed && !entry.staged.partial)
    }

    /// The shares of this root, oldest first.
    pub(crate) fn of_root<'c>(&'c self, root: &'c Path) -> impl DoubleEndedIterator<Item = &'c Entry> {
        self.entries.iter().filter(move |entry| entry.staged.root() == Some(root))
    }

    /// The highest run and sequence number of this root in memory.
    pub(crate) fn highest(&self, root: &Path) -> (u64, u64) {
        self.of_root(root)
            .filter_map(|entry| entry.staged.tag())
            .fold((0, 0), |(run, sequence), tag| (run.max(tag.run), sequence.max(tag.sequence)))
    }

    pub(crate) fn set_fate(&mut self, staged: &Arc<Staged>, fate: Fate) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| Arc::ptr_eq(&entry.staged, staged)) {
            entry.fate = fate;
        }
    }

    /// Frees the oldest of this fate that nobody reads. Those in the regions of dead processes (`adopted`) or in our own.
    pub(crate) fn evict_oldest(&mut self, fate: Fate) -> Option<Arc<Staged>> {
        let index = self.entries.iter().position(|entry| entry.fate == fate && !entry.staged.is_read())?;
        Some(self.remove(index))
    }

    /// Frees what `drop_it` chooses of what is not waiting.
    pub(crate) fn evict_where(&mut self, mut drop_it: impl FnMut(&Entry) -> bool) -> Vec<Arc<Staged>> {
        let mut gone = Vec::new();
        let mut index = 0;
        while index < self.entries.len() {
            let entry = &self.entries[index];
            if entry.fate != Fate::Waiting && drop_it(entry) {
                gone.push(self.remove(index));
            } else {
                index += 1;
            }
        }
        gone
    }

    /// Keeps, of what is persisted of this root, the newest `keep` checkpoints, and of each only what newer saves of its
    /// tag have not replaced.
    pub(crate) fn keep_newest(&mut self, root: &Path, keep: usize) {
        self.keep_newest_of(root, keep, Fate::Persisted);
    }

    /// The same for a root without a persistent tier, which keeps at least one.
    pub(crate) fn keep_newest_only_here(&mut self, root: &Path, keep: usize) {
        self.keep_newest_of(root, keep.max(1), Fate::OnlyHere);
    }

    /// Counts checkpoints, not saves: two rounds of one tag are one checkpoint.
    fn keep_newest_of(&mut self, root: &Path, keep: usize, fate: Fate) {
        let mut newest: BTreeMap<String, CheckpointKey> = BTreeMap::new();
        // By address: the numbers of two dead processes may be the same.
        let mut replaced: BTreeSet<*const Staged> = BTreeSet::new();
        let mut held: BTreeSet<(String, String)> = BTreeSet::new();
        for entry in self.of_root(root).rev().filter(|entry| entry.fate == fate) {
            let (Some(record), Some(key)) = (entry.staged.tag(), entry.staged.key()) else { continue };
            let best = newest.entry(record.tag.clone()).or_insert(key);
            *best = key.max(*best);
            let names = entry.staged.images.iter().map(|image| (record.tag.clone(), image.record.file.clone()));
            let new: Vec<_> = names.filter(|name| !held.contains(name)).collect();
            if new.is_empty() {
                replaced.insert(Arc::as_ptr(&entry.staged));
            }
            held.extend(new);
        }
        let mut tags: Vec<_> = newest.into_iter().map(|(tag, key)| (key, tag)).collect();
        tags.sort_unstable();
        let surplus = tags.len().saturating_sub(keep);
        let old: BTreeSet<String> = tags.into_iter().take(surplus).map(|(_, tag)| tag).collect();
        self.evict_where(|entry| {
            entry.fate == fate
                && entry.staged.root() == Some(root)
                && entry
                    .staged
                    .tag()
                    .is_some_and(|record| old.contains(&record.tag) || replaced.contains(&Arc::as_ptr(&entry.staged)))
        });
    }

    /// Frees the oldest checkpoint that has no persistent tier, all saves of its tag together: half of one is none.
    pub(crate) fn evict_oldest_only_here(&mut self) -> bool {
        let oldest = self.entries.iter().find(|entry| entry.fate == Fate::OnlyHere && !entry.staged.is_read());
        let Some((root, tag)) =
            oldest.and_then(|entry| Some((entry.staged.root()?.to_path_buf(), entry.staged.tag()?.tag.clone())))
        else {
            return false;
        };
        let gone = self.evict_where(|entry| {
            entry.staged.root() == Some(&root) && entry.staged.tag().is_some_and(|record| record.tag == tag)
        });
        !gone.is_empty()
    }

    /// Forgets everything and frees nothing: what is not persisted is for a successor.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    fn remove(&mut self, index: usize) -> Arc<Staged> {
        let entry = self.entries.remove(index);
        entry.staged.release();
        entry.staged
    }
}

#[cfg(test)]
mod tests {
    use relight_format::manifest::Writer;
    use relight_format::record::Target;
    use relight_io::arena::Region;
    use serde_json::Value;

    use super::*;

    const ROOT: &str = "memory:job";

    fn entry(region: &Region, tag: &str, sequence: u64, adopted: u64) -> Entry {
        let image = region.alloc(100, 10).unwrap().publish(b"x").unwrap();
        let record = ImageRecord {
            target: Target::Tag { root: ROOT.to_owned(), tag: tag.to_owned() },
            file: "model.pt".to_owned(),
            bytes: 100,
            crc32: 0,
            chunk_bytes: 4096,
            chunks: vec![0],
            share: sequence,
        };
        let seal = TagRecord {
            root: ROOT.to_owned(),
            tag: tag.to_owned(),
            step: None,
            run: 1,
            sequence,
            share: sequence,
            slots: Vec::new(),
            meta: Value::Null,
            sealed_at: String::new(),
            writer: Writer { rank: 0, host: "node0".to_owned(), pid: 1 },
            world_size: 1,
            best: false,
            keep: None,
        };
        let images = vec![Arc::new(StagedImage { record, image, memory: MemoryKind::Shared })];
        let purpose = Purpose::Tag { root: PathBuf::from(ROOT), record: Box::new(seal), seal: None };
        Entry {
            staged: Arc::new(Staged { purpose, images, adopted: Some(adopted), partial: false }),
            fate: Fate::OnlyHere,
        }
    }

    /// Guards: of two dead processes of one root, each counts from 1. What one of them had saved twice took a checkpoint
    /// of the other along, the only copy.
    #[test]
    fn a_save_that_was_replaced_takes_no_other_of_its_number_along() {
        let region = Region::private(1 << 20).unwrap();
        let mut catalogue = Catalogue::default();
        for (tag, sequence, adopted) in [("a", 1, 0), ("b", 1, 1), ("a", 2, 0)] {
            catalogue.insert(entry(&region, tag, sequence, adopted));
        }
        catalogue.keep_newest_only_here(Path::new(ROOT), 3);
        let left: Vec<_> = catalogue.entries().iter().map(|entry| entry.staged.tag().unwrap()).collect();
        assert_eq!(left.iter().map(|tag| (tag.tag.as_str(), tag.sequence)).collect::<Vec<_>>(), [("b", 1), ("a", 2)]);
    }
}

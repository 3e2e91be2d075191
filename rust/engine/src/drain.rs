//! Drain: takes over what dead processes left staged on this node.
//!
//! Owns: which of it counts (complete, not yet persisted, not overtaken), its order, what is said about the rest.
//! Must not: take the region of a live process; trust bytes without their checksum; overwrite what came later.
//! Invariant: what is complete is visible to readers when `drain` returns, and is persisted before any later save.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use relight_format::manifest::Manifest;
use relight_format::record::{FileTarget, ImageRecord, SlotRecord, TagRecord, Target};
use relight_io::arena::{ArenaError, Region, WholeImage};
use relight_io::buffer::AlignedBuf;
use relight_io::copy;
use serde::Serialize;

use crate::core::{Core, Job, RootState};
use crate::disk::is_memory_only;
use crate::engine::version_of;
use crate::events::Level;
use crate::save_file::MemoryKind;
use crate::staged::{Entry, Fate, Purpose, Staged, StagedImage};
use crate::wait::lock;

/// A tag that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrainedTag {
    /// Its root.
    pub root: String,
    /// The tag.
    pub tag: String,
    /// It was persisted before its process died.
    pub persisted: bool,
}

/// A single file that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrainedFile {
    /// Where it goes.
    pub path: String,
    /// It was persisted before its process died.
    pub persisted: bool,
}

/// What was found in the region of a dead process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrainedRegion {
    /// Its file.
    pub region: String,
    /// The dead process.
    pub pid: Option<u32>,
    /// Complete tags.
    pub tags: Vec<DrainedTag>,
    /// Single files.
    pub files: Vec<DrainedFile>,
    /// What was dropped or left, and why, in a sentence each.
    pub dropped: Vec<String>,
}

/// Something complete, before it is known whether it counts.
struct Found {
    staged: Staged,
    root: Option<Arc<RootState>>,
    fate: Fate,
    order: Order,
}

/// Tags by their number, files by the time of staging, each as their dead writers saved them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Order {
    sequence: u64,
    staged_at: String,
    share: u64,
}

impl Core {
    /// Adopts all regions of dead processes. What cannot be adopted is said and left.
    pub(crate) fn drain(self: &Arc<Self>) -> Vec<DrainedRegion> {
        let _one_at_a_time = lock(&self.draining);
        if self.check_open().is_err() {
            return Vec::new();
        }
        let dir = lock(&self.state).tier.dir.clone();
        let paths = match Region::list(&dir) {
            Ok(paths) => paths,
            Err(cause) => {
                let text = format!("{} cannot be searched for what dead processes left: {cause}", dir.display());
                self.say_once("drain", Level::Warning, text);
                return Vec::new();
            }
        };
        let mut reports = Vec::new();
        let mut found = Vec::new();
        for path in paths {
            if self.is_ours(&path) {
                continue;
            }
            let pid = Region::inspect(&path).ok().and_then(|view| view.pid);
            match Region::adopt(&path) {
                Ok(region) => reports.push(self.adopt(region, &path, pid, &mut found)),
                // Alive, or another successor was faster.
                Err(ArenaError::Owned { .. }) => {}
                Err(cause) => {
                    let text = format!("what a dead process left in {} cannot be used: {cause}", path.display());
                    self.events.log(Level::Warning, text);
                }
            }
        }
        self.take_in(found);
        reports
    }

    pub(crate) fn is_ours(&self, path: &Path) -> bool {
        let state = lock(&self.state);
        let own = state.tier.shared.as_ref().and_then(Region::path);
        own == Some(path) || state.tier.adopted.iter().any(|adopted| adopted.path == path)
    }

    /// Sorts what is in a region.
    fn adopt(&self, region: Region, path: &Path, pid: Option<u32>, all: &mut Vec<Found>) -> DrainedRegion {
        let mut report = DrainedRegion {
            region: path.display().to_string(),
            pid,
            tags: Vec::new(),
            files: Vec::new(),
            dropped: Vec::new(),
        };
        let dead = pid.map_or_else(|| "a dead process".to_owned(), |pid| format!("the dead process {pid}"));
        let (seals, files, images) = read_slots(&region, &mut report);
        let mut images = images;
        let id = lock(&self.state).tier.adopt(region.clone(), path.to_path_buf());
        let mut found = Vec::new();
        for (record, seal) in seals {
            match take_images(&mut images, &record) {
                Some(list) => found.push(self.found_tag(id, record, seal, list)),
                None => {
                    report.dropped.push(format!("{} of {}: an image of it is missing", record.tag, record.root));
                    seal.release();
                }
            }
        }
        found.extend(files.into_iter().map(|(target, image)| self.found_file(id, target, image)));
        // Without a seal: the process died while it was still saving this tag.
        let mut unsealed: BTreeMap<(String, String), usize> = BTreeMap::new();
        for image in images.into_values() {
            if let Target::Tag { root, tag } = &image.record.target {
                *unsealed.entry((tag.clone(), root.clone())).or_default() += 1;
            }
            image.image.release();
        }
        for ((tag, root), count) in unsealed {
            report.dropped.push(format!("{tag} of {root}: {dead} had staged {count} files of it, and not all"));
        }
        for dropped in &report.dropped {
            self.events.log(Level::Warning, format!("an incomplete save is dropped: {dropped}"));
        }
        let (found, gone): (Vec<_>, Vec<_>) = found.into_iter().partition(|found| self.is_reachable(&found.staged));
        // Those of a root without a persistent tier are left to whoever opens that, and are nobody's worry here.
        for gone in gone.iter().filter(|gone| !gone.staged.root().is_some_and(is_memory_only)) {
            let text = format!(
                "{} was staged by {dead}, but its directory is gone: it is left in {}; remove that file if the \
                 directory does not come back",
                gone.staged.name(),
                path.display()
            );
            if !lock(&self.left).contains(path) {
                self.log_of(Level::Warning, &gone.staged, text.clone());
            }
            report.dropped.push(text);
        }
        if found.is_empty() && !gone.is_empty() {
            // Nothing to do here. Given back as it is, it costs the budget nothing and is found again another time.
            lock(&self.state).tier.adopted.retain(|adopted| adopted.id != id);
            lock(&self.left).insert(path.to_path_buf());
            return report;
        }
        for found in found.iter().chain(&gone) {
            let persisted = found.fate == Fate::Persisted;
            match (&found.staged.purpose, found.staged.tag()) {
                (_, Some(record)) => {
                    let (root, tag) = (record.root.clone(), record.tag.clone());
                    report.tags.push(DrainedTag { root, tag, persisted });
                }
                (Purpose::File { path }, None) => {
                    report.files.push(DrainedFile { path: path.display().to_string(), persisted });
                }
                (Purpose::Tag { .. }, None) => {}
            }
        }
        all.extend(found);
        all.extend(gone.into_iter().map(|found| Found { fate: Fate::Failed, ..found }));
        report
    }

    /// Whether this process may take what is staged for `place`: of a root without a persistent tier only who opened it.
    fn is_claimed(&self, place: &Path) -> bool {
        !is_memory_only(place) || lock(&self.state).roots.contains_key(place)
    }

    fn is_reachable(&self, staged: &Staged) -> bool {
        let place = match &staged.purpose {
            Purpose::Tag { root, .. } => root.as_path(),
            Purpose::File { path } => path.parent().unwrap_or(path),
        };
        if !self.is_claimed(place) {
            return false;
        }
        // Only "not there" is a reason to leave it; a moment's failure is the persist thread's, which tries again.
        is_memory_only(place)
            || !matches!(self.disk.metadata(place), Err(cause) if cause.kind() == std::io::ErrorKind::NotFound)
    }

    fn found_tag(&self, id: u64, record: TagRecord, seal: WholeImage, images: Vec<Arc<StagedImage>>) -> Found {
        let path = PathBuf::from(&record.root);
        // `root` would open the other kind, and with that claim it.
        let root = if self.is_claimed(&path) { self.root(&path, false).ok() } else { None };
        if let Some(root) = &root {
            root.saw(record.run, record.sequence);
        }
        let mut fate = if seal.is_done() { Fate::Persisted } else { Fate::Waiting };
        if is_memory_only(&path) {
            fate = Fate::OnlyHere;
        }
        // Killed between the commit and the mark: the manifest says that it is persisted.
        let manifest = root.as_ref().and_then(|root| root.store.find(&record.tag).ok());
        let overtaken = manifest.as_ref().is_some_and(|manifest| is_overtaken(&record, &images, manifest));
        let number = (record.run, record.sequence);
        if overtaken || manifest.is_some_and(|manifest| (manifest.run, manifest.sequence) == number) {
            fate = Fate::Persisted;
        }
        let order = Order { sequence: record.sequence, staged_at: record.sealed_at.clone(), share: record.share };
        let staged = Staged {
            purpose: Purpose::Tag { root: path, record: Box::new(record), seal: Some(seal) },
            images,
            adopted: Some(id),
            // Not to be read: the disk has a later state.
            partial: overtaken,
        };
        if fate == Fate::Persisted {
            staged.mark_persisted();
        }
        Found { staged, root, fate, order }
    }

    fn found_file(&self, id: u64, target: FileTarget, image: Arc<StagedImage>) -> Found {
        let path = PathBuf::from(&target.path);
        let mut fate = if image.image.is_done() { Fate::Persisted } else { Fate::Waiting };
        let order = Order { sequence: 0, staged_at: target.staged_at, share: image.record.share };
        let moved_on = target.replaces.is_some_and(|version| version != version_of(self.disk.as_ref(), &path));
        if fate == Fate::Waiting && moved_on {
            fate = Fate::Persisted;
            if !self.holds(&path, &image.record) {
                let text = format!(
                    "{} was staged by a dead process, but somebody has changed the file since: the file stays as it is",
                    path.display()
                );
                self.events.log(Level::Warning, text);
            }
        }
        let staged = Staged { purpose: Purpose::File { path }, images: vec![image], adopted: Some(id), partial: false };
        if fate == Fate::Persisted {
            staged.mark_persisted();
        }
        Found { staged, root: None, fate, order }
    }

    /// Whether the file at `path` is this image: its writer died between the rename and the mark.
    fn holds(&self, path: &Path, record: &ImageRecord) -> bool {
        const PIECE_BYTES: u64 = 4 << 20;
        let Ok(file) = self.disk.open_file(path) else { return false };
        if file.len().ok() != Some(record.bytes) {
            return false;
        }
        // without memory for the look it is written once more
        let Ok(mut buffer) = AlignedBuf::new(PIECE_BYTES.min(record.bytes) as usize) else { return false };
        let (mut offset, mut crc) = (0, 0);
        while offset < record.bytes {
            let len = (record.bytes - offset).min(PIECE_BYTES);
            let piece = &mut buffer[..len as usize];
            if file.read_at(offset, piece).is_err() {
                return false;
            }
            let piece_crc = copy::best().crc(piece);
            crc = if offset == 0 { piece_crc } else { relight_format::crc::combine(crc, piece_crc, len) };
            offset += len;
        }
        crc == record.crc32
    }

    /// Makes everything visible and queues what is not persisted, in the order in which it was saved.
    fn take_in(self: &Arc<Self>, mut found: Vec<Found>) {
        found.sort_by(|a, b| a.order.cmp(&b.order));
        let mut jobs = Vec::new();
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        for Found { staged, root, fate, .. } in found {
            let staged = Arc::new(staged);
            let ticket = (fate == Fate::Waiting).then(|| self.new_ticket(&staged, 0));
            if let Some(ticket) = &ticket {
                let text = format!("found {} staged by a dead process; it is persisted now", staged.name());
                self.log_of(Level::Info, &staged, text);
                jobs.push(Job::new(ticket.clone(), Arc::clone(&staged), root, None));
            }
            state.staged.insert_adopted(Entry { staged, fate });
        }
        // Files by themselves are of no use once they are where they belong.
        state.staged.evict_where(|entry| {
            let useless = entry.staged.root().is_none() || entry.staged.partial;
            entry.fate == Fate::Persisted && entry.staged.adopted.is_some() && useless
        });
        for adopted in &mut state.tier.adopted {
            adopted.listed = true; // one drain at a time: all that are there are ours or an earlier one's
        }
        state.tier.remove_empty_regions(&state.staged);
        drop(guard);
        self.enqueue(jobs, true);
    }
}

/// Whether what `manifest` commits is of a later save than the one that staged this: the same tag, saved again.
fn is_overtaken(record: &TagRecord, images: &[Arc<StagedImage>], manifest: &Manifest) -> bool {
    // A number alone proves nothing: a job that goes on elsewhere, from what was committed, counts on from there too.
    let (committed, staged) = ((manifest.run, manifest.sequence), (record.run, record.sequence));
    let is_there = |image: &Arc<StagedImage>| {
        let file = manifest.file(&image.record.file);
        file.is_some_and(|file| (file.crc32, file.bytes) == (image.record.crc32, image.record.bytes))
    };
    committed > staged || (committed == staged && !images.iter().all(is_there))
}

type Seals = Vec<(TagRecord, WholeImage)>;
type Files = Vec<(FileTarget, Arc<StagedImage>)>;

fn read_slots(region: &Region, report: &mut DrainedRegion) -> (Seals, Files, BTreeMap<usize, Arc<StagedImage>>) {
    let (mut seals, mut files, mut images) = (Vec::new(), Vec::new(), BTreeMap::new());
    for image in region.images() {
        match SlotRecord::parse(image.meta()) {
            Ok(SlotRecord::Tag(record)) => seals.push((record, image)),
            Ok(SlotRecord::Image(record)) => {
                let slot = image.slot();
                let target = record.target.clone();
                let staged = Arc::new(StagedImage { record, image, memory: MemoryKind::Shared });
                match target {
                    Target::File(target) => files.push((target, staged)),
                    Target::Tag { .. } => {
                        images.insert(slot, staged);
                    }
                }
            }
            Err(cause) => {
                report.dropped.push(format!("a slot of {} cannot be read: {cause}", report.region));
                image.release();
            }
        }
    }
    let torn = region.torn();
    if torn > 0 {
        report.dropped.push(format!("{torn} images of {} were being written when the process died", report.region));
    }
    (seals, files, images)
}

/// The images that a seal names, if all are there.
fn take_images(images: &mut BTreeMap<usize, Arc<StagedImage>>, seal: &TagRecord) -> Option<Vec<Arc<StagedImage>>> {
    let belongs = |slot: &u32| images.get(&(*slot as usize)).is_some_and(|image| image.record.share == seal.share);
    if !seal.slots.iter().all(belongs) {
        return None;
    }
    Some(seal.slots.iter().filter_map(|slot| images.remove(&(*slot as usize))).collect())
}

//! Catalogue: which checkpoints a root has, which one is the latest, where a file of one lies.
//!
//! Owns: the answer to "is this tag whole?"; the cache of manifests; the list of problems.
//! Must not: change the root; read the bytes of a checkpoint; look at times (order comes from `relight_format::order`).
//! Invariant: a tag is listed only if its manifest is as it was written and each file it names has its length.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use relight_format::manifest::{FileRecord, Manifest};
use relight_format::names;
use relight_format::order::{self, CheckpointKey};

use crate::cleanup::{look_again, read_manifest};
use crate::disk::{DiskFile, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TagPaths;
use crate::root::{Cached, RootStore, check_tag};

/// A checkpoint of a root.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The tag: the name of the directory.
    pub tag: String,
    /// The directory.
    pub path: PathBuf,
    /// What was committed; None for a foreign one, which relight did not write.
    pub manifest: Option<Arc<Manifest>>,
    /// A newer run rolled back past this checkpoint.
    pub left_behind: bool,
}

impl Checkpoint {
    /// What orders it; None for a foreign one.
    pub fn key(&self) -> Option<CheckpointKey> {
        self.manifest.as_deref().map(key_of)
    }

    /// Whether relight did not write it.
    pub fn is_foreign(&self) -> bool {
        self.manifest.is_none()
    }
}

/// A directory that looks like a checkpoint of relight but is not whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The name of the directory or link.
    pub tag: String,
    /// What is wrong, naming the file.
    pub reason: String,
}

/// Where a file of a checkpoint lies.
#[derive(Clone, Debug)]
pub struct Located {
    /// Its path now.
    pub path: PathBuf,
    /// What the manifest says of it.
    pub record: FileRecord,
    /// The manifest that names it.
    pub manifest: Arc<Manifest>,
}

/// One look at the whole root.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// Oldest first, as [`RootStore::list`] says.
    pub(crate) checkpoints: Vec<Checkpoint>,
    problems: Vec<Problem>,
    /// As [`RootStore::highest`] says.
    pub(crate) highest: (u64, u64),
}

impl Walk {
    /// The newest whole checkpoint that relight committed.
    pub(crate) fn latest(&self) -> Option<&Checkpoint> {
        self.checkpoints.last().filter(|newest| !newest.is_foreign())
    }

    fn saw(&mut self, manifest: &Manifest) {
        self.highest = (self.highest.0.max(manifest.run), self.highest.1.max(manifest.sequence));
    }
}

/// One look at a directory of the root.
enum Look {
    Whole(Arc<Manifest>),
    Foreign,
    Broken(Error),
    /// Not a checkpoint of anybody.
    Nothing,
}

impl RootStore {
    /// All checkpoints, oldest first: foreign ones by name, then relight's by the latest rule.
    ///
    /// # Errors
    /// What the disk says of the root itself; InvalidArgument if it is no directory any more. A root that is gone has no
    /// checkpoints.
    pub fn list(&self) -> Result<Vec<Checkpoint>> {
        Ok(self.walk()?.checkpoints)
    }

    /// The newest whole checkpoint that relight committed.
    ///
    /// # Errors
    /// As [`RootStore::list`].
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        Ok(self.walk()?.latest().cloned())
    }

    /// Directories that look like checkpoints of relight but are not whole, and links to nothing; by name.
    ///
    /// # Errors
    /// As [`RootStore::list`].
    pub fn problems(&self) -> Result<Vec<Problem>> {
        Ok(self.walk()?.problems)
    }

    /// The highest run and sequence number that any manifest of the root has, damaged checkpoints included; 0 and 0 in
    /// a root without.
    ///
    /// # Errors
    /// As [`RootStore::list`].
    pub fn highest(&self) -> Result<(u64, u64)> {
        let mut walk = Walk::default();
        for entry in self.entries()? {
            let paths = TagPaths::new(self.path(), &entry);
            if let Ok(Some(manifest)) = self.manifest(&paths) {
                walk.saw(&manifest);
            }
        }
        Ok(walk.highest)
    }

    /// The manifest of `tag`, if the checkpoint is whole.
    ///
    /// # Errors
    /// NotFound with the tags that there are; Corrupt naming the missing or bad file.
    pub fn find(&self, tag: &str) -> Result<Arc<Manifest>> {
        check_tag(tag)?;
        match self.look(tag)? {
            Look::Whole(manifest) => Ok(manifest),
            Look::Broken(error) => Err(error.of_tag(tag)),
            Look::Foreign | Look::Nothing => Err(self.not_found(tag)),
        }
    }

    /// Where `file` (its true name) of `tag` lies. The other files of the tag may be damaged.
    ///
    /// # Errors
    /// NotFound with the names that there are; Corrupt if the file is missing or has not the length of the manifest.
    pub fn resolve(&self, tag: &str, file: &str) -> Result<Located> {
        check_tag(tag)?;
        // A commit between our look at the manifest and our look at the file moves files: then the manifest was
        // replaced too, and a second look is consistent.
        match self.try_resolve(tag, file) {
            Err(error) if error.kind == ErrorKind::Corrupt => self.try_resolve(tag, file),
            other => other,
        }
    }

    /// Opens `file` of `tag`. An open file keeps its bytes, whatever is committed or deleted afterwards.
    ///
    /// # Errors
    /// As [`RootStore::resolve`].
    pub fn open_file(&self, tag: &str, file: &str) -> Result<(Box<dyn DiskFile>, Located)> {
        const LOOKS: u32 = 3;
        let mut looks = 1;
        loop {
            let located = self.resolve(tag, file)?;
            let opened = look_again(|| self.disk().open_file(&located.path));
            let fits = |opened: &dyn DiskFile| opened.len().is_ok_and(|len| len == located.record.bytes);
            match opened {
                // A later commit's file may have the same length. It gets its plain name after its manifest is there,
                // so what was opened is of our manifest if that is the newest still.
                Ok(opened) if fits(opened.as_ref()) && (looks == LOOKS || self.is_current(tag, &located)?) => {
                    return Ok((opened, located));
                }
                // moved or replaced between the look and the opening
                Ok(_) if looks < LOOKS => {}
                Err(cause) if cause.kind() == io::ErrorKind::NotFound && looks < LOOKS => {}
                Ok(_) => return Err(self.damaged(tag, &located.record, "changes while it is opened")),
                Err(cause) => return Err(Error::io(format!("open {file}"), &located.path, cause).of_tag(tag)),
            }
            looks += 1;
        }
    }

    fn is_current(&self, tag: &str, located: &Located) -> Result<bool> {
        let now = self.manifest(&TagPaths::new(self.path(), tag)).map_err(|error| error.of_tag(tag))?;
        // Deleted meanwhile: the open file is what it was.
        Ok(now.is_none_or(|now| now.file(&located.record.name) == Some(&located.record)))
    }

    fn try_resolve(&self, tag: &str, file: &str) -> Result<Located> {
        let paths = TagPaths::new(self.path(), tag);
        let manifest = match self.manifest(&paths).map_err(|error| error.of_tag(tag))? {
            Some(manifest) => manifest,
            None => return Err(self.find(tag).err().unwrap_or_else(|| self.not_found(tag))),
        };
        let Some(record) = manifest.file(file).cloned() else {
            let have: Vec<_> = manifest.files.iter().map(|record| record.name.as_str()).collect();
            let message = format!("tag {tag} has no file {file:?}; it has {}", have.join(", "));
            return Err(Error::new(ErrorKind::NotFound, message).at(&paths.tag).of_tag(tag));
        };
        let path = self.place(&paths, tag, &record)?;
        Ok(Located { path, record, manifest })
    }

    /// The generation's folder first, then the plain name.
    fn place(&self, paths: &TagPaths, tag: &str, record: &FileRecord) -> Result<PathBuf> {
        for path in [paths.staged(record.generation, &record.path), paths.plain(&record.path)] {
            match look_again(|| self.disk().metadata(&path)) {
                Ok(found) if found.kind == EntryKind::File && found.len == record.bytes => return Ok(path),
                Ok(found) => {
                    let what = format!("has {} bytes instead of {}", found.len, record.bytes);
                    return Err(self.damaged(tag, record, &what));
                }
                Err(cause) if is_absent(&cause) => {}
                Err(cause) => return Err(Error::io(format!("look at {}", record.name), &path, cause).of_tag(tag)),
            }
        }
        Err(self.damaged(tag, record, "is missing"))
    }

    fn damaged(&self, tag: &str, record: &FileRecord, what: &str) -> Error {
        let message = format!(
            "{} of tag {tag} {what}: something other than relight changed it; use another checkpoint",
            record.name
        );
        let path = TagPaths::new(self.path(), tag).plain(&record.path);
        Error::new(ErrorKind::Corrupt, message).at(path).of_tag(tag)
    }

    fn not_found(&self, tag: &str) -> Error {
        let have = match self.list() {
            Ok(all) if all.is_empty() => "it has none".to_owned(),
            Ok(all) => format!("it has {}", all.into_iter().map(|found| found.tag).collect::<Vec<_>>().join(", ")),
            // The root is out of order: what it has is not known.
            Err(error) => return error.of_tag(tag),
        };
        let message = format!("{} has no checkpoint {tag}; {have}", self.path().display());
        Error::new(ErrorKind::NotFound, message).at(self.path().join(tag)).of_tag(tag)
    }

    /// Looks at every tag once: what a commit is followed by needs all of it, and there may be thousands of tags.
    pub(crate) fn walk(&self) -> Result<Walk> {
        let mut walk = Walk::default();
        for entry in self.root_entries()? {
            let tag = entry.name;
            if entry.kind == EntryKind::Dangling {
                walk.problems.push(Problem { tag, reason: "a link to nothing".to_owned() });
                continue;
            }
            if entry.kind != EntryKind::Directory || names::check_tag(&tag).is_err() {
                continue;
            }
            let path = self.path().join(&tag);
            match self.look(&tag)? {
                Look::Whole(manifest) => {
                    walk.saw(&manifest);
                    walk.checkpoints.push(Checkpoint { tag, path, manifest: Some(manifest), left_behind: false });
                }
                Look::Foreign => {
                    walk.checkpoints.push(Checkpoint { tag, path, manifest: None, left_behind: false });
                }
                Look::Broken(error) => {
                    if let Ok(Some(manifest)) = self.manifest(&TagPaths::new(self.path(), &tag)) {
                        walk.saw(&manifest);
                    }
                    walk.problems.push(Problem { tag, reason: error.message });
                }
                Look::Nothing => {}
            }
        }
        walk.problems.sort_by(|a, b| a.tag.cmp(&b.tag));
        self.forget_all_but(&walk.checkpoints);
        walk.checkpoints.sort_by(|a, b| (a.key(), &a.tag).cmp(&(b.key(), &b.tag)));
        let keys: Vec<_> = walk.checkpoints.iter().filter_map(Checkpoint::key).collect();
        let left_behind = order::left_behind(&keys);
        let ours = walk.checkpoints.iter_mut().filter(|checkpoint| !checkpoint.is_foreign());
        for (checkpoint, left_behind) in ours.zip(left_behind) {
            checkpoint.left_behind = left_behind;
        }
        Ok(walk)
    }

    /// Manifests of deleted checkpoints leave the cache: a job that saves for weeks deletes thousands.
    fn forget_all_but(&self, checkpoints: &[Checkpoint]) {
        let kept: HashSet<PathBuf> =
            checkpoints.iter().map(|found| TagPaths::new(self.path(), &found.tag).manifest()).collect();
        let mut cache = self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|path, _| kept.contains(path));
    }

    fn look(&self, tag: &str) -> Result<Look> {
        let paths = TagPaths::new(self.path(), tag);
        // twice, for the same reason as in `resolve`
        let mut broken = None;
        for _ in 0..2 {
            match self.look_once(&paths, tag) {
                Ok(Look::Broken(error)) => broken = Some(error),
                other => return other,
            }
        }
        Ok(broken.map_or(Look::Nothing, Look::Broken))
    }

    fn look_once(&self, paths: &TagPaths, tag: &str) -> Result<Look> {
        match self.manifest(paths) {
            Ok(Some(manifest)) => {
                let damaged = manifest.files.iter().find_map(|file| self.place(paths, tag, file).err());
                Ok(damaged.map_or(Look::Whole(manifest), Look::Broken))
            }
            Ok(None) => self.look_without_manifest(paths, tag),
            // one unreadable tag does not hide the others
            Err(error) => Ok(Look::Broken(error.of_tag(tag))),
        }
    }

    fn look_without_manifest(&self, paths: &TagPaths, tag: &str) -> Result<Look> {
        let entries = match look_again(|| self.disk().list_dir(&paths.tag)) {
            Ok(entries) => entries,
            Err(cause) if is_absent(&cause) => return Ok(Look::Nothing),
            Err(cause) => return Ok(Look::Broken(Error::io("list the directory", &paths.tag, cause))),
        };
        let broken =
            |reason: String| Ok(Look::Broken(Error::new(ErrorKind::Corrupt, reason).at(paths.manifest()).of_tag(tag)));
        if entries.iter().any(|entry| entry.name == names::RELIGHT_DIR) {
            return broken(format!(
                "tag {tag} has no {}/{}: its save is under way or was not finished; use another checkpoint",
                names::RELIGHT_DIR,
                names::MANIFEST
            ));
        }
        if entries.iter().any(|entry| !entry.name.starts_with('.')) {
            return Ok(Look::Foreign);
        }
        if names::step_of_tag(tag).is_some() {
            return broken(format!("tag {tag} is an empty directory; use another checkpoint"));
        }
        Ok(Look::Nothing)
    }

    /// The manifest of a tag, from the cache while its file is the same; None if there is none.
    pub(crate) fn manifest(&self, paths: &TagPaths) -> Result<Option<Arc<Manifest>>> {
        let path = paths.manifest();
        let disk = self.disk().as_ref();
        // a panic elsewhere leaves the map whole: each change is one insert or remove
        let cache = || self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match look_again(|| disk.metadata(&path)) {
            Ok(found) => found,
            Err(cause) if is_absent(&cause) => {
                cache().remove(&path);
                return Ok(None);
            }
            Err(cause) => return Err(Error::io("look at the manifest", &path, cause)),
        };
        let cached = cache().get(&path).cloned();
        if let Some(cached) = cached.filter(|cached| cached.version == found.version && cached.len == found.len) {
            return Ok(Some(cached.manifest));
        }
        let Some(manifest) = read_manifest(disk, &path)?.map(Arc::new) else {
            cache().remove(&path);
            return Ok(None);
        };
        // Should the file be replaced between the look and the reading, the version is the older one: the next look
        // differs from it and reads again.
        let entry = Cached { version: found.version, len: found.len, manifest: Arc::clone(&manifest) };
        cache().insert(path, entry);
        Ok(Some(manifest))
    }

    fn entries(&self) -> Result<Vec<String>> {
        let is_tag = |kind, name: &str| kind == EntryKind::Directory && names::check_tag(name).is_ok();
        let entries = self.root_entries()?;
        Ok(entries.into_iter().filter(|entry| is_tag(entry.kind, &entry.name)).map(|entry| entry.name).collect())
    }

    fn root_entries(&self) -> Result<Vec<crate::disk::DirEntry>> {
        match look_again(|| self.disk().list_dir(self.path())) {
            Ok(entries) => {
                self.learn_names(&entries);
                Ok(entries)
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            // A file in place of the root, or of a directory above it, too. Not "no checkpoints": a job that starts from
            // nothing because of a moment's failure loses all it had.
            Err(cause) => Err(Error::io("list the root", self.path(), cause)),
        }
    }
}

pub(crate) fn key_of(manifest: &Manifest) -> CheckpointKey {
    CheckpointKey::new(manifest.step, manifest.run, manifest.sequence)
}

/// Not there, or below something that is no directory.
fn is_absent(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use relight_format::manifest::Writer;
    use serde_json::Value;

    use super::*;
    use crate::clock::SystemClock;
    use crate::commit::{CommitFacts, CompleteParts};
    use crate::disk::PosixDisk;
    use crate::root::RootOptions;

    #[test]
    fn the_cache_forgets_what_was_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(SystemClock::new());
        let root = RootStore::open(Arc::new(PosixDisk), clock, dir.path(), RootOptions::default()).unwrap();
        for sequence in 1..=3 {
            let writer = Writer { rank: 0, host: "node0".to_owned(), pid: 1 };
            let generation = root.tag(&format!("step{sequence}")).unwrap().begin_generation(&writer).unwrap();
            let part = generation.write_part(0, 1, &[]).unwrap();
            let facts = CommitFacts {
                run: 1,
                sequence,
                step: None,
                world_size: 1,
                staged_at: String::new(),
                best: false,
                writers: vec![writer],
                meta: Value::Null,
            };
            generation.commit(CompleteParts::check(vec![part], 1).unwrap(), facts).unwrap();
        }
        assert_eq!(root.list().unwrap().len(), 3);
        root.delete("step1").unwrap();
        root.delete("step2").unwrap();
        assert_eq!(root.list().unwrap().len(), 1);
        assert_eq!(root.inner.cache.lock().unwrap().len(), 1);
    }
}

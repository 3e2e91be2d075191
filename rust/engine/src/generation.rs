//! Generations: the files of one save to a tag, before they are committed.
//!
//! Owns: a generation's number, directory and lock; the files in it and the parts that list them.
//! Must not: show a reader anything (`commit` does).
//! Invariant: what a part lists is durable before the part is; a generation's lock is held for as long as its writer
//! lives, so nobody takes its files for leftovers.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use relight_format::manifest::{FileRecord, Manifest, Part, SCHEMA_VERSION, Writer};
use relight_format::names;

use crate::cleanup;
use crate::clock::Clock;
use crate::disk::{Disk, DiskLock, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, TagPaths};
use crate::publish::{self, PendingFile};
use crate::root::{RootStore, make_dir};
use crate::tag_lock::{TagLock, holder_text};

/// How often a generation is begun anew when another process removes the tag's directory meanwhile.
const BEGIN_ATTEMPTS: u32 = 8;

/// One tag of a root, for writing.
#[derive(Clone, Debug)]
pub struct TagStore {
    root: RootStore,
    tag: String,
    paths: TagPaths,
}

impl TagStore {
    pub(crate) fn new(root: RootStore, tag: &str) -> Self {
        let paths = TagPaths::new(root.path(), tag);
        Self { root, tag: tag.to_owned(), paths }
    }

    /// The tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Opens a new generation: makes the directories, finishes what an earlier writer of the tag left, removes what
    /// dead writers left in the whole root, and takes the next number.
    ///
    /// # Errors
    /// InvalidArgument if the tag differs from one that exists in case only, or if the file system cannot publish;
    /// Conflict if another process changes the tag for longer than the limit; else what the disk says.
    pub fn begin_generation(&self, writer: &Writer) -> Result<Generation> {
        self.root.prepare()?;
        cleanup::sweep(self.root.disk(), self.root.path(), &self.tag);
        let mut attempt = 1;
        loop {
            match self.try_begin(writer) {
                // a sweep or a deletion by another process took the directory between two of our calls
                Err(error) if error.kind == ErrorKind::NotFound && attempt < BEGIN_ATTEMPTS => attempt += 1,
                other => return other.map_err(|error| error.of_tag(&self.tag).on_rank(writer.rank)),
            }
        }
    }

    /// Finishes what an earlier writer of the tag left; for a tag that is committed but was not brought to plain names.
    ///
    /// # Errors
    /// Conflict if another process changes the tag for longer than the limit; else what the disk says.
    pub fn settle(&self, writer: &Writer) -> Result<()> {
        let lock = self.lock(writer)?;
        cleanup::settle(self.root.disk(), &self.paths, &lock).map(|_| ()).map_err(|error| error.of_tag(&self.tag))
    }

    pub(crate) fn lock(&self, writer: &Writer) -> Result<TagLock> {
        let disk = self.root.disk().as_ref();
        TagLock::take(disk, &self.paths.lock(), &self.tag, &holder_text(writer), self.root.inner.lock_wait)
    }

    fn try_begin(&self, writer: &Writer) -> Result<Generation> {
        let disk = self.root.disk();
        self.make_directories()?;
        let lock = self.lock(writer)?;
        let settled = cleanup::settle(disk, &self.paths, &lock)?;
        let number = settled.highest + 1;
        let directory = self.paths.generation(number);
        disk.create_dir(&directory).map_err(|cause| Error::io("make the directory", &directory, cause))?;
        let alive = disk
            .lock(&self.paths.generation_lock(number), &holder_text(writer), Duration::ZERO)
            .map_err(|cause| Error::io("lock the directory", &directory, cause))?;
        let generation = Generation {
            store: self.clone(),
            number,
            writer: writer.clone(),
            names: Mutex::new(names_of(settled.manifest.as_ref())),
            alive: Mutex::new(Some(alive)),
            keep_files: false,
            pid: std::process::id(),
        };
        publish::sync_dir(disk.as_ref(), &self.paths.own)?;
        drop(lock);
        Ok(generation)
    }

    fn make_directories(&self) -> Result<()> {
        let disk = self.root.disk().as_ref();
        if disk.metadata(&self.paths.tag).is_err() {
            // under the root's lock, or two processes might make two tags that differ in case only
            let root_lock = self.root.lock("making a tag")?;
            self.refuse_case_twin()?;
            make_dir(disk, &self.paths.tag)?;
            drop(root_lock);
        }
        // Synced also when they were there: who made them may have died before its own sync.
        publish::sync_dir(disk, self.root.path())?;
        make_dir(disk, &self.paths.own)?;
        publish::sync_dir(disk, &self.paths.tag)
    }

    /// Refuses a tag that is not there yet and differs from one that is in case only, as far as this process knows: a
    /// save does not wait for the disk. What others make meanwhile is left to the moment at which the directory is made.
    pub(crate) fn refuse_known_case_twin(&self) -> Result<()> {
        if !self.root.knows_case_twin(&self.tag) {
            return Ok(());
        }
        // Somebody may have deleted it since: a refusal, and only that, is worth a look at the disk.
        match self.root.disk().metadata(&self.paths.tag) {
            Ok(_) => Ok(()),
            Err(_) => match self.refuse_case_twin() {
                Err(error) if error.kind == ErrorKind::InvalidArgument => Err(error),
                _ => Ok(()),
            },
        }
    }

    fn refuse_case_twin(&self) -> Result<()> {
        let root = self.root.path();
        let entries = self.root.disk().list_dir(root).map_err(|cause| Error::io("list the root", root, cause))?;
        self.root.learn_names(&entries);
        self.refuse_twin_among(entries.iter().map(|entry| entry.name.as_str()))
    }

    /// Refuses the tag if one of `others` is the same name where case is ignored.
    pub(crate) fn refuse_twin_among<'n>(&self, mut others: impl Iterator<Item = &'n str>) -> Result<()> {
        let folded = names::fold_case(&self.tag);
        match others.find(|&other| other != self.tag && names::fold_case(other) == folded) {
            None => Ok(()),
            Some(twin) => {
                let message = format!(
                    "tags {} and {twin} differ in case only and would be one directory where case is ignored; choose \
                     another tag",
                    self.tag
                );
                Err(Error::new(ErrorKind::InvalidArgument, message).at(&self.paths.tag).of_tag(&self.tag))
            }
        }
    }
}

/// The names that are taken, by what they are where case is ignored.
fn names_of(manifest: Option<&Manifest>) -> HashMap<String, String> {
    let files = manifest.map_or(&[][..], |manifest| &manifest.files);
    files.iter().map(|file| (names::fold_case(&file.path), file.path.clone())).collect()
}

/// A generation under way. Dropped without a commit, its files are removed and the tag is as it was.
pub struct Generation {
    store: TagStore,
    number: u64,
    writer: Writer,
    names: Mutex<HashMap<String, String>>,
    alive: Mutex<Option<Box<dyn DiskLock>>>,
    keep_files: bool,
    /// The process that made it: a forked child has a copy, and must not clean up what its parent writes.
    pid: u32,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("tag", &self.store.tag).field("number", &self.number).finish_non_exhaustive()
    }
}

impl Generation {
    /// Its number in the tag, for [`FileRecord::generation`].
    pub fn number(&self) -> u64 {
        self.number
    }

    /// A file under way in this generation; `path` is its name on disk ([`FileRecord::path`]). After an error the same
    /// path may be created again: a retry takes a new file.
    ///
    /// # Errors
    /// InvalidArgument if `path` is not a plain name, or differs from another file of the tag in case only; Conflict
    /// if the tag's directory was removed meanwhile; else what the disk says.
    pub fn create_file(&self, path: &str) -> Result<PendingFile> {
        self.claim_name(path)?;
        PendingFile::in_directory(self.disk(), &self.directory(), path).map_err(|error| self.explain(error))
    }

    /// Says durably what rank `rank` wrote. All its files are finished.
    ///
    /// # Errors
    /// InvalidArgument if a record is not of this generation, or its file is missing or has another length.
    pub fn write_part(&self, rank: u32, world_size: u32, files: &[FileRecord]) -> Result<Part> {
        let part = Part {
            schema_version: SCHEMA_VERSION,
            tag: self.store.tag.clone(),
            generation: self.number,
            rank,
            world_size,
            files: files.to_vec(),
        };
        self.write(&part).map_err(|error| self.explain(error).on_rank(rank))?;
        Ok(part)
    }

    /// Gives the generation up: its files are removed, what was committed before stays.
    pub fn abandon(self) {
        drop(self);
    }

    fn write(&self, part: &Part) -> Result<()> {
        self.check_files(&part.files)?;
        let bytes = part.to_bytes().map_err(|cause| {
            Error::new(ErrorKind::InvalidArgument, format!("cannot write the part: {cause}")).because(cause)
        })?;
        // the files' names live in the directory: without this a power cut leaves a part that lists files that are gone
        publish::sync_dir(self.disk().as_ref(), &self.directory())?;
        publish::publish(self.disk(), &self.directory(), &layout::staged_part_name(part.rank), &bytes)
    }

    pub(crate) fn check_files(&self, files: &[FileRecord]) -> Result<()> {
        for file in files {
            let staged = self.store.paths.staged(self.number, &file.path);
            let message = match self.disk().metadata(&staged) {
                Ok(found) if found.kind == EntryKind::File && found.len == file.bytes => continue,
                Ok(found) => format!("has {} bytes, its record says {}", found.len, file.bytes),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("find {}", file.name), &staged, cause));
                }
                Err(cause) => return Err(Error::io(format!("look at {}", file.name), &staged, cause)),
            };
            let message = format!("{} of tag {} {message}; save it again", file.name, self.store.tag);
            return Err(Error::new(ErrorKind::InvalidArgument, message).at(staged));
        }
        Ok(())
    }

    fn claim_name(&self, path: &str) -> Result<()> {
        let refuse = |message: String| {
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .of_tag(&self.store.tag)
                .at(self.store.paths.plain(path)))
        };
        let is_plain = !path.is_empty()
            && !path.starts_with('.')
            && !path.contains(['/', '\\', '\0'])
            && !path.eq_ignore_ascii_case(names::COMPLETE);
        if !is_plain {
            return refuse(format!("{path:?} is not a file name of a tag; escape it with escape_file_name"));
        }
        let plain = self.store.paths.plain(path);
        if self.disk().metadata(&plain).is_ok_and(|found| found.kind == EntryKind::Directory) {
            return refuse(format!("cannot save {path}: {} is a directory; rename one", plain.display()));
        }
        // a panic elsewhere leaves the map whole: each change is one insert
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        match names.get(&names::fold_case(path)) {
            Some(other) if other != path => {
                let message = format!(
                    "{other} and {path} of tag {} would be one file where case is ignored; rename one",
                    self.store.tag
                );
                drop(names);
                refuse(message)
            }
            _ => {
                names.insert(names::fold_case(path), path.to_owned());
                Ok(())
            }
        }
    }

    /// Says what it means that a file is gone which this process has made.
    pub(crate) fn explain(&self, error: Error) -> Error {
        if error.kind != ErrorKind::NotFound {
            return error.of_tag(&self.store.tag);
        }
        let path = error.path.clone().unwrap_or_else(|| self.directory());
        let message = format!(
            "the directory of tag {} was removed while it was being saved ({}); other checkpoints are as they were: \
             save again",
            self.store.tag,
            self.store.paths.tag.display()
        );
        Error::new(ErrorKind::Conflict, message).at(path).of_tag(&self.store.tag).because(error)
    }

    pub(crate) fn keep_files(&mut self) {
        self.keep_files = true;
    }

    pub(crate) fn store(&self) -> &TagStore {
        &self.store
    }

    pub(crate) fn tag(&self) -> &str {
        &self.store.tag
    }

    pub(crate) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(crate) fn paths(&self) -> &TagPaths {
        &self.store.paths
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        self.store.root.disk()
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        self.store.root.inner.clock.as_ref()
    }

    fn directory(&self) -> PathBuf {
        self.store.paths.generation(self.number)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.keep_files && self.pid == std::process::id() {
            // nothing names these files, and while we hold their lock nobody else looks at them
            cleanup::purge_generation(self.disk().as_ref(), &self.store.paths, self.number);
        }
        drop(self.alive.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

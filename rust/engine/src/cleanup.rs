//! Cleanup: finishes what a writer that died, or failed, has left in a tag.
//!
//! Owns: the moves to plain names, complete.txt, half-done deletions, the removal of what no checkpoint needs.
//! Must not: remove what a manifest names, or what belongs to a writer that lives; touch a foreign file.
//! Invariant: every step may be broken off and done again; nothing is removed before what replaces it is durable.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use relight_format::manifest::{Manifest, ManifestError};
use relight_format::names;

use crate::disk::{Disk, EntryKind};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, TagPaths};
use crate::publish;
use crate::tag_lock::{self, TagLock};

/// What a settled tag has.
#[derive(Debug)]
pub(crate) struct Settled {
    /// The committed generation; None if there is none that can be read.
    pub(crate) manifest: Option<Manifest>,
    /// The highest generation that has a number, committed or not.
    pub(crate) highest: u64,
}

/// Finishes what other writers left in the tag: a half-done deletion, moves, complete.txt, leftovers of dead writers.
pub(crate) fn settle(disk: &Arc<dyn Disk>, paths: &TagPaths, lock: &TagLock) -> Result<Settled> {
    finish_removal(disk.as_ref(), paths, lock)?;
    let manifest = match read_manifest(disk.as_ref(), &paths.manifest()) {
        Ok(manifest) => manifest,
        // Nobody can load it, so a new save may replace it. What it names is unknown: nothing is cleaned up.
        Err(error) if error.kind == ErrorKind::Corrupt => {
            let highest = generations(disk.as_ref(), paths)?.into_iter().max().unwrap_or(0);
            return Ok(Settled { manifest: None, highest });
        }
        Err(error) => return Err(error),
    };
    match &manifest {
        Some(found) => settle_manifest(disk, paths, found, None, lock)?,
        None => {
            refuse_stale_name(disk.as_ref(), paths)?;
            remove_parts(disk.as_ref(), paths)?;
            purge(disk.as_ref(), paths, None);
        }
    }
    let present = generations(disk.as_ref(), paths)?.into_iter().max().unwrap_or(0);
    let highest = manifest.as_ref().map_or(0, |found| found.generation).max(present);
    Ok(Settled { manifest, highest })
}

/// A network file system may remember for a while that a name was not there, and say so although another host has made
/// it since. Its list of a directory is fresh. What a manifest names must not go because nobody could open it.
fn refuse_stale_name(disk: &dyn Disk, paths: &TagPaths) -> Result<()> {
    if !list(disk, &paths.own)?.iter().any(|name| name == names::MANIFEST) {
        return Ok(());
    }
    let cause = io::Error::from(io::ErrorKind::StaleNetworkFileHandle);
    Err(Error::io("read the manifest", &paths.manifest(), cause))
}

/// Brings the files of a committed manifest to their plain names, then says so in complete.txt.
/// `own` is the generation whose lock the caller holds.
pub(crate) fn settle_manifest(
    disk: &Arc<dyn Disk>,
    paths: &TagPaths,
    manifest: &Manifest,
    own: Option<u64>,
    _lock: &TagLock,
) -> Result<()> {
    let present: HashSet<u64> = generations(disk.as_ref(), paths)?.into_iter().collect();
    let mut waiting: Vec<u64> = manifest.files.iter().map(|file| file.generation).collect();
    // a generation with no file of its own may still have parts to move
    waiting.push(manifest.generation);
    waiting.extend(own);
    waiting.sort_unstable();
    waiting.dedup();
    waiting.retain(|number| present.contains(number));
    for &number in &waiting {
        move_generation(disk.as_ref(), paths, manifest, number)?;
    }
    if !waiting.is_empty() {
        // The new names first: were the old names gone and the new ones not yet durable, a power cut would lose files.
        publish::sync_dir(disk.as_ref(), &paths.tag)?;
        publish::sync_dir(disk.as_ref(), &paths.own)?;
    }
    let complete = disk.metadata(&paths.complete());
    if !complete.is_ok_and(|found| found.kind == EntryKind::File && found.len == COMPLETE_TEXT.len() as u64) {
        publish::publish(disk, &paths.tag, names::COMPLETE, COMPLETE_TEXT)?;
    }
    purge(disk.as_ref(), paths, own);
    Ok(())
}

/// What Nebula left in a complete tag.
const COMPLETE_TEXT: &[u8] = b"OK";

fn move_generation(disk: &dyn Disk, paths: &TagPaths, manifest: &Manifest, number: u64) -> Result<()> {
    let directory = paths.generation(number);
    let entries = list(disk, &directory)?;
    let names: HashSet<&str> = entries.iter().map(String::as_str).collect();
    for file in manifest.files.iter().filter(|file| file.generation == number && names.contains(&*file.path)) {
        publish::rename(disk, &directory.join(&file.path), &paths.plain(&file.path))?;
    }
    for rank in manifest.writers.iter().map(|writer| writer.rank).chain(0..manifest.world_size) {
        let name = layout::staged_part_name(rank);
        if names.contains(&*name) && disk.metadata(&directory.join(&name)).is_ok() {
            publish::rename(disk, &directory.join(&name), &paths.part(rank))?;
        }
    }
    Ok(())
}

/// Removes generations of dead writers and temporary files, as far as the disk lets it: what is left is looked at
/// again by the next save. `own` is a generation whose lock the caller holds. Called once no manifest needs any of them.
fn purge(disk: &dyn Disk, paths: &TagPaths, own: Option<u64>) {
    // the one temporary name in the tag's own directory; who holds the tag's lock knows that its writer is dead
    let _ = disk.remove_file(&publish::temp_path(&paths.tag, names::COMPLETE));
    for name in list(disk, &paths.own).unwrap_or_default() {
        if publish::is_temp(&name) {
            let _ = disk.remove_file(&paths.own.join(&name));
        } else if let Some(number) = layout::number_of_generation(&name) {
            if own == Some(number) {
                purge_generation(disk, paths, number);
            } else if let Ok(Some(_lock)) = tag_lock::try_take(disk, &paths.generation_lock(number), "cleaning up") {
                purge_generation(disk, paths, number);
            }
        }
    }
}

/// Removes the directory of one generation, best effort. Its lock is held by the caller.
pub(crate) fn purge_generation(disk: &dyn Disk, paths: &TagPaths, number: u64) {
    let directory = paths.generation(number);
    let lock = paths.generation_lock(number);
    for name in list(disk, &directory).unwrap_or_default() {
        let path = directory.join(name);
        if path != lock {
            let _ = disk.remove_file(&path);
        }
    }
    // the lock goes last: as long as it is there, others can tell that the writer is alive
    let _ = disk.remove_file(&lock);
    let _ = disk.remove_dir(&directory);
}

/// Removes the files of a tag whose deletion has begun: its manifest was renamed to the tombstone.
pub(crate) fn finish_removal(disk: &dyn Disk, paths: &TagPaths, _lock: &TagLock) -> Result<()> {
    let tombstone = match read_manifest(disk, &paths.tombstone()) {
        Ok(None) => return Ok(()),
        Ok(Some(manifest)) => Some(manifest),
        // it cannot say what to remove; the files stay as foreign ones
        Err(error) if error.kind == ErrorKind::Corrupt => None,
        Err(error) => return Err(error),
    };
    let replaced = list(disk, &paths.own)?.iter().any(|name| name == names::MANIFEST);
    if !replaced {
        publish::remove_if_there(disk, &paths.complete())?;
        for file in tombstone.iter().flat_map(|manifest| &manifest.files) {
            let plain = paths.plain(&file.path);
            match disk.metadata(&plain) {
                Ok(found) if found.kind == EntryKind::Directory => {}
                _ => publish::remove_if_there(disk, &plain)?,
            }
        }
        remove_parts(disk, paths)?;
        purge(disk, paths, None);
        // the tombstone is what remembers the files: it goes when their removal is durable
        publish::sync_dir(disk, &paths.tag)?;
    }
    publish::remove_if_there(disk, &paths.tombstone())?;
    publish::sync_dir(disk, &paths.own)
}

/// Removes the parts of a tag that has no manifest.
fn remove_parts(disk: &dyn Disk, paths: &TagPaths) -> Result<()> {
    for name in list(disk, &paths.own)? {
        if layout::rank_of_part(&name).is_some() {
            publish::remove_if_there(disk, &paths.own.join(&name))?;
        }
    }
    Ok(())
}

/// Removes the directories of a tag that has nothing left. Foreign files keep them.
pub(crate) fn remove_empty(disk: &dyn Disk, root: &Path, paths: &TagPaths, _lock: &TagLock) {
    let Ok(own) = list(disk, &paths.own) else { return };
    let lock = paths.lock();
    if own.iter().any(|name| paths.own.join(name) != lock) {
        return;
    }
    // best effort: an empty directory does no harm, and the next save looks again
    let target = disk.canonical(&paths.tag).unwrap_or_else(|_| paths.tag.clone());
    let _ = disk.remove_file(&lock);
    if disk.remove_dir(&paths.own).is_ok() && disk.remove_dir(&target).is_ok() {
        if target != paths.tag {
            // the tag was a link to a directory elsewhere; without that it would dangle
            let _ = disk.remove_file(&paths.tag);
        }
        let _ = disk.sync_dir(root);
    }
}

/// Looks at every tag of `root` but `except`, and cleans up after dead writers. Best effort.
pub(crate) fn sweep(disk: &Arc<dyn Disk>, root: &Path, except: &str) {
    for entry in disk.list_dir(root).unwrap_or_default() {
        if entry.kind != EntryKind::Directory || entry.name == except || names::check_tag(&entry.name).is_err() {
            continue;
        }
        let paths = TagPaths::new(root, &entry.name);
        let Ok(own) = list(disk.as_ref(), &paths.own) else { continue };
        let settled = own.iter().any(|name| name == names::MANIFEST)
            && !own.iter().any(|name| {
                publish::is_temp(name) || name == layout::TOMBSTONE || layout::number_of_generation(name).is_some()
            });
        if settled {
            continue;
        }
        if let Ok(Some(lock)) = TagLock::try_take(disk.as_ref(), &paths.lock(), "cleaning up")
            && settle(disk, &paths, &lock).is_ok_and(|found| found.manifest.is_none())
        {
            remove_empty(disk.as_ref(), root, &paths, &lock);
        }
    }
}

/// The manifest at `path`; None if there is none.
///
/// # Errors
/// Corrupt if it is not what was written; InvalidArgument if a newer relight wrote it.
pub(crate) fn read_manifest(disk: &dyn Disk, path: &Path) -> Result<Option<Manifest>> {
    let bytes = match look_again(|| read_whole(disk, path)) {
        Ok(bytes) => bytes,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(Error::io("read the manifest", path, cause)),
    };
    Manifest::parse(&bytes).map(Some).map_err(|cause| {
        let kind = match &cause {
            ManifestError::Newer { .. } => ErrorKind::InvalidArgument,
            _ => ErrorKind::Corrupt,
        };
        Error::new(kind, format!("{cause} ({})", path.display())).at(path).because(cause)
    })
}

/// Asks once more when a network file system says that what it knew of a path is stale (another host removed or
/// replaced it); stale again means gone.
pub(crate) fn look_again<T>(mut look: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let is_stale = |cause: &io::Error| cause.kind() == io::ErrorKind::StaleNetworkFileHandle;
    match look() {
        Err(cause) if is_stale(&cause) => match look() {
            Err(cause) if is_stale(&cause) => Err(io::Error::from(io::ErrorKind::NotFound)),
            other => other,
        },
        other => other,
    }
}

pub(crate) fn read_whole(disk: &dyn Disk, path: &Path) -> io::Result<Vec<u8>> {
    let file = disk.open_file(path)?;
    let len = usize::try_from(file.len()?).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    let mut bytes = vec![0; len];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

fn generations(disk: &dyn Disk, paths: &TagPaths) -> Result<Vec<u64>> {
    Ok(list(disk, &paths.own)?.iter().filter_map(|name| layout::number_of_generation(name)).collect())
}

fn list(disk: &dyn Disk, directory: &Path) -> Result<Vec<String>> {
    match look_again(|| disk.list_dir(directory)) {
        Ok(entries) => Ok(entries.into_iter().map(|entry| entry.name).collect()),
        Err(cause) => Err(Error::io("list the directory", directory, cause)),
    }
}

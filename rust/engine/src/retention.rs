//! Retention: which checkpoints go, and how one goes so that no reader meets half of it; the `latest` hint.
//!
//! Owns: the rule of `keep` (decision 0003); the order of a deletion; the content of `latest`.
//! Must not: delete what was just committed, the newest, the newest best, what is pinned, or anything without a manifest.
//! Invariant: `latest` names a whole checkpoint or is absent; a tag with complete.txt has a manifest.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use relight_format::names;

use crate::catalog::{Checkpoint, Walk};
use crate::cleanup;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TagPaths;
use crate::publish;
use crate::root::{RootStore, check_tag};
use crate::tag_lock::TagLock;

/// What a retention did.
#[derive(Debug, Default)]
pub struct Retained {
    /// The tags that were deleted, oldest first.
    pub deleted: Vec<String>,
    /// Tags that should go but could not be deleted, and why; the next retention tries again.
    pub failed: Vec<(String, Error)>,
}

impl RootStore {
    /// Deletes all but the newest `keep` checkpoints.
    ///
    /// Tags with a step and tags without are counted apart. Beyond the newest `keep`, these stay: what was just
    /// committed, the newest of all that is marked best, and what is pinned.
    ///
    /// # Errors
    /// InvalidArgument if `keep` is 0; what the disk says of the root. A tag that cannot be deleted is in `failed`.
    pub fn retain(&self, keep: usize, just_committed: &str, pinned: &[String]) -> Result<Retained> {
        self.retain_of(&self.list()?, keep, just_committed, pinned)
    }

    /// As `retain`, of a listing that was just made.
    pub(crate) fn retain_of(
        &self,
        listed: &[Checkpoint],
        keep: usize,
        just_committed: &str,
        pinned: &[String],
    ) -> Result<Retained> {
        if keep == 0 {
            let message = "keep is 0: retention would delete what it has just saved; keep at least 1, or None for all";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let mut retained = Retained::default();
        for tag in victims(listed, keep, just_committed, pinned) {
            match self.remove(&tag.0, Duration::ZERO, Some(tag.1)) {
                Ok(true) => retained.deleted.push(tag.0),
                // replaced or deleted by another process meanwhile
                Ok(false) => {}
                Err(error) => retained.failed.push((tag.0, error)),
            }
        }
        Ok(retained)
    }

    /// Deletes the checkpoint `tag`; files in its directory that relight did not write stay.
    ///
    /// # Errors
    /// NotFound with the tags that there are; InvalidArgument for a foreign one; Corrupt if its manifest cannot say
    /// which files are its; Conflict if another process changes it for longer than the limit.
    pub fn delete(&self, tag: &str) -> Result<()> {
        check_tag(tag)?;
        let paths = TagPaths::new(self.path(), tag);
        if self.manifest(&paths).map_err(|error| error.of_tag(tag))?.is_none() {
            if self.list()?.iter().any(|found| found.tag == tag && found.is_foreign()) {
                let message =
                    format!("tag {tag} was not written by relight, which never deletes it; delete it by hand");
                return Err(Error::new(ErrorKind::InvalidArgument, message).at(paths.tag).of_tag(tag));
            }
            return Err(self.find(tag).err().unwrap_or_else(|| Error::new(ErrorKind::Conflict, "the tag came back")));
        }
        match self.remove(tag, self.inner.lock_wait, None)? {
            true => Ok(()),
            false => Err(self.find(tag).err().unwrap_or_else(|| {
                Error::new(ErrorKind::Conflict, format!("tag {tag} was saved again while it was being deleted"))
                    .of_tag(tag)
            })),
        }
    }

    /// Writes the newest checkpoint's tag to `<root>/latest`, for people and for tools that look there. relight itself
    /// never reads it.
    ///
    /// # Errors
    /// What the disk says.
    pub fn update_latest_hint(&self) -> Result<()> {
        self.point_at_latest()?.1
    }

    /// As `update_latest_hint`, with what the root has; second: whether the hint could be written.
    pub(crate) fn point_at_latest(&self) -> Result<(Walk, Result<()>)> {
        self.make_own()?;
        // Held from the look on, or another process could commit or delete before the hint is written.
        let _root_lock = self.lock("pointing at the latest")?;
        let walk = self.walk()?;
        let written = walk.latest().map_or(Ok(()), |newest| self.write_hint(&newest.tag));
        Ok((walk, written))
    }

    /// Deletes `tag`; false if there is nothing to delete, or not the commit `sequence` any more.
    fn remove(&self, tag: &str, wait: Duration, sequence: Option<u64>) -> Result<bool> {
        let disk = self.disk();
        let paths = TagPaths::new(self.path(), tag);
        let holder = format!("pid {} (deleting)", std::process::id());
        let lock = match TagLock::take(disk.as_ref(), &paths.lock(), tag, &holder, wait) {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(false),
            other => other?,
        };
        self.make_own()?;
        self.hide(tag, &paths, sequence, &lock).and_then(|hidden| {
            if hidden {
                cleanup::finish_removal(disk.as_ref(), &paths, &lock)?;
                cleanup::remove_empty(disk.as_ref(), self.path(), &paths, &lock);
            }
            Ok(hidden)
        })
    }

    /// From here on no reader is shown the tag, and the hint does not name it.
    fn hide(&self, tag: &str, paths: &TagPaths, sequence: Option<u64>, _lock: &TagLock) -> Result<bool> {
        let disk = self.disk().as_ref();
        // Held until the tag is hidden, or another process could point `latest` at it in between.
        let _root_lock = self.lock("deleting a tag")?;
        let manifest = match cleanup::read_manifest(disk, &paths.manifest())? {
            Some(manifest) if sequence.is_none_or(|listed| listed == manifest.sequence) => manifest,
            _ => return Ok(false),
        };
        self.move_hint_away(tag)?;
        // complete.txt says that the manifest is valid, so it goes first
        publish::remove_if_there(disk, &paths.complete())?;
        publish::sync_dir(disk, &paths.tag)?;
        publish::rename(disk, &paths.manifest(), &paths.tombstone())?;
        publish::sync_dir(disk, &paths.own)?;
        drop(manifest);
        Ok(true)
    }

    fn move_hint_away(&self, tag: &str) -> Result<()> {
        if self.read_hint()?.as_deref() != Some(tag) {
            return Ok(());
        }
        let rest = self.list()?.into_iter().rfind(|found| !found.is_foreign() && found.tag != tag);
        match rest {
            Some(next) => self.write_hint(&next.tag),
            None => {
                publish::remove_if_there(self.disk().as_ref(), &self.path().join(names::LATEST))?;
                publish::sync_dir(self.disk().as_ref(), self.path())
            }
        }
    }

    fn write_hint(&self, tag: &str) -> Result<()> {
        if self.read_hint()?.as_deref() == Some(tag) {
            return Ok(());
        }
        publish::publish(self.disk(), self.path(), names::LATEST, tag.as_bytes())
    }

    fn read_hint(&self) -> Result<Option<String>> {
        let path = self.path().join(names::LATEST);
        match cleanup::look_again(|| cleanup::read_whole(self.disk().as_ref(), &path)) {
            Ok(text) => Ok(Some(String::from_utf8_lossy(&text).trim().to_owned())),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(Error::io("read the latest hint", &path, cause)),
        }
    }
}

/// The tags that go, oldest first, with the sequence number of the commit that was seen.
fn victims(listed: &[Checkpoint], keep: usize, just_committed: &str, pinned: &[String]) -> Vec<(String, u64)> {
    let ours: Vec<_> =
        listed.iter().filter_map(|found| Some((found.tag.as_str(), Arc::clone(found.manifest.as_ref()?)))).collect();
    let mut stays: HashSet<&str> = pinned.iter().map(String::as_str).collect();
    stays.insert(just_committed);
    for has_step in [true, false] {
        let newest_first = ours.iter().rev().filter(|(_, manifest)| manifest.step.is_some() == has_step);
        stays.extend(newest_first.take(keep).map(|(tag, _)| *tag));
    }
    stays.extend(ours.iter().rev().find(|(_, manifest)| manifest.best).map(|(tag, _)| *tag));
    ours.iter()
        .filter(|(tag, _)| !stays.contains(tag))
        .map(|(tag, manifest)| ((*tag).to_owned(), manifest.sequence))
        .collect()
}

//! Where things lie below a root.
//!
//! Owns: every name that relight gives to a file or directory of its own (decision 0001).
//! Must not: touch the disk.

use std::path::{Path, PathBuf};

use relight_format::names;

/// The lock of a tag, and of a root, in their `.relight`.
const LOCK: &str = "lock";
/// The lock of one generation's directory: held for as long as its writer lives. No file of a user begins with a dot.
const GENERATION_LOCK: &str = ".lock";
/// The manifest of a tag that is being deleted: says what is still to be removed.
pub(crate) const TOMBSTONE: &str = "deleted.json";

/// The root's own directory, for locks.
pub(crate) fn root_own(root: &Path) -> PathBuf {
    root.join(names::RELIGHT_DIR)
}

/// The lock under which the tags of a root are named, retired, and pointed at by `latest`.
pub(crate) fn root_lock(root: &Path) -> PathBuf {
    root_own(root).join(LOCK)
}

/// The lock of the writer of the history.
pub(crate) fn history_lock(root: &Path) -> PathBuf {
    root_own(root).join("history.lock")
}

/// The paths of one tag.
#[derive(Clone, Debug)]
pub(crate) struct TagPaths {
    /// `<root>/<tag>`.
    pub(crate) tag: PathBuf,
    /// `<root>/<tag>/.relight`.
    pub(crate) own: PathBuf,
}

impl TagPaths {
    pub(crate) fn new(root: &Path, tag: &str) -> Self {
        let tag = root.join(tag);
        let own = tag.join(names::RELIGHT_DIR);
        Self { tag, own }
    }

    pub(crate) fn manifest(&self) -> PathBuf {
        self.own.join(names::MANIFEST)
    }

    pub(crate) fn tombstone(&self) -> PathBuf {
        self.own.join(TOMBSTONE)
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.own.join(LOCK)
    }

    pub(crate) fn complete(&self) -> PathBuf {
        self.tag.join(names::COMPLETE)
    }

    /// Where a committed file is in the end.
    pub(crate) fn plain(&self, path: &str) -> PathBuf {
        self.tag.join(path)
    }

    pub(crate) fn generation(&self, number: u64) -> PathBuf {
        self.own.join(format!("g{number}"))
    }

    pub(crate) fn generation_lock(&self, number: u64) -> PathBuf {
        self.generation(number).join(GENERATION_LOCK)
    }

    /// Where a file is between its writing and the moves.
    pub(crate) fn staged(&self, number: u64, path: &str) -> PathBuf {
        self.generation(number).join(path)
    }

    pub(crate) fn part(&self, rank: u32) -> PathBuf {
        self.own.join(part_name(rank))
    }
}

/// A part's name in `.relight`.
pub(crate) fn part_name(rank: u32) -> String {
    format!("part-{rank}.json")
}

/// A part's name in a generation's directory, where the user's files are too: theirs never begin with a dot.
pub(crate) fn staged_part_name(rank: u32) -> String {
    format!(".part-{rank}.json")
}

/// The rank of a part by its name in `.relight`.
pub(crate) fn rank_of_part(name: &str) -> Option<u32> {
    name.strip_prefix("part-")?.strip_suffix(".json")?.parse().ok()
}

/// The number of a generation by its directory's name.
pub(crate) fn number_of_generation(name: &str) -> Option<u64> {
    let digits = name.strip_prefix('g')?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

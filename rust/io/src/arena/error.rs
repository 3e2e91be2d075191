//! What can go wrong with the memory tier's memory.
//!
//! Owns: the cases that a caller acts on differently: wait, stream instead, leave a region alone, tell the person.
//! Must not: say what to do about a checkpoint (the engine knows that); lose the system's own error.

use std::io;
use std::path::PathBuf;

/// The error of arena calls.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The operating system refused.
    #[error("cannot {what}: {path}: {source}")]
    Io {
        /// What was tried, as "map the region".
        what: &'static str,
        /// The region, or its directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A live process owns the region.
    #[error("the region belongs to a live process{}: {path}", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Owned {
        /// The region.
        path: PathBuf,
        /// Its owner, where it is known.
        pid: Option<u32>,
    },
    /// The file is not to be trusted, or of no use.
    #[error("the region is refused: {why}: {path}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There is no gap of this size now; there will be one when images are released.
    #[error("the memory tier is full: {need} bytes needed in one piece, {free} free in all")]
    Full {
        /// Bytes that the image needs, meta and padding included.
        need: u64,
        /// Bytes that nobody uses, in all gaps together.
        free: u64,
    },
    /// The image is larger than the whole region.
    #[error("the image needs {need} bytes, the memory tier has {capacity} in all")]
    TooLarge {
        /// Bytes that the image needs, meta and padding included.
        need: u64,
        /// Bytes of the region.
        capacity: u64,
    },
    /// All slots are taken.
    #[error("the memory tier holds as many files as it can ({slots})")]
    NoSlot {
        /// Number of slots.
        slots: usize,
    },
    /// The file system of the region, or the memory of the node, has no room although the region has.
    #[error("no memory behind the region: {need} bytes needed: {source}")]
    NoMemory {
        /// Bytes that the image needs.
        need: u64,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The meta bytes are longer than what was asked for at the start.
    #[error("the record of an image has {len} bytes, {capacity} were set aside")]
    MetaTooLong {
        /// Its length.
        len: usize,
        /// What was set aside.
        capacity: usize,
    },
    /// A forked child touched its parent's region.
    #[error("the region belongs to the parent process (pid {pid}); a forked child cannot use it")]
    Forked {
        /// The parent.
        pid: u32,
    },
}

//! The file format of relight: pure functions over bytes.
//!
//! Owns: the archive's layout, the manifest, names on disk, the order of checkpoints, checksums.
//! Must not: do I/O, read the time, know of `relight-io`; use `unsafe`.
//! Invariant: bytes from outside never make it panic, and never make it allocate more than their own length allows.
#![forbid(unsafe_code)]

pub mod crc;
pub mod history;
pub mod manifest;
pub mod names;
pub mod order;
pub mod record;
pub mod zip;

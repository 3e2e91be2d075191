//! The archive: a zip64 file of stored entries, as torch.save's, laid out before its bytes are known.
//!
//! Owns: where every byte of an archive lies, and what a reader may believe of one.
//! Must not: know what the entries mean; move their bytes.

mod check;
mod layout;
mod read;
mod wire;

pub use check::{gap_problem, padding_problem};
pub use layout::{ArchiveLayout, DESCRIPTOR_BYTES, EntrySpec, LayoutError, Placed, align_for};
pub use read::{Archive, ArchiveEntry, FileKind, ParseError, ZipError, kind_of};

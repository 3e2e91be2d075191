//! What lies between the data of two entries: a data descriptor, and a header with its padding.
//!
//! Owns: the check of bytes that reading an entry never looks at.
//! Must not: read; the engine's `verify` brings the bytes.

use super::read::ArchiveEntry;
use super::wire::{DESCRIPTOR_SIGNATURE, EXTRA_PADDING, In, LOCAL_BYTES};

/// What is wrong with `gap`, the bytes from the data's end to the next header (or to the central directory).
///
/// torch and relight leave a data descriptor there and no byte more. The four forms of one are accepted: with and
/// without signature, with 32-bit and 64-bit sizes.
pub fn gap_problem(entry: &ArchiveEntry, gap: &[u8]) -> Option<String> {
    let expected = if entry.descriptor { is_descriptor(entry, gap) } else { gap.is_empty() };
    (!expected).then(|| {
        let what = if entry.descriptor { "the data descriptor" } else { "the space" };
        format!("{what} after {} (offset {}, {} bytes) is damaged", entry.name, entry.data_end(), gap.len())
    })
}

/// What is wrong with the padding in `header`, the bytes of a local header up to its data: torch and relight fill it
/// with `Z`.
pub fn padding_problem(entry: &ArchiveEntry, header: &[u8]) -> Option<String> {
    let mut fields = In(header);
    fields.take(LOCAL_BYTES - 4)?;
    let (name_len, _) = (fields.u16()?, fields.u16()?);
    fields.take(name_len.into())?;
    while let (Some(id), Some(len)) = (fields.u16(), fields.u16()) {
        let body = fields.take(len.into())?;
        if id == EXTRA_PADDING && body.iter().any(|byte| *byte != b'Z') {
            return Some(format!("the padding before {} (offset {}) is damaged", entry.name, entry.header_offset));
        }
    }
    None
}

fn is_descriptor(entry: &ArchiveEntry, gap: &[u8]) -> bool {
    let mut fields = In(gap);
    if matches!(gap.len(), 16 | 24) && fields.u32() != Some(DESCRIPTOR_SIGNATURE) {
        return false;
    }
    let crc = fields.u32();
    let sizes = match gap.len() {
        12 | 16 => (fields.u32().map(u64::from), fields.u32().map(u64::from)),
        20 | 24 => (fields.u64(), fields.u64()),
        _ => return false,
    };
    crc == Some(entry.crc32) && sizes == (Some(entry.packed_len), Some(entry.len))
}

//! The layout of an archive from names and lengths alone: every offset, and the bytes around the data.
//!
//! Owns: the exact bytes that relight writes; `docs/design/format.md` draws them and the golden files hold them still.
//! Must not: see data; its checksums come in when the bytes have passed.
//! Invariant: the pieces touch each other, in order, from 0 to `total_len`.

use std::collections::HashSet;

use super::wire::{
    CENTRAL_BYTES, CENTRAL_SIGNATURE, DESCRIPTOR_SIGNATURE, END_BYTES, END_SIGNATURE, END64_BYTES, END64_SIGNATURE,
    EXTRA_PADDING, EXTRA_ZIP64, FLAG_DESCRIPTOR, FLAG_UTF8, LOCAL_BYTES, LOCAL_SIGNATURE, LOCATOR_BYTES,
    LOCATOR_SIGNATURE, METHOD_STORED, Out, SEE_64, SEE_64_SHORT,
};

/// Bytes of a data descriptor: signature, checksum, two 64-bit sizes.
pub const DESCRIPTOR_BYTES: u64 = 24;

/// The version of the zip specification that a reader needs for 64-bit sizes.
const VERSION: u16 = 45;
/// 1980-01-01 00:00: the same state gives the same bytes, whenever it is saved.
const DOS_DATE: u16 = 0x0021;
const DOS_TIME: u16 = 0;
/// Of the extra field with both 64-bit sizes, its head included.
const ZIP64_EXTRA_BYTES: usize = 20;
/// Of the padding extra field's head.
const PADDING_HEAD_BYTES: usize = 4;
/// So that the padding fits the 16 bits of an extra field's length.
const ALIGN_MAX: u64 = 32 * 1024;
const NAME_BYTES_MAX: usize = 4096;

/// The alignment of an entry's data in the file: 4096 from 64 KiB on, so that it can be mapped, read with O_DIRECT and
/// rewritten in place; 64 below, so that tiny entries stay cheap.
pub fn align_for(len: u64) -> u64 {
    const LARGE: u64 = 64 * 1024;
    if len >= LARGE { 4096 } else { 64 }
}

/// What is to be laid out for one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntrySpec {
    /// Its name without the stem, as `data/0`.
    pub name: String,
    /// Bytes of its data.
    pub len: u64,
    /// What the offset of its data is a multiple of; a power of two.
    pub align: u64,
}

/// Where one entry lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Of its local header.
    pub header_offset: u64,
    /// Of its data.
    pub data_offset: u64,
    /// Bytes of its data.
    pub len: u64,
    /// Of its data descriptor: the end of its data.
    pub descriptor_offset: u64,
}

/// Why entries cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No entries.
    #[error("an archive needs at least one entry")]
    NoEntries,
    /// The stem is not one path component.
    #[error("the stem {stem:?} is not a plain name: no separators, no control characters, 1 to 200 bytes")]
    Stem {
        /// The stem.
        stem: String,
    },
    /// An entry's name is not a plain relative path.
    #[error("the entry name {name:?} is not a plain relative path")]
    Name {
        /// The name.
        name: String,
    },
    /// Two entries of one name.
    #[error("the entry name {name:?} is used twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// Not a power of two up to 32 KiB.
    #[error("the alignment {align} of entry {name:?} is not a power of two from 1 to {ALIGN_MAX}")]
    Align {
        /// The entry.
        name: String,
        /// The alignment.
        align: u64,
    },
    /// More bytes than a file can have.
    #[error("the archive would be longer than a file can be")]
    TooLong,
}

/// An archive, laid out.
#[derive(Clone, Debug)]
pub struct ArchiveLayout {
    /// Full names, the stem included.
    names: Vec<String>,
    placed: Vec<Placed>,
    trailer_offset: u64,
    total_len: u64,
}

impl ArchiveLayout {
    /// Lays `entries` out in the order given, each named `<stem>/<name>`.
    ///
    /// # Errors
    /// [`LayoutError`] says which entry cannot be.
    pub fn new(stem: &str, entries: &[EntrySpec]) -> Result<Self, LayoutError> {
        if entries.is_empty() {
            return Err(LayoutError::NoEntries);
        }
        if stem.len() > 200 || stem.contains('/') || !is_plain_path(stem) {
            return Err(LayoutError::Stem { stem: stem.to_owned() });
        }
        let mut seen = HashSet::with_capacity(entries.len());
        let mut names = Vec::with_capacity(entries.len());
        let mut placed = Vec::with_capacity(entries.len());
        let mut offset = 0_u64;
        for entry in entries {
            if entry.name.len() > NAME_BYTES_MAX || !is_plain_path(&entry.name) {
                return Err(LayoutError::Name { name: entry.name.clone() });
            }
            if !seen.insert(entry.name.as_str()) {
                return Err(LayoutError::Twice { name: entry.name.clone() });
            }
            if !entry.align.is_power_of_two() || entry.align > ALIGN_MAX {
                return Err(LayoutError::Align { name: entry.name.clone(), align: entry.align });
            }
            let name = format!("{stem}/{}", entry.name);
            let place = place(offset, name.len(), entry).ok_or(LayoutError::TooLong)?;
            offset = place.descriptor_offset + DESCRIPTOR_BYTES;
            names.push(name);
            placed.push(place);
        }
        let mut layout = Self { names, placed, trailer_offset: offset, total_len: 0 };
        let trailer_len = layout.directory_len() + (END64_BYTES + LOCATOR_BYTES + END_BYTES) as u64;
        layout.total_len =
            offset.checked_add(trailer_len).filter(|len| is_file_len(*len)).ok_or(LayoutError::TooLong)?;
        Ok(layout)
    }

    /// Bytes of the archive.
    pub fn total_len(&self) -> u64 {
        self.total_len
    }

    /// How many entries there are.
    pub fn entry_count(&self) -> usize {
        self.placed.len()
    }

    /// Where entry `index` lies.
    pub fn entry(&self, index: usize) -> Placed {
        self.placed[index]
    }

    /// The bytes from `header_offset` up to `data_offset` of entry `index`.
    pub fn header_bytes(&self, index: usize) -> Vec<u8> {
        let (name, place) = (&self.names[index], self.placed[index]);
        let header_len = (place.data_offset - place.header_offset) as usize; // below 64 KiB: name and padding are bounded
        let extra_len = header_len - LOCAL_BYTES - name.len();
        let padding_len = extra_len - ZIP64_EXTRA_BYTES - PADDING_HEAD_BYTES;
        let mut out = Out(Vec::with_capacity(header_len));
        out.u32(LOCAL_SIGNATURE).u16(VERSION).u16(FLAG_DESCRIPTOR | FLAG_UTF8).u16(METHOD_STORED);
        out.u16(DOS_TIME).u16(DOS_DATE);
        // The checksum is not known yet: it follows in the descriptor. The sizes are, in the 64-bit field.
        out.u32(0).u32(SEE_64).u32(SEE_64);
        out.u16(name.len() as u16).u16(extra_len as u16).bytes(name.as_bytes());
        out.u16(EXTRA_ZIP64).u16(16).u64(place.len).u64(place.len);
        out.u16(EXTRA_PADDING).u16(padding_len as u16);
        // As torch does; zeros would read as empty extra fields, wherever a damaged length lets them begin.
        out.0.resize(header_len, b'Z');
        out.0
    }

    /// The bytes from `descriptor_offset` of entry `index` on, [`DESCRIPTOR_BYTES`] of them.
    pub fn descriptor_bytes(&self, index: usize, crc: u32) -> Vec<u8> {
        let len = self.placed[index].len;
        let mut out = Out(Vec::with_capacity(DESCRIPTOR_BYTES as usize));
        out.u32(DESCRIPTOR_SIGNATURE).u32(crc).u64(len).u64(len);
        out.0
    }

    /// Where the central directory begins: all entries lie before it.
    pub fn trailer_offset(&self) -> u64 {
        self.trailer_offset
    }

    /// The bytes from `trailer_offset` to the end: central directory and end records. `crcs` has one for each entry.
    ///
    /// # Panics
    /// If the number of checksums is not that of the entries.
    pub fn trailer_bytes(&self, crcs: &[u32]) -> Vec<u8> {
        assert_eq!(crcs.len(), self.placed.len(), "one checksum for each entry");
        let mut out = Out(Vec::with_capacity((self.total_len - self.trailer_offset) as usize));
        for ((name, place), crc) in self.names.iter().zip(&self.placed).zip(crcs) {
            write_central(&mut out, name, *place, *crc);
        }
        let (count, directory_len) = (self.placed.len() as u64, self.directory_len());
        let end64_offset = self.trailer_offset + directory_len;
        out.u32(END64_SIGNATURE).u64(END64_BYTES as u64 - 12).u16(VERSION).u16(VERSION).u32(0).u32(0);
        out.u64(count).u64(count).u64(directory_len).u64(self.trailer_offset);
        out.u32(LOCATOR_SIGNATURE).u32(0).u64(end64_offset).u32(1);
        let count = u16::try_from(count).unwrap_or(SEE_64_SHORT);
        out.u32(END_SIGNATURE).u16(0).u16(0).u16(count).u16(count);
        out.u32(short(directory_len)).u32(short(self.trailer_offset)).u16(0);
        out.0
    }

    fn directory_len(&self) -> u64 {
        let entries = self.names.iter().zip(&self.placed);
        entries.map(|(name, place)| (CENTRAL_BYTES + name.len() + central_extra_len(*place)) as u64).sum()
    }
}

/// Where an entry lies whose local header begins at `offset`; `None` beyond what a file can have.
fn place(offset: u64, name_len: usize, entry: &EntrySpec) -> Option<Placed> {
    let header_min = (LOCAL_BYTES + name_len + ZIP64_EXTRA_BYTES + PADDING_HEAD_BYTES) as u64;
    let data_offset = offset.checked_add(header_min)?.checked_next_multiple_of(entry.align)?;
    let descriptor_offset = data_offset.checked_add(entry.len)?;
    is_file_len(descriptor_offset.checked_add(DESCRIPTOR_BYTES)?).then_some(Placed {
        header_offset: offset,
        data_offset,
        len: entry.len,
        descriptor_offset,
    })
}

/// Whether a file can have this length: systems count it in 63 bits.
fn is_file_len(len: u64) -> bool {
    i64::try_from(len).is_ok()
}

/// A relative path of ordinary components: what every zip reader extracts below its directory.
fn is_plain_path(path: &str) -> bool {
    !path.chars().any(|c| c == '\\' || c.is_control()) && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// The value of a 32-bit field.
fn short(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(SEE_64)
}

/// The 64-bit values that the 32-bit fields of a central directory entry cannot hold, in the order of the specification.
fn central_wide(place: Placed) -> impl Iterator<Item = u64> {
    [place.len, place.len, place.header_offset].into_iter().filter(|value| *value >= u64::from(SEE_64))
}

fn central_extra_len(place: Placed) -> usize {
    match central_wide(place).count() {
        0 => 0,
        count => 4 + 8 * count,
    }
}

fn write_central(out: &mut Out, name: &str, place: Placed, crc: u32) {
    let extra_len = central_extra_len(place);
    out.u32(CENTRAL_SIGNATURE).u16(VERSION).u16(VERSION).u16(FLAG_DESCRIPTOR | FLAG_UTF8).u16(METHOD_STORED);
    out.u16(DOS_TIME).u16(DOS_DATE).u32(crc).u32(short(place.len)).u32(short(place.len));
    out.u16(name.len() as u16).u16(extra_len as u16).u16(0).u16(0).u16(0).u32(0).u32(short(place.header_offset));
    out.bytes(name.as_bytes());
    if extra_len > 0 {
        out.u16(EXTRA_ZIP64).u16(extra_len as u16 - 4);
        for value in central_wide(place) {
            out.u64(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, len: u64) -> EntrySpec {
        EntrySpec { name: name.to_owned(), len, align: align_for(len) }
    }

    #[test]
    fn pieces_touch_and_data_is_aligned() {
        let lens = [287, 1, 0, 64 * 1024 - 1, 64 * 1024, 12, 5 << 30, 40];
        let specs: Vec<_> = lens.iter().enumerate().map(|(i, len)| spec(&format!("data/{i}"), *len)).collect();
        let layout = ArchiveLayout::new("model", &specs).unwrap();
        let mut end = 0;
        for (i, spec) in specs.iter().enumerate() {
            let place = layout.entry(i);
            assert_eq!(place.header_offset, end);
            assert_eq!(place.data_offset % spec.align, 0);
            assert_eq!(layout.header_bytes(i).len() as u64, place.data_offset - place.header_offset);
            assert!(place.data_offset - place.header_offset < 4096 + 128);
            assert_eq!(place.descriptor_offset, place.data_offset + spec.len);
            assert_eq!(layout.descriptor_bytes(i, 1).len() as u64, DESCRIPTOR_BYTES);
            end = place.descriptor_offset + DESCRIPTOR_BYTES;
        }
        assert_eq!(layout.trailer_offset(), end);
        let trailer = layout.trailer_bytes(&[0; 8]);
        assert_eq!(layout.trailer_offset() + trailer.len() as u64, layout.total_len());
    }

    /// Guards: 100,000 tiny tensors that cost a page each.
    #[test]
    fn test_bl_032_a_tiny_entry_costs_little() {
        let specs: Vec<_> = (0..1000).map(|i| spec(&format!("data/{i}"), 64)).collect();
        let layout = ArchiveLayout::new("model", &specs).unwrap();
        assert!(layout.total_len() / 1000 <= 64 + 200, "{} bytes each", layout.total_len() / 1000);
    }

    #[test]
    fn what_cannot_be_an_archive_is_refused() {
        let ok = spec("data.pkl", 1);
        assert_eq!(ArchiveLayout::new("model", &[]).unwrap_err(), LayoutError::NoEntries);
        for stem in ["", "a/b", "..", "a\\b", "a\0b", &"x".repeat(201)] {
            assert!(
                matches!(ArchiveLayout::new(stem, std::slice::from_ref(&ok)), Err(LayoutError::Stem { .. })),
                "{stem:?}"
            );
        }
        for name in ["", "/x", "x/", "../x", "a//b", "a/./b", "a\nb", &"x".repeat(5000)] {
            let error = ArchiveLayout::new("model", &[spec(name, 1)]).unwrap_err();
            assert!(matches!(error, LayoutError::Name { .. }), "{name:?}: {error}");
        }
        assert!(matches!(ArchiveLayout::new("m", &[ok.clone(), ok.clone()]), Err(LayoutError::Twice { .. })));
        for align in [0, 3, 65_536] {
            let error = ArchiveLayout::new("m", &[EntrySpec { align, ..ok.clone() }]).unwrap_err();
            assert!(matches!(error, LayoutError::Align { .. }));
        }
        for lens in [vec![u64::MAX], vec![i64::MAX as u64], vec![1 << 62, 1 << 62]] {
            let specs: Vec<_> = lens.iter().enumerate().map(|(i, len)| spec(&format!("{i}"), *len)).collect();
            assert_eq!(ArchiveLayout::new("m", &specs).unwrap_err(), LayoutError::TooLong);
        }
    }
}

//! Reading an archive's tables: relight's own files and those of every torch.save since 1.6.
//!
//! Owns: which archives are accepted, and that every table agrees with every other before one is believed.
//! Must not: read data; that is checked against the checksums here by whoever reads it.
//! Invariant: what `parse` returns lies within the file and nothing overlaps. Memory grows with entries that are really
//! there, never with a number that the file claims.

use super::wire::{
    CENTRAL_BYTES, CENTRAL_SIGNATURE, END_BYTES, END_SIGNATURE, END64_BYTES, END64_SIGNATURE, EXTRA_ZIP64,
    FLAG_DESCRIPTOR, FLAG_ENCRYPTED, In, LOCAL_BYTES, LOCAL_SIGNATURE, LOCATOR_BYTES, LOCATOR_SIGNATURE, METHOD_STORED,
    SEE_64, SEE_64_SHORT,
};

/// Bytes read at a time of the central directory: more than its longest entry.
const DIRECTORY_WINDOW: usize = 256 * 1024;
/// Bytes read at a time for local headers: several tiny entries lie in one window, and a page costs as much as a byte.
const HEADER_WINDOW: usize = 4096;

/// Bytes of a data descriptor: with and without signature, with 32-bit and 64-bit sizes.
const DESCRIPTOR_LENS: [u64; 4] = [12, 16, 20, 24];

/// The tables of an archive, checked against each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archive {
    /// The folder that all entries lie in.
    pub stem: String,
    /// In the order of the central directory, folders left out.
    pub entries: Vec<ArchiveEntry>,
    /// Where the central directory begins.
    pub directory_offset: u64,
    /// Whether the entries have checksums. torch.save writes 0 for all after
    /// `torch.serialization.set_crc32_options(False)`: such a file can be read and not be verified.
    pub has_checksums: bool,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// Its name without the stem.
    pub name: String,
    /// Where its local header begins.
    pub header_offset: u64,
    /// Where its data begins.
    pub data_offset: u64,
    /// Bytes of its data once unpacked; of all of it, where it is stored.
    pub len: u64,
    /// Bytes that its data takes in the file.
    pub packed_len: u64,
    /// CRC-32 of the unpacked data.
    pub crc32: u32,
    /// Whether the data lies there as it is; else a foreign tool has compressed it.
    pub stored: bool,
    /// Whether a data descriptor follows the data.
    pub descriptor: bool,
}

impl ArchiveEntry {
    /// Where its data ends.
    pub fn data_end(&self) -> u64 {
        self.data_offset + self.packed_len
    }
}

/// What a file is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A zip archive, at least at its beginning.
    Zip,
    /// What torch.save wrote before 1.6, or writes with `_use_new_zipfile_serialization=False`: a bare pickle.
    LegacyPickle,
    /// What torch.save wrote before 0.1.10: a tar.
    LegacyTar,
    /// Nothing that torch.save wrote.
    Other,
}

/// Bytes that [`kind_of`] looks at.
const KIND_BYTES: usize = 512;

/// What a file is that begins with `head`; 512 bytes are enough.
pub fn kind_of(head: &[u8]) -> FileKind {
    // The pickled number 0x1950a86a20f9469cfc6c that stands at the front of each, in protocols 2 and up.
    const MAGIC: &[u8] = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
    if head.starts_with(b"PK\x03\x04") {
        FileKind::Zip
    } else if head.first() == Some(&0x80) && head.get(2..2 + MAGIC.len()) == Some(MAGIC) {
        FileKind::LegacyPickle
    } else if head.get(257..262) == Some(b"ustar") {
        FileKind::LegacyTar
    } else {
        FileKind::Other
    }
}

/// Why a file is not an archive that can be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZipError {
    /// No bytes.
    #[error("the file has no bytes")]
    Empty,
    /// It is something else.
    #[error("the file is not a zip archive")]
    NotZip(FileKind),
    /// It begins as an archive and has no end.
    #[error("the archive is cut short: its end record is missing after {len} bytes")]
    Cut {
        /// The bytes that there are.
        len: u64,
    },
    /// A zip that torch did not write.
    #[error("the archive is not one of torch.save: {0}")]
    NotTorch(String),
    /// A zip feature that torch.save never uses.
    #[error("entry {name} at offset {offset} {what}, which torch.save never does")]
    Unsupported {
        /// The entry.
        name: String,
        /// Its local header.
        offset: u64,
        /// What it does.
        what: &'static str,
    },
    /// Two tables contradict each other, or one the file's length.
    #[error("{what} (offset {offset})")]
    Lie {
        /// The contradiction.
        what: String,
        /// Where the table lies.
        offset: u64,
    },
}

/// A file could not be read, or is not an archive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError<E> {
    /// The reader's own error.
    #[error("{0}")]
    Read(E),
    /// What is wrong with the bytes.
    #[error(transparent)]
    Zip(#[from] ZipError),
}

impl Archive {
    /// Reads the tables of a file of `len` bytes; `read(offset, count)` gives that many bytes, all within the file.
    ///
    /// # Errors
    /// [`ParseError::Read`] passes on what `read` said; [`ParseError::Zip`] says what is wrong with the bytes.
    pub fn parse<E>(len: u64, read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>, E>) -> Result<Self, ParseError<E>> {
        let mut source = Window { len, read, start: 0, bytes: Vec::new() };
        let end = find_end(&mut source)?;
        let mut entries = read_directory(&mut source, &end)?;
        check_headers(&mut source, &mut entries, end.directory_offset)?;
        Ok(as_torch(entries, end.directory_offset)?)
    }

    /// The index of the entry `name` (without the stem).
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }
}

/// The file, read through one window.
struct Window<'a, E> {
    len: u64,
    read: &'a mut dyn FnMut(u64, usize) -> Result<Vec<u8>, E>,
    start: u64,
    bytes: Vec<u8>,
}

impl<E> Window<'_, E> {
    /// `count` bytes from `offset`; on the way up to `ahead` are read. Beyond the file it is a lie of whoever pointed there.
    fn get(&mut self, offset: u64, count: usize, ahead: usize, what: &str) -> Result<&[u8], ParseError<E>> {
        let lie = || lie(format!("{what} lies beyond the end of the file ({} bytes)", self.len), offset);
        let available = self.len.checked_sub(offset).filter(|rest| *rest >= count as u64).ok_or_else(lie)?;
        let inside = offset.checked_sub(self.start).filter(|at| at + count as u64 <= self.bytes.len() as u64);
        let at = match inside {
            Some(at) => at as usize,
            None => {
                let wanted = available.min(count.max(ahead) as u64) as usize;
                self.bytes = (self.read)(offset, wanted).map_err(ParseError::Read)?;
                self.start = offset;
                0
            }
        };
        // A reader that gives less than it was asked for breaks its contract; that is not a reason to panic.
        self.bytes.get(at..at + count).ok_or_else(|| ZipError::Cut { len: offset }.into())
    }
}

fn lie<E>(what: String, offset: u64) -> ParseError<E> {
    ZipError::Lie { what, offset }.into()
}

/// What the records at the end of the file say.
struct End {
    count: u64,
    directory_offset: u64,
    directory_len: u64,
}

fn find_end<E>(source: &mut Window<'_, E>) -> Result<End, ParseError<E>> {
    let len = source.len;
    if len == 0 {
        return Err(ZipError::Empty.into());
    }
    let head_len = len.min(KIND_BYTES as u64) as usize;
    match kind_of(source.get(0, head_len, 0, "the head")?) {
        FileKind::Zip => {}
        kind => return Err(ZipError::NotZip(kind).into()),
    }
    let end_offset = end_offset(source)?.ok_or(ZipError::Cut { len })?;
    let mut end = In(source.get(end_offset, END_BYTES, 0, "the end record")?);
    let fields = (|| {
        end.take(4)?;
        Some((end.u16()?, end.u16()?, end.u16()?, end.u16()?, end.u32()?, end.u32()?))
    })();
    let Some((disk, directory_disk, count_here, count, directory_len, directory_offset)) = fields else {
        return Err(ZipError::Cut { len }.into());
    };
    if disk != 0 || directory_disk != 0 || count != count_here {
        return Err(lie("the end record speaks of several disks".to_owned(), end_offset));
    }
    let short =
        End { count: count.into(), directory_offset: directory_offset.into(), directory_len: directory_len.into() };
    let (end, directory_end) = match end64(source, end_offset, &short)? {
        Some(found) => found,
        None => (short, end_offset),
    };
    if end.directory_offset.checked_add(end.directory_len) != Some(directory_end) {
        let what =
            format!("the central directory ({} bytes) does not end where the end records begin", end.directory_len);
        return Err(lie(what, end.directory_offset));
    }
    if end.count > end.directory_len / CENTRAL_BYTES as u64 {
        return Err(lie(format!("{} entries do not fit the central directory", end.count), end.directory_offset));
    }
    Ok(end)
}

/// Where the end record begins: it is followed by its comment and nothing else.
fn end_offset<E>(source: &mut Window<'_, E>) -> Result<Option<u64>, ParseError<E>> {
    const COMMENT_BYTES_MAX: u64 = u16::MAX as u64;
    let len = source.len;
    for span in [END_BYTES as u64, END_BYTES as u64 + COMMENT_BYTES_MAX] {
        let span = span.min(len);
        let start = len - span;
        let bytes = source.get(start, span as usize, 0, "the end")?;
        let signature = END_SIGNATURE.to_le_bytes();
        let found = (0..bytes.len().saturating_sub(END_BYTES - 1)).rev().find(|&at| {
            let comment_len = u16::from_le_bytes([bytes[at + 20], bytes[at + 21]]) as usize;
            bytes[at..].starts_with(&signature) && at + END_BYTES + comment_len == bytes.len()
        });
        if let Some(at) = found {
            return Ok(Some(start + at as u64));
        }
    }
    Ok(None)
}

/// The 64-bit end record, where there is one, and where it begins.
fn end64<E>(source: &mut Window<'_, E>, end_offset: u64, short: &End) -> Result<Option<(End, u64)>, ParseError<E>> {
    let Some(locator_offset) = end_offset.checked_sub(LOCATOR_BYTES as u64) else { return Ok(None) };
    let mut locator = In(source.get(locator_offset, LOCATOR_BYTES, 0, "the locator")?);
    let fields = (|| Some((locator.u32()?, locator.u32()?, locator.u64()?, locator.u32()?)))();
    let (disk, offset, disks) = match fields {
        Some((LOCATOR_SIGNATURE, disk, offset, disks)) => (disk, offset, disks),
        _ if short.count == u64::from(SEE_64_SHORT)
            || short.directory_len == u64::from(SEE_64)
            || short.directory_offset == u64::from(SEE_64) =>
        {
            return Err(lie("the end record points to a 64-bit one that is not there".to_owned(), end_offset));
        }
        _ => return Ok(None),
    };
    let mut record = In(source.get(offset, END64_BYTES, 0, "the 64-bit end record")?);
    let fields = (|| {
        let (signature, rest_len) = (record.u32()?, record.u64()?);
        record.take(4)?;
        let disks = (record.u32()?, record.u32()?);
        Some((signature, rest_len, disks, record.u64()?, record.u64()?, record.u64()?, record.u64()?))
    })();
    let Some((END64_SIGNATURE, rest_len, (0, 0), count_here, count, directory_len, directory_offset)) = fields else {
        return Err(lie("the 64-bit end record is not where the locator says".to_owned(), offset));
    };
    if disk != 0 || disks > 1 || count != count_here {
        return Err(lie("the 64-bit end record speaks of several disks".to_owned(), offset));
    }
    if offset.checked_add(12).and_then(|at| at.checked_add(rest_len)) != Some(locator_offset) {
        return Err(lie("the 64-bit end record does not end at its locator".to_owned(), offset));
    }
    let agrees = |short: u64, see: u64, wide: u64| short == see || short == wide;
    if !agrees(short.count, SEE_64_SHORT.into(), count)
        || !agrees(short.directory_len, SEE_64.into(), directory_len)
        || !agrees(short.directory_offset, SEE_64.into(), directory_offset)
    {
        return Err(lie("the two end records contradict each other".to_owned(), offset));
    }
    Ok(Some((End { count, directory_offset, directory_len }, offset)))
}

/// All entries of the central directory, still with their full names.
fn read_directory<E>(source: &mut Window<'_, E>, end: &End) -> Result<Vec<ArchiveEntry>, ParseError<E>> {
    let mut entries = Vec::new();
    let mut names = std::collections::HashSet::new();
    let directory_end = end.directory_offset + end.directory_len; // checked: no overflow
    let mut offset = end.directory_offset;
    for _ in 0..end.count {
        let (entry, entry_len) = read_central(source, offset, directory_end)?;
        offset += entry_len;
        if !names.insert(entry.name.clone()) {
            return Err(lie(format!("the entry {} is there twice", entry.name), entry.header_offset));
        }
        entries.push(entry);
    }
    if offset != directory_end {
        return Err(lie(format!("the central directory has more than its {} entries", end.count), offset));
    }
    Ok(entries)
}

/// The archive of these entries, if it is one of torch.save: all in one folder, which holds a `data.pkl`.
///
/// Called when all tables agree, so that damage to a name in one of them is not taken for another kind of archive.
fn as_torch(entries: Vec<ArchiveEntry>, directory_offset: u64) -> Result<Archive, ZipError> {
    let folder =
        |name: &str| name.split_once('/').map(|(folder, _)| folder.to_owned()).filter(|folder| !folder.is_empty());
    let stem = entries.first().and_then(|entry| folder(&entry.name));
    let Some(stem) = stem else {
        return Err(ZipError::NotTorch("its first entry lies in no folder".to_owned()));
    };
    let prefix = format!("{stem}/");
    let mut inside = Vec::with_capacity(entries.len());
    for mut entry in entries {
        let Some(name) = entry.name.strip_prefix(&prefix) else {
            return Err(ZipError::NotTorch(format!("its entry {} does not lie in {prefix}", entry.name)));
        };
        // A folder: some tool has packed the archive anew.
        if entry.len > 0 || !(name.is_empty() || name.ends_with('/')) {
            entry.name = name.to_owned();
            inside.push(entry);
        }
    }
    if !inside.iter().any(|entry| entry.name == "data.pkl") {
        return Err(ZipError::NotTorch(format!("it has no {prefix}data.pkl")));
    }
    // The version number's checksum is never 0, so a file with checksums has one that is not.
    let has_checksums = inside.iter().any(|entry| entry.crc32 != 0) || inside.iter().all(|entry| entry.len == 0);
    Ok(Archive { stem, entries: inside, directory_offset, has_checksums })
}

/// The central directory's entry at `offset`: what it says, and its own length.
fn read_central<E>(
    source: &mut Window<'_, E>,
    offset: u64,
    directory_end: u64,
) -> Result<(ArchiveEntry, u64), ParseError<E>> {
    let broken = |what: &str| lie::<E>(format!("the central directory is damaged: {what}"), offset);
    let beyond = || broken("an entry goes beyond its end");
    let room = directory_end.saturating_sub(offset);
    if room < CENTRAL_BYTES as u64 {
        return Err(beyond());
    }
    let window = room.min(DIRECTORY_WINDOW as u64) as usize;
    let mut fixed = In(source.get(offset, CENTRAL_BYTES, window, "the central directory")?);
    let fields = (|| {
        let signature = fixed.u32()?;
        fixed.take(4)?; // versions
        let (flags, method) = (fixed.u16()?, fixed.u16()?);
        fixed.take(4)?; // time and date
        let (crc32, packed_len, len) = (fixed.u32()?, fixed.u32()?, fixed.u32()?);
        let (name_len, extra_len, comment_len, disk) = (fixed.u16()?, fixed.u16()?, fixed.u16()?, fixed.u16()?);
        fixed.take(6)?; // attributes
        let lens = [name_len, extra_len, comment_len].map(usize::from);
        Some((signature, flags, method, crc32, packed_len, len, lens, disk, fixed.u32()?))
    })();
    let Some((CENTRAL_SIGNATURE, flags, method, crc32, packed_len, len, lens, disk, header_offset)) = fields else {
        return Err(broken("an entry does not begin as one"));
    };
    let [name_len, extra_len, comment_len] = lens;
    let entry_len = CENTRAL_BYTES + name_len + extra_len + comment_len;
    if entry_len as u64 > room {
        return Err(beyond());
    }
    let bytes = source.get(offset, entry_len, window, "the central directory")?;
    let (name, rest) = bytes[CENTRAL_BYTES..].split_at(name_len);
    let name = std::str::from_utf8(name).map_err(|_| broken("a name is not UTF-8"))?.to_owned();
    let mut wide = Zip64::find(&rest[..extra_len]);
    let mut widen = |short: u32| wide.value(short).ok_or_else(|| broken("a 64-bit field is missing"));
    // In this order they stand in the extra field.
    let (len, packed_len, header_offset) = (widen(len)?, widen(packed_len)?, widen(header_offset)?);
    let stored = method == METHOD_STORED;
    if disk != 0 && disk != SEE_64_SHORT {
        return Err(broken("an entry lies on another disk"));
    }
    if flags & FLAG_ENCRYPTED != 0 {
        return Err(ZipError::Unsupported { name, offset: header_offset, what: "is encrypted" }.into());
    }
    if stored && len != packed_len {
        return Err(broken("a stored entry has two sizes"));
    }
    let descriptor = flags & FLAG_DESCRIPTOR != 0;
    let entry = ArchiveEntry { name, header_offset, data_offset: 0, len, packed_len, crc32, stored, descriptor };
    Ok((entry, entry_len as u64))
}

/// The values of a zip64 extra field, handed out in order for each 32-bit field that points to it.
struct Zip64<'a>(In<'a>);

impl<'a> Zip64<'a> {
    fn find(extra: &'a [u8]) -> Self {
        let mut fields = In(extra);
        while let (Some(id), Some(len)) = (fields.u16(), fields.u16()) {
            match fields.take(len.into()) {
                Some(body) if id == EXTRA_ZIP64 => return Self(In(body)),
                Some(_) => {}
                None => break,
            }
        }
        Self(In(&[]))
    }

    /// Whether the extra fields end where their space ends.
    fn is_whole(extra: &[u8]) -> bool {
        let mut fields = In(extra);
        while let (Some(_), Some(len)) = (fields.u16(), fields.u16()) {
            if fields.take(len.into()).is_none() {
                return false;
            }
            if fields.0.is_empty() {
                return true;
            }
        }
        extra.is_empty()
    }

    fn value(&mut self, short: u32) -> Option<u64> {
        if short == SEE_64 { self.0.u64() } else { Some(short.into()) }
    }
}

/// Checks each local header against the central directory, finds where the data begins, and that the entries lie one
/// behind the other.
fn check_headers<E>(
    source: &mut Window<'_, E>,
    entries: &mut [ArchiveEntry],
    directory_offset: u64,
) -> Result<(), ParseError<E>> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&index| entries[index].header_offset);
    for (at, &index) in order.iter().enumerate() {
        let next = order.get(at + 1).map_or(directory_offset, |&next| entries[next].header_offset);
        let entry = &mut entries[index];
        entry.data_offset = read_local(source, entry)?;
        let gap = entry.data_offset.checked_add(entry.packed_len).and_then(|end| next.checked_sub(end));
        let Some(gap) = gap else {
            let what = format!("the entry {} with {} bytes reaches into what follows it", entry.name, entry.packed_len);
            return Err(lie(what, entry.header_offset));
        };
        // A wrong offset that every table agrees on would show here: only a descriptor has room between data and header.
        if entry.descriptor && !DESCRIPTOR_LENS.contains(&gap) {
            let what = format!("the entry {} is followed by {gap} bytes that are no data descriptor", entry.name);
            return Err(lie(what, entry.header_offset));
        }
    }
    Ok(())
}

/// Where the data of `entry` begins, by its local header.
fn read_local<E>(source: &mut Window<'_, E>, entry: &ArchiveEntry) -> Result<u64, ParseError<E>> {
    let offset = entry.header_offset;
    let broken = |what: &str| lie::<E>(format!("the local header of {} {what}", entry.name), offset);
    let mut fixed = In(source.get(offset, LOCAL_BYTES, HEADER_WINDOW, &entry.name)?);
    let fields = (|| {
        let signature = fixed.u32()?;
        fixed.take(2)?; // version
        let (flags, method) = (fixed.u16()?, fixed.u16()?);
        fixed.take(4)?; // time and date
        let (crc32, packed_len, len) = (fixed.u32()?, fixed.u32()?, fixed.u32()?);
        Some((signature, flags, method, crc32, packed_len, len, usize::from(fixed.u16()?), usize::from(fixed.u16()?)))
    })();
    let Some((LOCAL_SIGNATURE, flags, method, crc32, packed_len, len, name_len, extra_len)) = fields else {
        return Err(broken("does not begin as one"));
    };
    let head_len = LOCAL_BYTES + name_len + extra_len;
    let bytes = source.get(offset, head_len, HEADER_WINDOW, &entry.name)?;
    let (name, extra) = bytes[LOCAL_BYTES..].split_at(name_len);
    if name != entry.name.as_bytes() {
        return Err(broken("has another name than the central directory"));
    }
    if (method == METHOD_STORED) != entry.stored || (flags & FLAG_DESCRIPTOR != 0) != entry.descriptor {
        return Err(broken("has another method or other flags than the central directory"));
    }
    // Without this a damaged length here would move the data by some bytes.
    if !Zip64::is_whole(extra) {
        return Err(broken("has extra fields that do not fill their space"));
    }
    // With a descriptor the fields may be 0, for "see behind the data"; what else they say must be true.
    let mut wide = Zip64::find(extra);
    let sizes = (wide.value(len), wide.value(packed_len));
    let agrees = |value: u64, truth: u64| value == truth || (entry.descriptor && value == 0);
    let sizes_agree = match sizes {
        (Some(len), Some(packed_len)) => agrees(len, entry.len) && agrees(packed_len, entry.packed_len),
        _ => false,
    };
    if !sizes_agree || !agrees(crc32.into(), entry.crc32.into()) {
        return Err(broken("has another size or checksum than the central directory"));
    }
    Ok(offset + head_len as u64)
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;

use super::super::{ArchiveLayout, EntrySpec, align_for};
use super::*;
use crate::crc::crc32;
use proptest::prelude::*;

/// The bytes of an archive, written as the engine does.
fn build(stem: &str, entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let specs: Vec<_> = entries
        .iter()
        .map(|(name, data)| EntrySpec {
            name: (*name).to_owned(),
            len: data.len() as u64,
            align: align_for(data.len() as u64),
        })
        .collect();
    let layout = ArchiveLayout::new(stem, &specs).unwrap();
    let mut bytes = Vec::new();
    let mut crcs = Vec::new();
    for (i, (_, data)) in entries.iter().enumerate() {
        bytes.extend(layout.header_bytes(i));
        bytes.extend(data);
        crcs.push(crc32(data));
        bytes.extend(layout.descriptor_bytes(i, crcs[i]));
    }
    bytes.extend(layout.trailer_bytes(&crcs));
    assert_eq!(bytes.len() as u64, layout.total_len());
    bytes
}

/// Reads the tables, and asserts on the way that no read leaves the file or is larger than it has to be.
fn parse(bytes: &[u8]) -> Result<Archive, ParseError<String>> {
    Archive::parse(bytes.len() as u64, &mut |offset, count| {
        assert!(count <= 256 * 1024, "{count} bytes at once");
        Ok(bytes[offset as usize..offset as usize + count].to_vec())
    })
}

/// No length is a power of two: one flip would make it 0, which a header with a descriptor may say.
fn small() -> Vec<u8> {
    build(
        "model",
        &[
            ("data.pkl", b"pickle".to_vec()),
            (".format_version", b"000".to_vec()),
            ("data/0", vec![7; 300]),
            ("data/1", Vec::new()),
            ("version", b"3\n\n".to_vec()),
        ],
    )
}

#[test]
fn what_was_laid_out_is_read_back() {
    let bytes = small();
    let archive = parse(&bytes).unwrap();
    assert_eq!(archive.stem, "model");
    assert!(archive.has_checksums);
    let names: Vec<_> = archive.entries.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["data.pkl", ".format_version", "data/0", "data/1", "version"]);
    let entry = &archive.entries[archive.find("data/0").unwrap()];
    assert_eq!(bytes[entry.data_offset as usize..][..300], [7; 300]);
    assert_eq!((entry.len, entry.crc32, entry.stored), (300, crc32(&[7; 300]), true));
}

#[test]
fn every_cut_is_an_error() {
    let bytes = small();
    for len in 0..bytes.len() {
        let error = parse(&bytes[..len]).unwrap_err();
        let ParseError::Zip(error) = error else { panic!("{error}") };
        match len {
            0 => assert_eq!(error, ZipError::Empty),
            1..4 => assert_eq!(error, ZipError::NotZip(FileKind::Other)),
            _ => assert_eq!(error, ZipError::Cut { len: len as u64 }),
        }
    }
}

/// The bytes of `archive` that nothing depends on: data (its checksum is for whoever reads it), descriptors, times,
/// versions, attributes, the content of the padding.
fn indifferent(bytes: &[u8], archive: &Archive) -> Vec<bool> {
    let mut marks = vec![false; bytes.len()];
    let mut mark = |from: u64, to: u64| marks[from as usize..to as usize].fill(true);
    let mut order: Vec<_> = archive.entries.iter().collect();
    order.sort_by_key(|entry| entry.header_offset);
    for (i, entry) in order.iter().enumerate() {
        let at = entry.header_offset;
        let name_len = (archive.stem.len() + 1 + entry.name.len()) as u64;
        mark(at + 4, at + 6); // version
        mark(at + 6, at + 8); // flags: of bits 0, 3 and 11 below
        mark(at + 8, at + 10); // method: see below
        mark(at + 10, at + 14); // time and date
        mark(at + 30 + name_len + 2, at + 30 + name_len + 4); // a longer 64-bit field only swallows padding
        mark(at + 30 + name_len + 20, at + 30 + name_len + 22); // another word for padding
        mark(at + 30 + name_len + 24, entry.data_offset); // padding, its head aside
        let next = order.get(i + 1).map_or(archive.directory_offset, |next| next.header_offset);
        mark(entry.data_offset, next);
    }
    let mut at = archive.directory_offset;
    for entry in &archive.entries {
        for (from, to) in [(4, 8), (8, 10), (12, 16), (16, 20), (36, 42)] {
            mark(at + from, at + to);
        }
        at += 46 + (archive.stem.len() + 1 + entry.name.len()) as u64;
    }
    mark(at + 12, at + 16); // versions of the 64-bit end record
    mark(at + 56 + 16, at + 56 + 20); // number of disks
    marks
}

/// Guards: a flipped bit in a table that moves, cuts or renames data without a word.
#[test]
fn every_flip_that_matters_is_noticed() {
    let bytes = small();
    let truth = parse(&bytes).unwrap();
    let indifferent = indifferent(&bytes, &truth);
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            match parse(&flipped) {
                Err(_) => {}
                Ok(read) if indifferent[at] => {
                    // Nothing but a checksum, and then the data is refused when it is read.
                    for (read, truth) in read.entries.iter().zip(&truth.entries) {
                        assert_eq!(ArchiveEntry { crc32: truth.crc32, ..read.clone() }, *truth, "flip at {at}");
                    }
                }
                Ok(_) => panic!("a flip of bit {bit} at {at} was not noticed"),
            }
        }
    }
}

#[test]
fn what_is_no_archive_of_torch_is_told_apart() {
    let kind = |bytes: &[u8]| match parse(bytes) {
        Err(ParseError::Zip(ZipError::NotZip(kind))) => kind,
        other => panic!("{other:?}"),
    };
    assert_eq!(kind(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.rest"), FileKind::LegacyPickle);
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    assert_eq!(kind(&tar), FileKind::LegacyTar);
    assert_eq!(kind(b"\x80\x04\x95some pickle"), FileKind::Other);
    assert_eq!(kind(b"hello"), FileKind::Other);
    let zip = build("docs", &[("readme.txt", b"hello".to_vec())]);
    assert!(matches!(parse(&zip), Err(ParseError::Zip(ZipError::NotTorch(_)))));
}

#[test]
fn an_archive_without_checksums_is_flagged_and_not_refused() {
    let mut bytes = small();
    let mut at = parse(&bytes).unwrap().directory_offset as usize;
    for entry in parse(&bytes).unwrap().entries {
        bytes[at + 16..at + 20].fill(0);
        at += 46 + "model/".len() + entry.name.len();
    }
    assert!(!parse(&bytes).unwrap().has_checksums);
}

#[test]
fn a_comment_behind_the_end_record_is_accepted() {
    let mut bytes = small();
    let at = bytes.len() - 2;
    bytes[at] = 5;
    bytes.extend(b"hello");
    assert_eq!(parse(&bytes).unwrap().entries.len(), 5);
}

#[test]
fn an_error_of_the_reader_is_passed_on() {
    let error = Archive::parse(100, &mut |_, _| Err::<Vec<u8>, _>("gone")).unwrap_err();
    assert_eq!(error, ParseError::Read("gone"));
    let error = Archive::parse(100, &mut |_, _| Ok::<_, &str>(b"PK\x03\x04".to_vec())).unwrap_err();
    assert!(matches!(error, ParseError::Zip(_)));
}

/// Archives of more than 4 GiB: only the tables exist, the data is never looked at.
#[test]
fn offsets_and_sizes_beyond_32_bits_are_read_back() {
    let specs = [("data.pkl", 10), ("data/0", 5 << 30), ("data/1", u64::from(u32::MAX)), ("version", 2)]
        .map(|(name, len)| EntrySpec { name: name.to_owned(), len, align: align_for(len) });
    let layout = ArchiveLayout::new("big", &specs).unwrap();
    let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
    for i in 0..specs.len() {
        pieces.push((layout.entry(i).header_offset, layout.header_bytes(i)));
        pieces.push((layout.entry(i).descriptor_offset, layout.descriptor_bytes(i, 1)));
    }
    pieces.push((layout.trailer_offset(), layout.trailer_bytes(&[1; 4])));
    let archive = Archive::parse(layout.total_len(), &mut |offset, count| {
        let mut bytes = vec![0_u8; count];
        for (start, piece) in &pieces {
            for (i, byte) in piece.iter().enumerate() {
                if let Some(at) = (start + i as u64).checked_sub(offset).filter(|at| *at < count as u64) {
                    bytes[at as usize] = *byte;
                }
            }
        }
        Ok::<_, String>(bytes)
    });
    for (i, entry) in archive.unwrap().entries.iter().enumerate() {
        let place = layout.entry(i);
        assert_eq!(
            (entry.header_offset, entry.data_offset, entry.len),
            (place.header_offset, place.data_offset, place.len)
        );
    }
}

#[test]
fn more_than_65535_entries_are_read_back() {
    let names: Vec<_> = (0..70_000).map(|i| format!("data/{i}")).collect();
    let mut entries: Vec<_> = names.iter().map(|name| (name.as_str(), vec![1])).collect();
    entries[0].0 = "data.pkl";
    assert_eq!(parse(&build("m", &entries)).unwrap().entries.len(), 70_000);
}

proptest! {
    #[test]
    fn layout_and_parse_agree(
        lens in proptest::collection::vec(prop_oneof![0usize..200, Just(65_535usize), Just(65_536usize)], 1..12),
        stem in "[a-zé._-]{1,20}[a-z]",
    ) {
        let names: Vec<_> = (0..lens.len()).map(|i| if i == 0 { "data.pkl".to_owned() } else { format!("data/{i}") }).collect();
        let entries: Vec<_> =
            names.iter().zip(&lens).enumerate().map(|(i, (name, len))| (name.as_str(), vec![i as u8 + 1; *len])).collect();
        let bytes = build(&stem, &entries);
        let archive = parse(&bytes).unwrap();
        prop_assert_eq!(&archive.stem, &stem);
        for (entry, (name, data)) in archive.entries.iter().zip(&entries) {
            prop_assert_eq!(entry.name.as_str(), *name);
            prop_assert_eq!(&bytes[entry.data_offset as usize..entry.data_end() as usize], &data[..]);
            prop_assert_eq!(entry.crc32, crc32(data));
        }
    }

    #[test]
    fn damage_never_panics(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20), cut in any::<Option<prop::sample::Index>>()) {
        let mut bytes = small();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(archive) = parse(&bytes) {
            for entry in archive.entries {
                prop_assert!(entry.data_end() <= archive.directory_offset);
            }
        }
    }

    #[test]
    fn noise_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Some(head) = bytes.get_mut(..4) {
            head.copy_from_slice(b"PK\x03\x04");
        }
        prop_assert!(parse(&bytes).is_err());
    }
}

//! An image gives out the bytes that were written, or says which are not.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use relight_engine::clock::SystemClock;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::image::{COMPRESSED, FOREIGN_ZIP, FillTarget, Image, LEGACY, ReadOptions};
use relight_engine::wait::never;
use relight_engine::{Error, ErrorKind};
use relight_format::crc::crc32;
use relight_format::manifest::{CODEC_NONE, FileRecord};
use relight_format::zip::{ArchiveLayout, EntrySpec, align_for};
use relight_io::foreign::ForeignBytesMut;
use relight_testkit::{Fault, FaultDisk, MemoryDisk, Op};

const CHUNK_BYTES: usize = 1 << 20;
const PATH: &str = "/model.pt";

/// Bytes that differ everywhere.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect()
}

fn contents() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("data.pkl", noise(300, 1)),
        (".format_version", b"0".to_vec()),
        ("data/0", noise(5_000_001, 2)),
        ("data/1", Vec::new()),
        ("data/2", noise(64, 3)),
        ("data/3", noise(100_000, 4)),
        ("version", b"3\n".to_vec()),
    ]
}

fn archive(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let spec = |(name, data): &(&str, Vec<u8>)| EntrySpec {
        name: (*name).to_owned(),
        len: data.len() as u64,
        align: align_for(data.len() as u64),
    };
    let layout = ArchiveLayout::new("model", &entries.iter().map(spec).collect::<Vec<_>>()).unwrap();
    let mut bytes = Vec::new();
    let crcs: Vec<u32> = entries.iter().map(|(_, data)| crc32(data)).collect();
    for (i, (_, data)) in entries.iter().enumerate() {
        bytes.extend(layout.header_bytes(i));
        bytes.extend(data);
        bytes.extend(layout.descriptor_bytes(i, crcs[i]));
    }
    bytes.extend(layout.trailer_bytes(&crcs));
    bytes
}

fn record(bytes: &[u8]) -> FileRecord {
    FileRecord {
        name: "model.pt".to_owned(),
        path: "model.pt".to_owned(),
        generation: 1,
        bytes: bytes.len() as u64,
        crc32: crc32(bytes),
        chunk_bytes: CHUNK_BYTES as u64,
        chunks: bytes.chunks(CHUNK_BYTES).map(crc32).collect(),
        rank: 0,
        codec: CODEC_NONE.to_owned(),
    }
}

fn disk_with(bytes: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::new();
    let mut file = disk.create_file(Path::new(PATH)).unwrap();
    file.write_at(0, bytes).unwrap();
    disk
}

fn open(bytes: &[u8], record: Option<&FileRecord>) -> Result<Image, Error> {
    Image::open_file(&disk_with(bytes), Path::new(PATH), record).map(|image| image.of_tag("t1"))
}

fn with_options<R>(threads: usize, then: impl FnOnce(&ReadOptions<'_>) -> R) -> R {
    let clock = SystemClock::new();
    then(&ReadOptions { threads, clock: &clock, interrupt: &never })
}

fn verify(image: &Image) -> Vec<String> {
    with_options(1, |options| image.verify(options)).unwrap()
}

/// Reads (entry, offset, length) each into a buffer of its own.
fn read_parts(image: &Image, parts: &[(usize, u64, usize)], threads: usize) -> Result<Vec<Vec<u8>>, Error> {
    let cells: Vec<Vec<Cell<u8>>> = parts.iter().map(|(_, _, len)| vec![Cell::new(0xaa); *len]).collect();
    let targets: Vec<_> = (parts.iter().zip(&cells))
        .map(|((entry, offset, _), cells)| FillTarget {
            entry: *entry,
            offset: *offset,
            buffer: ForeignBytesMut::from_cells(cells),
        })
        .collect();
    with_options(threads, |options| image.read_into(&targets, options))?;
    Ok(cells.iter().map(|cells| cells.iter().map(Cell::get).collect()).collect())
}

fn whole(image: &Image) -> Vec<(usize, u64, usize)> {
    image.entries().iter().enumerate().map(|(i, entry)| (i, 0, entry.len as usize)).collect()
}

fn in_memory(bytes: Vec<u8>, record: Option<FileRecord>) -> Image {
    Image::from_memory(Arc::new(bytes), "t1/model.pt", record).unwrap()
}

#[test]
fn every_entry_is_read_whole_and_in_parts_from_file_and_memory() {
    let (contents, bytes) = (contents(), archive(&contents()));
    for record in [None, Some(record(&bytes))] {
        for image in [open(&bytes, record.as_ref()).unwrap(), in_memory(bytes.clone(), record.clone())] {
            for threads in [1, 2, 5] {
                let read = read_parts(&image, &whole(&image), threads).unwrap();
                assert!(read.iter().zip(&contents).all(|(read, (_, data))| read == data));
            }
            for (i, (_, data)) in contents.iter().enumerate() {
                assert_eq!(&image.read(i).unwrap(), data);
            }
            let parts = [(2, 1, 10), (2, 4_999_000, 1001), (2, 1_048_570, 2_500_000), (5, 7, 1), (4, 60, 4), (3, 0, 0)];
            for _ in 0..2 {
                for (read, (entry, offset, len)) in read_parts(&image, &parts, 2).unwrap().iter().zip(parts) {
                    assert_eq!(read[..], contents[entry].1[offset as usize..][..len]);
                }
            }
            assert_eq!(verify(&image), Vec::<String>::new());
        }
    }
}

#[test]
fn one_entry_may_be_split_over_several_buffers_and_is_still_checked_as_a_whole() {
    let mut bytes = archive(&contents());
    let at = open(&bytes, None).unwrap().entries()[2].data_offset as usize;
    let parts = [(2, 0, 3), (2, 3, 4_000_000), (2, 4_000_003, 999_998)];
    let joined = read_parts(&open(&bytes, None).unwrap(), &parts, 2).unwrap().concat();
    assert_eq!(joined, contents()[2].1);
    bytes[at + 4_500_000] ^= 1;
    let error = read_parts(&open(&bytes, None).unwrap(), &parts, 2).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Corrupt);
}

/// Guards: a flipped byte that is loaded into a model without a word.
#[test]
fn a_flipped_byte_is_corrupt_and_the_error_says_where() {
    let good = archive(&contents());
    let entry = open(&good, None).unwrap().entries()[2].clone();
    for at in [0, 1, 2_500_000, 5_000_000] {
        let mut bytes = good.clone();
        bytes[entry.data_offset as usize + at] ^= 0x10;
        for image in [open(&bytes, None).unwrap(), in_memory(bytes.clone(), None)] {
            for error in [read_parts(&image, &whole(&image), 2).unwrap_err(), image.read(2).unwrap_err()] {
                assert_eq!(error.kind, ErrorKind::Corrupt);
                let facts = ["model.pt", "data/0", &entry.data_offset.to_string(), "another checkpoint"];
                assert!(facts.iter().all(|fact| error.message.contains(fact)), "{}", error.message);
            }
            assert_eq!(image.read(4).unwrap(), contents()[4].1, "the other entries are readable");
            assert_eq!(verify(&image).len(), 1);
        }
        let image = open(&bytes, Some(&record(&good))).unwrap();
        let error = read_parts(&image, &[(2, at as u64 / 2, at - at / 2 + 1)], 2).unwrap_err();
        assert_eq!((error.kind, error.tag.as_deref()), (ErrorKind::Corrupt, Some("t1")));
        assert!(error.message.contains("chunk at offset"), "{}", error.message);
        assert_eq!(verify(&image).len(), 3, "entry, chunk and file");
    }
}

/// Guards: two buffers for one entry, neither of them checked.
#[test]
fn an_entry_that_is_read_twice_at_once_is_checked_twice() {
    let mut bytes = archive(&contents());
    let parts = [(2, 0, 5_000_001), (2, 17, 5), (2, 0, 5_000_001)];
    let read = read_parts(&open(&bytes, None).unwrap(), &parts, 2).unwrap();
    assert!(read[0] == contents()[2].1 && read[1] == contents()[2].1[17..22] && read[2] == read[0]);
    let at = open(&bytes, None).unwrap().entries()[2].data_offset as usize;
    bytes[at + 4_500_000] ^= 1;
    assert_eq!(read_parts(&open(&bytes, None).unwrap(), &parts, 2).unwrap_err().kind, ErrorKind::Corrupt);
}

#[test]
fn an_entry_that_a_foreign_tool_compressed_is_listed_and_refused_by_name() {
    let mut bytes = archive(&contents());
    let entry = open(&bytes, None).unwrap().entries()[6].clone();
    let central = bytes.len() - 22 - 20 - 56 - 46 - "model/version".len();
    assert_eq!(bytes[central..][..4], *b"PK\x01\x02");
    bytes[entry.header_offset as usize + 8] = 8; // deflate
    bytes[central + 10] = 8;
    let image = open(&bytes, None).unwrap();
    assert!(!image.entries()[6].stored && image.entries()[2].stored);
    for error in [image.read(6).unwrap_err(), read_parts(&image, &[(6, 0, 1)], 1).unwrap_err()] {
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
        assert!(error.message.contains("version") && error.message.contains(COMPRESSED), "{error}");
    }
    assert_eq!(image.read(2).unwrap(), contents()[2].1);
}

/// Guards: a part of an entry is taken as good because a part of the same chunk was.
#[test]
fn part_of_a_small_entry_is_checked_without_a_manifest() {
    let mut bytes = archive(&contents());
    let at = open(&bytes, None).unwrap().entries()[5].data_offset as usize;
    bytes[at + 99_999] ^= 1;
    let error = read_parts(&open(&bytes, None).unwrap(), &[(5, 0, 10)], 1).unwrap_err();
    assert!(error.message.contains("data/3"), "{}", error.message);
}

#[test]
fn every_flipped_byte_is_found_by_verify_with_a_manifest_and_the_ones_that_matter_without() {
    let good = archive(&[("data.pkl", noise(100, 1)), ("data/0", noise(10, 2)), ("version", b"3\n".to_vec())]);
    let record = record(&good);
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 0x41;
        let found = open(&bytes, Some(&record)).map_or_else(|error| vec![error.message], |image| verify(&image));
        assert!(!found.is_empty(), "the flip at {at} was not found");
        match open(&bytes, Some(&record)) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind, ErrorKind::Corrupt, "at {at}: {error}"),
        }
        // Without a manifest: times, versions and attributes in the headers are nobody's business; data is.
        if let Ok(image) = open(&bytes, None) {
            let data = image.entries().iter().any(|e| (e.data_offset..e.data_end() + 24).contains(&(at as u64)));
            assert!(!data || !verify(&image).is_empty(), "the flip at {at} was not found");
        }
    }
}

#[test]
fn test_bl_097_a_file_cut_anywhere_is_corrupt_and_named_with_its_lengths() {
    let good = archive(&[("data.pkl", noise(100, 1)), ("data/0", noise(10, 2)), ("version", b"3\n".to_vec())]);
    let record = record(&good);
    for len in 0..good.len() {
        let error = open(&good[..len], Some(&record)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Corrupt);
        assert!(error.message.contains(&format!("has {len} bytes")) && error.message.contains(&good.len().to_string()));
        assert_eq!(error.path.as_deref(), Some(Path::new(PATH)));
        let error = open(&good[..len], None).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Corrupt, "{len}: {error}");
        assert!(error.message.contains(PATH), "{error}");
    }
    let error = open(&[&good[..], b"x"].concat(), Some(&record)).unwrap_err();
    assert!(error.message.contains("overwritten"), "{error}");
}

#[test]
fn what_is_not_an_archive_of_torch_is_told_apart() {
    let legacy = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.rest";
    let error = open(legacy, None).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    assert!(error.message.contains(LEGACY) && error.message.contains("torch.load"), "{error}");
    let error = open(&archive(&[("word/document.xml", b"x".to_vec())]), None).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    assert!(error.message.contains(FOREIGN_ZIP), "{error}");
    for bytes in [&b""[..], b"hello, world", b"PK", &[0; 5000]] {
        assert_eq!(open(bytes, None).unwrap_err().kind, ErrorKind::Corrupt);
    }
    // The manifest says that it was an archive: then it is none of these, but damage.
    assert_eq!(open(legacy, Some(&record(legacy))).unwrap_err().kind, ErrorKind::Corrupt);
}

#[test]
fn an_archive_without_checksums_is_read_and_said_not_to_be_verifiable() {
    let mut bytes = archive(&contents());
    let image = open(&bytes, None).unwrap();
    let mut at = bytes.len() - 22 - 20 - 56;
    for entry in image.entries().iter().rev() {
        at -= 46 + "model/".len() + entry.name.len();
        bytes[at + 16..at + 20].fill(0);
        let descriptor = entry.data_end() as usize;
        bytes[descriptor + 4..descriptor + 8].fill(0);
    }
    let image = open(&bytes, None).unwrap();
    assert!(!image.has_checksums());
    assert_eq!(image.read(2).unwrap(), contents()[2].1);
    assert_eq!(read_parts(&image, &[(2, 5, 10)], 1).unwrap()[0], contents()[2].1[5..15]);
    let problems = verify(&image);
    assert!(problems.len() == 1 && problems[0].contains("without checksums"), "{problems:?}");
}

#[test]
fn a_target_outside_its_entry_is_refused_before_anything_is_read() {
    let image = open(&archive(&contents()), None).unwrap();
    for (entry, offset, len) in [(7, 0, 0), (2, 5_000_000, 2), (2, u64::MAX, 1), (3, 0, 1)] {
        let error = read_parts(&image, &[(0, 0, 300), (entry, offset, len)], 1).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
    }
    assert_eq!(image.read(99).unwrap_err().kind, ErrorKind::InvalidArgument);
}

#[test]
fn an_error_of_the_disk_keeps_its_kind_and_names_the_file() {
    const EIO: i32 = 5;
    let disk = FaultDisk::new(Arc::new(disk_with(&archive(&contents()))));
    let image = Image::open_file(&disk, Path::new(PATH), None).unwrap();
    disk.fail(Fault::with(EIO).on(Op::Read).after(1));
    let error = read_parts(&image, &whole(&image), 2).unwrap_err();
    assert_eq!((error.kind, error.os_code()), (ErrorKind::StorageUnavailable, Some(EIO)));
    assert!(error.message.contains(PATH), "{error}");
    let missing = Image::open_file(&disk, Path::new("/none.pt"), None).unwrap_err();
    assert_eq!(missing.kind, ErrorKind::NotFound);
    let directory = Image::open_file(&disk, Path::new("/"), None).unwrap_err();
    assert_eq!(directory.kind, ErrorKind::InvalidArgument);
}

#[test]
fn a_file_that_is_cut_while_it_is_open_is_corrupt_and_not_a_signal() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.pt");
    std::fs::write(&path, archive(&contents())).unwrap();
    let image = Image::open_file(&PosixDisk, &path, None).unwrap();
    assert_eq!(read_parts(&image, &whole(&image), 2).unwrap()[2], contents()[2].1);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let error = read_parts(&image, &whole(&image), 2).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Corrupt);
    assert!(error.message.contains("cut"), "{error}");
}

#[test]
fn an_interrupt_ends_a_read() {
    let image = open(&archive(&contents()), None).unwrap();
    let clock = relight_testkit::ManualClock::new(std::time::Duration::ZERO);
    let interrupt = || Err(Error::new(ErrorKind::Interrupted, "Ctrl-C"));
    let options = ReadOptions { threads: 1, clock: &Hasty(clock), interrupt: &interrupt };
    assert_eq!(image.verify(&options).unwrap_err().kind, ErrorKind::Interrupted);
    let cells = vec![Cell::new(0); 300];
    let target = FillTarget { entry: 0, offset: 0, buffer: ForeignBytesMut::from_cells(&cells) };
    assert_eq!(image.read_into(&[target], &options).unwrap_err().kind, ErrorKind::Interrupted);
}

/// A clock that goes on by a second whenever it is read.
#[derive(Debug)]
struct Hasty(relight_testkit::ManualClock);

impl relight_engine::clock::Clock for Hasty {
    fn monotonic(&self) -> std::time::Duration {
        self.0.advance(std::time::Duration::from_secs(1));
        self.0.monotonic()
    }

    fn wall(&self) -> std::time::Duration {
        self.0.wall()
    }

    fn pause(&self, _: std::time::Duration) {}
}

#[test]
fn thousands_of_tiny_entries_are_read_with_few_requests() {
    let names: Vec<_> = (0..5000).map(|i| if i == 0 { "data.pkl".to_owned() } else { format!("data/{i}") }).collect();
    let contents: Vec<_> = names.iter().enumerate().map(|(i, name)| (name.as_str(), noise(64, i as u64))).collect();
    let disk = FaultDisk::new(Arc::new(disk_with(&archive(&contents))));
    let image = Image::open_file(&disk, Path::new(PATH), None).unwrap();
    let reads = || disk.calls().iter().filter(|call| call.op == Op::Read).count();
    let before = reads();
    let read = read_parts(&image, &whole(&image), 2).unwrap();
    assert!(read.iter().zip(&contents).all(|(read, (_, data))| read == data));
    assert!(reads() - before <= 2, "{} requests", reads() - before);
}

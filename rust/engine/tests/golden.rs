//! Files of released formats are read for good, and the layout of today still makes the newest of them.
//!
//! `tests/golden/v1` is a root as the first format left it. To make one for a new format: pack a torch.save file with
//! the example `repack` of relight-format and run this test with `RELIGHT_GOLDEN_FROM=<that file>` and
//! `RELIGHT_GOLDEN_TO=<the new root>`. A released one is never made anew.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use relight_engine::clock::SystemClock;
use relight_engine::commit::{CommitFacts, CompleteParts};
use relight_engine::disk::PosixDisk;
use relight_engine::image::{Image, ReadOptions};
use relight_engine::root::{RootOptions, RootStore};
use relight_engine::verify::verify_tag;
use relight_engine::wait::never;
use relight_format::crc::crc32;
use relight_format::manifest::{CODEC_NONE, FileRecord, Manifest, Part, Writer};
use relight_format::names::escape_file_name;
use relight_format::zip::{ArchiveLayout, EntrySpec, align_for};
use relight_testkit::ManualClock;

const TAG: &str = "global_step5";
const FILES: [&str; 2] = ["model.pt", "odd name/of a file"];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/v1")
}

/// A copy to open: opening may finish what a writer left, and golden files stay as they are.
fn copy() -> tempfile::TempDir {
    fn copy_all(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            let target = to.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                copy_all(&entry.path(), &target);
            } else {
                std::fs::copy(entry.path(), target).unwrap();
            }
        }
    }
    let directory = tempfile::tempdir().unwrap();
    copy_all(&golden(), directory.path());
    directory
}

fn open(path: &Path) -> RootStore {
    // 2026-11-29T16:30:42Z
    let clock = Arc::new(ManualClock::new(Duration::from_secs(1_795_969_842)));
    let options = RootOptions { create: true, lock_wait: Duration::ZERO };
    RootStore::open(Arc::new(PosixDisk), clock, path, options).unwrap()
}

/// Guards: a change of the layout that nobody meant.
#[test]
fn the_layout_of_today_makes_the_golden_archive_bit_for_bit() {
    let path = golden().join(TAG).join("model.pt");
    let bytes = std::fs::read(&path).unwrap();
    let image = Image::open_file(&PosixDisk, &path, None).unwrap();
    let specs: Vec<_> = (image.entries().iter())
        .map(|entry| EntrySpec { name: entry.name.clone(), len: entry.len, align: align_for(entry.len) })
        .collect();
    let layout = ArchiveLayout::new(image.stem(), &specs).unwrap();
    let mut made = Vec::new();
    let mut crcs = Vec::new();
    for index in 0..specs.len() {
        let data = image.read(index).unwrap();
        made.extend(layout.header_bytes(index));
        made.extend(&data);
        crcs.push(crc32(&data));
        made.extend(layout.descriptor_bytes(index, crcs[index]));
    }
    made.extend(layout.trailer_bytes(&crcs));
    assert_eq!(made, bytes);
}

/// The same for what a small file cannot show: large alignment, offsets beyond 32 bits.
#[test]
fn the_layout_of_large_entries_is_what_it_was() {
    let lens = [300, 1, 2, 6, 65_535, 65_536, 5 << 30, u64::from(u32::MAX), 12, 2, 40];
    let specs: Vec<_> = (lens.iter().enumerate())
        .map(|(i, len)| EntrySpec { name: format!("data/{i}"), len: *len, align: align_for(*len) })
        .collect();
    let layout = ArchiveLayout::new("model", &specs).unwrap();
    let mut bytes = Vec::new();
    for i in 0..specs.len() {
        bytes.extend(layout.header_bytes(i));
        bytes.extend(layout.descriptor_bytes(i, i as u32));
    }
    bytes.extend(layout.trailer_bytes(&[7; 11]));
    assert_eq!((layout.total_len(), crc32(&bytes)), (LARGE_LEN, LARGE_CRC));
}

const LARGE_LEN: u64 = 9_663_821_045;
const LARGE_CRC: u32 = 3_899_524_474;

#[test]
fn the_golden_root_is_found_verified_and_read() {
    let directory = copy();
    let root = open(directory.path());
    let latest = root.latest().unwrap().unwrap();
    assert_eq!(latest.tag, TAG);
    let manifest = latest.manifest.unwrap();
    assert_eq!((manifest.step, manifest.run, manifest.sequence, manifest.generation), (Some(5), 1, 1, 1));
    assert_eq!(manifest.meta["loss"], 0.1);
    let clock = SystemClock::new();
    let report = verify_tag(&root, TAG, &ReadOptions { threads: 1, clock: &clock, interrupt: &never }).unwrap();
    assert!(report.ok(), "{report:?}");
    assert_eq!(report.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), FILES);
    for name in FILES {
        let (file, located) = root.open_file(TAG, name).unwrap();
        let image = Image::of_file(file, &located.path, &located.record).unwrap();
        let names: Vec<_> = image.entries().iter().map(|entry| entry.name.as_str()).collect();
        let storages = ["data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "data/1", "data/2"];
        assert_eq!(names, [&storages[..], &["version", ".data/serialization_id"]].concat());
        assert_eq!(image.read(1).unwrap(), b"0", ".format_version");
        assert_eq!(image.read(4).unwrap(), [0.0_f32, 1.0, 2.0, 3.0].map(f32::to_le_bytes).concat());
    }
}

#[test]
fn the_golden_manifest_and_part_are_written_today_as_they_were() {
    let own = golden().join(TAG).join(".relight");
    let manifest = std::fs::read(own.join("manifest.json")).unwrap();
    assert_eq!(Manifest::parse(&manifest).unwrap().to_bytes().unwrap(), manifest);
    let part = std::fs::read(own.join("part-0.json")).unwrap();
    assert_eq!(Part::parse(&part).unwrap().to_bytes().unwrap(), part);
}

/// Guards: a damaged file of a tag that verify passes over, or that hides the others.
#[test]
fn verify_names_the_damaged_file_of_a_tag_and_reads_the_others() {
    let directory = copy();
    let path = directory.path().join(TAG).join("model.pt");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() / 2;
    let verify = || {
        let clock = SystemClock::new();
        let options = ReadOptions { threads: 1, clock: &clock, interrupt: &never };
        verify_tag(&open(directory.path()), TAG, &options).unwrap()
    };
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let report = verify();
    assert_eq!(report.files.iter().map(relight_engine::verify::FileReport::ok).collect::<Vec<_>>(), [false, true]);
    std::fs::write(&path, &bytes[..at]).unwrap();
    assert!(verify().files[0].problems[0].contains("model.pt"));
    std::fs::remove_file(&path).unwrap();
    assert!(!verify().ok());
}

/// Makes a golden root, when the variables of the module's header say so.
#[test]
fn a_golden_root_is_made_on_demand() {
    let (Ok(from), Ok(to)) = (std::env::var("RELIGHT_GOLDEN_FROM"), std::env::var("RELIGHT_GOLDEN_TO")) else { return };
    const CHUNK_BYTES: usize = 1024;
    let bytes = std::fs::read(from).unwrap();
    let root = open(Path::new(&to));
    let writer = Writer { rank: 0, host: "node0".to_owned(), pid: 4711 };
    let generation = root.tag(TAG).unwrap().begin_generation(&writer).unwrap();
    let record = |name: &str| FileRecord {
        name: name.to_owned(),
        path: escape_file_name(name),
        generation: generation.number(),
        bytes: bytes.len() as u64,
        crc32: crc32(&bytes),
        chunk_bytes: CHUNK_BYTES as u64,
        chunks: bytes.chunks(CHUNK_BYTES).map(crc32).collect(),
        rank: 0,
        codec: CODEC_NONE.to_owned(),
    };
    let records = FILES.map(record);
    for record in &records {
        let mut file = generation.create_file(&record.path).unwrap();
        file.write_at(0, &bytes).unwrap();
        file.finish().unwrap();
    }
    let part = generation.write_part(0, 1, &records).unwrap();
    let facts = CommitFacts {
        run: 1,
        sequence: 1,
        step: Some(5),
        world_size: 1,
        staged_at: "2026-11-29T16:30:41.250Z".to_owned(),
        best: false,
        writers: vec![writer.clone()],
        meta: serde_json::json!({"loss": 0.1, "note": "golden"}),
    };
    generation.commit(CompleteParts::check(vec![part], 1).unwrap(), facts).unwrap();
    root.update_latest_hint().unwrap();
}

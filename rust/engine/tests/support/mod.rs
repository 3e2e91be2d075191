//! What the tests of the commit side share: one save, and the look at what is there.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test uses some of it")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use relight_engine::commit::{CommitFacts, Committed, CompleteParts};
use relight_engine::disk::Disk;
use relight_engine::error::Result;
use relight_engine::root::{RootOptions, RootStore};
use relight_format::crc::crc32;
use relight_format::manifest::{FileRecord, Writer};
use relight_format::names::{escape_file_name, step_of_tag};
use relight_testkit::ManualClock;

pub const CHUNK_BYTES: u64 = 16;
pub const ROOT: &str = "/runs/exp1";

/// The files of one save: true name and bytes.
pub type Files = BTreeMap<String, Vec<u8>>;

pub fn files(list: &[(&str, &[u8])]) -> Files {
    list.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect()
}

pub fn root_on(disk: Arc<dyn Disk>) -> Result<RootStore> {
    let options = RootOptions { create: true, lock_wait: Duration::ZERO };
    RootStore::open(disk, Arc::new(ManualClock::new(Duration::from_secs(1_000_000))), Path::new(ROOT), options)
}

pub fn writer() -> Writer {
    Writer { rank: 0, host: "node0".to_owned(), pid: 4711 }
}

pub fn record(name: &str, bytes: &[u8], generation: u64) -> FileRecord {
    FileRecord {
        name: name.to_owned(),
        path: escape_file_name(name),
        generation,
        bytes: bytes.len() as u64,
        crc32: crc32(bytes),
        chunk_bytes: CHUNK_BYTES,
        chunks: bytes.chunks(CHUNK_BYTES as usize).map(crc32).collect(),
        rank: 0,
        codec: "none".to_owned(),
    }
}

pub fn facts(tag: &str, run: u64, sequence: u64) -> CommitFacts {
    CommitFacts {
        run,
        sequence,
        step: step_of_tag(tag),
        world_size: 1,
        staged_at: "2026-11-29T16:30:41.250Z".to_owned(),
        best: false,
        writers: vec![writer()],
        meta: serde_json::Value::Null,
    }
}

/// One save with given facts: files, part, commit.
pub fn save_as(root: &RootStore, tag: &str, files: &Files, facts: CommitFacts) -> Result<Committed> {
    let generation = root.tag(tag)?.begin_generation(&writer())?;
    let mut records = Vec::new();
    for (name, bytes) in files {
        let record = record(name, bytes, generation.number());
        let mut file = generation.create_file(&record.path)?;
        file.reserve(record.bytes)?;
        let half = bytes.len() / 2;
        file.write_at(0, &bytes[..half])?;
        file.write_at(half as u64, &bytes[half..])?;
        file.finish()?;
        records.push(record);
    }
    let part = generation.write_part(0, 1, &records)?;
    generation.commit(CompleteParts::check(vec![part], 1)?, facts)
}

/// One save as the next of its root, in run 1, with the hint after it.
pub fn save(root: &RootStore, tag: &str, files: &Files) -> Result<()> {
    save_in_run(root, tag, files, 1)
}

pub fn save_in_run(root: &RootStore, tag: &str, files: &Files, run: u64) -> Result<()> {
    let (_, sequence) = root.highest()?;
    save_as(root, tag, files, facts(tag, run, sequence + 1))?;
    root.update_latest_hint()
}

/// Every file of `tag` as a reader gets it, checked against the manifest's checksums. Panics on a torn one.
pub fn load(root: &RootStore, tag: &str) -> Files {
    let manifest = root.find(tag).unwrap();
    let load_one = |name: &str| {
        let (file, located) = root.open_file(tag, name).unwrap();
        let mut bytes = vec![0; located.record.bytes as usize];
        file.read_at(0, &mut bytes).unwrap();
        assert_eq!(crc32(&bytes), located.record.crc32, "{name} of {tag} is torn");
        bytes
    };
    manifest.files.iter().map(|file| (file.name.clone(), load_one(&file.name))).collect()
}

/// Every checkpoint of relight in the root, oldest first.
pub fn load_all(root: &RootStore) -> Vec<(String, Files)> {
    let ours = root.list().unwrap().into_iter().filter(|found| !found.is_foreign());
    ours.map(|found| (found.tag.clone(), load(root, &found.tag))).collect()
}

pub fn tags(root: &RootStore) -> Vec<String> {
    root.list().unwrap().into_iter().map(|found| found.tag).collect()
}

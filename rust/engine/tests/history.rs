//! The history: one writer at a time, always with the header, tolerant of what a killed writer left.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use relight_engine::clock::SystemClock;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::error::ErrorKind;
use relight_engine::root::{RootOptions, RootStore};
use relight_format::history::{HEADER, HistoryRecord};
use relight_testkit::MemoryDisk;
use support::{ROOT, root_on};

fn record(tag: &str) -> HistoryRecord {
    HistoryRecord {
        time: "2026-11-29T16:30:41.250Z".to_owned(),
        event: "persist".to_owned(),
        tag: tag.to_owned(),
        file: "model.pt".to_owned(),
        rank: 0,
        tier: "persistent".to_owned(),
        bytes: 5_000_000,
        seconds: 2.0,
        error: String::new(),
    }
}

fn fresh() -> (MemoryDisk, RootStore) {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    (disk, root)
}

fn text(disk: &MemoryDisk) -> String {
    let path = Path::new(ROOT).join("checkpointHistories.csv");
    String::from_utf8(disk.files(Path::new(ROOT))[&path].clone()).unwrap()
}

fn put(disk: &MemoryDisk, text: &[u8]) {
    disk.create_file(&Path::new(ROOT).join("checkpointHistories.csv")).unwrap().write_at(0, text).unwrap();
}

fn tags(root: &RootStore) -> Vec<String> {
    root.history().records().unwrap().into_iter().map(|fields| fields[2].clone()).collect()
}

/// Guards: a file without the header, or with a second one.
#[test]
fn the_header_comes_first_and_once_and_each_record_is_one_line() {
    let (disk, root) = fresh();
    assert!(root.history().records().unwrap().is_empty());
    root.history().append(&record("a")).unwrap();
    let mut odd = record("b, \"quoted\"");
    odd.error = "two\nlines, and a comma".to_owned();
    root.history().append(&odd).unwrap();
    let text = text(&disk);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((lines.len(), lines[0]), (3, HEADER));
    assert_eq!(lines[1], "2026-11-29T16:30:41.250Z,persist,a,model.pt,0,persistent,5000000,2.000000,2.5,");
    assert_eq!(tags(&root), ["a", "b, \"quoted\""]);
    assert_eq!(root.history().records().unwrap()[1][9], "two lines, and a comma");
}

/// Guards: a record glued to the half line of a killed writer, or swallowed by its open quote.
#[test]
fn a_torn_last_line_stays_alone() {
    for torn in ["2026-11-29T16:30", "2026-11-29T16:30:41.250Z,persist,\"half a ta"] {
        let (disk, root) = fresh();
        root.history().append(&record("a")).unwrap();
        let whole = text(&disk);
        disk.tamper(&Path::new(ROOT).join("checkpointHistories.csv"), |bytes| bytes.extend_from_slice(torn.as_bytes()));
        assert_eq!(tags(&root), ["a"]);
        root.history().append(&record("b")).unwrap();
        root.history().append(&record("c")).unwrap();
        assert_eq!(tags(&root), ["a", "b", "c"]);
        assert!(text(&disk).starts_with(&whole));
        assert_eq!(text(&disk).matches('"').count() % 2, 0, "a quote is left open for other readers");
    }
}

/// Guards: a header that its first writer left half, or that a power cut took.
#[test]
fn half_a_header_is_made_whole() {
    for left in ["", "time,ev", HEADER] {
        let (disk, root) = fresh();
        put(&disk, left.as_bytes());
        root.history().append(&record("a")).unwrap();
        assert_eq!(text(&disk).lines().next().unwrap(), HEADER);
        assert_eq!(text(&disk).lines().count(), 2);
        assert_eq!(tags(&root), ["a"]);
    }
}

/// Guards: lines of another program's history overwritten, or ours without a header.
#[test]
fn a_history_of_another_program_keeps_its_lines() {
    let (disk, root) = fresh();
    put(&disk, b"name,duration\nglobal_step1,3.5\n");
    root.history().append(&record("a")).unwrap();
    root.history().append(&record("b")).unwrap();
    let text = text(&disk);
    assert!(text.starts_with("name,duration\nglobal_step1,3.5\n"));
    assert_eq!(text.matches(HEADER).count(), 1);
    assert_eq!(tags(&root), ["a", "b"]);
}

/// Guards: a line written while another process writes one.
#[test]
fn there_is_one_writer_at_a_time() {
    let (disk, root) = fresh();
    root.history().append(&record("a")).unwrap();
    let lock = Path::new(ROOT).join(".relight/history.lock");
    let held = disk.lock(&lock, "pid 77", Duration::ZERO).unwrap();
    let error = root.history().append(&record("b")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(error.message.contains("pid 77"), "{error}");
    drop(held);
    root.history().append(&record("c")).unwrap();
    assert_eq!(tags(&root), ["a", "c"]);
}

/// Guards: lines of two processes that are lost or mixed.
#[test]
fn many_writers_lose_no_line() {
    let directory = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for who in 0..4 {
            let path = directory.path();
            scope.spawn(move || {
                let options = RootOptions { create: true, lock_wait: Duration::from_secs(60) };
                let root = RootStore::open(Arc::new(PosixDisk), Arc::new(SystemClock::new()), path, options).unwrap();
                for round in 0..20 {
                    root.history().append(&record(&format!("{who}-{round}"))).unwrap();
                }
            });
        }
    });
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk);
    let root = RootStore::open(disk, Arc::new(SystemClock::new()), directory.path(), RootOptions::default()).unwrap();
    let mut found = tags(&root);
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 80);
}

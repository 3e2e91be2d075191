//! Two writers and a reader at one tag: each commit is whole, the later one wins after it.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use relight_engine::clock::SystemClock;
use relight_engine::commit::CompleteParts;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::error::{ErrorKind, Result};
use relight_engine::generation::Generation;
use relight_engine::publish::PendingFile;
use relight_engine::root::{RootOptions, RootStore};
use relight_testkit::{Fault, FaultDisk, MemoryDisk, Op, SlowDisk};
use support::{Files, ROOT, facts, files, load, load_all, record, root_on, save, save_as, tags, writer};

fn open_posix(path: &Path) -> RootStore {
    let options = RootOptions { create: true, lock_wait: Duration::from_secs(60) };
    RootStore::open(Arc::new(PosixDisk), Arc::new(SystemClock::new()), path, options).unwrap()
}

fn staged(root: &RootStore, tag: &str, files: &Files) -> Result<(Generation, CompleteParts)> {
    let generation = root.tag(tag)?.begin_generation(&writer())?;
    let mut records = Vec::new();
    for (name, bytes) in files {
        let mut file = generation.create_file(name)?;
        file.write_at(0, bytes)?;
        file.finish()?;
        records.push(record(name, bytes, generation.number()));
    }
    let part = generation.write_part(0, 1, &records)?;
    Ok((generation, CompleteParts::check(vec![part], 1)?))
}

/// Everything below the root but the locks, which name their last holder.
fn content(disk: &MemoryDisk) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = disk.files(Path::new(ROOT));
    files.retain(|path, _| !path.ends_with(".relight/lock"));
    files
}

/// Guards: a mixture of two writers' files, or a reader that meets one.
#[test]
fn test_bl_055_056_two_writers_to_one_tag_and_a_reader_never_meet_a_mixture() {
    const ROUNDS: u64 = 25;
    let directory = tempfile::tempdir().unwrap();
    let sequence = AtomicU64::new(1);
    let done = AtomicBool::new(false);
    let state = |who: u8, round: u64| {
        let bytes = vec![who + (round % 20) as u8; 1000 + who as usize * 7 + round as usize];
        files(&[("model.pt", &bytes), ("optim.pt", &bytes)])
    };
    let same = |found: &Files| {
        assert!(found.len() == 2 && found["model.pt"] == found["optim.pt"], "a mixture of two writers");
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let root = open_posix(directory.path());
            let mut loads = 0;
            while !done.load(Ordering::Acquire) {
                if let Some(newest) = root.latest().unwrap() {
                    // each file is opened by itself, so two files may be of two commits; each is whole
                    for file in ["model.pt", "optim.pt"] {
                        let (file, located) = root.open_file(&newest.tag, file).unwrap();
                        let mut bytes = vec![0; located.record.bytes as usize];
                        file.read_at(0, &mut bytes).unwrap();
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn file");
                        loads += 1;
                    }
                }
            }
            loads
        });
        let writers = [b'a', b'n'].map(|who| {
            let (sequence, directory, state) = (&sequence, directory.path(), &state);
            scope.spawn(move || {
                let root = open_posix(directory);
                for round in 0..ROUNDS {
                    let facts = facts("last.ckpt", 1, sequence.fetch_add(1, Ordering::Relaxed));
                    save_as(&root, "last.ckpt", &state(who, round), facts).unwrap();
                    root.update_latest_hint().unwrap();
                }
            })
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Release);
        assert!(reader.join().unwrap() > 0);
    });
    let root = open_posix(directory.path());
    same(&load(&root, "last.ckpt"));
    assert!(root.find("last.ckpt").unwrap().generation >= 2 * ROUNDS, "each commit has a number of its own");
    save(&root, "last.ckpt", &state(b'z', 1)).unwrap();
    let own: Vec<_> = std::fs::read_dir(directory.path().join("last.ckpt/.relight"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('g') || name.starts_with(".relight-tmp-"))
        .collect();
    assert!(own.is_empty(), "left {own:?}");
}

/// Guards: the order of beginnings decided who wins, or the earlier number overwrote the later commit's moves.
#[test]
fn of_two_generations_the_one_committed_later_wins_whichever_began_first() {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    let (first, first_parts) = staged(&root, "t1", &files(&[("model.pt", b"first"), ("a.pt", b"a")])).unwrap();
    let (second, second_parts) = staged(&root, "t1", &files(&[("model.pt", b"second one"), ("b.pt", b"b")])).unwrap();
    assert_ne!(first.number(), second.number());
    let earlier = second.commit(second_parts, facts("t1", 1, 1)).unwrap().manifest;
    let later = first.commit(first_parts, facts("t1", 1, 2)).unwrap().manifest;
    assert!(later.generation > earlier.generation, "numbers of commits rise");
    let expected = files(&[("model.pt", b"first"), ("a.pt", b"a"), ("b.pt", b"b")]);
    assert_eq!(load(&root, "t1"), expected);
    assert_eq!(disk.files(Path::new(ROOT))[&Path::new(ROOT).join("t1/model.pt")], b"first");
}

/// Guards: files that wait in their folder after a crash, moved over those of a later commit.
#[test]
fn a_commit_finishes_the_moves_of_one_that_came_before_it() {
    let disk = MemoryDisk::new();
    let faulty = FaultDisk::new(Arc::new(disk.clone()));
    let root = root_on(Arc::new(faulty.clone())).unwrap();
    let (late, late_parts) = staged(&root, "t1", &files(&[("model.pt", b"late")])).unwrap();
    let (early, early_parts) = staged(&root, "t1", &files(&[("model.pt", b"early"), ("z.pt", b"z")])).unwrap();
    faulty.fail(Fault::with(5).on(Op::Rename).in_path("t1/model.pt"));
    assert!(early.commit(early_parts, facts("t1", 1, 1)).unwrap().unsettled.is_some());
    faulty.heal();
    late.commit(late_parts, facts("t1", 1, 2)).unwrap();
    let plain = disk.files(Path::new(ROOT));
    assert_eq!(plain[&Path::new(ROOT).join("t1/model.pt")], b"late");
    assert_eq!(plain[&Path::new(ROOT).join("t1/z.pt")], b"z");
    assert_eq!(load(&root, "t1"), files(&[("model.pt", b"late"), ("z.pt", b"z")]));
}

/// Guards: a waiter that hangs, or an error that does not say who is in the way.
#[test]
fn a_tag_that_is_locked_for_too_long_is_a_conflict_naming_the_holder() {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    save(&root, "t1", &files(&[("a", b"1")])).unwrap();
    let (late, parts) = staged(&root, "t1", &files(&[("a", b"2")])).unwrap();
    let lock = Path::new(ROOT).join("t1/.relight/lock");
    let held = disk.lock(&lock, "pid 77 on host node9 (rank 3)", Duration::ZERO).unwrap();
    let error = root.tag("t1").unwrap().begin_generation(&writer()).unwrap_err();
    assert_eq!((error.kind, error.tag.as_deref()), (ErrorKind::Conflict, Some("t1")));
    assert!(error.message.contains("pid 77 on host node9"), "{error}");
    assert_eq!(late.commit(parts, facts("t1", 1, 2)).unwrap_err().kind, ErrorKind::Conflict);
    drop(held);
    assert_eq!(load(&root, "t1"), files(&[("a", b"1")]));
    save(&root, "t1", &files(&[("a", b"3")])).unwrap();
    assert_eq!(load(&root, "t1"), files(&[("a", b"3")]));
}

/// Guards: a living writer's files taken for leftovers by another writer, of the same tag or of another.
#[test]
fn what_a_living_writer_has_staged_survives_other_saves_and_deletions() {
    let root = root_on(Arc::new(MemoryDisk::new())).unwrap();
    save(&root, "t1", &files(&[("a", b"old")])).unwrap();
    let (living, parts) = staged(&root, "t1", &files(&[("b", b"staged")])).unwrap();
    save(&root, "t2", &files(&[("a", b"2")])).unwrap();
    save(&root, "t1", &files(&[("c", b"3")])).unwrap();
    root.delete("t1").unwrap();
    assert_eq!(tags(&root), ["t2"]);
    living.commit(parts, facts("t1", 1, 9)).unwrap();
    assert_eq!(load(&root, "t1"), files(&[("b", b"staged")]));
}

/// Guards: a generation that was given up and stays on the disk, or takes the tag with it.
#[test]
fn an_abandoned_generation_leaves_nothing() {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    save(&root, "t1", &files(&[("a", b"1")])).unwrap();
    let before = content(&disk);
    staged(&root, "t1", &files(&[("a", b"2"), ("b", b"3")])).unwrap().0.abandon();
    assert!(content(&disk) == before);
}

/// Guards: two tags, or two files of a tag, that are one on a system that ignores case.
#[test]
fn names_that_differ_in_case_only_are_refused_naming_both_before_anything_is_written() {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    save(&root, "Best_1", &files(&[("model.pt", b"1")])).unwrap();
    let before = content(&disk);
    let error = save(&root, "best_1", &files(&[("model.pt", b"1")])).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    assert!(error.message.contains("Best_1") && error.message.contains("best_1"), "{error}");
    let generation = root.tag("Best_1").unwrap().begin_generation(&writer()).unwrap();
    let error = generation.create_file("MODEL.pt").unwrap_err();
    generation.abandon();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    assert!(error.message.contains("MODEL.pt") && error.message.contains("model.pt"), "{error}");
    assert!(content(&disk) == before);
    // also when the other name came in meanwhile
    let (late, parts) = staged(&root, "Best_1", &files(&[("OPTIM.pt", b"1")])).unwrap();
    save(&root, "Best_1", &files(&[("optim.pt", b"2")])).unwrap();
    assert_eq!(late.commit(parts, facts("Best_1", 1, 5)).unwrap_err().kind, ErrorKind::InvalidArgument);
    assert_eq!(load(&root, "Best_1"), files(&[("model.pt", b"1"), ("optim.pt", b"2")]));
}

/// Guards: a name that leaves the tag, or that is one of relight's own.
#[test]
fn a_path_that_is_no_plain_name_is_refused() {
    let root = root_on(Arc::new(MemoryDisk::new())).unwrap();
    let generation = root.tag("t1").unwrap().begin_generation(&writer()).unwrap();
    for path in ["", ".", "..", "a/b", "../x", ".relight", "complete.txt", "Complete.TXT", "a\\b", "a\0b"] {
        assert_eq!(generation.create_file(path).unwrap_err().kind, ErrorKind::InvalidArgument, "{path:?}");
    }
    for tag in ["", ".", "..", "../x", "/abs", "a/b", "a\nb", "latest"] {
        assert_eq!(root.tag(tag).unwrap_err().kind, ErrorKind::InvalidArgument, "{tag:?}");
    }
}

/// Guards: a reader that blocks on a writer whose disk stands still; a staged file that is shown.
#[test]
fn while_a_write_is_stuck_readers_see_the_old_checkpoint_and_others_save() {
    let disk = MemoryDisk::new();
    let slow = SlowDisk::new(Arc::new(disk.clone()));
    let root = root_on(Arc::new(disk.clone())).unwrap();
    save(&root, "t1", &files(&[("a", b"old")])).unwrap();
    slow.gate().close(Op::SyncFile, "t2/");
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| save(&root_on(Arc::new(slow.clone())).unwrap(), "t2", &files(&[("a", b"stuck")])));
        slow.gate().wait_until_stuck(1);
        assert_eq!(load_all(&root), [("t1".to_owned(), files(&[("a", b"old")]))]);
        save(&root, "t3", &files(&[("a", b"other")])).unwrap();
        slow.gate().open();
        stuck.join().unwrap().unwrap();
    });
    assert_eq!(tags(&root), ["t1", "t2", "t3"]);
}

/// Guards: parts of another generation, of too few ranks, or of two ranks that disagree, in one commit.
#[test]
fn only_parts_of_all_ranks_of_one_generation_make_a_commit() {
    let part = |rank: u32, world_size: u32, generation: u64, bytes: &[u8]| {
        let mut file = record("model.pt", bytes, generation);
        file.rank = rank;
        relight_format::manifest::Part {
            schema_version: 1,
            tag: "t1".to_owned(),
            generation,
            rank,
            world_size,
            files: vec![file],
        }
    };
    assert!(CompleteParts::check(vec![part(1, 2, 1, b"x"), part(0, 2, 1, b"x")], 2).is_ok());
    let kind = |parts, world_size| CompleteParts::check(parts, world_size).unwrap_err().kind;
    assert_eq!(kind(vec![], 1), ErrorKind::InvalidArgument);
    assert_eq!(kind(vec![part(0, 2, 1, b"x")], 2), ErrorKind::Conflict);
    assert_eq!(kind(vec![part(0, 2, 1, b"x"), part(1, 2, 2, b"x")], 2), ErrorKind::InvalidArgument);
    assert_eq!(kind(vec![part(0, 1, 1, b"x"), part(0, 1, 1, b"x")], 1), ErrorKind::InvalidArgument);
    assert_eq!(kind(vec![part(0, 2, 1, b"x"), part(1, 2, 1, b"y")], 2), ErrorKind::InvalidArgument);
}

/// Guards: a lock that a program started meanwhile keeps for as long as it runs.
#[test]
fn a_lock_does_not_pass_to_a_program_that_is_started_under_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lock");
    let held = PosixDisk.lock(&path, "us", Duration::ZERO).unwrap();
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    drop(held);
    let again = PosixDisk.lock(&path, "us", Duration::ZERO);
    child.kill().unwrap();
    child.wait().unwrap();
    again.unwrap();
}

/// Guards: 4 writers to one path that publish a mixture, or fail for no reason of their own.
#[test]
fn test_bl_055_writers_to_one_path_publish_one_whole_state_each() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.pt");
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk);
    std::thread::scope(|scope| {
        for who in 0..4_u8 {
            let (disk, path) = (&disk, &path);
            scope.spawn(move || {
                for round in 0..25_usize {
                    let bytes = vec![who; 1000 + 100 * usize::from(who) + round];
                    let mut file = PendingFile::for_path(disk, path).unwrap();
                    file.write_at(0, &bytes[..500]).unwrap();
                    file.write_at(500, &bytes[500..]).unwrap();
                    file.finish_without_sync().unwrap();
                    let found = std::fs::read(path).unwrap();
                    assert!(found.len() >= 1000 && found.iter().all(|byte| *byte == found[0]), "a mixture");
                }
            });
        }
    });
    let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["model.pt"]);
}

//! Whatever call fails: the old state is intact, the error is typed, the next save works.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::path::Path;
use std::sync::Arc;

use relight_engine::disk::Disk;
use relight_engine::error::{Error, ErrorKind, Result};
use relight_engine::publish::PendingFile;
use relight_engine::root::RootStore;
use relight_testkit::{Fault, FaultDisk, MemoryDisk, Op};
use support::{Files, ROOT, facts, files, load, load_all, root_on, save, save_as, tags, writer};

const EPERM: i32 = 1;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;
const ESTALE: i32 = 116;

const ONE: &[(&str, &[u8])] = &[("model.pt", b"first model, a few chunks long"), ("rng.pt", b"r1")];
const TWO: &[(&str, &[u8])] = &[("model.pt", b"second model of another length"), ("optim.pt", b"o2")];

fn on_memory(disk: &MemoryDisk) -> RootStore {
    root_on(Arc::new(disk.clone())).unwrap()
}

fn start() -> MemoryDisk {
    let disk = MemoryDisk::new();
    save(&on_memory(&disk), "global_step1", &files(ONE)).unwrap();
    disk
}

/// Runs `act` with `fault` placed before its first, second, ... call, until it meets no call any more.
fn at_every_call(
    fault: impl Fn(u64) -> Fault,
    kind: ErrorKind,
    act: impl Fn(&RootStore) -> Result<()>,
    old: &Files,
    new: &Files,
) {
    let mut failures = 0;
    for skip in 0.. {
        let disk = start();
        let faulty = FaultDisk::new(Arc::new(disk.clone()));
        faulty.fail(fault(skip));
        let result = root_on(Arc::new(faulty.clone())).and_then(|root| act(&root));
        let label = format!("call {skip}: {:?}", faulty.calls().iter().rev().nth(1));
        let found = load(&on_memory(&disk), "global_step1");
        assert!(found == *old || found == *new, "{label}: {found:?}");
        match &result {
            Ok(()) => assert_eq!(found, *new, "{label}: it said that all went well"),
            Err(error) => {
                failures += 1;
                assert_eq!(error.kind, kind, "{label}: {error}");
                assert!(error.path.is_some(), "{label}: {error} names no path");
            }
        }
        let met = faulty.failed() > 0;
        faulty.heal();
        save(&on_memory(&disk), "global_step2", &files(TWO)).unwrap_or_else(|error| panic!("{label}: {error}"));
        act(&on_memory(&disk)).unwrap_or_else(|error| panic!("{label}, again: {error}"));
        assert_eq!(load(&on_memory(&disk), "global_step1"), *new, "{label}");
        let left: Vec<_> = disk.files(Path::new(ROOT)).into_keys().filter(|path| is_leftover(path)).collect();
        assert!(left.is_empty(), "{label}: left {left:?}");
        if !met {
            break;
        }
    }
    assert!(failures > 10, "only {failures} calls made the save fail");
}

fn is_leftover(path: &Path) -> bool {
    path.components().any(|part| {
        let name = part.as_os_str().to_string_lossy();
        name.starts_with(".relight-tmp-") || name.starts_with("g1") || name.starts_with("g2") || name == "deleted.json"
    })
}

fn second_generation(root: &RootStore) -> Result<()> {
    save(root, "global_step1", &files(TWO))
}

fn both() -> Files {
    let mut both = files(ONE);
    both.extend(files(TWO));
    both
}

/// Guards: one failed call anywhere that costs the old checkpoint, or is not reported.
#[test]
fn when_any_one_call_fails_the_old_checkpoint_or_the_new_one_is_whole() {
    at_every_call(
        |skip| Fault::with(EIO).after(skip).times(1),
        ErrorKind::StorageUnavailable,
        second_generation,
        &files(ONE),
        &both(),
    );
}

/// Guards: cleaning up after a failure that fails too.
#[test]
fn when_every_call_fails_from_some_point_on_the_old_checkpoint_or_the_new_one_is_whole() {
    at_every_call(
        |skip| Fault::with(EIO).after(skip),
        ErrorKind::StorageUnavailable,
        second_generation,
        &files(ONE),
        &both(),
    );
}

/// Guards: a full disk that is not `StorageFull`, or half a write that counts.
#[test]
fn test_bl_066_a_disk_that_fills_up_at_any_point_is_storage_full_and_the_old_checkpoint_stays() {
    at_every_call(
        |skip| Fault::with(ENOSPC).on_changes().after(skip).short_write(),
        ErrorKind::StorageFull,
        second_generation,
        &files(ONE),
        &both(),
    );
}

/// Guards: a delete that fails half-way and leaves a tag that is neither there nor gone.
#[test]
fn when_any_call_of_a_deletion_fails_the_checkpoint_is_whole_or_gone() {
    for skip in 0.. {
        let disk = start();
        save(&on_memory(&disk), "global_step2", &files(TWO)).unwrap();
        let faulty = FaultDisk::new(Arc::new(disk.clone()));
        faulty.fail(Fault::with(EIO).after(skip).times(1));
        let result = root_on(Arc::new(faulty.clone())).and_then(|root| root.delete("global_step1"));
        let label = format!("call {skip}: {result:?}");
        let left = load_all(&on_memory(&disk));
        assert_eq!(
            left.last().map(|(tag, files)| (tag.as_str(), files)),
            Some(("global_step2", &files(TWO))),
            "{label}"
        );
        if left.len() == 2 {
            assert_eq!(left[0].1, files(ONE), "{label}");
            assert!(result.is_err(), "{label}");
        }
        save(&on_memory(&disk), "global_step3", &files(TWO)).unwrap();
        let left: Vec<_> = disk.files(Path::new(ROOT)).into_keys().filter(|path| is_leftover(path)).collect();
        assert!(left.is_empty(), "{label}: left {left:?}");
        if faulty.failed() == 0 {
            assert_eq!(tags(&on_memory(&disk)), ["global_step2", "global_step3"]);
            break;
        }
    }
}

/// Guards: a full disk on which nothing can be deleted, because a deletion needs room.
#[test]
fn on_a_full_disk_a_checkpoint_can_be_deleted() {
    let disk = start();
    save(&on_memory(&disk), "global_step2", &files(TWO)).unwrap();
    let faulty = FaultDisk::new(Arc::new(disk.clone()));
    for op in [Op::CreateFile, Op::Write, Op::Reserve] {
        faulty.fail(Fault::with(ENOSPC).on(op));
    }
    let root = root_on(Arc::new(faulty)).unwrap();
    root.delete("global_step1").unwrap();
    assert_eq!(root.retain(1, "global_step2", &[]).unwrap().deleted.len(), 0);
    assert_eq!(tags(&root), ["global_step2"]);
}

/// Guards: an error after the commit that makes a committed checkpoint a failed save.
#[test]
fn a_failure_after_the_manifest_is_told_but_does_not_undo_the_commit() {
    let disk = start();
    let faulty = FaultDisk::new(Arc::new(disk.clone()));
    faulty.fail(Fault::with(EIO).on(Op::Rename).in_path("global_step1/model.pt"));
    let root = root_on(Arc::new(faulty.clone())).unwrap();
    let committed = save_as(&root, "global_step1", &files(TWO), facts("global_step1", 1, 2)).unwrap();
    assert_eq!(committed.unsettled.unwrap().kind, ErrorKind::StorageUnavailable);
    assert_eq!(load(&root, "global_step1"), both());
    faulty.heal();
    root.tag("global_step1").unwrap().settle(&writer()).unwrap();
    let plain = disk.files(Path::new(ROOT));
    assert_eq!(plain[&Path::new(ROOT).join("global_step1/model.pt")], both()["model.pt"]);
}

/// Guards: a retry on the file that failed, whose dirty pages the kernel has dropped.
#[test]
fn test_bl_067_a_retry_takes_a_new_file() {
    for op in [Op::CreateFile, Op::Write, Op::SyncFile, Op::Rename] {
        let disk = start();
        let faulty = FaultDisk::new(Arc::new(disk.clone()));
        let root = root_on(Arc::new(faulty.clone())).unwrap();
        let generation = root.tag("global_step2").unwrap().begin_generation(&writer()).unwrap();
        faulty.fail(Fault::with(EIO).on(op).times(2));
        let write = |bytes: &[u8]| -> Result<()> {
            let mut file = generation.create_file("model.pt")?;
            file.write_at(0, bytes)?;
            file.finish()
        };
        assert_eq!(write(b"one").unwrap_err().kind, ErrorKind::StorageUnavailable);
        assert_eq!(write(b"two").unwrap_err().kind, ErrorKind::StorageUnavailable);
        write(b"three").unwrap();
        let creations = faulty.calls().into_iter().filter(|call| {
            call.op == Op::CreateFile && call.path.to_string_lossy().contains("global_step2/.relight/g1/.relight-tmp")
        });
        assert_eq!(creations.count(), 3, "{op:?}");
    }
}

/// Guards: a file that failed once and is written or synced again.
#[test]
fn a_file_that_met_an_error_is_dead() {
    let faulty = FaultDisk::new(Arc::new(start()));
    let root = root_on(Arc::new(faulty.clone())).unwrap();
    let generation = root.tag("global_step2").unwrap().begin_generation(&writer()).unwrap();
    let mut file = generation.create_file("model.pt").unwrap();
    faulty.fail(Fault::with(EIO).on(Op::Write).times(1));
    assert!(file.write_at(0, b"x").is_err());
    let calls = faulty.calls().len();
    assert_eq!(file.write_at(0, b"x").unwrap_err().kind, ErrorKind::StorageUnavailable);
    assert_eq!(file.finish().unwrap_err().kind, ErrorKind::StorageUnavailable);
    assert_eq!(faulty.calls().len(), calls, "the dead file was touched");
}

/// Guards: half a file on a bucket that is mounted through FUSE; an error that does not say which mount.
#[test]
fn test_bl_069_a_mount_without_rename_is_refused_by_name_before_a_byte_is_written() {
    for (errno, kind) in [(ENOSYS, ErrorKind::InvalidArgument), (EPERM, ErrorKind::StorageDenied)] {
        let disk = MemoryDisk::new();
        let faulty = FaultDisk::new(Arc::new(disk.clone()));
        faulty.fail(Fault::with(errno).on(Op::Rename));
        let error = root_on(Arc::new(faulty.clone())).and_then(|root| save(&root, "a1", &files(ONE))).unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.contains("mounted at"), "{error}");
        assert!(error.message.contains(ROOT), "{error}");
        assert!(!error.kind.retryable());
        assert!(faulty.calls().iter().all(|call| call.op != Op::Write), "bytes were written before the refusal");
        assert!(!disk.files(Path::new(ROOT)).keys().any(|path| path.to_string_lossy().contains("a1")));
    }
}

/// Guards: a moment's ESTALE that hides a good tag, or ends a listing.
#[test]
fn test_bl_163_a_stale_handle_is_looked_up_again_and_stale_again_means_gone() {
    for op in [Op::ListDir, Op::Metadata, Op::OpenFile, Op::Read, Op::Len] {
        for skip in 0..12 {
            let faulty = FaultDisk::new(Arc::new(start()));
            let root = root_on(Arc::new(faulty.clone())).unwrap();
            faulty.fail(Fault::with(ESTALE).on(op).after(skip).times(1));
            assert_eq!(tags(&root), ["global_step1"], "{op:?} {skip}");
            assert_eq!(root.latest().unwrap().unwrap().tag, "global_step1");
            let (_, located) = root.open_file("global_step1", "rng.pt").unwrap();
            assert_eq!(located.record.name, "rng.pt");
        }
    }
    let disk = start();
    save(&on_memory(&disk), "global_step2", &files(TWO)).unwrap();
    let faulty = FaultDisk::new(Arc::new(disk));
    let root = root_on(Arc::new(faulty.clone())).unwrap();
    faulty.fail(Fault::with(ESTALE).in_path("global_step2"));
    assert_eq!(tags(&root), ["global_step1"]);
}

/// Guards: a writer whose directory was removed that hangs, panics or publishes a part.
#[test]
fn a_tag_removed_under_its_writer_is_a_clear_error_and_a_retry_makes_it_again() {
    for stage in 0..3 {
        let disk = start();
        let root = on_memory(&disk);
        let run = |stage: Option<i32>| -> Result<()> {
            let pull = |now: i32| {
                if stage == Some(now) {
                    disk.remove_all(&Path::new(ROOT).join("global_step2"));
                }
            };
            let generation = root.tag("global_step2")?.begin_generation(&writer())?;
            pull(0);
            let mut file = generation.create_file("model.pt")?;
            file.write_at(0, b"abc")?;
            file.finish()?;
            pull(1);
            let part = generation.write_part(0, 1, &[support::record("model.pt", b"abc", generation.number())])?;
            pull(2);
            let parts = relight_engine::commit::CompleteParts::check(vec![part], 1)?;
            generation.commit(parts, facts("global_step2", 1, 2)).map(drop)
        };
        let error = run(Some(stage)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict, "stage {stage}: {error}");
        assert!(error.message.contains("global_step2") && error.message.contains("removed"), "{error}");
        assert_eq!(load_all(&root), [("global_step1".to_owned(), files(ONE))]);
        run(None).unwrap();
        assert_eq!(load(&root, "global_step2"), files(&[("model.pt", b"abc")]));
    }
}

fn save_path(disk: &Arc<dyn Disk>, path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = PendingFile::for_path(disk, path)?;
    file.write_at(0, bytes)?;
    file.finish_durable()
}

/// Guards: the old file damaged, or a temporary one left, by a save to the same name that fails.
#[test]
fn test_bl_053_a_failed_save_to_a_path_leaves_the_old_file_and_nothing_else() {
    for errno in [EIO, ENOSPC] {
        for skip in 0.. {
            let memory = MemoryDisk::new();
            let path = Path::new("/model.pt");
            save_path(&(Arc::new(memory.clone()) as Arc<dyn Disk>), path, b"the old file").unwrap();
            let faulty = FaultDisk::new(Arc::new(memory.clone()));
            faulty.fail(Fault::with(errno).after(skip).times(1).short_write());
            let disk: Arc<dyn Disk> = Arc::new(faulty.clone());
            let result: Result<(), Error> = save_path(&disk, path, b"the new");
            let met = faulty.failed() > 0;
            let bytes = memory.files(Path::new("/"))[path].clone();
            match &result {
                Ok(()) => assert_eq!(bytes, b"the new"),
                // the last call makes the new name durable: it is there already
                Err(_) => assert!(bytes == b"the old file" || bytes == b"the new", "call {skip}: {result:?}"),
            }
            faulty.heal();
            save_path(&disk, path, b"the new").unwrap();
            let all: Vec<_> = memory.files(Path::new("/")).into_keys().collect();
            assert_eq!(all, [path], "call {skip}");
            if !met {
                break;
            }
        }
    }
}

/// Guards: what a killed writer left beside a path; a living writer whose file is taken for that.
#[test]
fn test_bl_055_a_dead_writers_temporary_file_goes_and_a_living_ones_stays() {
    let memory = MemoryDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let path = Path::new("/model.pt");
    let mut living = PendingFile::for_path(&disk, path).unwrap();
    living.write_at(0, b"slow").unwrap();
    let mut dead = PendingFile::for_path(&disk, path).unwrap();
    dead.write_at(0, b"half").unwrap();
    std::mem::forget(dead);
    let after = memory.after_kill();
    let disk: Arc<dyn Disk> = Arc::new(after.clone());
    assert_eq!(after.files(Path::new("/")).len(), 4, "two temporary files and their locks");
    save_path(&disk, path, b"whole").unwrap();
    assert_eq!(after.files(Path::new("/")).into_keys().collect::<Vec<_>>(), [path]);
    // on the machine where both live
    save_path(&(Arc::new(memory.clone()) as Arc<dyn Disk>), path, b"whole").unwrap();
    living.finish_durable().unwrap();
    assert_eq!(memory.files(Path::new("/"))[path], b"slow");
}

//! Saves to a path of their own, blocking and staged: the old file or the new one, whole.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, plan_of};
use relight_engine::clock::Clock;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::engine::EngineOptions;
use relight_engine::image::Image;
use relight_engine::plan::{ImagePlan, Piece, PlanEntry};
use relight_engine::save_file::{MemoryKind, SaveOptions, save_file};
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_engine::{Error, ErrorKind, Result};
use relight_io::foreign::ForeignBytes;
use relight_testkit::{Fault, Op};

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const EACCES: i32 = 13;

fn write(bed: &Bed, path: &str, state: &[(String, Vec<u8>)]) -> Result<()> {
    write_with(bed, path, state, &SaveOptions::default())
}

fn write_with(bed: &Bed, path: &str, state: &[(String, Vec<u8>)], options: &SaveOptions) -> Result<()> {
    let plan = plan_of(state);
    save_file(&bed.disk(), &bed.clock, Path::new(path), &plan, options, &never).map(|report| {
        assert_eq!((report.bytes, report.memory, report.streamed), (plan.total_len(), MemoryKind::None, true));
    })
}

fn read(disk: &dyn Disk, path: &str) -> Vec<(String, Vec<u8>)> {
    let image = Image::open_file(disk, Path::new(path), None).unwrap();
    bytes_of(&image)
}

fn out() -> Bed {
    let bed = Bed::new();
    bed.disk().create_dir(Path::new("/out")).unwrap();
    bed
}

/// BL-027's kind in small: several windows, and a last byte that counts.
#[test]
fn a_file_of_many_windows_reads_back_and_leaves_nothing_beside_it() {
    let bed = out();
    let state = model(1, 30 << 20);
    write(&bed, "/out/model.pt", &state).unwrap();
    assert!(read(bed.disk().as_ref(), "/out/model.pt") == state);
    let names: Vec<PathBuf> = bed.memory.files(Path::new("/out")).into_keys().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn test_bl_053_at_every_failing_call_the_old_file_is_byte_identical_or_the_new_one_is_whole() {
    let (old, new) = (model(1, 9_000), model(2, 9_000));
    let mut failed = 0;
    for call in 0.. {
        let bed = out();
        write(&bed, "/out/model.pt", &old).unwrap();
        let before = bed.memory.files(Path::new("/out"))[Path::new("/out/model.pt")].clone();
        bed.faults.fail(Fault::with(EIO).on_changes().after(call).times(1).short_write());
        let result = write(&bed, "/out/model.pt", &new);
        if bed.faults.failed() == 0 {
            break;
        }
        failed += 1;
        let after = bed.memory.files(Path::new("/out"))[Path::new("/out/model.pt")].clone();
        if result.is_err() && after != before {
            // Only the sync of the directory comes after the rename: the new file is there, not yet known to be durable.
            assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), new, "call {call}");
            assert_eq!(bed.faults.calls().iter().filter(|made| made.op == Op::SyncDir).count(), 2, "call {call}");
        } else if result.is_err() {
            assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), old, "call {call}");
        }
        bed.faults.heal();
        write(&bed, "/out/model.pt", &new).unwrap();
        let names: Vec<PathBuf> = bed.memory.files(Path::new("/out")).into_keys().collect();
        assert_eq!(names.len(), 1, "call {call}: the next save removes what is left: {names:?}");
    }
    assert!(failed > 5, "only {failed} calls were tried");
}

#[test]
fn test_bl_065_a_full_disk_says_need_and_free_first_and_keeps_the_cause() {
    let bed = out();
    for op in [Op::Reserve, Op::Write, Op::SyncFile] {
        bed.faults.fail(Fault::with(ENOSPC).on(op));
        let error = write(&bed, "/out/model.pt", &model(1, 20_000)).unwrap_err();
        assert_eq!((error.kind, error.os_code()), (ErrorKind::StorageFull, Some(ENOSPC)), "{op:?}: {error}");
        assert!(error.message.starts_with("model.pt needs "), "{error}");
        assert!(error.message.contains("/out"), "{error}");
        assert!(bed.memory.files(Path::new("/out")).is_empty());
        bed.faults.heal();
    }
}

/// A plan of one storage that other code may change.
fn plan_of_cells(cells: &[Cell<u8>]) -> ImagePlan<'_> {
    let pieces = vec![Piece::Foreign(ForeignBytes::from_cells(cells))];
    ImagePlan::new("model", vec![PlanEntry { name: "data/0".to_owned(), pieces }]).unwrap()
}

/// Half a second passes at each look: every poll asks for an interrupt.
#[derive(Debug, Default)]
struct Ticking(std::sync::atomic::AtomicU64);

impl Clock for Ticking {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(500 * self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }

    fn wall(&self) -> Duration {
        Duration::from_secs(1_000_000)
    }

    fn pause(&self, _: Duration) {}
}

#[test]
fn test_bl_070_a_state_that_changes_while_it_streams_is_torn_and_nothing_is_published() {
    let bed = out();
    let cells: Vec<Cell<u8>> = (0..20 << 20).map(|_| Cell::new(1)).collect();
    let plan = plan_of_cells(&cells);
    let clock: Arc<dyn Clock> = Arc::new(Ticking::default());
    // The caller's check runs between two pieces of the copy, as another thread's work would.
    let change = || {
        cells[5].set(cells[5].get().wrapping_add(1));
        Ok(())
    };
    let options = SaveOptions { compare: true, copy_threads: 1, ..SaveOptions::default() };
    let error = save_file(&bed.disk(), &clock, Path::new("/out/model.pt"), &plan, &options, &change).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Torn);
    assert!(error.message.contains("data/0"), "{error}");
    assert!(bed.memory.files(Path::new("/out")).is_empty());
}

#[test]
fn test_bl_053_ctrl_c_in_the_middle_leaves_the_old_file() {
    let bed = out();
    let old = model(1, 9_000);
    write(&bed, "/out/model.pt", &old).unwrap();
    let state = model(2, 30 << 20);
    let clock: Arc<dyn Clock> = Arc::new(Ticking::default());
    let asked = RefCell::new(0);
    let ctrl_c = || {
        *asked.borrow_mut() += 1;
        if *asked.borrow() == 10 { Err(Error::new(ErrorKind::Interrupted, "Ctrl-C")) } else { Ok(()) }
    };
    let path = Path::new("/out/model.pt");
    let error = save_file(&bed.disk(), &clock, path, &plan_of(&state), &SaveOptions::default(), &ctrl_c).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Interrupted);
    assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), old);
    assert_eq!(bed.memory.files(Path::new("/out")).len(), 1);
}

#[test]
fn ctrl_c_is_noticed_while_the_disk_is_stuck_and_the_file_goes_when_the_disk_comes_back() {
    let bed = out();
    bed.slow.gate().close(Op::Write, "/out");
    let state = model(2, 30 << 20);
    let ctrl_c = || Err(Error::new(ErrorKind::Interrupted, "Ctrl-C"));
    let path = Path::new("/out/model.pt");
    let clock: Arc<dyn Clock> = Arc::clone(&bed.clock);
    let options = SaveOptions::default();
    let error = save_file(&bed.disk(), &clock, path, &plan_of(&state), &options, &ctrl_c).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Interrupted);
    bed.slow.gate().open();
    write(&bed, "/out/model.pt", &model(3, 100)).unwrap();
    assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), model(3, 100));
}

#[test]
fn test_bl_059_a_link_stays_a_link_and_a_hard_link_keeps_the_old_content() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link, hard) = (dir.path().join("real.pt"), dir.path().join("link.pt"), dir.path().join("hard.pt"));
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk);
    let bed = Bed::new();
    let save = |path: &Path, seed: u8| {
        let state = model(seed, 100_000);
        save_file(&disk, &bed.clock, path, &plan_of(&state), &SaveOptions::default(), &never).unwrap();
    };
    save(&real, 1);
    std::os::unix::fs::symlink(&real, &link).unwrap();
    std::fs::hard_link(&real, &hard).unwrap();
    save(&link, 2);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(read(disk.as_ref(), real.to_str().unwrap()), model(2, 100_000));
    assert_eq!(read(disk.as_ref(), hard.to_str().unwrap()), model(1, 100_000));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn without_durability_nothing_is_synced_and_the_file_is_still_replaced_in_one_step() {
    let bed = out();
    let options = SaveOptions { durable: false, ..SaveOptions::default() };
    write_with(&bed, "/out/model.pt", &model(1, 1000), &options).unwrap();
    assert!(!bed.faults.calls().iter().any(|call| matches!(call.op, Op::SyncFile | Op::SyncDir)));
    assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), model(1, 1000));
}

#[test]
fn a_staged_file_is_pending_until_it_is_where_it_belongs_and_the_newest_wins() {
    let bed = out();
    let engine = bed.engine(options(&bed));
    let path = Path::new("/out/model.pt");
    bed.slow.gate().close(Op::CreateFile, "/out");
    let (first_state, second_state) = (model(1, 80_000), model(2, 80_000));
    let (report, first) = engine.stage_file(path, &plan_of(&first_state), true, &never).unwrap();
    assert_eq!((report.memory, report.streamed), (MemoryKind::Shared, false));
    assert_eq!(engine.pending_path(path).unwrap().id(), first.id());
    let (_, second) = engine.stage_file(path, &plan_of(&second_state), true, &never).unwrap();
    assert_eq!(engine.pending_path(path).unwrap().id(), second.id());
    bed.slow.gate().open();
    assert!(committed(&first) && committed(&second));
    assert!(engine.flush(LONG, &never).unwrap());
    assert!(engine.pending_path(path).is_none());
    assert_eq!(read(bed.disk().as_ref(), "/out/model.pt"), second_state);
    assert_eq!(engine.memory().used_bytes, 0, "a file that is where it belongs needs no memory");
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_staged_file_beyond_the_budget_is_written_through_before_the_call_returns() {
    let bed = out();
    let engine = bed.engine(EngineOptions { memory_bytes_max: Some(2 << 20), ..options(&bed) });
    let state = model(1, 10 << 20);
    let (report, ticket) = engine.stage_file(Path::new("/out/big.pt"), &plan_of(&state), false, &never).unwrap();
    assert!(report.streamed);
    assert_eq!(ticket.state(), TicketState::Committed);
    assert_eq!(read(bed.disk().as_ref(), "/out/big.pt"), state);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_path_that_cannot_be_a_file_is_refused_before_anything_is_staged() {
    let bed = out();
    let engine = bed.engine(options(&bed));
    let state = model(1, 100);
    for path in ["/out", "/missing/model.pt"] {
        assert!(engine.stage_file(Path::new(path), &plan_of(&state), false, &never).is_err(), "{path}");
        assert!(write(&bed, path, &state).is_err(), "{path}");
    }
    for (path, said) in [
        ("/missing/model.pt", "cannot create model.pt: there is no directory /missing; create it first"),
        ("s3://bucket/model.pt", "there is no directory s3://bucket; object stores are not built yet"),
        ("/home/me/s3:/bucket/model.pt", "/home/me/s3:/bucket; object stores are not built yet"),
    ] {
        let staged = engine.stage_file(Path::new(path), &plan_of(&state), false, &never).map(|_| ());
        for error in [staged.unwrap_err(), write(&bed, path, &state).unwrap_err()] {
            assert_eq!(error.kind, ErrorKind::NotFound);
            assert!(error.message.contains(said), "{path}: {error}");
        }
    }
    let denied = Error::io("open", Path::new("/out/a.pt"), std::io::Error::from_raw_os_error(EACCES));
    assert!(denied.message.ends_with("(/out/a.pt); give this user access, or choose another path"), "{denied}");
    let address = Error::io("open", Path::new("s3://bucket/a.pt"), std::io::ErrorKind::NotFound.into());
    assert!(address.message.contains("object stores are not built yet"), "{address}");
    assert_eq!(engine.memory().used_bytes, 0);
    let posix: Arc<dyn Disk> = Arc::new(PosixDisk);
    let refused = save_file(&posix, &bed.clock, Path::new("/dev/null"), &plan_of(&state), &Default::default(), &never);
    assert_eq!(refused.unwrap_err().kind, ErrorKind::InvalidArgument, "a rename would replace the device");
}

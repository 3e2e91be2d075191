//! What another thread or process does between two of our calls.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;
mod support;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, drain_until_found, model, options, plan_of, save_with};
use relight_engine::disk::Disk;
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::error::ErrorKind;
use relight_engine::image::Tier;
use relight_engine::root::RootStore;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_testkit::hook::{Hook, HookedDisk, Verdict};
use relight_testkit::{Call, Fault, MemoryDisk, Op};

type Action = Box<dyn FnOnce() -> Verdict + Send>;

/// Does something once, before the first call of its kind on a path with this end.
#[derive(Default)]
struct Meanwhile {
    op: Option<Op>,
    path: PathBuf,
    action: Mutex<Option<Action>>,
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

impl Hook for Meanwhile {
    fn before(&self, call: &Call) -> Verdict {
        if Some(call.op) != self.op || !call.path.ends_with(&self.path) {
            return Verdict::Go;
        }
        // Taken out first: what it does comes here too.
        let action = self.action.lock().unwrap().take();
        action.map_or(Verdict::Go, |action| action())
    }
}

fn meanwhile(disk: &Arc<dyn Disk>, op: Op, path: &str, action: Action) -> Arc<HookedDisk<Meanwhile>> {
    let hook = Meanwhile { op: Some(op), path: path.into(), action: Mutex::new(Some(action)) };
    Arc::new(HookedDisk::over(Arc::clone(disk), hook))
}

fn root_of(disk: &Arc<dyn Disk>) -> RootStore {
    support::root_on(Arc::clone(disk)).unwrap()
}

/// Guards: a reader that had looked at the manifest opened the file of the next commit, which has the same length, and
/// called a healthy checkpoint damaged.
#[test]
fn a_commit_between_the_look_at_the_manifest_and_the_opening_of_a_file_is_seen_whole() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let writer = root_of(&disk);
    support::save(&writer, "last", &support::files(&[("model.pt", b"first state")])).unwrap();
    let commit = Box::new(move || {
        support::save(&writer, "last", &support::files(&[("model.pt", b"later state")])).unwrap();
        Verdict::Go
    });
    let reader = support::root_on(meanwhile(&disk, Op::OpenFile, "last/model.pt", commit)).unwrap();
    assert_eq!(support::load(&reader, "last")["model.pt"], b"later state");
}

/// Guards: NFS remembers for a while that a name was not there. A sweep that believed it took a committed generation,
/// whose writer had died before the moves, for a leftover.
#[test]
fn a_manifest_that_the_directory_lists_is_there_whatever_an_open_says() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let state = support::files(&[("model.pt", b"precious")]);
    let dies = Box::new(|| Verdict::Fail(io::Error::from_raw_os_error(5)));
    let writer = support::root_on(meanwhile(&disk, Op::Rename, "global_step1/model.pt", dies)).unwrap();
    let facts = support::facts("global_step1", 1, 1);
    assert!(support::save_as(&writer, "global_step1", &state, facts).unwrap().unsettled.is_some());

    let stale = Box::new(|| Verdict::Fail(io::ErrorKind::NotFound.into()));
    let sweeper = support::root_on(meanwhile(&disk, Op::OpenFile, ".relight/manifest.json", stale)).unwrap();
    support::save_as(&sweeper, "global_step2", &state, support::facts("global_step2", 1, 2)).unwrap();
    assert_eq!(support::load(&root_of(&disk), "global_step1"), state);
}

/// An engine that cannot persist dies without a close: what it has staged is in its region.
fn dies_with_a_save(bed: &Bed, root: &str, tag: &str) {
    let engine = bed.engine(EngineOptions { attempts_max: 1, ..options(bed) });
    bed.faults.fail(Fault::with(5).on(Op::Write));
    let root = engine.open_root(Path::new(root), true, false).unwrap();
    pipeline::save(&root, tag, &model(1, 70_000));
    assert!(engine.flush(LONG, &never).unwrap());
    drop((root, engine));
    bed.faults.heal();
}

/// Guards: a persist that ended while a region was being adopted removed the region: its images were in no list yet.
/// Killed now, the process would have lost what the dead one had staged.
#[test]
fn a_region_that_is_being_adopted_is_not_taken_for_an_empty_one() {
    let bed = Bed::new();
    dies_with_a_save(&bed, "/ckpt", "global_step1");
    bed.disk().create_dir(Path::new("/out")).unwrap();
    let engine: Arc<Mutex<Option<Engine>>> = Arc::default();
    let left = Arc::new(Mutex::new(0));
    let persist = Box::new({
        let (engine, left, regions) = (Arc::clone(&engine), Arc::clone(&left), bed.regions.path().to_path_buf());
        move || {
            let engine = engine.lock().unwrap().clone().unwrap();
            let (_, ticket) =
                engine.stage_file(Path::new("/out/a.pt"), &plan_of(&model(2, 50_000)), false, &never).unwrap();
            assert!(committed(&ticket));
            *left.lock().unwrap() = std::fs::read_dir(regions).unwrap().count();
            Verdict::Go
        }
    });
    let disk = meanwhile(&bed.disk(), Op::Canonical, "ckpt", persist);
    let next = Engine::new(options(&bed), disk, Arc::clone(&bed.clock)).unwrap();
    *engine.lock().unwrap() = Some(next.clone());
    assert_eq!(drain_until_found(&next)[0].tags.len(), 1);
    engine.lock().unwrap().take();
    assert_eq!(*left.lock().unwrap(), 2, "the region of the dead process is there, beside ours");
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

/// Guards: a region is whole pages; the budget was not, and what was left of it went below zero.
#[test]
fn a_budget_that_is_no_multiple_of_a_page_is_not_passed() {
    let bed = Bed::new();
    let budget = (2 << 20) + 1;
    let engine = bed.engine(EngineOptions { memory_bytes_max: Some(budget), ..options(&bed) });
    let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
    assert!(committed(&pipeline::save(&root, "global_step1", &model(1, 3 << 20))), "larger than the budget: streamed");
    assert!(committed(&pipeline::save(&root, "global_step2", &model(2, 1 << 20))));
    let memory = engine.memory();
    assert!(memory.capacity_bytes <= budget && memory.peak_bytes <= budget, "{memory:?}");
    assert_eq!(memory.reason, None);
}

/// Guards: whoever waited for a queued save of an engine that was dropped waited for ever.
#[test]
fn the_tickets_of_a_dropped_engine_end() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
    bed.slow.gate().close(Op::Write, "global_step1");
    let stuck = pipeline::save(&root, "global_step1", &model(1, 50_000));
    let queued = pipeline::save(&root, "global_step2", &model(2, 50_000));
    bed.slow.gate().wait_until_stuck(1);
    drop((root, engine));
    assert!(queued.wait(Some(Duration::from_secs(5)), &never).unwrap(), "it never ends");
    assert_eq!(queued.check().unwrap_err().kind, ErrorKind::Closed);
    bed.slow.gate().open();
    assert!(stuck.wait(LONG, &never).unwrap());
    let next = bed.engine(options(&bed));
    let tags: Vec<_> = drain_until_found(&next)[0].tags.iter().map(|tag| tag.tag.clone()).collect();
    assert!(tags.contains(&"global_step2".to_owned()), "what was queued is for the next process: {tags:?}");
    assert!(next.close(LONG, &never).unwrap());
}

/// Guards: a panic between two attempts ended the persist thread, and every later save and close hung.
#[test]
fn a_panic_between_two_attempts_costs_one_save_and_not_the_thread() {
    let bed = Bed::new();
    let disk = meanwhile(&bed.disk(), Op::Lock, "history.lock", Box::new(|| panic!("on purpose")));
    let engine = Engine::new(options(&bed), disk, Arc::clone(&bed.clock)).unwrap();
    let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
    bed.faults.fail(Fault::with(5).on(Op::Write));
    let lost = pipeline::save(&root, "global_step1", &model(1, 50_000));
    assert!(lost.wait(Some(Duration::from_secs(5)), &never).unwrap(), "the thread is gone");
    assert_eq!(lost.state(), TicketState::Failed);
    assert_eq!(engine.memory().checkpoints[0].state, "failed");
    bed.faults.heal();
    assert!(committed(&pipeline::save(&root, "global_step2", &model(2, 50_000))));
    assert!(engine.close(LONG, &never).unwrap());
}

/// Decision 0002: a process takes one more than the highest run of the root at its first save, not at the opening.
#[test]
fn a_run_that_begins_after_the_root_was_opened_is_older_than_ours() {
    let bed = Bed::new();
    let ours = bed.engine(options(&bed));
    let root = ours.open_root(Path::new("/ckpt"), true, false).unwrap();
    // The job before us, which was told to end, commits its last save.
    let before = bed.engine(options(&bed));
    let its_root = before.open_root(Path::new("/ckpt"), true, false).unwrap();
    assert!(committed(&pipeline::save(&its_root, "global_step1000", &model(1, 50_000))));
    assert!(before.close(LONG, &never).unwrap());
    assert!(committed(&save_with(&root, "global_step600", &model(2, 50_000), BeginOptions::default())));
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step600"));
    let image = root.open_image("global_step600", "model.pt", None).unwrap();
    assert!(bytes_of(&image) == model(2, 50_000));
}

/// Guards: a job went on elsewhere and saved the tag again, under the number that the dead process had taken. Its memory
/// was then called persisted, and was what a reader got.
#[test]
fn what_a_dead_process_staged_does_not_stand_for_what_another_committed_under_its_number() {
    for saves in [1, 2] {
        let bed = Bed::new();
        let (here, elsewhere) = (bed.regions.path().join("here"), bed.regions.path().join("elsewhere"));
        for dir in [&here, &elsewhere] {
            std::fs::create_dir(dir).unwrap();
        }
        let on = |dir: &Path| EngineOptions { memory_dir: Some(dir.to_path_buf()), attempts_max: 1, ..options(&bed) };
        let engine = bed.engine(on(&here));
        let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
        bed.faults.fail(Fault::with(5).on(Op::Write));
        for seed in 1..=saves {
            pipeline::save(&root, "global_step1", &model(seed, 50_000));
        }
        assert!(engine.flush(LONG, &never).unwrap());
        drop((root, engine));
        bed.faults.heal();

        let engine = bed.engine(on(&elsewhere));
        let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
        if saves > 1 {
            // A run that began later, by a process whose numbers are behind.
            assert!(committed(&pipeline::save(&root, "global_step0", &model(8, 50_000))));
            engine.close(LONG, &never).unwrap();
            let engine = bed.engine(on(&elsewhere));
            let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
            assert!(committed(&pipeline::save(&root, "global_step1", &model(9, 50_000))));
        } else {
            assert!(committed(&pipeline::save(&root, "global_step1", &model(9, 50_000))));
        }
        let next = bed.engine(on(&here));
        drain_until_found(&next);
        let root = next.open_root(Path::new("/ckpt"), true, false).unwrap();
        assert!(next.flush(LONG, &never).unwrap());
        for tier in [None, Some(Tier::Persistent)] {
            let image = root.open_image("global_step1", "model.pt", tier).unwrap();
            assert!(bytes_of(&image) == model(9, 50_000), "{saves} {tier:?}");
        }
    }
}

/// Guards: two callers saw the same room, and both took it: beside the region of a dead process, ours is not the only limit.
#[test]
fn two_callers_at_once_do_not_pass_the_budget() {
    const ROUNDS: usize = 300;
    let bed = Bed::new();
    let budget = 4 << 20;
    let options = || EngineOptions { memory_bytes_max: Some(budget), copy_threads: 1, ..options(&bed) };
    let dead = bed.engine(options());
    let root = dead.open_root(Path::new("/ckpt"), true, false).unwrap();
    assert!(committed(&pipeline::save(&root, "global_step1", &model(1, 1_500_000))));
    drop((root, dead));
    let engine = bed.engine(options());
    drain_until_found(&engine);
    let root = engine.open_root(Path::new("/ckpt"), true, false).unwrap();
    // Being read, it cannot make room.
    let reader = root.open_image("global_step1", "model.pt", Some(Tier::Memory)).unwrap();
    let adopted = engine.memory().used_bytes;
    let state = model(2, 1_000_000);
    assert!(2 << 20 < budget - adopted + (1 << 20), "one more fits, two do not");
    for _ in 0..ROUNDS {
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for tag in ["global_step2", "global_step3"] {
                let (root, state, barrier) = (&root, &state, &barrier);
                scope.spawn(move || {
                    let share = root.begin(tag, BeginOptions::default()).unwrap();
                    barrier.wait();
                    let report = share.stage("model.pt", &plan_of(state), false, &never).unwrap();
                    barrier.wait();
                    report.streamed
                });
            }
        });
        let peak = engine.memory().peak_bytes;
        assert!(peak <= budget, "{peak} bytes of {budget}");
    }
    drop(reader);
}

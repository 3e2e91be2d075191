//! Real processes, a real disk, real shared memory, SIGKILL: what was sealed is never lost, what was not is never seen.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use pipeline::{LONG, bytes_of, drain_until_found, model, plan_of, save};
use relight_engine::clock::SystemClock;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::image::{Image, Tier};
use relight_engine::share::BeginOptions;
use relight_engine::wait::never;
use relight_testkit::{Op, SlowDisk};

const DIR: &str = "RELIGHT_TEST_KILL_DIR";
const REGIONS: &str = "RELIGHT_TEST_KILL_REGIONS";

fn engine_in(regions: &Path, disk: Arc<dyn Disk>) -> Engine {
    let options = EngineOptions {
        memory_bytes_max: Some(32 << 20),
        memory_dir: Some(regions.to_path_buf()),
        chunk_bytes: 64 << 10,
        ..EngineOptions::default()
    };
    Engine::new(options, disk, Arc::new(SystemClock::new())).unwrap()
}

fn child_dirs() -> Option<(String, String)> {
    Some((std::env::var(DIR).ok()?, std::env::var(REGIONS).ok()?))
}

/// Runs a test of this file as a process of its own; its dirs say that it is the child.
fn spawn(child: &str, dir: &Path, regions: &Path) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", child, "--nocapture"])
        .env(DIR, dir)
        .env(REGIONS, regions)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

/// The next line that begins with `word`, without it.
fn next_word(lines: &mut BufReader<ChildStdout>, word: &str) -> Option<String> {
    for line in lines.lines() {
        if let Some(rest) = line.ok()?.strip_prefix(word) {
            return Some(rest.trim().to_owned());
        }
    }
    None
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn temp_dirs() -> (tempfile::TempDir, tempfile::TempDir) {
    let regions = tempfile::Builder::new().prefix("relight-kill-").tempdir_in("/dev/shm").unwrap();
    (tempfile::tempdir().unwrap(), regions)
}

/// Not a test by itself: the process that dies with two tags staged, one of them unsealed, and a file.
#[test]
fn child_that_stages_and_waits() {
    let Some((dir, regions)) = child_dirs() else { return };
    let slow = SlowDisk::new(Arc::new(PosixDisk));
    slow.gate().close(Op::Write, "");
    let engine = engine_in(Path::new(&regions), Arc::new(slow.clone()));
    let root = engine.open_root(&Path::new(&dir).join("ckpt"), true, true).unwrap();
    save(&root, "global_step1", &model(1, 900_000));
    engine.stage_file(&Path::new(&dir).join("alone.pt"), &plan_of(&model(3, 50_000)), false, &never).unwrap();
    let share = root.begin("global_step2", BeginOptions::default()).unwrap();
    share.stage("model.pt", &plan_of(&model(2, 900_000)), false, &never).unwrap();
    slow.gate().wait_until_stuck(1);
    println!("\nstaged");
    loop {
        // A park may end by itself, as when a scope of copy threads has left a wake-up behind.
        std::thread::park();
    }
}

#[test]
fn test_bl_060_after_sigkill_the_next_process_has_what_was_sealed_and_persists_it() {
    let (dir, regions) = temp_dirs();
    let (child, mut lines) = spawn("child_that_stages_and_waits", dir.path(), regions.path());
    next_word(&mut lines, "staged").unwrap();
    let early = engine_in(regions.path(), Arc::new(PosixDisk));
    assert!(early.drain().is_empty(), "the region of a live process is left alone");
    let seen = relight_engine::report::regions(Some(regions.path())).unwrap();
    assert!(seen[0].alive);
    let states: Vec<_> = seen[0].checkpoints.iter().map(|found| (found.tag.clone(), found.state)).collect();
    assert!(states.contains(&("global_step1".to_owned(), "staged")), "{states:?}");
    assert!(states.contains(&("global_step2".to_owned(), "incomplete")), "{states:?}");
    let region = seen[0].path.clone();
    assert!(relight_engine::report::remove_region(Path::new(&region)).is_err(), "it has an owner");
    kill(child);

    let next = engine_in(regions.path(), Arc::new(PosixDisk));
    let found = drain_until_found(&next);
    let tags: Vec<_> = found[0].tags.iter().map(|tag| tag.tag.as_str()).collect();
    assert_eq!(tags, ["global_step1"]);
    assert_eq!(found[0].files.len(), 1);
    assert!(found[0].dropped.iter().any(|text| text.contains("global_step2")), "{found:?}");
    let root = next.open_root(&dir.path().join("ckpt"), false, true).unwrap();
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step1"));
    assert_eq!(bytes_of(&root.open_image("global_step1", "model.pt", None).unwrap()), model(1, 900_000));
    assert!(next.close(LONG, &never).unwrap());
    let image = root.open_image("global_step1", "model.pt", Some(Tier::Persistent)).unwrap();
    assert_eq!(bytes_of(&image), model(1, 900_000));
    let alone = Image::open_file(&PosixDisk, &dir.path().join("alone.pt"), None).unwrap();
    assert_eq!(bytes_of(&alone), model(3, 50_000));
    assert!(root.verify("global_step1", &never).unwrap().ok());
    assert_eq!(std::fs::read_dir(regions.path()).unwrap().count(), 0);
}

/// Guards: a trainer starts again while another job of the node is draining its region, and resumes from an older
/// checkpoint, or from none.
#[test]
fn what_another_successor_is_draining_is_waited_for() {
    let (dir, regions) = temp_dirs();
    let (child, mut lines) = spawn("child_that_stages_and_waits", dir.path(), regions.path());
    next_word(&mut lines, "staged").unwrap();
    kill(child);
    let slow = SlowDisk::new(Arc::new(PosixDisk));
    slow.gate().close(Op::Write, "");
    let bystander = engine_in(regions.path(), Arc::new(slow.clone()));
    drain_until_found(&bystander);
    slow.gate().wait_until_stuck(1);

    let ckpt = dir.path().join("ckpt");
    let next = engine_in(regions.path(), Arc::new(PosixDisk));
    let root = next.open_root(&ckpt, false, true).unwrap();
    assert_eq!(root.latest().unwrap(), None, "it is in other hands");
    next.await_drains(dir.path(), &never).unwrap(); // nothing is staged for this place
    let stop = || Err(relight_engine::Error::new(relight_engine::ErrorKind::Interrupted, "Ctrl-C"));
    let stopped = next.await_drains(&ckpt, &stop).unwrap_err();
    assert_eq!(stopped.kind, relight_engine::ErrorKind::Interrupted);
    let waiting = std::thread::scope(|scope| {
        let wait = scope.spawn(|| next.await_drains(&ckpt, &never));
        slow.gate().open();
        wait.join().unwrap()
    });
    waiting.unwrap();
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step1"));
    save(&root, "global_step2", &model(2, 10_000));
    assert!(next.close(LONG, &never).unwrap());
    let order: Vec<_> = root.list().unwrap().iter().map(|one| (one.tag.clone(), one.sequence)).collect();
    assert!(order[0].0 == "global_step1" && order[1].0 == "global_step2" && order[0].1 < order[1].1, "{order:?}");
    assert!(bystander.close(LONG, &never).unwrap());
}

#[test]
fn a_successor_that_never_finishes_is_named_after_the_limit() {
    let (dir, regions) = temp_dirs();
    let (child, mut lines) = spawn("child_that_stages_and_waits", dir.path(), regions.path());
    next_word(&mut lines, "staged").unwrap();
    kill(child);
    let slow = SlowDisk::new(Arc::new(PosixDisk));
    slow.gate().close(Op::Write, "");
    let bystander = engine_in(regions.path(), Arc::new(slow.clone()));
    drain_until_found(&bystander);
    let options = EngineOptions {
        memory_dir: Some(regions.path().to_path_buf()),
        lock_timeout: std::time::Duration::ZERO,
        ..EngineOptions::default()
    };
    let next = Engine::new(options, Arc::new(PosixDisk), Arc::new(SystemClock::new())).unwrap();
    let late = next.await_drains(&dir.path().join("ckpt"), &never).unwrap_err();
    assert_eq!(late.kind, relight_engine::ErrorKind::TimedOut);
    assert!(late.message.contains("global_step1") && late.message.contains(&std::process::id().to_string()), "{late}");
    slow.gate().open();
    assert!(bystander.close(LONG, &never).unwrap());
}

/// Not a test by itself: saves one step after the other until it is killed.
#[test]
fn child_that_saves_in_a_loop() {
    let Some((dir, regions)) = child_dirs() else { return };
    let engine = engine_in(Path::new(&regions), Arc::new(PosixDisk));
    let root = engine.open_root(Path::new(&dir), true, true).unwrap();
    let latest = root.latest().unwrap().and_then(|tag| relight_format::names::step_of_tag(&tag)).unwrap_or(0);
    root.start_run(None).unwrap();
    for step in latest + 1.. {
        let keep = BeginOptions { keep: Some(3), ..BeginOptions::default() };
        pipeline::save_with(&root, &format!("global_step{step}"), &model(step as u8, 700_000), keep);
        println!("\nsealed {step}");
    }
}

/// BL-052 and BL-056's kind: whatever the moment of the kill, the newest sealed checkpoint is there, whole.
#[test]
fn test_bl_052_killed_at_any_moment_the_newest_sealed_checkpoint_is_there_and_whole() {
    let (dir, regions) = temp_dirs();
    for round in 0..25_u64 {
        let (child, mut lines) = spawn("child_that_saves_in_a_loop", dir.path(), regions.path());
        let mut sealed = 0;
        for _ in 0..=round % 4 {
            sealed = next_word(&mut lines, "sealed").unwrap().parse().unwrap();
        }
        // A different point of the save each time: some work of our own, not a time.
        (0..round * 40_000).fold(1_u64, |mixed, number| std::hint::black_box(mixed.wrapping_mul(31) ^ number));
        kill(child);
        while let Some(more) = next_word(&mut lines, "sealed") {
            sealed = more.parse().unwrap_or(sealed);
        }
        let next = engine_in(regions.path(), Arc::new(PosixDisk));
        let root = next.open_root(dir.path(), true, true).unwrap();
        let latest = root.latest().unwrap().unwrap();
        let step = relight_format::names::step_of_tag(&latest).unwrap();
        // One more may have been sealed before its line was written.
        assert!(step == sealed || step == sealed + 1, "round {round}: {latest}, sealed {sealed}");
        assert_eq!(bytes_of(&root.open_image(&latest, "model.pt", None).unwrap()), model(step as u8, 700_000));
        assert!(next.close(LONG, &never).unwrap(), "round {round}");
        for listed in root.list().unwrap() {
            assert!(root.verify(&listed.tag, &never).unwrap().ok(), "round {round}: {}", listed.tag);
        }
        assert_eq!(root.latest().unwrap(), Some(latest), "round {round}: it is the same on the disk");
        assert_eq!(std::fs::read_dir(regions.path()).unwrap().count(), 0, "round {round}");
    }
}

//! Persists that fail: retries, what is said, and that no other save pays for it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, save, save_with, tags};
use relight_engine::ErrorKind;
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::events::{Event, Level};
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_testkit::{Fault, Op};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn history(bed: &Bed) -> Vec<String> {
    let files = bed.memory.files(Path::new("/ckpt"));
    let text = files.iter().find(|(path, _)| path.ends_with("checkpointHistories.csv")).unwrap().1;
    String::from_utf8(text.clone()).unwrap().lines().map(str::to_owned).collect()
}

fn count(lines: &[String], event: &str, tag: &str) -> usize {
    lines.iter().filter(|line| line.contains(&format!(",{event},{tag},"))).count()
}

fn messages(engine: &Engine, wanted: Level) -> Vec<String> {
    let mut found = Vec::new();
    while let Some(event) = engine.next_event(Duration::ZERO) {
        match event {
            Event::Log { level, message, .. } if level == wanted => found.push(message),
            Event::Closed => break,
            _ => {}
        }
    }
    found
}

#[test]
fn test_bl_067_two_failed_attempts_then_success_is_committed_on_new_files_and_in_the_history() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.faults.fail(Fault::with(EIO).on(Op::SyncFile).in_path("/g").times(2));
    let state = model(3, 100_000);
    let ticket = save(&root, "global_step1", &state);
    assert!(committed(&ticket));
    assert_eq!(ticket.progress().attempts, 3);
    assert_eq!(ticket.progress().bytes_persisted, ticket.progress().bytes_total);
    let image = root.open_image("global_step1", "model.pt", Some(Tier::Persistent)).unwrap();
    assert_eq!(bytes_of(&image), state);
    let lines = history(&bed);
    assert_eq!((count(&lines, "retry", "global_step1"), count(&lines, "commit", "global_step1")), (2, 1));
    // Each attempt wrote a file that no other attempt had touched.
    let created: Vec<_> = bed
        .faults
        .calls()
        .into_iter()
        .filter(|call| call.op == Op::CreateFile && call.path.to_string_lossy().contains("global_step1/.relight/g"))
        .collect();
    let data: Vec<_> = created.iter().filter(|call| call.path.to_string_lossy().contains("relight-tmp")).collect();
    assert!(data.len() >= 3, "{data:?}");
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn test_bl_067_when_all_attempts_fail_it_is_reported_and_the_last_good_checkpoint_stays() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "global_step1", &model(1, 50_000))));
    bed.faults.fail(Fault::with(EIO).on(Op::Write).in_path("global_step2"));
    let ticket = save(&root, "global_step2", &model(2, 50_000));
    assert!(!committed(&ticket));
    let first = ticket.check().unwrap_err();
    assert_eq!((first.kind, first.os_code()), (ErrorKind::StorageUnavailable, Some(EIO)));
    assert_eq!(first.tag.as_deref(), Some("global_step2"));
    assert_eq!(ticket.check().unwrap_err().message, first.message, "it is told again, as a new error");
    assert_eq!(ticket.progress().attempts, 3);
    let lines = history(&bed);
    assert_eq!((count(&lines, "retry", "global_step2"), count(&lines, "failed", "global_step2")), (2, 1));
    assert!(messages(&engine, Level::Error).iter().any(|text| text.contains("global_step2")));

    assert_eq!(tags(&root), ["global_step1"], "a failed save is no checkpoint");
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step1"));
    assert!(root.verify("global_step1", &never).unwrap().ok());
    bed.faults.heal();
    assert!(committed(&save(&root, "global_step3", &model(3, 50_000))));
    assert_eq!(engine.memory().checkpoints.iter().filter(|staged| staged.state == "failed").count(), 0);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn test_bl_074_a_failed_save_costs_no_other_and_retention_does_not_trip_over_it() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.faults.fail(Fault::with(EIO).on(Op::Write).in_path("global_step2"));
    let keep = |step| BeginOptions { keep: Some(2), step: Some(step), ..BeginOptions::default() };
    let tickets: Vec<_> = (1..=4)
        .map(|step| save_with(&root, &format!("global_step{step}"), &model(step as u8, 20_000), keep(step)))
        .collect();
    let outcomes: Vec<bool> = tickets.iter().map(committed).collect();
    assert_eq!(outcomes, [true, false, true, true]);
    assert_eq!(tags(&root), ["global_step3", "global_step4"]);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn test_bl_081_after_a_failed_commit_and_a_rollback_the_new_run_is_latest() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "global_step16", &model(16, 20_000))));
    bed.faults.fail(Fault::with(EIO).on(Op::Rename).in_path("global_step20/.relight/manifest.json"));
    assert!(!committed(&save(&root, "global_step20", &model(20, 20_000))));
    bed.faults.heal();
    root.start_run(Some("global_step16")).unwrap();
    assert!(committed(&save(&root, "global_step17", &model(17, 20_000))));
    assert!(committed(&save(&root, "global_step18", &model(18, 20_000))));
    assert_eq!(tags(&root), ["global_step16", "global_step17", "global_step18"]);
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step18"));
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn test_bl_066_a_full_disk_is_storage_full_wherever_it_shows() {
    for op in [Op::CreateFile, Op::Reserve, Op::Write, Op::SyncFile] {
        let bed = Bed::new();
        let engine = bed.engine(options(&bed));
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        assert!(committed(&save(&root, "global_step1", &model(1, 50_000))));
        bed.faults.fail(Fault::with(ENOSPC).on(op).in_path("global_step2/.relight/g"));
        let ticket = save(&root, "global_step2", &model(2, 50_000));
        assert!(!committed(&ticket), "{op:?}");
        let error = ticket.check().unwrap_err();
        assert_eq!(error.kind, ErrorKind::StorageFull, "{op:?}: {error}");
        assert_eq!(root.latest().unwrap().as_deref(), Some("global_step1"));
        assert!(root.verify("global_step1", &never).unwrap().ok());
        // What could not be persisted stays for the next process.
        assert!(!engine.close(LONG, &never).unwrap());
        assert_eq!(bed.region_files().len(), 1);
    }
}

#[test]
fn saves_are_committed_in_the_order_of_their_seals() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateDir, "global_step0");
    let tickets: Vec<_> = (0..6).map(|step| save(&root, &format!("global_step{step}"), &model(step, 30_000))).collect();
    bed.slow.gate().wait_until_stuck(1);
    assert_eq!(tickets[1].state(), TicketState::Queued);
    bed.slow.gate().open();
    assert!(engine.flush(LONG, &never).unwrap());
    let ids: Vec<u64> = tickets.iter().map(|ticket| ticket.id()).collect();
    let mut ended = Vec::new();
    while let Some(Event::Ticket { id, state }) = engine.next_event(Duration::ZERO) {
        assert_eq!(state, TicketState::Committed);
        ended.push(id);
    }
    assert_eq!(ended, ids);
    let sequences: Vec<u64> = root.list().unwrap().iter().map(|listed| listed.sequence).collect();
    assert_eq!(sequences, [1, 2, 3, 4, 5, 6]);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn test_bl_072_a_second_save_to_a_tag_in_flight_waits_its_turn_and_delete_waits_for_both() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateDir, "last");
    let (old, new) = (model(1, 40_000), model(2, 40_000));
    let first = save(&root, "last", &old);
    let second = save(&root, "last", &new);
    bed.slow.gate().wait_until_stuck(1);
    let image = root.open_image("last", "model.pt", None).unwrap();
    assert_eq!(bytes_of(&image), new, "the newest complete state, never a stale one");
    drop(image);
    assert_eq!(tags(&root), ["last"]);
    let deleter = std::thread::spawn({
        let root = root.clone();
        move || root.delete("last", &never)
    });
    bed.slow.gate().open();
    assert!(committed(&first) && committed(&second));
    deleter.join().unwrap().unwrap();
    assert!(tags(&root).is_empty());
    assert_eq!(root.open_image("last", "model.pt", None).unwrap_err().kind, ErrorKind::NotFound);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn retries_wait_longer_each_time() {
    let bed = Bed::new();
    let clock = std::sync::Arc::new(relight_testkit::ManualClock::new(Duration::from_secs(1_000_000)));
    let slow = EngineOptions { retry_delay: Duration::from_millis(40), attempts_max: 4, ..options(&bed) };
    let engine = Engine::new(slow, bed.disk(), clock.clone()).unwrap();
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.faults.fail(Fault::with(EIO).on(Op::Write).in_path("global_step1"));
    assert!(!committed(&save(&root, "global_step1", &model(1, 10_000))));
    let waited: Vec<u64> = clock.pauses().iter().map(|pause| pause.as_millis() as u64).collect();
    assert_eq!(waited, [40, 80, 100, 60]);
    bed.faults.heal();
    assert!(!engine.close(None, &never).unwrap());
}

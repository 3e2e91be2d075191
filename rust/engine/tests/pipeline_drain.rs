//! After a death: the next process sees what was staged, persists it, and drops what was not complete.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, drain_until_found, model, options, plan_of, save, tags};
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::events::{Event, Level};
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::wait::never;
use relight_testkit::{Fault, Op};

/// An engine that cannot persist dies without a close: what it has staged is in its region.
fn dies_with(bed: &Bed, work: impl FnOnce(&Engine)) {
    let engine = bed.engine(EngineOptions { attempts_max: 1, ..options(bed) });
    bed.faults.fail(Fault::with(5).on(Op::Write));
    work(&engine);
    assert!(engine.flush(LONG, &never).unwrap());
    drop(engine);
    bed.faults.heal();
}

fn warnings(engine: &Engine) -> Vec<String> {
    std::iter::from_fn(|| engine.next_event(Duration::ZERO))
        .take(1000)
        .filter_map(|event| match event {
            Event::Log { level: Level::Warning, message, .. } => Some(message),
            _ => None,
        })
        .collect()
}

#[test]
fn what_a_dead_process_staged_is_visible_at_once_and_persisted_before_new_saves() {
    let bed = Bed::new();
    let states: Vec<_> = (1..=3).map(|step| model(step, 70_000)).collect();
    dies_with(&bed, |engine| {
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        for (index, state) in states.iter().enumerate() {
            save(&root, &format!("global_step{}", index + 1), state);
        }
    });
    let next = bed.engine(options(&bed));
    bed.slow.gate().close(Op::CreateDir, "global_step1");
    let found = drain_until_found(&next);
    assert_eq!(found[0].tags.len(), 3);
    assert!(found[0].tags.iter().all(|tag| !tag.persisted) && found[0].dropped.is_empty(), "{found:?}");
    let root = next.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().wait_until_stuck(1);
    assert_eq!(tags(&root), ["global_step1", "global_step2", "global_step3"]);
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step3"));
    let image = root.open_image("global_step3", "model.pt", None).unwrap();
    assert_eq!((image.tier(), bytes_of(&image)), (Tier::Memory, states[2].clone()));
    drop(image);

    root.start_run(Some("global_step3")).unwrap();
    let newer = save(&root, "global_step4", &model(4, 70_000));
    bed.slow.gate().open();
    assert!(committed(&newer));
    let listed = root.list().unwrap();
    let numbers: Vec<_> = listed.iter().map(|listed| (listed.tag.as_str(), listed.run, listed.sequence)).collect();
    let wanted = [("global_step1", 1, 1), ("global_step2", 1, 2), ("global_step3", 1, 3), ("global_step4", 2, 4)];
    assert_eq!(numbers, wanted);
    for (index, state) in states.iter().enumerate() {
        let tag = format!("global_step{}", index + 1);
        assert_eq!(&bytes_of(&root.open_image(&tag, "model.pt", Some(Tier::Persistent)).unwrap()), state, "{tag}");
    }
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty(), "the drained region is removed");
}

#[test]
fn what_is_committed_already_is_not_persisted_again() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "global_step1", &model(1, 50_000))));
    drop((engine, root));
    let next = bed.engine(options(&bed));
    let before = bed.faults.calls().len();
    let found = drain_until_found(&next);
    assert_eq!(found[0].tags.len(), 1);
    assert!(found[0].tags[0].persisted);
    let root = next.open_root(Path::new("/ckpt"), false, true).unwrap();
    assert!(next.flush(LONG, &never).unwrap());
    assert!(!bed.faults.calls()[before..].iter().any(|call| call.op == Op::Write), "nothing is written again");
    let image = root.open_image("global_step1", "model.pt", None).unwrap();
    assert_eq!((image.tier(), bytes_of(&image)), (Tier::Memory, model(1, 50_000)), "and memory is the nearest tier");
    assert_eq!(root.list().unwrap()[0].tiers, [Tier::Memory, Tier::Persistent]);
    drop(image);
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

#[test]
fn a_file_by_itself_is_drained_to_its_path_unless_somebody_has_changed_it_since() {
    let bed = Bed::new();
    let disk = bed.disk();
    disk.create_dir(Path::new("/out")).unwrap();
    let clock = std::sync::Arc::clone(&bed.clock);
    let write = |name: &str, seed: u8| {
        let state = model(seed, 5000);
        let options = Default::default();
        let path = Path::new("/out").join(name);
        relight_engine::save_file::save_file(&disk, &clock, &path, &plan_of(&state), &options, &never).unwrap();
    };
    write("changed.pt", 1);
    dies_with(&bed, |engine| {
        for name in ["new.pt", "changed.pt", "twice.pt", "twice.pt"] {
            let seed =
                if name == "twice.pt" && engine.pending_path(Path::new("/out/twice.pt")).is_some() { 9 } else { 5 };
            let state = model(seed, 60_000);
            engine.stage_file(&Path::new("/out").join(name), &plan_of(&state), false, &never).unwrap();
        }
    });
    write("changed.pt", 2);
    let next = bed.engine(options(&bed));
    let found = drain_until_found(&next);
    assert!(found[0].files.len() >= 3, "{found:?}");
    assert!(next.flush(LONG, &never).unwrap());
    let read = |name: &str| {
        let image =
            relight_engine::image::Image::open_file(disk.as_ref(), &Path::new("/out").join(name), None).unwrap();
        bytes_of(&image)
    };
    assert_eq!(read("new.pt"), model(5, 60_000));
    assert_eq!(read("changed.pt"), model(2, 5000), "what came later stays");
    assert!(warnings(&next).iter().any(|text| text.contains("changed.pt")));
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

#[test]
fn what_was_staged_for_a_directory_that_is_gone_is_left_and_named() {
    let bed = Bed::new();
    dies_with(&bed, |engine| {
        let root = engine.open_root(Path::new("/gone"), true, true).unwrap();
        save(&root, "global_step1", &model(1, 50_000));
    });
    bed.memory.remove_all(Path::new("/gone"));
    let next = bed.engine(options(&bed));
    let found = drain_until_found(&next);
    assert!(found[0].tags.is_empty() && found[0].dropped.len() == 1, "{found:?}");
    assert!(warnings(&next).iter().any(|text| text.contains("global_step1") && text.contains("gone")));
    assert!(next.close(LONG, &never).unwrap(), "it is not this process's to finish");
    assert_eq!(bed.region_files().len(), 1, "nothing staged is thrown away");
    // The directory comes back: now it is drained.
    bed.disk().create_dir(Path::new("/gone")).unwrap();
    let later = bed.engine(options(&bed));
    drain_until_found(&later);
    let root = later.open_root(Path::new("/gone"), false, true).unwrap();
    assert!(later.close(LONG, &never).unwrap());
    assert_eq!(tags(&root), ["global_step1"]);
}

#[test]
fn a_tag_that_another_process_has_saved_since_is_not_overwritten() {
    let bed = Bed::new();
    dies_with(&bed, |engine| {
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        save(&root, "last", &model(1, 50_000));
    });
    let elsewhere = tempfile::Builder::new().prefix("relight-elsewhere-").tempdir_in("/dev/shm").unwrap();
    let mut other_node = options(&bed);
    other_node.memory_dir = Some(elsewhere.path().to_path_buf());
    let other = bed.engine(other_node);
    let root = other.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "first", &model(3, 100))) && committed(&save(&root, "last", &model(2, 50_000))));
    assert!(other.close(LONG, &never).unwrap());
    let next = bed.engine(options(&bed));
    drain_until_found(&next);
    let root = next.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(next.flush(LONG, &never).unwrap());
    assert_eq!(bytes_of(&root.open_image("last", "model.pt", None).unwrap()), model(2, 50_000));
    assert!(next.close(LONG, &never).unwrap());
}

fn commits(bed: &Bed) -> Vec<String> {
    let files = bed.memory.files(Path::new("/ckpt"));
    let text = files.iter().find(|(path, _)| path.ends_with("checkpointHistories.csv")).unwrap().1;
    let text = String::from_utf8(text.clone()).unwrap();
    let lines = text.lines().filter(|line| line.contains(",commit,"));
    lines.map(|line| line.split(',').nth(2).unwrap().to_owned()).collect()
}

#[test]
fn drained_tags_are_persisted_before_saves_that_wait_already() {
    let bed = Bed::new();
    dies_with(&bed, |engine| {
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        save(&root, "old1", &model(1, 50_000));
        save(&root, "old2", &model(2, 50_000));
    });
    let next = bed.engine(options(&bed));
    let root = next.open_root(Path::new("/ckpt"), true, false).unwrap();
    bed.slow.gate().close(Op::CreateDir, "/new1");
    save(&root, "new1", &model(3, 50_000));
    save(&root, "new2", &model(4, 50_000));
    bed.slow.gate().wait_until_stuck(1);
    drain_until_found(&next);
    bed.slow.gate().open();
    assert!(next.close(LONG, &never).unwrap());
    assert_eq!(commits(&bed), ["new1", "old1", "old2", "new2"]);
}

#[test]
fn what_is_being_drained_counts_towards_the_budget() {
    const MIB: usize = 1 << 20;
    let bed = Bed::new();
    dies_with(&bed, |engine| {
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        save(&root, "global_step1", &model(1, 4 * MIB));
    });
    let next = bed.engine(EngineOptions { memory_bytes_max: Some(8 << 20), ..options(&bed) });
    bed.slow.gate().close(Op::CreateDir, "global_step1");
    bed.slow.gate().close(Op::Write, "global_step1");
    drain_until_found(&next);
    let root = next.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().wait_until_stuck(1);
    let saver = std::thread::spawn(move || {
        let share = root.begin("global_step2", BeginOptions::default()).unwrap();
        let state = model(2, 4 * MIB);
        let report = share.stage("model.pt", &plan_of(&state), false, &never).unwrap();
        (report, share.seal(&never).unwrap())
    });
    let waits = |event: &Event| matches!(event, Event::Log { message, .. } if message.contains("waiting until"));
    let mut events = std::iter::from_fn(|| next.next_event(Duration::from_secs(60)));
    assert!(events.any(|event| waits(&event)), "there is no room before the dead process's image has gone");
    bed.slow.gate().open();
    let (report, ticket) = saver.join().unwrap();
    assert!(report.wait_seconds > 0.0 && !report.streamed);
    assert!(committed(&ticket));
    assert!(next.memory().peak_bytes <= 8 << 20);
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

//! The memory tier: its budget, the wait for room, what streams, and what goes when room is needed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, plan_of, save, tags};
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::events::{Event, Level};
use relight_engine::image::Tier;
use relight_engine::save_file::MemoryKind;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_engine::{Error, ErrorKind};
use relight_testkit::{Fault, Op};

const MIB: usize = 1 << 20;

fn budget(bed: &Bed, mib: u64) -> EngineOptions {
    EngineOptions { memory_bytes_max: Some(mib << 20), ..options(bed) }
}

fn warnings(engine: &Engine) -> Vec<String> {
    let mut found = Vec::new();
    while let Some(event) = engine.next_event(Duration::ZERO) {
        match event {
            Event::Log { level: Level::Warning, message, .. } => found.push(message),
            Event::Closed => break,
            _ => {}
        }
    }
    found
}

#[test]
fn many_saves_never_pass_the_budget() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    for step in 0..20 {
        save(&root, &format!("global_step{step}"), &model(step, MIB * (1 + step as usize % 4)));
    }
    assert!(engine.flush(LONG, &never).unwrap());
    let memory = engine.memory();
    assert!(memory.peak_bytes <= 8 << 20 && memory.peak_bytes > 4 << 20, "{memory:?}");
    assert!(memory.reserved_bytes <= 8 << 20, "{memory:?}");
    assert!((1..=2).contains(&memory.checkpoints.len()), "memory_keep is 2: {memory:?}");
    for step in 0..20 {
        let tag = format!("global_step{step}");
        let image = root.open_image(&tag, "model.pt", Some(Tier::Persistent)).unwrap();
        assert_eq!(bytes_of(&image), model(step, MIB * (1 + step as usize % 4)), "{tag}");
    }
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_full_tier_waits_for_the_oldest_persist_and_says_which() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateDir, "global_step1");
    let first = save(&root, "global_step1", &model(1, 4 * MIB));
    bed.slow.gate().wait_until_stuck(1);
    let (reported, report) = mpsc::channel();
    let stager = thread::spawn({
        let root = root.clone();
        move || {
            let share = root.begin("global_step2", BeginOptions::default()).unwrap();
            let state = model(2, 4 * MIB);
            reported.send(share.stage("model.pt", &plan_of(&state), false, &never).unwrap()).unwrap();
            share.seal(&never).unwrap()
        }
    });
    let said = loop {
        if let Some(Event::Log { message, .. }) = engine.next_event(Duration::from_secs(60)) {
            break message;
        }
    };
    assert!(said.contains("waiting until global_step1"), "{said}");
    assert!(report.try_recv().is_err(), "it must not go on before the oldest is persisted");
    bed.slow.gate().open();
    let second = stager.join().unwrap();
    assert!(report.recv().unwrap().wait_seconds > 0.0);
    assert!(committed(&first) && committed(&second));
    assert!(engine.memory().peak_bytes <= 8 << 20);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn the_wait_for_room_can_be_interrupted_and_leaves_the_engine_whole() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateDir, "global_step1");
    let first = save(&root, "global_step1", &model(1, 4 * MIB));
    let share = root.begin("global_step2", BeginOptions::default()).unwrap();
    let state = model(2, 4 * MIB);
    let ctrl_c = || Err(Error::new(ErrorKind::Interrupted, "Ctrl-C"));
    let error = share.stage("model.pt", &plan_of(&state), false, &ctrl_c).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Interrupted);
    assert!(share.files().is_empty());
    bed.slow.gate().open();
    share.stage("model.pt", &plan_of(&state), false, &never).unwrap();
    assert!(committed(&first) && committed(&share.seal(&never).unwrap()));
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn an_image_larger_than_the_budget_streams_and_is_committed_at_the_seal() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 4));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let (large, small) = (model(1, 20 * MIB), model(2, 1000));
    let share = root.begin("global_step1", BeginOptions::default()).unwrap();
    let report = share.stage("model.pt", &plan_of(&large), true, &never).unwrap();
    assert!(report.streamed);
    assert_eq!(report.memory, MemoryKind::None);
    let report = share.stage("small.pt", &plan_of(&small), false, &never).unwrap();
    assert_eq!((report.streamed, report.memory), (false, MemoryKind::Shared));
    assert_eq!(bytes_of(&share.image("model.pt").unwrap()), large);
    assert!(root.list().unwrap().is_empty());
    let ticket = share.seal(&never).unwrap();
    assert_eq!(ticket.state(), TicketState::Committed, "nothing in memory could finish it after a kill");
    assert_eq!(root.list().unwrap()[0].tiers, [Tier::Persistent]);
    assert_eq!(bytes_of(&root.open_image("global_step1", "model.pt", None).unwrap()), large);
    assert_eq!(bytes_of(&root.open_image("global_step1", "small.pt", None).unwrap()), small);
    assert!(root.verify("global_step1", &never).unwrap().ok());
    assert!(engine.memory().peak_bytes <= 4 << 20);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_share_whose_own_files_hold_the_room_persists_them_early() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let share = root.begin("global_step1", BeginOptions::default()).unwrap();
    let files: Vec<_> = (0..6).map(|number| (format!("part{number}.pt"), model(number, 3 * MIB))).collect();
    for (name, state) in &files {
        assert!(!share.stage(name, &plan_of(state), false, &never).unwrap().streamed);
    }
    let ticket = share.seal(&never).unwrap();
    assert!(committed(&ticket));
    for (name, state) in &files {
        assert_eq!(&bytes_of(&root.open_image("global_step1", name, None).unwrap()), state, "{name}");
    }
    assert!(root.verify("global_step1", &never).unwrap().ok());
    let memory = engine.memory();
    assert!(memory.peak_bytes <= 8 << 20, "{memory:?}");
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_failed_write_of_a_stream_is_tried_again_on_a_new_file() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 4));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.faults.fail(Fault::with(5).on(Op::Write).in_path("global_step1").after(1).times(1));
    let state = model(1, 20 * MIB);
    let share = root.begin("global_step1", BeginOptions::default()).unwrap();
    assert!(share.stage("model.pt", &plan_of(&state), false, &never).unwrap().streamed);
    assert!(committed(&share.seal(&never).unwrap()));
    assert_eq!(bytes_of(&root.open_image("global_step1", "model.pt", None).unwrap()), state);

    bed.faults.fail(Fault::with(28).on(Op::Reserve).in_path("global_step2"));
    let share = root.begin("global_step2", BeginOptions::default()).unwrap();
    let error = share.stage("model.pt", &plan_of(&state), false, &never).unwrap_err();
    assert_eq!(error.kind, ErrorKind::StorageFull);
    assert!(error.message.contains("model.pt needs") && error.message.contains("bytes"), "{error}");
    drop(share);
    assert_eq!(tags(&root), ["global_step1"]);
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_staged_file_that_is_replaced_or_abandoned_gives_its_room_back() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let share = root.begin("t1", BeginOptions::default()).unwrap();
    for seed in 0..5 {
        share.stage("model.pt", &plan_of(&model(seed, 2 * MIB)), false, &never).unwrap();
    }
    assert_eq!(share.files(), ["model.pt"]);
    assert_eq!(bytes_of(&share.image("model.pt").unwrap()), model(4, 2 * MIB));
    assert!(engine.memory().used_bytes < 4 << 20);
    share.abandon();
    assert_eq!(engine.memory().used_bytes, 0);
    assert_eq!(share.seal(&never).unwrap_err().kind, ErrorKind::InvalidArgument);
    assert!(root.list().unwrap().is_empty());
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_reader_keeps_its_image_when_room_is_needed() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let state = model(1, 2 * MIB);
    assert!(committed(&save(&root, "global_step1", &state)));
    let image = root.open_image("global_step1", "model.pt", Some(Tier::Memory)).unwrap();
    for step in 2..8 {
        assert!(committed(&save(&root, &format!("global_step{step}"), &model(step, 2 * MIB))));
    }
    assert_eq!(bytes_of(&image), state);
    assert!(engine.memory().peak_bytes <= 8 << 20);
    assert!(engine.close(LONG, &never).unwrap());
    assert_eq!(bytes_of(&image), state, "also after the close");
}

#[test]
fn without_a_usable_memory_dir_private_memory_serves_and_it_is_said_once() {
    let bed = Bed::new();
    let missing = bed.regions.path().join("missing");
    let engine = bed.engine(EngineOptions { memory_dir: Some(missing), ..budget(&bed, 8) });
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    for step in 1..4 {
        let state = model(step, MIB);
        let share = root.begin(&format!("global_step{step}"), BeginOptions::default()).unwrap();
        let report = share.stage("model.pt", &plan_of(&state), false, &never).unwrap();
        assert_eq!(report.memory, MemoryKind::Private);
        let ticket = share.seal(&never).unwrap();
        assert_eq!(root.latest().unwrap(), Some(format!("global_step{step}")));
        assert!(committed(&ticket));
        assert_eq!(bytes_of(&root.open_image(ticket.tag().unwrap(), "model.pt", None).unwrap()), state);
    }
    let memory = engine.memory();
    assert_eq!(memory.kind, MemoryKind::Private);
    assert!(memory.reason.is_some() && memory.region.is_none());
    let said = warnings(&engine);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("private memory"), "{said:?}");
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_failed_image_leaves_when_its_room_is_needed_and_that_is_said() {
    let bed = Bed::new();
    let engine = bed.engine(budget(&bed, 8));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.faults.fail(Fault::with(5).on(Op::Write).in_path("global_step1"));
    assert!(!committed(&save(&root, "global_step1", &model(1, 4 * MIB))));
    assert_eq!(engine.memory().checkpoints[0].state, "failed");
    let other = engine.open_root(Path::new("/other"), true, true).unwrap();
    assert!(committed(&save(&other, "global_step2", &model(2, 4 * MIB))));
    assert!(warnings(&engine).iter().any(|text| text.contains("global_step1") && text.contains("room")));
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn names_that_would_be_one_file_and_options_without_a_meaning_are_refused() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let share = root.begin("t", BeginOptions::default()).unwrap();
    let state = model(1, 2000);
    share.stage("model.pt", &plan_of(&state), false, &never).unwrap();
    for name in ["Model.pt", ""] {
        let error = share.stage(name, &plan_of(&state), false, &never).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{name:?}");
    }
    let refused = [
        BeginOptions { keep: Some(0), ..BeginOptions::default() },
        BeginOptions { rank: 1, world_size: 2, ..BeginOptions::default() },
    ];
    for options in refused {
        assert_eq!(root.begin("t", options).unwrap_err().kind, ErrorKind::InvalidArgument);
    }
    assert_eq!(root.begin("../t", BeginOptions::default()).unwrap_err().kind, ErrorKind::InvalidArgument);
    let empty = root.begin("u", BeginOptions::default()).unwrap();
    assert_eq!(empty.seal(&never).unwrap_err().kind, ErrorKind::InvalidArgument);
}

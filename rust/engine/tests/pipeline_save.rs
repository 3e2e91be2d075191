//! The way of a save: stage, seal, persist, commit; what readers see meanwhile and after.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, plan_of, save, save_with, tags};
use relight_engine::ErrorKind;
use relight_engine::disk::Disk;
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::image::Tier;
use relight_engine::save_file::MemoryKind;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_testkit::hook::{Call, Hook, HookedDisk, Verdict};
use relight_testkit::{MemoryDisk, Op};

#[test]
fn a_save_is_readable_from_memory_at_the_seal_and_from_the_disk_after_the_commit() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateFile, ".relight-tmp");
    let state = model(1, 300_000);

    let share = root.begin("global_step5", BeginOptions::default()).unwrap();
    let report = share.stage("model.pt", &plan_of(&state), true, &never).unwrap();
    assert_eq!(report.memory, MemoryKind::Shared);
    assert!(root.list().unwrap().is_empty(), "a share is invisible before its seal");
    assert_eq!(root.latest().unwrap(), None);
    let ticket = share.seal(&never).unwrap();

    let listed = root.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].tag.as_str(), listed[0].step, listed[0].sequence), ("global_step5", Some(5), 1));
    assert_eq!(listed[0].tiers, [Tier::Memory]);
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step5"));
    let image = root.open_image("global_step5", "model.pt", None).unwrap();
    assert_eq!(image.tier(), Tier::Memory);
    assert_eq!(bytes_of(&image), state);
    drop(image);

    bed.slow.gate().open();
    assert!(ticket.wait(Some(Duration::from_secs(60)), &never).unwrap());
    ticket.check().unwrap();
    assert_eq!(ticket.state(), TicketState::Committed);
    let listed = root.list().unwrap();
    assert_eq!(listed[0].tiers, [Tier::Memory, Tier::Persistent]);
    let image = root.open_image("global_step5", "model.pt", Some(Tier::Persistent)).unwrap();
    assert_eq!(image.tier(), Tier::Persistent);
    assert_eq!(bytes_of(&image), state);
    assert!(root.verify("global_step5", &never).unwrap().ok());
    assert!(engine.close(Some(Duration::from_secs(60)), &never).unwrap());
    assert!(bed.region_files().is_empty(), "a clean close leaves no region");
}

#[test]
fn memory_serves_what_is_damaged_on_the_disk_but_not_what_was_deleted_or_overtaken() {
    let bed = Bed::new();
    let engine = bed.engine(EngineOptions { memory_keep: 3, ..options(&bed) });
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    for (tag, seed) in [("damaged", 1), ("deleted", 2), ("overtaken", 3)] {
        assert!(committed(&save(&root, tag, &model(seed, 50_000))));
    }
    bed.memory.tamper(Path::new("/ckpt/damaged/model.pt"), |bytes| bytes.truncate(100));
    bed.memory.remove_all(Path::new("/ckpt/deleted"));
    let elsewhere = Bed::new();
    let other = Engine::new(options(&elsewhere), bed.disk(), Arc::clone(&bed.clock)).unwrap();
    let others = other.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&others, "overtaken", &model(4, 50_000))));
    assert!(other.close(LONG, &never).unwrap());

    let image = root.open_image("damaged", "model.pt", None).unwrap();
    assert_eq!((image.tier(), bytes_of(&image)), (Tier::Memory, model(1, 50_000)));
    assert_eq!(root.open_image("deleted", "model.pt", None).unwrap_err().kind, ErrorKind::NotFound);
    let image = root.open_image("overtaken", "model.pt", None).unwrap();
    assert_eq!((image.tier(), bytes_of(&image)), (Tier::Persistent, model(4, 50_000)));
    assert!(!tags(&root).contains(&"deleted".to_owned()));
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_second_save_to_a_tag_adds_its_files_and_each_tier_says_so() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "t", &model(1, 50_000))));
    bed.slow.gate().close(Op::CreateDir, "/ckpt/t/");
    let share = root.begin("t", BeginOptions { best: true, ..BeginOptions::default() }).unwrap();
    share.stage("optim.pt", &plan_of(&model(2, 50_000)), false, &never).unwrap();
    let ticket = share.seal(&never).unwrap();
    let names = || {
        let listed = root.list().unwrap();
        let files: Vec<String> = listed[0].files.iter().map(|file| file.name.clone()).collect();
        (listed.len(), files, listed[0].sequence, listed[0].best, listed[0].tiers.clone())
    };
    let files = vec!["model.pt".to_owned(), "optim.pt".to_owned()];
    assert_eq!(names(), (1, files.clone(), 2, true, vec![Tier::Memory]));
    assert_eq!(bytes_of(&root.open_image("t", "model.pt", None).unwrap()), model(1, 50_000));
    assert_eq!(bytes_of(&root.open_image("t", "optim.pt", None).unwrap()), model(2, 50_000));
    bed.slow.gate().open();
    assert!(committed(&ticket));
    assert_eq!(names(), (1, files, 2, true, vec![Tier::Memory, Tier::Persistent]));
    assert!(engine.close(LONG, &never).unwrap());
}

/// Notes the looks at the manifest of one tag.
#[derive(Debug, Default)]
struct LooksAtFirst(Mutex<usize>);

impl Hook for LooksAtFirst {
    fn before(&self, call: &Call) -> Verdict {
        *self.0.lock().unwrap() += usize::from(call.path.ends_with("global_step1/.relight/manifest.json"));
        Verdict::Go
    }
}

/// There may be thousands of checkpoints, on a storage where each look is a round trip.
#[test]
fn a_commit_looks_at_each_older_checkpoint_once() {
    let bed = Bed::new();
    let disk = HookedDisk::over(Arc::new(MemoryDisk::new()), LooksAtFirst::default());
    let engine = Engine::new(options(&bed), Arc::new(disk.clone()), Arc::clone(&bed.clock)).unwrap();
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let keep = || BeginOptions { keep: Some(3), ..BeginOptions::default() };
    for tag in ["global_step1", "global_step2"] {
        assert!(committed(&save_with(&root, tag, &model(1, 5_000), keep())));
    }
    *disk.hook().0.lock().unwrap() = 0;
    assert!(committed(&save_with(&root, "global_step3", &model(1, 5_000), keep())));
    assert_eq!(*disk.hook().0.lock().unwrap(), 1);
    assert!(committed(&save_with(&root, "global_step4", &model(1, 5_000), keep())));
    assert_eq!(tags(&root), ["global_step2", "global_step3", "global_step4"]);
    assert!(engine.close(LONG, &never).unwrap());
}

/// Notes each call that another thread than the persist thread makes.
#[derive(Debug, Default)]
struct CallersCalls(Mutex<Vec<Call>>);

impl Hook for CallersCalls {
    fn before(&self, call: &Call) -> Verdict {
        if std::thread::current().name() != Some("relight-persist") {
            self.0.lock().unwrap().push(call.clone());
        }
        Verdict::Go
    }
}

/// Training is blocked for the copy, never for the storage: a mount may hang.
#[test]
fn a_save_makes_no_call_to_the_disk_in_the_callers_thread() {
    let bed = Bed::new();
    let disk = HookedDisk::over(Arc::new(MemoryDisk::new()), CallersCalls::default());
    let calls = || std::mem::take(&mut *disk.hook().0.lock().unwrap());
    let engine = Engine::new(options(&bed), Arc::new(disk.clone()), Arc::clone(&bed.clock)).unwrap();
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    calls();
    let state = model(1, 50_000);

    let share = root.begin("global_step1", BeginOptions::default()).unwrap();
    assert!(!calls().is_empty(), "the first save of a run looks which numbers others have used");
    share.stage("model.pt", &plan_of(&state), true, &never).unwrap();
    let first = share.seal(&never).unwrap();
    let mut tickets = vec![first.clone()];
    tickets.push(save(&root, "global_step2", &state)); // perhaps before the first is on the disk
    assert!(first.wait(LONG, &never).unwrap());
    tickets.push(save(&root, "global_step3", &state));
    tickets.push(save(&root, "global_step1", &state));
    assert_eq!(calls(), []);

    assert!(tickets.iter().all(committed));
    assert!(engine.close(LONG, &never).unwrap());
}

#[test]
fn a_tag_that_differs_in_case_only_is_refused_at_the_call_for_as_long_as_the_other_is_there() {
    let bed = Bed::new();
    let earlier = bed.engine(options(&bed));
    let root = earlier.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "best", &model(1, 50_000))));
    assert!(earlier.close(LONG, &never).unwrap());

    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let refused = |tag: &str| root.begin(tag, BeginOptions::default()).unwrap_err();
    assert_eq!(refused("Best").kind, ErrorKind::InvalidArgument);
    assert!(refused("Best").message.contains("case only"));
    drop(root.begin("best", BeginOptions::default()).unwrap());
    // committed since by this process
    assert!(committed(&save(&root, "last", &model(2, 50_000))));
    engine.set_memory_keep(0);
    assert!(committed(&save(&root, "other", &model(3, 50_000))));
    assert_eq!(refused("LAST").kind, ErrorKind::InvalidArgument);
    // under way
    let share = root.begin("new", BeginOptions::default()).unwrap();
    assert_eq!(refused("NEW").kind, ErrorKind::InvalidArgument);
    share.abandon();
    drop(root.begin("NEW", BeginOptions::default()).unwrap());
    // deleted, by another process too
    root.delete("last", &never).unwrap();
    bed.memory.remove_all(Path::new("/ckpt/best"));
    assert!(committed(&save(&root, "LAST", &model(4, 50_000))));
    assert!(committed(&save(&root, "Best", &model(5, 50_000))));
    assert_eq!(tags(&root), ["other", "LAST", "Best"]);
}

/// A job that resumes must not start from nothing because its root is broken.
#[test]
fn a_root_in_whose_place_a_file_lies_is_an_error_and_no_empty_root() {
    let bed = Bed::new();
    let engine = bed.engine(EngineOptions { memory_keep: 0, ..options(&bed) });
    let root = engine.open_root(Path::new("/around/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "global_step1", &model(1, 50_000))));
    for place in ["/around/ckpt", "/around"] {
        bed.memory.remove_all(Path::new(place));
        bed.memory.create_file(Path::new(place)).unwrap();
        let errors = [
            root.list().unwrap_err(),
            root.latest().unwrap_err(),
            root.problems().unwrap_err(),
            root.open_image("global_step1", "model.pt", Some(Tier::Persistent)).unwrap_err(),
            engine.open_root(Path::new("/around/ckpt"), false, true).unwrap_err(),
            engine.open_root(Path::new("/around/ckpt"), true, true).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
            assert!(error.message.contains("/around/ckpt"), "{error}");
        }
    }
    // gone is another thing: it may have been deleted, and the next save makes it
    bed.memory.remove_all(Path::new("/around"));
    assert!(root.list().unwrap().is_empty());
}

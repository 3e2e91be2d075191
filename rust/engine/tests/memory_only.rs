//! A root without a persistent tier (Nebula without a path): complete in memory, dropped by age, found by a successor.

mod pipeline;

use std::path::Path;

use pipeline::{Bed, bytes_of, committed, model, options, plan_of, save, tags};
use relight_engine::ErrorKind;
use relight_engine::engine::EngineOptions;
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::wait::never;

const NAME: &str = "memory:/somewhere/run";

/// Guards: a root that has no directory was queued for a disk, and reported as failed.
#[test]
fn a_save_is_complete_at_its_seal_and_touches_no_disk() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new(NAME), true, true).unwrap();
    assert!(tags(&root).is_empty());
    let state = model(1, 100_000);
    let ticket = save(&root, "global_step1", &state);
    assert!(committed(&ticket));
    let listed = root.list().unwrap();
    assert_eq!((listed.len(), listed[0].tiers.as_slice()), (1, [Tier::Memory].as_slice()));
    assert_eq!(bytes_of(&root.open_image("global_step1", "model.pt", None).unwrap()), state);
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step1"));
    let on_disk = root.open_image("global_step1", "model.pt", Some(Tier::Persistent));
    assert_eq!(on_disk.unwrap_err().kind, ErrorKind::NotFound);
    assert!(engine.close(None, &never).unwrap(), "nothing is left to persist");
    assert!(bed.region_files().is_empty(), "a normal end leaves nothing in shared memory");
}

/// Guards: retention that counts saves and not checkpoints lost files of a tag that was saved in two rounds.
#[test]
fn the_oldest_checkpoints_go_and_a_tag_keeps_its_files_of_all_rounds() {
    let bed = Bed::new();
    let engine = bed.engine(EngineOptions { memory_keep: 2, ..options(&bed) });
    let root = engine.open_root(Path::new(NAME), true, true).unwrap();
    for step in 1..=5 {
        for file in ["a", "b"] {
            let share = root.begin(&format!("global_step{step}"), BeginOptions::default()).unwrap();
            share.stage(file, &plan_of(&model(step, 5000)), false, &never).unwrap();
            assert!(committed(&share.seal(&never).unwrap()));
        }
    }
    assert_eq!(tags(&root), ["global_step4", "global_step5"]);
    for step in [4, 5] {
        for file in ["a", "b"] {
            let image = root.open_image(&format!("global_step{step}"), file, None).unwrap();
            assert_eq!(bytes_of(&image), model(step, 5000));
        }
    }
    for seed in 10..20 {
        save(&root, "global_step5", &model(seed, 5000));
    }
    assert_eq!(engine.memory().checkpoints.len(), 2 + 2 + 1, "what was replaced is freed");
}

/// Guards: without room for one more, a save failed although older checkpoints could have gone.
#[test]
fn room_is_made_by_dropping_the_oldest_and_what_never_fits_is_refused() {
    let bed = Bed::new();
    let engine = bed.engine(EngineOptions { memory_bytes_max: Some(4 << 20), memory_keep: 100, ..options(&bed) });
    let root = engine.open_root(Path::new(NAME), true, true).unwrap();
    for step in 1..=6 {
        assert!(committed(&save(&root, &format!("global_step{step}"), &model(step, 1 << 20))));
    }
    assert_eq!(tags(&root).last().map(String::as_str), Some("global_step6"));
    assert!(engine.memory().peak_bytes <= 4 << 20);
    let share = root.begin("global_step7", BeginOptions::default()).unwrap();
    let error = share.stage("model.pt", &plan_of(&model(7, 8 << 20)), false, &never).unwrap_err();
    assert_eq!(error.kind, ErrorKind::StorageFull);
    assert!(error.message.contains("no storage path is set"), "{error}");
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step6"));
}

/// Guards: memory of a dead process was dropped, or shown to another job of the same user.
#[test]
fn after_a_death_only_who_opens_the_same_name_has_them() {
    let bed = Bed::new();
    let state = model(3, 50_000);
    {
        let dead = bed.engine(options(&bed));
        let root = dead.open_root(Path::new(NAME), true, true).unwrap();
        save(&root, "global_step3", &state);
        // Dropped without `close`, as by SIGKILL: the region stays.
    }
    let stranger = bed.engine(options(&bed));
    let other = stranger.open_root(Path::new("memory:/somewhere/other"), true, true).unwrap();
    assert!(tags(&other).is_empty());
    assert!(stranger.close(None, &never).unwrap());
    assert_eq!(bed.region_files().len(), 1, "it stays for whoever it belongs to");

    let successor = bed.engine(options(&bed));
    let root = successor.open_root(Path::new(NAME), true, true).unwrap();
    assert_eq!(tags(&root), ["global_step3"]);
    assert_eq!(bytes_of(&root.open_image("global_step3", "model.pt", None).unwrap()), state);
    save(&root, "global_step2", &model(2, 5000));
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step2"), "a new run outranks what it went back behind");
    assert!(successor.close(None, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

/// Guards: two rounds of one tag (as DeepSpeed's `save_16bit_model` after `save_checkpoint`) counted as two checkpoints.
#[test]
fn retention_in_memory_counts_checkpoints_also_of_a_root_on_disk() {
    let bed = Bed::new();
    let engine = bed.engine(EngineOptions { memory_keep: 2, ..options(&bed) });
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    for step in 1..=4 {
        for file in ["a", "b", "b"] {
            let share = root.begin(&format!("global_step{step}"), BeginOptions::default()).unwrap();
            share.stage(file, &plan_of(&model(step, 5000)), false, &never).unwrap();
            assert!(committed(&share.seal(&never).unwrap()));
        }
    }
    let in_memory = |listed: &relight_engine::tags::Listed| listed.tiers.contains(&Tier::Memory);
    let tags: Vec<_> = root.list().unwrap().into_iter().filter(in_memory).map(|listed| listed.tag).collect();
    assert_eq!(tags, ["global_step3", "global_step4"]);
    assert_eq!(engine.memory().checkpoints.len(), 4, "what was replaced is freed");
}

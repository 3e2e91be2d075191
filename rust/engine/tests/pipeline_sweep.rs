//! Every call of the disk fails once, or for ever: no sequence of saves ends with a checkpoint that is not what was saved.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, plan_of, save};
use relight_engine::engine::EngineOptions;
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::wait::never;
use relight_testkit::Fault;

fn sweep(times: u64, all_committed: bool) {
    let mut tried = 0;
    for call in 0.. {
        let bed = Bed::new();
        let engine = bed.engine(EngineOptions { attempts_max: 2, ..options(&bed) });
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        assert!(committed(&save(&root, "global_step1", &model(1, 3000))));
        bed.faults.fail(Fault::with(5).on_changes().after(call).times(times).short_write());
        let tickets = [save(&root, "global_step2", &model(2, 3000)), save(&root, "global_step1", &model(3, 3000))];
        let outcomes = tickets.each_ref().map(committed);
        let failed = bed.faults.failed();
        bed.faults.heal();
        if failed == 0 {
            break;
        }
        tried += 1;
        if all_committed {
            assert_eq!(outcomes, [true, true], "call {call}: one failure is tried again");
        }
        let wanted = |tag: &str| match (tag, outcomes) {
            ("global_step1", [_, false]) => vec![1],
            ("global_step1", _) => vec![3],
            _ => vec![2],
        };
        let check = |tag: &str| {
            let image = root.open_image(tag, "model.pt", Some(Tier::Persistent)).unwrap();
            let found = bytes_of(&image);
            // A failure after the rename of the manifest may be told of a save that is there all the same.
            let may = wanted(tag).into_iter().chain((!all_committed).then_some(3)).map(|seed| model(seed, 3000));
            let found_seed = found[0].1[0];
            assert!(
                may.into_iter().any(|state| state == found),
                "call {call}: {tag} is {found_seed}: {:?}",
                root.list()
            );
            assert!(root.verify(tag, &never).unwrap().ok(), "call {call}: {tag}");
        };
        check("global_step1");
        if outcomes[0] {
            check("global_step2");
        }
        // What failed stays for the next process, which brings everything to its place.
        engine.close(LONG, &never).unwrap();
        drop(engine);
        let next = bed.engine(options(&bed));
        let root = next.open_root(Path::new("/ckpt"), true, true).unwrap();
        assert!(next.close(LONG, &never).unwrap(), "call {call}");
        for (tag, seed) in [("global_step1", 3), ("global_step2", 2)] {
            let image = root.open_image(tag, "model.pt", Some(Tier::Persistent));
            if outcomes == [false, true] && tag == "global_step2" {
                // A newer commit of the root made the failed one useless.
                continue;
            }
            assert_eq!(bytes_of(&image.unwrap()), model(seed, 3000), "call {call}: {tag}");
        }
        assert!(bed.region_files().is_empty(), "call {call}");
    }
    assert!(tried > 30, "only {tried} calls were tried");
}

#[test]
fn one_failure_at_any_call_costs_an_attempt_and_nothing_else() {
    sweep(1, true);
}

#[test]
fn a_disk_that_fails_for_ever_from_any_call_on_leaves_only_whole_checkpoints_and_the_next_process_finishes() {
    sweep(u64::MAX, false);
}

/// Guards: the retry of a commit began a new generation, without the files that were durable only in the old one.
#[test]
fn a_share_with_streamed_files_is_whole_after_one_failure_at_any_call() {
    let (large, small) = (model(1, 1_200_000), model(2, 3000));
    let mut tried = 0;
    for call in 0.. {
        let bed = Bed::new();
        let engine = bed.engine(EngineOptions { memory_bytes_max: Some(1 << 20), attempts_max: 2, ..options(&bed) });
        let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
        assert!(committed(&save(&root, "global_step1", &model(3, 3000))));
        bed.faults.fail(Fault::with(5).on_changes().after(call).times(1).short_write());
        let share = root.begin("global_step2", BeginOptions::default()).unwrap();
        assert!(share.stage("large.pt", &plan_of(&large), false, &never).unwrap().streamed);
        assert!(!share.stage("small.pt", &plan_of(&small), false, &never).unwrap().streamed);
        let ticket = share.seal(&never).unwrap();
        assert!(committed(&ticket), "call {call}: {:?}", ticket.check());
        if bed.faults.failed() == 0 {
            break;
        }
        tried += 1;
        assert!(root.verify("global_step2", &never).unwrap().ok(), "call {call}");
        assert_eq!(bytes_of(&root.open_image("global_step2", "large.pt", None).unwrap()), large, "call {call}");
        assert_eq!(bytes_of(&root.open_image("global_step2", "small.pt", None).unwrap()), small, "call {call}");
        assert!(engine.close(LONG, &never).unwrap(), "call {call}");
    }
    assert!(tried > 30, "only {tried} calls were tried");
}

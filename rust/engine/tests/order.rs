//! Which checkpoint is the newest, which ones go, and what is no checkpoint.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use relight_engine::clock::Clock;
use relight_engine::disk::{Disk, PosixDisk};
use relight_engine::error::ErrorKind;
use relight_engine::root::{RootOptions, RootStore};
use relight_testkit::{ManualClock, MemoryDisk};
use support::{ROOT, facts, files, load, root_on, save, save_as, save_in_run, tags};

const MODEL: &[(&str, &[u8])] = &[("model.pt", b"the model")];

fn fresh() -> (MemoryDisk, RootStore) {
    let disk = MemoryDisk::new();
    let root = root_on(Arc::new(disk.clone())).unwrap();
    (disk, root)
}

fn save_step(root: &RootStore, step: i64) -> String {
    let tag = format!("global_step{step}");
    save(root, &tag, &files(MODEL)).unwrap();
    tag
}

fn save_and_retain(root: &RootStore, tag: &str, run: u64, keep: usize) -> Vec<String> {
    save_in_run(root, tag, &files(MODEL), run).unwrap();
    let retained = root.retain(keep, tag, &[]).unwrap();
    assert!(retained.failed.is_empty(), "{:?}", retained.failed);
    root.update_latest_hint().unwrap();
    retained.deleted
}

fn latest(root: &RootStore) -> String {
    root.latest().unwrap().unwrap().tag
}

fn hint(disk: &MemoryDisk) -> String {
    String::from_utf8(disk.files(Path::new(ROOT))[&Path::new(ROOT).join("latest")].clone()).unwrap()
}

/// Guards: order by the text of the tags, or by the moment of the save.
#[test]
fn test_bl_095_steps_are_ordered_by_number_in_whatever_order_they_were_saved() {
    let (disk, root) = fresh();
    for step in [500, 9, 10_000, 10, 2500, 99, 1000, 100] {
        save_step(&root, step);
    }
    let expected: Vec<_> =
        [9, 10, 99, 100, 500, 1000, 2500, 10_000].map(|step| format!("global_step{step}")).into_iter().collect();
    assert_eq!(tags(&root), expected);
    assert_eq!(latest(&root), "global_step10000");
    assert_eq!(hint(&disk), "global_step10000");
}

/// Guards: a tag without a step, or a directory of somebody else, taken for the newest.
#[test]
fn test_bl_096_order_is_by_value_and_what_has_no_step_or_is_foreign_is_never_newest() {
    let (disk, root) = fresh();
    for tag in ["100000", "09000000", "0900000", "best"] {
        save(&root, tag, &files(MODEL)).unwrap();
    }
    for name in ["handpicked", "10.bak"] {
        disk.create_dir(&root.path().join(name)).unwrap();
        disk.create_file(&root.path().join(name).join("model.pt")).unwrap();
    }
    assert_eq!(tags(&root), ["10.bak", "handpicked", "best", "100000", "0900000", "09000000"]);
    assert_eq!(latest(&root), "09000000");
    let foreign: Vec<_> = root.list().unwrap().into_iter().filter(|found| found.is_foreign()).map(|f| f.tag).collect();
    assert_eq!(foreign, ["10.bak", "handpicked"]);
}

/// Guards: a root with foreign checkpoints only that has a latest.
#[test]
fn what_relight_did_not_write_is_never_the_latest() {
    let (disk, root) = fresh();
    disk.create_dir(&root.path().join("global_step7")).unwrap();
    disk.create_file(&root.path().join("global_step7/model.pt")).unwrap();
    assert_eq!(tags(&root), ["global_step7"]);
    assert!(root.latest().unwrap().is_none());
    root.update_latest_hint().unwrap();
    assert!(!disk.files(Path::new(ROOT)).contains_key(&Path::new(ROOT).join("latest")));
    assert_eq!(root.delete("global_step7").unwrap_err().kind, ErrorKind::InvalidArgument);
    assert_eq!(root.delete("global_step8").unwrap_err().kind, ErrorKind::NotFound);
}

/// What befalls the directory of a tag.
type Damage<'a> = &'a dyn Fn(&MemoryDisk, &Path);

/// Guards: a damaged newest checkpoint that is resumed from, or whose loss is not told.
#[test]
fn test_bl_097_a_damaged_newest_is_passed_over_and_named_with_its_reason() {
    let damages: [(&str, Damage); 6] = [
        ("manifest.json", &|disk, tag| disk.remove_file(&tag.join(".relight/manifest.json")).unwrap()),
        ("model.pt", &|disk, tag| disk.remove_file(&tag.join("model.pt")).unwrap()),
        ("model.pt", &|disk, tag| disk.tamper(&tag.join("model.pt"), Vec::clear)),
        ("manifest", &|disk, tag| disk.tamper(&tag.join(".relight/manifest.json"), |bytes| bytes[30] ^= 1)),
        ("manifest", &|disk, tag| disk.tamper(&tag.join(".relight/manifest.json"), |bytes| bytes.truncate(40))),
        ("empty directory", &|disk, tag| {
            disk.remove_all(tag);
            disk.create_dir(tag).unwrap();
        }),
    ];
    for (index, (reason, damage)) in damages.iter().enumerate() {
        let (disk, root) = fresh();
        save_step(&root, 200);
        save_step(&root, 300);
        assert_eq!(latest(&root), "global_step300");
        damage(&disk, &root.path().join("global_step300"));
        assert_eq!(latest(&root), "global_step200", "damage {index}");
        let problems = root.problems().unwrap();
        assert_eq!(problems.len(), 1, "damage {index}: {problems:?}");
        assert_eq!(problems[0].tag, "global_step300");
        assert!(problems[0].reason.contains(reason), "damage {index}: {problems:?}");
        let error = root.find("global_step300").unwrap_err();
        assert_eq!((error.kind, error.tag.as_deref()), (ErrorKind::Corrupt, Some("global_step300")), "damage {index}");
        assert!(error.message.contains(reason), "damage {index}: {error}");
        assert!(root.open_file("global_step300", "model.pt").is_err());
        // and saving it again makes it good
        save_step(&root, 300);
        assert_eq!(load(&root, "global_step300"), files(MODEL), "damage {index}");
        assert_eq!((latest(&root).as_str(), root.problems().unwrap().len()), ("global_step300", 0), "damage {index}");
    }
}

/// Guards: an order that follows the clock.
#[test]
fn test_bl_100_a_clock_that_stands_or_goes_back_changes_no_order() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let clock = Arc::new(ManualClock::new(Duration::from_secs(1_000_000)));
    let options = RootOptions { create: true, lock_wait: Duration::ZERO };
    let root = RootStore::open(disk, Arc::clone(&clock) as Arc<dyn Clock>, Path::new(ROOT), options).unwrap();
    for step in 1..=20 {
        clock.set_wall(Duration::from_secs(1_000_000 - (step / 5) as u64 * 1000));
        save_step(&root, step);
    }
    assert_eq!(tags(&root), (1..=20).map(|step| format!("global_step{step}")).collect::<Vec<_>>());
    // and for tags without steps, the sequence of commits
    for tag in ["zeta", "alpha", "mid"] {
        save(&root, tag, &files(MODEL)).unwrap();
    }
    assert_eq!(tags(&root)[..3], ["zeta", "alpha", "mid"]);
}

/// Guards: retention that goes by file times.
#[test]
fn test_bl_101_the_oldest_by_step_goes_and_the_newest_never() {
    let (_, root) = fresh();
    let mut deleted = Vec::new();
    for (step, newest) in [(300, 300), (100, 300), (200, 300), (500, 500), (400, 500)] {
        deleted.extend(save_and_retain(&root, &format!("global_step{step}"), 1, 2));
        assert_eq!(latest(&root), format!("global_step{newest}"));
    }
    assert_eq!(tags(&root), ["global_step400", "global_step500"]);
    assert_eq!(deleted, ["global_step100", "global_step200", "global_step300"]);
}

/// Guards: a new run's checkpoints deleted at once, because an older run had higher steps.
#[test]
fn test_bl_110_what_a_new_run_commits_stays_and_the_older_higher_steps_go() {
    let (disk, root) = fresh();
    for step in [500, 600, 700] {
        assert!(save_and_retain(&root, &format!("global_step{step}"), 1, 3).is_empty());
    }
    assert_eq!(save_and_retain(&root, "global_step100", 2, 3), ["global_step500"]);
    assert_eq!(latest(&root), "global_step100");
    let left_behind: Vec<_> =
        root.list().unwrap().into_iter().filter(|found| found.left_behind).map(|f| f.tag).collect();
    assert_eq!(left_behind, ["global_step600", "global_step700"]);
    assert_eq!(save_and_retain(&root, "global_step200", 2, 3), ["global_step600"]);
    assert_eq!(save_and_retain(&root, "global_step300", 2, 3), ["global_step700"]);
    assert_eq!(tags(&root), ["global_step100", "global_step200", "global_step300"]);
    assert_eq!(hint(&disk), "global_step300");
}

/// Guards: a save with an older step that is deleted by its own retention, or a tag saved again that is lost.
#[test]
fn test_bl_111_an_older_step_just_committed_stays_and_the_same_step_again_is_replaced() {
    let (_, root) = fresh();
    save_and_retain(&root, "global_step125", 1, 2);
    save_and_retain(&root, "global_step5", 1, 2);
    assert_eq!(tags(&root), ["global_step5", "global_step125"]);
    assert_eq!(save_and_retain(&root, "global_step130", 1, 2), ["global_step5"]);
    let again = files(&[("model.pt", b"the second 125")]);
    save(&root, "global_step125", &again).unwrap();
    assert!(root.retain(2, "global_step125", &[]).unwrap().deleted.is_empty());
    assert_eq!(tags(&root), ["global_step125", "global_step130"]);
    assert_eq!(load(&root, "global_step125"), again);
    // one more than keep, for as long as it is the one just committed
    assert!(save_and_retain(&root, "global_step7", 1, 2).is_empty());
    assert_eq!(tags(&root), ["global_step7", "global_step125", "global_step130"]);
    assert_eq!(save_and_retain(&root, "global_step131", 1, 2), ["global_step7", "global_step125"]);
}

/// Guards: retention that counts only what this process saved.
#[test]
fn test_bl_114_retention_knows_the_checkpoints_of_earlier_processes() {
    let disk = MemoryDisk::new();
    for start in [0, 3] {
        let root = root_on(Arc::new(disk.clone())).unwrap();
        for step in start + 1..=start + 3 {
            save_and_retain(&root, &format!("global_step{step}"), 1 + start, 3);
        }
    }
    let root = root_on(Arc::new(disk)).unwrap();
    assert_eq!(tags(&root), ["global_step4", "global_step5", "global_step6"]);
    assert_eq!(root.highest().unwrap(), (4, 6));
}

/// Guards: a value of keep that would delete everything; a pinned, best or foreign checkpoint that goes.
#[test]
fn retention_leaves_pinned_best_foreign_and_stepless_ones_alone() {
    let (disk, root) = fresh();
    assert_eq!(root.retain(0, "x", &[]).unwrap_err().kind, ErrorKind::InvalidArgument);
    disk.create_dir(&root.path().join("global_step1")).unwrap();
    disk.create_file(&root.path().join("global_step1/model.pt")).unwrap();
    save(&root, "handpicked", &files(MODEL)).unwrap();
    for step in 2..=5 {
        let mut facts = facts(&format!("global_step{step}"), 1, step);
        facts.best = step <= 3;
        save_as(&root, &format!("global_step{step}"), &files(MODEL), facts).unwrap();
    }
    let retained = root.retain(1, "global_step5", &["global_step4".to_owned()]).unwrap();
    assert_eq!(retained.deleted, ["global_step2"]);
    assert_eq!(tags(&root), ["global_step1", "handpicked", "global_step3", "global_step4", "global_step5"]);
    save(&root, "other", &files(MODEL)).unwrap();
    assert_eq!(root.retain(1, "other", &[]).unwrap().deleted, ["handpicked", "global_step4"]);
}

/// Guards: a deletion that takes files of others, or follows a link and leaves it dangling.
#[test]
fn test_bl_166_links_work_dangling_ones_are_named_and_foreign_files_survive_a_deletion() {
    let (disk, _) = fresh();
    disk.create_dir("/elsewhere".as_ref()).unwrap();
    disk.create_dir("/elsewhere/tag".as_ref()).unwrap();
    disk.link("/runs/exp1".as_ref(), "/link".as_ref());
    let options = RootOptions { create: true, lock_wait: Duration::ZERO };
    let root = RootStore::open(
        Arc::new(disk.clone()),
        Arc::new(ManualClock::new(Duration::ZERO)),
        Path::new("/link"),
        options,
    )
    .unwrap();
    assert_eq!(root.path(), Path::new(ROOT));
    disk.link("/elsewhere/tag".as_ref(), &root.path().join("global_step1"));
    disk.link("/nowhere".as_ref(), &root.path().join("global_step9"));
    save_step(&root, 1);
    save_step(&root, 2);
    assert_eq!(tags(&root), ["global_step1", "global_step2"]);
    assert_eq!(load(&root, "global_step1"), files(MODEL));
    let problems = root.problems().unwrap();
    assert_eq!((problems.len(), problems[0].tag.as_str()), (1, "global_step9"));
    assert!(problems[0].reason.contains("link to nothing"));
    root.delete("global_step1").unwrap();
    assert!(disk.metadata("/elsewhere/tag".as_ref()).is_err());
    assert!(root.problems().unwrap().iter().all(|problem| problem.tag != "global_step1"), "the link was left dangling");
    disk.create_file(&root.path().join("global_step2/notes.txt")).unwrap();
    root.delete("global_step2").unwrap();
    let left: Vec<_> = disk.files(&root.path().join("global_step2")).into_keys().collect();
    assert_eq!(left, [root.path().join("global_step2/notes.txt")]);
}

/// Guards: a file asked for by a wrong name, answered without the names that there are.
#[test]
fn what_is_not_there_is_not_found_with_what_there_is() {
    let (_, root) = fresh();
    save(&root, "global_step1", &files(&[("model.pt", b"m"), ("rng state/0", b"r")])).unwrap();
    let error = root.open_file("global_step1", "optim.pt").unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("model.pt") && error.message.contains("rng state/0"), "{error}");
    let error = root.find("global_step2").unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("global_step1"), "{error}");
    assert_eq!(root.resolve("global_step1", "rng state/0").unwrap().record.path, "rng state%2F0");
}

/// Guards: a manifest that was replaced, or a tree that was moved, answered from the cache.
#[test]
fn the_cache_sees_what_other_processes_commit_and_trees_may_be_moved() {
    let (disk, root) = fresh();
    save_step(&root, 1);
    assert_eq!(root.find("global_step1").unwrap().sequence, 1);
    let other = root_on(Arc::new(disk.clone())).unwrap();
    save(&other, "global_step1", &files(&[("model.pt", b"another")])).unwrap();
    assert_eq!(root.find("global_step1").unwrap().sequence, 2);
    other.delete("global_step1").unwrap();
    assert_eq!(root.find("global_step1").unwrap_err().kind, ErrorKind::NotFound);
    save_step(&root, 3);
    disk.rename(Path::new(ROOT), Path::new("/moved")).unwrap();
    assert!(root.list().unwrap().is_empty());
    let options = RootOptions { create: false, lock_wait: Duration::ZERO };
    let open = |path: &str| {
        RootStore::open(Arc::new(disk.clone()), Arc::new(ManualClock::default()), Path::new(path), options)
    };
    assert_eq!(load(&open("/moved").unwrap(), "global_step3"), files(MODEL));
    assert_eq!(open("/gone").unwrap_err().kind, ErrorKind::NotFound);
}

/// Guards: modes of our own making; a umask that is touched.
#[test]
fn test_bl_153_modes_are_those_of_a_plain_open_and_mkdir() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    std::fs::write(directory.path().join("plain"), b"x").unwrap();
    std::fs::create_dir(directory.path().join("made")).unwrap();
    let (file, made) = (mode(&directory.path().join("plain")), mode(&directory.path().join("made")));
    let path = directory.path().join("root");
    let root = RootStore::open(
        Arc::new(PosixDisk),
        Arc::new(ManualClock::default()),
        &path,
        RootOptions { create: true, lock_wait: Duration::ZERO },
    )
    .unwrap();
    save_step(&root, 1);
    for name in ["global_step1", "global_step1/.relight", "."] {
        assert_eq!(mode(&path.join(name)), made, "{name}");
    }
    for name in ["global_step1/model.pt", "global_step1/complete.txt", "global_step1/.relight/manifest.json", "latest"]
    {
        assert_eq!(mode(&path.join(name)), file, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Guards: any sequence of saves with retention that loses the newest, or keeps too many.
    #[test]
    fn after_any_saves_with_keep_the_newest_by_the_rule_are_there(
        saves in proptest::collection::vec((0_i64..12, 1_u64..4), 1..14), keep in 1_usize..4,
    ) {
        let (disk, root) = fresh();
        let mut run = 1;
        let mut last = String::new();
        for (step, bump) in saves {
            run += u64::from(bump == 3);
            last = format!("global_step{step}");
            save_and_retain(&root, &last, run, keep);
            let listed = root.list().unwrap();
            prop_assert!(listed.iter().any(|found| found.tag == last), "{last} was just committed");
            prop_assert!(listed.len() <= keep + 1);
            prop_assert_eq!(&hint(&disk), &listed.last().unwrap().tag);
            prop_assert!(listed.windows(2).all(|pair| pair[0].key() < pair[1].key()));
        }
        prop_assert!(tags(&root).contains(&last));
        prop_assert!(root.problems().unwrap().is_empty());
    }
}

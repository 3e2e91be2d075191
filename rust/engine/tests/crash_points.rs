//! At every point between two disk calls a crash leaves the old or the new checkpoint, whole.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use relight_engine::error::Result;
use relight_engine::root::RootStore;
use relight_format::crc::crc32;
use relight_format::manifest::Part;
use relight_testkit::{CrashDisk, Fault, FaultDisk, MemoryDisk, Op};
use support::{Files, ROOT, facts, files, load, load_all, root_on, save, save_as};

/// What a root may hold: each checkpoint with its files.
type World = Vec<(String, Files)>;

/// Names and bytes of the files of one tag.
type Content<'a> = &'a [(&'a str, &'a [u8])];

fn world(list: &[(&str, Content)]) -> World {
    list.iter().map(|(tag, content)| ((*tag).to_owned(), files(content))).collect()
}

/// Runs `act` over `before`, stopped at every changing call, and looks at every state that a kill or a power cut may
/// leave. Each must be one of `allowed`, in any order of tags.
fn at_every_crash_point(before: impl Fn(&MemoryDisk), act: impl Fn(&RootStore) -> Result<()>, allowed: &[World]) {
    let start = MemoryDisk::new();
    before(&start);
    let start = settled(&start);
    let whole = start.after_kill();
    let counted = CrashDisk::new(&whole);
    act(&root_on(Arc::new(counted.clone())).unwrap()).unwrap();
    let calls = counted.changes();
    assert!(calls > 10, "the scenario makes only {calls} changing calls");
    let (mut seen, mut states) = (vec![false; allowed.len()], 0);
    for point in 1..=calls + 1 {
        let disk = start.after_kill();
        let crash = CrashDisk::stop_at(&disk, point);
        let result = root_on(Arc::new(crash.clone())).and_then(|root| act(&root));
        if point > calls {
            result.unwrap();
        }
        let stopped_by = crash.stopped_by().map(|call| format!("{:?} {}", call.op, call.path.display()));
        let mut after = disk.after_power_cut();
        after.push(("killed".to_owned(), disk.after_kill()));
        for (cut, left) in after {
            let label = format!("stopped at call {point} of {calls} ({}), {cut}", stopped_by.as_deref().unwrap_or("-"));
            let found = look(&left, &label);
            match allowed.iter().position(|world| *world == found) {
                Some(index) => seen[index] = true,
                None => panic!("{label}: found {found:?}"),
            }
            states += 1;
            next_save_succeeds_and_cleans_up(&left, &found, &label);
        }
    }
    assert!(seen.iter().all(|seen| *seen), "not every allowed state was seen: {seen:?} in {states} states");
}

const EIO: i32 = 5;

fn saved(disk: &MemoryDisk, saves: &[(&str, Content)]) {
    let root = root_on(Arc::new(disk.clone())).unwrap();
    for (tag, content) in saves {
        save(&root, tag, &files(content)).unwrap();
    }
}

/// What was written before the scenario has been on the disk for long.
fn settled(disk: &MemoryDisk) -> MemoryDisk {
    let kept = disk.after_power_cut().into_iter().filter(|(what, _)| !what.starts_with("random"));
    kept.last().expect("there is at least one state").1
}

/// What a reader finds; panics if anything that is shown cannot be loaded, or a rule of the layout is broken.
fn look(disk: &MemoryDisk, label: &str) -> World {
    let root = root_on(Arc::new(disk.clone())).unwrap();
    let mut found = load_all(&root);
    found.sort();
    for (path, bytes) in disk.files(Path::new(ROOT)) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name == "complete.txt" {
            let tag = path.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
            assert_eq!(bytes, b"OK", "{label}: {}", path.display());
            assert!(found.iter().any(|(known, _)| *known == tag), "{label}: {tag} has complete.txt but is not whole");
        }
        if name == ".part-0.json" {
            what_a_part_lists_is_there(disk, &path, &bytes, label);
        }
        if path == Path::new(ROOT).join("latest") {
            let tag = String::from_utf8(bytes).unwrap();
            assert!(found.iter().any(|(known, _)| *known == tag), "{label}: latest names {tag:?}, which is not whole");
        }
    }
    found
}

/// In the generation's folder, or at its plain name once it was moved.
fn what_a_part_lists_is_there(disk: &MemoryDisk, part: &Path, text: &[u8], label: &str) {
    let all = disk.files(Path::new(ROOT));
    let staged = part.parent().unwrap();
    let plain = staged.parent().unwrap().parent().unwrap();
    for file in Part::parse(text).unwrap().files {
        let bytes = all.get(&staged.join(&file.path)).or_else(|| all.get(&plain.join(&file.path)));
        let crc = bytes.map(|bytes| crc32(bytes));
        assert_eq!(crc, Some(file.crc32), "{label}: {} lists {}, which was not durable", part.display(), file.name);
    }
}

fn next_save_succeeds_and_cleans_up(disk: &MemoryDisk, before: &World, label: &str) {
    let root = root_on(Arc::new(disk.clone())).unwrap();
    let next = files(&[("model.pt", b"the save after the crash")]);
    save(&root, "global_step900", &next).unwrap_or_else(|error| panic!("{label}: the next save: {error}"));
    assert_eq!(load(&root, "global_step900"), next, "{label}");
    let mut expected = before.clone();
    expected.push(("global_step900".to_owned(), next));
    expected.sort();
    let mut found = load_all(&root);
    found.sort();
    assert_eq!(found, expected, "{label}: after the next save");
    // An empty directory, made in the moment before `.relight` in it, could be anybody's, so it stays.
    let problems = root.problems().unwrap();
    assert!(problems.iter().all(|problem| problem.reason.contains("empty directory")), "{label}: {problems:?}");
    let latest = String::from_utf8(disk.files(Path::new(ROOT))[&Path::new(ROOT).join("latest")].clone()).unwrap();
    assert_eq!(latest, "global_step900", "{label}");
    let left: Vec<PathBuf> = leftovers(disk, &expected);
    assert!(left.is_empty(), "{label}: the next save left {left:?}");
}

/// Files that no checkpoint needs.
fn leftovers(disk: &MemoryDisk, world: &World) -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    let own = |path: &Path| {
        let below: Vec<_> =
            path.strip_prefix(root).unwrap().iter().map(|name| name.to_string_lossy().into_owned()).collect();
        let below: Vec<_> = below.iter().map(String::as_str).collect();
        match below.as_slice() {
            ["latest"] | [".relight", "lock"] => true,
            [tag, rest @ ..] => world.iter().filter(|(known, _)| known == tag).any(|(_, files)| match rest {
                ["complete.txt"] | [".relight", "lock" | "manifest.json" | "part-0.json"] => true,
                [name] => files.contains_key(*name),
                _ => false,
            }),
            [] => false,
        }
    };
    disk.files(root).into_keys().filter(|path| !own(path)).collect()
}

const ONE: &[(&str, &[u8])] =
    &[("model.pt", b"first model, a few chunks long, so that it can be torn"), ("rng.pt", b"r1")];
const TWO: &[(&str, &[u8])] = &[("model.pt", b"second model of another length"), ("optim.pt", b"o2")];
const BOTH: &[(&str, &[u8])] =
    &[("model.pt", b"second model of another length"), ("optim.pt", b"o2"), ("rng.pt", b"r1")];

/// Guards: a manifest that became visible although a file, a part or a directory was not durable.
#[test]
fn at_every_crash_point_of_the_first_save_there_is_nothing_or_the_whole() {
    let save_one = |root: &RootStore| save(root, "global_step1", &files(ONE));
    at_every_crash_point(|_| (), save_one, &[world(&[]), world(&[("global_step1", ONE)])]);
}

/// Guards: the same when the root holds others, which must not be touched.
#[test]
fn at_every_crash_point_of_a_further_save_the_earlier_one_stays() {
    at_every_crash_point(
        |disk| saved(disk, &[("global_step1", ONE)]),
        |root| save(root, "global_step2", &files(TWO)),
        &[world(&[("global_step1", ONE)]), world(&[("global_step1", ONE), ("global_step2", TWO)])],
    );
}

/// Guards: files of two generations mixed when a crash falls between two moves.
#[test]
fn at_every_crash_point_of_a_second_generation_there_is_one_whole_generation() {
    at_every_crash_point(
        |disk| saved(disk, &[("global_step1", ONE)]),
        |root| save(root, "global_step1", &files(TWO)),
        &[world(&[("global_step1", ONE)]), world(&[("global_step1", BOTH)])],
    );
}

/// Guards: a save to a fixed tag, as `last.ckpt`, that loses the old checkpoint before the new one is there.
#[test]
fn at_every_crash_point_of_an_overwrite_the_old_or_the_new_is_whole() {
    const OLD: &[(&str, &[u8])] = &[("model.pt", b"the old one")];
    const NEW: &[(&str, &[u8])] = &[("model.pt", b"the new one, of other length")];
    at_every_crash_point(
        |disk| saved(disk, &[("last.ckpt", OLD)]),
        |root| save(root, "last.ckpt", &files(NEW)),
        &[world(&[("last.ckpt", OLD)]), world(&[("last.ckpt", NEW)])],
    );
}

/// Guards: a crash during the moves of the second generation, then a third save that must not mix the two.
#[test]
fn at_every_crash_point_of_a_third_generation_after_one_that_was_not_moved_it_is_whole() {
    const THIRD: &[(&str, &[u8])] = &[("rng.pt", b"r3 is longer")];
    const ALL: &[(&str, &[u8])] =
        &[("model.pt", b"second model of another length"), ("optim.pt", b"o2"), ("rng.pt", b"r3 is longer")];
    let unmoved = |disk: &MemoryDisk| {
        saved(disk, &[("global_step1", ONE)]);
        let faulty = FaultDisk::new(Arc::new(disk.clone()));
        faulty.fail(Fault::with(EIO).on(Op::Rename).in_path("global_step1/optim.pt"));
        let root = root_on(Arc::new(faulty)).unwrap();
        let committed = save_as(&root, "global_step1", &files(TWO), facts("global_step1", 1, 2)).unwrap();
        assert!(committed.unsettled.is_some());
    };
    at_every_crash_point(
        unmoved,
        |root| save(root, "global_step1", &files(THIRD)),
        &[world(&[("global_step1", BOTH)]), world(&[("global_step1", ALL)])],
    );
}

/// Guards: a deletion that a reader meets half done; a hint that names what is gone.
#[test]
fn at_every_crash_point_of_a_retention_the_newest_stays_and_the_old_is_whole_or_gone() {
    at_every_crash_point(
        |disk| saved(disk, &[("global_step1", ONE), ("global_step2", TWO)]),
        |root| root.retain(1, "global_step2", &[]).map(drop),
        &[world(&[("global_step1", ONE), ("global_step2", TWO)]), world(&[("global_step2", TWO)])],
    );
}

/// Guards: a hint left on a tag that a user deletes.
#[test]
fn at_every_crash_point_of_deleting_the_latest_the_hint_names_a_whole_one() {
    at_every_crash_point(
        |disk| saved(disk, &[("global_step1", ONE), ("global_step2", TWO)]),
        |root| root.delete("global_step2"),
        &[world(&[("global_step1", ONE), ("global_step2", TWO)]), world(&[("global_step1", ONE)])],
    );
}

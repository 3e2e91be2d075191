//! Regions within one process.
//!
//! Owns: what a region promises while its owner lives, and how it is found afterwards.
//! Must not: kill anybody; `tests/arena_kill.rs` does.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::layout::{HUGE_BYTES, Header};
use super::*;

const PAGE: u64 = PAGE_BYTES;

fn shm() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("relight-test-").tempdir_in("/dev/shm").unwrap()
}

fn put(region: &Region, bytes: &[u8], meta: &[u8]) -> WholeImage {
    let mut image = region.alloc(bytes.len() as u64, meta.len()).unwrap();
    image.bytes_mut().copy_from_slice(bytes);
    image.publish(meta).unwrap()
}

/// Gives the region up and returns its path.
fn leave(region: Region) -> PathBuf {
    region.path().unwrap().to_owned()
}

#[test]
fn a_successor_finds_what_was_published_and_only_that() {
    let dir = shm();
    let region = Region::create(dir.path(), 8 << 20).unwrap();
    let big = vec![3; 3 << 20];
    put(&region, &big, b"{\"file\":1}").mark_done();
    put(&region, b"small", b"");
    put(&region, b"", b"empty");
    let unfinished = region.alloc(100, 10).unwrap();
    put(&region, b"gone", b"gone").release();
    let path = region.path().unwrap();
    assert_eq!(Region::list(dir.path()).unwrap(), [path]);
    let view = Region::inspect(path).unwrap();
    assert!(view.alive);
    assert_eq!((view.images.len(), view.torn), (3, 1));
    assert_eq!(view.images[0].meta, b"{\"file\":1}");
    assert_eq!(view.images.iter().map(|image| image.done).collect::<Vec<_>>(), [true, false, false]);
    drop(unfinished);
    assert_eq!(Region::inspect(path).unwrap().torn, 0);
}

#[test]
fn a_region_that_was_given_up_is_adopted_whole() {
    let dir = shm();
    let region = Region::create(dir.path(), 8 << 20).unwrap();
    put(&region, &[7; 5000], b"one").mark_done();
    let two = put(&region, &[8; 70_000], b"two");
    assert!(matches!(Region::adopt(region.path().unwrap()), Err(ArenaError::Owned { .. })));
    let path = leave(region);
    assert!(matches!(Region::adopt(&path), Err(ArenaError::Owned { .. })), "an image keeps its region");
    drop(two);
    assert!(!Region::inspect(&path).unwrap().alive);

    let region = Region::adopt(&path).unwrap();
    assert!(matches!(Region::adopt(&path), Err(ArenaError::Owned { .. })));
    assert_eq!(region.torn(), 0);
    let images = region.images();
    assert_eq!(
        images.iter().map(|image| (image.meta(), image.is_done())).collect::<Vec<_>>(),
        [(&b"one"[..], true), (b"two", false)]
    );
    assert_eq!((images[0].bytes(), images[1].bytes()), (&[7; 5000][..], &[8; 70_000][..]));
    // It goes on as any region: what is released makes room, orders go on counting.
    images[0].release();
    drop(images);
    let three = put(&region, &[9; 10], b"three");
    assert!(three.order() > 2);
    assert_eq!(region.images().len(), 2);
    region.unlink().unwrap();
    assert!(Region::list(dir.path()).unwrap().is_empty());
    assert_eq!(three.bytes(), [9; 10]);
}

#[test]
fn room_comes_back_with_the_last_handle_and_its_memory_is_used_again() {
    let dir = shm();
    let region = Region::create(dir.path(), 64 * PAGE).unwrap();
    let image = put(&region, &[1; 10 * PAGE as usize], b"");
    let reserved = region.usage().reserved_bytes;
    assert_eq!(reserved, 10 * PAGE);
    let other = image.clone();
    image.release();
    drop(image);
    assert_eq!(region.usage().used_bytes, 10 * PAGE, "a handle still reads");
    assert_eq!(other.bytes()[0], 1);
    drop(other);
    assert_eq!(region.usage().used_bytes, 0);
    drop(region.alloc(10 * PAGE, 0).unwrap());
    let usage = region.usage();
    assert_eq!((usage.reserved_bytes, usage.peak_bytes, usage.used_bytes), (reserved, 10 * PAGE, 0));
    assert_eq!(region.trim(), reserved);
    assert_eq!(region.usage().reserved_bytes, 0);
    assert_eq!(put(&region, &[2; 5], b"m").meta(), b"m");
}

#[test]
fn handles_that_are_dropped_without_release_keep_the_image_for_later() {
    let region = Region::private(1 << 20).unwrap();
    drop(put(&region, b"bytes", b"meta"));
    let images = region.images();
    assert_eq!(images[0].bytes(), b"bytes");
    images[0].release();
    assert!(region.images().is_empty());
}

#[test]
fn a_full_region_says_what_is_missing() {
    let region = Region::private(10 * PAGE).unwrap();
    let first = region.alloc(6 * PAGE, 0).unwrap();
    assert!(matches!(region.alloc(6 * PAGE, 0), Err(ArenaError::Full { need: 24_576, free: 16_384 })));
    assert!(matches!(region.alloc(11 * PAGE, 0), Err(ArenaError::TooLarge { .. })));
    assert!(matches!(region.alloc(u64::MAX, 0), Err(ArenaError::TooLarge { .. })));
    drop(first);
    assert!(region.alloc(10 * PAGE, 0).is_ok());
    let region = Region::private((SLOTS as u64 + 1) * PAGE).unwrap();
    let all: Vec<_> = (0..SLOTS).map(|_| region.alloc(1, 0).unwrap()).collect();
    assert!(matches!(region.alloc(1, 0), Err(ArenaError::NoSlot { .. })));
    drop(all);
}

#[test]
fn meta_that_is_longer_than_announced_is_refused_and_frees_its_room() {
    let region = Region::private(10 * PAGE).unwrap();
    let image = region.alloc(10, 20).unwrap();
    assert!(matches!(image.publish(&[0; PAGE as usize + 1]), Err(ArenaError::MetaTooLong { .. })));
    assert_eq!(region.usage().used_bytes, 0);
}

#[test]
fn planted_files_are_refused() {
    let dir = shm();
    let region = Region::create(dir.path(), 1 << 20).unwrap();
    put(&region, b"x", b"y");
    let path = leave(region);
    let refuses = |path: &Path| {
        assert!(matches!(Region::adopt(path), Err(ArenaError::Refused { .. })), "adopt");
        assert!(matches!(Region::inspect(path), Err(ArenaError::Refused { .. })), "inspect");
    };
    let link = path.with_file_name(format!("relight-{}-1-0.region", rustix::process::geteuid().as_raw()));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    refuses(&link);
    assert_eq!(Region::list(dir.path()).unwrap(), std::slice::from_ref(&path));
    fs::remove_file(&link).unwrap();
    fs::hard_link(&path, &link).unwrap();
    refuses(&path);
    fs::remove_file(&link).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    refuses(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(Region::adopt(&path).unwrap().images().len(), 1);
}

#[test]
fn damage_makes_a_slot_vanish_and_never_goes_astray() {
    let dir = shm();
    let region = Region::create(dir.path(), 1 << 20).unwrap();
    put(&region, b"first", b"meta 1");
    put(&region, b"second", b"meta 2");
    let path = leave(region);
    let whole = fs::read(&path).unwrap();
    // Every bit of the first slot and of its meta bytes, and some of its image.
    let slot = TABLE_OFFSET as usize * 8..(TABLE_OFFSET + SLOT_BYTES) as usize * 8;
    let meta = (DATA_OFFSET + PAGE) as usize * 8..(DATA_OFFSET + PAGE + 6) as usize * 8;
    for bit in slot.chain(meta) {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        let view = Region::inspect(&path).unwrap();
        let region = Region::adopt(&path).unwrap();
        let images = region.images();
        assert_eq!(view.images.len(), images.len(), "bit {bit}");
        assert_eq!(images.last().unwrap().bytes(), b"second");
        // whole <-> done is one bit: such a flip cannot be told, and costs a second persist or leaves one to the crc
        // of the manifest. All else is gone.
        if let [first, _] = &images[..] {
            assert_eq!((first.bytes(), first.meta()), (&b"first"[..], &b"meta 1"[..]));
            assert_eq!(bit, TABLE_OFFSET as usize * 8, "only the done bit may flip unnoticed");
        }
    }
}

#[test]
fn headers_that_are_damaged_cut_off_or_from_another_boot_are_refused() {
    let dir = shm();
    let path = leave(Region::create(dir.path(), 1 << 20).unwrap());
    let whole = fs::read(&path).unwrap();
    let refuses = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        assert!(matches!(Region::adopt(&path), Err(ArenaError::Refused { .. })));
        assert!(matches!(Region::inspect(&path), Err(ArenaError::Refused { .. })));
    };
    for len in [0, 7, 100, 4096, 1 << 20, whole.len() - 1] {
        refuses(&whole[..len]);
    }
    let mut bytes = whole.clone();
    bytes[17] ^= 4;
    refuses(&bytes);
    let other_boot = Header { capacity: 1 << 20, uid: rustix::process::geteuid().as_raw(), boot_id: [b'0'; 36] };
    bytes[..128].copy_from_slice(&other_boot.encode());
    refuses(&bytes);
    Region::remove(&path).unwrap();
    assert!(!path.exists());
}

#[test]
fn an_owner_who_lives_is_believed_even_if_its_lock_was_lost() {
    let dir = shm();
    let region = Region::create(dir.path(), 1 << 20).unwrap();
    let path = leave(region);
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let start_time = crate::limits::process_start_time(child.id()).unwrap();
    let record = layout::Owner { pid: child.id(), start_time };
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file::write_all_at(&file, OWNER_OFFSET, &record.encode()).unwrap();
    drop(file);
    assert!(matches!(Region::adopt(&path), Err(ArenaError::Owned { pid: Some(_), .. })));
    assert!(matches!(Region::remove(&path), Err(ArenaError::Owned { .. })));
    assert!(Region::inspect(&path).unwrap().alive);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(Region::adopt(&path).is_ok());
}

#[test]
fn what_a_process_left_that_died_while_making_a_region_is_removed() {
    let dir = shm();
    let uid = rustix::process::geteuid().as_raw();
    let left = dir.path().join(format!("relight-{uid}-1-0.region.new"));
    drop(FileLock::create_new(&left, 0o600).unwrap().unwrap());
    let at_work = dir.path().join(format!("relight-{uid}-2-0.region.new"));
    let _lock = FileLock::create_new(&at_work, 0o600).unwrap().unwrap();
    let _region = Region::create(dir.path(), 1 << 20).unwrap();
    assert!(!left.exists());
    assert!(at_work.exists());
}

#[test]
fn many_threads_fill_and_free_without_mixing_their_bytes() {
    let region = Region::private(40 * HUGE_BYTES / 16).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let region = &region;
            scope.spawn(move || {
                for round in 0..200_u64 {
                    let len = 1 + (round * 7919 + u64::from(thread) * 104_729) % 300_000;
                    let Ok(mut image) = region.alloc(len, 8) else { continue };
                    image.bytes_mut().fill(thread);
                    let image = image.publish(&[thread]).unwrap();
                    assert!(image.bytes().iter().all(|byte| *byte == thread));
                    assert_eq!(image.meta(), [thread]);
                    image.release();
                }
            });
        }
    });
    assert_eq!(region.usage().used_bytes, 0);
    assert!(region.usage().peak_bytes > 0);
}

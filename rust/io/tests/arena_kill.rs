//! Regions whose owner is killed, at random moments of its work.
#![cfg(not(feature = "loom"))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use relight_io::arena::{ArenaError, Region, RegionView};

const ROLE: &str = "RELIGHT_TEST_ROLE";
const DIR: &str = "RELIGHT_TEST_DIR";

/// A small random number generator (SplitMix64), so that a failing seed can be run again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The bytes of image `number`: each tells its number and its place.
fn expected(number: u64, len: usize) -> Vec<u8> {
    let mut random = Random(number);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn shm() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("relight-test-").tempdir_in("/dev/shm").unwrap()
}

fn start(role: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(DIR, dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what the processes do that the tests kill.
#[test]
#[ignore = "started by the tests of this file"]
fn child() {
    let dir = PathBuf::from(std::env::var(DIR).unwrap());
    match std::env::var(ROLE).unwrap().as_str() {
        "publish" => publish_for_ever(&dir),
        "fork" => publish_and_fork(&dir),
        "adopt" => adopt_and_wait(&dir),
        other => panic!("no role {other}"),
    }
}

/// Publishes, marks and frees images until it is killed. Each step is a byte on stdout.
fn publish_for_ever(dir: &Path) {
    let region = Region::create(dir, 8 << 20).unwrap();
    let mut out = std::io::stdout();
    let mut random = Random(u64::from(std::process::id()));
    for number in 1_u64.. {
        let len = (random.next() % 400_000) as usize;
        let meta = format!("{number} {len}").into_bytes();
        let mut image = match region.alloc(len as u64, meta.len()) {
            Ok(image) => image,
            Err(ArenaError::Full { .. }) => {
                for image in region.images().iter().step_by(2) {
                    image.release();
                }
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        let bytes = expected(number, len);
        let (first, second) = bytes.split_at(len / 2);
        image.bytes_mut()[..first.len()].copy_from_slice(first);
        out.write_all(b".").unwrap();
        out.flush().unwrap();
        image.bytes_mut()[first.len()..].copy_from_slice(second);
        let image = image.publish(&meta).unwrap();
        if number % 3 == 0 {
            image.mark_done();
        }
    }
}

fn check_view(view: &RegionView) {
    for image in &view.images {
        let meta = String::from_utf8(image.meta.clone()).unwrap();
        let (_, len) = meta.split_once(' ').unwrap();
        assert_eq!(image.image_len.to_string(), len);
    }
}

/// Guards: an image that a killed process had half written was taken for whole.
#[test]
fn after_a_kill_at_any_moment_the_successor_sees_whole_images_only_and_bit_for_bit() {
    let seed = std::env::var("RELIGHT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random(seed);
    let (mut images, mut torn) = (0, 0);
    for round in 0..60 {
        let dir = shm();
        let mut child = start("publish", dir.path());
        let mut steps = vec![0; 40 + (random.next() % 80) as usize];
        let out = child.stdout.as_mut().unwrap();
        out.read_exact(&mut steps).unwrap();
        // Somewhere between two steps.
        for _ in 0..random.next() % 200_000 {
            std::hint::spin_loop();
        }
        let [path] = &Region::list(dir.path()).unwrap()[..] else { panic!("one region") };
        let view = Region::inspect(path).unwrap();
        assert!(view.alive);
        check_view(&view);
        assert!(matches!(Region::adopt(path), Err(ArenaError::Owned { .. })));
        child.kill().unwrap();
        child.wait().unwrap();

        let region = Region::adopt(path).unwrap();
        torn += region.torn();
        for image in region.images() {
            let meta = std::str::from_utf8(image.meta()).unwrap();
            let (number, len) = meta.split_once(' ').unwrap();
            let (number, len) = (number.parse().unwrap(), len.parse().unwrap());
            assert!(image.bytes() == expected(number, len), "seed {seed} round {round} image {number}");
            images += 1;
        }
    }
    assert!(images > 100 && torn > 0, "the kills hit nothing of interest: {images} images, {torn} torn");
}

unsafe extern "C" {
    fn fork() -> i32;
}

/// Publishes an image, forks a child that lives on as a DataLoader worker does, and waits to be killed.
fn publish_and_fork(dir: &Path) {
    let region = Region::create(dir, 1 << 20).unwrap();
    let mut image = region.alloc(5, 6).unwrap();
    image.bytes_mut().copy_from_slice(b"image");
    let image = image.publish(b"of dad").unwrap();
    // SAFETY: the child only drops values that refuse to do anything in it, writes a line and reads a pipe.
    let pid = unsafe { fork() };
    if pid == 0 {
        assert!(matches!(region.alloc(1, 1), Err(ArenaError::Forked { .. })));
        assert!(region.images().is_empty());
        image.release();
        drop(image);
        drop(region);
    }
    println!("\nready {}", std::process::id());
    // Until the test closes the pipe.
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}

fn wait_for_ready(out: &mut impl BufRead) -> u32 {
    loop {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "the child ended early");
        if let Some(pid) = line.trim().strip_prefix("ready ") {
            return pid.parse().unwrap();
        }
    }
}

/// Guards: a forked DataLoader worker that outlives its killed trainer kept the lock, so nobody could adopt; or it freed
/// its parent's images when it dropped its copies of the handles.
#[test]
fn a_forked_worker_that_outlives_its_parent_neither_keeps_the_lock_nor_frees_the_images() {
    let dir = shm();
    let mut parent = start("fork", dir.path());
    let mut out = BufReader::new(parent.stdout.take().unwrap());
    let pids = [wait_for_ready(&mut out), wait_for_ready(&mut out)];
    let worker = pids.into_iter().find(|pid| *pid != parent.id()).unwrap();
    let [path] = &Region::list(dir.path()).unwrap()[..] else { panic!("one region") };
    assert!(matches!(Region::adopt(path), Err(ArenaError::Owned { .. })), "the parent lives");
    parent.kill().unwrap();
    // Kept open through the wait: the worker reads from it.
    let pipe = parent.stdin.take();
    parent.wait().unwrap();
    assert!(relight_io::limits::process_start_time(worker).is_some(), "the worker lives");
    assert!(!Region::inspect(path).unwrap().alive);
    let region = Region::adopt(path).unwrap();
    let images = region.images();
    assert_eq!((images.len(), images[0].bytes(), images[0].meta()), (1, &b"image"[..], &b"of dad"[..]));
    drop(pipe);
}

/// Tries to adopt the one region when told to, says how it went, and waits to be killed.
fn adopt_and_wait(dir: &Path) {
    println!("\nready {}", std::process::id());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let path = &Region::list(dir).unwrap()[0];
    let region = Region::adopt(path);
    println!("ready {}", u32::from(region.is_ok()));
    std::io::stdin().read_line(&mut line).unwrap();
}

#[test]
fn of_many_successors_at_once_exactly_one_adopts() {
    for _ in 0..5 {
        let dir = shm();
        let mut owner = start("publish", dir.path());
        owner.stdout.as_mut().unwrap().read_exact(&mut [0; 60]).unwrap();
        owner.kill().unwrap();
        owner.wait().unwrap();
        let mut successors: Vec<Child> = (0..4).map(|_| start("adopt", dir.path())).collect();
        let mut outs: Vec<_> =
            successors.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap())).collect();
        outs.iter_mut().for_each(|out| assert!(wait_for_ready(out) > 0));
        successors.iter_mut().for_each(|child| child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap());
        let winners: u32 = outs.iter_mut().map(wait_for_ready).sum();
        assert_eq!(winners, 1);
        for mut child in successors {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// Guards: SIGBUS where /dev/shm is smaller than the budget (64 MB is Docker's default).
#[test]
fn a_full_tmpfs_is_an_error_before_a_byte_is_touched() {
    // A small tmpfs of its own needs a mount namespace; where that is refused, nothing is tested.
    let script = "set -e; mount -t tmpfs -o size=2m none \"$1\"; shift; exec \"$@\"";
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "on_a_small_tmpfs", "--nocapture"])
        .env(DIR, dir.path())
        .output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare:") => {
            eprintln!("not run: no mount namespaces here");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "started by the test above, in a mount namespace with a tmpfs of 2 MiB"]
fn on_a_small_tmpfs() {
    let dir = PathBuf::from(std::env::var(DIR).unwrap());
    let region = Region::create(&dir, 1 << 30).unwrap();
    let mut image = region.alloc(1 << 20, 0).unwrap();
    image.bytes_mut().fill(1);
    let Err(ArenaError::NoMemory { need, source }) = region.alloc(2 << 20, 0) else { panic!("2 MiB fit beside 1") };
    assert_eq!((need, source.kind()), (2 << 20, std::io::ErrorKind::StorageFull));
    // What failed left nothing behind: the room that is there can still be had.
    drop(image);
    let mut image = region.alloc(1 << 20, 0).unwrap();
    image.bytes_mut().fill(2);
    assert_eq!(region.usage().used_bytes, 1 << 20);
}

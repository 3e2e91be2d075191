//! What the pipeline's tests share: a disk in memory behind gate and faults, a region directory, made-up states.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, reason = "each test file uses its part")]

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use relight_engine::clock::{Clock, SystemClock};
use relight_engine::disk::Disk;
use relight_engine::drain::DrainedRegion;
use relight_engine::engine::{Engine, EngineOptions};
use relight_engine::image::Image;
use relight_engine::plan::{ImagePlan, Piece, PlanEntry};
use relight_engine::share::BeginOptions;
use relight_engine::tags::Root;
use relight_engine::ticket::Ticket;
use relight_engine::wait::never;
use relight_io::foreign::ForeignBytes;
use relight_testkit::{FaultDisk, MemoryDisk, SlowDisk};

/// Longer than anything takes; a test that waits so long has failed.
pub const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// A machine: its disk and its shared memory outlive the engines on it.
pub struct Bed {
    pub memory: MemoryDisk,
    pub faults: Arc<FaultDisk>,
    pub slow: Arc<SlowDisk>,
    pub clock: Arc<dyn Clock>,
    pub regions: tempfile::TempDir,
}

impl Bed {
    pub fn new() -> Self {
        let memory = MemoryDisk::new();
        let faults = Arc::new(FaultDisk::new(Arc::new(memory.clone())));
        let slow = Arc::new(SlowDisk::new(Arc::clone(&faults) as Arc<dyn Disk>));
        let regions = tempfile::Builder::new().prefix("relight-pipeline-").tempdir_in("/dev/shm").unwrap();
        Self { memory, faults, slow, clock: Arc::new(SystemClock::new()), regions }
    }

    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.slow) as Arc<dyn Disk>
    }

    pub fn engine(&self, options: EngineOptions) -> Engine {
        Engine::new(options, self.disk(), Arc::clone(&self.clock)).unwrap()
    }

    pub fn region_files(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.regions.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

/// Options for a machine: a small budget, short delays.
pub fn options(bed: &Bed) -> EngineOptions {
    EngineOptions {
        memory_bytes_max: Some(64 << 20),
        memory_dir: Some(bed.regions.path().to_path_buf()),
        chunk_bytes: 64 << 10,
        retry_delay: Duration::from_millis(1),
        ..EngineOptions::default()
    }
}

/// Entries of a made-up state: a pickle and two storages, told apart by `seed`.
pub fn model(seed: u8, len: usize) -> Vec<(String, Vec<u8>)> {
    let bytes = |salt: u64, len: usize| {
        let mut word = u64::from(seed) << 32 | salt | 1;
        let mut next = || {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (word >> 56) as u8
        };
        (0..len).map(|_| next()).collect::<Vec<u8>>()
    };
    vec![
        ("data.pkl".to_owned(), vec![seed; 100]),
        ("data/0".to_owned(), bytes(0, len)),
        ("data/1".to_owned(), bytes(7, len / 3 + 1)),
        ("version".to_owned(), b"3\n".to_vec()),
    ]
}

/// The plan of a state: small entries inline, the others as memory of the caller in two pieces.
pub fn plan_of(state: &[(String, Vec<u8>)]) -> ImagePlan<'_> {
    let entries = state
        .iter()
        .map(|(name, bytes)| {
            let pieces = if bytes.len() < 1000 {
                vec![Piece::Inline(Cow::Borrowed(bytes.as_slice()))]
            } else {
                let (front, back) = bytes.split_at(bytes.len() / 2);
                vec![Piece::Foreign(ForeignBytes::from_cells(front)), Piece::Foreign(ForeignBytes::from_cells(back))]
            };
            PlanEntry { name: name.clone(), pieces }
        })
        .collect();
    ImagePlan::new("model", entries).unwrap()
}

/// All entries of an image, read and checked.
pub fn bytes_of(image: &Image) -> Vec<(String, Vec<u8>)> {
    let entries = image.entries().iter().enumerate();
    entries.map(|(index, entry)| (entry.name.clone(), image.read(index).unwrap())).collect()
}

/// Saves one file under a tag; not waited for.
pub fn save(root: &Root, tag: &str, state: &[(String, Vec<u8>)]) -> Ticket {
    save_with(root, tag, state, BeginOptions::default())
}

pub fn save_with(root: &Root, tag: &str, state: &[(String, Vec<u8>)], options: BeginOptions) -> Ticket {
    let share = root.begin(tag, options).unwrap();
    share.stage("model.pt", &plan_of(state), false, &never).unwrap();
    share.seal(&never).unwrap()
}

/// Waits for the end; `true` if it was committed.
pub fn committed(ticket: &Ticket) -> bool {
    assert!(ticket.wait(LONG, &never).unwrap(), "the persist does not end");
    ticket.check().is_ok()
}

pub fn tags(root: &Root) -> Vec<String> {
    root.list().unwrap().into_iter().map(|listed| listed.tag).collect()
}

/// Drains until the thread of a dropped engine has let its region go.
pub fn drain_until_found(engine: &Engine) -> Vec<DrainedRegion> {
    for _ in 0..10_000 {
        let found = engine.drain();
        if !found.is_empty() {
            return found;
        }
        std::thread::yield_now();
    }
    panic!("no region of a dead process is found");
}

//! The memory tier: where images live from staging until their room is needed.
//!
//! Owns: the budget, the choice between shared and private memory, who must go when room is needed, the wait for it.
//! Must not: free what is not persisted (a failed image may go, and that is said); write beyond the budget.
//! Invariant: bytes of our regions plus those of the regions of dead processes never pass the budget.

use std::path::{Path, PathBuf};
use std::time::Duration;

use relight_io::arena::{ArenaError, FillingImage, Region};
use relight_io::limits;

use crate::core::{Core, Phase, State};
use crate::engine::EngineOptions;
use crate::error::Result;
use crate::events::Level;
use crate::save_file::MemoryKind;
use crate::staged::{Catalogue, Fate};
use crate::wait::{Interrupt, lock, wait_until};

/// Left free in the directory of the regions, for others who use it.
const SHARED_RESERVE_BYTES: u64 = 16 << 20;
/// A region smaller than this is not worth its slots.
const REGION_BYTES_MIN: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;

/// The region of a dead process, now ours to persist and to remove.
#[derive(Debug)]
pub(crate) struct Adopted {
    pub(crate) id: u64,
    pub(crate) region: Region,
    pub(crate) path: PathBuf,
    /// What is in it is in the catalogue; until then it only looks as if nothing were left in it.
    pub(crate) listed: bool,
}

/// The regions of this process.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) dir: PathBuf,
    requested: Option<u64>,
    /// The budget and our regions are made at first use: an engine that only reads takes no memory.
    open: bool,
    pub(crate) budget: u64,
    pub(crate) shared: Option<Region>,
    pub(crate) private: Option<Region>,
    pub(crate) adopted: Vec<Adopted>,
    next_adopted: u64,
    pub(crate) peak_bytes: u64,
    /// Why there is no shared memory, or less than was asked for.
    pub(crate) reason: Option<String>,
}

/// Where an image goes.
pub(crate) enum Room {
    /// Into this slot.
    Memory { image: FillingImage, kind: MemoryKind },
    /// There is none, and none will come by waiting.
    None,
}

impl Tier {
    pub(crate) fn new(options: &EngineOptions) -> Self {
        let from_env = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let dir = options.memory_dir.clone().or_else(|| from_env("RELIGHT_MEMORY_DIR").map(PathBuf::from));
        let nebula = from_env("NEBULA_MEMORY_BUFFER_SIZE").and_then(|text| text.trim().parse::<u64>().ok());
        Self {
            dir: dir.unwrap_or_else(|| PathBuf::from("/dev/shm")),
            // Whoever set both limits means both.
            requested: [options.memory_bytes_max, nebula].into_iter().flatten().min(),
            open: false,
            budget: 0,
            shared: None,
            private: None,
            adopted: Vec::new(),
            next_adopted: 0,
            peak_bytes: 0,
            reason: None,
        }
    }

    pub(crate) fn adopt(&mut self, region: Region, path: PathBuf) -> u64 {
        let id = self.next_adopted;
        self.next_adopted += 1;
        self.adopted.push(Adopted { id, region, path, listed: false });
        id
    }

    /// Bytes in use in all regions.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.own().map(|(region, _)| region.usage().used_bytes).sum::<u64>() + self.adopted_bytes()
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.own().map(|(region, _)| region.usage().reserved_bytes).sum::<u64>() + self.adopted_bytes()
    }

    fn adopted_bytes(&self) -> u64 {
        self.adopted.iter().map(|adopted| adopted.region.usage().used_bytes).sum()
    }

    fn own(&self) -> impl Iterator<Item = (&Region, MemoryKind)> {
        let shared = self.shared.iter().map(|region| (region, MemoryKind::Shared));
        shared.chain(self.private.iter().map(|region| (region, MemoryKind::Private)))
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        match (&self.shared, &self.private) {
            (Some(_), _) => MemoryKind::Shared,
            (None, Some(_)) => MemoryKind::Private,
            (None, None) => MemoryKind::None,
        }
    }

    /// Takes the budget and makes the shared region; a warning if that is not possible.
    fn open(&mut self) -> Option<String> {
        if self.open {
            return None;
        }
        self.open = true;
        let headroom = limits::cgroup_headroom().unwrap_or(u64::MAX);
        let available = limits::memory_available().unwrap_or(u64::MAX);
        // Half of what the group may still take is the training's, whatever was asked for: beyond its limit the kernel
        // kills. Of the node's memory, half is taken only where nobody said how much.
        self.budget = match self.requested {
            Some(requested) => requested.min(headroom / 2).min(available),
            None => headroom.min(available) / 2,
        };
        // Regions are whole pages: one of a budget between two would pass it.
        self.budget -= self.budget % PAGE_BYTES;
        let room = limits::free_bytes(&self.dir).map_or(0, |free| free.saturating_sub(SHARED_RESERVE_BYTES));
        let capacity = self.budget.min(room);
        if self.budget < REGION_BYTES_MIN {
            self.reason = Some(format!("the memory budget of {} bytes is too small to keep an image", self.budget));
            return self.reason.clone();
        }
        if capacity < REGION_BYTES_MIN {
            self.reason = Some(format!(
                "{} is missing or has too little room ({room} bytes) for shared memory",
                self.dir.display()
            ));
            return self.reason.clone();
        }
        match Region::create(&self.dir, capacity) {
            Ok(region) => {
                self.shared = Some(region);
                None
            }
            Err(cause) => {
                self.reason = Some(format!("shared memory cannot be made in {}: {cause}", self.dir.display()));
                self.reason.clone()
            }
        }
    }

    /// The region for an image of `need` bytes; private memory where the shared one can never hold it.
    /// Second: what to tell the user, once.
    fn region_for(&mut self, need: u64) -> (Option<(Region, MemoryKind)>, Option<String>) {
        let mut warning = self.open();
        if let Some(shared) = self.shared.as_ref().filter(|shared| need <= capacity_of(shared)) {
            return (Some((shared.clone(), MemoryKind::Shared)), warning);
        }
        let rest = self.budget.saturating_sub(self.shared.as_ref().map_or(0, capacity_of));
        if self.private.is_none() && need <= rest && rest >= REGION_BYTES_MIN {
            match Region::private(rest) {
                Ok(region) => {
                    self.private = Some(region);
                    let reason = self.reason.get_or_insert_with(|| {
                        format!("{} has too little room for an image of {need} bytes", self.dir.display())
                    });
                    warning = Some(format!(
                        "{reason}: private memory is used. Checkpoints are persisted as usual, but what is staged dies \
                         with this process; give the container a larger {} (docker run --shm-size) or another \
                         memory_dir",
                        self.dir.display()
                    ));
                }
                Err(cause) => {
                    warning = Some(format!("no memory for the memory tier: {cause}; checkpoints are streamed"))
                }
            }
        }
        let private = self.private.as_ref().filter(|private| need <= capacity_of(private));
        (private.map(|region| (region.clone(), MemoryKind::Private)), warning)
    }
}

/// What `allocate` found about the room.
enum Look {
    Taken(Result<FillingImage, ArenaError>, MemoryKind),
    Evicted,
    WaitFor { name: String, finished: u64 },
    Nothing,
}

impl Core {
    /// Room for an image: free, else that of persisted images (oldest first), else of what the oldest persist under
    /// way will give back, else of failed ones, else what `spill` can persist at once. Second: the time of the wait.
    pub(crate) fn allocate(
        &self,
        image_len: u64,
        meta_len: usize,
        spill: &mut dyn FnMut() -> Result<bool>,
        interrupt: Interrupt<'_>,
    ) -> Result<(Room, Duration)> {
        let mut waited = Duration::ZERO;
        let mut said = false;
        // Set when the region had no stretch that is long enough: then free bytes alone do not help.
        let mut crowded = false;
        loop {
            match self.take_room(image_len, meta_len, crowded) {
                Look::Taken(Ok(image), kind) => {
                    let mut state = lock(&self.state);
                    state.tier.peak_bytes = state.tier.used_bytes().max(state.tier.peak_bytes);
                    return Ok((Room::Memory { image, kind }, waited));
                }
                Look::Taken(Err(ArenaError::Full { .. } | ArenaError::NoSlot { .. }), _) => crowded = true,
                Look::Taken(Err(cause), _) => {
                    // The node has less memory than it had; reserved memory of evicted images is used again.
                    let text = format!("the memory tier cannot grow: {cause}; room is made, or images are streamed");
                    self.say_once("growth", Level::Warning, text);
                    crowded = true;
                }
                Look::Evicted => crowded = false,
                Look::WaitFor { name, finished } => {
                    if !said {
                        said = true;
                        let text = format!("memory tier full: waiting until {name} is persisted");
                        self.events.log(Level::Info, text);
                    }
                    let start = self.clock.monotonic();
                    let moved_on = |state: &mut State| {
                        let closed = matches!(state.phase, Phase::Closed { .. });
                        (closed || state.finished != finished).then_some(())
                    };
                    let done = wait_until(&self.state, &self.changed, &*self.clock, None, interrupt, moved_on);
                    waited += self.clock.monotonic().saturating_sub(start);
                    done?;
                    if matches!(lock(&self.state).phase, Phase::Closed { .. }) {
                        self.check_open()?;
                    }
                    crowded = false;
                }
                Look::Nothing => {
                    let start = self.clock.monotonic();
                    let freed = spill()?;
                    waited += self.clock.monotonic().saturating_sub(start);
                    if !freed {
                        return Ok((Room::None, waited));
                    }
                    crowded = false;
                }
            }
        }
    }

    /// Takes free room before another caller can find the same, else makes some, else says what there is to wait for.
    fn take_room(&self, image_len: u64, meta_len: usize, crowded: bool) -> Look {
        let _one_at_a_time = lock(&self.granting);
        let need = bytes_needed(image_len, meta_len);
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let (region, warning) = state.tier.region_for(need);
        if let Some(text) = warning {
            self.say_once("memory", Level::Warning, text);
        }
        let Some((region, kind)) = region else { return Look::Nothing };
        let fits = state.tier.used_bytes().saturating_add(need) <= state.tier.budget;
        if fits && !crowded {
            drop(guard);
            return Look::Taken(region.alloc(image_len, meta_len), kind);
        }
        if state.staged.evict_oldest(Fate::Persisted).is_some() || state.staged.evict_oldest_only_here() {
            state.tier.remove_empty_regions(&state.staged);
            return Look::Evicted;
        }
        if let Some(job) = state.active.as_ref().or(state.queue.front()) {
            return Look::WaitFor { name: job.staged.name(), finished: state.finished };
        }
        if let Some(lost) = state.staged.evict_oldest(Fate::Failed) {
            let text = format!("{} could not be persisted and leaves the memory tier: its room is needed", lost.name());
            self.log_of(Level::Warning, &lost, text);
            state.tier.remove_empty_regions(&state.staged);
            return Look::Evicted;
        }
        Look::Nothing
    }
}

impl Tier {
    /// Gives everything up. Regions in which something is left for a successor keep their file.
    pub(crate) fn close(&mut self, staged: &mut Catalogue) {
        staged.evict_where(|entry| matches!(entry.fate, Fate::Persisted | Fate::OnlyHere));
        self.remove_empty_regions(staged);
        let left = staged.entries().iter().any(|entry| entry.staged.adopted.is_none());
        if let Some(shared) = self.shared.take().filter(|_| !left) {
            // An error leaves an empty region: the next process removes it.
            let _ = shared.unlink();
        }
        staged.clear();
        self.private = None;
        self.adopted.clear();
    }

    /// Removes the regions of dead processes from which nothing is left.
    pub(crate) fn remove_empty_regions(&mut self, staged: &Catalogue) {
        self.adopted.retain(|adopted| {
            let needed =
                !adopted.listed || staged.entries().iter().any(|entry| entry.staged.adopted == Some(adopted.id));
            if !needed {
                // An error leaves a file in which everything is marked as persisted: the next process removes it.
                let _ = adopted.region.unlink();
            }
            needed
        });
    }
}

fn capacity_of(region: &Region) -> u64 {
    region.usage().capacity_bytes
}

/// What an image takes in a region, with its record and in whole pages.
fn bytes_needed(image_len: u64, meta_len: usize) -> u64 {
    image_len.next_multiple_of(PAGE_BYTES).saturating_add(meta_len as u64).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES)
}

/// The memory directory that is meant where none is given.
pub(crate) fn memory_dir(dir: Option<&Path>) -> PathBuf {
    let options = EngineOptions { memory_dir: dir.map(Path::to_path_buf), ..EngineOptions::default() };
    Tier::new(&options).dir
}

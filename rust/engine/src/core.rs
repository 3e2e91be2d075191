//! The core: what the callers' threads and the persist thread share.
//!
//! Owns: the one lock over the engine's bookkeeping, the queue of persists, the numbers of tickets and shares.
//! Must not: hold the lock while bytes are copied or written, or while the caller is asked for an interrupt.
//! Invariant: a job is in the queue, is `active`, or is finished; its images stay in memory until it is finished.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use relight_format::manifest::{FileRecord, Writer};
use relight_io::copy;

use crate::clock::{self, Clock};
use crate::disk::Disk;
use crate::engine::EngineOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Events, Level};
use crate::generation::Generation;
use crate::memory::Tier;
use crate::root::RootStore;
use crate::stage::Copier;
use crate::staged::{Catalogue, Staged};
use crate::ticket::Ticket;
use crate::wait::{Interrupt, lock};

/// How far the engine is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Takes saves.
    Open,
    /// Finishes what is queued.
    Closing,
    /// Did what it could.
    Closed {
        /// Nothing was left staged.
        clean: bool,
    },
}

/// Files of a share that are durable in a generation already: streamed, or persisted early to make room.
#[derive(Debug)]
pub(crate) struct Spilled {
    pub(crate) generation: Generation,
    pub(crate) files: Vec<FileRecord>,
}

/// One persist: a share of a tag, or a single file.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ticket: Ticket,
    pub(crate) staged: Arc<Staged>,
    /// The root of a share, once it could be opened.
    pub(crate) root: OnceLock<Arc<RootState>>,
    /// Taken by each attempt, put back by one that failed.
    pub(crate) spilled: Mutex<Option<Spilled>>,
}

impl Job {
    pub(crate) fn new(
        ticket: Ticket,
        staged: Arc<Staged>,
        root: Option<Arc<RootState>>,
        spilled: Option<Spilled>,
    ) -> Arc<Self> {
        Arc::new(Self {
            ticket,
            staged,
            root: root.map_or_else(OnceLock::new, OnceLock::from),
            spilled: Mutex::new(spilled),
        })
    }

    pub(crate) fn is_of_tag(&self, root: &Path, tag: &str) -> bool {
        self.staged.root() == Some(root) && self.staged.tag().is_some_and(|record| record.tag == tag)
    }
}

/// What the engine knows of one root.
#[derive(Debug)]
pub(crate) struct RootState {
    pub(crate) store: RootStore,
    /// Held over "number, seal, queue", so that the order of numbers is the order of commits.
    pub(crate) sealing: Mutex<()>,
    numbers: Mutex<Numbers>,
    pub(crate) pins: Mutex<BTreeMap<String, usize>>,
    /// The tags of shares that are neither sealed nor given up, and how many shares each has.
    begun: Mutex<BTreeMap<String, usize>>,
}

#[derive(Debug, Default)]
struct Numbers {
    run: Option<u64>,
    highest_run: u64,
    highest_sequence: u64,
}

impl RootState {
    pub(crate) fn new(store: RootStore) -> Self {
        Self {
            store,
            sealing: Mutex::new(()),
            numbers: Mutex::new(Numbers::default()),
            pins: Mutex::new(BTreeMap::new()),
            begun: Mutex::new(BTreeMap::new()),
        }
    }

    /// Learns of run and sequence numbers that are in use.
    pub(crate) fn saw(&self, run: u64, sequence: u64) {
        let mut numbers = lock(&self.numbers);
        numbers.highest_run = numbers.highest_run.max(run);
        numbers.highest_sequence = numbers.highest_sequence.max(sequence);
    }

    /// Learns of the numbers that others have used on the disk meanwhile.
    pub(crate) fn look_again(&self) -> Result<()> {
        let (run, sequence) = self.store.highest()?;
        self.saw(run, sequence);
        Ok(())
    }

    /// The run of this process and the next sequence number.
    pub(crate) fn next_numbers(&self) -> (u64, u64) {
        let mut numbers = lock(&self.numbers);
        let run = numbers.run.unwrap_or(numbers.highest_run + 1);
        numbers.run = Some(run);
        numbers.highest_run = numbers.highest_run.max(run);
        numbers.highest_sequence += 1;
        (run, numbers.highest_sequence)
    }

    /// Whether the next save begins a run.
    pub(crate) fn is_between_runs(&self) -> bool {
        lock(&self.numbers).run.is_none()
    }

    /// The next save begins a run of its own.
    pub(crate) fn start_run(&self) {
        lock(&self.numbers).run = None;
    }

    /// A share of `tag` begins, unless one is under way whose tag differs in case only.
    pub(crate) fn begin_tag(self: &Arc<Self>, tag: &str) -> Result<Begun> {
        let store = self.store.tag(tag)?;
        let mut begun = lock(&self.begun);
        store.refuse_twin_among(begun.keys().map(String::as_str))?;
        *begun.entry(tag.to_owned()).or_insert(0) += 1;
        drop(begun);
        Ok(Begun { root: Arc::clone(self), tag: tag.to_owned() })
    }

    pub(crate) fn pinned(&self) -> Vec<String> {
        lock(&self.pins).keys().cloned().collect()
    }
}

/// A share is under way; its tag is taken until this is dropped.
#[derive(Debug)]
pub(crate) struct Begun {
    root: Arc<RootState>,
    tag: String,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut begun = lock(&self.root.begun);
        if let Some(count) = begun.get_mut(&self.tag) {
            *count -= 1;
            if *count == 0 {
                begun.remove(&self.tag);
            }
        }
    }
}

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// The persist thread ends after its present job.
    pub(crate) stop: bool,
    pub(crate) worker: bool,
    pub(crate) queue: VecDeque<Arc<Job>>,
    pub(crate) active: Option<Arc<Job>>,
    /// Jobs that came to an end; a waiter sees by it that something moved.
    pub(crate) finished: u64,
    pub(crate) staged: Catalogue,
    pub(crate) tier: Tier,
    pub(crate) roots: HashMap<PathBuf, Arc<RootState>>,
    pub(crate) memory_keep: usize,
}

impl State {
    pub(crate) fn jobs(&self) -> impl DoubleEndedIterator<Item = &Arc<Job>> {
        self.active.iter().chain(self.queue.iter())
    }

    /// The jobs that will not be run, because the engine ends.
    pub(crate) fn take_queue(&mut self) -> Vec<Arc<Job>> {
        let queued: Vec<Arc<Job>> = self.queue.drain(..).collect();
        self.finished += queued.len() as u64;
        queued
    }
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: EngineOptions,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) events: Events,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
    /// Held from the look for room in memory to its taking, never over a wait. Taken before `state`.
    pub(crate) granting: Mutex<()>,
    /// One drain at a time: two would fight for the same regions.
    pub(crate) draining: Mutex<()>,
    /// Regions of dead processes that were looked at and left, each told of once.
    pub(crate) left: Mutex<BTreeSet<PathBuf>>,
    said: Mutex<BTreeSet<&'static str>>,
    next_ticket: AtomicU64,
    next_share: AtomicU64,
}

impl Core {
    pub(crate) fn new(options: EngineOptions, disk: Arc<dyn Disk>, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            phase: Phase::Open,
            stop: false,
            worker: false,
            queue: VecDeque::new(),
            active: None,
            finished: 0,
            staged: Catalogue::default(),
            tier: Tier::new(&options),
            roots: HashMap::new(),
            memory_keep: options.memory_keep,
        };
        Self {
            options,
            disk,
            clock,
            events: Events::default(),
            host: relight_io::limits::host_name(),
            pid: std::process::id(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            granting: Mutex::new(()),
            draining: Mutex::new(()),
            left: Mutex::new(BTreeSet::new()),
            said: Mutex::new(BTreeSet::new()),
            next_ticket: AtomicU64::new(1),
            next_share: AtomicU64::new(1),
        }
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if lock(&self.state).phase == Phase::Open {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Closed, "the engine is closed; make a new one to save"))
    }

    pub(crate) fn copier<'c>(&'c self, interrupt: Interrupt<'c>) -> Copier<'c> {
        Copier {
            kernel: copy::best(),
            threads: self.options.copy_threads,
            chunk_bytes: self.options.chunk_bytes,
            clock: self.clock.as_ref(),
            interrupt,
        }
    }

    pub(crate) fn now_text(&self) -> String {
        clock::rfc3339(self.clock.wall())
    }

    pub(crate) fn writer(&self, rank: u32) -> Writer {
        Writer { rank, host: self.host.clone(), pid: self.pid }
    }

    pub(crate) fn new_ticket(&self, staged: &Staged, more_bytes: u64) -> Ticket {
        // Relaxed: only uniqueness is asked of the number.
        let id = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let tag = staged.tag().map(|record| record.tag.clone());
        Ticket::new(id, tag, staged.place().to_path_buf(), staged.bytes() + more_bytes, Arc::clone(&self.clock))
    }

    pub(crate) fn new_share(&self) -> u64 {
        self.next_share.fetch_add(1, Ordering::Relaxed)
    }

    /// Logs what stays true for the life of the engine, once.
    pub(crate) fn say_once(&self, what: &'static str, level: Level, message: String) {
        if lock(&self.said).insert(what) {
            self.events.log(level, message);
        }
    }

    pub(crate) fn log_of(&self, level: Level, staged: &Staged, message: String) {
        match (staged.root(), staged.tag()) {
            (Some(root), Some(record)) => self.events.log_tag(level, root, &record.tag, message),
            _ => self.events.log(level, message),
        }
    }

    /// Waits for what `done` looks for; `None` at the time limit.
    pub(crate) fn wait<R>(
        &self,
        limit: Option<Duration>,
        interrupt: Interrupt<'_>,
        done: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<Option<R>> {
        crate::wait::wait_until(&self.state, &self.changed, self.clock.as_ref(), limit, interrupt, done)
    }
}

//! The engine: one per process; everything a caller can ask of it.
//!
//! Owns: options, the order of opening and closing, saves to a path of their own.
//! Must not: know Python; wait for a stuck disk beyond the caller's limit.
//! Invariant: after `close` nothing that was staged is lost: it is persisted, or its region stays for the next process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use relight_format::record::{FileTarget, ImageRecord, SlotRecord, Target};

use crate::clock::Clock;
use crate::core::{Core, Job, Phase, RootState};
use crate::disk::{Disk, Nowhere, is_memory_only};
use crate::drain::DrainedRegion;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Event, Level};
use crate::memory::Room;
use crate::plan::ImagePlan;
use crate::report::MemoryReport;
use crate::root::{RootOptions, RootStore};
use crate::save_file::{
    MemoryKind, SaveOptions, StageReport, check_chunk_bytes, check_target, save_file, seconds_since,
};
use crate::staged::{Entry, Fate, Purpose, Staged, StagedImage};
use crate::tags::Root;
use crate::ticket::Ticket;
use crate::wait::{Interrupt, lock};

/// How an engine works.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The most bytes that images in memory take. None: `NEBULA_MEMORY_BUFFER_SIZE`, else half of what the node can spare.
    pub memory_bytes_max: Option<u64>,
    /// Where shared memory is made. None: `RELIGHT_MEMORY_DIR`, else `/dev/shm`.
    pub memory_dir: Option<PathBuf>,
    /// Persisted checkpoints of a root that stay in memory.
    pub memory_keep: usize,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Threads that copy, the caller's included.
    pub copy_threads: usize,
    /// Tries of a persist, each on a new file.
    pub attempts_max: u32,
    /// Before the second try; doubles.
    pub retry_delay: Duration,
    /// How long to wait for a tag that another process is writing.
    pub lock_timeout: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            memory_bytes_max: None,
            memory_dir: None,
            memory_keep: 2,
            chunk_bytes: 4 << 20,
            copy_threads: 2,
            attempts_max: 3,
            retry_delay: Duration::from_millis(500),
            lock_timeout: Duration::from_secs(30),
        }
    }
}

/// The engine. Clones are the same engine; when the last one goes without `close`, what is queued stays in memory for
/// the next process.
#[derive(Clone, Debug)]
pub struct Engine {
    handle: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        // The thread is not joined: its disk may be stuck.
        state.stop = true;
        let queued = state.take_queue();
        drop(state);
        self.core.changed.notify_all();
        self.core.end_unpersisted(queued);
    }
}

impl Engine {
    /// An engine over this disk and clock. Takes no memory and starts no thread before the first save.
    pub fn new(options: EngineOptions, disk: Arc<dyn Disk>, clock: Arc<dyn Clock>) -> Result<Self> {
        check_chunk_bytes(options.chunk_bytes)?;
        let positive = [("copy_threads", options.copy_threads), ("attempts_max", options.attempts_max as usize)];
        if let Some((name, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("{name} is 0; give at least 1")));
        }
        Ok(Self { handle: Arc::new(Handle { core: Arc::new(Core::new(options, disk, clock)) }) })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// The process that the engine belongs to.
    pub fn pid(&self) -> u32 {
        self.core().pid
    }

    /// Opens a directory of tags. `drain` first adopts what dead processes left staged on this node.
    ///
    /// A path `memory:<name>` is a root without a persistent tier: its checkpoints are complete in memory, the oldest
    /// goes when there are more than `memory_keep`, and a normal end of the process drops them all. After a death the
    /// next process that opens the same name has them.
    pub fn open_root(&self, path: &Path, create: bool, drain: bool) -> Result<Root> {
        let core = self.core();
        if is_memory_only(path) {
            // Opened before the drain, which leaves the tags of such roots to whoever opens them.
            core.root(path, create)?;
        }
        if drain {
            core.drain();
        }
        let state = core.root(path, create)?;
        Ok(Root::new(self.clone(), state))
    }

    /// Stages one file for `path` itself and persists it in the background.
    pub fn stage_file(
        &self,
        path: &Path,
        plan: &ImagePlan<'_>,
        compare: bool,
        interrupt: Interrupt<'_>,
    ) -> Result<(StageReport, Ticket)> {
        let core = self.core();
        core.check_open()?;
        let started = core.clock.monotonic();
        let path = target_of(core.disk.as_ref(), path)?;
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let pending = self.pending_path(&path).is_some();
        let replaces = if pending { None } else { Some(version_of(core.disk.as_ref(), &path)) };
        let target =
            Target::File(FileTarget { path: path.display().to_string(), replaces, staged_at: core.now_text() });
        let record = blank_record(plan, core.options.chunk_bytes, target, &file, core.new_share());
        let (image, waited) = core.stage(plan, record, compare, &mut || Ok(false), interrupt)?;
        let Some(image) = image else { return self.stream_file(&path, plan, compare, started, waited, interrupt) };
        let report = StageReport {
            bytes: image.record.bytes,
            crc32: image.record.crc32,
            seconds: seconds_since(core.clock.as_ref(), started),
            wait_seconds: waited.as_secs_f64(),
            streamed: false,
            memory: image.memory,
        };
        let staged = Arc::new(Staged {
            purpose: Purpose::File { path },
            images: vec![Arc::new(image)],
            adopted: None,
            partial: false,
        });
        let ticket = core.submit(staged, None, None);
        Ok((report, ticket))
    }

    /// Larger than the budget: written through before the call returns.
    fn stream_file(
        &self,
        path: &Path,
        plan: &ImagePlan<'_>,
        compare: bool,
        started: Duration,
        waited: Duration,
        interrupt: Interrupt<'_>,
    ) -> Result<(StageReport, Ticket)> {
        let core = self.core();
        // An earlier save to this path would otherwise come later and win.
        while let Some(earlier) = self.pending_path(path) {
            earlier.wait(None, interrupt)?;
        }
        let options = SaveOptions {
            compare,
            copy_threads: core.options.copy_threads,
            chunk_bytes: core.options.chunk_bytes,
            durable: true,
        };
        let mut report = save_file(&core.disk, &core.clock, path, plan, &options, interrupt)?;
        report.seconds = seconds_since(core.clock.as_ref(), started);
        report.wait_seconds = waited.as_secs_f64();
        let staged = Staged {
            purpose: Purpose::File { path: path.to_path_buf() },
            images: vec![],
            adopted: None,
            partial: false,
        };
        let ticket = core.new_ticket(&staged, report.bytes);
        ticket.begin_attempt();
        ticket.add_bytes(report.bytes);
        let state = ticket.end(Ok(()));
        core.events.push(Event::Ticket { id: ticket.id(), state });
        Ok((report, ticket))
    }

    /// The newest unfinished `stage_file` to this path, links resolved.
    pub fn pending_path(&self, path: &Path) -> Option<Ticket> {
        let path = target_of(self.core().disk.as_ref(), path).ok()?;
        let state = lock(&self.core().state);
        let mut jobs = state.jobs().rev();
        // a job is taken off the list a moment after its ticket has ended
        let is_it = |job: &&Arc<Job>| {
            matches!(&job.staged.purpose, Purpose::File { path: target } if *target == path)
                && !job.ticket.state().is_final()
        };
        jobs.find(is_it).map(|job| job.ticket.clone())
    }

    /// Adopts the regions of dead processes now: their tags are visible at once and persisted before any new save.
    pub fn drain(&self) -> Vec<DrainedRegion> {
        self.core().drain()
    }

    /// Waits until other successors on this node have persisted what a dead process staged for `place` (a root or the
    /// path of a single file): then a reader here sees it.
    ///
    /// # Errors
    /// TimedOut after the limit for locks, naming the process that has it.
    pub fn await_drains(&self, place: &Path, interrupt: Interrupt<'_>) -> Result<()> {
        let disk = self.core().disk.as_ref();
        match disk.canonical(place).map_or_else(|_| target_of(disk, place), Ok) {
            Ok(place) => self.core().await_drains(&place, interrupt),
            // Nothing can be staged for a place that cannot be.
            Err(_) => Ok(()),
        }
    }

    /// What the memory tier holds.
    pub fn memory(&self) -> MemoryReport {
        MemoryReport::of(&lock(&self.core().state))
    }

    /// How many persisted checkpoints of each root stay in memory, from the next commit on.
    pub fn set_memory_keep(&self, memory_keep: usize) {
        lock(&self.core().state).memory_keep = memory_keep;
    }

    /// The next event, `None` at the time limit.
    pub fn next_event(&self, timeout: Duration) -> Option<Event> {
        self.core().events.next(self.core().clock.as_ref(), timeout)
    }

    /// Waits until nothing is queued: `false` at the time limit. Tells no error of a persist: its ticket does.
    pub fn flush(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> Result<bool> {
        let idle = |state: &mut crate::core::State| (state.queue.is_empty() && state.active.is_none()).then_some(());
        Ok(self.core().wait(timeout, interrupt, idle)?.is_some())
    }

    /// Waits for what is queued, at most `timeout`, then stops. `false` if something stays staged: its region is left
    /// for the next process, and a warning names it. A write that is stuck is left behind with its thread.
    pub fn close(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> Result<bool> {
        let core = self.core();
        {
            let mut state = lock(&core.state);
            if let Phase::Closed { clean } = state.phase {
                return Ok(clean);
            }
            state.phase = Phase::Closing;
        }
        self.flush(timeout, interrupt)?;
        let mut guard = lock(&core.state);
        let state = &mut *guard;
        if let Phase::Closed { clean } = state.phase {
            return Ok(clean);
        }
        state.stop = true;
        let stuck = state.active.is_some();
        let left: Vec<Arc<Staged>> = state
            .staged
            .entries()
            .iter()
            .filter(|entry| !matches!(entry.fate, Fate::Persisted | Fate::OnlyHere))
            .map(|entry| Arc::clone(&entry.staged))
            .collect();
        let clean = left.is_empty() && !stuck;
        state.phase = Phase::Closed { clean };
        state.tier.close(&mut state.staged);
        let queued = state.take_queue();
        let worker = state.worker;
        core.changed.notify_all();
        drop(guard);
        for staged in &left {
            let text = if staged.images.iter().all(|image| image.memory == MemoryKind::Shared) {
                format!(
                    "{} is not persisted; it stays in memory, the next process on this node persists it",
                    staged.name()
                )
            } else {
                format!("{} is not persisted and is lost with this process: it is in private memory", staged.name())
            };
            core.log_of(Level::Warning, staged, text);
        }
        core.end_unpersisted(queued);
        if worker && !stuck {
            // It has nothing to do and sees `stop` at once.
            core.wait(None, interrupt, |state| (!state.worker).then_some(()))?;
        }
        core.events.close();
        Ok(clean)
    }
}

impl Core {
    /// The state of a root, shared by all who open it.
    pub(crate) fn root(&self, path: &Path, create: bool) -> Result<Arc<RootState>> {
        let options = RootOptions { create, lock_wait: self.options.lock_timeout };
        let disk = if is_memory_only(path) { Arc::new(Nowhere::new(path)) } else { Arc::clone(&self.disk) };
        let store = RootStore::open(disk, Arc::clone(&self.clock), path, options)?;
        if let Some(known) = lock(&self.state).roots.get(store.path()) {
            return Ok(Arc::clone(known));
        }
        let (run, sequence) = store.highest()?;
        let new = Arc::new(RootState::new(store));
        let mut state = lock(&self.state);
        let known = Arc::clone(state.roots.entry(new.store.path().to_path_buf()).or_insert(new));
        known.saw(run, sequence);
        Ok(known)
    }

    /// Copies an image into the memory tier; `None` where there is no room for it. Second: the wait for room.
    pub(crate) fn stage(
        &self,
        plan: &ImagePlan<'_>,
        mut record: ImageRecord,
        compare: bool,
        spill: &mut dyn FnMut() -> Result<bool>,
        interrupt: Interrupt<'_>,
    ) -> Result<(Option<StagedImage>, Duration)> {
        // Checksums are written with all their digits: the blank record is as long as the real one can be.
        let meta_len = record_bytes(&SlotRecord::Image(record.clone()))?.len();
        let (room, waited) = self.allocate(plan.total_len(), meta_len, spill, interrupt)?;
        let Room::Memory { mut image, kind, .. } = room else { return Ok((None, waited)) };
        let copier = self.copier(interrupt);
        let mut stager = crate::stage::Stager::new(plan, copier);
        stager.fill(image.bytes_mut())?;
        if compare {
            crate::stage::check_same(plan, copier, image.bytes_mut())?;
        }
        let sums = stager.finish();
        record.crc32 = sums.crc32;
        record.chunks = sums.chunks;
        let meta = record_bytes(&SlotRecord::Image(record.clone()))?;
        let image = image.publish(&meta).map_err(memory_error)?;
        Ok((Some(StagedImage { record, image, memory: kind }), waited))
    }

    /// Tells whoever waits for these that the engine ends before they were persisted.
    fn end_unpersisted(&self, jobs: impl IntoIterator<Item = Arc<Job>>) {
        for job in jobs {
            let text = format!("the engine was closed before {} was persisted", job.staged.name());
            let state = job.ticket.end(Err(Arc::new(Error::new(ErrorKind::Closed, text))));
            self.events.push(Event::Ticket { id: job.ticket.id(), state });
        }
    }

    /// Puts what is complete into the catalogue and the queue.
    pub(crate) fn submit(
        self: &Arc<Self>,
        staged: Arc<Staged>,
        root: Option<Arc<RootState>>,
        spilled: Option<crate::core::Spilled>,
    ) -> Ticket {
        let more = spilled.as_ref().map_or(0, |spilled| spilled.files.iter().map(|file| file.bytes).sum());
        let ticket = self.new_ticket(&staged, more);
        if let Some(root) = staged.root().filter(|root| is_memory_only(root)) {
            let mut guard = lock(&self.state);
            let state = &mut *guard;
            state.staged.insert(Entry { staged: Arc::clone(&staged), fate: Fate::OnlyHere });
            state.staged.keep_newest_only_here(root, state.memory_keep);
            state.tier.remove_empty_regions(&state.staged);
            drop(guard);
            let ended = ticket.end(Ok(()));
            self.events.push(Event::Ticket { id: ticket.id(), state: ended });
            return ticket;
        }
        let entry = Entry { staged: Arc::clone(&staged), fate: Fate::Waiting };
        let job = Job::new(ticket.clone(), staged, root, spilled);
        {
            let mut state = lock(&self.state);
            if matches!(state.phase, Phase::Closed { .. }) {
                // Closed between the check and here: the caller is told.
                drop(state);
                self.end_unpersisted([job]);
                return ticket;
            }
            state.staged.insert(entry);
        }
        self.enqueue(vec![job], false);
        ticket
    }
}

/// The record of an image before its bytes have passed.
pub(crate) fn blank_record(
    plan: &ImagePlan<'_>,
    chunk_bytes: u64,
    target: Target,
    file: &str,
    share: u64,
) -> ImageRecord {
    let bytes = plan.total_len();
    let chunks = vec![u32::MAX; bytes.div_ceil(chunk_bytes) as usize];
    ImageRecord { target, file: file.to_owned(), bytes, crc32: u32::MAX, chunk_bytes, chunks, share }
}

pub(crate) fn record_bytes(record: &SlotRecord) -> Result<Vec<u8>> {
    record.to_bytes().map_err(|cause| {
        Error::new(ErrorKind::InvalidArgument, format!("the record of an image cannot be written: {cause}"))
            .because(cause)
    })
}

pub(crate) fn memory_error(cause: relight_io::arena::ArenaError) -> Error {
    Error::new(ErrorKind::StorageUnavailable, format!("the memory tier failed: {cause}; save again")).because(cause)
}

/// The absolute path that a save to `path` replaces: links resolved, the last name too where it exists.
fn target_of(disk: &dyn Disk, path: &Path) -> Result<PathBuf> {
    check_target(disk, path)?;
    if let Ok(resolved) = disk.canonical(path) {
        return Ok(resolved);
    }
    let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
        let text = format!("{} is not a file name; name a file in a directory", path.display());
        return Err(Error::new(ErrorKind::InvalidArgument, text).at(path));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let parent = disk.canonical(parent).map_err(|cause| Error::create(path, parent, cause))?;
    Ok(parent.join(name))
}

/// What is at a path, in one number: 0 for nothing.
pub(crate) fn version_of(disk: &dyn Disk, path: &Path) -> u64 {
    disk.metadata(path).map_or(0, |found| found.version.max(1))
}

//! Persist: writes what is staged to its place and commits it, in the order of the seals.
//!
//! Owns: the one persist thread, the attempts of each job, what happens after the last of them.
//! Must not: die of an error or a panic; let the failure of one save cost another; know anything of Python.
//! Invariant: an image is marked as persisted only after its commit is durable.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use relight_format::history::HistoryRecord;
use relight_format::manifest::FileRecord;
use relight_format::record::TagRecord;
use relight_io::{copy, priority};

use crate::commit::{CommitFacts, Committed, CompleteParts};
use crate::core::{Core, Job, RootState, Spilled, State};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Event, Level};
use crate::generation::Generation;
use crate::publish::PendingFile;
use crate::save_file::{seconds_since, with_need};
use crate::staged::{Fate, Purpose, StagedImage};
use crate::wait::{POLL, lock};

/// The background yields to training, but is not starved by it.
const NICE: i32 = 10;
/// The tier's word in the history.
const PERSISTENT: &str = "persistent";

impl Core {
    /// Queues a job behind the others, or before them (drained ones are older than any new save).
    pub(crate) fn enqueue(self: &Arc<Self>, jobs: Vec<Arc<Job>>, first: bool) {
        let mut state = lock(&self.state);
        if first {
            for job in jobs.into_iter().rev() {
                state.queue.push_front(job);
            }
        } else {
            state.queue.extend(jobs);
        }
        self.changed.notify_all();
        if state.worker || state.queue.is_empty() {
            return;
        }
        state.worker = true;
        drop(state);
        let core = Arc::clone(self);
        let spawned = thread::Builder::new().name("relight-persist".to_owned()).spawn(move || {
            // Not permitted in some sandboxes: then the thread runs at the priority of the others.
            let _ = priority::lower_this_thread(NICE);
            core.work(|state| !state.stop);
        });
        if let Err(cause) = spawned {
            // At the process limit. The save must not be lost: this thread persists, and says why it takes so long.
            let text = format!("no thread can be started ({cause}): checkpoints are persisted within the call");
            self.say_once("thread", Level::Warning, text);
            self.work(|state| !state.queue.is_empty());
        }
    }

    /// Runs jobs for as long as `go_on` says so.
    fn work(&self, go_on: impl Fn(&State) -> bool) {
        let mut state = lock(&self.state);
        while go_on(&state) {
            let Some(job) = state.queue.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            };
            state.active = Some(Arc::clone(&job));
            drop(state);
            self.run(&job);
            state = lock(&self.state);
            state.active = None;
            // The job holds its images: it goes before a waiter looks for room.
            drop(job);
            state.finished += 1;
            self.changed.notify_all();
        }
        state.worker = false;
        self.changed.notify_all();
    }

    fn run(&self, job: &Job) {
        // A panic in the bookkeeping must not end the thread either.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.attempts(job))).unwrap_or_else(|_| Err(panicked(job)));
        let committed = outcome.is_ok();
        let ended = catch_unwind(AssertUnwindSafe(|| match outcome {
            Ok(()) => self.after_commit(job),
            Err(error) => self.after_failure(job, error),
        }));
        if ended.is_err() && !job.ticket.state().is_final() {
            lock(&self.state).staged.set_fate(&job.staged, if committed { Fate::Persisted } else { Fate::Failed });
            let state = job.ticket.end(if committed { Ok(()) } else { Err(Arc::new(panicked(job))) });
            self.events.push(Event::Ticket { id: job.ticket.id(), state });
        }
    }

    /// Tries until it works, cannot work, or was tried often enough.
    fn attempts(&self, job: &Job) -> Result<()> {
        let mut delay = self.options.retry_delay;
        for attempt in 1.. {
            job.ticket.begin_attempt();
            let started = self.clock.monotonic();
            let tried = catch_unwind(AssertUnwindSafe(|| self.attempt(job))).unwrap_or_else(|_| Err(panicked(job)));
            let Err(error) = tried else { return Ok(()) };
            let seconds = seconds_since(self.clock.as_ref(), started);
            let last = attempt >= self.options.attempts_max || !error.kind.retryable() || lock(&self.state).stop;
            self.write_history(job, if last { "failed" } else { "retry" }, seconds, &error.message);
            if last {
                return Err(error);
            }
            let text = format!("persist of {} failed and is tried again: {error}", job.staged.name());
            self.log_of(Level::Warning, &job.staged, text);
            self.back_off(delay);
            delay = delay.saturating_mul(2);
        }
        Ok(())
    }

    /// In short pieces: a close does not wait for the end of a long delay.
    pub(crate) fn back_off(&self, delay: Duration) {
        let mut left = delay;
        while !left.is_zero() && !lock(&self.state).stop {
            let piece = left.min(POLL);
            self.clock.pause(piece);
            left -= piece;
        }
    }

    fn attempt(&self, job: &Job) -> Result<()> {
        match &job.staged.purpose {
            Purpose::Tag { root: path, record, .. } => {
                if job.root.get().is_none() {
                    // It could not be opened when the share was drained. Err: another thread has set it, which is as good.
                    let _ = job.root.set(self.root(path, false)?);
                }
                let Some(root) = job.root.get() else { return Ok(()) };
                self.persist_share(job, root, record)
            }
            Purpose::File { path } => {
                let image = job.staged.images.first();
                image.map_or(Ok(()), |image| {
                    let mut file = PendingFile::for_path(&self.disk, path)?;
                    self.write_image(job, image, &mut file)?;
                    file.finish_durable()
                        .map_err(|error| with_need(error, self.disk.as_ref(), path, image.record.bytes))
                })
            }
        }
    }

    fn persist_share(&self, job: &Job, root: &RootState, record: &TagRecord) -> Result<()> {
        let rank = record.writer.rank;
        let Spilled { mut generation, mut files } = match lock(&job.spilled).take() {
            Some(spilled) => spilled,
            None => Spilled {
                generation: root.store.tag(&record.tag)?.begin_generation(&self.writer(rank))?,
                files: Vec::new(),
            },
        };
        let spilled_count = files.len();
        let committed = self.commit_share(job, root, record, &mut generation, &mut files);
        if committed.is_err() && job.staged.partial {
            // What is durable only in this generation cannot be written again: the next attempt goes on in it.
            files.truncate(spilled_count);
            *lock(&job.spilled) = Some(Spilled { generation, files });
        }
        let committed = committed.map_err(|error| error.of_tag(&record.tag).on_rank(rank))?;
        if let Some(unsettled) = committed.unsettled {
            let text = format!("{} is committed and loads, but is not at its plain names yet: {unsettled}", record.tag);
            self.log_of(Level::Warning, &job.staged, text);
        }
        Ok(())
    }

    fn commit_share(
        &self,
        job: &Job,
        root: &RootState,
        record: &TagRecord,
        generation: &mut Generation,
        files: &mut Vec<FileRecord>,
    ) -> Result<Committed> {
        let rank = record.writer.rank;
        for image in &job.staged.images {
            let started = self.clock.monotonic();
            let file = image.record.as_file(generation.number(), rank);
            self.write_in_generation(job, generation, image, &file)?;
            let seconds = seconds_since(self.clock.as_ref(), started);
            let line = self.history_line("persist", &record.tag, &file.name, rank, file.bytes, seconds, "");
            self.append_history(root, &line);
            files.push(file);
        }
        let part = generation.write_part(rank, record.world_size, files)?;
        let parts = CompleteParts::check(vec![part], record.world_size)?;
        let facts = CommitFacts {
            run: record.run,
            sequence: record.sequence,
            step: record.step,
            world_size: record.world_size,
            staged_at: record.sealed_at.clone(),
            best: record.best,
            writers: vec![record.writer.clone()],
            meta: record.meta.clone(),
        };
        generation.try_commit(&parts, &facts)
    }

    fn write_in_generation(
        &self,
        job: &Job,
        generation: &Generation,
        image: &StagedImage,
        file: &FileRecord,
    ) -> Result<()> {
        let mut pending = generation.create_file(&file.path)?;
        self.write_image(job, image, &mut pending)?;
        let target = pending.target().to_path_buf();
        pending.finish().map_err(|error| with_need(error, self.disk.as_ref(), &target, file.bytes))
    }

    fn write_image(&self, job: &Job, image: &StagedImage, file: &mut PendingFile) -> Result<()> {
        let target = file.target().to_path_buf();
        let full = |error| with_need(error, self.disk.as_ref(), &target, image.record.bytes);
        let bytes = image.image.bytes();
        if job.staged.adopted.is_some() && copy::best().crc(bytes) != image.record.crc32 {
            // It comes from a process that died: what it wrote last is not trusted unseen.
            let text = format!("the staged image of {} is damaged and cannot be drained", image.record.file);
            return Err(Error::new(ErrorKind::Corrupt, text).at(&target));
        }
        file.reserve(image.record.bytes).map_err(full)?;
        file.write_pieces(0, bytes, &mut |written| job.ticket.add_bytes(written)).map_err(full)
    }

    /// After the commit nothing is an error of the save any more: what fails here is said and left.
    fn after_commit(&self, job: &Job) {
        job.staged.mark_persisted();
        if let (Some(root), Some(record)) = (job.root.get(), job.staged.tag()) {
            self.write_history(job, "commit", job.ticket.progress().seconds, "");
            self.tidy_root(job, root, record);
        }
        self.tidy_memory(job);
        if job.staged.adopted.is_some() {
            let text = format!("drained: {} of a dead process is persisted", job.staged.name());
            self.log_of(Level::Info, &job.staged, text);
        }
        let state = job.ticket.end(Ok(()));
        self.events.push(Event::Ticket { id: job.ticket.id(), state });
    }

    /// Hint, retention, and the numbers that other processes have used meanwhile.
    fn tidy_root(&self, job: &Job, root: &RootState, record: &TagRecord) {
        let warn = |what: &str, error: &Error| {
            self.log_of(Level::Warning, &job.staged, format!("{} is committed, but {what}: {error}", record.tag));
        };
        let (walk, hint) = match root.store.point_at_latest() {
            Ok((walk, hint)) => (Ok(walk), hint),
            Err(error) => (root.store.walk(), Err(error)),
        };
        if let Err(error) = hint {
            warn("the file `latest` was not written", &error);
        }
        let walk = match walk {
            Ok(walk) => walk,
            Err(error) => return warn("the root could not be read again, nor older checkpoints be deleted", &error),
        };
        root.saw(walk.highest.0, walk.highest.1);
        if let Some(keep) = record.keep {
            match root.store.retain_of(&walk.checkpoints, keep as usize, &record.tag, &root.pinned()) {
                Ok(retained) => {
                    for (tag, error) in &retained.failed {
                        warn(&format!("the older {tag} was not deleted"), error);
                    }
                    self.forget(root, &retained.deleted, record);
                }
                Err(error) => warn("older checkpoints were not deleted", &error),
            }
        }
    }

    /// Tags that retention deleted leave the memory tier too.
    fn forget(&self, root: &RootState, deleted: &[String], record: &TagRecord) {
        for tag in deleted {
            let line = self.history_line("delete", tag, "", record.writer.rank, 0, 0.0, "");
            self.append_history(root, &line);
        }
        let mut state = lock(&self.state);
        state.staged.evict_where(|entry| {
            entry.staged.root() == Some(root.store.path())
                && entry.staged.tag().is_some_and(|record| deleted.contains(&record.tag))
        });
    }

    fn tidy_memory(&self, job: &Job) {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        state.staged.set_fate(&job.staged, Fate::Persisted);
        let useless = match (&job.staged.purpose, job.staged.tag()) {
            (Purpose::Tag { root, .. }, Some(done)) => {
                let gone = state.staged.evict_where(|entry| {
                    let ours = Arc::ptr_eq(&entry.staged, &job.staged);
                    let failed_before = entry.fate == Fate::Failed
                        && entry.staged.root() == Some(root)
                        && entry.staged.tag().is_some_and(|failed| failed.sequence < done.sequence);
                    (ours && job.staged.partial) || failed_before
                });
                state.staged.keep_newest(root, state.memory_keep);
                gone
            }
            (Purpose::File { path }, _) | (Purpose::Tag { root: path, .. }, None) => {
                state.staged.evict_where(|entry| {
                    Arc::ptr_eq(&entry.staged, &job.staged)
                        || (entry.fate == Fate::Failed
                            && matches!(&entry.staged.purpose, Purpose::File { path: failed } if failed == path))
                })
            }
        };
        state.tier.remove_empty_regions(&state.staged);
        drop(guard);
        for lost in useless.iter().filter(|lost| !Arc::ptr_eq(lost, &job.staged)) {
            let text =
                format!("{} could not be persisted and leaves the memory tier: a newer one is committed", lost.name());
            self.log_of(Level::Info, lost, text);
        }
    }

    fn after_failure(&self, job: &Job, error: Error) {
        lock(&self.state).staged.set_fate(&job.staged, Fate::Failed);
        let attempts = job.ticket.progress().attempts;
        let text = format!("{} was not persisted ({attempts} attempts): {error}", job.staged.name());
        self.log_of(Level::Error, &job.staged, text);
        let state = job.ticket.end(Err(Arc::new(error)));
        self.events.push(Event::Ticket { id: job.ticket.id(), state });
    }

    fn write_history(&self, job: &Job, event: &str, seconds: f64, error: &str) {
        if let (Some(root), Some(record)) = (job.root.get(), job.staged.tag()) {
            let bytes = job.ticket.progress().bytes_total;
            let line = self.history_line(event, &record.tag, "", record.writer.rank, bytes, seconds, error);
            self.append_history(root, &line);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the columns of a line; a struct of the same fields is what it makes")]
    pub(crate) fn history_line(
        &self,
        event: &str,
        tag: &str,
        file: &str,
        rank: u32,
        bytes: u64,
        seconds: f64,
        error: &str,
    ) -> HistoryRecord {
        HistoryRecord {
            time: self.now_text(),
            event: event.to_owned(),
            tag: tag.to_owned(),
            file: file.to_owned(),
            rank,
            tier: PERSISTENT.to_owned(),
            bytes,
            seconds,
            error: error.to_owned(),
        }
    }

    pub(crate) fn append_history(&self, root: &RootState, line: &HistoryRecord) {
        if let Err(error) = root.store.history().append(line) {
            self.say_once("history", Level::Warning, format!("the history cannot be written: {error}"));
        }
    }
}

fn panicked(job: &Job) -> Error {
    let text = format!("the engine panicked while it persisted {}", job.staged.name());
    Error::new(ErrorKind::StorageUnavailable, text)
}

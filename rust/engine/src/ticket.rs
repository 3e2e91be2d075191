//! Ticket: what the caller holds of one persist under way.
//!
//! Owns: its state, counters and, if it failed, its error, for as long as anyone asks.
//! Must not: keep an image alive, or stop the persist when it is dropped.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde::Serialize;

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::wait::{Interrupt, lock, wait_until};

/// Where a persist stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TicketState {
    /// Staged; waits for its turn.
    Queued,
    /// Being written.
    Persisting,
    /// Durable and visible.
    Committed,
    /// Given up; `Ticket::check` has the error.
    Failed,
}

impl TicketState {
    /// Whether nothing more will happen.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Committed | Self::Failed)
    }
}

/// Counters of one persist.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// Where it stands.
    pub state: TicketState,
    /// Bytes of all its files.
    pub bytes_total: u64,
    /// Bytes written by the present attempt.
    pub bytes_persisted: u64,
    /// Attempts begun.
    pub attempts: u32,
    /// From the start of the first attempt to the end, or to now.
    pub seconds: f64,
    /// From the seal to the first attempt, or to now.
    pub queued_seconds: f64,
}

#[derive(Debug)]
struct Course {
    state: TicketState,
    attempts: u32,
    started: Option<Duration>,
    ended: Option<Duration>,
    error: Option<Arc<Error>>,
}

#[derive(Debug)]
struct Shared {
    id: u64,
    tag: Option<String>,
    path: PathBuf,
    clock: Arc<dyn Clock>,
    queued: Duration,
    bytes_total: u64,
    bytes_persisted: AtomicU64,
    course: Mutex<Course>,
    changed: Condvar,
}

/// One persist under way.
#[derive(Clone, Debug)]
pub struct Ticket {
    shared: Arc<Shared>,
}

impl Ticket {
    /// `path` is the root of a tag, or the file that is written by itself.
    pub(crate) fn new(id: u64, tag: Option<String>, path: PathBuf, bytes_total: u64, clock: Arc<dyn Clock>) -> Self {
        let course = Course { state: TicketState::Queued, attempts: 0, started: None, ended: None, error: None };
        let shared = Shared {
            id,
            tag,
            path,
            queued: clock.monotonic(),
            clock,
            bytes_total,
            bytes_persisted: AtomicU64::new(0),
            course: Mutex::new(course),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Its number, unique in the engine.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// The tag, unless it is a single file.
    pub fn tag(&self) -> Option<&str> {
        self.shared.tag.as_deref()
    }

    /// The root of the tag, or the single file.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Where it stands.
    pub fn state(&self) -> TicketState {
        lock(&self.shared.course).state
    }

    /// Its counters.
    pub fn progress(&self) -> Progress {
        let course = lock(&self.shared.course);
        let now = self.shared.clock.monotonic();
        let end = course.ended.unwrap_or(now);
        let started = course.started.unwrap_or(end);
        Progress {
            state: course.state,
            bytes_total: self.shared.bytes_total,
            // Relaxed: a counter for people, it orders nothing.
            bytes_persisted: self.shared.bytes_persisted.load(Ordering::Relaxed),
            attempts: course.attempts,
            seconds: end.saturating_sub(started).as_secs_f64(),
            queued_seconds: started.saturating_sub(self.shared.queued).as_secs_f64(),
        }
    }

    /// Waits until it is committed or failed: `false` at the time limit.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> Result<bool> {
        let shared = &*self.shared;
        let done = |course: &mut Course| course.state.is_final().then_some(());
        Ok(wait_until(&shared.course, &shared.changed, &*shared.clock, timeout, interrupt, done)?.is_some())
    }

    /// The error of a failed persist, as a new error each time; `Ok` while it is under way.
    pub fn check(&self) -> Result<()> {
        match &lock(&self.shared.course).error {
            Some(error) => Err(again(error)),
            None => Ok(()),
        }
    }

    pub(crate) fn begin_attempt(&self) {
        let mut course = lock(&self.shared.course);
        course.state = TicketState::Persisting;
        course.attempts += 1;
        course.started.get_or_insert_with(|| self.shared.clock.monotonic());
        self.shared.bytes_persisted.store(0, Ordering::Relaxed);
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.shared.bytes_persisted.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn end(&self, outcome: Result<(), Arc<Error>>) -> TicketState {
        let mut course = lock(&self.shared.course);
        course.ended = Some(self.shared.clock.monotonic());
        match outcome {
            Ok(()) => course.state = TicketState::Committed,
            Err(error) => {
                course.state = TicketState::Failed;
                course.error = Some(error);
            }
        }
        self.shared.changed.notify_all();
        course.state
    }
}

/// A new error with the facts of `error`: an exception that is raised twice must not be one object.
pub(crate) fn again(error: &Arc<Error>) -> Error {
    let mut new = Error::new(error.kind, error.message.clone());
    new.path.clone_from(&error.path);
    new.tag.clone_from(&error.tag);
    new.rank = error.rank;
    // The system's code stays readable on the copy; any other cause is reached through the original.
    match error.os_code() {
        Some(code) => new.because(std::io::Error::from_raw_os_error(code)),
        None => new.because(SharedCause(Arc::clone(error))),
    }
}

/// The cause of an error that is kept in one place and told in many.
#[derive(Debug)]
struct SharedCause(Arc<Error>);

impl std::fmt::Display for SharedCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0.source {
            Some(cause) => cause.fmt(f),
            None => self.0.fmt(f),
        }
    }
}

impl std::error::Error for SharedCause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().and_then(|cause| cause.source())
    }
}

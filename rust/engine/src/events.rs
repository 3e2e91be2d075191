//! Events: what happened in the background, for whoever shows or logs it.
//!
//! Owns: the queue between the engine's threads and the one reader.
//! Must not: call the reader, block a writer, or be the only place where an error is told (its ticket keeps it too).

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use serde::Serialize;

use crate::clock::Clock;
use crate::ticket::TicketState;
use crate::wait::{lock, never, wait_until};

/// Events kept for a reader that does not read; then the oldest go.
const EVENTS_MAX: usize = 4096;

/// How loud a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Good to know.
    Info,
    /// Something is not as it should be; nothing is lost.
    Warning,
    /// Something failed.
    Error,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// A message for the log.
    Log {
        /// How loud.
        level: Level,
        /// The fact and the way out.
        message: String,
        /// The tag that it is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        tag: Option<String>,
        /// The root that it is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        root: Option<String>,
    },
    /// A persist ended.
    Ticket {
        /// Which.
        id: u64,
        /// `committed` or `failed`.
        state: TicketState,
    },
    /// The engine is closed; no event follows.
    Closed,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    closed: bool,
}

/// The queue of events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Events {
    pub(crate) fn push(&self, event: Event) {
        let mut queue = lock(&self.queue);
        if queue.events.len() == EVENTS_MAX {
            queue.events.pop_front();
        }
        queue.events.push_back(event);
        self.changed.notify_all();
    }

    pub(crate) fn log(&self, level: Level, message: impl Into<String>) {
        self.push(Event::Log { level, message: message.into(), tag: None, root: None });
    }

    pub(crate) fn log_tag(&self, level: Level, root: &Path, tag: &str, message: impl Into<String>) {
        let root = Some(root.display().to_string());
        self.push(Event::Log { level, message: message.into(), tag: Some(tag.to_owned()), root });
    }

    /// From here on, a reader that has read everything gets `Closed`, each time.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn next(&self, clock: &dyn Clock, timeout: Duration) -> Option<Event> {
        let next = |queue: &mut Queue| queue.events.pop_front().or(queue.closed.then_some(Event::Closed));
        // `never` gives no error.
        wait_until(&self.queue, &self.changed, clock, Some(timeout), &never, next).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn a_reader_gets_events_in_order_and_then_closed_for_ever() {
        let (events, clock) = (Events::default(), SystemClock::new());
        assert_eq!(events.next(&clock, Duration::ZERO), None);
        events.log_tag(Level::Warning, Path::new("/r"), "t", "m");
        events.close();
        let first = serde_json::to_string(&events.next(&clock, Duration::ZERO)).unwrap();
        assert_eq!(first, r#"{"event":"log","level":"warning","message":"m","tag":"t","root":"/r"}"#);
        for _ in 0..2 {
            assert_eq!(events.next(&clock, Duration::from_secs(9)), Some(Event::Closed));
        }
    }

    #[test]
    fn a_reader_that_does_not_read_costs_bounded_memory() {
        let events = Events::default();
        for _ in 0..EVENTS_MAX + 10 {
            events.log(Level::Info, "x");
        }
        assert_eq!(lock(&events.queue).events.len(), EVENTS_MAX);
    }
}

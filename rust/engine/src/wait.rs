//! Waiting: for a condition, with a time limit, and so that Ctrl-C is noticed.
//!
//! Owns: how often a waiting caller looks for an interrupt.
//! Must not: wait for an event by sleeping: a wait ends when the other side says so.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Clock;
use crate::error::Result;

/// Asked by long calls, on the calling thread, whether the caller wants to stop; the error ends the call.
pub type Interrupt<'a> = &'a dyn Fn() -> Result<()>;

/// How often a waiting caller looks for an interrupt.
pub(crate) const POLL: Duration = Duration::from_millis(100);

/// An interrupt that never comes.
pub fn never() -> Result<()> {
    Ok(())
}

/// Asks for an interrupt, but not more often than every `POLL`.
pub(crate) struct Pulse<'a> {
    clock: &'a dyn Clock,
    interrupt: Interrupt<'a>,
    asked: Duration,
}

impl<'a> Pulse<'a> {
    pub(crate) fn new(clock: &'a dyn Clock, interrupt: Interrupt<'a>) -> Self {
        Self { clock, interrupt, asked: clock.monotonic() }
    }

    pub(crate) fn poll(&mut self) -> Result<()> {
        let now = self.clock.monotonic();
        if now.saturating_sub(self.asked) < POLL {
            return Ok(());
        }
        self.asked = now;
        (self.interrupt)()
    }
}

/// Locks. A panic elsewhere does not make the data unusable: each critical section leaves it whole at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `done` gives a value: `None` at the time limit.
pub(crate) fn wait_until<'m, T, R>(
    mutex: &'m Mutex<T>,
    changed: &Condvar,
    clock: &dyn Clock,
    limit: Option<Duration>,
    interrupt: Interrupt<'_>,
    mut done: impl FnMut(&mut T) -> Option<R>,
) -> Result<Option<R>> {
    let deadline = limit.map(|limit| clock.monotonic().saturating_add(limit));
    let mut guard: MutexGuard<'m, T> = lock(mutex);
    loop {
        if let Some(value) = done(&mut guard) {
            return Ok(Some(value));
        }
        let rest = deadline.map_or(POLL, |deadline| deadline.saturating_sub(clock.monotonic()));
        if rest.is_zero() {
            return Ok(None);
        }
        guard = changed.wait_timeout(guard, rest.min(POLL)).unwrap_or_else(PoisonError::into_inner).0;
        if let Some(value) = done(&mut guard) {
            return Ok(Some(value));
        }
        // The caller's check may take the interpreter's lock, whose holder may want this mutex: never hold both.
        drop(guard);
        interrupt()?;
        guard = lock(mutex);
    }
}

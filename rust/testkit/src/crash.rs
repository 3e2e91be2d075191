//! A disk that stops between two calls, as a kill or a power cut does.
//!
//! Owns: the count of changing calls, and the point at which all is over.
//! Must not: let anything through after that point: a dead process cleans nothing up.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;

use crate::hook::{Call, Hook, HookedDisk, Op, Verdict};
use crate::memory::MemoryDisk;

/// Where a [`CrashDisk`] stops, and what it has seen.
#[derive(Debug, Default)]
pub struct CrashPoint {
    state: Mutex<CrashState>,
}

#[derive(Debug, Default)]
struct CrashState {
    seen: u64,
    stop_at: Option<u64>,
    stopped_by: Option<Call>,
}

impl Hook for CrashPoint {
    fn before(&self, call: &Call) -> Verdict {
        let mut state = self.state.lock().unwrap();
        let dead = || io::Error::other("the machine is off");
        if state.stopped_by.is_some() {
            return Verdict::Fail(dead());
        }
        if !call.op.changes() {
            return Verdict::Go;
        }
        state.seen += 1;
        if state.stop_at == Some(state.seen) {
            state.stopped_by = Some(call.clone());
            // a write can be broken off in its middle, every other call is made or not
            return if call.op == Op::Write { Verdict::Partial(call.bytes / 2, dead()) } else { Verdict::Fail(dead()) };
        }
        Verdict::Go
    }
}

/// A [`MemoryDisk`] that can be stopped before its n-th changing call.
pub type CrashDisk = HookedDisk<CrashPoint>;

impl CrashDisk {
    /// Counts, and never stops.
    pub fn new(memory: &MemoryDisk) -> Self {
        Self::over(Arc::new(memory.clone()), CrashPoint::default())
    }

    /// Stops instead of making the `call`-th changing call, from 1 on; every later call of any kind fails.
    pub fn stop_at(memory: &MemoryDisk, call: u64) -> Self {
        let disk = Self::new(memory);
        disk.hook().state.lock().unwrap().stop_at = Some(call);
        disk
    }

    /// How many changing calls were made or stopped.
    pub fn changes(&self) -> u64 {
        self.hook().state.lock().unwrap().seen
    }

    /// The call that was not made any more.
    pub fn stopped_by(&self) -> Option<Call> {
        self.hook().state.lock().unwrap().stopped_by.clone()
    }
}

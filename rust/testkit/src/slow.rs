//! A disk that stands still where a test says, until the test lets it go on.
//!
//! Owns: the gate. Must not: use time; a test waits for the call to be stuck, then opens the gate.

use std::sync::Arc;
use std::sync::{Condvar, Mutex};

use relight_engine::disk::Disk;

use crate::hook::{Call, Hook, HookedDisk, Op, Verdict};

/// Where calls wait.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    closed_for: Option<(Op, String)>,
    waiting: usize,
}

impl Gate {
    /// Calls of kind `op` whose path has `part` in it wait from now on.
    pub fn close(&self, op: Op, part: &str) {
        self.state.lock().unwrap().closed_for = Some((op, part.to_owned()));
    }

    /// Lets all go on.
    pub fn open(&self) {
        self.state.lock().unwrap().closed_for = None;
        self.changed.notify_all();
    }

    /// Returns once `count` calls wait at the gate.
    pub fn wait_until_stuck(&self, count: usize) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| state.waiting < count).unwrap());
    }
}

impl Hook for Gate {
    fn before(&self, call: &Call) -> Verdict {
        let stops = |state: &GateState| {
            state
                .closed_for
                .as_ref()
                .is_some_and(|(op, part)| *op == call.op && call.path.to_string_lossy().contains(part.as_str()))
        };
        let mut state = self.state.lock().unwrap();
        if stops(&state) {
            state.waiting += 1;
            self.changed.notify_all();
            state = self.changed.wait_while(state, |state| stops(state)).unwrap();
            state.waiting -= 1;
        }
        Verdict::Go
    }
}

/// A disk with a gate.
pub type SlowDisk = HookedDisk<Gate>;

impl SlowDisk {
    /// `inner`, the gate open.
    pub fn new(inner: Arc<dyn Disk>) -> Self {
        Self::over(inner, Gate::default())
    }

    /// The gate.
    pub fn gate(&self) -> &Gate {
        self.hook()
    }
}

//! A disk that fails where a test says.
//!
//! Owns: which calls fail, with which error of the system.
//! Must not: fail anything else.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;

use relight_engine::disk::Disk;

use crate::hook::{Call, Hook, HookedDisk, Op, Verdict};

/// One rule: which calls fail, and how.
#[derive(Clone, Debug)]
pub struct Fault {
    errno: i32,
    ops: Option<Vec<Op>>,
    path_part: Option<String>,
    skip: u64,
    times: u64,
    short_write: bool,
}

impl Fault {
    /// Every call fails with the system's error `errno`; the methods narrow that down.
    pub fn with(errno: i32) -> Self {
        Self { errno, ops: None, path_part: None, skip: 0, times: u64::MAX, short_write: false }
    }

    /// Only calls of this kind.
    #[must_use]
    pub fn on(mut self, op: Op) -> Self {
        self.ops.get_or_insert_default().push(op);
        self
    }

    /// Only calls that can change something.
    #[must_use]
    pub fn on_changes(self) -> Self {
        use Op::{CreateDir, CreateFile, Lock, RemoveDir, RemoveFile, Rename, Reserve, SyncDir, SyncFile, Write};
        let all = [CreateDir, CreateFile, Lock, RemoveDir, RemoveFile, Rename, Reserve, SyncDir, SyncFile, Write];
        all.into_iter().fold(self, Self::on)
    }

    /// Only calls whose path has `part` in it.
    #[must_use]
    pub fn in_path(mut self, part: &str) -> Self {
        self.path_part = Some(part.to_owned());
        self
    }

    /// Lets the first `calls` that match pass.
    #[must_use]
    pub fn after(mut self, calls: u64) -> Self {
        self.skip = calls;
        self
    }

    /// Fails `times` calls, then no more.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// A write that fails puts half of its bytes on the disk before.
    #[must_use]
    pub fn short_write(mut self) -> Self {
        self.short_write = true;
        self
    }

    fn matches(&self, call: &Call) -> bool {
        self.ops.as_ref().is_none_or(|ops| ops.contains(&call.op))
            && self.path_part.as_ref().is_none_or(|part| call.path.to_string_lossy().contains(part.as_str()))
    }
}

/// The rules of a [`FaultDisk`], and what it has seen.
#[derive(Debug, Default)]
pub struct Faults {
    state: Mutex<FaultState>,
}

#[derive(Debug, Default)]
struct FaultState {
    rules: Vec<Fault>,
    calls: Vec<Call>,
    failed: u64,
}

impl Hook for Faults {
    fn before(&self, call: &Call) -> Verdict {
        let mut state = self.state.lock().unwrap();
        state.calls.push(call.clone());
        let mut verdict = Verdict::Go;
        for rule in state.rules.iter_mut().filter(|rule| rule.matches(call)) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 {
                rule.times -= 1;
                let error = io::Error::from_raw_os_error(rule.errno);
                verdict = if rule.short_write { Verdict::Partial(call.bytes / 2, error) } else { Verdict::Fail(error) };
                break;
            }
        }
        state.failed += u64::from(!matches!(verdict, Verdict::Go));
        verdict
    }
}

/// A disk that fails where its rules say; with none it passes everything on.
pub type FaultDisk = HookedDisk<Faults>;

impl FaultDisk {
    /// `inner`, failing nowhere yet.
    pub fn new(inner: Arc<dyn Disk>) -> Self {
        Self::over(inner, Faults::default())
    }

    /// Adds a rule.
    pub fn fail(&self, fault: Fault) {
        self.hook().state.lock().unwrap().rules.push(fault);
    }

    /// Removes all rules.
    pub fn heal(&self) {
        self.hook().state.lock().unwrap().rules.clear();
    }

    /// How many calls have failed.
    pub fn failed(&self) -> u64 {
        self.hook().state.lock().unwrap().failed
    }

    /// Every call so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.hook().state.lock().unwrap().calls.clone()
    }
}

//! The one door between Python and the engine.
//!
//! Owns: the refusal of forked children, the release of the GIL, panics, signals, and errors on their way out.
//! Must not: be bypassed. A method that calls the engine without it may hang a forked child, hold the GIL over a disk
//! write, or let a panic unwind into the interpreter.
//! Invariant: the process is checked before anything that may take a lock: in a forked child the holder of that lock
//! does not exist.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use relight_engine::wait::Interrupt;
use relight_engine::{Error, ErrorKind};

use crate::errors::to_python;

/// A value that belongs to the process that made it. In a forked child it refuses to be used and is never dropped:
/// dropping would take locks whose holders were left behind, or release what the parent still uses.
#[derive(Debug)]
pub(crate) struct Owned<T> {
    /// 0: nobody's.
    pid: u32,
    value: Option<T>,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { pid: std::process::id(), value: Some(value) }
    }

    /// A value that takes no locks and shares nothing that changes: a forked child may go on using it.
    pub(crate) fn by_nobody(value: T) -> Self {
        Self { pid: 0, value: Some(value) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The value, or the refusal of a forked child.
    pub(crate) fn get(&self) -> Result<&T, Error> {
        match &self.value {
            Some(value) if self.is_ours() => Ok(value),
            _ => Err(forked(self.pid)),
        }
    }

    fn is_ours(&self) -> bool {
        self.pid == 0 || self.pid == std::process::id()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.is_ours() {
            std::mem::forget(self.value.take());
        }
    }
}

fn forked(pid: u32) -> Error {
    let message = format!(
        "this process was forked from process {pid}, which the engine belongs to; save and load in process {pid}, or \
         start this one with the spawn method and open a Checkpointer in it"
    );
    Error::new(ErrorKind::Closed, message)
}

/// Calls the engine with the GIL free. `work` gets the check that long waits make every 100 ms.
pub(crate) fn enter<T, R, F>(py: Python<'_>, owned: &Owned<T>, work: F) -> PyResult<R>
where
    T: Sync,
    R: Send,
    F: FnOnce(&T, Interrupt<'_>) -> Result<R, Error> + Send,
{
    let value = owned.get().map_err(|error| to_python(py, error))?;
    enter_free(py, |interrupt| work(value, interrupt))
}

/// As `enter`, for calls that need no engine.
pub(crate) fn enter_free<R, F>(py: Python<'_>, work: F) -> PyResult<R>
where
    R: Send,
    F: FnOnce(Interrupt<'_>) -> Result<R, Error> + Send,
{
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let outcome = py.detach(|| {
        let interrupt = || match Python::try_attach(|py| py.check_signals()) {
            Some(Ok(())) => Ok(()),
            Some(Err(exception)) => {
                *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(exception);
                Err(Error::new(ErrorKind::Interrupted, "the wait was interrupted by a signal"))
            }
            None => Err(Error::new(ErrorKind::Closed, "the interpreter is shutting down")),
        };
        catch_unwind(AssertUnwindSafe(|| work(&interrupt)))
    });
    // What a signal handler raised comes first, even if the work got done: a Ctrl-C must not be swallowed.
    if let Some(exception) = raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(exception);
    }
    match outcome {
        Ok(result) => result.map_err(|error| to_python(py, error)),
        Err(panic) => Err(to_python(py, after_panic(panic.as_ref()))),
    }
}

fn after_panic(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    let message = format!(
        "a bug in relight stopped this call: {text}; what is committed is safe. Make a new Checkpointer, and please \
         report this with the lines that the engine wrote to stderr"
    );
    Error::new(ErrorKind::Closed, message)
}

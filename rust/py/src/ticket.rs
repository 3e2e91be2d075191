//! Python's `Ticket`.
//!
//! Owns: progress as JSON, the wait, the error of a failed persist as a new exception each time.
//! Must not: call back into Python from the persist thread.

use pyo3::prelude::*;
use relight_engine::ticket;

use crate::arguments::{json, limit};
use crate::enter::{Owned, enter};

/// One persist under way.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct Ticket {
    inner: Owned<ticket::Ticket>,
    id: u64,
    tag: Option<String>,
}

impl Ticket {
    pub(crate) fn new(ticket: ticket::Ticket) -> Self {
        let (id, tag) = (ticket.id(), ticket.tag().map(str::to_owned));
        Self { inner: Owned::new(ticket), id, tag }
    }
}

#[pymethods]
impl Ticket {
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    #[getter]
    fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// JSON {state, bytes_total, bytes_persisted, attempts, seconds, queued_seconds}.
    fn progress(&self, py: Python<'_>) -> PyResult<String> {
        enter(py, &self.inner, |ticket, _| json(&ticket.progress()))
    }

    /// True when committed or failed; False at the time limit.
    #[pyo3(signature = (timeout_s=None, /))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let limit = limit(py, "timeout_s", timeout_s)?;
        enter(py, &self.inner, |ticket, interrupt| ticket.wait(limit, interrupt))
    }

    /// Raises the error of a failed persist (a new exception each time).
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, &self.inner, |ticket, _| ticket.check())
    }

    fn __repr__(&self) -> String {
        format!(
            "<relight._core.Ticket {}{}>",
            self.id,
            self.tag.as_ref().map_or(String::new(), |tag| format!(" of {tag}"))
        )
    }
}

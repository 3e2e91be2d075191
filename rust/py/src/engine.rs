//! Python's `Engine`.
//!
//! Owns: the keywords of `Engine` and their defaults; JSON of what it reports.
//! Must not: keep an option that `EngineOptions` does not have.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PySequence;
use relight_engine::clock::SystemClock;
use relight_engine::disk::PosixDisk;
use relight_engine::engine::{self, EngineOptions};
use relight_engine::plan::ImagePlan;

use crate::arguments::{duration, json, limit};
use crate::buffers::Entries;
use crate::enter::{Owned, enter, enter_free};
use crate::root::Root;
use crate::share::StageReport;
use crate::ticket::Ticket;

/// One per process: the memory tier, copy threads and the persist thread.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct Engine {
    inner: Owned<engine::Engine>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        *, memory_bytes_max=None, memory_dir=None, memory_keep=2, chunk_bytes=4194304, copy_threads=2, attempts_max=3,
        retry_delay_s=0.5, lock_timeout_s=30.0,
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        memory_bytes_max: Option<u64>,
        memory_dir: Option<PathBuf>,
        memory_keep: usize,
        chunk_bytes: u64,
        copy_threads: usize,
        attempts_max: u32,
        retry_delay_s: f64,
        lock_timeout_s: f64,
    ) -> PyResult<Self> {
        let options = EngineOptions {
            memory_bytes_max,
            memory_dir,
            memory_keep,
            chunk_bytes,
            copy_threads,
            attempts_max,
            retry_delay: duration(py, "retry_delay_s", retry_delay_s)?,
            lock_timeout: duration(py, "lock_timeout_s", lock_timeout_s)?,
        };
        let engine =
            enter_free(py, |_| engine::Engine::new(options, Arc::new(PosixDisk), Arc::new(SystemClock::new())))?;
        Ok(Self { inner: Owned::new(engine) })
    }

    /// The process that the engine belongs to.
    #[getter]
    fn pid(&self) -> u32 {
        self.inner.pid()
    }

    /// Opens a directory of tags.
    #[pyo3(signature = (root, /, *, create=true, drain=true))]
    fn open_root(&self, py: Python<'_>, root: PathBuf, create: bool, drain: bool) -> PyResult<Root> {
        enter(py, &self.inner, |engine, _| engine.open_root(&root, create, drain)).map(Root::new)
    }

    /// Stages one file for `path` itself (no tag): what save_async to a path does.
    #[pyo3(signature = (path, entries, /, *, stem, compare=false))]
    fn stage_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        entries: &Bound<'_, PySequence>,
        stem: &str,
        compare: bool,
    ) -> PyResult<(StageReport, Ticket)> {
        let entries = Entries::export(entries)?;
        let plan = entries.plan();
        let (report, ticket) = enter(py, &self.inner, |engine, interrupt| {
            engine.stage_file(&path, &ImagePlan::new(stem, plan)?, compare, interrupt)
        })?;
        Ok((StageReport(report), Ticket::new(ticket)))
    }

    /// The newest unfinished stage_file to this path (links resolved), if there is one.
    #[pyo3(signature = (path, /))]
    fn pending_path(&self, py: Python<'_>, path: PathBuf) -> PyResult<Option<Ticket>> {
        let ticket = enter(py, &self.inner, |engine, _| Ok(engine.pending_path(&path)))?;
        Ok(ticket.map(Ticket::new))
    }

    /// Adopts regions of dead processes now; JSON list of what was found.
    fn drain(&self, py: Python<'_>) -> PyResult<String> {
        enter(py, &self.inner, |engine, _| json(&engine.drain()))
    }

    /// Waits until other processes have persisted what a dead one staged for this root or path.
    #[pyo3(signature = (place, /))]
    fn await_drains(&self, py: Python<'_>, place: PathBuf) -> PyResult<()> {
        enter(py, &self.inner, |engine, interrupt| engine.await_drains(&place, interrupt))
    }

    /// What the memory tier holds, as JSON.
    fn memory(&self, py: Python<'_>) -> PyResult<String> {
        enter(py, &self.inner, |engine, _| json(&engine.memory()))
    }

    /// How many persisted checkpoints of each root stay in memory, from the next commit on.
    #[pyo3(signature = (memory_keep, /))]
    fn set_memory_keep(&self, py: Python<'_>, memory_keep: usize) -> PyResult<()> {
        enter(py, &self.inner, |engine, _| {
            engine.set_memory_keep(memory_keep);
            Ok(())
        })
    }

    /// The next event as JSON, or None at the time limit.
    #[pyo3(signature = (timeout_s, /))]
    fn next_event(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<String>> {
        let timeout = duration(py, "timeout_s", timeout_s)?;
        enter(py, &self.inner, |engine, _| engine.next_event(timeout).map(|event| json(&event)).transpose())
    }

    /// Waits until nothing is queued; False at the time limit. Raises no background error.
    #[pyo3(signature = (timeout_s=None, /))]
    fn flush(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let limit = limit(py, "timeout_s", timeout_s)?;
        enter(py, &self.inner, |engine, interrupt| engine.flush(limit, interrupt))
    }

    /// Waits for queued persists, at most timeout_s, then stops the threads. False if something stays staged.
    #[pyo3(signature = (timeout_s=None, /))]
    fn close(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let limit = limit(py, "timeout_s", timeout_s)?;
        enter(py, &self.inner, |engine, interrupt| engine.close(limit, interrupt))
    }

    fn __repr__(&self) -> String {
        format!("<relight._core.Engine of process {}>", self.inner.pid())
    }
}

//! Python's `Share` and `StageReport`.
//!
//! Owns: the export of the caller's buffers for the length of one `stage`.
//! Must not: keep a buffer after the call: on return the caller may change its tensors.

use pyo3::prelude::*;
use pyo3::types::PySequence;
use relight_engine::plan::ImagePlan;
use relight_engine::share;

use crate::buffers::Entries;
use crate::enter::{Owned, enter};
use crate::image::Image;
use crate::ticket::Ticket;

/// What one rank saves under one tag: a new generation, additive per file.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct Share {
    inner: Owned<share::Share>,
    tag: String,
}

impl Share {
    pub(crate) fn new(share: share::Share) -> Self {
        let tag = share.tag().to_owned();
        Self { inner: Owned::new(share), tag }
    }
}

#[pymethods]
impl Share {
    #[getter]
    fn tag(&self) -> &str {
        &self.tag
    }

    #[getter]
    fn files(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        enter(py, &self.inner, |share, _| Ok(share.files()))
    }

    /// Copies the bytes; on return the caller may change its tensors. The same file again replaces it.
    #[pyo3(signature = (file, entries, /, *, stem, compare=false))]
    fn stage(
        &self,
        py: Python<'_>,
        file: &str,
        entries: &Bound<'_, PySequence>,
        stem: &str,
        compare: bool,
    ) -> PyResult<StageReport> {
        let entries = Entries::export(entries)?;
        let plan = entries.plan();
        let report = enter(py, &self.inner, |share, interrupt| {
            share.stage(file, &ImagePlan::new(stem, plan)?, compare, interrupt)
        })?;
        Ok(StageReport(report))
    }

    /// Reads back what is staged.
    #[pyo3(signature = (file, /))]
    fn image(&self, py: Python<'_>, file: &str) -> PyResult<Image> {
        enter(py, &self.inner, |share, _| share.image(file)).map(Image::new)
    }

    /// Declares that this rank's files are all there: complete in memory now, persisted and committed in the background.
    fn seal(&self, py: Python<'_>) -> PyResult<Ticket> {
        enter(py, &self.inner, |share, interrupt| share.seal(interrupt)).map(Ticket::new)
    }

    /// Drops what was staged.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, &self.inner, |share, _| {
            share.abandon();
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("<relight._core.Share of {}>", self.tag)
    }
}

/// What staging (or a blocking write) of one file did.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct StageReport(pub(crate) relight_engine::save_file::StageReport);

#[pymethods]
impl StageReport {
    /// Length of the image.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Of the whole image.
    #[getter]
    fn crc32(&self) -> u32 {
        self.0.crc32
    }

    /// All of the call.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// Of it, waiting for room in the memory tier.
    #[getter]
    fn wait_seconds(&self) -> f64 {
        self.0.wait_seconds
    }

    /// Larger than the budget: written through, not kept in memory.
    #[getter]
    fn streamed(&self) -> bool {
        self.0.streamed
    }

    /// "shared", "private" or "none".
    #[getter]
    fn memory(&self) -> &'static str {
        self.0.memory.as_str()
    }

    fn __repr__(&self) -> String {
        format!("<relight._core.StageReport: {} bytes, memory {}>", self.0.bytes, self.0.memory.as_str())
    }
}

//! Python's `Root`.
//!
//! Owns: the keywords of `Root` and the JSON of what it lists.
//! Must not: order or filter checkpoints (the engine does).

use pyo3::prelude::*;
use relight_engine::HistoryRecord;
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::tags;
use relight_engine::verify::TagReport;
use serde_json::{Value, json};

use crate::arguments::{json, parse_json};
use crate::enter::{Owned, enter};
use crate::errors::invalid;
use crate::image::Image;
use crate::share::Share;

/// One directory that holds tags.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct Root {
    inner: Owned<tags::Root>,
    path: String,
}

impl Root {
    pub(crate) fn new(root: tags::Root) -> Self {
        let path = root.path().display().to_string();
        Self { inner: Owned::new(root), path }
    }
}

#[pymethods]
impl Root {
    /// Absolute, links resolved.
    #[getter]
    fn path(&self) -> &str {
        &self.path
    }

    /// Opens a new generation of a tag for this rank; writes nothing yet.
    #[pyo3(signature = (tag, /, *, step=None, rank=0, world_size=1, meta="{}", best=false, keep=None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn begin(
        &self,
        py: Python<'_>,
        tag: &str,
        step: Option<i64>,
        rank: u32,
        world_size: u32,
        meta: &str,
        best: bool,
        keep: Option<usize>,
    ) -> PyResult<Share> {
        let meta = parse_json(py, "meta", meta)?;
        let options = BeginOptions { step, rank, world_size, meta, best, keep };
        enter(py, &self.inner, |root, _| root.begin(tag, options)).map(Share::new)
    }

    /// JSON list of the checkpoints, oldest first.
    fn list(&self, py: Python<'_>) -> PyResult<String> {
        enter(py, &self.inner, |root, _| json(&root.list()?))
    }

    /// The tag of the newest complete checkpoint.
    fn latest(&self, py: Python<'_>) -> PyResult<Option<String>> {
        enter(py, &self.inner, |root, _| root.latest())
    }

    /// Memory tier first, then persistent; `tier` asks for one.
    #[pyo3(signature = (tag, file, /, *, tier=None))]
    fn open_image(&self, py: Python<'_>, tag: &str, file: &str, tier: Option<&str>) -> PyResult<Image> {
        let tier = match tier {
            None => None,
            Some("memory") => Some(Tier::Memory),
            Some("persistent") => Some(Tier::Persistent),
            Some(other) => {
                return Err(invalid(py, format!("tier is {other:?}; give \"memory\", \"persistent\" or None")));
            }
        };
        enter(py, &self.inner, |root, _| root.open_image(tag, file, tier)).map(Image::new)
    }

    /// Reads every byte of a tag and compares it with the manifest; JSON.
    #[pyo3(signature = (tag, /))]
    fn verify(&self, py: Python<'_>, tag: &str) -> PyResult<String> {
        enter(py, &self.inner, |root, interrupt| json(&report_of(&root.verify(tag, interrupt)?)))
    }

    /// JSON list of directories that look like checkpoints of relight but are not whole.
    fn problems(&self, py: Python<'_>) -> PyResult<String> {
        enter(py, &self.inner, |root, _| {
            let problems = root.problems()?;
            let listed: Vec<Value> =
                problems.iter().map(|one| json!({ "tag": one.tag, "reason": one.reason })).collect();
            json(&listed)
        })
    }

    /// Deletes a tag from all tiers.
    #[pyo3(signature = (tag, /))]
    fn delete(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        enter(py, &self.inner, |root, interrupt| root.delete(tag, interrupt))
    }

    /// Saves from here on are a new run.
    #[pyo3(signature = (resumed_from, /))]
    fn start_run(&self, py: Python<'_>, resumed_from: Option<&str>) -> PyResult<()> {
        enter(py, &self.inner, |root, _| root.start_run(resumed_from))
    }

    /// Retention leaves the tag alone.
    #[pyo3(signature = (tag, /))]
    fn pin(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        enter(py, &self.inner, |root, _| {
            root.pin(tag);
            Ok(())
        })
    }

    /// Retention may delete the tag again.
    #[pyo3(signature = (tag, /))]
    fn unpin(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        enter(py, &self.inner, |root, _| {
            root.unpin(tag);
            Ok(())
        })
    }

    /// Adds a line to the root's history.
    #[pyo3(signature = (event, tag, file, rank, tier, bytes, seconds, error, /))]
    #[allow(clippy::too_many_arguments, reason = "the columns of the history")]
    fn history_append(
        &self,
        py: Python<'_>,
        event: &str,
        tag: &str,
        file: &str,
        rank: u32,
        tier: &str,
        bytes: u64,
        seconds: f64,
        error: &str,
    ) -> PyResult<()> {
        let line = HistoryRecord {
            time: String::new(), // the engine's clock fills it in
            event: event.to_owned(),
            tag: tag.to_owned(),
            file: file.to_owned(),
            rank,
            tier: tier.to_owned(),
            bytes,
            seconds,
            error: error.to_owned(),
        };
        enter(py, &self.inner, |root, _| root.history_append(line))
    }

    fn __repr__(&self) -> String {
        format!("<relight._core.Root {}>", self.path)
    }
}

/// What `Root.verify` says, as `_core.pyi` has it.
fn report_of(report: &TagReport) -> Value {
    let files: Vec<Value> = report
        .files
        .iter()
        .map(|file| {
            let problem = (!file.ok()).then(|| file.problems.join("; "));
            json!({ "name": file.name, "bytes": file.bytes, "ok": file.ok(), "problem": problem })
        })
        .collect();
    json!({ "tag": report.tag, "ok": report.ok(), "files": files })
}

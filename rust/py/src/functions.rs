//! The functions of the module: what needs no engine.
//!
//! Owns: `save_file`, `open_image`, regions, names, CRC.
//! Must not: touch the engine of this process, or keep state.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PySequence;
use relight_engine::clock::{Clock, SystemClock};
use relight_engine::disk::Disk;
use relight_engine::disk::PosixDisk;
use relight_engine::plan::ImagePlan;
use relight_engine::save_file::SaveOptions;
use relight_engine::{Error, ErrorKind, image, names, report};

use crate::arguments::json;
use crate::buffers::{Entries, buffer, readable};
use crate::enter::enter_free;
use crate::errors::invalid;
use crate::image::Image;
use crate::share::StageReport;

/// Opens one file that torch.save or relight wrote.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub(crate) fn open_image(py: Python<'_>, path: PathBuf) -> PyResult<Image> {
    enter_free(py, |_| image::Image::open_file(&PosixDisk, &path, None)).map(Image::new)
}

/// Writes one file through bounded buffers: temporary name in the same directory, fsync, rename, fsync of the directory.
#[pyfunction]
#[pyo3(signature = (path, entries, /, *, stem, compare=false, copy_threads=2, chunk_bytes=4194304, durable=true))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn save_file(
    py: Python<'_>,
    path: PathBuf,
    entries: &Bound<'_, PySequence>,
    stem: &str,
    compare: bool,
    copy_threads: usize,
    chunk_bytes: u64,
    durable: bool,
) -> PyResult<StageReport> {
    let entries = Entries::export(entries)?;
    let plan = entries.plan();
    let options = SaveOptions { compare, copy_threads, chunk_bytes, durable };
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let report = enter_free(py, |interrupt| {
        let plan = ImagePlan::new(stem, plan)?;
        relight_engine::save_file::save_file(&disk, &clock, &path, &plan, &options, interrupt)
    })?;
    Ok(StageReport(report))
}

/// JSON list of this user's regions.
#[pyfunction]
#[pyo3(signature = (memory_dir=None, /))]
pub(crate) fn regions(py: Python<'_>, memory_dir: Option<PathBuf>) -> PyResult<String> {
    enter_free(py, |_| json(&report::regions(memory_dir.as_deref())?))
}

/// Removes a region whose owner is dead, with what is staged in it.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub(crate) fn remove_region(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    enter_free(py, |_| report::remove_region(&path))
}

/// Raises InvalidArgument for a tag that cannot be used.
#[pyfunction]
#[pyo3(signature = (tag, /))]
pub(crate) fn check_tag(py: Python<'_>, tag: &str) -> PyResult<()> {
    names::check_tag(tag).map_err(|cause| invalid(py, cause.to_string()))
}

/// The step in a tag.
#[pyfunction]
#[pyo3(signature = (tag, /))]
pub(crate) fn step_of_tag(tag: &str) -> Option<i64> {
    names::step_of_tag(tag)
}

/// The name on disk of a file of a tag.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(crate) fn escape_file_name(name: &str) -> String {
    names::escape_file_name(name)
}

/// CRC-32 (IEEE) of a buffer.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn crc32(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u32> {
    const BLOCK_BYTES: usize = 128 << 10;
    let exported = buffer(data, "data")?;
    let bytes = readable(py, &exported);
    enter_free(py, |_| {
        let mut crc = relight_engine::crc::Crc::new();
        let mut block = vec![0; BLOCK_BYTES.min(bytes.len())];
        let mut at = 0;
        while at < bytes.len() {
            let len = block.len().min(bytes.len() - at);
            bytes.slice(at..at + len).copy_to(&mut block[..len]);
            crc.update(&block[..len]);
            at += len;
        }
        Ok(crc.value())
    })
}

/// Panics inside the door, for the test that a panic becomes EngineClosed and nothing worse.
#[pyfunction(name = "_panic")]
#[pyo3(signature = (message, /))]
pub(crate) fn panic(py: Python<'_>, message: &str) -> PyResult<()> {
    enter_free(py, |_| -> Result<(), Error> {
        if message.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "message is empty; say something"));
        }
        panic!("{message}")
    })
}

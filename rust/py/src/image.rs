//! Python's `Image` and `ImageEntry`.
//!
//! Owns: which images a forked child may go on using: those of files.
//! Must not: hand out bytes of the image itself: what is read is a copy that was checked.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySequence};
use relight_engine::clock::SystemClock;
use relight_engine::image::{self, FillTarget, ReadOptions, Tier};
use relight_engine::wait::Interrupt;

use crate::buffers::{buffer, writable};
use crate::enter::{Owned, enter};

/// Threads that read an image, the caller's included.
const READ_THREADS: usize = 2;

/// One readable torch.save archive: a file, or an image in the memory tier.
#[pyclass(frozen, module = "relight._core")]
pub(crate) struct Image {
    inner: Owned<image::Image>,
    clock: SystemClock,
    tier: &'static str,
    path: String,
    length: u64,
    crc32: Option<u32>,
    stem: String,
}

impl Image {
    pub(crate) fn new(image: image::Image) -> Self {
        Self {
            tier: image.tier().word(),
            path: image.path().display().to_string(),
            length: image.len(),
            crc32: image.record().map(|record| record.crc32),
            stem: image.stem().to_owned(),
            inner: match image.tier() {
                Tier::Memory => Owned::new(image),
                // Reads at given places of a file: a dataset opened before the DataLoader forked its workers works in them.
                Tier::Persistent => Owned::by_nobody(image),
            },
            clock: SystemClock::new(),
        }
    }

    fn options<'c>(&'c self, interrupt: Interrupt<'c>) -> ReadOptions<'c> {
        ReadOptions { threads: READ_THREADS, clock: &self.clock, interrupt }
    }
}

#[pymethods]
impl Image {
    /// "memory" or "persistent".
    #[getter]
    fn tier(&self) -> &'static str {
        self.tier
    }

    /// The file, or "memory:<tag>/<file>".
    #[getter]
    fn path(&self) -> &str {
        &self.path
    }

    /// Bytes of the archive.
    #[getter]
    fn length(&self) -> u64 {
        self.length
    }

    /// Of the archive, as its manifest or seal says; nothing for a file that was opened by its path.
    #[getter]
    fn crc32(&self) -> Option<u32> {
        self.crc32
    }

    /// The folder that all entries lie in.
    #[getter]
    fn stem(&self) -> &str {
        &self.stem
    }

    /// In the order of the archive.
    #[getter]
    fn entries(&self, py: Python<'_>) -> PyResult<Vec<ImageEntry>> {
        enter(py, &self.inner, |image, _| {
            let entries = image.entries().iter().map(|entry| ImageEntry {
                name: entry.name.clone(),
                offset: entry.data_offset,
                length: entry.len,
                crc32: entry.crc32,
                stored: entry.stored,
            });
            Ok(entries.collect())
        })
    }

    /// One entry, checked against its CRC-32.
    #[pyo3(signature = (index, /))]
    fn read<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = enter(py, &self.inner, |image, _| image.read(index))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Fills writable buffers with (entry index, offset in the entry, buffer), in parallel, checksums verified.
    #[pyo3(signature = (targets, /))]
    fn read_into(&self, py: Python<'_>, targets: &Bound<'_, PySequence>) -> PyResult<()> {
        let mut exported = Vec::with_capacity(targets.len()?);
        for target in targets.try_iter()? {
            let (entry, offset, object) = target?.extract::<(usize, u64, Bound<'_, PyAny>)>()?;
            exported.push((entry, offset, buffer(&object, "a target")?));
        }
        let mut fill = Vec::with_capacity(exported.len());
        for (entry, offset, buffer) in &exported {
            fill.push(FillTarget { entry: *entry, offset: *offset, buffer: writable(py, buffer, "a target")? });
        }
        enter(py, &self.inner, |image, interrupt| image.read_into(&fill, &self.options(interrupt)))
    }

    /// Reads everything; one sentence per problem, empty if all is as written.
    fn verify(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        enter(py, &self.inner, |image, interrupt| image.verify(&self.options(interrupt)))
    }

    fn __repr__(&self) -> String {
        format!("<relight._core.Image {}, {} bytes>", self.path, self.length)
    }
}

/// One entry of an image.
#[pyclass(frozen, get_all, module = "relight._core")]
pub(crate) struct ImageEntry {
    /// Without the stem.
    name: String,
    /// Of the data, from the start of the image.
    offset: u64,
    /// Bytes.
    length: u64,
    /// As the archive says.
    crc32: u32,
    /// False: compressed by a foreign tool.
    stored: bool,
}

#[pymethods]
impl ImageEntry {
    fn __repr__(&self) -> String {
        format!("<relight._core.ImageEntry {}, {} bytes at {}>", self.name, self.length, self.offset)
    }
}

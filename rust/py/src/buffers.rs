//! Python's buffers as foreign memory.
//!
//! Owns: what counts as a buffer (contiguous; writable where it is filled), and that it stays exported, which keeps its
//! memory in place, for as long as the engine looks at it.
//! Must not: copy tensor bytes, or keep a buffer after the call.
//! A memoryview over a raw address (`PyMemoryView_FromMemory`) keeps nothing alive; its maker does, during the call.

use std::borrow::Cow;

use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySequence};
use relight_engine::foreign::{ForeignBytes, ForeignBytesMut};
use relight_engine::plan::{Piece, PlanEntry};

use crate::errors::invalid;

/// The bytes of an object with the buffer protocol, of any item type.
pub(crate) fn buffer(object: &Bound<'_, PyAny>, what: &str) -> PyResult<PyBuffer<u8>> {
    let py = object.py();
    let untyped = PyUntypedBuffer::get(object)
        .map_err(|_| invalid(py, format!("{what} is a {}, not a buffer of contiguous bytes", type_name(object))))?;
    if !untyped.is_c_contiguous() {
        return Err(invalid(py, format!("{what} is not contiguous; copy it, or give its contiguous parts in order")));
    }
    if untyped.as_typed::<u8>().is_ok() {
        return untyped.into_typed();
    }
    if untyped.len_bytes() == 0 {
        // A view with a zero in its shape cannot be cast.
        return PyBuffer::get(PyBytes::new(py, b"").as_any());
    }
    let bytes = PyMemoryView::from(object)?.call_method1("cast", ("B",))?;
    PyBuffer::get(&bytes)
}

/// Readable memory of a buffer.
#[allow(
    deprecated,
    reason = "only address and length are taken from the cells; their bytes are read as foreign memory"
)]
pub(crate) fn readable<'a>(py: Python<'a>, buffer: &'a PyBuffer<u8>) -> ForeignBytes<'a> {
    // An empty buffer may have no address, of which no slice can be made.
    let cells = if buffer.item_count() == 0 { None } else { buffer.as_slice(py) };
    cells.map_or(ForeignBytes::from_cells::<u8>(&[]), ForeignBytes::from_cells)
}

/// Writable memory of a buffer.
#[allow(
    deprecated,
    reason = "only address and length are taken from the cells; their bytes are written as foreign memory"
)]
pub(crate) fn writable<'a>(py: Python<'a>, buffer: &'a PyBuffer<u8>, what: &str) -> PyResult<ForeignBytesMut<'a>> {
    if buffer.item_count() == 0 {
        return Ok(ForeignBytesMut::from_cells(&[]));
    }
    let cells =
        buffer.as_mut_slice(py).ok_or_else(|| invalid(py, format!("{what} is read-only; give a writable buffer")))?;
    Ok(ForeignBytesMut::from_cells(cells))
}

/// The entries of an archive as Python gave them, exported until this is dropped.
pub(crate) struct Entries<'py> {
    py: Python<'py>,
    entries: Vec<(String, Content<'py>)>,
}

enum Content<'py> {
    /// Immutable: may be borrowed as it is.
    Bytes(Bound<'py, PyBytes>),
    Buffers(Vec<PyBuffer<u8>>),
}

impl<'py> Entries<'py> {
    /// Exports every buffer of `entries`: (name, bytes or a sequence of buffers).
    pub(crate) fn export(entries: &Bound<'py, PySequence>) -> PyResult<Self> {
        let py = entries.py();
        let mut exported = Vec::with_capacity(entries.len()?);
        for entry in entries.try_iter()? {
            let (name, content) = entry?.extract::<(String, Bound<'py, PyAny>)>()?;
            let content = match content.cast_into::<PyBytes>() {
                Ok(bytes) => Content::Bytes(bytes),
                Err(other) => Content::Buffers(export_pieces(&name, &other.into_inner())?),
            };
            exported.push((name, content));
        }
        Ok(Self { py, entries: exported })
    }

    /// What the engine plans the image from.
    pub(crate) fn plan(&self) -> Vec<PlanEntry<'_>> {
        self.entries.iter().map(|(name, content)| self.plan_entry(name, content)).collect()
    }

    fn plan_entry<'a>(&'a self, name: &str, content: &'a Content<'py>) -> PlanEntry<'a> {
        let pieces = match content {
            Content::Bytes(bytes) => vec![Piece::Inline(Cow::Borrowed(bytes.as_bytes()))],
            Content::Buffers(buffers) => buffers.iter().map(|one| Piece::Foreign(readable(self.py, one))).collect(),
        };
        PlanEntry { name: name.to_owned(), pieces }
    }
}

fn export_pieces(name: &str, pieces: &Bound<'_, PyAny>) -> PyResult<Vec<PyBuffer<u8>>> {
    let sequence = pieces.cast::<PySequence>().map_err(|_| {
        invalid(pieces.py(), format!("entry {name} is a {}; give bytes, or a sequence of buffers", type_name(pieces)))
    })?;
    sequence.try_iter()?.map(|piece| buffer(&piece?, &format!("a piece of entry {name}"))).collect()
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

//! Errors on their way to Python.
//!
//! Owns: which kind is which class of `relight.exceptions`; facts and causes go along.
//! Must not: turn a cause into text where it can be an exception, or let a kind without a class through.
//! Invariant: the match lists every kind, so a new one does not compile before it has a class.

use std::error::Error as StdError;
use std::io;

use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use relight_engine::{Error, ErrorKind};

/// The name of the class in `relight.exceptions`.
fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "CheckpointNotFound",
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::StorageFull => "StorageFull",
        ErrorKind::StorageDenied => "StorageDenied",
        ErrorKind::StorageUnavailable => "StorageUnavailable",
        ErrorKind::Corrupt => "CorruptCheckpoint",
        ErrorKind::Conflict => "CommitConflict",
        ErrorKind::Torn => "TornSnapshot",
        ErrorKind::Closed => "EngineClosed",
        ErrorKind::TimedOut => "WaitTimeout",
        // An interrupted wait raises what the signal's handler raised (see `enter`). Only a system call that was
        // interrupted on another thread comes here.
        ErrorKind::Interrupted => "CheckpointError",
    }
}

/// The exception of an error.
pub(crate) fn to_python(py: Python<'_>, error: Error) -> PyErr {
    match build(py, &error) {
        Ok(exception) => exception,
        // Without `relight.exceptions` (a broken installation) the fact must still come through.
        Err(broken) => {
            let exception = PyRuntimeError::new_err(error.message);
            exception.set_cause(py, Some(broken));
            exception
        }
    }
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("relight.exceptions")?.getattr(class_of(error.kind))?;
    let facts = PyDict::new(py);
    facts.set_item("path", &error.path)?;
    facts.set_item("tag", &error.tag)?;
    facts.set_item("rank", error.rank)?;
    facts.set_item("retryable", error.kind.retryable())?;
    if let Some(code) = error.os_code() {
        facts.set_item("errno", code)?;
    }
    let exception = PyErr::from_value(class.call((&error.message,), Some(&facts))?);
    if let Some(source) = &error.source {
        exception.set_cause(py, Some(cause(py, &**source)));
    }
    Ok(exception)
}

/// A lower layer's error, with its own causes: an OSError with its number where the system gave one.
fn cause(py: Python<'_>, error: &(dyn StdError + 'static)) -> PyErr {
    let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let exception = match code {
        Some(code) => PyOSError::new_err((code, error.to_string())),
        None => PyRuntimeError::new_err(error.to_string()),
    };
    if let Some(below) = error.source() {
        exception.set_cause(py, Some(cause(py, below)));
    }
    exception
}

/// InvalidArgument with this message.
pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    to_python(py, Error::new(ErrorKind::InvalidArgument, message))
}

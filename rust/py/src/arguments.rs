//! Small conversions of arguments and results.
//!
//! Owns: time limits and JSON.
//! Must not: accept what the engine would have to guess about (a negative limit, text that is no JSON).

use std::time::Duration;

use pyo3::prelude::*;
use relight_engine::{Error, ErrorKind};
use serde::Serialize;

use crate::errors::invalid;

/// A time limit in seconds; infinity is none.
pub(crate) fn limit(py: Python<'_>, name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds == f64::INFINITY => Ok(None),
        Some(seconds) => duration(py, name, seconds).map(Some),
    }
}

/// A duration in seconds.
pub(crate) fn duration(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| invalid(py, format!("{name} is {seconds}; give a number of seconds, 0 or more")))
}

/// JSON text of a result.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|cause| {
        Error::new(ErrorKind::Corrupt, format!("a result cannot be written as JSON: {cause}")).because(cause)
    })
}

/// A JSON value that the caller gave as text.
pub(crate) fn parse_json(py: Python<'_>, name: &str, text: &str) -> PyResult<serde_json::Value> {
    serde_json::from_str(text).map_err(|cause| invalid(py, format!("{name} is not JSON: {cause}")))
}

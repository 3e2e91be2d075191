//! The Python extension module `relight._core`.
//!
//! Owns: the conversions between Python and the engine. `_core.pyi` is its contract; stubtest compares the two.
//! Must not: decide anything about checkpoints, hold a Python object in a background thread, or use `unsafe`.
//! Invariant: every call into the engine goes through `enter`: fork, GIL, panics, signals and errors are handled there.
#![deny(unsafe_code)]

mod arguments;
mod buffers;
mod engine;
mod enter;
mod errors;
mod functions;
mod image;
mod root;
mod share;
mod ticket;

/// The Rust engine of relight.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::functions::{
        check_tag, crc32, escape_file_name, open_image, panic, regions, remove_region, save_file, step_of_tag,
    };
    #[pymodule_export]
    use crate::image::{Image, ImageEntry};
    #[pymodule_export]
    use crate::root::Root;
    #[pymodule_export]
    use crate::share::{Share, StageReport};
    #[pymodule_export]
    use crate::ticket::Ticket;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

//! The Python extension module `relight._core`.
#![deny(unsafe_code)]

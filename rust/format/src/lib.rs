//! The file format of relight: pure functions over bytes.
#![forbid(unsafe_code)]

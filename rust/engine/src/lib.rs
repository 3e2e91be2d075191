//! The engine of relight: stage, persist, commit and load, over seams for disk and clock.
//!
//! Owns: the order of every step of a save and a load; what is visible and what is latest; the memory tier's use.
//! Must not: know Python or torch; use `unsafe`; touch the file system or the time except through `Disk` and `Clock`.
#![forbid(unsafe_code)]

pub mod clock;
pub mod disk;
pub mod error;

pub use error::{Error, ErrorKind, Result};

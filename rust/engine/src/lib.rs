//! The engine of relight: stage, persist, commit and load, over seams for disk and clock.
//!
//! Owns: the order of every step of a save and a load; what is visible and what is latest; the memory tier's use.
//! Must not: know Python or torch; use `unsafe`; touch the file system or the time except through `Disk` and `Clock`.
#![forbid(unsafe_code)]

mod cleanup;
pub mod catalog;
pub mod clock;
pub mod commit;
pub mod disk;
pub mod error;
pub mod generation;
pub mod history;
mod layout;
pub mod publish;
pub mod retention;
pub mod root;
mod tag_lock;

pub use error::{Error, ErrorKind, Result};

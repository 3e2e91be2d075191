//! The engine of relight: stage, persist, commit and load, over seams for disk and clock.
//!
//! Owns: the order of every step of a save and a load; what is visible and what is latest; the memory tier's use.
//! Must not: know Python or torch; use `unsafe`; touch the file system or the time except through `Disk` and `Clock`.
#![forbid(unsafe_code)]

pub mod catalog;
mod cleanup;
pub mod clock;
pub mod commit;
mod core;
pub mod disk;
pub mod drain;
pub mod engine;
pub mod error;
pub mod events;
pub mod generation;
pub mod history;
pub mod image;
mod layout;
mod memory;
mod persist;
pub mod plan;
pub mod publish;
pub mod report;
pub mod retention;
pub mod root;
pub mod save_file;
pub mod share;
mod stage;
mod staged;
mod stream;
mod successors;
mod tag_lock;
pub mod tags;
pub mod ticket;
pub mod verify;
pub mod wait;

pub use error::{Error, ErrorKind, Result};
// What a caller needs of the layers below: it must not know them.
pub use relight_format::history::HistoryRecord;
pub use relight_format::{crc, names};
pub use relight_io::foreign;

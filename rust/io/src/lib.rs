//! Shared memory, rings, copy kernels, locks and thin file calls: the one unsafe crate of relight.
//!
//! Owns: every `unsafe` block of the project, each with its argument; the arena that outlives the process.
//! Must not: know the file format, the commit protocol, or Python.
//! Invariant: no safe function of this crate can be called so that it breaks memory safety; where that rests on a
//! promise which no type can carry (memory of the caller, files that others may cut), the type's page says which.

pub mod arena;
pub mod buffer;
pub mod copy;
pub mod file;
pub mod foreign;
pub mod limits;
pub mod lock;
pub mod map;
pub mod priority;
pub mod ring;
mod sync;

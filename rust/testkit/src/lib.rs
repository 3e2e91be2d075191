//! Crash, fault, slow and simulated disks and clocks for the tests of relight; never published.
//!
//! Owns: a stand-in for each seam of the engine, and one conformance suite per seam.
//! Must not: be used by anything but tests.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

pub mod clock;
pub mod conformance;
pub mod crash;
pub mod fault;
pub mod hook;
pub mod memory;
pub mod slow;

pub use clock::ManualClock;
pub use crash::CrashDisk;
pub use fault::{Fault, FaultDisk};
pub use hook::{Call, Op};
pub use memory::MemoryDisk;
pub use slow::{Gate, SlowDisk};

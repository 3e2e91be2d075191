//! Crash, fault, slow and simulated disks and clocks for the tests of relight; never published.
#![forbid(unsafe_code)]

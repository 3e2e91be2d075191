//! Shared memory, rings, copy kernels and write drivers: the one unsafe crate of relight.

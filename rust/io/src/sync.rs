//! The primitives that the lock-free parts are built on.
//!
//! Owns: the choice between the standard ones and, under the feature `loom`, loom's, which try every interleaving and
//! every allowed stale read.
//! Must not: behave differently in the two forms.

#[cfg(feature = "loom")]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    },
};

#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicBool, AtomicUsize, Ordering, fence},
};

/// `std::cell::UnsafeCell` with loom's two ways in.
#[cfg(not(feature = "loom"))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "loom"))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with_mut<R>(&self, use_it: impl FnOnce(*mut T) -> R) -> R {
        use_it(self.0.get())
    }
}

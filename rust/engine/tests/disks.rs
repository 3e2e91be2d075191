//! Every form of the disk seam keeps the same promises.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::path::PathBuf;
use std::sync::Arc;

use relight_engine::disk::{Disk, PosixDisk};
use relight_testkit::{CrashDisk, FaultDisk, MemoryDisk, SlowDisk, disk_conformance};

fn in_memory(wrap: impl FnOnce(MemoryDisk) -> Arc<dyn Disk>) -> (Arc<dyn Disk>, PathBuf, ()) {
    let memory = MemoryDisk::new();
    memory.create_dir("/here".as_ref()).unwrap();
    (wrap(memory), PathBuf::from("/here"), ())
}

disk_conformance!(posix, || {
    let directory = tempfile::tempdir().unwrap();
    let disk: std::sync::Arc<dyn relight_engine::disk::Disk> = std::sync::Arc::new(super::PosixDisk);
    (disk, directory.path().to_path_buf(), directory)
});
disk_conformance!(memory, || super::in_memory(|memory| std::sync::Arc::new(memory)));
disk_conformance!(crash, || super::in_memory(|memory| std::sync::Arc::new(super::CrashDisk::new(&memory))));
disk_conformance!(fault, || super::in_memory(|memory| {
    std::sync::Arc::new(super::FaultDisk::new(std::sync::Arc::new(memory)))
}));
disk_conformance!(slow, || super::in_memory(|memory| {
    std::sync::Arc::new(super::SlowDisk::new(std::sync::Arc::new(memory)))
}));

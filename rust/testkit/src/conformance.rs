//! One suite that every disk passes: `disk_conformance!(posix, || (disk, directory))`.
//!
//! Owns: what `Disk` promises and any form of it can show without a power cut.
//! Must not: ask more of a disk than the documentation of `Disk` does.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use relight_engine::disk::{Disk, EntryKind};

/// Makes a module of tests for one disk. `$make` gives a new disk, an empty directory on it, and what keeps both alive.
#[macro_export]
macro_rules! disk_conformance {
    ($name:ident, $make:expr) => {
        $crate::disk_conformance!(@tests $name, $make,
            a_new_file_takes_only_a_free_name,
            bytes_are_written_and_read_where_they_were_put,
            a_read_beyond_the_end_is_an_error,
            rename_replaces_and_keeps_open_files,
            names_come_and_go,
            what_is_not_there_is_not_found,
            a_directory_with_names_stays,
            a_lock_is_held_once_and_given_back,
            a_waiter_gets_the_lock_when_it_is_given_back,
            a_lock_on_a_removed_name_is_taken_anew,
            a_file_shows_another_version_when_it_is_replaced,
            an_existing_file_can_be_changed_in_place,
        );
    };
    (@tests $name:ident, $make:expr, $($test:ident,)*) => {
        mod $name {
            $(#[test]
            fn $test() {
                let (disk, directory, _keep) = ($make)();
                $crate::conformance::$test(&disk, &directory);
            })*
        }
    };
}

/// The disk under test.
pub type Any = Arc<dyn Disk>;

fn put(disk: &Any, path: &Path, bytes: &[u8]) {
    let mut file = disk.create_file(path).unwrap();
    file.write_at(0, bytes).unwrap();
    file.sync().unwrap();
}

fn get(disk: &Any, path: &Path) -> Vec<u8> {
    let file = disk.open_file(path).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

fn kind<T>(result: io::Result<T>) -> io::ErrorKind {
    match result {
        Ok(_) => panic!("must fail"),
        Err(error) => error.kind(),
    }
}

/// `create_file` never opens what exists.
pub fn a_new_file_takes_only_a_free_name(disk: &Any, directory: &Path) {
    let path = directory.join("file");
    put(disk, &path, b"one");
    assert_eq!(kind(disk.create_file(&path)), io::ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.create_dir(&path)), io::ErrorKind::AlreadyExists);
    assert_eq!(get(disk, &path), b"one");
}

/// Writes may come in any order; a gap reads as zeros.
pub fn bytes_are_written_and_read_where_they_were_put(disk: &Any, directory: &Path) {
    let path = directory.join("file");
    let mut file = disk.create_file(&path).unwrap();
    file.reserve(16).unwrap();
    file.write_at(6, b"world").unwrap();
    file.write_at(0, b"hello").unwrap();
    assert_eq!(file.len().unwrap(), 11);
    assert!(!file.is_empty().unwrap());
    file.sync().unwrap();
    assert_eq!(get(disk, &path), b"hello\0world");
    let mut part = [0; 3];
    disk.open_file(&path).unwrap().read_at(7, &mut part).unwrap();
    assert_eq!(&part, b"orl");
}

/// A short file is an error, never a short buffer.
pub fn a_read_beyond_the_end_is_an_error(disk: &Any, directory: &Path) {
    let path = directory.join("file");
    put(disk, &path, b"abc");
    let file = disk.open_file(&path).unwrap();
    assert_eq!(kind(file.read_at(1, &mut [0; 3])), io::ErrorKind::UnexpectedEof);
}

/// Who has the old file open keeps its bytes.
pub fn rename_replaces_and_keeps_open_files(disk: &Any, directory: &Path) {
    let (old, new) = (directory.join("old"), directory.join("new"));
    put(disk, &old, b"old");
    put(disk, &new, b"new");
    let open = disk.open_file(&old).unwrap();
    disk.rename(&new, &old).unwrap();
    assert_eq!(get(disk, &old), b"new");
    assert_eq!(kind(disk.metadata(&new)), io::ErrorKind::NotFound);
    let mut bytes = [0; 3];
    open.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"old");
    disk.sync_dir(directory).unwrap();
}

/// `list_dir` and `metadata` agree.
pub fn names_come_and_go(disk: &Any, directory: &Path) {
    put(disk, &directory.join("a"), b"12345");
    disk.create_dir(&directory.join("b")).unwrap();
    let mut entries: Vec<_> =
        disk.list_dir(directory).unwrap().into_iter().map(|entry| (entry.name, entry.kind)).collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(entries, [("a".to_owned(), EntryKind::File), ("b".to_owned(), EntryKind::Directory)]);
    assert_eq!(disk.metadata(&directory.join("a")).unwrap().len, 5);
    assert_eq!(disk.metadata(&directory.join("b")).unwrap().kind, EntryKind::Directory);
    disk.remove_file(&directory.join("a")).unwrap();
    disk.remove_dir(&directory.join("b")).unwrap();
    assert!(disk.list_dir(directory).unwrap().is_empty());
}

/// Each call says `NotFound`, by its kind.
pub fn what_is_not_there_is_not_found(disk: &Any, directory: &Path) {
    let (gone, below) = (directory.join("gone"), directory.join("gone/file"));
    assert_eq!(kind(disk.open_file(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.modify_file(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.metadata(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.list_dir(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.remove_file(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.remove_dir(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.sync_dir(&gone)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.rename(&gone, &directory.join("other"))), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.create_file(&below)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.create_dir(&below)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.lock(&below, "x", Duration::ZERO)), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.canonical(&gone)), io::ErrorKind::NotFound);
}

/// Removing or replacing a directory that has names fails.
pub fn a_directory_with_names_stays(disk: &Any, directory: &Path) {
    let full = directory.join("full");
    disk.create_dir(&full).unwrap();
    put(disk, &full.join("file"), b"x");
    assert_eq!(kind(disk.remove_dir(&full)), io::ErrorKind::DirectoryNotEmpty);
    put(disk, &directory.join("file"), b"y");
    assert!(disk.rename(&directory.join("file"), &full).is_err());
    assert_eq!(get(disk, &full.join("file")), b"x");
    assert!(disk.open_file(&full).is_err());
}

/// Also within one process.
pub fn a_lock_is_held_once_and_given_back(disk: &Any, directory: &Path) {
    let path = directory.join("lock");
    let held = disk.lock(&path, "the first", Duration::ZERO).unwrap();
    assert_eq!(kind(disk.lock(&path, "the second", Duration::from_millis(20))), io::ErrorKind::WouldBlock);
    assert_eq!(get(disk, &path), b"the first");
    drop(held);
    drop(disk.lock(&path, "2nd", Duration::ZERO).unwrap());
    assert_eq!(get(disk, &path), b"2nd");
}

/// The wait ends with the lock, not with the limit.
pub fn a_waiter_gets_the_lock_when_it_is_given_back(disk: &Any, directory: &Path) {
    let path = directory.join("lock");
    let held = disk.lock(&path, "the first", Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| disk.lock(&path, "the second", Duration::from_secs(60)).map(drop));
        drop(held);
        waiter.join().unwrap().unwrap();
    });
}

/// A lock on a file that has no name any more would exclude nobody.
pub fn a_lock_on_a_removed_name_is_taken_anew(disk: &Any, directory: &Path) {
    let path = directory.join("lock");
    let first = disk.lock(&path, "the first", Duration::ZERO).unwrap();
    disk.remove_file(&path).unwrap();
    let second = disk.lock(&path, "the second", Duration::ZERO).unwrap();
    assert_eq!(get(disk, &path), b"the second");
    drop(first);
    assert_eq!(kind(disk.lock(&path, "the third", Duration::ZERO)), io::ErrorKind::WouldBlock);
    drop(second);
}

/// What caches go by.
pub fn a_file_shows_another_version_when_it_is_replaced(disk: &Any, directory: &Path) {
    let (path, next) = (directory.join("file"), directory.join("next"));
    put(disk, &path, b"one");
    let before = disk.metadata(&path).unwrap();
    assert_eq!(disk.metadata(&path).unwrap(), before);
    put(disk, &next, b"two");
    disk.rename(&next, &path).unwrap();
    assert_ne!(disk.metadata(&path).unwrap().version, before.version);
}

/// `modify_file` keeps what it does not write.
pub fn an_existing_file_can_be_changed_in_place(disk: &Any, directory: &Path) {
    let path = directory.join("file");
    put(disk, &path, b"abc");
    let mut file = disk.modify_file(&path).unwrap();
    file.write_at(2, b"CDE").unwrap();
    assert_eq!(get(disk, &path), b"abCDE");
}

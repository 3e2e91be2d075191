//! Advisory locks on files that die with the process, and only with it.
//!
//! Owns: who of the processes of a node (or of a shared file system) may write; one table of what this process holds.
//! Must not: be opened past. POSIX drops every record lock that a process has on a file when that process closes ANY
//! descriptor of it; so a lock file is opened here and nowhere else, and never a second time while it is held.
//! Invariant: a `FileLock` that exists is held by the kernel for this process, and its path names the locked file.
//!
//! Why POSIX record locks (fcntl) and not flock: an flock belongs to the open file description, which a forked child
//! shares. DataLoader workers are forked; one that outlives a killed trainer would keep the trainer's lock, and nobody
//! could adopt its memory or write its tag. A record lock belongs to the process: a child neither inherits it nor can
//! drop it, SIGKILL releases it, and pids need not be compared across pid namespaces. Its two weaknesses are met by the
//! table: between threads of one process it does not exclude (the table does), and closing another descriptor of the
//! file would drop it (the table is asked, by device and inode, before a lock file is opened).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

use crate::file;

/// How long to wait before asking again for a lock that another process holds: the kernel has no timed wait for locks.
/// Holders in this process ring the bell.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Device and inode.
type FileKey = (u64, u64);

struct Held {
    file: Arc<File>,
    /// 0: exclusive.
    readers: usize,
}

#[derive(Default)]
struct Table {
    /// The process that filled the table: a forked child inherits the table but not the locks.
    pid: u32,
    held: HashMap<FileKey, Held>,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
static RELEASED: Condvar = Condvar::new();

/// The table, emptied first if it came from a parent. The parent's descriptors in it are leaked, not closed: they are
/// the child's own copies, and a drop elsewhere in the child may still use them.
fn table() -> MutexGuard<'static, Table> {
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if table.pid != pid {
        std::mem::forget(std::mem::take(&mut table.held));
        table.pid = pid;
    }
    table
}

/// A held lock; dropped = released. In a forked child it is nothing: dropping it there releases nothing.
#[derive(Debug)]
pub struct FileLock {
    file: Arc<File>,
    key: FileKey,
    pid: u32,
}

impl FileLock {
    /// Takes the lock alone, or says `None` if anybody holds it. The file is made (mode 0666 with the umask) if absent.
    pub fn try_exclusive(path: &Path) -> io::Result<Option<Self>> {
        acquire(&mut table(), path, Mode::Exclusive, true)
    }

    /// Takes the lock alone, waiting at most `wait` for others to release it; `None` if they do not.
    pub fn exclusive_within(path: &Path, wait: Duration) -> io::Result<Option<Self>> {
        within(path, Mode::Exclusive, wait)
    }

    /// Takes the lock together with other readers, waiting at most `wait` for a writer; `None` if it does not release it.
    pub fn shared_within(path: &Path, wait: Duration) -> io::Result<Option<Self>> {
        within(path, Mode::Shared, wait)
    }

    /// Takes the lock of a file that is there, opened read-write with `flags` beside; `None` if it is held.
    pub(crate) fn try_existing(path: &Path, flags: OFlags) -> io::Result<Option<Self>> {
        acquire_with(&mut table(), path, Mode::Exclusive, flags)
    }

    /// Makes a new file and takes its lock. `None` if somebody was faster: try another name.
    pub(crate) fn create_new(path: &Path, mode: u32) -> io::Result<Option<Self>> {
        let mut table = table();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let file = match file::open(path, flags, mode) {
            Ok(file) => File::from(file),
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(cause) => return Err(cause),
        };
        take(&mut table, path, file, Mode::Exclusive)
    }

    /// Replaces the text that says who holds the lock.
    pub fn write_holder(&self, text: &str) -> io::Result<()> {
        file::set_len(&self.file, 0)?;
        file::write_all_at(&self.file, 0, text.as_bytes())
    }

    /// What the holder, or the last one, wrote. Empty if there is no such file, or between a lock and its text.
    pub fn holder(path: &Path) -> io::Result<String> {
        without_losing_locks(path, |file, _| {
            let len = file.metadata()?.len().min(4096) as usize;
            let mut text = vec![0; len];
            match file::read_exact_at(file, 0, &mut text) {
                // The holder is just replacing its text.
                Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(String::new()),
                Err(cause) => Err(cause),
                Ok(()) => Ok(String::from_utf8_lossy(&text).into_owned()),
            }
        })
        .or_else(|cause| if cause.kind() == io::ErrorKind::NotFound { Ok(String::new()) } else { Err(cause) })
    }

    /// The locked file. It must not be duplicated: closing the duplicate would drop the lock.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child: the lock is the parent's, and the table may have been locked when we were forked.
            return;
        }
        let mut table = table();
        let Some(held) = table.held.get_mut(&self.key) else { return };
        if held.readers > 1 {
            held.readers -= 1;
            return;
        }
        table.held.remove(&self.key);
        // Unlocked under the table, so that nobody here can take the lock and lose it to this call. A failure leaves
        // the release to the close of the descriptor, which comes next.
        let _ = rustix::fs::fcntl_lock(&self.file, FlockOperation::NonBlockingUnlock);
        drop(table);
        RELEASED.notify_all();
    }
}

/// Opens `path` for reading and looks at it without harm to locks of this process: a file that it holds is looked at
/// through the descriptor it has, and `look` is told so. `path` is not followed if it is a link.
pub(crate) fn without_losing_locks<T>(path: &Path, look: impl FnOnce(&File, bool) -> io::Result<T>) -> io::Result<T> {
    // The table stays locked until our descriptor is closed: else another thread could take the lock in between, and
    // our close would drop it.
    let table = table();
    if let Some(held) = key_of(path)?.and_then(|key| table.held.get(&key)) {
        return look(&held.file, true);
    }
    let file = File::from(file::open(path, OFlags::RDONLY | OFlags::NOFOLLOW, 0)?);
    look(&file, false)
}

/// Whether another process holds a lock on `file`, which the caller got from `without_losing_locks`.
pub(crate) fn is_held_elsewhere(file: &File) -> io::Result<bool> {
    let wish = rustix::process::Flock::from(rustix::process::FlockType::WriteLock);
    Ok(file::retry(|| rustix::process::fcntl_getlk(file, &wish))?.is_some())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Exclusive,
    Shared,
}

#[allow(clippy::disallowed_methods, reason = "a lock's time limit is real time; the engine's clock cannot wake us")]
fn within(path: &Path, mode: Mode, wait: Duration) -> io::Result<Option<FileLock>> {
    let start = std::time::Instant::now();
    let mut table = table();
    loop {
        if let Some(lock) = acquire(&mut table, path, mode, true)? {
            return Ok(Some(lock));
        }
        let Some(rest) = wait.checked_sub(start.elapsed()).filter(|rest| !rest.is_zero()) else { return Ok(None) };
        (table, _) = RELEASED.wait_timeout(table, rest.min(ASK_AGAIN)).unwrap_or_else(PoisonError::into_inner);
    }
}

fn acquire(table: &mut Table, path: &Path, mode: Mode, create: bool) -> io::Result<Option<FileLock>> {
    let create = if create { OFlags::CREATE } else { OFlags::empty() };
    acquire_with(table, path, mode, create)
}

fn acquire_with(table: &mut Table, path: &Path, mode: Mode, flags: OFlags) -> io::Result<Option<FileLock>> {
    if let Some(key) = key_of(path)?
        && let Some(held) = table.held.get_mut(&key)
    {
        if mode == Mode::Exclusive || held.readers == 0 {
            return Ok(None);
        }
        held.readers += 1;
        return Ok(Some(FileLock { file: Arc::clone(&held.file), key, pid: table.pid }));
    }
    let file = File::from(file::open(path, OFlags::RDWR | OFlags::NOFOLLOW | flags, 0o666)?);
    take(table, path, file, mode)
}

/// Locks a freshly opened file, unless its path names another one by now.
fn take(table: &mut Table, path: &Path, file: File, mode: Mode) -> io::Result<Option<FileLock>> {
    let wish = match mode {
        Mode::Exclusive => FlockOperation::NonBlockingLockExclusive,
        Mode::Shared => FlockOperation::NonBlockingLockShared,
    };
    let metadata = file.metadata()?;
    let key = (metadata.dev(), metadata.ino());
    if table.held.contains_key(&key) {
        // The path was switched to a file that we hold, between our look and our open. Closing would drop that lock:
        // the descriptor is leaked instead. It takes another process of this user to bring this about.
        std::mem::forget(file);
        return Ok(None);
    }
    match file::retry(|| rustix::fs::fcntl_lock(&file, wish)) {
        Ok(()) => {}
        Err(cause) if matches!(Errno::from_io_error(&cause), Some(Errno::AGAIN | Errno::ACCESS)) => return Ok(None),
        Err(cause) => return Err(cause),
    }
    // Its last holder may have removed the file while we opened it: a lock on a file without a name guards nothing.
    if key_of(path)? != Some(key) {
        return Ok(None);
    }
    let file = Arc::new(file);
    let readers = usize::from(mode == Mode::Shared);
    table.held.insert(key, Held { file: Arc::clone(&file), readers });
    Ok(Some(FileLock { file, key, pid: table.pid }))
}

/// Device and inode of `path`, `None` if there is no such file. A link is not followed.
fn key_of(path: &Path) -> io::Result<Option<FileKey>> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn one_holder_at_a_time_and_the_next_one_after_release() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::try_exclusive(&path).unwrap().unwrap();
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        assert!(FileLock::shared_within(&path, NOW).unwrap().is_none());
        drop(lock);
        assert!(FileLock::try_exclusive(&path).unwrap().is_some());
    }

    #[test]
    fn readers_share_and_keep_writers_out_until_the_last_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = FileLock::shared_within(&path, NOW).unwrap().unwrap();
        let second = FileLock::shared_within(&path, NOW).unwrap().unwrap();
        drop(first);
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        drop(second);
        assert!(FileLock::try_exclusive(&path).unwrap().is_some());
    }

    #[test]
    fn a_waiter_gets_the_lock_when_the_holder_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::try_exclusive(&path).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| FileLock::exclusive_within(&path, Duration::from_secs(60)).unwrap().is_some());
            drop(lock);
            assert!(waiter.join().unwrap());
        });
    }

    #[test]
    fn the_holder_is_named_and_looking_does_not_drop_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(FileLock::holder(&path).unwrap(), "");
        let lock = FileLock::try_exclusive(&path).unwrap().unwrap();
        lock.write_holder("a longer text").unwrap();
        lock.write_holder("pid 7").unwrap();
        assert_eq!(FileLock::holder(&path).unwrap(), "pid 7");
        assert!(held_for_another_process(&path));
        drop(lock);
        assert!(!held_for_another_process(&path));
    }

    /// Guards: the lock of a removed file was taken, while the next process locked a new file of that name.
    #[test]
    fn a_lock_file_that_lost_its_name_is_not_a_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = FileLock::try_exclusive(&path).unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = FileLock::try_exclusive(&path).unwrap().unwrap();
        assert_ne!(first.key, second.key);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("victim"), "precious").unwrap();
        std::os::unix::fs::symlink(dir.path().join("victim"), dir.path().join("lock")).unwrap();
        assert!(FileLock::try_exclusive(&dir.path().join("lock")).is_err());
    }

    /// Asks the kernel from outside, as another process sees it.
    fn held_for_another_process(path: &Path) -> bool {
        let code = "import fcntl,sys\n\
            f=open(sys.argv[1],'r+')\n\
            try: fcntl.lockf(f,fcntl.LOCK_EX|fcntl.LOCK_NB)\n\
            except OSError: print('held')\n";
        let output = std::process::Command::new("python3").arg("-c").arg(code).arg(path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout.starts_with(b"held")
    }
}

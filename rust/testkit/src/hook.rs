//! A disk that asks before each call: what crash, fault and slow disks have in common.
//!
//! Owns: the names of the calls, and the passing on.
//! Must not: change what a call means when its hook says `Go`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use relight_engine::disk::{DirEntry, Disk, DiskFile, DiskLock, Metadata};

/// The primitive calls of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// `Disk::create_file`
    CreateFile,
    /// `Disk::open_file`
    OpenFile,
    /// `Disk::modify_file`
    ModifyFile,
    /// `Disk::rename`
    Rename,
    /// `Disk::remove_file`
    RemoveFile,
    /// `Disk::create_dir`
    CreateDir,
    /// `Disk::remove_dir`
    RemoveDir,
    /// `Disk::list_dir`
    ListDir,
    /// `Disk::metadata`
    Metadata,
    /// `Disk::sync_dir`
    SyncDir,
    /// `Disk::lock`
    Lock,
    /// `Disk::free_bytes`
    FreeBytes,
    /// `Disk::canonical`
    Canonical,
    /// `DiskFile::write_at`
    Write,
    /// `DiskFile::read_at`
    Read,
    /// `DiskFile::reserve`
    Reserve,
    /// `DiskFile::sync`
    SyncFile,
    /// `DiskFile::len`
    Len,
}

impl Op {
    /// Whether the call can change what is on the disk, or what a power cut leaves.
    pub fn changes(self) -> bool {
        !matches!(
            self,
            Self::OpenFile
                | Self::ModifyFile
                | Self::ListDir
                | Self::Metadata
                | Self::FreeBytes
                | Self::Canonical
                | Self::Read
                | Self::Len
        )
    }
}

/// One call, before it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which.
    pub op: Op,
    /// On what; for a rename, the new name.
    pub path: PathBuf,
    /// How many bytes, of a write or read.
    pub bytes: usize,
}

/// What becomes of a call.
#[derive(Debug)]
pub enum Verdict {
    /// It is made.
    Go,
    /// It fails without effect.
    Fail(io::Error),
    /// A write puts only so many bytes on the disk, then fails; another call fails without effect.
    Partial(usize, io::Error),
}

/// Decides about each call.
pub trait Hook: Send + Sync + fmt::Debug + 'static {
    /// What becomes of `call`.
    fn before(&self, call: &Call) -> Verdict;
}

/// A disk whose calls a hook decides about.
#[derive(Debug)]
pub struct HookedDisk<H> {
    inner: Arc<dyn Disk>,
    hook: Arc<H>,
}

impl<H> Clone for HookedDisk<H> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), hook: Arc::clone(&self.hook) }
    }
}

impl<H: Hook> HookedDisk<H> {
    /// `inner`, with `hook` before it.
    pub fn over(inner: Arc<dyn Disk>, hook: H) -> Self {
        Self { inner, hook: Arc::new(hook) }
    }

    /// The hook.
    pub fn hook(&self) -> &H {
        &self.hook
    }

    fn ask(&self, op: Op, path: &Path) -> io::Result<()> {
        ask(self.hook.as_ref(), op, path, 0)
    }

    fn wrap(&self, path: &Path, file: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        Box::new(HookedFile { inner: file, path: path.to_path_buf(), hook: Arc::clone(&self.hook) })
    }
}

fn ask<H: Hook>(hook: &H, op: Op, path: &Path, bytes: usize) -> io::Result<()> {
    match hook.before(&Call { op, path: path.to_path_buf(), bytes }) {
        Verdict::Go => Ok(()),
        Verdict::Fail(error) | Verdict::Partial(_, error) => Err(error),
    }
}

impl<H: Hook> Disk for HookedDisk<H> {
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.ask(Op::CreateFile, path)?;
        Ok(self.wrap(path, self.inner.create_file(path)?))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.ask(Op::OpenFile, path)?;
        Ok(self.wrap(path, self.inner.open_file(path)?))
    }

    fn modify_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.ask(Op::ModifyFile, path)?;
        Ok(self.wrap(path, self.inner.modify_file(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.ask(Op::Rename, to)?;
        self.inner.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.ask(Op::RemoveFile, path)?;
        self.inner.remove_file(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.ask(Op::CreateDir, path)?;
        self.inner.create_dir(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.ask(Op::RemoveDir, path)?;
        self.inner.remove_dir(path)
    }

    fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.ask(Op::ListDir, path)?;
        self.inner.list_dir(path)
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.ask(Op::Metadata, path)?;
        self.inner.metadata(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.ask(Op::SyncDir, path)?;
        self.inner.sync_dir(path)
    }

    fn lock(&self, path: &Path, holder: &str, wait: Duration) -> io::Result<Box<dyn DiskLock>> {
        self.ask(Op::Lock, path)?;
        self.inner.lock(path, holder, wait)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        self.ask(Op::FreeBytes, path)?;
        self.inner.free_bytes(path)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        self.ask(Op::Canonical, path)?;
        self.inner.canonical(path)
    }

    fn mount_point(&self, path: &Path) -> Option<PathBuf> {
        self.inner.mount_point(path)
    }
}

#[derive(Debug)]
struct HookedFile<H> {
    inner: Box<dyn DiskFile>,
    path: PathBuf,
    hook: Arc<H>,
}

impl<H: Hook> DiskFile for HookedFile<H> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let call = Call { op: Op::Write, path: self.path.clone(), bytes: bytes.len() };
        match self.hook.before(&call) {
            Verdict::Go => self.inner.write_at(offset, bytes),
            Verdict::Fail(error) => Err(error),
            Verdict::Partial(written, error) => {
                self.inner.write_at(offset, &bytes[..written.min(bytes.len())])?;
                Err(error)
            }
        }
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        ask(self.hook.as_ref(), Op::Read, &self.path, buffer.len())?;
        self.inner.read_at(offset, buffer)
    }

    fn reserve(&mut self, len: u64) -> io::Result<()> {
        ask(self.hook.as_ref(), Op::Reserve, &self.path, 0)?;
        self.inner.reserve(len)
    }

    fn sync(&mut self) -> io::Result<()> {
        ask(self.hook.as_ref(), Op::SyncFile, &self.path, 0)?;
        self.inner.sync()
    }

    fn len(&self) -> io::Result<u64> {
        ask(self.hook.as_ref(), Op::Len, &self.path, 0)?;
        self.inner.len()
    }
}

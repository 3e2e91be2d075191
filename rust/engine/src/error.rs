//! The errors of the engine.
//!
//! Owns: the kinds (one per thing that a caller can do next) and the facts that each error carries.
//! Must not: lose a cause; turn an error into text before it reaches the person.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The result of engine calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller can do next; each kind is one class in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No such checkpoint or file: ask for one that exists.
    NotFound,
    /// The call cannot be meant so: change it.
    InvalidArgument,
    /// Storage or memory tier has no room: free space or lower what is kept.
    StorageFull,
    /// Storage refuses this user: change permissions.
    StorageDenied,
    /// Storage does not answer or fails: wait, repair, try again.
    StorageUnavailable,
    /// Bytes are not what was written: use another checkpoint.
    Corrupt,
    /// Another writer holds or has replaced the tag: choose who writes.
    Conflict,
    /// The state changed while it was being copied: save again.
    Torn,
    /// The engine is closed, or belongs to another process: make a new one.
    Closed,
    /// A wait reached its limit: wait longer, or look at what is slow.
    TimedOut,
    /// Ctrl-C or another signal handler asked to stop the wait.
    Interrupted,
}

impl ErrorKind {
    /// The word of this kind, stable over versions.
    pub fn word(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::InvalidArgument => "invalid_argument",
            Self::StorageFull => "storage_full",
            Self::StorageDenied => "storage_denied",
            Self::StorageUnavailable => "storage_unavailable",
            Self::Corrupt => "corrupt",
            Self::Conflict => "conflict",
            Self::Torn => "torn",
            Self::Closed => "closed",
            Self::TimedOut => "timed_out",
            Self::Interrupted => "interrupted",
        }
    }

    /// Whether the same call may succeed later with nothing changed by the caller.
    pub fn retryable(self) -> bool {
        matches!(self, Self::StorageFull | Self::StorageUnavailable | Self::Conflict | Self::Torn | Self::TimedOut)
    }
}

/// One failure: the fact, where, and the way out.
#[derive(Debug)]
pub struct Error {
    /// What the caller can do next.
    pub kind: ErrorKind,
    /// The fact and the way out, in one or two sentences, naming the file.
    pub message: String,
    /// The file or directory that the fact is about.
    pub path: Option<PathBuf>,
    /// The tag that the fact is about.
    pub tag: Option<String>,
    /// The rank on which it happened.
    pub rank: Option<u32>,
    /// What the operating system or a lower layer said.
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), path: None, tag: None, rank: None, source: None }
    }

    /// An error from the operating system while doing `what` ("write model.pt") to `path`.
    /// The kind follows from the system's own code.
    pub fn io(what: impl fmt::Display, path: &Path, cause: io::Error) -> Self {
        use io::ErrorKind as K;
        let (kind, way_out) = match cause.kind() {
            K::NotFound if is_address(path) => (ErrorKind::NotFound, NO_OBJECT_STORES),
            K::NotFound => (ErrorKind::NotFound, "check the path"),
            // Of reading as of writing: `what` says which.
            K::PermissionDenied => (ErrorKind::StorageDenied, "give this user access, or choose another path"),
            K::ReadOnlyFilesystem => (ErrorKind::StorageDenied, "mount it for writing, or choose another path"),
            K::StorageFull | K::QuotaExceeded | K::FileTooLarge => {
                (ErrorKind::StorageFull, "free space, lower keep, or choose another path")
            }
            K::NotADirectory | K::IsADirectory | K::InvalidFilename => {
                (ErrorKind::InvalidArgument, "choose another path")
            }
            K::Interrupted => (ErrorKind::Interrupted, "the wait was interrupted"),
            // Links in a circle, and a name with a NUL, which never reaches the system: trying again cannot help.
            _ if cause.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
                || (cause.kind() == K::InvalidInput && cause.raw_os_error().is_none()) =>
            {
                (ErrorKind::InvalidArgument, "choose another path")
            }
            _ => (ErrorKind::StorageUnavailable, "check the storage, then try again"),
        };
        Self::new(kind, format!("cannot {what}: {cause} ({}); {way_out}", path.display())).at(path).because(cause)
    }

    /// The directory that `target` shall be written to is not there, said by `cause`; any other error is one of `io`.
    pub(crate) fn create(target: &Path, directory: &Path, cause: io::Error) -> Self {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        if cause.kind() != io::ErrorKind::NotFound {
            return Self::io(format!("create {name}"), target, cause);
        }
        let way_out = if is_address(target) { NO_OBJECT_STORES } else { "create it first, or choose another path" };
        let text = format!("cannot create {name}: there is no directory {}; {way_out}", directory.display());
        Self::new(ErrorKind::NotFound, text).at(target).because(cause)
    }

    /// The process may not have `bytes` more of memory.
    pub(crate) fn no_memory(bytes: u64, cause: io::Error) -> Self {
        let text = format!("there is no memory for a buffer of {bytes} bytes ({cause}); free memory, then try again");
        Self::new(ErrorKind::StorageUnavailable, text).because(cause)
    }

    /// Names the file or directory.
    #[must_use]
    pub fn at(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Names the tag.
    #[must_use]
    pub fn of_tag(mut self, tag: impl Into<String>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// Names the rank.
    #[must_use]
    pub fn on_rank(mut self, rank: u32) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn because(mut self, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(cause));
        self
    }

    /// The operating system's error code, where there is one below.
    pub fn os_code(&self) -> Option<i32> {
        let cause = self.source.as_ref()?.downcast_ref::<io::Error>()?;
        cause.raw_os_error()
    }
}

const NO_OBJECT_STORES: &str = "object stores are not built yet, give a path of a mounted file system";

/// Whether a path looks like the address of an object store: `s3://bucket/model.pt`, also as `/home/me/s3:/bucket/model.pt`.
fn is_address(path: &Path) -> bool {
    path.components().any(|part| {
        let scheme = part.as_os_str().to_str().and_then(|part| part.strip_suffix(':'));
        scheme.is_some_and(|scheme| scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|cause| &**cause as &(dyn std::error::Error + 'static))
    }
}

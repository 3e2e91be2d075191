//! A file system in memory that knows what would survive a power cut.
//!
//! Owns: names, bytes and links as `Disk` promises them; beside each, what is durable.
//! Must not: be kinder than POSIX allows. Here a file's sync makes its bytes durable and nothing else, a directory's
//! sync makes that directory's names durable and nothing else, also when a rename touched two.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use relight_engine::disk::{DirEntry, Disk, DiskFile, DiskLock, EntryKind, Metadata};

mod power_cut;

type Id = u64;
const ROOT: Id = 1;

#[derive(Clone, Debug)]
enum Node {
    File { bytes: Vec<u8>, durable: Vec<u8> },
    Directory { names: BTreeMap<String, Id>, durable: BTreeMap<String, Id> },
    Link(PathBuf),
}

/// One call that changed names, and which of its effects are not durable.
#[derive(Clone, Debug)]
struct Change {
    effects: Vec<Effect>,
}

/// In `directory`, `name` leads to `target` or to nothing.
#[derive(Clone, Debug)]
struct Effect {
    directory: Id,
    name: String,
    target: Option<Id>,
}

#[derive(Clone, Debug)]
struct State {
    nodes: BTreeMap<Id, Node>,
    versions: BTreeMap<Id, u64>,
    next_id: Id,
    next_version: u64,
    pending: Vec<Change>,
    locked: BTreeSet<Id>,
}

/// A file system in memory; clones are the same one.
#[derive(Clone)]
pub struct MemoryDisk {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    unlocked: Condvar,
}

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryDisk")
    }
}

impl Default for MemoryDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryDisk {
    /// An empty one.
    pub fn new() -> Self {
        let root = Node::Directory { names: BTreeMap::new(), durable: BTreeMap::new() };
        Self::of(State {
            nodes: BTreeMap::from([(ROOT, root)]),
            versions: BTreeMap::new(),
            next_id: ROOT + 1,
            next_version: 1,
            pending: Vec::new(),
            locked: BTreeSet::new(),
        })
    }

    /// What it is now, as one of its own, with no locks held: what a machine finds whose processes were killed.
    pub fn after_kill(&self) -> Self {
        let mut state = self.state().clone();
        state.locked.clear();
        Self::of(state)
    }

    /// Makes a symbolic link.
    pub fn link(&self, target: &Path, path: &Path) {
        let mut state = self.state();
        let (directory, name) = state.parent_of(path).unwrap();
        let id = state.make(Node::Link(target.to_path_buf()));
        state.change(vec![Effect { directory, name, target: Some(id) }]);
    }

    /// Replaces the bytes of a file where it lies, durably, as a foreign tool or a bad disk does.
    pub fn tamper(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let id = state.find(path).unwrap();
        let version = state.new_version();
        state.versions.insert(id, version);
        let Some(Node::File { bytes, durable }) = state.nodes.get_mut(&id) else { panic!("{path:?} is no file") };
        change(bytes);
        durable.clone_from(bytes);
    }

    /// Every file below `directory` with its bytes, by path.
    pub fn files(&self, directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let state = self.state();
        let Ok(start) = state.find(directory) else { return found };
        let mut open = vec![(directory.to_path_buf(), start)];
        while let Some((path, id)) = open.pop() {
            match &state.nodes[&id] {
                Node::File { bytes, .. } => {
                    found.insert(path, bytes.clone());
                }
                Node::Directory { names, .. } => open.extend(names.iter().map(|(name, id)| (path.join(name), *id))),
                Node::Link(_) => {}
            }
        }
        found
    }

    /// Removes `path` with all below it, as `rm -rf` does.
    pub fn remove_all(&self, path: &Path) {
        let mut state = self.state();
        let (directory, name) = state.parent_of(path).unwrap();
        state.change(vec![Effect { directory, name, target: None }]);
    }

    fn of(state: State) -> Self {
        Self { shared: Arc::new(Shared { state: Mutex::new(state), unlocked: Condvar::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let state = self.state();
        let id = state.find(path)?;
        match state.nodes[&id] {
            Node::File { .. } => Ok(Box::new(MemoryFile { disk: self.clone(), id })),
            _ => Err(io::ErrorKind::IsADirectory.into()),
        }
    }
}

impl State {
    fn make(&mut self, node: Node) -> Id {
        let id = self.next_id;
        self.next_id += 1;
        self.nodes.insert(id, node);
        let version = self.new_version();
        self.versions.insert(id, version);
        id
    }

    fn new_version(&mut self) -> u64 {
        self.next_version += 1;
        self.next_version
    }

    fn names(&self, directory: Id) -> io::Result<&BTreeMap<String, Id>> {
        match self.nodes.get(&directory) {
            Some(Node::Directory { names, .. }) => Ok(names),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn change(&mut self, effects: Vec<Effect>) {
        for effect in &effects {
            if let Some(Node::Directory { names, .. }) = self.nodes.get_mut(&effect.directory) {
                effect.put(names);
            }
        }
        self.pending.push(Change { effects });
    }

    /// The node at `path`, links followed.
    fn find(&self, path: &Path) -> io::Result<Id> {
        self.walk(path, 0).map(|(id, _)| id)
    }

    fn walk(&self, path: &Path, links: u32) -> io::Result<(Id, PathBuf)> {
        if links > 20 {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (mut at, mut real) = (ROOT, PathBuf::from("/"));
        for component in path.components() {
            let Component::Normal(name) = component else { continue };
            let id = *self.names(at)?.get(&*name.to_string_lossy()).ok_or(io::ErrorKind::NotFound)?;
            (at, real) = match &self.nodes[&id] {
                Node::Link(target) => self.walk(&real.join(target), links + 1)?,
                _ => (id, real.join(name)),
            };
        }
        Ok((at, real))
    }

    /// The directory that holds the name of `path`, and the name. The directory exists, the name need not.
    fn parent_of(&self, path: &Path) -> io::Result<(Id, String)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
        let directory = self.find(path.parent().unwrap_or(Path::new("/")))?;
        self.names(directory)?;
        Ok((directory, name))
    }

    /// As `parent_of`, for a name that is there; and the node, no link followed.
    fn entry(&self, path: &Path) -> io::Result<(Id, String, Id)> {
        let (directory, name) = self.parent_of(path)?;
        let id = *self.names(directory)?.get(&name).ok_or(io::ErrorKind::NotFound)?;
        Ok((directory, name, id))
    }

    fn is_directory(&self, id: Id) -> bool {
        matches!(self.nodes[&id], Node::Directory { .. })
    }

    fn kind(&self, id: Id) -> EntryKind {
        if self.is_directory(id) { EntryKind::Directory } else { EntryKind::File }
    }
}

impl Effect {
    fn put(&self, names: &mut BTreeMap<String, Id>) {
        match self.target {
            Some(id) => names.insert(self.name.clone(), id),
            None => names.remove(&self.name),
        };
    }
}

impl Disk for MemoryDisk {
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        let (directory, name) = state.parent_of(path)?;
        if state.names(directory)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = state.make(Node::File { bytes: Vec::new(), durable: Vec::new() });
        state.change(vec![Effect { directory, name, target: Some(id) }]);
        Ok(Box::new(MemoryFile { disk: self.clone(), id }))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.open(path)
    }

    fn modify_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.open(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        let (from_directory, from_name, id) = state.entry(from)?;
        let (to_directory, to_name) = state.parent_of(to)?;
        if let Some(&replaced) = state.names(to_directory)?.get(&to_name) {
            match (state.is_directory(id), state.is_directory(replaced)) {
                (false, true) => return Err(io::ErrorKind::IsADirectory.into()),
                (true, false) => return Err(io::ErrorKind::NotADirectory.into()),
                (true, true) if !state.names(replaced)?.is_empty() => {
                    return Err(io::ErrorKind::DirectoryNotEmpty.into());
                }
                // two names of one file: POSIX leaves both
                _ if replaced == id => return Ok(()),
                _ => {}
            }
        }
        let version = state.new_version();
        state.versions.insert(id, version);
        state.change(vec![
            Effect { directory: from_directory, name: from_name, target: None },
            Effect { directory: to_directory, name: to_name, target: Some(id) },
        ]);
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let (directory, name, id) = state.entry(path)?;
        if state.is_directory(id) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        state.change(vec![Effect { directory, name, target: None }]);
        Ok(())
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let (directory, name) = state.parent_of(path)?;
        if state.names(directory)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = state.make(Node::Directory { names: BTreeMap::new(), durable: BTreeMap::new() });
        state.change(vec![Effect { directory, name, target: Some(id) }]);
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let (directory, name, id) = state.entry(path)?;
        if !state.names(id)?.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        state.change(vec![Effect { directory, name, target: None }]);
        Ok(())
    }

    fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let state = self.state();
        let directory = state.find(path)?;
        let names = state.names(directory)?;
        let kind = |id: Id, name: &str| match state.nodes[&id] {
            Node::Link(_) => state.find(&path.join(name)).map_or(EntryKind::Dangling, |id| state.kind(id)),
            _ => state.kind(id),
        };
        Ok(names.iter().map(|(name, id)| DirEntry { name: name.clone(), kind: kind(*id, name) }).collect())
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let state = self.state();
        let id = state.find(path)?;
        let len = match &state.nodes[&id] {
            Node::File { bytes, .. } => bytes.len() as u64,
            _ => 0,
        };
        Ok(Metadata { kind: state.kind(id), len, version: state.versions.get(&id).copied().unwrap_or(0) })
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let directory = state.find(path)?;
        let mut pending = std::mem::take(&mut state.pending);
        let Some(Node::Directory { durable, .. }) = state.nodes.get_mut(&directory) else {
            return Err(io::ErrorKind::NotADirectory.into());
        };
        for change in &mut pending {
            change.effects.retain(|effect| {
                if effect.directory == directory {
                    effect.put(durable);
                }
                effect.directory != directory
            });
        }
        pending.retain(|change| !change.effects.is_empty());
        state.pending = pending;
        Ok(())
    }

    fn lock(&self, path: &Path, holder: &str, wait: Duration) -> io::Result<Box<dyn DiskLock>> {
        const SLICE: Duration = Duration::from_millis(5);
        let mut waited = Duration::ZERO;
        let mut state = self.state();
        loop {
            // looked up each time: the name may lead to another file by now
            let id = match state.find(path) {
                Ok(id) => id,
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    let (directory, name) = state.parent_of(path)?;
                    let id = state.make(Node::File { bytes: Vec::new(), durable: Vec::new() });
                    state.change(vec![Effect { directory, name, target: Some(id) }]);
                    id
                }
                Err(cause) => return Err(cause),
            };
            if state.locked.insert(id) {
                if let Some(Node::File { bytes, .. }) = state.nodes.get_mut(&id) {
                    *bytes = holder.as_bytes().to_vec();
                }
                return Ok(Box::new(MemoryLock { disk: self.clone(), id }));
            }
            if waited >= wait {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            state = self.shared.unlocked.wait_timeout(state, SLICE.min(wait - waited)).unwrap().0;
            waited += SLICE;
        }
    }

    fn free_bytes(&self, _path: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        self.state().walk(path, 0).map(|(_, real)| real)
    }
}

#[derive(Debug)]
struct MemoryFile {
    disk: MemoryDisk,
    id: Id,
}

impl MemoryFile {
    fn with_bytes<T>(&self, read: impl FnOnce(&[u8]) -> T) -> T {
        match &self.disk.state().nodes[&self.id] {
            Node::File { bytes, .. } => read(bytes),
            _ => unreachable!("only files are opened"),
        }
    }
}

impl DiskFile for MemoryFile {
    fn write_at(&mut self, offset: u64, new: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        let version = state.new_version();
        state.versions.insert(self.id, version);
        if let Some(Node::File { bytes, .. }) = state.nodes.get_mut(&self.id) {
            let start = usize::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
            let end = start + new.len();
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[start..end].copy_from_slice(new);
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        self.with_bytes(|bytes| {
            let from = bytes.get(start..start + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(from);
            Ok(())
        })
    }

    fn reserve(&mut self, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if let Some(Node::File { bytes, durable }) = self.disk.state().nodes.get_mut(&self.id) {
            durable.clone_from(bytes);
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.with_bytes(|bytes| bytes.len() as u64))
    }
}

#[derive(Debug)]
struct MemoryLock {
    disk: MemoryDisk,
    id: Id,
}

impl DiskLock for MemoryLock {}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        self.disk.state().locked.remove(&self.id);
        self.disk.shared.unlocked.notify_all();
    }
}

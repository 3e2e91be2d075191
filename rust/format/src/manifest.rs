//! The manifest: the JSON whose appearance commits a checkpoint; and the part, what one rank says before it.
//!
//! Owns: the fields, what they mean, the rules that hold between them, the checksum over the text.
//! Must not: decide what is newest (`order`) or where a file lies (the engine's catalogue).
//! Invariant: what `parse` returns has passed `check`, and what `to_bytes` returns `parse` reads back equal.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::crc;
use crate::names;

mod text;

pub use text::hex_list;

/// The schema that this version writes, and the newest that it reads.
pub const SCHEMA_VERSION: u32 = 1;
/// The `codec` of a plain torch.save file.
pub const CODEC_NONE: &str = "none";
/// How deep lists and objects may nest in `meta`, so that every JSON reader takes the manifest.
pub const META_DEPTH_MAX: usize = 64;

/// One committed generation of a tag.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The tag.
    pub tag: String,
    /// The generation that this commit made, from 1 on.
    pub generation: u64,
    /// The segment of saves that it belongs to; see `order`.
    pub run: u64,
    /// The number of this commit in its root: one more than the highest seen.
    pub sequence: u64,
    /// The training step, where there is one.
    pub step: Option<i64>,
    /// How many ranks wrote it.
    pub world_size: u32,
    /// What wrote it, as `relight 0.1.0`.
    pub created_by: String,
    /// When the last share was staged, RFC 3339 UTC; for people, never for an order.
    pub staged_at: String,
    /// When it was committed, RFC 3339 UTC; for people, never for an order.
    pub committed_at: String,
    /// Whether the user marked it as the best.
    pub best: bool,
    /// All files of the tag, those of earlier generations that still count included.
    pub files: Vec<FileRecord>,
    /// The processes that wrote this generation.
    pub writers: Vec<Writer>,
    /// The user's own JSON.
    #[serde(default)]
    pub meta: Value,
}

/// One file of a tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// The name that the caller gave.
    pub name: String,
    /// Its name on disk: `names::escape_file_name(name)`.
    pub path: String,
    /// The generation that wrote it: it lies in `.relight/g<generation>/` until it is moved.
    pub generation: u64,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the whole file, eight hexadecimal digits in the text.
    #[serde(with = "text::hex")]
    pub crc32: u32,
    /// Bytes of a chunk; the last one has what is left.
    pub chunk_bytes: u64,
    /// CRC-32 of each chunk, one string of eight hexadecimal digits each in the text.
    #[serde(with = "text::hex_list")]
    pub chunks: Vec<u32>,
    /// The rank that wrote it.
    pub rank: u32,
    /// [`CODEC_NONE`]: a plain torch.save file.
    pub codec: String,
}

/// A process that wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writer {
    /// Its rank.
    pub rank: u32,
    /// The host's name.
    pub host: String,
    /// The process id on that host.
    pub pid: u32,
}

/// What one rank wrote for one generation; durable before the rank says that it is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The tag.
    pub tag: String,
    /// The generation.
    pub generation: u64,
    /// The rank.
    pub rank: u32,
    /// How many ranks write this generation.
    pub world_size: u32,
    /// The rank's files.
    pub files: Vec<FileRecord>,
}

/// Why bytes are not a manifest, or a manifest says what cannot be.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The end of the text is missing or no checksum.
    #[error("the manifest is cut short or is not one of relight: {bytes} bytes with no checksum at the end")]
    Cut {
        /// How many bytes there are.
        bytes: usize,
    },
    /// The text was changed after it was written.
    #[error("the manifest was changed: its checksum is {stored:08x}, its text has {computed:08x}")]
    Checksum {
        /// What the text says.
        stored: u32,
        /// What it has.
        computed: u32,
    },
    /// The text does not have the fields of a manifest.
    #[error("the manifest is not readable: {0}")]
    Json(#[from] serde_json::Error),
    /// A newer relight wrote it.
    #[error(
        "the manifest has schema version {found} (written by {created_by}), this relight reads up to {supported}; read it with that version of relight or a newer one"
    )]
    Newer {
        /// Its version.
        found: u64,
        /// The newest that can be read.
        supported: u32,
        /// What wrote it.
        created_by: String,
    },
    /// Its fields contradict each other.
    #[error("the manifest contradicts itself: {0}")]
    Invariant(String),
}

impl Manifest {
    /// Reads a manifest: checksum, schema version, fields, and the rules of [`Manifest::check`].
    ///
    /// # Errors
    /// [`ManifestError`], which also a flip of any one bit gives.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = text::read(bytes)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The text of the manifest, its checksum at the end.
    ///
    /// # Errors
    /// [`ManifestError::Invariant`] if it breaks a rule: a manifest that no one can read is never written.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        text::write(self)
    }

    /// The file called `name`.
    pub fn file(&self, name: &str) -> Option<&FileRecord> {
        self.files.iter().find(|file| file.name == name)
    }

    /// The bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add)
    }

    /// The rules that hold between the fields.
    ///
    /// # Errors
    /// [`ManifestError::Invariant`] names the first that is broken.
    pub fn check(&self) -> Result<(), ManifestError> {
        ensure(self.schema_version == SCHEMA_VERSION, || format!("schema_version is {}", self.schema_version))?;
        names::check_tag(&self.tag).map_err(|error| ManifestError::Invariant(error.to_string()))?;
        ensure(self.generation > 0 && self.run > 0 && self.sequence > 0, || {
            format!("generation {}, run and sequence begin at 1 ({}, {})", self.generation, self.run, self.sequence)
        })?;
        ensure(self.world_size > 0, || "world_size is 0".to_owned())?;
        check_files(&self.files, self.generation)?;
        ensure(depth(&self.meta) <= META_DEPTH_MAX, || format!("meta nests deeper than {META_DEPTH_MAX} levels"))
    }
}

impl Part {
    /// Reads a part; as [`Manifest::parse`].
    ///
    /// # Errors
    /// As [`Manifest::parse`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let part: Self = text::read(bytes)?;
        part.check()?;
        Ok(part)
    }

    /// The text of the part, its checksum at the end.
    ///
    /// # Errors
    /// As [`Manifest::to_bytes`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        text::write(self)
    }

    /// The rules that hold between the fields.
    ///
    /// # Errors
    /// [`ManifestError::Invariant`] names the first that is broken.
    pub fn check(&self) -> Result<(), ManifestError> {
        ensure(self.schema_version == SCHEMA_VERSION, || format!("schema_version is {}", self.schema_version))?;
        names::check_tag(&self.tag).map_err(|error| ManifestError::Invariant(error.to_string()))?;
        ensure(self.rank < self.world_size, || format!("rank {} of {}", self.rank, self.world_size))?;
        check_files(&self.files, self.generation)?;
        for file in &self.files {
            ensure(file.rank == self.rank && file.generation == self.generation, || {
                format!("{} is of rank {} and generation {}", file.name, file.rank, file.generation)
            })?;
        }
        Ok(())
    }
}

impl FileRecord {
    /// The length of chunk `index`.
    pub fn chunk_len(&self, index: usize) -> u64 {
        self.bytes.saturating_sub(index as u64 * self.chunk_bytes).min(self.chunk_bytes)
    }

    /// The rules that hold for one file.
    ///
    /// # Errors
    /// [`ManifestError::Invariant`] names the file and the first rule that is broken.
    pub fn check(&self) -> Result<(), ManifestError> {
        let name = &self.name;
        names::check_file_name(name).map_err(|error| ManifestError::Invariant(error.to_string()))?;
        // By the rule, not merely harmless: a reader that only knows the name finds the file.
        ensure(self.path == names::escape_file_name(name) && names::is_plain_component(&self.path), || {
            format!("{name:?} lies at {:?}", self.path)
        })?;
        ensure(self.generation > 0, || format!("{name:?} is of generation 0"))?;
        ensure(self.codec == CODEC_NONE, || format!("{name:?} has the unknown codec {:?}", self.codec))?;
        let whole = crc::of_chunks(self.bytes, self.chunk_bytes, &self.chunks);
        ensure(whole.is_some(), || {
            format!("{name:?} has {} chunks of {} for {} bytes", self.chunks.len(), self.chunk_bytes, self.bytes)
        })?;
        ensure(whole == Some(self.crc32), || {
            format!("{name:?}: the checksums of its chunks do not make that of the file")
        })
    }
}

fn check_files(files: &[FileRecord], newest: u64) -> Result<(), ManifestError> {
    let mut paths = std::collections::HashMap::with_capacity(files.len());
    for file in files {
        file.check()?;
        ensure(file.generation <= newest, || {
            format!("{:?} is of the future generation {}", file.name, file.generation)
        })?;
        // Names that differ in case only would be one file after a copy to a system that ignores case.
        if let Some(other) = paths.insert(names::fold_case(&file.path), &file.name) {
            return Err(ManifestError::Invariant(format!(
                "{other:?} and {:?} would be one file where case is ignored; rename one",
                file.name
            )));
        }
    }
    Ok(())
}

fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), ManifestError> {
    if holds { Ok(()) } else { Err(ManifestError::Invariant(message())) }
}

/// How deep lists and objects nest; without recursion, so that depth itself does no harm.
fn depth(value: &Value) -> usize {
    let mut deepest = 0;
    let mut open = vec![(value, 0)];
    while let Some((value, level)) = open.pop() {
        deepest = deepest.max(level);
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, level + 1))),
            Value::Object(items) => open.extend(items.values().map(|item| (item, level + 1))),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests;

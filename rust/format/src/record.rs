//! What the memory tier stores beside its images, as JSON: enough for a successor to read, persist and commit them.
//!
//! Owns: the fields.
//! Must not: know where in a region they lie (`relight-io` keeps bytes, the engine's `memory` gives them meaning).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::{FileRecord, Writer};

/// What a slot of the region holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SlotRecord {
    /// One image.
    Image(ImageRecord),
    /// The seal of one rank's share of a tag; has no image. Its images count only together with it.
    Tag(TagRecord),
}

/// One staged image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Where it is to go.
    pub target: Target,
    /// The true name of the file.
    pub file: String,
    /// The image's length.
    pub bytes: u64,
    /// CRC-32 of the image.
    pub crc32: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// CRC-32 of each chunk.
    #[serde(with = "crate::manifest::hex_list")]
    pub chunks: Vec<u32>,
    /// A number that the images of one share and its seal have in common, new for each share in the region.
    pub share: u64,
}

/// Where an image is to go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// A file of a tag, below this root (absolute, links resolved).
    Tag {
        /// The root.
        root: String,
        /// The tag.
        tag: String,
    },
    /// A single file at this path (absolute), by `save_async` to a path: whole by itself, it needs no seal.
    File(FileTarget),
}

/// A single file to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileTarget {
    /// Absolute, links resolved.
    pub path: String,
    /// The version of what was there when the image was staged, 0 for nothing: a successor does not overwrite what
    /// somebody else has put there since. None if an earlier save to the path was still under way: it may be any.
    pub replaces: Option<u64>,
    /// When it was staged, RFC 3339 UTC: the order of two images for one path from two dead processes.
    pub staged_at: String,
}

/// The seal: this rank's share of the tag is complete in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TagRecord {
    /// The root, absolute, links resolved.
    pub root: String,
    /// The tag.
    pub tag: String,
    /// Its step.
    pub step: Option<i64>,
    /// Its run.
    pub run: u64,
    /// Its sequence number, taken at the seal.
    pub sequence: u64,
    /// The share: which images belong to it.
    pub share: u64,
    /// The slots of its images.
    pub slots: Vec<u32>,
    /// The user's own JSON.
    pub meta: Value,
    /// When it was sealed, RFC 3339 UTC; for people.
    pub sealed_at: String,
    /// Who staged it.
    pub writer: Writer,
    /// How many ranks write the tag.
    pub world_size: u32,
    /// Whether the user marked it as the best.
    pub best: bool,
    /// How many checkpoints to keep after its commit.
    pub keep: Option<u32>,
}

impl ImageRecord {
    /// The record of this image as a file of a generation; a tag's manifest needs it.
    pub fn as_file(&self, generation: u64, rank: u32) -> FileRecord {
        FileRecord {
            name: self.file.clone(),
            path: crate::names::escape_file_name(&self.file),
            generation,
            bytes: self.bytes,
            crc32: self.crc32,
            chunk_bytes: self.chunk_bytes,
            chunks: self.chunks.clone(),
            rank,
            codec: crate::manifest::CODEC_NONE.to_owned(),
        }
    }
}

impl SlotRecord {
    /// Reads a slot's record.
    ///
    /// # Errors
    /// If it is not one of this version.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }

    /// The record's bytes.
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_equal() {
        let image = SlotRecord::Image(ImageRecord {
            target: Target::File(FileTarget {
                path: "/ckpt/model.pt".into(),
                replaces: Some(u64::MAX),
                staged_at: "2026-11-29T16:30:41.250Z".into(),
            }),
            file: "model.pt".into(),
            bytes: 9,
            crc32: 1,
            chunk_bytes: 4,
            chunks: vec![1, 2, u32::MAX],
            share: 3,
        });
        let seal = SlotRecord::Tag(TagRecord {
            root: "/ckpt".into(),
            tag: "global_step5".into(),
            step: Some(5),
            run: 1,
            sequence: 2,
            share: 3,
            slots: vec![0, 7],
            meta: serde_json::json!({"a": 0.1}),
            sealed_at: "2026-11-29T16:30:41.250Z".into(),
            writer: Writer { rank: 0, host: "node".into(), pid: 1 },
            world_size: 1,
            best: true,
            keep: Some(3),
        });
        for record in [image, seal] {
            assert_eq!(SlotRecord::parse(&record.to_bytes().unwrap()).unwrap(), record);
        }
        assert!(SlotRecord::parse(b"{}").is_err());
    }
}

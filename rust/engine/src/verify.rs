//! Verifying a checkpoint: every byte of every file of a tag, against its manifest.
//!
//! Owns: the report. Must not: know how a file lies on disk (`catalog`) or what is checked in one (`image`).

use relight_format::manifest::FileRecord;

use crate::error::{ErrorKind, Result};
use crate::image::{Image, ReadOptions};
use crate::layout::TagPaths;
use crate::root::{RootStore, check_tag};

/// What verifying one file found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// Its true name.
    pub name: String,
    /// Its length, as the manifest has it.
    pub bytes: u64,
    /// One sentence for each thing that is wrong; none if every byte is as it was written.
    pub problems: Vec<String>,
}

impl FileReport {
    /// Whether every byte is as it was written.
    pub fn ok(&self) -> bool {
        self.problems.is_empty()
    }
}

/// What verifying a tag found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagReport {
    /// The tag.
    pub tag: String,
    /// Its files, in the order of the manifest.
    pub files: Vec<FileReport>,
}

impl TagReport {
    /// Whether every byte of every file is as it was written.
    pub fn ok(&self) -> bool {
        self.files.iter().all(FileReport::ok)
    }
}

/// Reads all files of `tag` and compares them with its manifest. A damaged file is a line in the report, not an error.
///
/// # Errors
/// NotFound without such a checkpoint; Corrupt if its manifest itself is damaged; what the disk or the interrupt says.
pub fn verify_tag(root: &RootStore, tag: &str, options: &ReadOptions<'_>) -> Result<TagReport> {
    check_tag(tag)?;
    let manifest = match root.manifest(&TagPaths::new(root.path(), tag))? {
        Some(manifest) => manifest,
        None => root.find(tag)?, // says what there is instead
    };
    let files = manifest.files.iter().map(|record| verify_file(root, tag, record, options)).collect::<Result<_>>()?;
    Ok(TagReport { tag: tag.to_owned(), files })
}

fn verify_file(root: &RootStore, tag: &str, record: &FileRecord, options: &ReadOptions<'_>) -> Result<FileReport> {
    let opened = root.open_file(tag, &record.name);
    let verified = opened
        .and_then(|(file, located)| Image::of_file(file, &located.path, &located.record))
        .and_then(|image| image.of_tag(tag).verify(options));
    let problems = match verified {
        Ok(problems) => problems,
        Err(error) if error.kind == ErrorKind::Corrupt => vec![error.message],
        Err(error) => return Err(error),
    };
    Ok(FileReport { name: record.name.clone(), bytes: record.bytes, problems })
}

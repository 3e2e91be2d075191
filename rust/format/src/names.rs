//! Names: which tags are allowed, how a file's name becomes a name on disk, the step in a tag.
//!
//! Owns: that no name leaves its directory, and that two names never share a file.
//! Must not: look at a disk.
//! Invariant: `escape_file_name` is injective, and what it returns is one plain path component on every common system.

use std::fmt::Write;

use crate::history;

/// Bytes that a tag may have: leaves room for what relight appends in temporary names below the usual limit of 255.
pub const TAG_BYTES_MAX: usize = 200;
/// Bytes that an escaped file name may have; see [`TAG_BYTES_MAX`].
pub const FILE_BYTES_MAX: usize = 200;
/// The folder in a tag that holds relight's own files.
pub const RELIGHT_DIR: &str = ".relight";
/// The manifest's name in [`RELIGHT_DIR`].
pub const MANIFEST: &str = "manifest.json";
/// What is left in a tag after its manifest, as Nebula did.
pub const COMPLETE: &str = "complete.txt";
/// The hint below the root that names the newest tag.
pub const LATEST: &str = "latest";

/// Characters that some common system refuses in a name, separators and control characters aside.
const RESERVED_CHARACTERS: &[char] = &['<', '>', ':', '"', '|', '?', '*'];

/// A tag or a file name that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No characters at all.
    #[error("the {what} is empty; give it a name, as global_step500")]
    Empty {
        /// `tag` or `file name`.
        what: &'static str,
    },
    /// It could name another directory.
    #[error("tag {tag:?} holds {character:?}: a tag is one directory below the root; use - or _ instead")]
    Separator {
        /// The tag.
        tag: String,
        /// The separator.
        character: char,
    },
    /// It cannot be a directory's name everywhere.
    #[error("tag {tag:?} holds {character:?}, which file systems or tools refuse in a name; use - or _ instead")]
    Character {
        /// The tag.
        tag: String,
        /// The first such character.
        character: char,
    },
    /// It begins with a dot.
    #[error("tag {tag:?} begins with a dot: such names are hidden, or lead out of the root; begin it with a letter")]
    LeadingDot {
        /// The tag.
        tag: String,
    },
    /// It begins or ends so that some system would take it for another name.
    #[error("tag {tag:?} begins or ends with a space or ends with a dot, which some file systems drop; leave that out")]
    Edge {
        /// The tag.
        tag: String,
    },
    /// The name has a meaning already.
    #[error("tag {tag:?} is a reserved name ({owner}); choose another, as {tag}_1")]
    Reserved {
        /// The tag.
        tag: String,
        /// Who reserves it.
        owner: &'static str,
    },
    /// It is too long.
    #[error("the {what} has {bytes} bytes, at most {max} are allowed: {start:?}...; shorten it")]
    TooLong {
        /// `tag` or `file name`.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        max: usize,
        /// How it begins.
        start: String,
    },
}

/// Whether `tag` can name a checkpoint: one plain directory below the root, on every common system, so that a tree can
/// be copied anywhere. A tag is used as given or refused, never changed.
///
/// # Errors
/// [`NameError`] says what is wrong and what to use instead.
pub fn check_tag(tag: &str) -> Result<(), NameError> {
    let own = || tag.to_owned();
    if tag.is_empty() {
        return Err(NameError::Empty { what: "tag" });
    }
    if tag.len() > TAG_BYTES_MAX {
        return Err(too_long("tag", tag, TAG_BYTES_MAX));
    }
    if let Some(character) = tag.chars().find(|c| matches!(c, '/' | '\\')) {
        return Err(NameError::Separator { tag: own(), character });
    }
    if let Some(character) = tag.chars().find(|c| c.is_control() || RESERVED_CHARACTERS.contains(c)) {
        return Err(NameError::Character { tag: own(), character });
    }
    if tag.starts_with('.') {
        return Err(NameError::LeadingDot { tag: own() });
    }
    if tag.starts_with(char::is_whitespace) || tag.ends_with(char::is_whitespace) || tag.ends_with('.') {
        return Err(NameError::Edge { tag: own() });
    }
    if is_device(tag) {
        return Err(NameError::Reserved { tag: own(), owner: "a device on Windows" });
    }
    if [LATEST, history::FILE_NAME].iter().any(|name| tag.eq_ignore_ascii_case(name)) {
        return Err(NameError::Reserved { tag: own(), owner: "a file of relight in the root" });
    }
    Ok(())
}

/// Whether `name` can name a file of a tag. Every other oddity is escaped.
///
/// # Errors
/// [`NameError::Empty`], or [`NameError::TooLong`] beyond 4096 bytes.
pub fn check_file_name(name: &str) -> Result<(), NameError> {
    const BYTES_MAX: usize = 4096; // the manifest keeps the true name
    if name.is_empty() {
        return Err(NameError::Empty { what: "file name" });
    }
    if name.len() > BYTES_MAX {
        return Err(too_long("file name", name, BYTES_MAX));
    }
    Ok(())
}

fn too_long(what: &'static str, name: &str, max: usize) -> NameError {
    NameError::TooLong { what, bytes: name.len(), max, start: name.chars().take(40).collect() }
}

/// The name on disk of the file `name`: an ordinary name stays as it is.
///
/// `%XX` (two upper-case digits for each UTF-8 byte) stands for control characters, `/`, `\`, `%`, characters that some
/// system reserves, a dot or space at an edge, and the first letter of a reserved name (`complete.txt`, `CON`). A name
/// that is then longer than [`FILE_BYTES_MAX`] is cut to `<start>%~<32 digits>.<extension>`, the digits being the
/// FNV-1a hash (128 bits) of the whole true name.
pub fn escape_file_name(name: &str) -> String {
    if name.is_empty() {
        return "%".to_owned(); // never from another name: elsewhere two digits or ~ follow
    }
    let last = name.len() - name.chars().next_back().map_or(0, char::len_utf8);
    let reserved_word = is_device(name) || name.eq_ignore_ascii_case(COMPLETE);
    let mut escaped = String::with_capacity(name.len());
    for (at, c) in name.char_indices() {
        let edge = (at == 0 && (matches!(c, '.') || c.is_whitespace() || reserved_word))
            || (at == last && (c == '.' || c.is_whitespace()));
        if edge || c.is_control() || matches!(c, '/' | '\\' | '%') || RESERVED_CHARACTERS.contains(&c) {
            push_escaped(&mut escaped, c);
        } else {
            escaped.push(c);
        }
    }
    if escaped.len() > FILE_BYTES_MAX { cut(name, &escaped) } else { escaped }
}

fn push_escaped(into: &mut String, c: char) {
    for byte in c.encode_utf8(&mut [0; 4]).bytes() {
        let _ = write!(into, "%{byte:02X}"); // writing to a String cannot fail
    }
}

/// `<start>%~<hash>.<extension>`: no escape has `%~`, so it never meets a name that was not cut.
fn cut(name: &str, escaped: &str) -> String {
    const EXTENSION_MAX: usize = 12;
    let extension = escaped
        .rsplit_once('.')
        .map(|(_, e)| e)
        .filter(|e| (1..=EXTENSION_MAX).contains(&e.len()) && e.bytes().all(|b| b.is_ascii_alphanumeric()))
        .map_or(String::new(), |e| format!(".{e}"));
    let tail = format!("%~{:032x}{extension}", fnv1a_128(name.as_bytes()));
    let mut end = FILE_BYTES_MAX - tail.len();
    while !escaped.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{tail}", &escaped[..end])
}

/// Fowler, Noll and Vo's hash 1a with 128 bits. A collision is refused by the manifest, never written over.
fn fnv1a_128(bytes: &[u8]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

/// Whether Windows takes the name, whatever its extension, for a device.
fn is_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or(name).trim_end().to_ascii_uppercase();
    match stem.as_str() {
        "CON" | "PRN" | "AUX" | "NUL" => true,
        _ => (stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT")))
            .is_some_and(|n| matches!(n, "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9" | "¹" | "²" | "³")),
    }
}

/// What two names must differ in, to be two files on a system that ignores case.
pub fn fold_case(path: &str) -> String {
    path.to_lowercase()
}

/// Whether `path` is one plain component: not empty, no separator, not `.` or `..`, not relight's own.
pub(crate) fn is_plain_component(path: &str) -> bool {
    !path.is_empty()
        && !path.starts_with('.')
        && path.len() <= 255
        && !path.chars().any(|c| matches!(c, '/' | '\\') || c.is_control())
        && !path.eq_ignore_ascii_case(COMPLETE)
}

/// The step in a tag: N in `global_step<N>`, else its last integer; `None` without one or beyond 63 bits.
pub fn step_of_tag(tag: &str) -> Option<i64> {
    const KNOWN: &str = "global_step";
    let known = tag.rfind(KNOWN).map(|at| &tag[at + KNOWN.len()..]).filter(|rest| rest.starts_with(is_digit));
    let digits = match known {
        Some(rest) => &rest[..rest.find(|c| !is_digit(c)).unwrap_or(rest.len())],
        None => {
            let end = tag.rfind(is_digit)? + 1;
            let start = tag[..end]
                .rfind(|c| !is_digit(c))
                .map_or(0, |at| at + tag[at..].chars().next().map_or(1, char::len_utf8));
            &tag[start..end]
        }
    };
    digits.parse().ok()
}

fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
}

#[cfg(test)]
mod tests;

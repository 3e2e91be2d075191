//! The text of manifests and parts: indented JSON whose last member is a CRC-32 of all that stands before it.
//!
//! Owns: that end of the text, and checksums as hexadecimal strings.
//! Must not: know the fields.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ManifestError, SCHEMA_VERSION};
use crate::crc;

/// What follows the covered text: this, eight digits, and [`TAIL_END`].
const TAIL_START: &[u8] = b",\n  \"crc32\": \"";
const TAIL_END: &[u8] = b"\"\n}\n";
const TAIL_BYTES: usize = TAIL_START.len() + 8 + TAIL_END.len();

pub(super) fn write<T: Serialize>(value: &T) -> Result<Vec<u8>, ManifestError> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    debug_assert!(bytes.ends_with(b"\n}"));
    bytes.truncate(bytes.len() - b"\n}".len());
    let crc = crc::crc32(&bytes);
    bytes.extend_from_slice(TAIL_START);
    bytes.extend_from_slice(format!("{crc:08x}").as_bytes());
    bytes.extend_from_slice(TAIL_END);
    Ok(bytes)
}

pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ManifestError> {
    let Some((covered, stored)) = split(bytes) else {
        // A later schema may end otherwise. Only such a text may claim so: in one with our end the checksum decides.
        return Err(newer(bytes).unwrap_or(ManifestError::Cut { bytes: bytes.len() }));
    };
    let computed = crc::crc32(covered);
    if computed != stored {
        return Err(ManifestError::Checksum { stored, computed });
    }
    if let Some(error) = newer(bytes) {
        return Err(error);
    }
    Ok(serde_json::from_slice(bytes)?)
}

/// The covered text and the checksum after it.
fn split(bytes: &[u8]) -> Option<(&[u8], u32)> {
    let (covered, tail) = bytes.split_at_checked(bytes.len().checked_sub(TAIL_BYTES)?)?;
    let digits = tail.strip_prefix(TAIL_START)?.strip_suffix(TAIL_END)?;
    Some((covered, parse_hex(std::str::from_utf8(digits).ok()?)?))
}

/// The error for a text that is JSON and says a newer schema.
fn newer(bytes: &[u8]) -> Option<ManifestError> {
    #[derive(serde::Deserialize)]
    struct Head {
        schema_version: u64,
        #[serde(default)]
        created_by: String,
    }
    let head: Head = serde_json::from_slice(bytes).ok()?;
    (head.schema_version > u64::from(SCHEMA_VERSION)).then(|| ManifestError::Newer {
        found: head.schema_version,
        supported: SCHEMA_VERSION,
        created_by: if head.created_by.is_empty() { "a newer relight".to_owned() } else { head.created_by },
    })
}

/// Exactly eight lower-case digits: one checksum has one text, so a flip in the case of a digit is a flip too.
fn parse_hex(digits: &str) -> Option<u32> {
    let valid = digits.len() == 8 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if valid { u32::from_str_radix(digits, 16).ok() } else { None }
}

pub(super) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(crc: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{crc:08x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        let digits = String::deserialize(deserializer)?;
        super::parse_hex(&digits).ok_or_else(|| D::Error::custom("a checksum is eight hexadecimal digits"))
    }
}

/// Serde form of a list of CRC-32s: one string, eight digits each.
pub mod hex_list {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Write;

    /// Writes the string.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(crcs: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        let mut digits = String::with_capacity(crcs.len() * 8);
        for crc in crcs {
            let _ = write!(digits, "{crc:08x}"); // writing to a String cannot fail
        }
        serializer.serialize_str(&digits)
    }

    /// Reads the string.
    ///
    /// # Errors
    /// If it is not a multiple of eight lower-case hexadecimal digits.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let refused = || D::Error::custom("chunk checksums are eight hexadecimal digits each");
        if !digits.is_ascii() {
            return Err(refused());
        }
        digits
            .as_bytes()
            .chunks(8)
            .map(|eight| std::str::from_utf8(eight).ok().and_then(super::parse_hex).ok_or_else(refused))
            .collect()
    }
}

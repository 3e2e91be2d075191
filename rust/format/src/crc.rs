//! CRC-32 (IEEE 802.3, the one of zip): over bytes, as a stream, and combined from the CRCs of pieces.
//!
//! Owns: the arithmetic that makes one checksum serve entry, chunk and file.
//! Must not: be the hot copy kernel (`relight-io` has that; both are tested against each other in the engine).

/// The polynomial of CRC-32, bits reversed.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The CRC-32 of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// The CRC-32 of `a` followed by `b`, from both CRCs and the length of `b`.
pub fn combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    Append::of_len(len_b).combine(crc_a, crc_b)
}

/// [`combine`] prepared for many second parts of one length: a file's chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// x to the power of 8 times the length, modulo the polynomial.
    power: u32,
    len: u64,
}

impl Append {
    /// Prepares for second parts of `len` bytes.
    pub fn of_len(len: u64) -> Self {
        // x^8, squared for each bit of the length: about 100 products whatever the length.
        let mut square = 0x0080_0000;
        let mut power = 0x8000_0000; // x^0
        let mut rest = len;
        while rest > 0 {
            if rest & 1 == 1 {
                power = product(square, power);
            }
            square = product(square, square);
            rest >>= 1;
        }
        Self { power, len }
    }

    /// The length that this was prepared for.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the second parts have no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The CRC-32 of a part with `crc_a` followed by a part of the prepared length with `crc_b`.
    pub fn combine(&self, crc_a: u32, crc_b: u32) -> u32 {
        product(self.power, crc_a) ^ crc_b
    }
}

/// The product of two polynomials over GF(2) modulo the CRC's, bits reversed (bit 31 is x^0).
fn product(a: u32, b: u32) -> u32 {
    let (mut sum, mut b) = (0, b);
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            sum ^= b;
        }
        b = if b & 1 == 1 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
    }
    sum
}

/// The CRC-32 of a file from the CRCs of its chunks: all of `chunk_bytes`, the last one of what is left of `len`.
/// `None` if there are not as many chunks as that makes.
pub fn of_chunks(len: u64, chunk_bytes: u64, chunks: &[u32]) -> Option<u32> {
    if chunk_bytes == 0 || len.div_ceil(chunk_bytes) != chunks.len() as u64 {
        return None;
    }
    let Some((last, full)) = chunks.split_last() else {
        return Some(0);
    };
    let append = Append::of_len(chunk_bytes);
    let before = full.iter().fold(0, |crc, chunk| append.combine(crc, *chunk));
    Some(combine(before, *last, len - full.len() as u64 * chunk_bytes))
}

/// A CRC-32 that grows with the bytes.
#[derive(Clone, Debug, Default)]
pub struct Crc {
    hasher: crc32fast::Hasher,
    len: u64,
}

impl Crc {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes in.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
    }

    /// Bytes taken in so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no byte was taken in.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The CRC-32 of all bytes so far.
    pub fn value(&self) -> u32 {
        self.hasher.clone().finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn lengths_beyond_32_bits_combine_as_crc32fast_does() {
        for len in [1, 4096, u64::from(u32::MAX), 5 << 30, 1 << 40, 0x0123_4567_89ab] {
            let mut first = crc32fast::Hasher::new_with_initial_len(0x1234_5678, 7);
            first.combine(&crc32fast::Hasher::new_with_initial_len(0x9abc_def0, len));
            assert_eq!(combine(0x1234_5678, 0x9abc_def0, len), first.finalize(), "len {len}");
        }
    }

    proptest! {
        #[test]
        fn pieces_combine_to_the_whole(bytes in proptest::collection::vec(any::<u8>(), 0..2000), at in 0usize..2000, chunk in 1usize..300) {
            let at = at.min(bytes.len());
            let (a, b) = bytes.split_at(at);
            prop_assert_eq!(combine(crc32(a), crc32(b), b.len() as u64), crc32(&bytes));
            let mut stream = Crc::new();
            stream.update(a);
            stream.update(b);
            prop_assert_eq!(stream.value(), crc32(&bytes));
            let chunks: Vec<u32> = bytes.chunks(chunk).map(crc32).collect();
            prop_assert_eq!(of_chunks(bytes.len() as u64, chunk as u64, &chunks), Some(crc32(&bytes)));
        }
    }

    #[test]
    fn a_wrong_number_of_chunks_has_no_checksum() {
        assert_eq!(of_chunks(10, 4, &[1, 2]), None);
        assert_eq!(of_chunks(0, 4, &[1]), None);
        assert_eq!(of_chunks(10, 0, &[]), None);
        assert_eq!(of_chunks(0, 4, &[]), Some(0));
    }
}

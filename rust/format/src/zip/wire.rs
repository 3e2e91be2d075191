//! Numbers of the zip format, and little-endian access that cannot leave the bytes.
//!
//! Owns: signatures and field sizes, as the zip specification (APPNOTE) has them.
//! Must not: know what an archive of torch looks like.

pub(super) const LOCAL_SIGNATURE: u32 = 0x0403_4b50;
pub(super) const DESCRIPTOR_SIGNATURE: u32 = 0x0807_4b50;
pub(super) const CENTRAL_SIGNATURE: u32 = 0x0201_4b50;
pub(super) const END64_SIGNATURE: u32 = 0x0606_4b50;
pub(super) const LOCATOR_SIGNATURE: u32 = 0x0706_4b50;
pub(super) const END_SIGNATURE: u32 = 0x0605_4b50;

pub(super) const LOCAL_BYTES: usize = 30;
pub(super) const CENTRAL_BYTES: usize = 46;
pub(super) const END64_BYTES: usize = 56;
pub(super) const LOCATOR_BYTES: usize = 20;
pub(super) const END_BYTES: usize = 22;

/// Bit 0: encrypted. Bit 3: checksum and sizes follow the data. Bit 11: names are UTF-8.
pub(super) const FLAG_ENCRYPTED: u16 = 1;
pub(super) const FLAG_DESCRIPTOR: u16 = 1 << 3;
pub(super) const FLAG_UTF8: u16 = 1 << 11;
pub(super) const METHOD_STORED: u16 = 0;

/// The extra field with 64-bit sizes.
pub(super) const EXTRA_ZIP64: u16 = 1;
/// The extra field that torch pads with: "FB".
pub(super) const EXTRA_PADDING: u16 = 0x4246;

/// What a 32-bit field holds when the 64-bit one counts, and the same for 16 bits.
pub(super) const SEE_64: u32 = u32::MAX;
pub(super) const SEE_64_SHORT: u16 = u16::MAX;

/// Bytes being written, least significant first.
#[derive(Default)]
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Bytes being read from the front; `None` at their end.
#[derive(Clone, Copy)]
pub(super) struct In<'a>(pub(super) &'a [u8]);

impl<'a> In<'a> {
    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
}

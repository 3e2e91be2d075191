//! The bytes of a region file.
//!
//! Owns: the layout of header, owner record and slot records, and the checks that make each of them believable.
//! Must not: touch memory or files; pure functions over bytes.
//! Invariant: a record that `decode` returns has a matching CRC and lies inside the region; nothing else is trusted.
//!
//! ```text
//!   0        header: magic version page | capacity slots slot_bytes | data_offset uid | boot id | crc     never changes
//!   2048     owner:  pid start_time crc                                                                    one per life
//!   4096     slot table: 1024 x 64 bytes: state word | extent | image length | meta length, crc | order | crc
//!   2 MiB    data area: extents of [image | pad to 4096 | meta]
//! ```

use super::protocol::State;

pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const HUGE_BYTES: u64 = 2 << 20;
pub(crate) const SLOTS: usize = 1024;
pub(crate) const SLOT_BYTES: u64 = 64;
pub(crate) const HEADER_BYTES: usize = 128;
pub(crate) const OWNER_OFFSET: u64 = 2048;
pub(crate) const OWNER_BYTES: usize = 24;
pub(crate) const TABLE_OFFSET: u64 = PAGE_BYTES;
pub(crate) const TABLE_BYTES: usize = SLOTS * SLOT_BYTES as usize;
/// The data area starts on a huge page.
pub(crate) const DATA_OFFSET: u64 = HUGE_BYTES;
/// The record behind the state word.
pub(crate) const RECORD_BYTES: usize = 56;

const MAGIC: &[u8; 8] = b"RELIGHT1";
const VERSION: u32 = 1;

/// What never changes in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) capacity: u64,
    pub(crate) uid: u32,
    /// As text, cut or filled to 36 bytes.
    pub(crate) boot_id: [u8; 36],
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(PAGE_BYTES as u32).to_le_bytes());
        bytes.extend_from_slice(&self.capacity.to_le_bytes());
        bytes.extend_from_slice(&(SLOTS as u32).to_le_bytes());
        bytes.extend_from_slice(&(SLOT_BYTES as u32).to_le_bytes());
        bytes.extend_from_slice(&DATA_OFFSET.to_le_bytes());
        bytes.extend_from_slice(&self.uid.to_le_bytes());
        bytes.extend_from_slice(&self.boot_id);
        seal(bytes)
    }

    /// The header in `bytes`, or why it is not one.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let mut fields = Fields(bytes);
        if &fields.take::<8>() != MAGIC {
            return Err("it is no region of relight");
        }
        if fields.u32() != VERSION {
            return Err("it has the layout of another version of relight");
        }
        if !is_sealed(bytes) {
            return Err("its header is damaged");
        }
        let page = fields.u32();
        let capacity = fields.u64();
        let table = (fields.u32(), fields.u32());
        let data = fields.u64();
        if (u64::from(page), table, data) != (PAGE_BYTES, (SLOTS as u32, SLOT_BYTES as u32), DATA_OFFSET) {
            return Err("its layout is not one that relight writes");
        }
        if !capacity.is_multiple_of(PAGE_BYTES) || capacity > 1 << 60 {
            return Err("its capacity is not one that relight writes");
        }
        Ok(Self { capacity, uid: fields.u32(), boot_id: fields.take() })
    }

    /// Bytes of the whole region file.
    pub(crate) fn file_len(&self) -> u64 {
        DATA_OFFSET + self.capacity
    }
}

/// The process that a region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
}

impl Owner {
    pub(crate) fn encode(self) -> [u8; OWNER_BYTES] {
        let mut bytes = Vec::with_capacity(OWNER_BYTES);
        bytes.extend_from_slice(&u64::from(self.pid).to_le_bytes());
        bytes.extend_from_slice(&self.start_time.to_le_bytes());
        seal(bytes)
    }

    /// `None`: given up, or cut off while it was written. Then the lock alone says whether somebody lives.
    pub(crate) fn decode(bytes: &[u8; OWNER_BYTES]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let pid = u32::try_from(fields.u64()).ok().filter(|pid| *pid != 0 && is_sealed(bytes))?;
        Some(Self { pid, start_time: fields.u64() })
    }
}

/// Where a slot's contents lie; offsets count from the start of the data area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) extent_offset: u64,
    pub(crate) extent_len: u64,
    pub(crate) image_len: u64,
    pub(crate) meta_len: u32,
    pub(crate) meta_crc: u32,
    /// Counts the images published in this region.
    pub(crate) order: u64,
}

impl Record {
    /// The bytes behind the state word. The CRC covers the generation, so that a record never passes for a later one.
    pub(crate) fn encode(&self, generation: u64) -> [u8; RECORD_BYTES] {
        let mut bytes = Vec::with_capacity(RECORD_BYTES);
        bytes.extend_from_slice(&self.extent_offset.to_le_bytes());
        bytes.extend_from_slice(&self.extent_len.to_le_bytes());
        bytes.extend_from_slice(&self.image_len.to_le_bytes());
        bytes.extend_from_slice(&self.meta_len.to_le_bytes());
        bytes.extend_from_slice(&self.meta_crc.to_le_bytes());
        bytes.extend_from_slice(&self.order.to_le_bytes());
        bytes.extend_from_slice(&(generation as u32).to_le_bytes());
        seal(bytes)
    }

    /// The record of a slot in `state`, if its CRC holds and it lies inside `capacity`.
    pub(crate) fn decode(bytes: &[u8; RECORD_BYTES], state: State, capacity: u64) -> Option<Self> {
        let mut fields = Fields(bytes);
        let record = Self {
            extent_offset: fields.u64(),
            extent_len: fields.u64(),
            image_len: fields.u64(),
            meta_len: fields.u32(),
            meta_crc: fields.u32(),
            order: fields.u64(),
        };
        (is_sealed(bytes) && fields.u32() == state.generation as u32 && record.fits(capacity)).then_some(record)
    }

    /// Where the meta bytes start in the extent.
    pub(crate) fn meta_offset(&self) -> u64 {
        self.image_len.next_multiple_of(PAGE_BYTES)
    }

    fn fits(&self, capacity: u64) -> bool {
        let end = self.extent_offset.checked_add(self.extent_len);
        let inner = self
            .image_len
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|offset| offset.checked_add(u64::from(self.meta_len)));
        self.extent_offset.is_multiple_of(PAGE_BYTES)
            && self.extent_len.is_multiple_of(PAGE_BYTES)
            && end.is_some_and(|end| end <= capacity)
            && inner.is_some_and(|inner| inner <= self.extent_len)
    }
}

/// Fills up with zeroes and ends with the CRC of all before.
fn seal<const N: usize>(mut bytes: Vec<u8>) -> [u8; N] {
    bytes.resize(N - 4, 0);
    let crc = crc32fast::hash(&bytes);
    let mut sealed = [0; N];
    sealed[..N - 4].copy_from_slice(&bytes);
    sealed[N - 4..].copy_from_slice(&crc.to_le_bytes());
    sealed
}

fn is_sealed<const N: usize>(bytes: &[u8; N]) -> bool {
    crc32fast::hash(&bytes[..N - 4]).to_le_bytes() == bytes[N - 4..]
}

/// Reads little-endian fields one after another. The records above are longer than their fields, so it never runs out.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (bytes, rest) = self.0.split_at(N);
        field.copy_from_slice(bytes);
        self.0 = rest;
        field
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Phase;
    use super::*;

    const WHOLE: State = State { phase: Phase::Whole, generation: 9 };

    fn record() -> Record {
        Record { extent_offset: 8192, extent_len: 12_288, image_len: 5000, meta_len: 77, meta_crc: 1, order: 3 }
    }

    #[test]
    fn records_come_back_as_they_were_written() {
        let header = Header { capacity: 1 << 20, uid: 1000, boot_id: [b'x'; 36] };
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        let owner = Owner { pid: 4711, start_time: 99 };
        assert_eq!(Owner::decode(&owner.encode()), Some(owner));
        assert_eq!(Record::decode(&record().encode(9), WHOLE, 1 << 20), Some(record()));
    }

    /// Guards: a length with a flipped bit was believed, and a read went beyond the mapping.
    #[test]
    fn every_flipped_bit_is_noticed() {
        let header = Header { capacity: 1 << 20, uid: 1000, boot_id: [b'x'; 36] }.encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit} of the header");
        }
        let encoded = record().encode(9);
        for bit in 0..RECORD_BYTES * 8 {
            let mut bytes = encoded;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bytes, WHOLE, 1 << 20), None, "bit {bit} of the record");
        }
        let owner = Owner { pid: 4711, start_time: 99 }.encode();
        for bit in 0..OWNER_BYTES * 8 {
            let mut bytes = owner;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Owner::decode(&bytes), None, "bit {bit} of the owner");
        }
    }

    #[test]
    fn a_record_of_another_generation_or_beyond_the_capacity_is_refused() {
        assert_eq!(Record::decode(&record().encode(8), WHOLE, 1 << 20), None);
        assert_eq!(Record::decode(&record().encode(9), WHOLE, 16_384), None);
        let lying = Record { image_len: u64::MAX - 5, ..record() };
        assert_eq!(Record::decode(&lying.encode(9), WHOLE, 1 << 20), None);
        let lying = Record { extent_offset: u64::MAX - 4095, ..record() };
        assert_eq!(Record::decode(&lying.encode(9), WHOLE, 1 << 20), None);
    }
}

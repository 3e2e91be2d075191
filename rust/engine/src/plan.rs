//! Plan: where each byte of an image comes from, known before a byte is copied.
//!
//! Owns: the order of the segments of an image (headers, data, descriptors, trailer) and that they cover it exactly.
//! Must not: read a source; know what the bytes mean.
//! Invariant: segments are sorted, touch each other and end at the length of the image: no byte is left undefined.

use std::borrow::Cow;

use relight_format::zip::{self, ArchiveLayout, EntrySpec};
use relight_io::foreign::ForeignBytes;

use crate::error::{Error, ErrorKind, Result};

/// Some bytes of an entry.
#[derive(Debug)]
pub enum Piece<'a> {
    /// Bytes that the plan holds: a pickle, a version number.
    Inline(Cow<'a, [u8]>),
    /// Memory of the caller, read while the image is staged.
    Foreign(ForeignBytes<'a>),
}

impl Piece<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Foreign(bytes) => bytes.len() as u64,
        }
    }
}

/// One entry of the archive: its name without the stem, and its bytes in order.
#[derive(Debug)]
pub struct PlanEntry<'a> {
    /// Name in the archive, without the stem.
    pub name: String,
    /// The bytes, in order.
    pub pieces: Vec<Piece<'a>>,
}

/// Where a segment's bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The local header of an entry, with the padding that aligns its data.
    Header(usize),
    /// A piece of an entry.
    Data { entry: usize, piece: usize },
    /// The data descriptor of an entry: known when the entry's bytes have passed.
    Descriptor(usize),
    /// Central directory and what follows: known when all entries have passed.
    Trailer,
    /// A hole of the layout.
    Zero,
}

/// A range of the image with one source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) source: Source,
}

impl Segment {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// One image, laid out: every offset follows from the lengths.
#[derive(Debug)]
pub struct ImagePlan<'a> {
    layout: ArchiveLayout,
    entries: Vec<PlanEntry<'a>>,
    segments: Vec<Segment>,
}

impl<'a> ImagePlan<'a> {
    /// Lays out an archive `stem` with these entries, in this order.
    pub fn new(stem: &str, entries: Vec<PlanEntry<'a>>) -> Result<Self> {
        let specs: Vec<EntrySpec> = entries
            .iter()
            .map(|entry| {
                let len = entry.pieces.iter().map(Piece::len).sum();
                EntrySpec { name: entry.name.clone(), len, align: zip::align_for(len) }
            })
            .collect();
        let layout = ArchiveLayout::new(stem, &specs).map_err(|cause| {
            Error::new(ErrorKind::InvalidArgument, format!("the object cannot be laid out as an archive: {cause}"))
                .because(cause)
        })?;
        let segments = segments(&layout, &entries)?;
        Ok(Self { layout, entries, segments })
    }

    /// Length of the image.
    pub fn total_len(&self) -> u64 {
        self.layout.total_len()
    }

    pub(crate) fn layout(&self) -> &ArchiveLayout {
        &self.layout
    }

    pub(crate) fn entries(&self) -> &[PlanEntry<'a>] {
        &self.entries
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    pub(crate) fn piece(&self, entry: usize, piece: usize) -> &Piece<'a> {
        &self.entries[entry].pieces[piece]
    }
}

/// The segments of `layout`, in order of offset, without a hole or an overlap.
fn segments(layout: &ArchiveLayout, entries: &[PlanEntry<'_>]) -> Result<Vec<Segment>> {
    let mut list = SegmentList { segments: Vec::with_capacity(entries.len() * 3 + 1), end: 0 };
    for (index, entry) in entries.iter().enumerate() {
        let placed = layout.entry(index);
        list.push(placed.header_offset, placed.data_offset - placed.header_offset, Source::Header(index))?;
        let mut offset = placed.data_offset;
        for (number, piece) in entry.pieces.iter().enumerate() {
            list.push(offset, piece.len(), Source::Data { entry: index, piece: number })?;
            offset += piece.len();
        }
        list.push(placed.descriptor_offset, zip::DESCRIPTOR_BYTES, Source::Descriptor(index))?;
    }
    let trailer = layout.trailer_offset();
    list.push(trailer, layout.total_len() - trailer, Source::Trailer)?;
    Ok(list.segments)
}

struct SegmentList {
    segments: Vec<Segment>,
    end: u64,
}

impl SegmentList {
    fn push(&mut self, offset: u64, len: u64, source: Source) -> Result<()> {
        let Some(hole) = offset.checked_sub(self.end) else {
            // Two sources for one byte would make the image depend on which thread is faster.
            return Err(Error::new(ErrorKind::InvalidArgument, format!("the layout overlaps at offset {offset}")));
        };
        if hole > 0 {
            self.segments.push(Segment { offset: self.end, len: hole, source: Source::Zero });
        }
        if len > 0 {
            self.segments.push(Segment { offset, len, source });
        }
        self.end = offset + len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, pieces: Vec<Piece<'static>>) -> PlanEntry<'static> {
        PlanEntry { name: name.to_owned(), pieces }
    }

    #[test]
    fn segments_cover_the_image_exactly() {
        let plan = ImagePlan::new(
            "model",
            vec![
                entry("data.pkl", vec![Piece::Inline(Cow::Borrowed(b"abc"))]),
                entry("empty", vec![]),
                entry("data/0", vec![Piece::Inline(vec![1; 70_000].into()), Piece::Inline(vec![2; 5].into())]),
            ],
        )
        .unwrap();
        let mut end = 0;
        for segment in plan.segments() {
            assert_eq!(segment.offset, end);
            assert!(segment.len > 0);
            end = segment.end();
        }
        assert_eq!(end, plan.total_len());
    }
}

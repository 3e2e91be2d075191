//! Stage: builds the bytes of an image from its plan, copying and checking each source byte in one pass.
//!
//! Owns: the copy threads of one call, and the checksums of entries, chunks and the whole image.
//! Must not: know where the image goes (memory tier, a window of a stream); allocate anything of the image's size.
//! Invariant: after `fill` every byte of the window is written; re-used memory never shows through.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use relight_format::crc;
use relight_io::copy::CopyKernel;

use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{ImagePlan, Piece, Segment, Source};
use crate::wait::{Interrupt, Pulse, lock};

/// The most that one thread copies before it looks for more work or for an interrupt.
const ITEM_BYTES: u64 = 1 << 20;

/// An item with more parts than this gets its checksum from a second pass over its bytes (they are in the cache)
/// instead of combining the parts': a combination costs about as much as the checksum of 4 KiB.
const COMBINED_PARTS_MAX: usize = 64;

/// How the bytes are copied.
#[derive(Clone, Copy)]
pub(crate) struct Copier<'c> {
    pub(crate) kernel: &'c dyn CopyKernel,
    pub(crate) threads: usize,
    pub(crate) chunk_bytes: u64,
    pub(crate) clock: &'c dyn Clock,
    pub(crate) interrupt: Interrupt<'c>,
}

/// The checksums of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageSums {
    pub(crate) crc32: u32,
    pub(crate) chunk_bytes: u64,
    pub(crate) chunks: Vec<u32>,
}

/// Fills an image from its start to its end, window after window.
pub(crate) struct Stager<'p, 'a> {
    plan: &'p ImagePlan<'a>,
    copier: Copier<'p>,
    position: u64,
    /// The first segment that does not end before `position`.
    segment: usize,
    entries: Vec<Running>,
    trailer: Option<Vec<u8>>,
    chunk: Running,
    chunks: Vec<u32>,
    whole: Running,
}

impl<'p, 'a> Stager<'p, 'a> {
    pub(crate) fn new(plan: &'p ImagePlan<'a>, copier: Copier<'p>) -> Self {
        Self {
            plan,
            copier,
            position: 0,
            segment: 0,
            entries: vec![Running::default(); plan.entries().len()],
            trailer: None,
            chunk: Running::default(),
            chunks: Vec::new(),
            whole: Running::default(),
        }
    }

    /// Bytes of the image that are still to come.
    pub(crate) fn left(&self) -> u64 {
        self.plan.total_len() - self.position
    }

    /// Fills all of `window` with the next bytes of the image.
    ///
    /// After an error (an interrupt) the window's content is undefined and the stager is used up.
    pub(crate) fn fill(&mut self, window: &mut [u8]) -> Result<()> {
        let mut items = self.items(window);
        let copier = self.copier;
        let plan = self.plan;
        let mut pulse = Pulse::new(copier.clock, copier.interrupt);
        in_parallel(
            copier.threads,
            items.iter_mut().collect(),
            &|item: &mut Item<'_>| item.copy(plan, copier.kernel),
            || pulse.poll(),
        )?;
        for item in items {
            self.account(item);
        }
        Ok(())
    }

    /// The checksums, once all bytes have passed.
    pub(crate) fn finish(mut self) -> ImageSums {
        debug_assert_eq!(self.left(), 0);
        self.end_chunk();
        ImageSums { crc32: self.whole.crc, chunk_bytes: self.copier.chunk_bytes, chunks: self.chunks }
    }

    /// Cuts the window into items that end at chunk borders, so that no part belongs to two checksums.
    fn items<'w>(&mut self, window: &'w mut [u8]) -> Vec<Item<'w>> {
        let segments = self.plan.segments();
        let chunk_bytes = self.copier.chunk_bytes;
        let mut items = Vec::with_capacity(window.len() / ITEM_BYTES as usize + 2);
        let mut rest = window;
        while !rest.is_empty() {
            let chunk_left = chunk_bytes - self.position % chunk_bytes;
            let len = (rest.len() as u64).min(ITEM_BYTES).min(chunk_left);
            let (bytes, behind) = rest.split_at_mut(len as usize);
            rest = behind;
            let end = self.position + len;
            let first = self.segment;
            while self.segment < segments.len() && segments[self.segment].end() <= end {
                self.segment += 1;
            }
            // The segment that crosses the border belongs to this item and to the next.
            let last = if segments.get(self.segment).is_some_and(|segment| segment.offset < end) {
                self.segment + 1
            } else {
                self.segment
            };
            items.push(Item { offset: self.position, bytes, first, crcs: vec![0; last - first] });
            self.position = end;
        }
        items
    }

    /// Adds an item to the checksums, in order, and writes what depends on them: descriptors and trailer.
    fn account(&mut self, item: Item<'_>) {
        let Item { offset, bytes, first, crcs } = item;
        let combine = crcs.len() <= COMBINED_PARTS_MAX;
        let mut sum = Running::default();
        let mut start = 0;
        for (index, mut part_crc) in crcs.into_iter().enumerate() {
            let segment = self.plan.segments()[first + index];
            let (from, len) = part(&segment, offset, bytes.len());
            let target = &mut bytes[start..start + len];
            start += len;
            match segment.source {
                Source::Data { entry, .. } => self.entries[entry].add(part_crc, len as u64),
                Source::Descriptor(entry) => {
                    let descriptor = self.plan.layout().descriptor_bytes(entry, self.entries[entry].crc);
                    target.copy_from_slice(&descriptor[from..from + len]);
                    part_crc = crc::crc32(target);
                }
                Source::Trailer => {
                    let entries = &self.entries;
                    let trailer = self.trailer.get_or_insert_with(|| {
                        let crcs: Vec<u32> = entries.iter().map(|entry| entry.crc).collect();
                        self.plan.layout().trailer_bytes(&crcs)
                    });
                    target.copy_from_slice(&trailer[from..from + len]);
                    part_crc = crc::crc32(target);
                }
                Source::Header(_) | Source::Zero => {}
            }
            if combine {
                sum.add(part_crc, len as u64);
            }
        }
        if !combine {
            sum.add(self.copier.kernel.crc(bytes), bytes.len() as u64);
        }
        self.chunk.add(sum.crc, sum.len);
        if self.chunk.len == self.copier.chunk_bytes {
            self.end_chunk();
        }
    }

    fn end_chunk(&mut self) {
        if self.chunk.len > 0 {
            self.chunks.push(self.chunk.crc);
            self.whole.add(self.chunk.crc, self.chunk.len);
            self.chunk = Running::default();
        }
    }

    /// Reads the caller's memory again: an entry whose checksum differs changed while it was copied, or after.
    /// Finds what `check_same` finds, without the image: for streams.
    pub(crate) fn check_sources(&self) -> Result<()> {
        let changed = Mutex::new(None);
        let work: Vec<usize> = (0..self.plan.entries().len()).collect();
        let (plan, kernel, entries) = (self.plan, self.copier.kernel, &self.entries);
        let mut pulse = Pulse::new(self.copier.clock, self.copier.interrupt);
        in_parallel(
            self.copier.threads,
            work,
            &|entry: usize| {
                if source_crc(plan, kernel, entry) != entries[entry].crc {
                    lock(&changed).get_or_insert(entry);
                }
            },
            || pulse.poll(),
        )?;
        let first = *lock(&changed);
        torn(self.plan, first)
    }
}

/// The checksum of an entry's sources as they are now.
fn source_crc(plan: &ImagePlan<'_>, kernel: &dyn CopyKernel, entry: usize) -> u32 {
    let mut scratch = vec![0; 128 << 10];
    let mut sum = Running::default();
    for piece in &plan.entries()[entry].pieces {
        match piece {
            Piece::Inline(bytes) => sum.add(kernel.crc(bytes), bytes.len() as u64),
            Piece::Foreign(bytes) => {
                let mut start = 0;
                while start < bytes.len() {
                    let len = (bytes.len() - start).min(scratch.len());
                    let crc = kernel.copy_crc(&mut scratch[..len], bytes.slice(start..start + len));
                    sum.add(crc, len as u64);
                    start += len;
                }
            }
        }
    }
    sum.crc
}

/// Compares the caller's memory with the image that was made from it: a difference means that it changed meanwhile.
pub(crate) fn check_same(plan: &ImagePlan<'_>, copier: Copier<'_>, image: &[u8]) -> Result<()> {
    let changed = Mutex::new(None);
    let mut work = Vec::new();
    for segment in plan.segments() {
        let Source::Data { entry, piece } = segment.source else { continue };
        if let Piece::Foreign(bytes) = plan.piece(entry, piece) {
            let mut start = 0;
            while start < bytes.len() {
                let len = (bytes.len() - start).min(ITEM_BYTES as usize);
                work.push((entry, bytes.slice(start..start + len), segment.offset as usize + start));
                start += len;
            }
        }
    }
    let mut pulse = Pulse::new(copier.clock, copier.interrupt);
    in_parallel(
        copier.threads,
        work,
        &|(entry, source, offset)| {
            if !copier.kernel.equals(&image[offset..offset + source.len()], source) {
                lock(&changed).get_or_insert(entry);
            }
        },
        || pulse.poll(),
    )?;
    let first = *lock(&changed);
    torn(plan, first)
}

fn torn(plan: &ImagePlan<'_>, changed: Option<usize>) -> Result<()> {
    let Some(entry) = changed else { return Ok(()) };
    let name = &plan.entries()[entry].name;
    Err(Error::new(
        ErrorKind::Torn,
        format!(
            "the state changed while it was being copied: entry {name} is not what it was when it was read. Nothing was \
             saved; save again while no other thread writes to it"
        ),
    ))
}

/// A checksum that grows.
#[derive(Clone, Copy, Default)]
struct Running {
    crc: u32,
    len: u64,
}

impl Running {
    fn add(&mut self, crc: u32, len: u64) {
        self.crc = if self.len == 0 { crc } else { crc::combine(self.crc, crc, len) };
        self.len += len;
    }
}

/// A stretch of the window for one thread, with the checksum of each part of a segment in it.
struct Item<'w> {
    /// Of the image.
    offset: u64,
    bytes: &'w mut [u8],
    first: usize,
    crcs: Vec<u32>,
}

impl Item<'_> {
    fn copy(&mut self, plan: &ImagePlan<'_>, kernel: &dyn CopyKernel) {
        let sum_all = self.crcs.len() <= COMBINED_PARTS_MAX;
        let item_len = self.bytes.len();
        let mut start = 0;
        for (index, crc) in self.crcs.iter_mut().enumerate() {
            let segment = &plan.segments()[self.first + index];
            let (from, len) = part(segment, self.offset, item_len);
            let target = &mut self.bytes[start..start + len];
            start += len;
            match segment.source {
                Source::Data { entry, piece } => match plan.piece(entry, piece) {
                    Piece::Inline(bytes) => {
                        target.copy_from_slice(&bytes[from..from + len]);
                        *crc = kernel.crc(target);
                    }
                    Piece::Foreign(bytes) => *crc = kernel.copy_crc(target, bytes.slice(from..from + len)),
                },
                Source::Header(entry) => {
                    target.copy_from_slice(&plan.layout().header_bytes(entry)[from..from + len]);
                    if sum_all {
                        *crc = kernel.crc(target);
                    }
                }
                Source::Zero => {
                    target.fill(0);
                    if sum_all {
                        *crc = kernel.crc(target);
                    }
                }
                // Written by `account`, once the entry's bytes have passed.
                Source::Descriptor(_) | Source::Trailer => {}
            }
        }
    }
}

/// The part of `segment` that lies in the item: where it starts in the segment, and its length.
fn part(segment: &Segment, item_offset: u64, item_len: usize) -> (usize, usize) {
    let start = segment.offset.max(item_offset);
    let end = segment.end().min(item_offset + item_len as u64);
    ((start - segment.offset) as usize, (end - start) as usize)
}

/// Runs `run` over `work` on this thread and up to `threads - 1` others; `poll` (here only) can stop it.
pub(crate) fn in_parallel<T: Send>(
    threads: usize,
    work: Vec<T>,
    run: &(dyn Fn(T) + Sync),
    mut poll: impl FnMut() -> Result<()>,
) -> Result<()> {
    let helpers = threads.min(work.len()).saturating_sub(1);
    let queue = Mutex::new(work.into_iter());
    let stop = AtomicBool::new(false);
    let next = || {
        // Relaxed: the flag only saves work; the scope's join orders everything else.
        if stop.load(Ordering::Relaxed) { None } else { lock(&queue).next() }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            let helper = thread::Builder::new().name("relight-copy".to_owned());
            let spawned = helper.spawn_scoped(scope, || {
                while let Some(item) = next() {
                    run(item);
                }
            });
            if spawned.is_err() {
                // At the process limit: the caller's thread does all the work.
                break;
            }
        }
        while let Some(item) = next() {
            run(item);
            if let Err(interrupted) = poll() {
                stop.store(true, Ordering::Relaxed);
                return Err(interrupted);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests;

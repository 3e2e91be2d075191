//! Filling the caller's buffers from an image, in parallel, checked in the same pass.
//!
//! Owns: how a read is split into items, and what each byte is checked against.
//! Must not: allocate anything of the read's size.
//! Invariant: `read_into` returns Ok only if every byte it put out was covered by a checksum that agreed, or there is
//! none that covers it (an archive without checksums; part of a large entry without a manifest).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use relight_format::crc;
use relight_io::copy::{self, CopyKernel};
use relight_io::foreign::ForeignBytesMut;

use super::source::Buffer;
use super::{Image, PIECE_BYTES, ReadOptions};
use crate::error::{ErrorKind, Result};
use crate::wait::{Pulse, lock};

/// Bytes between two pieces that are read along rather than skipped: a second request costs about as much.
const SKIP_BYTES_MAX: u64 = 16 << 10;

/// One buffer to fill.
#[derive(Clone, Copy, Debug)]
pub struct FillTarget<'b> {
    /// The entry.
    pub entry: usize,
    /// Where in the entry the first byte is.
    pub offset: u64,
    /// The buffer; all of it is filled.
    pub buffer: ForeignBytesMut<'b>,
}

/// Bytes of the image that lie one behind the other and go into one buffer.
struct Piece<'b> {
    start: u64,
    buffer: ForeignBytesMut<'b>,
    /// Where its checksum goes.
    sum: Option<usize>,
}

impl Piece<'_> {
    fn end(&self) -> u64 {
        self.start + self.buffer.len() as u64
    }
}

/// What a thread does at a time.
enum Item<'b> {
    /// Copies pieces that lie close together, in order, with one request.
    Pieces(Vec<Piece<'b>>),
    /// Checks a range as a whole and copies the parts of it that are wanted.
    Unit { unit: Unit, pieces: Vec<Piece<'b>> },
}

/// A range of the image that has one checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    Chunk(usize),
    Entry(usize),
}

/// A whole entry that is being read, its pieces in order.
struct Whole {
    entry: usize,
    /// Positions in the list of sums, and bytes of each.
    sums: Vec<(usize, u64)>,
}

struct Work<'b> {
    items: Vec<Item<'b>>,
    wholes: Vec<Whole>,
    sum_count: usize,
    bytes: u64,
}

impl Image {
    /// Fills the buffers: in parallel, in the order of the file. An entry that the targets cover completely is checked
    /// against its checksum; of one that they cover in part, the chunks of the manifest that hold the part are read
    /// whole and checked, or without a manifest the entry, if it is small.
    ///
    /// # Errors
    /// Corrupt, naming file, entry or chunk; InvalidArgument for a target outside its entry; what the interrupt says.
    /// After an error the content of the buffers is undefined.
    pub fn read_into(&self, targets: &[FillTarget<'_>], options: &ReadOptions<'_>) -> Result<()> {
        let work = self.plan(targets)?;
        let state = State {
            image: self,
            kernel: copy::best(),
            work: &work,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sums: (0..work.sum_count).map(|_| Mutex::new(0)).collect(),
            failure: Mutex::new(None),
        };
        let helpers = options.threads.clamp(1, 64).min(work.bytes.div_ceil(PIECE_BYTES) as usize).saturating_sub(1);
        let mut pulse = Pulse::new(options.clock, options.interrupt);
        thread::scope(|scope| {
            for _ in 0..helpers {
                let spawned = thread::Builder::new()
                    .name("relight-read".to_owned())
                    .spawn_scoped(scope, || state.run(&mut || Ok(())));
                if spawned.is_err() {
                    break; // the process may have no more threads: then fewer do it
                }
            }
            state.run(&mut || pulse.poll());
        });
        if let Some(error) = lock(&state.failure).take() {
            return Err(self.tagged(error));
        }
        for whole in &work.wholes {
            let sum = whole.sums.iter().fold(0, |sum, (at, len)| crc::combine(sum, *lock(&state.sums[*at]), *len));
            self.check_entry(&self.archive.entries[whole.entry], sum)?;
        }
        Ok(())
    }

    fn plan<'b>(&self, targets: &[FillTarget<'b>]) -> Result<Work<'b>> {
        let mut by_entry: BTreeMap<usize, Vec<&FillTarget<'b>>> = BTreeMap::new();
        for target in targets {
            let entry = self.stored_entry(target.entry)?;
            let end = target.offset.checked_add(target.buffer.len() as u64);
            if end.is_none_or(|end| end > entry.len) {
                let message = format!(
                    "{} bytes from offset {} are asked of {}, which has {}",
                    target.buffer.len(),
                    target.offset,
                    self.name_of(entry),
                    entry.len
                );
                return Err(self.error(ErrorKind::InvalidArgument, message));
            }
            by_entry.entry(target.entry).or_default().push(target);
        }
        let mut pieces = Vec::new();
        let mut units: BTreeMap<Unit, Vec<Piece<'b>>> = BTreeMap::new();
        let mut wholes = Vec::new();
        let mut sum_count = 0;
        for (index, list) in by_entry {
            let entry = &self.archive.entries[index];
            for (set, whole) in sets(list, entry.len) {
                let mut sums = Vec::new();
                for target in set {
                    for piece in split(entry.data_offset + target.offset, target.buffer) {
                        if whole {
                            sums.push((sum_count, piece.buffer.len() as u64));
                            pieces.push(Piece { sum: Some(sum_count), ..piece });
                            sum_count += 1;
                        } else {
                            self.add_part(index, piece, &mut pieces, &mut units);
                        }
                    }
                }
                if whole {
                    wholes.push(Whole { entry: index, sums });
                }
            }
        }
        let bytes = targets.iter().map(|target| target.buffer.len() as u64).sum();
        let mut items: Vec<_> = group(pieces).into_iter().map(Item::Pieces).collect();
        items.extend(units.into_iter().map(|(unit, pieces)| Item::Unit { unit, pieces }));
        Ok(Work { items, wholes, sum_count, bytes })
    }

    /// Files a piece of a part of entry `index` under what it can be checked by.
    fn add_part<'b>(
        &self,
        index: usize,
        piece: Piece<'b>,
        pieces: &mut Vec<Piece<'b>>,
        units: &mut BTreeMap<Unit, Vec<Piece<'b>>>,
    ) {
        if let Some(record) = &self.record {
            let chunk_bytes = record.chunk_bytes.max(1);
            for chunk in piece.start / chunk_bytes..piece.end().div_ceil(chunk_bytes) {
                let bounds = chunk * chunk_bytes..(chunk + 1) * chunk_bytes;
                let Some(inside) = clip(&piece, &bounds) else { continue };
                if self.good_chunks[chunk as usize].load(Ordering::Relaxed) {
                    pieces.push(inside);
                } else {
                    units.entry(Unit::Chunk(chunk as usize)).or_default().push(inside);
                }
            }
        } else if self.archive.has_checksums && self.archive.entries[index].len <= PIECE_BYTES {
            units.entry(Unit::Entry(index)).or_default().push(piece);
        } else {
            pieces.push(piece);
        }
    }

    fn bounds(&self, unit: Unit) -> Range<u64> {
        match (unit, &self.record) {
            (Unit::Entry(index), _) => {
                let entry = &self.archive.entries[index];
                entry.data_offset..entry.data_end()
            }
            (Unit::Chunk(index), Some(record)) => {
                let start = index as u64 * record.chunk_bytes;
                start..start + record.chunk_len(index)
            }
            (Unit::Chunk(_), None) => 0..0, // chunks come from a record
        }
    }

    fn check_unit(&self, unit: Unit, sum: u32) -> Result<()> {
        match (unit, &self.record) {
            (Unit::Entry(index), _) => self.check_entry(&self.archive.entries[index], sum),
            (Unit::Chunk(index), Some(record)) if record.chunks[index] != sum => {
                let bounds = self.bounds(unit);
                let names: Vec<_> = (self.archive.entries.iter())
                    .filter(|entry| entry.data_offset < bounds.end && bounds.start < entry.data_end())
                    .map(|entry| entry.name.as_str())
                    .take(3)
                    .collect();
                let fact = format!(
                    "the chunk at offset {} ({} bytes, with {}) has checksum {sum:08x}, written was {:08x}",
                    bounds.start,
                    bounds.end - bounds.start,
                    names.join(", "),
                    record.chunks[index]
                );
                Err(self.corrupt(fact))
            }
            (Unit::Chunk(index), _) => {
                // Relaxed: whoever sees it late checks again
                self.good_chunks[index].store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

/// One entry's targets in sets, each with whether it is all of the entry: then it is checked as a whole.
fn sets<'t, 'b>(targets: Vec<&'t FillTarget<'b>>, len: u64) -> Vec<(Vec<&'t FillTarget<'b>>, bool)> {
    // The same entry may be wanted twice; each copy of all of it is a set of its own.
    let (complete, mut rest): (Vec<&FillTarget<'b>>, Vec<_>) =
        targets.into_iter().partition(|target| target.buffer.len() as u64 == len);
    rest.sort_by_key(|target| target.offset);
    let tiled = tiles(&rest, len);
    complete.into_iter().map(|target| (vec![target], true)).chain([(rest, tiled)]).collect()
}

/// Whether the targets, sorted, cover 0..len exactly once; no targets cover nothing.
fn tiles(targets: &[&FillTarget<'_>], len: u64) -> bool {
    if targets.is_empty() {
        return false;
    }
    let mut end = 0;
    for target in targets {
        if target.offset != end {
            return false;
        }
        end += target.buffer.len() as u64;
    }
    end == len
}

/// A buffer in pieces that one thread handles at a time.
fn split(start: u64, buffer: ForeignBytesMut<'_>) -> impl Iterator<Item = Piece<'_>> {
    let step = PIECE_BYTES as usize;
    (0..buffer.len()).step_by(step).map(move |at| {
        let end = buffer.len().min(at + step);
        Piece { start: start + at as u64, buffer: buffer.slice(at..end), sum: None }
    })
}

/// The part of a piece that lies within `bounds`.
fn clip<'b>(piece: &Piece<'b>, bounds: &Range<u64>) -> Option<Piece<'b>> {
    let (start, end) = (piece.start.max(bounds.start), piece.end().min(bounds.end));
    (start < end).then(|| {
        let range = (start - piece.start) as usize..(end - piece.start) as usize;
        Piece { start, buffer: piece.buffer.slice(range), sum: piece.sum }
    })
}

/// Pieces that lie close together in the file become one item, of a bounded span.
fn group(mut pieces: Vec<Piece<'_>>) -> Vec<Vec<Piece<'_>>> {
    pieces.sort_by_key(|piece| piece.start);
    let mut groups: Vec<Vec<Piece<'_>>> = Vec::new();
    let mut span = 0..0;
    for piece in pieces {
        let near = piece.start <= span.end + SKIP_BYTES_MAX && piece.end().max(span.end) - span.start <= PIECE_BYTES;
        let bounds = piece.start..piece.end();
        match groups.last_mut() {
            Some(group) if near => {
                span.end = span.end.max(bounds.end);
                group.push(piece);
            }
            _ => {
                span = bounds;
                groups.push(vec![piece]);
            }
        }
    }
    groups
}

/// What the threads of one read share.
struct State<'s, 'b> {
    image: &'s Image,
    kernel: &'static dyn CopyKernel,
    work: &'s Work<'b>,
    next: AtomicUsize,
    stop: AtomicBool,
    sums: Vec<Mutex<u32>>,
    failure: Mutex<Option<crate::error::Error>>,
}

impl State<'_, '_> {
    /// Does items until there are none; `poll` is asked before each.
    fn run(&self, poll: &mut dyn FnMut() -> Result<()>) {
        let mut buffer = Buffer::default();
        // Relaxed: the counter only hands out numbers, results are published by the mutexes and the join
        while !self.stop.load(Ordering::Relaxed) {
            let Some(item) = self.work.items.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(error) = poll().and_then(|()| self.do_item(item, &mut buffer)) {
                self.stop.store(true, Ordering::Relaxed);
                lock(&self.failure).get_or_insert(error);
            }
        }
    }

    fn do_item(&self, item: &Item<'_>, buffer: &mut Buffer) -> Result<()> {
        match item {
            Item::Pieces(pieces) => self.copy(pieces, buffer),
            Item::Unit { unit, pieces } => self.copy_unit(*unit, pieces, buffer),
        }
    }

    fn copy(&self, pieces: &[Piece<'_>], buffer: &mut Buffer) -> Result<()> {
        let start = pieces.first().map_or(0, |piece| piece.start);
        let end = pieces.iter().map(Piece::end).max().unwrap_or(start);
        let bytes = self.image.source.view(&self.image.path, start, (end - start) as usize, buffer)?;
        for piece in pieces {
            let from = &bytes[(piece.start - start) as usize..(piece.end() - start) as usize];
            match piece.sum {
                Some(at) => *lock(&self.sums[at]) = self.kernel.copy_out_crc(piece.buffer, from),
                None => piece.buffer.copy_from(from),
            }
        }
        Ok(())
    }

    /// Reads the unit in pieces, so that a large chunk needs no large buffer.
    fn copy_unit(&self, unit: Unit, pieces: &[Piece<'_>], buffer: &mut Buffer) -> Result<()> {
        let bounds = self.image.bounds(unit);
        let mut sum = 0;
        let mut start = bounds.start;
        while start < bounds.end {
            let end = bounds.end.min(start + PIECE_BYTES);
            let bytes = self.image.source.view(&self.image.path, start, (end - start) as usize, buffer)?;
            sum = crc::combine(sum, self.kernel.crc(bytes), end - start);
            for piece in pieces.iter().filter_map(|piece| clip(piece, &(start..end))) {
                piece.buffer.copy_from(&bytes[(piece.start - start) as usize..(piece.end() - start) as usize]);
            }
            start = end;
        }
        self.image.check_unit(unit, sum)
    }
}

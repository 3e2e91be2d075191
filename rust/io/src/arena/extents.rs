//! Which parts of the data area are in use, and which have memory behind them.
//!
//! Owns: first-fit placement, and the set of reserved ranges.
//! Must not: reserve memory itself; it says which ranges still need it.
//! Invariant: extents in use are disjoint, page-aligned, inside the capacity; freeing one keeps its memory for the next.

use std::collections::BTreeMap;
use std::ops::Range;

use super::layout::{HUGE_BYTES, PAGE_BYTES};

/// Disjoint ranges that do not touch: start -> end.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        while let Some((&before, &its_end)) = self.0.range(..=end).next_back().filter(|(_, its_end)| **its_end >= start)
        {
            self.0.remove(&before);
            start = start.min(before);
            end = end.max(its_end);
        }
        self.0.insert(start, end);
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.0.range(..range.end).next_back().filter(|(_, end)| **end > range.start) {
            self.0.remove(&start);
            if start < range.start {
                self.0.insert(start, range.start);
            }
            if end > range.end {
                self.0.insert(range.end, end);
            }
        }
    }

    /// The parts of `range` that are not in the set.
    pub(crate) fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        let from = self.0.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        for (&start, &end) in self.0.range(from..range.end) {
            if start > at {
                missing.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            missing.push(at..range.end);
        }
        missing
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

/// The data area's book.
#[derive(Debug)]
pub(crate) struct Extents {
    capacity: u64,
    /// Start -> end. Unlike in `RangeSet`, neighbours stay apart.
    used: BTreeMap<u64, u64>,
    reserved: RangeSet,
    used_bytes: u64,
    peak_bytes: u64,
}

impl Extents {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: BTreeMap::new(), reserved: RangeSet::default(), used_bytes: 0, peak_bytes: 0 }
    }

    /// Takes the first gap for `len` bytes (a multiple of a page), one with memory behind it if there is one.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let align = if len >= HUGE_BYTES { HUGE_BYTES } else { PAGE_BYTES };
        let candidates = || {
            self.gaps().filter_map(move |gap| {
                let start = gap.start.next_multiple_of(align);
                (start.checked_add(len)? <= gap.end).then_some(start)
            })
        };
        let start = candidates()
            .find(|start| self.reserved.missing(*start..start + len).is_empty())
            .or_else(|| candidates().next())?;
        self.occupy(start, len).then_some(start)
    }

    /// Marks an extent as used; false if it reaches beyond the capacity or into another one.
    pub(crate) fn occupy(&mut self, start: u64, len: u64) -> bool {
        let Some(end) = start.checked_add(len).filter(|end| *end <= self.capacity) else { return false };
        let clash = self.used.range(..end).next_back().is_some_and(|(_, its_end)| *its_end > start);
        if clash || len == 0 {
            return false;
        }
        self.used.insert(start, end);
        self.used_bytes += len;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
        true
    }

    /// Gives an extent back; its memory stays reserved.
    pub(crate) fn give_back(&mut self, start: u64) {
        if let Some(end) = self.used.remove(&start) {
            self.used_bytes -= end - start;
        }
    }

    /// Notes that memory lies behind `range`.
    pub(crate) fn note_reserved(&mut self, range: Range<u64>) {
        self.reserved.insert(range);
    }

    /// Notes that `range` has no memory any more.
    pub(crate) fn note_released(&mut self, range: Range<u64>) {
        self.reserved.remove(range);
    }

    /// The parts of `range` that have no memory yet.
    pub(crate) fn unreserved(&self, range: Range<u64>) -> Vec<Range<u64>> {
        self.reserved.missing(range)
    }

    /// The parts that nobody uses, in order.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = Range<u64>> {
        let starts = std::iter::once(0).chain(self.used.values().copied());
        let ends = self.used.keys().copied().chain(std::iter::once(self.capacity));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved.total()
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.capacity - self.used_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = PAGE_BYTES;

    #[test]
    fn the_first_gap_with_memory_behind_it_is_used_again() {
        let mut extents = Extents::new(16 * PAGE);
        let first = extents.take(4 * PAGE).unwrap();
        let second = extents.take(4 * PAGE).unwrap();
        extents.note_reserved(second..second + 4 * PAGE);
        extents.give_back(first);
        extents.give_back(second);
        assert_eq!(extents.take(4 * PAGE), Some(0));
        extents.give_back(0);
        assert_eq!(extents.take(16 * PAGE), Some(0));
        assert_eq!(extents.take(PAGE), None);
        assert_eq!(extents.unreserved(0..16 * PAGE), [0..second, second + 4 * PAGE..16 * PAGE]);
    }

    #[test]
    fn a_gap_that_has_memory_is_preferred_to_an_earlier_one_without() {
        let mut extents = Extents::new(16 * PAGE);
        let wall = (0..3).map(|_| extents.take(4 * PAGE).unwrap()).collect::<Vec<_>>();
        extents.note_reserved(wall[2]..wall[2] + 4 * PAGE);
        extents.give_back(wall[0]);
        extents.give_back(wall[2]);
        // Gaps: 0..4 without memory, 8..16 whose first four pages have it.
        assert_eq!(extents.take(4 * PAGE), Some(wall[2]));
    }

    #[test]
    fn large_extents_start_on_huge_pages() {
        let mut extents = Extents::new(4 * HUGE_BYTES);
        assert_eq!(extents.take(PAGE), Some(0));
        assert_eq!(extents.take(HUGE_BYTES), Some(HUGE_BYTES));
        assert_eq!(extents.take(PAGE), Some(PAGE));
        assert_eq!((extents.used_bytes(), extents.free_bytes()), (HUGE_BYTES + 2 * PAGE, 3 * HUGE_BYTES - 2 * PAGE));
    }

    proptest! {
        #[test]
        fn range_sets_agree_with_a_set_of_numbers(steps in proptest::collection::vec((any::<bool>(), 0_u64..60, 0_u64..20), 0..40)) {
            let mut set = RangeSet::default();
            let mut model = std::collections::BTreeSet::new();
            for (add, start, len) in steps {
                let range = start..start + len;
                if add { set.insert(range.clone()); model.extend(range); }
                else { set.remove(range.clone()); model.retain(|n| !range.contains(n)); }
                prop_assert_eq!(set.total(), model.len() as u64);
                let missing: Vec<u64> = set.missing(5..70).into_iter().flatten().collect();
                let expected: Vec<u64> = (5..70).filter(|n| !model.contains(n)).collect();
                prop_assert_eq!(missing, expected);
            }
        }

        #[test]
        fn extents_never_overlap_and_all_space_comes_back(steps in proptest::collection::vec((0_usize..8, 1_u64..600), 0..60)) {
            let mut extents = Extents::new(2000 * PAGE);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (choice, pages) in steps {
                if choice < 5 {
                    if let Some(start) = extents.take(pages * PAGE) {
                        let end = start + pages * PAGE;
                        prop_assert!(end <= 2000 * PAGE);
                        prop_assert!(live.iter().all(|(s, e)| end <= *s || *e <= start));
                        live.push((start, end));
                    }
                } else if !live.is_empty() {
                    let (start, _) = live.swap_remove(choice % live.len());
                    extents.give_back(start);
                }
                prop_assert_eq!(extents.used_bytes(), live.iter().map(|(s, e)| e - s).sum::<u64>());
            }
            for (start, _) in live { extents.give_back(start); }
            prop_assert_eq!(extents.take(2000 * PAGE), Some(0));
        }
    }
}

use std::borrow::Cow;
use std::cell::Cell;

use proptest::prelude::*;
use relight_format::crc::crc32;
use relight_io::copy;
use relight_io::foreign::ForeignBytes;

use super::*;
use crate::clock::SystemClock;
use crate::plan::PlanEntry;
use crate::wait::never;

const CHUNK_BYTES: u64 = 64 << 10;

type Entries = Vec<Vec<Vec<u8>>>;

fn plan(entries: &Entries) -> ImagePlan<'_> {
    let entries = entries.iter().enumerate().map(|(number, pieces)| PlanEntry {
        name: format!("data/{number}"),
        pieces: pieces
            .iter()
            .enumerate()
            .map(|(index, bytes)| match index % 3 {
                0 => Piece::Foreign(ForeignBytes::from_cells(bytes.as_slice())),
                _ => Piece::Inline(Cow::Borrowed(bytes.as_slice())),
            })
            .collect(),
    });
    ImagePlan::new("model", entries.collect()).unwrap()
}

/// The image as one would write it down, entry after entry, with nothing clever.
fn reference(plan: &ImagePlan<'_>, entries: &Entries) -> Vec<u8> {
    let layout = plan.layout();
    let mut image = Vec::new();
    let mut crcs = Vec::new();
    for (index, pieces) in entries.iter().enumerate() {
        let data = pieces.concat();
        image.resize(layout.entry(index).header_offset as usize, 0);
        image.extend(layout.header_bytes(index));
        image.extend(&data);
        crcs.push(crc32(&data));
        image.extend(layout.descriptor_bytes(index, crc32(&data)));
    }
    image.extend(layout.trailer_bytes(&crcs));
    image
}

fn sums(image: &[u8]) -> ImageSums {
    let chunks = image.chunks(CHUNK_BYTES as usize).map(crc32).collect();
    ImageSums { crc32: crc32(image), chunk_bytes: CHUNK_BYTES, chunks }
}

fn copier<'c>(clock: &'c SystemClock, threads: usize) -> Copier<'c> {
    Copier { kernel: copy::best(), threads, chunk_bytes: CHUNK_BYTES, clock, interrupt: &never }
}

fn entries() -> impl Strategy<Value = Entries> {
    let len = prop_oneof![8 => 0..200_usize, 2 => 60_000..70_000_usize, 1 => 200_000..1_200_000_usize];
    let piece = (len, any::<u8>()).prop_map(|(len, seed)| {
        (0..len).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect::<Vec<u8>>()
    });
    proptest::collection::vec(proptest::collection::vec(piece, 0..4), 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Guards: any error of offsets, borders of chunks and windows, or combined checksums.
    #[test]
    fn staged_bytes_and_sums_are_those_of_the_reference(
        entries in entries(),
        threads in 1..4_usize,
        window in 1..3_000_000_usize,
    ) {
        let plan = plan(&entries);
        let wanted = reference(&plan, &entries);
        prop_assert_eq!(plan.total_len(), wanted.len() as u64);
        let clock = SystemClock::new();

        // Memory that was used before: what shows through is a byte that was not written.
        let mut image = vec![0xAA; wanted.len()];
        let mut stager = Stager::new(&plan, copier(&clock, threads));
        stager.fill(&mut image).unwrap();
        prop_assert!(image == wanted, "the image differs at {:?}", image.iter().zip(&wanted).position(|(a, b)| a != b));
        prop_assert_eq!(stager.finish(), sums(&wanted));
        check_same(&plan, copier(&clock, threads), &image).unwrap();

        let mut stager = Stager::new(&plan, copier(&clock, threads));
        let mut streamed = Vec::new();
        while stager.left() > 0 {
            let mut piece = vec![0xAA; (stager.left() as usize).min(window)];
            stager.fill(&mut piece).unwrap();
            streamed.extend(piece);
        }
        prop_assert!(streamed == wanted);
        stager.check_sources().unwrap();
        prop_assert_eq!(stager.finish(), sums(&wanted));
    }
}

/// Guards BL-032's kind: the checksums of a great many tiny entries, which are taken another way.
#[test]
fn many_tiny_entries_have_the_sums_of_the_reference() {
    let entries: Entries = (0..20_000_u32).map(|number| vec![number.to_le_bytes().repeat(16)]).collect();
    let plan = plan(&entries);
    let wanted = reference(&plan, &entries);
    let clock = SystemClock::new();
    let mut image = vec![0xAA; wanted.len()];
    let mut stager = Stager::new(&plan, copier(&clock, 2));
    stager.fill(&mut image).unwrap();
    assert!(image == wanted);
    assert_eq!(stager.finish(), sums(&wanted));
}

/// BL-070's kind: the state changes after its bytes were read.
#[test]
fn test_bl_070_a_change_after_the_copy_is_torn_and_names_the_entry() {
    let cells: Vec<Cell<u8>> = (0..3_000_000).map(|_| Cell::new(1)).collect();
    let entries = vec![
        PlanEntry { name: "data.pkl".to_owned(), pieces: vec![Piece::Inline(Cow::Borrowed(b"x"))] },
        PlanEntry { name: "data/7".to_owned(), pieces: vec![Piece::Foreign(ForeignBytes::from_cells(&cells))] },
    ];
    let plan = ImagePlan::new("model", entries).unwrap();
    let clock = SystemClock::new();
    let mut image = vec![0; plan.total_len() as usize];
    let mut stager = Stager::new(&plan, copier(&clock, 2));
    stager.fill(&mut image).unwrap();
    check_same(&plan, copier(&clock, 2), &image).unwrap();

    cells[2_999_999].set(2);
    for error in [check_same(&plan, copier(&clock, 2), &image), stager.check_sources()] {
        let error = error.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Torn);
        assert!(error.message.contains("data/7"), "{error}");
    }
}

#[test]
fn an_interrupt_ends_a_long_copy() {
    let bytes = vec![vec![vec![1_u8; 64 << 20]]];
    let plan = plan(&bytes);
    let clock = relight_testclock::Ticking::default();
    let stop = || Err(Error::new(ErrorKind::Interrupted, "stop"));
    let copier = Copier { kernel: copy::best(), threads: 2, chunk_bytes: CHUNK_BYTES, clock: &clock, interrupt: &stop };
    let mut image = vec![0; plan.total_len() as usize];
    let error = Stager::new(&plan, copier).fill(&mut image).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Interrupted);
}

mod relight_testclock {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// Half a second passes at each look.
    #[derive(Debug, Default)]
    pub(super) struct Ticking(AtomicU64);

    impl crate::clock::Clock for Ticking {
        fn monotonic(&self) -> Duration {
            Duration::from_millis(500 * self.0.fetch_add(1, Ordering::Relaxed))
        }

        fn wall(&self) -> Duration {
            Duration::ZERO
        }

        fn pause(&self, _: Duration) {}
    }
}

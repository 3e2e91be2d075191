//! Every interleaving, and every stale read that the memory model allows, of the lock-free parts.
//! `cargo test -p relight-io --features loom --test loom --release`
#![cfg(feature = "loom")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use relight_io::arena::protocol::{self, ReadWord, Word};
use relight_io::ring::{Closed, channel};

/// Every interleaving with at most three forced switches of the thread: the sleep brings so many steps that all of them
/// would take hours, and a lost wake-up needs two.
fn bounded(run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(run);
}

#[test]
fn items_cross_the_ring_whole_in_order_and_once() {
    bounded(|| {
        let (mut producer, mut consumer) = channel(1);
        let sender = thread::spawn(move || {
            for item in [1, 2] {
                producer.push(Box::new(item)).unwrap();
            }
        });
        assert_eq!(consumer.pop().as_deref(), Some(&1));
        assert_eq!(consumer.pop().as_deref(), Some(&2));
        assert_eq!(consumer.pop(), None);
        sender.join().unwrap();
    });
}

#[test]
fn a_ring_of_two_is_filled_and_emptied_without_sleeping() {
    loom::model(|| {
        let (mut producer, mut consumer) = channel(2);
        let sender = thread::spawn(move || (0..3).filter(|item| producer.try_push(Box::new(*item)).is_ok()).count());
        let mut taken = Vec::new();
        for _ in 0..2 {
            taken.extend(consumer.try_pop().map(|item| *item));
        }
        let sent = sender.join().unwrap();
        taken.extend(std::iter::from_fn(|| consumer.try_pop()).map(|item| *item));
        assert_eq!(taken.len(), sent);
        assert!(taken.is_sorted());
    });
}

/// Guards: a sleeper that the other side's last act did not wake.
#[test]
fn whoever_sleeps_wakes_when_the_other_half_goes() {
    loom::model(|| {
        let (producer, mut consumer) = channel::<u32>(1);
        let other = thread::spawn(move || drop(producer));
        assert_eq!(consumer.pop(), None);
        other.join().unwrap();
    });
    loom::model(|| {
        let (mut producer, consumer) = channel(1);
        producer.try_push(1).unwrap();
        let other = thread::spawn(move || drop(consumer));
        assert_eq!(producer.push(2), Err(Closed(2)));
        other.join().unwrap();
    });
}

/// A state word in loom's memory.
struct Slot(AtomicU64);

impl ReadWord for Slot {
    fn load_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn load_relaxed(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn fence_acquire() {
        fence(Ordering::Acquire);
    }
}

impl Word for Slot {
    fn store_release(&self, word: u64) {
        self.0.store(word, Ordering::Release);
    }

    fn store_relaxed(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
    }

    fn fence_release() {
        fence(Ordering::Release);
    }
}

/// The successor may look at any moment of the owner's life: whole means that the contents are there, and that reading
/// them does not race with their writing (loom's cell checks that).
#[test]
fn a_successor_that_reads_whole_reads_all_contents() {
    static SEEN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    loom::model(|| {
        let slot = Arc::new((Slot(AtomicU64::new(0)), UnsafeCell::new(0_u64)));
        let successor = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                // SAFETY: `read` looks only at whole slots, which are not written any more; loom checks that too.
                protocol::read(&slot.0, |_| slot.1.with(|contents| unsafe { *contents })).map(|(_, contents)| contents)
            })
        };
        let generation = protocol::begin(&slot.0);
        // SAFETY: the owner's alone until it publishes; loom fails the test if that is not so.
        slot.1.with_mut(|contents| unsafe { *contents = 7 });
        protocol::publish(&slot.0, generation);
        protocol::mark_done(&slot.0, generation);
        let seen = successor.join().unwrap();
        SEEN.fetch_or(1 << u32::from(seen.is_some()), std::sync::atomic::Ordering::Relaxed);
        assert!(seen.is_none_or(|contents| contents == 7));
    });
    // A model that never comes to the interesting case proves nothing.
    assert_eq!(SEEN.load(std::sync::atomic::Ordering::Relaxed), 0b11, "both outcomes were tried");
}

/// An onlooker may read while the owner re-uses the slot: what it is shown is one generation, never a mixture.
#[test]
fn an_onlooker_never_takes_a_mixture_of_two_generations_for_whole() {
    loom::model(|| {
        let slot = Arc::new((Slot(AtomicU64::new(0)), [AtomicU64::new(0), AtomicU64::new(0)]));
        let fill = |slot: &(Slot, [AtomicU64; 2]), value| {
            let generation = protocol::begin(&slot.0);
            slot.1.iter().for_each(|part| part.store(value, Ordering::Relaxed));
            protocol::publish(&slot.0, generation);
            generation
        };
        let first = fill(&slot, 1);
        let owner = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                protocol::free(&slot.0, first);
                fill(&slot, 2);
            })
        };
        let seen = protocol::read(&slot.0, |_| [0, 1].map(|part: usize| slot.1[part].load(Ordering::Relaxed)));
        if let Some((state, contents)) = seen {
            assert_eq!(contents, [state.generation; 2]);
        }
        owner.join().unwrap();
    });
}

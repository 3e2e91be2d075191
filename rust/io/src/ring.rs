//! A bounded lock-free ring between one producer and one consumer.
//!
//! Owns: the descriptors in flight between two stages. A full ring is the back-pressure.
//! Must not: move tensor bytes (descriptors only), spin while it waits, or lose an item when one side goes away.
//! Invariant: slots `head..tail` hold items and belong to the consumer, the others are empty and belong to the
//! producer; only the producer moves `tail`, only the consumer moves `head`.
//!
//! ```text
//!         head (consumer)        tail (producer)
//!           v                      v
//!   | free | item | item | item | free |      indices count up for ever; slot = index & mask
//! ```
//! Source: the classic single-producer single-consumer queue of Lamport, with each side's cached copy of the other's
//! index; the sleep is an event count (publish, fence, look for a sleeper / announce sleep, fence, look again).

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::PoisonError;

use crate::sync::{Arc, AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, UnsafeCell, fence};

/// The consumer is gone; the item comes back.
#[derive(Debug, PartialEq, Eq)]
pub struct Closed<T>(pub T);

/// Keeps the two indices on cache lines of their own (128: the adjacent line is fetched along on x86).
#[repr(align(128))]
struct Padded<T>(T);

struct Shared<T> {
    /// Index of the next item to take.
    head: Padded<AtomicUsize>,
    /// Index of the next slot to fill.
    tail: Padded<AtomicUsize>,
    producer_gone: AtomicBool,
    consumer_gone: AtomicBool,
    room: Sleeper,
    items: Sleeper,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    capacity: usize,
}

// SAFETY: items move from one thread to the other (T: Send). A slot is touched by one side at a time: `head` and `tail`
// say by whom, and are handed over with release and acquire.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: owns its items, as a queue does.
unsafe impl<T: Send> Send for Shared<T> {}

/// The half that puts items in. Dropping it closes the ring; what is in it can still be taken.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    tail: usize,
    /// A head that was true once: never ahead of the real one, so room seen here is room.
    head_seen: usize,
}

/// The half that takes items out. Dropping it closes the ring; what is in it is dropped.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    head: usize,
    /// A tail that was true once: never ahead of the real one, so items seen here are items.
    tail_seen: usize,
}

/// A ring with room for `capacity` items.
///
/// # Panics
/// If `capacity` is 0.
pub fn channel<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity > 0, "a ring needs room for an item");
    let slots = (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
    let shared = Arc::new(Shared {
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
        producer_gone: AtomicBool::new(false),
        consumer_gone: AtomicBool::new(false),
        room: Sleeper::new(),
        items: Sleeper::new(),
        slots,
        capacity,
    });
    (Producer { shared: Arc::clone(&shared), tail: 0, head_seen: 0 }, Consumer { shared, head: 0, tail_seen: 0 })
}

impl<T> Shared<T> {
    fn slot(&self, index: usize) -> &UnsafeCell<MaybeUninit<T>> {
        // The number of slots is a power of two, so the mask also holds when the index wraps around.
        &self.slots[index & (self.slots.len() - 1)]
    }
}

impl<T: Send> Producer<T> {
    /// Puts an item in, or gives it back if the ring is full or the consumer is gone.
    pub fn try_push(&mut self, item: T) -> Result<(), T> {
        // Relaxed: only decides whether work is wasted; an item put in too late is dropped with the ring.
        if self.shared.consumer_gone.load(Ordering::Relaxed) || !self.has_room() {
            return Err(item);
        }
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: `has_room` saw, with acquire, a head by which the consumer had left this slot; until our store
            // to `tail` below it does not look at it again. The pointer comes from a cell of a live slot.
            let slot = unsafe { &mut *slot };
            slot.write(item);
        });
        self.tail = self.tail.wrapping_add(1);
        // Release: the consumer that sees the new tail sees the item in the slot.
        self.shared.tail.0.store(self.tail, Ordering::Release);
        self.shared.items.wake();
        Ok(())
    }

    /// Puts an item in, sleeping while the ring is full.
    pub fn push(&mut self, mut item: T) -> Result<(), Closed<T>> {
        loop {
            match self.try_push(item) {
                Ok(()) => return Ok(()),
                Err(back) => item = back,
            }
            // Acquire: pairs with the consumer's release in drop; nothing is read behind it, it costs nothing here.
            if self.shared.consumer_gone.load(Ordering::Acquire) {
                return Err(Closed(item));
            }
            let shared = Arc::clone(&self.shared);
            shared.room.sleep_until(|| self.has_room() || shared.consumer_gone.load(Ordering::Acquire));
        }
    }

    fn has_room(&mut self) -> bool {
        if self.tail.wrapping_sub(self.head_seen) < self.shared.capacity {
            return true;
        }
        // Acquire: the slots below this head were read out before it was stored, so they may be overwritten.
        self.head_seen = self.shared.head.0.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head_seen) < self.shared.capacity
    }
}

impl<T: Send> Consumer<T> {
    /// Takes the oldest item, if there is one.
    pub fn try_pop(&mut self) -> Option<T> {
        if !self.has_item() {
            return None;
        }
        let item = self.shared.slot(self.head).with_mut(|slot| {
            // SAFETY: `has_item` saw, with acquire, a tail beyond this slot, so the producer has left it; until our
            // store to `head` below it does not touch it again. The pointer comes from a cell of a live slot.
            let slot = unsafe { &*slot };
            // SAFETY: the producer wrote an item here before it stored that tail, and it is taken out once: `head`
            // moves on.
            unsafe { slot.assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        // Release: the producer that sees the new head may overwrite the slot, after our read of it.
        self.shared.head.0.store(self.head, Ordering::Release);
        self.shared.room.wake();
        Some(item)
    }

    /// Takes the oldest item, sleeping while there is none. `None`: empty, and the producer is gone.
    pub fn pop(&mut self) -> Option<T> {
        loop {
            // Acquire, and read before the ring is looked at: whoever sees that the producer is gone also sees its
            // last item, so "gone, then empty" means empty for ever.
            let gone = self.shared.producer_gone.load(Ordering::Acquire);
            if let Some(item) = self.try_pop() {
                return Some(item);
            }
            if gone {
                return None;
            }
            let shared = Arc::clone(&self.shared);
            shared.items.sleep_until(|| self.has_item() || shared.producer_gone.load(Ordering::Acquire));
        }
    }

    fn has_item(&mut self) -> bool {
        if self.head != self.tail_seen {
            return true;
        }
        // Acquire: pairs with the producer's release; the items below this tail are visible.
        self.tail_seen = self.shared.tail.0.load(Ordering::Acquire);
        self.head != self.tail_seen
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        // Release: pairs with `pop`, which must see the last item when it sees this.
        self.shared.producer_gone.store(true, Ordering::Release);
        self.shared.items.wake();
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // Release: keeps the reads of the last items before it, for tools that check; no data hangs on it.
        self.shared.consumer_gone.store(true, Ordering::Release);
        self.shared.room.wake();
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Relaxed: both halves are gone, and the reference count of Arc has made all they did visible here.
        let tail = self.tail.0.load(Ordering::Relaxed);
        let mut index = self.head.0.load(Ordering::Relaxed);
        while index != tail {
            self.slot(index).with_mut(|slot| {
                // SAFETY: `&mut self`: nobody else is left. The pointer comes from a cell of a live slot.
                let slot = unsafe { &mut *slot };
                // SAFETY: slots `head..tail` hold items (the invariant), and each is dropped once.
                unsafe { slot.assume_init_drop() }
            });
            index = index.wrapping_add(1);
        }
    }
}

/// Where one side sleeps until the other has done something.
struct Sleeper {
    asleep: AtomicBool,
    door: Mutex<()>,
    bell: Condvar,
}

impl Sleeper {
    fn new() -> Self {
        Self { asleep: AtomicBool::new(false), door: Mutex::new(()), bell: Condvar::new() }
    }

    /// Sleeps until `ready`. Called by one thread at a time.
    fn sleep_until(&self, mut ready: impl FnMut() -> bool) {
        // A poisoned door guards no data.
        let mut guard = self.door.lock().unwrap_or_else(PoisonError::into_inner);
        self.asleep.store(true, Ordering::Relaxed);
        // SeqCst: of this fence and the one in `wake` one comes first. If ours does, `wake` sees `asleep` and rings;
        // if the other does, `ready` sees what was published before it. Without both, each side could miss the other.
        fence(Ordering::SeqCst);
        while !ready() {
            // The bell is rung with the door locked, so it cannot ring between `ready` and this wait.
            guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        // Relaxed: a bell that rings for nobody is harmless.
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Wakes the sleeper. Called after what it waits for was published.
    fn wake(&self) {
        // SeqCst: see `sleep_until`.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            let _guard = self.door.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_one();
        }
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Producer(capacity {})", self.shared.capacity)
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Consumer(capacity {})", self.shared.capacity)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn items_come_out_in_order_and_a_full_ring_gives_the_item_back() {
        let (mut producer, mut consumer) = channel(3);
        for i in 0..3 {
            producer.try_push(i).unwrap();
        }
        assert_eq!(producer.try_push(3), Err(3));
        assert_eq!(consumer.try_pop(), Some(0));
        producer.try_push(3).unwrap();
        drop(producer);
        assert_eq!(std::iter::from_fn(|| consumer.pop()).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_million_items_cross_threads_through_a_small_ring() {
        let (mut producer, mut consumer) = channel(4);
        let sender = std::thread::spawn(move || {
            for i in 0..1_000_000_u64 {
                producer.push(Box::new(i)).unwrap();
            }
        });
        for i in 0..1_000_000 {
            assert_eq!(*consumer.pop().unwrap(), i);
        }
        assert!(consumer.pop().is_none());
        sender.join().unwrap();
    }

    #[test]
    fn items_left_behind_are_dropped_once() {
        let witness = std::sync::Arc::new(());
        let (mut producer, consumer) = channel(8);
        for _ in 0..5 {
            producer.try_push(std::sync::Arc::clone(&witness)).unwrap();
        }
        assert_eq!(std::sync::Arc::strong_count(&witness), 6);
        drop(consumer);
        let Closed(item) = producer.push(std::sync::Arc::clone(&witness)).unwrap_err();
        drop((item, producer));
        assert_eq!(std::sync::Arc::strong_count(&witness), 1);
    }

    #[test]
    fn a_producer_asleep_at_a_full_ring_wakes_when_the_consumer_goes() {
        let (mut producer, consumer) = channel(1);
        producer.try_push(1).unwrap();
        let sender = std::thread::spawn(move || producer.push(2));
        drop(consumer);
        assert_eq!(sender.join().unwrap(), Err(Closed(2)));
    }
}

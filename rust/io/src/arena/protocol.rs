//! The publish protocol of a slot: one word, written last.
//!
//! Owns: the states of a slot and the memory order of every step between them.
//! Must not: know what a slot holds; it is generic over the atomic word, so that loom can try every interleaving.
//! Invariant: whoever reads "whole" or "done" sees the contents of exactly that generation. A process that is killed
//! between any two steps leaves a word that says "free" or "filling" for everything that is not whole.
//!
//! ```text
//!            begin             publish            mark_done
//!   free g ---------> filling g+1 ------> whole g+1 ---------> done g+1
//!     ^_________________|____________________|___________________|      free (the generation stays, and never returns)
//! ```

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing is in it.
    Free = 0,
    /// Somebody is writing its contents.
    Filling = 1,
    /// Its contents are all there.
    Whole = 2,
    /// As whole, and persisted elsewhere.
    Done = 3,
}

/// The state word, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// What the slot is.
    pub phase: Phase,
    /// How often it was filled, this time included.
    pub generation: u64,
}

impl State {
    /// The word of this state.
    pub fn word(self) -> u64 {
        self.generation << 8 | self.phase as u64
    }

    /// The state of a word; `None` if no slot has such a word (flipped bits).
    pub fn of(word: u64) -> Option<Self> {
        let phase = match word & 0xff {
            0 => Phase::Free,
            1 => Phase::Filling,
            2 => Phase::Whole,
            3 => Phase::Done,
            _ => return None,
        };
        // Generations are 32 bits wide in the record's CRC, so higher bits are damage.
        (word >> 40 == 0).then_some(Self { phase, generation: word >> 8 })
    }
}

/// A state word that can be read.
pub trait ReadWord {
    /// Reads it; what was written before the release that it shows is visible after.
    fn load_acquire(&self) -> u64;
    /// Reads it.
    fn load_relaxed(&self) -> u64;
    /// Orders what was read before against what is read or written after.
    fn fence_acquire();
}

/// A state word that can be written: an atomic in shared memory, or loom's model of one.
pub trait Word: ReadWord {
    /// Writes it; whoever acquires it sees all that was written before.
    fn store_release(&self, word: u64);
    /// Writes it.
    fn store_relaxed(&self, word: u64);
    /// Orders what was read or written before against what is written after.
    fn fence_release();
}

impl ReadWord for AtomicU64 {
    fn load_acquire(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn load_relaxed(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    fn fence_acquire() {
        fence(Ordering::Acquire);
    }
}

impl Word for AtomicU64 {
    fn store_release(&self, word: u64) {
        self.store(word, Ordering::Release);
    }

    fn store_relaxed(&self, word: u64) {
        self.store(word, Ordering::Relaxed);
    }

    fn fence_release() {
        fence(Ordering::Release);
    }
}

/// Starts to fill a free slot; returns the generation of its new contents. Called by the one owner of the slot.
pub fn begin<W: Word>(word: &W) -> u64 {
    // Relaxed: only the owner of the region writes the word, and it is us.
    let generation = ((word.load_relaxed() >> 8) + 1) & 0xffff_ffff;
    word.store_relaxed(State { phase: Phase::Filling, generation }.word());
    // Release fence: "filling" is out before the first byte of the new contents. Without it a kill could leave new bytes
    // under the word of the old generation, and a reader could take a mixture for whole.
    W::fence_release();
    generation
}

/// Declares that the contents are all there.
pub fn publish<W: Word>(word: &W, generation: u64) {
    // Release: every byte of the contents was written before, so whoever acquires this word sees them.
    word.store_release(State { phase: Phase::Whole, generation }.word());
}

/// Declares that the contents are persisted elsewhere.
pub fn mark_done<W: Word>(word: &W, generation: u64) {
    // Release: keeps the chain to the contents for a reader that never saw "whole".
    word.store_release(State { phase: Phase::Done, generation }.word());
}

/// Declares that the slot is empty. The owner has no reader of it left.
pub fn free<W: Word>(word: &W, generation: u64) {
    // Release: all reads of the contents by this process come before whatever is written into them next.
    word.store_release(State { phase: Phase::Free, generation }.word());
}

/// Looks at a slot that its owner may be re-using meanwhile: `look` runs if the slot is whole or done, and its result
/// counts only if the slot still holds the same generation afterwards. `look` must copy what it needs.
pub fn read<W: ReadWord, T>(word: &W, look: impl FnOnce(State) -> T) -> Option<(State, T)> {
    let state = State::of(word.load_acquire()).filter(|state| matches!(state.phase, Phase::Whole | Phase::Done))?;
    let seen = look(state);
    // Acquire fence: the contents were read before the word is read again. With the release fence in `begin`: if we read
    // one byte of a newer generation, we also read a newer word now.
    W::fence_acquire();
    let after = State::of(word.load_relaxed())?;
    (after.generation == state.generation && matches!(after.phase, Phase::Whole | Phase::Done)).then_some((after, seen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_goes_through_its_states_and_generations_never_return() {
        let word = AtomicU64::new(0);
        assert!(read(&word, |_| ()).is_none());
        let first = begin(&word);
        assert!(read(&word, |_| ()).is_none());
        publish(&word, first);
        assert_eq!(read(&word, |state| state.generation).unwrap().1, first);
        mark_done(&word, first);
        assert_eq!(read(&word, |_| ()).unwrap().0.phase, Phase::Done);
        free(&word, first);
        assert!(read(&word, |_| ()).is_none());
        assert_eq!(begin(&word), first + 1);
    }

    #[test]
    fn contents_that_were_replaced_while_being_read_do_not_count() {
        let word = AtomicU64::new(0);
        let first = begin(&word);
        publish(&word, first);
        let seen = read(&word, |_| {
            free(&word, first);
            let second = begin(&word);
            publish(&word, second);
        });
        assert!(seen.is_none());
    }

    #[test]
    fn words_that_no_slot_has_are_told() {
        assert_eq!(State::of(0x0104), None);
        assert_eq!(State::of(1 << 40 | 0x0102), None);
        assert_eq!(State::of(0x0102), Some(State { phase: Phase::Whole, generation: 1 }));
    }
}

//! What a file system may show after a power cut.
//!
//! Owns: the choice of what survives of that which no sync made durable.
//! Must not: lose or change what was synced.

use std::collections::BTreeMap;

use super::{Change, Id, MemoryDisk, Node, State};

/// What became of bytes that were written but not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bytes {
    /// As at the last sync.
    Lost,
    /// All there.
    Kept,
    /// The length is there, the second half is zeros.
    Torn,
}

/// Random choices of names and bytes beside the regular ones.
const RANDOM_CUTS: u64 = 6;

impl MemoryDisk {
    /// The states that a POSIX file system may show after a power cut now, each with a word on how it came about.
    /// Names: the changes since the last syncs survive up to some point (as a journal keeps them), or any of them do.
    /// Bytes: what was not synced is lost, kept or torn.
    pub fn after_power_cut(&self) -> Vec<(String, MemoryDisk)> {
        let state = self.state().clone();
        let dirty = |node: &Node| matches!(node, Node::File { bytes, durable } if bytes != durable);
        let dirty: Vec<Id> = state.nodes.iter().filter(|(_, node)| dirty(node)).map(|(id, _)| *id).collect();
        let changes = state.pending.len();
        let fates: &[Bytes] = if dirty.is_empty() { &[Bytes::Lost] } else { &[Bytes::Lost, Bytes::Torn, Bytes::Kept] };
        let mut cuts = Vec::new();
        for kept in 0..=changes {
            for fate in fates {
                let survived = &state.pending[..kept];
                let what = format!("{kept} of {changes} changes of names survive, bytes {fate:?}");
                cuts.push((what, MemoryDisk::of(cut(&state, survived.iter(), |_| *fate))));
            }
        }
        if changes > 1 {
            for seed in 1..=RANDOM_CUTS {
                let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ changes as u64);
                let survived: Vec<_> = state.pending.iter().filter(|_| random.next().is_multiple_of(2)).collect();
                let chosen: BTreeMap<Id, Bytes> = dirty
                    .iter()
                    .map(|id| (*id, [Bytes::Lost, Bytes::Torn, Bytes::Kept][(random.next() % 3) as usize]))
                    .collect();
                let cut = cut(&state, survived.into_iter(), |id| chosen.get(&id).copied().unwrap_or(Bytes::Lost));
                cuts.push((format!("random survivors, seed {seed}"), MemoryDisk::of(cut)));
            }
        }
        cuts
    }
}

fn cut<'a>(state: &State, survived: impl Iterator<Item = &'a Change>, fate: impl Fn(Id) -> Bytes) -> State {
    let mut after = state.clone();
    after.locked.clear();
    after.pending.clear();
    for (id, node) in &mut after.nodes {
        match node {
            Node::File { bytes, durable } => {
                if bytes != durable {
                    match fate(*id) {
                        Bytes::Lost => bytes.clone_from(durable),
                        Bytes::Kept => {}
                        Bytes::Torn => {
                            let half = bytes.len() / 2;
                            bytes[half..].fill(0);
                        }
                    }
                }
                durable.clone_from(bytes);
            }
            Node::Directory { names, durable } => names.clone_from(durable),
            Node::Link(_) => {}
        }
    }
    for effect in survived.flat_map(|change| &change.effects) {
        if let Some(Node::Directory { names, .. }) = after.nodes.get_mut(&effect.directory) {
            effect.put(names);
        }
    }
    for node in after.nodes.values_mut() {
        if let Node::Directory { names, durable } = node {
            durable.clone_from(names);
        }
    }
    after
}

/// A small generator: the same seed gives the same cuts on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

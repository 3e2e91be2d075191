//! Successors: what a dead process left may be in the hands of another process of this node.
//!
//! Owns: the wait until that one has persisted what is of a root or a path that is opened here.
//! Must not: take a region from a live process; wait for a trainer that lives (its saves are its own).
//! Invariant: after `await_drains` a reader sees what the dead process had staged for the place: in memory if we adopted
//! it, else on the disk.

use std::path::Path;
use std::sync::Arc;

use relight_format::record::{SlotRecord, Target};
use relight_io::arena::{Region, RegionView};

use crate::core::Core;
use crate::disk::is_memory_only;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Level;
use crate::wait::{Interrupt, POLL, lock};

/// Something of our place that another process is about to persist.
struct Pending {
    name: String,
    pid: Option<u32>,
}

impl Core {
    /// Waits, at most as long as for a lock, until other successors have persisted what is staged for `place`: a root,
    /// or the path of a single file. Without this, a trainer that starts again while another job of the node drains its
    /// region would resume from an older checkpoint.
    ///
    /// # Errors
    /// TimedOut, naming the process; what `interrupt` says.
    pub(crate) fn await_drains(self: &Arc<Self>, place: &Path, interrupt: Interrupt<'_>) -> Result<()> {
        if is_memory_only(place) {
            return Ok(());
        }
        let limit = self.options.lock_timeout;
        let started = self.clock.monotonic();
        let mut said = false;
        while let Some(pending) = self.in_other_hands(place) {
            let by = pending.pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
            if self.clock.monotonic().saturating_sub(started) >= limit {
                let text = format!(
                    "{} was staged by a process that died and is being persisted by {by}, for longer than {:.0} s; wait \
                     until it is done, or look at the storage, then try again",
                    pending.name,
                    limit.as_secs_f64()
                );
                return Err(Error::new(ErrorKind::TimedOut, text).at(place));
            }
            if !said {
                said = true;
                self.events.log(
                    Level::Info,
                    format!("waiting until {by} has persisted {}, which a dead process left", pending.name),
                );
            }
            // The other process rings no bell of ours: its region is looked at again after each pause.
            self.wait(Some(POLL), interrupt, |_| None::<()>)?;
        }
        if said {
            // Or it died over it, and what is left is ours.
            self.drain();
            let root = lock(&self.state).roots.get(place).cloned();
            if let Some(root) = root {
                root.look_again()?;
            }
        }
        Ok(())
    }

    fn in_other_hands(&self, place: &Path) -> Option<Pending> {
        let dir = lock(&self.state).tier.dir.clone();
        // What cannot be listed or looked at was reported by the drain.
        let paths = Region::list(&dir).unwrap_or_default();
        paths.iter().filter(|path| !self.is_ours(path)).find_map(|path| {
            let view = Region::inspect(path).ok()?;
            view.adopted.then(|| pending_of(&view, place)).flatten()
        })
    }
}

fn pending_of(view: &RegionView, place: &Path) -> Option<Pending> {
    view.images.iter().filter(|image| !image.done).find_map(|image| {
        let name = match SlotRecord::parse(&image.meta).ok()? {
            SlotRecord::Tag(record) => (Path::new(&record.root) == place).then_some(record.tag),
            SlotRecord::Image(record) => match record.target {
                Target::File(target) => (Path::new(&target.path) == place).then_some(target.path),
                Target::Tag { .. } => None,
            },
        };
        Some(Pending { name: name?, pid: view.pid })
    })
}

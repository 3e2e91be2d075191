//! Which of two checkpoints of a root is the newer one (decision 0002).
//!
//! Owns: the order behind `latest`, `list` and retention.
//! Must not: look at times; clocks go back, file times are copied.
//! Invariant: a total order as long as sequence numbers differ, and they do: each commit takes a new one.

/// What orders checkpoints: compare two keys, the greater is the newer.
///
/// A tag with no step is never newer than one with a step. Then the run counts: one that was started later outranks
/// what it abandoned, whatever the steps. Within a run the step decides, however the saves were interleaved; last the
/// sequence number, for the same step saved twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointKey {
    // The derived order compares the fields from top to bottom: do not reorder them.
    /// Whether the tag has a step.
    pub has_step: bool,
    /// The segment of saves that it belongs to.
    pub run: u64,
    /// The step, 0 where there is none.
    pub step: i64,
    /// The number of its commit.
    pub sequence: u64,
}

impl CheckpointKey {
    /// The key of a checkpoint.
    pub fn new(step: Option<i64>, run: u64, sequence: u64) -> Self {
        Self { has_step: step.is_some(), run, step: step.unwrap_or(0), sequence }
    }
}

/// For each key, whether its run was left behind: the checkpoint belongs to a run that a later one rolled back past.
///
/// After a rollback from step 1000 to 500, the new run's first checkpoints have lower steps than the abandoned one's:
/// a checkpoint is left behind if some newer run holds a checkpoint whose step is not above its own.
pub fn left_behind(keys: &[CheckpointKey]) -> Vec<bool> {
    keys.iter()
        .map(|key| {
            key.has_step && keys.iter().any(|other| other.has_step && other.run > key.run && other.step <= key.step)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newest(keys: &[(Option<i64>, u64, u64)]) -> CheckpointKey {
        keys.iter().map(|&(step, run, sequence)| CheckpointKey::new(step, run, sequence)).max().unwrap()
    }

    /// Guards: order by text, or by the moment of the commit, within one run.
    #[test]
    fn test_bl_095_steps_saved_in_any_order_are_ordered_by_number() {
        let steps = [500, 9, 10_000, 10, 2500, 99, 1000, 100];
        let keys: Vec<_> = steps.iter().enumerate().map(|(i, &s)| (Some(s), 1, i as u64 + 1)).collect();
        assert_eq!(newest(&keys).step, 10_000);
    }

    #[test]
    fn test_bl_096_a_tag_without_a_step_is_never_newest() {
        assert_eq!(newest(&[(Some(1), 1, 1), (None, 9, 9)]).step, 1);
        assert_eq!(newest(&[(None, 1, 1), (None, 1, 2)]).sequence, 2);
    }

    #[test]
    fn test_bl_100_the_same_step_again_is_newer() {
        assert_eq!(newest(&[(Some(5), 1, 2), (Some(5), 1, 3), (Some(5), 1, 1)]).sequence, 3);
    }

    #[test]
    fn a_resumed_run_outranks_what_it_abandoned() {
        assert_eq!(newest(&[(Some(500), 1, 1), (Some(1000), 1, 2), (Some(600), 2, 3)]).step, 600);
    }

    #[test]
    fn what_a_rollback_abandoned_is_left_behind_and_what_it_built_on_is_not() {
        let keys = [(500, 1), (600, 1), (1000, 1), (600, 2), (700, 2)].map(|(s, r)| CheckpointKey::new(Some(s), r, 1));
        assert_eq!(left_behind(&keys), [false, true, true, false, false]);
    }
}

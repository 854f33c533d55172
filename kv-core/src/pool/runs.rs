//! Free slots as runs of neighbours.
//!
//! One copy moves a run of neighbouring slots; each further run costs a copy engine the better
//! part of a microsecond. So a group gets its slots in as few runs as there are.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::SlotIndex;

/// A set of slots, kept as maximal runs.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// First slot of each run, and its length.
    by_start: BTreeMap<u32, u32>,
    /// The same runs by length, then by first slot.
    by_length: BTreeSet<(u32, u32)>,
}

impl Runs {
    fn add(&mut self, start: u32, length: u32) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn drop_run(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Puts a slot in that isn't there.
    pub(crate) fn insert(&mut self, slot: SlotIndex) {
        let (mut start, mut length) = (slot.value(), 1);
        let before = self
            .by_start
            .range(..start)
            .next_back()
            .map(|(&s, &l)| (s, l));
        if let Some((left, left_length)) = before {
            assert!(left + left_length <= start, "{slot:?} is free already");
            if left + left_length == start {
                self.drop_run(left, left_length);
                (start, length) = (left, left_length + 1);
            }
        }
        if let Some(&right_length) = self.by_start.get(&(slot.value() + 1)) {
            self.drop_run(slot.value() + 1, right_length);
            length += right_length;
        }
        self.add(start, length);
    }

    /// Takes at most `most` neighbours: from the shortest run that holds as many, else the longest
    /// run. First slot and length, or `None` if there is no slot.
    pub(crate) fn take(&mut self, most: u32) -> Option<(SlotIndex, u32)> {
        let fitting = self.by_length.range((most, 0)..).next();
        let &(length, start) = fitting.or_else(|| self.by_length.last())?;
        self.drop_run(start, length);
        let taken = length.min(most);
        if length > taken {
            self.add(start + taken, length - taken);
        }
        Some((SlotIndex::new(start), taken))
    }

    /// All slots, in order.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn iter(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let runs = self.by_start.iter();
        runs.flat_map(|(&start, &length)| (start..start + length).map(SlotIndex::new))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn runs(slots: &[u32]) -> Runs {
        let mut runs = Runs::default();
        for &slot in slots {
            runs.insert(SlotIndex::new(slot));
        }
        runs
    }

    fn take_all(runs: &mut Runs, n: u32) -> Vec<u32> {
        let mut slots = Vec::new();
        while let Some((start, length)) = runs.take(n - count(&slots)) {
            slots.extend(start.value()..start.value() + length);
            if count(&slots) == n {
                break;
            }
        }
        slots
    }

    fn count(slots: &[u32]) -> u32 {
        u32::try_from(slots.len()).unwrap()
    }

    #[test]
    fn neighbours_become_one_run_whatever_comes_first() {
        for order in [[3, 4, 5], [5, 4, 3], [3, 5, 4], [4, 3, 5]] {
            assert_eq!(
                runs(&order).by_length.iter().copied().collect::<Vec<_>>(),
                [(3, 3)]
            );
        }
    }

    #[test]
    fn the_shortest_run_that_is_long_enough_is_used() {
        let mut free = runs(&[0, 1, 2, 3, 10, 11, 20]);
        assert_eq!(take_all(&mut free, 2), [10, 11]);
        assert_eq!(take_all(&mut free, 1), [20]);
        assert_eq!(take_all(&mut free, 3), [0, 1, 2]);
        assert_eq!(free.iter().map(SlotIndex::value).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn without_a_run_that_is_long_enough_the_longest_ones_are_used_up() {
        let mut free = runs(&[0, 5, 6, 7, 9, 10]);
        assert_eq!(take_all(&mut free, 5), [5, 6, 7, 9, 10]);
        assert_eq!(take_all(&mut free, 5), [0]);
        assert_eq!(free.take(1), None);
    }
}

//! A queue with classes: one order inside each priority.

use std::collections::BTreeMap;

/// Groups that wait, by priority and then by a number that says who was first.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    classes: BTreeMap<i32, BTreeMap<u64, usize>>,
    len: usize,
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self {
            classes: BTreeMap::new(),
            len: 0,
        }
    }

    pub(crate) fn insert(&mut self, priority: i32, order: u64, group: usize) {
        let class = self.classes.entry(priority).or_default();
        let taken = class.insert(order, group);
        assert!(taken.is_none(), "two groups have the number {order}");
        self.len += 1;
    }

    /// Takes a group out; says whether it was there.
    pub(crate) fn remove(&mut self, priority: i32, order: u64) -> bool {
        let Some(class) = self.classes.get_mut(&priority) else {
            return false;
        };
        let found = class.remove(&order).is_some();
        if class.is_empty() {
            self.classes.remove(&priority);
        }
        self.len -= usize::from(found);
        found
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The first group of each class, the most urgent class first.
    pub(crate) fn heads(&self) -> impl Iterator<Item = usize> + '_ {
        self.classes
            .values()
            .filter_map(|class| class.values().next().copied())
    }

    /// The first few groups of each class.
    pub(crate) fn first(&self, of_each: usize) -> impl Iterator<Item = usize> + '_ {
        self.classes
            .values()
            .flat_map(move |class| class.values().copied().take(of_each))
    }

    /// All groups.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.classes
            .values()
            .flat_map(|class| class.values().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::Queue;

    #[test]
    fn classes_keep_their_own_order() {
        let mut queue = Queue::new();
        for (priority, order, group) in [(0, 5, 50), (0, 2, 20), (-1, 9, 90), (3, 1, 10)] {
            queue.insert(priority, order, group);
        }
        assert_eq!(queue.heads().collect::<Vec<_>>(), [90, 20, 10]);
        assert_eq!(queue.iter().collect::<Vec<_>>(), [90, 20, 50, 10]);
        assert_eq!(queue.first(1).count(), 3);
        assert!(queue.remove(-1, 9) && !queue.remove(-1, 9) && !queue.remove(7, 1));
        assert_eq!((queue.len(), queue.heads().next()), (3, Some(20)));
    }
}

//! Updates that wait for their instant.

use std::collections::{BTreeMap, VecDeque};

/// So many sorted runs are kept before updates go into a tree.
const RUNS_MAX: usize = 8;

/// A change of how often something is there.
pub(super) type Change<D> = (D, isize);

/// Updates by instant.
///
/// Updates mostly come in a few interleaved orders: rows as they happen, and their departures a
/// window later. Each is appended to a run that stays sorted by that; what fits none goes into a
/// tree.
pub(super) struct Agenda<D> {
    runs: Vec<VecDeque<(u64, Change<D>)>>,
    rest: BTreeMap<u64, Vec<Change<D>>>,
}

impl<D: Ord> Agenda<D> {
    pub(super) fn new() -> Self {
        Self { runs: Vec::new(), rest: BTreeMap::new() }
    }

    /// Adds an update.
    pub(super) fn add(&mut self, time: u64, data: D, difference: isize) {
        let fits = |run: &&mut VecDeque<(u64, Change<D>)>| {
            run.back().is_none_or(|&(last, _)| last <= time)
        };
        if let Some(run) = self.runs.iter_mut().find(fits) {
            run.push_back((time, (data, difference)));
        } else if self.runs.len() < RUNS_MAX {
            self.runs.push(VecDeque::from([(time, (data, difference))]));
        } else {
            self.rest.entry(time).or_default().push((data, difference));
        }
    }

    /// The earliest instant.
    pub(super) fn next(&self) -> Option<u64> {
        let runs = self.runs.iter().filter_map(|run| run.front().map(|&(time, _)| time)).min();
        match (runs, self.rest.keys().next()) {
            (Some(run), Some(&rest)) => Some(run.min(rest)),
            (run, rest) => run.or(rest.copied()),
        }
    }

    /// Moves everything of the instant `time`, the [earliest](Self::next), into `changes`, sorted,
    /// with equal data added up and what adds up to nothing left out.
    pub(super) fn take(&mut self, time: u64, changes: &mut Vec<Change<D>>) {
        changes.clear();
        for run in &mut self.runs {
            while run.front().is_some_and(|&(first, _)| first == time) {
                changes.extend(run.pop_front().map(|(_, change)| change));
            }
        }
        if let Some(rest) = self.rest.remove(&time) {
            changes.extend(rest);
        }
        consolidate(changes);
    }

    /// How many updates wait.
    #[cfg(test)]
    fn len(&self) -> usize {
        let runs: usize = self.runs.iter().map(VecDeque::len).sum();
        runs + self.rest.values().map(Vec::len).sum::<usize>()
    }
}

/// Sorts, adds up equals, and leaves out what adds up to nothing.
pub(super) fn consolidate<D: Ord>(changes: &mut Vec<Change<D>>) {
    if changes.len() > 1 {
        changes.sort_by(|left, right| left.0.cmp(&right.0));
        changes.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 += next.1;
            }
            same
        });
    }
    changes.retain(|change| change.1 != 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_come_out_by_instant_in_whatever_order_they_went_in() {
        let mut state = 7_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..200 {
            let mut agenda = Agenda::new();
            let mut plain: BTreeMap<u64, Vec<Change<u64>>> = BTreeMap::new();
            for _ in 0..next(100) {
                let (time, data, difference) = (next(30), next(4), next(3) as isize - 1);
                agenda.add(time, data, difference);
                plain.entry(time).or_default().push((data, difference));
            }
            let mut changes = Vec::new();
            for (time, mut expected) in plain {
                assert_eq!(agenda.next(), Some(time));
                agenda.take(time, &mut changes);
                consolidate(&mut expected);
                assert_eq!(changes, expected);
            }
            assert_eq!((agenda.next(), agenda.len()), (None, 0));
        }
    }
}

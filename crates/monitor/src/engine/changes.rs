//! From relations to streams.

use std::collections::BTreeMap;

use differential_dataflow::VecCollection;
use fathom_cql::ast::ToStream;
use timely::dataflow::Scope;

use super::instants::by_instant;
use super::{Entry, Tuple};

/// What of a relation is a stream. Within an instant its rows arrive in the order of [`Tuple`].
pub(super) fn to_stream<G: Scope<Timestamp = u64>>(
    relation: &VecCollection<G, Tuple, isize>,
    manner: ToStream,
) -> VecCollection<G, Entry, isize> {
    match manner {
        ToStream::Insertions => by_instant(relation, "istream", |_, changes, results| {
            let came = changes.drain(..).filter(|&(_, count)| count > 0);
            results.extend(came.map(|(row, count)| ((0, row), count)));
        }),
        ToStream::Deletions => by_instant(relation, "dstream", |_, changes, results| {
            let went = changes.drain(..).filter(|&(_, count)| count < 0);
            results.extend(went.map(|(row, count)| ((0, row), -count)));
        }),
        ToStream::Whole => {
            let mut rows: BTreeMap<Tuple, isize> = BTreeMap::new();
            by_instant(relation, "rstream", move |_, changes, results| {
                for (row, count) in changes.drain(..) {
                    add(&mut rows, row, count);
                }
                results.extend(rows.iter().map(|(row, &count)| ((0, row.clone()), count)));
            })
        }
    }
}

/// Changes how often a row is in a bag. Returns how often it was and how often it is.
pub(super) fn add(rows: &mut BTreeMap<Tuple, isize>, row: Tuple, count: isize) -> (isize, isize) {
    use std::collections::btree_map::Entry;
    match rows.entry(row) {
        Entry::Vacant(vacant) => {
            vacant.insert(count);
            (0, count)
        }
        Entry::Occupied(mut occupied) => {
            let before = *occupied.get();
            let after = before + count;
            if after == 0 {
                occupied.remove();
            } else {
                occupied.insert(after);
            }
            (before, after)
        }
    }
}

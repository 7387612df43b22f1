//! From streams to relations: windows.

use std::collections::VecDeque;

use differential_dataflow::{AsCollection, VecCollection};
use fathom_cql::plan::Window;
use hashbrown::HashMap;
use timely::dataflow::Scope;
use timely::dataflow::operators::Map;

use super::instants::by_instant;
use super::{Entry, Tuple, key};

/// The part of `stream` that is in the window, at each instant.
pub(super) fn window<G: Scope<Timestamp = u64>>(
    stream: &VecCollection<G, Entry, isize>,
    window: &Window,
) -> VecCollection<G, Tuple, isize> {
    match *window {
        Window::Unbounded => stream.map(|(_, row)| row),
        Window::Range { length_ns, slide_ns } => range(stream, length_ns, slide_ns.unwrap_or(1)),
        Window::Rows { ref by, rows } => last_rows(stream, by.clone(), rows as usize),
    }
}

/// The first multiple of `slide` at or after `time`; `None` where time ends before.
fn next_multiple(time: u64, slide: u64) -> Option<u64> {
    time.checked_next_multiple_of(slide)
}

/// By time: a row's coming and going are known when it comes.
fn range<G: Scope<Timestamp = u64>>(
    stream: &VecCollection<G, Entry, isize>,
    length: u64,
    slide: u64,
) -> VecCollection<G, Tuple, isize> {
    let changes = stream.inner.flat_map(move |((_, row), time, difference)| {
        let comes = next_multiple(time, slide);
        let goes = time.checked_add(length).and_then(|end| next_multiple(end, slide));
        let going = goes.filter(|_| goes != comes).map(|goes| (row.clone(), goes, -difference));
        let coming = comes.filter(|_| goes != comes).map(|comes| (row, comes, difference));
        coming.into_iter().chain(going)
    });
    // What leaves waits here: operators behind, joins above all, look at everything that they
    // have been given whenever an instant ends.
    by_instant(&changes.as_collection(), "range", |_, changes, results| results.append(changes))
}

/// The last rows, for each value of some columns.
fn last_rows<G: Scope<Timestamp = u64>>(
    stream: &VecCollection<G, Entry, isize>,
    by: Vec<usize>,
    rows: usize,
) -> VecCollection<G, Tuple, isize> {
    let mut windows: HashMap<Tuple, VecDeque<Tuple>> = HashMap::new();
    by_instant(stream, "rows", move |_, changes, results| {
        for ((_, row), count) in changes.drain(..) {
            // A stream only grows.
            let count = usize::try_from(count).unwrap_or(0).min(rows);
            if count == 0 {
                continue;
            }
            let window = windows.entry(key(&row, &by)).or_default();
            for _ in 0..count {
                if window.len() == rows {
                    results.extend(window.pop_front().map(|old| (old, -1)));
                }
                window.push_back(row.clone());
                results.push((row.clone(), 1));
            }
        }
    })
}

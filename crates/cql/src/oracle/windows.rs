//! Windows: from streams to relations.

use std::collections::BTreeMap;

use super::bag::Bag;
use super::{Arrival, Changing, Oracle};
use crate::plan::{Stream, Window};
use crate::value::Value;

impl Oracle {
    pub(super) fn window<'a>(&'a self, window: &'a Window, stream: &'a Stream) -> Changing<'a> {
        let arrivals = self.stream(stream);
        let times = arrivals.iter().map(|arrival| i128::from(arrival.time));
        let instants: Vec<i128> = match *window {
            Window::Unbounded | Window::Rows { .. } => times.collect(),
            Window::Range { length_ns, slide_ns } => {
                let slide = i128::from(slide_ns.unwrap_or(1));
                let length = i128::from(length_ns);
                times.flat_map(|time| [next(time, slide), next(time + length, slide)]).collect()
            }
        };
        let instants = instants.into_iter().filter_map(|instant| i64::try_from(instant).ok());
        let instants = instants.filter(|instant| *instant <= self.until).collect();
        let at = Box::new(move |instant| {
            let bag = contents(window, &arrivals, instant);
            if self.step(arrivals.len()) { bag } else { Bag::default() }
        });
        Changing { instants, at }
    }
}

/// The first multiple of the slide at or after a time.
fn next(time: i128, slide: i128) -> i128 {
    -last(-time, slide)
}

/// The last multiple of the slide at or before a time.
fn last(time: i128, slide: i128) -> i128 {
    time.div_euclid(slide.max(1)) * slide.max(1)
}

/// The contents of a window at an instant.
fn contents(window: &Window, arrivals: &[Arrival], instant: i64) -> Bag {
    let arrived = arrivals.iter().filter(|arrival| arrival.time <= instant);
    match window {
        Window::Unbounded => arrived.map(|arrival| arrival.row.clone()).collect(),
        Window::Range { length_ns, slide_ns } => {
            let end = last(i128::from(instant), i128::from(slide_ns.unwrap_or(1)));
            let start = end - i128::from(*length_ns);
            let inside = |time: i128| start < time && time <= end;
            let inside = arrived.filter(|arrival| inside(i128::from(arrival.time)));
            inside.map(|arrival| arrival.row.clone()).collect()
        }
        Window::Rows { by, rows } => {
            let mut parts: BTreeMap<Vec<Option<&Value>>, Vec<&Arrival>> = BTreeMap::new();
            for arrival in arrived {
                let key = by.iter().map(|column| arrival.row.get(*column)).collect();
                parts.entry(key).or_default().push(arrival);
            }
            let rows = usize::try_from(*rows).unwrap_or(usize::MAX);
            let last = parts.values().flat_map(|part| part.iter().rev().take(rows));
            last.map(|arrival| arrival.row.clone()).collect()
        }
    }
}

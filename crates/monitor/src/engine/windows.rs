//! Windows, which turn streams into relations.

use std::collections::VecDeque;
use std::rc::Rc;

use hashbrown::HashMap;

use super::Tuple;
use super::build::Stateful;
use super::rows::{Results, key};
use super::run::{Epoch, Run};

/// A window by time. The instants at which a row enters and leaves it are known when the row
/// arrives.
#[derive(Debug)]
pub(super) struct Range {
    length: u64,
    slide: u64,
    entering: Waiting,
    exiting: Waiting,
}

impl Range {
    /// A window of this length that moves by this slide, in nanoseconds.
    pub(super) fn new(length: u64, slide: u64) -> Self {
        Self { length, slide, entering: Waiting::default(), exiting: Waiting::default() }
    }

    /// Takes the rows that arrive in an epoch. Returns the rows that enter and leave in this epoch.
    pub(super) fn epoch(&mut self, epoch: &Epoch) -> Vec<Run> {
        let (mut entering, mut exiting) = (Vec::new(), Vec::new());
        for run in epoch.runs.iter().filter(|run| run.len() > 0) {
            self.arrive(run, &mut entering, &mut exiting);
        }
        self.entering.add(entering);
        self.exiting.add(exiting);
        let mut runs = Vec::new();
        self.entering.take(epoch.end, &mut runs);
        self.exiting.take(epoch.end, &mut runs);
        runs
    }

    fn arrive(&self, run: &Run, entering: &mut Vec<Run>, exiting: &mut Vec<Run>) {
        // An instant beyond the range of time is never reached.
        let enters = |time: u64| match self.slide {
            // The usual case needs no division.
            1 => Some(time),
            slide => time.checked_next_multiple_of(slide),
        };
        let exits = |time: u64| time.checked_add(self.length).and_then(enters);
        // A row that enters and leaves at the same instant is never in the window.
        let is_there = |row: &usize| {
            let time = run.time(*row);
            enters(time).is_some() && enters(time) != exits(time)
        };
        let run = if run.rows().all(|row| is_there(&row)) {
            run.clone()
        } else {
            let rows: Vec<u32> = run.rows().filter(is_there).map(|row| row as u32).collect();
            run.gather(&rows)
        };
        let leaves = run.times().partition_point(|&time| exits(time).is_some());
        let leaving = run.slice(run.rows().start..run.rows().start + leaves);
        exiting.push(leaving.moved(-1, |time| exits(time).unwrap_or(u64::MAX)));
        entering.push(match self.slide {
            1 => run,
            _ => run.moved(1, |time| enters(time).unwrap_or(u64::MAX)),
        });
    }
}

impl Stateful for Range {
    fn rows(&self) -> usize {
        self.exiting.0.iter().flatten().map(Run::len).sum()
    }
}

/// Runs that wait for their instants. Runs that were added together may overlap; runs that are
/// added later have later instants.
#[derive(Debug, Default)]
struct Waiting(VecDeque<Vec<Run>>);

impl Waiting {
    fn add(&mut self, mut runs: Vec<Run>) {
        runs.retain(|run| run.len() > 0);
        if !runs.is_empty() {
            self.0.push_back(runs);
        }
    }

    /// Takes the changes before an instant.
    fn take(&mut self, end: u64, taken: &mut Vec<Run>) {
        while let Some(first) = self.0.front_mut() {
            for run in &mut *first {
                let (now, later) = run.split(end);
                taken.extend(Some(now).filter(|run| run.len() > 0));
                *run = later;
            }
            first.retain(|run| run.len() > 0);
            if !first.is_empty() {
                return;
            }
            self.0.pop_front();
        }
    }
}

/// A window of the last rows of a stream, for each combination of values in some columns.
#[derive(Debug)]
pub(super) struct LastRows {
    by: Vec<usize>,
    rows: usize,
    windows: HashMap<Tuple, VecDeque<Tuple>>,
}

impl LastRows {
    pub(super) fn new(by: Vec<usize>, rows: usize) -> Self {
        Self { by, rows, windows: HashMap::new() }
    }

    /// Adds `count` copies of a row.
    pub(super) fn arrive(&mut self, row: &Tuple, count: i64, results: &mut Results) {
        // The rows of a stream are never deleted, so a count is not negative.
        let count = usize::try_from(count).unwrap_or(0).min(self.rows);
        if count == 0 {
            return;
        }
        let window = self.windows.entry(key(row, &self.by)).or_default();
        for _ in 0..count {
            if window.len() == self.rows {
                results.extend(window.pop_front().map(|old| (old, -1)));
            }
            window.push_back(Rc::clone(row));
            results.push((Rc::clone(row), 1));
        }
    }
}

impl Stateful for LastRows {
    fn rows(&self) -> usize {
        self.windows.values().map(VecDeque::len).sum()
    }
}

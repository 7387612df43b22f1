//! Groups and their aggregates, updated row by row.

use std::collections::VecDeque;
use std::rc::Rc;

use fathom_cql::Value;
use fathom_cql::plan::Aggregate;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::build::Stateful;
use super::run::{Change, Run, RunBuilder, in_order};
use super::state::AggregateState;
use crate::columns::{ColumnValues, ColumnView, hash_of};

/// A group.
#[derive(Debug)]
struct Group {
    key: Vec<Value>,
    hash: u64,
    /// The number of its rows.
    rows: i64,
    /// See [`Groups::states`].
    states: Vec<AggregateState>,
    /// The aggregates of its row in the relation; `None` if the relation has no row of the group.
    shown: Option<Vec<Value>>,
    /// Whether it was changed at this instant.
    touched: bool,
    /// Its number among the groups that were changed in this epoch.
    number: Option<u32>,
}

/// The groups of consecutive rows of some columns.
#[derive(Debug)]
struct Known {
    columns: Rc<Vec<Rc<ColumnValues>>>,
    /// The first of the rows.
    first: usize,
    places: Vec<u32>,
}

/// The groups of the combinations of keys found so far, for keys with few distinct values.
struct Combinations<'k> {
    /// For each key: the index of each row's value, and the number of values.
    keys: Vec<(&'k [u32], usize)>,
    places: Vec<Option<u32>>,
}

impl<'k> Combinations<'k> {
    /// No combinations yet; `None` if the keys may have more combinations than there are rows.
    fn of(keys: &[&'k Rc<ColumnValues>], rows: usize) -> Option<Self> {
        let mut all = 1_usize;
        let keys = keys.iter().map(|key| {
            let ColumnValues::Indexed(of, at) = &***key else { return None };
            all = all.checked_mul(of.len()).filter(|all| *all <= rows)?;
            Some((at.as_slice(), of.len()))
        });
        let keys = keys.collect::<Option<_>>()?;
        Some(Self { keys, places: vec![None; all] })
    }

    /// The group of a row, if its combination has been found before.
    fn place(&mut self, row: usize) -> &mut Option<u32> {
        let at = self.keys.iter().fold(0, |at, (values, count)| at * count + values[row] as usize);
        &mut self.places[at]
    }
}

/// Changes the count of an aggregate's value in a row. Without an argument each row counts.
#[inline]
fn change(state: &mut AggregateState, argument: Option<ColumnView<'_>>, row: usize, count: i64) {
    match argument {
        None => state.add_integer(0, count),
        Some(ColumnView::Nulls) => {}
        Some(ColumnView::Integers(integers)) => state.add_integer(integers[row], count),
        Some(ColumnView::Floats(floats)) => state.add(&Value::Float(floats[row]), count),
        Some(ColumnView::Values(values)) => state.add(&values[row], count),
        Some(ColumnView::Indexed(ColumnValues::Values(values), rows)) => {
            state.add(&values[rows[row] as usize], count);
        }
        Some(ColumnView::Indexed(of, rows)) => state.add(&of.value(rows[row] as usize), count),
    }
}

/// The groups of a relation. The relation's first columns are the keys; the others are the
/// arguments of the aggregates that have one.
#[derive(Debug)]
pub(super) struct Groups {
    keys: usize,
    /// The aggregates, each with the position of its state.
    aggregates: Vec<(Aggregate, usize)>,
    /// The states of each group: an aggregate, and the column of its argument. Several aggregates
    /// may have one state.
    states: Vec<(Aggregate, Option<usize>)>,
    hasher: DefaultHashBuilder,
    /// The places of groups in `all`, by their keys.
    table: HashTable<u32>,
    all: Vec<Group>,
    /// Free places in `all`.
    free: Vec<u32>,
    /// The groups of the rows in a window, by columns. Rows leave the window in the same columns,
    /// and their groups exist until then.
    known: VecDeque<Known>,
    /// Whether rows leave in the same columns in which they entered.
    reuses: bool,
    /// Reused memory: the group of each row of each run.
    places: Vec<Vec<u32>>,
    changes: Vec<Change>,
    touched: Vec<u32>,
    /// The groups that were changed in this epoch; and for each output row the number of its group
    /// among them.
    numbered: Vec<u32>,
    shown: Vec<u32>,
    values: Vec<Value>,
    builder: RunBuilder,
}

impl Groups {
    /// `reuses` is whether the relation is a window by time, whose rows leave in the same columns
    /// in which they entered.
    pub(super) fn new(keys: usize, aggregates: Vec<Aggregate>, reuses: bool) -> Self {
        let mut next = keys;
        let mut states: Vec<(Aggregate, Option<usize>)> = Vec::new();
        let aggregates = aggregates.into_iter().map(|aggregate| {
            let argument = aggregate.argument.as_ref().map(|_| {
                next += 1;
                next - 1
            });
            let known = states.iter().position(|(of, _)| AggregateState::is_shared(of, &aggregate));
            let state = known.unwrap_or_else(|| {
                states.push((aggregate.clone(), argument));
                states.len() - 1
            });
            (aggregate, state)
        });
        let aggregates: Vec<_> = aggregates.collect();
        Self {
            keys,
            values: aggregates.iter().map(|_| Value::Null).collect(),
            aggregates,
            states,
            hasher: DefaultHashBuilder::default(),
            table: HashTable::new(),
            all: Vec::new(),
            free: Vec::new(),
            known: VecDeque::new(),
            reuses,
            places: Vec::new(),
            changes: Vec::new(),
            touched: Vec::new(),
            numbered: Vec::new(),
            shown: Vec::new(),
            builder: RunBuilder::default(),
        }
    }

    /// Computes the changes of the groups from the inserted and deleted rows of an epoch.
    pub(super) fn epoch<'r>(&mut self, runs: &'r [Run]) -> Vec<Run> {
        if runs.iter().all(|run| run.len() == 0) {
            return Vec::new();
        }
        self.places.resize_with(runs.len().max(self.places.len()), Vec::new);
        for (number, run) in runs.iter().enumerate() {
            let mut places = std::mem::take(&mut self.places[number]);
            places.clear();
            if !self.reuse(run, &mut places) {
                self.find(run, &mut places);
                self.keep(run, &places);
            }
            self.places[number] = places;
        }
        let argument = |run: &'r Run, column| {
            run.column(column).map_or(ColumnView::Nulls, |column| ColumnView::new(column))
        };
        let arguments: Vec<Vec<_>> = runs
            .iter()
            .map(|run| self.states.iter().map(|(_, of)| of.map(|of| argument(run, of))).collect())
            .collect();
        let mut changes = std::mem::take(&mut self.changes);
        in_order(runs, &mut changes);
        for instant in changes.chunk_by(|one, next| one.time == next.time) {
            for change in instant {
                let (run, row) = (change.run as usize, change.row as usize);
                let place = self.places[run][row - runs[run].rows().start];
                self.change(place, &arguments[run], row, runs[run].count(row));
            }
            self.show(instant[0].time);
        }
        self.changes = changes;
        let result = self.result();
        self.remove_empty(runs.len());
        result.into_iter().collect()
    }

    /// Finds the groups of rows that leave the window among the kept groups. Returns whether they
    /// were found.
    fn reuse(&mut self, run: &Run, places: &mut Vec<u32>) -> bool {
        let rows = run.rows();
        if !self.reuses || rows.is_empty() || run.count(rows.start) >= 0 {
            return false;
        }
        let is = |known: &Known| Rc::ptr_eq(&known.columns, run.columns());
        // It is mostly the oldest entry.
        let Some(at) = self.known.iter().position(is) else { return false };
        let known = &self.known[at];
        let end = known.first + known.places.len();
        if rows.start < known.first || rows.end > end {
            return false;
        }
        places.extend(&known.places[rows.start - known.first..rows.end - known.first]);
        if rows.end == end {
            self.known.remove(at);
        }
        true
    }

    /// Keeps the groups of rows that enter the window.
    fn keep(&mut self, run: &Run, places: &[u32]) {
        let rows = run.rows();
        if !self.reuses || rows.is_empty() || run.count(rows.start) <= 0 {
            return;
        }
        match self.known.back_mut() {
            Some(known)
                if Rc::ptr_eq(&known.columns, run.columns())
                    && known.first + known.places.len() == rows.start =>
            {
                known.places.extend(places);
            }
            _ => {
                let (columns, places) = (Rc::clone(run.columns()), places.to_vec());
                self.known.push_back(Known { columns, first: rows.start, places });
            }
        }
    }

    /// Finds the group of each row, or adds a group without rows.
    fn find(&mut self, run: &Run, places: &mut Vec<u32>) {
        let keys: Vec<&Rc<ColumnValues>> =
            (0..self.keys).filter_map(|key| run.column(key)).collect();
        let mut met = Combinations::of(&keys, run.len());
        for row in run.rows() {
            let met = met.as_mut().map(|met| met.place(row));
            if let Some(place) = met.as_ref().and_then(|met| **met) {
                places.push(place);
                continue;
            }
            let hash = hash_of(&keys, row, &self.hasher);
            let groups = &self.all;
            let same = |&place: &u32| {
                let group = &groups[place as usize];
                group.hash == hash
                    && keys.iter().zip(&group.key).all(|(key, value)| key.is(row, value))
            };
            let place = match self.table.find(hash, same) {
                Some(place) => *place,
                None => self.add(hash, keys.iter().map(|key| key.value(row)).collect()),
            };
            if let Some(met) = met {
                *met = Some(place);
            }
            places.push(place);
        }
    }

    fn add(&mut self, hash: u64, key: Vec<Value>) -> u32 {
        let states = self.states.iter().map(|(of, _)| AggregateState::new(of)).collect();
        let group = Group { key, hash, rows: 0, states, shown: None, touched: false, number: None };
        let place = if let Some(place) = self.free.pop() {
            self.all[place as usize] = group;
            place
        } else {
            self.all.push(group);
            (self.all.len() - 1) as u32
        };
        let groups = &self.all;
        self.table.insert_unique(hash, place, |&place| groups[place as usize].hash);
        place
    }

    fn change(&mut self, place: u32, arguments: &[Option<ColumnView<'_>>], row: usize, count: i64) {
        let group = &mut self.all[place as usize];
        group.rows += count;
        for (state, argument) in group.states.iter_mut().zip(arguments) {
            change(state, *argument, row, count);
        }
        if !group.touched {
            group.touched = true;
            self.touched.push(place);
        }
    }

    /// Outputs the changes of the groups that were changed at an instant.
    fn show(&mut self, time: u64) {
        for place in self.touched.drain(..) {
            let group = &mut self.all[place as usize];
            group.touched = false;
            let number = *group.number.get_or_insert_with(|| {
                self.numbered.push(place);
                (self.numbered.len() - 1) as u32
            });
            let is = group.rows > 0;
            if is {
                for (place, (aggregate, state)) in self.values.iter_mut().zip(&self.aggregates) {
                    group.states[*state].show(aggregate, place);
                }
            }
            match &mut group.shown {
                Some(shown) if is => {
                    if *shown == self.values {
                        continue;
                    }
                    self.builder.push_replaced(time, shown, &self.values);
                    self.shown.extend([number, number]);
                    // The vectors are swapped: nothing is copied.
                    std::mem::swap(shown, &mut self.values);
                }
                Some(shown) => {
                    self.builder.push(time, -1, shown);
                    self.shown.push(number);
                    group.shown = None;
                }
                None if is => {
                    self.builder.push(time, 1, &self.values);
                    self.shown.push(number);
                    group.shown = Some(self.values.clone());
                }
                None => {}
            }
        }
    }

    /// The output: the keys, which have few distinct values, and the aggregates.
    fn result(&mut self) -> Option<Run> {
        let rows = Rc::new(std::mem::take(&mut self.shown));
        let all = &self.all;
        let keys = (0..self.keys).map(|key| {
            let of = self.numbered.iter().map(|&place| all[place as usize].key[key].clone());
            Rc::new(ColumnValues::Indexed(Rc::new(of.collect()), Rc::clone(&rows)))
        });
        let keys: Vec<_> = keys.collect();
        for place in self.numbered.drain(..) {
            self.all[place as usize].number = None;
        }
        let run = self.builder.take()?;
        let aggregates = run.columns().iter().cloned();
        Some(run.with_columns(keys.into_iter().chain(aggregates).collect()))
    }

    /// Removes groups without rows. This happens at the end of an epoch, because their places are
    /// needed until then.
    fn remove_empty(&mut self, runs: usize) {
        for places in &mut self.places[..runs] {
            for place in places.drain(..) {
                let group = &mut self.all[place as usize];
                if group.rows != 0 {
                    continue;
                }
                if let Ok(found) = self.table.find_entry(group.hash, |&other| other == place) {
                    found.remove();
                    group.key = Vec::new();
                    group.states = Vec::new();
                    self.free.push(place);
                }
            }
        }
    }
}

impl Stateful for Groups {
    fn rows(&self) -> usize {
        let values = self.all.iter().flat_map(|group| &group.states).map(AggregateState::values);
        self.table.len() + values.sum::<usize>()
    }
}

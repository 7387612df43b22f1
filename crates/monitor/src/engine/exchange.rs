//! Sends rows to the processes that need them.
//!
//! If an operator needs all rows with the same key, each process divides its rows by a hash of the
//! key, keeps its own part, and sends the other parts to their processes. A process that has
//! received an epoch from all processes merges them into one. All processes have the same epochs,
//! so each knows which epochs to wait for.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::rc::Rc;

use fathom_cql::Value;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::Scope;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::operator::Operator;

use super::build::Epochs;
use super::input::in_arrival_order;
use super::run::{Epoch, Run, RunCounts};
use crate::columns::{ColumnValues, hash_of};

/// The process to which each row of a node is sent.
#[derive(Clone, Debug)]
pub(super) enum Destination {
    /// All rows to one process.
    One(usize),
    /// All rows to one process, those of each instant in the order of their values.
    InOrder(usize),
    /// Rows that are equal in some columns to the same process.
    By(Vec<usize>),
    /// Equal rows to the same process.
    Row,
}

/// The number of this process, and the number of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) index: usize,
    pub(super) peers: usize,
}

/// A hash that is the same in every process of the same build. The standard library may change it
/// between releases, so the processes compare a [`sample`](hash_sample) of it.
type SameHasher = BuildHasherDefault<DefaultHasher>;

/// The hash of a row with values of each type. Processes with another hash would send equal rows to
/// different processes.
pub(crate) fn hash_sample() -> u64 {
    let values = [
        Value::Null,
        Value::Boolean(true),
        Value::Integer(-1),
        Value::Float(0.5),
        Value::text("text"),
    ];
    let columns = values.map(|value| Rc::new(ColumnValues::from_iter([value])));
    hash_of(&columns.each_ref(), 0, &SameHasher::default())
}

impl Member {
    /// The process that receives all rows of the node with this name.
    pub(super) fn of(self, name: &str) -> usize {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        (hasher.finish() % self.peers as u64) as usize
    }

    /// Divides a run into the rows of each process.
    fn part(self, run: &Run, place: &Destination) -> Vec<(usize, Run)> {
        let every: Vec<usize>;
        let by = match place {
            Destination::One(to) | Destination::InOrder(to) => return vec![(*to, run.clone())],
            Destination::By(by) => by,
            Destination::Row => {
                every = (0..run.columns().len()).collect();
                &every
            }
        };
        let keys: Vec<&Rc<ColumnValues>> = by.iter().filter_map(|&key| run.column(key)).collect();
        let mut rows: Vec<Vec<u32>> = vec![Vec::new(); self.peers];
        for row in run.rows() {
            let hash = hash_of(&keys, row, &SameHasher::default());
            rows[(hash % self.peers as u64) as usize].push(row as u32);
        }
        let some = rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty());
        some.map(|(to, rows)| (to, run.gather(rows))).collect()
    }
}

/// The part of an epoch that one process sends to another.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Packet {
    to: u64,
    from: u64,
    end: u64,
    runs: Vec<PackedRun>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PackedRun {
    times: Vec<u64>,
    counts: PackedCounts,
    columns: Vec<PackedColumn>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum PackedCounts {
    All(i64),
    Each(Vec<i64>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum PackedColumn {
    Nulls,
    Integers(Vec<i64>),
    Floats(Vec<f64>),
    Values(Vec<Value>),
    /// Distinct values, and for each row the index of its value.
    Indexed(Vec<Value>, Vec<u32>),
}

impl PackedRun {
    fn new(run: &Run) -> Self {
        let rows = run.rows();
        let counts = match run.counts() {
            RunCounts::All(count) => PackedCounts::All(*count),
            RunCounts::Each(counts) => PackedCounts::Each(counts[rows.clone()].to_vec()),
        };
        let columns = run.columns().iter().map(|column| PackedColumn::new(column, rows.clone()));
        Self { times: run.times().to_vec(), counts, columns: columns.collect() }
    }

    /// The run; `None` if the received data is invalid.
    fn unpack(self) -> Option<Run> {
        let rows = self.times.len();
        let counts = match self.counts {
            PackedCounts::All(count) => RunCounts::All(count),
            PackedCounts::Each(counts) if counts.len() == rows => RunCounts::Each(Rc::new(counts)),
            PackedCounts::Each(_) => return None,
        };
        let columns = self.columns.into_iter().map(|column| column.unpack(rows).map(Rc::new));
        let columns = columns.collect::<Option<Vec<_>>>()?;
        self.times.is_sorted().then(|| Run::new(self.times, counts, columns))
    }
}

impl PackedColumn {
    fn new(column: &ColumnValues, rows: std::ops::Range<usize>) -> Self {
        match column {
            ColumnValues::Nulls(_) => Self::Nulls,
            ColumnValues::Integers(integers) => Self::Integers(integers[rows].to_vec()),
            ColumnValues::Floats(floats) => Self::Floats(floats[rows].to_vec()),
            ColumnValues::Values(values) => Self::of_values(&values[rows]),
            ColumnValues::Indexed(of, at) => {
                // Only the values that occur, in the order of their first rows.
                let mut places = vec![u32::MAX; of.len()];
                let mut values = Vec::new();
                let rows = at[rows].iter().map(|&at| {
                    let place = &mut places[at as usize];
                    if *place == u32::MAX {
                        *place = values.len() as u32;
                        values.push(of.value(at as usize));
                    }
                    *place
                });
                let rows = rows.collect();
                Self::Indexed(values, rows)
            }
        }
    }

    /// Stores the distinct values and an index for each row, unless most values are distinct.
    fn of_values(values: &[Value]) -> Self {
        let mut known: HashMap<&Value, u32> = HashMap::new();
        let mut different = Vec::new();
        let mut rows = Vec::with_capacity(values.len());
        for value in values {
            rows.push(*known.entry(value).or_insert_with(|| {
                different.push(value.clone());
                (different.len() - 1) as u32
            }));
            if different.len() > 16 && different.len() * 2 > rows.len() {
                return Self::Values(values.to_vec());
            }
        }
        Self::Indexed(different, rows)
    }

    fn unpack(self, rows: usize) -> Option<ColumnValues> {
        let column = match self {
            Self::Nulls => ColumnValues::Nulls(rows),
            Self::Integers(integers) => ColumnValues::Integers(integers),
            Self::Floats(floats) => ColumnValues::Floats(floats),
            Self::Values(values) => ColumnValues::Values(values),
            Self::Indexed(values, rows) => {
                let known = values.len() as u32;
                if rows.iter().any(|&row| row >= known) {
                    return None;
                }
                ColumnValues::Indexed(Rc::new(ColumnValues::Values(values)), Rc::new(rows))
            }
        };
        (column.len() == rows).then_some(column)
    }
}

/// This process's parts of epochs, each with the capability that holds back its time.
type Held = VecDeque<(Capability<u64>, Rc<Epoch>)>;

/// Sends the rows of a node to their places. Calls `wrong` with the number of a process that sends
/// invalid data.
pub(super) fn exchange<G: Scope<Timestamp = u64>>(
    input: &Epochs<G>,
    member: Member,
    place: &Destination,
    wrong: &Rc<dyn Fn(usize)>,
) -> Epochs<G> {
    let Member { index, peers } = member;
    // The parts that the first operator has made for the second.
    let others: Rc<RefCell<VecDeque<Vec<Packet>>>> = Rc::default();
    let parted = Rc::clone(&others);
    let by = place.clone();
    let own = input.unary::<CapacityContainerBuilder<Vec<Rc<Epoch>>>, _, _, _>(
        Pipeline,
        "part",
        |_, _| {
            move |input, output| {
                input.for_each(|time, epochs| {
                    let mut session = output.session(&time);
                    for epoch in epochs.drain(..) {
                        let (own, packets) = parts(&epoch, member, &by);
                        parted.borrow_mut().push_back(packets);
                        session.give(Rc::new(own));
                    }
                });
            }
        },
    );
    // This operator runs after the previous one, once for each of its epochs.
    let packets =
        own.unary::<CapacityContainerBuilder<Vec<Packet>>, _, _, _>(Pipeline, "send", |_, _| {
            move |input, output| {
                input.for_each(|time, epochs| {
                    let mut session = output.session(&time);
                    for _ in epochs.drain(..) {
                        let packets = others.borrow_mut().pop_front();
                        packets.into_iter().flatten().for_each(|packet| session.give(packet));
                    }
                });
            }
        });
    let in_order = matches!(place, Destination::InOrder(_));
    let wrong = Rc::clone(wrong);
    let mut mine = Held::new();
    let mut theirs: Vec<VecDeque<Epoch>> = vec![VecDeque::new(); peers];
    own.binary::<_, CapacityContainerBuilder<Vec<Rc<Epoch>>>, _, _, _, _>(
        &packets,
        Pipeline,
        Exchange::new(|packet: &Packet| packet.to),
        "gather",
        |_, _| {
            move |own, packets, output| {
                own.for_each(|time, epochs| {
                    let time = time.retain();
                    mine.extend(epochs.drain(..).map(|epoch| (time.clone(), epoch)));
                });
                packets.for_each(|_, packets| {
                    for packet in packets.drain(..) {
                        let from = packet.from as usize;
                        let Some(place) = theirs.get_mut(from) else { continue };
                        let runs: Option<_> =
                            packet.runs.into_iter().map(PackedRun::unpack).collect();
                        let runs = runs.unwrap_or_else(|| {
                            wrong(from);
                            Vec::new()
                        });
                        place.push_back(Epoch { end: packet.end, runs });
                    }
                });
                let is_complete = |theirs: &[VecDeque<Epoch>]| {
                    let mut others = theirs.iter().enumerate().filter(|(of, _)| *of != index);
                    others.all(|(_, epochs)| !epochs.is_empty())
                };
                while !mine.is_empty() && is_complete(&theirs) {
                    let Some((time, own)) = mine.pop_front() else { return };
                    let mut runs = gathered(&own, &mut theirs, &wrong);
                    if in_order {
                        runs = in_arrival_order(runs, true);
                    }
                    output.session(&time).give(Rc::new(Epoch { end: own.end, runs }));
                }
            }
        },
    )
}

/// The runs of an epoch, in the order of the processes. `theirs` are the parts of the others.
fn gathered(own: &Epoch, theirs: &mut [VecDeque<Epoch>], wrong: &Rc<dyn Fn(usize)>) -> Vec<Run> {
    let mut runs = Vec::new();
    for (of, epochs) in theirs.iter_mut().enumerate() {
        match epochs.pop_front() {
            Some(epoch) if epoch.end == own.end => runs.extend(epoch.runs),
            Some(_) => wrong(of),
            None => runs.extend(own.runs.iter().cloned()),
        }
    }
    runs
}

/// This process's part of an epoch, and the packets for the others: one for each.
fn parts(epoch: &Epoch, member: Member, place: &Destination) -> (Epoch, Vec<Packet>) {
    let Member { index, peers } = member;
    let mut own = Epoch { end: epoch.end, runs: Vec::new() };
    let packet =
        |to: usize| Packet { to: to as u64, from: index as u64, end: epoch.end, runs: Vec::new() };
    let mut packets: Vec<Packet> = (0..peers).map(packet).collect();
    for run in epoch.runs.iter().filter(|run| run.len() > 0) {
        for (to, run) in member.part(run, place) {
            if to == index {
                own.runs.push(run);
            } else {
                packets[to].runs.push(PackedRun::new(&run));
            }
        }
    }
    packets.remove(index);
    (own, packets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run {
        let texts: ColumnValues = ["a", "b", "a", "c"].map(Value::text).into_iter().collect();
        let mixed: ColumnValues =
            [Value::Null, Value::Float(0.5), Value::Integer(1), Value::text("x")]
                .into_iter()
                .collect();
        let indexed = ColumnValues::Indexed(Rc::new(texts.clone()), Rc::new(vec![3, 3, 0, 1]));
        let columns = [
            ColumnValues::Integers(vec![1, 2, 3, 4]),
            texts,
            mixed,
            indexed,
            ColumnValues::Floats(vec![0.5, f64::NAN, -1.0, 0.0]),
            ColumnValues::Nulls(4),
        ];
        let columns = columns.into_iter().map(Rc::new).collect();
        Run::new(vec![1, 1, 2, 5], RunCounts::Each(Rc::new(vec![1, -1, 2, 1])), columns)
    }

    fn rows(run: &Run) -> Vec<(u64, i64, Vec<Value>)> {
        let mut row = Vec::new();
        let read = |at| {
            run.read(at, &mut row);
            (run.time(at), run.count(at), row.clone())
        };
        run.rows().map(read).collect()
    }

    #[test]
    fn packed_runs_are_unpacked_unchanged() {
        let run = run().slice(1..4);
        assert_eq!(rows(&PackedRun::new(&run).unpack().unwrap()), rows(&run));
        let bad = |change: &dyn Fn(&mut PackedRun)| {
            let mut packed = PackedRun::new(&run);
            change(&mut packed);
            assert!(packed.unpack().is_none());
        };
        bad(&|packed| packed.times.reverse());
        bad(&|packed| packed.counts = PackedCounts::Each(vec![1; 2]));
        bad(&|packed| packed.columns[0] = PackedColumn::Integers(vec![1]));
        bad(&|packed| packed.columns[1] = PackedColumn::Indexed(vec![Value::Null], vec![0, 0, 1]));
    }

    /// Equal rows go to the same process, whatever representation their columns have, and no row is
    /// lost.
    #[test]
    fn equal_rows_go_to_the_same_process() {
        let (run, member) = (run(), Member { index: 1, peers: 3 });
        let again = PackedRun::new(&run).unpack().unwrap();
        let epoch = |run: Run| Epoch { end: 9, runs: vec![run] };
        for place in [
            Destination::Row,
            Destination::By(vec![1]),
            Destination::By(vec![3, 0]),
            Destination::One(2),
        ] {
            let to = |run: Run| {
                let (own, packets) = parts(&epoch(run), member, &place);
                assert_eq!(packets.len(), 2);
                let own = own.runs.iter().flat_map(rows).map(|row| (1, row));
                let sent = packets.into_iter().flat_map(|packet| {
                    assert_eq!((packet.from, packet.end), (1, 9));
                    let runs = packet.runs.into_iter().flat_map(|run| rows(&run.unpack().unwrap()));
                    runs.map(move |row| (packet.to, row))
                });
                let mut all: Vec<_> = own.chain(sent).collect();
                all.sort_by_key(|(_, (.., row))| row.clone());
                all
            };
            let parted = to(run.clone());
            assert_eq!(parted, to(again.clone()), "{place:?}");
            let mut rows: Vec<_> = parted.into_iter().map(|(_, row)| row).collect();
            rows.sort_by_key(|(_, _, row)| row.clone());
            assert_eq!(rows, self::rows(&run));
        }
    }
}

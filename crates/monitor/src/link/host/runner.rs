//! Runs fragments over the events of a host, and passes the results to the outbox.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::plans::{Fragments, is_stream};
use super::super::rows::{RELATION_BYTES_MAX, RELATION_ROWS_MAX, RowsWriter, Tuple, row_bytes};
use super::outbox::Outbox;
use crate::read::{Batch, LAST_TIME_NS, WantedStream};
use crate::recording::{Clock, Header};
use crate::{ColumnValues, Delta, Engine, HeldLimit};

/// The advice to the centre if the fragments exceed their limit.
const REMEDY: &str =
    "ask for shorter windows or fewer groups, or raise `held_max` of [monitor] there";

/// See the module.
pub struct Runner {
    engine: Engine,
    limit: HeldLimit,
    outputs: Vec<FragmentOutput>,
    streams: Vec<StreamColumns>,
    /// The host's address.
    address: Option<i64>,
    /// The nanoseconds to add to the events' times to get the centre's time.
    unix_offset_ns: i64,
    correction_ns: i64,
    /// The last watermark: all results before it are in the outbox.
    watermark_ns: i64,
    events: u64,
    late: u64,
}

/// The columns of a stream's rows that the host fills or changes.
struct StreamColumns {
    /// The columns that hold times.
    times: Vec<usize>,
    /// The column that holds the host's address.
    ip: Option<usize>,
}

impl StreamColumns {
    fn new(WantedStream { schema, columns }: &WantedStream) -> Self {
        let header = Header::new(schema, Clock::Monotonic, 0);
        let columns = header.columns(0).iter().zip(columns).filter(|(_, wanted)| **wanted);
        let ip = columns.clone().position(|(column, _)| column.name == "IP");
        let times = columns.enumerate().filter(|(_, (column, _))| column.is_time);
        Self { times: times.map(|(at, _)| at).collect(), ip }
    }
}

/// The output of a fragment.
struct FragmentOutput {
    writer: RowsWriter,
    /// The rows of a relation with their counts; `None` for a stream.
    held: Option<BTreeMap<Tuple, i64>>,
    /// The memory that these rows take, in bytes, approximately.
    bytes: usize,
}

impl FragmentOutput {
    /// Adds a change to the output.
    fn add(&mut self, fragment: usize, delta: &Delta<'_>, outbox: &mut Outbox) {
        self.hold(delta);
        let (fragment, is_stream) = (fragment as u16, self.held.is_none());
        self.writer.add(delta.time_ns as i64, delta.row, delta.count, &mut |block, rows| {
            send(fragment, is_stream, &block, rows, outbox);
        });
    }

    fn finish(&mut self, fragment: u16, outbox: &mut Outbox) {
        if let Some((block, rows)) = self.writer.take() {
            send(fragment, self.held.is_none(), &block, rows, outbox);
        }
    }

    /// Applies a change to the rows of the relation.
    fn hold(&mut self, delta: &Delta<'_>) {
        let Some(held) = &mut self.held else { return };
        let row_bytes = row_bytes(delta.row);
        let count = held.entry(delta.row.into()).or_insert_with(|| {
            self.bytes += row_bytes;
            0
        });
        *count += delta.count;
        if *count == 0 {
            held.remove(delta.row);
            self.bytes -= row_bytes;
        }
    }
}

fn send(fragment: u16, is_stream: bool, block: &[u8], rows: u64, outbox: &mut Outbox) {
    if is_stream {
        outbox.stream(fragment, block, rows);
    } else {
        outbox.relation(fragment, block);
    }
}

impl Runner {
    /// Runs fragments over rows of the `wanted` streams. The fragments may hold at most `held_max`
    /// rows, groups and values.
    pub fn new(
        fragments: &Fragments,
        wanted: &[WantedStream],
        unix_offset_ns: i64,
        held_max: u64,
    ) -> Self {
        let output = |plan: &fathom_cql::plan::Plan| FragmentOutput {
            writer: RowsWriter::new(plan),
            held: (!is_stream(plan)).then(BTreeMap::new),
            bytes: 0,
        };
        Self {
            engine: Engine::new(wanted.len(), &fragments.plans),
            limit: HeldLimit::new(Some(held_max)),
            outputs: fragments.plans.iter().map(output).collect(),
            streams: wanted.iter().map(StreamColumns::new).collect(),
            address: None,
            unix_offset_ns,
            correction_ns: 0,
            watermark_ns: 0,
            events: 0,
            late: 0,
        }
    }

    /// Sets the correction of the clock, in nanoseconds. Time does not go back: later events that
    /// would be before the last watermark get its instant.
    pub fn correct(&mut self, correction_ns: i64) {
        self.correction_ns = correction_ns;
    }

    /// Sets the host's address in events that follow: an IPv4 address as a number, or the last 8
    /// bytes of an IPv6 address.
    pub fn set_address(&mut self, address: IpAddr) {
        self.address = Some(match address.to_canonical() {
            IpAddr::V4(address) => i64::from(u32::from(address)),
            IpAddr::V6(address) => u128::from(address) as i64,
        });
    }

    /// The fragments whose results are relations.
    pub fn relations(&self) -> impl Iterator<Item = u16> + '_ {
        let relation =
            |(at, output): (usize, &FragmentOutput)| output.held.is_some().then_some(at as u16);
        self.outputs.iter().enumerate().filter_map(relation)
    }

    fn corrected(&self, time_ns: i64) -> i64 {
        time_ns.saturating_add(self.unix_offset_ns).saturating_add(self.correction_ns)
    }

    /// Processes a batch of events.
    ///
    /// # Errors
    /// If the fragments exceed their limit.
    pub fn rows(&mut self, batch: &mut Batch) -> Result<(), String> {
        let stream = batch.stream;
        let Some(StreamColumns { times, ip }) = self.streams.get(stream) else { return Ok(()) };
        let (mut times_ns, mut columns) = batch.take();
        for time_ns in &mut times_ns {
            let corrected = self.corrected(*time_ns as i64);
            *time_ns = corrected.clamp(self.watermark_ns, LAST_TIME_NS) as u64;
        }
        for &column in times {
            if let Some(column) = columns.get_mut(column) {
                column.map_integers(|time_ns| self.corrected(time_ns));
            }
        }
        let ip = ip.and_then(|ip| columns.get_mut(ip));
        if let (Some(ip @ ColumnValues::Nulls(_)), Some(address)) = (ip, self.address) {
            *ip = ColumnValues::Integers(vec![address; times_ns.len()]);
        }
        self.events += times_ns.len() as u64;
        self.engine.push_columns(stream, times_ns, columns);
        self.check()
    }

    fn check(&mut self) -> Result<(), String> {
        let results = self.outputs.iter().filter_map(|output| output.held.as_ref());
        let results = results.map(BTreeMap::len).sum();
        let checked = self.limit.check(&self.engine, &[("the results", results)]);
        checked.map_err(|exceeded| format!("{exceeded}: {REMEDY}"))
    }

    /// Ends all instants before `time_ns`, and passes the results to the outbox.
    ///
    /// # Errors
    /// If the relations are too large, or the fragments exceed their limit.
    pub fn advance(&mut self, time_ns: i64, outbox: &mut Outbox) -> Result<(), String> {
        let time_ns = self.corrected(time_ns).clamp(0, LAST_TIME_NS);
        if time_ns <= self.watermark_ns {
            return Ok(());
        }
        let mut steps = self.limit.steps(&self.engine, time_ns as u64);
        while let Some(end_ns) = steps.next(&self.limit) {
            let outputs = &mut self.outputs;
            self.engine.advance(end_ns, &mut |delta| {
                for &fragment in delta.queries {
                    if let Some(output) = outputs.get_mut(fragment) {
                        output.add(fragment, &delta, outbox);
                    }
                }
            });
            self.check()?;
        }
        // The limits apply to all relations together, as at the centre.
        let (mut rows, mut bytes) = (0, 0);
        for (at, output) in self.outputs.iter_mut().enumerate() {
            output.finish(at as u16, outbox);
            rows += output.held.as_ref().map_or(0, BTreeMap::len);
            bytes += output.bytes;
        }
        if rows > RELATION_ROWS_MAX || bytes > RELATION_BYTES_MAX {
            return Err(format!(
                "the results have {rows} rows of {} MiB, and may have {RELATION_ROWS_MAX} of {} MiB: \
                 ask for shorter windows, fewer groups or shorter texts",
                bytes >> 20,
                RELATION_BYTES_MAX >> 20
            ));
        }
        self.check()?;
        self.watermark_ns = time_ns;
        let late = self.engine.statistics().late;
        if late > self.late {
            outbox.missed(late - self.late);
            self.late = late;
        }
        for fragment in outbox.stale() {
            self.send_whole(fragment, outbox);
        }
        outbox.watermark(time_ns, self.events);
        Ok(())
    }

    /// Sends all rows of a relation.
    fn send_whole(&mut self, fragment: u16, outbox: &mut Outbox) {
        let Some(output) = self.outputs.get_mut(usize::from(fragment)) else { return };
        let Some(held) = &output.held else { return };
        let time_ns = self.watermark_ns;
        let mut reset = true;
        let mut send = |block: &[u8]| {
            outbox.whole(fragment, reset, block);
            reset = false;
        };
        for (row, &count) in held {
            output.writer.add(time_ns, row, count, &mut |block, _| send(&block));
        }
        // An empty relation is sent as one frame without rows.
        let last = output.writer.take().map(|(block, _)| block);
        if last.is_some() || held.is_empty() {
            send(&last.unwrap_or_default());
        }
    }

    /// The number of events processed.
    pub fn events(&self) -> u64 {
        self.events
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::Value;

    use fathom_cql::ParseOptions;

    use super::super::super::frame::{FromHost, Inbox, Sender};
    use super::super::super::rows::RowsReader;
    use super::*;
    use crate::replay::Script;
    use crate::{HELD_MAX, io_stream};

    fn runner(text: &str) -> (Runner, Vec<fathom_cql::plan::Plan>) {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let schema = io_stream();
        let plans: Vec<_> = script.queries().iter().map(|query| query.plan.clone()).collect();
        let (stream, columns) = (schema.name.clone(), schema.columns.clone());
        let fragments = Fragments { stream, columns, others: Vec::new(), plans: plans.clone() };
        let wanted = [WantedStream::whole(&schema)];
        (Runner::new(&fragments, &wanted, 1000, HELD_MAX), plans)
    }

    fn event(time: i64, disk: &str) -> (i64, Vec<Value>) {
        let mut row = vec![Value::Null; io_stream().columns.len()];
        row[0] = Value::Integer(time);
        row[7] = Value::text(disk);
        (time, row)
    }

    fn push(runner: &mut Runner, events: Vec<(i64, Vec<Value>)>) {
        let mut batch = Batch::default();
        for (time_ns, row) in events {
            batch.push(time_ns, row);
        }
        runner.rows(&mut batch).unwrap();
    }

    /// Applies the frames that the outbox sends to the rows of relations, as the centre does.
    /// Returns the watermarks.
    fn receive(
        outbox: &mut Outbox,
        plans: &[fathom_cql::plan::Plan],
        held: &mut BTreeMap<Tuple, i64>,
    ) -> Vec<i64> {
        let (mut bytes, mut watermarks) = (Vec::new(), Vec::new());
        outbox.send(usize::MAX, &mut bytes);
        outbox.acknowledge(u64::MAX);
        let mut inbox = Inbox::new(Sender::Host);
        inbox.add(&bytes);
        while let Some((kind, frame)) = inbox.next().unwrap() {
            match FromHost::read(kind, frame).unwrap() {
                FromHost::Rows { fragment, reset, block, .. } => {
                    if reset {
                        held.clear();
                    }
                    if block.is_empty() {
                        continue;
                    }
                    let mut reader = RowsReader::new(&plans[usize::from(fragment)]);
                    for (_, row, count) in reader.read(block).unwrap().rows {
                        *held.entry(row).or_default() += count;
                    }
                    held.retain(|_, count| *count != 0);
                }
                FromHost::Watermark { time_ns, .. } => watermarks.push(time_ns),
                other => panic!("{other:?}"),
            }
        }
        watermarks
    }

    #[test]
    fn times_are_those_of_the_centre_and_do_not_go_back() {
        let (mut runner, plans) = runner("select BlktapTS from IOstream");
        let mut outbox = Outbox::new(1 << 20);
        runner.correct(-100);
        push(&mut runner, vec![event(50, "a")]);
        runner.advance(60, &mut outbox).unwrap();
        runner.correct(-500);
        // With the new correction this event is before the last watermark.
        push(&mut runner, vec![event(70, "a")]);
        runner.advance(80, &mut outbox).unwrap();
        runner.advance(600, &mut outbox).unwrap();
        let mut held = BTreeMap::new();
        assert_eq!(receive(&mut outbox, &plans, &mut held), [960, 1100]);
        let times: Vec<Value> = held.keys().map(|row| row[0].clone()).collect();
        assert_eq!(times, [Value::Integer(570), Value::Integer(950)]);
        assert_eq!(runner.events(), 2);
    }

    #[test]
    fn relations_are_sent_by_changes_and_as_a_whole_after_a_loss() {
        let text = "select VDisk, count(*) from IOstream [range 100 nanoseconds] group by VDisk";
        let (mut runner, plans) = runner(text);
        let mut outbox = Outbox::new(1 << 20);
        let mut held = BTreeMap::new();
        let rows = |held: &BTreeMap<Tuple, i64>| -> Vec<String> {
            let text = |(row, count): (&Tuple, &i64)| format!("{} {} {count}", row[0], row[1]);
            held.iter().map(text).collect()
        };
        push(&mut runner, vec![event(10, "a"), event(20, "b"), event(30, "b")]);
        runner.advance(40, &mut outbox).unwrap();
        assert_eq!(receive(&mut outbox, &plans, &mut held), [1040]);
        assert_eq!(rows(&held), ["a 1 1", "b 2 1"]);
        runner.advance(115, &mut outbox).unwrap();
        assert_eq!(receive(&mut outbox, &plans, &mut held), [1115]);
        assert_eq!(rows(&held), ["b 2 1"]);
        // The centre loses its rows and gets them again.
        held.clear();
        outbox.forget_relations(runner.relations().collect::<Vec<_>>());
        push(&mut runner, vec![event(120, "c")]);
        runner.advance(125, &mut outbox).unwrap();
        assert_eq!(receive(&mut outbox, &plans, &mut held), [1125]);
        assert_eq!(rows(&held), ["b 1 1", "c 1 1"]);
        outbox.forget_relations([0]);
        runner.advance(300, &mut outbox).unwrap();
        receive(&mut outbox, &plans, &mut held);
        assert_eq!(rows(&held), [""; 0]);
    }
}

//! Passes the batches of a file to an engine, and decides how long the engine waits for events that
//! come out of order.
//!
//! An engine ends the instants of one batch before it gets the next. An event of a later batch with
//! an earlier instant would come late and be dropped. The lateness of a file's events is unknown
//! until they have been read. There are three cases:
//!
//! - **A file whose rows fit into memory** is read as a whole, and its lateness is measured
//!   meanwhile. Only the rows and columns that the queries use are held.
//! - **A larger file** is read twice. The first pass measures the lateness of its times.
//! - **A pipe** cannot be read twice. The engine waits for a fixed time, and for longer after an
//!   event has come late. Late events are counted.
//!
//! If the user gives a lateness, nothing is measured.
//!
//! A given lateness, and that of a pipe, is judged row by row, so that the results do not depend on
//! where batches end: a row is late if its instant is earlier than that of a row before it by more
//! than the lateness. A file whose lateness is measured has no late rows.

use std::collections::VecDeque;
use std::path::Path;

use crate::columns::ColumnValues;
use crate::read::{self, Batch, ReadError, ReadOptions, ReadReport, Reader, WantedStream};

/// The most bytes of rows that are held to measure the lateness of a file in a single pass.
const LOOK_AHEAD_BYTES: usize = 256 << 20;
/// The most bytes of rows that may wait in the engine.
const WAITING_BYTES_MAX: usize = 2 << 30;
/// How long the engine waits for the events of a pipe, in nanoseconds.
pub(crate) const PIPE_LATENESS_NS: u64 = 1_000_000_000;

/// Some rows of a stream, by column.
pub(crate) struct Rows {
    /// The position of the stream among the wanted ones.
    pub(crate) stream: usize,
    /// The latest instant of the batch, including the rows that the reader dropped; in nanoseconds.
    pub(crate) latest_ns: u64,
    pub(crate) times_ns: Vec<u64>,
    pub(crate) columns: Vec<ColumnValues>,
    /// The latest instants of rows that the reader dropped; see [`Batch`].
    passed: Vec<(usize, i64)>,
}

impl Rows {
    /// The memory that they take, in bytes, approximately.
    fn bytes(&self) -> usize {
        let columns: usize = self.columns.iter().map(ColumnValues::bytes).sum();
        size_of::<Self>() + size_of_val(&*self.times_ns) + columns
    }
}

/// The rows that were dropped because they came late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LateRows {
    pub(crate) count: u64,
    /// The longest time by which one of them was earlier than a row before it, in nanoseconds.
    pub(crate) lateness_ns: u64,
}

/// See the module.
pub(crate) struct Feed<'r> {
    reader: Box<dyn Reader + 'r>,
    batch: Batch,
    /// The rows that were read to measure the lateness, in the order of the file.
    held: VecDeque<Rows>,
    /// The error that ended reading early. It follows the rows in `held`.
    failure: Option<ReadError>,
    lateness_ns: u64,
    /// Whether late rows are dropped here, row by row.
    judges: bool,
    /// Whether the lateness grows after an event has come late.
    grows: bool,
    /// The latest instant so far, and the first one that is not late; in nanoseconds.
    latest_ns: u64,
    first_ns: u64,
    late: LateRows,
    /// The number of rows passed on so far, and their bytes.
    given: (u64, u64),
}

impl Feed<'static> {
    /// Opens a file. The lateness is in nanoseconds; `None` means as long as the file needs.
    pub(crate) fn open(
        file: &Path,
        wanted: &[WantedStream],
        options: &ReadOptions,
        lateness_ns: Option<u64>,
    ) -> Result<Self, ReadError> {
        let is_regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        let reader = read::open_streams(file, wanted, options)?;
        let mut feed = Feed::within(reader, lateness_ns.unwrap_or(PIPE_LATENESS_NS));
        feed.grows = lateness_ns.is_none();
        if lateness_ns.is_none() && is_regular {
            (feed.judges, feed.grows) = (false, false);
            feed.lateness_ns = match feed.look_ahead(LOOK_AHEAD_BYTES) {
                Some(lateness_ns) => lateness_ns,
                None => measure(&mut *open_times(file, wanted, options)?)?,
            };
        }
        Ok(feed)
    }
}

impl<'r> Feed<'r> {
    /// The batches of a reader, with a lateness in nanoseconds.
    pub(crate) fn within(reader: Box<dyn Reader + 'r>, lateness_ns: u64) -> Self {
        Self {
            reader,
            batch: Batch::default(),
            held: VecDeque::new(),
            failure: None,
            lateness_ns,
            judges: true,
            grows: false,
            latest_ns: 0,
            first_ns: 0,
            late: LateRows::default(),
            given: (0, 0),
        }
    }

    /// Reads ahead until `bytes_max` bytes are held. Returns the lateness of the rows if the file
    /// ends before.
    fn look_ahead(&mut self, bytes_max: usize) -> Option<u64> {
        let (mut bytes, mut latest_ns, mut lateness_ns) = (0, 0, 0);
        while bytes < bytes_max {
            match self.read() {
                Ok(Some(rows)) => {
                    let first_ns = rows.times_ns.iter().min().copied().unwrap_or(latest_ns);
                    lateness_ns = lateness_ns.max(latest_ns.saturating_sub(first_ns));
                    latest_ns = latest_ns.max(rows.latest_ns);
                    bytes += rows.bytes();
                    self.held.push_back(rows);
                }
                Ok(None) => return Some(lateness_ns),
                Err(error) => {
                    self.failure = Some(error);
                    return Some(lateness_ns);
                }
            }
        }
        None
    }

    fn read(&mut self) -> Result<Option<Rows>, ReadError> {
        if !self.reader.next_batch(&mut self.batch)? {
            return Ok(None);
        }
        let latest_ns = u64::try_from(self.batch.latest_ns).unwrap_or(0);
        let (stream, passed) = (self.batch.stream, std::mem::take(&mut self.batch.passed));
        let (times_ns, columns) = self.batch.take();
        Ok(Some(Rows { stream, latest_ns, times_ns, columns, passed }))
    }

    /// The next rows, in the order of the file, without those that are late; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Rows>, ReadError> {
        let mut rows = match (self.held.pop_front(), self.failure.take()) {
            (Some(rows), failure) => {
                self.failure = failure;
                Some(rows)
            }
            (None, Some(failure)) => return Err(failure),
            (None, None) => self.read()?,
        };
        if let Some(rows) = rows.as_mut().filter(|_| self.judges) {
            self.drop_late(rows);
        }
        if let Some(rows) = &rows {
            let (count, bytes) = &mut self.given;
            *count += rows.times_ns.len() as u64;
            *bytes += rows.bytes() as u64;
        }
        Ok(rows)
    }

    /// Drops the rows that are late.
    fn drop_late(&mut self, rows: &mut Rows) {
        let mut passed = rows.passed.iter().peekable();
        let mut kept: Vec<u32> = Vec::with_capacity(rows.times_ns.len());
        for (at, &time_ns) in rows.times_ns.iter().enumerate() {
            while let Some((_, time_ns)) = passed.next_if(|(before, _)| *before <= at) {
                self.pass(u64::try_from(*time_ns).unwrap_or(0));
            }
            if time_ns >= self.first_ns {
                self.pass(time_ns);
                kept.push(at as u32);
                continue;
            }
            let lateness_ns = self.latest_ns - time_ns;
            self.late.count += 1;
            self.late.lateness_ns = self.late.lateness_ns.max(lateness_ns);
            if self.grows {
                self.lateness_ns = self.lateness_ns.max(lateness_ns);
            }
        }
        self.pass(rows.latest_ns);
        if kept.len() < rows.times_ns.len() {
            rows.times_ns = kept.iter().map(|&at| rows.times_ns[at as usize]).collect();
            rows.columns = rows.columns.iter().map(|column| column.gather(&kept)).collect();
        }
    }

    /// A row with this instant has been read.
    fn pass(&mut self, time_ns: u64) {
        self.latest_ns = self.latest_ns.max(time_ns);
        self.first_ns = self.first_ns.max(self.latest_ns.saturating_sub(self.lateness_ns));
    }

    /// The rows that were dropped so far.
    pub(crate) fn late(&self) -> LateRows {
        self.late
    }

    /// How long the engine waits for late events, in nanoseconds.
    pub(crate) fn lateness_ns(&self) -> u64 {
        self.lateness_ns
    }

    /// Checks the memory of the rows that wait in the engine. `rows` is their number.
    ///
    /// # Errors
    /// If they take too much memory.
    pub(crate) fn check_waiting(&self, rows: usize) -> Result<(), ReadError> {
        let (count, bytes) = self.given;
        let each = bytes / count.max(1);
        if (rows as u64).saturating_mul(each) <= WAITING_BYTES_MAX as u64 {
            return Ok(());
        }
        let late = span_text(self.lateness_ns);
        let gib = WAITING_BYTES_MAX >> 30;
        let message = format!(
            "events come up to {late} out of order: to put them in order takes more than {gib} GiB"
        );
        Err(ReadError::new(message).advise(
            "sort the file by its time first, or give with --limit-lateness how late an event may \
             come: events that come later are dropped and counted",
        ))
    }

    pub(crate) fn report(&self) -> &ReadReport {
        self.reader.report()
    }
}

/// A reader of a file's times only.
fn open_times(
    file: &Path,
    wanted: &[WantedStream],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    let options = ReadOptions { conditions: None, ..options.clone() };
    let times = |stream: &WantedStream| {
        WantedStream::new(&stream.schema, &vec![false; stream.columns.len()])
    };
    let times: Vec<_> = wanted.iter().map(times).collect();
    read::open_streams(file, &times, &options)
}

/// The lateness of a file, in nanoseconds: the longest time by which an event's instant is earlier
/// than that of an event before it.
fn measure(reader: &mut dyn Reader) -> Result<u64, ReadError> {
    let mut batch = Batch::default();
    let (mut latest_ns, mut lateness_ns) = (0, 0);
    while reader.next_batch(&mut batch)? {
        for &time_ns in &batch.times_ns {
            latest_ns = latest_ns.max(time_ns);
            lateness_ns = lateness_ns.max(latest_ns - time_ns);
        }
        latest_ns = latest_ns.max(batch.latest_ns);
    }
    Ok(u64::try_from(lateness_ns).unwrap_or(0))
}

/// A duration in the syntax of command options, such as `3s`, rounded up.
pub fn span_text(nanoseconds: u64) -> String {
    let units = [
        (3_600_000_000_000, "h"),
        (60_000_000_000, "min"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
    ];
    let fits = |(unit, _): &(u64, &str)| {
        nanoseconds >= 10 * unit || (nanoseconds > 0 && nanoseconds % unit == 0)
    };
    let (unit, name) = units.into_iter().find(fits).unwrap_or((1, "ns"));
    format!("{}{name}", nanoseconds.div_ceil(unit))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::io;

    use fathom_cql::generate::Generator;
    use fathom_cql::oracle::{self, InputRow};
    use fathom_cql::{ParseOptions, Row, Value, catalog};

    use super::*;
    use crate::replay::{ReplayRequest, ResultSink, Script, replay};
    use crate::write::{Form, Printer, PrinterOptions};

    /// Runs a count over a CSV file with these times. Returns the last row of the result, the
    /// number of late events and their lateness.
    fn counted(times: &[u64], lateness_ns: Option<u64>) -> (String, u64, u64) {
        let mut text = "BlktapTS,Size\n".to_owned();
        for time in times {
            let _ = writeln!(text, "{time},8");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        let request = ReplayRequest {
            script: "select count(*) as n, min(BlktapTS) as first from IOstream".into(),
            parameters: Vec::new(),
            stream_compatible: false,
            file: file.path().to_owned(),
            read: ReadOptions::default(),
            lateness_ns,
            held_max: None,
            cluster: None,
        };
        let mut printed = Vec::new();
        let options = PrinterOptions { form: Form::Csv, deltas: false };
        let mut printer = Printer::new(&mut printed, options);
        let summary = replay(&request, &mut printer).unwrap();
        printer.finish().unwrap();
        let printed = String::from_utf8(printed).unwrap();
        (printed.lines().last().unwrap().to_owned(), summary.late, summary.late_ns)
    }

    #[test]
    fn a_file_in_any_order_loses_nothing() {
        let late_one: Vec<u64> = std::iter::once(100).chain(1..=24).collect();
        assert_eq!(counted(&late_one, None), ("25,1".into(), 0, 0));
        let batches: Vec<u64> = (0..20_000).rev().collect();
        assert_eq!(counted(&batches, None), ("20000,0".into(), 0, 0));
        // Each row is in the right batch, except one that comes three batches late.
        let mut swapped: Vec<u64> = (0..20_000).map(|time| time ^ 7).collect();
        let early = swapped.remove(100);
        swapped.insert(15_000, early);
        assert_eq!(counted(&swapped, None), ("20000,0".into(), 0, 0));
        let (row, late, late_ns) = counted(&swapped, Some(100));
        assert_eq!((row.as_str(), late), ("19999,0", 1));
        assert!((12_000..15_000).contains(&late_ns), "{late_ns}");
        assert_eq!(counted(&swapped, Some(late_ns)).1, 0, "the reported lateness suffices");
    }

    #[test]
    fn a_file_that_is_not_held_is_measured() {
        let mut text = "BlktapTS,Type,Path\n".to_owned();
        for time in 0..20_000_u64 {
            let _ = writeln!(text, "{},Q,\"a\n,b\"", time ^ 255);
        }
        let script = "select count(*) from IOstream where Type = 'Q'";
        let script = Script::prepare(script, &[], ParseOptions::default()).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        let options = ReadOptions { conditions: script.conditions(), ..ReadOptions::default() };
        let open = || read::open_streams(file.path(), script.streams(), &options).unwrap();
        let mut feed = Feed::within(open(), 0);
        feed.judges = false;
        assert_eq!(feed.look_ahead(1), None, "one batch is held");
        assert_eq!(feed.held.len(), 1);
        let mut times = open_times(file.path(), script.streams(), &options).unwrap();
        assert_eq!(measure(&mut *times).unwrap(), 255);
        let mut read = 0;
        while let Some(rows) = feed.next().unwrap() {
            read += rows.times_ns.len();
        }
        assert_eq!(read, 20_000);
    }

    /// A reader that returns one of these lists of rows per batch.
    struct Batches(VecDeque<Vec<(i64, Row)>>, ReadReport);

    impl Reader for Batches {
        fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
            batch.clear();
            for (time_ns, row) in self.0.pop_front().into_iter().flatten() {
                batch.push(time_ns, row);
            }
            Ok(!batch.is_empty())
        }

        fn report(&self) -> &ReadReport {
            &self.1
        }
    }

    #[test]
    fn the_wait_for_a_pipe_grows_after_a_late_event() {
        let second = 1_000_000_000;
        let times = [vec![10], vec![9], vec![30], vec![12], vec![60], vec![45], vec![61]];
        let row = |time: &i64| (time * second, vec![Value::Integer(time * second)]);
        let times = times.map(|batch: Vec<i64>| batch.iter().map(row).collect());
        let reader = Batches(VecDeque::from(times), ReadReport::default());
        let script = Script::prepare("select BlktapTS from IOstream", &[], ParseOptions::default());
        let script = script.unwrap();
        let mut feed = Feed::within(Box::new(reader), PIPE_LATENESS_NS);
        feed.grows = true;
        let mut printed = Vec::new();
        let options = PrinterOptions { form: Form::Csv, deltas: false };
        let mut printer = Printer::new(&mut printed, options);
        let summary = script.run_feed(script.engine(), &mut feed, &mut printer).unwrap();
        printer.finish().unwrap();
        let seconds = |line: &str| line.parse::<i64>().unwrap() / second;
        let printed = String::from_utf8(printed).unwrap();
        let printed: Vec<i64> = printed.lines().skip(1).map(seconds).collect();
        // 9 is within a second of 10. 12 is late and dropped; the longer lateness that follows from
        // it keeps 45.
        assert_eq!(printed, [9, 10, 30, 45, 60, 61]);
        assert_eq!((summary.late, summary.late_ns), (1, 18 * second as u64));
    }

    #[test]
    fn the_lateness_is_judged_by_row_wherever_batches_end() {
        let late_of = |times: &[(i64, bool)], lateness: i64| {
            let (mut latest, mut late, mut kept) = (0, 0, Vec::new());
            for &(time, is_wanted) in times {
                match is_wanted {
                    true if time < latest - lateness => late += 1,
                    true => kept.push(time),
                    false => {}
                }
                latest = latest.max(time);
            }
            kept.sort_unstable();
            (kept, late)
        };
        let text = "select BlktapTS from IOstream where Type = 'Q'";
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let mut dropped = 0;
        for seed in 0..150 {
            let mut generator = Generator::new(seed);
            let (rows, spread) = (1 + generator.below(9000), 1 + generator.below(500));
            let times: Vec<(i64, bool)> = (0..rows)
                .map(|row| ((row + generator.below(spread)) as i64, generator.chance(70)))
                .collect();
            let mut file = "BlktapTS,Type\n".to_owned();
            for (time, is_wanted) in &times {
                let _ = writeln!(file, "{time},{}", if *is_wanted { "Q" } else { "R" });
            }
            let options = ReadOptions { conditions: script.conditions(), ..ReadOptions::default() };
            assert!(options.conditions.is_some(), "the reader filters rows");
            let bytes = io::Cursor::new(file.into_bytes());
            let schema = script.schema();
            let mut reader =
                read::from_bytes("test", bytes, schema, script.wanted(), &options).unwrap();
            let lateness = generator.below(spread) as i64;
            let mut printed = Vec::new();
            let form = PrinterOptions { form: Form::Csv, deltas: false };
            let mut printer = Printer::new(&mut printed, form);
            let summary = script.run(&mut *reader, lateness as u64, &mut printer).unwrap();
            printer.finish().unwrap();
            let printed = String::from_utf8(printed).unwrap();
            let printed = printed.lines().skip(1).map(|line| line.parse().unwrap()).collect();
            let expected = late_of(&times, lateness);
            assert_eq!((printed, summary.late), expected, "seed {seed}, lateness {lateness}");
            dropped += summary.late;
        }
        assert!(dropped > 1000, "{dropped}");
    }

    /// The sum of the counts of each change, by instant and row.
    #[derive(Default)]
    struct Changes(BTreeMap<(i64, Row), i64>);

    impl ResultSink for Changes {
        fn begin(&mut self, _: usize, _: &[catalog::Column], _: bool) -> io::Result<()> {
            Ok(())
        }

        fn delta(&mut self, _: usize, time: i64, count: i64, row: &[Value]) -> io::Result<()> {
            *self.0.entry((time, row.to_vec())).or_default() += count;
            Ok(())
        }
    }

    #[test]
    fn any_order_in_any_batches_gives_the_defined_results() {
        let scripts = [
            "select VDisk, sum(Size), median(Size) from IOstream [range 40 nanoseconds]
             group by VDisk",
            "select ReqId from IOstream [rows 7]",
            "create view V as select ReqId + 1 as Id from IOstream where Size > 2;
             create view W as select Id, Id * 2 as Twice from V;
             select sum(Twice), count(*) from W [rows 3]",
            "select a.ReqId, b.ReqId from IOstream [range 9 nanoseconds] as a
             left join IOstream [now] as b on a.Size = b.Size",
            "select Size from IOstream where Size > 3",
            "select VDisk, sum(Size), avg(Size), variance(Size), stddev(Size), min(Size), max(Size),
             sum(distinct Size), avg(distinct Size), sum(Size * 0.1), avg(Size * 0.1),
             max(distinct Size), variance(Size * 0.1)
             from IOstream [range 40 nanoseconds] group by VDisk",
        ];
        let (mut changes, mut late) = (0, 0);
        for seed in 0..200 {
            let mut generator = Generator::new(seed);
            let text = scripts[seed as usize % scripts.len()];
            let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
            let spread = 1 << generator.below(9);
            let mut inputs = Vec::new();
            for number in 0..generator.below(60) {
                let mut row = vec![Value::Null; script.schema().columns.len()];
                let time_ns = generator.below(spread) as i64 + number as i64;
                row[0] = Value::Integer(time_ns);
                row[3] = Value::Integer(number as i64);
                row[5] = Value::Integer(generator.below(6) as i64);
                row[7] = Value::text(["a", "b"][generator.below(2)]);
                inputs.push(InputRow { source: 0, time_ns, row, count: 1 });
            }
            let until = inputs.iter().map(|input| input.time_ns).max().unwrap_or(0);
            let mut expected = BTreeMap::new();
            for delta in oracle::run(&script.queries()[0].plan, &inputs, until) {
                expected.insert((delta.time_ns, delta.row), delta.count);
            }
            let mut batches = VecDeque::new();
            let mut rest = &inputs[..];
            while !rest.is_empty() {
                let (first, others) = rest.split_at((1 + generator.below(9)).min(rest.len()));
                batches.push_back(first.iter().map(|input| (input.time_ns, &input.row)).collect());
                rest = others;
            }
            let wanted = |row: &Row| {
                let both = row.iter().zip(script.wanted());
                both.filter(|(_, wanted)| **wanted).map(|(value, _)| value.clone()).collect()
            };
            let batches: VecDeque<Vec<(i64, Row)>> = batches
                .into_iter()
                .map(|batch: Vec<(i64, &Row)>| {
                    batch.into_iter().map(|(time_ns, row)| (time_ns, wanted(row))).collect()
                })
                .collect();
            let mut feed = Feed::within(Box::new(Batches(batches, ReadReport::default())), 0);
            feed.judges = false;
            feed.lateness_ns = feed.look_ahead(usize::MAX).unwrap();
            late += feed.lateness_ns;
            let mut results = Changes::default();
            let summary = script.run_feed(script.engine(), &mut feed, &mut results).unwrap();
            assert_eq!(summary.late, 0, "seed {seed}");
            results.0.retain(|_, count| *count != 0);
            assert_eq!(results.0, expected, "seed {seed}");
            changes += expected.len();
        }
        assert!(changes > 2000 && late > 2000, "{changes} changes, {late} ns late");
    }

    #[test]
    fn spans_are_rounded_up_as_options_take_them() {
        for (nanoseconds, text) in [
            (0, "0ns"),
            (999, "999ns"),
            (1000, "1us"),
            (1001, "1001ns"),
            (10_001, "11us"),
            (3_000_000_000, "3s"),
            (3_000_000_001, "3001ms"),
            (7_200_000_000_000, "2h"),
        ] {
            assert_eq!(span_text(nanoseconds), text);
        }
    }
}

//! The samples of a host: one each second, for all who look, and some minutes of them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{Client, DaemonInfo, DirtyRequest, Histogram, Problem, Statistics};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use crate::top::model::{Activity, DiskSample, Interval, Layer, Operation};

/// The time between two samples.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the daemon may take for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// The most samples that are kept, and the most bytes of them for all disks of a host.
const POINTS_MAX: usize = 900;
const MEMORY_MAX: usize = 64 << 20;
/// Fewer are never kept.
const POINTS_MIN: usize = 60;
/// The samples with which a list of disks begins.
const SPARK_POINTS: usize = 60;
/// The samples between two looks at the daemon itself, and at the dirty pages.
const INFO_PERIOD: u64 = 5;
/// The most problems that are sent.
const PROBLEMS_MAX: usize = 200;
/// The latencies of a column of the heat map: a row for each power of two, from this exponent of
/// nanoseconds on. The first and the last row have what is shorter or longer.
const HEAT_FIRST: u32 = 10;
const HEAT_ROWS: usize = 24;

/// The names of a point's values. Rates are those of a second; times are nanoseconds.
const COLUMNS: [&str; VALUES] = [
    "reads",
    "writes",
    "others",
    "read_bytes",
    "written_bytes",
    "depth",
    "p50",
    "p99",
    "max",
    "errors",
    "held",
    "hits",
    "dirty",
];
const VALUES: usize = 13;

/// What a disk did in one interval. What is not known is NaN.
#[derive(Clone, Copy, Debug)]
struct Point {
    values: [f32; VALUES],
    heat: [u16; HEAT_ROWS],
}

impl Point {
    fn new(activity: &Activity, latency: &Histogram) -> Self {
        let values = [
            activity.reads_per_second,
            activity.writes_per_second,
            activity.others_per_second,
            activity.read_bytes_per_second,
            activity.write_bytes_per_second,
            activity.depth,
            activity.latency_ns_p50 as f64,
            activity.latency_ns_p99 as f64,
            activity.latency_ns_max as f64,
            activity.errors as f64,
            activity.held as f64,
            activity.hit_ratio().unwrap_or(f64::NAN),
            activity.dirty_bytes.map_or(f64::NAN, |bytes| bytes as f64),
        ];
        Self { values: values.map(|value| value as f32), heat: heat(latency) }
    }

    /// The values as numbers of JSON.
    fn numbers(&self) -> Vec<Number> {
        self.values.iter().map(|value| Number(*value)).collect()
    }
}

/// The counts of a column of the heat map.
fn heat(latency: &Histogram) -> [u16; HEAT_ROWS] {
    let mut rows = [0; HEAT_ROWS];
    let mut before = 0;
    for (row, count) in rows.iter_mut().enumerate() {
        let limit = if row + 1 == HEAT_ROWS { u64::MAX } else { 2 << (HEAT_FIRST + row as u32) };
        let to = if limit == u64::MAX { latency.count() } else { latency.count_to(limit - 1) };
        *count = u16::try_from(to.saturating_sub(before)).unwrap_or(u16::MAX);
        before = to;
    }
    rows
}

/// A number with four digits, or `null`.
#[derive(Clone, Copy, Debug)]
struct Number(f32);

impl Serialize for Number {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = f64::from(self.0);
        if !value.is_finite() {
            return serializer.serialize_none();
        }
        if value.fract() == 0.0 || value.abs() >= 1000.0 {
            return serializer.serialize_i64(value.round() as i64);
        }
        serializer.serialize_f64((value * 1000.0).round() / 1000.0)
    }
}

/// The history of a disk. The last point is that of the last sample.
struct DiskHistory {
    points: VecDeque<Point>,
    last: DiskSample,
}

/// A problem of a disk, or of the daemon.
#[derive(Clone, Debug, Serialize)]
struct Found {
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<String>,
    kind: &'static str,
    message: String,
    remedy: String,
    since_unix_time_ns: u64,
}

impl Found {
    fn new(disk: Option<&str>, problem: &Problem) -> Self {
        Self {
            disk: disk.map(str::to_owned).or_else(|| problem.disk.clone()),
            kind: problem.kind.name(),
            message: problem.message.clone(),
            remedy: problem.remedy.clone(),
            since_unix_time_ns: problem.since_unix_time_ns,
        }
    }
}

/// A disk in a list.
#[derive(Serialize)]
struct Row<'h> {
    name: &'h str,
    vm: &'h str,
    capacity_bytes: u64,
    counted: bool,
    problems: usize,
    values: Vec<Number>,
    /// The last rates of requests and bytes, in the first message.
    #[serde(skip_serializing_if = "Option::is_none")]
    spark: Option<[Vec<Number>; 2]>,
}

/// All disks in one interval.
#[derive(Serialize)]
struct ListMessage<'h> {
    columns: [&'static str; VALUES],
    unix_time_ns: u64,
    seconds: f64,
    total: Vec<Number>,
    disks: Vec<Row<'h>>,
    problems: &'h [Found],
    #[serde(skip_serializing_if = "Option::is_none")]
    daemon: Option<&'h DaemonInfo>,
    /// The totals before, in the first message.
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<HistoryMessage>,
}

/// The points of a disk or of all.
#[derive(Serialize)]
struct HistoryMessage {
    times_ms: Vec<u64>,
    points: Vec<Vec<Number>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    heat: Vec<[u16; HEAT_ROWS]>,
}

/// A disk in one interval, with its history in the first message.
#[derive(Serialize)]
struct DiskMessage<'h> {
    columns: [&'static str; VALUES],
    heat_first: u32,
    unix_time_ns: u64,
    seconds: f64,
    name: &'h str,
    vm: &'h str,
    values: Vec<Number>,
    heat: [u16; HEAT_ROWS],
    operations: &'h [Operation],
    layers: &'h [Layer],
    problems: Vec<Found>,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<HistoryMessage>,
}

#[derive(Serialize)]
struct Failed<'t> {
    error: &'t str,
    remedy: &'t str,
}

/// What is known of a host.
#[derive(Default)]
struct History {
    /// The times of the samples in milliseconds since 1970, and the totals.
    times_ms: VecDeque<u64>,
    totals: VecDeque<Point>,
    seconds: f64,
    unix_time_ns: u64,
    disks: BTreeMap<String, DiskHistory>,
    problems: Vec<Found>,
    daemon: Option<DaemonInfo>,
    /// Why there is no sample now, and what to do.
    failure: Option<(String, String)>,
    /// The message of this sample for those who have the list.
    message: Arc<str>,
}

/// The latencies of the reads and writes of a disk.
fn latency(disk: &DiskSample) -> Histogram {
    let mut all = Histogram::default();
    for operation in &disk.operations {
        if matches!(operation.name.as_str(), "read" | "write") {
            all.merge(&operation.latency);
        }
    }
    all
}

impl History {
    fn points_max(&self) -> usize {
        let each = size_of::<Point>() * (self.disks.len() + 1);
        (MEMORY_MAX / each).clamp(POINTS_MIN, POINTS_MAX)
    }

    fn add(&mut self, interval: Interval) {
        let points_max = self.points_max();
        let mut all = Histogram::default();
        let mut disks = std::mem::take(&mut self.disks);
        for sample in interval.disks {
            let latency = latency(&sample);
            all.merge(&latency);
            let point = Point::new(&sample.activity, &latency);
            let mut history = disks.remove(&sample.name).unwrap_or_else(|| DiskHistory {
                points: VecDeque::new(),
                last: DiskSample::default(),
            });
            history.points.push_back(point);
            let surplus = history.points.len().saturating_sub(points_max);
            history.points.drain(..surplus);
            let name = sample.name.clone();
            history.last = sample;
            self.disks.insert(name, history);
        }
        self.totals.push_back(Point::new(&interval.total, &all));
        self.times_ms.push_back(interval.unix_time_ns / 1_000_000);
        let surplus = self.totals.len().saturating_sub(points_max);
        self.totals.drain(..surplus);
        self.times_ms.drain(..surplus);
        (self.unix_time_ns, self.seconds) = (interval.unix_time_ns, interval.seconds);
        let of_disks = self.disks.iter().flat_map(|(name, disk)| {
            disk.last.problems.iter().map(|problem| Found::new(Some(name), problem))
        });
        let of_daemon = self.daemon.iter().flat_map(|daemon| &daemon.problems);
        let of_daemon = of_daemon.map(|problem| Found::new(None, problem));
        self.problems = of_daemon.chain(of_disks).take(PROBLEMS_MAX).collect();
        self.failure = None;
        self.message = self.list(false).into();
    }

    fn fail(&mut self, error: String, remedy: String) {
        self.failure = Some((error, remedy));
        self.message = self.failed().unwrap_or_default().into();
    }

    fn failed(&self) -> Option<String> {
        let (error, remedy) = self.failure.as_ref()?;
        Some(json(&Failed { error, remedy }))
    }

    fn list(&self, is_first: bool) -> String {
        let spark = |disk: &DiskHistory| {
            let first = disk.points.len().saturating_sub(SPARK_POINTS);
            let points = disk.points.iter().skip(first);
            let requests = points.clone().map(|it| Number(it.values[..3].iter().sum())).collect();
            [requests, points.map(|it| Number(it.values[3..5].iter().sum())).collect()]
        };
        let disks = self.disks.iter().map(|(name, disk)| Row {
            name,
            vm: &disk.last.vm,
            capacity_bytes: disk.last.capacity_bytes,
            counted: disk.last.counted,
            problems: disk.last.problems.len(),
            values: disk.points.back().map(Point::numbers).unwrap_or_default(),
            spark: is_first.then(|| spark(disk)),
        });
        json(&ListMessage {
            columns: COLUMNS,
            unix_time_ns: self.unix_time_ns,
            seconds: self.seconds,
            total: self.totals.back().map(Point::numbers).unwrap_or_default(),
            disks: disks.collect(),
            problems: &self.problems,
            daemon: self.daemon.as_ref(),
            history: is_first.then(|| self.history(&self.totals, false)),
        })
    }

    fn disk(&self, name: &str, is_first: bool) -> String {
        let Some(disk) = self.disks.get(name) else {
            let error = format!("the daemon has no disk {name:?} now");
            return json(&Failed { error: &error, remedy: "" });
        };
        let last = disk.points.back();
        json(&DiskMessage {
            columns: COLUMNS,
            heat_first: HEAT_FIRST,
            unix_time_ns: self.unix_time_ns,
            seconds: self.seconds,
            name,
            vm: &disk.last.vm,
            values: last.map(Point::numbers).unwrap_or_default(),
            heat: last.map(|point| point.heat).unwrap_or_default(),
            operations: &disk.last.operations,
            layers: &disk.last.layers,
            problems: disk.last.problems.iter().map(|it| Found::new(Some(name), it)).collect(),
            history: is_first.then(|| self.history(&disk.points, true)),
        })
    }

    fn history(&self, points: &VecDeque<Point>, has_heat: bool) -> HistoryMessage {
        // A disk has no points of the time before it was there.
        let first = self.times_ms.len().saturating_sub(points.len());
        HistoryMessage {
            times_ms: self.times_ms.iter().skip(first).copied().collect(),
            points: points.iter().map(Point::numbers).collect(),
            heat: points.iter().filter(|_| has_heat).map(|point| point.heat).collect(),
        }
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// What a host does, for all who look.
pub(super) struct Feed {
    history: Mutex<History>,
    /// The number of the last sample.
    samples: watch::Sender<u64>,
}

impl Feed {
    /// Begins to take samples of a daemon, until the process ends.
    pub(super) fn start(client: Client) -> io::Result<Arc<Self>> {
        let feed = Arc::new(Self { history: Mutex::default(), samples: watch::Sender::new(0) });
        let theirs = Arc::clone(&feed);
        let client = client.with_limit(ANSWER_TIME_MAX);
        thread::Builder::new().name("samples".into()).spawn(move || theirs.run(&client))?;
        Ok(feed)
    }

    fn run(&self, client: &Client) {
        let mut before: Option<Statistics> = None;
        for number in 1_u64.. {
            let begun = Instant::now();
            match client.statistics() {
                Ok(after) => {
                    if let Some(before) = &before {
                        self.sample(client, before, &after, number);
                    }
                    before = Some(after);
                }
                Err(error) => {
                    use fathom_failure::Failing as _;
                    self.history.lock().fail(error.to_string(), error.remedy());
                    before = None;
                }
            }
            self.samples.send_replace(number);
            thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
        }
    }

    fn sample(&self, client: &Client, before: &Statistics, after: &Statistics, number: u64) {
        let mut interval = Interval::between(before, after);
        let daemon = (number % INFO_PERIOD == 2).then(|| client.daemon().ok()).flatten();
        // A daemon without guests has none.
        if let Ok(dirty) = client.dirty(None, DirtyRequest::default()) {
            interval.set_dirty(&dirty);
        }
        let mut history = self.history.lock();
        if daemon.is_some() {
            history.daemon = daemon;
        }
        history.add(interval);
    }

    /// Reports each sample from now on.
    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.samples.subscribe()
    }

    /// The message for those who have the list of disks; the first one has what was before.
    pub(super) fn list(&self, is_first: bool) -> Arc<str> {
        let history = self.history.lock();
        match history.failed() {
            Some(failed) => failed.into(),
            None if is_first => history.list(true).into(),
            None => Arc::clone(&history.message),
        }
    }

    /// The message for those who look at a disk; the first one has what was before.
    pub(super) fn disk(&self, name: &str, is_first: bool) -> String {
        let history = self.history.lock();
        history.failed().unwrap_or_else(|| history.disk(name, is_first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_one_row_of_the_heat_map() {
        let mut latency = Histogram::default();
        for value in [0, 1, 1500, 2047, 2048, 1 << 20, 1 << 33, 1 << 34, u64::MAX >> 1] {
            latency.record(value, 1);
        }
        let rows = heat(&latency);
        assert_eq!(rows.iter().map(|count| u64::from(*count)).sum::<u64>(), latency.count());
        assert_eq!((rows[0], rows[1], rows[10], rows[HEAT_ROWS - 1]), (4, 1, 1, 3));
        latency.record(2048, 1 << 20);
        assert_eq!(heat(&latency)[1], u16::MAX);
    }

    #[test]
    fn numbers_are_short_and_what_is_not_known_is_null() {
        let text = |value| json(&Number(value));
        assert_eq!(
            [text(0.0), text(12.0), text(1.23456), text(f32::NAN)],
            ["0", "12", "1.235", "null"]
        );
        assert_eq!(text(123_456.7), "123457");
    }

    fn interval(names: &[&str], reads: f64, time_s: u64) -> Interval {
        let activity = Activity { reads_per_second: reads, ..Activity::default() };
        let disk = |name: &&str| DiskSample {
            name: (*name).to_owned(),
            activity: activity.clone(),
            ..DiskSample::default()
        };
        let disks = names.iter().map(disk).collect();
        let (seconds, unix_time_ns) = (1.0, time_s * 1_000_000_000);
        Interval { unix_time_ns, seconds, total: activity.clone(), disks }
    }

    #[test]
    fn a_disk_has_the_points_since_it_was_there_and_no_more_than_are_kept() {
        let mut history = History::default();
        for second in 0..POINTS_MAX as u64 + 10 {
            history.add(interval(&["a"], second as f64, second));
        }
        history.add(interval(&["a", "<b>"], 7.0, 1000));
        let message = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let of_a = message(&history.disk("a", true));
        assert_eq!(of_a["history"]["points"].as_array().unwrap().len(), POINTS_MAX);
        assert_eq!(of_a["history"]["times_ms"][POINTS_MAX - 1], 1_000_000);
        let of_b = message(&history.disk("<b>", true));
        assert_eq!(of_b["history"]["times_ms"], serde_json::json!([1_000_000]));
        assert_eq!(of_b["values"][0], 7);
        let list = message(&history.list(true));
        assert_eq!(list["disks"][0]["name"], "<b>");
        assert_eq!(list["disks"][1]["spark"][0].as_array().unwrap().len(), SPARK_POINTS);
        assert!(message(&history.list(false))["disks"][1].get("spark").is_none());
        history.add(interval(&["a"], 1.0, 1001));
        assert!(message(&history.disk("<b>", false))["error"].is_string());
        history.fail("gone".into(), "start it".into());
        assert_eq!(message(&history.message)["remedy"], "start it");
    }

    #[test]
    fn a_thousand_disks_take_bounded_memory() {
        let mut history = History::default();
        let names: Vec<String> = (0..1000).map(|number| format!("disk-{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        history.add(interval(&names, 1.0, 1));
        assert!(history.points_max() * size_of::<Point>() * 1001 <= MEMORY_MAX);
        assert!(history.points_max() >= POINTS_MIN);
    }
}

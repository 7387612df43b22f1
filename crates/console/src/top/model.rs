//! The activity between two samples.
use std::cmp::Ordering;

use clap::ValueEnum;
use fathom_control::{
    DirtyReport, DiskStatistics, Histogram, LayerFigure, LayerFigures, Nanoseconds,
    OperationStatistics, PagerReport, Problem, Statistics,
};
use serde::Serialize;

use crate::output::{figure, short_bytes, short_number};
use crate::usage::UsageOrder;

/// An order of the disks, or of the lines of the usage page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SortKey {
    /// Requests per second, most first
    Iops,
    /// Bytes per second, most first
    Throughput,
    /// Bytes read per second, most first
    Read,
    /// Bytes written per second, most first
    Written,
    /// Requests in flight, most first
    Depth,
    /// Latency, longest first: for disks the 99th percentile, with --by the mean
    Latency,
    /// Failed requests, most first
    Errors,
    /// Dirty data of the guest, most first; with --by, as `written`
    Dirty,
    /// Name
    Name,
}

impl SortKey {
    /// All orders, in the order of the columns.
    pub const ALL: [Self; 9] = [
        Self::Name,
        Self::Iops,
        Self::Throughput,
        Self::Read,
        Self::Written,
        Self::Depth,
        Self::Latency,
        Self::Errors,
        Self::Dirty,
    ];

    /// The key's name on the screen.
    pub fn name(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Throughput => "throughput",
            Self::Read => "bytes read",
            Self::Written => "bytes written",
            Self::Depth => "depth",
            Self::Latency => "latency",
            Self::Errors => "errors",
            Self::Dirty => "dirty data",
            Self::Name => "name",
        }
    }

    /// The order `by` columns further, wrapping around.
    #[must_use]
    pub fn step(self, by: isize) -> Self {
        let position = Self::ALL.iter().position(|&key| key == self).unwrap_or(0) as isize;
        Self::ALL[(position + by).rem_euclid(Self::ALL.len() as isize) as usize]
    }

    /// Whether the order uses the values of a column.
    pub fn is_by(self, column: Self) -> bool {
        self == column || self == Self::Throughput && matches!(column, Self::Read | Self::Written)
    }

    /// The corresponding order of accounts, which have no errors and no dirty data.
    pub fn of_accounts(self) -> UsageOrder {
        match self {
            Self::Iops | Self::Errors => UsageOrder::Requests,
            Self::Throughput => UsageOrder::Throughput,
            Self::Read => UsageOrder::Read,
            Self::Written | Self::Dirty => UsageOrder::Written,
            Self::Depth => UsageOrder::Time,
            Self::Latency => UsageOrder::Latency,
            Self::Name => UsageOrder::Name,
        }
    }
}

/// All disks in one interval.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Interval {
    /// Its end, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// Its length, in seconds.
    pub seconds: f64,
    /// All disks together.
    pub total: Activity,
    /// The disks.
    pub disks: Vec<DiskSample>,
}

/// One disk in one interval.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DiskSample {
    /// Its name.
    pub name: String,
    /// The virtual machine that it belongs to.
    pub vm: String,
    /// Its size, in bytes.
    pub capacity_bytes: u64,
    /// Whether it has a tap; without one its requests are not measured.
    pub counted: bool,
    /// Its current problems.
    pub problems: Vec<Problem>,
    /// Its activity.
    #[serde(flatten)]
    pub activity: Activity,
    /// Its activity by operation.
    pub operations: Vec<Operation>,
    /// The figures of its layers, from the front end down; layers without figures are omitted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Layer>,
}

/// The figures of a layer in one interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    /// Its name.
    pub layer: String,
    /// Its figures.
    pub figures: Vec<Figure>,
}

/// A figure of a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Its name, with the unit at the end.
    pub name: String,
    /// Its value at the end of the interval, unless it is a counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<u64>,
    /// Its growth in a second, if it is a counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_second: Option<f64>,
}

impl Layer {
    fn new(layer: &LayerFigures, seconds: f64) -> Self {
        let figure = |figure: &LayerFigure| Figure {
            name: figure.name.clone(),
            value: (!figure.is_counter()).then_some(figure.value),
            per_second: figure.is_counter().then(|| figure.value as f64 / seconds),
        };
        Self { layer: layer.layer.clone(), figures: layer.figures.iter().map(figure).collect() }
    }

    /// The name and the figures as one text; `None` if all figures are 0.
    pub fn text(&self) -> Option<String> {
        let is_zero = |figure: &Figure| {
            figure.value.unwrap_or(0) == 0 && figure.per_second.is_none_or(|rate| rate <= 0.0)
        };
        if self.figures.iter().all(is_zero) {
            return None;
        }
        let figures: Vec<String> = self.figures.iter().map(Figure::text).collect();
        Some(format!("{}: {}", self.layer, figures.join(", ")))
    }
}

impl Figure {
    fn text(&self) -> String {
        match (self.value, self.per_second) {
            (Some(value), _) => figure(&self.name, value),
            (None, rate) => {
                let words = self.name.strip_suffix("_total").unwrap_or(&self.name);
                let rate = rate.unwrap_or(0.0);
                if let Some(words) = words.strip_suffix("_bytes") {
                    format!("{}/s {}", short_bytes(rate), words.replace('_', " "))
                } else if let Some(words) = words.strip_suffix("_nanoseconds") {
                    let time = Nanoseconds(rate as u64);
                    format!("{time} {} in a second", words.replace('_', " "))
                } else {
                    format!("{} {}/s", short_number(rate), words.replace('_', " "))
                }
            }
        }
    }
}

impl DiskSample {
    /// The problems of the disk, as one text; empty on a sound disk.
    pub fn problems(&self) -> String {
        let names: Vec<&str> = self.problems.iter().map(|problem| problem.kind.name()).collect();
        names.join(", ")
    }
}

/// Activity in an interval.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Activity {
    /// Reads per second.
    pub reads_per_second: f64,
    /// Writes per second.
    pub writes_per_second: f64,
    /// Other requests per second: flushes, discards, …
    pub others_per_second: f64,
    /// Bytes read per second.
    pub read_bytes_per_second: f64,
    /// Bytes written per second.
    pub write_bytes_per_second: f64,
    /// Mean number of requests in flight.
    pub depth: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// Median latency of reads and writes, in nanoseconds.
    pub latency_ns_p50: u64,
    /// Their 99th percentile, in nanoseconds.
    pub latency_ns_p99: u64,
    /// Their maximum, in nanoseconds.
    pub latency_ns_max: u64,
    /// Requests that failed in the interval.
    pub errors: u64,
    /// Requests refused in the interval.
    pub refused: u64,
    /// Requests that the layers `limit` and `schedule` hold back at the end of the interval.
    pub held: u64,
    /// Reads in the interval of which a cache reported whether it had them.
    pub cache_reads: u64,
    /// Those that it had wholly.
    pub cache_hits: u64,
    /// The dirty pages of guests for the disk at the end of the interval, in bytes. Pages of a
    /// device on several disks count for each of them, and once in the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// What the pager of the disk's guest has taken out of the guest's memory, in bytes. The memory
    /// of a guest with several disks counts for each of them, and once in the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub away_bytes: Option<u64>,
}

impl Activity {
    /// All requests per second.
    pub fn iops(&self) -> f64 {
        self.reads_per_second + self.writes_per_second + self.others_per_second
    }

    /// The share of the reads that caches had wholly, from 0 to 1; `None` if no cache was asked.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.cache_reads > 0).then(|| self.cache_hits as f64 / self.cache_reads as f64)
    }

    /// All bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.read_bytes_per_second + self.write_bytes_per_second
    }
}

/// One operation of a disk.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Operation {
    /// Its name.
    #[serde(rename = "operation")]
    pub name: String,
    /// Requests per second.
    pub per_second: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Mean number of requests in flight, of those that succeeded.
    pub depth: f64,
    /// Median latency, in nanoseconds.
    pub latency_ns_p50: u64,
    /// 99th percentile of the latency, in nanoseconds.
    pub latency_ns_p99: u64,
    /// Longest latency, in nanoseconds.
    pub latency_ns_max: u64,
    /// Failed requests.
    pub errors: u64,
    /// The distribution of the latencies.
    #[serde(skip)]
    pub latency: Histogram,
}

impl Interval {
    /// The activity between two samples. A new disk, or one whose counters have restarted, counts
    /// as idle, because the start of its counting is not known.
    pub fn between(before: &Statistics, after: &Statistics) -> Self {
        let nanoseconds = after.time_ns.saturating_sub(before.time_ns).max(1);
        let seconds = nanoseconds as f64 / 1e9;
        let mut all = Histogram::default();
        let mut total = Activity::default();
        let disks: Vec<DiskSample> = after
            .disks
            .iter()
            .map(|disk| {
                let earlier = before.disk(&disk.name).filter(|old| old.instance == disk.instance);
                let change = disk.since(earlier.unwrap_or(disk));
                let latency = latency(&change);
                all.merge(&latency);
                let row = DiskSample::new(&change, &latency, seconds);
                total.add(&row.activity);
                row
            })
            .collect();
        total.set_latency(&all);
        Self { unix_time_ns: after.unix_time_ns, seconds, total, disks }
    }

    /// Adds the guests' dirty pages.
    pub fn set_dirty(&mut self, report: &DirtyReport) {
        for disk in &mut self.disks {
            let devices = report.guests.iter().filter_map(|guest| guest.devices.as_ref()).flatten();
            let bytes = devices
                .filter(|device| device.disks.contains(&disk.name))
                .map(|device| device.dirty_bytes);
            disk.activity.dirty_bytes = bytes.reduce(u64::saturating_add);
        }
        let all = report.guests.iter().filter_map(|guest| guest.dirty_bytes);
        self.total.dirty_bytes = all.reduce(u64::saturating_add);
    }

    /// Adds what the guests' pagers have taken away.
    pub fn set_away(&mut self, report: &PagerReport) {
        let paged: Vec<_> = report
            .guests
            .iter()
            .filter_map(|guest| {
                let pager = guest.pager.as_ref().filter(|pager| !pager.has_detached())?;
                Some((&guest.disks, pager.away_bytes))
            })
            .collect();
        for disk in &mut self.disks {
            let found = paged.iter().find(|(disks, _)| disks.contains(&disk.name));
            disk.activity.away_bytes = found.map(|(_, bytes)| *bytes);
        }
        self.total.away_bytes = paged.iter().map(|(_, bytes)| *bytes).reduce(u64::saturating_add);
    }

    /// Keeps the disks whose name or machine contains the text. The total does not change.
    pub fn filter(&mut self, text: &str) {
        let text = text.to_lowercase();
        self.disks.retain(|disk| {
            disk.name.to_lowercase().contains(&text) || disk.vm.to_lowercase().contains(&text)
        });
    }

    /// Sorts the disks; equal ones by name.
    pub fn sort(&mut self, key: SortKey) {
        let value = |disk: &DiskSample| match key {
            SortKey::Iops => disk.activity.iops(),
            SortKey::Throughput => disk.activity.bytes_per_second(),
            SortKey::Read => disk.activity.read_bytes_per_second,
            SortKey::Written => disk.activity.write_bytes_per_second,
            SortKey::Depth => disk.activity.depth,
            SortKey::Latency => disk.activity.latency_ns_p99 as f64,
            SortKey::Errors => disk.activity.errors as f64,
            SortKey::Dirty => disk.activity.dirty_bytes.unwrap_or(0) as f64,
            SortKey::Name => 0.0,
        };
        self.disks.sort_by(|left, right| {
            let order = value(right).partial_cmp(&value(left)).unwrap_or(Ordering::Equal);
            order.then_with(|| left.name.cmp(&right.name))
        });
    }
}

/// The latencies of reads and writes together, for which programs wait most.
fn latency(disk: &DiskStatistics) -> Histogram {
    let mut latency = Histogram::default();
    for name in ["read", "write"] {
        if let Some(operation) = disk.operation(name) {
            latency.merge(&operation.latency);
        }
    }
    latency
}

/// The requests that a layer holds back by its own rule.
fn held(layer: &LayerFigures) -> u64 {
    let is_held = |figure: &&LayerFigure| matches!(figure.name.as_str(), "held" | "waiting");
    layer.figures.iter().filter(is_held).map(|figure| figure.value).sum()
}

/// A figure of a disk's cache; 0 without a cache.
fn of_cache(layers: &[LayerFigures], name: &str) -> u64 {
    let caches = layers.iter().filter(|layer| layer.layer == "cache");
    let figures = caches.flat_map(|layer| &layer.figures);
    figures.filter(|figure| figure.name == name).map(|figure| figure.value).sum()
}

impl DiskSample {
    fn new(change: &DiskStatistics, latency: &Histogram, seconds: f64) -> Self {
        let operations: Vec<Operation> =
            change.operations.iter().map(|operation| Operation::new(operation, seconds)).collect();
        let of = |name| operations.iter().find(|o| o.name == name);
        let rate = |name| of(name).map_or(0.0, |o| o.per_second);
        let bytes = |name| of(name).map_or(0.0, |o| o.bytes_per_second);
        let all: f64 = operations.iter().map(|operation| operation.per_second).sum();
        let mut activity = Activity {
            reads_per_second: rate("read"),
            writes_per_second: rate("write"),
            others_per_second: (all - rate("read") - rate("write")).max(0.0),
            read_bytes_per_second: bytes("read"),
            write_bytes_per_second: bytes("write"),
            depth: change.depth_ns as f64 / 1e9 / seconds,
            in_flight: change.in_flight,
            errors: operations.iter().map(|operation| operation.errors).sum(),
            refused: change.refused,
            held: change.layers.iter().map(held).sum(),
            cache_reads: of_cache(&change.layers, "reads_total"),
            cache_hits: of_cache(&change.layers, "hits_total"),
            ..Activity::default()
        };
        activity.set_latency(latency);
        Self {
            name: change.name.clone(),
            vm: change.vm.clone(),
            capacity_bytes: change.capacity_bytes,
            counted: change.counted,
            problems: change.problems.clone(),
            activity,
            operations,
            layers: change.layers.iter().map(|layer| Layer::new(layer, seconds)).collect(),
        }
    }
}

impl Operation {
    fn new(change: &OperationStatistics, seconds: f64) -> Self {
        Self {
            name: change.operation.clone(),
            per_second: change.count as f64 / seconds,
            bytes_per_second: change.bytes as f64 / seconds,
            depth: change.latency_sum_ns as f64 / 1e9 / seconds,
            latency_ns_p50: change.latency.percentile(50.0),
            latency_ns_p99: change.latency.percentile(99.0),
            latency_ns_max: change.latency.max(),
            errors: change.errors,
            latency: change.latency.clone(),
        }
    }
}

impl Activity {
    fn add(&mut self, other: &Self) {
        self.reads_per_second += other.reads_per_second;
        self.writes_per_second += other.writes_per_second;
        self.others_per_second += other.others_per_second;
        self.read_bytes_per_second += other.read_bytes_per_second;
        self.write_bytes_per_second += other.write_bytes_per_second;
        self.depth += other.depth;
        self.in_flight += other.in_flight;
        self.errors += other.errors;
        self.refused += other.refused;
        self.held += other.held;
        self.cache_reads += other.cache_reads;
        self.cache_hits += other.cache_hits;
    }

    fn set_latency(&mut self, latency: &Histogram) {
        self.latency_ns_p50 = latency.percentile(50.0);
        self.latency_ns_p99 = latency.percentile(99.0);
        self.latency_ns_max = latency.max();
    }
}

#[cfg(test)]
pub mod tests {
    use fathom_control::{DeviceDirty, GuestDirty, GuestPager, GuestPagerState, PagerGuest};

    use super::*;

    /// The sample with a log in its first disk: so many rounds, and a megabyte in use.
    pub fn with_log(mut sample: Statistics, rounds: u64) -> Statistics {
        let figure =
            |name: &str, value| LayerFigure { name: name.into(), meaning: String::new(), value };
        let figures = vec![figure("used_bytes", 1 << 20), figure("rounds_total", rounds)];
        let idle =
            LayerFigures { layer: "idle".into(), figures: vec![figure("queued_requests", 0)] };
        sample.disks[0].layers = vec![LayerFigures { layer: "wal".into(), figures }, idle];
        sample
    }

    /// The dirty pages of a guest: 3 MiB on the first disk, 1 MiB on both, and the rest elsewhere.
    pub fn dirty(disks: [&str; 2]) -> DirtyReport {
        let device = |disks: &[&str], dirty_bytes| DeviceDirty {
            disks: disks.iter().map(|disk| (*disk).to_owned()).collect(),
            dirty_bytes,
            ..DeviceDirty::default()
        };
        let guest = GuestDirty {
            dirty_bytes: Some(6 << 20),
            devices: Some(vec![device(&disks[..1], 3 << 20), device(&disks, 1 << 20)]),
            ..GuestDirty::default()
        };
        DirtyReport { guests: vec![guest, GuestDirty::default()], ..DirtyReport::default() }
    }

    /// Pagers: of a guest with both disks, of which so much is away, and of one that has detached.
    pub fn pagers(disks: [&str; 2], away_bytes: u64) -> PagerReport {
        let guest = |disks: &[&str], state, away_bytes| PagerGuest {
            disks: disks.iter().map(|disk| (*disk).to_owned()).collect(),
            pager: Some(GuestPager { state, away_bytes, ..GuestPager::default() }),
            ..PagerGuest::default()
        };
        let guests = vec![
            guest(&disks, GuestPagerState::Silent, away_bytes),
            guest(&["c"], GuestPagerState::Detached, 1 << 40),
        ];
        PagerReport { guests, ..PagerReport::default() }
    }

    /// A sample of disks with a number of reads each and twice as many writes.
    pub fn sample(time_ns: u64, disks: &[(&str, u64)]) -> Statistics {
        let operation = |name: &str, count: u64, latency_ns: u64| {
            let mut latency = Histogram::default();
            latency.record(latency_ns, count);
            OperationStatistics {
                operation: name.into(),
                count,
                bytes: count * 4096,
                latency_sum_ns: count * latency_ns,
                latency,
                ..OperationStatistics::default()
            }
        };
        let disks = disks.iter().map(|&(name, count)| DiskStatistics {
            name: name.into(),
            vm: "guest".into(),
            capacity_bytes: 10 << 30,
            instance: 1,
            counted: true,
            depth_ns: count * 20_000 + 2 * count * 100_000 + count / 10 * 3_000_000,
            operations: vec![
                operation("read", count, 20_000),
                operation("write", 2 * count, 100_000),
                operation("flush", count / 10, 3_000_000),
            ],
            ..DiskStatistics::default()
        });
        Statistics { time_ns, unix_time_ns: time_ns, disks: disks.collect() }
    }

    #[test]
    fn rates_depth_and_percentiles_are_those_of_the_interval() {
        let before = sample(1_000_000_000, &[("a", 1000), ("b", 50)]);
        let after = sample(3_000_000_000, &[("a", 3000), ("b", 50), ("new", 700)]);
        let mut interval = Interval::between(&before, &after);
        interval.sort(SortKey::Iops);
        let a = &interval.disks[0];
        assert_eq!((a.name.as_str(), interval.seconds), ("a", 2.0));
        assert!((a.activity.reads_per_second - 1000.0).abs() < 1e-6);
        assert!((a.activity.writes_per_second - 2000.0).abs() < 1e-6);
        assert!((a.activity.others_per_second - 100.0).abs() < 1e-6);
        // 1000 × 20 µs + 2000 × 100 µs + 100 × 3 ms in each second.
        assert!((a.activity.depth - 0.52).abs() < 1e-6);
        assert!((96_000..=104_000).contains(&a.activity.latency_ns_p50));
        // Earlier requests of a new disk do not count in this interval.
        let new = interval.disks.iter().find(|disk| disk.name == "new").expect("it is there");
        assert!(new.activity.iops() < 1e-9);
        assert!((interval.total.reads_per_second - 1000.0).abs() < 1e-6);
        interval.filter("NE");
        assert_eq!(interval.disks.len(), 1);
    }

    #[test]
    fn dirty_pages_count_for_each_disk_and_once_in_the_total() {
        let before = sample(1_000_000_000, &[("a", 1000), ("b", 50), ("c", 50)]);
        let mut interval = Interval::between(&before, &before);
        interval.set_dirty(&dirty(["b", "a"]));
        let all: Vec<_> = interval.disks.iter().map(|disk| disk.activity.dirty_bytes).collect();
        assert_eq!(all, [Some(1 << 20), Some(4 << 20), None]);
        assert_eq!(interval.total.dirty_bytes, Some(6 << 20));
        interval.sort(SortKey::Dirty);
        assert_eq!(interval.disks[0].name, "b");
        interval.set_dirty(&DirtyReport::default());
        assert_eq!(
            (interval.total.dirty_bytes, interval.disks[0].activity.dirty_bytes),
            (None, None)
        );
    }

    #[test]
    fn memory_that_is_away_counts_for_each_disk_and_once_in_the_total() {
        let before = sample(1_000_000_000, &[("a", 1000), ("b", 50), ("c", 50)]);
        let mut interval = Interval::between(&before, &before);
        interval.set_away(&pagers(["b", "a"], 3 << 20));
        let of = |interval: &Interval| -> Vec<_> {
            interval.disks.iter().map(|disk| disk.activity.away_bytes).collect()
        };
        assert_eq!(of(&interval), [Some(3 << 20), Some(3 << 20), None]);
        assert_eq!(interval.total.away_bytes, Some(3 << 20));
        // Nothing that a pager stores overflows.
        let mut report = pagers(["b", "a"], u64::MAX);
        report.guests.extend(pagers(["x", "c"], 2).guests);
        interval.set_away(&report);
        assert_eq!(of(&interval), [Some(u64::MAX), Some(u64::MAX), Some(2)]);
        assert_eq!(interval.total.away_bytes, Some(u64::MAX));
        interval.set_away(&PagerReport::default());
        assert_eq!((of(&interval), interval.total.away_bytes), (vec![None; 3], None));
    }

    #[test]
    fn requests_that_layers_hold_back_are_counted() {
        let mut after = sample(1_000_000_000, &[("a", 1000), ("b", 50)]);
        let layer = |layer: &str, figures: &[(&str, u64)]| LayerFigures {
            layer: layer.into(),
            figures: figures
                .iter()
                .map(|&(name, value)| LayerFigure {
                    name: name.into(),
                    meaning: String::new(),
                    value,
                })
                .collect(),
        };
        after.disks[0].layers = vec![
            layer("limit", &[("waiting", 3), ("held_total", 100)]),
            layer("schedule", &[("held", 20), ("held_bytes", 9999), ("waiting", 1)]),
        ];
        let interval = Interval::between(&after, &after);
        assert_eq!((interval.disks[0].activity.held, interval.disks[1].activity.held), (24, 0));
        assert_eq!(interval.total.held, 24);
        let figure = Figure {
            name: "held_nanoseconds_total".into(),
            value: None,
            per_second: Some(15_900_000_000.0),
        };
        assert_eq!(figure.text(), "15.9 s held in a second");
    }

    #[test]
    fn sort_keys_wrap_around() {
        for key in SortKey::ALL {
            assert_eq!(key.step(1).step(-1), key);
            assert_eq!(key.step(SortKey::ALL.len() as isize), key);
        }
    }
}

//! A line of grouped accounts.
use std::collections::BTreeMap;

use fathom_control::{UsageCount, UsageCounts, UsageRow};
use serde::Serialize;

use super::group::{FLUSHES, FOLDED, Scope, container_name, requests};

/// All accounts with the same key.
#[derive(Clone, Debug, Default)]
pub struct UsageEntry {
    /// The key of the line.
    pub key: Scope,
    /// Its name.
    pub name: String,
    /// Its machines.
    pub machine: Mix,
    /// Its disks.
    pub disk: Mix,
    /// Its control groups.
    pub container: Mix,
    /// Its known processes.
    pub process: Mix,
    /// Its process and the process's number, if only one is known.
    pub only_process: Option<(String, u64)>,
    /// Its kinds of data.
    pub kind: Mix,
    /// The guest's devices.
    pub device: Mix,
    /// The file with the most requests.
    pub hottest: Option<String>,
    /// The file, if the line is grouped by file.
    pub file: Option<Object>,
    /// Its requests.
    pub counts: UsageCounts,
}

/// The properties of a file, or of data without a file.
#[derive(Clone, Debug, Default)]
pub struct Object {
    /// Its path; empty if it has none.
    pub path: String,
    /// The type of its file system.
    pub file_system: String,
    /// Its inode number.
    pub inode: u64,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// Its owner, a user ID of the guest.
    pub owner: u64,
    /// Its database system; empty if it has none.
    pub database_system: String,
    /// The part of its database with the most requests.
    pub database_part: String,
    /// The number of this table or index.
    pub database_index: u64,
}

impl Object {
    /// The object of a row.
    pub fn of(row: &UsageRow) -> Self {
        Self {
            path: row.path.clone(),
            file_system: row.file_system.clone(),
            inode: row.inode,
            size_bytes: row.file_size_bytes,
            owner: row.owner,
            database_system: row.database_system.clone(),
            database_part: row.database_part.clone(),
            database_index: row.database_index,
        }
    }

    /// Whether it is a single file, not a journal or the like.
    pub fn is_file(&self) -> bool {
        !self.path.is_empty() || self.inode != 0
    }
}

/// The parts of a line by name, with the number of their requests, the largest first.
#[derive(Clone, Debug, Default)]
pub struct Mix(Vec<(String, u64)>);

impl Mix {
    /// The parts in a map.
    pub fn of<K>(map: &BTreeMap<K, u64>, text: impl Fn(&K) -> String) -> Self {
        // Idle parts are omitted, unless all parts are idle.
        let idle = map.values().all(|requests| *requests == 0);
        let mut parts: Vec<(String, u64)> = map
            .iter()
            .filter(|(_, requests)| idle || **requests > 0)
            .map(|(key, requests)| (text(key), *requests))
            .collect();
        parts.sort_by_key(|part| std::cmp::Reverse(part.1));
        Self(parts)
    }

    /// The only part; `None` if there are several or none.
    pub fn only(&self) -> Option<&str> {
        if let [(text, _)] = &self.0[..] { Some(text) } else { None }
    }

    /// The largest part, and the number of other parts: `/web +2`.
    pub fn text(&self, name: impl Fn(&str) -> String) -> String {
        match &self.0[..] {
            [] => String::new(),
            [(text, _)] => name(text),
            [(text, _), rest @ ..] => format!("{} +{}", name(text), rest.len()),
        }
    }

    /// The shares of the parts in the requests: `/web 80 %, / 20 %`.
    pub fn shares(&self, name: impl Fn(&str) -> String) -> String {
        let total: u64 = self.0.iter().map(|part| part.1).sum();
        let share = |(text, requests): &(String, u64)| {
            if self.0.len() == 1 || total == 0 {
                name(text)
            } else {
                format!("{} {:.0} %", name(text), *requests as f64 / total as f64 * 100.0)
            }
        };
        self.0.iter().map(share).collect::<Vec<_>>().join(", ")
    }

    fn contains(&self, text: &str) -> bool {
        self.0.iter().any(|part| part.0.to_lowercase().contains(text))
    }
}

impl UsageEntry {
    /// Whether a lower-case text occurs in any of the names.
    pub fn contains(&self, text: &str) -> bool {
        self.name.to_lowercase().contains(text)
            || self.key.container.as_ref().is_some_and(|name| name.to_lowercase().contains(text))
            || [&self.machine, &self.disk, &self.container, &self.process, &self.kind, &self.device]
                .iter()
                .any(|mix| mix.contains(text))
    }

    /// The number of requests.
    pub fn requests(&self) -> u64 {
        requests(&self.counts)
    }

    /// The sum of the requests' latencies, in nanoseconds.
    pub fn time_ns(&self) -> u64 {
        let UsageCounts { read, write, flush, other } = &self.counts;
        read.latency_sum_ns
            .saturating_add(write.latency_sum_ns)
            .saturating_add(flush.latency_sum_ns)
            .saturating_add(other.latency_sum_ns)
    }

    /// The mean latency, in nanoseconds.
    pub fn latency_mean_ns(&self) -> u64 {
        self.time_ns().checked_div(self.requests()).unwrap_or(0)
    }

    /// The 99th percentile of the latency, in nanoseconds; an upper bound.
    pub fn latency_p99_ns(&self) -> u64 {
        percentile(&self.counts.sum(), 99.0)
    }

    /// The container's name; empty if it is not known.
    pub fn container_text(&self) -> String {
        match self.container.only() {
            Some("" | FLUSHES | FOLDED) => String::new(),
            _ => self.container.text(container_name),
        }
    }

    /// All values, for JSON.
    pub fn line(&self, seconds: f64) -> Line<'_> {
        let only = |mix: &Mix| mix.only().filter(|text| !text.is_empty()).map(str::to_owned);
        let process = self.only_process.as_ref();
        let is_known = |text: &str| !text.is_empty() && text != "unknown";
        let text = |text: &str| is_known(text).then(|| text.to_owned());
        let number = |number: u64| (number != 0).then_some(number);
        let file = self.file.as_ref();
        // A file may have several parts.
        let part = file.filter(|_| self.key.database.is_some());
        let some = |count: &UsageCount| (!count.is_empty()).then(|| Numbers::of(count, seconds));
        Line {
            name: &self.name,
            machine: only(&self.machine),
            disk: only(&self.disk),
            container: only(&self.container).filter(|text| text.starts_with('/')),
            process: process.and_then(|process| text(&process.0)),
            process_id: process.and_then(|process| number(process.1)),
            kind: only(&self.kind),
            device: only(&self.device),
            file_system: file.and_then(|file| text(&file.file_system)),
            path: file.and_then(|file| text(&file.path)),
            inode: file.and_then(|file| number(file.inode)),
            file_size_bytes: file.and_then(|file| number(file.size_bytes)),
            owner: file.filter(|file| file.is_file()).map(|file| file.owner),
            database_system: file.and_then(|file| text(&file.database_system)),
            database_part: part.and_then(|file| text(&file.database_part)),
            database_index: part.and_then(|file| number(file.database_index)),
            hottest_file: self.hottest.as_deref(),
            all: Numbers::of(&self.counts.sum(), seconds),
            read: some(&self.counts.read),
            write: some(&self.counts.write),
            flush: some(&self.counts.flush),
            other: some(&self.counts.other),
        }
    }
}

/// The end of the bucket of a latency; a bucket is a power of two.
fn step_end(latency_ns: u64) -> u64 {
    match latency_ns {
        0 => 0,
        latency_ns => latency_ns.checked_next_power_of_two().unwrap_or(u64::MAX),
    }
}

/// The longest latency, in nanoseconds; an upper bound. If the maximum of an interval is known only
/// to its bucket, the report has the bucket's middle, and this is the bucket's end.
pub fn longest(count: &UsageCount) -> u64 {
    match count.latency_max_ns {
        max if max == count.latency.max() => step_end(max),
        max => max,
    }
}

/// A percentile of the latencies, in nanoseconds; an upper bound. This is the end of a bucket,
/// unless the longest latency is shorter.
pub fn percentile(count: &UsageCount, percent: f64) -> u64 {
    let mean = count.latency_sum_ns.checked_div(count.requests).unwrap_or(0);
    step_end(count.latency.percentile(percent)).min(longest(count).max(mean))
}

/// A line for JSON. Values that are unknown or differ within the line are omitted.
#[derive(Serialize)]
pub struct Line<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_system: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inode: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_size_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database_system: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database_part: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database_index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hottest_file: Option<&'a str>,
    #[serde(flatten)]
    all: Numbers,
    #[serde(skip_serializing_if = "Option::is_none")]
    read: Option<Numbers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write: Option<Numbers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flush: Option<Numbers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    other: Option<Numbers>,
}

/// Counts and latencies of requests, for JSON.
#[derive(Serialize)]
pub struct Numbers {
    requests: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<f64>,
    latency_ns_mean: u64,
    latency_ns_p50: u64,
    latency_ns_p99: u64,
    latency_ns_max: u64,
    /// The share of the requests that a cache had wholly.
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio: Option<f64>,
}

impl Numbers {
    /// The numbers of a count; rates only if `seconds` is not 0.
    pub fn of(count: &UsageCount, seconds: f64) -> Self {
        let rate = |number: u64| (seconds > 0.0).then(|| number as f64 / seconds);
        Self {
            requests: count.requests,
            bytes: count.bytes,
            per_second: rate(count.requests),
            bytes_per_second: rate(count.bytes),
            latency_ns_mean: count.latency_sum_ns.checked_div(count.requests).unwrap_or(0),
            latency_ns_p50: percentile(count, 50.0),
            latency_ns_p99: percentile(count, 99.0),
            latency_ns_max: longest(count),
            hit_ratio: count.hit_ratio(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_neither_below_the_truth_nor_above_the_longest() {
        let count = |latencies: &[u64]| {
            let mut count = UsageCount::default();
            for latency in latencies {
                count.requests += 1;
                count.latency_sum_ns += latency;
                count.latency_max_ns = count.latency_max_ns.max(*latency);
                // The daemon counts the middle of a bucket.
                count.latency.record(3 << (latency.ilog2() - 1), 1);
            }
            count
        };
        assert_eq!(percentile(&count(&[250, 250]), 99.0), 250);
        assert_eq!(percentile(&count(&[130, 250, 1000]), 50.0), 256);
        assert_eq!(percentile(&count(&[]), 99.0), 0);
        let mut vague = count(&[130, 250]);
        vague.latency_max_ns = vague.latency.max();
        assert_eq!((percentile(&vague, 99.0), longest(&vague)), (256, 256));
        assert_eq!(longest(&count(&[130, 250])), 250);
    }

    #[test]
    fn parts_are_reported_the_largest_first() {
        let mut map = BTreeMap::from([("a", 1), ("b", 3)]);
        let name = |text: &str| text.to_uppercase();
        let mix = Mix::of(&map, |text| (*text).to_owned());
        assert_eq!((mix.text(name).as_str(), mix.only()), ("B +1", None));
        assert_eq!(mix.shares(name), "B 75 %, A 25 %");
        map.insert("b", 0);
        let mix = Mix::of(&map, |text| (*text).to_owned());
        assert_eq!((mix.shares(name).as_str(), mix.only()), ("A", Some("a")));
    }
}

//! `fathom cache top`: what caches do, live.
use std::{
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use fathom_control::{
    Bytes, CacheClass, CacheCounts, CacheDisk, CacheEstimate, CacheInfo, CacheReport, Client,
    ClientError, ESTIMATES, Nanoseconds,
};
use serde::Serialize;

use super::{gain, hits, shares};
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{
        self, Format, latency, short_bytes, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
        time::clock,
    },
    top::interval,
};

/// Options of `fathom cache top`.
#[derive(Debug, Args)]
#[command(after_help = "\
A table for each interval, with a line for each disk with a cache. HIT is the share of the reads that the
cache had wholly in the interval, and ALL since the disk got its cache. SAVED are the bytes per second that
were not read from the disk beneath, and TIME is the time that this saved in each second, as estimated
from reads there. -50 % to +100 % is the change of the hit ratio, in percentage points, that a cache of
that much more or less would bring: from the miss-ratio curve of the last one to two hours. CLASSES
are those with most of the reads.

Examples:
  fathom cache top
  fathom cache top --interval 5s --count 12
  fathom cache top --once                the sums since the disks got their caches
  fathom cache top --json --once | jq '.caches[].disks[] | {name, hit_ratio, sizes}'")]
pub struct TopOptions {
    /// Time between two samples
    #[arg(long, short, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Nanoseconds,
    /// End after this number of intervals
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// Print the sums since the disks got their caches, and end
    #[arg(long, conflicts_with = "count")]
    once: bool,
    /// Show only this disk
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// An interval, as printed with `--json`.
#[derive(Serialize)]
struct Interval {
    /// Its end, in nanoseconds since 1970.
    unix_time_ns: u64,
    /// Its length, in seconds; 0 for the sums since the start.
    seconds: f64,
    caches: Vec<Cache>,
}

#[derive(Serialize)]
struct Cache {
    name: String,
    size_bytes: u64,
    used_bytes: u64,
    policy: String,
    /// Blocks put into the cache, and removed to make room, in the interval.
    insertions: u64,
    evictions: u64,
    disks: Vec<Disk>,
}

#[derive(Serialize)]
struct Disk {
    name: String,
    used_bytes: u64,
    /// The counts of the interval.
    counts: CacheCounts,
    hit_ratio: Option<f64>,
    /// The hit ratio since the disk got its cache.
    hit_ratio_all: Option<f64>,
    /// The time saved in the interval, in nanoseconds.
    saved_ns: u64,
    /// The counts of the interval by class.
    classes: Vec<CacheClass>,
    /// The hit ratio of an LRU cache of the present size, and of others.
    sizes: Vec<Estimate>,
    #[serde(skip)]
    gains: [String; 4],
}

#[derive(Serialize)]
struct Estimate {
    percent: u64,
    size_bytes: u64,
    hit_ratio: f64,
}

/// Carries out the command.
pub fn run(options: &TopOptions) -> CommandResult {
    let client = options.control.client().with_limit(Duration::from_secs(5));
    let first = sample(options, &client)?;
    if options.once {
        return print(options, &Interval::between(&CacheReport::default(), &first));
    }
    let pause = Duration::from_nanos(options.interval.0);
    let mut before = first;
    let mut next = Instant::now() + pause;
    let mut printed = 0;
    while options.count.is_none_or(|count| printed < count) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next = (next + pause).max(Instant::now());
        let after = sample(options, &client)?;
        print(options, &Interval::between(&before, &after))?;
        before = after;
        printed += 1;
    }
    Ok(())
}

fn sample(options: &TopOptions, client: &Client) -> CommandResult<CacheReport> {
    let report = match client.caches(options.disk.as_deref(), 0, 0) {
        Ok(report) => report,
        Err(error @ ClientError::Refused(_)) => return Err(error.into()),
        Err(error) => {
            return Err(Failure::from(error).about("lost the daemon"));
        }
    };
    match (&options.disk, report.caches.is_empty()) {
        (Some(disk), true) => Err(super::info::no_cache(disk)),
        (None, true) => Err(Failure::new("no disk has a cache")
            .advise("add the layer `cache` to a disk; docs/cache.md shows how")),
        _ => Ok(report),
    }
}

fn print(options: &TopOptions, interval: &Interval) -> CommandResult {
    if options.format.json {
        let text = serde_json::to_string(interval)
            .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
        return output::text_line(&text);
    }
    let text = interval.text(output::width(), Style::stdout());
    output::text_line(&if options.once { text } else { text + "\n" })
}

impl Interval {
    /// The interval between two samples; all counts of `after` if `before` is empty.
    fn between(before: &CacheReport, after: &CacheReport) -> Self {
        let seconds = match before.time_ns {
            0 => 0.0,
            time_ns => after.time_ns.saturating_sub(time_ns) as f64 / 1e9,
        };
        let cache = |info: &CacheInfo| {
            let old = before.caches.iter().find(|other| other.name == info.name);
            let since =
                |count: fn(&CacheInfo) -> u64| count(info).saturating_sub(old.map_or(0, count));
            let disk = |disk: &CacheDisk| {
                Disk::between(before.of_disk(&disk.name).map(|(_, old)| old), disk)
            };
            Cache {
                name: info.name.clone(),
                size_bytes: info.size_bytes,
                used_bytes: info.used_bytes,
                policy: info.policy.clone(),
                insertions: since(|info| info.insertions),
                evictions: since(|info| info.removals.capacity),
                disks: info.disks.iter().map(disk).collect(),
            }
        };
        Self {
            unix_time_ns: after.unix_time_ns,
            seconds,
            caches: after.caches.iter().map(cache).collect(),
        }
    }

    fn text(&self, width: Option<usize>, style: Style) -> String {
        let mut lines = Vec::new();
        for cache in &self.caches {
            let used =
                super::percent(Some(cache.used_bytes as f64 / cache.size_bytes.max(1) as f64));
            lines.push(format!(
                "{}  {}: {}, {used} used, policy {}, {} in, {} out",
                clock(self.unix_time_ns),
                clean(&cache.name),
                Bytes(cache.size_bytes),
                cache.policy,
                short_number(cache.insertions as f64),
                short_number(cache.evictions as f64),
            ));
            lines.push(self.table(cache).render(width, style));
        }
        lines.join("\n")
    }

    fn table(&self, cache: &Cache) -> Table {
        let is_sum = self.seconds <= 0.0;
        let sizes = ["-50 %", "-25 %", "+25 %", "+100 %"].map(TableColumn::number);
        let [half, less, more, double] = sizes;
        let mut table = Table::new([
            TableColumn::text("DISK").flexible().kept(),
            TableColumn::number("USED").importance(3),
            TableColumn::number(if is_sum { "READS" } else { "READ/S" }).kept(),
            TableColumn::number("HIT").kept(),
            TableColumn::number("ALL").importance(2),
            TableColumn::number(if is_sum { "SAVED" } else { "SAVED B/S" }).importance(6),
            TableColumn::number("TIME").importance(4),
            half.importance(5),
            less.importance(1),
            more.importance(7),
            double.importance(5),
            TableColumn::text("CLASSES").flexible_to(12).importance(2),
        ]);
        let seconds = if is_sum { 1.0 } else { self.seconds };
        for disk in &cache.disks {
            let [half, less, more, double] = disk.gains.clone();
            table.row([
                clean(&disk.name),
                short_bytes(disk.used_bytes as f64),
                short_number(disk.counts.reads as f64 / seconds),
                hits(&disk.counts),
                super::percent(disk.hit_ratio_all),
                short_bytes(disk.counts.hit_bytes as f64 / seconds),
                latency((disk.saved_ns as f64 / seconds) as u64),
                half,
                less,
                more,
                double,
                shares(&disk.classes, |class| class.counts.reads),
            ]);
        }
        table
    }
}

impl Disk {
    fn between(before: Option<&CacheDisk>, after: &CacheDisk) -> Self {
        // A disk that got another cache begins at zero.
        let before = before.filter(|before| before.counts.reads <= after.counts.reads);
        let since = |now: &CacheCounts, old: Option<&CacheCounts>| match old {
            Some(old) => now.since(old),
            None => *now,
        };
        let counts = since(&after.counts, before.map(|before| &before.counts));
        let class = |class: &CacheClass| {
            let old = before
                .and_then(|before| before.classes.iter().find(|other| other.class == class.class));
            let counts = since(&class.counts, old.map(|old| &old.counts));
            CacheClass { counts, ..class.clone() }
        };
        let curve = &after.curve;
        let present = CacheEstimate {
            percent: 100,
            size_bytes: curve.size_bytes,
            miss_ratio: curve.miss_ratio,
        };
        let size = |estimate: &CacheEstimate| Estimate {
            percent: estimate.percent,
            size_bytes: estimate.size_bytes,
            hit_ratio: 1.0 - estimate.miss_ratio,
        };
        let mut sizes: Vec<Estimate> = curve.estimates.iter().chain([&present]).map(size).collect();
        sizes.sort_by_key(|size| size.percent);
        if curve.accesses == 0 {
            sizes.clear();
        }
        Self {
            name: after.name.clone(),
            used_bytes: after.used_bytes,
            hit_ratio: counts.hit_ratio(),
            hit_ratio_all: after.counts.hit_ratio(),
            saved_ns: counts.saved_ns(),
            counts,
            classes: after
                .classes
                .iter()
                .map(class)
                .filter(|class| class.counts.reads > 0)
                .collect(),
            sizes,
            gains: ESTIMATES.map(|percent| gain(curve, percent)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::report, *};

    #[test]
    fn an_interval_has_rates_and_a_sum_has_sums() {
        let interval = Interval::between(&report(1), &report(2));
        let text = interval.text(None, Style::PLAIN);
        for part in [
            "hosts: 1 GiB, 100.0 % used, policy auto, 0 in, 0 out",
            "READ/S",
            "  500 ",
            "75.0 %",
            "1.46M",
            "-25.0",
            "+5.0",
            "+15.0",
            "5 50 %, unknown 50 %",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let text = Interval::between(&CacheReport::default(), &report(2)).text(None, Style::PLAIN);
        assert!(
            text.contains("READS") && text.contains("2000") && text.contains("70.0k in"),
            "{text}"
        );
        // A narrow terminal keeps the most important columns.
        for line in interval.text(Some(48), Style::PLAIN).lines().skip(1) {
            assert!(line.chars().count() <= 48, "{line}");
        }
        assert!(interval.text(Some(48), Style::PLAIN).contains("+25 %"));
    }

    #[test]
    fn a_disk_with_another_cache_begins_again() {
        let interval = Interval::between(&report(5), &report(1));
        assert_eq!(interval.caches[0].disks[0].counts.reads, 1000);
        let json = serde_json::to_value(Interval::between(&report(1), &report(3))).unwrap();
        let disk = &json["caches"][0]["disks"][0];
        assert_eq!((&disk["counts"]["reads"], &disk["hit_ratio"]), (&2000.into(), &0.75.into()));
        assert_eq!(disk["sizes"].as_array().unwrap().len(), 5);
        assert_eq!(disk["sizes"][2]["percent"], 100);
    }
}

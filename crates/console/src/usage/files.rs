//! `fathom files`: the files that a disk is busy with.
use std::{thread, time::Duration};

use clap::Args;
use fathom_control::{DiskUsage, Nanoseconds, UsageReport};
use serde::Serialize;

use super::{
    group::{Entry, Grouping, Groups, Scope},
    plain,
};
use crate::{
    connection::ControlOptions,
    failure::{Failure, Outcome},
    output::{self, Format, short_bytes},
    top::SortKey,
};

/// Options of `fathom files`.
#[derive(Debug, Args)]
#[command(after_help = "\
Counted since the disk was opened, or for --interval. A file is counted where the guest's memory
told it; what has no file (a journal, metadata, swap) stands between the files under its own name.

Examples:
  fathom files root                      the hottest files since the disk was opened
  fathom files root --interval 10s --sort throughput
  fathom files root --json | jq '.files[0]'")]
pub struct FilesOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Measure for this time, in place of everything since the disk was opened
    #[arg(long, short, value_name = "TIME")]
    interval: Option<Nanoseconds>,
    /// How many files
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Order of the files
    #[arg(long, value_enum, default_value = "iops")]
    sort: SortKey,
    /// Only what contains this: in its path, container or kind
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    disk: String,
    vm: String,
    seconds: f64,
    shares: Vec<Share>,
    files: Vec<Entry>,
}

/// A kind's part of all bytes.
#[derive(Debug, PartialEq, Serialize)]
struct Share {
    kind: String,
    bytes: u64,
    /// Between 0 and 1.
    of_all: f64,
}

/// Carries out the command.
pub fn run(options: &FilesOptions) -> Outcome {
    let client = options.control.client().with_limit(Duration::from_secs(5));
    let mut usage = client.usage(Some(&options.disk), None)?;
    let mut seconds = 0.0;
    if let Some(interval) = options.interval {
        thread::sleep(Duration::from_nanos(interval.0));
        let after = client.usage(Some(&options.disk), None)?;
        seconds = after.time_ns.saturating_sub(usage.time_ns) as f64 / 1e9;
        usage = after.since(&usage);
    }
    let Some(disk) = usage.disk(&options.disk) else {
        return Err(Failure::new(format!("the daemon serves no disk called {}", options.disk))
            .advise("`fathom disk list` shows those that it serves"));
    };
    if !disk.counted {
        return Err(Failure::new(format!("{} does not find out what requests mean", disk.name))
            .advise("set `classify = true` for it in the configuration, and reload"));
    }
    let mut groups = Groups::of(&usage, seconds, Grouping::File, &Scope::default());
    groups.filter(&options.filter);
    groups.sort(options.sort);
    let shares = shares(&usage);
    if options.format.json {
        groups.entries.truncate(options.limit);
        return output::json(&Report {
            disk: disk.name.clone(),
            vm: disk.vm.clone(),
            seconds,
            shares,
            files: groups.entries,
        });
    }
    if groups.entries.is_empty() {
        return output::text_line(&nothing(disk));
    }
    let text = plain::table(&groups, Grouping::File, options.limit, output::width());
    output::text_line(&text)?;
    let left_out = groups.entries.len().saturating_sub(options.limit);
    if left_out > 0 {
        output::text_line(&format!("and {left_out} more"))?;
    }
    let parts: Vec<String> = shares
        .iter()
        .map(|share| {
            let percent = share.of_all * 100.0;
            format!("{} {percent:.1} % ({})", share.kind, short_bytes(share.bytes as f64))
        })
        .collect();
    output::text_line(&format!("\nOf all bytes: {}", parts.join(", ")))
}

fn nothing(disk: &DiskUsage) -> String {
    if disk.total.is_empty() {
        format!("Nothing was read or written on {}.", disk.name)
    } else {
        "Nothing contains that.".into()
    }
}

/// The kinds' parts of the bytes, the greatest first.
fn shares(usage: &UsageReport) -> Vec<Share> {
    let mut kinds = Groups::of(usage, 0.0, Grouping::Kind, &Scope::default());
    kinds.sort(SortKey::Throughput);
    let all: u64 = kinds.entries.iter().map(Entry::bytes).sum();
    kinds
        .entries
        .iter()
        .filter(|entry| entry.bytes() > 0)
        .map(|entry| Share {
            kind: entry.name.clone(),
            bytes: entry.bytes(),
            of_all: entry.bytes() as f64 / all as f64,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::group::tests::usage;
    use super::*;

    #[test]
    fn shares_are_of_all_bytes() {
        let shares = shares(&usage());
        let kinds: Vec<&str> = shares.iter().map(|share| share.kind.as_str()).collect();
        assert_eq!(kinds, ["data", "metadata", "unknown"]);
        assert!((shares.iter().map(|share| share.of_all).sum::<f64>() - 1.0).abs() < 1e-9);
    }
}

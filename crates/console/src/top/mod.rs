//! `fathom top`: what the daemon's disks do, live.

mod app;
mod histogram;
mod model;
mod plain;
mod screen;
mod summary;
mod terminal;
mod usage_screen;

use std::{
    io::{self, IsTerminal},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use fathom_control::{Client, ClientError, Nanoseconds, Statistics, UsageReport};
use serde::Serialize;

use crate::{
    connection::ControlOptions,
    failure::{Failure, Outcome},
    output::{self, Format},
};
use model::Interval;

use crate::usage::{self, Grouping, Groups, Scope};
pub use model::SortKey;
pub use plain::clock;

/// Options of `fathom top`.
#[derive(Debug, Args)]
#[command(after_help = "\
On a terminal this is a live view: ? shows its keys. Piped, or with --plain, it prints a line for
each disk and interval; with --json an object for each interval, one a line. Rates and latencies are
those of the interval; depth is the mean number of requests under way.

With --by it shows who causes the I/O in place of the disks: what each guest's own memory says, with
nothing installed in the guest. On a terminal, u changes between the two and Enter leads from
machines to containers, processes and files.

Examples:
  fathom top                             the live view
  fathom top --interval 5s | tee log     a line for each disk every five seconds
  fathom top --json --count 1 | jq       one interval, for a program
  fathom top --since-start               totals by operation
  fathom top --by container              the live view of who causes the I/O
  fathom top --by file --plain -n 1      the hottest files of one interval")]
pub struct TopOptions {
    /// Time between two samples
    #[arg(long, short, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Nanoseconds,
    /// End after so many intervals
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// Order of the disks
    #[arg(long, value_enum, default_value = "iops")]
    sort: SortKey,
    /// Only disks whose name or machine contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show who causes the I/O, put together by this
    #[arg(long, value_enum, conflicts_with = "since_start")]
    by: Option<Grouping>,
    /// With --by: only this disk
    #[arg(long, value_name = "NAME", requires = "by")]
    disk: Option<String>,
    /// With --by: only this machine
    #[arg(long, value_name = "NAME", requires = "by")]
    vm: Option<String>,
    /// With --by: so many lines an interval
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    /// Lines of text, also on a terminal
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// What the disks have done since they were opened, once
    #[arg(long, conflicts_with_all = ["count", "plain"])]
    since_start: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Times with or without a unit: `2` is two seconds.
fn interval(text: &str) -> Result<Nanoseconds, String> {
    let bare = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let text = if bare { format!("{text}s") } else { text.to_owned() };
    let time: Nanoseconds = text.parse().map_err(|error| format!("{error}"))?;
    match time.0 {
        0..50_000_000 => Err("at least 50ms".into()),
        3_600_000_000_001.. => Err("at most an hour".into()),
        _ => Ok(time),
    }
}

/// Carries out the command.
pub fn run(options: &TopOptions) -> Outcome {
    let client = options.control.client().with_limit(Duration::from_secs(5));
    // Whether there is a daemon is said in the ordinary way, before the screen is taken.
    let first = client.statistics()?;
    if options.since_start {
        return if options.format.json {
            output::json(&first)
        } else {
            output::text_line(summary::table(&first, &options.filter, output::width()).trim_end())
        };
    }
    let live = io::stdout().is_terminal() && io::stdin().is_terminal();
    if live && !options.plain && !options.format.json {
        return terminal::run(options, &client, first);
    }
    match options.by {
        Some(grouping) => accounts(options, &client, grouping),
        None => lines(options, &client, first),
    }
}

/// What `--by` with `--json` prints for each interval.
#[derive(Serialize)]
struct Accounts<'a> {
    by: Grouping,
    #[serde(flatten)]
    groups: &'a Groups,
    guests: &'a [fathom_control::GuestInfo],
}

/// Prints who caused the I/O, interval after interval.
fn accounts(options: &TopOptions, client: &Client, grouping: Grouping) -> Outcome {
    let pause = Duration::from_nanos(options.interval.0);
    let sample = || client.usage(options.disk.as_deref(), options.vm.as_deref());
    let mut before = sample()?;
    let mut next = Instant::now() + pause;
    let mut printed = 0;
    while options.count.is_none_or(|count| printed < count) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next = (next + pause).max(Instant::now());
        let after = sample()?;
        let guests = client.guests()?;
        let mut groups = Groups::of(
            &after.since(&before),
            seconds(&before, &after),
            grouping,
            &Scope::default(),
        );
        groups.filter(&options.filter);
        groups.sort(options.sort);
        if options.format.json {
            groups.entries.truncate(options.limit);
            let accounts = Accounts { by: grouping, groups: &groups, guests: &guests.guests };
            let text = serde_json::to_string(&accounts)
                .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
            output::text_line(&text)?;
        } else {
            let (width, time) = (output::width(), clock(after.unix_time_ns));
            output::text_line(&format!("{time}  {}", usage::insight_line(&guests)))?;
            output::text_line(&usage::table(&groups, grouping, options.limit, width))?;
            output::text_line("")?;
        }
        before = after;
        printed += 1;
    }
    Ok(())
}

/// The time between two samples.
fn seconds(before: &UsageReport, after: &UsageReport) -> f64 {
    after.time_ns.saturating_sub(before.time_ns).max(1) as f64 / 1e9
}

/// Prints interval after interval.
fn lines(options: &TopOptions, client: &Client, first: Statistics) -> Outcome {
    let pause = Duration::from_nanos(options.interval.0);
    let mut before = first;
    let mut next = Instant::now() + pause;
    let mut printer = plain::Printer::default();
    let mut printed = 0;
    while options.count.is_none_or(|count| printed < count) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next = (next + pause).max(Instant::now());
        let after = match client.statistics() {
            Ok(after) => after,
            Err(error @ ClientError::Refused(_)) => return Err(error.into()),
            Err(error) => {
                return Err(
                    Failure::new(format!("the daemon is gone: {error}")).advise(error.remedy())
                );
            }
        };
        let mut interval = Interval::between(&before, &after);
        interval.filter(&options.filter);
        interval.sort(options.sort);
        let text = if options.format.json {
            serde_json::to_string(&interval)
                .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?
        } else {
            printer.lines(&interval, output::width())
        };
        output::text_line(&text)?;
        before = after;
        printed += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds_unless_said_otherwise() {
        assert_eq!(interval("2"), Ok(Nanoseconds(2_000_000_000)));
        assert_eq!(interval("0.5"), Ok(Nanoseconds(500_000_000)));
        assert_eq!(interval("250ms"), Ok(Nanoseconds(250_000_000)));
        assert!(interval("1ms").is_err() && interval("").is_err() && interval("soon").is_err());
    }
}

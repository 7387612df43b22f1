//! `fathom top`: shows the activity of the daemon's disks, live.

mod app;
mod columns;
pub(crate) mod histogram;
pub(crate) mod model;
mod plain;
mod screen;
mod summary;
mod terminal;
pub(crate) mod usage_json;
mod usage_plain;
mod usage_screen;
mod usage_view;

use std::{
    io::{self, IsTerminal},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use fathom_control::{Client, ClientError, DirtyRequest, Nanoseconds, Statistics};

use crate::usage::Grouping;
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{self, Format},
};
use model::{Interval, SortKey};

/// Options of `fathom top`.
#[derive(Debug, Args)]
#[command(after_help = "\
On a terminal this is a live view; ? shows its keys. In a pipe, or with --plain, it prints a line
for each disk and interval, with --json one object per line for each interval. Rates and latencies
are those of the interval; depth is the mean number of requests in flight. HELD are the requests that
the layers `limit` and `schedule` hold back, and DIRTY is the data in the guest's memory that it has
still to write to the disk. AWAY is what a pager has taken out of the guest's memory; the column is there
if a guest has a pager and the terminal is wide.

With --by it shows who causes the I/O instead of the disks, as found in each guest's memory; nothing
is installed in the guest. In a pipe, that is a table for each interval. On a terminal, 1 to 6
select the disks or a grouping, and Enter opens a machine's containers, their processes where these
are known, and their files.

Examples:
  fathom top                             the live view
  fathom top --interval 5s | tee log     a line for each disk every five seconds
  fathom top --json --count 1 | jq       one interval, for a program
  fathom top --since-start               totals by operation
  fathom top --by container              the live view of who causes the I/O
  fathom top --by file --plain -n 1      the hottest files of one interval
  fathom top --by file --vm web --filter /var --sort written --plain
  fathom top --by container --since-start
  fathom top --by kind --json | jq '.usage[] | {name, bytes_per_second}'")]
pub struct TopOptions {
    /// Time between two samples
    #[arg(long, short, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Nanoseconds,
    /// End after this number of intervals
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// Order of the disks, or of the lines with --by
    #[arg(long, value_enum, default_value = "iops")]
    sort: SortKey,
    /// Show only disks whose name or machine contains this; with --by, only lines that contain it
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show who causes the I/O, grouped by this
    #[arg(long, value_enum, value_name = "WHAT")]
    by: Option<Grouping>,
    /// Show only this disk
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    /// Show only the disks of this machine
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// With --by, in a pipe: the most lines of an interval [default: 20; all with --json]
    #[arg(long, value_name = "N", requires = "by")]
    limit: Option<usize>,
    /// Print lines of text, even on a terminal
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// Print the totals since the disks were opened, once
    #[arg(long, conflicts_with_all = ["count", "plain"])]
    since_start: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Parses a time with or without a unit: `2` is two seconds.
pub fn interval(text: &str) -> Result<Nanoseconds, String> {
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
pub fn run(options: &TopOptions) -> CommandResult {
    let client = options.control.client().with_limit(Duration::from_secs(5));
    // An unreachable daemon is reported before the terminal is switched to the live view.
    let first = options.select(client.statistics()?)?;
    if options.since_start {
        if let Some(grouping) = options.by {
            return usage_plain::since_start(options, &client, grouping);
        }
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
        Some(grouping) => usage_plain::intervals(options, &client, grouping),
        None => lines(options, &client, first),
    }
}

impl TopOptions {
    /// Keeps only the disks selected by `--disk` and `--vm`.
    fn narrow(&self, mut statistics: Statistics) -> Statistics {
        statistics.disks.retain(|disk| {
            self.disk.as_ref().is_none_or(|name| *name == disk.name)
                && self.vm.as_ref().is_none_or(|name| *name == disk.vm)
        });
        statistics
    }

    /// The selected disks.
    ///
    /// # Errors
    /// If `--disk` or `--vm` selects no disk.
    fn select(&self, statistics: Statistics) -> CommandResult<Statistics> {
        let all: Vec<String> = statistics.disks.iter().map(|disk| disk.name.clone()).collect();
        let statistics = self.narrow(statistics);
        if statistics.disks.is_empty() && (self.disk.is_some() || self.vm.is_some()) {
            let what = match (&self.disk, &self.vm) {
                (Some(disk), None) => format!("disk {disk:?}"),
                (Some(disk), Some(vm)) => format!("disk {disk:?} of machine {vm:?}"),
                (None, vm) => format!("disk of machine {:?}", vm.as_deref().unwrap_or_default()),
            };
            return Err(Failure::new(format!("there is no {what}"))
                .advise(format!("the daemon serves: {}", all.join(", "))));
        }
        Ok(statistics)
    }
}

/// Prints a line for each disk and interval.
fn lines(options: &TopOptions, client: &Client, first: Statistics) -> CommandResult {
    let pause = Duration::from_nanos(options.interval.0);
    let mut before = first;
    let mut next = Instant::now() + pause;
    let mut printer = plain::Printer::default();
    let mut printed = 0;
    while options.count.is_none_or(|count| printed < count) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next = (next + pause).max(Instant::now());
        let after = match client.statistics() {
            Ok(after) => options.narrow(after),
            Err(error @ ClientError::Refused(_)) => return Err(error.into()),
            Err(error) => {
                return Err(Failure::from(error).about("lost the daemon"));
            }
        };
        let mut interval = Interval::between(&before, &after);
        // A daemon without guests, or an older one, has no report.
        if let Ok(dirty) = client.dirty(None, DirtyRequest::default()) {
            interval.set_dirty(&dirty);
        }
        if let Ok(pagers) = client.guest_pagers() {
            interval.set_away(&pagers);
        }
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
    fn intervals_are_seconds_by_default() {
        assert_eq!(interval("2"), Ok(Nanoseconds(2_000_000_000)));
        assert_eq!(interval("0.5"), Ok(Nanoseconds(500_000_000)));
        assert_eq!(interval("250ms"), Ok(Nanoseconds(250_000_000)));
        assert!(interval("1ms").is_err() && interval("").is_err() && interval("soon").is_err());
    }
}

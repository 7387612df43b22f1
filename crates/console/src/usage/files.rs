//! `fathom files`: lists a disk's files by their I/O.
use std::{thread, time::Duration};

use clap::Args;
use fathom_control::{Client, DiskUsage, GuestInfo, Nanoseconds, count};
use serde::Serialize;

use super::{
    accounts::{Accounts, machine},
    entry::{Line, Numbers},
    group::{FLUSHES, Grouping, Groups, Scope, UsageOrder},
    insight, plain,
};
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{self, Format, short_number},
};

/// Options of `fathom files`.
#[derive(Debug, Args)]
#[command(after_help = "\
Requests are counted since the daemon began to count, or for --interval. Data without a file (a
journal, metadata, swap) is listed among the files under a name of its own. Below the files are the
shares of the kinds in all bytes.

Examples:
  fathom files root                      the hottest files since the disk was opened
  fathom files root --interval 10s --sort written
  fathom files root --databases          which table or index of a database is hot
  fathom files root --filter /web        the files of a container, or below a directory
  fathom files root --json | jq -r '.files[0].path'")]
pub struct FilesOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Measure for this time, instead of everything since counting began
    #[arg(long, short, value_name = "TIME", value_parser = crate::top::interval)]
    interval: Option<Nanoseconds>,
    /// List the tables, indexes and logs of databases instead of files
    #[arg(long)]
    databases: bool,
    /// The most files to list
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Order of the files
    #[arg(long, value_enum, default_value = "requests")]
    sort: UsageOrder,
    /// Show only lines that contain this in their path, container, process or kind
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    disk: &'a str,
    vm: &'a str,
    /// The end of the interval, in nanoseconds since 1970.
    unix_time_ns: u64,
    /// Its length, in seconds; 0 for all time.
    seconds: f64,
    /// How far the guest is understood.
    insight: Option<&'a fathom_control::InsightStatus>,
    /// All requests of the disk.
    total: Numbers,
    /// The requests by kind.
    kinds: Vec<Line<'a>>,
    files: Vec<Line<'a>>,
    /// The number of files beyond the limit.
    files_left_out: usize,
    /// Parts of requests that the daemon had no time to count.
    dropped: u64,
}

/// Carries out the command.
pub fn run(options: &FilesOptions) -> CommandResult {
    let client = options.control.client().with_limit(Duration::from_secs(5));
    let accounts = measure(&client, &options.disk, options.interval)?;
    let Some(disk) = accounts.disk(&options.disk) else {
        return Err(Failure::new(format!("the daemon serves no disk called {}", options.disk))
            .advise("`fathom disk list` shows its disks"));
    };
    if !disk.counted {
        return Err(Failure::new(format!("the requests of {} are not classified", disk.name))
            .advise("set `classify = true` for it in the configuration, and reload"));
    }
    let guests = client.guests()?.guests;
    let guest = guests.iter().rev().find(|guest| guest.disks.contains(&disk.name));
    let everything = Scope::default();
    let grouping = if options.databases { Grouping::Database } else { Grouping::File };
    let mut files = Groups::of(&accounts, grouping, &everything);
    // A flush concerns no single file.
    files.entries.retain(|entry| entry.kind.only() != Some(FLUSHES));
    files.filter(&options.filter);
    files.sort(options.sort);
    let mut kinds = Groups::of(&accounts, Grouping::Kind, &everything);
    kinds.sort(UsageOrder::Throughput);
    if options.format.json {
        let seconds = accounts.seconds;
        let left_out = files.entries.len().saturating_sub(options.limit);
        return output::json(&Report {
            disk: &disk.name,
            vm: &disk.vm,
            unix_time_ns: accounts.unix_time_ns,
            seconds,
            insight: guest.map(|guest| &guest.insight),
            total: Numbers::of(&disk.total.sum(), seconds),
            kinds: kinds.entries.iter().map(|entry| entry.line(seconds)).collect(),
            files: files.entries.iter().take(options.limit).map(|e| e.line(seconds)).collect(),
            files_left_out: left_out,
            dropped: disk.dropped,
        });
    }
    let width = output::width();
    output::text_line(&head(disk, guest, accounts.seconds))?;
    if files.entries.is_empty() {
        return output::text_line(if disk.total.is_empty() {
            "No I/O."
        } else if options.databases && options.filter.is_empty() {
            "No I/O of a database that is recognised."
        } else {
            "No line matches the filter."
        });
    }
    output::text_line(&plain::table(
        &files,
        grouping,
        &accounts.common(),
        &guests,
        options.limit,
        width,
    ))?;
    let omitted = plain::omitted(&files, options.limit);
    if !omitted.is_empty() {
        output::text_line(&omitted)?;
    }
    output::text_line(&format!("\n{}", plain::shares(&kinds, width)))?;
    if disk.dropped > 0 {
        let parts = count(disk.dropped, "part");
        let text = format!("\nThe daemon had no time to count {parts} of requests.");
        output::text_line(&text)?;
    }
    Ok(())
}

/// The activity of a disk since counting began, or in an interval from now on.
fn measure(client: &Client, disk: &str, interval: Option<Nanoseconds>) -> CommandResult<Accounts> {
    let first = client.usage(Some(disk), None)?;
    let Some(interval) = interval else { return Ok(Accounts::all(&first)) };
    thread::sleep(Duration::from_nanos(interval.0));
    Ok(Accounts::between(&first, &client.usage(Some(disk), None)?))
}

/// The disk, the number of requests, and how far the guest is understood.
fn head(disk: &DiskUsage, guest: Option<&GuestInfo>, seconds: f64) -> String {
    let machine = if disk.vm.is_empty() { String::new() } else { format!(" of {}", machine(disk)) };
    let since =
        if seconds > 0.0 { format!("in {seconds:.1} s") } else { "since counting began".into() };
    let requests = super::group::requests(&disk.total);
    let guest = guest.map_or_else(|| "no guest".into(), |guest| insight::long(&guest.insight));
    format!("{}{machine}: {} requests {since}; {guest}", disk.name, short_number(requests as f64))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::usage, *};

    #[test]
    fn the_head_names_the_disk_and_the_interval() {
        let accounts = Accounts::all(&usage());
        let disk = &accounts.disks[0];
        assert_eq!(
            head(disk, None, 0.0),
            "root of shop: 97 requests since counting began; no guest"
        );
        let guest = GuestInfo::default();
        assert_eq!(head(disk, Some(&guest), 2.0), "root of shop: 97 requests in 2.0 s; no guest");
    }
}

//! `fathom processes`: what the processes of guests have read and written, and what they wait for.
use std::collections::HashMap;
use std::time::Duration;

use clap::Args;
use fathom_control::{
    Bytes, CallFile, CallInfo, GuestProcesses, InsightState, Nanoseconds, ProcessInfo,
    ProcessesReport,
};

use crate::{
    connection::ControlOptions,
    failure::CommandResult,
    output::{
        self, Format, progress,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
    top::interval,
    usage::{container_name, insight},
};

/// The number of processes that are listed unless `-n` sets another.
const PROCESSES: usize = 20;

/// Options of `fathom processes`.
#[derive(Debug, Args)]
#[command(after_help = "\
The processes are read from the guest's memory, with nothing installed in the guest. READ and DIRTIED
are the guest kernel's own counts for a process and its children that have ended, for all of the
guest's disks. DIRTIED counts data when a program writes it, long before the guest writes it to a disk.

Examples:
  fathom processes                       those with the most I/O in the last second
  fathom processes shop --interval 10    the same in ten seconds, of one guest
  fathom processes shop --total          since each process started
  fathom processes --waiting             those that wait in a system call about a file
  fathom processes --json | jq '.guests[].processes[] | select(.calls)'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct ProcessesOptions {
    /// The guest: the name of its machine, of one of its disks, or its number; all by default
    #[arg(value_name = "GUEST")]
    guest: Option<String>,
    /// The interval whose I/O is counted
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Nanoseconds,
    /// Show the I/O since each process started, instead of that in an interval
    #[arg(long, conflicts_with = "interval")]
    total: bool,
    /// Only processes that wait in a system call about a file now
    #[arg(long)]
    waiting: bool,
    /// The most processes to list of each guest
    #[arg(long, short = 'n', value_name = "N", default_value_t = PROCESSES)]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &ProcessesOptions) -> CommandResult {
    let client = options.control.client();
    let mut report = client.processes(options.guest.as_deref())?;
    if !options.total && !options.waiting {
        let time = Duration::from_nanos(options.interval.0);
        progress::wait("Counting I/O", time);
        let after = client.processes(options.guest.as_deref())?;
        report = since(&report, after);
    }
    for guest in &mut report.guests {
        select(guest, options);
    }
    if options.format.json {
        return output::json(&report);
    }
    if report.guests.is_empty() {
        return output::text_line("No guest is connected whose memory is read.");
    }
    let (width, style) = (output::width(), Style::stdout());
    for (place, guest) in report.guests.iter().enumerate() {
        if place > 0 {
            output::text_line("")?;
        }
        output::text_line(&title(guest))?;
        if !guest.processes.is_empty() {
            output::text_line(&table(guest).render(width, style))?;
        }
    }
    Ok(())
}

/// The I/O of the processes of `after` since the report `before`. A process that has started since
/// counts in full.
fn since(before: &ProcessesReport, mut after: ProcessesReport) -> ProcessesReport {
    for guest in &mut after.guests {
        let earlier = before.guests.iter().find(|earlier| earlier.number == guest.number);
        let earlier: HashMap<_, _> = earlier
            .iter()
            .flat_map(|earlier| &earlier.processes)
            .map(|process| ((process.process_id, process.start_ns), process))
            .collect();
        for process in &mut guest.processes {
            let Some(old) = earlier.get(&(process.process_id, process.start_ns)) else { continue };
            for (now, old) in [
                (&mut process.read_bytes, old.read_bytes),
                (&mut process.dirtied_bytes, old.dirtied_bytes),
                (&mut process.cancelled_bytes, old.cancelled_bytes),
            ] {
                *now = now.map(|now| now.saturating_sub(old.unwrap_or(0)));
            }
        }
    }
    after
}

/// Keeps the processes that the options choose, those with the most I/O first.
fn select(guest: &mut GuestProcesses, options: &ProcessesOptions) {
    let transferred = |process: &ProcessInfo| {
        process.read_bytes.unwrap_or(0).saturating_add(process.dirtied_bytes.unwrap_or(0))
    };
    guest.processes.retain(|process| {
        let waits = !process.calls.is_empty();
        if options.waiting { waits } else { waits || transferred(process) > 0 }
    });
    guest.processes.sort_by_key(|process| std::cmp::Reverse(transferred(process)));
    guest.processes.truncate(options.limit);
}

/// The guest, and what is not known about it.
fn title(guest: &GuestProcesses) -> String {
    let name = clean(&if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() });
    if guest.insight.state != InsightState::Attached {
        return format!("{name}: {}", insight::long(&guest.insight));
    }
    let mut text = match guest.processes.len() {
        0 => format!("{name}: no process with I/O"),
        number => format!("{name}: {}", processes(number as u64)),
    };
    if let Some(uptime_ns) = guest.uptime_ns {
        text += &format!(", up {}", age(uptime_ns));
    }
    if !guest.is_whole {
        text += "; not all processes were read, because the guest changed its lists meanwhile";
    }
    text
}

/// A number of processes, as text.
fn processes(number: u64) -> String {
    if number == 1 { "1 process".into() } else { format!("{number} processes") }
}

/// A long time, in its greatest two units.
fn age(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// The processes of a guest. One with several calls has a line for each.
fn table(guest: &GuestProcesses) -> Table {
    let mut table = Table::new([
        TableColumn::number("PROCESS"),
        TableColumn::text("COMMAND"),
        TableColumn::number("AGE").importance(1),
        TableColumn::text("CONTAINER").flexible().optional().importance(2),
        TableColumn::number("THREADS").importance(0),
        TableColumn::number("READ"),
        TableColumn::number("DIRTIED"),
        TableColumn::number("REMOVED").optional().importance(1),
        TableColumn::text("WAITS IN").flexible_path(16).optional(),
    ]);
    for process in &guest.processes {
        let bytes = |value: Option<u64>| match value {
            None => "-".to_owned(),
            Some(0) => String::new(),
            Some(value) => Bytes(value).to_string(),
        };
        let age = guest.uptime_ns.zip(process.start_ns);
        let mut calls = process.calls.iter().map(waits_in);
        table.row([
            process.process_id.to_string(),
            clean(&process.command),
            age.map_or_else(String::new, |(now, start)| self::age(now.saturating_sub(start))),
            if process.cgroup.is_empty() { String::new() } else { container_name(&process.cgroup) },
            process.threads.to_string(),
            bytes(process.read_bytes),
            bytes(process.dirtied_bytes),
            bytes(process.cancelled_bytes),
            calls.next().unwrap_or_default(),
        ]);
        for call in calls {
            let mut cells = [const { String::new() }; 9];
            cells[8] = call;
            table.row(cells);
        }
    }
    table
}

/// A system call and its files: `fsync /srv/a`, `copy_file_range /srv/a to /srv/b`.
fn waits_in(call: &CallInfo) -> String {
    let name = |file: &CallFile| {
        clean(&if !file.path.is_empty() {
            file.path.clone()
        } else if file.inode != 0 {
            format!("inode {} of {} on {}", file.inode, file.file_system, file.device)
        } else {
            file.device.clone()
        })
    };
    let mut text = clean(&call.call);
    match (&call.source, &call.file) {
        (Some(source), Some(file)) => text += &format!(" {} to {}", name(source), name(file)),
        (None, Some(file)) => text += &format!(" {}", name(file)),
        (Some(source), None) => text += &format!(" {}", name(source)),
        (None, None) => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use fathom_control::InsightStatus;

    use super::*;

    fn process(process_id: u64, start_ns: u64, read: u64, dirtied: u64) -> ProcessInfo {
        ProcessInfo {
            process_id,
            command: "fio\u{1b}[2J".into(),
            start_ns: Some(start_ns),
            cgroup: "/web".into(),
            threads: 1,
            read_bytes: Some(read),
            dirtied_bytes: Some(dirtied),
            ..ProcessInfo::default()
        }
    }

    fn guest(processes: Vec<ProcessInfo>) -> GuestProcesses {
        GuestProcesses {
            vm: "shop".into(),
            insight: InsightStatus { state: InsightState::Attached, ..Default::default() },
            uptime_ns: Some(100_000_000_000),
            is_whole: true,
            processes,
            ..GuestProcesses::default()
        }
    }

    #[test]
    fn an_interval_has_its_own_counts_and_numbers_that_are_used_again_are_other_processes() {
        let report =
            |processes| ProcessesReport { guests: vec![guest(processes)], ..Default::default() };
        let before = report(vec![process(1, 5, 100, 10), process(2, 7, 1000, 0)]);
        let after = report(vec![process(1, 5, 150, 30), process(2, 9, 4, 4)]);
        let found = since(&before, after);
        let numbers: Vec<_> = found.guests[0]
            .processes
            .iter()
            .map(|process| (process.process_id, process.read_bytes, process.dirtied_bytes))
            .collect();
        assert_eq!(numbers, [(1, Some(50), Some(20)), (2, Some(4), Some(4))]);
    }

    #[test]
    fn each_call_has_a_line() {
        let file = |path: &str| Some(CallFile { path: path.into(), ..CallFile::default() });
        let call = |call: &str, file, source| CallInfo {
            call: call.into(),
            file,
            source,
            ..CallInfo::default()
        };
        let mut one = process(1, 40_000_000_000, 1 << 20, 0);
        one.calls = vec![
            call("fsync", file("/srv/a"), None),
            call("copy_file_range", file("/srv/b"), file("/srv/a")),
            call("sync", None, None),
        ];
        let guest = guest(vec![one]);
        assert_eq!(title(&guest), "shop: 1 process, up 1 min 40 s");
        let text = table(&guest).render(None, Style::PLAIN);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("1 min 0 s") && lines[1].ends_with("fsync /srv/a"), "{text}");
        assert!(lines[2].ends_with("copy_file_range /srv/a to /srv/b"), "{text}");
        assert!(lines[3].ends_with("sync") && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn ages_have_two_units() {
        let of = |seconds: u64| age(seconds * 1_000_000_000);
        assert_eq!(
            [of(9), of(61), of(7200), of(200_000)],
            ["9 s", "1 min 1 s", "2 h 0 min", "2 d 7 h"]
        );
    }
}

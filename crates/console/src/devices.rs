//! `fathom devices`: shows the devices beneath the disks.
use std::{thread, time::Duration};

use clap::Args;
use fathom_control::{DeviceActivity, DeviceIdle, DeviceList, DeviceStatus, Nanoseconds};
use serde::Serialize;

use crate::{
    connection::ControlOptions,
    failure::CommandResult,
    output::{
        self, Format, latency, short_bytes, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
    top::histogram::horizontal,
};

/// The width of the longest bar.
const BAR_WIDTH: usize = 30;
/// The intervals of the lengths of idle periods end at these lengths, in nanoseconds.
const LENGTHS_NS: [u64; 7] =
    [100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000, u64::MAX];

/// Options of `fathom devices`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows what the disks lie on, through partitions, logical volumes, arrays, loop devices and file
systems. The host's numbers include all programs. Busy is the share of the time during which the
device had requests in flight. The number behind a disk is that of its requests in flight.

If a layer of a device's disks has background work, the idle time of the device is shown, as guests'
requests leave it, and how long the idle periods were.

Examples:
  fathom devices                         the devices, measured for a second
  fathom devices --interval 10s
  fathom devices --json | jq '.devices[] | {name, disks, busy}'")]
pub struct DevicesOptions {
    /// Measure for this time
    #[arg(long, short, value_name = "TIME", default_value = "1s", value_parser = crate::top::interval)]
    interval: Nanoseconds,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report<'r> {
    /// The end of the interval, in nanoseconds since 1970.
    unix_time_ns: u64,
    /// Its length, in seconds.
    seconds: f64,
    devices: Vec<Line<'r>>,
}

/// A device in the interval.
#[derive(Serialize)]
struct Line<'r> {
    #[serde(flatten)]
    device: &'r DeviceStatus,
    /// The share of the time during which requests of any program were in flight.
    busy: Option<f64>,
    /// The rest of the time.
    idle: Option<f64>,
    reads_per_second: Option<f64>,
    read_bytes_per_second: Option<f64>,
    writes_per_second: Option<f64>,
    written_bytes_per_second: Option<f64>,
    /// The mean number of requests in flight.
    depth: Option<f64>,
}

impl<'r> Line<'r> {
    fn new(device: &'r DeviceStatus, before: &DeviceList, seconds: f64) -> Self {
        let earlier = before.device(&device.kind, &device.name).and_then(|device| device.host);
        let growth = device.host.zip(earlier).map(|(host, earlier)| host.since(&earlier));
        let per_second = |count: fn(&DeviceActivity) -> u64| {
            growth.map(|growth| count(&growth) as f64 / seconds)
        };
        let busy = per_second(|growth| growth.busy_ms).map(|ms| (ms / 1e3).min(1.0));
        Self {
            device,
            busy,
            idle: busy.map(|busy| 1.0 - busy),
            reads_per_second: per_second(|growth| growth.reads),
            read_bytes_per_second: per_second(|growth| growth.read_bytes),
            writes_per_second: per_second(|growth| growth.writes),
            written_bytes_per_second: per_second(|growth| growth.written_bytes),
            depth: per_second(|growth| growth.depth_ms).map(|ms| ms / 1e3),
        }
    }
}

/// Carries out the command.
pub fn run(options: &DevicesOptions) -> CommandResult {
    let client = options.control.client();
    let before = client.devices()?;
    thread::sleep(Duration::from_nanos(options.interval.0));
    let now = client.devices()?;
    let seconds = now.time_ns.saturating_sub(before.time_ns).max(1) as f64 / 1e9;
    let lines: Vec<Line<'_>> =
        now.devices.iter().map(|device| Line::new(device, &before, seconds)).collect();
    if options.format.json {
        let unix_time_ns = now.unix_time_ns;
        return output::json(&Report { unix_time_ns, seconds, devices: lines });
    }
    if lines.is_empty() {
        return output::text_line("The daemon serves no disk.");
    }
    output::text_line(&table(&lines).render(output::width(), Style::stdout()))?;
    for problem in now.devices.iter().flat_map(|device| &device.problems) {
        output::text_line(&format!("! {}", clean(problem)))?;
    }
    let mut shown: Vec<&DeviceIdle> = Vec::new();
    for idle in now.devices.iter().filter_map(|device| device.idle_time.as_ref()) {
        if shown.iter().any(|other| other.devices == idle.devices) {
            continue;
        }
        shown.push(idle);
        output::text_line(&format!("\n{}", title(idle)))?;
        if idle.periods.count() > 0 {
            output::text_line(&periods(idle).render(output::width(), Style::stdout()))?;
        }
    }
    Ok(())
}

/// The idle time of a device in words.
fn title(idle: &DeviceIdle) -> String {
    let all_ns = idle.idle_ns.saturating_add(idle.busy_ns).max(1);
    let share = idle.idle_ns as f64 / all_ns as f64 * 100.0;
    let names = clean(&idle.devices.join(" "));
    let (now, time) = (if idle.is_idle { "idle" } else { "busy" }, latency(all_ns));
    match idle.periods.count() {
        0 => format!("{names}: {now} now, idle for {share:.0} % of {time}"),
        1 => format!("{names}: {now} now, idle for {share:.0} % of {time}; before, 1 idle period"),
        count => format!(
            "{names}: {now} now, idle for {share:.0} % of {time}; before, {count} idle periods"
        ),
    }
}

/// The lengths of the idle periods of a device.
fn periods(idle: &DeviceIdle) -> Table {
    let mut table = Table::new([
        TableColumn::text("IDLE FOR").kept(),
        TableColumn::number("PERIODS").kept(),
        TableColumn::text("").importance(5),
    ]);
    let mut last = 0;
    let counts = LENGTHS_NS.map(|length_ns| {
        let count = idle.periods.count_to(length_ns);
        count - std::mem::replace(&mut last, count)
    });
    let largest = counts.iter().copied().max().unwrap_or(0).max(1);
    for (index, (length_ns, count)) in LENGTHS_NS.iter().zip(counts).enumerate() {
        let label = match (index.checked_sub(1), *length_ns) {
            (Some(before), u64::MAX) => format!("> {}", latency(LENGTHS_NS[before])),
            _ => format!("≤ {}", latency(*length_ns)),
        };
        let bar = horizontal(count as f64 / largest as f64, BAR_WIDTH);
        table.row([label, count.to_string(), bar]);
    }
    table
}

fn table(lines: &[Line<'_>]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DEVICE").kept(),
        TableColumn::text("KIND").importance(6),
        TableColumn::number("SIZE").optional().importance(2),
        TableColumn::number("FATHOM").importance(7),
        TableColumn::number("HOST").optional().importance(7),
        TableColumn::number("BUSY").optional().kept(),
        TableColumn::number("READ/S").optional().importance(5),
        TableColumn::number("READ").optional().importance(4),
        TableColumn::number("WRITE/S").optional().importance(5),
        TableColumn::number("WRITTEN").optional().importance(4),
        TableColumn::text("THROUGH").optional().flexible().importance(1),
        TableColumn::text("DISKS").flexible().kept(),
    ]);
    let some = |value: Option<f64>, show: fn(f64) -> String| value.map(show).unwrap_or_default();
    for line in lines {
        let device = line.device;
        let kind = match (device.kind.as_str(), device.rotational) {
            ("device", Some(true)) => "disk",
            ("device", Some(false)) => "ssd",
            (kind, _) => kind,
        };
        let size = device.size_bytes;
        let with_count = |disk: &String| match device.in_flight_of.get(disk) {
            Some(count) => format!("{disk} ({count})"),
            None => disk.clone(),
        };
        let mut disks: Vec<String> = device.disks.iter().map(with_count).collect();
        disks.extend(device.logs.iter().map(|disk| format!("log of {disk}")));
        table.row([
            clean(&device.name),
            clean(kind),
            if size > 0 { short_bytes(size as f64) } else { String::new() },
            device.in_flight.to_string(),
            device.host.map(|host| host.in_flight.to_string()).unwrap_or_default(),
            some(line.busy, |busy| format!("{:.0} %", busy * 100.0)),
            some(line.reads_per_second, short_number),
            some(line.read_bytes_per_second, short_bytes),
            some(line.writes_per_second, short_number),
            some(line.written_bytes_per_second, short_bytes),
            clean(&device.through.join(" ")),
            clean(&disks.join(", ")),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use fathom_control::Histogram;

    use super::*;

    #[test]
    fn every_idle_period_has_a_place() {
        let mut lengths = Histogram::default();
        for (length_ns, count) in [(50_000, 2), (5_000_000, 30), (60_000_000_000, 1)] {
            lengths.record(length_ns, count);
        }
        let idle = DeviceIdle {
            devices: vec!["sda".into(), "sdb".into()],
            is_idle: true,
            idle_ns: 75_000_000_000,
            busy_ns: 25_000_000_000,
            periods: lengths,
        };
        assert_eq!(
            title(&idle),
            "sda sdb: idle now, idle for 75 % of 100 s; before, 33 idle periods"
        );
        let text = periods(&idle).render(None, Style::PLAIN);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(lines.len(), 8, "{text}");
        assert!(lines[1].starts_with("≤ 100 µs") && lines[1].contains(" 2 "), "{text}");
        assert!(lines[3].contains(" 30 ") && lines[3].ends_with(&"█".repeat(30)), "{text}");
        assert!(lines[7].starts_with("> 10.0 s") && lines[7].contains(" 1 "), "{text}");
    }

    #[test]
    fn the_disks_with_requests_in_flight_have_their_number() {
        let device = DeviceStatus {
            name: "sda".into(),
            disks: vec!["a".into(), "b".into()],
            in_flight: 3,
            in_flight_of: [("b".to_owned(), 3)].into(),
            ..DeviceStatus::default()
        };
        let line = Line::new(&device, &DeviceList::default(), 1.0);
        let text = table(&[line]).render(None, Style::PLAIN);
        assert!(text.contains("a, b (3)"), "{text}");
    }
}

//! `fathom devices`: shows the devices beneath the disks.
use std::{thread, time::Duration};

use clap::Args;
use fathom_control::{DeviceActivity, DeviceList, DeviceStatus, Nanoseconds};
use serde::Serialize;

use crate::{
    connection::ControlOptions,
    failure::Outcome,
    output::{
        self, Format, short_bytes, short_number,
        style::Style,
        table::{Column, Table},
        text::clean,
    },
};

/// Options of `fathom devices`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows what the disks lie on, through partitions, logical volumes, arrays, loop devices and file
systems. The host's numbers include all programs. Busy is the share of the time during which the
device had requests in flight.

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
pub fn run(options: &DevicesOptions) -> Outcome {
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
    Ok(())
}

fn table(lines: &[Line<'_>]) -> Table {
    let mut table = Table::new([
        Column::text("DEVICE").kept(),
        Column::text("KIND").importance(6),
        Column::number("SIZE").optional().importance(2),
        Column::number("FATHOM").importance(7),
        Column::number("HOST").optional().importance(7),
        Column::number("BUSY").optional().kept(),
        Column::number("READ/S").optional().importance(5),
        Column::number("READ").optional().importance(4),
        Column::number("WRITE/S").optional().importance(5),
        Column::number("WRITTEN").optional().importance(4),
        Column::text("THROUGH").optional().flexible().importance(1),
        Column::text("DISKS").flexible().kept(),
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
        let mut disks = device.disks.clone();
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

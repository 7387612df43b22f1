//! `fathom background`: shows the background work of the disks' layers.
use clap::Args;
use fathom_control::BackgroundDevice;

use crate::{
    connection::ControlOptions,
    failure::CommandResult,
    output::{
        self, Format, latency, short_bytes, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
};

/// Options of `fathom background`.
#[derive(Debug, Args)]
#[command(after_help = "\
Layers do work for which no request waits, such as the write-back of a log, in steps while their
devices are idle. USED is the share of the idle time in which work waited that steps used; MET are
guests' requests that came during a step, and DELAY is how long such a step still took on average.

Examples:
  fathom background
  fathom background --json | jq '.devices[] | {devices, steps, forced_steps}'")]
pub struct BackgroundOptions {
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &BackgroundOptions) -> CommandResult {
    let list = options.control.client().background()?;
    if options.format.json {
        return output::json(&list);
    }
    if list.devices.is_empty() {
        return output::text_line("No disk has a layer with background work.");
    }
    output::text_line(&devices(&list.devices).render(output::width(), Style::stdout()))?;
    if list.devices.iter().all(|device| device.waiting.is_empty()) {
        return output::text_line("\nNo work waits.");
    }
    output::text_line("")?;
    output::text_line(&waiting(&list.devices).render(output::width(), Style::stdout()))
}

fn devices(devices: &[BackgroundDevice]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DEVICE").flexible().kept(),
        TableColumn::text("NOW").importance(6),
        TableColumn::number("IDLE").kept(),
        TableColumn::number("P50").importance(2),
        TableColumn::number("P95").importance(2),
        TableColumn::number("STEPS").importance(7),
        TableColumn::number("FORCED").importance(5),
        TableColumn::number("MOVED").importance(4),
        TableColumn::number("STEP").importance(3),
        TableColumn::number("USED").kept(),
        TableColumn::number("MET").kept(),
        TableColumn::number("DELAY").importance(6),
    ]);
    let share = |part: u64, whole: u64| match whole {
        0 => "–".to_owned(),
        _ => format!("{:.0} %", part as f64 / whole as f64 * 100.0),
    };
    for device in devices {
        let periods = &device.idle_periods;
        table.row([
            clean(&device.devices.join(" ")),
            if device.is_idle { "idle" } else { "busy" }.to_owned(),
            share(device.idle_ns, device.idle_ns.saturating_add(device.busy_ns)),
            latency(periods.percentile(50.0)),
            latency(periods.percentile(95.0)),
            short_number(device.steps as f64),
            short_number(device.forced_steps as f64),
            short_bytes(device.bytes as f64),
            latency(device.step_ns),
            share(device.used_ns, device.offered_ns),
            short_number(device.met_requests as f64),
            latency(device.met_ns.checked_div(device.met_steps).unwrap_or(0)),
        ]);
    }
    table
}

fn waiting(devices: &[BackgroundDevice]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible().kept(),
        TableColumn::text("WORK").kept(),
        TableColumn::number("WAITS").kept(),
        TableColumn::number("DUE IN").importance(5),
        TableColumn::text("").importance(3),
    ]);
    for work in devices.iter().flat_map(|device| &device.waiting) {
        table.row([
            clean(&work.disk),
            clean(&work.layer),
            short_bytes(work.bytes as f64),
            latency(work.deadline_in_ns),
            if work.is_running { "runs" } else { "" }.to_owned(),
        ]);
    }
    table
}

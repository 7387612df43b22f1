//! `fathom offload`: carries the load of a disk elsewhere, and shows it.

mod cluster;
mod history;

use clap::{Args, Subcommand};
use fathom_control::{OffloadAction, OffloadAnswer, OffloadDisk, OffloadRequest, OffloadState};

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

/// Commands for the layer `offload`.
#[derive(Debug, Subcommand)]
pub enum OffloadCommand {
    /// Carry the load of a disk elsewhere from now on
    Start(ChangeOptions),
    /// Let the load go to the disk again, and bring home what was carried
    Stop(ChangeOptions),
    /// Show which disks are carried, and what their devices' models foresee
    Status(StatusOptions),
    /// Show what the model of a disk's device foresaw in the last minutes, and what came
    History(history::HistoryOptions),
    /// Run a small Valkey cluster on this host, for trials
    Cluster(cluster::ClusterCommand),
    /// Remove the log of a disk from a cluster
    Forget(cluster::ForgetOptions),
}

/// Options of `fathom offload start` and `stop`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk needs a layer `offload`. What is started by hand stays until it is stopped by hand.

Examples:
  fathom offload start web
  fathom offload start web --dry-run     only reports what would be done
  fathom offload stop web --json | jq .disk.log_used_bytes")]
pub struct ChangeOptions {
    /// The disk
    #[arg(value_name = "DISK")]
    disk: String,
    /// Only report what would be done
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom offload status`.
#[derive(Debug, Args)]
#[command(after_help = "\
LOG are changes that are not at home yet. HITS are reads that copies of often-read blocks served.
The response times are those of the disk's requests at its device: at low load, now, and as the model
foresees them with a tenth more requests. PEAK names what says that there is one: the model, or what is
observed if the model is bad. ERROR is the model's.

Examples:
  fathom offload status
  fathom offload status web --json | jq '.disks[].forecast'")]
pub struct StatusOptions {
    /// Only this disk
    #[arg(value_name = "DISK")]
    disk: Option<String>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(command: &OffloadCommand) -> CommandResult {
    match command {
        OffloadCommand::Start(options) => change(options, OffloadAction::Start),
        OffloadCommand::Stop(options) => change(options, OffloadAction::Stop),
        OffloadCommand::Status(options) => status(options),
        OffloadCommand::History(options) => history::run(options),
        OffloadCommand::Cluster(options) => cluster::run(options),
        OffloadCommand::Forget(options) => cluster::forget(options),
    }
}

fn change(options: &ChangeOptions, action: OffloadAction) -> CommandResult {
    let request = OffloadRequest { action, dry_run: options.dry_run };
    let answer = options.control.client().change_offload(&options.disk, request)?;
    if options.format.json {
        return output::json(&answer);
    }
    output::text_line(&describe(&answer, action))
}

/// An answer in one line.
fn describe(answer: &OffloadAnswer, action: OffloadAction) -> String {
    let disk = &answer.disk;
    let name = clean(&disk.disk);
    let used = short_bytes(disk.log_used_bytes as f64);
    match (action, answer.is_changed, answer.dry_run) {
        (OffloadAction::Start, true, true) => {
            format!("{name}: its {} would be carried from now on", carried(disk))
        }
        (OffloadAction::Start, true, false) if disk.state != OffloadState::Carrying => {
            format!("{name}: its {} are carried as soon as its log answers", carried(disk))
        }
        (OffloadAction::Start, true, false) => format!("{name}: its {} are carried", carried(disk)),
        (OffloadAction::Start, false, _) => format!("{name}: is carried already"),
        (OffloadAction::Stop, true, true) => format!("{name}: {used} would be brought home"),
        (OffloadAction::Stop, true, false) if disk.log_used_bytes > 0 => {
            format!("{name}: {used} are brought home while its device is idle")
        }
        (OffloadAction::Stop, true, false) => format!("{name}: goes to its disk again"),
        (OffloadAction::Stop, false, _) => format!("{name}: was not carried"),
    }
}

/// What is carried, in words.
fn carried(disk: &OffloadDisk) -> &'static str {
    match disk.carries.as_str() {
        "reads" => "reads",
        "writes" => "writes",
        _ => "reads and writes",
    }
}

fn status(options: &StatusOptions) -> CommandResult {
    let report = options.control.client().offload(options.disk.as_deref())?;
    if options.format.json {
        return output::json(&report);
    }
    if report.disks.is_empty() {
        return output::text_line("No disk has a layer `offload`.");
    }
    output::text_line(&disks(&report.disks).render(output::width(), Style::stdout()))?;
    if report.disks.iter().any(|disk| disk.forecast.is_some()) {
        let forecasts = forecasts(&report.disks).render(output::width(), Style::stdout());
        output::text_line(&format!("\n{forecasts}"))?;
    }
    for disk in report.disks.iter().filter(|disk| !disk.failure.is_empty()) {
        output::text_line(&format!("! {}: {}", clean(&disk.disk), clean(&disk.failure)))?;
    }
    Ok(())
}

fn disks(disks: &[OffloadDisk]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible().kept(),
        TableColumn::text("STATE").kept(),
        TableColumn::text("BY").optional().importance(6),
        TableColumn::text("CARRIES").importance(2),
        TableColumn::number("LOG").kept(),
        TableColumn::number("OF").importance(4),
        TableColumn::number("COPIES").importance(5),
        TableColumn::number("HITS").importance(6),
        TableColumn::number("CARRIED").importance(3),
        TableColumn::number("STARTS").importance(1),
    ]);
    for disk in disks {
        table.row([
            clean(&disk.disk),
            disk.state.name().to_owned(),
            clean(&disk.by),
            clean(&disk.carries),
            short_bytes(disk.log_used_bytes as f64),
            short_bytes(disk.log_size_bytes as f64),
            short_bytes(disk.copies_used_bytes as f64),
            short_number(disk.hits as f64),
            short_number(disk.carried as f64),
            disk.starts.to_string(),
        ]);
    }
    table
}

fn forecasts(disks: &[OffloadDisk]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible().kept(),
        TableColumn::number("ARRIVE/S").importance(4),
        TableColumn::number("LOW").importance(3),
        TableColumn::number("P90").importance(3),
        TableColumn::number("NOW").kept(),
        TableColumn::number("P90").kept(),
        TableColumn::number("FORESEEN").kept(),
        TableColumn::number("P90").kept(),
        TableColumn::number("ERROR").importance(5),
        TableColumn::text("PEAK").optional().kept(),
    ]);
    let known = |time_ns: u64| match time_ns {
        0 => "–".to_owned(),
        _ => latency(time_ns),
    };
    for (disk, forecast) in disks.iter().filter_map(|disk| Some((disk, disk.forecast.as_ref()?))) {
        table.row([
            clean(&disk.disk),
            short_number(forecast.arrivals_per_second),
            known(forecast.low_mean_ns),
            known(forecast.low_p90_ns),
            known(forecast.observed_mean_ns),
            known(forecast.observed_p90_ns),
            known(forecast.predicted_mean_ns),
            known(forecast.predicted_p90_ns),
            format!("{:.0} %", forecast.error * 100.0),
            if forecast.is_peak { clean(&forecast.source) } else { String::new() },
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use fathom_control::OffloadForecast;

    use super::*;

    fn disk() -> OffloadDisk {
        OffloadDisk {
            disk: "web".into(),
            state: OffloadState::Carrying,
            carries: "both".into(),
            by: "hand".into(),
            log_used_bytes: 3 << 20,
            log_size_bytes: 1 << 30,
            carried: 700,
            hits: 30,
            starts: 2,
            forecast: Some(OffloadForecast {
                observed_mean_ns: 6_000_000,
                predicted_p90_ns: 20_000_000,
                is_peak: true,
                source: "model".into(),
                ..OffloadForecast::default()
            }),
            ..OffloadDisk::default()
        }
    }

    #[test]
    fn an_answer_is_one_line() {
        let answer = |is_changed, dry_run| OffloadAnswer { disk: disk(), is_changed, dry_run };
        let (start, stop) = (OffloadAction::Start, OffloadAction::Stop);
        assert_eq!(describe(&answer(true, false), start), "web: its reads and writes are carried");
        assert_eq!(describe(&answer(false, false), start), "web: is carried already");
        assert_eq!(describe(&answer(true, true), stop), "web: 3.00M would be brought home");
        assert_eq!(
            describe(&answer(true, false), stop),
            "web: 3.00M are brought home while its device is idle"
        );
    }

    #[test]
    fn what_is_unknown_is_not_shown_as_zero() {
        let text = disks(&[disk()]).render(None, Style::PLAIN);
        assert!(text.contains("carrying") && text.contains(" 30 "), "{text}");
        let text = forecasts(&[disk(), OffloadDisk::default()]).render(None, Style::PLAIN);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[1].contains('–') && lines[1].contains("model"), "{text}");
    }
}

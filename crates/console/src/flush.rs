//! `fathom flush`: makes a guest write its dirty data.
use std::time::Duration;

use clap::Args;
use fathom_control::{FlushReport, FlushWay};
use indicatif::{ProgressBar, ProgressDrawTarget};

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{self, Format, latency, short_bytes},
};

/// The interval between two drawings of the progress.
const TICK: Duration = Duration::from_millis(200);

/// Options of `fathom flush`.
#[derive(Debug, Args)]
#[command(after_help = "\
The configuration has to allow the way, in the table [[guest]] of the virtual machine.

  sysrq      sends the keys of the kernel's emergency sync, by QEMU's machine protocol
  tunables   lowers vm.dirty_expire_centisecs in the guest's memory until the data is written; do not
             migrate the guest meanwhile
  agent      runs `sync` by the QEMU guest agent, which has to be installed in the guest
  balloon    takes memory from the guest until the data is written; slow, and it evicts cached files

Examples:
  fathom flush web                       by the first way in the configuration
  fathom flush web --by sysrq
  fathom flush web --json | jq .written_bytes")]
pub struct FlushOptions {
    /// The guest's virtual machine, the `vm` of its disks
    #[arg(value_name = "GUEST")]
    guest: String,
    /// The way
    #[arg(long, value_name = "WAY", value_parser = way)]
    by: Option<FlushWay>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

fn way(text: &str) -> Result<FlushWay, String> {
    let ways = FlushWay::ALL;
    ways.into_iter().find(|way| way.name() == text).ok_or_else(|| {
        let names: Vec<&str> = ways.iter().map(|way| way.name()).collect();
        format!("choose one of {}", names.join(", "))
    })
}

/// Carries out the command.
pub fn run(options: &FlushOptions) -> CommandResult {
    let progress = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    progress.set_message(format!("{} writes its dirty data", options.guest));
    progress.set_style(indicatif::ProgressStyle::default_spinner());
    progress.enable_steady_tick(TICK);
    let report = options.control.client().flush_guest(&options.guest, options.by);
    progress.finish_and_clear();
    let report = report?;
    if options.format.json {
        output::json(&report)?;
    } else {
        output::text_line(&describe(&report))?;
    }
    if report.is_complete {
        return Ok(());
    }
    let message = format!("{} has not written all its dirty data", report.vm);
    Err(Failure::new(message).advise("its disks may be slow, or it writes all the time: try again"))
}

/// The result in one line.
fn describe(report: &FlushReport) -> String {
    let mut text = format!("{}: ", report.vm);
    if let (Some(before), Some(after)) = (report.dirty_before_bytes, report.dirty_after_bytes) {
        text += &format!(
            "{} dirty before, {} after; ",
            short_bytes(before as f64),
            short_bytes(after as f64)
        );
    }
    text += &format!("{} written", short_bytes(report.written_bytes as f64));
    if let (Some(first), Some(last)) = (report.first_write_ns, report.last_write_ns) {
        text += &format!(", first write after {}, last after {}", latency(first), latency(last));
    }
    text + &format!(" (by {})", report.by)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_one_line() {
        let mut report = FlushReport {
            vm: "web".into(),
            by: FlushWay::Sysrq,
            is_complete: true,
            dirty_before_bytes: Some(20 << 20),
            dirty_after_bytes: Some(0),
            written_bytes: 21 << 20,
            first_write_ns: Some(3_000_000),
            last_write_ns: Some(120_000_000),
            time_ns: 230_000_000,
        };
        assert_eq!(
            describe(&report),
            "web: 20.0M dirty before, 0 after; 21.0M written, first write after 3.0 ms, \
             last after 120 ms (by sysrq)"
        );
        (report.dirty_before_bytes, report.first_write_ns) = (None, None);
        assert_eq!(describe(&report), "web: 21.0M written (by sysrq)");
        assert_eq!(way("tunables"), Ok(FlushWay::Tunables));
        assert_eq!(way("sync"), Err("choose one of sysrq, tunables, agent, balloon".into()));
    }
}

//! `fathom pager`: what the host has swapped out of guests' memory, and the pagers of this host.

mod attached;
mod swapped;
mod work;

use clap::{Args, Subcommand};
use fathom_control::{Bytes, GuestPager, PagerGuest};

use crate::connection::ControlOptions;
use crate::failure::CommandResult;
use crate::output::Format;
use crate::output::text::clean;

pub use attached::PagerHelper;

/// Options of `fathom pager`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
RESIDENT is what is in the host's memory, SWAPPED what the host has swapped out, and AWAY what a pager has
taken away; a dash is what is not known. The disks are those with the layer `swap-watch`, since they have it:
  STALE READS  swapped pages that came in only to be overwritten by a read of the disk
  DOUBLE       swapped pages that came in only to be written to the disk
  SILENT       of the pages that were equal to a block of the disk and were swapped out, those that came
               back unchanged: at least so much was written to swap for nothing
  REREAD       blocks that were read again while the page that had them was swapped out: at most so much
SILENT and REREAD are estimates from a sample; behind ± is their standard error.

Examples:
  fathom disk layer web swap-watch       count the needless I/O of a disk from now on
  fathom pager                           all guests on vhost-user disks
  fathom pager web
  fathom pager list                      the pagers of this host
  fathom pager --json | jq '.guests[] | {vm, resident_bytes, swapped_bytes}'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct PagerOptions {
    #[command(subcommand)]
    command: Option<PagerCommand>,
    /// The guest: the name of its machine or of one of its disks; all by default
    #[arg(value_name = "GUEST")]
    guest: Option<String>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// A command for the pagers of this host.
#[derive(Debug, Subcommand)]
enum PagerCommand {
    /// Attach to a machine that runs, and serve the faults of its memory
    Attach(attached::AttachCommand),
    /// Take up what a pager that died has left
    Adopt(attached::AdoptCommand),
    /// Change how much of a machine's memory is to be in the host's memory
    Limit(attached::LimitCommand),
    /// Leave a machine's memory to the host's kernel again
    Detach(attached::DetachCommand),
    /// List the machines that have or had a pager
    List(attached::ListCommand),
}

/// The name of a guest for display: its machine's name, or its disks' names.
pub fn guest_name(guest: &PagerGuest) -> String {
    clean(&if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() })
}

/// What a pager reports, in a line.
pub fn summary(pager: &GuestPager) -> String {
    let of_limit = match pager.limit_bytes {
        0 => "no limit".to_owned(),
        limit => format!("a limit of {}", Bytes(limit)),
    };
    let file = match pager.file_bytes {
        0 => String::new(),
        bytes => format!(" and {} of a swap file", Bytes(bytes)),
    };
    format!(
        "{}, {of_limit}: {} in memory, {} away in {}{file}",
        pager.state.name(),
        Bytes(pager.resident_bytes),
        Bytes(pager.away_bytes),
        Bytes(pager.store_bytes)
    )
}

/// Carries out the command.
pub fn run(options: &PagerOptions) -> CommandResult {
    match &options.command {
        None => swapped::run(&options.control, options.guest.as_deref(), options.format.json),
        Some(PagerCommand::Attach(command)) => attached::attach(command),
        Some(PagerCommand::Adopt(command)) => attached::adopt(command),
        Some(PagerCommand::Limit(command)) => attached::limit(command),
        Some(PagerCommand::Detach(command)) => attached::detach(command),
        Some(PagerCommand::List(command)) => attached::list(command),
    }
}

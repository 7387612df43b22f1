//! `fathom log`: the logs of the layers `wal` and `offload`.

mod create;

use clap::Subcommand;

use crate::failure::CommandResult;

/// The logs of the layers `wal` and `offload`.
#[derive(Debug, Subcommand)]
pub enum LogCommand {
    /// Prepare a place on a block device for a log
    #[command(after_help = "\
The daemon makes the file of a log, but on a device only where this command has prepared the place: a device that
was named by mistake is not overwritten. A place with a log stays as it is.

Examples:
  fathom log create /dev/nvme0n1p4                 all of a partition
  fathom log create /dev/nvme0n1p4 --offset 1G     the place of another disk's log
  fathom log create /dev/nvme0n1p4 --force         although there is a file system")]
    Create(create::CreateLogOptions),
}

/// Carries out a command.
pub fn run(command: &LogCommand) -> CommandResult {
    match command {
        LogCommand::Create(options) => create::run(options),
    }
}

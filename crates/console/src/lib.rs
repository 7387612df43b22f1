//! The fathom commands: faces of the control interface.
//!
//! [`Command`] is the part of the `fathom` command line that is not the daemon's; [`run`] carries
//! it out. Everything about a running daemon goes through `fathom_control`'s client.
//!
//! Exit status: 0 done, 1 failed, 2 the command line makes no sense.

mod connection;
mod disk;
mod failure;
pub mod load;
mod output;
mod process;
mod random;
mod top;
mod vm;

use std::process::ExitCode;

use clap::Subcommand;

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Virtual disks: images, and the disks of the running daemon
    #[command(subcommand)]
    Disk(disk::DiskCommand),
    /// Show what the daemon's disks do, live
    Top(top::TopOptions),
    /// Start a virtual machine on Fathom's disks, or print its QEMU command line
    Vm(Box<vm::VmOptions>),
}

/// Carries out a command.
pub fn run(command: Command) -> ExitCode {
    let done = |()| 0;
    let outcome = match &command {
        Command::Disk(command) => disk::run(command).map(done),
        Command::Top(options) => top::run(options).map(done),
        Command::Vm(options) => vm::run(options),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(failure) => failure.report(),
    }
}

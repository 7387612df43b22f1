//! The fathom commands: faces of the control interface.
//!
//! [`Command`] is the part of the `fathom` command line that is not the daemon's; [`run`] carries
//! it out. Everything about a running daemon goes through `fathom_control`'s client.
//!
//! Exit status: 0 done, 1 failed, 2 the command line makes no sense.

#![allow(clippy::format_push_string, reason = "what is printed is put together for reading")]

mod bench;
mod connection;
mod disk;
mod doctor;
mod events;
mod failure;
mod generate;
mod inspect;
pub mod load;
mod monitor;
mod output;
mod process;
mod query;
mod random;
mod record;
mod top;
mod usage;
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
    /// Show the files that a disk is busy with
    Files(usage::FilesOptions),
    /// List slow requests, and tell all that is known of one
    ExplainIo(usage::ExplainOptions),
    /// Run standing queries in CQL over live or recorded events
    Query(Box<query::QueryOptions>),
    /// Say how queries in CQL are carried out, and what they give
    Explain(query::ExplainOptions),
    /// Run standing queries in CQL over the events of many hosts
    Monitor(Box<monitor::MonitorOptions>),
    /// Record the events of the daemon's disks into a file
    Record(Box<record::RecordOptions>),
    /// Start a virtual machine on Fathom's disks, or print its QEMU command line
    Vm(Box<vm::VmOptions>),
    /// Measure a disk, without a guest
    Bench(Box<bench::BenchOptions>),
    /// Say what of Fathom works on this host, and why not
    Doctor(doctor::DoctorOptions),
    /// Say what an image of a guest's memory tells: kernel, cached files, processes
    Inspect(inspect::InspectOptions),
    /// Print a shell's completion script
    Completions(generate::CompletionsOptions),
    /// Print or write the manual pages
    Man(generate::ManOptions),
}

/// Carries out a command.
///
/// Completions and manual pages are those of the console's commands alone; [`run_within`] knows
/// the others too.
pub fn run(command: Command) -> ExitCode {
    let root = clap::Command::new("fathom").about("A virtual disk server for VM hosts");
    run_within(command, Command::augment_subcommands(root))
}

/// Carries out a command of the given command line, which is the one to be completed and described
/// in manual pages.
#[allow(clippy::needless_pass_by_value, reason = "a command is carried out once")]
pub fn run_within(command: Command, definition: clap::Command) -> ExitCode {
    let done = |()| 0;
    let outcome = match &command {
        Command::Disk(command) => disk::run(command).map(done),
        Command::Top(options) => top::run(options).map(done),
        Command::Files(options) => usage::files(options).map(done),
        Command::ExplainIo(options) => usage::explain(options).map(done),
        Command::Query(options) => query::run(options).map(done),
        Command::Monitor(options) => monitor::run(options).map(done),
        Command::Explain(options) => query::explain(options).map(done),
        Command::Record(options) => record::run(options).map(done),
        Command::Vm(options) => vm::run(options),
        Command::Bench(options) => bench::run(options).map(done),
        Command::Doctor(options) => doctor::run(options),
        Command::Inspect(options) => inspect::run(options).map(done),
        Command::Completions(options) => generate::completions(options, definition).map(done),
        Command::Man(options) => generate::man(options, definition).map(done),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(failure) => failure.report(),
    }
}

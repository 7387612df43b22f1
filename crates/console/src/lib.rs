//! The fathom commands, which speak to the daemon through its control interface.
//!
//! Read [`Command`] first. The crate must not know how the daemon carries a request out.
//!
//! [`Command`] is the part of the `fathom` command line that does not start the daemon; [`run`]
//! carries it out. All access to a running daemon goes through the client of `fathom_control`.
//!
//! Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.

#![allow(clippy::format_push_string, reason = "it keeps the code that builds output readable")]
// What is printed passes `output::screen`.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

#[macro_use]
mod output;
mod audit;
mod pager;

mod background;
mod bench;
mod cache;
mod config;
mod connection;
mod devices;
mod dirty;
mod disk;
mod doctor;
mod events;
mod failure;
mod flush;
mod generate;
mod inspect;
mod lifetimes;
pub mod load;
mod log;
mod monitor;
mod offload;
mod patterns;
mod process;
mod processes;
mod query;
mod random;
mod record;
mod replay;
mod snapshot;
mod store;
mod top;
mod usage;
mod vm;
mod web;

use std::process::ExitCode;

use clap::Subcommand;

pub use log::LogCommand;
pub use pager::PagerHelper;

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Virtual disks: images, and the disks of the running daemon
    #[command(subcommand)]
    Disk(disk::DiskCommand),
    /// Show what the daemon's disks do, live
    Top(top::TopOptions),
    /// Show the devices beneath the disks, and how busy they are
    Devices(devices::DevicesOptions),
    /// Show the work that layers do while their devices are idle
    Background(background::BackgroundOptions),
    /// The caches of the daemon's disks
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// The logs of the layers `wal` and `offload`: a group that the binary makes, because the
    /// server has some of its commands.
    #[command(skip)]
    Log(LogCommand),
    /// Changes of the running daemon that its configuration file does not have
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Carry the load of a disk elsewhere while its device is contended
    #[command(subcommand)]
    Offload(offload::OffloadCommand),
    /// Show the files that a disk is busy with
    Files(usage::FilesOptions),
    /// Show data in guests' memory that they have not written yet
    Dirty(dirty::DirtyOptions),
    /// Show what processes of guests read and write, and what they wait for
    Processes(processes::ProcessesOptions),
    /// Show which files of guests were copied or encrypted
    Patterns(patterns::PatternsOptions),
    /// Show how long what guests write lives until it is overwritten or deleted
    Lifetimes(lifetimes::LifetimesOptions),
    /// Show what the host has swapped out of guests' memory; attach pagers to machines
    Pager(pager::PagerOptions),
    /// List slow requests, and show everything known about one
    ExplainIo(usage::ExplainOptions),
    /// Pools of the block store, and their volumes
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Snapshots of disks in pools, their clones, and roll-backs
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Make a guest write its dirty data
    Flush(flush::FlushOptions),
    /// Run standing queries in CQL over live or recorded events
    Query(Box<query::QueryOptions>),
    /// Show how queries in CQL run, and the columns of their results
    Explain(query::ExplainOptions),
    /// Run standing queries in CQL over the events of many hosts
    Monitor(Box<monitor::MonitorOptions>),
    /// Record the events of the daemon's disks into a file
    Record(Box<record::RecordOptions>),
    /// Compare caches and their policies over a recording or a trace, without a disk
    Replay(Box<replay::ReplayOptions>),
    /// Show what daemons do on a page for browsers
    Web(Box<web::WebOptions>),
    /// Start a virtual machine on Fathom's disks, or print its QEMU command line
    Vm(Box<vm::VmOptions>),
    /// Measure a disk, without a guest
    Bench(Box<bench::BenchOptions>),
    /// Show who has changed what
    Audit(audit::AuditOptions),
    /// Show which parts of Fathom work on this host, and why others do not
    Doctor(doctor::DoctorOptions),
    /// Show the kernel, cached files and processes in an image of a guest's memory
    Inspect(inspect::InspectOptions),
    /// Print a shell's completion script
    Completions(generate::CompletionsOptions),
    /// Print or write the manual pages
    Man(generate::ManOptions),
}

/// Carries out a command.
///
/// Completions and manual pages cover the console's commands alone; with [`run_within`] they cover
/// all commands of `definition`.
pub fn run(command: Command) -> ExitCode {
    let root = clap::Command::new("fathom").about("A virtual disk server for VM hosts");
    run_within(command, Command::augment_subcommands(root))
}

/// Carries out a command of the command line `definition`, for which completions and manual pages
/// are made.
#[allow(clippy::needless_pass_by_value, reason = "a command runs once")]
pub fn run_within(command: Command, definition: clap::Command) -> ExitCode {
    let done = |()| 0;
    let outcome = match &command {
        Command::Disk(command) => disk::run(command).map(done),
        Command::Top(options) => top::run(options).map(done),
        Command::Devices(options) => devices::run(options).map(done),
        Command::Background(options) => background::run(options).map(done),
        Command::Cache(command) => cache::run(command).map(done),
        Command::Log(command) => log::run(command).map(done),
        Command::Config(command) => config::run(command).map(done),
        Command::Offload(command) => offload::run(command).map(done),
        Command::Files(options) => usage::files(options).map(done),
        Command::Dirty(options) => dirty::run(options).map(done),
        Command::Processes(options) => processes::run(options).map(done),
        Command::Patterns(options) => patterns::run(options).map(done),
        Command::Lifetimes(options) => lifetimes::run(options).map(done),
        Command::Pager(options) => pager::run(options).map(done),
        Command::ExplainIo(options) => usage::explain(options).map(done),
        Command::Store(command) => store::run(command).map(done),
        Command::Snapshot(command) => snapshot::run(command).map(done),
        Command::Flush(options) => flush::run(options).map(done),
        Command::Query(options) => query::run(options).map(done),
        Command::Monitor(options) => monitor::run(options).map(done),
        Command::Explain(options) => query::explain(options).map(done),
        Command::Record(options) => record::run(options).map(done),
        Command::Replay(options) => replay::run(options).map(done),
        Command::Web(options) => web::run(options).map(done),
        Command::Vm(options) => vm::run(options),
        Command::Bench(options) => bench::run(options).map(done),
        Command::Audit(options) => audit::run(options).map(done),
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

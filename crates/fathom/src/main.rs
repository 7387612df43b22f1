//! The `fathom` command: the daemon, and the commands that use its control interface.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, Parser, Subcommand};

/// The version, and the commit from which it was built; see `build.rs`.
const VERSION: &str = env!("FATHOM_VERSION");

/// A virtual disk server for VM hosts
#[derive(Debug, Parser)]
#[command(name = "fathom", version = VERSION, propagate_version = true, max_term_width = 100)]
struct Fathom {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Daemon(DaemonCommand),
    #[command(
        subcommand,
        about = "Prepare a place for a log; keep or discard what a refused log has"
    )]
    Log(LogCommand),
    #[command(flatten)]
    Console(fathom_console::Command),
}

/// The commands that are daemons.
#[derive(Debug, Subcommand)]
enum DaemonCommand {
    #[command(about = "Serve disks to guests and NBD clients: the daemon")]
    Serve(Box<fathom_server::Serve>),
    #[command(hide = true)]
    Keep(fathom_server::Keep),
    #[command(hide = true)]
    Confine(fathom_server::Confine),
    #[command(hide = true)]
    PagerHelper(fathom_console::PagerHelper),
}

impl DaemonCommand {
    /// The names.
    const NAMES: [&str; 4] = ["serve", "keep", "confine", "pager-helper"];

    fn run(&self, begun: Instant) -> ExitCode {
        match self {
            Self::Serve(options) => fathom_server::serve(options, begun),
            Self::Keep(options) => fathom_server::keep(options),
            Self::Confine(options) => fathom_server::confine(options),
            Self::PagerHelper(helper) => helper.run(),
        }
    }
}

/// The command line of a daemon, which starts without the definitions of all other commands.
#[derive(Debug, Parser)]
#[command(name = "fathom", version = VERSION, propagate_version = true, max_term_width = 100)]
struct FathomDaemon {
    #[command(subcommand)]
    command: DaemonCommand,
}

/// The commands for logs: those of both sides.
#[derive(Debug, Subcommand)]
enum LogCommand {
    #[command(flatten)]
    Console(fathom_console::LogCommand),
    #[command(flatten)]
    Server(fathom_server::LogCommand),
}

fn main() -> ExitCode {
    let begun = Instant::now();
    let first = std::env::args_os().nth(1);
    if first.is_some_and(|first| DaemonCommand::NAMES.iter().any(|name| first == *name)) {
        return FathomDaemon::parse().command.run(begun);
    }
    match Fathom::parse().command {
        Command::Daemon(command) => command.run(begun),
        Command::Log(LogCommand::Server(command)) => fathom_server::settle_log(&command),
        Command::Log(LogCommand::Console(command)) => {
            let command = fathom_console::Command::Log(command);
            fathom_console::run_within(command, Fathom::command())
        }
        Command::Console(command) => fathom_console::run_within(command, Fathom::command()),
    }
}

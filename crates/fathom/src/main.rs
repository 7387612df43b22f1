//! The `fathom` command: the daemon, and the commands that use its control interface.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, Parser, Subcommand};

/// A virtual disk server for VM hosts
#[derive(Debug, Parser)]
#[command(name = "fathom", version, propagate_version = true, max_term_width = 100)]
struct Fathom {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(about = "Serve disks to guests and NBD clients: the daemon")]
    Serve(Box<fathom_server::Serve>),
    #[command(hide = true)]
    Keep(fathom_server::Keep),
    #[command(subcommand, about = "Keep or discard the changes of a log that is not served")]
    Log(fathom_server::LogCommand),
    #[command(flatten)]
    Console(fathom_console::Command),
}

fn main() -> ExitCode {
    let begun = Instant::now();
    match Fathom::parse().command {
        Command::Serve(options) => fathom_server::serve(&options, begun),
        Command::Keep(options) => fathom_server::keep(&options),
        Command::Log(command) => fathom_server::settle_log(&command),
        Command::Console(command) => fathom_console::run_within(command, Fathom::command()),
    }
}

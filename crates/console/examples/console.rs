//! The console's commands alone, without the daemon's.
use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "fathom", version)]
struct Arguments {
    #[command(subcommand)]
    command: fathom_console::Command,
}

fn main() -> ExitCode {
    fathom_console::run(Arguments::parse().command)
}

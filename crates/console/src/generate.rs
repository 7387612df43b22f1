//! `fathom completions` and `fathom man`: generated from the definitions of the command line.
use std::{io, path::PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::{
    failure::{CommandResult, Failure},
    output,
};

/// Options of `fathom completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fathom completions bash > /etc/bash_completion.d/fathom
  fathom completions zsh > \"${fpath[1]}/_fathom\"
  fathom completions fish > ~/.config/fish/completions/fathom.fish")]
pub struct CompletionsOptions {
    /// The shell to write the script for
    #[arg(value_enum)]
    shell: Shell,
}

/// Options of `fathom man`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fathom man | man -l -                    read the page of the command itself
  fathom man /usr/local/share/man/man1     install a page for each command")]
pub struct ManOptions {
    /// Write a page for each command into this directory, instead of one to standard output
    directory: Option<PathBuf>,
}

/// Prints a completion script.
pub fn completions(options: &CompletionsOptions, mut definition: Command) -> CommandResult {
    let name = definition.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut definition, name, &mut script);
    output::text_line(String::from_utf8_lossy(&script).trim_end())
}

/// Prints or writes manual pages.
pub fn man(options: &ManOptions, definition: Command) -> CommandResult {
    let failed = |error: io::Error| Failure::new(format!("cannot write the manual: {error}"));
    let Some(directory) = &options.directory else {
        let mut page = Vec::new();
        clap_mangen::Man::new(definition).render(&mut page).map_err(failed)?;
        return output::text_line(String::from_utf8_lossy(&page).trim_end());
    };
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(definition, directory))
        .map_err(|error| Failure::io("write to", directory, &error))
}

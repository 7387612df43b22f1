//! Help, completions and manual pages, which are generated from the same definitions.
mod common;

use std::fs;

use clap::Subcommand;
use common::run;
use fathom_console::Command;

/// The command line without `fathom serve` and `fathom log`.
fn definition() -> clap::Command {
    Command::augment_subcommands(clap::Command::new("fathom"))
}

/// The words of an example line, parsed as by a shell, without its comment, up to a pipe, a
/// redirection or the description beside it.
fn words(line: &str) -> Vec<String> {
    let mut example = String::new();
    for part in line.split_inclusive("   ") {
        example.push_str(part);
        // Spaces within quotes belong to the command.
        if let Some(mut words) = shlex::split(&example) {
            let end = words.iter().position(|word| matches!(word.as_str(), "|" | ">" | "<" | "&"));
            words.truncate(end.unwrap_or(words.len()));
            return words;
        }
    }
    panic!("a quotation is not closed: {line}");
}

/// The lines that begin with `fathom`; lines continued by a backslash are joined.
fn examples(text: &str) -> Vec<String> {
    let joined = text.split("\\\n").map(str::trim_start).collect::<Vec<_>>().join("");
    let lines = joined.lines().map(str::trim);
    let lines = lines.map(|line| line.strip_prefix("$ ").unwrap_or(line));
    let is_server = |line: &str| {
        ["serve", "log "]
            .map(|name| format!("fathom {name}"))
            .iter()
            .any(|name| line.starts_with(name))
    };
    let ours = lines.filter(|line| line.starts_with("fathom ") && !is_server(line));
    ours.map(str::to_owned).collect()
}

fn check_examples(text: &str, place: &str) -> usize {
    let examples = examples(text);
    for example in &examples {
        let parsed = definition().try_get_matches_from(words(example));
        if let Err(error) = parsed {
            assert!(!error.use_stderr(), "{place}: {example}: {error}");
        }
    }
    examples.len()
}

#[test]
fn every_example_in_the_help_is_a_command() {
    fn visit(command: &clap::Command) -> usize {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let own = check_examples(&help, command.get_name());
        own + command.get_subcommands().map(visit).sum::<usize>()
    }
    assert!(visit(&definition()) > 25);
}

#[test]
fn the_manual_names_every_command_and_its_examples_are_commands() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/commands.md");
    let text = fs::read_to_string(path).expect("docs/commands.md is there");
    assert!(check_examples(&text, "docs/commands.md") > 15);
    for command in definition().get_subcommands() {
        let names: Vec<String> = if command.has_subcommands() {
            let of =
                |sub: &clap::Command| format!("fathom {} {}", command.get_name(), sub.get_name());
            command.get_subcommands().map(of).collect()
        } else {
            vec![format!("fathom {}", command.get_name())]
        };
        for name in names {
            assert!(text.contains(&name), "docs/commands.md does not mention `{name}`");
        }
    }
}

#[test]
fn every_shell_gets_a_completion_script() {
    let directory = tempfile::tempdir().expect("a directory");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (status, stdout, stderr) = run(directory.path(), &["completions", shell]);
        assert_eq!(status, 0, "{shell}: {stderr}");
        for word in ["fathom", "resize", "doctor", "preallocate", "explain-io", "container"] {
            assert!(stdout.contains(word), "{word} is missing for {shell}");
        }
    }
    assert_eq!(run(directory.path(), &["completions", "cmd.exe"]).0, 2);
}

#[test]
fn every_command_gets_a_manual_page() {
    let directory = tempfile::tempdir().expect("a directory");
    assert_eq!(run(directory.path(), &["man", "man1"]).0, 0);
    for page in [
        "fathom",
        "fathom-disk",
        "fathom-disk-import",
        "fathom-vm",
        "fathom-top",
        "fathom-files",
        "fathom-dirty",
        "fathom-explain-io",
        "fathom-query",
        "fathom-explain",
    ] {
        let text = fs::read_to_string(directory.path().join(format!("man1/{page}.1")));
        assert!(text.expect("the page is there").contains(".SH"), "{page}");
    }
    let (status, stdout, _) = run(directory.path(), &["man"]);
    assert!(status == 0 && stdout.contains(".TH fathom 1"));
}

#[test]
fn every_help_has_examples() {
    let directory = tempfile::tempdir().expect("a directory");
    for command in [
        "disk create",
        "disk info",
        "disk check",
        "disk resize",
        "disk import",
        "disk add",
        "disk recover",
        "disk remove",
        "disk list",
        "vm",
        "top",
        "files",
        "devices",
        "dirty",
        "background",
        "explain-io",
        "query",
        "replay",
        "explain",
        "inspect",
        "bench",
        "doctor",
        "completions",
        "man",
    ] {
        let arguments: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let (status, stdout, _) = run(directory.path(), &arguments);
        assert_eq!(status, 0);
        assert!(stdout.contains("Example") && stdout.contains("fathom "), "{command}:\n{stdout}");
    }
}

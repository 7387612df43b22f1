//! `fathom config`: how the running daemon differs from its configuration file.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use fathom_control::{
    ConfigurationReport, Deviation, DeviationKind, DiskDefinition, RevertRequest,
};
use serde_json::Value;

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::{self, Format};

/// Changes of the running daemon that its configuration file does not have.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Show how the running disks differ from the file
    #[command(after_help = "\
A change that lasts is also there after a restart. One that does not ends with the daemon.

Example:
  fathom config diff")]
    Diff(DiffOptions),
    /// Write the disks that differ as tables for the file
    #[command(after_help = "\
The configuration file is not changed: paste the tables into it instead of those of the same
disks, then reload. Without --all, only disks that differ are written.

Examples:
  fathom config save                       print the tables
  fathom config save --output changes.toml   write them into a new file")]
    Save(SaveOptions),
    /// Bring a disk, or all, back to what the file says
    #[command(after_help = "\
The record of the change is set aside: `fathom config diff` shows it.

Examples:
  fathom config revert web-root
  fathom config revert --all")]
    Revert(RevertOptions),
}

/// Options of `fathom config diff`.
#[derive(Debug, Args)]
pub struct DiffOptions {
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom config save`.
#[derive(Debug, Args)]
pub struct SaveOptions {
    /// Write into this new file; an existing one is not replaced
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom config revert`.
#[derive(Debug, Args)]
pub struct RevertOptions {
    /// The disk's name
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    disk: Option<String>,
    /// All disks
    #[arg(long)]
    all: bool,
    /// Remove an added disk even if a virtual machine or an NBD client uses it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out a command.
pub fn run(command: &ConfigCommand) -> CommandResult {
    match command {
        ConfigCommand::Diff(options) => diff(options),
        ConfigCommand::Save(options) => save(options),
        ConfigCommand::Revert(options) => revert(options),
    }
}

fn diff(options: &DiffOptions) -> CommandResult {
    let report = options.control.client().configuration()?;
    if options.format.json {
        return output::json(&report);
    }
    if !report.file_problem.is_empty() {
        output::text_line(&format!("The file cannot be read now:\n{}", report.file_problem))?;
    }
    if report.disks.is_empty() {
        output::text_line(&format!("The disks are as in {}.", file_of(&report)))?;
    } else {
        output::text_line(&table(&report.disks).render(output::width(), Style::stdout()))?;
    }
    for (disk, reason) in &report.damaged {
        output::text_line(&format!("! {disk} is not served: its record cannot be used: {reason}"))?;
    }
    for aside in &report.set_aside {
        output::text_line(&format!("A change of {} was set aside: {}", aside.disk, aside.record))?;
    }
    if !report.folder_problem.is_empty() {
        output::text_line(&format!(
            "Changes end with the daemon: {} cannot be used: {}",
            report.folder, report.folder_problem
        ))?;
    }
    Ok(())
}

fn file_of(report: &ConfigurationReport) -> &str {
    report.file.as_deref().unwrap_or("the daemon's flags")
}

fn table(disks: &[Deviation]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible(),
        TableColumn::text("CHANGE"),
        TableColumn::text("LASTS"),
        TableColumn::text("KEY"),
        TableColumn::text("FILE").flexible().importance(2),
        TableColumn::text("RUNNING").flexible(),
    ]);
    for disk in disks {
        let lasts = if disk.lasting { "yes" } else { "no" };
        let head = [disk.disk.clone(), disk.kind.name().to_owned(), lasts.to_owned()];
        let row = |[name, kind, lasts]: [String; 3], key: &str, file: &Value, running: &Value| {
            [name, kind, lasts, key.to_owned(), shown(file), shown(running)]
        };
        let mut head = Some(head);
        for key in &disk.keys {
            let head = head.take().unwrap_or_default();
            table.row(row(head, &key.key, &key.file, &key.running));
        }
        if let Some(head) = head {
            table.row(row(head, "", &Value::Null, &Value::Null));
        }
    }
    table
}

/// A value in few words: of layers, the kinds and what is written of their options.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) if !values.is_empty() => {
            values.iter().map(shown).collect::<Vec<_>>().join(" ")
        }
        Value::Object(object) => match object.get("kind").and_then(Value::as_str) {
            Some(kind) => {
                let options = object.iter().filter(|(key, value)| {
                    *key != "kind" && !value.is_null() && **value != Value::Array(Vec::new())
                });
                let mut text = kind.to_owned();
                for (key, value) in options {
                    text.push_str(&format!(",{key}={value}"));
                }
                text
            }
            None => value.to_string(),
        },
        _ => value.to_string(),
    }
}

fn save(options: &SaveOptions) -> CommandResult {
    let report = options.control.client().configuration()?;
    let mut text = String::new();
    for deviation in &report.disks {
        text.push_str(&saved(deviation)?);
    }
    if options.format.json {
        return output::json(&serde_json::json!({ "toml": text, "disks": report.disks.len() }));
    }
    let Some(path) = &options.output else {
        if text.is_empty() {
            return output::text_line(&format!("# The disks are as in {}.", file_of(&report)));
        }
        return output::text_line(text.trim_end());
    };
    let mut file = OpenOptions::new();
    let opened = file.write(true).create_new(true).mode(0o600).open(path);
    let written = opened.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| {
        Failure::new(format!("{} cannot be written: {error}", path.display()))
            .advise("name a new file: an existing one is not replaced")
    })?;
    output::text_line(&format!(
        "{} has {}; put these into {} and reload",
        path.display(),
        fathom_control::count(report.disks.len(), "table"),
        file_of(&report)
    ))
}

/// A disk as a table of the file.
fn saved(deviation: &Deviation) -> Result<String, Failure> {
    let name = &deviation.disk;
    match &deviation.definition {
        None => Ok(format!("# {name:?} was removed: remove its table.\n\n")),
        Some(definition) => {
            let comment = match deviation.kind {
                DeviationKind::Added => format!("# {name:?} was added.\n"),
                _ => format!("# {name:?} was changed: this replaces its table.\n"),
            };
            Ok(comment + &toml_of(definition)? + "\n")
        }
    }
}

/// A definition as TOML.
fn toml_of(definition: &DiskDefinition) -> Result<String, Failure> {
    let failed = |what: &dyn std::fmt::Display| {
        Failure::new(format!("the disk {:?} cannot be written as TOML: {what}", definition.name))
    };
    let mut value = serde_json::to_value(definition).map_err(|error| failed(&error))?;
    drop_absent(&mut value);
    let Value::Object(object) = value else { return Err(failed(&"it is no table")) };
    let mut text = "[[disk]]\n".to_owned();
    // Tables within the disk are written in one line, so that a table of the file can be replaced
    // as a whole.
    for (key, value) in &object {
        text.push_str(&format!("{key} = {}\n", inline(value)));
    }
    Ok(text)
}

/// Removes absent values, which TOML does not have.
fn drop_absent(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.retain(|_, value| !value.is_null());
            object.values_mut().for_each(drop_absent);
        }
        Value::Array(values) => values.iter_mut().for_each(drop_absent),
        _ => {}
    }
}

/// A value in the syntax of TOML, in one line.
fn inline(value: &Value) -> String {
    match value {
        Value::Array(values) => {
            format!("[{}]", values.iter().map(inline).collect::<Vec<_>>().join(", "))
        }
        Value::Object(object) => {
            let pairs = object.iter().map(|(key, value)| format!("{key} = {}", inline(value)));
            format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
        }
        // JSON's texts and numbers are those of TOML, but for two escapes that JSON's writer does
        // not use.
        other => other.to_string(),
    }
}

fn revert(options: &RevertOptions) -> CommandResult {
    let request = RevertRequest { disk: options.disk.clone(), force: options.force };
    let report = options.control.client().revert(&request)?;
    if options.format.json {
        return output::json(&report);
    }
    if report.changed.is_empty() && report.refused.is_empty() {
        return output::text_line("The disks are as in the file.");
    }
    for line in &report.changed {
        output::text_line(line)?;
    }
    for line in &report.refused {
        output::text_line(&format!("! {line}"))?;
    }
    if report.refused.is_empty() {
        Ok(())
    } else {
        Err(Failure::new("not everything was reverted"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_control::LayerDefinition;
    use serde_json::json;

    #[test]
    fn a_definition_is_written_as_a_table_of_the_file() {
        let layer = json!({ "total_iops_sec": 500, "containers": ["/docker/\"x\""], "name": null });
        let definition = DiskDefinition {
            name: "web \u{e4}".into(),
            image: Some("/images/a.img".into()),
            layers: vec![LayerDefinition::new("limit", layer)],
            ..DiskDefinition::default()
        };
        let text = toml_of(&definition).unwrap();
        assert!(text.starts_with("[[disk]]\n"), "{text}");
        assert!(text.contains("name = \"web \u{e4}\"\n"), "{text}");
        assert!(text.contains("total_iops_sec = 500") && !text.contains("null"), "{text}");
    }
}

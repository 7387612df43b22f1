//! `fathom patterns`: which files of guests were copied or encrypted, and by whom.

use std::fmt::Write as _;

use clap::Args;
use fathom_control::{
    Bytes, CopiedFile, DiskPatterns, EncryptedFile, EncryptionState, PatternFile, PatternProcess,
    PatternsReport, count,
};

use crate::connection::ControlOptions;
use crate::failure::CommandResult;
use crate::output::style::{self, Style};
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::output::{self, Format};
use crate::usage::container_name;

/// The number of files and copies that are listed unless `-n` sets another.
const ROWS: usize = 20;

/// Options of `fathom patterns`.
#[derive(Debug, Args)]
#[command(after_help = "\
The layer `patterns` of a disk compares what a guest reads and writes. SIGN is why a file is considered
encrypted: its `format`, that other content was `overwritten`, that it was `converted` from a file with
other content, or that its `name` promises another format. `-` is random content without such a sign.

Examples:
  fathom disk layer web patterns         examine the content of a disk from now on
  fathom patterns                        the last encrypted files and copies of all disks
  fathom patterns web -n 256 --json
  fathom query 'SELECT Path, Evidence FROM Patterns WHERE Pattern = \"encryption\"'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct PatternsOptions {
    /// The disk; all with the layer `patterns` by default
    #[arg(value_name = "DISK")]
    disk: Option<String>,
    /// Only encrypted files
    #[arg(long, conflicts_with = "copies")]
    encrypted: bool,
    /// Only copies
    #[arg(long)]
    copies: bool,
    /// The most files, and the most copies, to list of each disk
    #[arg(long, short = 'n', value_name = "N", default_value_t = ROWS)]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &PatternsOptions) -> CommandResult {
    let mut report = options.control.client().patterns(options.disk.as_deref())?;
    for disk in &mut report.disks {
        disk.encrypted.truncate(if options.copies { 0 } else { options.limit });
        disk.copies.truncate(if options.encrypted { 0 } else { options.limit });
    }
    if options.format.json {
        return output::json(&report);
    }
    if report.disks.is_empty() {
        return output::text_line(
            "No disk has the layer `patterns`: `fathom disk layer DISK patterns` adds it.",
        );
    }
    output::text_line(&text(&report, output::width(), Style::stdout()))
}

/// The report of all disks.
fn text(report: &PatternsReport, width: Option<usize>, style: Style) -> String {
    let blocks = report.disks.iter().map(|disk| of_disk(disk, report.time_ns, width, style));
    blocks.collect::<Vec<_>>().join("\n\n")
}

fn of_disk(disk: &DiskPatterns, now_ns: u64, width: Option<usize>, style: Style) -> String {
    let mut text = format!(
        "{}: {} encrypted, {} with random content; {} of {}; {} examined",
        clean(&disk.disk),
        count(disk.encrypted_count, "file"),
        disk.random_count,
        count(disk.copies_count, "copy").replace("copys", "copies"),
        Bytes(disk.copied_bytes),
        Bytes(disk.examined_bytes),
    );
    if disk.transformed_bytes > 0 {
        let bytes = Bytes(disk.transformed_bytes);
        let _ = write!(text, ", {bytes} not: the guest encrypts or compresses them itself");
    }
    for state in &disk.in_progress {
        let _ = write!(text, "\n{}", style.paint(style::BAD, &in_progress(state, now_ns)));
    }
    if !disk.encrypted.is_empty() {
        text += "\n\n";
        text += &encrypted(&disk.encrypted, now_ns).render(width, style);
    }
    if !disk.copies.is_empty() {
        text += "\n\n";
        text += &copies(&disk.copies, now_ns).render(width, style);
    }
    text
}

/// Who encrypts many files.
fn in_progress(state: &EncryptionState, now_ns: u64) -> String {
    let who = match &*by(&state.process) {
        "" => "an unknown process".to_owned(),
        who => who.to_owned(),
    };
    format!(
        "encryption in progress: {who} has encrypted {} with {} since {} ago",
        count(state.files, "file"),
        Bytes(state.bytes),
        ago(now_ns, state.begun_ns),
    )
}

/// A process, with its container.
fn by(process: &PatternProcess) -> String {
    let mut text = match process.process_id {
        0 => clean(&process.command),
        id => format!("{} {id}", clean(&process.command)),
    };
    if !process.cgroup.is_empty() {
        let separator = if text.is_empty() { "" } else { " in " };
        let _ = write!(text, "{separator}{}", container_name(&process.cgroup));
    }
    text
}

fn name(file: &PatternFile) -> String {
    clean(&if file.path.is_empty() {
        format!("inode {} of {} on {}", file.inode, file.file_system, file.device)
    } else {
        file.path.clone()
    })
}

fn ago(now_ns: u64, then_ns: u64) -> String {
    let seconds = now_ns.saturating_sub(then_ns) / 1_000_000_000;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// What says so.
fn sign(evidence: &str) -> String {
    if evidence.is_empty() { "-".to_owned() } else { clean(evidence) }
}

fn encrypted(files: &[EncryptedFile], now_ns: u64) -> Table {
    let mut table = Table::new([
        TableColumn::number("AGO"),
        TableColumn::text("SIGN"),
        TableColumn::text("FILE").flexible_path(16),
        TableColumn::number("SIZE"),
        TableColumn::text("FROM").flexible_path(16).optional().importance(1),
        TableColumn::text("BY").flexible().optional().importance(2),
    ]);
    for file in files {
        table.row([
            ago(now_ns, file.time_ns),
            sign(&file.evidence),
            name(&file.file),
            Bytes(file.file.size).to_string(),
            clean(&file.source_path),
            by(&file.by),
        ]);
    }
    table
}

fn copies(copies: &[CopiedFile], now_ns: u64) -> Table {
    let mut table = Table::new([
        TableColumn::number("AGO"),
        TableColumn::text("COPY").flexible_path(16),
        TableColumn::text("OF").flexible_path(16),
        TableColumn::number("COPIED"),
        TableColumn::text("SIGN").optional().importance(1),
        TableColumn::text("BY").flexible().optional().importance(2),
    ]);
    for copy in copies {
        table.row([
            ago(now_ns, copy.last_ns),
            name(&copy.target),
            name(&copy.source),
            Bytes(copy.bytes).to_string(),
            sign(&copy.evidence),
            by(&copy.by),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> PatternFile {
        PatternFile { path: path.into(), inode: 12, size: 1 << 20, ..PatternFile::default() }
    }

    #[test]
    fn the_report_names_files_and_processes() {
        let process = PatternProcess {
            process_id: 412,
            command: "gpg\u{1b}[2J".into(),
            cgroup: "/system.slice/web.service".into(),
            ..PatternProcess::default()
        };
        let disk = DiskPatterns {
            disk: "web".into(),
            encrypted_count: 1,
            copies_count: 1,
            copied_bytes: 1 << 20,
            transformed_bytes: 4096,
            in_progress: vec![EncryptionState {
                process: process.clone(),
                files: 7,
                bytes: 1 << 20,
                ..EncryptionState::default()
            }],
            encrypted: vec![EncryptedFile {
                file: file("/srv/a.gpg"),
                evidence: "format".into(),
                by: process.clone(),
                ..EncryptedFile::default()
            }],
            copies: vec![CopiedFile {
                target: file("/srv/b"),
                source: PatternFile { path: String::new(), ..file("") },
                bytes: 1 << 20,
                evidence: "call".into(),
                by: PatternProcess { process_id: 0, command: String::new(), ..process },
                ..CopiedFile::default()
            }],
            ..DiskPatterns::default()
        };
        let report = PatternsReport { time_ns: 90_000_000_000, unix_time_ns: 0, disks: vec![disk] };
        let text = text(&report, None, Style::PLAIN);
        assert!(text.contains("7 files with 1 MiB") && text.contains("web.service"), "{text}");
        assert!(text.contains("90 s") && text.contains("/srv/a.gpg"), "{text}");
        assert!(text.contains("inode 12 of") && text.contains("call"), "{text}");
        assert!(text.contains("1 copy of 1 MiB") && !text.contains('\u{1b}'), "{text}");
        for line in super::text(&report, Some(80), Style::PLAIN).lines().skip(1) {
            assert!(line.chars().count() <= 80 || line.starts_with("encryption"), "{line}");
        }
    }
}

//! `fathom dirty`: the dirty pages of guests, the disks that will get them, and their files.
use clap::Args;
use fathom_control::{
    Bytes, DeviceDirty, DirtyReport, DirtyRequest, FilesDirty, GuestDirty, InsightState,
    MappedDirty, Nanoseconds, TablesDirty, WrittenDirty,
};

use crate::{
    connection::ControlOptions,
    failure::CommandResult,
    output::{
        self, Format,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
    top::interval,
    usage::insight,
};

/// The number of files that are listed unless `-n` sets another.
const FILES: usize = 20;

/// Options of `fathom dirty`.
#[derive(Debug, Args)]
#[command(after_help = "\
Dirty pages are data in a guest's memory that it has not written to its disks yet. They are read from
the guest's memory, with nothing installed in the guest.

Examples:
  fathom dirty                           all guests, and the disks that will get their pages
  fathom dirty shop --files              the files of one guest with dirty pages
  fathom dirty web --written=5s          what is written to memory, less what the disks transfer
  fathom dirty --json | jq '.guests[] | {vm, dirty_bytes}'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct DirtyOptions {
    /// The guest: the name of its machine, of one of its disks, or its number; all by default
    #[arg(value_name = "GUEST")]
    guest: Option<String>,
    /// List the files with dirty pages
    #[arg(long)]
    files: bool,
    /// Also count the pages of files that processes have changed through mappings
    #[arg(long)]
    mapped: bool,
    /// Estimate the pages that programs have written from every Nth page of the memory, also of a
    /// guest that is not understood
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", require_equals = true)]
    tables: Option<u64>,
    /// Count the pages that are written to the guest's memory in this time, 2s by default, less
    /// what its disks transfer meanwhile; also of a guest that is not understood
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "2s", require_equals = true, value_parser = interval)]
    written: Option<Nanoseconds>,
    /// The most files to list of each guest
    #[arg(long, short = 'n', value_name = "N", default_value_t = FILES, requires = "files")]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &DirtyOptions) -> CommandResult {
    let request = DirtyRequest {
        files: options.files.then_some(options.limit),
        mapped: options.mapped,
        tables: options.tables,
        written_ms: options.written.map(|time| time.0 / 1_000_000),
    };
    let report = options.control.client().dirty(options.guest.as_deref(), request)?;
    if options.format.json {
        return output::json(&report);
    }
    let (width, style) = (output::width(), Style::stdout());
    if report.guests.is_empty() {
        return output::text_line("No guest is connected whose memory is read.");
    }
    output::text_line(&table(&report).render(width, style))?;
    for guest in &report.guests {
        if guest.insight.state != InsightState::Attached {
            let line = format!("{}: {}", name(guest), insight::long(&guest.insight));
            output::text_line(&line)?;
        } else if guest.devices.is_none() {
            let line = format!(
                "{}: its dirty pages by device are not known: the guest changes its lists, or its \
                 kernel's structures are unknown. Try again.",
                name(guest)
            );
            output::text_line(&line)?;
        }
        if let Some(tables) = &guest.tables {
            output::text_line(&format!("{}: {}", name(guest), by_tables(tables)))?;
        }
        if let Some(written) = &guest.written {
            output::text_line(&format!("{}: {}", name(guest), by_content(written)))?;
        }
        if let Some(mapped) = &guest.mapped {
            output::text_line(&format!("{}: {}", name(guest), through_mappings(mapped)))?;
        }
        let Some(files) = &guest.files else { continue };
        output::text_line(&format!("\n{}: {}", name(guest), summary(files)))?;
        if !files.files.is_empty() {
            output::text_line(&files_table(files).render(width, style))?;
        }
    }
    Ok(())
}

/// The name of a guest for display: its machine's name, or its disks' names.
fn name(guest: &GuestDirty) -> String {
    clean(&if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() })
}

/// A number of bytes, or a dash.
fn bytes(value: Option<u64>) -> String {
    value.map_or_else(|| "-".into(), |value| Bytes(value).to_string())
}

/// One line for each guest, and one for each of its devices.
fn table(report: &DirtyReport) -> Table {
    let mut table = Table::new([
        TableColumn::text("GUEST").flexible(),
        TableColumn::text("DEVICE").flexible().importance(2),
        TableColumn::text("DISK").flexible().importance(3),
        TableColumn::number("DIRTY"),
        TableColumn::number("BEING WRITTEN"),
        TableColumn::number("MEMORY").importance(0),
        TableColumn::number("COUNTED IN").importance(1),
    ]);
    for guest in &report.guests {
        let is_counted = guest.dirty_bytes.is_some();
        let time = format!("{:.1} µs", guest.count_ns as f64 / 1e3);
        table.row([
            name(guest),
            String::new(),
            String::new(),
            bytes(guest.dirty_bytes),
            bytes(guest.writeback_bytes),
            Bytes(guest.memory_bytes).to_string(),
            if is_counted { time } else { String::new() },
        ]);
        for device in guest.devices.iter().flatten() {
            table.row([
                String::new(),
                clean(&device.name),
                disks(device),
                Bytes(device.dirty_bytes).to_string(),
                Bytes(device.writeback_bytes).to_string(),
                String::new(),
                String::new(),
            ]);
        }
    }
    table
}

/// The disks that a device lies on.
fn disks(device: &DeviceDirty) -> String {
    let mut disks = device.disks.clone();
    if device.lies_elsewhere {
        disks.push("(elsewhere)".into());
    }
    clean(&disks.join(", "))
}

/// The pages that a guest's processes have changed through mappings, in a sentence.
fn through_mappings(mapped: &MappedDirty) -> String {
    let marked = Bytes(mapped.marked_bytes);
    let mut text = match mapped.unknown_bytes {
        0 => format!("{marked} changed through mappings of files, all counted by its kernel"),
        unknown => format!(
            "{marked} changed through mappings of files, of which its kernel does not count {}",
            Bytes(unknown)
        ),
    };
    if !mapped.is_whole {
        text += "; not all mappings were examined, because the guest changed them meanwhile";
    }
    text
}

/// The estimate of the pages that a guest's programs have written, in a sentence.
fn by_tables(tables: &TablesDirty) -> String {
    let (stride, found) = (tables.stride, tables.tables);
    let mut text = match tables.error_bytes {
        None => format!("no page table among {} pages (stride {stride})", tables.examined),
        Some(error) => {
            let marked = Bytes(tables.marked_bytes);
            let error = if stride > 1 { format!(" ± {}", Bytes(error)) } else { String::new() };
            format!(
                "{marked}{error} written by programs since the pages were mapped, private memory \
                 included, by {found} page tables (stride {stride})"
            )
        }
    };
    if !tables.is_whole {
        text += "; the time was over after a part of the memory: use a greater stride";
    } else if tables.error_bytes.is_none() {
        text += ": use a smaller stride";
    }
    text
}

/// The pages that were written in an interval, in a sentence.
fn by_content(written: &WrittenDirty) -> String {
    let (changed, time) = (Bytes(written.changed_bytes), Nanoseconds(written.interval_ns));
    let error = match written.error_bytes {
        0 => String::new(),
        error => format!(" ± {}", Bytes(error)),
    };
    let mut text = format!("{changed}{error} written to memory in {time}, private memory included");
    match (written.read_bytes, written.written_bytes, written.left_bytes) {
        (Some(read), Some(to_disks), Some(left)) => {
            let (read, to_disks, left) = (Bytes(read), Bytes(to_disks), Bytes(left));
            text += &format!(
                "; less {read} read from disks and {to_disks} written to disks: {left} more than before"
            );
        }
        _ => text += "; what its disks transferred is not known, because a disk has no tap",
    }
    if !written.is_whole {
        text += "; the time was over after a part of the memory";
    }
    text
}

/// The files of a guest, in a sentence.
fn summary(files: &FilesDirty) -> String {
    let listed: u64 = files.files.iter().map(|file| file.dirty_bytes).sum();
    let mut text = match files.files.len() {
        0 => "no file has dirty pages".to_owned(),
        _ => format!("{} dirty in files", Bytes(files.dirty_bytes)),
    };
    if listed < files.dirty_bytes {
        let rest = Bytes(files.dirty_bytes - listed);
        text += &format!(", {rest} of it in files that are not listed");
    }
    if !files.is_whole {
        text += "; not all files were found, because the guest changed its lists meanwhile";
    }
    text
}

/// A table of files.
fn files_table(files: &FilesDirty) -> Table {
    let mut table = Table::new([
        TableColumn::number("DIRTY"),
        TableColumn::text("KIND").importance(2),
        TableColumn::text("DEVICE").flexible().importance(3),
        TableColumn::text("FS").importance(1),
        TableColumn::number("SIZE").importance(0),
        TableColumn::text("PATH").flexible_path(16),
    ]);
    for file in &files.files {
        let size =
            if file.inode == 0 { String::new() } else { Bytes(file.file_size_bytes).to_string() };
        table.row([
            Bytes(file.dirty_bytes).to_string(),
            clean(&file.kind),
            clean(&file.device),
            clean(&file.file_system),
            size,
            clean(&file.path),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use fathom_control::{FileDirty, InsightStatus};

    use super::*;

    fn guest() -> GuestDirty {
        let device = |name: &str, disks: &[&str], dirty_bytes, lies_elsewhere| DeviceDirty {
            name: name.into(),
            dirty_bytes,
            writeback_bytes: 4096,
            disks: disks.iter().map(|disk| (*disk).to_owned()).collect(),
            lies_elsewhere,
        };
        GuestDirty {
            vm: "shop".into(),
            disks: vec!["root".into(), "data".into()],
            memory_bytes: 512 << 20,
            insight: InsightStatus { state: InsightState::Attached, ..Default::default() },
            dirty_bytes: Some(3 << 20),
            writeback_bytes: Some(8192),
            count_ns: 7_600,
            devices: Some(vec![
                device("vda", &["root"], 1 << 20, false),
                device("dm-0\u{1b}[2J", &["root", "data"], 2 << 20, true),
            ]),
            ..GuestDirty::default()
        }
    }

    #[test]
    fn each_device_has_its_disks() {
        let report = DirtyReport {
            guests: vec![guest(), GuestDirty { number: 2, ..GuestDirty::default() }],
            ..DirtyReport::default()
        };
        let text = table(&report).render(None, Style::PLAIN);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("shop") && lines[1].contains("3 MiB"), "{text}");
        assert!(lines[1].ends_with("7.6 µs"), "{text}");
        assert!(lines[2].contains("vda") && lines[2].contains("root"), "{text}");
        assert!(lines[3].contains("root, data, (elsewhere)"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(lines[4].contains('-'), "a guest that is not understood: {text}");
    }

    #[test]
    fn changes_through_mappings_are_described() {
        let mut mapped =
            MappedDirty { marked_bytes: 8192, is_whole: true, ..MappedDirty::default() };
        let text = "8 KiB changed through mappings of files, all counted by its kernel";
        assert_eq!(through_mappings(&mapped), text);
        (mapped.unknown_bytes, mapped.is_whole) = (4096, false);
        let text = through_mappings(&mapped);
        assert!(text.contains("does not count 4 KiB; not all mappings"), "{text}");
    }

    #[test]
    fn an_estimate_has_its_error() {
        let mut tables = TablesDirty {
            marked_bytes: 40 << 20,
            error_bytes: Some(3 << 20),
            stride: 20,
            tables: 7,
            examined: 4000,
            is_whole: true,
            count_ns: 1,
        };
        let text = by_tables(&tables);
        assert!(
            text.starts_with("40 MiB ± 3 MiB written") && text.ends_with("(stride 20)"),
            "{text}"
        );
        tables.error_bytes = None;
        let text = by_tables(&tables);
        assert_eq!(text, "no page table among 4000 pages (stride 20): use a smaller stride");
        (tables.stride, tables.error_bytes, tables.is_whole) = (1, Some(0), false);
        let text = by_tables(&tables);
        assert!(text.starts_with("40 MiB written") && text.ends_with("a greater stride"), "{text}");
    }

    #[test]
    fn written_pages_are_described_with_what_the_disks_transferred() {
        let mut written = WrittenDirty {
            interval_ns: 2_000_000_000,
            changed_bytes: 30 << 20,
            error_bytes: 1 << 20,
            read_bytes: Some(4 << 20),
            written_bytes: Some(6 << 20),
            left_bytes: Some(20 << 20),
            is_whole: true,
            ..WrittenDirty::default()
        };
        assert_eq!(
            by_content(&written),
            "30 MiB ± 1 MiB written to memory in 2.0 s, private memory included; less 4 MiB read from \
             disks and 6 MiB written to disks: 20 MiB more than before"
        );
        (written.read_bytes, written.error_bytes, written.is_whole) = (None, 0, false);
        let text = by_content(&written);
        assert!(text.starts_with("30 MiB written") && text.contains("no tap"), "{text}");
        assert!(text.ends_with("a part of the memory"), "{text}");
    }

    #[test]
    fn what_is_missing_among_the_files_is_stated() {
        let file = |dirty_bytes| FileDirty { dirty_bytes, ..FileDirty::default() };
        let mut files = FilesDirty {
            files: vec![file(8192)],
            dirty_bytes: 12_288,
            is_whole: true,
            count_ns: 1,
        };
        assert_eq!(
            summary(&files),
            "12 KiB dirty in files, 4 KiB of it in files that are not listed"
        );
        files.is_whole = false;
        assert!(summary(&files).contains("not all files were found"));
        assert_eq!(
            summary(&FilesDirty { is_whole: true, ..FilesDirty::default() }),
            "no file has dirty pages"
        );
    }
}

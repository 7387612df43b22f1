//! `fathom inspect`: analyses an image of a guest's memory, without a daemon.
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use fathom_control::Bytes;
use fathom_insight::Names;
use fathom_introspect::{CachedFile, Kernel, Task, open_image};
use serde::Serialize;

use crate::{
    failure::{CommandResult, Failure},
    output::{
        self, Format,
        sheet::Sheet,
        style::Style,
        table::{Table, TableColumn},
    },
};

/// The size of a page of the guest, in bytes.
const PAGE: u64 = 4096;

/// Options of `fathom inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
An image is a file that QEMU's dump-guest-memory wrote, or the file of a memory back end. The guest
must be paused or stopped, because a running guest changes the file.

Examples:
  fathom inspect guest.elf               the kernel, and the files that fill its page cache
  fathom inspect guest.raw --files 0 --tasks
  fathom inspect guest.raw --json | jq '.files[].path'

Exit status: 0 a kernel was found, 1 no kernel was found, 2 invalid command line.")]
pub struct InspectOptions {
    /// The image of a guest's memory: an ELF core or raw
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// The number of files to show, those with the most pages in memory first
    #[arg(long, value_name = "N", default_value_t = 20)]
    files: usize,
    /// Show the guest's processes
    #[arg(long)]
    tasks: bool,
    /// In a raw image, the amount of memory below 4 GiB (QEMU: q35 2G, pc 3G)
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    low: Bytes,
    #[command(flatten)]
    format: Format,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    release: String,
    search_ns: u64,
    memory_bytes: u64,
    dirty_bytes: Option<u64>,
    writeback_bytes: Option<u64>,
    file_pages_bytes: Option<u64>,
    free_bytes: Option<u64>,
    modules: Vec<String>,
    files: Vec<FileReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tasks: Option<Vec<TaskReport>>,
}

#[derive(Serialize)]
struct FileReport {
    kind: &'static str,
    cached_bytes: u64,
    file_system: String,
    device: String,
    inode: u64,
    size: u64,
    path: String,
}

#[derive(Serialize)]
struct TaskReport {
    pid: u32,
    command: String,
}

/// Carries out the command.
pub fn run(options: &InspectOptions) -> CommandResult {
    let memory = open_image(&options.image, options.low.0)
        .map_err(|error| Failure::io("read", &options.image, &error))?;
    let begun = Instant::now();
    let kernel = Kernel::attach(&memory, None).map_err(|error| {
        Failure::new(error.to_string()).advise(
            "a raw image must begin at guest address 0; QEMU's monitor writes an ELF core with \
             `dump-guest-memory FILE`",
        )
    })?;
    let search_ns = begun.elapsed().as_nanos() as u64;
    let names = Names::default();
    let mut files = kernel.cached_files(&names);
    files.truncate(options.files);
    let counters = kernel.counters();
    let report = Report {
        release: kernel.release().to_owned(),
        search_ns,
        memory_bytes: memory.length(),
        dirty_bytes: counters.dirty,
        writeback_bytes: counters.writeback,
        file_pages_bytes: counters.file_pages,
        free_bytes: counters.free,
        modules: kernel.modules().map(str::to_owned).collect(),
        files: files.iter().map(|file| file_report(file, &names)).collect(),
        tasks: options.tasks.then(|| kernel.tasks().into_iter().map(task_report).collect()),
    };
    if options.format.json { output::json(&report) } else { print(&report) }
}

fn file_report(file: &CachedFile, names: &Names) -> FileReport {
    let text = |name| names.text(name).map_or_else(String::new, |text| text.to_string());
    FileReport {
        kind: file.facts.kind.name(),
        cached_bytes: file.pages * PAGE,
        file_system: text(file.facts.file_system),
        device: text(file.facts.device),
        inode: file.facts.inode,
        size: file.facts.file_size,
        path: text(file.facts.path),
    }
}

fn task_report(task: Task) -> TaskReport {
    TaskReport { pid: task.process_id, command: task.command }
}

fn print(report: &Report) -> CommandResult {
    let (width, style) = (output::width(), Style::stdout());
    let bytes =
        |value: Option<u64>| value.map_or_else(String::new, |value| Bytes(value).to_string());
    let mut sheet = Sheet::default();
    sheet.fact("kernel", format!("Linux {}", report.release));
    sheet.fact("found after", format!("{} ms", report.search_ns / 1_000_000));
    sheet.fact("memory", Bytes(report.memory_bytes).to_string());
    sheet.fact_if_any("page cache", bytes(report.file_pages_bytes));
    sheet.fact_if_any("dirty", bytes(report.dirty_bytes));
    sheet.fact_if_any("being written", bytes(report.writeback_bytes));
    sheet.fact_if_any("free", bytes(report.free_bytes));
    sheet.fact_if_any("modules", report.modules.join(" "));
    output::text_line(&sheet.render(width, style))?;
    if !report.files.is_empty() {
        let mut table = Table::new([
            TableColumn::number("CACHED"),
            TableColumn::text("KIND").importance(2),
            TableColumn::text("DEVICE"),
            TableColumn::text("FS").importance(1),
            TableColumn::number("INODE").importance(0),
            TableColumn::number("SIZE").importance(3),
            TableColumn::text("PATH").flexible(),
        ]);
        for file in &report.files {
            let number = |value: u64, text: String| if value == 0 { String::new() } else { text };
            table.row([
                Bytes(file.cached_bytes).to_string(),
                file.kind.to_owned(),
                file.device.clone(),
                file.file_system.clone(),
                number(file.inode, file.inode.to_string()),
                number(file.inode, Bytes(file.size).to_string()),
                file.path.clone(),
            ]);
        }
        output::text_line("")?;
        output::text_line(&table.render(width, style))?;
    }
    if let Some(tasks) = &report.tasks {
        let mut table = Table::new([TableColumn::number("PID"), TableColumn::text("COMMAND")]);
        for task in tasks {
            table.row([task.pid.to_string(), task.command.clone()]);
        }
        output::text_line("")?;
        output::text_line(&table.render(width, style))?;
    }
    Ok(())
}

//! `fathom snapshot diff`.

use std::path::{Path, PathBuf};

use clap::Args;
use fathom_control::{
    Bytes, Client, DifferenceExtent, DifferencePart, DifferenceQuery, WrittenFiles,
    WrittenFilesQuery, count,
};
use fathom_store::Pool;
use serde::Serialize;

use super::{Place, find_one};
use crate::failure::{CommandResult, Failure};
use crate::output;
use crate::output::progress::Progress;
use crate::output::sheet::Sheet;
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::store::{about, of_daemon, open_pool};

/// Options of `fathom snapshot diff`.
#[derive(Debug, Args)]
pub struct DiffOptions {
    /// The disk, or, with --store, the volume
    disk: String,
    /// The earlier snapshot
    from: String,
    /// The later snapshot [default: the disk as it is now]
    to: Option<String>,
    /// List the extents
    #[arg(long)]
    list: bool,
    /// Show the files of the guest that were written, and how much
    #[arg(long, conflicts_with_all = ["list", "holes"])]
    files: bool,
    /// Tell changed parts that are zeroes now from the others; this takes longer
    #[arg(long)]
    holes: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Serialize)]
struct DiffReport<'a> {
    pool: &'a Path,
    volume: &'a str,
    from: &'a str,
    to: Option<&'a str>,
    size_bytes: u64,
    changed_bytes: u64,
    /// Only with --holes.
    #[serde(skip_serializing_if = "Option::is_none")]
    hole_bytes: Option<u64>,
    extents: &'a [DifferenceExtent],
}

/// What can compare the snapshots of a pool.
enum Comparer {
    /// The daemon, of which a disk uses the pool.
    Daemon(Client),
    /// This process.
    Own(PathBuf, Pool),
}

impl Comparer {
    fn part(&self, query: &DifferenceQuery) -> CommandResult<DifferencePart> {
        match self {
            Self::Daemon(client) => Ok(client.difference(query)?),
            Self::Own(path, pool) => {
                Ok(DifferencePart::of(pool, query).map_err(|error| about(path, error))?)
            }
        }
    }
}

/// All that differs, and the size of the later snapshot.
fn compare(
    comparer: &Comparer,
    mut query: DifferenceQuery,
    is_silent: bool,
) -> CommandResult<(Vec<DifferenceExtent>, u64)> {
    let (mut extents, mut first): (Vec<DifferenceExtent>, Option<DifferencePart>) =
        (Vec::new(), None);
    let mut progress: Option<Progress> = None;
    loop {
        let mut part = comparer.part(&query)?;
        for extent in part.extents.drain(..) {
            match extents.last_mut() {
                Some(last)
                    if last.offset + last.length == extent.offset && last.hole == extent.hole =>
                {
                    last.length += extent.length;
                }
                _ => extents.push(extent),
            }
        }
        let next = part.next_byte;
        let numbers = |part: &DifferencePart| (part.from_number, part.to_number, part.size_bytes);
        let first = first.get_or_insert_with(|| part.clone());
        if numbers(first) != numbers(&part) {
            return Err(Failure::new("a snapshot or the volume was replaced meanwhile")
                .advise("repeat the command"));
        }
        match next {
            None => return Ok((extents, first.size_bytes)),
            Some(at) => {
                let label = query.volume.clone();
                progress
                    .get_or_insert_with(|| Progress::new(label, part.size_bytes).silent(is_silent))
                    .update(at);
                query.at = Some(at);
            }
        }
    }
}

pub(super) fn run(options: &DiffOptions) -> CommandResult {
    let place = &options.place;
    let (path, volume) = find_one(place, &options.disk)?;
    let client = place.control.client();
    let has_daemon = of_daemon(&client, &path).is_some();
    if options.files {
        if !has_daemon {
            let message =
                "only the daemon knows which files were written, and no disk of it uses the pool";
            return Err(Failure::new(message).advise("serve a disk of the pool"));
        }
        let from = options.from.clone();
        let query = WrittenFilesQuery { path, volume, from, to: options.to.clone() };
        let written = client.written_files(&query)?;
        return if place.format.json { output::json(&written) } else { show_files(&written) };
    }
    let comparer = match of_daemon(&client, &path) {
        Some(_) => Comparer::Daemon(client),
        None => Comparer::Own(path.clone(), open_pool(&path)?),
    };
    let query = DifferenceQuery {
        path: path.clone(),
        volume: volume.clone(),
        from: Some(options.from.clone()),
        to: options.to.clone(),
        holes: options.holes,
        at: None,
    };
    let (extents, size_bytes) = compare(&comparer, query, place.format.json)?;
    let sum = |is_hole: bool| {
        let chosen = extents.iter().filter(|extent| extent.hole == is_hole);
        chosen.map(|extent| extent.length).sum::<u64>()
    };
    let report = DiffReport {
        pool: &path,
        volume: &volume,
        from: &options.from,
        to: options.to.as_deref(),
        size_bytes,
        changed_bytes: sum(false) + sum(true),
        hole_bytes: options.holes.then(|| sum(true)),
        extents: &extents,
    };
    if place.format.json { output::json(&report) } else { show(&report, options.list) }
}

fn show_files(written: &WrittenFiles) -> CommandResult {
    let mut sheet = Sheet::default();
    sheet.fact("written", Bytes(written.written_bytes).to_string());
    for (name, bytes) in
        [("of unknown files", written.unknown_bytes), ("of files not listed", written.other_bytes)]
    {
        if bytes > 0 {
            sheet.fact(name, Bytes(bytes).to_string());
        }
    }
    if !written.complete {
        sheet.fact(
            "incomplete",
            "the daemon did not serve the disk all the time, or without `classify`",
        );
    }
    output::text_line(&sheet.render(output::width(), Style::stdout()))?;
    if written.files.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(vec![
        TableColumn::text("FILE").flexible_path(6),
        TableColumn::text("CONTAINER").flexible().importance(1),
        TableColumn::number("WRITTEN"),
    ]);
    for file in &written.files {
        let path =
            if file.path.is_empty() { format!("({})", file.kind) } else { file.path.clone() };
        table.row(vec![clean(&path), clean(&file.cgroup), Bytes(file.bytes).to_string()]);
    }
    output::text_line(table.render(output::width(), Style::stdout()).trim_end())
}

fn show(report: &DiffReport<'_>, lists: bool) -> CommandResult {
    let share = report.changed_bytes as f64 / report.size_bytes.max(1) as f64 * 100.0;
    let (changed, size) = (Bytes(report.changed_bytes), Bytes(report.size_bytes));
    let to = report.to.unwrap_or("now");
    let mut sheet = Sheet::default();
    sheet.fact("volume", clean(report.volume));
    sheet.fact("compared", format!("{} and {}", clean(report.from), clean(to)));
    sheet.fact("changed", format!("{changed} of {size} ({share:.1} %)"));
    if let Some(hole_bytes) = report.hole_bytes {
        sheet.fact("of it holes", Bytes(hole_bytes).to_string());
    }
    sheet.fact("extents", count(report.extents.len() as u64, "extent"));
    output::text_line(&sheet.render(output::width(), Style::stdout()))?;
    if !lists || report.extents.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(vec![
        TableColumn::number("FIRST BYTE"),
        TableColumn::number("BYTES"),
        TableColumn::text("STATE"),
    ]);
    for extent in report.extents {
        let state = if extent.hole { "hole" } else { "data" };
        table.row(vec![extent.offset.to_string(), extent.length.to_string(), state.into()]);
    }
    output::text_line(table.render(output::width(), Style::stdout()).trim_end())
}

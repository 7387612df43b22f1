//! `fathom lifetimes`: how long what guests write lives.

mod picture;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use fathom_control::{
    Bytes, DiskLifetimes, GroupedBy, Histogram, LifetimesGroup, LifetimesReport, count,
};

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::output::{self, Format};
use crate::usage::container_name;

/// The number of containers and endings that are listed unless `-n` sets another.
const ROWS: usize = 10;
const SECOND_NS: u64 = 1_000_000_000;
/// The ages of the table, in nanoseconds, with their names.
const AGES: [(u64, &str); 7] = [
    (SECOND_NS, "1s"),
    (10 * SECOND_NS, "10s"),
    (30 * SECOND_NS, "30s"),
    (120 * SECOND_NS, "2min"),
    (600 * SECOND_NS, "10min"),
    (3600 * SECOND_NS, "1h"),
    (86_400 * SECOND_NS, "1d"),
];

/// Options of `fathom lifetimes`.
#[derive(Debug, Args)]
#[command(after_help = "\
The columns 1s to 1d have the share of the written bytes that died within this time after the guest made
them, and DIED the share that died at all. CAUSE is the most frequent reason. The row `naive` is what
overwritten blocks of the disk alone show, which is all that a disk sees without insight.

Examples:
  fathom disk layer web lifetimes        follow what the guest writes from now on
  fathom lifetimes                       all disks
  fathom lifetimes web --by ending -n 64
  fathom lifetimes web --picture web.svg
  fathom lifetimes web --json | jq '.disks[0].groups[0].lifetimes'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct LifetimesOptions {
    /// The disk; all with the layer `lifetimes` by default
    #[arg(value_name = "DISK")]
    disk: Option<String>,
    /// Only the disk itself and the groups of one sort
    #[arg(long, value_name = "SORT")]
    by: Option<Sort>,
    /// The most containers, and the most endings, to list of each disk
    #[arg(long, short = 'n', value_name = "N", default_value_t = ROWS)]
    limit: usize,
    /// Also draw the lifetimes of the disk, naive ones beside them, into this file (SVG)
    #[arg(long, value_name = "FILE", requires = "disk")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// A sort of groups.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Sort {
    /// The kinds of data
    Kind,
    /// The containers and services
    Container,
    /// The endings of files' names
    Ending,
}

impl Sort {
    fn has(self, by: GroupedBy) -> bool {
        matches!(
            (self, by),
            (_, GroupedBy::Disk)
                | (Self::Kind, GroupedBy::Kind)
                | (Self::Container, GroupedBy::Container)
                | (Self::Ending, GroupedBy::Ending)
        )
    }
}

/// Carries out the command.
pub fn run(options: &LifetimesOptions) -> CommandResult {
    let mut report = options.control.client().lifetimes(options.disk.as_deref())?;
    for disk in &mut report.disks {
        arrange(&mut disk.groups, options.by, options.limit);
    }
    if let (Some(path), Some(disk)) = (&options.picture, report.disks.first()) {
        if disk.groups.iter().all(|group| group.born_bytes == 0) {
            return Err(Failure::new(format!("nothing has been written to {}", clean(&disk.disk)))
                .advise("try again when the guest has written something"));
        }
        std::fs::write(path, picture::draw(disk, followed_ns(disk, report.time_ns)))
            .map_err(|error| Failure::io("write", path, &error))?;
    }
    if options.format.json {
        return output::json(&report);
    }
    if report.disks.is_empty() {
        return output::text_line(
            "No disk has the layer `lifetimes`: `fathom disk layer DISK lifetimes` adds it.",
        );
    }
    output::text_line(&text(&report, output::width(), Style::stdout()))?;
    match &options.picture {
        Some(path) => output::text_line(&format!("\nThe picture is in {}.", path.display())),
        None => Ok(()),
    }
}

/// Keeps the groups that are listed: of each sort those with the most bytes, most first.
fn arrange(groups: &mut Vec<LifetimesGroup>, sort: Option<Sort>, limit: usize) {
    groups.retain(|group| sort.is_none_or(|sort| sort.has(group.by)));
    groups.sort_by_key(|group| (group.by as u8, std::cmp::Reverse(group.born_bytes)));
    let (mut of, mut rows) = (GroupedBy::Disk, 0);
    groups.retain(|group| {
        rows = if group.by == of { rows + 1 } else { 1 };
        of = group.by;
        matches!(group.by, GroupedBy::Disk | GroupedBy::Kind) || rows <= limit
    });
}

/// The report of all disks.
fn text(report: &LifetimesReport, width: Option<usize>, style: Style) -> String {
    let blocks = report.disks.iter().map(|disk| of_disk(disk, report.time_ns, width, style));
    blocks.collect::<Vec<_>>().join("\n\n")
}

/// How long the disk is followed, in nanoseconds.
fn followed_ns(disk: &DiskLifetimes, now_ns: u64) -> u64 {
    now_ns.saturating_sub(disk.begun_ns)
}

fn of_disk(disk: &DiskLifetimes, now_ns: u64, width: Option<usize>, style: Style) -> String {
    let share = match disk.share {
        share if share >= 1.0 => String::new(),
        share => format!("; from {} of it", percent(share)),
    };
    let born = disk.groups.first().map_or(0, |group| group.born_bytes);
    let head = format!(
        "{}: {} written, {} of it alive; {} followed{share}",
        clean(&disk.disk),
        Bytes(born),
        Bytes(disk.living_bytes),
        count(disk.files, "file"),
    );
    if born == 0 {
        return format!("{}: nothing written yet", clean(&disk.disk));
    }
    let followed_ns = followed_ns(disk, now_ns);
    format!("{head}\n\n{}", table(&disk.groups, followed_ns).render(width, style))
}

fn table(groups: &[LifetimesGroup], followed_ns: u64) -> Table {
    let mut columns = vec![
        TableColumn::text("BY"),
        TableColumn::text("NAME").flexible_path(16),
        TableColumn::number("WRITTEN"),
    ];
    // The longest ages are left out first, then the shortest.
    let importance = [2, 3, 5, 4, 4, 2, 1];
    columns.extend(AGES.iter().zip(importance).map(|((_, name), importance)| {
        TableColumn::number(name).optional().importance(importance)
    }));
    columns.push(TableColumn::number("DIED"));
    columns.push(TableColumn::text("CAUSE").optional().importance(3));
    let mut table = Table::new(columns);
    let mut row = |by: &str, name: String, born: u64, lives: &Histogram, cause: String| {
        let share = |died: u64| percent(died as f64 / born.max(1) as f64);
        let mut cells = vec![by.to_owned(), name, Bytes(born).to_string()];
        cells.extend(AGES.iter().map(|(age, _)| match age {
            age if *age <= followed_ns => share(lives.count_to(*age)),
            _ => String::new(),
        }));
        let died = lives.count();
        cells.push(share(died));
        cells.push(if died == 0 { String::new() } else { cause });
        table.row(cells);
    };
    for group in groups {
        let (by, name) = labels(group);
        row(&by, name, group.born_bytes, &group.lifetimes, cause(group));
        if group.by == GroupedBy::Disk {
            let (born, naive) = (group.born_bytes, &group.naive_lifetimes);
            row("naive", String::new(), born, naive, "overwritten".into());
        }
    }
    table
}

fn labels(group: &LifetimesGroup) -> (String, String) {
    let others = |what: &str| format!("(other {what})");
    match group.by {
        GroupedBy::Disk => ("disk".into(), String::new()),
        GroupedBy::Kind => ("kind".into(), clean(&group.name)),
        GroupedBy::Container if group.name == "*" => ("container".into(), others("containers")),
        GroupedBy::Container => ("container".into(), container_name(&group.name)),
        GroupedBy::Ending if group.name == "*" => ("ending".into(), others("endings")),
        GroupedBy::Ending if group.name.is_empty() => ("ending".into(), "(none)".into()),
        GroupedBy::Ending => ("ending".into(), clean(&group.name)),
    }
}

/// The most frequent cause of death.
fn cause(group: &LifetimesGroup) -> String {
    let causes = [
        (group.overwritten_bytes, "overwritten"),
        (group.truncated_bytes, "truncated"),
        (group.deleted_bytes, "deleted"),
        (group.discarded_bytes, "discarded"),
        (group.reused_bytes, "reused"),
    ];
    let all: u64 = causes.iter().map(|(bytes, _)| bytes).sum();
    let most = causes.into_iter().rev().max_by_key(|(bytes, _)| *bytes);
    match most {
        Some((bytes, name)) if bytes < all => {
            format!("{name} {}", percent(bytes as f64 / all as f64))
        }
        Some((_, name)) => name.to_owned(),
        None => String::new(),
    }
}

/// A share as people read it.
fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0 %".into(),
        percent if percent < 1.0 => format!("{percent:.1} %"),
        percent => format!("{percent:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(values: &[(u64, u64)]) -> Histogram {
        let mut histogram = Histogram::default();
        for (seconds, bytes) in values {
            histogram.record(seconds * SECOND_NS, *bytes);
        }
        histogram
    }

    fn group(by: GroupedBy, name: &str, born_bytes: u64) -> LifetimesGroup {
        LifetimesGroup {
            by,
            name: name.into(),
            born_bytes,
            deleted_bytes: 600,
            overwritten_bytes: 200,
            lifetimes: histogram(&[(29, 600), (100, 200)]),
            naive_lifetimes: histogram(&[(100, 200)]),
            ..LifetimesGroup::default()
        }
    }

    pub(super) fn disk() -> DiskLifetimes {
        DiskLifetimes {
            disk: "web".into(),
            share: 0.25,
            files: 3,
            living_bytes: 200,
            groups: vec![
                group(GroupedBy::Disk, "", 1000),
                group(GroupedBy::Kind, "data", 1000),
                group(GroupedBy::Container, "/system.slice/web.service", 950),
                group(GroupedBy::Ending, ".tmp\u{1b}[2J", 800),
                group(GroupedBy::Ending, "", 900),
                group(GroupedBy::Ending, "*", 1),
            ],
            ..DiskLifetimes::default()
        }
    }

    #[test]
    fn the_report_fits_a_terminal_and_shows_the_naive_view() {
        let mut disk = disk();
        arrange(&mut disk.groups, None, 2);
        let names: Vec<&str> = disk.groups.iter().map(|group| &*group.name).collect();
        assert_eq!(names, ["", "data", "/system.slice/web.service", "", ".tmp\u{1b}[2J"]);
        let time_ns = 700 * SECOND_NS;
        let report = LifetimesReport { time_ns, unix_time_ns: 0, disks: vec![disk] };
        let text = text(&report, Some(80), Style::PLAIN);
        // An hour has not passed.
        assert!(text.contains("10min") && !text.contains("1h"), "{text}");
        assert!(text.contains("web.service") && !text.contains('\u{1b}'), "{text}");
        assert!(text.contains("deleted 75 %") && text.contains("60 %"), "{text}");
        let naive = text.lines().find(|line| line.starts_with("naive")).unwrap();
        assert!(naive.contains("20 %"), "{text}");
        assert!(text.contains("from 25 %"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

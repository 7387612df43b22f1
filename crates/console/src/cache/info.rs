//! `fathom cache info`: what the cache of a disk does.
use clap::Args;
use fathom_control::{Bytes, CacheCounts, CacheDisk, CacheFile, CacheInfo};
use serde::Serialize;

use super::{class_text, gain, hits, percent};
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{
        self, Format, latency,
        sheet::Sheet,
        short_bytes, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
    usage::container_name,
};

/// Options of `fathom cache info`.
#[derive(Debug, Args)]
#[command(after_help = "\
Counts begin when the disk got its cache; those of files and parts of databases are of the rows that
the layer `classify` still has. HIT is the share of the reads that the cache had wholly. AVOIDED is what
the reads of bytes in the cache would have cost at home, as estimated from reads there.

Examples:
  fathom cache info db
  fathom cache info db --limit 50
  fathom cache info db --json | jq '.disk.classes[] | {class, reads, hits}'")]
pub struct InfoOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// The most files and parts of databases to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

#[derive(Serialize)]
struct Report<'a> {
    cache: &'a CacheInfo,
    disk: &'a CacheDisk,
}

/// Carries out the command.
pub fn run(options: &InfoOptions) -> CommandResult {
    let report = options.control.client().caches(Some(&options.disk), 0, options.limit)?;
    let (cache, disk) = report.of_disk(&options.disk).ok_or_else(|| no_cache(&options.disk))?;
    if options.format.json {
        return output::json(&Report { cache, disk });
    }
    let width = output::width();
    output::text_line(&sheet(cache, disk).render(width, Style::stdout()))?;
    if !disk.classes.is_empty() {
        output::text_line(&format!("\n{}", classes(disk).render(width, Style::stdout())))?;
    }
    if !disk.groups.is_empty() {
        output::text_line(&format!("\n{}", groups(disk).render(width, Style::stdout())))?;
    }
    for list in [&disk.databases, &disk.files] {
        if !list.is_empty() {
            output::text_line(&format!("\n{}", files(list).render(width, Style::stdout())))?;
        }
    }
    Ok(())
}

/// The failure for a disk without a cache.
pub fn no_cache(disk: &str) -> Failure {
    Failure::new(format!("the disk {disk} has no cache"))
        .advise("`fathom cache list` shows the caches; docs/cache.md shows how to add one")
}

fn sheet(cache: &CacheInfo, disk: &CacheDisk) -> Sheet {
    let mut sheet = Sheet::default();
    let kind = if cache.is_shared { "shared, " } else { "" };
    sheet.fact(
        "cache",
        format!(
            "{} ({kind}{}, policy {}, blocks of {})",
            clean(&cache.name),
            disk.mode,
            cache.policy,
            Bytes(cache.block_size)
        ),
    );
    sheet.fact_if_any("out of service", cache.failure.clone());
    let used = percent(Some(cache.used_bytes as f64 / cache.size_bytes.max(1) as f64));
    let of_disk = Bytes(disk.used_bytes);
    sheet.fact("size", format!("{}, {used} used, {of_disk} by the disk", Bytes(cache.size_bytes)));
    if disk.log_bytes > 0 {
        let (dirty, size) = (Bytes(disk.dirty_bytes), Bytes(disk.log_bytes));
        sheet.fact("log", format!("{dirty} of {size} may not be on the disk yet"));
    }
    let held = super::shares(&cache.classes, |class| class.used_bytes);
    sheet.fact_if_any("content by class", held);
    let counts = &disk.counts;
    sheet.fact("hits", format!("{} of {} reads: {}", counts.hits, counts.reads, hits(counts)));
    sheet.fact(
        "bytes saved",
        format!("{} of {}", Bytes(counts.hit_bytes), Bytes(counts.read_bytes)),
    );
    sheet.fact(
        "time",
        format!(
            "hits took {}, misses {}; hits would have taken {} at home",
            latency(counts.hit_ns),
            latency(counts.miss_ns),
            latency(counts.avoided_ns)
        ),
    );
    sheet.fact("blocks put in", cache.insertions.to_string());
    let removals = &cache.removals;
    sheet.fact(
        "blocks removed",
        format!(
            "{} for others, {} written, {} discarded",
            removals.capacity, removals.written, removals.discarded
        ),
    );
    let refusals = &cache.refusals;
    sheet.fact(
        "blocks refused",
        format!("{} by the policy, {} without a free slot", refusals.policy, refusals.no_room),
    );
    sheet
}

/// The columns of counts.
fn count_columns() -> [TableColumn; 5] {
    [
        TableColumn::number("READS").kept(),
        TableColumn::number("HIT").kept(),
        TableColumn::number("SAVED").importance(4),
        TableColumn::number("AVOIDED").importance(3),
        TableColumn::number("MISSES").importance(2),
    ]
}

fn count_cells(counts: &CacheCounts) -> [String; 5] {
    [
        short_number(counts.reads as f64),
        hits(counts),
        short_bytes(counts.hit_bytes as f64),
        latency(counts.avoided_ns),
        latency(counts.miss_ns),
    ]
}

fn classes(disk: &CacheDisk) -> Table {
    let first = [TableColumn::text("CLASS").flexible().kept()];
    let mut table = Table::new(first.into_iter().chain(count_columns()));
    for class in &disk.classes {
        let cells = count_cells(&class.counts);
        table.row([class_text(&class.class)].into_iter().chain(cells));
    }
    table
}

fn groups(disk: &CacheDisk) -> Table {
    let first = [TableColumn::text("CONTAINER").flexible_path(16).kept()];
    let sizes = ["-50 %", "-25 %", "+25 %", "+100 %"].map(TableColumn::number);
    let sizes = sizes.map(|column| column.importance(5));
    let mut table = Table::new(first.into_iter().chain(count_columns()).chain(sizes));
    for group in &disk.groups {
        let gains = [50, 75, 125, 200].map(|size| gain(&group.curve, size));
        let cells = count_cells(&group.counts).into_iter().chain(gains);
        table.row([container_name(&group.cgroup)].into_iter().chain(cells));
    }
    table
}

fn files(list: &[CacheFile]) -> Table {
    let mut table = Table::new([
        TableColumn::text(if list.iter().all(|file| !file.database_system.is_empty()) {
            "PART OF A DATABASE"
        } else {
            "FILE"
        })
        .flexible_path(18)
        .kept(),
        TableColumn::text("KIND").importance(2),
        TableColumn::number("READS").kept(),
        TableColumn::number("HIT").kept(),
        TableColumn::number("READ").importance(3),
    ]);
    for file in list {
        let hit = (file.reads > 0).then(|| file.hits as f64 / file.reads as f64);
        table.row([
            name(file),
            file.kind.clone(),
            short_number(file.reads as f64),
            percent(hit),
            short_bytes(file.read_bytes as f64),
        ]);
    }
    table
}

/// The name of a file, or of a part of a database.
fn name(file: &CacheFile) -> String {
    let path = match (file.path.as_str(), file.inode) {
        ("", 0) => "no file".to_owned(),
        ("", inode) => format!("inode {inode}"),
        (path, _) => clean(path),
    };
    match (file.database_part.as_str(), file.database_index) {
        ("", _) => path,
        (part, 0) => format!("{path}: {part}"),
        (part, index) => format!("{path}: {part} {index}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::report, *};

    #[test]
    fn a_sheet_has_everything_and_strange_names_are_harmless() {
        let report = report(1);
        let (cache, disk) = report.of_disk("db").unwrap();
        let text = sheet(cache, disk).render(None, Style::PLAIN);
        for part in [
            "hosts (shared, write-through, policy auto, blocks of 16 KiB)",
            "1 GiB, 100.0 % used, 512 MiB by the disk",
            "5 75 %, 0 25 %",
            "750 of 1000 reads: 75.0 %",
            "misses 2.0 s",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let text = groups(disk).render(Some(100), Style::PLAIN);
        assert!(text.contains("-25.0") && text.contains("+15.0"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
        assert!(classes(disk).render(None, Style::PLAIN).contains("class 5"));
    }

    #[test]
    fn files_and_parts_of_databases_have_names() {
        let file = CacheFile {
            path: "/a\n\u{1b}".into(),
            reads: 4,
            hits: 1,
            database_system: "sqlite".into(),
            database_part: "index".into(),
            database_index: 7,
            ..CacheFile::default()
        };
        assert_eq!(name(&file), "/a\u{fffd}\u{fffd}: index 7");
        let text = files(&[file]).render(None, Style::PLAIN);
        assert!(text.contains("PART OF A DATABASE") && text.contains("25.0 %"), "{text}");
        assert_eq!(name(&CacheFile { inode: 3, ..CacheFile::default() }), "inode 3");
    }
}

//! `fathom cache list`: the caches of the daemon's disks.
use clap::Args;
use fathom_control::{Bytes, CacheCounts, CacheInfo};

use crate::{
    connection::ControlOptions,
    failure::CommandResult,
    output::{
        self, Format, short_bytes, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
};

/// Options of `fathom cache list`.
#[derive(Debug, Args)]
#[command(after_help = "\
HIT is the share of the reads that the cache had wholly, and SAVED the bytes that were not read from
the disks beneath, since the disks got their cache. IN are the blocks put into the cache, and OUT those
that left it to make room for others. DIRTY is what the logs of disks in the mode write-back have that may
not be on the disks yet.

Examples:
  fathom cache list
  fathom cache list --json | jq '.caches[] | {name, used_bytes, removals}'")]
pub struct ListOptions {
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &ListOptions) -> CommandResult {
    let report = options.control.client().caches(None, 0, 0)?;
    if options.format.json {
        return output::json(&report);
    }
    if report.caches.is_empty() {
        return output::text_line("No disk has the layer `cache`.");
    }
    output::text_line(&table(&report.caches).render(output::width(), Style::stdout()))
}

/// The bytes in logs that may not be at home; empty if no disk of the cache has a log in it.
fn dirty(cache: &CacheInfo) -> String {
    let logs = || cache.disks.iter().filter(|disk| disk.log_bytes > 0);
    let bytes: u64 = logs().map(|disk| disk.dirty_bytes).sum();
    if logs().next().is_some() { short_bytes(bytes as f64) } else { String::new() }
}

fn table(caches: &[CacheInfo]) -> Table {
    let mut table = Table::new([
        TableColumn::text("CACHE").flexible().kept(),
        TableColumn::number("SIZE").kept(),
        TableColumn::number("USED").kept(),
        TableColumn::number("BLOCK").importance(1),
        TableColumn::text("POLICY").importance(3),
        TableColumn::number("HIT").kept(),
        TableColumn::number("SAVED").importance(6),
        TableColumn::number("IN").importance(2),
        TableColumn::number("OUT").importance(2),
        TableColumn::text("DIRTY").optional().importance(4),
        TableColumn::text("DISKS").flexible().importance(5),
        TableColumn::text("OUT OF SERVICE").flexible().optional().kept(),
    ]);
    for cache in caches {
        let mut counts = CacheCounts::default();
        cache.disks.iter().for_each(|disk| counts.merge(&disk.counts));
        let disks: Vec<String> = cache.disks.iter().map(|disk| clean(&disk.name)).collect();
        table.row([
            clean(&cache.name),
            Bytes(cache.size_bytes).to_string(),
            super::percent(Some(cache.used_bytes as f64 / cache.size_bytes.max(1) as f64)),
            Bytes(cache.block_size).to_string(),
            cache.policy.clone(),
            super::hits(&counts),
            short_bytes(counts.hit_bytes as f64),
            short_number(cache.insertions as f64),
            short_number(cache.removals.capacity as f64),
            dirty(cache),
            disks.join(", "),
            cache.failure.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{super::tests::report, *};

    #[test]
    fn a_cache_is_a_line() {
        let text = table(&report(1).caches).render(Some(100), Style::PLAIN);
        for part in ["hosts", "1 GiB", "100.0 %", "75.0 %", "5.86M", "70.0k", "db, web"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!(!text.contains("OUT OF SERVICE") && !text.contains("DIRTY"), "{text}");
        let mut report = report(1);
        let disk = &mut report.caches[0].disks[0];
        (disk.dirty_bytes, disk.log_bytes) = (3 << 20, 1 << 30);
        let text = table(&report.caches).render(Some(120), Style::PLAIN);
        assert!(text.contains("DIRTY") && text.contains("3.00M"), "{text}");
    }
}

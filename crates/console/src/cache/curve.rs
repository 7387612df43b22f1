//! `fathom cache curve`: the hit ratio of each size of a disk's cache.
use std::path::PathBuf;

use clap::Args;
use fathom_control::{Bytes, CacheCurve, CacheDisk};

use super::{gain, hits, info::no_cache, percent, picture, span};
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{
        self, Format, short_number,
        style::Style,
        table::{Table, TableColumn},
    },
    usage::container_name,
};

/// The sizes of the table, in percent of the present size. Larger ones follow, each of twice the
/// size, while the curve rises.
const SIZES: [u64; 10] = [10, 25, 50, 75, 100, 125, 150, 200, 300, 400];
/// A curve rises no more where it is this close to its end.
const RISE_MIN: f64 = 0.005;
/// The width of the bars, in characters.
const BAR: usize = 40;
/// The points of a curve.
const POINTS: usize = 200;

/// Options of `fathom cache curve`.
#[derive(Debug, Args)]
#[command(after_help = "\
The curve is that of an LRU cache, computed from a sample of the reads of the last one to two hours. The
cache's own policy can be better or worse. Blocks that are read again only after a longer time count as
new. The containers are those that read most; their sizes are what each of them would need alone.

Examples:
  fathom cache curve db
  fathom cache curve db --picture db.svg
  fathom cache curve db --json | jq '.curve.points'

The curve of a disk before it has a cache, from one that is as small as it can be, and stays empty:
  fathom cache attach db --size 1M --mode read-only")]
pub struct CurveOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Also draw the curve, and those of the disk's containers, into this file (SVG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &CurveOptions) -> CommandResult {
    let report = options.control.client().caches(Some(&options.disk), POINTS, 0)?;
    let (_, disk) = report.of_disk(&options.disk).ok_or_else(|| no_cache(&options.disk))?;
    if let Some(path) = &options.picture {
        if disk.curve.accesses == 0 {
            return Err(Failure::new(format!("there is no curve of {} yet", disk.name))
                .advise("try again when the disk has been read"));
        }
        std::fs::write(path, picture::draw(disk))
            .map_err(|error| Failure::io("write", path, &error))?;
    }
    if options.format.json {
        return output::json(disk);
    }
    if disk.curve.accesses == 0 {
        return output::text_line(&format!("{} has not been read yet.", disk.name));
    }
    let width = output::width();
    output::text_line(&head(disk))?;
    output::text_line(&format!("\n{}", sizes(&disk.curve).render(width, Style::stdout())))?;
    if !disk.groups.is_empty() {
        output::text_line(&format!("\n{}", groups(disk).render(width, Style::stdout())))?;
    }
    match &options.picture {
        Some(path) => output::text_line(&format!("\nThe picture is in {}.", path.display())),
        None => Ok(()),
    }
}

fn head(disk: &CacheDisk) -> String {
    let curve = &disk.curve;
    format!(
        "{}: {} accesses to blocks in {}, {} of the blocks followed; hits now {}",
        disk.name,
        short_number(curve.accesses as f64),
        span(curve.window_ns),
        percent(Some(curve.sampled)),
        hits(&disk.counts),
    )
}

/// The hit ratio of a size, from 0 to 1.
pub fn hit_ratio(curve: &CacheCurve, size_bytes: u64) -> f64 {
    let points = &curve.points;
    let at = points.partition_point(|(size, _)| *size <= size_bytes);
    let miss_ratio = match (at.checked_sub(1).and_then(|at| points.get(at)), points.get(at)) {
        (Some((x0, y0)), Some((x1, y1))) => {
            let part = size_bytes.saturating_sub(*x0) as f64 / x1.saturating_sub(*x0).max(1) as f64;
            y0 + (y1 - y0) * part
        }
        (Some((_, last)), None) => *last,
        (None, _) => 1.0,
    };
    1.0 - miss_ratio
}

/// The size from which on the curve rises no more, in bytes.
pub fn useful_size(curve: &CacheCurve) -> u64 {
    let last = curve.points.last().map_or(1.0, |(_, ratio)| *ratio);
    let useful = curve.points.iter().find(|(_, ratio)| ratio - last < RISE_MIN);
    useful.map_or(0, |(size, _)| *size)
}

/// The sizes of the table, in percent of the present size.
fn percents(curve: &CacheCurve) -> impl Iterator<Item = u64> {
    let useful = u128::from(useful_size(curve)) * 100 / u128::from(curve.size_bytes.max(1));
    let largest = SIZES[SIZES.len() - 1];
    let larger = (1..u64::BITS - largest.ilog2()).map(move |shift| largest << shift);
    SIZES.into_iter().chain(larger.take_while(move |size| u128::from(size / 2) < useful))
}

fn sizes(curve: &CacheCurve) -> Table {
    let mut table = Table::new([
        TableColumn::number("SIZE").kept(),
        TableColumn::number("").kept(),
        TableColumn::number("HIT").kept(),
        TableColumn::text("").flexible_to(10),
    ]);
    for percent_of in percents(curve) {
        let size = (u128::from(curve.size_bytes) * u128::from(percent_of) / 100) as u64;
        let ratio = hit_ratio(curve, size).clamp(0.0, 1.0);
        let bar = "█".repeat((ratio * BAR as f64).round() as usize);
        table.row([
            Bytes(size).to_string(),
            if percent_of == 100 { "now".into() } else { format!("{percent_of} %") },
            percent(Some(ratio)),
            bar,
        ]);
    }
    table
}

fn groups(disk: &CacheDisk) -> Table {
    let sizes = ["-50 %", "-25 %", "+25 %", "+100 %"].map(TableColumn::number);
    let first = [
        TableColumn::text("CONTAINER").flexible_path(16).kept(),
        TableColumn::number("READS").importance(3),
        TableColumn::number("HIT").kept(),
    ];
    let mut table = Table::new(first.into_iter().chain(sizes));
    for group in &disk.groups {
        let gains = [50, 75, 125, 200].map(|size| gain(&group.curve, size));
        let first = [
            container_name(&group.cgroup),
            short_number(group.counts.reads as f64),
            hits(&group.counts),
        ];
        table.row(first.into_iter().chain(gains));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{super::tests::report, *};

    #[test]
    fn the_curve_is_a_line_between_its_points() {
        let report = report(1);
        let curve = &report.caches[0].disks[0].curve;
        for (size, wanted) in
            [(0, 0.0), (1 << 28, 0.25), (1 << 29, 0.5), (1 << 30, 0.75), (3 << 29, 0.825)]
        {
            let ratio = hit_ratio(curve, size);
            assert!((ratio - wanted).abs() < 1e-6, "{size}: {ratio}");
        }
        assert!((hit_ratio(curve, u64::MAX) - 0.9).abs() < 1e-9);
        assert!(hit_ratio(&CacheCurve::default(), 5).abs() < 1e-9);
        let text = sizes(curve).render(Some(60), Style::PLAIN);
        assert!(text.contains("now") && text.contains("75.0 %"), "{text}");
        // A cache of a thousandth of what the disk reads again.
        let small = CacheCurve {
            size_bytes: 1 << 20,
            points: vec![(0, 1.0), (1 << 30, 0.5), (1 << 40, 0.499)],
            ..CacheCurve::default()
        };
        assert_eq!(useful_size(&small), 1 << 30);
        assert_eq!(percents(&small).last(), Some(102_400));
        let text = sizes(&small).render(Some(60), Style::PLAIN);
        assert!(text.contains("1 GiB  102400 %  50.0 %"), "{text}");
        let empty = CacheCurve::default();
        assert_eq!(percents(&empty).last(), Some(400));
        let wide = CacheCurve { size_bytes: 1, points: vec![(u64::MAX, 0.0)], ..empty };
        assert!(percents(&wide).count() < 80);
        let text = head(&report.caches[0].disks[0]);
        assert!(text.starts_with("db: 12.3k accesses to blocks in 1 h, 1.0 % of"), "{text}");
    }
}

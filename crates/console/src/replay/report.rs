//! The report of a replay.

use fathom_cache::{
    CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_SWAP, CLASS_TABLE, CLASS_UNKNOWN, ClassCounts,
    Curve, SimulationCounts,
};
use fathom_control::{Bytes, Nanoseconds};
use serde::Serialize;

use crate::{
    failure::CommandResult,
    output::{
        self,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
};

/// The report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The file.
    pub trace: String,
    /// The requests of the trace, and their disks.
    pub requests: u64,
    /// See `requests`.
    pub disks: usize,
    /// The time that the trace covers.
    pub duration_ns: u64,
    /// The size of a block.
    pub block: u64,
    /// The model of the slow disks.
    pub disk: &'static str,
    /// A row for each size and policy.
    pub rows: Vec<Row>,
    /// The miss-ratio curve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub curve: Option<Vec<CurvePoint>>,
    /// The time that the replay took.
    pub elapsed_ns: u64,
}

/// A cache of one size with one policy.
#[derive(Debug, Serialize)]
pub struct Row {
    cache: u64,
    policy: &'static str,
    /// The accesses to blocks, and the share of them whose block was in the cache.
    accesses: u64,
    hit_ratio: f64,
    /// The same of reads alone.
    reads: u64,
    read_hit_ratio: f64,
    insertions: u64,
    evictions: u64,
    refusals: u64,
    disk_reads: u64,
    disk_writes: u64,
    disk_read_ns: u64,
    disk_write_ns: u64,
    classes: Vec<ClassRow>,
}

/// The accesses of one class.
#[derive(Debug, Serialize)]
struct ClassRow {
    class: String,
    accesses: u64,
    hit_ratio: f64,
    reads: u64,
    read_hit_ratio: f64,
}

/// The miss ratio of an LRU cache of one size.
#[derive(Debug, Serialize)]
pub struct CurvePoint {
    cache: u64,
    miss_ratio: f64,
}

impl CurvePoint {
    /// The points of a curve.
    pub fn all(curve: &Curve, block: Bytes) -> Vec<Self> {
        let points = curve.points().into_iter();
        points.map(|(blocks, miss_ratio)| Self { cache: blocks * block.0, miss_ratio }).collect()
    }
}

/// The share of `part` in `all`.
fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

impl Row {
    /// The row of a cache of this size.
    pub fn new(cache: Bytes, policy: &'static str, counts: &SimulationCounts) -> Self {
        let total = counts.total();
        let classes = counts.classes.iter().enumerate();
        Self {
            cache: cache.0,
            policy,
            accesses: total.accesses(),
            hit_ratio: share(total.hits(), total.accesses()),
            reads: total.reads,
            read_hit_ratio: share(total.read_hits, total.reads),
            insertions: counts.insertions,
            evictions: counts.evictions,
            refusals: counts.refusals,
            disk_reads: counts.disk_reads,
            disk_writes: counts.disk_writes,
            disk_read_ns: counts.disk_read_ns,
            disk_write_ns: counts.disk_write_ns,
            classes: classes
                .filter(|(_, class)| class.accesses() > 0)
                .map(|(number, class)| ClassRow::new(number as u8, class))
                .collect(),
        }
    }
}

impl ClassRow {
    fn new(class: u8, counts: &ClassCounts) -> Self {
        Self {
            class: class_name(class),
            accesses: counts.accesses(),
            hit_ratio: share(counts.hits(), counts.accesses()),
            reads: counts.reads,
            read_hit_ratio: share(counts.read_hits, counts.reads),
        }
    }
}

/// The name of a class.
fn class_name(class: u8) -> String {
    match class {
        CLASS_JOURNAL => "journal".into(),
        CLASS_SWAP => "swap".into(),
        CLASS_UNKNOWN => "unknown".into(),
        CLASS_TABLE => "table".into(),
        CLASS_INDEX => "index".into(),
        CLASS_LOG => "log".into(),
        class => class.to_string(),
    }
}

/// A share for display.
fn percent(share: f64) -> String {
    format!("{:.2}%", share * 100.0)
}

impl Report {
    /// Prints the report as text.
    pub fn print(&self) -> CommandResult {
        let (width, style) = (output::width(), Style::stdout());
        let time = |time_ns: u64| Nanoseconds(time_ns).to_string();
        let faster = self.duration_ns as f64 / self.elapsed_ns.max(1) as f64;
        output::text_line(&format!(
            "{}: {} requests of {} disk{} in {}, replayed in {}{}\n",
            clean(&self.trace),
            self.requests,
            self.disks,
            if self.disks == 1 { "" } else { "s" },
            time(self.duration_ns),
            time(self.elapsed_ns),
            if faster > 2.0 { format!(", {faster:.0} times as fast") } else { String::new() },
        ))?;
        output::text_line(&self.comparison().render(width, style))?;
        for row in self.rows.iter().filter(|row| row.classes.len() > 1) {
            let title = format!("\n{}, {}, by class:", Bytes(row.cache), row.policy);
            output::text_line(&title)?;
            output::text_line(&row.by_class().render(width, style))?;
        }
        if let Some(curve) = &self.curve {
            output::text_line("\nThe miss ratio of an LRU cache, by its size:")?;
            output::text_line(&curve_table(curve, self.block).render(width, style))?;
        }
        Ok(())
    }

    fn comparison(&self) -> Table {
        let mut table = Table::new([
            TableColumn::number("CACHE").kept(),
            TableColumn::text("POLICY").kept(),
            TableColumn::number("HITS").kept(),
            TableColumn::number("READ HITS").importance(5),
            TableColumn::number("INSERTED").importance(2),
            TableColumn::number("EVICTED").importance(1),
            TableColumn::number("REFUSED").importance(1),
            TableColumn::number("DISK READS").importance(4),
            TableColumn::number("READ TIME").kept(),
            TableColumn::number("WRITE TIME").importance(3),
        ]);
        for row in &self.rows {
            table.row([
                Bytes(row.cache).to_string(),
                row.policy.into(),
                percent(row.hit_ratio),
                percent(row.read_hit_ratio),
                row.insertions.to_string(),
                row.evictions.to_string(),
                row.refusals.to_string(),
                row.disk_reads.to_string(),
                Nanoseconds(row.disk_read_ns).to_string(),
                Nanoseconds(row.disk_write_ns).to_string(),
            ]);
        }
        table
    }
}

impl Row {
    fn by_class(&self) -> Table {
        let mut table = Table::new([
            TableColumn::text("CLASS").kept(),
            TableColumn::number("ACCESSES"),
            TableColumn::number("HITS").kept(),
            TableColumn::number("READS"),
            TableColumn::number("READ HITS").kept(),
        ]);
        for class in &self.classes {
            table.row([
                class.class.clone(),
                class.accesses.to_string(),
                percent(class.hit_ratio),
                class.reads.to_string(),
                percent(class.read_hit_ratio),
            ]);
        }
        table
    }
}

/// The points of a curve at about each doubling of the size.
fn curve_table(curve: &[CurvePoint], block: u64) -> Table {
    let mut table =
        Table::new([TableColumn::number("CACHE").kept(), TableColumn::number("MISSES").kept()]);
    let mut next = block;
    for (index, point) in curve.iter().enumerate() {
        if point.cache >= next || index + 1 == curve.len() {
            table.row([Bytes(point.cache).to_string(), percent(point.miss_ratio)]);
            next = point.cache.saturating_mul(2);
        }
    }
    table
}

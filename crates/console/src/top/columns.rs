//! The columns of the disks' table, and those that fit into a terminal.
use super::model::{Activity, SortKey};
use crate::output::{latency, short_bytes, short_number};

/// A column of the disks' table.
pub struct DiskColumn {
    /// Its heading.
    pub heading: &'static str,
    /// Its width, in characters.
    pub width: usize,
    /// The wider the terminal, the higher the ranks of the columns shown.
    rank: u8,
    /// The order that uses it.
    pub key: Option<SortKey>,
    /// Its text for an activity.
    pub value: fn(&Activity) -> String,
}

/// The rank of what a narrow terminal loses first.
const RANK_MAX: u8 = 9;

const COLUMNS: &[DiskColumn] = &[
    DiskColumn {
        heading: "READ/S",
        width: 7,
        rank: 0,
        key: Some(SortKey::Iops),
        value: |a| short_number(a.reads_per_second),
    },
    DiskColumn {
        heading: "WRITE/S",
        width: 7,
        rank: 0,
        key: Some(SortKey::Iops),
        value: |a| short_number(a.writes_per_second),
    },
    DiskColumn {
        heading: "OTHER/S",
        width: 7,
        rank: 8,
        key: None,
        value: |a| short_number(a.others_per_second),
    },
    DiskColumn {
        heading: "READ B/S",
        width: 8,
        rank: 3,
        key: Some(SortKey::Read),
        value: |a| short_bytes(a.read_bytes_per_second),
    },
    DiskColumn {
        heading: "WRITE B/S",
        width: 9,
        rank: 3,
        key: Some(SortKey::Written),
        value: |a| short_bytes(a.write_bytes_per_second),
    },
    DiskColumn {
        heading: "DEPTH",
        width: 5,
        rank: 4,
        key: Some(SortKey::Depth),
        value: |a| format!("{:.1}", a.depth),
    },
    DiskColumn {
        heading: "P50",
        width: 7,
        rank: 2,
        key: None,
        value: |a| latency(a.latency_ns_p50),
    },
    DiskColumn {
        heading: "P99",
        width: 7,
        rank: 1,
        key: Some(SortKey::Latency),
        value: |a| latency(a.latency_ns_p99),
    },
    DiskColumn {
        heading: "MAX",
        width: 7,
        rank: 6,
        key: None,
        value: |a| latency(a.latency_ns_max),
    },
    DiskColumn {
        heading: "ERRORS",
        width: 6,
        rank: 7,
        key: Some(SortKey::Errors),
        value: |a| a.errors.to_string(),
    },
    DiskColumn {
        heading: "HELD",
        width: 6,
        rank: 0,
        key: None,
        value: |a| short_number(a.held as f64),
    },
    DiskColumn {
        heading: "HIT",
        width: 6,
        rank: 8,
        key: None,
        value: |a| a.hit_ratio().map_or_else(|| "–".into(), |hit| format!("{:.0} %", hit * 100.0)),
    },
    DiskColumn {
        heading: "DIRTY",
        width: 7,
        rank: 3,
        key: Some(SortKey::Dirty),
        value: |a| a.dirty_bytes.map_or_else(|| "–".into(), |bytes| short_bytes(bytes as f64)),
    },
    DiskColumn {
        heading: "AWAY",
        width: 7,
        rank: RANK_MAX,
        key: None,
        value: |a| a.away_bytes.map_or_else(|| "–".into(), |bytes| short_bytes(bytes as f64)),
    },
];

/// The rank of the column of recent rates.
const RECENT_RANK: u8 = 5;
const RECENT_WIDTH: usize = 12;
const RECENT_WIDTH_MAX: usize = 60;
const NAME_WIDTH: usize = 10;

impl DiskColumn {
    /// Its rank, in a table with these sums; `None` for a column that has no use in it.
    fn rank(&self, total: &Activity) -> Option<u8> {
        match self.heading {
            // Errors are shown on any width.
            "ERRORS" if total.errors > 0 => Some(0),
            "HELD" if total.held == 0 => None,
            "HIT" if total.cache_reads == 0 => None,
            "DIRTY" if total.dirty_bytes.is_none() => None,
            "AWAY" if total.away_bytes.is_none() => None,
            _ => Some(self.rank),
        }
    }
}

/// The columns that fit, and the widths of the name and of the recent rates.
pub fn layout(
    room: usize,
    total: &Activity,
    name_width: usize,
) -> (Vec<&'static DiskColumn>, usize, usize) {
    let is_shown =
        |column: &&DiskColumn, limit: u8| column.rank(total).is_some_and(|rank| rank <= limit);
    let width = |limit: u8| {
        let columns = COLUMNS.iter().filter(|column| is_shown(column, limit));
        let columns: usize = columns.map(|column| column.width + 1).sum();
        columns + if limit >= RECENT_RANK { RECENT_WIDTH + 2 } else { 0 }
    };
    let limit = (0..=RANK_MAX).rev().find(|&limit| NAME_WIDTH + width(limit) <= room).unwrap_or(0);
    let columns = COLUMNS.iter().filter(|column| is_shown(column, limit)).collect();
    let spare = room.saturating_sub(NAME_WIDTH + width(limit));
    let name = NAME_WIDTH + spare.min(name_width.saturating_sub(NAME_WIDTH));
    let recent = if limit >= RECENT_RANK {
        (RECENT_WIDTH + spare - (name - NAME_WIDTH)).min(RECENT_WIDTH_MAX)
    } else {
        0
    };
    (columns, name, recent)
}

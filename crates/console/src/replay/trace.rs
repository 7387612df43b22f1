//! The requests of a trace.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use fathom_cache::{
    Action, CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_NAMED, CLASS_SWAP, CLASS_TABLE,
    CLASS_UNKNOWN, SimulatedRequest,
};
use fathom_cql::Value;
use fathom_monitor::{
    ColumnValues, io_stream,
    read::{self, Batch, ReadOptions, ReadReport, Reader},
};

use crate::failure::CommandResult;

/// The bytes of a sector.
const SECTOR: u64 = 512;
/// The columns that are read, in the order of the schema.
const COLUMNS: [&str; 9] =
    ["Type", "IOOp", "Sector", "Size", "VMName", "VDisk", "Kind", "Class", "DbPart"];

/// The machine and the name of a disk, as far as the trace has them.
type DiskName = (Option<Arc<str>>, Option<Arc<str>>);

/// A reader of requests.
pub struct Trace {
    reader: Box<dyn Reader>,
    batch: Batch,
    /// The next row of the batch.
    row: usize,
    is_over: bool,
    /// The numbers of disks.
    disks: HashMap<DiskName, u32>,
    requests: u64,
    first_ns: u64,
    last_ns: u64,
}

impl Trace {
    /// Opens a file.
    pub fn open(path: &Path, options: &ReadOptions) -> CommandResult<Self> {
        let schema = io_stream();
        let mut wanted = vec![false; schema.columns.len()];
        for name in COLUMNS {
            let column = schema.find(name).expect("the stream has the column");
            wanted[column] = true;
        }
        Ok(Self {
            reader: read::open(path, &schema, &wanted, options)?,
            batch: Batch::default(),
            row: 0,
            is_over: false,
            disks: HashMap::new(),
            requests: 0,
            first_ns: u64::MAX,
            last_ns: 0,
        })
    }

    /// The next request; `None` at the end. Responses and operations without a range are skipped.
    pub fn next(&mut self) -> CommandResult<Option<SimulatedRequest>> {
        loop {
            if self.row == self.batch.len() {
                self.row = 0;
                if self.is_over || !self.reader.next_batch(&mut self.batch)? {
                    self.is_over = true;
                    self.batch.clear();
                    return Ok(None);
                }
                continue;
            }
            let row = self.row;
            self.row += 1;
            if let Some(request) = self.request(row) {
                self.requests += 1;
                self.first_ns = self.first_ns.min(request.time_ns);
                self.last_ns = self.last_ns.max(request.time_ns);
                return Ok(Some(request));
            }
        }
    }

    fn request(&mut self, row: usize) -> Option<SimulatedRequest> {
        let text = |column: usize| match self.value(column, row) {
            Value::Text(text) => Some(text),
            _ => None,
        };
        let number = |column: usize| match self.value(column, row) {
            Value::Integer(number) => u64::try_from(number).ok(),
            _ => None,
        };
        // Some traces have no types: all of their rows are requests.
        if text(0).is_some_and(|text| &*text != "Q") {
            return None;
        }
        let action = match text(1).as_deref() {
            Some("r") => Action::Read,
            Some("w") => Action::Write,
            Some("d" | "z") => Action::Discard,
            _ => return None,
        };
        let offset = number(2)?.checked_mul(SECTOR)?;
        let length = number(3)?.checked_mul(SECTOR)?;
        offset.checked_add(length)?;
        if length == 0 || length > LENGTH_MAX && action != Action::Discard {
            return None;
        }
        let class = class(text(6).as_deref(), number(7), text(8).as_deref());
        let disk = (text(4), text(5));
        let next = self.disks.len() as u32;
        let disk = *self.disks.entry(disk).or_insert(next);
        let time_ns = u64::try_from(self.batch.times_ns[row]).unwrap_or(0);
        Some(SimulatedRequest { time_ns, disk, action, offset, length, class })
    }

    fn value(&self, column: usize, row: usize) -> Value {
        self.batch
            .columns
            .get(column)
            .map_or(Value::Null, |column: &ColumnValues| column.value(row))
    }

    /// The report of the reader.
    pub fn report(&self) -> &ReadReport {
        self.reader.report()
    }

    /// The number of requests so far.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// The number of disks so far.
    pub fn disks(&self) -> usize {
        self.disks.len()
    }

    /// The time from the first request to the last, in nanoseconds.
    pub fn duration_ns(&self) -> u64 {
        self.last_ns.saturating_sub(self.first_ns)
    }
}

/// The longest read or write; longer ones are invalid, and would take very long to simulate.
const LENGTH_MAX: u64 = 1 << 30;

/// The class of a request of this kind, with this class and this part of a database in the trace.
/// It is the one that the layer `cache` gives.
fn class(kind: Option<&str>, class: Option<u64>, part: Option<&str>) -> u8 {
    match (kind, part, class) {
        (Some("journal"), _, _) => CLASS_JOURNAL,
        (Some("swap"), _, _) => CLASS_SWAP,
        (_, Some("table"), _) => CLASS_TABLE,
        (_, Some("index"), _) => CLASS_INDEX,
        (_, Some("log"), _) => CLASS_LOG,
        (_, _, Some(class)) => class.min(u64::from(CLASS_NAMED) - 1) as u8,
        (_, _, None) => CLASS_UNKNOWN,
    }
}

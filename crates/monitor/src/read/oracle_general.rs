//! Traces of libCacheSim in its format `oracleGeneral`: binary records of accesses to objects.
//!
//! Little-endian, without a header:
//!
//! ```text
//!      0       4               12      16              24
//!      │ time  │ object        │ size  │ next access   │
//! ```
//!
//! The time is in seconds and the size in bytes. The next access to the object is the number of its
//! record, or −1 or 2⁶³ − 1 if there is none. The object of a trace of disks is a sector of 512
//! bytes. There are no operations: a simulator of caches takes all accesses as reads.

use std::borrow::Cow;

use super::columns::EventColumns;
use super::formats::Head;
use super::intern::Texts;
use super::records::{RecordFormat, RecordReader, number};
use super::request::{TracedOperation, TracedRequest, TracedRequests};
use super::source::ByteSource;
use super::{Batch, Reader, TimeUnit, instant};

/// The length of a record, in bytes.
const SIZE: usize = 24;
/// The most records of a file that is recognised. Other bytes hardly ever are such numbers.
const RECORDS_MAX: i64 = 1 << 40;

/// The most records that are examined.
const EXAMINED: usize = 64;

/// The state of the format's reader.
struct OracleGeneral(TracedRequests);

/// Whether a file has this format: it has no mark, but its times do not decrease, and each next
/// access is in a later record.
pub fn is(head: &Head<'_>) -> bool {
    let records = head.bytes.chunks_exact(SIZE).take(EXAMINED);
    let has_next = |(at, record): (i64, &[u8])| match number::<8>(record, 16) as i64 {
        -1 | i64::MAX => true,
        next => at < next && next < RECORDS_MAX,
    };
    let times = records.clone().map(|record| number::<4>(record, 0));
    (head.bytes.len() >= SIZE) && (0..).zip(records).all(has_next) && times.is_sorted()
}

/// A reader of this format.
pub fn reader(
    name: &str,
    _: &Head<'_>,
    source: ByteSource,
    columns: EventColumns,
) -> Box<dyn Reader> {
    let format = OracleGeneral(TracedRequests::new(columns));
    Box::new(RecordReader::new(name, source, format))
}

impl RecordFormat for OracleGeneral {
    fn size(&self) -> usize {
        SIZE
    }

    fn record(
        &mut self,
        record: &[u8],
        texts: &mut Texts,
        batch: &mut Batch,
    ) -> Result<(), String> {
        let time_ns = instant(number::<4>(record, 0) as i64, TimeUnit::Seconds)
            .ok_or("its time is out of range")?;
        let sector =
            i64::try_from(number::<8>(record, 4)).map_err(|_| "its object is out of range")?;
        let sectors = (sector, number::<4>(record, 12).div_ceil(512) as i64);
        let operation = TracedOperation::Read;
        let request = TracedRequest { time_ns, operation, sectors, disk: Cow::Borrowed(b"") };
        self.0.add(&request, texts, batch)
    }
}

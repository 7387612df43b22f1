//! The entry point for fuzzing: arbitrary bytes as a recording.

use std::io::{self, Cursor};

use fathom_cql::{Row, Value};

use super::checksum::Sum;
use super::{
    BlockLimits, HEAD, HEADER, MAGIC, ParquetWriter, Recording, RowGroupLimits, RowReader,
    TEXT_MAX, Writer,
};
use crate::fuzz::drain;
use crate::io_stream;
use crate::read::{Batch, ReadError, ReadOptions, TimeUnit};

/// The most values that are compared. A few bytes can encode millions of values.
const VALUES: usize = 1 << 18;

/// The rows with their instants.
type Rows = Vec<(i64, Row)>;

/// Reads the bytes of a fuzzer as a recording, by items and by blocks, and panics if a reader
/// violates its contract. If the first byte is even, the checksums are corrected first, because a
/// fuzzer does not find valid ones.
pub fn fuzz_recording(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let mut bytes = data.to_vec();
    if how & 1 == 0 {
        set_checksums(&mut bytes);
    }
    let schema = io_stream();
    for time_unit in [TimeUnit::Nanoseconds, TimeUnit::Seconds] {
        let options = ReadOptions { time_unit, ..ReadOptions::default() };
        // All columns, or the few that a query needs.
        let all = how & 2 == 0;
        let wanted: Vec<bool> = (0..schema.columns.len()).map(|at| all || at % 8 == 1).collect();
        let kinds = schema.columns.iter().zip(&wanted).filter(|(_, wanted)| **wanted);
        let kinds: Vec<_> = kinds.map(|(column, _)| column.kind).collect();
        if let Ok(mut reader) =
            RowReader::new("fuzz", Cursor::new(&bytes), &schema, &wanted, &options)
        {
            let _ = drain(&mut reader, &kinds);
        }
    }
    let Ok(items) = by_items(&bytes) else { return };
    assert!(as_parquet(&bytes).is_none_or(|events| events == items.len() as u64));
    let blocks = by_blocks(&bytes);
    assert!(blocks.is_ok_and(|blocks| blocks == items), "two ways to read differ");
    let long = |value: &Value| matches!(value, Value::Text(text) if text.len() > TEXT_MAX);
    if !items.iter().flat_map(|(_, row)| row).any(long) {
        let again = written_again(&bytes, &items);
        assert!(by_items(&again).is_ok_and(|read| read == items), "rows do not come back");
    }
}

/// Sets the checksums of the header and of the blocks, as far as their lengths are valid.
fn set_checksums(bytes: &mut [u8]) {
    let number = |bytes: &[u8], at: usize| -> Option<usize> {
        Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize)
    };
    if !bytes.starts_with(&MAGIC) {
        return;
    }
    // The position of the header or block, the length of its fixed part, and the position of the
    // length of the rest.
    let (mut at, mut fixed, mut length_at) = (0, HEADER, 12);
    while let Some(length) = number(bytes, at + length_at) {
        let (behind, end) = (at + fixed, (at + fixed).saturating_add(length));
        if end > bytes.len() {
            return;
        }
        let sum = Sum::new().add(&bytes[at..behind - 4]).add(&bytes[behind..end]).value();
        bytes[behind - 4..behind].copy_from_slice(&sum.to_le_bytes());
        (at, fixed, length_at) = (end, HEAD, 8);
    }
}

/// The first rows, read by items.
fn by_items(bytes: &[u8]) -> Result<Rows, ReadError> {
    let mut recording = Recording::open("fuzz", bytes)?;
    let most = VALUES / recording.header().columns.len().max(1);
    let (mut rows, mut batch) = (Rows::new(), Batch::default());
    while rows.len() < most && recording.next_item(&mut batch)?.is_some() {
        rows.extend(batch.times_ns.iter().copied().zip(batch.rows()));
        assert_eq!(recording.report().events, rows.len() as u64);
    }
    Ok(rows)
}

/// The same rows, read by blocks.
fn by_blocks(bytes: &[u8]) -> Result<Rows, ReadError> {
    let mut recording = Recording::open("fuzz", bytes)?;
    let most = VALUES / recording.header().columns.len().max(1);
    let (mut rows, mut batch) = (Rows::new(), Batch::default());
    while let Some(block) = recording.next_block()? {
        recording.open_block(&block)?;
        while rows.len() < most && recording.block_rows(&mut batch)? {
            rows.extend(batch.times_ns.iter().copied().zip(batch.rows()));
            assert_eq!(recording.report().events, rows.len() as u64);
        }
        if rows.len() >= most {
            break;
        }
    }
    Ok(rows)
}

/// The number of the first rows after they have been written as Parquet; `None` if there are no
/// columns.
fn as_parquet(bytes: &[u8]) -> Option<u64> {
    let mut recording = Recording::open("fuzz", bytes).expect("it was read");
    let most = VALUES / recording.header().columns.len().max(1);
    let limits = RowGroupLimits { rows: 100, ..RowGroupLimits::default() };
    let mut writer = ParquetWriter::new(io::sink(), recording.header(), limits).ok()?;
    let mut batch = Batch::default();
    while (writer.summary().events as usize) < most
        && recording.next_item(&mut batch).expect("it was read").is_some()
    {
        writer.append(&batch).expect("a sink has room");
    }
    Some(writer.finish(recording.report()).expect("a sink has room").events)
}

/// A recording of the same rows.
fn written_again(bytes: &[u8], rows: &Rows) -> Vec<u8> {
    let recording = Recording::open("fuzz", bytes).expect("it was read");
    let limits = BlockLimits { rows: 100, ..BlockLimits::default() };
    let mut writer = Writer::new(Vec::new(), recording.header(), limits).expect("a header");
    for (time_ns, row) in rows {
        writer.append_row(*time_ns, row).expect("memory has room");
    }
    writer.finish().expect("memory has room").0
}

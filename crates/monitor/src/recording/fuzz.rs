//! The entry point for fuzzing: arbitrary bytes as a recording.

use std::io::{self, Cursor};

use fathom_cql::{Row, Type, Value};

use super::checksum::Sum;
use super::{
    BlockLimits, Cell, HEAD, HEADER, Header, MAGIC, ParquetWriter, Recording, RowGroupLimits,
    RowReader, TEXT_MAX, Writer,
};
use crate::fuzz::{drain, kinds};
use crate::read::{Batch, ReadError, ReadOptions, TimeUnit, WantedStream};
use crate::streams;

/// The most values that are compared. A few bytes can encode millions of values.
const VALUES: usize = 1 << 18;

/// The rows with their streams and instants.
type Rows = Vec<(usize, i64, Row)>;

fn rows_of(batch: &Batch) -> impl Iterator<Item = (usize, i64, Row)> {
    let times = batch.times_ns.iter().zip(batch.rows());
    times.map(|(time_ns, row)| (batch.stream, *time_ns, row))
}

/// The width of the widest row.
fn width(header: &Header) -> usize {
    header.streams.iter().map(|stream| stream.columns.len()).max().unwrap_or(0).max(1)
}

/// Reads the bytes of a fuzzer as a recording, by items and by blocks, and panics if a reader
/// violates its contract. If the first byte is even, the checksums are corrected first, because a
/// fuzzer does not find valid ones.
pub fn fuzz_recording(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let mut bytes = data.to_vec();
    if how & 1 == 0 {
        set_checksums(&mut bytes);
    }
    let schemas = streams();
    for time_unit in [TimeUnit::Nanoseconds, TimeUnit::Seconds] {
        let options = ReadOptions { time_unit, ..ReadOptions::default() };
        // All columns, or the few that a query needs.
        let all = how & 2 == 0;
        // All streams, or one.
        let several = how & 4 == 0;
        let wanted = schemas.iter().take(if several { schemas.len() } else { 1 }).map(|schema| {
            let columns: Vec<bool> =
                (0..schema.columns.len()).map(|at| all || at % 8 == 1).collect();
            WantedStream::new(schema, &columns)
        });
        let wanted: Vec<WantedStream> = wanted.collect();
        let kinds: Vec<Vec<Type>> = wanted.iter().map(kinds).collect();
        if let Ok(mut reader) = RowReader::new("fuzz", Cursor::new(&bytes), &wanted, &options) {
            let _ = drain(&mut reader, &kinds);
        }
    }
    let Ok(items) = by_items(&bytes) else { return };
    let first = items.iter().filter(|(stream, ..)| *stream == 0).count() as u64;
    assert!(as_parquet(&bytes).is_none_or(|events| events == first));
    let blocks = by_blocks(&bytes);
    assert!(blocks.is_ok_and(|blocks| blocks == items), "two ways to read differ");
    let long = |value: &Value| matches!(value, Value::Text(text) if text.len() > TEXT_MAX);
    if !items.iter().flat_map(|(_, _, row)| row).any(long) {
        let again = written_again(&bytes, &items);
        // Rows of one stream keep their order.
        let by_stream = |mut rows: Rows| {
            rows.sort_by_key(|(stream, ..)| *stream);
            rows
        };
        let again = by_items(&again).map(by_stream);
        assert!(again.is_ok_and(|read| read == by_stream(items)), "rows do not come back");
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
    let most = VALUES / width(recording.header());
    let (mut rows, mut batch) = (Rows::new(), Batch::default());
    while rows.len() < most && recording.next_item(&mut batch)?.is_some() {
        rows.extend(rows_of(&batch));
        assert_eq!(recording.report().events, rows.len() as u64);
    }
    Ok(rows)
}

/// The same rows, read by blocks.
fn by_blocks(bytes: &[u8]) -> Result<Rows, ReadError> {
    let mut recording = Recording::open("fuzz", bytes)?;
    let most = VALUES / width(recording.header());
    let (mut rows, mut batch) = (Rows::new(), Batch::default());
    while let Some(block) = recording.next_block()? {
        recording.open_block(&block)?;
        while rows.len() < most && recording.block_rows(&mut batch)? {
            rows.extend(rows_of(&batch));
            assert_eq!(recording.report().events, rows.len() as u64);
        }
        if rows.len() >= most {
            break;
        }
    }
    Ok(rows)
}

/// The number of the first rows of the first stream after they have been written as Parquet; `None`
/// if there are no columns.
fn as_parquet(bytes: &[u8]) -> Option<u64> {
    let mut recording = Recording::open("fuzz", bytes).expect("it was read");
    let most = VALUES / width(recording.header());
    let limits = RowGroupLimits { rows: 100, ..RowGroupLimits::default() };
    let mut writer = ParquetWriter::new(io::sink(), recording.header(), limits).ok()?;
    let (mut batch, mut read) = (Batch::default(), 0);
    while read < most && recording.next_item(&mut batch).expect("it was read").is_some() {
        read += batch.len();
        if batch.stream == 0 {
            writer.append(&batch).expect("a sink has room");
        }
    }
    Some(writer.finish(recording.report()).expect("a sink has room").events)
}

/// A recording of the same rows.
fn written_again(bytes: &[u8], rows: &Rows) -> Vec<u8> {
    let recording = Recording::open("fuzz", bytes).expect("it was read");
    let limits = BlockLimits { rows: 100, ..BlockLimits::default() };
    let mut writer = Writer::new(Vec::new(), recording.header(), limits).expect("a header");
    for (stream, time_ns, row) in rows {
        writer.append(*stream, *time_ns, row.iter().map(Cell::from)).expect("memory has room");
    }
    writer.finish().expect("memory has room").0
}

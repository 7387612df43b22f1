//! Parquet: written files are read by another reader, and compared value by value.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use fastrand::Rng;
use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Row, Type, Value};
use fathom_monitor::read::{self, Batch, ReadOptions, ReadReport};
use fathom_monitor::recording::{
    BlockLimits, Clock, DropPlace, Header, ParquetWriter, RecordingSummary, RowGroupLimits, Writer,
};
use parquet::basic::{LogicalType, Repetition, TimeUnit, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};

/// A time in the year 2026.
const OFFSET_NS: i64 = 1_790_000_000_000_000_000;

fn header(wall_offset_ns: i64) -> Header {
    let schema = StreamSchema::new(
        "S",
        &[
            ("BlktapTS", Type::Integer),
            ("Any", Type::Integer),
            ("Few", Type::Integer),
            ("Ratio", Type::Float),
            ("Is", Type::Boolean),
            ("Name", Type::Text),
            ("Own.text", Type::Text),
            ("Nothing", Type::Text),
            ("FtrTS", Type::Integer),
        ],
    );
    Header::new(&schema, Clock::Monotonic, wall_offset_ns)
}

fn rows(count: usize, random: &mut Rng) -> Vec<(i64, Row)> {
    let mut time = 1_000_000_000_000;
    let one = |number: usize| {
        time += random.i64(-1000..10_000);
        let any = [0, 1, -1, i64::MAX, i64::MIN, random.i64(..)][random.usize(0..6)];
        let float = [0.5, f64::MIN_POSITIVE, f64::INFINITY, f64::NAN][random.usize(0..4)];
        let text = ["", "ä", "web", "/var/lib/x"][random.usize(0..4)];
        let row = [
            Value::Integer(time),
            Value::Integer(any),
            Value::Integer(random.i64(0..5) * 8),
            Value::Float(float),
            Value::Boolean(random.bool()),
            Value::text(text),
            Value::text(&format!("{number}{}", "x".repeat(number % 100))),
            Value::Null,
            Value::Integer([i64::MAX, i64::MIN, time + 7][random.usize(0..3)]),
        ];
        let some = |(column, value)| match column {
            1..=8 if random.u8(0..4) == 0 => Value::Null,
            _ => value,
        };
        (time, row.into_iter().enumerate().map(some).collect())
    };
    (0..count).map(one).collect()
}

fn recording(path: &Path, header: &Header, rows: &[(i64, Row)]) {
    let out = File::create(path).unwrap();
    let mut writer = Writer::new(out, header, BlockLimits::default()).unwrap();
    for (number, (time_ns, row)) in rows.iter().enumerate() {
        if number == 7 {
            writer.note_dropped(3, DropPlace::Ring, "web").unwrap();
        }
        writer.append_row(*time_ns, row).unwrap();
    }
    writer.finish().unwrap();
}

fn convert(
    from: &Path,
    out: impl Write + Send,
    limits: RowGroupLimits,
) -> io::Result<RecordingSummary> {
    let (mut reader, header) = read::open_whole(from, None, &ReadOptions::default()).unwrap();
    let mut writer = ParquetWriter::new(out, &header, limits)?;
    let mut batch = Batch::default();
    while reader.next_batch(&mut batch).unwrap() {
        writer.append(&batch)?;
    }
    let most = writer.bytes();
    let summary = writer.finish(reader.report())?;
    assert!(summary.bytes <= most, "{} {most}", summary.bytes);
    Ok(summary)
}

fn values<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    rows: usize,
    value: impl Fn(&T::T) -> Value,
) -> Vec<Value> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    while levels.len() < rows {
        let (records, _, _) =
            reader.read_records(rows, Some(&mut levels), None, &mut values).unwrap();
        assert!(records > 0);
    }
    let mut values = values.iter();
    levels
        .iter()
        .map(|level| if *level == 1 { value(values.next().unwrap()) } else { Value::Null })
        .collect()
}

/// The rows of a Parquet file. The offset that was added to times is subtracted.
fn read_back(path: &Path, header: &Header) -> (Vec<Row>, ParquetMetaData) {
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let mut all: Vec<Row> = Vec::new();
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).unwrap();
        let count = group.metadata().num_rows() as usize;
        let start = all.len();
        all.resize(start + count, Row::new());
        for (number, column) in header.columns(0).iter().enumerate() {
            let add = if column.is_time { header.wall_offset_ns } else { 0 };
            let column = match group.get_column_reader(number).unwrap() {
                ColumnReader::BoolColumnReader(mut reader) => {
                    values(&mut reader, count, |value| Value::Boolean(*value))
                }
                ColumnReader::Int64ColumnReader(mut reader) => {
                    values(&mut reader, count, |value| Value::Integer(value.wrapping_sub(add)))
                }
                ColumnReader::DoubleColumnReader(mut reader) => {
                    values(&mut reader, count, |value| Value::Float(*value))
                }
                ColumnReader::ByteArrayColumnReader(mut reader) => {
                    values(&mut reader, count, |value| Value::text(value.as_utf8().unwrap()))
                }
                _ => panic!("a column of another type"),
            };
            for (row, value) in all[start..].iter_mut().zip(column) {
                row.push(value);
            }
        }
    }
    (all, reader.metadata().clone())
}

fn metadata_value(metadata: &ParquetMetaData, key: &str) -> Option<String> {
    let all = metadata.file_metadata().key_value_metadata()?;
    all.iter().find(|pair| pair.key == format!("fathom.{key}"))?.value.clone()
}

#[test]
fn every_value_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("x.rec"), folder.path().join("x.parquet"));
    let mut random = Rng::with_seed(1);
    let small = RowGroupLimits { rows: 300, ..RowGroupLimits::default() };
    for (count, limits, offset_ns) in [
        (0, small, OFFSET_NS),
        (1, small, OFFSET_NS),
        (300, small, 0),
        (9001, small, OFFSET_NS),
        (20_000, RowGroupLimits::default(), -5),
    ] {
        let header = header(offset_ns);
        let rows = rows(count, &mut random);
        recording(&from, &header, &rows);
        let summary = convert(&from, File::create(&to).unwrap(), limits).unwrap();
        let dropped = if count > 7 { 3 } else { 0 };
        assert_eq!(summary.events, count as u64);
        assert_eq!(summary.bytes, to.metadata().unwrap().len());
        let (read, metadata) = read_back(&to, &header);
        assert_eq!(read, rows.into_iter().map(|(_, row)| row).collect::<Vec<_>>());
        assert_eq!(metadata.num_row_groups(), count.div_ceil(limits.rows));
        let value = |key| metadata_value(&metadata, key);
        assert_eq!(value("events"), Some(count.to_string()));
        assert_eq!(value("dropped"), Some(dropped.to_string()));
        assert_eq!((value("stream"), value("clock")), (Some("S".into()), Some("monotonic".into())));
        let offset = (offset_ns != 0).then(|| offset_ns.to_string());
        assert_eq!(value("wall_offset_ns"), offset);
        let notes = value("notes").unwrap_or_default();
        assert_eq!(notes.contains("3 events of disk \"web\" are missing here"), dropped == 3);
    }
}

#[test]
fn columns_have_their_types() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.parquet");
    for offset_ns in [0, OFFSET_NS] {
        let header = header(offset_ns);
        let out = File::create(&path).unwrap();
        let writer = ParquetWriter::new(out, &header, RowGroupLimits::default()).unwrap();
        writer.finish(&ReadReport::default()).unwrap();
        let (_, metadata) = read_back(&path, &header);
        let schema = metadata.file_metadata().schema_descr();
        assert_eq!(schema.num_columns(), header.columns(0).len());
        for (column, field) in header.columns(0).iter().zip(schema.columns()) {
            assert_eq!(field.name(), column.name);
            assert_eq!(field.self_type().get_basic_info().repetition(), Repetition::OPTIONAL);
            let instant = LogicalType::timestamp(true, TimeUnit::NANOS);
            let (physical, logical) = match column.kind {
                Type::Boolean => (PhysicalType::BOOLEAN, None),
                Type::Integer if column.is_time && offset_ns != 0 => {
                    (PhysicalType::INT64, Some(instant))
                }
                Type::Integer => (PhysicalType::INT64, None),
                Type::Float => (PhysicalType::DOUBLE, None),
                Type::Text => (PhysicalType::BYTE_ARRAY, Some(LogicalType::String)),
            };
            assert_eq!(
                (field.physical_type(), field.logical_type_ref()),
                (physical, logical.as_ref())
            );
        }
    }
}

#[test]
fn other_files_become_the_stream_of_events() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sample/events.csv");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("x.parquet");
    let summary = convert(&sample, File::create(&to).unwrap(), RowGroupLimits::default()).unwrap();
    let (mut reader, header) = read::open_whole(&sample, None, &ReadOptions::default()).unwrap();
    assert_eq!(header.columns(0).len(), fathom_monitor::io_stream().columns.len());
    let (mut rows, mut batch) = (Vec::new(), Batch::default());
    while reader.next_batch(&mut batch).unwrap() {
        rows.extend(batch.rows());
    }
    assert_eq!((rows.len(), summary.events), (278, 278));
    let (read, metadata) = read_back(&to, &header);
    assert_eq!(read, rows);
    assert_eq!(metadata_value(&metadata, "clock"), Some("unknown".into()));
}

#[test]
fn row_groups_are_bounded() {
    let header = header(0);
    let text = |number: usize| Value::text(&format!("{number:8000}"));
    let mut row: Row = vec![Value::Null; header.columns(0).len()];
    let mut batch = Batch::default();
    for number in 0..4096 {
        row[6] = text(number);
        batch.push(7, row.clone());
    }
    // Long texts close a row group early, ...
    let limits = RowGroupLimits { bytes: 4 << 20, ..RowGroupLimits::default() };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.parquet");
    let mut writer = ParquetWriter::new(File::create(&path).unwrap(), &header, limits).unwrap();
    writer.append(&batch).unwrap();
    writer.finish(&ReadReport::default()).unwrap();
    let (read, metadata) = read_back(&path, &header);
    assert_eq!(read, batch.rows().collect::<Vec<_>>());
    let sizes: Vec<_> = metadata.row_groups().iter().map(RowGroupMetaData::num_rows).collect();
    assert_eq!(sizes, [1024; 4]);
    // ... and the number of row groups is limited.
    let limits = RowGroupLimits { rows: 1, ..RowGroupLimits::default() };
    let schema = StreamSchema::new("S", &[("Is", Type::Boolean)]);
    let header = Header::new(&schema, Clock::Unknown, 0);
    let mut writer = ParquetWriter::new(io::sink(), &header, limits).unwrap();
    let mut batch = Batch::default();
    batch.push(7, vec![Value::Boolean(true)]);
    for count in 0..32_767 {
        assert_eq!(writer.is_full(), count >= 32_639, "{count}");
        writer.append(&batch).unwrap();
    }
    assert_eq!(writer.append(&batch).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
}

/// A disk of this size in bytes, and its content.
struct Disk<'a>(usize, &'a mut Vec<u8>);

impl Write for Disk<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.0 - self.1.len());
        if count == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.1.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_reported_and_an_incomplete_file_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("x.rec"), folder.path().join("x.parquet"));
    let header = header(OFFSET_NS);
    recording(&from, &header, &rows(2000, &mut Rng::with_seed(2)));
    let limits = RowGroupLimits { rows: 300, ..RowGroupLimits::default() };
    let mut whole = Vec::new();
    convert(&from, Disk(usize::MAX, &mut whole), limits).unwrap();
    for room in (0..whole.len()).step_by(777).chain([whole.len() - 1]) {
        let mut part = Vec::new();
        let error = convert(&from, Disk(room, &mut part), limits).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{room}");
        assert_eq!(part, whole[..room]);
        std::fs::write(&to, part).unwrap();
        assert!(SerializedFileReader::new(File::open(&to).unwrap()).is_err(), "{room}");
    }
}

//! Recordings: they are read as they were written, and invalid bytes do no harm.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Row, Type, Value};
use fathom_monitor::io_stream;
use fathom_monitor::read::{
    self, Batch, ReadOptions, ReadReport, Reader as _, TimeUnit, WantedStream,
};
use fathom_monitor::recording::{
    BlockLimits, Cell, Clock, DropPlace, Header, Item, MAGIC, Recording, RowReader, Writer,
    fuzz_recording, moment_block,
};

fn schema() -> StreamSchema {
    StreamSchema::new(
        "S",
        &[
            ("BlktapTS", Type::Integer),
            ("Number", Type::Integer),
            ("Ratio", Type::Float),
            ("Is", Type::Boolean),
            ("Name", Type::Text),
            ("Nothing", Type::Text),
            ("Same", Type::Text),
            ("Late", Type::Text),
        ],
    )
}

fn rows(count: usize, random: &mut Rng) -> Vec<(i64, Row)> {
    let same: Arc<str> = "always this".into();
    let mut time = 1_000_000_000_000;
    (0..count)
        .map(|number| {
            time += random.i64(-1000..10_000);
            let maybe = |value: Value, random: &mut Rng| {
                if random.u8(0..4) == 0 { Value::Null } else { value }
            };
            let any = [0, 1, -1, i64::MAX, i64::MIN, random.i64(..)][random.usize(0..6)];
            let float = [0.5, -0.0, f64::INFINITY, f64::NAN][random.usize(0..4)];
            let text = ["", "ä", "web", "/var/lib/x"][random.usize(0..4)];
            let row = vec![
                Value::Integer(time),
                maybe(Value::Integer(any), random),
                maybe(Value::Float(float), random),
                maybe(Value::Boolean(random.bool()), random),
                maybe(Value::text(text), random),
                Value::Null,
                Value::Text(Arc::clone(&same)),
                if number > 700 { Value::text("late") } else { Value::Null },
            ];
            (time, row)
        })
        .collect()
}

fn recorded(rows: &[(i64, Row)], block: usize) -> Vec<u8> {
    let header = Header::new(&schema(), Clock::Monotonic, 5);
    let limits = BlockLimits { rows: block, ..BlockLimits::default() };
    let mut writer = Writer::new(Vec::new(), &header, limits).unwrap();
    for (time, row) in rows {
        writer.append_row(*time, row).unwrap();
    }
    let (bytes, summary) = writer.finish().unwrap();
    assert_eq!((summary.events, summary.bytes), (rows.len() as u64, bytes.len() as u64));
    bytes
}

fn read_all(
    bytes: &[u8],
    unit: TimeUnit,
    wanted: &[bool],
) -> Result<(Vec<(i64, Row)>, ReadReport), String> {
    let options = ReadOptions { time_unit: unit, ..ReadOptions::default() };
    let source = std::io::Cursor::new(bytes.to_vec());
    let mut reader = read::from_bytes("test", source, &schema(), wanted, &options)
        .map_err(|error| error.to_string())?;
    let (mut all, mut batch) = (Vec::new(), Batch::default());
    while reader.next_batch(&mut batch).map_err(|error| error.to_string())? {
        assert!(!batch.is_empty() && batch.len() <= read::BATCH_ROWS);
        all.extend(batch.times_ns.iter().copied().zip(batch.rows()));
    }
    Ok((all, reader.report().clone()))
}

#[test]
fn every_type_and_null_is_read_as_it_was_written() {
    let mut random = Rng::with_seed(1);
    for (count, block) in [(0, 1), (1, 1), (7, 100), (8, 8), (1000, 3), (9000, 1 << 15)] {
        let rows = rows(count, &mut random);
        let bytes = recorded(&rows, block);
        let (read, report) = read_all(&bytes, TimeUnit::Nanoseconds, &[true; 8]).unwrap();
        assert_eq!(read, rows, "{count} {block}");
        assert_eq!((report.events, report.bad, report.notes.len()), (count as u64, 0, 0));
    }
}

#[test]
fn unwanted_columns_are_skipped_and_times_have_their_unit() {
    let rows = rows(900, &mut Rng::with_seed(2));
    let bytes = recorded(&rows, 300);
    let wanted = [true, false, false, false, true, false, false, true];
    let (read, _) = read_all(&bytes, TimeUnit::Microseconds, &wanted).unwrap();
    for ((time, row), (from_time, from)) in read.iter().zip(&rows) {
        assert_eq!(time, from_time);
        assert_eq!(row[..], [Value::Integer(time / 1000), from[4].clone(), from[7].clone()]);
    }
}

#[test]
fn notes_moments_and_the_end_are_reported() {
    let header = Header::new(&io_stream(), Clock::Monotonic, 5);
    let mut writer = Writer::new(Vec::new(), &header, BlockLimits::default()).unwrap();
    writer.append_row(7, &vec![Value::Integer(7)]).unwrap();
    writer.note_dropped(3, DropPlace::Ring, "web").unwrap();
    writer.append_row(9, &vec![Value::Integer(9)]).unwrap();
    let (mut bytes, summary) = writer.finish().unwrap();
    assert_eq!((summary.events, summary.dropped), (2, 3));
    let end = bytes.len() - 56;
    bytes.splice(end..end, moment_block(9));
    let mut recording = Recording::open("test", bytes.as_slice()).unwrap();
    assert_eq!(recording.header(), &header);
    let mut items = Vec::new();
    let mut batch = Batch::default();
    while let Some(item) = recording.next_item(&mut batch).unwrap() {
        items.push(item);
    }
    let dropped = Item::Dropped { count: 3, place: DropPlace::Ring, disk: "web".into() };
    let end = Item::End { events: 2, dropped: 3 };
    assert_eq!(items, [Item::Rows, dropped, Item::Rows, Item::Moment(9), end]);
    assert_eq!((recording.report().dropped, recording.report().events), (3, 2));
}

/// The recording and its rows as CSV are of the last program that wrote version 1 alone.
#[test]
fn a_recording_of_version_1_is_read() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let options = ReadOptions::default();
    let rows = |name: &str| {
        let read = support::file(&folder.join(name), &options).unwrap();
        assert_eq!(read.report.notes, [""; 0]);
        read.events.times_ns.iter().copied().zip(read.events.rows()).collect::<Vec<_>>()
    };
    let recorded = rows("version-1.rec");
    assert_eq!(recorded.len(), 170);
    assert_eq!(recorded, rows("version-1.csv"));
    // A recording of one stream is still written in that version.
    let bytes = std::fs::read(folder.join("version-1.rec")).unwrap();
    let recording = Recording::open("test", &bytes[..]).unwrap();
    assert_eq!(recording.header().to_bytes().unwrap(), bytes[..recording_start(&bytes)]);
}

/// Rows with their instants.
type Rows = Vec<(i64, Row)>;

fn recording_start(bytes: &[u8]) -> usize {
    bytes.windows(4).position(|four| four == b"FBLK").unwrap()
}

/// Streams `A` (two columns), `B` (one) and `C` (a text).
fn several() -> [StreamSchema; 3] {
    [
        StreamSchema::new("A", &[("T", Type::Integer), ("X", Type::Integer)]),
        StreamSchema::new("B", &[("Y", Type::Integer)]),
        StreamSchema::new("C", &[("Z", Type::Text)]),
    ]
}

/// A recording of 300 rows of three streams. Blocks of different streams overlap in time, and some
/// begin before the one in front of them.
fn recorded_several() -> (Vec<u8>, [Rows; 3]) {
    let header = Header::of_streams(&several(), Clock::Monotonic, 5);
    let mut writer = Writer::new(Vec::new(), &header, BlockLimits::default()).unwrap();
    let mut rows: [Rows; 3] = Default::default();
    let mut random = Rng::with_seed(6);
    for number in 0..300 {
        let stream = random.usize(..3);
        let time_ns = 1000 + number - random.i64(0..200);
        let row = match stream {
            0 => vec![Value::Integer(time_ns), Value::Integer(number)],
            1 => vec![Value::Integer(-number)],
            _ => vec![Value::text(&format!("row {number}"))],
        };
        writer.append(stream, time_ns, row.iter().map(Cell::from)).unwrap();
        rows[stream].push((time_ns, row));
        if number % 40 == 39 {
            writer.flush().unwrap();
        }
    }
    assert!(writer.append(3, 0, []).is_err());
    let (bytes, summary) = writer.finish().unwrap();
    assert_eq!((summary.events, bytes[8]), (300, 2));
    (bytes, rows)
}

/// The rows of the wanted streams, each in its order, and the report.
fn read_several(bytes: &[u8], wanted: &[WantedStream]) -> Result<(Vec<Rows>, ReadReport), String> {
    let failed = |error: read::ReadError| error.to_string();
    let options = ReadOptions::default();
    let mut reader = RowReader::new("test", bytes, wanted, &options).map_err(failed)?;
    let (mut all, mut batch) = (vec![Vec::new(); wanted.len()], Batch::default());
    while reader.next_batch(&mut batch).map_err(failed)? {
        assert_eq!(
            batch.columns.len(),
            wanted[batch.stream].columns.iter().filter(|it| **it).count()
        );
        all[batch.stream].extend(batch.times_ns.iter().copied().zip(batch.rows()));
    }
    Ok((all, reader.report().clone()))
}

#[test]
fn rows_of_several_streams_are_read_as_they_were_written() {
    let (bytes, rows) = recorded_several();
    let wanted = several().map(|schema| WantedStream::whole(&schema));
    let (read, report) = read_several(&bytes, &wanted).unwrap();
    assert_eq!(read, rows);
    assert_eq!((report.events, report.notes), (300, Vec::new()));
    // In another order, and without one of them, which this version does not know.
    let some = [wanted[2].clone(), wanted[0].clone()];
    let (read, report) = read_several(&bytes, &some).unwrap();
    assert_eq!(read, [rows[2].clone(), rows[0].clone()]);
    assert_eq!(report.notes, ["test:0: the stream \"B\" is not known: its rows are skipped"]);
    // A stream that the recording lacks is noted, unless there is no other.
    let other = WantedStream::whole(&io_stream());
    let (read, report) = read_several(&bytes, &[wanted[1].clone(), other.clone()]).unwrap();
    assert_eq!(read, [rows[1].clone(), Vec::new()]);
    assert_eq!(report.notes[0], "test:0: the recording has no stream IOstream");
    let missing = read_several(&bytes, &[other]).unwrap_err();
    assert_eq!(missing, "test: the recording has no stream IOstream");
    // All columns of one stream alone.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let (mut reader, header) =
        read::open_whole(file.path(), Some("b"), &ReadOptions::default()).unwrap();
    assert_eq!(header, Header::new(&several()[1], Clock::Monotonic, 5));
    let (mut all, mut batch) = (Vec::new(), Batch::default());
    while reader.next_batch(&mut batch).unwrap() {
        assert_eq!(batch.stream, 0);
        all.extend(batch.times_ns.iter().copied().zip(batch.rows()));
    }
    assert_eq!(all, rows[1]);
    assert!(read::open_whole(file.path(), Some("D"), &ReadOptions::default()).is_err());
}

#[test]
fn a_recording_of_several_streams_that_is_cut_off_or_damaged_gives_whole_blocks() {
    let (bytes, rows) = recorded_several();
    let wanted = several().map(|schema| WantedStream::whole(&schema));
    let start = recording_start(&bytes);
    for end in start..bytes.len() {
        let (read, report) = read_several(&bytes[..end], &wanted).unwrap();
        for (read, rows) in read.iter().zip(&rows) {
            assert!(rows.starts_with(read), "{end}");
        }
        assert_eq!((report.bad, report.notes.len()), (0, 1), "{end}");
    }
    // A block of a stream that the header does not have is damaged, also with a correct checksum.
    let mut odd = bytes.clone();
    odd[start + 6] = 3;
    correct(&mut odd);
    let (read, report) = read_several(&odd, &wanted).unwrap();
    assert_eq!(report.bad, 1);
    assert_eq!(read.iter().map(Vec::len).sum::<usize>() as u64, report.events);
    // A block with the columns of another stream is damaged, or its values are nulls and numbers of
    // that stream; no row has another width.
    for stream in 0..3 {
        let mut odd = bytes.clone();
        odd[start + 6] = stream;
        correct(&mut odd);
        let _ = read_several(&odd, &wanted).unwrap();
    }
    for seed in 0..3000 {
        let mut random = Rng::with_seed(seed);
        let mut changed = bytes.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(MAGIC.len()..changed.len());
            changed[at] = random.u8(..);
        }
        if random.bool() {
            correct(&mut changed);
        }
        fuzz_recording(&[&[random.u8(..)], &changed[..]].concat());
        let _ = read_several(&changed, &wanted);
    }
}

#[test]
fn a_recording_that_is_cut_off_ends_without_an_error() {
    let rows = rows(300, &mut Rng::with_seed(3));
    let bytes = recorded(&rows, 50);
    let mut counts = Vec::new();
    for end in 200..bytes.len() {
        let (read, report) = read_all(&bytes[..end], TimeUnit::default(), &[true; 8]).unwrap();
        assert!(rows.starts_with(&read) && read.len() % 50 == 0);
        assert_eq!((report.bad, report.notes.len()), (0, 1), "{end}");
        counts.push(read.len());
    }
    assert_eq!((counts.first(), counts.last()), (Some(&0), Some(&300)));
}

#[test]
fn a_damaged_block_is_skipped() {
    let rows = rows(300, &mut Rng::with_seed(4));
    let mut bytes = recorded(&rows, 50);
    let mut blocks = bytes.windows(4).enumerate().filter(|(_, four)| four == b"FBLK");
    let second = blocks.nth(1).unwrap().0;
    bytes[second + 60] ^= 1;
    let (read, report) = read_all(&bytes, TimeUnit::default(), &[true; 8]).unwrap();
    assert_eq!((read.len(), report.bad), (250, 1));
    assert_eq!((&read[..50], &read[50..]), (&rows[..50], &rows[100..]));
}

/// A block of one row at instant 7 with one text. Its checksum is corrected later.
fn block_of(text: &[u8]) -> Vec<u8> {
    let mut plain = vec![1, 14, 1];
    // The length as a varint of two bytes.
    plain.extend([text.len() as u8 | 0x80, (text.len() >> 7) as u8]);
    plain.extend(text);
    let mut block = b"FBLK\x01\0\0\0".to_vec();
    for number in [plain.len() as u32, plain.len() as u32, 1] {
        block.extend(number.to_le_bytes());
    }
    block.extend([7_u64.to_le_bytes(), 7_u64.to_le_bytes()].concat());
    block.extend([0; 4]);
    block.extend(plain);
    block
}

#[test]
fn a_text_that_is_too_long_is_an_error() {
    let schema = StreamSchema::new("S", &[("Name", Type::Text)]);
    let mut bytes = Header::new(&schema, Clock::Unknown, 0).to_bytes().unwrap();
    for length in [8193, 8192, 200] {
        bytes.extend(block_of(&vec![b'x'; length]));
    }
    correct(&mut bytes);
    let lengths =
        |rows: &[Row]| -> Vec<usize> { rows.iter().map(|row| row[0].to_string().len()).collect() };
    let mut recording = Recording::open("test", bytes.as_slice()).unwrap();
    let (mut batch, mut rows) = (Batch::default(), Vec::new());
    while recording.next_item(&mut batch).unwrap().is_some() {
        rows.extend(batch.rows());
    }
    assert_eq!((lengths(&rows), recording.report().bad), (vec![8192, 200], 1));
    // Block by block: the damaged block comes before the valid ones.
    let mut recording = Recording::open("test", bytes.as_slice()).unwrap();
    rows.clear();
    while let Some(block) = recording.next_block().unwrap() {
        recording.open_block(&block).unwrap();
        while recording.block_rows(&mut batch).unwrap() {
            rows.extend(batch.rows());
        }
    }
    assert_eq!((lengths(&rows), recording.report().bad), (vec![8192, 200], 1));
}

#[test]
fn a_damaged_block_with_a_correct_checksum_is_skipped() {
    let schema = StreamSchema::new("S", &[("Name", Type::Text)]);
    let mut bytes = Header::new(&schema, Clock::Unknown, 0).to_bytes().unwrap();
    let mut first = block_of(&[b'x'; 200]);
    // The instant is outside of the block's interval.
    first[41] = 16;
    bytes.extend(first);
    bytes.extend(block_of(&[b'y'; 200]));
    correct(&mut bytes);
    let mut recording = Recording::open("test", bytes.as_slice()).unwrap();
    let (mut batch, mut counts) = (Batch::default(), Vec::new());
    while let Some(block) = recording.next_block().unwrap() {
        recording.open_block(&block).unwrap();
        while recording.block_rows(&mut batch).unwrap() {
            counts.push(batch.len());
        }
    }
    assert_eq!((counts, recording.report().bad), (vec![1], 1));
}

/// Corrects the checksums of blocks, so that the checks after them are reached.
fn correct(bytes: &mut [u8]) {
    let starts: Vec<usize> = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, four)| four == b"FBLK")
        .map(|(at, _)| at)
        .collect();
    for start in starts {
        let Some(head) = bytes.get(start..start + 40) else { continue };
        let length = u32::from_le_bytes(head[8..12].try_into().unwrap()) as usize;
        let Some(stored) = bytes.get(start + 40..start + 40 + length) else { continue };
        let sum = crc32c(&[&head[..36], stored].concat());
        bytes[start + 36..start + 40].copy_from_slice(&sum.to_le_bytes());
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| sum >> 1 ^ (0x82f6_3b78 * (sum & 1)))
    })
}

#[test]
fn invalid_bytes_do_no_harm() {
    let begun = Instant::now();
    let mut random = Rng::with_seed(5);
    let rows = rows(40, &mut random);
    let seeds = [recorded(&rows, 10), recorded(&rows[..3], 3), recorded(&rows[..20], 1)];
    let (mut good, mut bad) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = seeds[random.usize(0..seeds.len())].clone();
        for _ in 0..random.usize(1..6) {
            let at = random.usize(MAGIC.len()..bytes.len());
            match random.u8(0..6) {
                0 => bytes[at] = random.u8(..),
                1 => bytes[at] ^= 1 << random.u8(0..8),
                2 => bytes[at] = 0xff,
                3 => bytes.truncate(at + 1),
                4 => {
                    let end = (at + random.usize(0..40)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
                _ => {
                    let end = (at + random.usize(0..9)).min(bytes.len());
                    bytes.drain(at..end);
                }
            }
            if bytes.len() <= MAGIC.len() {
                break;
            }
        }
        if random.bool() {
            correct(&mut bytes);
        }
        fuzz_recording(&[&[random.u8(..)], &bytes[..]].concat());
        match read_all(&bytes, TimeUnit::default(), &[true; 8]) {
            Ok((rows, _)) => {
                assert!(rows.iter().all(|(time, row)| *time >= 0 && row.len() == 8));
                good += 1;
            }
            Err(_) => bad += 1,
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} {bad}");
    assert!(begun.elapsed() < Duration::from_secs(120));
}

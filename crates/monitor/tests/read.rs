//! Tests of all formats that are read.

mod support;

use std::fmt::Write;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, channel};

use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Type, Value};
use fathom_monitor::io_stream;
use fathom_monitor::read::{self, Batch, ReadOptions, TimeUnit};
use support::{all, bytes, bytes_with, file, paper, trace};

fn microseconds(time_column: Option<&str>) -> ReadOptions {
    let time_column = time_column.map(str::to_owned);
    ReadOptions { time_column, time_unit: TimeUnit::Microseconds, ..ReadOptions::default() }
}

#[test]
fn filtered_rows_are_counted() {
    let schema = io_stream();
    let text = "BlktapTS,Type,VMName,Size\n1,Q,a,1\n5,\"R\",b,x\n2,\"Q\",b,3\n9,R,,4\nx,R,a,5\n";
    let column = |name: &str| schema.find(name).unwrap();
    let read = |conditions: &[&[(&str, &str)]]| {
        let one = |&(name, text): &(&str, &str)| (column(name), text.into());
        let conditions = conditions.iter().map(|all| all.iter().map(one).collect()).collect();
        let options = ReadOptions { conditions: Some(conditions), ..ReadOptions::default() };
        let mut reader = read::from_bytes(
            "test",
            text.as_bytes(),
            &schema,
            &vec![true; schema.columns.len()],
            &options,
        )
        .unwrap();
        let mut batch = Batch::default();
        assert!(reader.next_batch(&mut batch).unwrap());
        let sizes: Vec<Value> = batch.rows().map(|row| row[column("Size")].clone()).collect();
        let report = reader.report().clone();
        let (latest, filtered) = (batch.latest_ns, batch.filtered);
        assert!(!reader.next_batch(&mut batch).unwrap() && batch.is_empty());
        (sizes, latest, filtered, report.events, report.bad)
    };
    let sizes = |sizes: &[i64]| sizes.iter().copied().map(Value::Integer).collect::<Vec<_>>();
    assert_eq!(read(&[&[("Type", "Q")]]), (sizes(&[1, 3]), 9, 2, 4, 1));
    assert_eq!(read(&[&[("Type", "Q"), ("VMName", "b")]]), (sizes(&[3]), 9, 3, 4, 1));
    assert_eq!(read(&[&[("VMName", "a")], &[("Type", "R")]]).3, 3, "one size is not a number");
    // The file does not have this column, so no row meets the condition.
    assert_eq!(read(&[&[("Cgroup", "x")]]), (sizes(&[]), 9, 4, 4, 1));
    // A replacement character may stand for any bytes that are not UTF-8.
    assert_eq!(read(&[&[("VMName", "\u{fffd}"), ("Type", "Q")]]).0, sizes(&[1, 3]));
}

#[test]
fn the_papers_tables_are_read() {
    for (table, rows) in
        [("table3_2", 10), ("table3_3", 10), ("table3_4", 5), ("table3_5", 10), ("table3_7", 5)]
    {
        let path = paper(&format!("{table}.tsv"));
        let table = file(&path, &microseconds(None)).unwrap();
        assert_eq!((table.events.len(), table.report.bad), (rows, 0));
        assert!(table.report.notes.is_empty(), "{:?}", table.report.notes);
        for (time, stamp) in table.events.times_ns.iter().zip(table.integers("BlktapTS")) {
            assert_eq!(*time, stamp * 1000);
        }
        assert!(table.texts("IOOp").iter().all(|letter| letter == "w" || letter == "r"));
        assert!(table.texts("VMName").iter().all(|name| name == "muscatvm51"));
        let by_filter = file(&path, &microseconds(Some("ftrts"))).unwrap();
        assert_eq!(by_filter.events.times_ns[0], by_filter.integers("FtrTS")[0] * 1000);
        assert!(by_filter.events.rows().eq(table.events.rows()));
    }
    let table = file(&paper("table3_3.tsv"), &microseconds(None)).unwrap();
    assert_eq!(table.integers("Sector")[..3], [599_544, 599_544, 6464]);
    assert_eq!(table.texts("Type").concat(), "QRQQQRRRQR");
    assert_eq!(table.texts("PDisk")[9], "/dev/sda3");
    assert!(table.column("IP").iter().all(Value::is_null));
}

#[test]
fn csv_in_all_its_forms() {
    let text = "\u{feff}path, IOP ,Comment,blktapts,Size\r\n\
                \"/a, \"\"b\"\"\",r,x,5,8\r\n\
                \r\n\
                \"two\nlines\",w,\"y\",3,\r\n\
                \"\",w,,4,-1\r\n\
                ,w,,9,16";
    let read = bytes(text).unwrap();
    assert_eq!(read.events.times_ns, [5, 3, 4, 9]);
    assert_eq!(
        read.column("Path"),
        [Value::text("/a, \"b\""), Value::text("two\nlines"), Value::text(""), Value::Null]
    );
    assert_eq!(read.texts("IOOp").concat(), "rwww");
    assert_eq!(read.texts("Size"), ["8", "", "-1", "16"]);
    assert_eq!(read.report.bad, 0);
    assert_eq!(read.report.notes, ["test:1: IOstream has no column Comment: ignored"]);
}

#[test]
fn rows_have_the_wanted_columns() {
    let schema = io_stream();
    let mut wanted = vec![false; schema.columns.len()];
    wanted[schema.find("Size").unwrap()] = true;
    let read = bytes_with("BlktapTS,Type,Size\n1,Q,8\n2,R,x\n", &wanted, &ReadOptions::default());
    let read = read.unwrap();
    assert_eq!(read.report.notes, ["test:3: Size is \"x\", which is not of type integer"]);
    assert_eq!(read.events.times_ns, [1]);
    assert_eq!(read.events.row(0), [Value::Integer(8)]);
    // Columns that are not wanted are not parsed.
    let none = vec![false; schema.columns.len()];
    let read = bytes_with("BlktapTS,Type,Size\n1,Q,8\n2,R,x\n", &none, &ReadOptions::default());
    assert_eq!(read.unwrap().events.len(), 2);
}

#[test]
fn times_have_units_and_bounds() {
    for (unit, factor) in [
        (TimeUnit::Nanoseconds, 1),
        (TimeUnit::Microseconds, 1_000),
        (TimeUnit::Milliseconds, 1_000_000),
        (TimeUnit::Seconds, 1_000_000_000),
    ] {
        let options = ReadOptions { time_unit: unit, ..ReadOptions::default() };
        let text = "BlktapTS\n7\n-1\n9223372036854775807\n\nsoon\n";
        let read = bytes_with(text, &all(), &options).unwrap();
        assert_eq!((read.events.times_ns, read.report.bad), (vec![7 * factor], 3));
    }
    let error = bytes("Sector,Size\n1,2\n").unwrap_err();
    assert!(error.to_string().contains("no column BlktapTS"), "{error}");
    assert!(error.help().unwrap().contains("--time-column"));
    // A column that the stream does not have may contain the times.
    let options = ReadOptions { time_column: Some("When".into()), ..ReadOptions::default() };
    let read = bytes_with("when,Size\n5,2\n", &all(), &options).unwrap();
    assert_eq!(read.events.times_ns, [5]);
}

#[test]
fn a_declared_stream_takes_the_time_of_events() {
    let schema = StreamSchema::new("Mine", &[("Size", Type::Integer), ("Vm", Type::Text)]);
    let times = |text: &'static str| {
        let options = ReadOptions::default();
        let mut reader =
            read::from_bytes("test", text.as_bytes(), &schema, &[true, true], &options).unwrap();
        let mut batch = Batch::default();
        assert!(reader.next_batch(&mut batch).unwrap());
        batch.times_ns
    };
    assert_eq!(times("Size,Vm,blktapts\n8,a,5\n16,b,7\n"), [5, 7]);
    // Without that column, the times are in the first declared column.
    assert_eq!(times("Vm,Size\na,8\nb,16\n"), [8, 16]);
}

#[test]
fn invalid_lines_are_reported_until_there_are_too_many() {
    let mut text = "BlktapTS,Size\n".to_owned();
    for line in 0..20_000 {
        text += if line % 150 == 0 { "1,2,3\n" } else { "1,2\n" };
    }
    let read = bytes(&text).unwrap();
    assert_eq!((read.report.bad, read.report.notes.len()), (134, 5));
    assert_eq!(read.report.notes[1], "test:152: 3 fields, but 2 columns");
    let error = bytes(text.replace("1,2\n", "1\n")).unwrap_err();
    assert!(error.to_string().contains("101 of 101 lines are bad"), "{error}");
    let error = bytes("BlktapTS,Size\nx,1\n").unwrap_err();
    assert!(error.to_string().contains("no line of the file is valid"), "{error}");
    for (text, what) in [
        ("BlktapTS,Size\n1,\"2\"x\n1,2\n", "text follows the end of a quoted field"),
        ("BlktapTS,Path\n1,\"2\n1,2\n", "a quote is not closed"),
        (&format!("BlktapTS,Path\n1,{}\n1,2\n", "x".repeat(9000)), "has 9000 bytes"),
        (&format!("BlktapTS,Path\n1,{}\n1,2\n", "x".repeat(70_000)), "more than 65536 bytes"),
    ] {
        let read = bytes(text).unwrap();
        assert_eq!((read.events.len(), read.report.bad), (1, 1), "{what}");
        assert!(read.report.notes[0].starts_with("test:2: "), "{:?}", read.report.notes);
        assert!(read.report.notes[0].contains(what), "{:?}", read.report.notes);
    }
    let error = bytes("BlktapTS,IOp,IOOp\n").unwrap_err();
    assert!(error.to_string().contains("twice"), "{error}");
}

#[test]
fn unknown_formats_are_reported() {
    for (text, what) in [
        (&b""[..], "is empty"),
        (b"\n \n\n", "is empty"),
        (b"Dear all,\nthis is a letter.\n", "is unknown"),
        (&[0; 4096], "is unknown"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "compressed by gzip"),
    ] {
        let error = bytes(text).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    let error = file(&paper("none.tsv"), &ReadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
    // A directory can be opened, but not read.
    let error = file(&paper(""), &ReadOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot read"), "{error}");
}

const BLKPARSE: &str = "\
  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]
  8,0    3        2     0.000001829   697  P   R [kjournald]
  8,0    3        3     0.000002197   697  Q   W 223490 + 8 [kjournald]
  8,0    3        4     0.000005533   697  Q WSM 223498 + 8 [kworker/u8:3 x]
  8,0    3        5     0.000006000   697  M   W 223498 + 8 [kjournald]
  8,0    3        6     0.000012658   697  D   W 223490 + 16 [kjournald]
  8,0    3        0     0.000012700     0  m   N cfq workload slice:100
  8,0    3        7     0.000512000     0  C   W 223490 + 16 [0]
  8,0    1        8     1.000000000   700  Q   R 64 + 8 (     10) [cat]
  8,16   1        9     1.000000100   700  Q   R 64 + 8 [cat]
  8,0    1       10     1.500000000     0  C   R 64 + 8 [65531]
  8,16   1       11     1.500000001     0  C   R 64 + 8 [-95]
  8,0    1       12     1.600000000   700  Q FWS [sync]
  8,0    1       13     1.700000000     0  C FWS 0 [0]
  8,0    1       14     1.800000000     0  C   D 4096 + 2048 [0]
CPU0 (8,0):
 Reads Queued:           1,        4KiB	 Writes Queued:           2,        8KiB
Total (8,0):
 Reads Queued:           1,        4KiB	 Writes Queued:           2,        8KiB

Throughput (R/W): 1KiB/s / 2KiB/s
";

#[test]
fn blkparse_yields_requests_and_their_responses() {
    let read = bytes(BLKPARSE).unwrap();
    assert_eq!(read.report.bad, 0, "{:?}", read.report.notes);
    assert_eq!(read.texts("Type").concat(), "QQRRQQENQRR");
    assert_eq!(read.texts("IOOp").concat(), "wwwwrrrrffd");
    // The completion of the merged request answers both requests.
    assert_eq!(read.integers("ReqId"), [1, 2, 1, 2, 3, 4, 3, 4, 5, 5, 6]);
    assert_eq!(
        read.integers("Sector"),
        [223_490, 223_498, 223_490, 223_498, 64, 64, 64, 64, 0, 0, 4096]
    );
    assert_eq!(read.integers("Size"), [8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 2048]);
    assert_eq!(read.events.times_ns[..3], [2197, 5533, 512_000]);
    assert_eq!(read.texts("VDisk")[4..8], ["8,0", "8,16", "8,0", "8,16"]);
    assert_eq!(read.texts("Process")[1], "kworker/u8:3 x");
    assert_eq!(read.texts("Process")[3], "kworker/u8:3 x");
    assert_eq!(read.texts("Flags")[1], (5 << 8).to_string());
    assert_eq!(read.texts("Error")[6..9], ["input/output error", "unsupported", ""]);
}

#[test]
fn requests_of_blkparse_without_a_response_are_removed() {
    let mut text = String::new();
    for number in 0..70_000 {
        let _ = writeln!(text, "8,0 0 {number} 0.000000001 1 Q R {} + 8 [a]", number * 8);
    }
    text += "8,0 0 1 0.000000002 1 C R 0 + 8 [0]\n8,0 0 1 0.000000002 1 C R 559992 + 8 [0]\n";
    let numbers = bytes(text).unwrap().integers("ReqId");
    assert_eq!(numbers[70_000..], [70_001, 70_000]);
}

fn vscsi(version: u16, records: &[(u32, u16, u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(length, command, block, time) in records {
        if version == 1 {
            bytes.extend([1_u32, length, 1].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([command, 0x100].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([block, time].iter().flat_map(|word| word.to_le_bytes()));
        } else {
            bytes.extend([command, 0x200].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([1_u32, length, 1].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([block, time, 77].iter().flat_map(|word| word.to_le_bytes()));
        }
    }
    bytes
}

#[test]
fn vscsi_records_of_both_versions() {
    let records =
        [(4096, 0x2a, 7, 5), (512, 0x28, 9, 6), (36, 0x12, 0, 7), (0, 0x35, 0, 8), (1, 0x88, 1, 8)];
    for version in [1, 2] {
        let read = bytes(vscsi(version, &records)).unwrap();
        assert_eq!(read.events.times_ns, [5000, 6000, 8000, 8000]);
        assert_eq!(read.integers("BlktapTS"), [5000, 6000, 8000, 8000]);
        assert_eq!(read.texts("IOOp").concat(), "wrfr");
        assert_eq!(read.texts("Type").concat(), "QQQQ");
        assert_eq!(read.integers("Size"), [8, 1, 0, 1]);
        assert_eq!(read.integers("ReqId"), [0, 1, 2, 3]);
        let mut cut = vscsi(version, &records);
        cut.pop();
        let read = bytes(cut).unwrap();
        assert_eq!((read.events.len(), read.report.bad), (3, 1));
        assert!(read.report.notes[0].ends_with("the last one is cut off"));
    }
    // The times of traces are converted to the unit of the queries.
    let read = bytes_with(vscsi(1, &records), &all(), &microseconds(None)).unwrap();
    assert_eq!((read.events.times_ns[0], read.integers("BlktapTS")[0]), (5000, 5));
}

#[test]
fn traces_of_cloudphysics_are_read() {
    let Some(path) = trace("cloudphysics.vscsi") else { return };
    let read = file(&path, &ReadOptions::default()).unwrap();
    assert_eq!((read.events.len(), read.report.bad), (113_872, 0));
    assert_eq!(read.texts("IOOp").iter().filter(|letter| *letter == "w").count(), 66_898);
    assert_eq!(read.integers("Sector")[0], 0x28f_1a09);
    assert_eq!(read.integers("Size")[3], 13);
}

#[test]
fn traces_of_tencent_are_decompressed_and_read() {
    let Some(path) = trace("tencent-cbs.bz2") else { return };
    let read = match file(&path, &ReadOptions::default()) {
        Err(error) if error.to_string().contains("no program bzip2") => {
            return eprintln!("skipped: {error}");
        }
        other => other.unwrap(),
    };
    assert_eq!((read.events.len(), read.report.bad), (50_000, 0));
    assert_eq!(read.events.times_ns[..2], [1_538_323_200_000_000_000, 1_538_323_199_000_000_000]);
    assert_eq!(read.texts("IOOp").iter().filter(|letter| *letter == "w").count(), 25_479);
    assert_eq!(read.texts("VDisk")[..2], ["1058", "1063"]);
    assert_eq!(read.integers("Size")[..3], [128, 128, 16]);
    // Half of the file: the decompressed rows are returned before the error.
    let packed = std::fs::read(&path).unwrap();
    let error = bytes(&packed[..packed.len() / 2]).unwrap_err();
    assert!(error.to_string().starts_with("cannot read test: "), "{error}");
}

/// A source that returns bytes when they are sent.
struct Slow(Receiver<Vec<u8>>);

impl Read for Slow {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Ok(bytes) = self.0.recv() else { return Ok(0) };
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }
}

#[test]
fn a_reader_returns_available_rows_without_waiting_for_more() {
    let (sink, source) = channel();
    let source = Slow(source);
    let schema = io_stream();
    let options = ReadOptions::default();
    let line = format!("BlktapTS,Path\n1,{}\n2,b\n3,\"c", "a".repeat(200));
    for piece in line.as_bytes().chunks(32) {
        sink.send(piece.to_vec()).unwrap();
    }
    let mut reader =
        fathom_monitor::read::from_bytes("pipe", source, &schema, &all(), &options).unwrap();
    let mut batch = fathom_monitor::read::Batch::default();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        assert!(reader.next_batch(&mut batch).unwrap());
        seen.extend(batch.times_ns.iter().copied());
    }
    sink.send(b"\"\n".to_vec()).unwrap();
    assert!(reader.next_batch(&mut batch).unwrap());
    seen.extend(batch.times_ns.iter().copied());
    assert_eq!(seen, [1, 2, 3]);
    drop(sink);
    assert!(!reader.next_batch(&mut batch).unwrap());
}

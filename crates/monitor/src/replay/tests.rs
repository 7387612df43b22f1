//! Tests of replays with events in any order, and of the limits on state.

use fathom_cql::Row;

use super::*;
use crate::io_stream;
use crate::read;
use crate::recording::{BlockLimits, Clock, Header, Writer, end_block, moment_block};

#[derive(Default)]
struct Results(Vec<(usize, i64, i64, Row)>);

impl ResultSink for Results {
    fn begin(&mut self, _: usize, _: &[Column], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()> {
        self.0.push((query, time_ns, count, row.to_vec()));
        Ok(())
    }
}

#[test]
fn events_in_any_order_within_the_lateness_count() {
    let text = "BlktapTS,Type,Size\n5,Q,8\n3,Q,1\n9,R,8\n9,R,1\n20,Q,4\n1,Q,7\n";
    let script = "select sum(Size) from IOstream [range 4 nanoseconds]; select Size from IOstream;
        select sum(Size) from IOstream [range 4 nanoseconds]";
    let script = Script::prepare(script, &[], ParseOptions::default()).unwrap();
    let (schema, options) = (script.schema(), ReadOptions::default());
    let mut reader =
        read::from_bytes("test", text.as_bytes(), schema, script.wanted(), &options).unwrap();
    let mut results = Results::default();
    let summary = script.run(&mut *reader, 100, &mut results).unwrap();
    let of = |query| -> Vec<(i64, i64, i64)> {
        let mine = results.0.iter().filter(|result| result.0 == query);
        mine.map(|(_, time, count, row)| match row[..] {
            [Value::Integer(value)] => (*time, *count, value),
            _ => panic!("{row:?}"),
        })
        .collect()
    };
    assert_eq!(
        of(0),
        [
            (1, 1, 7),
            (3, -1, 7),
            (3, 1, 8),
            (5, -1, 8),
            (5, 1, 9),
            (7, 1, 8),
            (7, -1, 9),
            (9, -1, 8),
            (9, 1, 9),
            (13, -1, 9),
            (20, 1, 4)
        ]
    );
    assert_eq!(of(2), of(0), "queries with the same result");
    assert_eq!(of(1), [(1, 1, 7), (3, 1, 1), (5, 1, 8), (9, 1, 1), (9, 1, 8), (20, 1, 4)]);
    assert_eq!((summary.read.events, summary.late), (6, 0));
}

fn rows(text: &str) -> io::Cursor<Vec<u8>> {
    io::Cursor::new(text.as_bytes().to_vec())
}

#[test]
fn exceeding_the_limit_ends_a_replay_and_live_queries() {
    let script = |most| {
        let text = "select Size from IOstream [range 1 hour]";
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        script.with_held_max(most)
    };
    let events = 200;
    let lines: Vec<String> = (0..events).map(|time| format!("{time},7\n")).collect();
    let text = format!("BlktapTS,Size\n{}", lines.concat());
    let header = Header::new(&io_stream(), Clock::Monotonic, 0);
    let mut writer = Writer::new(Vec::new(), &header, BlockLimits::default()).unwrap();
    for time_ns in 0..events {
        writer.append_row(time_ns, &vec![Value::Integer(7)]).unwrap();
    }
    let (mut bytes, _) = writer.finish().unwrap();
    let end = bytes.len() - end_block(200, 0).len();
    bytes.splice(end..end, moment_block(199));
    let options = ReadOptions::default();
    for most in [None, Some(200), Some(100)] {
        let script = script(most);
        let wanted = script.streams();
        let mut reader =
            read::from_bytes("test", rows(&text), script.schema(), script.wanted(), &options)
                .unwrap();
        let replayed = script.run(&mut *reader, 0, &mut Results::default());
        let mut reader = RowReader::new("test", &bytes[..], wanted, &options).unwrap();
        let lived = script.run_live(&mut reader, 0, &mut Results::default(), None);
        for summary in [replayed, lived] {
            match (most, summary) {
                (None | Some(200), Ok(summary)) => assert_eq!(summary.read.events, 200),
                (Some(100), Err(QueryError::Held(exceeded))) => {
                    assert_eq!(exceeded.limit, 100);
                    assert!((101..=103).contains(&exceeded.held), "{exceeded}");
                }
                (_, other) => panic!("{most:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn rows_kept_of_a_result_count_too() {
    use crate::write::{Printer, PrinterOptions};
    let text = "select BlktapTS from IOstream [range 1 hour]";
    let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
    let script = script.with_held_max(Some(300));
    let lines: Vec<String> = (0..200).map(|time| format!("{time}\n")).collect();
    let text = format!("BlktapTS\n{}", lines.concat());
    for (deltas, ends) in [(false, false), (true, true)] {
        let (schema, options) = (script.schema(), ReadOptions::default());
        let mut reader =
            read::from_bytes("test", rows(&text), schema, script.wanted(), &options).unwrap();
        let options = PrinterOptions { deltas, ..PrinterOptions::default() };
        let ran = script.run(&mut *reader, 0, &mut Printer::new(Vec::new(), options));
        assert_eq!(ran.is_ok(), ends, "{ran:?}");
        if let Err(error) = ran {
            assert!(error.to_string().contains("most in the result"), "{error}");
        }
    }
}

#[test]
fn live_events_count_up_to_their_end_and_a_cut_is_an_error() {
    let header = Header::new(&io_stream(), Clock::Monotonic, 0);
    let mut writer = Writer::new(Vec::new(), &header, BlockLimits::default()).unwrap();
    for time_ns in [3, 5, 5] {
        writer.append_row(time_ns, &vec![Value::Integer(time_ns)]).unwrap();
    }
    let (bytes, _) = writer.finish().unwrap();
    let text = "select count(*) from IOstream [range 4 nanoseconds]";
    let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
    let run = |bytes: &[u8]| {
        let options = ReadOptions::default();
        let wanted = script.streams();
        let mut reader = RowReader::new("test", bytes, wanted, &options).unwrap();
        let mut results = Results::default();
        let summary = script.run_live(&mut reader, 0, &mut results, None);
        (summary.map(|summary| summary.read.events), results.0)
    };
    let (events, results) = run(&bytes);
    assert_eq!(events.unwrap(), 3);
    let row = |count| vec![Value::Integer(count)];
    assert_eq!(results, [(0, 3, 1, row(1)), (0, 5, -1, row(1)), (0, 5, 1, row(3))]);
    for left_out in [1, 56, 60] {
        let (cut, _) = run(&bytes[..bytes.len() - left_out]);
        assert!(matches!(cut, Err(QueryError::Read(_))), "{left_out}");
    }
}

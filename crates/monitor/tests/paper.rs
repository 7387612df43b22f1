//! Runs the monitoring paper's queries over the paper's samples, and compares the results with the
//! printed tables.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use fathom_cql::catalog::{Catalog, Column};
use fathom_cql::oracle::{self, InputRow};
use fathom_cql::{ParseOptions, Row, Value};
use fathom_monitor::ResultSink;
use fathom_monitor::io_stream;
use fathom_monitor::read::{self, Batch, ReadOptions, TimeUnit};
use fathom_monitor::replay::Script;

/// One change of a result: query, instant, count, row.
type Change = (usize, i64, i64, Row);

#[derive(Default)]
struct Results(Vec<Change>);

impl ResultSink for Results {
    fn begin(&mut self, _: usize, _: &[Column], _: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, query: usize, time: i64, count: i64, row: &[Value]) -> std::io::Result<()> {
        self.0.push((query, time, count, row.to_vec()));
        Ok(())
    }
}

fn script(name: &str) -> Script {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cql/tests/paper").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    Script::prepare(&text, &[], ParseOptions { stream_compat: true, ..ParseOptions::default() })
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn table(number: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/paper/table3_{number}.tsv"))
}

/// The timestamps of the filter node, which STREAM used.
fn options() -> ReadOptions {
    ReadOptions {
        time_column: Some("FtrTS".into()),
        time_unit: TimeUnit::Microseconds,
        ..ReadOptions::default()
    }
}

fn run(script: &Script, input: u32) -> Vec<Change> {
    let file = File::open(table(input)).expect("a table");
    let mut reader = read::from_bytes("table", file, script.schema(), script.wanted(), &options())
        .expect("a table");
    let mut results = Results::default();
    let summary = script.run(&mut *reader, 0, &mut results).expect("it runs");
    assert_eq!((summary.read.bad, summary.late), (0, 0));
    results.0
}

/// The inserted rows only: STREAM prints them apart from the deletions.
fn arrivals(changes: &[Change]) -> Vec<Row> {
    let arrivals = changes.iter().filter(|(_, _, count, _)| *count > 0);
    arrivals.flat_map(|(_, _, n, row)| vec![row.clone(); usize::try_from(*n).unwrap()]).collect()
}

/// The rows of a table of the paper, as texts.
fn printed(number: u32) -> Vec<Vec<String>> {
    let text = fs::read_to_string(table(number)).expect("a table");
    let cells = |line: &str| line.split('\t').map(|cell| cell.trim().to_owned()).collect();
    text.lines().skip(1).filter(|line| !line.trim().is_empty()).map(cells).collect()
}

fn texts(row: &[Value], columns: usize) -> Vec<String> {
    row[..columns].iter().map(ToString::to_string).collect()
}

#[test]
fn query_0_forwards_everything() {
    let rows = arrivals(&run(&script("query00.cql"), 2));
    let rows: Vec<_> = rows.iter().map(|row| texts(row, 10)).collect();
    assert_eq!(rows, printed(2));
    assert_eq!(rows.len(), 10);
}

#[test]
fn query_1_gives_table_3_4() {
    let rows = arrivals(&run(&script("query01.cql"), 3));
    let rows: Vec<_> = rows.iter().map(|row| texts(row, 10)).collect();
    assert_eq!(rows, printed(4));
}

#[test]
fn query_4_gives_table_3_6() {
    let rows = arrivals(&run(&script("query04.cql"), 5));
    // The paper added the request's number to its table "for better readability".
    let printed: Vec<_> = printed(6).iter().map(|row| row[0].clone()).collect();
    assert_eq!(rows.iter().map(|row| row[0].to_string()).collect::<Vec<_>>(), printed);
    assert_eq!(printed, ["14112", "16733", "16733", "16733", "5960"]);
}

#[test]
fn query_8_gives_table_3_8() {
    let rows = arrivals(&run(&script("query08.cql"), 7));
    let rows: Vec<_> = rows.iter().map(|row| texts(row, 3)).collect();
    // The first row of the table is a comment: the average is not lower there.
    assert_eq!(rows, printed(8)[1..]);
    assert_eq!(rows, [["785", "11719", "16006"]]);
}

/// The rows of a table as inputs of the naive evaluator.
fn inputs(source: usize, number: u32) -> Vec<InputRow> {
    let schema = io_stream();
    let wanted = vec![true; schema.columns.len()];
    let file = File::open(table(number)).expect("a table");
    let mut reader = read::from_bytes("table", file, &schema, &wanted, &options()).expect("rows");
    let (mut batch, mut inputs) = (Batch::default(), Vec::new());
    while reader.next_batch(&mut batch).expect("rows") {
        let rows = batch.times_ns.iter().zip(batch.rows());
        inputs.extend(rows.map(|(&time_ns, row)| InputRow { source, time_ns, row, count: 1 }));
    }
    inputs
}

#[test]
fn every_query_over_every_sample_gives_the_results_of_the_evaluator() {
    for name in [
        "query00", "query01", "query02", "query03", "query04", "query05", "query06", "query07",
        "query08", "query09", "query10", "query10m",
    ] {
        let script = script(&format!("{name}.cql"));
        let source = Catalog::find(script.catalog(), "IOstream").expect("the stream");
        let mut changes = 0;
        for number in [2, 3, 5, 7] {
            let inputs = inputs(source, number);
            let last = inputs.iter().map(|input| input.time_ns).max().expect("rows");
            let mut is: BTreeMap<(usize, i64, Row), i64> = BTreeMap::new();
            for (query, time_ns, count, row) in run(&script, number) {
                *is.entry((query, time_ns, row)).or_default() += count;
            }
            let mut expected = BTreeMap::new();
            for (query, planned) in script.queries().iter().enumerate() {
                for delta in oracle::run(&planned.plan, &inputs, last) {
                    expected.insert((query, delta.time_ns, delta.row), delta.count);
                }
            }
            assert_eq!(is, expected, "{name} over table 3.{number}");
            changes += expected.len();
        }
        assert!(changes > 0, "{name} has no result for any sample");
    }
}

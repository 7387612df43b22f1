//! Runs each query of `docs/queries.md` over a small recorded sample. The engine gives the results
//! that the naive evaluator computes, also when hosts and a centre share the work, and the page
//! shows these results.
//!
//! With `FATHOM_WRITE=1` in the environment, the sample and the results in the page are written.

#[path = "support/sample.rs"]
mod sample;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use fathom_cql::catalog::{Column, StreamSchema};
use fathom_cql::oracle::{self, InputRow};
use fathom_cql::{Hosts, ParseOptions, Row, Value, split};
use fathom_monitor::read::{self, Batch, ReadOptions, Reader, WantedStream};
use fathom_monitor::recording::{BlockLimits, Cell, Clock, Header, RowReader, Writer};
use fathom_monitor::replay::Script;
use fathom_monitor::write::{Form, Printer, PrinterOptions};
use fathom_monitor::{Engine, ResultSink, streams};

/// Whether to write the files instead of comparing them.
fn writes() -> bool {
    env::var_os("FATHOM_WRITE").is_some()
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn events() -> String {
    let path = file("tests/sample/events.csv");
    if writes() {
        fs::write(&path, sample::csv()).expect("it is written");
    }
    fs::read_to_string(path).expect("the sample is there")
}

/// A block of the page.
#[derive(Debug)]
struct Block {
    /// The words after the three ticks.
    info: Vec<String>,
    /// The line of the ticks, from 0.
    line: usize,
    text: String,
}

/// The blocks of the page.
fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut inside = false;
    for (line, text) in page.lines().enumerate() {
        if let Some(info) = text.strip_prefix("```") {
            inside = !inside;
            if inside {
                let info = info.split_whitespace().map(str::to_owned).collect();
                blocks.push(Block { info, line, text: String::new() });
            }
        } else if inside {
            let block = blocks.last_mut().expect("a block is open");
            block.text.push_str(text);
            block.text.push('\n');
        }
    }
    assert!(!inside, "a block is not closed");
    blocks
}

impl Block {
    fn is(&self, kind: &str) -> bool {
        self.info.first().is_some_and(|first| first == kind)
    }

    fn has(&self, word: &str) -> bool {
        self.info.iter().any(|other| other == word)
    }

    /// The script, with the parameters in the block's info string, such as `limit=500`.
    fn script(&self) -> Script {
        let parameter = |word: &String| {
            let (name, value) = word.split_once('=')?;
            let value = value.parse().map_or_else(|_| Value::text(value), Value::Integer);
            Some((name.to_owned(), value))
        };
        let parameters: Vec<_> = self.info.iter().filter_map(parameter).collect();
        let options =
            ParseOptions { stream_compat: self.has("stream-compat"), ..ParseOptions::default() };
        Script::prepare(&self.text, &parameters, options)
            .unwrap_or_else(|error| panic!("line {}: {error}", self.line + 1))
    }
}

fn reader_of(wanted: &[WantedStream], events: &str) -> Box<dyn Reader> {
    let options = ReadOptions::default();
    if wanted.iter().any(|stream| stream.schema.name == "Changes") {
        let bytes = Cursor::new(recording(events));
        return Box::new(RowReader::new("sample", bytes, wanted, &options).expect("a recording"));
    }
    let bytes = Cursor::new(events.to_owned().into_bytes());
    read::from_bytes("events.csv", bytes, &wanted[0].schema, &wanted[0].columns, &options)
        .expect("the sample is CSV")
}

/// A recording of the events, and of the changes in the file beside them, in order of time.
fn recording(events: &str) -> Vec<u8> {
    let changes = fs::read_to_string(file("tests/sample/changes.csv")).expect("the sample");
    let mut rows = Vec::new();
    for (stream, (schema, text)) in streams().iter().zip([events, &changes]).enumerate() {
        let (mut reader, mut batch) = (reader_of_csv(schema, text), Batch::default());
        while reader.next_batch(&mut batch).expect("rows") {
            let times = batch.times_ns.iter().zip(batch.rows());
            rows.extend(times.map(|(&time_ns, row)| (time_ns, stream, row)));
        }
    }
    rows.sort_by_key(|(time_ns, stream, _)| (*time_ns, *stream));
    let header = Header::of_streams(&streams(), Clock::Unknown, 0);
    let mut writer = Writer::new(Vec::new(), &header, BlockLimits::default()).expect("a header");
    let mut last = 0;
    for (time_ns, stream, row) in rows {
        if stream != last {
            writer.flush().expect("memory has room");
        }
        last = stream;
        writer.append(stream, time_ns, row.iter().map(Cell::from)).expect("memory has room");
    }
    writer.finish().expect("memory has room").0
}

fn reader_of_csv(schema: &StreamSchema, text: &str) -> Box<dyn Reader> {
    let all = vec![true; schema.columns.len()];
    let bytes = Cursor::new(text.to_owned().into_bytes());
    read::from_bytes("sample", bytes, schema, &all, &ReadOptions::default()).expect("it is CSV")
}

/// All columns of a script's streams.
fn whole(script: &Script) -> Vec<WantedStream> {
    script.streams().iter().map(|stream| WantedStream::whole(&stream.schema)).collect()
}

/// The changes of results: the count by query, instant and row.
type ResultChanges = BTreeMap<(usize, i64, Row), i64>;

#[derive(Default)]
struct Results(ResultChanges);

impl ResultSink for Results {
    fn begin(&mut self, _: usize, _: &[Column], _: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, query: usize, time: i64, count: i64, row: &[Value]) -> std::io::Result<()> {
        *self.0.entry((query, time, row.to_vec())).or_default() += count;
        Ok(())
    }
}

fn run(script: &Script, mut reader: Box<dyn Reader>) -> ResultChanges {
    let mut results = Results::default();
    let summary = script.run(&mut *reader, 0, &mut results).expect("it runs");
    assert_eq!((summary.read.bad, summary.late), (0, 0));
    results.0
}

/// The results of the naive evaluator.
fn expected(script: &Script, events: &str) -> ResultChanges {
    let (mut batch, mut inputs) = (Batch::default(), Vec::new());
    let mut reader = reader_of(&whole(script), events);
    while reader.next_batch(&mut batch).expect("rows") {
        let rows = batch.times_ns.iter().zip(batch.rows());
        let source = script.sources()[batch.stream];
        inputs.extend(rows.map(|(&time_ns, row)| InputRow { source, time_ns, row, count: 1 }));
    }
    let last = inputs.iter().map(|input| input.time_ns).max().expect("rows");
    let mut expected = ResultChanges::new();
    for (query, planned) in script.queries().iter().enumerate() {
        for delta in oracle::run(&planned.plan, &inputs, last) {
            expected.insert((query, delta.time_ns, delta.row), delta.count);
        }
    }
    expected
}

/// The results of a centre if each machine is on a host of its own.
fn by_hosts(script: &Script, events: &str) -> ResultChanges {
    let plans: Vec<_> = script.queries().iter().map(|query| query.plan.clone()).collect();
    let parts = split(&plans, script.catalog(), Hosts::Many);
    let streams = script.catalog().streams.len();
    let machine =
        |stream: usize| script.streams()[stream].schema.find("VMName").expect("the column");
    let mut hosts: BTreeMap<Value, Engine> = BTreeMap::new();
    let mut batch = Batch::default();
    let mut last = 0;
    let mut reader = reader_of(&whole(script), events);
    while reader.next_batch(&mut batch).expect("rows") {
        for (&time, row) in batch.times_ns.iter().zip(batch.rows()) {
            last = last.max(time as u64);
            let host = hosts.entry(row[machine(batch.stream)].clone());
            let host = host.or_insert_with(|| Engine::new(streams, &parts.fragments));
            host.push(script.sources()[batch.stream], time as u64, &row);
        }
    }
    assert!(hosts.len() > 1);
    let mut centre = Engine::new(parts.fragments.len(), &parts.centre);
    for host in hosts.values_mut() {
        host.advance(last + 1, &mut |sent| {
            for &fragment in sent.queries {
                centre.change(fragment, sent.time_ns, sent.row, sent.count);
            }
        });
    }
    let mut changes = ResultChanges::new();
    centre.advance(last + 1, &mut |delta| {
        for &query in delta.queries {
            let at = (query, delta.time_ns as i64, delta.row.to_vec());
            *changes.entry(at).or_default() += delta.count;
        }
    });
    changes
}

/// The output of `fathom query`.
fn printed(script: &Script, events: &str, block: &Block) -> String {
    let form = match () {
        () if block.has("json") => Form::Json,
        () if block.has("csv") => Form::Csv,
        () => Form::Table,
    };
    let mut printer =
        Printer::new(Vec::new(), PrinterOptions { form, deltas: block.has("deltas") });
    script.run(&mut *reader_of(script.streams(), events), 0, &mut printer).expect("it runs");
    String::from_utf8(printer.finish().expect("it is written")).expect("it is text")
}

/// The first lines of a result: the number in the info string (`first=3`), or all.
fn first(text: &str, block: &Block) -> String {
    let number = block.info.iter().find_map(|word| word.strip_prefix("first="));
    let number = number.map_or(usize::MAX, |number| number.parse().expect("a number"));
    let mut lines: Vec<&str> = text.lines().take(number.saturating_add(1)).collect();
    if lines.len() < text.lines().count() {
        lines.push("…");
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_sample_equals_the_output_of_its_generator() {
    assert_eq!(events(), sample::csv(), "FATHOM_WRITE=1 writes it anew");
    let lines = events().lines().count();
    assert!((150..300).contains(&lines), "{lines} lines");
}

#[test]
fn every_query_of_the_page_gives_the_results_of_the_page_and_the_evaluator() {
    let path = file("../../docs/queries.md");
    let page = fs::read_to_string(&path).expect("the page is there");
    let events = events();
    let blocks = blocks(&page);
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    let (mut queries, mut results, mut wrong) = (0, 0, Vec::new());
    // Backwards, because lines may be replaced.
    for (at, block) in blocks.iter().enumerate().rev().filter(|(_, block)| block.is("sql")) {
        let line = block.line + 1;
        let script = block.script();
        let is = run(&script, reader_of(script.streams(), &events));
        let all = script.queries().len();
        let silent = (0..all).find(|query| !is.iter().any(|((of, ..), n)| of == query && *n > 0));
        assert_eq!(silent, None, "line {line}: a query without a row");
        assert_eq!(is, expected(&script, &events), "line {line}");
        assert_eq!(by_hosts(&script, &events), is, "line {line}: many hosts");
        queries += all;
        let Some(shown) = blocks.get(at + 1).filter(|next| next.is("text")) else { continue };
        let printed = printed(&script, &events, shown);
        let heads = usize::from(!shown.has("json"));
        assert!(printed.lines().count() > heads, "line {line}: nothing is printed");
        let printed = first(&printed, shown);
        results += 1;
        if printed != shown.text {
            wrong.push(format!("line {}: the result is\n{printed}", shown.line + 1));
            let old = shown.line + 1..=shown.line + shown.text.lines().count();
            lines.splice(old, printed.lines().map(str::to_owned));
        }
    }
    if writes() {
        fs::write(&path, lines.join("\n") + "\n").expect("it is written");
    } else {
        assert!(wrong.is_empty(), "{}\nFATHOM_WRITE=1 writes them anew", wrong.join("\n"));
    }
    assert!(queries >= 25 && results >= 20, "{queries} queries, {results} results");
}

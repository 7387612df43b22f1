//! Entry points for fuzzing: arbitrary bytes as files of events and as queries.

use std::io::Cursor;

use fathom_cql::catalog::{Catalog, StreamSchema};
use fathom_cql::oracle::{InputRow, run_within};
use fathom_cql::plan::Plan;
use fathom_cql::{Diagnostic, Parameters, ParseOptions, Type, Value, check, parse, plan_script};

use crate::io_stream;
use crate::read::{
    self, BATCH_ROWS, Batch, LAST_TIME_NS, ReadError, ReadOptions, Reader, TimeUnit, WantedStream,
};
use crate::schema::catalog;

/// The most steps of the naive evaluator for a query.
const STEPS: u64 = 20_000;

/// The types of the wanted columns of a stream.
pub(crate) fn kinds(WantedStream { schema, columns }: &WantedStream) -> Vec<Type> {
    let wanted = schema.columns.iter().zip(columns).filter(|(_, wanted)| **wanted);
    wanted.map(|(column, _)| column.kind).collect()
}

/// Reads all batches, and panics if the reader violates its contract. `kinds` are the types of the
/// columns of each stream.
pub(crate) fn drain(reader: &mut dyn Reader, kinds: &[Vec<Type>]) -> Result<(), ReadError> {
    let mut batch = Batch::default();
    let mut events = 0;
    while reader.next_batch(&mut batch)? {
        assert!((1..=BATCH_ROWS).contains(&batch.read()));
        assert!(batch.columns.iter().all(|column| column.len() == batch.len()));
        assert!(batch.times_ns.iter().all(|&time| time <= batch.latest_ns));
        assert!(batch.times_ns.iter().all(|time| (0..=LAST_TIME_NS).contains(time)));
        let kinds = &kinds[batch.stream];
        for row in batch.rows() {
            assert_eq!(row.len(), kinds.len());
            let fits = |(value, kind): (&Value, &Type)| value.kind().is_none_or(|of| of == *kind);
            assert!(row.iter().zip(kinds).all(fits), "{row:?}");
        }
        events += batch.read() as u64;
    }
    assert!(batch.is_empty());
    let report = reader.report();
    assert!(report.events == events && report.notes.len() <= 5, "{report:?}");
    Ok(())
}

/// Reads the bytes of a fuzzer as a file of events in the recognised format, and panics if a reader
/// violates its contract.
pub fn fuzz_events(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let schema = io_stream();
    let columns: Vec<bool> =
        (0..schema.columns.len()).map(|at| how & 1 == 0 || at % 4 == 1).collect();
    let wanted = WantedStream::new(&schema, &columns);
    let kinds = [kinds(&wanted)];
    let options = ReadOptions {
        time_unit: [TimeUnit::Nanoseconds, TimeUnit::Seconds][usize::from(how >> 1 & 1)],
        time_column: (how & 4 != 0).then(|| "FtrTS".to_owned()),
        conditions: (how & 8 != 0).then(|| vec![vec![(1, "Q".into())]]),
    };
    let source = Cursor::new(data.to_vec());
    let read = read::from_bytes("fuzz", source, &schema, &columns, &options)
        .and_then(|mut reader| drain(&mut *reader, &kinds));
    if let Err(error) = read {
        assert!((1..4096).contains(&error.to_string().len()), "{error}");
    }
}

/// Parses the bytes of a fuzzer as queries over the stream of events. Queries that can be planned
/// are explained, and evaluated with all columns and with the needed columns only. Panics if a plan
/// is invalid, or if a result depends on a column that is not needed.
pub fn fuzz_script(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(data) else { return };
    let script =
        match parse(text, &ParseOptions { stream_compat: how & 1 == 1, ..ParseOptions::default() })
        {
            Ok(script) => script,
            Err(wrong) => return check_place(text, &wrong),
        };
    let parameters = Parameters::from([
        ("limit".to_owned(), Value::Integer(8)),
        ("vm".to_owned(), Value::text("web")),
    ]);
    let catalog = catalog();
    let planned = match plan_script(&script, &catalog, &parameters) {
        Ok(planned) => planned,
        Err(wrong) => return check_place(text, &wrong),
    };
    let inputs = inputs(&planned.catalog);
    for query in &planned.queries {
        query.unbounded.iter().chain(&query.warnings).for_each(|remark| check_place(text, remark));
        assert_eq!(check::check(&query.plan, &planned.catalog), Ok(()));
        assert!(!fathom_cql::explain(&query.plan, &planned.catalog).is_empty());
        check_pruned(&query.plan, &planned.catalog, &inputs);
    }
}

fn check_place(text: &str, diagnostic: &Diagnostic) {
    assert!(text.get(diagnostic.span.range()).is_some(), "{diagnostic:?}");
    assert_eq!(diagnostic.render(text).lines().count(), 3);
}

/// Ten events of each stream that the script declares (at most three streams). Some are equal, and
/// some share an instant.
fn inputs(catalog: &Catalog) -> Vec<InputRow> {
    const TIMES_NS: [i64; 10] = [0, 0, 1, 7, 1_000, 1_000, 500_000_000, 1 << 30, 1 << 34, 1 << 40];
    let row = |schema: &StreamSchema, number: usize| {
        let value = |(column, kind): (usize, Type)| match ((number / 2 + column) % 7, kind) {
            (0, _) => Value::Null,
            (of, Type::Integer) => Value::Integer(of as i64 * 3 - 4),
            (of, Type::Float) => Value::Float(of as f64 / 2.0 - 1.0),
            (of, Type::Boolean) => Value::Boolean(of % 2 == 0),
            (of, Type::Text) => Value::text(["Q", "R", "w", "r", "web", ""][of - 1]),
        };
        schema.columns.iter().map(|column| column.kind).enumerate().map(value).collect()
    };
    let mut inputs = Vec::new();
    for (number, time_ns) in TIMES_NS.into_iter().enumerate() {
        for (source, schema) in catalog.streams.iter().enumerate().take(3) {
            inputs.push(InputRow { source, time_ns, row: row(schema, number), count: 1 });
        }
    }
    inputs
}

/// Panics if a plan's results change when the inputs have only the columns that the plan needs.
fn check_pruned(plan: &Plan, catalog: &Catalog, inputs: &[InputRow]) {
    let until_ns = 1 << 41;
    let mut pruned = plan.clone();
    let columns = fathom_cql::prune(std::slice::from_mut(&mut pruned), catalog);
    let mut narrow = catalog.clone();
    for (schema, columns) in narrow.streams.iter_mut().zip(&columns) {
        schema.columns = columns.iter().map(|&column| schema.columns[column].clone()).collect();
    }
    assert_eq!(check::check(&pruned, &narrow), Ok(()));
    let Some(deltas) = run_within(plan, inputs, until_ns, STEPS) else { return };
    let mut inputs = inputs.to_vec();
    for input in &mut inputs {
        input.row = columns[input.source].iter().map(|&at| input.row[at].clone()).collect();
    }
    let again = run_within(&pruned, &inputs, until_ns, STEPS);
    assert!(again.is_none_or(|again| again == deltas), "{plan:?}\n{pruned:?}");
}

//! Measures the cost of queries in the engine alone: events per second on one core, with rows
//! prepared in advance.
//!
//! ```text
//! cargo run --release -p fathom-monitor --example engine_cost
//! ```

use std::time::Instant;

use fathom_cql::catalog::Catalog;
use fathom_cql::{Parameters, ParseOptions, Row, Value, parse, plan_script, prune};
use fathom_monitor::{Engine, io_stream};

const EVENTS: u64 = 1_000_000;
/// The interval between events, in nanoseconds.
const STEP_NS: u64 = 5_000;
/// The number of events between two advances of time.
const BATCH: u64 = 1_000;

const QUERIES: [(&str, &str); 3] = [
    ("filter", "select * from IOstream where Type = 'Q' and VMName = 'vm0'"),
    (
        "groups",
        "select VMName, VDisk, avg(Size), count(*), sum(Size) from IOstream [range 3 seconds]
         where Type = 'Q' group by VMName, VDisk",
    ),
    (
        "join",
        "select R.BlktapTS - Q.BlktapTS
         from IOstream [range 3 seconds] as Q, IOstream [range 3 seconds] as R
         where Q.Type = 'Q' and R.Type = 'R' and Q.ReqId = R.ReqId",
    ),
];

/// The value of a column of an event. Texts are shared, as readers share them.
fn value(column: &str, event: u64, texts: &[Value; 14]) -> Value {
    let (request, response) = (event / 2, event % 2);
    match column {
        "BlktapTS" | "FtrTS" => Value::Integer((event * STEP_NS) as i64),
        "Type" => texts[response as usize].clone(),
        "IOOp" => texts[2 + usize::from(request % 3 == 0)].clone(),
        "ReqId" => Value::Integer(request as i64),
        "Sector" => Value::Integer((request * 7919 % 100_000) as i64),
        "Size" => Value::Integer(8 * (1 + request % 4) as i64),
        "VMName" => texts[4 + (request % 2) as usize].clone(),
        "VDisk" | "PDisk" => texts[6 + (request % 8) as usize].clone(),
        _ => Value::Null,
    }
}

fn main() {
    let schema = io_stream();
    let catalog = Catalog { streams: vec![schema.clone()] };
    let texts =
        ["Q", "R", "r", "w", "vm0", "vm1", "vda", "vdb", "vdc", "vdd", "vde", "vdf", "vdg", "vdh"]
            .map(Value::text);
    for (name, text) in QUERIES {
        let script = parse(text, &ParseOptions::default()).expect("a query");
        let planned = plan_script(&script, &catalog, &Parameters::default()).expect("a query");
        let mut plans = vec![planned.queries[0].plan.clone()];
        let columns = prune(&mut plans, &catalog).remove(0);
        let columns: Vec<&str> =
            columns.iter().map(|&column| schema.columns[column].name.as_str()).collect();
        let row = |event| columns.iter().map(|column| value(column, event, &texts)).collect();
        let rows: Vec<Row> = (0..EVENTS).map(row).collect();
        let mut engine = Engine::new(1, &plans);
        let mut results = 0_u64;
        let start = Instant::now();
        for (event, row) in (0..EVENTS).zip(rows) {
            engine.push(0, event * STEP_NS, &row);
            if event % BATCH == BATCH - 1 {
                engine.advance(event * STEP_NS, &mut |_| results += 1);
            }
        }
        engine.advance(EVENTS * STEP_NS, &mut |_| results += 1);
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name:8} {} of {} columns, {:6.2} million events/s, {results} changes of the result",
            columns.len(),
            schema.columns.len(),
            EVENTS as f64 / seconds / 1e6
        );
    }
}

//! Tests of all formats of results.

mod support;

use fathom_cql::catalog::Column;
use fathom_cql::{Row, Type, Value};
use fathom_monitor::ResultSink;
use fathom_monitor::write::{Form, Printer, PrinterOptions};

fn columns() -> Vec<Column> {
    let column = |(name, kind): (&str, Type)| Column { name: name.into(), kind };
    [("Path", Type::Text), ("Size", Type::Integer), ("Mean", Type::Float), ("Ok", Type::Boolean)]
        .map(column)
        .to_vec()
}

fn row(path: &str, size: i64, mean: f64) -> Row {
    vec![Value::text(path), Value::Integer(size), Value::Float(mean), Value::Boolean(true)]
}

const fn options(form: Form, deltas: bool) -> PrinterOptions {
    PrinterOptions { form, deltas }
}

fn printed(options: PrinterOptions, is_stream: bool, deltas: &[(i64, i64, Row)]) -> String {
    let mut printer = Printer::new(Vec::new(), options);
    printer.begin(0, &columns(), is_stream).unwrap();
    for (time, count, row) in deltas {
        printer.delta(0, *time, *count, row).unwrap();
    }
    String::from_utf8(printer.finish().unwrap()).unwrap()
}

#[test]
fn csv_quotes_texts_where_needed() {
    let rows = [
        (5, 1, row("/a, \"b\"", 8, 0.1)),
        (5, 2, row("two\nlines", -1, 1.0)),
        (6, 1, vec![Value::text(""), Value::Null, Value::Null, Value::Null]),
        (7, 1, row("é", 1, f64::NAN)),
        (7, 1, row("x", 1, 1e300)),
    ];
    let text = printed(options(Form::Csv, false), true, &rows);
    assert_eq!(
        text,
        "Path,Size,Mean,Ok\n\
         \"/a, \"\"b\"\"\",8,0.1,true\n\
         \"two\nlines\",-1,1.0,true\n\
         \"two\nlines\",-1,1.0,true\n\
         \"\",,,\n\
         é,1,NaN,true\n\
         x,1,1e300,true\n"
    );
}

#[test]
fn json_has_one_object_per_line() {
    let rows = [
        (5, 1, row("a\"\n\u{1}", 8, 0.1)),
        (
            6,
            -2,
            vec![Value::Null, Value::Integer(i64::MIN), Value::Float(f64::INFINITY), Value::Null],
        ),
    ];
    let text = printed(options(Form::Json, true), false, &rows);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        r#"{"@ts":5,"@sign":"+","Path":"a\"\n\u0001","Size":8,"Mean":0.1,"Ok":true}"#
    );
    assert_eq!(
        lines[1],
        r#"{"@ts":6,"@sign":"-","Path":null,"Size":-9223372036854775808,"Mean":null,"Ok":null}"#
    );
    assert_eq!((lines.len(), lines[1]), (3, lines[2]));
    for line in lines {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
}

#[test]
fn json_names_each_column_once() {
    let column = |name: &str| Column { name: name.into(), kind: Type::Integer };
    let columns: Vec<Column> = ["a", "a", "a_2", "a"].map(column).to_vec();
    let mut printer = Printer::new(Vec::new(), options(Form::Json, false));
    printer.begin(0, &columns, true).unwrap();
    printer.delta(0, 0, 1, &[1, 2, 3, 4].map(Value::Integer)).unwrap();
    let text = String::from_utf8(printer.finish().unwrap()).unwrap();
    assert_eq!(text, "{\"a\":1,\"a_3\":2,\"a_2\":3,\"a_4\":4}\n");
}

#[test]
fn tables_are_aligned() {
    let rows = [
        (5, 1, row("/var/lib", 8, 0.5)),
        (5, 1, row("\u{1b}[31m", 12_345, 10.0)),
        (6, 1, vec![Value::Null, Value::Null, Value::Null, Value::Null]),
    ];
    assert_eq!(
        printed(options(Form::Table, false), true, &rows),
        "Path       Size  Mean  Ok\n\
         /var/lib      8   0.5  true\n\
         \u{fffd}[31m     12345  10.0  true\n\
         –             –     –  –\n"
    );
    assert_eq!(
        printed(options(Form::Table, true), true, &rows[..1]),
        "@ts  @sign  Path      Size  Mean  Ok\n  5  +      /var/lib     8   0.5  true\n"
    );
    assert_eq!(printed(options(Form::Table, false), true, &[]), "Path  Size  Mean  Ok\n");
    let many: Vec<_> = (0..1000).map(|time| (time, 1, row("a", time, 1.0))).collect();
    assert_eq!(printed(options(Form::Table, false), true, &many).lines().count(), 1001);
    let long = [(1, 1, row(&"x".repeat(500), 1, 1.0))];
    assert!(printed(options(Form::Table, false), true, &long).contains("xx…"));
}

#[test]
fn the_final_content_of_a_relation_is_written() {
    let deltas = [
        (1, 1, row("a", 1, 1.0)),
        (2, 3, row("b", 1, 1.0)),
        (3, -1, row("a", 1, 1.0)),
        (4, -1, row("b", 1, 1.0)),
    ];
    let text = printed(options(Form::Csv, false), false, &deltas);
    assert_eq!(text, "Path,Size,Mean,Ok\nb,1,1.0,true\nb,1,1.0,true\n");
    let text = printed(options(Form::Csv, true), false, &deltas);
    assert_eq!(text.lines().count(), 7);
    assert!(text.starts_with("@ts,@sign,Path,Size,Mean,Ok\n1,+,a,1,1.0,true\n2,+,b"));
    assert!(text.ends_with("3,-,a,1,1.0,true\n4,-,b,1,1.0,true\n"));
}

#[test]
fn rows_of_several_queries_have_their_query_s_number() {
    let column = |name: &str| vec![Column { name: name.into(), kind: Type::Integer }];
    for (form, expected) in [
        (Form::Csv, "@query,a\n1,7\n@query,b\n2,8\n1,9\n"),
        (Form::Json, "{\"@query\":1,\"a\":7}\n{\"@query\":2,\"b\":8}\n{\"@query\":1,\"a\":9}\n"),
        (Form::Table, "@query  a\n     1  7\n@query  b\n     2  8\n     1  9\n"),
    ] {
        let mut printer = Printer::new(Vec::new(), options(form, false));
        printer.begin(0, &column("a"), true).unwrap();
        printer.begin(1, &column("b"), true).unwrap();
        for (query, value) in [(0, 7), (1, 8), (0, 9)] {
            printer.delta(query, 0, 1, &[Value::Integer(value)]).unwrap();
        }
        assert!(printer.delta(2, 0, 1, &[]).is_err());
        assert_eq!(String::from_utf8(printer.finish().unwrap()).unwrap(), expected);
    }
}

#[test]
fn written_csv_can_be_read() {
    let schema = fathom_monitor::io_stream();
    let text = "BlktapTS,Path,Process,Size\n1,\"/a, \"\"b\"\"\",\"two\nlines\",8\n2,\"\",,\n";
    let first = support::bytes(text).unwrap();
    let mut printer = Printer::new(Vec::new(), options(Form::Csv, false));
    printer.begin(0, &schema.columns, true).unwrap();
    for (&time, row) in first.events.times_ns.iter().zip(first.events.rows()) {
        printer.delta(0, time, 1, &row).unwrap();
    }
    let second = support::bytes(printer.finish().unwrap()).unwrap();
    assert!(second.events.rows().eq(first.events.rows()));
}

#[test]
fn a_relation_is_printed_in_its_order() {
    let mut printer = Printer::new(Vec::new(), options(Form::Csv, false));
    printer.begin(0, &columns()[..2], false).unwrap();
    printer.order(0, &[(1, true)]);
    for (path, size) in [("b", 1), ("a", 1), ("c", 2), ("d", 0)] {
        printer.delta(0, 5, 1, &[Value::text(path), Value::Integer(size)]).unwrap();
    }
    let text = String::from_utf8(printer.finish().unwrap()).unwrap();
    assert_eq!(text, "Path,Size\nc,2\na,1\nb,1\nd,0\n");
}

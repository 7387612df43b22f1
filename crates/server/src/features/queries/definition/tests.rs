use std::path::Path;

use fathom_control::Nanoseconds;
use fathom_cql::Value;
use serde_json::json;

use super::command::{Command, CommandRequest};
use super::*;
use crate::configuration::{Configuration, ConfigurationFile, LogLevel, parse};

fn read(text: &str) -> Result<Configuration, crate::configuration::Problems> {
    let configuration = parse(text, Path::new("f.toml"))?;
    configuration.check_sections()?;
    Ok(configuration)
}

#[track_caller]
fn expect(text: &str, expected: &str) {
    let problems = read(text).expect_err("this configuration is wrong");
    assert_eq!(problems.to_string(), expected);
}

/// The action in the definition of a query. Panics if the definition is invalid.
#[track_caller]
fn action(cql: &str, action: &str) -> ActionDefinition {
    let text = format!("[[query]]\nname = \"q\"\ncql = \"{cql}\"\naction = {action}\n");
    read(&text).unwrap_or_else(|problems| panic!("{problems}")).all::<QueryDefinition>()[0]
        .definition
        .action
        .clone()
}

#[track_caller]
fn expect_action(cql: &str, action: &str, expected: &str) {
    let text = format!("[[query]]\nname = \"q\"\ncql = \"{cql}\"\naction = {action}\n");
    expect(&text, expected);
}

const STREAM: &str = "select VDisk, Path, Size from IOstream";
const RELATION: &str = "select VDisk, sum(Size) as sectors from IOstream [now] group by VDisk";

#[test]
fn actions_are_read() {
    let log = action(STREAM, "{ log = \"warning\" }");
    assert_eq!((log.on(), log.limit().unwrap().to_string()), (On::Insert, "10/second".into()));
    let definition = LogDefinition { level: LogLevel::Warning, ..LogDefinition::default() };
    assert_eq!(log, ActionDefinition::Log(definition));
    let metric = action(
        RELATION,
        "{ metric = \"m\", value = \"SECTORS\", labels = \"vdisk\", help = \"h\", series_max = 7 }",
    );
    let definition = MetricDefinition {
        name: "m".into(),
        kind: MetricKind::Gauge,
        value: Some("SECTORS".into()),
        labels: Some(vec!["vdisk".into()]),
        help: "h".into(),
        series_max: 7,
        on: On::Insert,
    };
    assert_eq!((metric.on(), metric.limit()), (On::Both, None));
    assert_eq!(metric, ActionDefinition::Metric(definition));
    let counter = action(RELATION, "{ metric = \"m\", type = \"counter\", on = \"delete\" }");
    assert_eq!((counter.on(), counter.limit()), (On::Delete, None));
    let webhook =
        action(RELATION, "{ webhook = \"https://[::1]:8/x\", timeout = \"1s\", on = \"both\" }");
    let definition = WebhookDefinition {
        url: "https://[::1]:8/x".into(),
        timeout: Nanoseconds(1_000_000_000),
        on: On::Both,
        limit: None,
    };
    assert_eq!(webhook, ActionDefinition::Webhook(definition));
    let command = action(
        STREAM,
        "{ command = \"PATCH /v1/disks/{VDisk}\", body = { capacity = \"{Size}\" }, \
         on = \"insert\", limit = \"1 / hour\" }",
    );
    let definition = CommandDefinition {
        request: "PATCH /v1/disks/{VDisk}".into(),
        body: Some(json!({ "capacity": "{Size}" })),
        on: On::Insert,
        limit: RateLimit { count: 1, period: Period::Hour },
    };
    assert_eq!(command, ActionDefinition::Command(definition));
}

#[test]
fn mistakes_of_tables_are_reported() {
    expect(
        "[[query]]\nname = \"q\"\ncql = \"select * from IOstream\"\nfile = \"a\"\nactoin = {}\n",
        "f.toml:1:1: the query \"q\" has no action\n  \
         → add a line like `action = { log = \"warning\" }`\n\
         f.toml:4:8: a query has `cql` and `file`\n  → keep one of them\n\
         f.toml:5:1: there is no key `actoin` in [[query]]\n  → did you mean `action`?",
    );
    expect(
        "[[query]]\naction = { log = \"warn\", limits = 3 }\n",
        "f.toml:1:1: a query has no text\n  \
         → add a line like `cql = \"select …\"` or `file = \"a.cql\"`\n\
         f.toml:2:18: `log` of `action` cannot be \"warn\"\n  → did you mean `warning`?\n\
         f.toml:2:26: there is no key `limits` in `action`\n  → did you mean `limit`?",
    );
    expect_action(
        STREAM,
        "{ limit = \"1/hour\" }",
        "f.toml:4:10: the action has no kind\n  \
         → known here: `log`, `metric`, `webhook`, `command`",
    );
    expect_action(
        STREAM,
        "{ log = \"info\", webhook = \"http://a/\" }",
        "f.toml:4:10: the action has `log` and `webhook`\n  \
         → keep one, and put the other in a separate [[query]]",
    );
    expect_action(
        STREAM,
        "{ log = \"info\", limit = \"ten/hour\" }",
        "f.toml:4:34: `limit` of `action`: \"ten/hour\" is not a limit\n  \
         → write it like `limit = \"10/minute\"`: a number each second, minute or hour",
    );
    expect_action(
        RELATION,
        "{ metric = \"m\", limit = \"1/hour\" }",
        "f.toml:4:26: there is no key `limit` in `action`\n  → known here: `metric`, `type`, \
         `value`, `labels`, `help`, `series_max`, `on`",
    );
    expect_action(
        RELATION,
        "{ metric = \"m\", on = \"insert\", series_max = 0, labels = [1], type = \"gauche\" }",
        "f.toml:4:31: a gauge has no `on`: it follows inserted and deleted rows\n  \
         → leave it out, or add `type = \"counter\"`\n\
         f.toml:4:54: `series_max` of `action` is out of range\n  → choose a number from 1 to 10000\n\
         f.toml:4:66: `labels` of `action` has to be a text, and is a whole number\n  \
         → write it like `labels = \"…\"`\n\
         f.toml:4:78: `type` of `action` cannot be \"gauche\"\n  → did you mean `gauge`?",
    );
    expect_action(
        RELATION,
        "{ webhook = \"http://a/\", timeout = \"1h\", body = 1 }",
        "f.toml:4:45: the time limit of an attempt is out of range\n  → choose a time from 1ms to 60s\n\
         f.toml:4:51: there is no key `body` in `action`\n  \
         → known here: `webhook`, `timeout`, `on`, `limit`",
    );
    expect_action(
        RELATION,
        "{ command = \"PATCH /v1/disks/a\", body = { layers = [1979-05-27] } }",
        "f.toml:4:61: `layers` of [query.action.body] cannot be a date\n  \
         → correct it, or leave the line out",
    );
    expect_action(
        RELATION,
        "7",
        "f.toml:4:10: `action` of [[query]] has to be a table, and is a whole number\n  \
         → write it like `action = { … }`",
    );
    let two = "[[query]]\nname = \"q\"\ncql = \"select VDisk from IOstream\"\n\
               action = { metric = \"m\", type = \"counter\" }\n";
    expect(
        &two.repeat(2),
        "f.toml:6:8: there are two queries called \"q\"\n  \
         → give each a different name (the other is in line 2)\n\
         f.toml:8:21: there are two metrics called \"m\"\n  \
         → give each a different name (the other is in line 4)",
    );
}

#[test]
fn mistakes_of_queries_are_reported_with_their_places() {
    let table = |cql: &str| {
        format!("[[query]]\nname = \"q\"\ncql = {cql}\naction = {{ log = \"info\" }}\n")
    };
    expect(
        &table("'''\nselect VDisk,\n  Sise from IOstream'''"),
        "f.toml:5:3: line 2, column 3 of the query: there is no column `Sise`\n  \
         → did you mean `Size`?",
    );
    expect(
        &table("  \"select Sise from IOstream\""),
        "f.toml:3:17: line 1, column 8 of the query: there is no column `Sise`\n  \
         → did you mean `Size`?",
    );
    // A text with escapes has other places in the file.
    expect(
        &table("\"select '\\u00e9',\\n Sise from IOstream\""),
        "f.toml:3:7: line 2, column 2 of the query: there is no column `Sise`\n  \
         → did you mean `Size`?",
    );
    expect(
        &table("\"select 1 from IOstream; select 2 from IOstream\""),
        "f.toml:3:7: the query \"q\" cannot be kept: the script has 2 queries\n  \
         → keep one, and put each of the others in a separate [[query]]",
    );
    expect(
        &table("\"create stream S (a integer); select a from S\""),
        "f.toml:3:7: the query \"q\" cannot be kept: it reads the stream `S`\n  \
         → use IOstream or Changes: there is no other stream",
    );
    let growing = table("\"select distinct ReqId from IOstream\"");
    let problems = read(&growing).unwrap_err().to_string();
    assert!(problems.contains("`unbounded_allowed = true` if that is intended"), "{problems}");
    read(&format!("{growing}unbounded_allowed = true\n")).unwrap();
    let held = |key: &str| read(&format!("{}{key}", table("\"select VDisk from IOstream\"")));
    let of = |key: &str| held(key).unwrap().all::<QueryDefinition>()[0].definition.held_max;
    assert_eq!((of("").get(), of("held_max = 1\n").get()), (10_000_000, 1));
    let problems = held("held_max = 0\n").unwrap_err().to_string();
    assert_eq!(
        problems,
        "f.toml:5:12: `held_max` of [[query]] is out of range\n  → choose a number from 1 up"
    );
    let many = table("\"select VDisk from IOstream\"").repeat(QUERIES_MAX + 1);
    let problems = read(&many).unwrap_err();
    assert_eq!(problems.0[0].message, "there are 65 queries");
}

#[test]
fn actions_are_checked_against_their_queries() {
    expect_action(
        STREAM,
        "{ log = \"info\", on = \"delete\" }",
        "f.toml:4:31: the query \"q\" never deletes rows: it is a stream\n  \
         → leave `on` out, or make the query a relation",
    );
    expect_action(
        STREAM,
        "{ metric = \"fathom_x\", value = \"path\", labels = [\"Seize\", \"path\"] }",
        "f.toml:4:21: the name fathom_x is reserved for metrics of the daemon\n  \
         → choose a name with another prefix\n\
         f.toml:4:21: a gauge shows the rows of a relation, but this query is a stream\n  \
         → add `type = \"counter\"`, or use a window\n\
         f.toml:4:41: the column `path` has no numbers\n  \
         → choose a column with numbers, or leave `value` out\n\
         f.toml:4:58: the query has no column `Seize`\n  → did you mean `Size`?",
    );
    expect_action(
        "select VDisk as `a b`, VDisk as `__c`, VDisk as d, Path as d from IOstream [now]",
        "{ metric = \"1\" }",
        "f.toml:4:21: \"1\" is not a valid name of a metric\n  \
         → choose letters, digits and underscores, as in `disk_slow_requests`\n\
         f.toml:4:21: the column `a b` cannot be the name of a label\n  \
         → give it another name with `as`: letters, digits and underscores\n\
         f.toml:4:21: the column `__c` cannot be the name of a label\n  \
         → give it another name with `as`: letters, digits and underscores\n\
         f.toml:4:21: the column `d` occurs twice\n  \
         → give it another name with `as`: letters, digits and underscores",
    );
    for url in ["ftp://a/", "/path", "http://", "http//a", "\\u0000"] {
        let message = read(&format!(
            "[[query]]\nname = \"q\"\ncql = \"{STREAM}\"\naction = {{ webhook = \"{url}\" }}\n"
        ));
        let message = message.unwrap_err().to_string();
        assert!(message.contains("f.toml:4:22: "), "{message}");
        assert!(message.contains("is not an address of an HTTP server"), "{message}");
    }
}

#[test]
fn a_query_may_be_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    let text = "[[query]]\nname = \"q\"\nfile = \"q.cql\"\naction = { log = \"info\" }\n";
    std::fs::write(&path, text).unwrap();
    let control = Some(folder.path().join("control.sock"));
    let file = ConfigurationFile { path, control, ..ConfigurationFile::default() };
    let shown = |problems: crate::configuration::Problems| {
        problems.to_string().replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(
        shown(file.load().unwrap_err()),
        "f.toml:3:8: the query's file q.cql cannot be read: no such file or folder\n  \
         → name a file with UTF-8 text that the daemon may read"
    );
    let query = folder.path().join("q.cql");
    std::fs::write(&query, "select\n Sise from IOstream").unwrap();
    assert_eq!(
        shown(file.load().unwrap_err()),
        "f.toml:3:8: line 2, column 2 of q.cql: there is no column `Sise`\n  → did you mean `Size`?"
    );
    std::fs::write(&query, "x".repeat(QUERY_LENGTH_MAX + 100)).unwrap();
    assert!(shown(file.load().unwrap_err()).contains("longer than 65536 bytes"));
    std::fs::write(&query, "").unwrap();
    assert!(shown(file.load().unwrap_err()).contains("f.toml:3:8: "));
    std::fs::write(&query, STREAM).unwrap();
    assert_eq!(file.load().unwrap().all::<QueryDefinition>()[0].definition.text, STREAM);
}

fn command(request: &str, body: Option<serde_json::Value>) -> Result<Command, String> {
    let query = QueryDefinition {
        text: "select VDisk, Size, 0.5 * Size as half, Path, null as nothing from IOstream".into(),
        ..QueryDefinition::default()
    };
    let prepared = PreparedQuery::new(&query).unwrap();
    let definition =
        CommandDefinition { request: request.into(), body, ..CommandDefinition::default() };
    Command::new(&definition, &prepared.columns).map_err(|wrong| wrong.to_string())
}

#[test]
fn values_stay_values() {
    let body = json!({ "layers": [{ "kind": "log", "file": "{path}" }], "capacity": "{half}",
                       "tap": true });
    let command = command("PATCH /v1/disks/{VDisk}", Some(body)).unwrap();
    let row = |disk: &str, half: f64, path: Value| {
        [Value::text(disk), Value::Integer(1), Value::Float(half), path, Value::Null]
    };
    let hostile = "a/../b?x=1#é\"}";
    let request = command.fill(&row(hostile, 4096.0, Value::text(hostile))).unwrap();
    let wanted = json!({ "layers": [{ "kind": "log", "file": hostile }], "capacity": 4096,
                         "tap": true });
    assert_eq!(
        request,
        CommandRequest {
            method: fathom_control::Method::Patch,
            path: "/v1/disks/a%2F..%2Fb%3Fx%3D1%23%C3%A9%22%7D".into(),
            body: Some(wanted)
        }
    );
    let request = command.fill(&row("a", 0.5, Value::Null)).unwrap();
    assert_eq!(request.body.unwrap()["capacity"], json!(0.5));
    for disk in ["", ".", ".."] {
        assert!(command.fill(&row(disk, 1.0, Value::Null)).is_err(), "{disk}");
    }
    assert_eq!(command.fill(&[Value::Null]).unwrap_err(), "VDisk is null");
}

#[test]
fn only_permitted_commands_are_accepted() {
    for request in [
        "",
        "DELETE",
        "DELETE /v1/disks",
        "DELETE /v1/disks/",
        "DELETE /v1/disks/..",
        "DELETE /v1/disks/{VDisk}/x",
        "DELETE v1/disks/a",
        "POST /v1/shutdown",
        "GET /v1/disks",
        "DELETE /v1/disks/{VDisc}",
        "DELETE /v1/disks/a{VDisk}",
        "DELETE /v1/disks/{VDisk}{Path}",
        "DELETE /v1/{VDisk}/a",
        "PATCH /v1/disks/a",
    ] {
        assert!(command(request, None).is_err(), "{request}");
    }
    for request in ["DELETE /v1/disks/a b", "DELETE /v1/disks/{vdisk}", "POST /v1/reload"] {
        assert!(command(request, None).is_ok(), "{request}");
    }
    for (request, body) in [
        ("DELETE /v1/disks/a", json!({})),
        ("PATCH /v1/disks/a", json!({ "capasity": "{Size}" })),
        ("PATCH /v1/disks/a", json!({ "capacity": "much" })),
        ("PATCH /v1/disks/a", json!({ "capacity": "{Size} bytes" })),
        ("PATCH /v1/disks/a", json!({ "layers": [{ "kind": "{VDisc}" }] })),
        ("POST /v1/disks", json!([])),
        ("POST /v1/disks/a/offload", json!({ "action": "begin" })),
        ("POST /v1/disks/a/offload", json!({ "actions": "{Size}" })),
    ] {
        assert!(command(request, Some(body.clone())).is_err(), "{request} {body}");
    }
    assert!(command("PATCH /v1/disks/a", Some(json!({ "capacity": "1G" }))).is_ok());
    let start = Some(json!({ "action": "start" }));
    assert!(command("POST /v1/disks/{VDisk}/offload", start).is_ok());
}

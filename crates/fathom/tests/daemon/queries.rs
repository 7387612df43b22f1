//! The daemon's kept queries, and their actions.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

use fathom_control::{QueryState, QueryStatus, Statistics};
use serde_json::Value;

use crate::nbd::Nbd;
use crate::process::{Daemon, command};

const DISKS: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
                     [[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"4M\"\n\
                     [[disk]]\nname = \"b\"\nmemory = \"4M\"\n";

/// The table of a query.
fn query(name: &str, cql: &str, action: &str) -> String {
    format!("[[query]]\nname = \"{name}\"\ncql = '''{cql}'''\naction = {action}\n")
}

fn status(daemon: &Daemon, name: &str) -> QueryStatus {
    let list = daemon.client().queries().unwrap();
    list.queries.into_iter().find(|query| query.name == name).unwrap()
}

/// The value of a series in `/metrics`.
fn sample(daemon: &Daemon, series: &str) -> Option<f64> {
    let page = daemon.client().metrics().unwrap();
    page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// The number of requests that the disks' taps have counted.
fn requests(statistics: &Statistics) -> u64 {
    let operations = statistics.disks.iter().flat_map(|disk| &disk.operations);
    operations.map(|operation| operation.count + operation.errors).sum()
}

fn has_thread(daemon: &Daemon, name: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
    let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(comm).any(|comm| comm.trim() == name)
}

#[test]
fn lines_and_metrics_are_what_the_taps_have_counted() {
    let text = [
        DISKS.to_owned(),
        query(
            "eighth",
            "select VDisk, IOOp, Sector, Size from IOstream where Type = 'Q' and Sector = 8",
            "{ log = \"warning\", limit = \"2/hour\" }",
        ),
        query(
            "bytes",
            "select VDisk as disk, IOOp as op, Size * 512 as bytes from IOstream where Type = 'R'",
            "{ metric = \"test_bytes_total\", type = \"counter\", value = \"bytes\", help = \"B.\" }",
        ),
        query(
            "held",
            "select VDisk as disk, count(*) as n from IOstream [range 1 hour] where Type = 'Q' \
             group by VDisk",
            "{ metric = \"test_requests\", value = \"n\" }",
        ),
    ];
    let daemon = Daemon::start(&text.concat());
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut b = Nbd::connect(&daemon.path("nbd.sock"), "b");
    for number in 0..100 {
        a.write(number % 5 * 4096, &[1; 4096]);
        b.read(number * 512, 1024);
    }
    let statistics = daemon.client().statistics().unwrap();
    let bytes = |disk: &str, operation: &str| {
        statistics.disk(disk).unwrap().operation(operation).unwrap().bytes as f64
    };
    assert_eq!((bytes("a", "write"), bytes("b", "read")), (409_600.0, 102_400.0));
    let expected = [
        ("test_bytes_total{disk=\"a\",op=\"w\"}", bytes("a", "write")),
        ("test_bytes_total{disk=\"b\",op=\"r\"}", bytes("b", "read")),
        ("test_requests{disk=\"a\"}", 100.0),
        ("test_requests{disk=\"b\"}", 100.0),
        ("fathom_query_events_total{query=\"held\"}", 400.0),
        ("fathom_query_suppressed_total{query=\"eighth\"}", 19.0),
    ];
    for (series, value) in expected {
        daemon.until(series, || sample(&daemon, series) == Some(value));
    }
    let page = daemon.client().metrics().unwrap();
    let head = "# HELP test_bytes_total B.\n# TYPE test_bytes_total counter\n";
    assert!(page.contains(head) && page.contains("# TYPE test_requests gauge\n"), "{page}");

    let line = "warning query eighth: VDisk=\"a\" IOOp=\"w\" Sector=8 Size=8\n";
    assert_eq!(daemon.log().matches(line).count(), 2, "{}", daemon.log());
    let eighth = status(&daemon, "eighth");
    // One of the reads begins at this sector as well.
    assert_eq!((eighth.results, eighth.acted, eighth.suppressed), (21, 2, 19));
    assert_eq!((eighth.state, eighth.events, eighth.failures), (QueryState::Running, 400, 0));
    assert_eq!((eighth.action.as_str(), eighth.limit.as_str()), ("log", "2/hour"));

    let list = |arguments: &[&str]| {
        let all = ["query", "--list", "--control", "control.sock"];
        let output = command(&daemon.path("")).args(all).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let table = list(&[]);
    assert!(table.lines().nth(1).unwrap().starts_with("eighth  running  log warning"), "{table}");
    let json: Value = serde_json::from_str(&list(&["--json"])).unwrap();
    assert_eq!(json["queries"][1]["target"], "test_bytes_total");
    daemon.end();
}

#[test]
fn every_event_of_a_load_is_read_or_counted_as_dropped() {
    let text = [
        "[[disk]]\nname = \"a\"\nmemory = \"64M\"\nvhost_user = { socket = \"a.sock\" }\n"
            .to_owned(),
        query(
            "done",
            "select IOOp as op, Size * 512 as bytes from IOstream where Type = 'R'",
            "{ metric = \"test_bytes_total\", type = \"counter\", value = \"bytes\" }",
        ),
    ];
    let daemon = Daemon::start(&text.concat());
    let load = ["bench", "a", "--write", "--depth", "1", "-t", "300ms", "--warmup", "10ms"];
    let output =
        command(&daemon.path("")).args(load).args(["--control", "control.sock"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let statistics = daemon.client().statistics().unwrap();
    let expected = 2 * requests(&statistics);
    assert!(expected > 200, "{statistics:?}");
    daemon.until("a request and a response for each request", || {
        let done = status(&daemon, "done");
        done.events + done.events_late + done.events_dropped == expected
    });
    let done = status(&daemon, "done");
    // Only events that are reported as dropped are missing. The last results arrive with the next
    // moment.
    let missing = |letter: &str, name: &str| {
        let counted =
            sample(&daemon, &format!("test_bytes_total{{op=\"{letter}\"}}")).unwrap_or(0.0);
        let tap = statistics.disks[0].operation(name).unwrap().bytes as f64;
        assert!(counted <= tap, "{name}: counted {counted}, but the tap has {tap}");
        tap - counted
    };
    let dropped = (done.events_dropped + done.events_late) as f64;
    daemon.until("all bytes but those dropped", || {
        missing("r", "read") + missing("w", "write") <= dropped * 4096.0
    });
    daemon.end();
}

/// A server that sends `answer` to each request, and passes on the requests' bodies.
fn server(answer: &'static str) -> (String, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/report?by=fathom", listener.local_addr().unwrap());
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let body = read_request(&mut stream);
            stream.write_all(answer.as_bytes()).unwrap();
            if sender.send(body).is_err() {
                return;
            }
        }
    });
    (url, receiver)
}

fn read_request(stream: &mut TcpStream) -> Value {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    assert!(head.starts_with("post /report?by=fathom http/1.1\r\n"), "{head}");
    assert!(head.contains("\r\ncontent-type: application/json\r\n"), "{head}");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    serde_json::from_slice(&body).unwrap()
}

const ACCEPTED: &str = "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n";
const BROKEN: &str =
    "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

#[test]
fn rows_are_sent_to_a_server_and_a_failing_server_disturbs_no_other() {
    let writes = "select VDisk, Sector, Path from IOstream where Type = 'Q' and IOOp = 'w'";
    let (good, accepted) = server(ACCEPTED);
    let (bad, refused) = server(BROKEN);
    // Accepts connections, and sends no answer.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("http://{}/", silent.local_addr().unwrap());
    let text = [
        DISKS.to_owned(),
        query("good", writes, &format!("{{ webhook = \"{good}\" }}")),
        query("bad", writes, &format!("{{ webhook = \"{bad}\" }}")),
        query("silent", writes, &format!("{{ webhook = \"{silent_url}\", timeout = \"50ms\" }}")),
        query("unreachable", writes, "{ webhook = \"http://127.0.0.1:1/\" }"),
    ];
    let daemon = Daemon::start(&text.concat());
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for number in 0..250 {
        a.write(number * 512, &[1; 512]);
    }
    let mut sectors = Vec::new();
    while sectors.len() < 250 {
        let body = accepted.recv_timeout(crate::process::PATIENCE).unwrap();
        assert_eq!((&body["query"], &body["lost"]), (&"good".into(), &0.into()));
        assert!(body["time"].as_u64().unwrap() > 1_700_000_000_000_000_000);
        let rows = body["rows"].as_array().unwrap();
        assert!((1..=100).contains(&rows.len()));
        for row in rows {
            assert_eq!((&row["@sign"], &row["VDisk"]), (&"+".into(), &"a".into()));
            assert!(row["@ts"].as_u64().is_some() && row["Path"].is_null(), "{row}");
            sectors.push(row["Sector"].as_u64().unwrap());
        }
    }
    assert_eq!(sectors, (0..250).collect::<Vec<u64>>());
    daemon.until("the good server has all rows", || status(&daemon, "good").acted == 250);
    // The same rows are sent repeatedly, and dropped in the end.
    let first = refused.recv_timeout(crate::process::PATIENCE).unwrap();
    for _ in 1..5 {
        let again = refused.recv_timeout(crate::process::PATIENCE).unwrap();
        assert_eq!(again["rows"], first["rows"]);
    }
    for name in ["bad", "silent", "unreachable"] {
        daemon.until("rows are dropped", || status(&daemon, name).lost >= 1);
        let query = status(&daemon, name);
        assert!(query.failures >= 5 && query.acted == 0, "{query:?}");
        assert_eq!((query.results, query.state), (250, QueryState::Running));
    }
    let error = status(&daemon, "bad").last_error.unwrap();
    assert_eq!(error, "the server answers 500 Internal Server Error");
    assert!(status(&daemon, "silent").last_error.unwrap().contains("timeout"));
    assert_eq!(a.read(0, 512), [1; 512], "the disk still works");
    daemon.end();
}

/// A self-signed identity.
fn identity() -> openssl::ssl::SslAcceptor {
    use openssl::asn1::Asn1Time;
    use openssl::ssl::{SslAcceptor, SslMethod};
    let group = openssl::ec::EcGroup::from_curve_name(openssl::nid::Nid::X9_62_PRIME256V1).unwrap();
    let key = openssl::ec::EcKey::generate(&group).unwrap();
    let key = openssl::pkey::PKey::from_ec_key(key).unwrap();
    let mut name = openssl::x509::X509NameBuilder::new().unwrap();
    name.append_entry_by_text("CN", "localhost").unwrap();
    let name = name.build();
    let mut certificate = openssl::x509::X509::builder().unwrap();
    certificate.set_subject_name(&name).unwrap();
    certificate.set_issuer_name(&name).unwrap();
    certificate.set_pubkey(&key).unwrap();
    certificate.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    certificate.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    certificate.sign(&key, openssl::hash::MessageDigest::sha256()).unwrap();
    let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls()).unwrap();
    acceptor.set_private_key(&key).unwrap();
    acceptor.set_certificate(&certificate.build()).unwrap();
    acceptor.build()
}

#[test]
fn nothing_is_sent_to_a_server_without_a_trusted_certificate() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let (sender, handshakes) = channel();
    let acceptor = identity();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if sender.send(acceptor.accept(stream.unwrap()).is_ok()).is_err() {
                return;
            }
        }
    });
    let cql = "select VDisk from IOstream where Type = 'Q' and IOOp = 'w'";
    let hook = query("hook", cql, &format!("{{ webhook = \"{url}\" }}"));
    let daemon = Daemon::start(&[DISKS, &hook].concat());
    Nbd::connect(&daemon.path("nbd.sock"), "a").write(0, &[1; 512]);
    assert!(!handshakes.recv_timeout(crate::process::PATIENCE).unwrap());
    daemon.until("a failure", || status(&daemon, "hook").failures >= 1);
    let error = status(&daemon, "hook").last_error.unwrap();
    assert!(error.contains("certificate verify failed"), "{error}");
    daemon.end();
}

#[test]
fn commands_change_disks_and_failures_are_reported() {
    let at = |sector: u64, more: &str| {
        format!(
            "select VDisk{more} from IOstream where Type = 'R' and IOOp = 'w' and Sector = {sector}"
        )
    };
    let text = [
        DISKS.to_owned(),
        "[[disk]]\nname = \"a name\"\nmemory = \"1M\"\n".to_owned(),
        query(
            "grow",
            &at(1, ", Size * 2 * 8388608 as wanted"),
            "{ command = \"PATCH /v1/disks/{VDisk}\", body = { capacity = \"{wanted}\" } }",
        ),
        query(
            "shrink",
            &at(2, ""),
            "{ command = \"PATCH /v1/disks/a\", body = { capacity = 512 } }",
        ),
        query("remove", &at(3, ""), "{ command = \"DELETE /v1/disks/{vdisk}?force=true\" }"),
        query(
            "add",
            &at(4, ", 'c' as new, 1048576 as size"),
            "{ command = \"POST /v1/disks\", body = { name = \"{new}\", memory = \"{size}\" } }",
        ),
        query("null", &at(5, ", Path"), "{ command = \"DELETE /v1/disks/{Path}\" }"),
    ];
    let daemon = Daemon::start(&text.concat());
    let client = daemon.client();
    let capacity = |disk: &str| client.disk(disk).map(|disk| disk.capacity_bytes).ok();
    let mut spaced = Nbd::connect(&daemon.path("nbd.sock"), "a name");
    spaced.write(512, &[1; 512]);
    daemon.until("a disk grows", || capacity("a name") == Some(16 << 20));
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    a.write(2 * 512, &[1; 512]);
    daemon.until("a refusal", || status(&daemon, "shrink").failures == 1);
    let shrink = status(&daemon, "shrink");
    assert!(shrink.last_error.unwrap().contains("PATCH /v1/disks/a: the disk \"a\" has 4 MiB"));
    assert_eq!((shrink.acted, shrink.lost, capacity("a")), (0, 1, Some(4 << 20)));
    a.write(4 * 512, &[1; 512]);
    daemon.until("a disk is added", || capacity("c") == Some(1 << 20));
    a.write(5 * 512, &[1; 512]);
    daemon.until("a value is refused", || status(&daemon, "null").failures == 1);
    assert_eq!(status(&daemon, "null").last_error.unwrap(), "Path is null");
    spaced.write(3 * 512, &[1; 512]);
    daemon.until("a disk is removed", || capacity("a name").is_none());
    daemon.until("it is counted", || status(&daemon, "remove").acted == 1);
    assert!(daemon.log().contains("query remove: executed DELETE /v1/disks/a%20name?force=true\n"));
    assert_eq!(client.disks().unwrap().disks.len(), 3);
    daemon.end();
}

#[test]
fn a_reload_adds_changes_and_removes_queries_without_disturbing_others() {
    let held = query(
        "held",
        "select count(*) as n from IOstream [range 1 hour] where Type = 'Q' and IOOp = 'w'",
        "{ metric = \"test_held\", value = \"n\" }",
    );
    let line = |word: &str| {
        let cql = format!("select '{word}' as word from IOstream where Type = 'R' and IOOp = 'w'");
        query("line", &cql, "{ log = \"info\" }")
    };
    let daemon = Daemon::start(DISKS);
    let client = daemon.client();
    for name in ["queries", "events"] {
        assert!(!has_thread(&daemon, name), "no thread runs without a query");
    }
    let reload = |queries: &[&str]| {
        std::fs::write(daemon.path("f.toml"), [&[DISKS], queries].concat().concat()).unwrap();
        let report = client.reload().unwrap();
        assert!(report.refused.is_empty(), "{report:?}");
        report.changed
    };
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    a.write(0, &[1; 512]);
    assert_eq!(reload(&[&held]), ["the query \"held\" was added"]);
    a.write(0, &[1; 512]);
    daemon.until("one is counted", || sample(&daemon, "test_held") == Some(1.0));
    assert_eq!(reload(&[&line("one"), &held]), ["the query \"line\" was added"]);
    a.write(0, &[1; 512]);
    daemon.until("a line", || daemon.log().contains("query line: word=\"one\""));
    assert_eq!(reload(&[&line("two"), &held]), ["the query \"line\" was changed"]);
    a.write(0, &[1; 512]);
    daemon.until("another line", || daemon.log().contains("query line: word=\"two\""));
    assert_eq!(reload(&[&line("two"), &held]), [""; 0]);
    // The window has the events from before the other query was added.
    daemon.until("three are counted", || sample(&daemon, "test_held") == Some(3.0));
    daemon.until("three rows and a group are held", || status(&daemon, "held").held == 4);
    let names = || -> Vec<String> {
        client.queries().unwrap().queries.into_iter().map(|query| query.name).collect()
    };
    assert_eq!(names(), ["line", "held"]);
    assert!(has_thread(&daemon, "queries") && has_thread(&daemon, "events"));

    // An error in the file changes nothing.
    let wrong = query("held", "select\nVDisc from IOstream", "{ log = \"info\" }");
    std::fs::write(daemon.path("f.toml"), [DISKS, &wrong].concat()).unwrap();
    let refused = client.reload().unwrap_err().to_string();
    let line_number = DISKS.lines().count() + 4;
    assert!(refused.contains(&format!("f.toml:{line_number}:1: line 2, column 1 of")), "{refused}");
    assert_eq!(names(), ["line", "held"]);

    assert_eq!(reload(&[&held]), ["the query \"line\" was removed"]);
    a.write(0, &[1; 512]);
    daemon.until("four are counted", || sample(&daemon, "test_held") == Some(4.0));
    assert_eq!(daemon.log().matches("query line:").count(), 2);
    assert_eq!(reload(&[]), ["the query \"held\" was removed"]);
    assert_eq!(sample(&daemon, "test_held"), None);
    for name in ["queries", "events"] {
        daemon.until("no thread is left", || !has_thread(&daemon, name));
    }
    daemon.end();
}

#[test]
fn windows_end_without_events_too() {
    let silent = query(
        "silent",
        "select distinct VDisk from IOstream [range 200 milliseconds]",
        "{ log = \"error\", on = \"delete\" }",
    );
    let daemon = Daemon::start(&[DISKS, &silent].concat());
    Nbd::connect(&daemon.path("nbd.sock"), "b").write(0, &[1; 512]);
    daemon.until("silence", || daemon.log().contains("error   query silent: - VDisk=\"b\"\n"));
    daemon.until("the line is counted", || {
        let silent = status(&daemon, "silent");
        (silent.results_gone, silent.acted) == (1, 1)
    });
    daemon.end();
}

#[test]
fn a_query_over_its_limit_is_ended_and_the_others_continue() {
    let counts = |name: &str| {
        let cql = "select count(*) as n from IOstream [range 1 hour] where Type = 'Q'";
        query(name, cql, &format!("{{ metric = \"test_{name}\", value = \"n\" }}"))
    };
    let bounded = |most: u64| format!("{}held_max = {most}\n", counts("bounded"));
    let daemon = Daemon::start(&[DISKS, &counts("free"), &bounded(100)].concat());
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut write = |times: u64| (0..times).for_each(|_| a.write(0, &[1; 512]));
    // A window of rows, and a group.
    write(99);
    daemon.until("all is counted", || sample(&daemon, "test_bounded") == Some(99.0));
    daemon.until("the rows are counted", || status(&daemon, "bounded").held == 100);
    assert_eq!(status(&daemon, "bounded").state, QueryState::Running);
    write(51);
    daemon.until("the query to end", || status(&daemon, "bounded").last_error.is_some());
    let bounded_status = status(&daemon, "bounded");
    assert_eq!(bounded_status.state, QueryState::Failed);
    let held = bounded_status.held;
    // It is noticed before all rows of a round have been processed.
    assert!((101..=103).contains(&held), "{bounded_status:?}");
    // Its result is no longer known.
    assert_eq!((sample(&daemon, "test_bounded"), bounded_status.series), (None, 0));
    let error = bounded_status.last_error.unwrap();
    let what = format!("{held} rows, groups and values are held, most in the operator `range`");
    assert!(error.starts_with(&what) && error.contains("raise its `held_max`"), "{error}");
    assert_eq!(bounded_status.failures, 1);
    assert_eq!(sample(&daemon, "fathom_query_running{query=\"bounded\"}"), Some(0.0));
    assert_eq!(sample(&daemon, "fathom_query_failures_total{query=\"bounded\"}"), Some(1.0));
    let line = format!("error   query bounded: stopped: {what}");
    assert_eq!(daemon.log().matches(&line).count(), 1, "{}", daemon.log());

    write(50);
    daemon.until("the other query to continue", || sample(&daemon, "test_free") == Some(200.0));
    assert_eq!(status(&daemon, "free").state, QueryState::Running);
    // With a higher limit it starts again, without its earlier state.
    std::fs::write(daemon.path("f.toml"), [DISKS, &counts("free"), &bounded(1000)].concat())
        .unwrap();
    let report = daemon.client().reload().unwrap();
    assert_eq!(report.changed, ["the query \"bounded\" was changed"]);
    write(150);
    daemon.until("it counts again", || sample(&daemon, "test_bounded") == Some(150.0));
    assert_eq!(status(&daemon, "bounded").state, QueryState::Running);
    daemon
        .until("the other query to have all rows", || sample(&daemon, "test_free") == Some(350.0));
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    daemon.end();
}

#[test]
fn a_probable_mistake_in_a_kept_query_is_logged_once() {
    let odd = query("odd", "select VDisk from IOstream where Type = 'X'", "{ log = \"info\" }");
    let sound = query("sound", "select VDisk from IOstream", "{ log = \"info\" }");
    let daemon = Daemon::start(&[DISKS, &odd, &sound].concat());
    let lines = |text: &str| daemon.log().lines().filter(|line| line.contains(text)).count();
    let warning = "warning query odd: line 1, column 34: ";
    assert_eq!(lines(warning), 1, "{}", daemon.log());
    assert_eq!(lines("query sound: "), 0, "{}", daemon.log());
    // The warning of an unchanged query is not repeated.
    let more = query("more", "select VDisk from IOstream", "{ log = \"info\" }");
    std::fs::write(daemon.path("f.toml"), [DISKS, &odd, &sound, &more].concat()).unwrap();
    assert_eq!(daemon.client().reload().unwrap().changed, ["the query \"more\" was added"]);
    assert_eq!(lines(warning), 1, "{}", daemon.log());
    daemon.end();
}

//! A host with a thousand disks whose names and texts are scripts. No daemon accepts such names, so
//! that a server of its own plays one.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::browser::Browser;
use super::{Page, TOKEN, look};

const SCRIPT: &str = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>";
static SAMPLES: AtomicU64 = AtomicU64::new(0);

fn statistics() -> Value {
    let sample = SAMPLES.fetch_add(1, Ordering::Relaxed) + 1;
    let time_ns = sample * 1_000_000_000;
    let disk = |number: u64| {
        let count = sample * number;
        let operation = json!({
            "operation": "read", "count": count, "bytes": count * 4096, "errors": 0,
            "errors_by_kind": {}, "latency_sum_ns": count * 50_000,
            "latency": { "buckets": [[369, count]] }, "sizes": [] });
        let problem = json!({ "kind": "full", "message": SCRIPT, "remedy": SCRIPT,
            "since_unix_time_ns": 1_767_225_600_000_000_000_u64 });
        let problems = if number == 0 { vec![problem] } else { Vec::new() };
        json!({
            "name": format!("{SCRIPT}{number}"), "vm": SCRIPT, "capacity_bytes": 1 << 30, "instance": 1,
            "counted": true, "problems": problems, "in_flight": 0, "refused": 0, "busy_ns": 0,
            "depth_ns": 0, "layers": [], "operations": [operation] })
    };
    let disks: Vec<Value> = (0..1000).map(disk).collect();
    let unix_time_ns = 1_767_225_600_000_000_000 + time_ns;
    json!({ "time_ns": time_ns, "unix_time_ns": unix_time_ns, "disks": disks })
}

fn events() -> Value {
    json!({ "last": 1, "lost": 0, "events": [{ "sequence": 1,
        "unix_time_ns": 1_767_225_600_000_000_000_u64, "level": "error", "disk": SCRIPT,
        "message": SCRIPT, "left_out": 0 }] })
}

fn usage() -> Value {
    let sample = SAMPLES.load(Ordering::Relaxed) + 1;
    let count = json!({ "requests": sample, "bytes": sample * 4096, "latency_sum_ns": sample,
        "latency_max_ns": 1, "latency": { "buckets": [[1, sample]] } });
    json!({ "time_ns": sample * 1_000_000_000, "unix_time_ns": sample, "disks": [{
        "name": "a", "vm": SCRIPT, "instance": 1, "counted": true, "total": { "read": count },
        "unknown": {}, "errors": [0, 0, 0], "folded": {}, "folded_rows": 0, "dropped": 0,
        "dropped_bytes": 0, "rows": [{ "kind": "data", "cgroup": format!("/{SCRIPT}"),
            "process": SCRIPT, "process_id": 1, "file_system": "ext4", "device": SCRIPT, "inode": 7,
            "path": format!("/{SCRIPT}"), "file_size_bytes": 1, "owner": 0, "instance": 1,
            "read": count }] }] })
}

fn answer(stream: UnixStream) {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    let mut line = String::new();
    if reader.read_line(&mut first).is_err() {
        return;
    }
    while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
        line.clear();
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let body = match path.split('?').next().unwrap_or_default() {
        "/v1/statistics" => statistics(),
        "/v1/events" => events(),
        "/v1/usage" => usage(),
        "/v1/guests" => json!({ "time_ns": 1, "unix_time_ns": 1, "guests": [] }),
        _ => json!({ "error": { "code": "not-found", "message": SCRIPT, "remedy": SCRIPT } }),
    };
    let (status, body) =
        if body.get("error").is_some() { ("404 Not Found", body) } else { ("200 OK", body) };
    let body = body.to_string();
    let mut text = String::new();
    let _ = write!(text, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let _ = reader.get_mut().write_all(text.as_bytes());
}

#[test]
fn a_thousand_disks_with_scripts_for_names_are_shown_as_texts() {
    let Some(browser) = Browser::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("control.sock")).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    std::fs::write(folder.path().join("token"), TOKEN).unwrap();
    let arguments =
        ["--listen", "127.0.0.1:0", "--host", "here=control.sock", "--token-file", "token"];
    let page = Page::start(folder.path(), &arguments);
    browser.size(390, 800);
    look(&page, &browser, "disks");
    browser.until("document.querySelectorAll('[aria-label=\"Disks\"] tbody tr').length === 100");
    browser.until(
        "document.querySelector('[aria-label=\"Disks\"] .more')?.textContent === '900 more'",
    );
    browser.until("document.querySelector('ul.problems')?.textContent.includes('<script>')");
    let is_narrow = "document.documentElement.scrollWidth <= 390";
    browser.until(is_narrow);
    browser.picture("phone");
    browser.value("void document.querySelector('[aria-label=\"Disks\"] .more').click()");
    browser.until("document.querySelectorAll('[aria-label=\"Disks\"] tbody tr').length === 400");
    browser.value("void document.querySelector('tbody a').click()");
    browser.until("document.querySelector('.path strong')?.textContent.includes('<script>')");
    browser.until(
        "document.querySelector('canvas.heat')?.getAttribute('aria-label')?.startsWith('Most of')",
    );
    for (view, found) in [
        ("events", "document.querySelector('ul.events li')"),
        ("who?by=file", "document.querySelector('[aria-label=\"Usage\"] tbody')"),
        ("who?by=process", "document.querySelector('[aria-label=\"Usage\"] tbody')"),
        ("guests", "document.querySelector('p.bad')"),
    ] {
        browser.open(&format!("http://{}/#/here/{view}", page.address()));
        let is_text = format!("{found}?.textContent.includes('<script>') === true");
        if view != "guests" {
            browser.until(&is_text);
        }
        browser.until(is_narrow);
        let made = browser.value("document.querySelectorAll('main img, main script').length");
        assert_eq!(made, 0, "{view}");
    }
    assert_eq!(browser.value("window.hacked === undefined"), true);
}

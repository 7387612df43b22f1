//! `fathom top` against a control server.
mod common;

use common::{control_server, run};
use serde_json::Value;

#[test]
fn lines_and_objects_show_the_interval() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = control_server(directory.path());
    let socket = socket.to_str().expect("a path in UTF-8");
    let base = ["top", "--control", socket, "--interval", "50ms"];

    let arguments = [&base[..], &["--count", "2"]].concat();
    let (status, stdout, stderr) = run(directory.path(), &arguments);
    assert_eq!(status, 0, "{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 5, "{stdout}");
    assert!(lines[0].starts_with("TIME") && lines[0].ends_with("HELD    DIRTY"), "{stdout}");
    // The busiest disk comes first: 2000 reads in the second between two samples.
    assert!(lines[1].contains("root") && lines[1].contains(" 2000 "), "{stdout}");
    assert!(lines[2].contains("data") && lines[2].contains(" 1000 "), "{stdout}");

    let arguments = [&base[..], &["--count", "2", "--json", "--filter", "DATA"]].concat();
    let (status, stdout, stderr) = run(directory.path(), &arguments);
    assert_eq!(status, 0, "{stderr}");
    let objects: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    assert_eq!(objects.len(), 2);
    let disk = &objects[0]["disks"][0];
    assert_eq!(
        (disk["name"].as_str(), disk["reads_per_second"].as_f64()),
        (Some("data"), Some(1000.0))
    );
    assert_eq!((disk["depth"].as_f64(), disk["errors"].as_u64()), (Some(0.05), Some(1)));
    assert_eq!(objects[0]["total"]["reads_per_second"].as_f64(), Some(3000.0));
    assert_eq!(disk["operations"][0]["operation"], "read");
}

#[test]
fn without_a_daemon_a_remedy_is_shown() {
    let directory = tempfile::tempdir().expect("a directory");
    for command in [&["top"][..], &["disk", "list"], &["disk", "remove", "a"], &["bench", "a"]] {
        let arguments = [command, &["--control", "none.sock"]].concat();
        let (status, stdout, stderr) = run(directory.path(), &arguments);
        assert_eq!((status, stdout.as_str()), (1, ""), "{command:?}");
        assert!(stderr.contains("none.sock") && stderr.contains("fathom serve"), "{stderr}");
    }
    let (status, _, stderr) = run(directory.path(), &["top", "--interval", "1ns"]);
    assert!(status == 2 && stderr.contains("at least 50ms"), "{stderr}");
}

#[test]
fn a_refusal_is_passed_on_with_its_remedy() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = control_server(directory.path());
    let socket = socket.to_str().expect("a path in UTF-8");
    let (status, _, stderr) = run(directory.path(), &["disk", "list", "--control", socket]);
    assert!(status == 1 && stderr.contains("error: no") && stderr.contains("→ retry"), "{stderr}");
}

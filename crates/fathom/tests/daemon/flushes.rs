//! Flushes of guests: whose QEMU hangs, and whose disks are slow or fail.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use fathom_control::{DiskDefinition, FlushWay};

use crate::nbd::Nbd;
use crate::process::Daemon;

/// More than the daemon lets in at a time.
const GUESTS: usize = 24;

#[test]
fn flushes_that_hang_do_not_keep_disks_from_being_changed() {
    let folder = tempfile::tempdir().unwrap();
    // No QEMU answers.
    let _listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
    let socket = folder.path().join("qmp").display().to_string();
    let mut text = String::new();
    for number in 0..GUESTS {
        let _ = write!(
            text,
            "[[disk]]\nname = \"d{number}\"\nvm = \"vm{number}\"\nmemory = \"1M\"\n\
             [[guest]]\nvm = \"vm{number}\"\nflush = [\"sysrq\"]\nqmp = \"{socket}\"\n"
        );
    }
    let daemon = Daemon::start_in(folder, &text);
    let outcomes: Vec<String> = std::thread::scope(|scope| {
        let flush = |number: usize| {
            let client = daemon.client();
            let vm = format!("vm{number}");
            scope.spawn(move || client.flush_guest(&vm, Some(FlushWay::Sysrq)).unwrap_err())
        };
        let flushes: Vec<_> = (0..GUESTS).map(flush).collect();
        std::thread::sleep(Duration::from_millis(500));
        let definition: DiskDefinition =
            serde_json::from_str(r#"{"name": "new", "memory": "1M"}"#).unwrap();
        daemon.client().add_disk(&definition).unwrap();
        assert!(flushes.iter().any(|flush| !flush.is_finished()), "all flushes have ended");
        flushes.into_iter().map(|flush| flush.join().unwrap().to_string()).collect()
    });
    let refused = outcomes.iter().filter(|text| text.contains("being flushed already")).count();
    assert_eq!(refused, GUESTS - 16, "{outcomes:?}");
    let silent = outcomes.iter().filter(|text| text.contains("does not answer")).count();
    assert_eq!(silent, 16, "{outcomes:?}");
}

/// Answers a client as QEMU's machine protocol does.
fn answer(mut stream: UnixStream) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let _ = stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n");
    while let Some(Ok(_)) = lines.next() {
        if stream.write_all(b"{\"return\": {}}\n").is_err() {
            return;
        }
    }
}

/// A guest's emergency sync waits for nothing: the daemon flushes its disks.
#[test]
fn a_flush_reports_success_when_the_disks_are_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            std::thread::spawn(move || answer(stream));
        }
    });
    let socket = folder.path().join("qmp").display().to_string();
    let mut text = "[[nbd]]\naddress = \"unix:nbd.sock\"\n".to_owned();
    for (vm, name) in [("good", "a"), ("good", "b"), ("bad", "c"), ("bad", "d")] {
        let fails = "layers = [{ kind = \"fault\", operations = [\"flush\"] }]\n";
        let layers = if name == "d" { fails } else { "" };
        let _ =
            write!(text, "[[disk]]\nname = \"{name}\"\nvm = \"{vm}\"\nmemory = \"1M\"\n{layers}");
    }
    for vm in ["good", "bad"] {
        let _ = write!(text, "[[guest]]\nvm = \"{vm}\"\nflush = [\"sysrq\"]\nqmp = \"{socket}\"\n");
    }
    let daemon = Daemon::start_in(folder, &text);
    let flushes = |disk: &str| {
        let statistics = daemon.client().statistics().unwrap();
        let flushes = statistics.disk(disk).unwrap().operation("flush").cloned();
        flushes.map_or(0, |flushes| flushes.count + flushes.errors)
    };
    let flush = |vm: &str, disk: &str| {
        std::thread::scope(|scope| {
            let client = daemon.client();
            let flush = scope.spawn(move || client.flush_guest(vm, Some(FlushWay::Sysrq)));
            // The guest reacts to the keys.
            let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), disk);
            while !flush.is_finished() {
                nbd.write(0, &[1; 4096]);
                std::thread::sleep(Duration::from_millis(1500));
            }
            flush.join().unwrap()
        })
    };
    assert!(flush("good", "a").unwrap().is_complete);
    assert_eq!((flushes("a"), flushes("b"), flushes("c")), (1, 1, 0));
    let error = flush("bad", "c").unwrap_err().to_string();
    assert!(error.contains("the flush of the disk \"d\" failed"), "{error}");
    assert_eq!((flushes("c"), flushes("d")), (1, 1));
}

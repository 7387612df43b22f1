//! Flushes of guests whose QEMU hangs.

use std::fmt::Write as _;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use fathom_control::{DiskDefinition, FlushWay};

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

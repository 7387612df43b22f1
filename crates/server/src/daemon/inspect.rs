//! Looks now and then at what changes the disks' stores from outside, and logs what is found.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::BackendProblem;

use super::Daemon;

/// How often each store is looked at.
const INTERVAL: Duration = Duration::from_secs(5);

/// Begins to look, on a thread of its own, until `daemon` is gone. A file system that hangs holds
/// up this thread alone.
pub(super) fn start(daemon: &Arc<Daemon>) -> std::io::Result<()> {
    let daemon = Arc::downgrade(daemon);
    std::thread::Builder::new().name("inspect".into()).spawn(move || run(&daemon)).map(drop)
}

fn run(daemon: &Weak<Daemon>) {
    let mut known: BTreeSet<(String, &'static str)> = BTreeSet::new();
    while let Some(daemon) = daemon.upgrade() {
        let served = daemon.served();
        drop(daemon);
        let mut found = BTreeSet::new();
        for served in served {
            let (disk, backend) = (served.disk.name(), served.disk.backend());
            backend.inspect();
            for problem in backend.problems() {
                let mark = (disk.to_owned(), problem.name());
                if !known.contains(&mark) && !is_logged_at_once(&problem) {
                    tracing::error!(disk, "{problem}");
                }
                found.insert(mark);
            }
        }
        for (disk, problem) in known.difference(&found) {
            tracing::info!(disk = disk.as_str(), "no longer: {problem}");
        }
        known = found;
        std::thread::sleep(INTERVAL);
    }
}

/// Whether the back end logs the problem itself, where it begins.
fn is_logged_at_once(problem: &BackendProblem) -> bool {
    match problem {
        BackendProblem::WritesLost { .. } | BackendProblem::LossNotRecorded => true,
        BackendProblem::Deleted { .. } | BackendProblem::CutShort { .. } => false,
    }
}

//! A start notices that the folder of changes in use is another one than before.

use std::path::Path;
use std::process::Command;

use fathom_control::{DiskChange, LayerDefinition, ProblemKind};
use serde_json::json;
use tempfile::TempDir;

use crate::live::records;
use crate::process::Daemon;

const CONFIGURATION: &str = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";

/// Changes the disk in a way that lasts.
fn limit(daemon: &Daemon, rate: u64) {
    let layer = LayerDefinition::new("limit", json!({ "total_iops_sec": rate }));
    let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
}

fn kill(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// The problem of the folder after a start.
fn problem(daemon: &Daemon) -> Option<String> {
    let problems = daemon.client().daemon().unwrap().problems;
    let problem = problems.into_iter().find(|it| it.kind == ProblemKind::FolderReplaced)?;
    assert!(problem.remedy.contains("fathom config diff"), "{}", problem.remedy);
    Some(problem.message)
}

fn shell(folder: &Path, script: &str) {
    let status = Command::new("sh").args(["-ec", script]).current_dir(folder).status();
    assert!(status.unwrap().success(), "{script}");
}

#[test]
fn another_folder_of_changes_in_use_is_noticed() {
    // Notes of folders in memory are not written.
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    limit(&daemon, 100);
    let live = records(&daemon.path(""));
    let live = live.file_name().unwrap().to_str().unwrap().to_owned();
    shell(&daemon.path(""), &format!("cp -a {live} old"));
    limit(&daemon, 200);
    shell(&daemon.path(""), &format!("cp -a {live} new"));
    let daemon = Daemon::start_in(kill(daemon), CONFIGURATION);
    assert_eq!(problem(&daemon), None);

    let folder = kill(daemon);
    shell(folder.path(), &format!("rm -r {live} && cp -a old {live}"));
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let text = problem(&daemon).unwrap();
    assert!(text.contains("is an older copy") && text.contains(&live), "{text}");
    // The disk is served, and the right folder is accepted.
    assert!(daemon.client().disk("a").is_ok());
    let folder = kill(daemon);
    shell(folder.path(), &format!("rm -r {live} && cp -a new {live}"));
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    assert_eq!(problem(&daemon), None);

    // Without the folder, the file applies, and a reload accepts that.
    let folder = kill(daemon);
    shell(folder.path(), &format!("rm -r {live}"));
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let text = problem(&daemon).unwrap();
    assert!(text.contains("is gone"), "{text}");
    daemon.client().reload().unwrap();
    assert_eq!(problem(&daemon), None);
    let daemon = Daemon::start_in(kill(daemon), CONFIGURATION);
    assert_eq!(problem(&daemon), None);

    // A new folder gets another identity; then the earlier one comes back.
    limit(&daemon, 300);
    let folder = kill(daemon);
    shell(folder.path(), &format!("rm -r {live} && cp -a new {live}"));
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let text = problem(&daemon).unwrap();
    assert!(text.contains("is not the one"), "{text}");
    // The next change accepts it.
    limit(&daemon, 400);
    assert_eq!(problem(&daemon), None);
    let daemon = Daemon::start_in(kill(daemon), CONFIGURATION);
    assert_eq!(problem(&daemon), None);
    daemon.end();
}

//! Snapshots by rule.

use std::collections::BTreeSet;

use fathom_control::{PoolChange, ProblemKind};

use crate::nbd::Nbd;
use crate::process::Daemon;
use crate::store::{entry, prepared, run};

const DISKS: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
    [[disk]]\nname = \"a\"\nstore = \"pool\"\nvolume = \"one\"\n\
    [[disk]]\nname = \"b\"\nstore = \"pool\"\nvolume = \"two\"\n";

fn rule(name: &str, more: &str) -> String {
    format!("[[snapshots]]\nname = \"{name}\"\nstore = \"pool\"\nevery = \"1s\"\n{more}\n")
}

/// The names of the snapshots of each volume.
fn names(daemon: &Daemon) -> Vec<Vec<String>> {
    let of = |volume: fathom_control::VolumeEntry| {
        volume.snapshots.into_iter().map(|snapshot| snapshot.name).collect()
    };
    entry(daemon).volumes.into_iter().map(of).collect()
}

/// Waits until the rule has taken `count` snapshots from now on. Returns all their names.
fn wait_for(daemon: &Daemon, rule: &str, count: usize) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let known: BTreeSet<String> = names(daemon).remove(0).into_iter().collect();
    daemon.until("snapshots by rule", || {
        let all = names(daemon).remove(0);
        let new = all.into_iter().filter(|name| name.starts_with(rule) && !known.contains(name));
        found.extend(new);
        found.len() >= count
    });
    found
}

#[test]
fn a_rule_keeps_its_last_snapshots_and_those_that_are_held_or_served() {
    let rules = rule("two.lines", "volumes = [\"one\", \"two\"]\nkeep_last = 3")
        + &rule("two", "volumes = [\"one\"]\nkeep_last = 1\nkeep_yearly = 1\nfreeze = \"try\"");
    let daemon = Daemon::start_in(prepared(), &format!("{DISKS}{rules}"));
    let folder = daemon.path("");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[7; 4096]);
    run(&folder, &["snapshot", "create", "a", "--name", "mine"]).unwrap();
    let reserved = ["snapshot", "create", "a", "--name", "auto.two.lines.20261129T120000Z"];
    assert!(run(&folder, &reserved).unwrap_err().contains("those of rules"));
    let first = wait_for(&daemon, "auto.two.lines.", 1).pop_first().unwrap();
    let held = wait_for(&daemon, "auto.two.lines.", 1).pop_first().unwrap();
    run(&folder, &["snapshot", "hold", "a", &held, "--reason", "a test"]).unwrap();
    let served = wait_for(&daemon, "auto.two.lines.", 1).pop_first().unwrap();
    let add = ["disk", "add", "s", "--store", "pool", "--volume", &format!("one@{served}")];
    run(&folder, &add).unwrap();
    nbd.write(0, &[8; 4096]);
    wait_for(&daemon, "auto.two.lines.", 6);
    wait_for(&daemon, "auto.two.2", 2);
    let all = names(&daemon);
    let of =
        |volume: usize, rule: &str| all[volume].iter().filter(|it| it.starts_with(rule)).count();
    assert!(!all[0].contains(&first) && !all[1].contains(&held), "{all:?}");
    for name in ["mine", &held, &served] {
        assert!(all[0].iter().any(|it| it == name), "{name} is not there: {all:?}");
    }
    // One more for a moment, while the rule is carried out.
    assert!((5..=6).contains(&of(0, "auto.two.lines.")), "{all:?}");
    assert!((3..=4).contains(&of(1, "auto.two.lines.")), "{all:?}");
    assert!((1..=2).contains(&of(0, "auto.two.2")), "{all:?}");
    let shared = all[1].iter().filter(|name| all[0].contains(name)).count();
    assert!(shared + 1 >= all[1].len(), "the volumes have snapshots of one instant: {all:?}");
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "s").read(0, 4096), [7; 4096]);
    let refused = run(&folder, &["snapshot", "delete", "a", &held]).unwrap_err();
    assert!(refused.contains("is held"), "{refused}");
    // The next daemon knows the snapshots of this one.
    drop(nbd);
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, &format!("{DISKS}{rules}"));
    run(&folder, &["snapshot", "release", "a", &held]).unwrap();
    run(&folder, &["disk", "remove", "s"]).unwrap();
    daemon.until("what is neither held nor served is deleted", || {
        let all = names(&daemon);
        ![&held, &served].iter().any(|name| all[0].contains(name))
    });
    // Without its rule, nothing is taken or deleted. Changes of the pool come one after the other.
    std::fs::write(daemon.path("f.toml"), DISKS).unwrap();
    daemon.client().reload().unwrap();
    let path = daemon.path("pool");
    let hold = |name: &str| PoolChange::Hold {
        volume: "one".into(),
        name: name.into(),
        reason: "a".into(),
    };
    daemon.until("the rules have ended", || {
        let before = names(&daemon);
        daemon.client().change_pool(&path, hold("mine")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2500));
        before == names(&daemon)
    });
    let left = names(&daemon);
    assert!(left[0].len() >= 5, "its snapshots stay: {left:?}");
    daemon.end();
}

#[test]
fn a_rule_that_fails_is_a_problem_until_it_succeeds() {
    let rules = rule("good", "volumes = [\"one\"]\nkeep_last = 2")
        + &rule("bad", "volumes = [\"two\", \"three\"]\nkeep_last = 1");
    let daemon = Daemon::start_in(prepared(), &format!("{DISKS}{rules}"));
    let failed = || {
        let info = daemon.client().daemon().unwrap();
        let failed = info.problems.into_iter().filter(|it| it.kind == ProblemKind::SnapshotFailed);
        failed.map(|problem| (problem.cause, problem.message)).collect::<Vec<_>>()
    };
    daemon.until("the rule fails", || !failed().is_empty());
    let found = failed();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == "bad" && found[0].1.contains("no such volume"), "{found:?}");
    assert!(names(&daemon)[1].is_empty(), "all volumes or none");
    wait_for(&daemon, "auto.good.", 1);
    run(&daemon.path(""), &["store", "new", "pool", "three", "4M"]).unwrap();
    daemon.until("the rule succeeds", || failed().is_empty());
    assert_eq!(names(&daemon)[1].len(), 1);
    daemon.end();
}

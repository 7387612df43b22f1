//! A network namespace of the test, in which it takes the network down and up.

use std::process::Command;
use std::time::Duration;

use fathom_monitor::link::unix_time_ns;

use super::support::*;

/// The variable that marks a run of this program inside of the namespace.
const INSIDE: &str = "FATHOM_TEST_NETWORK";
const NAME: &str = "network::a_network_that_is_down_for_a_while_loses_nothing";

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().unwrap();
    assert!(status.success(), "ip {arguments:?}");
}

/// Whether this run is inside of the namespace. If not, runs the test again inside of one, if that
/// is possible.
fn is_inside() -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let possible = Command::new("unshare").args(["-rn", "ip", "link", "show", "lo"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there are no network namespaces here");
        return false;
    }
    let program = std::env::current_exe().unwrap();
    let mut inside = Command::new("unshare");
    inside.arg("-rn").arg(program).args(["--exact", NAME, "--nocapture"]).env(INSIDE, "1");
    let output = inside.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    false
}

#[test]
fn a_network_that_is_down_for_a_while_loses_nothing() {
    if !is_inside() {
        return;
    }
    ip(&["link", "set", "lo", "up"]);
    let text = "select VDisk, ReqId, BlktapTS from IOstream;
                select VDisk, count(*) from IOstream [range 50 milliseconds] group by VDisk";
    let mut centre = centre(text, |options| options.patience = Duration::from_secs(90));
    let address = centre.address().to_string();
    let base = unix_time_ns() - 20 * SECOND;
    let (mut hosts, mut all) = (Vec::new(), Vec::new());
    for number in 0..2 {
        let feed = Feed::default();
        let host = host(&feed, plain(&format!("host-{number}"), &address), 0);
        hosts.push((host, feed));
        all.push(events(number, base, 2000));
    }
    let mut collected = Collected::default();
    run_until_running(&mut centre, &mut collected, hosts.len());
    run_until(&mut centre, &mut collected, |_| hosts.iter().all(|(_, feed)| feed.is_wanted()));
    let watch = centre.watch();
    let rows = || watch.status().hosts.iter().map(|host| host.rows).sum::<u64>();
    for step in 0..4 {
        let before = rows();
        if step % 2 == 1 {
            ip(&["link", "set", "lo", "down"]);
        }
        for ((_, feed), events) in hosts.iter().zip(&all) {
            feed.give_events(&events[step * 500..(step + 1) * 500], 0);
        }
        if step % 2 == 1 {
            // The hosts continue, and their frames wait.
            run_until(&mut centre, &mut collected, |_| {
                hosts
                    .iter()
                    .all(|(host, feed)| feed.is_empty() && host.status().waiting_bytes > 1000)
            });
            assert_eq!(rows(), before);
            ip(&["link", "set", "lo", "up"]);
        }
        // Each query has a fragment that sends a row for each event.
        let expected = before + 2 * 1000;
        run_until(&mut centre, &mut collected, |_| rows() >= expected);
    }
    let last = base + 2001 * 1_000_000;
    for (_, feed) in &hosts {
        feed.give(Part::Watermark(last));
    }
    run_to(&mut centre, &mut collected, last);
    let expected = expected(text, all.concat());
    let to = expected.keys().map(|(_, time_ns, _)| *time_ns).max().unwrap();
    assert!(collected.to(to) == expected, "the results differ");
    for host in watch.status().hosts {
        assert_eq!((host.late, host.dropped_rows), (0, 0));
    }
}

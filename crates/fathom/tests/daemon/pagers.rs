//! What pagers report, as the daemon shows it. The pager is the test: it has the real table of
//! leases, and stores figures in it.

use std::fs::File;
use std::path::Path;

use fathom_control::{GuestPager, GuestPagerHold, GuestPagerState, ProblemKind};
use fathom_guest_memory::{
    EvictionHold, LEASE_FOLDER, MemoryFile, PagerFigures, PagerLeases, PagerPhase, TableOwner,
    published_now_ns,
};

use crate::alerts;
use crate::process::{Daemon, command};
use crate::vmm::{Client, MEMORY, memfd};

const S: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
/// The process of a VMM that there is not.
const PROCESS: u32 = 4_194_000;

/// A machine with two disks, its neighbour with one, and a disk that no machine uses.
pub fn configuration() -> String {
    let disk = |name: &str, vm: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nvm = \"{vm}\"\nmemory = \"1M\"\n\
             [disk.vhost_user]\nsocket = \"{name}.sock\"\n"
        )
    };
    let idle = "[[disk]]\nname = \"idle\"\nmemory = \"1M\"\n";
    format!("{}{}{}{idle}", disk("root", "web"), disk("data", "web"), disk("other", "mail"))
}

/// The table of leases of a machine.
pub struct Table(Option<PagerLeases>);

impl Table {
    /// `None` if this user cannot make it.
    pub fn make(memory: &File) -> Option<Self> {
        let identity = MemoryFile::of(memory).unwrap();
        let owner = TableOwner { process: PROCESS, start_ticks: 0, namespace: 0 };
        match PagerLeases::start(Path::new(LEASE_FOLDER), identity, MEMORY / 4096, owner) {
            Ok(leases) => Some(Self(Some(leases))),
            Err(error) => {
                println!("Skipped: {LEASE_FOLDER}: {error}");
                None
            }
        }
    }

    pub fn publish(&self, figures: &PagerFigures) {
        self.0.as_ref().unwrap().publish(figures);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.0.take().unwrap().put_aside();
        PagerLeases::remove_ended(Path::new(LEASE_FOLDER), |_| false);
    }
}

/// The figures of a pager at work.
pub fn at_work() -> PagerFigures {
    PagerFigures {
        process: 4_194_001,
        published_ns: published_now_ns(),
        phase: PagerPhase::Attached,
        held_since_ns: published_now_ns().saturating_sub(60 * S),
        limit_bytes: 5 * MIB,
        resident_bytes: 4 * MIB,
        away_bytes: 3 * MIB,
        filled_bytes: MIB,
        store_bytes: 768 << 10,
        evicted: 2000,
        brought: 1232,
        wanted: 40,
        existing: 8,
        overwritten: 17,
        faults: 1500,
        away_faults: 1100,
        fault_sum_ns: 22 * S / 1000,
        fault_p99_ns: 54_000,
        ..PagerFigures::default()
    }
}

/// The VMM of the disks `names`, with one memory.
pub fn connect(daemon: &Daemon, names: &[&str], memory: &File) -> Vec<Client> {
    let connect = |name: &&str| {
        let socket = daemon.path(&format!("{name}.sock"));
        let mut client = Client::connect_with(&socket, 1, 0, memory.try_clone().unwrap());
        client.start_queue(0, 0);
        client
    };
    names.iter().map(connect).collect()
}

/// The pager of the machine `web`.
fn pager(daemon: &Daemon) -> Option<GuestPager> {
    let report = daemon.client().pager(Some("data")).unwrap();
    assert_eq!((report.guests.len(), report.guests[0].vm.as_str()), (1, "web"));
    assert_eq!(report.guests[0].disks, ["data", "root"]);
    report.guests[0].pager.clone()
}

fn kinds(daemon: &Daemon) -> Vec<ProblemKind> {
    let problems = daemon.client().daemon().unwrap().problems;
    assert!(problems.iter().all(|problem| problem.cause == "web"), "{problems:?}");
    problems.into_iter().map(|problem| problem.kind).collect()
}

/// The value of a metric of the machine.
fn metric(page: &str, name: &str) -> Option<f64> {
    let sample = format!("fathom_pager_{name}{{vm=\"web\",process=\"{PROCESS}\"}} ");
    let mut found = page.lines().filter_map(|line| line.strip_prefix(&sample));
    let value = found.next().map(|value| value.parse().unwrap());
    assert_eq!(found.next(), None, "{name} is there twice");
    value
}

fn check_at_work(daemon: &Daemon) {
    let found = pager(daemon).expect("a pager");
    assert_eq!((found.process, found.pager), (PROCESS, 4_194_001));
    assert_eq!((found.state, found.hold), (GuestPagerState::Attached, GuestPagerHold::None));
    assert!(found.age_ns < 30 * S && found.held_ns >= 60 * S, "{found:?}");
    let bytes = (found.limit_bytes, found.resident_bytes, found.away_bytes, found.filled_bytes);
    assert_eq!(bytes, (5 * MIB, 4 * MIB, 3 * MIB, MIB));
    assert_eq!((found.evicted_pages, found.brought_pages, found.wanted_pages), (2000, 1232, 40));
    assert_eq!((found.faults, found.away_faults, found.fault_p99_ns), (1500, 1100, 54_000));
    assert_eq!(kinds(daemon), []);
    let page = daemon.client().metrics().unwrap();
    for (name, value) in [
        ("away_bytes", 3.0 * MIB as f64),
        ("store_bytes", 786_432.0),
        ("evicted_pages_total", 2000.0),
        ("away_fault_seconds_total", 0.022),
        ("away_fault_p99_seconds", 0.000_054),
        ("overwritten_pages_total", 17.0),
        ("damaged_pages", 0.0),
        ("held", 0.0),
    ] {
        assert_eq!(metric(&page, name), Some(value), "{name}\n{page}");
    }
    let states = page.lines().filter(|line| line.starts_with("fathom_pager_state{"));
    let current = format!("{{vm=\"web\",process=\"{PROCESS}\",state=\"attached\"}} 1");
    assert!(states.clone().count() == 5 && states.clone().any(|line| line.ends_with(&current)));
    alerts::check_metrics(&page);
}

#[test]
fn what_a_pager_reports_is_shown_and_outlives_the_daemon() {
    let memory = memfd(MEMORY);
    let daemon = Daemon::start(&configuration());
    let clients = connect(&daemon, &["root", "data"], &memory);
    let _neighbour = connect(&daemon, &["other"], &memfd(MEMORY));
    daemon.until("the guests run", || daemon.client().pager(None).unwrap().guests.len() == 2);
    assert_eq!(pager(&daemon), None);
    assert!(!daemon.client().metrics().unwrap().contains("fathom_pager_"));
    let Some(table) = Table::make(&memory) else { return };
    assert_eq!(pager(&daemon), None, "it has said nothing yet");
    table.publish(&at_work());
    check_at_work(&daemon);
    // The daemon has its place in the table now, which changes nothing of the figures.
    assert_eq!(daemon.client().renew_leases().unwrap().leased, 2);
    check_at_work(&daemon);
    let report = daemon.client().guest_pagers().unwrap();
    assert_eq!((report.guests.len(), report.guests[0].resident_bytes), (1, None));
    assert!(report.guests[0].pager.is_some(), "and its neighbour has none");
    let output = |arguments: &[&str]| {
        let socket = daemon.path("control.sock");
        let mut command = command(&daemon.path(""));
        let output = command.args(arguments).arg("--control").arg(socket).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let text = output(&["pager"]);
    let line = "web: its pager: attached, a limit of 5 MiB: 4 MiB in memory, 3 MiB away in 768 KiB";
    assert!(text.contains(line) && text.contains("AWAY"), "{text}");
    let text = output(&["top", "--plain", "--count", "1"]);
    let ends = text.lines().filter(|line| line.ends_with(" 3.00M")).count();
    assert!(text.contains("    AWAY") && ends == 2, "{text}");
    let text = output(&["doctor", "."]);
    assert!(text.contains("pager of web") && text.contains("3 MiB away"), "{text}");

    // The next daemon finds the same.
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    drop(clients);
    let daemon = Daemon::start_in(folder, &configuration());
    let clients = connect(&daemon, &["root", "data"], &memory);
    daemon.until("the guest runs", || daemon.client().pager(None).unwrap().guests.len() == 1);
    check_at_work(&daemon);

    // A pager that detaches says so, and its last figures are not those of now.
    table.publish(&PagerFigures {
        phase: PagerPhase::Detached,
        away_bytes: 0,
        damaged: 3,
        published_ns: 0,
        ..at_work()
    });
    let found = pager(&daemon).unwrap();
    assert_eq!((found.state, found.away_bytes), (GuestPagerState::Detached, 0));
    let page = daemon.client().metrics().unwrap();
    let current = format!("{{vm=\"web\",process=\"{PROCESS}\",state=\"detached\"}} 1");
    assert!(page.contains(&current) && metric(&page, "away_bytes").is_none(), "{page}");
    assert_eq!(kinds(&daemon), []);
    table.publish(&at_work());
    check_at_work(&daemon);
    // A machine that has ended is not shown.
    drop(clients);
    daemon.until("the guest has gone", || daemon.client().pager(None).unwrap().guests.is_empty());
    assert!(!daemon.client().metrics().unwrap().contains("fathom_pager_"));
    drop(table);
    daemon.end();
}

#[test]
fn a_pager_that_is_silent_and_pages_that_are_lost_are_problems() {
    let memory = memfd(MEMORY);
    let Some(table) = Table::make(&memory) else { return };
    let daemon = Daemon::start(&configuration());
    let _clients = connect(&daemon, &["root", "data"], &memory);
    table.publish(&at_work());
    daemon.until("the guest runs", || !daemon.client().pager(None).unwrap().guests.is_empty());
    check_at_work(&daemon);
    let silent =
        PagerFigures { published_ns: published_now_ns().saturating_sub(45 * S), ..at_work() };
    table.publish(&silent);
    let found = pager(&daemon).unwrap();
    assert_eq!((found.state, found.away_bytes), (GuestPagerState::Silent, 3 * MIB));
    assert_eq!(kinds(&daemon), [ProblemKind::PagerSilent]);
    let problem = daemon.client().daemon().unwrap().problems.remove(0);
    let text = "the pager of guest web has not reported for ";
    assert!(problem.message.starts_with(text) && problem.message.contains("3 MiB"), "{problem:?}");
    assert!(problem.remedy.contains(&format!("fathom pager adopt {PROCESS}")), "{problem:?}");
    let page = daemon.client().metrics().unwrap();
    assert!(page.contains("fathom_problem{kind=\"pager-silent\",cause=\"web\"} 1"), "{page}");
    assert_eq!(metric(&page, "away_bytes"), Some(3.0 * MIB as f64));

    // The next pager reports again, and the problem ends.
    table.publish(&at_work());
    assert_eq!(kinds(&daemon), []);
    let log = daemon.log();
    assert!(log.contains("problem ended: pager-silent (web)"), "{log}");
    let retreat =
        PagerFigures { hold: EvictionHold::Retreat, resident_bytes: 6 * MIB, ..at_work() };
    table.publish(&PagerFigures { damaged: 1, existing: 65, ..retreat });
    let expected = [ProblemKind::PagerDamaged, ProblemKind::PagerExisting, ProblemKind::PagerLimit];
    assert_eq!(kinds(&daemon), expected);
    assert_eq!(metric(&daemon.client().metrics().unwrap(), "held"), Some(1.0));

    // Whatever is in the table, the daemon answers.
    let hostile = PagerFigures {
        process: u32::MAX,
        published_ns: u64::MAX,
        held_since_ns: u64::MAX,
        limit_bytes: u64::MAX,
        resident_bytes: u64::MAX,
        away_bytes: u64::MAX,
        damaged: u64::MAX,
        existing: u64::MAX,
        fault_sum_ns: u64::MAX,
        fault_p99_ns: u64::MAX,
        phase: PagerPhase::Unknown,
        hold: EvictionHold::Unknown,
        ..at_work()
    };
    table.publish(&hostile);
    let found = pager(&daemon).unwrap();
    assert_eq!((found.state, found.away_bytes), (GuestPagerState::Unknown, u64::MAX));
    assert_eq!(kinds(&daemon), [ProblemKind::PagerDamaged, ProblemKind::PagerExisting]);
    alerts::check_metrics(&daemon.client().metrics().unwrap());
    drop(table);
    assert_eq!(pager(&daemon), None);
    assert_eq!(kinds(&daemon), []);
    daemon.end();
}

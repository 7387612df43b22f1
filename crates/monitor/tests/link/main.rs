//! Hosts and a centre over real sockets: the centre's results are those of a single engine.

mod hostile;
mod network;
mod streams;
mod support;

use std::time::{Duration, Instant};

use fathom_cql::Value;
use fathom_monitor::QueryError;
use fathom_monitor::link::{
    Centre, CentreOptions, HostOptions, HostState, LinkState, unix_time_ns,
};
use support::*;

/// Filters, windows by time and of rows, a join, and a stream of a relation's insertions.
const QUERIES: &str = "
    select BlktapTS, VDisk, Size from IOstream where Type = 'Q' and Size >= 8;
    select VDisk, count(*) as requests, sum(Size) as sectors, max(Size) as most
        from IOstream [range 100 milliseconds slide 20 milliseconds] where IOOp <> 'f'
        group by VDisk;
    select r.VDisk, r.ReqId, r.BlktapTS - q.BlktapTS as ns
        from IOstream [range 1 second] as q, IOstream [now] as r
        where q.Type = 'Q' and r.Type = 'R' and q.VDisk = r.VDisk and q.ReqId = r.ReqId;
    select avg(Size) as mean from IOstream [rows 20];
    Istream(select distinct VDisk from IOstream [range 5 milliseconds])";

#[test]
fn many_hosts_give_the_results_of_one_engine() {
    let authority = Authority::new();
    let mut centre = centre(QUERIES, |options| {
        options.tls = Some(authority.centre());
        options.patience = Duration::from_secs(90);
    });
    let address = centre.address().to_string();
    let base = unix_time_ns() - 20 * SECOND;
    let names = ["alpha", "beta", "gamma"];
    let (mut all, mut hosts) = (Vec::new(), Vec::new());
    for (number, name) in names.into_iter().enumerate() {
        let (feed, events) = (Feed::default(), events(number, base, 3000));
        hosts.push((host(&feed, authority.host(name, &address), 0), feed.clone()));
        all.push((feed, events));
    }
    let mut collected = Collected::default();
    let watch = centre.watch();
    // Time begins when all hosts are running.
    run_until_running(&mut centre, &mut collected, names.len());
    let last = base + 3001 * 1_000_000;
    for (feed, events) in &all {
        feed.give_events(events, 0);
        feed.give(Part::Dropped(7));
        feed.give(Part::Watermark(last));
    }
    run_to(&mut centre, &mut collected, last);
    let all: Vec<Event> = all.into_iter().flat_map(|(_, events)| events).collect();
    let expected = expected(QUERIES, all);
    let to = expected.keys().map(|(_, time_ns, _)| *time_ns).max().unwrap();
    assert!(expected.len() > 5000);
    assert!(collected.to(to) == expected, "the results differ");
    // Both sides have the correct status.
    let status = watch.status();
    for ((host, _), name) in hosts.iter_mut().zip(names) {
        let known = of(&status, name);
        assert_eq!((known.state, known.late, known.connections), (HostState::Running, 0, 1));
        assert_eq!((known.dropped_events, known.dropped_rows), (7, 0));
        assert!(known.rows >= 3000 && known.bytes > 1000 && known.events == 3000, "{known:?}");
        assert!(known.clock.unwrap().round_trip_ns > 0 && known.correction_ns == 0);
        let link = host.status();
        assert_eq!((link.state, link.events, link.dropped_events), (LinkState::Running, 3000, 7));
        host.stop(Duration::from_secs(5));
    }
    run_until(&mut centre, &mut collected, |_| {
        watch.status().hosts.iter().all(|host| host.state == HostState::Away)
    });
    let known = of(&watch.status(), "alpha");
    assert_eq!(known.problem.as_deref(), Some("the host ends"));
    assert!(hosts.iter().all(|(_, feed)| !feed.is_wanted()));
}

/// The last frames of a host are received, even if the centre is sending at that moment.
#[test]
fn last_frames_are_received() {
    let authority = Authority::new();
    let mut centre = centre("select BlktapTS from IOstream", |options| {
        options.tls = Some(authority.centre());
    });
    let address = centre.address().to_string();
    let (watch, mut collected) = (centre.watch(), Collected::default());
    for round in 0..40 {
        let feed = Feed::default();
        let mut host = host(&feed, authority.host("alpha", &address), 0);
        run_until(&mut centre, &mut collected, |_| feed.is_wanted());
        let now_ns = unix_time_ns();
        // One watermark per event, so that the centre has frames to acknowledge all the time.
        for number in 0..200 {
            feed.give_events(&events(0, now_ns + number * 1000, 1), 0);
            feed.give(Part::Watermark(now_ns + number * 1000 + 1));
        }
        std::thread::sleep(Duration::from_millis(round % 8));
        host.stop(Duration::from_secs(5));
        run_until(&mut centre, &mut collected, |_| {
            of(&watch.status(), "alpha").state == HostState::Away
        });
        let known = of(&watch.status(), "alpha");
        assert_eq!(known.problem.as_deref(), Some("the host ends"), "round {round}");
        assert_eq!(known.rows, (round + 1) * 200);
    }
}

/// No frame that fits into the buffer is lost or repeated, wherever the connection is cut.
#[test]
fn cuts_lose_nothing_that_fits() {
    let mut centre = centre(QUERIES, |options| options.patience = Duration::from_secs(90));
    let wire = Wire::to(centre.address().to_string());
    let base = unix_time_ns() - 20 * SECOND;
    let feed = Feed::default();
    let host = host(&feed, plain("alpha", &wire.address), 0);
    let (events, last) = (events(0, base, 6000), base + 6001 * 1_000_000);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| feed.is_wanted());
    let mut cuts = 0;
    for part in events.chunks(600) {
        let before = wire.passed();
        feed.give_events(part, 0);
        // Cuts the connection in the middle of the frames.
        run_until(&mut centre, &mut collected, |_| wire.passed() > before + 700);
        wire.cut();
        cuts += 1;
    }
    feed.give(Part::Watermark(last));
    run_to(&mut centre, &mut collected, last);
    let expected = expected(QUERIES, events);
    let to = expected.keys().map(|(_, time_ns, _)| *time_ns).max().unwrap();
    assert!(collected.to(to) == expected, "the results differ after {cuts} cuts");
    let known = of(&centre.watch().status(), "alpha");
    assert_eq!((known.late, known.dropped_rows, known.dropped_events), (0, 0, 0));
    assert!(known.connections > 5 && host.status().connections > 5, "{known:?}");
}

#[test]
fn a_host_that_has_disappeared_is_not_waited_for_and_may_return() {
    let text = "select VMName, VDisk, BlktapTS from IOstream; select Type, ReqId from IOstream";
    let mut centre = centre(text, |options| options.patience = Duration::from_millis(300));
    let address = centre.address().to_string();
    let wire = Wire::to(address.clone());
    let (stays, leaves) = (Feed::default(), Feed::default());
    let _stays = host(&stays, plain("stays", &address), 0);
    let killed = host(&leaves, plain("leaves", &wire.address), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| stays.is_wanted() && leaves.is_wanted());
    let watch = centre.watch();
    let now = |feed: &Feed, host: usize| {
        let now_ns = unix_time_ns();
        feed.give_events(&events(host, now_ns, 1), 0);
        feed.give(Part::Watermark(now_ns + 1000));
        now_ns
    };
    // The host is killed: its connection ends without a frame.
    let last = now(&leaves, 1);
    run_until(&mut centre, &mut collected, |_| of(&watch.status(), "leaves").rows > 0);
    wire.close();
    drop(killed);
    run_until(&mut centre, &mut collected, |_| {
        of(&watch.status(), "leaves").state == HostState::Away
    });
    // Time advances with the other host alone.
    run_until(&mut centre, &mut collected, |watermark_ns| {
        now(&stays, 0);
        watermark_ns > last + SECOND
    });
    assert_eq!(of(&watch.status(), "stays").late, 0);
    // The host returns as a new process.
    let leaves = Feed::default();
    let back = host(&leaves, plain("leaves", &address), 0);
    run_until(&mut centre, &mut collected, |_| leaves.is_wanted());
    let rows = of(&watch.status(), "leaves").rows;
    run_until(&mut centre, &mut collected, |_| {
        now(&stays, 0);
        now(&leaves, 1);
        let known = of(&watch.status(), "leaves");
        known.rows > rows + 20 && known.state == HostState::Running
    });
    let known = of(&watch.status(), "leaves");
    assert_eq!((known.connections, known.problem), (2, None));
    assert_eq!(back.status().connections, 1);
}

#[test]
fn a_blocked_connection_drops_rows_of_its_host_only_and_counts_them() {
    let text = "select VDisk, ReqId, BlktapTS from IOstream";
    let mut centre = centre(text, |options| options.patience = Duration::from_secs(1));
    let address = centre.address().to_string();
    let wire = Wire::to(address.clone());
    let (good, stuck) = (Feed::default(), Feed::default());
    let _good = host(&good, plain("good", &address), 0);
    let small = HostOptions { buffer_max: 64 << 10, ..plain("stuck", &wire.address) };
    let slow = host(&stuck, small, 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| good.is_wanted() && stuck.is_wanted());
    wire.hold(true);
    let (mut given, mut others, watch) = (0, 0, centre.watch());
    run_until(&mut centre, &mut collected, |_| {
        if stuck.is_empty() {
            stuck.give_events(&events(1, unix_time_ns(), 1000), 0);
            given += 1000;
        }
        good.give_events(&events(0, unix_time_ns(), 1), 0);
        others += 1;
        let link = slow.status();
        assert!(link.waiting_bytes < 256 << 10, "{link:?}");
        link.dropped_rows > 20_000 && of(&watch.status(), "good").late == 0
    });
    wire.hold(false);
    // After the last report, all rows have been received or counted.
    stuck.give(Part::Watermark(unix_time_ns()));
    run_until(&mut centre, &mut collected, |_| {
        let known = of(&watch.status(), "stuck");
        known.events == given && known.rows + known.dropped_rows == given
    });
    let known = of(&watch.status(), "stuck");
    assert_eq!(known.dropped_rows, slow.status().dropped_rows);
    good.give(Part::Watermark(unix_time_ns()));
    run_until(&mut centre, &mut collected, |_| of(&watch.status(), "good").rows == others);
    assert_eq!(of(&watch.status(), "good").late, 0);
}

#[test]
fn clocks_that_are_minutes_off_are_corrected() {
    let text = "select VDisk, ReqId, Type from IOstream";
    let mut centre = centre(text, |options| options.patience = Duration::from_secs(90));
    let address = centre.address().to_string();
    let base = unix_time_ns() - 20 * SECOND;
    let skews = [0, 180 * SECOND, -600 * SECOND];
    let (mut hosts, mut feeds) = (Vec::new(), Vec::new());
    for (number, skew) in skews.into_iter().enumerate() {
        let feed = Feed::default();
        hosts.push(host(&feed, plain(&format!("host-{number}"), &address), skew));
        feeds.push(feed);
    }
    let mut collected = Collected::default();
    run_until_running(&mut centre, &mut collected, feeds.len());
    run_until(&mut centre, &mut collected, |_| feeds.iter().all(Feed::is_wanted));
    let last = base + 501 * 1_000_000;
    for (number, (feed, skew)) in feeds.iter().zip(skews).enumerate() {
        feed.give_events(&events(number, base, 500), skew);
        feed.give(Part::Watermark(last + SECOND + skew));
    }
    run_to(&mut centre, &mut collected, last + SECOND / 2);
    let status = centre.watch().status();
    for (number, skew) in skews.into_iter().enumerate() {
        let known = of(&status, &format!("host-{number}"));
        let clock = known.clock.unwrap();
        let wrong_by = (known.correction_ns + skew).abs();
        assert!(wrong_by <= clock.uncertainty_ns() + SECOND / 100, "{known:?}");
        assert_eq!((known.late, known.rows), (0, 500), "{known:?}");
        assert_eq!(hosts[number].status().correction_ns, known.correction_ns);
        for disk in 0..3 {
            let disk = Value::text(&format!("disk-{number}-{disk}"));
            assert!(collected.rows(0, &disk) > 100);
        }
    }
    // Rows have instants of the centre's clock.
    let off = collected
        .0
        .keys()
        .filter(|(_, time_ns, _)| *time_ns < base - SECOND || *time_ns > last + SECOND);
    assert_eq!(off.count(), 0);
}

/// A connection with different delays in both directions: the clock's error is within the reported
/// uncertainty, and the centre waits for the slow host.
#[test]
fn the_centre_waits_for_a_slow_connection() {
    let text = "select VDisk, count(*) as n from IOstream [range 1 second] group by VDisk";
    let mut centre = centre(text, |options| options.patience = Duration::from_secs(60));
    let address = centre.address().to_string();
    let (there, back) = (Duration::from_millis(160), Duration::from_millis(40));
    let wire = Wire::with_delays(address.clone(), [there, back]);
    let skew = -300 * SECOND;
    let (near, far) = (Feed::default(), Feed::default());
    let _near = host(&near, plain("near", &address), 0);
    let _far = host(&far, plain("far", &wire.address), skew);
    let mut collected = Collected::default();
    let watch = centre.watch();
    run_until_running(&mut centre, &mut collected, 2);
    let base = unix_time_ns();
    for step in 0..20 {
        let now = base + step * SECOND / 20;
        run_until(&mut centre, &mut collected, |_| unix_time_ns() >= now);
        for (number, feed, skew) in [(0, &near, 0), (1, &far, skew)] {
            feed.give_events(&events(number, now - SECOND / 20, 25), skew);
            feed.give(Part::Watermark(now + skew));
        }
    }
    let last = base + 19 * SECOND / 20;
    run_until(&mut centre, &mut collected, |watermark_ns| {
        let known = of(&watch.status(), "far");
        // Time does not pass the watermark of the far host.
        assert!(known.lag_ns.is_none_or(|lag_ns| watermark_ns <= unix_time_ns() - lag_ns + SECOND));
        watermark_ns >= last - SECOND / 4
    });
    let known = of(&watch.status(), "far");
    let clock = known.clock.unwrap();
    assert!(clock.round_trip_ns >= 200_000_000, "{known:?}");
    let wrong_by = (known.correction_ns + skew).abs();
    assert!(wrong_by <= clock.uncertainty_ns() + SECOND / 100, "{known:?}");
    assert!(
        wrong_by >= 20_000_000,
        "the delays of the two directions cannot be distinguished: {known:?}"
    );
    // The delay to the centre, minus the error of the clock.
    assert!(known.lag_ns.unwrap() >= 80_000_000, "{known:?}");
    for name in ["near", "far"] {
        let known = of(&watch.status(), name);
        assert_eq!((known.late, known.rows > 0, known.connections), (0, true, 1), "{known:?}");
    }
}

/// A row that several parts of a query need is sent once. Events have the address of their host.
#[test]
fn rows_are_sent_once_with_the_address_of_their_host() {
    let mut centre = centre("select IP, count(*) from IOstream group by IP", |options| {
        options.patience = Duration::from_secs(90);
    });
    let feed = Feed::default();
    let host = host(&feed, plain("alpha", &centre.address().to_string()), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| feed.is_wanted());
    let base = unix_time_ns();
    feed.give_events(&events(0, base, 100), 0);
    feed.give(Part::Watermark(base + SECOND));
    run_to(&mut centre, &mut collected, base + SECOND / 2);
    let address = Value::Integer(0x7f00_0001);
    assert!(!collected.0.is_empty() && collected.0.keys().all(|(_, _, row)| row[0] == address));
    // The query uses requests in three ways.
    let of_paper = include_str!("../../../cql/tests/paper/query05.cql");
    centre.replace(script(of_paper)).unwrap();
    run_until(&mut centre, &mut collected, |_| host.status().events == 0);
    assert_eq!(host.status().fragments, 1);
}

#[test]
fn new_queries_replace_the_running_ones() {
    let mut centre = centre("select VDisk from IOstream", |options| {
        options.patience = Duration::from_secs(90);
    });
    let feed = Feed::default();
    let base = unix_time_ns() - 20 * SECOND;
    let host = host(&feed, plain("alpha", &centre.address().to_string()), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| feed.is_wanted());
    feed.give_events(&events(0, base, 100), 0);
    run_until(&mut centre, &mut collected, |_| host.status().events == 100);
    let text = "select Size from IOstream; select VDisk, count(*) from IOstream group by VDisk";
    centre.replace(script(text)).unwrap();
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| host.status().events == 0);
    let events = events(0, base + SECOND, 100);
    feed.give_events(&events, 0);
    feed.give(Part::Watermark(base + 2 * SECOND));
    run_to(&mut centre, &mut collected, base + 2 * SECOND);
    let expected = expected(text, events);
    assert_eq!(collected.to(base + 2 * SECOND), expected);
}

#[test]
fn a_host_whose_fragments_exceed_the_limit_refuses_them_and_other_hosts_continue() {
    // Each host holds the numbers that it has reported.
    let mut centre = centre("select distinct ReqId from IOstream", |options| {
        options.patience = Duration::from_secs(90);
    });
    let watch = centre.watch();
    let address = centre.address().to_string();
    let base = unix_time_ns() - 20 * SECOND;
    let (small_feed, large_feed) = (Feed::default(), Feed::default());
    let bounded = |name: &str, held_max| HostOptions { held_max, ..plain(name, &address) };
    let small = host(&small_feed, bounded("small", 1000), 0);
    let large = host(&large_feed, bounded("large", 1_000_000), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| small_feed.is_wanted() && large_feed.is_wanted());
    small_feed.give_events(&events(0, base, 1000), 0);
    run_until(&mut centre, &mut collected, |_| small.status().events == 1000);
    assert_eq!(small.status().state, LinkState::Running);
    small_feed.give_events(&events(0, base + SECOND, 4000), 0);
    run_until(&mut centre, &mut collected, |_| {
        watch.status().hosts.iter().any(|host| host.state == HostState::Refusing)
    });
    let problem = of(&watch.status(), "small").problem.unwrap();
    assert!(problem.contains("more than 1000: ask for shorter windows"), "{problem}");
    let held: u64 = problem.split(' ').next().unwrap().parse().unwrap();
    assert!((1001..1200).contains(&held), "{problem}");
    let status = small.status();
    assert_eq!((status.state, status.fragments), (LinkState::Connected, 0));
    assert_eq!(status.problem, Some(problem));
    assert!(!small_feed.is_wanted());
    large_feed.give_events(&events(1, base + 10 * SECOND, 4000), 0);
    run_until(&mut centre, &mut collected, |_| large.status().events == 4000);
    assert_eq!(of(&watch.status(), "large").state, HostState::Running);
}

#[test]
fn a_centre_whose_queries_exceed_the_limit_ends() {
    let text = "select VDisk, Size from IOstream [range 1 hour]";
    let mut options = CentreOptions::new("127.0.0.1:0");
    options.ping = Duration::from_millis(50);
    options.patience = Duration::from_secs(90);
    let bounded = script(text).with_held_max(Some(1000));
    let mut centre = Centre::listen(options, bounded, &mut |_| true).unwrap();
    let feed = Feed::default();
    let base = unix_time_ns() - 20 * SECOND;
    let host = host(&feed, plain("alpha", &centre.address().to_string()), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| feed.is_wanted());
    feed.give_events(&events(0, base, 900), 0);
    run_until(&mut centre, &mut collected, |_| host.status().events == 900);
    feed.give_events(&events(0, base + SECOND, 200), 0);
    feed.give(Part::Watermark(base + 10 * SECOND));
    let begun = Instant::now();
    let ran = centre.run(&mut collected, &mut |_| begun.elapsed() < TIME_MAX);
    let Err(QueryError::Held(exceeded)) = ran else { panic!("{ran:?}") };
    assert_eq!(exceeded.limit, 1000);
    assert!((1001..=1100).contains(&exceeded.held), "{exceeded}");
    assert!(exceeded.place.contains("range"), "{exceeded}");
}

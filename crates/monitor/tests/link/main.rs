//! Hosts and a centre over real sockets: what the centre tells is what one engine would tell.

mod hostile;
mod network;
mod support;

use std::time::{Duration, Instant};

use fathom_cql::Value;
use fathom_monitor::QueryError;
use fathom_monitor::link::{
    Centre, CentreOptions, HostOptions, HostState, LinkState, unix_time_ns,
};
use support::*;

/// Filters, windows by time and of rows, a join, and what becomes a stream of a relation.
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
fn many_hosts_answer_as_one() {
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
    // Time begins with all of them.
    run_until(&mut centre, &mut collected, |_| {
        let status = watch.status();
        let running = status.hosts.iter().filter(|host| host.state == HostState::Running);
        running.count() == names.len()
    });
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
    // Everybody knows what was.
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

/// What a host says last is heard, whatever the centre is saying at that moment.
#[test]
fn last_words_are_heard() {
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
        // A watermark each, so that there is something to acknowledge all the time.
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

/// However often the path is cut, and where, nothing is lost and nothing comes twice.
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
        // Somewhere in the middle.
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
fn a_host_that_is_gone_is_not_waited_for_and_may_come_back() {
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
    // Killed: its path ends without a word.
    let last = now(&leaves, 1);
    run_until(&mut centre, &mut collected, |_| of(&watch.status(), "leaves").rows > 0);
    wire.close();
    drop(killed);
    run_until(&mut centre, &mut collected, |_| {
        of(&watch.status(), "leaves").state == HostState::Away
    });
    // The other goes on alone.
    run_until(&mut centre, &mut collected, |watermark_ns| {
        now(&stays, 0);
        watermark_ns > last + SECOND
    });
    assert_eq!(of(&watch.status(), "stays").late, 0);
    // It comes back, as a new process.
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
fn a_path_that_is_stuck_costs_rows_that_are_counted_and_nobody_else() {
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
    // All is accounted for once it has been told.
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
    // Rows are at the instants of the centre's clock.
    let off = collected
        .0
        .keys()
        .filter(|(_, time_ns, _)| *time_ns < base - SECOND || *time_ns > last + SECOND);
    assert_eq!(off.count(), 0);
}

/// A path that takes longer there than back: what is known of the clock is as wrong as is said, and
/// everybody waits for the slow one.
#[test]
fn a_slow_path_is_waited_for() {
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
    run_until(&mut centre, &mut collected, |_| {
        watch.status().hosts.iter().filter(|host| host.state == HostState::Running).count() == 2
    });
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
        // Nothing is over before the far one has told it.
        assert!(known.lag_ns.is_none_or(|lag_ns| watermark_ns <= unix_time_ns() - lag_ns + SECOND));
        watermark_ns >= last - SECOND / 4
    });
    let known = of(&watch.status(), "far");
    let clock = known.clock.unwrap();
    assert!(clock.round_trip_ns >= 200_000_000, "{known:?}");
    let wrong_by = (known.correction_ns + skew).abs();
    assert!(wrong_by <= clock.uncertainty_ns() + SECOND / 100, "{known:?}");
    assert!(wrong_by >= 20_000_000, "nobody can see which way takes longer: {known:?}");
    // The way there, less what the clock is wrong by.
    assert!(known.lag_ns.unwrap() >= 80_000_000, "{known:?}");
    for name in ["near", "far"] {
        let known = of(&watch.status(), name);
        assert_eq!((known.late, known.rows > 0, known.connections), (0, true, 1), "{known:?}");
    }
}

/// What several parts of a query look at travels once, and events say where they are from.
#[test]
fn rows_travel_once_and_know_their_host() {
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
    // Requests are looked at in three ways.
    let of_paper = include_str!("../../../cql/tests/paper/query05.cql");
    centre.replace(script(of_paper)).unwrap();
    run_until(&mut centre, &mut collected, |_| host.status().events == 0);
    assert_eq!(host.status().fragments, 1);
}

#[test]
fn other_queries_replace_what_runs() {
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
fn a_host_whose_fragments_hold_too_much_refuses_them_and_the_others_go_on() {
    // Each host keeps the numbers that it has told.
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
fn a_centre_whose_queries_hold_too_much_ends() {
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
    let Err(QueryError::Held(too_much)) = ran else { panic!("{ran:?}") };
    assert_eq!(too_much.most, 1000);
    assert!((1001..=1100).contains(&too_much.held), "{too_much}");
    assert!(too_much.place.contains("range"), "{too_much}");
}

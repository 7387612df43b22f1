//! Several processes, here threads with connections of their own: together they give the results of
//! one engine.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use fathom_cql::Row;
use fathom_cql::generate::{Case, case};
use fathom_monitor::cluster::{Cluster, ClusterOptions};
use fathom_monitor::{Delta, Engine};

const PATIENCE: Duration = Duration::from_secs(30);

/// The number of cases of a test, by default 300; `FATHOM_CASES` changes it.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

type Changes = Vec<(u64, Row, i64)>;

/// Free addresses.
fn addresses(count: usize) -> Vec<String> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

fn options(addresses: &[String], index: usize) -> ClusterOptions {
    ClusterOptions {
        addresses: addresses.to_vec(),
        index,
        tls: None,
        patience: PATIENCE,
        own_results: false,
    }
}

fn plans(case: &Case) -> &[fathom_cql::plan::Plan] {
    std::slice::from_ref(&case.plan)
}

/// Pushes the events of one process, advances time in steps, and returns the results.
fn run(
    engine: &mut Engine,
    case: &Case,
    is_mine: impl Fn(usize) -> bool,
    step_ns: i64,
    is_last: bool,
) -> Changes {
    let mut changes = Changes::new();
    let mut take =
        |delta: Delta<'_>| changes.push((delta.time_ns, delta.row.to_vec(), delta.count));
    let mut inputs: Vec<_> = case.inputs.iter().enumerate().collect();
    inputs.sort_by_key(|(_, input)| input.time_ns);
    let mut now_ns = 0;
    for (number, input) in inputs {
        while input.time_ns - now_ns >= step_ns {
            now_ns += step_ns;
            engine.advance(now_ns as u64, &mut take);
        }
        if is_mine(number) {
            engine.change(input.source, input.time_ns as u64, &input.row, 1);
        }
    }
    // Processes end at different instants.
    let until = if is_last { case.until_ns as u64 + 1 } else { now_ns as u64 + 1 };
    engine.finish(until, &mut take).unwrap();
    assert_eq!(engine.statistics().late, 0);
    changes
}

/// The results of each of `processes` processes. Each gets a part of the events and has steps of a
/// different length.
fn together(case: &Case, processes: usize, own_results: bool, seed: u64) -> Vec<Changes> {
    let addresses = addresses(processes);
    let process = |index: usize| {
        let options = ClusterOptions { own_results, ..options(&addresses, index) };
        let cluster = Cluster::join(&options, plans(case), &mut |_| true);
        let mut engine =
            Engine::in_cluster(cluster.unwrap(), case.catalog.streams.len(), plans(case));
        let is_mine = |number: usize| {
            let hash = (number as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            hash % processes as u64 == index as u64
        };
        let step_ns = [1, 7, 1000][(seed as usize + index) % 3];
        run(&mut engine, case, is_mine, step_ns, index == seed as usize % processes)
    };
    std::thread::scope(|scope| {
        let process = &process;
        let all: Vec<_> = (0..processes).map(|index| scope.spawn(move || process(index))).collect();
        all.into_iter().map(|process| process.join().unwrap()).collect()
    })
}

/// The net count of each row at each instant, summed over all processes.
fn net(changes: &[Changes]) -> BTreeMap<(u64, Row), i64> {
    let mut net = BTreeMap::new();
    for (time_ns, row, count) in changes.iter().flatten() {
        *net.entry((*time_ns, row.clone())).or_default() += count;
    }
    net.retain(|_, count| *count != 0);
    net
}

#[test]
fn several_processes_give_the_results_of_one() {
    let (mut total, mut by_others) = (0, 0);
    for seed in 0..cases() {
        let case = case(seed);
        let mut alone = Engine::new(case.catalog.streams.len(), plans(&case));
        let expected = run(&mut alone, &case, |_| true, 1000, true);
        total += expected.len();
        let (processes, own_results) = (2 + (seed % 2) as usize, seed % 3 == 0);
        let results = together(&case, processes, own_results, seed);
        if own_results {
            by_others += results[1..].iter().flatten().count();
            assert_eq!(net(&results), net(&[expected]), "seed {seed}: {:?}", case.plan);
        } else {
            assert_eq!(results[0], expected, "seed {seed}: {:?}", case.plan);
            assert!(results[1..].iter().all(Vec::is_empty), "only process 0 reports results");
        }
    }
    assert!(total as u64 > cases(), "only {total} changes");
    assert!(by_others as u64 > cases() / 4, "only {by_others} changes");
}

fn join(addresses: &[String], index: usize, case: &Case) -> io::Result<Cluster> {
    Cluster::join(&options(addresses, index), plans(case), &mut |_| true)
}

#[test]
fn processes_with_different_queries_are_rejected() {
    let addresses = addresses(2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(&addresses, 1, &case(1)).err());
        let first = join(&addresses, 0, &case(2)).err();
        for error in [first, other.join().unwrap()] {
            let error = error.unwrap().to_string();
            assert!(error.contains("different queries"), "{error}");
        }
    });
}

/// Other programs that connect are rejected and do no harm.
#[test]
fn other_programs_are_rejected() {
    let (addresses, case) = (addresses(2), case(3));
    let problems = RefCell::new(Vec::new());
    std::thread::scope(|scope| {
        let (addresses, case) = (&addresses, &case);
        let others = scope.spawn(|| {
            let begun = Instant::now();
            for rubbish in
                [&b"GET / HTTP/1.1\r\nHost: one.of.many.processes\r\n\r\n"[..], b"", b"fathom"]
            {
                let mut stream = loop {
                    match TcpStream::connect(&addresses[0]) {
                        Ok(stream) => break stream,
                        Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
                    }
                };
                stream.write_all(rubbish).unwrap();
            }
            join(addresses, 1, case).unwrap()
        });
        let mut keep_waiting = |waiting: &str| {
            problems.borrow_mut().push(waiting.to_owned());
            true
        };
        let first = Cluster::join(&options(addresses, 0), plans(case), &mut keep_waiting).unwrap();
        let run = |cluster| {
            let mut engine = Engine::in_cluster(cluster, case.catalog.streams.len(), plans(case));
            run(&mut engine, case, |number| number % 2 == 0, 1000, true)
        };
        let other = scope.spawn(move || run(others.join().unwrap()));
        run(first);
        other.join().unwrap();
    });
    assert!(problems.borrow().iter().any(|problem| problem.contains("another program")));
}

/// The end of a process, and a lost connection, are reported by the other processes. No process
/// waits forever or fails.
#[test]
fn a_lost_process_is_reported() {
    let case = case(4);
    for cut in [false, true] {
        let mut addresses = addresses(3);
        let wire = addresses.clone();
        // Process 1 connects to process 0 through this listener.
        let middle = TcpListener::bind("127.0.0.1:0").unwrap();
        let real = std::mem::replace(&mut addresses[0], middle.local_addr().unwrap().to_string());
        std::thread::scope(|scope| {
            let (case, seen, wire) = (&case, &addresses, &wire);
            let cutting = scope.spawn(move || {
                let mut both = Vec::new();
                for stream in middle.incoming().take(2) {
                    let stream = stream.unwrap();
                    let begun = Instant::now();
                    let other = loop {
                        match TcpStream::connect(&real) {
                            Ok(other) => break other,
                            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
                        }
                    };
                    for (mut from, mut to) in [(&stream, &other), (&other, &stream)]
                        .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                    {
                        std::thread::spawn(move || {
                            let _ = std::io::copy(&mut from, &mut to);
                            let _ = to.shutdown(Shutdown::Write);
                        });
                    }
                    both.push([stream, other]);
                }
                both
            });
            let process = |addresses: Vec<String>, index: usize| {
                move || {
                    let cluster = join(&addresses, index, case).unwrap();
                    let streams = case.catalog.streams.len();
                    let mut engine = Engine::in_cluster(cluster, streams, plans(case));
                    let begun = Instant::now();
                    let mut now_ns = 0;
                    while engine.loss().is_none() {
                        assert!(begun.elapsed() < PATIENCE, "no loss is reported");
                        now_ns += 1000;
                        engine.advance(now_ns, &mut |_| {});
                        engine.wait(Duration::from_millis(1));
                        if !cut && index == 2 && engine.ended_ns() > 0 {
                            return None;
                        }
                    }
                    engine.loss()
                }
            };
            let first = scope.spawn(process(wire.clone(), 0));
            let second = scope.spawn(process(seen.clone(), 1));
            let third = scope.spawn(process(seen.clone(), 2));
            let streams = cutting.join().unwrap();
            if cut {
                std::thread::sleep(Duration::from_millis(100));
                for stream in streams.iter().flatten() {
                    // A process that has noticed the loss may have ended.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            let losses = [first, second, third].map(|process| process.join().unwrap());
            for (index, loss) in losses.iter().enumerate() {
                match loss {
                    None => assert!(!cut && index == 2),
                    Some(loss) if index == 0 || !cut => {
                        assert_eq!(loss.reason.is_some(), cut, "{loss}");
                    }
                    Some(_) => {}
                }
            }
        });
    }
}

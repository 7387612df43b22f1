//! The layers delay, fault and log.

mod support;

use std::sync::Arc;

use fathom_block::{ErrorKind, Layer, Operation};
use fathom_layers::{Delay, DelayTime, Fault, FaultEffect, FaultRule, Log};
use parking_lot::Mutex;

use support::Bench;

fn over_memory(rules: Vec<FaultRule>, seed: u64) -> (Arc<Fault>, Bench) {
    let fault = Arc::new(Fault::new(rules, seed));
    let bench = Bench::new(vec![Arc::clone(&fault) as Arc<dyn Layer>]);
    (fault, bench)
}

#[test]
fn rules_choose_by_operation_range_and_count() {
    let rule = FaultRule {
        operations: vec![Operation::Write],
        range: Some(4096..8192),
        after: 2,
        strikes_max: 1,
        error: ErrorKind::NoSpace,
        ..FaultRule::default()
    };
    let (fault, mut bench) = over_memory(vec![rule], 0);
    assert_eq!(bench.run(Operation::Write, 0, 4096, 1), Ok(()), "beside the range");
    assert_eq!(bench.run(Operation::Write, 8192, 512, 1), Ok(()), "behind the range");
    assert_eq!(bench.run(Operation::Read, 4096, 512, 1), Ok(()), "another operation");
    assert_eq!(bench.run(Operation::Write, 4096, 512, 1), Ok(()), "the first");
    assert_eq!(bench.run(Operation::Write, 3584, 1024, 1), Ok(()), "the second");
    assert_eq!(bench.run(Operation::Write, 7680, 1024, 9), Err(ErrorKind::NoSpace));
    assert_eq!(bench.read(7680, 512), [0; 512], "the request was not carried out");
    assert_eq!(bench.run(Operation::Write, 4096, 512, 1), Ok(()), "it strikes once");
    assert_eq!(fault.strikes(), [1]);
}

#[test]
fn rules_can_be_disabled_and_enabled() {
    let (fault, mut bench) = over_memory(vec![FaultRule::default()], 0);
    assert_eq!(bench.run(Operation::Flush, 0, 0, 0), Err(ErrorKind::Io));
    fault.set_enabled(false);
    assert!(!fault.is_enabled());
    assert_eq!(bench.run(Operation::Flush, 0, 0, 0), Ok(()));
    fault.set_enabled(true);
    assert_eq!(bench.run(Operation::Flush, 0, 0, 0), Err(ErrorKind::Io));
}

#[test]
fn writes_are_cut_short_or_torn_and_fail() {
    for effect in [FaultEffect::Short, FaultEffect::Torn] {
        let mut partly = 0;
        for seed in 0..40 {
            let operations = vec![Operation::Write];
            let rule = FaultRule { operations, effect, ..FaultRule::default() };
            let (_, mut bench) = over_memory(vec![rule], seed);
            assert_eq!(bench.run(Operation::Write, 512, 4096, 7), Err(ErrorKind::Io));
            assert_eq!(bench.read(0, 512), [0; 512]);
            assert_eq!(bench.read(4608, 512), [0; 512]);
            let data = bench.read(512, 4096);
            let sectors: Vec<bool> = data
                .chunks(512)
                .map(|sector| {
                    assert!(sector.iter().all(|byte| *byte == sector[0]), "a torn sector");
                    sector[0] == 7
                })
                .collect();
            let written = sectors.iter().filter(|written| **written).count();
            assert!(written < 8, "the write failed, so some sector is not written");
            partly += u32::from(written > 0);
            if effect == FaultEffect::Short {
                assert!(
                    sectors.is_sorted_by(|left, right| left >= right),
                    "only a prefix is written"
                );
            }
        }
        assert!(partly > 20, "{effect:?}: most requests write some sectors");
    }
}

#[test]
fn a_late_failure_carries_out_the_request() {
    let rule = FaultRule {
        operations: vec![Operation::Write],
        effect: FaultEffect::Late,
        error: ErrorKind::ReadOnly,
        ..FaultRule::default()
    };
    let (_, mut bench) = over_memory(vec![rule], 0);
    assert_eq!(bench.run(Operation::Write, 0, 512, 5), Err(ErrorKind::ReadOnly));
    assert_eq!(bench.read(0, 512), [5; 512]);
}

#[test]
fn the_rate_and_the_seed_determine_which_requests_are_struck() {
    let outcomes = |seed| -> Vec<bool> {
        let rule = FaultRule { rate: 0.25, ..FaultRule::default() };
        let (_, mut bench) = over_memory(vec![rule], seed);
        (0..2000).map(|_| bench.run(Operation::Read, 0, 512, 0).is_err()).collect()
    };
    let first = outcomes(1);
    let struck = first.iter().filter(|struck| **struck).count();
    assert!((400..600).contains(&struck), "{struck} of 2000");
    assert_eq!(first, outcomes(1));
    assert_ne!(first, outcomes(2));
}

#[test]
fn delays_are_fixed_and_jittered_and_can_change() {
    let delay = Arc::new(Delay::new(3));
    let time = DelayTime { fixed_ns: 1000, jitter_ns: 500 };
    delay.set(Operation::Read, time);
    assert_eq!(delay.time(Operation::Read), time);
    let mut bench = Bench::new(vec![Arc::clone(&delay) as Arc<dyn Layer>]);
    let mut took = |operation| {
        let start_ns = bench.time_ns.get();
        assert_eq!(bench.run(operation, 0, 512, 0), Ok(()));
        bench.time_ns.get() - start_ns
    };
    let times: Vec<u64> = (0..100).map(|_| took(Operation::Read)).collect();
    assert!(times.iter().all(|time_ns| (1000..=1500).contains(time_ns)));
    assert!(times.iter().any(|time_ns| *time_ns != times[0]));
    assert_eq!(took(Operation::Write), 0);
    delay.set(Operation::Read, DelayTime::default());
    delay.set(Operation::Write, DelayTime::fixed(70));
    assert_eq!((took(Operation::Read), took(Operation::Write)), (0, 70));
}

#[test]
fn the_log_has_a_line_for_each_event_up_to_its_limit() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let log =
        Arc::new(Log::new("disk0", 3, Box::new(move |line| sink.lock().push(line.to_owned()))));
    let delay = Arc::new(Delay::every(DelayTime::fixed(250), 0));
    let mut bench = Bench::new(vec![Arc::clone(&log) as Arc<dyn Layer>, delay]);
    bench.time_ns.set(5_000_000_000);
    assert_eq!(bench.run(Operation::Write, 512, 1024, 0), Ok(()));
    assert!(bench.run(Operation::Read, u64::MAX - 1, 1, 0).is_err(), "refused above the log");
    assert_eq!(bench.run(Operation::Flush, 0, 0, 0), Ok(()));
    assert_eq!(log.dropped(), 1);
    bench.time_ns.set(7_000_000_000);
    assert_eq!(bench.run(Operation::Flush, 0, 0, 0), Ok(()));
    let lines = lines.lock();
    let expected = [
        "disk0 #0 write 512+1024",
        "disk0 #0 write 512+1024 done 250 ns",
        "disk0 #2 flush",
        "1 line dropped",
        "disk0 #3 flush",
        "disk0 #3 flush done 250 ns",
    ];
    assert_eq!(*lines, expected);
}

#[test]
fn the_log_writes_lines_to_a_writer() {
    let (mut reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    let log = Arc::new(Log::to_writer("vda", 100, writer));
    let mut bench = Bench::new(vec![log]);
    assert_eq!(bench.run(Operation::GetId, 0, 0, 0), Ok(()));
    drop(bench);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
    assert_eq!(text.lines().count(), 2);
    assert!(text.starts_with("vda #0 get-id\nvda #0 get-id done "), "{text}");
}

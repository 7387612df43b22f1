//! The daemon's forecast of contention, on modelled devices that two disks share: peaks are
//! foreseen before the 90th percentile has left its band, and there are hardly any false alarms.
//! `bench/foresee` compares all forecasts.

#[allow(dead_code, reason = "examples use the other parts")]
#[path = "support/replay.rs"]
mod replay;

#[allow(dead_code, reason = "examples use the other parts")]
#[path = "support/consolidate.rs"]
mod consolidate;

#[allow(dead_code, reason = "examples use the other parts")]
#[path = "support/judge.rs"]
mod judge;

#[allow(dead_code, reason = "examples use the other parts")]
#[path = "support/cases.rs"]
mod cases;

use cases::{CASES, run};
use fathom_devices::contention::forecast::default_forecast;
use fathom_devices::contention::{Contention, ContentionOptions};
use judge::{Judge, score};

fn judge(options: ContentionOptions) -> Judge {
    Judge::new(vec![Contention::new(options, default_forecast())], 2, options.queue_low)
}

#[test]
fn peaks_are_foreseen_before_the_90th_percentile_leaves_its_band() {
    let options = ContentionOptions::default();
    let (mut left, mut foreseen) = (0, 0);
    for case in CASES.iter().filter(|case| case.name.ends_with("hdd")) {
        let (record, peaks) = run(case, 1, 4, judge(options), options.step_ns);
        let found = score(&record, 0, &peaks, &options);
        println!("{}: {found:?}", case.name);
        assert!(found.left >= 3, "{}: the load makes peaks: {found:?}", case.name);
        (left, foreseen) = (left + found.left, foreseen + found.foreseen);
        // Bursts of the load itself are foreseen as well; docs/offload.md has the number of such
        // alarms.
        assert!(found.on < 0.6, "{}: {found:?}", case.name);
    }
    // The first peaks of a run teach the device's curve. `bench/foresee` has longer runs.
    assert!(foreseen * 3 >= left * 2, "{foreseen} of {left} peaks are foreseen");
}

#[test]
fn a_run_is_repeated_exactly() {
    let options = ContentionOptions::default();
    let once = || {
        let (record, _) = run(&CASES[0], 3, 1, judge(options), options.step_ns);
        let observed: Vec<_> = record.steps.iter().map(|step| step.observed.clone()).collect();
        let peaks: Vec<_> = record.steps.iter().map(|step| step.is_peak[0]).collect();
        (observed, peaks)
    };
    assert_eq!(once(), once());
}

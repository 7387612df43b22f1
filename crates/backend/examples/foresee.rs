//! Compares the forecasts of contention: on modelled devices that two disks share, whose load has
//! peaks, which share of the peaks is foreseen, how long before, and how often a peak is foreseen
//! that does not come. Prints a line of JSON for each forecast. `bench/foresee` makes a table of
//! them. Arguments: the folder of the traces, a text that the case and the forecast have to contain
//! (`default` stands for the daemon's forecast), the number of seeds, and other values of options
//! than the defaults, as `name=value`.

#[allow(dead_code, reason = "the tests use the other parts")]
#[path = "../tests/support/replay.rs"]
mod replay;

#[allow(dead_code, reason = "the tests use the other parts")]
#[path = "../tests/support/consolidate.rs"]
mod consolidate;

#[path = "../tests/support/judge.rs"]
mod judge;

#[path = "../tests/support/cases.rs"]
mod cases;

use std::io::{IsTerminal, stderr};
use std::path::Path;

use cases::{CASES, Case, run};
use consolidate::{Consolidation, Peak};
use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_devices::contention::forecast::{
    Base, Forecast, Prediction, Trend, TrendOptions, all_forecasts, default_forecast,
};
use fathom_devices::contention::{Contention, ContentionOptions, Sample};
use judge::{Judge, Record, score};
use replay::{CAPACITY, cloudphysics, tencent};

/// No prediction: only what is observed counts.
struct Observed;

impl Forecast for Observed {
    fn name(&self) -> String {
        "observed".into()
    }

    fn step(&mut self, _load: f64, _seconds: f64) {}

    fn learn(&mut self, _sample: Sample, _service_ns: f64) {}

    fn predict(&self, _base: &Base, _headroom: f64) -> Option<Prediction> {
        None
    }

    fn parallelism(&self) -> Option<f64> {
        None
    }
}

/// Shows on a terminal what runs.
fn show(text: &str) {
    if stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
    }
}

/// The options with other values, and those of trends.
fn options(values: &[String]) -> (ContentionOptions, TrendOptions) {
    let mut options = ContentionOptions::default();
    let mut trend = TrendOptions::default();
    for value in values {
        let (name, number) = value.split_once('=').expect("an option as name=value");
        let number: f64 = number.parse().expect("a number");
        let time_ns = (number * 1e9) as u64;
        match name {
            "horizon" => trend.horizon = number,
            "smoothed" => trend.smoothed = number,
            "step" => options.step_ns = time_ns,
            "window" => options.window_ns = time_ns,
            "dwell_observed" => options.dwell_observed_ns = time_ns,
            "share_queue" => options.share_queue = number,
            "hold" => options.hold_ns = time_ns,
            "queue_low" => options.queue_low = number,
            "headroom" => options.headroom = number,
            "margin" => options.margin = number,
            "share" => options.share = number,
            "share_observed" => options.share_observed = number,
            "error_max" => options.error_max = number,
            "requests_min" => options.requests_min = number as u64,
            _ => panic!("no option {name}"),
        }
    }
    (options, trend)
}

/// The forecasts that are wanted, and whether each is the daemon's.
fn forecasts(case: &str, only: &str, trend: TrendOptions) -> Vec<(Box<dyn Forecast>, bool)> {
    let usual = default_forecast().name();
    let mut all = all_forecasts();
    if trend != TrendOptions::default() {
        all.push(Box::new(Trend::new(trend)));
    }
    all.push(Box::new(Observed));
    let marked = all.into_iter().map(|forecast| {
        let is_default = forecast.name() == usual;
        (forecast, is_default)
    });
    let is_wanted = |(forecast, is_default): &(Box<dyn Forecast>, bool)| {
        let mark = if *is_default { " default" } else { "" };
        format!("{case} {}{mark}", forecast.name()).contains(only)
    };
    marked.filter(is_wanted).collect()
}

/// Prints the scores of a run.
fn print(
    case: &str,
    seed: u64,
    record: &Record,
    peaks: &[Peak],
    marks: &[bool],
    options: &ContentionOptions,
) {
    for (index, errors) in record.forecasts.iter().enumerate() {
        let found = score(record, index, peaks, options);
        println!(
            "{{\"case\": {case:?}, \"seed\": {seed}, \"forecast\": {:?}, \"default\": {}, \"peaks\": {}, \
             \"left\": {}, \"foreseen\": {}, \"lead_mean_ns\": {:.0}, \"lead_median_ns\": {:.0}, \
             \"alarms\": {}, \"false_alarms\": {}, \"hours\": {:.4}, \"on\": {:.4}, \"error_mean\": {:.4}, \
             \"error_p90\": {:.4}, \"used\": {:.4}, \"parallelism\": {:.3}}}",
            errors.name,
            marks[index],
            found.peaks,
            found.left,
            found.foreseen,
            found.lead_mean_ns,
            found.lead_median_ns,
            found.alarms,
            found.false_alarms,
            found.hours,
            found.on,
            errors.mean,
            errors.p90,
            errors.used,
            errors.parallelism.unwrap_or(0.0),
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = arguments.first().map_or("../shared/traces", String::as_str);
    let only = arguments.get(1).map_or("", String::as_str);
    let seeds: u64 = arguments.get(2).and_then(|seeds| seeds.parse().ok()).unwrap_or(3);
    let (options, trend) = options(arguments.get(3..).unwrap_or_default());
    let judge = |case: &str, disks: usize| {
        let (contentions, marks): (Vec<Contention>, Vec<bool>) = forecasts(case, only, trend)
            .into_iter()
            .map(|(forecast, mark)| (Contention::new(options, forecast), mark))
            .unzip();
        (!marks.is_empty()).then(|| (Judge::new(contentions, disks, options.queue_low), marks))
    };
    for case in CASES {
        for seed in 1..=seeds {
            let Case { name, .. } = case;
            let Some((judge, marks)) = judge(name, 2) else { continue };
            show(&format!("{name}, run {seed} of {seeds}"));
            let (record, peaks) = run(case, seed, cases::PEAKS, judge, options.step_ns);
            print(name, seed, &record, &peaks, &marks, &options);
        }
    }
    let folder = Path::new(folder);
    let tencent = |volumes| tencent(&folder.join("tencent-cbs.bz2"), volumes);
    let traces = [
        ("trace cloudphysics", cloudphysics(&folder.join("cloudphysics.vscsi"))),
        ("trace tencent, 1 volume", tencent(1)),
        ("trace tencent, 20 volumes", tencent(20)),
    ];
    for (trace, arrivals) in traces {
        let Some(arrivals) = arrivals else {
            eprintln!("skipped: {trace} is not in {}", folder.display());
            continue;
        };
        for device in ["hdd", "ssd"] {
            let name = format!("{trace}, {device}");
            // A hard disk does not keep up with as many volumes.
            let is_too_much = device == "hdd" && trace.contains("20");
            let Some((mut judge, marks)) = judge(&name, 1).filter(|_| !is_too_much) else {
                continue;
            };
            show(&name);
            let model = match device {
                "hdd" => Model::hdd(HddParameters::spanning(CAPACITY), 1),
                _ => Model::ssd(SsdParameters::sata(), 1),
            };
            let requests = arrivals.iter().map(|arrival| (0, *arrival));
            Consolidation::new(&[model], 1, CAPACITY).run(
                requests,
                options.step_ns,
                |now_ns, batches| judge.step(now_ns, batches),
            );
            print(&name, 1, &judge.end(), &[], &marks, &options);
        }
    }
    show("");
}

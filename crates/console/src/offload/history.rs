//! `fathom offload history`: what the model of a device foresaw, and what came.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use fathom_control::{OffloadHistory, OffloadSample};

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{
        self, Format, latency, short_number,
        style::Style,
        svg::{self, escape},
        table::{Table, TableColumn},
        text::{clean, shorten},
    },
};

/// The rows of the table.
const ROWS: usize = 20;
const SECOND_NS: u64 = 1_000_000_000;

const WIDTH: f64 = 1040.0;
const HEIGHT: f64 = 600.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 1016.0;
/// The edges of the plot of times, and of the plot of errors.
const TIMES: (f64, f64) = (104.0, 400.0);
const ERRORS: (f64, f64) = (446.0, 530.0);
/// The greatest error that the picture shows, as a part of one.
const ERROR_MAX: f64 = 1.0;
const OBSERVED: &str = "#0b4f8a";
const PREDICTED: &str = "#d55e00";
const LOW: &str = "#5c6670";

/// Options of `fathom offload history`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk's layer `offload` needs `auto`, because its device is observed only then. There is a sample of
each second with requests, of the last 20 minutes of these; a row of the table has several. P90 is the
greatest 90th percentile in them, FORESEEN the greatest that the model foresaw with a tenth more requests,
LOW that of a low load. ERROR is the model's mean error; above 30 % the verdict is what is observed.

Examples:
  fathom offload history web
  fathom offload history web --picture web.svg
  fathom offload history web --json | jq '.samples[-1]'")]
pub struct HistoryOptions {
    /// The disk
    #[arg(value_name = "DISK")]
    disk: String,
    /// Also draw it into this file (SVG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &HistoryOptions) -> CommandResult {
    let history = options.control.client().offload_history(&options.disk)?;
    if let Some(path) = &options.picture {
        if history.samples.is_empty() {
            return Err(none(&history));
        }
        std::fs::write(path, draw(&history)).map_err(|error| Failure::io("write", path, &error))?;
    }
    if options.format.json {
        return output::json(&history);
    }
    if history.samples.is_empty() {
        return Err(none(&history));
    }
    output::text_line(&table(&history.samples).render(output::width(), Style::stdout()))?;
    match &options.picture {
        Some(path) => output::text_line(&format!("\nThe picture is in {}.", path.display())),
        None => Ok(()),
    }
}

fn none(history: &OffloadHistory) -> Failure {
    Failure::new(format!("nothing of the disk {} was observed", clean(&history.disk)))
        .advise("set `auto` of its layer `offload` to `report` or `act`, and wait for requests")
}

/// The age of a sample when the last one came, in seconds.
fn age(sample: &OffloadSample, last: &OffloadSample) -> f64 {
    last.unix_time_ns.saturating_sub(sample.unix_time_ns) as f64 / SECOND_NS as f64
}

fn table(samples: &[OffloadSample]) -> Table {
    let mut table = Table::new([
        TableColumn::number("AGE").kept(),
        TableColumn::number("ARRIVE/S").importance(2),
        TableColumn::number("LOW").importance(3),
        TableColumn::number("P90").kept(),
        TableColumn::number("FORESEEN").kept(),
        TableColumn::number("ERROR").importance(4),
        TableColumn::text("PEAK").optional().kept(),
        TableColumn::text("CARRIED").optional().kept(),
    ]);
    let Some(last) = samples.last() else { return table };
    for part in samples.chunks(samples.len().div_ceil(ROWS)) {
        let count = part.len() as f64;
        let mean = |of: fn(&OffloadSample) -> f64| part.iter().map(of).sum::<f64>() / count;
        let most = |of: fn(&OffloadSample) -> u64| match part.iter().map(of).max() {
            None | Some(0) => "–".to_owned(),
            Some(time_ns) => latency(time_ns),
        };
        let share = |of: fn(&OffloadSample) -> bool| match part.iter().filter(|it| of(it)).count() {
            0 => String::new(),
            some => format!("{:.0} %", some as f64 / count * 100.0),
        };
        table.row([
            format!("{:.0} s", age(&part[0], last)),
            short_number(mean(|sample| sample.arrivals_per_second)),
            most(|sample| sample.low_p90_ns),
            most(|sample| sample.observed_p90_ns),
            most(|sample| sample.predicted_p90_ns),
            format!("{:.0} %", mean(|sample| sample.error) * 100.0),
            share(|sample| sample.is_peak),
            share(|sample| sample.is_carried),
        ]);
    }
    table
}

/// The scale of the picture.
struct Scale {
    begin_ns: u64,
    length_ns: u64,
    /// The greatest time, in nanoseconds.
    most: f64,
}

impl Scale {
    fn x(&self, unix_time_ns: u64) -> f64 {
        let at = unix_time_ns.saturating_sub(self.begin_ns).min(self.length_ns);
        LEFT + (RIGHT - LEFT) * at as f64 / self.length_ns as f64
    }

    fn y(&self, time_ns: u64) -> f64 {
        place(TIMES, time_ns as f64 / self.most)
    }
}

/// The place of a part of the greatest value in a plot.
fn place((top, bottom): (f64, f64), part: f64) -> f64 {
    let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 1.0 };
    bottom - (bottom - top) * part
}

/// A round number that is at least `value`.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(1.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|it| *it >= value)
        .unwrap_or(value)
}

/// The picture of a history that is not empty.
fn draw(history: &OffloadHistory) -> String {
    let samples = &history.samples;
    let most = |of: fn(&OffloadSample) -> u64| samples.iter().map(of).max().unwrap_or(0);
    let observed = most(|it| it.observed_p90_ns.max(it.low_p90_ns)).max(1);
    // What is foreseen in an overload has no limit. Beyond twice what came, it is drawn at the top.
    let foreseen = most(|it| it.predicted_p90_ns).min(observed.saturating_mul(2));
    let begin_ns = samples.first().map_or(0, |sample| sample.unix_time_ns);
    let end_ns = samples.last().map_or(0, |sample| sample.unix_time_ns);
    let scale = Scale {
        begin_ns,
        length_ns: end_ns.saturating_sub(begin_ns).max(SECOND_NS),
        most: round_up(observed.max(foreseen) as f64),
    };
    let mut picture = svg::begin(WIDTH, HEIGHT);
    let title = format!("What was foreseen for {}, and what came", shorten(&history.disk, 40));
    let _ = writeln!(
        picture,
        "<text x=\"{LEFT}\" y=\"32\" font-size=\"19\" font-weight=\"600\">{}</text>",
        escape(&title)
    );
    legend(&mut picture, history);
    bands(&mut picture, samples, &scale);
    axes(&mut picture, &scale);
    for (colour, dashes, of) in [
        (LOW, "2 4", (|it| it.low_p90_ns) as fn(&OffloadSample) -> u64),
        (PREDICTED, "6 3", |it| it.predicted_p90_ns),
        (OBSERVED, "", |it| it.observed_p90_ns),
    ] {
        let y = |sample: &OffloadSample| (of(sample) > 0).then(|| scale.y(of(sample)));
        line(&mut picture, samples, &scale, (colour, dashes), y);
    }
    let error = |sample: &OffloadSample| Some(place(ERRORS, sample.error / ERROR_MAX));
    line(&mut picture, samples, &scale, (PREDICTED, ""), error);
    picture.push_str("</svg>\n");
    picture
}

fn legend(picture: &mut String, history: &OffloadHistory) {
    let devices = shorten(&history.devices.join(", "), 30);
    let _ = writeln!(
        picture,
        "<text x=\"{LEFT}\" y=\"55\" fill=\"#68727c\">90th percentile of the response times at {}</text>",
        escape(if devices.is_empty() { "its device" } else { &devices })
    );
    let mut x = LEFT;
    for (colour, dashes, text) in [
        (OBSERVED, "", "observed"),
        (PREDICTED, "6 3", "foreseen, with a tenth more requests"),
        (LOW, "2 4", "low load"),
    ] {
        let _ = writeln!(
            picture,
            "<line x1=\"{x}\" y1=\"78\" x2=\"{}\" y2=\"78\" stroke=\"{colour}\" stroke-width=\"2.5\" \
             stroke-dasharray=\"{dashes}\"/><text x=\"{}\" y=\"82\">{text}</text>",
            x + 26.0,
            x + 32.0
        );
        x += 60.0 + 7.0 * text.len() as f64;
    }
    for (colour, text) in [("#f6d9cb", "a peak"), ("#9fd0b5", "carried")] {
        let _ = writeln!(
            picture,
            "<rect x=\"{x}\" y=\"71\" width=\"26\" height=\"14\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"82\">{text}</text>",
            x + 32.0
        );
        x += 110.0;
    }
}

/// The times with a peak, and below them those in which the disk was carried.
fn bands(picture: &mut String, samples: &[OffloadSample], scale: &Scale) {
    let is_peak: fn(&OffloadSample) -> bool = |sample| sample.is_peak;
    for (of, top, colour) in
        [(is_peak, TIMES.0, "#f6d9cb"), (|it| it.is_carried, TIMES.1 - 10.0, "#9fd0b5")]
    {
        let is_same = |one: &OffloadSample, next: &OffloadSample| {
            of(one) == of(next)
                && next.unix_time_ns.saturating_sub(one.unix_time_ns) < 3 * SECOND_NS
        };
        for band in samples.chunk_by(is_same).filter(|band| of(&band[0])) {
            let end_ns = band[band.len() - 1].unix_time_ns.saturating_add(SECOND_NS);
            let (x, end) = (scale.x(band[0].unix_time_ns), scale.x(end_ns));
            let _ = writeln!(
                picture,
                "<rect x=\"{x:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>",
                end - x,
                TIMES.1 - top,
            );
        }
    }
}

fn axes(picture: &mut String, scale: &Scale) {
    let mut tick = |y: f64, text: String| {
        let _ = writeln!(
            picture,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\" stroke=\"#dfe3e7\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 8.0,
            y + 4.5
        );
    };
    for quarter in 0..=4 {
        let part = f64::from(quarter) / 4.0;
        let text = if quarter == 0 { "0".into() } else { latency((scale.most * part) as u64) };
        tick(place(TIMES, part), text);
    }
    for half in 0..=2 {
        let part = f64::from(half) / 2.0;
        tick(place(ERRORS, part), format!("{:.0} %", part * ERROR_MAX * 100.0));
    }
    let _ = writeln!(
        picture,
        "<text x=\"{LEFT}\" y=\"{:.1}\" fill=\"#68727c\">error of the model</text>",
        ERRORS.0 - 12.0
    );
    for quarter in 0..=4_u64 {
        let at = scale.length_ns / 4 * quarter;
        let left = (scale.length_ns - at) / SECOND_NS;
        let text = if left == 0 { "now".into() } else { format!("−{left} s") };
        let _ = writeln!(
            picture,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{}\">{text}</text>",
            scale.x(scale.begin_ns.saturating_add(at)),
            ERRORS.1 + 24.0,
            if quarter == 4 { "end" } else { "middle" }
        );
    }
}

/// A line through the samples that have a place. Seconds without samples interrupt it.
fn line(
    picture: &mut String,
    samples: &[OffloadSample],
    scale: &Scale,
    (colour, dashes): (&str, &str),
    y: impl Fn(&OffloadSample) -> Option<f64>,
) {
    let (mut path, mut before) = (String::new(), None::<u64>);
    for sample in samples {
        let Some(y) = y(sample) else {
            before = None;
            continue;
        };
        let is_next =
            before.is_some_and(|at| sample.unix_time_ns.saturating_sub(at) < 3 * SECOND_NS);
        let x = scale.x(sample.unix_time_ns);
        let _ = write!(path, "{}{x:.1},{y:.1} ", if is_next { 'L' } else { 'M' });
        before = Some(sample.unix_time_ns);
    }
    let _ = writeln!(
        picture,
        "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\" \
         stroke-linejoin=\"round\" d=\"{path}\"/>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(count: u64) -> OffloadHistory {
        let sample = |second| OffloadSample {
            unix_time_ns: second * SECOND_NS,
            arrivals_per_second: 200.0,
            observed_mean_ns: 10_000_000,
            observed_p90_ns: 20_000_000 + second * 1_000_000,
            predicted_p90_ns: if second < 5 { 0 } else { 22_000_000 },
            low_p90_ns: 17_000_000,
            error: 0.1,
            is_peak: second > 50,
            is_carried: second > 60,
            ..OffloadSample::default()
        };
        let samples = (0..count).map(sample).collect();
        OffloadHistory { disk: "a<b".into(), devices: vec!["sda".into()], samples }
    }

    #[test]
    fn a_table_has_some_rows_of_any_history() {
        let text = table(&history(100).samples).render(None, Style::PLAIN);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 21, "{text}");
        assert!(lines[1].contains("99 s") && lines[1].contains('–'), "{text}");
        assert!(lines[20].contains("100 %") && lines[20].contains("119"), "{text}");
        assert_eq!(table(&history(1).samples).render(None, Style::PLAIN).lines().count(), 2);
    }

    #[test]
    fn any_history_can_be_drawn() {
        let picture = draw(&history(100));
        assert!(picture.contains("a&lt;b") && picture.contains("−99 s"), "{picture}");
        assert_eq!(picture.matches('<').count(), picture.matches('>').count());
        let extreme = OffloadSample {
            unix_time_ns: u64::MAX,
            observed_p90_ns: u64::MAX,
            error: f64::NAN,
            ..OffloadSample::default()
        };
        for samples in [vec![extreme], vec![OffloadSample::default(), extreme]] {
            let picture = draw(&OffloadHistory { samples, ..OffloadHistory::default() });
            assert!(picture.ends_with("</svg>\n") && !picture.contains("NaN"), "{picture}");
        }
    }
}

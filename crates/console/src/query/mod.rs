//! `fathom query`: runs standing queries in CQL over live or recorded events.
mod diagnostics;
mod explain;
mod list;
pub mod running;
mod split;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum, value_parser};
use fathom_control::{Nanoseconds, count};
use fathom_cql::Value;
use fathom_monitor::{
    HELD_MAX, QueryError, ReplayRequest, ReplaySummary,
    read::{ReadOptions, ReadReport, TimeUnit},
    recording::{Recording, RowReader},
    replay, span_text,
};

use crate::{
    connection::ControlOptions,
    events::{EventClock, open_event_stream},
    failure::{CommandResult, Failure, reason},
};

pub use explain::{ExplainOptions, explain};
pub use running::shown_times;
use running::{Printing, finish, prepare, warn, warn_of_mistakes};

/// Options of `fathom query`.
#[derive(Debug, Args)]
#[command(after_help = "\
A file is a recording of `fathom record`, CSV whose first line names columns of IOstream, the output
of blkparse, a log of fio, or a trace of CloudPhysics (vscsi), libCacheSim (oracleGeneral), Tencent,
MSR Cambridge, SPC, ARC, DiskSim or MQSim; files compressed by bzip2 are unpacked.

The rows of a stream are printed as they arrive, and those of a relation at the end. With --deltas
each change is printed: its time in nanoseconds, and + or -.

Without --replay the queries read the events of the running daemon's disks, until they are ended.

Examples:
  fathom query 'select VMName, Path, Size from IOstream where Size > 1024'
  fathom query 'select * from IOstream where Size = 8' --replay events.csv
  fathom query 'select VDisk, count(*) from IOstream group by VDisk' --replay trace.bz2 --csv
  fathom query --file response-time.cql --replay table.tsv --stream-compat
  fathom query --file slow.cql --param limit=20000 --replay events.csv --deltas --json
  fathom query --list
  blkparse sda.blktrace.0 | fathom query --file seeks.cql --replay -")]
pub struct QueryOptions {
    /// The queries
    #[arg(
        value_name = "CQL",
        required_unless_present_any = ["file", "list"],
        conflicts_with_all = ["file", "list"]
    )]
    text: Option<String>,
    /// Read the queries from this file
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// List the daemon's kept queries and their results
    #[arg(
        long,
        conflicts_with_all = ["file", "replay", "disks", "time", "csv", "deltas", "limit_held"]
    )]
    list: bool,
    /// Read events from this file (-: from standard input)
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Query the live events of this disk of the running daemon; may be repeated [default: all
    /// disks, unless --replay is given]
    #[arg(long = "disk", value_name = "NAME", conflicts_with = "replay")]
    disks: Vec<String>,
    /// End after this time, with the results of all events up to then
    #[arg(long = "for", value_name = "TIME", conflicts_with = "replay")]
    time: Option<Nanoseconds>,
    /// Interpret the queries as STREAM did: a second of a window is one unit of time, a
    /// microsecond, and the time is column `FtrTS`; other options override the unit and the column
    #[arg(long)]
    stream_compat: bool,
    /// Set $NAME in the queries: a number, true, false, null, or a text
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, Value)>,
    #[command(flatten)]
    reading: Reading,
    /// End with an error when more rows, groups and values are held [default: 10000000, or no limit
    /// with --replay]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    limit_held: Option<u64>,
    #[command(flatten)]
    printing: Printing,
    #[command(flatten)]
    control: ControlOptions,
}

/// The unit and the column of a file's times.
#[derive(Debug, Args)]
pub struct Times {
    /// Unit of the times in CSV [default: ns]
    #[arg(long, value_enum, value_name = "UNIT")]
    time_unit: Option<Unit>,
    /// Column of the time in CSV [default: `BlktapTS`]
    #[arg(long, value_name = "NAME")]
    time_column: Option<String>,
}

/// How events are read.
#[derive(Debug, Args)]
struct Reading {
    #[command(flatten)]
    times: Times,
    /// Wait this long (such as 5s, 10min or 1h) for events that arrive out of order; later ones are
    /// dropped and counted. By default a file is read completely, so that no event is late; for
    /// standard input the time is 1s, for a running daemon 0
    #[arg(long, value_name = "TIME")]
    limit_lateness: Option<Nanoseconds>,
}

impl Times {
    /// The options for a reader; `stream_compat` selects STREAM's defaults.
    pub fn options(&self, stream_compat: bool) -> ReadOptions {
        let (column, unit) = if stream_compat {
            (Some("FtrTS".to_owned()), TimeUnit::Microseconds)
        } else {
            (None, TimeUnit::Nanoseconds)
        };
        ReadOptions {
            time_column: self.time_column.clone().or(column),
            time_unit: self.time_unit.map_or(unit, TimeUnit::from),
            ..ReadOptions::default()
        }
    }

    /// Whether an option was given.
    pub fn are_given(&self) -> bool {
        self.time_unit.is_some() || self.time_column.is_some()
    }
}

impl Reading {
    fn lateness_ns(&self) -> Option<u64> {
        self.limit_lateness.map(|time| time.0)
    }
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Unit {
    /// Nanoseconds
    Ns,
    /// Microseconds
    Us,
    /// Milliseconds
    Ms,
    /// Seconds
    S,
}

impl From<Unit> for TimeUnit {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Ns => Self::Nanoseconds,
            Unit::Us => Self::Microseconds,
            Unit::Ms => Self::Milliseconds,
            Unit::S => Self::Seconds,
        }
    }
}

/// Parses `NAME=VALUE`. A value that is neither a number, a boolean nor `null` is a text; a value
/// in quotes is a text.
pub fn parameter(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, such as limit=20000")?;
    let name = name.strip_prefix('$').unwrap_or(name);
    let begins = |c: char| c.is_ascii_alphabetic() || c == '_';
    if !name.starts_with(begins) || !name.chars().all(|c| begins(c) || c.is_ascii_digit()) {
        return Err(format!("{name:?} is not a valid name"));
    }
    let quoted = |quote| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    let number = value.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let value = if let Some(text) = quoted('\'').or_else(|| quoted('"')) {
        Value::text(text)
    } else if let Ok(integer) = value.parse() {
        Value::Integer(integer)
    } else if let (true, Ok(float)) = (number, value.parse()) {
        Value::Float(float)
    } else {
        match value.to_ascii_lowercase().as_str() {
            "true" => Value::Boolean(true),
            "false" => Value::Boolean(false),
            "null" => Value::Null,
            _ => Value::text(value),
        }
    };
    Ok((name.to_owned(), value))
}

/// The text of the queries, from a file or from the command line.
pub fn script(file: Option<&Path>, text: Option<&str>) -> CommandResult<String> {
    match file {
        Some(path) => fs::read_to_string(path).map_err(|error| Failure::io("read", path, &error)),
        None => Ok(text.unwrap_or_default().to_owned()),
    }
}

impl QueryOptions {
    fn request(&self, file: &Path) -> CommandResult<ReplayRequest> {
        let script = script(self.file.as_deref(), self.text.as_deref())?;
        Ok(ReplayRequest {
            script,
            parameters: self.parameters.clone(),
            stream_compatible: self.stream_compat,
            file: file.to_owned(),
            read: self.reading.times.options(self.stream_compat),
            lateness_ns: self.reading.lateness_ns(),
            held_max: self.limit_held,
            cluster: None,
        })
    }
}

/// How often the daemon reports the instant up to which it has sent all events.
const PULSE: Duration = Duration::from_millis(10);

/// Runs queries over the live events of the daemon's disks. A relation's changes are printed,
/// because it has no end.
fn live(options: &QueryOptions) -> CommandResult {
    let text = script(options.file.as_deref(), options.text.as_deref())?;
    let script = prepare(&text, &options.parameters, options.stream_compat)?
        .with_held_max(options.limit_held.or(Some(HELD_MAX)));
    warn(&text, &script);
    let client = options.control.client();
    let names: Vec<&str> = script.streams().iter().map(|it| it.schema.name.as_str()).collect();
    let stream = open_event_stream(&client, &options.disks, &names, Some(PULSE))?;
    let time = options.time.map(|time| Duration::from_nanos(time.0));
    let watch = stream.watch()?;
    let read = ReadOptions::default();
    let mut reader = RowReader::new("the daemon", stream, script.streams(), &read)
        .map_err(|error| failure(&text, error.into()))?;
    let clock = EventClock::new(reader.header());
    let mut printer = options.printing.live_printer(&script);
    printer.show_times(options.printing.times(reader.header().wall_offset_ns));
    let lateness_ns = options.reading.lateness_ns().unwrap_or(0);
    let end_ns = time.map(|time| clock.after(time));
    if let Some(time) = time {
        let begun = Instant::now();
        watch.begin(move || begun.elapsed() >= time)?;
    }
    let summary = script.run_live(&mut reader, lateness_ns, &mut printer, end_ns);
    finish(printer, &text, summary)?.iter().for_each(report_summary);
    Ok(())
}

/// How long the instants of a recording are before those since 1970; `None` of other files, and of
/// standard input, which is read once only.
fn wall_offset_ns(file: &Path) -> Option<i64> {
    let source = fs::File::open(file).ok().filter(|source| {
        source.metadata().is_ok_and(|metadata| metadata.is_file()) && file != Path::new("-")
    })?;
    let recording = Recording::open("", source).ok()?;
    Some(recording.header().wall_offset_ns).filter(|offset_ns| *offset_ns != 0)
}

/// Runs queries over the events in a file.
fn recorded(options: &QueryOptions, file: &Path) -> CommandResult {
    let request = options.request(file)?;
    let script = prepare(&request.script, &request.parameters, request.stream_compatible)?;
    warn_of_mistakes(&request.script, &script);
    let mut printer = options.printing.printer();
    if let Some(offset_ns) = wall_offset_ns(file) {
        printer.show_times(options.printing.times(offset_ns));
    }
    let summary = replay(&request, &mut printer);
    let Some(summary) = finish(printer, &request.script, summary)? else { return Ok(()) };
    check_summary(&summary, request.lateness_ns)
}

/// Carries out the command.
pub fn run(options: &QueryOptions) -> CommandResult {
    match &options.replay {
        _ if options.list => list::list(&options.control.client(), options.printing.json),
        Some(file) => recorded(options, file),
        None => live(options),
    }
}

/// Reports on standard error the parts of a file that were not read.
pub fn report_input(report: &ReadReport) {
    for note in &report.notes {
        note!("{note}");
    }
    match report.bad {
        0 => {}
        1 => note!("1 malformed line was skipped"),
        bad => note!("{bad} malformed lines were skipped"),
    }
    if report.dropped > 0 {
        note!("{} missing in the input", count(report.dropped, "event"));
    }
}

/// A message about events that arrived too late, with its remedy; `None` if no event was late.
fn late(summary: &ReplaySummary) -> Option<(String, String)> {
    let events = match summary.late {
        0 => return None,
        1 => "1 event arrived too late and is".to_owned(),
        late => format!("{late} events arrived too late and are"),
    };
    let needed = span_text(summary.late_ns);
    let what = format!("{events} not in the result");
    Some((what, format!("wait longer for late events with --limit-lateness {needed}")))
}

/// Reports on standard error the parts of the input that are not in the result.
fn report_summary(summary: &ReplaySummary) {
    report_input(&summary.read);
    if let Some((what, remedy)) = late(summary) {
        note!("{what}\n→ {remedy}");
    }
}

/// As `report_summary`, for a file: late events are a failure unless a lateness was given.
fn check_summary(summary: &ReplaySummary, lateness_ns: Option<u64>) -> CommandResult {
    if let (Some((what, remedy)), None) = (late(summary), lateness_ns) {
        report_input(&summary.read);
        let remedy = format!("{remedy}, or use a file, which is read completely");
        Err(Failure::new(what).advise(remedy))
    } else {
        report_summary(summary);
        Ok(())
    }
}

pub fn failure(script: &str, error: QueryError) -> Failure {
    match error {
        QueryError::Script(errors) => diagnostics::failure(script, &errors),
        QueryError::Request(what) => Failure::usage(what),
        QueryError::Read(error) => error.into(),
        QueryError::Lost(loss) => {
            Failure::new(loss.to_string()).advise("start all processes of the centre again")
        }
        QueryError::Held(error) => Failure::new(error.to_string()).advise(
            "shorten the windows, filter rows or group by fewer columns, or raise --limit-held",
        ),
        QueryError::Write(error) => {
            Failure::new(format!("cannot write the result: {}", reason(&error)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_types() {
        for (text, value) in [
            ("a=7", Value::Integer(7)),
            ("$a=-7", Value::Integer(-7)),
            ("a=0.5", Value::Float(0.5)),
            ("a=1e3", Value::Float(1000.0)),
            ("a=TRUE", Value::Boolean(true)),
            ("a=null", Value::Null),
            ("a=inf", Value::text("inf")),
            ("a='7'", Value::text("7")),
            ("a=\"null\"", Value::text("null")),
            ("a=x=y", Value::text("x=y")),
            ("a=", Value::text("")),
            ("a='", Value::text("'")),
        ] {
            assert_eq!(parameter(text), Ok(("a".to_owned(), value)), "{text}");
        }
        for text in ["a", "=7", "1a=7", "a b=7"] {
            assert!(parameter(text).is_err(), "{text}");
        }
    }
}

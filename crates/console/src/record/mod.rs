//! `fathom record`: the events of the daemon's disks into a file, and such a file in other forms.
use std::{
    fs::File,
    io::{self, BufWriter, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use fathom_control::{AnswerStream, Bytes, Nanoseconds};
use fathom_cql::catalog::Column;
use fathom_monitor::{
    ResultSink,
    read::{Batch, ReadError, ReadReport},
    recording::{BlockLimits, Item, Recording, RecordingSummary, Writer},
    write::{Form, Printer, PrinterOptions},
};

use crate::{
    connection::ControlOptions,
    events::open_event_stream,
    failure::{Failure, Outcome, reason},
};

/// Blocks with so many rows are kept as they come; smaller ones are put together.
const KEPT_ROWS: u32 = 4096;
/// How often it is looked whether to end.
const ATTENTION: Duration = Duration::from_millis(50);
/// How often the progress is shown: on a terminal, and elsewhere.
const SHOW_INTERVAL: Duration = Duration::from_millis(200);
const SHOW_INTERVAL_LINES: Duration = Duration::from_secs(10);

static SIGNALLED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALLED.store(true, Ordering::Relaxed);
}

/// Options of `fathom record`.
#[derive(Debug, Args)]
#[command(after_help = "\
Ctrl-C ends the recording in good order. `fathom query --replay FILE` asks it questions.
When events come faster than they are written, some are dropped: the recording says where.

Examples:
  fathom record -o all.rec                         all disks, until Ctrl-C
  fathom record web-root web-data -o web.rec --for 30s --limit 1G
  fathom record -o - | fathom query --file slow.cql --replay -
  fathom record --export web.rec -o web.csv        also .jsonl; - is CSV")]
pub struct RecordOptions {
    #[command(flatten)]
    control: ControlOptions,
    /// The disks; all where none is named
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// Write to this file (-: to standard output)
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// End after this time
    #[arg(long = "for", value_name = "TIME")]
    time: Option<Nanoseconds>,
    /// End when the file has this size
    #[arg(long, value_name = "SIZE")]
    limit: Option<Bytes>,
    /// Write the events of this recording as CSV, or as an object of JSON a line
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "time", "limit", "control"])]
    export: Option<PathBuf>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

/// Carries out the command.
pub fn run(options: &RecordOptions) -> Outcome {
    match &options.export {
        Some(file) => export(file, &options.output),
        None => record(options),
    }
}

fn output(path: &Path) -> Outcome<Box<dyn Write>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(io::stdout().lock()));
    }
    let file = File::create(path).map_err(|error| Failure::io("write", path, &error))?;
    Ok(Box::new(file))
}

/// Ends the stream when it is time to, from a thread of its own: a disk may do nothing for long.
fn watch(stream: &AnswerStream, time: Option<Duration>) -> Outcome<Arc<AtomicBool>> {
    let failed = |error: io::Error| Failure::new(format!("cannot watch the daemon: {error}"));
    let connection = stream.connection().map_err(failed)?;
    let ended = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&ended);
    let begun = Instant::now();
    let due = move || {
        SIGNALLED.load(Ordering::Relaxed) || time.is_some_and(|time| begun.elapsed() >= time)
    };
    let wait = move || {
        while !due() {
            thread::sleep(ATTENTION);
        }
        told.store(true, Ordering::Relaxed);
        // Fails only where the other side has left already.
        let _ = connection.shutdown(std::net::Shutdown::Both);
    };
    thread::Builder::new().name("watch".into()).spawn(wait).map_err(failed)?;
    Ok(ended)
}

fn record(options: &RecordOptions) -> Outcome {
    let client = options.control.client();
    // First, so that no file is made where there is no daemon.
    let stream = open_event_stream(&client, &options.disks, None)?;
    let out = BufWriter::new(output(&options.output)?);
    let handler: extern "C" fn(libc::c_int) = on_signal;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler does nothing but store to an atomic.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    let time = options.time.map(|time| Duration::from_nanos(time.0));
    let ended = watch(&stream, time)?;
    let mut progress = Progress::new(options.quiet);
    match copy(stream, out, options.limit.map(|limit| limit.0), &ended, &mut progress) {
        Ok(summary) => {
            progress.end(summary);
            Ok(())
        }
        // A reader who has left is no failure.
        Err(Broken::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(broken) => Err(broken.into()),
    }
}

/// Why a recording ends too early.
enum Broken {
    Read(ReadError),
    Write(io::Error),
    /// The daemon's stream ends without an end.
    CutOff,
}

impl From<Broken> for Failure {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Read(error) => error.into(),
            Broken::Write(error) => {
                Self::new(format!("cannot write the events: {}", reason(&error)))
            }
            Broken::CutOff => Self::new("the events are cut off: the daemon is gone")
                .advise("what was written can be read; see the daemon's log"),
        }
    }
}

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Writes what comes until the end, also where that is a break.
fn copy(
    stream: impl Read,
    out: impl Write,
    limit: Option<u64>,
    ended: &AtomicBool,
    progress: &mut Progress,
) -> Result<RecordingSummary, Broken> {
    let mut recording = Recording::open("the daemon's stream", stream)?;
    let mut writer = Writer::new(out, recording.header(), BlockLimits::default())?;
    let mut batch = Batch::default();
    let mut broken = None;
    loop {
        let block = match recording.next_block() {
            Ok(Some(block)) => block,
            Ok(None) => {
                broken = Some(Broken::CutOff);
                break;
            }
            Err(error) => {
                broken = Some(error.into());
                break;
            }
        };
        if block.has_rows() && block.count() >= KEPT_ROWS {
            writer.copy(&block)?;
        } else {
            match recording.open_block(&block)? {
                Some(Item::Dropped { count, place, disk }) => {
                    writer.note_dropped(count, place, &disk)?;
                }
                Some(Item::End { .. }) => break,
                _ => {}
            }
            while recording.block_rows(&mut batch)? {
                for (time_ns, row) in batch.times_ns.iter().zip(batch.rows()) {
                    writer.append_row(*time_ns, &row)?;
                }
            }
        }
        writer.flush_if_due()?;
        progress.update(&writer);
        if limit.is_some_and(|limit| writer.bytes() >= limit) || ended.load(Ordering::Relaxed) {
            break;
        }
    }
    let (_, summary) = writer.finish()?;
    match broken.filter(|_| !ended.load(Ordering::Relaxed)) {
        Some(broken) => Err(broken),
        None => Ok(summary),
    }
}

/// What is shown meanwhile.
struct Progress {
    quiet: bool,
    terminal: bool,
    begun: Instant,
    shown: Instant,
    /// Whether a line is shown that the next one replaces.
    open: bool,
}

impl Progress {
    fn new(quiet: bool) -> Self {
        let now = Instant::now();
        let terminal = io::stderr().is_terminal();
        Self { quiet, terminal, begun: now, shown: now, open: false }
    }

    fn line(&self, summary: RecordingSummary) -> String {
        let RecordingSummary { events, dropped, bytes } = summary;
        let time = self.begun.elapsed().as_secs_f64();
        format!("{events} events, {}, {dropped} dropped, {time:.1} s", Bytes(bytes))
    }

    fn update<W: Write>(&mut self, writer: &Writer<W>) {
        let interval = if self.terminal { SHOW_INTERVAL } else { SHOW_INTERVAL_LINES };
        if self.quiet || self.shown.elapsed() < interval {
            return;
        }
        self.shown = Instant::now();
        let line = self.line(writer.summary());
        if self.terminal {
            eprint!("\r\x1b[K{line}");
            self.open = true;
        } else {
            eprintln!("{line}");
        }
    }

    fn end(&self, summary: RecordingSummary) {
        if !self.quiet {
            let before = if self.open { "\r\x1b[K" } else { "" };
            eprintln!("{before}{}", self.line(summary));
        }
    }
}

fn export(file: &Path, to: &Path) -> Outcome {
    let form = match to.extension().and_then(|ending| ending.to_str()) {
        Some("jsonl" | "ndjson" | "json") => Form::Json,
        Some("csv") => Form::Csv,
        None if to.as_os_str() == "-" => Form::Csv,
        _ => {
            return Err(Failure::usage(format!("{} has no ending that says a form", to.display()))
                .advise("name a file that ends in .csv or .jsonl, or - for CSV"));
        }
    };
    let source = File::open(file).map_err(|error| Failure::io("read", file, &error))?;
    let source = io::BufReader::with_capacity(1 << 18, source);
    let name = file.display().to_string();
    let mut recording = Recording::open(&name, source)?;
    let columns: Vec<Column> = recording.header().schema().columns;
    let out = BufWriter::with_capacity(1 << 18, output(to)?);
    let mut printer = Printer::new(out, PrinterOptions { form, deltas: false });
    let mut batch = Batch::default();
    let mut print = || -> Result<(), Broken> {
        printer.begin(0, &columns, true)?;
        while let Some(item) = recording.next_item(&mut batch)? {
            if item != Item::Rows {
                continue;
            }
            for (time_ns, row) in batch.times_ns.iter().zip(batch.rows()) {
                printer.delta(0, *time_ns, 1, &row)?;
            }
        }
        Ok(())
    };
    let printed = print();
    let finished = printer.finish().map(drop).map_err(Broken::Write);
    tell(recording.report());
    match printed.and(finished) {
        Ok(()) => Ok(()),
        Err(Broken::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(broken) => Err(broken.into()),
    }
}

/// Says what is not in the output.
fn tell(report: &ReadReport) {
    for note in &report.notes {
        eprintln!("{note}");
    }
    if report.dropped > 0 {
        eprintln!("{} events are missing in the recording", report.dropped);
    }
}

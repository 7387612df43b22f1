//! Records the live events of the daemon's disks.
use std::{
    io::{self, BufWriter, IsTerminal, Read, Write},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use fathom_control::Bytes;
use fathom_monitor::{
    read::{Batch, ReadReport},
    recording::{
        Block, BlockLimits, Cell, DropPlace, Header, Item, ParquetWriter, Recording,
        RecordingSummary, RowGroupLimits, Writer,
    },
    write::Form,
};

use super::{Broken, FileForm, RecordOptions, output::Output, text::TextWriter};
use crate::{
    events::{EventClock, open_event_stream},
    failure::{CommandResult, Failure},
    output::screen::print_over,
    process::catch_signals,
};

/// Blocks with at least this number of rows are copied unchanged; smaller ones are merged.
const KEPT_ROWS: u32 = 4096;
/// How often the daemon reports the instant up to which it has sent all events.
const PULSE: Duration = Duration::from_millis(50);
/// The interval between reports of the progress: on a terminal, and elsewhere.
const SHOW_INTERVAL: Duration = Duration::from_millis(200);
const SHOW_INTERVAL_LINES: Duration = Duration::from_secs(10);

/// Writes events until the recording is to end.
pub fn record(options: &RecordOptions, form: FileForm) -> CommandResult {
    Output::refuse_existing(&options.output, options.force)?;
    let client = options.control.client();
    // This precedes the creation of the file, so that no file is created without a daemon.
    let names = options.stream_names(form)?;
    let failed = |error| Failure::new(format!("cannot watch for signals: {error}"));
    let signalled = catch_signals(false).map_err(failed)?;
    let stream = open_event_stream(&client, &options.disks, &names, Some(PULSE))?;
    let watch = stream.watch()?;
    let mut recording = Recording::open("the daemon's stream", stream)?;
    let clock = EventClock::new(recording.header());
    let end_ns = options.time.map_or(i64::MAX, |time| clock.after(Duration::from_nanos(time.0)));
    let end = Arc::new(AtomicI64::new(end_ns));
    let noted = Arc::clone(&end);
    // A thread notes a signal, because a read may wait while the disks are idle.
    watch.begin(move || {
        let now_ns = clock.at(Instant::now());
        if signalled.load(Ordering::Relaxed) {
            noted.fetch_min(now_ns, Ordering::Relaxed);
        }
        now_ns >= noted.load(Ordering::Relaxed)
    })?;
    let mut output = Output::create(&options.output, form == FileForm::Parquet, options.force)?;
    let mut progress = Progress::new(options.quiet);
    let limit = options.limit.map(|limit| limit.0);
    let only = (form != FileForm::Recording).then_some(names[0]);
    match copy(&mut recording, only, output.writer(), form, limit, &end, &mut progress) {
        Ok(summary) => {
            output.keep()?;
            progress.end(summary);
            Ok(())
        }
        // A broken pipe is no failure.
        Err(Broken::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(Broken::Write(error)) => Err(Broken::Write(error).into()),
        // The events written until then are complete.
        Err(broken) => output.keep().and(Err(broken.into())),
    }
}

/// The format in which events are written.
enum Sink<W: Write + Send> {
    Recording(Box<Writer<BufWriter<W>>>),
    Parquet(Box<ParquetWriter<W>>),
    Text(Box<TextWriter<W>>),
}

impl<W: Write + Send> Sink<W> {
    fn new(out: W, header: &Header, form: FileForm) -> io::Result<Self> {
        let text = |out, form| TextWriter::new(out, header, form).map(Box::new).map(Self::Text);
        match form {
            FileForm::Parquet => {
                let writer = ParquetWriter::new(out, header, RowGroupLimits::default())?;
                Ok(Self::Parquet(Box::new(writer)))
            }
            FileForm::Csv => text(out, Form::Csv),
            FileForm::Jsonl => text(out, Form::Json),
            FileForm::Recording => {
                let writer = Writer::new(BufWriter::new(out), header, BlockLimits::default())?;
                Ok(Self::Recording(Box::new(writer)))
            }
        }
    }

    /// Copies a block unchanged and returns `true`; returns `false` if its rows must be appended.
    fn copy(&mut self, block: &Block) -> io::Result<bool> {
        match self {
            Self::Recording(writer) if block.has_rows() && block.count() >= KEPT_ROWS => {
                writer.copy(block).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    fn append(&mut self, batch: &Batch) -> io::Result<()> {
        match self {
            Self::Recording(writer) => {
                let mut rows = batch.times_ns.iter().zip(batch.rows());
                rows.try_for_each(|(time_ns, row)| {
                    writer.append(batch.stream, *time_ns, row.iter().map(Cell::from))
                })
            }
            Self::Parquet(writer) => writer.append(batch),
            Self::Text(writer) => writer.append(batch),
        }
    }

    fn note_dropped(&mut self, count: u64, place: DropPlace, disk: &str) -> io::Result<()> {
        match self {
            Self::Recording(writer) => writer.note_dropped(count, place, disk),
            Self::Parquet(writer) => {
                writer.note_dropped(count);
                Ok(())
            }
            Self::Text(writer) => {
                writer.note_dropped(count);
                Ok(())
            }
        }
    }

    /// Writes rows that have waited too long.
    fn flush_if_due(&mut self) -> io::Result<()> {
        match self {
            Self::Recording(writer) => writer.flush_if_due(),
            Self::Parquet(_) => Ok(()),
            Self::Text(writer) => writer.flush(),
        }
    }

    /// Whether the limit in bytes is reached, approximately, or the format's own limit. The rows
    /// held for a Parquet file become far smaller when they are written.
    fn is_full(&mut self, limit: Option<u64>) -> io::Result<bool> {
        let reached = |bytes: u64| limit.is_some_and(|limit| bytes >= limit);
        Ok(match self {
            Self::Recording(writer) => reached(writer.bytes()),
            Self::Parquet(writer) if writer.is_full() => true,
            Self::Parquet(writer) if reached(writer.bytes()) => {
                writer.flush()?;
                reached(writer.bytes() + limit.unwrap_or(0) / 8)
            }
            Self::Parquet(_) => false,
            Self::Text(writer) => reached(writer.summary().bytes),
        })
    }

    fn summary(&self) -> RecordingSummary {
        match self {
            Self::Recording(writer) => writer.summary(),
            Self::Parquet(writer) => writer.summary(),
            Self::Text(writer) => writer.summary(),
        }
    }

    fn finish(self, report: &ReadReport) -> io::Result<RecordingSummary> {
        match self {
            Self::Recording(writer) => writer.finish().map(|(_, summary)| summary),
            Self::Parquet(writer) => writer.finish(report),
            Self::Text(writer) => writer.finish(),
        }
    }
}

/// Writes the events before `end`, and completes the file also after an error of the stream. `only`
/// is the stream of a file that has a single one.
fn copy(
    recording: &mut Recording<impl Read>,
    only: Option<&str>,
    out: impl Write + Send,
    form: FileForm,
    limit: Option<u64>,
    end: &AtomicI64,
    progress: &mut Progress,
) -> Result<RecordingSummary, Broken> {
    let header = recording.header();
    let missing = |name: &str| io::Error::other(format!("the daemon has no stream {name}"));
    let only = only.map(|name| header.find(name).ok_or_else(|| missing(name))).transpose()?;
    let header = only.map_or_else(|| header.clone(), |stream| header.only(stream));
    let mut sink = Sink::new(out, &header, form)?;
    let filled = fill(recording, only, &mut sink, limit, end, progress);
    if let Err(Broken::Write(error)) = filled {
        return Err(Broken::Write(error));
    }
    let summary = sink.finish(recording.report())?;
    filled.map(|()| summary)
}

fn fill<W: Write + Send>(
    recording: &mut Recording<impl Read>,
    only: Option<usize>,
    sink: &mut Sink<W>,
    limit: Option<u64>,
    end: &AtomicI64,
    progress: &mut Progress,
) -> Result<(), Broken> {
    let mut batch = Batch::default();
    loop {
        let block = recording.next_block()?.ok_or(Broken::CutOff)?;
        if !sink.copy(&block)? {
            match recording.open_block(&block)? {
                Some(Item::Dropped { count, place, disk }) => {
                    sink.note_dropped(count, place, &disk)?;
                }
                Some(Item::End { .. }) => return Ok(()),
                // All events before the end have been sent.
                Some(Item::Moment(time_ns)) if time_ns >= end.load(Ordering::Relaxed) => {
                    return Ok(());
                }
                _ => {}
            }
            while recording.block_rows(&mut batch)? {
                if only.is_none_or(|stream| stream == batch.stream) {
                    sink.append(&batch)?;
                }
            }
        }
        sink.flush_if_due()?;
        progress.update(sink.summary());
        if sink.is_full(limit)? {
            return Ok(());
        }
    }
}

/// The progress shown while recording.
struct Progress {
    quiet: bool,
    terminal: bool,
    begun: Instant,
    shown: Instant,
    /// Whether the last line shown is to be replaced by the next.
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

    fn update(&mut self, summary: RecordingSummary) {
        let interval = if self.terminal { SHOW_INTERVAL } else { SHOW_INTERVAL_LINES };
        if self.quiet || self.shown.elapsed() < interval {
            return;
        }
        self.shown = Instant::now();
        let line = self.line(summary);
        if self.terminal {
            print_over(&line);
            self.open = true;
        } else {
            note!("{line}");
        }
    }

    fn end(&self, summary: RecordingSummary) {
        if !self.quiet {
            if self.open {
                print_over("");
            }
            note!("{}", self.line(summary));
        }
    }
}

//! A layer that writes a line for each request and each response.

use std::any::Any;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_block::{
    Capabilities, Facts, Layer, LayerPart, Observer, ObserverPosition, OpenContext, Operation,
    Outcome, Request,
};
use fathom_failure::Failure;
use fathom_insight::{Names, ProcessRole};
use fathom_options::{Check, Key};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::kind::{LayerContext, LayerOptions, Rank};

/// The highest limit of lines per second that can be configured.
const LINES_PER_SECOND_LIMIT: u64 = 1_000_000;

/// The configuration of a layer that writes requests to a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogOptions {
    /// The most lines that are written in a second; 0 for no limit.
    pub lines_per_second_max: u64,
    /// The file to which lines are appended; the daemon's log by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

impl Default for LogOptions {
    /// A hundred lines a second, in the daemon's log.
    fn default() -> Self {
        Self { lines_per_second_max: 100, file: None }
    }
}

impl LayerOptions for LogOptions {
    const KIND: &'static str = "log";
    const RANK: Rank = Rank::Trial;
    const MEANING: &'static str = "writes a line for each request and each response";
    const KEYS: &'static [Key] = &[
        Key::new(
            "lines_per_second_max",
            "100",
            "the most lines that are written in a second; 0 for no limit",
        ),
        Key::new(
            "file",
            "",
            "the file to which each line is appended immediately; the daemon's log by \
             default",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.lines_per_second_max > LINES_PER_SECOND_LIMIT {
            let message = format!("{} lines a second are too many", self.lines_per_second_max);
            let remedy = format!("choose at most {LINES_PER_SECOND_LIMIT}, or 0 for no limit");
            check.problem("lines_per_second_max", message, remedy);
        }
        if let Some(file) = &self.file {
            check.new_file("file", file, "lines cannot be appended to");
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let lines_max = self.lines_per_second_max;
        let log = if let Some(path) = &self.file {
            Log::to_file(context.disk, lines_max, path)?
        } else {
            Log::new("", lines_max, (context.log)())
        };
        Ok(Some(Arc::new(log.with_names(Arc::clone(context.names)))))
    }
}

/// The destination of lines. The queue's thread calls it: it must not block for long.
pub type LogSink = Box<dyn FnMut(&str) + Send>;

/// The state that the queues of a disk share.
struct Shared {
    sink: LogSink,
    names: Arc<Names>,
    /// Lines that may still be written in the second that began at `second_ns`.
    left: u64,
    second_ns: u64,
    /// The dropped lines that no line has reported yet.
    unreported: u64,
    dropped_total: u64,
    lines_per_second_max: u64,
    line: String,
}

/// A layer that writes one line for each request and one for each response, up to a limit per
/// second. It counts the dropped lines, and writes a line with their number.
///
/// ```text
/// disk0 #12 write 4096+512 fua
/// disk0 #12 write 4096+512 done 81250 ns
/// disk0 #13 read 0+4096 failed 1200 ns: input/output error
/// disk0 #14 write 4096+8192 | 4096 data source=bio inode=12 size=30 | 4096 metadata source=page
/// ```
///
/// If the meaning of a request is known, its line describes each part in order: the length, and
/// [the facts in words](Facts::describe). The line of a completed request does so again if a
/// process waits for it, and that of a flush if it is given to a file.
pub struct Log {
    shared: Arc<Mutex<Shared>>,
    prefix: Arc<str>,
    /// The file to which the lines are appended, if there is one.
    file: Option<LogFile>,
}

/// The file of a log.
struct LogFile {
    path: PathBuf,
    /// The device and the number of the open file.
    identity: Mutex<(u64, u64)>,
}

/// Opens the file of a log, and returns its device and number. The lines contain file names of
/// guests, so only the daemon's user may read them.
fn open_file(path: &Path) -> Result<(File, (u64, u64)), Failure> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    let opened = file.and_then(|file| {
        let metadata = file.metadata()?;
        Ok((file, (metadata.dev(), metadata.ino())))
    });
    opened.map_err(|error| {
        let what = format!("lines cannot be appended to {}", path.display());
        Failure::from(error).about(what).advise("name a file that the daemon may write")
    })
}

fn sink_of(mut writer: impl io::Write + Send + 'static) -> LogSink {
    let mut ended = String::new();
    Box::new(move |line: &str| {
        // One write for each line, so that concurrent readers of a file never see half a line.
        ended.clear();
        ended.push_str(line);
        ended.push('\n');
        let _ = writer.write_all(ended.as_bytes());
    })
}

impl Log {
    /// A layer that passes its lines, without line ends, to `sink`. Each line begins with `prefix`,
    /// for example the disk's name. `lines_per_second_max` limits the lines in each second of the
    /// stack's clock; 0 means no limit.
    pub fn new(prefix: &str, lines_per_second_max: u64, sink: LogSink) -> Self {
        let shared = Shared {
            sink,
            names: Arc::default(),
            left: lines_per_second_max,
            second_ns: 0,
            unreported: 0,
            dropped_total: 0,
            lines_per_second_max,
            line: String::new(),
        };
        Self { shared: Arc::new(Mutex::new(shared)), prefix: prefix.into(), file: None }
    }

    /// A layer that writes its lines to `writer`. Errors of the writer are ignored: a log never
    /// fails a disk.
    pub fn to_writer(
        prefix: &str,
        lines_per_second_max: u64,
        writer: impl io::Write + Send + 'static,
    ) -> Self {
        Self::new(prefix, lines_per_second_max, sink_of(writer))
    }

    /// A layer that appends its lines to the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be opened; the text includes a remedy.
    pub fn to_file(prefix: &str, lines_per_second_max: u64, path: &Path) -> io::Result<Self> {
        let (file, identity) = open_file(path)?;
        let log = Self::to_writer(prefix, lines_per_second_max, file);
        let file = LogFile { path: path.to_owned(), identity: Mutex::new(identity) };
        Ok(Self { file: Some(file), ..log })
    }

    /// The layer, if it is one of this kind.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// Appends lines to the file that is at the path now, for example after the old one has been
    /// renamed. Returns false if it is the same.
    ///
    /// # Errors
    /// If the file cannot be opened; the layer keeps the file that it has.
    pub fn open_again(&self) -> io::Result<bool> {
        let Some(LogFile { path, identity }) = &self.file else { return Ok(false) };
        let (file, new) = open_file(path)?;
        let mut identity = identity.lock();
        if *identity == new {
            return Ok(false);
        }
        *identity = new;
        self.shared.lock().sink = sink_of(file);
        Ok(true)
    }

    /// Sets the table with the texts of insights.
    #[must_use]
    pub fn with_names(self, names: Arc<Names>) -> Self {
        self.shared.lock().names = names;
        self
    }

    /// The number of dropped lines so far.
    pub fn dropped(&self) -> u64 {
        self.shared.lock().dropped_total
    }
}

impl Shared {
    /// Writes one line, unless the second's limit is reached.
    fn write(&mut self, now_ns: u64, fill: impl FnOnce(&mut String, &Names)) {
        const SECOND_NS: u64 = 1_000_000_000;
        let bounded = self.lines_per_second_max > 0;
        if now_ns.saturating_sub(self.second_ns) >= SECOND_NS {
            self.second_ns = now_ns;
            self.left = self.lines_per_second_max;
            if self.unreported > 0 {
                let lines = if self.unreported == 1 { "line" } else { "lines" };
                let notice = format!("{} {lines} dropped", self.unreported);
                (self.sink)(&notice);
                self.unreported = 0;
            }
        }
        if bounded && self.left == 0 {
            self.unreported += 1;
            self.dropped_total += 1;
            return;
        }
        self.left = self.left.saturating_sub(1);
        self.line.clear();
        fill(&mut self.line, &self.names);
        (self.sink)(&self.line);
    }
}

impl Layer for Log {
    fn name(&self) -> &'static str {
        "log"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::observer(LogQueue {
            shared: Arc::clone(&self.shared),
            prefix: Arc::clone(&self.prefix),
        }))
    }
}

struct LogQueue {
    shared: Arc<Mutex<Shared>>,
    prefix: Arc<str>,
}

/// `disk0 #12 write 4096+512 fua`.
fn describe(line: &mut String, prefix: &str, request: &Request) {
    let _ = write!(line, "{prefix} #{} {}", request.id, request.operation);
    if request.operation.has_range() {
        let _ = write!(line, " {}+{}", request.offset, request.length);
    }
    let flags = request.flags;
    for (set, name) in [
        (flags.force_unit_access, " fua"),
        (flags.keep_allocated, " keep-allocated"),
        (flags.only_if_fast, " only-if-fast"),
    ] {
        if set {
            line.push_str(name);
        }
    }
}

/// ` | 4096 data source=bio …` for each part, if the meaning is known.
fn explain(line: &mut String, names: &Names, request: &Request) {
    let insight = &request.insight;
    if insight.parts.is_empty() && insight.facts == Facts::default() {
        return;
    }
    for part in insight.parts(request.length) {
        let _ = write!(line, " | {} ", part.length);
        let _ = part.facts.describe(line, names);
    }
}

/// Whether more may be known about a request than when it came: a process waits for it, or it is a
/// flush that is given to a file.
fn is_explained_again(request: &Request) -> bool {
    let is_given = request.operation == Operation::Flush && request.insight.facts.inode != 0;
    let mut parts = request.insight.parts(request.length);
    is_given || parts.any(|part| part.facts.process_role == ProcessRole::Waiter)
}

impl Observer for LogQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        for request in requests {
            let now_ns = place.now_ns();
            *place.observe(request).word() = now_ns;
            self.shared.lock().write(now_ns, |line, names| {
                describe(line, &self.prefix, request);
                explain(line, names, request);
            });
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        for (request, outcome) in requests {
            let now_ns = place.now_ns();
            let took_ns = now_ns.saturating_sub(place.word(request));
            self.shared.lock().write(now_ns, |line, names| {
                describe(line, &self.prefix, request);
                let _ = match outcome {
                    Ok(()) => write!(line, " done {took_ns} ns"),
                    Err(error) => write!(line, " failed {took_ns} ns: {error}"),
                };
                if is_explained_again(request) {
                    explain(line, names, request);
                }
            });
        }
    }
}

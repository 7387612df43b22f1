//! Live events of the daemon's disks.
//!
//! A command that ends after a time, or with a signal, ends at an instant of the events: it reads
//! until the daemon states that all events before this instant have been sent. So no event is lost
//! that the daemon had at the end, however slowly the command reads.

use std::{
    io::{self, Read},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use fathom_control::{AnswerStream, Client, ClientError, ErrorCode};
use fathom_insight::STREAMS;
use fathom_monitor::recording::Header;
use parking_lot::Mutex;

use crate::failure::{CommandResult, Failure, reason};

/// How long a daemon may send nothing after the end for which a command waits. While it works, it
/// states at each pulse which events it has sent.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// The interval of the checks whether to end.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The live events of a daemon.
pub struct EventStream {
    answer: AnswerStream,
    wait: Arc<Mutex<Wait>>,
}

/// What a stream waits for.
#[derive(Default)]
struct Wait {
    /// The beginning of the read that waits for the daemon.
    since: Option<Instant>,
    /// Whether the daemon has sent nothing for too long.
    is_over: bool,
}

impl EventStream {
    fn new(answer: AnswerStream) -> Self {
        Self { answer, wait: Arc::default() }
    }

    /// A watch over the stream.
    ///
    /// # Errors
    /// When the process has no free descriptor.
    pub fn watch(&self) -> CommandResult<Watch> {
        let connection = self.answer.connection().map_err(|error| cannot_watch(&error))?;
        Ok(Watch { connection, wait: Arc::downgrade(&self.wait) })
    }
}

/// A watch over a stream whose command has an end.
pub struct Watch {
    connection: UnixStream,
    wait: Weak<Mutex<Wait>>,
}

fn cannot_watch(error: &io::Error) -> Failure {
    Failure::new(format!("cannot watch the daemon: {}", reason(error)))
}

impl Watch {
    /// Calls `is_due` from a thread until it returns true. From then on the stream fails when the
    /// daemon has sent nothing for 5 s.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn begin(self, mut is_due: impl FnMut() -> bool + Send + 'static) -> CommandResult {
        let Self { connection, wait } = self;
        let watch = move || {
            let mut due = false;
            // The stream may have ended before.
            while let Some(wait) = wait.upgrade() {
                due = due || is_due();
                let mut wait = wait.lock();
                if due && wait.since.is_some_and(|since| since.elapsed() >= SILENCE_MAX) {
                    wait.is_over = true;
                    // Fails only if the other side has already closed the connection.
                    let _ = connection.shutdown(Shutdown::Both);
                    return;
                }
                drop(wait);
                thread::sleep(CHECK_INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("watch".into());
        thread.spawn(watch).map(drop).map_err(|error| cannot_watch(&error))
    }
}

impl Read for EventStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait.lock().since = Some(Instant::now());
        let read = self.answer.read(buffer);
        let mut wait = self.wait.lock();
        wait.since = None;
        match read {
            Ok(0) | Err(_) if wait.is_over => {
                let text = format!("it has sent nothing for {} s", SILENCE_MAX.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            read => read,
        }
    }
}

/// The clock of a recording's times, as of its beginning.
#[derive(Clone, Copy, Debug)]
pub struct EventClock {
    begun: Instant,
    begun_ns: i64,
}

impl EventClock {
    /// The clock of a recording of this host that has just begun.
    pub fn new(header: &Header) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ns = i64::try_from(unix.as_nanos()).unwrap_or(i64::MAX);
        let begun_ns = unix_ns.saturating_sub(header.wall_offset_ns);
        Self { begun: Instant::now(), begun_ns }
    }

    /// The events' time, in nanoseconds, at a time after the beginning.
    pub fn at(&self, time: Instant) -> i64 {
        self.after(time.saturating_duration_since(self.begun))
    }

    /// The events' time, in nanoseconds, this long after the beginning.
    pub fn after(&self, time: Duration) -> i64 {
        self.begun_ns.saturating_add(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX))
    }
}

/// Opens the stream of the live events of some disks, or of all disks if `disks` is empty, and of
/// some streams. Streams that the daemon does not know are no error: its recording does not have
/// them. The stream has the bytes of a recording, for `fathom_monitor::read::from_bytes` or
/// `fathom_monitor::recording::Recording::open`.
///
/// With `pulse` the recording contains an `Item::Moment` at this interval: the instant up to which
/// all events have been sent. A reader that waits for an instant then need not wait for the next
/// event.
///
/// # Errors
/// If the daemon cannot be reached, or a disk does not exist.
pub fn open_event_stream(
    client: &Client,
    disks: &[String],
    streams: &[&str],
    pulse: Option<Duration>,
) -> CommandResult<EventStream> {
    // The disks may be served on this machine, and have priority.
    fathom_monitor::give_way();
    // A stream of a script's own has the rows of `IOstream`.
    let name_of = |name: &&str| {
        let names = STREAMS.iter().map(|stream| stream.name);
        names.into_iter().find(|known| known.eq_ignore_ascii_case(name)).unwrap_or(IO_STREAM)
    };
    let mut names: Vec<&str> = streams.iter().map(name_of).collect();
    names.sort_unstable();
    names.dedup();
    // A daemon that does not know the parameter has `IOstream` alone.
    let has_io = names.contains(&IO_STREAM);
    if names == [IO_STREAM] {
        names.clear();
    }
    match client.recording(disks, &names, pulse) {
        Err(ClientError::Refused(body)) if body.code == ErrorCode::Invalid && has_io => {
            Ok(EventStream::new(client.recording(disks, &[], pulse)?))
        }
        answer => Ok(EventStream::new(answer?)),
    }
}

/// The stream that every version has.
const IO_STREAM: &str = STREAMS[0].name;

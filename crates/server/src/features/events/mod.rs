//! Live events and their listeners.
//!
//! While there are listeners, one thread collects the events of their streams and disks from the
//! [producers](producer). It puts them into blocks of a recording, each with events of one stream
//! and one disk, and sends each block to all listeners to them. The thread never waits for a
//! listener: if a listener's buffer is full, the listener loses blocks, and gets a report of the
//! number of lost events.

mod changes;
mod collector;
mod columns;
pub(crate) mod feature;
mod feed;
mod listener;
mod patterns;
mod producer;
pub(crate) mod requests;
mod source;
mod syscalls;
pub(crate) mod tap;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{ErrorBody, ErrorCode};
use fathom_insight::STREAMS;
use fathom_monitor::recording::{self, Header};
use fathom_monitor::streams;
use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) use feed::{EventFeed, FeedWaker, follow};
pub(crate) use listener::EventBody;
pub(crate) use source::DiskEvents;

use crate::daemon::Daemon;
use crate::daemon::stack::refusal;
use listener::Listener;

/// The most listeners.
const LISTENERS_MAX: usize = 64;

/// The state that listeners and the collector share.
#[derive(Default)]
pub(crate) struct Events {
    state: Mutex<State>,
    /// Wakes the collector immediately.
    woken: Condvar,
}

#[derive(Default)]
struct State {
    listeners: Vec<Arc<Listener>>,
    collecting: bool,
    /// Set when the daemon shuts down: past events are sent, then all streams end.
    ending: bool,
}

/// The position of `IOstream` in [`STREAMS`].
pub(crate) const IO_STREAM: usize = 0;

/// The position of `Changes` in [`STREAMS`].
const CHANGES: usize = 1;

/// The position of `Patterns` in [`STREAMS`].
const PATTERNS: usize = 2;

/// The position of `Syscalls` in [`STREAMS`].
const SYSCALLS: usize = 3;

/// A set of streams, by their positions in [`STREAMS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamSet(u64);

impl StreamSet {
    /// `IOstream` alone.
    pub const IO: Self = Self(1 << IO_STREAM);

    /// All streams.
    pub const ALL: Self = Self((1 << STREAMS.len()) - 1);

    /// The streams with these names.
    ///
    /// # Errors
    /// A message about a name that no stream has.
    pub fn of<'n>(names: impl IntoIterator<Item = &'n str>) -> Result<Self, String> {
        let mut set = Self(0);
        for name in names {
            let stream = fathom_insight::stream::position(name);
            set = set.with(stream.ok_or_else(|| format!("there is no stream {name:?}"))?);
        }
        Ok(set)
    }

    /// Whether a stream is in the set.
    pub fn contains(self, stream: usize) -> bool {
        self.0 >> stream & 1 == 1
    }

    /// The set with another stream.
    pub fn with(self, stream: usize) -> Self {
        Self(self.0 | 1 << stream)
    }
}

impl Default for StreamSet {
    fn default() -> Self {
        Self::IO
    }
}

impl Events {
    /// Wakes the collector.
    fn wake(&self) {
        self.woken.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Ends all streams in order, and waits for that up to `limit`.
    pub(crate) fn end(&self, limit: Duration) {
        let end = Instant::now() + limit;
        self.state().ending = true;
        self.woken.notify_all();
        while self.state().collecting && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether every listener has received all events.
    pub(crate) fn all_delivered(&self) -> bool {
        self.state().listeners.iter().all(|listener| listener.has_left())
    }
}

/// The request of a listener.
#[derive(Default)]
pub(crate) struct ListenRequest {
    /// The disks; an empty set stands for all disks.
    pub disks: BTreeSet<String>,
    /// The streams at the beginning.
    pub streams: StreamSet,
    /// Whether the header has all streams, so that the request may change them.
    pub has_all_headers: bool,
    /// How often to report the instant before which all events have been sent.
    pub pulse: Option<Duration>,
    /// How often to report it while there are no events.
    pub idle_pulse: Option<Duration>,
}

/// The header of a recording of all streams that begins now. The blocks of `IOstream` are also
/// valid in a recording of that stream alone, because it is the first.
fn header(daemon: &Daemon) -> Header {
    let unix_ns = daemon.unix_time_ns();
    let offset = unix_ns as i64 - Clock::System.now_ns() as i64;
    Header::of_streams(&streams(), recording::Clock::Monotonic, offset)
}

/// A stream of the requested events from now on.
pub(crate) fn listen(daemon: &Arc<Daemon>, request: ListenRequest) -> Result<EventBody, ErrorBody> {
    subscribe(daemon, request).map(|(listener, _)| EventBody::new(listener))
}

/// Adds a listener to disks that have taps. Returns it with the header of its blocks.
fn subscribe(
    daemon: &Arc<Daemon>,
    request: ListenRequest,
) -> Result<(Arc<Listener>, Header), ErrorBody> {
    for name in &request.disks {
        let has_tap = daemon.tap_of(name)?.is_some();
        if request.streams.contains(IO_STREAM) && !has_tap {
            let message = format!("the disk {name:?} has no tap, so its events are not collected");
            return Err(refusal(ErrorCode::Conflict, message, "set `tap = true` for it"));
        }
    }
    let (listener, header) = add_listener(daemon, request, LISTENERS_MAX)?;
    // Events are sent only after the collection has begun. After this wait, the client misses no
    // event that follows its response.
    listener.wait_until_begun(Duration::from_secs(1));
    Ok((listener, header))
}

/// Adds a listener if there are fewer than `listeners_max`, and starts the collector if necessary.
fn add_listener(
    daemon: &Arc<Daemon>,
    request: ListenRequest,
    listeners_max: usize,
) -> Result<(Arc<Listener>, Header), ErrorBody> {
    let all = header(daemon);
    let is_io = request.streams == StreamSet::IO && !request.has_all_headers;
    let header = if is_io { all.only(IO_STREAM) } else { all.clone() };
    let bytes = header.to_bytes().map_err(|error| {
        refusal(ErrorCode::Failed, format!("the header cannot be written: {error}"), "")
    })?;
    let listener = Arc::new(Listener::new(request, bytes));
    let events = daemon.events();
    let mut state = events.state();
    state.listeners.retain(|listener| !listener.has_left());
    if state.ending {
        return Err(refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", ""));
    }
    if state.listeners.len() >= listeners_max {
        let message = format!("there are {listeners_max} listeners already");
        return Err(refusal(ErrorCode::Conflict, message, "close one of their streams"));
    }
    if !state.collecting {
        let collector = collector::Collector::new(Arc::clone(daemon), all);
        let thread = std::thread::Builder::new().name("events".into());
        thread.spawn(move || collector.run()).map_err(|error| {
            refusal(
                ErrorCode::Failed,
                format!("the thread that collects events cannot be started: {error}"),
                "",
            )
        })?;
        state.collecting = true;
    }
    state.listeners.push(Arc::clone(&listener));
    drop(state);
    events.woken.notify_all();
    Ok((listener, header))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_positions_of_the_streams_are_those_of_the_table() {
        let names = [IO_STREAM, CHANGES, PATTERNS, SYSCALLS].map(|stream| STREAMS[stream].name);
        assert_eq!(names, ["IOstream", "Changes", "Patterns", "Syscalls"]);
        let all = StreamSet::of(["iostream", "Changes", "patterns", "syscalls"]).unwrap();
        assert_eq!((all, StreamSet::of(["IOstream"]).unwrap()), (StreamSet::ALL, StreamSet::IO));
        assert!(StreamSet::of(["else"]).is_err());
    }
}

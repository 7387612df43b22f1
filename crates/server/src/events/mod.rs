//! Live events: who listens, and what is collected for them.
//!
//! While somebody listens, one thread collects the events of the disks that are listened to, puts
//! them into blocks of a recording, one disk a block, and hands each block to all who want that
//! disk. Nobody waits for a listener: whose buffer is full loses blocks, and is told how many
//! events they had.

mod collector;
mod columns;
mod feed;
mod listener;
mod source;

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{ErrorBody, ErrorCode};
use fathom_layers::Tap;
use fathom_monitor::io_stream;
use fathom_monitor::recording::{self, Header};

pub(crate) use feed::{EventFeed, Nudge, follow};
pub(crate) use listener::EventBody;
pub(crate) use source::DiskEvents;

use crate::daemon::Daemon;
use crate::wiring::refusal;
use listener::Listener;

/// The most that listen at once.
const LISTENERS_MAX: usize = 64;

/// What listeners and the collector share.
#[derive(Default)]
pub(crate) struct Events {
    state: Mutex<State>,
    /// Notified when the collector has something to do at once.
    woken: Condvar,
}

#[derive(Default)]
struct State {
    listeners: Vec<Arc<Listener>>,
    collecting: bool,
    /// The daemon ends: what has happened is told, then all streams end.
    ending: bool,
}

/// A disk that has a tap.
pub(crate) struct Source {
    pub name: String,
    pub tap: Tap,
}

impl Events {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all streams in order, and waits for that until the limit.
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
        self.state().listeners.iter().all(|listener| listener.is_gone())
    }
}

/// What a listener asks for.
#[derive(Default)]
pub(crate) struct ListenRequest {
    /// The disks; all where there are none.
    pub disks: BTreeSet<String>,
    /// How often to report the instant before which all events have been sent.
    pub pulse: Option<Duration>,
    /// How often to report it while there are no events.
    pub idle_pulse: Option<Duration>,
}

/// The header of a recording that begins now.
fn header(daemon: &Daemon) -> Header {
    let unix_ns = daemon.unix_time_ns();
    let offset = unix_ns as i64 - Clock::System.now_ns() as i64;
    Header::new(&io_stream(), recording::Clock::Monotonic, offset)
}

/// A stream of the events that `request` asks for, from now on.
pub(crate) fn listen(daemon: &Arc<Daemon>, request: ListenRequest) -> Result<EventBody, ErrorBody> {
    subscribe(daemon, request).map(|(listener, _)| EventBody::new(listener))
}

/// One more who listens, and the header that its blocks belong to.
fn subscribe(
    daemon: &Arc<Daemon>,
    request: ListenRequest,
) -> Result<(Arc<Listener>, Header), ErrorBody> {
    for name in &request.disks {
        if daemon.tap_of(name)?.is_none() {
            let message = format!("the disk {name:?} has no tap, so nobody knows its events");
            return Err(refusal(ErrorCode::Conflict, message, "give it `tap = true`"));
        }
    }
    let (listener, header) = enrol(daemon, request, LISTENERS_MAX)?;
    // Until it is collected nothing is told: whoever has an answer misses nothing from then on.
    listener.wait_until_begun(Duration::from_secs(1));
    Ok((listener, header))
}

/// Has events collected for one more listener, if there are fewer than `most`.
fn enrol(
    daemon: &Arc<Daemon>,
    request: ListenRequest,
    most: usize,
) -> Result<(Arc<Listener>, Header), ErrorBody> {
    let header = header(daemon);
    let bytes = header
        .to_bytes()
        .map_err(|error| refusal(ErrorCode::Failed, format!("there is no header: {error}"), ""))?;
    let listener = Arc::new(Listener::new(request, bytes));
    let events = daemon.events();
    let mut state = events.state();
    state.listeners.retain(|listener| !listener.is_gone());
    if state.ending {
        return Err(refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", ""));
    }
    if state.listeners.len() >= most {
        let message = format!("{most} listen already");
        return Err(refusal(ErrorCode::Conflict, message, "end one of them"));
    }
    if !state.collecting {
        let collector = collector::Collector::new(Arc::clone(daemon), header.clone());
        let thread = std::thread::Builder::new().name("events".into());
        thread.spawn(move || collector.run()).map_err(|error| {
            refusal(ErrorCode::Failed, format!("no thread collects events: {error}"), "")
        })?;
        state.collecting = true;
    }
    state.listeners.push(Arc::clone(&listener));
    drop(state);
    events.woken.notify_all();
    Ok((listener, header))
}

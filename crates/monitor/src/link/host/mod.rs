//! A host's side of the link: a thread that runs the centre's fragments over the host's events.
//!
//! The thread takes the available events, runs the fragments, and sends as much as the connection
//! accepts. It never waits for the centre while there are events. While it is not connected, it
//! continues within the limit of its buffer, and tries to connect at growing intervals.

mod outbox;
mod runner;
mod session;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_cql::catalog::StreamSchema;
use parking_lot::{Mutex, MutexGuard};

use super::channel::Line;
use super::plans::{Fragments, STACK};
use fathom_tls::Tls;

use super::BUFFER_MAX;
use crate::read::{Batch, WantedStream};
use crate::{HELD_MAX, give_way};
use outbox::Outbox;
use runner::Runner;
use session::{CentreRequest, Session};

/// The pause of the thread while there is no connection.
const PAUSE: Duration = Duration::from_millis(10);
/// The most items of events that are taken between two reads of the connection.
const PARTS: usize = 256;
/// The number of rounds that take the last events before the thread ends.
const LAST_ROUNDS: usize = 16;
/// The longest time without a connection before the fragments end.
const AWAY_MAX: Duration = Duration::from_secs(60);

/// An item of a host's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventItem {
    /// Rows. They are in the batch.
    Rows,
    /// A number of events that are missing at this position.
    Dropped(u64),
    /// An instant, in nanoseconds, before which no more events follow.
    Watermark(i64),
}

/// The source of a host's events.
pub trait EventSource: Send {
    /// The streams of the events.
    fn streams(&self) -> Vec<StreamSchema>;

    /// The current time of the events' clock, in nanoseconds.
    fn clock_ns(&self) -> i64;

    /// The nanoseconds to add to a time of that clock to get the time since 1970. The number does
    /// not change.
    fn unix_offset_ns(&self) -> i64;

    /// Begins to collect events of the wanted streams. Batches have the positions of their streams
    /// in `wanted`.
    ///
    /// # Errors
    /// The reason why events are not available.
    fn begin(&mut self, wanted: &[WantedStream]) -> Result<(), String>;

    /// The next item, without waiting; `None` if there is none now. Rows replace the content of
    /// `batch`.
    ///
    /// # Errors
    /// The reason why no more events follow.
    fn next(&mut self, batch: &mut Batch) -> Result<Option<EventItem>, String>;

    /// Stops collecting events.
    fn end(&mut self);
}

/// The options of a host's side.
#[derive(Clone)]
pub struct HostOptions {
    /// The host's name: that of its certificate.
    pub name: String,
    /// The address of the centre, `host:port`.
    pub centre: String,
    /// The name that the centre's certificate must have; by default the host of the address.
    pub centre_name: Option<String>,
    /// The encryption; `None` for plain text.
    pub tls: Option<Tls>,
    /// The most bytes that wait for the centre.
    pub buffer_max: usize,
    /// The most rows, groups and values that the centre's fragments may hold.
    pub held_max: u64,
    /// The first and the longest pause before the next attempt to connect.
    pub retry: (Duration, Duration),
}

impl HostOptions {
    /// Options of a host that connects in plain text.
    pub fn new(name: &str, centre: &str) -> Self {
        Self {
            name: name.to_owned(),
            centre: centre.to_owned(),
            centre_name: None,
            tls: None,
            buffer_max: BUFFER_MAX,
            held_max: HELD_MAX,
            retry: (Duration::from_millis(200), Duration::from_secs(30)),
        }
    }
}

/// The state of a host's connection to its centre.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// Not connected; the host tries to connect.
    #[default]
    Away,
    /// Connected without fragments.
    Connected,
    /// The centre's fragments run.
    Running,
}

impl LinkState {
    /// The state's name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::Connected => "connected",
            Self::Running => "running",
        }
    }
}

/// The status of a host's side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkStatus {
    /// The state of the connection.
    pub state: LinkState,
    /// The time of the connection, in nanoseconds since 1970; 0 if not connected.
    pub since_unix_ns: i64,
    /// Why the connection was lost, or why the fragments do not run.
    pub problem: Option<String>,
    /// The number of fragments that run.
    pub fragments: usize,
    /// The number to add to the host's clock to get the centre's, in nanoseconds.
    pub correction_ns: i64,
    /// The number of connections so far.
    pub connections: u64,
    /// The number of events that the fragments have processed.
    pub events: u64,
    /// The number of bytes sent.
    pub sent_bytes: u64,
    /// The number of bytes that wait for the centre.
    pub waiting_bytes: u64,
    /// The number of events that are missing at the fragments.
    pub dropped_events: u64,
    /// The number of rows that were not sent because the centre was slow or not connected.
    pub dropped_rows: u64,
}

#[derive(Default)]
struct Shared {
    status: Mutex<LinkStatus>,
    ending: AtomicBool,
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, LinkStatus> {
        self.status.lock()
    }
}

/// A host's side of the link. It ends when it is dropped.
pub struct Host {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Starts the thread, which connects to the centre.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(options: HostOptions, source: Box<dyn EventSource>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let noted = Arc::clone(&shared);
        // Plans may be nested deeply.
        let thread = std::thread::Builder::new().name("monitor".into()).stack_size(STACK);
        let thread = thread.spawn(move || {
            give_way();
            Worker::new(options, source, noted).run();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The current status.
    pub fn status(&self) -> LinkStatus {
        self.shared.status().clone()
    }

    /// Sends the waiting frames, announces the end to the centre, and ends the thread. Waits for
    /// about `limit` at most.
    pub fn stop(&mut self, limit: Duration) {
        self.shared.ending.store(true, Ordering::Release);
        let end = Instant::now() + limit;
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
            if thread.is_finished() {
                // The panic hook has already logged a panic of the thread.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
    }
}

/// The state of the connection.
enum Link {
    /// Not connected until the next attempt.
    Away { next: Instant },
    /// An attempt to connect is in progress.
    Connecting(Receiver<io::Result<Line>>),
    /// Connected.
    Up(Box<Session>),
}

/// The running fragments, with the run of the centre and the epoch that they belong to.
struct Running {
    run: u64,
    epoch: u32,
    runner: Runner,
}

struct Worker {
    options: HostOptions,
    source: Box<dyn EventSource>,
    shared: Arc<Shared>,
    link: Link,
    retry: Duration,
    running: Option<Running>,
    outbox: Outbox,
    batch: Batch,
    away_since: Instant,
    sent_before: u64,
}

impl Worker {
    fn new(options: HostOptions, source: Box<dyn EventSource>, shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        Self {
            retry: options.retry.0,
            outbox: Outbox::new(options.buffer_max),
            options,
            source,
            shared,
            link: Link::Away { next: now },
            running: None,
            batch: Batch::default(),
            away_since: now,
            sent_before: 0,
        }
    }

    fn run(&mut self) {
        while !self.shared.ending.load(Ordering::Acquire) {
            self.round();
        }
        for _ in 0..LAST_ROUNDS {
            self.take_events();
        }
        if let Link::Up(session) =
            std::mem::replace(&mut self.link, Link::Away { next: Instant::now() })
        {
            session.leave(&mut self.outbox, "the host ends");
        }
        self.source.end();
    }

    fn round(&mut self) {
        match &mut self.link {
            Link::Away { next } => {
                if Instant::now() >= *next {
                    self.link = Link::Connecting(session::connect(&self.options));
                } else {
                    std::thread::sleep(PAUSE);
                }
            }
            Link::Connecting(connected) => match connected.recv_timeout(PAUSE) {
                Ok(Ok(line)) => self.up(line),
                Ok(Err(error)) => self.down(&error.to_string()),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.down("the thread that connects has ended");
                }
            },
            Link::Up(session) => {
                let clock = || self.source.clock_ns().saturating_add(self.source.unix_offset_ns());
                match session.round(&mut self.outbox, &clock) {
                    Ok(requests) => {
                        for request in requests {
                            self.carry_out(request);
                        }
                    }
                    Err(error) => self.down(&error.to_string()),
                }
            }
        }
        self.take_events();
        self.note();
        if !matches!(self.link, Link::Up(_)) && self.away_since.elapsed() > AWAY_MAX {
            self.end_fragments();
        }
    }

    fn up(&mut self, line: Line) {
        self.link = Link::Up(Box::new(Session::new(line, &self.options.name)));
        let mut status = self.shared.status();
        status.state = LinkState::Connected;
        status.since_unix_ns = super::unix_time_ns();
        status.connections += 1;
    }

    fn down(&mut self, problem: &str) {
        if let Link::Up(session) = &self.link {
            self.sent_before += session.sent_bytes();
            self.away_since = Instant::now();
            if session.is_running() {
                self.retry = self.options.retry.0;
            }
        }
        // A random part of the pause spreads the connections of many hosts.
        let pause = self.retry.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.retry = (self.retry * 2).min(self.options.retry.1);
        self.link = Link::Away { next: Instant::now() + pause };
        let mut status = self.shared.status();
        status.state = LinkState::Away;
        status.since_unix_ns = 0;
        status.problem = Some(problem.to_owned());
    }

    /// Ends the fragments.
    fn end_fragments(&mut self) {
        if self.running.take().is_some() {
            self.source.end();
            self.outbox.clear();
            self.shared.status().fragments = 0;
        }
    }

    fn carry_out(&mut self, request: CentreRequest) {
        match request {
            CentreRequest::Correct { correction_ns } => self.correct(correction_ns),
            CentreRequest::Run { run, epoch, number, fresh, correction_ns, plans } => {
                let same = self
                    .running
                    .as_ref()
                    .is_some_and(|running| (running.run, running.epoch) == (run, epoch));
                let result = if same {
                    self.resume(number, fresh);
                    Ok(())
                } else {
                    self.replace(run, epoch, &plans)
                };
                match result {
                    Ok(()) => {
                        self.correct(correction_ns);
                        self.note_address();
                        self.accept(epoch, same);
                    }
                    Err(reason) => self.refuse(epoch, &reason),
                }
            }
        }
    }

    /// Sets the address of the connection as the address of the events' host.
    fn note_address(&mut self) {
        if let (Some(running), Link::Up(session)) = (&mut self.running, &self.link) {
            if let Some(address) = session.address() {
                running.runner.set_address(address);
            }
        }
    }

    fn correct(&mut self, correction_ns: i64) {
        if let Some(running) = &mut self.running {
            running.runner.correct(correction_ns);
            self.shared.status().correction_ns = correction_ns;
        }
    }

    /// Resumes the running fragments: the centre has received all frames up to `number`.
    fn resume(&mut self, number: u64, fresh: bool) {
        self.outbox.resume(number);
        if let (true, Some(running)) = (fresh, &self.running) {
            self.outbox.forget_relations(running.runner.relations());
        }
    }

    /// Replaces the fragments.
    fn replace(&mut self, run: u64, epoch: u32, plans: &[u8]) -> Result<(), String> {
        self.end_fragments();
        let fragments = Fragments::from_bytes(plans)?;
        let wanted = fragments.wanted(&self.source.streams())?;
        self.source.begin(&wanted)?;
        self.outbox.begin();
        let (offset_ns, held_max) = (self.source.unix_offset_ns(), self.options.held_max);
        let runner = Runner::new(&fragments, &wanted, offset_ns, held_max);
        self.running = Some(Running { run, epoch, runner });
        let mut status = self.shared.status();
        status.fragments = fragments.plans.len();
        status.problem = None;
        Ok(())
    }

    fn accept(&mut self, epoch: u32, resumed: bool) {
        if let Link::Up(session) = &mut self.link {
            session.accept(epoch, resumed);
        }
        self.shared.status().state = LinkState::Running;
    }

    fn refuse(&mut self, epoch: u32, reason: &str) {
        self.end_fragments();
        if let Link::Up(session) = &mut self.link {
            session.refuse(epoch, reason);
        }
        let mut status = self.shared.status();
        status.problem = Some(reason.to_owned());
        if status.state == LinkState::Running {
            status.state = LinkState::Connected;
        }
    }

    /// Takes the available events.
    fn take_events(&mut self) {
        for _ in 0..PARTS {
            let Some(running) = &mut self.running else { return };
            let done = match self.source.next(&mut self.batch) {
                Ok(None) => return,
                Ok(Some(EventItem::Rows)) => running.runner.rows(&mut self.batch),
                Ok(Some(EventItem::Dropped(events))) => {
                    self.outbox.missed(events);
                    Ok(())
                }
                Ok(Some(EventItem::Watermark(time_ns))) => {
                    running.runner.advance(time_ns, &mut self.outbox)
                }
                Err(reason) => Err(reason),
            };
            if let Err(reason) = done {
                let epoch = running.epoch;
                self.refuse(epoch, &reason);
            }
        }
    }

    fn note(&mut self) {
        let sent = match &self.link {
            Link::Up(session) => session.sent_bytes(),
            _ => 0,
        };
        let mut status = self.shared.status();
        if let Some(running) = &self.running {
            status.events = running.runner.events();
        }
        status.sent_bytes = self.sent_before + sent;
        status.waiting_bytes = self.outbox.bytes() as u64;
        status.dropped_events = self.outbox.dropped_events;
        status.dropped_rows = self.outbox.dropped_rows;
    }
}

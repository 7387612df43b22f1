//! A host's side: a thread that runs the centre's fragments over the host's events.
//!
//! The thread takes what events there are, runs the fragments, and sends what there is room for;
//! it never waits for the centre with events in hand. While the centre is away it goes on, within
//! the buffer's bound, and connects again, at first soon, then less often.

mod outbox;
mod runner;
mod session;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_cql::catalog::StreamSchema;

use super::channel::Line;
use super::plans::{Fragments, STACK};
use fathom_tls::Tls;

use super::BUFFER_MAX;
use crate::read::Batch;
use crate::{HELD_MAX, give_way};
use outbox::Outbox;
use runner::Runner;
use session::{Asked, Session};

/// How long the thread sleeps while there is no connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Parts of the events that are taken between two looks at the connection.
const PARTS: usize = 256;
/// So often are the last events looked for.
const LAST_ROUNDS: usize = 16;
/// Fragments of a centre that has been away for so long are let go of.
const AWAY_MAX: Duration = Duration::from_secs(60);

/// A part of a host's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventItem {
    /// Rows, which are in the batch.
    Rows,
    /// So many events are missing here.
    Dropped(u64),
    /// Nothing from before this instant comes any more.
    Watermark(i64),
}

/// Where a host's events come from.
pub trait EventSource: Send {
    /// The stream that they are of.
    fn schema(&self) -> StreamSchema;

    /// The clock of the events now, in nanoseconds.
    fn clock_ns(&self) -> i64;

    /// What to add to a time of that clock for one since 1970, in nanoseconds. It does not change.
    fn unix_offset_ns(&self) -> i64;

    /// Events are wanted from now on, with these columns of the stream.
    ///
    /// # Errors
    /// Why there are none.
    fn begin(&mut self, wanted: &[bool]) -> Result<(), String>;

    /// The next part, without waiting; rows are put in place of what is in `batch`. `None` where
    /// there is nothing for now.
    ///
    /// # Errors
    /// Why no events come any more.
    fn next(&mut self, batch: &mut Batch) -> Result<Option<EventItem>, String>;

    /// No events are wanted any more.
    fn end(&mut self);
}

/// How a host finds the centre.
#[derive(Clone)]
pub struct HostOptions {
    /// The host's name: that of its certificate.
    pub name: String,
    /// Where the centre listens, `host:port`.
    pub centre: String,
    /// The name that the centre's certificate has to have; the host of the address by default.
    pub centre_name: Option<String>,
    /// How the connection is encrypted; `None` for plain text.
    pub tls: Option<Tls>,
    /// The most bytes that wait for the centre.
    pub buffer_max: usize,
    /// The most rows, groups and values that the centre's fragments may hold.
    pub held_max: u64,
    /// How long to wait before a connection is tried again, at first and at most.
    pub retry: (Duration, Duration),
}

impl HostOptions {
    /// A host that speaks plain text to a centre.
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

/// Whether a host has its centre.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// It tries to connect.
    #[default]
    Away,
    /// It is connected, and runs nothing yet.
    Connected,
    /// It runs the centre's fragments.
    Running,
}

impl LinkState {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::Connected => "connected",
            Self::Running => "running",
        }
    }
}

/// What a host knows of the link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkStatus {
    /// Whether it has its centre.
    pub state: LinkState,
    /// Since when, in nanoseconds since 1970; 0 while away.
    pub since_unix_ns: i64,
    /// Why it was away last, or runs nothing.
    pub problem: Option<String>,
    /// The fragments that run.
    pub fragments: usize,
    /// What is added to the host's clock for the centre's, in nanoseconds.
    pub correction_ns: i64,
    /// Connections so far.
    pub connections: u64,
    /// Events that the fragments have seen.
    pub events: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// Bytes that wait for the centre.
    pub waiting_bytes: u64,
    /// Events that were missing before the fragments saw them.
    pub dropped_events: u64,
    /// Rows that were not sent, because the centre was away or slow.
    pub dropped_rows: u64,
}

#[derive(Default)]
struct Shared {
    status: Mutex<LinkStatus>,
    ending: AtomicBool,
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, LinkStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host's side of the link. It ends when it is dropped.
pub struct Host {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Begins to look for the centre.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn start(options: HostOptions, source: Box<dyn EventSource>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let noted = Arc::clone(&shared);
        // Plans may be nested deep.
        let thread = std::thread::Builder::new().name("monitor".into()).stack_size(STACK);
        let thread = thread.spawn(move || {
            give_way();
            Worker::new(options, source, noted).run();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What is known of the link.
    pub fn status(&self) -> LinkStatus {
        self.shared.status().clone()
    }

    /// Ends in good order: tells the centre what there is, and that the host leaves. It takes
    /// about `limit` at most.
    pub fn stop(&mut self, limit: Duration) {
        self.shared.ending.store(true, Ordering::Release);
        let end = Instant::now() + limit;
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
            if thread.is_finished() {
                // It logs nothing of its own: a panic was told by the hook.
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

/// What the connection is.
enum Link {
    /// None, until the next is tried.
    Away { next: Instant },
    /// One that is being made.
    Connecting(Receiver<io::Result<Line>>),
    /// One that is there.
    Up(Box<Session>),
}

/// Fragments that run, and of which centre they are.
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
                Err(mpsc::RecvTimeoutError::Disconnected) => self.down("no thread connects"),
            },
            Link::Up(session) => {
                let clock = || self.source.clock_ns().saturating_add(self.source.unix_offset_ns());
                match session.round(&mut self.outbox, &clock) {
                    Ok(asked) => asked.into_iter().for_each(|asked| self.carry_out(asked)),
                    Err(error) => self.down(&error.to_string()),
                }
            }
        }
        self.take_events();
        self.note();
        if !matches!(self.link, Link::Up(_)) && self.away_since.elapsed() > AWAY_MAX {
            self.let_go();
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
        // So that many hosts do not come back at the same moment.
        let pause = self.retry.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.retry = (self.retry * 2).min(self.options.retry.1);
        self.link = Link::Away { next: Instant::now() + pause };
        let mut status = self.shared.status();
        status.state = LinkState::Away;
        status.since_unix_ns = 0;
        status.problem = Some(problem.to_owned());
    }

    /// Lets go of fragments.
    fn let_go(&mut self) {
        if self.running.take().is_some() {
            self.source.end();
            self.outbox.clear();
            self.shared.status().fragments = 0;
        }
    }

    fn carry_out(&mut self, asked: Asked) {
        match asked {
            Asked::Correct { correction_ns } => self.correct(correction_ns),
            Asked::Run { run, epoch, number, fresh, correction_ns, plans } => {
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

    /// Events are of the host that the connection is of.
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

    /// Goes on with what runs: the centre has everything up to `number`.
    fn resume(&mut self, number: u64, fresh: bool) {
        self.outbox.resume(number);
        if let (true, Some(running)) = (fresh, &self.running) {
            self.outbox.forget_relations(running.runner.relations());
        }
    }

    /// Runs other fragments.
    fn replace(&mut self, run: u64, epoch: u32, plans: &[u8]) -> Result<(), String> {
        self.let_go();
        let fragments = Fragments::from_bytes(plans)?;
        let schema = self.source.schema();
        let wanted = fragments.wanted(&schema)?;
        self.source.begin(&wanted)?;
        self.outbox.begin();
        let (offset_ns, held_max) = (self.source.unix_offset_ns(), self.options.held_max);
        let runner = Runner::new(&fragments, &schema, &wanted, offset_ns, held_max);
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
        self.let_go();
        if let Link::Up(session) = &mut self.link {
            session.refuse(epoch, reason);
        }
        let mut status = self.shared.status();
        status.problem = Some(reason.to_owned());
        if status.state == LinkState::Running {
            status.state = LinkState::Connected;
        }
    }

    /// Takes what events there are.
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

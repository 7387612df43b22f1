//! A host's connection: who it is, how its clock goes, and what it sends.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::super::channel::{Channel, Line, invalid, prepare};
use super::super::clock::{Measurement, Offset};
use super::super::frame::{FromCentre, FromHost, Sender};
use super::super::rows::{Changes, RowsReader};
use super::super::unix_time_ns;
use super::budget::Budget;
use super::merge::RowsReport;
use super::{Current, Eject, HOSTS_MAX, HostState, Message, Record, Shared, What};

/// How long it may take until it is known who connects.
const GREET_TIME_MAX: Duration = Duration::from_secs(10);
/// How long another connection of the same host may take to end.
const YIELD_TIME_MAX: Duration = Duration::from_secs(5);
/// A host that says nothing, or reads nothing, for so long has gone.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long a look for what the host says waits.
const READ_WAIT: Duration = Duration::from_millis(10);
/// Pings before the fragments are given.
const FIRST_PINGS: usize = 4;
/// Pings that have no answer yet.
const PINGS_MAX: usize = 16;
/// How often rates are measured.
const RATE_INTERVAL: Duration = Duration::from_secs(1);

/// Serves a connection until it ends.
pub fn serve(stream: TcpStream, address: &str, shared: &Arc<Shared>, sender: &SyncSender<Message>) {
    let greeted = match greet(stream, shared) {
        Ok(greeted) => greeted,
        Err(error) => return shared.refuse(address, error.to_string()),
    };
    let Greeted { mut line, name, version } = greeted;
    let claimed = match claim(&name, &version, address, shared) {
        Ok(claimed) => claimed,
        Err(reason) => {
            FromCentre::Bye { reason: &reason }.write(line.output());
            line.end();
            return shared.refuse(address, reason);
        }
    };
    let mut session = Session::new(line, name, claimed, shared, sender);
    let (reason, for_good) = match session.run() {
        Ok(reason) => (reason, true),
        Err(error) => (error.to_string(), false),
    };
    session.end(&reason, for_good);
}

/// One who has said who it is.
struct Greeted {
    line: Line,
    name: Arc<str>,
    version: String,
}

fn greet(stream: TcpStream, shared: &Shared) -> io::Result<Greeted> {
    let end = Instant::now() + GREET_TIME_MAX;
    let stream = prepare(stream)?;
    let (channel, names) = match &shared.options.tls {
        None => (Channel::Plain(stream), None),
        Some(tls) => {
            let (stream, names) = tls.accept(stream, end)?;
            (Channel::Secure(Box::new(stream)), Some(names))
        }
    };
    let mut line = Line::open(channel, Sender::Host, end)?;
    line.channel().set_timeouts(READ_WAIT, READ_WAIT)?;
    let (name, version) = loop {
        if let Some((kind, bytes)) = line.next()? {
            match FromHost::read(kind, bytes).map_err(|wrong| invalid(wrong.0))? {
                FromHost::Hello { name, version } => break (name.to_owned(), printable(version)),
                _ => return Err(invalid("the other side does not say who it is")),
            }
        }
        if Instant::now() >= end || shared.is_ending() {
            let what = "the other side did not say who it is in time";
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        line.fill()?;
    };
    if let Err(reason) = check_name(&name, names.as_deref()) {
        FromCentre::Bye { reason: &reason }.write(line.output());
        line.end();
        return Err(invalid(&reason));
    }
    Ok(Greeted { line, name: name.into(), version })
}

/// Whether a host may call itself so, where its certificate has these names.
fn check_name(name: &str, names: Option<&[String]>) -> Result<(), String> {
    if name.is_empty() || name.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("this is no name of a host".into());
    }
    match names {
        Some(names) if !names.iter().any(|known| known.eq_ignore_ascii_case(name)) => {
            Err(format!("the certificate is for {}, not for {name:?}", list(names)))
        }
        _ => Ok(()),
    }
}

fn list(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(5).map(|name| printable(name)).collect();
    if shown.is_empty() { "nobody".into() } else { shown.join(", ") }
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// A name that belongs to this connection.
struct Claimed {
    connection: u64,
    eject: Arc<Eject>,
    budget: Arc<Budget>,
}

/// Takes a host's name. Another connection that has it is asked to end: a host knows best which of
/// its connections is alive.
fn claim(
    name: &Arc<str>,
    version: &str,
    address: &str,
    shared: &Shared,
) -> Result<Claimed, String> {
    let end = Instant::now() + YIELD_TIME_MAX;
    let connection = shared.numbers.fetch_add(1, Ordering::Relaxed);
    loop {
        let mut hosts = shared.hosts();
        if !hosts.contains_key(name) && hosts.len() >= HOSTS_MAX {
            make_room(&mut hosts)?;
        }
        let record = hosts.entry(Arc::clone(name)).or_insert_with(|| Record {
            status: super::HostStatus::default(),
            active: None,
            epoch: 0,
            number: 0,
            fresh: true,
            budget: Arc::new(Budget::new(shared.options.host_memory_max)),
        });
        if let Some((_, eject)) = &record.active {
            eject.ask("the host has connected anew");
        } else {
            let eject = Arc::new(Eject::default());
            record.active = Some((connection, Arc::clone(&eject)));
            let status = &mut record.status;
            status.name = name.to_string();
            address.clone_into(&mut status.address);
            version.clone_into(&mut status.version);
            status.state = HostState::Joining;
            status.since_unix_ns = unix_time_ns();
            status.connections += 1;
            return Ok(Claimed { connection, eject, budget: Arc::clone(&record.budget) });
        }
        drop(hosts);
        if Instant::now() >= end || shared.is_ending() {
            return Err("another connection of this host does not end".into());
        }
        std::thread::sleep(READ_WAIT);
    }
}

/// Forgets a host that is away.
fn make_room(hosts: &mut std::collections::BTreeMap<Arc<str>, Record>) -> Result<(), String> {
    let away = hosts.iter().find(|(_, record)| record.active.is_none());
    match away.map(|(name, _)| Arc::clone(name)) {
        Some(name) => {
            hosts.remove(&name);
            Ok(())
        }
        None => Err("there are too many hosts".into()),
    }
}

/// See the module.
struct Session<'s> {
    line: Line,
    name: Arc<str>,
    claimed: Claimed,
    shared: &'s Shared,
    sender: &'s SyncSender<Message>,
    /// What the host was given, and whether it runs that.
    current: Option<Arc<Current>>,
    running: bool,
    readers: Vec<RowsReader>,
    /// The last number that came, and that the host knows has come.
    number: u64,
    acknowledged: u64,
    offset: Offset,
    correction_ns: i64,
    /// Pings that have no answer yet: their numbers, and when they were sent.
    pings: Vec<(u32, i64)>,
    ping: u32,
    pinged: Instant,
    heard: Instant,
    /// When something was sent last, or nothing waited.
    drained: Instant,
    rate: Rate,
    events: u64,
}

/// What there was at a moment.
struct Rate {
    at: Instant,
    events: u64,
    bytes: u64,
    /// Bytes of connections before this one.
    before: u64,
}

impl<'s> Session<'s> {
    fn new(
        line: Line,
        name: Arc<str>,
        claimed: Claimed,
        shared: &'s Shared,
        sender: &'s SyncSender<Message>,
    ) -> Self {
        let now = Instant::now();
        let before = shared.hosts().get(&name).map_or(0, |record| record.status.bytes);
        Self {
            line,
            name,
            claimed,
            shared,
            sender,
            current: None,
            running: false,
            readers: Vec::new(),
            number: 0,
            acknowledged: 0,
            offset: Offset::default(),
            correction_ns: 0,
            pings: Vec::new(),
            ping: 0,
            pinged: now,
            heard: now,
            drained: now,
            rate: Rate { at: now, events: 0, bytes: 0, before },
            events: 0,
        }
    }

    /// Goes on until the host leaves, and gives its reason.
    fn run(&mut self) -> io::Result<String> {
        FromCentre::Welcome { run: self.shared.run }.write(self.line.output());
        self.send_ping();
        loop {
            self.line.flush()?;
            let received = self.line.received;
            self.line.fill()?;
            if self.line.received > received {
                self.heard = Instant::now();
            }
            if let Some(reason) = self.take_frames()? {
                return Ok(reason);
            }
            self.check()?;
            self.keep_time();
            self.give_fragments();
            if self.number > self.acknowledged {
                FromCentre::Acknowledged { number: self.number }.write(self.line.output());
                self.acknowledged = self.number;
            }
            self.note();
        }
    }

    /// Whether the connection is to go on.
    fn check(&mut self) -> io::Result<()> {
        let aborted = |reason: &str| Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason));
        if self.shared.is_ending() {
            return aborted("the centre ends");
        }
        if self.claimed.eject.wanted() {
            return aborted(&self.claimed.eject.reason());
        }
        if self.heard.elapsed() > SILENCE_MAX {
            return aborted("the host is silent");
        }
        if self.line.waiting() == 0 {
            self.drained = Instant::now();
        } else if self.drained.elapsed() > SILENCE_MAX {
            return aborted("the host does not read");
        }
        Ok(())
    }

    fn tell(&self, what: What) -> io::Result<()> {
        let epoch = self.current.as_ref().map_or(0, |current| current.epoch);
        let (name, connection) = (Arc::clone(&self.name), self.claimed.connection);
        self.sender
            .send(Message { name, connection, epoch, what })
            .map_err(|_| io::Error::new(io::ErrorKind::ConnectionAborted, "the centre ends"))?;
        self.shared.wake();
        Ok(())
    }

    fn with_record(&self, change: impl FnOnce(&mut Record)) {
        if let Some(record) = self.shared.hosts().get_mut(&self.name) {
            change(record);
        }
    }

    fn send_ping(&mut self) {
        self.pinged = Instant::now();
        if self.pings.len() == PINGS_MAX {
            self.pings.remove(0);
        }
        self.ping = self.ping.wrapping_add(1);
        self.pings.push((self.ping, self.shared.clock.now_ns()));
        FromCentre::Ping { ping: self.ping }.write(self.line.output());
    }

    /// Measures the host's clock now and then, and corrects it.
    fn keep_time(&mut self) {
        let first = self.offset.len() < FIRST_PINGS && self.pings.is_empty();
        if first || self.pinged.elapsed() >= self.shared.options.ping {
            self.send_ping();
        }
        if self.current.is_none() {
            return;
        }
        if let Some(correction_ns) = self.offset.change(self.correction_ns) {
            self.correction_ns = correction_ns;
            FromCentre::Correction { correction_ns }.write(self.line.output());
            self.with_record(|record| record.status.correction_ns = correction_ns);
        }
    }

    fn take_pong(&mut self, ping: u32, clock_ns: i64) {
        let Some(at) = self.pings.iter().position(|(number, _)| *number == ping) else { return };
        let (_, sent_ns) = self.pings.swap_remove(at);
        self.offset.add(Measurement::new(sent_ns, self.shared.clock.now_ns(), clock_ns));
        let best = self.offset.best();
        self.with_record(|record| record.status.clock = best);
    }

    /// Gives the host what it is to run, once its clock is known, and anew when that changes.
    fn give_fragments(&mut self) {
        let current = self.shared.current();
        let given = self.current.as_ref().is_some_and(|given| given.epoch == current.epoch);
        if given || self.offset.len() < FIRST_PINGS {
            return;
        }
        if self.current.is_none() {
            self.correction_ns = self.offset.change(0).unwrap_or(0);
        }
        let (epoch, correction_ns) = (current.epoch, self.correction_ns);
        let (mut number, mut fresh) = (0, true);
        self.with_record(|record| {
            if record.epoch == epoch {
                (number, fresh) = (record.number, record.fresh);
            }
            record.status.correction_ns = correction_ns;
        });
        self.number = number;
        self.acknowledged = number;
        self.readers = current.fragments.iter().map(RowsReader::new).collect();
        let plans = &current.plans;
        FromCentre::Fragments { epoch, number, fresh, correction_ns, plans }
            .write(self.line.output());
        self.running = false;
        self.current = Some(current);
    }

    /// Takes what has come. Gives the host's reason to leave where it does.
    fn take_frames(&mut self) -> io::Result<Option<String>> {
        loop {
            let Some((kind, bytes)) = self.line.next()? else { return Ok(None) };
            // The bytes are the line's, which answers are written to.
            let bytes = bytes.to_vec();
            let frame = FromHost::read(kind, &bytes).map_err(|wrong| invalid(wrong.0))?;
            if let FromHost::Bye { reason } = frame {
                return Ok(Some(printable_reason(reason)));
            }
            self.take_frame(&frame)?;
            if self.claimed.eject.wanted() || self.shared.is_ending() {
                return Ok(None);
            }
        }
    }

    fn take_frame(&mut self, frame: &FromHost<'_>) -> io::Result<()> {
        match *frame {
            FromHost::Hello { .. } | FromHost::Bye { .. } => {
                return Err(invalid("a second hello"));
            }
            FromHost::Pong { ping, clock_ns } => self.take_pong(ping, clock_ns),
            FromHost::Accepted { epoch, resumed } => return self.accepted(epoch, resumed),
            FromHost::Refused { reason, .. } => {
                self.running = false;
                let reason = printable_reason(reason);
                self.with_record(|record| {
                    record.status.state = HostState::Refusing;
                    record.status.problem = Some(reason);
                });
            }
            FromHost::Rows { number, fragment, reset, block } if self.is_new(number) => {
                self.rows(fragment, reset, block)?;
                self.have(number);
            }
            FromHost::Watermark { number, time_ns, events } if self.is_new(number) => {
                self.events = events;
                self.tell(What::Watermark { time_ns })?;
                self.have(number);
            }
            FromHost::Dropped { number, events, rows } if self.is_new(number) => {
                self.with_record(|record| {
                    let status = &mut record.status;
                    status.dropped_events = status.dropped_events.saturating_add(events);
                    status.dropped_rows = status.dropped_rows.saturating_add(rows);
                });
                self.have(number);
            }
            // Of another epoch, or had before.
            FromHost::Rows { .. } | FromHost::Watermark { .. } | FromHost::Dropped { .. } => {}
        }
        Ok(())
    }

    fn is_new(&self, number: u64) -> bool {
        self.running && number > self.number
    }

    /// A number's frame is in the engine's hands.
    fn have(&mut self, number: u64) {
        self.number = number;
        self.with_record(|record| record.number = number);
    }

    fn accepted(&mut self, epoch: u32, resumed: bool) -> io::Result<()> {
        // The answer to an earlier epoch.
        if self.current.as_ref().is_none_or(|current| current.epoch != epoch) {
            return Ok(());
        }
        if self.running {
            return Err(invalid("what runs is accepted again"));
        }
        self.running = true;
        if !resumed {
            (self.number, self.acknowledged) = (0, 0);
        }
        let number = self.number;
        self.with_record(|record| {
            (record.epoch, record.number, record.fresh) = (epoch, number, false);
            record.status.state = HostState::Running;
            record.status.problem = None;
        });
        self.tell(What::Joined { resumed })
    }

    fn rows(&mut self, fragment: u16, reset: bool, block: &[u8]) -> io::Result<()> {
        let Some(reader) = self.readers.get_mut(usize::from(fragment)) else {
            return Err(invalid("rows of no fragment"));
        };
        let changes = if reset && block.is_empty() {
            Changes::default()
        } else {
            reader.read(block).map_err(|wrong| invalid(wrong.0))?
        };
        let goes_on = || !self.claimed.eject.wanted() && !self.shared.is_ending();
        let Some(lease) = self.claimed.budget.take(changes.weight, &goes_on) else {
            let reason = self.claimed.eject.reason();
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason));
        };
        let rows = changes.rows.len() as u64;
        self.with_record(|record| record.status.rows += rows);
        self.tell(What::Rows(RowsReport { fragment, reset, changes, lease }))
    }

    fn note(&mut self) {
        let (events, bytes) = (self.events, self.line.received);
        let elapsed = self.rate.at.elapsed();
        let rates = (elapsed >= RATE_INTERVAL).then(|| {
            let seconds = elapsed.as_secs_f64();
            let of = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            let rates = (of(events, self.rate.events), of(bytes, self.rate.bytes));
            (self.rate.at, self.rate.events, self.rate.bytes) = (Instant::now(), events, bytes);
            rates
        });
        let total = self.rate.before + bytes;
        self.with_record(|record| {
            let status = &mut record.status;
            (status.events, status.bytes) = (events, total);
            if let Some(rates) = rates {
                (status.events_per_second, status.bytes_per_second) = rates;
            }
        });
    }

    /// Ends the connection, with a word to the host, and lets go of the name.
    fn end(mut self, reason: &str, for_good: bool) {
        // In this order: whoever takes the name next speaks after this.
        let report = self.tell(What::Left { for_good });
        let connection = self.claimed.connection;
        self.with_record(|record| {
            record.fresh |= for_good;
            if record.active.as_ref().is_some_and(|(active, _)| *active == connection) {
                record.active = None;
            }
            let status = &mut record.status;
            status.state = HostState::Away;
            status.problem = Some(reason.to_owned());
            status.since_unix_ns = 0;
            (status.events_per_second, status.bytes_per_second) = (0.0, 0.0);
        });
        if report.is_ok() || self.shared.is_ending() {
            FromCentre::Bye { reason }.write(self.line.output());
        }
        self.line.end();
    }
}

fn printable_reason(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

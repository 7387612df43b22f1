//! A session with a host: identifies the host, measures its clock, and receives its frames.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::super::channel::{Channel, Line, invalid, prepare};
use super::super::clock::{Measurement, Offset};
use super::super::frame::{FRAGMENTS_MAX, FromCentre, FromHost, LEVEL_STREAMS, Sender};
use super::super::rows::{RowChanges, RowsReader};
use super::super::unix_time_ns;
use super::budget::MemoryBudget;
use super::merge::RowsReport;
use super::{Current, Eject, HOSTS_MAX, HostState, Message, MessageKind, Record, Shared};

/// The time limit for the host to identify itself.
const HELLO_TIME_MAX: Duration = Duration::from_secs(10);
/// The time limit for a former connection of the same host to end.
const YIELD_TIME_MAX: Duration = Duration::from_secs(5);
/// The longest time in which a host may send nothing, or read nothing, before it is disconnected.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// The most bytes that wait for a host: two sets of fragments, and shorter frames.
const WAITING_MAX: usize = 3 * FRAGMENTS_MAX;
/// The timeout of reads and writes.
const READ_WAIT: Duration = Duration::from_millis(10);
/// The number of pings before the fragments are sent.
const FIRST_PINGS: usize = 4;
/// The most pings without an answer.
const PINGS_MAX: usize = 16;
/// The interval at which rates are measured.
const RATE_INTERVAL: Duration = Duration::from_secs(1);

/// The problem of a host whose version does not have all streams of the queries.
const LIMITED: &str =
    "its version has the stream IOstream alone, and sends nothing of other streams";

/// Serves a connection until it ends.
pub fn serve(
    stream: TcpStream,
    stranger: u64,
    address: &str,
    shared: &Arc<Shared>,
    sender: &SyncSender<Message>,
) {
    let identified = identify(stream, shared);
    shared.strangers.remove(stranger);
    let identified = match identified {
        Ok(identified) => identified,
        Err(error) => return shared.refuse(address, error.to_string()),
    };
    let IdentifiedHost { mut line, name, version } = identified;
    let claimed = match claim(&name, &version, address, shared) {
        Ok(claimed) => claimed,
        Err(reason) => {
            FromCentre::Bye { reason: &reason }.write(line.output());
            line.end();
            return shared.refuse(address, reason);
        }
    };
    let mut session = Session::new(line, name, claimed, shared, sender);
    let (reason, permanent) = match session.run() {
        Ok(reason) => (reason, true),
        Err(error) => (error.to_string(), false),
    };
    session.end(&reason, permanent);
}

/// A host that has identified itself.
struct IdentifiedHost {
    line: Line,
    name: Arc<str>,
    version: String,
}

fn identify(stream: TcpStream, shared: &Shared) -> io::Result<IdentifiedHost> {
    let end = Instant::now() + HELLO_TIME_MAX;
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
                _ => return Err(invalid("the other side does not identify itself")),
            }
        }
        if Instant::now() >= end || shared.is_ending() {
            let message = "the other side did not identify itself in time";
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        line.fill()?;
    };
    if let Err(reason) = check_name(&name, names.as_deref()) {
        FromCentre::Bye { reason: &reason }.write(line.output());
        line.end();
        return Err(invalid(&reason));
    }
    Ok(IdentifiedHost { line, name: name.into(), version })
}

/// Checks a host's name against the names of its certificate.
fn check_name(name: &str, names: Option<&[String]>) -> Result<(), String> {
    if name.is_empty() || name.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("this is not a valid host name".into());
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
    if shown.is_empty() { "no host".into() } else { shown.join(", ") }
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// The claim of a connection to a host's name.
struct Claimed {
    connection: u64,
    eject: Arc<Eject>,
    budget: Arc<MemoryBudget>,
}

/// Claims a host's name. If another connection has the name, it is ended: the new one shows that
/// the host has lost the former.
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
            budget: Arc::new(MemoryBudget::new(shared.options.host_memory_max)),
        });
        if let Some((_, eject)) = &record.active {
            eject.request("the host has connected anew");
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

/// Removes the record of a host that is not connected.
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
    /// The fragments that were sent to the host, and whether the host runs them.
    current: Option<Arc<Current>>,
    running: bool,
    readers: Vec<RowsReader>,
    /// The last number received, and the last number acknowledged.
    number: u64,
    acknowledged: u64,
    offset: Offset,
    correction_ns: i64,
    /// Pings without an answer: their numbers and the times at which they were sent.
    pings: Vec<(u32, i64)>,
    ping: u32,
    pinged: Instant,
    last_received: Instant,
    delivery: Delivery,
    rate: Rate,
    events: u64,
}

/// The last time at which the host read bytes, or none waited for it.
struct Delivery {
    /// The number of bytes sent by then.
    sent: u64,
    at: Instant,
}

impl Delivery {
    /// Checks that the host reads. `waiting` bytes wait, and `sent` bytes have been sent.
    ///
    /// # Errors
    /// The reason to disconnect a host that reads nothing, or too slowly.
    fn check(&mut self, waiting: usize, sent: u64, now: Instant) -> Result<(), &'static str> {
        if waiting == 0 || sent > self.sent {
            (self.sent, self.at) = (sent, now);
        }
        if now.duration_since(self.at) > SILENCE_MAX {
            return Err("the host does not read");
        }
        if waiting > WAITING_MAX {
            return Err("the host reads too slowly");
        }
        Ok(())
    }
}

/// A sample for the computation of rates.
struct Rate {
    at: Instant,
    events: u64,
    bytes: u64,
    /// The bytes received on earlier connections.
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
            last_received: now,
            delivery: Delivery { sent: 0, at: now },
            rate: Rate { at: now, events: 0, bytes: 0, before },
            events: 0,
        }
    }

    /// Runs the session until the host leaves, and returns the host's reason.
    fn run(&mut self) -> io::Result<String> {
        FromCentre::Welcome { run: self.shared.run }.write(self.line.output());
        self.send_ping();
        loop {
            self.line.flush()?;
            let received = self.line.received;
            self.line.fill()?;
            if self.line.received > received {
                self.last_received = Instant::now();
            }
            if let Some(reason) = self.take_frames()? {
                return Ok(reason);
            }
            self.check()?;
            self.correct_clock();
            self.send_fragments();
            if self.number > self.acknowledged {
                FromCentre::Acknowledged { number: self.number }.write(self.line.output());
                self.acknowledged = self.number;
            }
            self.note();
        }
    }

    /// Returns an error if the connection has to end.
    fn check(&mut self) -> io::Result<()> {
        let aborted = |reason: &str| Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason));
        if self.shared.is_ending() {
            return aborted("the centre ends");
        }
        if self.claimed.eject.requested() {
            return aborted(&self.claimed.eject.reason());
        }
        if self.last_received.elapsed() > SILENCE_MAX {
            return aborted("the host is silent");
        }
        let (waiting, sent) = (self.line.waiting(), self.line.sent_bytes);
        self.delivery.check(waiting, sent, Instant::now()).or_else(aborted)
    }

    fn send(&self, kind: MessageKind) -> io::Result<()> {
        let epoch = self.current.as_ref().map_or(0, |current| current.epoch);
        let (name, connection) = (Arc::clone(&self.name), self.claimed.connection);
        self.sender
            .send(Message { name, connection, epoch, kind })
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

    /// Measures the host's clock at intervals, and corrects it.
    fn correct_clock(&mut self) {
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

    /// Sends the fragments, as soon as the clock has been measured, and again when they change.
    fn send_fragments(&mut self) {
        let current = self.shared.current();
        let sent = self.current.as_ref().is_some_and(|sent| sent.epoch == current.epoch);
        if sent || self.offset.len() < FIRST_PINGS {
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
        let plans = if self.is_limited(&current) {
            current.single.as_ref().unwrap_or(&current.plans)
        } else {
            &current.plans
        };
        FromCentre::Fragments { epoch, number, fresh, correction_ns, plans }
            .write(self.line.output());
        self.running = false;
        self.current = Some(current);
    }

    /// Whether the host lacks a stream that the fragments read, because its version is older.
    fn is_limited(&self, current: &Current) -> bool {
        self.line.level < LEVEL_STREAMS && current.single.is_some()
    }

    /// Processes the received frames. Returns the host's reason if it leaves.
    fn take_frames(&mut self) -> io::Result<Option<String>> {
        loop {
            let Some((kind, bytes)) = self.line.next()? else { return Ok(None) };
            // The frame is copied because answers are written to the same line.
            let bytes = bytes.to_vec();
            let frame = FromHost::read(kind, &bytes).map_err(|wrong| invalid(wrong.0))?;
            if let FromHost::Bye { reason } = frame {
                return Ok(Some(printable_reason(reason)));
            }
            self.take_frame(&frame)?;
            if self.claimed.eject.requested() || self.shared.is_ending() {
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
                self.record_number(number);
            }
            FromHost::Watermark { number, time_ns, events } if self.is_new(number) => {
                self.events = events;
                self.send(MessageKind::Watermark { time_ns })?;
                self.record_number(number);
            }
            FromHost::Dropped { number, events, rows } if self.is_new(number) => {
                self.with_record(|record| {
                    let status = &mut record.status;
                    status.dropped_events = status.dropped_events.saturating_add(events);
                    status.dropped_rows = status.dropped_rows.saturating_add(rows);
                });
                self.record_number(number);
            }
            // Frames of another epoch, or received before.
            FromHost::Rows { .. } | FromHost::Watermark { .. } | FromHost::Dropped { .. } => {}
        }
        Ok(())
    }

    fn is_new(&self, number: u64) -> bool {
        self.running && number > self.number
    }

    /// Records that a frame has been passed to the engine.
    fn record_number(&mut self, number: u64) {
        self.number = number;
        self.with_record(|record| record.number = number);
    }

    fn accepted(&mut self, epoch: u32, resumed: bool) -> io::Result<()> {
        // The answer concerns an earlier epoch.
        if self.current.as_ref().is_none_or(|current| current.epoch != epoch) {
            return Ok(());
        }
        if self.running {
            return Err(invalid("the fragments are accepted again"));
        }
        self.running = true;
        if !resumed {
            (self.number, self.acknowledged) = (0, 0);
        }
        let number = self.number;
        let is_limited = self.current.as_ref().is_some_and(|current| self.is_limited(current));
        let problem = is_limited.then(|| LIMITED.to_owned());
        self.with_record(|record| {
            (record.epoch, record.number, record.fresh) = (epoch, number, false);
            record.status.state = HostState::Running;
            record.status.problem = problem;
        });
        self.send(MessageKind::Joined { resumed })
    }

    fn rows(&mut self, fragment: u16, reset: bool, block: &[u8]) -> io::Result<()> {
        let Some(reader) = self.readers.get_mut(usize::from(fragment)) else {
            return Err(invalid("rows of an unknown fragment"));
        };
        let changes = if reset && block.is_empty() {
            RowChanges::default()
        } else {
            reader.read(block).map_err(|wrong| invalid(wrong.0))?
        };
        let keep_waiting = || !self.claimed.eject.requested() && !self.shared.is_ending();
        let Some(lease) = self.claimed.budget.take(changes.weight, &keep_waiting) else {
            let reason = self.claimed.eject.reason();
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason));
        };
        let rows = changes.rows.len() as u64;
        self.with_record(|record| record.status.rows += rows);
        self.send(MessageKind::Rows(RowsReport { fragment, reset, changes, lease }))
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

    /// Ends the connection, reports the reason to the host, and releases the name.
    fn end(mut self, reason: &str, permanent: bool) {
        // In this order, so that messages of the next connection with this name follow this one.
        let report = self.send(MessageKind::Left { permanent });
        let connection = self.claimed.connection;
        self.with_record(|record| {
            record.fresh |= permanent;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_reads_slowly_stays_connected() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut delivery = Delivery { sent: 0, at: start };
        // Some bytes wait all the time.
        for second in 1..60 {
            assert_eq!(delivery.check(1000, second, after(second)), Ok(()));
        }
        assert_eq!(delivery.check(1000, 59, after(69)), Ok(()));
        assert_eq!(delivery.check(1000, 59, after(70)), Err("the host does not read"));
        assert_eq!(delivery.check(1000, 60, after(70)), Ok(()));
        // It sends nothing while none wait.
        assert_eq!(delivery.check(0, 60, after(90)), Ok(()));
        assert_eq!(delivery.check(WAITING_MAX, 60, after(91)), Ok(()));
        let too_slow = Err("the host reads too slowly");
        assert_eq!(delivery.check(WAITING_MAX + 1, 61, after(92)), too_slow);
    }
}

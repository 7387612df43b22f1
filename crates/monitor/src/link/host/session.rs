//! A session with the centre over an established connection.

use std::io;
use std::net::IpAddr;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::super::channel::{Channel, Line, host_of, invalid, reach};
use super::super::frame::{FromCentre, FromHost, Sender};
use super::{HostOptions, Outbox};

/// The time limit of connecting, and then of the handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// The longest silence of the centre before the connection is given up.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// The timeout of reads. While the centre sends nothing, events are taken at this interval.
const READ_WAIT: Duration = Duration::from_millis(3);
const WRITE_WAIT: Duration = Duration::from_millis(1);
/// The number of bytes that are passed to the connection at a time.
const SEND: usize = 64 << 10;
/// The most bytes that wait in the connection, apart from those of the outbox.
const WAITING_MAX: usize = 4 * SEND + super::super::frame::ROWS_MAX;
/// The longest time for sending the last frames.
const LEAVE_TIME_MAX: Duration = Duration::from_millis(500);

/// Connects on another thread.
pub fn connect(options: &HostOptions) -> Receiver<io::Result<Line>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let options = options.clone();
    // If the thread cannot be started, the sender is dropped, and the receiver gets an error.
    let _ = std::thread::Builder::new().name("connect".into()).spawn(move || {
        let _ = sender.send(connected(&options));
    });
    receiver
}

fn connected(options: &HostOptions) -> io::Result<Line> {
    let stream = reach(&options.centre, CONNECT_TIME_MAX)?;
    let end = Instant::now() + CONNECT_TIME_MAX;
    let channel = match &options.tls {
        None => Channel::Plain(stream),
        Some(tls) => {
            let name = options.centre_name.as_deref().unwrap_or(host_of(&options.centre));
            Channel::Secure(Box::new(tls.connect(stream, name, end)?))
        }
    };
    let line = Line::open(channel, Sender::Centre, end)?;
    line.channel().set_timeouts(READ_WAIT, WRITE_WAIT)?;
    Ok(line)
}

/// A request of the centre.
pub enum CentreRequest {
    /// Run fragments.
    Run { run: u64, epoch: u32, number: u64, fresh: bool, correction_ns: i64, plans: Vec<u8> },
    /// Correct the clock.
    Correct { correction_ns: i64 },
}

/// See the module.
pub struct Session {
    line: Line,
    run: Option<u64>,
    running: bool,
    last_received: Instant,
}

impl Session {
    /// Begins a session with a hello frame.
    pub fn new(mut line: Line, name: &str) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        FromHost::Hello { name, version }.write(line.output());
        Self { line, run: None, running: false, last_received: Instant::now() }
    }

    /// Receives frames, and sends frames as far as the connection accepts them. `clock` returns the
    /// host's clock without correction, in nanoseconds.
    ///
    /// # Errors
    /// If the connection is broken, or the centre disconnects or sends invalid frames.
    pub fn round(
        &mut self,
        outbox: &mut Outbox,
        clock: &dyn Fn() -> i64,
    ) -> io::Result<Vec<CentreRequest>> {
        let received = self.line.received;
        self.line.fill()?;
        if self.line.received > received {
            self.last_received = Instant::now();
        } else if self.last_received.elapsed() > SILENCE_MAX {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the centre is silent"));
        }
        let mut requests = Vec::new();
        let mut pings = Vec::new();
        while let Some((kind, bytes)) = self.line.next()? {
            match FromCentre::read(kind, bytes).map_err(|wrong| invalid(wrong.0))? {
                FromCentre::Welcome { run } => self.run = Some(run),
                FromCentre::Ping { ping } => pings.push(ping),
                FromCentre::Acknowledged { number } => outbox.acknowledge(number),
                FromCentre::Correction { correction_ns } => {
                    requests.push(CentreRequest::Correct { correction_ns });
                }
                FromCentre::Bye { reason } => {
                    let message = format!("the centre ended the connection: {reason}");
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, message));
                }
                FromCentre::Fragments { epoch, number, fresh, correction_ns, plans } => {
                    let run = self.run.ok_or_else(|| invalid("fragments without a welcome"))?;
                    let plans = plans.to_vec();
                    requests.push(CentreRequest::Run {
                        run,
                        epoch,
                        number,
                        fresh,
                        correction_ns,
                        plans,
                    });
                    // No frames of another epoch are sent until the fragments are accepted.
                    self.running = false;
                }
            }
        }
        if self.line.waiting() > WAITING_MAX {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the centre does not read"));
        }
        for ping in pings {
            FromHost::Pong { ping, clock_ns: clock().max(0) }.write(self.line.output());
        }
        self.line.flush()?;
        while self.running && self.line.waiting() == 0 {
            outbox.send(SEND, self.line.output());
            if self.line.waiting() == 0 {
                break;
            }
            self.line.flush()?;
        }
        Ok(requests)
    }

    /// Reports that the fragments run.
    pub fn accept(&mut self, epoch: u32, resumed: bool) {
        FromHost::Accepted { epoch, resumed }.write(self.line.output());
        self.running = true;
    }

    /// Reports that the fragments do not run.
    pub fn refuse(&mut self, epoch: u32, reason: &str) {
        FromHost::Refused { epoch, reason }.write(self.line.output());
        self.running = false;
    }

    /// The local address of the connection.
    pub fn address(&self) -> Option<IpAddr> {
        self.line.channel().socket().local_addr().ok().map(|address| address.ip())
    }

    /// Whether fragments run.
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// The number of bytes sent.
    pub fn sent_bytes(&self) -> u64 {
        self.line.sent_bytes
    }

    /// Sends the waiting frames for a short time, and disconnects.
    pub fn leave(mut self, outbox: &mut Outbox, reason: &str) {
        let end = Instant::now() + LEAVE_TIME_MAX;
        let mut all_sent = !self.running;
        while Instant::now() < end {
            if self.line.waiting() == 0 && !all_sent {
                outbox.send(SEND, self.line.output());
                all_sent = self.line.waiting() == 0;
            }
            if all_sent || self.line.flush().is_err() {
                break;
            }
        }
        FromHost::Bye { reason }.write(self.line.output());
        self.line.end();
    }
}

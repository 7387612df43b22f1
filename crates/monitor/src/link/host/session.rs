//! A connection to the centre, once it is there.

use std::io;
use std::net::IpAddr;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::super::channel::{Channel, Line, host_of, invalid, reach};
use super::super::frame::{FromCentre, FromHost, Sender};
use super::{HostOptions, Outbox};

/// How long a connection may take to be made, and then to be shaken hands over.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// A centre that says nothing for so long has gone.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// How long a look for what the centre says waits: the time between two looks at the events.
const READ_WAIT: Duration = Duration::from_millis(3);
const WRITE_WAIT: Duration = Duration::from_millis(1);
/// How much is handed to the connection at once, in bytes.
const SEND: usize = 64 << 10;
/// So many bytes at most wait beside those of the outbox.
const WAITING_MAX: usize = 4 * SEND + super::super::frame::ROWS_MAX;
/// How long the last words may take.
const LEAVE_TIME_MAX: Duration = Duration::from_millis(500);

/// Connects on a thread of its own.
pub fn connect(options: &HostOptions) -> Receiver<io::Result<Line>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let options = options.clone();
    // Where there is no thread the sender is gone, which the receiver notices.
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

/// What the centre asks for.
pub enum Asked {
    /// To run fragments.
    Run { run: u64, epoch: u32, number: u64, fresh: bool, correction_ns: i64, plans: Vec<u8> },
    /// To correct the clock.
    Correct { correction_ns: i64 },
}

/// See the module.
pub struct Session {
    line: Line,
    run: Option<u64>,
    running: bool,
    heard: Instant,
}

impl Session {
    /// Says hello.
    pub fn new(mut line: Line, name: &str) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        FromHost::Hello { name, version }.write(line.output());
        Self { line, run: None, running: false, heard: Instant::now() }
    }

    /// Reads what the centre says, and sends what there is room for. `clock` is the host's, as it
    /// is without correction.
    ///
    /// # Errors
    /// When the connection is broken, or the centre makes no sense or leaves.
    pub fn round(
        &mut self,
        outbox: &mut Outbox,
        clock: &dyn Fn() -> i64,
    ) -> io::Result<Vec<Asked>> {
        let received = self.line.received;
        self.line.fill()?;
        if self.line.received > received {
            self.heard = Instant::now();
        } else if self.heard.elapsed() > SILENCE_MAX {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the centre is silent"));
        }
        let mut asked = Vec::new();
        let mut pings = Vec::new();
        while let Some((kind, bytes)) = self.line.next()? {
            match FromCentre::read(kind, bytes).map_err(|wrong| invalid(wrong.0))? {
                FromCentre::Welcome { run } => self.run = Some(run),
                FromCentre::Ping { ping } => pings.push(ping),
                FromCentre::Acknowledged { number } => outbox.acknowledge(number),
                FromCentre::Correction { correction_ns } => {
                    asked.push(Asked::Correct { correction_ns });
                }
                FromCentre::Bye { reason } => {
                    let what = format!("the centre ended the connection: {reason}");
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, what));
                }
                FromCentre::Fragments { epoch, number, fresh, correction_ns, plans } => {
                    let run = self.run.ok_or_else(|| invalid("fragments without a welcome"))?;
                    let plans = plans.to_vec();
                    asked.push(Asked::Run { run, epoch, number, fresh, correction_ns, plans });
                    // Nothing of another epoch is sent until this one is answered.
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
        Ok(asked)
    }

    /// The fragments run.
    pub fn accept(&mut self, epoch: u32, resumed: bool) {
        FromHost::Accepted { epoch, resumed }.write(self.line.output());
        self.running = true;
    }

    /// The fragments do not run.
    pub fn refuse(&mut self, epoch: u32, reason: &str) {
        FromHost::Refused { epoch, reason }.write(self.line.output());
        self.running = false;
    }

    /// The own address.
    pub fn address(&self) -> Option<IpAddr> {
        self.line.channel().socket().local_addr().ok().map(|address| address.ip())
    }

    /// Whether fragments run.
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// How many bytes have gone.
    pub fn sent_bytes(&self) -> u64 {
        self.line.sent_bytes
    }

    /// Sends what there is, for a little while, and leaves.
    pub fn leave(mut self, outbox: &mut Outbox, reason: &str) {
        let end = Instant::now() + LEAVE_TIME_MAX;
        let mut told = !self.running;
        while Instant::now() < end {
            if self.line.waiting() == 0 && !told {
                outbox.send(SEND, self.line.output());
                told = self.line.waiting() == 0;
            }
            if told || self.line.flush().is_err() {
                break;
            }
        }
        FromHost::Bye { reason }.write(self.line.output());
        self.line.end();
    }
}

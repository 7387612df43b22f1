//! Copies bytes between timely's end of a connection and the socket.
//!
//! Timely sends messages: a header of six numbers, the fifth of which (big-endian, 8 bytes) is the
//! length of the content. A message of length 0 is the last one. Timely's threads panic if a
//! connection ends without it. So only complete messages are passed to timely, and when the other
//! process is lost, the last message is generated here.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::link::{Channel, is_wait};

/// The length of a message's header, in bytes.
const HEADER: usize = 48;
/// The position of the content's length in a message's header, in bytes.
const LENGTH: usize = 32;
/// The longest accepted message, in bytes.
const MESSAGE_MAX: usize = 1 << 30;
/// The most bytes of one read.
const READ: usize = 256 << 10;
/// The number of waiting bytes in a direction from which on no more are read.
const WAITING_MAX: usize = 4 << 20;
/// The longest time for the other side to read the last messages before the connection is closed.
const LINGER_MAX: Duration = Duration::from_secs(2);

/// How a process ended: the time, and the reason of the loss or `None` if it ended as intended.
/// Empty while it runs.
#[derive(Debug, Default)]
pub struct Fate(OnceLock<(Instant, Option<String>)>);

impl Fate {
    /// Marks the process as lost. The first reason is kept.
    pub fn lose(&self, reason: &str) {
        let _ = self.0.set((Instant::now(), Some(reason.to_owned())));
    }

    fn end(&self) {
        let _ = self.0.set((Instant::now(), None));
    }

    /// The end of the process, if it was more than `time` ago.
    pub fn after(&self, time: Duration) -> Option<&Option<String>> {
        self.0.get().filter(|(since, _)| since.elapsed() > time).map(|(_, reason)| reason)
    }
}

/// Copies until this process ends. The loss of the other process is recorded in `fate`.
pub fn run(channel: Channel, local: UnixStream, fate: &Fate) {
    let mut pump = Pump {
        channel,
        local,
        outgoing: Waiting::default(),
        incoming: Waiting::default(),
        complete: 0,
        remote: Side::Open,
        local_open: true,
        buffer: vec![0; READ],
    };
    if let Err(error) = pump.run(fate) {
        fate.lose(&error.to_string());
    }
}

/// Bytes that wait to be written.
#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    from: usize,
}

impl Waiting {
    fn len(&self) -> usize {
        self.bytes.len() - self.from
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.from > READ {
            self.bytes.drain(..self.from);
            self.from = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.from..]
    }

    fn consume(&mut self, count: usize) {
        self.from += count;
        if self.from == self.bytes.len() {
            (self.bytes, self.from) = (std::mem::take(&mut self.bytes), 0);
            self.bytes.clear();
        }
    }
}

/// The state of the other process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Open,
    /// The last message has been received or generated, and is being passed on.
    Ending,
    /// All messages have been passed on.
    Ended,
}

struct Pump {
    channel: Channel,
    local: UnixStream,
    outgoing: Waiting,
    incoming: Waiting,
    /// The length of the complete messages in `incoming`, in bytes.
    complete: usize,
    remote: Side,
    local_open: bool,
    buffer: Vec<u8>,
}

impl Pump {
    fn run(&mut self, fate: &Fate) -> io::Result<()> {
        self.local.set_nonblocking(true)?;
        self.channel.set_nonblocking()?;
        loop {
            let mut moved = self.read_local()?;
            if self.remote == Side::Open {
                match self.send().and_then(|sent| Ok(sent | self.receive()?)) {
                    Ok(more) => moved |= more,
                    Err(error) => {
                        fate.lose(&error.to_string());
                        self.end_incoming();
                        moved = true;
                    }
                }
                if self.remote == Side::Ending {
                    fate.end();
                }
            } else {
                // The other process has ended, so the bytes are dropped.
                moved |= self.outgoing.len() > 0;
                self.outgoing.consume(self.outgoing.len());
            }
            moved |= self.pass_on()?;
            if !self.local_open && self.outgoing.len() == 0 {
                return self.end();
            }
            if !moved {
                self.wait()?;
            }
        }
    }

    /// Reads bytes that timely sends. Their end is the end of this process.
    fn read_local(&mut self) -> io::Result<bool> {
        if !self.local_open || self.outgoing.len() >= WAITING_MAX {
            return Ok(false);
        }
        match self.local.read(&mut self.buffer) {
            Ok(0) => self.local_open = false,
            Ok(count) => self.outgoing.add(&self.buffer[..count]),
            Err(error) if is_wait(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn send(&mut self) -> io::Result<bool> {
        if self.outgoing.len() == 0 {
            return Ok(false);
        }
        let count = self.channel.write(self.outgoing.get())?;
        self.outgoing.consume(count);
        Ok(count > 0)
    }

    fn receive(&mut self) -> io::Result<bool> {
        if self.complete >= WAITING_MAX {
            return Ok(false);
        }
        let Some(count) = self.channel.read(&mut self.buffer)? else {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection has ended"));
        };
        self.incoming.add(&self.buffer[..count]);
        while let Some(header) = self.incoming.get().get(self.complete..self.complete + HEADER) {
            let length = header[LENGTH..LENGTH + 8]
                .iter()
                .fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
            let length = usize::try_from(length).ok().filter(|length| *length <= MESSAGE_MAX);
            let Some(length) = length else {
                return Err(io::Error::new(ErrorKind::InvalidData, "a message is too long"));
            };
            if length == 0 {
                self.complete += HEADER;
                self.remote = Side::Ending;
                break;
            }
            if self.incoming.len() < self.complete + HEADER + length {
                break;
            }
            self.complete += HEADER + length;
        }
        Ok(count > 0)
    }

    /// Ends the stream of a lost process: drops an incomplete message, and adds the last message.
    fn end_incoming(&mut self) {
        let complete = self.incoming.get()[..self.complete].to_vec();
        self.incoming = Waiting { bytes: complete, from: 0 };
        self.incoming.add(&[0; HEADER]);
        self.complete += HEADER;
        self.remote = Side::Ending;
    }

    fn pass_on(&mut self) -> io::Result<bool> {
        if self.remote == Side::Ended {
            return Ok(false);
        }
        let mut moved = false;
        if self.complete > 0 {
            match self.local.write(&self.incoming.get()[..self.complete]) {
                Ok(count) => {
                    self.incoming.consume(count);
                    self.complete -= count;
                    moved = count > 0;
                }
                Err(error) if is_wait(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if self.complete == 0 && self.remote == Side::Ending {
            self.local.shutdown(Shutdown::Write)?;
            self.remote = Side::Ended;
        }
        Ok(moved)
    }

    /// This process has ended: announces this to the other process, and ends the stream to timely's
    /// thread.
    fn end(&mut self) -> io::Result<()> {
        self.local.set_nonblocking(false)?;
        self.channel.close_write();
        if self.remote == Side::Open {
            self.end_incoming();
        }
        while self.complete > 0 || self.remote != Side::Ended {
            self.pass_on()?;
        }
        // Received bytes are read and dropped, because the other process may not receive the last
        // messages if the connection is reset.
        let end = Instant::now() + LINGER_MAX;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            match self.channel.read(&mut self.buffer) {
                Ok(Some(0)) => {
                    let mut places = [PollFd::new(self.channel.socket(), PollFlags::IN)];
                    let left = rustix::time::Timespec {
                        tv_sec: 0,
                        tv_nsec: left.as_nanos().clamp(1, 100_000_000) as _,
                    };
                    poll(&mut places, Some(&left))?;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        Ok(())
    }

    /// Waits until bytes can be read or written.
    fn wait(&self) -> io::Result<()> {
        let of = |read: bool, write: bool| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, read);
            flags.set(PollFlags::OUT, write);
            flags
        };
        let is_open = self.remote == Side::Open;
        let local = of(self.local_open && self.outgoing.len() < WAITING_MAX, self.complete > 0);
        let remote = of(is_open && self.complete < WAITING_MAX, is_open && self.outgoing.len() > 0);
        let mut places =
            [PollFd::new(&self.local, local), PollFd::new(self.channel.socket(), remote)];
        // The socket of an ended process would report its end in each call.
        let places = if is_open { &mut places[..] } else { &mut places[..1] };
        match poll(places, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// When two processes end simultaneously, each receives the other's last message before it
    /// ends. If a process did not announce its end, both would wait for the time limit.
    #[test]
    fn the_end_is_announced_although_the_other_side_has_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let channel = Channel::Plain(listener.accept().unwrap().0);
        let (local, mut timely) = UnixStream::pair().unwrap();
        let pump = std::thread::spawn(move || {
            let fate = Fate::default();
            run(channel, local, &fate);
            assert_eq!(fate.after(Duration::ZERO), Some(&None), "it has ended as intended");
        });
        let mut last = [1; HEADER];
        other.write_all(&[0; HEADER]).unwrap();
        timely.read_exact(&mut last).unwrap();
        assert_eq!(last, [0; HEADER]);
        timely.write_all(&last).unwrap();
        drop(timely);
        other.set_read_timeout(Some(LINGER_MAX / 2)).unwrap();
        let mut received = Vec::new();
        other.read_to_end(&mut received).expect("the end arrives before the time limit");
        drop(other);
        pump.join().unwrap();
    }
}

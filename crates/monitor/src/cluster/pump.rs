//! Bytes between timely's end of a connection and the socket.
//!
//! What timely sends are messages: a header of six numbers, the fifth of them (big-endian, 8
//! bytes) the length of what follows. A message of length 0 is the last. Timely's threads panic
//! when a connection ends in any other way; so what comes in is handed on by whole messages, and
//! when the other side is lost the last message is made here.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::link::{Channel, is_wait};

/// A message's header, in bytes, and where its length is.
const HEADER: usize = 48;
const LENGTH: usize = 32;
/// The longest message that is taken.
const MESSAGE_MAX: usize = 1 << 30;
/// How much is read at once, and waits in a direction at most before no more is read.
const READ: usize = 256 << 10;
const WAITING_MAX: usize = 4 << 20;
/// How long the other side is given to take the last words.
const LINGER_MAX: Duration = Duration::from_secs(2);

/// What has become of a process, once it is not there any more: since when, and why it is lost, or
/// `None` where it has ended in good order.
#[derive(Debug, Default)]
pub struct Fate(OnceLock<(Instant, Option<String>)>);

impl Fate {
    /// It is lost. What was first is the reason.
    pub fn lose(&self, reason: &str) {
        let _ = self.0.set((Instant::now(), Some(reason.to_owned())));
    }

    fn end(&self) {
        let _ = self.0.set((Instant::now(), None));
    }

    /// What has become of it, so long after it.
    pub fn after(&self, time: Duration) -> Option<&Option<String>> {
        self.0.get().filter(|(since, _)| since.elapsed() > time).map(|(_, reason)| reason)
    }
}

/// Pumps until this side ends. Until then, the loss of the other is noted.
pub fn run(channel: Channel, local: UnixStream, fate: &Fate) {
    let mut pump = Pump {
        channel,
        local,
        outgoing: Waiting::default(),
        incoming: Waiting::default(),
        whole: 0,
        remote: Side::Open,
        local_open: true,
        buffer: vec![0; READ],
    };
    if let Err(error) = pump.run(fate) {
        fate.lose(&error.to_string());
    }
}

/// Bytes that wait to be handed on.
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

    fn took(&mut self, count: usize) {
        self.from += count;
        if self.from == self.bytes.len() {
            (self.bytes, self.from) = (std::mem::take(&mut self.bytes), 0);
            self.bytes.clear();
        }
    }
}

/// What is known of the other side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Open,
    /// The last message has come, or was made here; it is handed on.
    Ending,
    /// There is nothing more to hand on.
    Ended,
}

struct Pump {
    channel: Channel,
    local: UnixStream,
    outgoing: Waiting,
    incoming: Waiting,
    /// How much of what came in is whole messages.
    whole: usize,
    remote: Side,
    local_open: bool,
    buffer: Vec<u8>,
}

impl Pump {
    fn run(&mut self, fate: &Fate) -> io::Result<()> {
        self.local.set_nonblocking(true)?;
        self.channel.set_nonblocking()?;
        loop {
            let mut moved = self.take_local()?;
            if self.remote == Side::Open {
                match self.send().and_then(|sent| Ok(sent | self.receive()?)) {
                    Ok(more) => moved |= more,
                    Err(error) => {
                        fate.lose(&error.to_string());
                        self.lose();
                        moved = true;
                    }
                }
                if self.remote == Side::Ending {
                    fate.end();
                }
            } else {
                // Nobody is there to take it.
                moved |= self.outgoing.len() > 0;
                self.outgoing.took(self.outgoing.len());
            }
            moved |= self.hand_on()?;
            if !self.local_open && self.outgoing.len() == 0 {
                return self.end();
            }
            if !moved {
                self.wait()?;
            }
        }
    }

    /// Takes what timely sends. When it has ended, this process has.
    fn take_local(&mut self) -> io::Result<bool> {
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
        self.outgoing.took(count);
        Ok(count > 0)
    }

    fn receive(&mut self) -> io::Result<bool> {
        if self.whole >= WAITING_MAX {
            return Ok(false);
        }
        let Some(count) = self.channel.read(&mut self.buffer)? else {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection has ended"));
        };
        self.incoming.add(&self.buffer[..count]);
        while let Some(header) = self.incoming.get().get(self.whole..self.whole + HEADER) {
            let length = header[LENGTH..LENGTH + 8]
                .iter()
                .fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
            let length = usize::try_from(length).ok().filter(|length| *length <= MESSAGE_MAX);
            let Some(length) = length else {
                return Err(io::Error::new(ErrorKind::InvalidData, "a message is too long"));
            };
            if length == 0 {
                self.whole += HEADER;
                self.remote = Side::Ending;
                break;
            }
            if self.incoming.len() < self.whole + HEADER + length {
                break;
            }
            self.whole += HEADER + length;
        }
        Ok(count > 0)
    }

    /// The other side is lost: what is not whole is nothing, and the last message is made.
    fn lose(&mut self) {
        let whole = self.incoming.get()[..self.whole].to_vec();
        self.incoming = Waiting { bytes: whole, from: 0 };
        self.incoming.add(&[0; HEADER]);
        self.whole += HEADER;
        self.remote = Side::Ending;
    }

    fn hand_on(&mut self) -> io::Result<bool> {
        if self.remote == Side::Ended {
            return Ok(false);
        }
        let mut moved = false;
        if self.whole > 0 {
            match self.local.write(&self.incoming.get()[..self.whole]) {
                Ok(count) => {
                    self.incoming.took(count);
                    self.whole -= count;
                    moved = count > 0;
                }
                Err(error) if is_wait(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if self.whole == 0 && self.remote == Side::Ending {
            self.local.shutdown(Shutdown::Write)?;
            self.remote = Side::Ended;
        }
        Ok(moved)
    }

    /// This side has ended: the other is told, and timely's thread, which may wait for more.
    fn end(&mut self) -> io::Result<()> {
        self.local.set_nonblocking(false)?;
        self.channel.close_write();
        if self.remote == Side::Open {
            self.lose();
        }
        while self.whole > 0 || self.remote != Side::Ended {
            self.hand_on()?;
        }
        // What comes in meanwhile is taken, so that the last words are not lost.
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

    /// Waits until there is something to do.
    fn wait(&self) -> io::Result<()> {
        let of = |read: bool, write: bool| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, read);
            flags.set(PollFlags::OUT, write);
            flags
        };
        let is_open = self.remote == Side::Open;
        let local = of(self.local_open && self.outgoing.len() < WAITING_MAX, self.whole > 0);
        let remote = of(is_open && self.whole < WAITING_MAX, is_open && self.outgoing.len() > 0);
        let mut places =
            [PollFd::new(&self.local, local), PollFd::new(self.channel.socket(), remote)];
        // A socket that is not looked at would tell of its end again and again.
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

    /// Each of two that end at once has had the other's last message before it ends itself. If it
    /// did not say that it ends, both would linger.
    #[test]
    fn the_end_is_reported_though_the_other_side_has_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let channel = Channel::Plain(listener.accept().unwrap().0);
        let (local, mut timely) = UnixStream::pair().unwrap();
        let pump = std::thread::spawn(move || {
            let fate = Fate::default();
            run(channel, local, &fate);
            assert_eq!(fate.after(Duration::ZERO), Some(&None), "it has ended in good order");
        });
        let mut last = [1; HEADER];
        other.write_all(&[0; HEADER]).unwrap();
        timely.read_exact(&mut last).unwrap();
        assert_eq!(last, [0; HEADER]);
        timely.write_all(&last).unwrap();
        drop(timely);
        other.set_read_timeout(Some(LINGER_MAX / 2)).unwrap();
        let mut said = Vec::new();
        other.read_to_end(&mut said).expect("the end comes long before nobody lingers any more");
        drop(other);
        pump.join().unwrap();
    }
}

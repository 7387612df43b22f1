//! A connection's bytes, plain or encrypted. Nothing waits longer than the socket's timeouts.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use openssl::ssl::SslStream;

use super::frame::{self, Inbox, PREAMBLE, Sender};

/// How much is read at once, in bytes.
const READ: usize = 64 << 10;
/// How long a handshake waits before it looks at the time.
const HANDSHAKE_WAIT: Duration = Duration::from_millis(100);
/// How long the other side is given to take the last words.
const LINGER_MAX: Duration = Duration::from_millis(300);

/// See the module.
pub enum Channel {
    /// As they are.
    Plain(TcpStream),
    /// Encrypted.
    Secure(Box<SslStream<TcpStream>>),
}

impl Channel {
    /// The socket below.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Secure(stream) => stream.get_ref(),
        }
    }

    /// How long a read and a write may wait.
    pub fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.socket().set_read_timeout(Some(read))?;
        self.socket().set_write_timeout(Some(write))
    }

    /// From now on nothing waits at all.
    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        self.socket().set_nonblocking(true)
    }

    /// The bytes that are there, or come soon: 0 where there are none, `None` at the end.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let read = match self {
            Self::Plain(socket) => socket.read(bytes),
            Self::Secure(stream) => stream.read(bytes),
        };
        match read {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(count)),
            Err(error) if is_wait(&error) => Ok(Some(0)),
            Err(error) => Err(error),
        }
    }

    /// Takes as many bytes as there is room for: perhaps none.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Secure(stream) => stream.write(bytes),
        };
        match written {
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Err(error) if is_wait(&error) => Ok(0),
            other => other,
        }
    }
}

impl Channel {
    /// Says no more; what the other side says can be read. Best effort.
    pub(crate) fn close_write(&mut self) {
        if let Self::Secure(stream) = self {
            // The other side learns that the end is no cut.
            let _ = stream.shutdown();
        }
        let _ = self.socket().shutdown(Shutdown::Write);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close_write();
        let _ = self.socket().shutdown(Shutdown::Both);
    }
}

/// Whether an error says only that nothing can be done now.
pub(crate) fn is_wait(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Connects to an address, `host:port`; each of those that it stands for is tried for so long.
///
/// # Errors
/// Why the last of them is not reached.
pub(crate) fn reach(address: &str, limit: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the address names no host");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return prepare(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Makes a socket ready for handshakes: it sends at once, and waits for little at a time.
pub(crate) fn prepare(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HANDSHAKE_WAIT))?;
    stream.set_write_timeout(Some(HANDSHAKE_WAIT))?;
    Ok(stream)
}

/// The host of an address.
pub(crate) fn host_of(address: &str) -> &str {
    let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Frames to and fro over a channel.
pub struct Line {
    channel: Channel,
    inbox: Inbox,
    buffer: Vec<u8>,
    /// What is being sent, and how much of it has been.
    output: Vec<u8>,
    sent: usize,
    /// All bytes that came.
    pub received: u64,
    /// All bytes that went.
    pub sent_bytes: u64,
}

impl Line {
    /// A line on which the other side sends as `sender`. Both sides say the preamble first; it is
    /// waited for until `end`.
    ///
    /// # Errors
    /// When the other side says something else, or nothing.
    pub fn open(channel: Channel, sender: Sender, end: Instant) -> io::Result<Self> {
        let mut line = Self {
            channel,
            inbox: Inbox::new(sender),
            buffer: vec![0; READ],
            output: frame::preamble().to_vec(),
            sent: 0,
            received: 0,
            sent_bytes: 0,
        };
        let mut preamble = [0; PREAMBLE];
        let mut come = 0;
        while come < PREAMBLE {
            line.flush()?;
            match line.channel.read(&mut preamble[come..])? {
                Some(count) => come += count,
                None => return Err(left()),
            }
            if come < PREAMBLE && Instant::now() >= end {
                let what = "the other side did not say who it is in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            // What differs will not become the same.
            if preamble[..come.min(8)] != frame::MAGIC[..come.min(8)] {
                break;
            }
        }
        frame::check_preamble(&preamble)
            .map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))?;
        line.received += PREAMBLE as u64;
        Ok(line)
    }

    /// The channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Where frames are put that are to be sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        if self.sent >= READ {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
        &mut self.output
    }

    /// How many bytes wait to be sent.
    pub fn waiting(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Sends what there is room for.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.output.len() {
            let count = self.channel.write(&self.output[self.sent..])?;
            if count == 0 {
                return Ok(());
            }
            self.sent += count;
            self.sent_bytes += count as u64;
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads what has come, or comes soon.
    ///
    /// # Errors
    /// When the other side has left, or the connection is broken.
    pub fn fill(&mut self) -> io::Result<()> {
        match self.channel.read(&mut self.buffer)? {
            Some(count) => {
                self.received += count as u64;
                self.inbox.add(&self.buffer[..count]);
                Ok(())
            }
            None => Err(left()),
        }
    }

    /// The next frame that has come: its kind and its bytes.
    ///
    /// # Errors
    /// When there is none: the other side speaks something else.
    pub fn next(&mut self) -> io::Result<Option<(u8, &[u8])>> {
        self.inbox.next().map_err(|wrong| invalid(wrong.0))
    }

    /// Sends what waits, for a little while, and ends the connection when the other side does. A
    /// socket that is closed while something comes in is reset, and the other side, which fails to
    /// write, would not read the last words.
    pub fn end(mut self) {
        let _ = self.channel.set_timeouts(Duration::from_millis(10), Duration::from_millis(200));
        if self.flush().is_err() {
            return;
        }
        self.channel.close_write();
        let end = Instant::now() + LINGER_MAX;
        while Instant::now() < end && matches!(self.channel.read(&mut self.buffer), Ok(Some(_))) {}
    }
}

fn left() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other side left")
}

/// The other side says what makes no sense.
pub fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

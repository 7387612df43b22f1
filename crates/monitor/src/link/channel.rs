//! A connection, plain or encrypted. No operation waits longer than the socket's timeouts.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use openssl::ssl::SslStream;

use super::frame::{self, Inbox, PREAMBLE, Sender};

/// The most bytes of one read.
const READ: usize = 64 << 10;
/// The timeout of reads and writes during a handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_millis(100);
/// The longest time for the other side to read the last frames before the connection is closed.
const LINGER_MAX: Duration = Duration::from_millis(300);

/// See the module.
pub enum Channel {
    /// Plain text.
    Plain(TcpStream),
    /// TLS.
    Secure(Box<SslStream<TcpStream>>),
}

impl Channel {
    /// The underlying socket.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Secure(stream) => stream.get_ref(),
        }
    }

    /// Sets the timeouts of reads and writes.
    pub fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.socket().set_read_timeout(Some(read))?;
        self.socket().set_write_timeout(Some(write))
    }

    /// Makes the socket non-blocking.
    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        self.socket().set_nonblocking(true)
    }

    /// Reads available bytes, and waits for them up to the timeout. Returns the number of bytes, 0
    /// after a timeout, `None` at the end.
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

    /// Writes as many bytes as the socket accepts, and returns their number; 0 after a timeout.
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
    /// Ends the outgoing direction; bytes can still be received. Errors are ignored.
    pub(crate) fn close_write(&mut self) {
        if let Self::Secure(stream) = self {
            // A TLS alert distinguishes the end from a cut connection.
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

/// Whether an error only means that the operation would have to wait.
pub(crate) fn is_wait(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Connects to an address, `host:port`. Each IP address of the host is tried for up to `limit`.
///
/// # Errors
/// The error of the last IP address.
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

/// Prepares a socket for handshakes: sends without delay, and sets short timeouts.
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

/// A connection that sends and receives frames.
pub struct Line {
    channel: Channel,
    inbox: Inbox,
    buffer: Vec<u8>,
    /// The frames to send, and how many of their bytes have been sent.
    output: Vec<u8>,
    sent: usize,
    /// The other side's level ([`frame::LEVEL`]).
    pub level: u8,
    /// The number of received bytes.
    pub received: u64,
    /// The number of sent bytes.
    pub sent_bytes: u64,
}

impl Line {
    /// Opens a connection whose other side sends as `sender`. Both sides send the preamble first.
    /// The other side's preamble has to arrive before `end`.
    ///
    /// # Errors
    /// If the other side sends another preamble, or none in time.
    pub fn open(channel: Channel, sender: Sender, end: Instant) -> io::Result<Self> {
        let mut line = Self {
            channel,
            inbox: Inbox::new(sender),
            buffer: vec![0; READ],
            output: frame::preamble().to_vec(),
            sent: 0,
            level: 0,
            received: 0,
            sent_bytes: 0,
        };
        let mut preamble = [0; PREAMBLE];
        let mut filled = 0;
        while filled < PREAMBLE {
            line.flush()?;
            match line.channel.read(&mut preamble[filled..])? {
                Some(count) => filled += count,
                None => return Err(disconnected()),
            }
            if filled < PREAMBLE && Instant::now() >= end {
                let message = "the other side did not identify itself in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            // A wrong beginning ends the wait.
            if preamble[..filled.min(8)] != frame::MAGIC[..filled.min(8)] {
                break;
            }
        }
        line.level = frame::check_preamble(&preamble)
            .map_err(|message| io::Error::new(io::ErrorKind::InvalidData, message))?;
        line.received += PREAMBLE as u64;
        Ok(line)
    }

    /// The underlying channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// The buffer to which frames are appended for sending.
    pub fn output(&mut self) -> &mut Vec<u8> {
        if self.sent >= READ {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
        &mut self.output
    }

    /// The number of bytes that wait to be sent.
    pub fn waiting(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Sends as many bytes as the socket accepts.
    ///
    /// # Errors
    /// If the connection is broken.
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

    /// Reads available bytes, and waits for them up to the timeout.
    ///
    /// # Errors
    /// If the other side has disconnected, or the connection is broken.
    pub fn fill(&mut self) -> io::Result<()> {
        match self.channel.read(&mut self.buffer)? {
            Some(count) => {
                self.received += count as u64;
                self.inbox.add(&self.buffer[..count]);
                Ok(())
            }
            None => Err(disconnected()),
        }
    }

    /// The next complete frame: its kind and its bytes; `None` until it is complete.
    ///
    /// # Errors
    /// If the received bytes are not a frame.
    pub fn next(&mut self) -> io::Result<Option<(u8, &[u8])>> {
        self.inbox.next().map_err(|wrong| invalid(wrong.0))
    }

    /// Sends the waiting bytes for a short time, and closes the connection when the other side
    /// does. If a socket is closed while bytes arrive, the connection is reset, and the other side
    /// may not receive the last frames.
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

fn disconnected() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other side left")
}

/// The error for invalid data from the other side.
pub fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.to_owned())
}

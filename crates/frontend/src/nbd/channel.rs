//! The byte stream of a connection, plain or encrypted, without blocking.

#![expect(unsafe_code, reason = "messages of many segments")]

use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use openssl::ssl::{ErrorCode, Ssl, SslStream};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use fathom_tls::Tls;

/// The most bytes that are encrypted together: the longest TLS record.
const RECORD_LENGTH: usize = 16 << 10;

/// A nonblocking stream socket.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Wraps a connected, nonblocking socket.
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Closes the socket's sending side.
    pub fn shut(&self) {
        // It is no error if the peer has already disconnected.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Write);
    }

    fn receive(&self, segments: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::readv(&self.0, segments)?)
    }

    fn receive_one(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(&self.0, buffer, RecvFlags::DONTWAIT)?.0)
    }

    fn send_one(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// Sends the bytes of the segments. Returns the number of bytes sent.
    ///
    /// # Safety
    /// The segments must be readable.
    unsafe fn send(&self, segments: &mut [libc::iovec]) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the caller guarantees that the segments are readable.
        let count = unsafe {
            if let [segment] = segments {
                libc::send(self.0.as_raw_fd(), segment.iov_base, segment.iov_len, flags)
            } else {
                let message = message(segments);
                libc::sendmsg(self.0.as_raw_fd(), &raw const message, flags)
            }
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

/// A message of the segments, which must stay where they are while it is used.
pub(super) fn message(segments: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeroes is a message without address, segments and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = segments.len() as _;
    message
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive_one(buffer)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send_one(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection's byte stream. No call blocks: a call that cannot proceed returns an error of kind
/// `WouldBlock`.
pub enum Channel {
    /// Without encryption.
    Plain(Socket),
    /// Encrypted.
    Secure(Box<Secure>),
    /// Unusable: during the change from plain to encrypted, and after its failure.
    Closed,
}

/// An encrypted stream.
pub struct Secure {
    stream: SslStream<Socket>,
    /// The bytes to be encrypted next: whole replies are gathered into large records.
    staging: Vec<u8>,
    staged_sent: usize,
}

impl Channel {
    /// Converts a plain channel into an encrypted one, whose TLS handshake has not begun.
    pub fn secure(self, tls: &Tls) -> io::Result<Self> {
        let Self::Plain(socket) = self else {
            return Err(io::Error::other("the channel is already encrypted"));
        };
        let ssl = Ssl::new(tls.context())?;
        let stream = SslStream::new(ssl, socket)?;
        Ok(Self::Secure(Box::new(Secure {
            stream,
            staging: Vec::with_capacity(RECORD_LENGTH),
            staged_sent: 0,
        })))
    }

    /// Continues the TLS handshake. On `Err(WouldBlock)`, `writable` is whether it waits to send
    /// rather than to receive.
    pub fn shake_hands(&mut self, writable: &mut bool) -> io::Result<()> {
        let Self::Secure(secure) = self else { return Ok(()) };
        match secure.stream.accept() {
            Ok(()) => Ok(()),
            Err(error) => {
                *writable = error.code() == ErrorCode::WANT_WRITE;
                Err(from_ssl(error))
            }
        }
    }

    /// The version of TLS, such as `TLSv1.3`.
    pub fn tls_version(&self) -> Option<&'static str> {
        match self {
            Self::Plain(_) | Self::Closed => None,
            Self::Secure(secure) => Some(secure.stream.ssl().version_str()),
        }
    }

    fn socket(&self) -> Option<&Socket> {
        match self {
            Self::Plain(socket) => Some(socket),
            Self::Secure(secure) => Some(secure.stream.get_ref()),
            Self::Closed => None,
        }
    }

    /// The socket, for polling.
    ///
    /// # Errors
    /// When the channel is closed.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.socket().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The socket of a plain channel.
    pub fn plain(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(socket) => Some(socket.as_fd()),
            Self::Secure(_) | Self::Closed => None,
        }
    }

    /// A second descriptor of the socket.
    ///
    /// # Errors
    /// When the channel is closed, or no descriptor is available.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.descriptor()?.try_clone_to_owned()
    }

    /// Closes the channel's sending side.
    pub fn shut(&mut self) {
        if let Self::Secure(secure) = self {
            // Best effort: the peer can distinguish this end from a broken connection.
            let _ = secure.stream.shutdown();
        }
        if let Some(socket) = self.socket() {
            socket.shut();
        }
    }

    /// Receives into `first`, and the rest into `second`. Returns the number of bytes; 0 is the end
    /// of the stream.
    pub fn receive(&mut self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Closed => Err(io::ErrorKind::NotConnected.into()),
            Self::Plain(socket) if first.is_empty() => socket.receive_one(second),
            Self::Plain(socket) => {
                socket.receive(&mut [IoSliceMut::new(first), IoSliceMut::new(second)])
            }
            Self::Secure(secure) => {
                let count = secure.receive(first)?;
                if count < first.len() {
                    return Ok(count);
                }
                match secure.receive(second) {
                    Ok(more) => Ok(count + more),
                    Err(_) if count > 0 => Ok(count),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Sends as many bytes as there is room for. Returns the number of bytes that were sent or
    /// staged.
    ///
    /// # Safety
    /// The segments must be readable.
    pub unsafe fn send(&mut self, segments: &mut [libc::iovec]) -> io::Result<usize> {
        match self {
            Self::Closed => Err(io::ErrorKind::NotConnected.into()),
            // SAFETY: the caller guarantees that the segments are readable.
            Self::Plain(socket) => unsafe { socket.send(segments) },
            Self::Secure(secure) => secure.send(segments.iter().map(|segment| {
                // SAFETY: as above.
                unsafe {
                    std::slice::from_raw_parts(segment.iov_base.cast::<u8>(), segment.iov_len)
                }
            })),
        }
    }

    /// The same as [`Self::send`], for bytes of the daemon.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Closed => Err(io::ErrorKind::NotConnected.into()),
            Self::Plain(socket) => socket.send_one(bytes),
            Self::Secure(secure) => secure.send(std::iter::once(bytes)),
        }
    }

    /// Whether there are staged bytes that have not been sent; [`Self::flush`] sends them.
    pub fn has_staged(&self) -> bool {
        matches!(self, Self::Secure(secure) if !secure.staging.is_empty())
    }

    /// Sends the staged bytes.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) | Self::Closed => Ok(()),
            Self::Secure(secure) => secure.drain(),
        }
    }
}

impl Secure {
    /// Receives until the buffer is full or no more bytes are available.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.stream.ssl_read(&mut buffer[done..]) {
                Ok(count) => done += count,
                Err(_) if done > 0 => break,
                Err(error) if error.code() == ErrorCode::ZERO_RETURN => return Ok(0),
                Err(error) => return Err(from_ssl(error)),
            }
        }
        Ok(done)
    }

    /// The same as [`Channel::send`]. Each part is read once.
    fn send<'b>(&mut self, parts: impl Iterator<Item = &'b [u8]>) -> io::Result<usize> {
        let mut taken = 0;
        for mut bytes in parts {
            while !bytes.is_empty() {
                if self.staging.len() == RECORD_LENGTH {
                    match self.drain() {
                        Ok(()) => {}
                        Err(error) if taken == 0 || !is_blocked(&error) => return Err(error),
                        Err(_) => return Ok(taken),
                    }
                }
                let count = bytes.len().min(RECORD_LENGTH - self.staging.len());
                self.staging.extend_from_slice(&bytes[..count]);
                taken += count;
                bytes = &bytes[count..];
            }
        }
        match self.drain() {
            Err(error) if !is_blocked(&error) => Err(error),
            _ => Ok(taken),
        }
    }

    /// Encrypts and sends the staged bytes.
    fn drain(&mut self) -> io::Result<()> {
        while self.staged_sent < self.staging.len() {
            match self.stream.ssl_write(&self.staging[self.staged_sent..]) {
                Ok(count) => self.staged_sent += count,
                Err(error) => return Err(from_ssl(error)),
            }
        }
        self.staging.clear();
        self.staged_sent = 0;
        Ok(())
    }
}

/// Whether an error only means that the call must be repeated later.
pub fn is_blocked(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn from_ssl(error: openssl::ssl::Error) -> io::Error {
    match error.code() {
        ErrorCode::WANT_READ | ErrorCode::WANT_WRITE => io::ErrorKind::WouldBlock.into(),
        _ => error.into_io_error().unwrap_or_else(io::Error::other),
    }
}

//! The connections of those who look.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fathom_tls::Tls;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// The most connections at a time, with those that are being encrypted.
const CONNECTIONS_MAX: usize = 256;
/// The longest time of a handshake.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a connection may be silent in both directions. What goes on sends something each
/// second.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(200);

/// Where the page is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let mut found = text.to_socket_addrs().map_err(|error| format!("{text:?}: {error}"))?;
        found.next().map(Self::Tcp).ok_or_else(|| format!("{text:?} is no address"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Whether other hosts can connect.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().to_canonical().is_loopback())
    }
}

/// A connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection, with its place among all. It ends when nothing was read or written for too long.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    silence: Pin<Box<tokio::time::Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: Box<dyn Stream>, place: OwnedSemaphorePermit) -> Self {
        Self { stream, silence: Box::pin(tokio::time::sleep(SILENCE_MAX)), _place: place }
    }

    /// Notes that bytes were moved, or fails if none were for too long.
    fn note<T>(
        &mut self,
        polled: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            let end = tokio::time::Instant::now() + SILENCE_MAX;
            self.silence.as_mut().reset(end);
        } else if self.silence.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.note(polled, context)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(polled, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

enum Source {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// The listener of the page.
pub(super) struct Listener {
    address: Address,
    is_encrypted: bool,
    ready: mpsc::Receiver<Connection>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Listener {
    pub(super) async fn bind(address: &Address, tls: Option<Tls>) -> io::Result<Self> {
        let is_encrypted = tls.is_some();
        let (source, address) = match address {
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address).await?;
                let address = Address::Tcp(listener.local_addr()?);
                (Source::Tcp(listener), address)
            }
            Address::Unix(path) => {
                // A socket that nobody listens at is left from an earlier start.
                if std::os::unix::net::UnixStream::connect(path).is_err() {
                    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| {
                        use std::os::unix::fs::FileTypeExt as _;
                        found.file_type().is_socket()
                    });
                    if is_socket {
                        std::fs::remove_file(path)?;
                    }
                }
                let listener = UnixListener::bind(path)?;
                std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
                (Source::Unix(listener), address.clone())
            }
        };
        let (sender, ready) = mpsc::channel(1);
        let accepting = tokio::spawn(accept(source, tls, sender));
        Ok(Self { address, is_encrypted, ready, accepting })
    }

    /// The address for a browser.
    pub(super) fn url(&self) -> String {
        let scheme = if self.is_encrypted { "https" } else { "http" };
        match &self.address {
            Address::Tcp(address) => format!("{scheme}://{address}"),
            Address::Unix(_) => self.address.to_string(),
        }
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// Whether it is for browsers of this host.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.address, Address::Tcp(address)
            if address.ip() != IpAddr::from([0; 4]) && address.ip().to_canonical().is_loopback())
    }

    pub(super) fn port(&self) -> u16 {
        match self.address {
            Address::Tcp(address) => address.port(),
            Address::Unix(_) => 0,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.abort();
        if let Address::Unix(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = ();

    async fn accept(&mut self) -> (Connection, ()) {
        match self.ready.recv().await {
            Some(connection) => (connection, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Accepts connections. A handshake delays no other connection.
async fn accept(source: Source, tls: Option<Tls>, ready: mpsc::Sender<Connection>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = match &source {
            Source::Tcp(listener) => {
                listener.accept().await.map(|(stream, _)| Box::new(stream) as _)
            }
            Source::Unix(listener) => {
                listener.accept().await.map(|(stream, _)| Box::new(stream) as Box<dyn Stream>)
            }
        };
        let Ok(stream) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (tls, ready) = (tls.clone(), ready.clone());
        tokio::spawn(async move {
            let stream = match tls {
                None => stream,
                Some(tls) => {
                    let handshake = tls.secure_accepted(stream);
                    match tokio::time::timeout(HANDSHAKE_TIME_MAX, handshake).await {
                        Ok(Ok(stream)) => Box::new(stream) as Box<dyn Stream>,
                        Ok(Err(_)) | Err(_) => return,
                    }
                }
            };
            let _ = ready.send(Connection::new(stream, place)).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_local_or_remote() {
        let address = |text: &str| text.parse::<Address>().unwrap();
        assert!(!address("127.0.0.1:80").is_remote() && !address("[::1]:80").is_remote());
        assert!(!address("[::ffff:127.0.0.1]:80").is_remote());
        assert!(address("0.0.0.0:80").is_remote() && address("[::]:80").is_remote());
        assert!(address("192.0.2.1:80").is_remote() && !address("unix:/x").is_remote());
        assert!("nothing".parse::<Address>().is_err());
    }
}

//! The way to a server: a socket, with TLS if the URI wants it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fathom_failure::Failure;
use fathom_tls::Tls;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::uri::{TlsFiles, Transport};

/// How long a host may be silent: what it has not acknowledged, and probes of an idle connection.
/// It is less than the time limit of a request, so that requests are sent again. A server may take
/// longer.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// The time without bytes after which the first probe follows, and that between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Bytes in both directions.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> ByteStream for T {}

/// A stream of any kind.
pub(crate) type AnyStream = Box<dyn ByteStream>;

/// What makes streams secure.
pub(crate) struct Secure {
    tls: Tls,
    name: String,
}

impl Secure {
    /// Reads the files.
    pub(crate) fn new(files: &TlsFiles) -> Result<Self, Failure> {
        let own = files.own.as_ref().map(|(certificate, key)| (&**certificate, &**key));
        let tls = Tls::client(&files.authority, own).map_err(|error| {
            Failure::new(error.to_string()).advise("name a folder with usable certificates")
        })?;
        Ok(Self { tls, name: files.name.clone() })
    }

    /// Begins TLS on a stream.
    pub(crate) async fn start(&self, stream: AnyStream) -> Result<AnyStream, Failure> {
        match self.tls.secure(stream, &self.name).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => {
                let failure = Failure::new(error.to_string());
                Err(failure.advise("check the certificates of both sides"))
            }
        }
    }
}

/// Connects to a server. Returns the socket, too.
pub(crate) async fn connect(transport: &Transport) -> io::Result<(AnyStream, OwnedFd)> {
    Ok(match transport {
        Transport::Tcp(host, port) => {
            let stream = TcpStream::connect((&**host, *port)).await?;
            stream.set_nodelay(true)?;
            let socket = SockRef::from(&stream);
            let probes =
                TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL);
            socket.set_tcp_keepalive(&probes.with_retries(2))?;
            socket.set_tcp_user_timeout(Some(SILENCE_MAX))?;
            let socket = stream.as_fd().try_clone_to_owned()?;
            (Box::new(stream), socket)
        }
        Transport::Unix(path) => {
            let stream = UnixStream::connect(path).await?;
            let socket = stream.as_fd().try_clone_to_owned()?;
            (Box::new(stream), socket)
        }
    })
}

//! Handshakes on sockets with timeouts and on streams of tokio, and the name of the peer.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::pin::Pin;
use std::time::Instant;

use openssl::nid::Nid;
use openssl::ssl::{self, HandshakeError, Ssl, SslRef, SslStream};
use openssl::x509::{X509Ref, X509VerifyResult};
use tokio::io::{AsyncRead, AsyncWrite};

use super::Tls;

impl Tls {
    /// Performs the handshake with a client, at the latest until `end`, and returns the names of
    /// the client's certificate. The socket must have timeouts.
    ///
    /// # Errors
    /// When the handshake fails, or does not complete in time. The text is for the operator.
    pub fn accept(
        &self,
        stream: TcpStream,
        end: Instant,
    ) -> io::Result<(SslStream<TcpStream>, Vec<String>)> {
        let ssl = Ssl::new(&self.context)?;
        let stream = shake_hands(ssl.accept(stream), end)?;
        let certificate = stream.ssl().peer_certificate();
        let names = certificate.map(|certificate| names(&certificate)).unwrap_or_default();
        Ok((stream, names))
    }

    /// Performs the handshake with a server, at the latest until `end`. The server's certificate
    /// must have the name `name`. The socket must have timeouts.
    ///
    /// # Errors
    /// See [`accept`](Self::accept).
    pub fn connect(
        &self,
        stream: TcpStream,
        name: &str,
        end: Instant,
    ) -> io::Result<SslStream<TcpStream>> {
        shake_hands(self.to_server(name)?.connect(stream), end)
    }

    /// Performs the handshake with a server on a stream of tokio. The server's certificate must
    /// have the name `name`. The caller limits the time.
    ///
    /// # Errors
    /// When the handshake fails. The text is for the operator.
    pub async fn secure<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        name: &str,
    ) -> io::Result<tokio_openssl::SslStream<S>> {
        let mut stream = tokio_openssl::SslStream::new(self.to_server(name)?, stream)?;
        match Pin::new(&mut stream).connect().await {
            Ok(()) => Ok(stream),
            Err(error) => Err(failure(stream.ssl(), &error)),
        }
    }

    /// Performs the handshake with a client over a stream of tokio. Callers set a time limit.
    ///
    /// # Errors
    /// When the handshake fails. The text is for the operator.
    pub async fn secure_accepted<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<tokio_openssl::SslStream<S>> {
        let mut stream = tokio_openssl::SslStream::new(Ssl::new(&self.context)?, stream)?;
        match Pin::new(&mut stream).accept().await {
            Ok(()) => Ok(stream),
            Err(error) => Err(failure(stream.ssl(), &error)),
        }
    }

    /// A connection to a server whose certificate must have the name `name`.
    fn to_server(&self, name: &str) -> io::Result<Ssl> {
        let mut ssl = Ssl::new(&self.context)?;
        if let Ok(address) = name.parse() {
            ssl.param_mut().set_ip(address)?;
        } else {
            ssl.set_hostname(name)?;
            ssl.param_mut().set_host(name)?;
        }
        Ok(ssl)
    }
}

type Handshake = Result<SslStream<TcpStream>, HandshakeError<TcpStream>>;

/// Continues a handshake with a peer of any speed until `end`. The socket has timeouts.
fn shake_hands(mut handshake: Handshake, end: Instant) -> io::Result<SslStream<TcpStream>> {
    loop {
        match handshake {
            Ok(stream) => return Ok(stream),
            Err(HandshakeError::WouldBlock(_)) if Instant::now() >= end => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the peer did not complete the TLS handshake in time",
                ));
            }
            Err(HandshakeError::WouldBlock(middle)) => handshake = middle.handshake(),
            Err(HandshakeError::SetupFailure(error)) => return Err(error.into()),
            Err(HandshakeError::Failure(middle)) => {
                return Err(failure(middle.ssl(), middle.error()));
            }
        }
    }
}

/// The error of a failed handshake, with a text for the operator.
fn failure(ssl: &SslRef, error: &ssl::Error) -> io::Error {
    let verified = ssl.verify_result();
    let reason = if verified == X509VerifyResult::OK {
        match error.ssl_error() {
            Some(stack) => stack
                .errors()
                .last()
                .map_or_else(String::new, |error| error.reason().unwrap_or("unknown").to_owned()),
            None => match error.io_error() {
                Some(error) => error.to_string(),
                None => "the peer closed the connection".into(),
            },
        }
    } else {
        format!("the peer's certificate is refused: {}", verified.error_string())
    };
    io::Error::new(io::ErrorKind::PermissionDenied, format!("the TLS handshake failed: {reason}"))
}

/// The names of a certificate: its DNS names, or its common name if it has none, and then its
/// addresses.
pub(super) fn names(certificate: &X509Ref) -> Vec<String> {
    let alternatives = || certificate.subject_alt_names().into_iter().flatten();
    let mut names: Vec<String> =
        alternatives().filter_map(|name| name.dnsname().map(str::to_owned)).collect();
    if names.is_empty() {
        let common = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
        names.extend(common.filter_map(|entry| entry.data().to_string().ok()));
    }
    let address = |bytes: &[u8]| match <[u8; 4]>::try_from(bytes) {
        Ok(bytes) => Some(IpAddr::from(bytes)),
        Err(_) => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    };
    let addresses = alternatives().filter_map(|name| name.ipaddress().and_then(address));
    names.extend(addresses.map(|address| address.to_string()));
    names
}

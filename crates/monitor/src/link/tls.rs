//! TLS with certificates on both sides.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use openssl::error::ErrorStack;
use openssl::nid::Nid;
use openssl::ssl::{
    HandshakeError, MidHandshakeSslStream, Ssl, SslContext, SslContextBuilder, SslFiletype,
    SslMethod, SslMode, SslOptions, SslSessionCacheMode, SslStream, SslVerifyMode, SslVersion,
};
use openssl::x509::X509Ref;

/// Where a side's certificates are, as PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The own certificate, and behind it the chain up to what the other side knows.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// The authority that the other side's certificate must be signed by.
    pub authority: PathBuf,
}

/// How a side encrypts.
#[derive(Clone)]
pub struct Tls {
    context: SslContext,
}

impl fmt::Debug for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Tls").field(&self.own_name()).finish()
    }
}

impl Tls {
    /// TLS of the centre, which hosts connect to.
    ///
    /// # Errors
    /// When a file cannot be read or does not fit the others; the text names the file.
    pub fn centre(files: &TlsFiles) -> io::Result<Self> {
        Self::new(SslMethod::tls_server(), files)
    }

    /// TLS of a host.
    ///
    /// # Errors
    /// See [`centre`](Self::centre).
    pub fn host(files: &TlsFiles) -> io::Result<Self> {
        Self::new(SslMethod::tls_client(), files)
    }

    fn new(method: SslMethod, files: &TlsFiles) -> io::Result<Self> {
        let mut builder = SslContext::builder(method)?;
        builder.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        builder.set_mode(
            SslMode::AUTO_RETRY
                | SslMode::ENABLE_PARTIAL_WRITE
                | SslMode::ACCEPT_MOVING_WRITE_BUFFER
                | SslMode::RELEASE_BUFFERS,
        );
        // A connection lives for long: there is nothing to resume.
        builder.set_options(SslOptions::NO_TICKET | SslOptions::NO_RENEGOTIATION);
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        builder.set_num_tickets(0)?;
        builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        set_files(&mut builder, files)?;
        Ok(Self { context: builder.build() })
    }

    /// The first name of the own certificate.
    pub fn own_name(&self) -> Option<String> {
        names(self.context.certificate()?).into_iter().next()
    }

    /// Shakes hands with one who connects until `end`, and gives the names of its certificate.
    pub(crate) fn accept(
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

    /// Shakes hands with another, whose certificate is to have this name, until `end`.
    pub(crate) fn connect(
        &self,
        stream: TcpStream,
        name: &str,
        end: Instant,
    ) -> io::Result<SslStream<TcpStream>> {
        let mut ssl = Ssl::new(&self.context)?;
        if let Ok(address) = name.parse() {
            ssl.param_mut().set_ip(address)?;
        } else {
            ssl.set_hostname(name)?;
            ssl.param_mut().set_host(name)?;
        }
        shake_hands(ssl.connect(stream), end)
    }
}

fn set_files(builder: &mut SslContextBuilder, files: &TlsFiles) -> io::Result<()> {
    let TlsFiles { certificate, key, authority } = files;
    for path in [certificate, key, authority] {
        readable(path)?;
    }
    builder
        .set_certificate_chain_file(certificate)
        .map_err(|error| unfit(certificate, "certificate", &error))?;
    builder
        .set_private_key_file(key, SslFiletype::PEM)
        .map_err(|error| unfit(key, "private key", &error))?;
    builder.check_private_key().map_err(|error| unfit(key, "key of this certificate", &error))?;
    builder.set_ca_file(authority).map_err(|error| unfit(authority, "authority", &error))
}

fn readable(path: &Path) -> io::Result<()> {
    fs::File::open(path)
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn unfit(path: &Path, what: &str, error: &ErrorStack) -> io::Error {
    let text = format!("{} is no usable {what}: {error}", path.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

type Handshake = Result<SslStream<TcpStream>, HandshakeError<TcpStream>>;

/// Goes on with a handshake, however slow the other side is, but not beyond `end`. The socket has
/// timeouts.
fn shake_hands(mut handshake: Handshake, end: Instant) -> io::Result<SslStream<TcpStream>> {
    loop {
        match handshake {
            Ok(stream) => return Ok(stream),
            Err(HandshakeError::WouldBlock(_)) if Instant::now() >= end => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the other side did not shake hands in time",
                ));
            }
            Err(HandshakeError::WouldBlock(middle)) => handshake = middle.handshake(),
            Err(HandshakeError::SetupFailure(error)) => return Err(error.into()),
            Err(HandshakeError::Failure(middle)) => return Err(failure(&middle)),
        }
    }
}

/// Why a handshake failed, for people.
fn failure(middle: &MidHandshakeSslStream<TcpStream>) -> io::Error {
    let verified = middle.ssl().verify_result();
    let reason = if verified == openssl::x509::X509VerifyResult::OK {
        match middle.error().ssl_error() {
            Some(stack) => stack
                .errors()
                .last()
                .map_or_else(String::new, |error| error.reason().unwrap_or("unknown").to_owned()),
            None => match middle.error().io_error() {
                Some(error) => error.to_string(),
                None => "the other side left".into(),
            },
        }
    } else {
        format!("the other side's certificate is refused: {}", verified.error_string())
    };
    io::Error::new(io::ErrorKind::PermissionDenied, format!("no TLS: {reason}"))
}

/// The names that a certificate is for: those of the DNS, or the common name where it has none,
/// and then its addresses.
fn names(certificate: &X509Ref) -> Vec<String> {
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

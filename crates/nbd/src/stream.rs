//! The way to a server: a socket, with TLS if the URI wants it.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fathom_failure::Failure;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

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
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl Secure {
    /// Reads the files.
    pub(crate) fn new(files: &TlsFiles) -> Result<Self, Failure> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.authority)? {
            roots.add(certificate).map_err(|error| unfit(&files.authority, error))?;
        }
        // There may be another provider already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let config = match &files.own {
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let private =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| unfit(key, error))?;
                builder.with_client_auth_cert(chain, private).map_err(|error| unfit(key, error))?
            }
            None => builder.with_no_client_auth(),
        };
        let name = ServerName::try_from(files.name.clone()).map_err(|_| {
            let message = format!("{:?} is not the name of a server", files.name);
            Failure::new(message).advise("correct it")
        })?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    /// Begins TLS on a stream.
    pub(crate) async fn start(&self, stream: AnyStream) -> Result<AnyStream, Failure> {
        match self.connector.connect(self.name.clone(), stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => {
                let message = format!("TLS fails ({error})");
                Err(Failure::new(message).advise("check the certificates of both sides"))
            }
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let file = File::open(path).map_err(|error| unfit(path, error))?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(BufReader::new(file)).collect();
    let all = all.map_err(|error| unfit(path, error))?;
    if all.is_empty() {
        return Err(unfit(path, "it has no certificate"));
    }
    Ok(all)
}

fn unfit(path: &Path, error: impl std::fmt::Display) -> Failure {
    let message = format!("{}: {error}", path.display());
    Failure::new(message).advise("name a folder with usable certificates")
}

/// Connects to a server.
pub(crate) async fn connect(transport: &Transport) -> io::Result<AnyStream> {
    Ok(match transport {
        Transport::Tcp(host, port) => {
            let stream = TcpStream::connect((&**host, *port)).await?;
            stream.set_nodelay(true)?;
            let socket = SockRef::from(&stream);
            let probes =
                TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL);
            socket.set_tcp_keepalive(&probes.with_retries(2))?;
            socket.set_tcp_user_timeout(Some(SILENCE_MAX))?;
            Box::new(stream)
        }
        Transport::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

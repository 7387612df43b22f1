//! TLS by OpenSSL for servers and clients, with certificates or pre-shared keys (PSK) as `GnuTLS`
//! clients use them. Callers with non-blocking streams use [`Tls::context`]; [`Tls::accept`] and
//! [`Tls::connect`] perform handshakes on sockets with timeouts, [`Tls::secure`] on streams of
//! tokio.
//!
//! Read [`Tls`] first. The crate must not know what is sent.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod handshake;
mod keys;

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use openssl::error::ErrorStack;
use openssl::ssl::{
    SslContext, SslContextBuilder, SslFiletype, SslMethod, SslMode, SslOptions,
    SslSessionCacheMode, SslVerifyMode, SslVersion,
};

/// The PEM files of one side's certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificates {
    /// This side's certificate, followed by the chain up to an authority that the peer trusts.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// The authority that must have signed the peer's certificate. With `None` a server accepts
    /// clients without a certificate.
    pub authority: Option<PathBuf>,
}

impl Certificates {
    /// The files of a server's directory, under the names that QEMU and libnbd use:
    /// `server-cert.pem`, `server-key.pem`, and for `verify_clients` `ca-cert.pem`.
    pub fn of_directory(directory: &Path, verify_clients: bool) -> Self {
        Self {
            certificate: directory.join("server-cert.pem"),
            key: directory.join("server-key.pem"),
            authority: verify_clients.then(|| directory.join("ca-cert.pem")),
        }
    }
}

/// The TLS settings of one side.
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
    /// A server's TLS 1.2 or newer. Clients need a certificate if `files` has an authority.
    ///
    /// # Errors
    /// When a file cannot be read or does not match the others; the text names the file.
    pub fn server(files: &Certificates) -> io::Result<Self> {
        let mut builder = builder(SslMethod::tls_server(), SslVersion::TLS1_2)?;
        builder.set_options(SslOptions::CIPHER_SERVER_PREFERENCE);
        set_files(&mut builder, files)?;
        Ok(Self { context: builder.build() })
    }

    /// A client's TLS 1.2 or newer. `authority` must have signed the servers' certificates; `own`
    /// is this side's certificate with its private key, if servers require one.
    ///
    /// # Errors
    /// See [`server`](Self::server).
    pub fn client(authority: &Path, own: Option<(&Path, &Path)>) -> io::Result<Self> {
        let mut builder = builder(SslMethod::tls_client(), SslVersion::TLS1_2)?;
        set_authority(&mut builder, authority)?;
        if let Some((certificate, key)) = own {
            set_certificate(&mut builder, certificate, key)?;
        }
        Ok(Self { context: builder.build() })
    }

    /// A server's TLS 1.3 with certificates on both sides.
    ///
    /// # Errors
    /// See [`server`](Self::server); also if `files` has no authority.
    pub fn mutual_server(files: &Certificates) -> io::Result<Self> {
        Self::mutual(SslMethod::tls_server(), files)
    }

    /// A client's TLS 1.3 with certificates on both sides.
    ///
    /// # Errors
    /// See [`mutual_server`](Self::mutual_server).
    pub fn mutual_client(files: &Certificates) -> io::Result<Self> {
        Self::mutual(SslMethod::tls_client(), files)
    }

    fn mutual(method: SslMethod, files: &Certificates) -> io::Result<Self> {
        if files.authority.is_none() {
            let text = "certificates on both sides need an authority";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut builder = builder(method, SslVersion::TLS1_3)?;
        set_files(&mut builder, files)?;
        Ok(Self { context: builder.build() })
    }

    /// The OpenSSL context, for streams that the caller makes.
    pub fn context(&self) -> &SslContext {
        &self.context
    }

    /// The first name of this side's certificate.
    pub fn own_name(&self) -> Option<String> {
        handshake::names(self.context.certificate()?).into_iter().next()
    }
}

/// The settings common to all kinds of TLS.
fn builder(method: SslMethod, oldest: SslVersion) -> io::Result<SslContextBuilder> {
    let mut builder = SslContext::builder(method)?;
    builder.set_min_proto_version(Some(oldest))?;
    builder.set_mode(
        SslMode::AUTO_RETRY
            | SslMode::ENABLE_PARTIAL_WRITE
            | SslMode::ACCEPT_MOVING_WRITE_BUFFER
            | SslMode::RELEASE_BUFFERS,
    );
    // Connections last as long as guests, so sessions need not be resumed.
    builder.set_options(SslOptions::NO_TICKET | SslOptions::NO_RENEGOTIATION);
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    builder.set_num_tickets(0)?;
    Ok(builder)
}

/// Loads the files, and enables the verification of the peer's certificate if there is an
/// authority.
fn set_files(builder: &mut SslContextBuilder, files: &Certificates) -> io::Result<()> {
    set_certificate(builder, &files.certificate, &files.key)?;
    files.authority.iter().try_for_each(|authority| set_authority(builder, authority))
}

/// Loads this side's certificate and its private key.
fn set_certificate(
    builder: &mut SslContextBuilder,
    certificate: &Path,
    key: &Path,
) -> io::Result<()> {
    readable(certificate)?;
    readable(key)?;
    builder
        .set_certificate_chain_file(certificate)
        .map_err(|error| unfit(certificate, "certificate", &error))?;
    builder
        .set_private_key_file(key, SslFiletype::PEM)
        .map_err(|error| unfit(key, "private key", &error))?;
    builder.check_private_key().map_err(|error| unfit(key, "key of this certificate", &error))
}

/// Loads the authority, and enables the verification of the peer's certificate.
fn set_authority(builder: &mut SslContextBuilder, authority: &Path) -> io::Result<()> {
    readable(authority)?;
    builder
        .set_ca_file(authority)
        .map_err(|error| unfit(authority, "certificate authority", &error))?;
    builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    Ok(())
}

fn readable(path: &Path) -> io::Result<()> {
    fs::File::open(path).map(drop).map_err(|error| named(path, &error))
}

/// The error with the file's name before it.
fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn unfit(path: &Path, what: &str, error: &ErrorStack) -> io::Error {
    let text = format!("{} is not a usable {what}: {error}", path.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_certificate_is_named() {
        let certificates = Certificates::of_directory(Path::new("/nowhere"), true);
        for made in [
            Tls::server(&certificates),
            Tls::mutual_server(&certificates),
            Tls::mutual_client(&certificates),
        ] {
            let error = made.unwrap_err().to_string();
            assert!(error.contains("/nowhere/server-cert.pem"), "{error}");
        }
        let error = Tls::client(Path::new("/nowhere/ca-cert.pem"), None).unwrap_err().to_string();
        assert!(error.contains("/nowhere/ca-cert.pem"), "{error}");
    }

    #[test]
    fn both_sides_need_an_authority() {
        let certificates = Certificates::of_directory(Path::new("/nowhere"), false);
        let error = Tls::mutual_client(&certificates).unwrap_err().to_string();
        assert!(error.contains("authority"), "{error}");
    }
}

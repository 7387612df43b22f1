//! Where an export is: the URI of the NBD project (`doc/uri.md`).

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fathom_failure::Failure;
use url::{Host, Url};

use crate::wire::STRING_LENGTH_MAX;

/// The port of NBD.
const PORT: u16 = 10809;

/// How a server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp(String, u16),
    Unix(PathBuf),
}

/// The files of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// The authority that has signed the server's certificate (PEM).
    pub(crate) authority: PathBuf,
    /// This host's certificate and its key (PEM), if there is one.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate must have.
    pub(crate) name: String,
}

/// The URI of an export, for example `nbds://host/disk?tls-certificates=/etc/fathom/tls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    text: String,
    pub(crate) transport: Transport,
    pub(crate) export: String,
    pub(crate) tls: Option<TlsFiles>,
}

impl NbdUri {
    /// Whether a text is meant as such a URI rather than as a path.
    pub fn is_meant(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
    }

    /// Reads a URI. Without TLS, the server must be on this host.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |message: String| {
            let example = "write it like `nbds://host/export?tls-certificates=/etc/fathom/tls`";
            Failure::new(message).advise(example)
        };
        let parsed = Url::parse(text)
            .map_err(|error| wrong(format!("{text:?} is not the URI of an export ({error})")))?;
        let (is_unix, is_secure) = match parsed.scheme() {
            "nbd" => (false, false),
            "nbds" => (false, true),
            "nbd+unix" => (true, false),
            "nbds+unix" => (true, true),
            other => return Err(wrong(format!("{other:?} is not a way to an export"))),
        };
        let (mut socket, mut folder, mut name) = (None, None, None);
        for (key, value) in parsed.query_pairs() {
            match &*key {
                "socket" if is_unix => socket = Some(PathBuf::from(&*value)),
                "tls-certificates" if is_secure => folder = Some(PathBuf::from(&*value)),
                "tls-hostname" if is_secure => name = Some(value.into_owned()),
                other => {
                    let message = format!("{other:?} has no meaning in {text:?}");
                    return Err(Failure::new(message).advise("remove it"));
                }
            }
        }
        let (transport, host) = if is_unix {
            let missing =
                || Failure::new(format!("{text:?} has no socket")).advise("add `?socket=/path`");
            (Transport::Unix(socket.ok_or_else(missing)?), "localhost".to_owned())
        } else {
            let missing = || wrong(format!("{text:?} has no host"));
            // Hosts of schemes that the standard does not know are not told from addresses.
            let host = match parsed.host().ok_or_else(missing)? {
                Host::Domain(name) => name.to_owned(),
                Host::Ipv4(address) => address.to_string(),
                Host::Ipv6(address) => address.to_string(),
            };
            if host.is_empty() {
                return Err(missing());
            }
            (Transport::Tcp(host.clone(), parsed.port().unwrap_or(PORT)), host)
        };
        let is_local = is_unix || is_loopback(&host);
        if !is_secure && !is_local {
            let message = format!("{text:?} would cross the network in plain text");
            return Err(Failure::new(message).advise("use `nbds://` with `tls-certificates`"));
        }
        let export = parsed.path().strip_prefix('/').unwrap_or(parsed.path());
        let export = decode(export).filter(|name| name.len() <= STRING_LENGTH_MAX);
        let export = export.ok_or_else(|| wrong(format!("{text:?} has no valid export")))?;
        let tls = if is_secure {
            let missing = || {
                let message = format!("{text:?} names no certificates");
                Failure::new(message).advise("add `?tls-certificates=FOLDER`")
            };
            Some(TlsFiles::of_folder(&folder.ok_or_else(missing)?, name.unwrap_or(host)))
        } else {
            None
        };
        Ok(Self { text: text.to_owned(), transport, export, tls })
    }

    /// The export and its server. Two URIs with the same place are of one export; there may be
    /// other names of the server.
    pub fn place(&self) -> String {
        format!("{}/{}", self.server(), self.export)
    }

    /// A path in the URI that depends on the current folder.
    pub fn relative_path(&self) -> Option<&Path> {
        let socket = match &self.transport {
            Transport::Unix(path) => Some(&**path),
            Transport::Tcp(..) => None,
        };
        let folder = self.tls.as_ref().and_then(|tls| tls.authority.parent());
        socket.into_iter().chain(folder).find(|path| !path.is_absolute())
    }

    /// The server, for messages.
    pub fn server(&self) -> String {
        match &self.transport {
            Transport::Tcp(host, port) if host.contains(':') => format!("[{host}]:{port}"),
            Transport::Tcp(host, port) => format!("{host}:{port}"),
            Transport::Unix(path) => path.display().to_string(),
        }
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl TlsFiles {
    /// The files of a client's folder, under the names that QEMU and libnbd use.
    fn of_folder(folder: &Path, name: String) -> Self {
        let own = (folder.join("client-cert.pem"), folder.join("client-key.pem"));
        let own = own.0.exists().then_some(own);
        Self { authority: folder.join("ca-cert.pem"), own, name }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Replaces `%XX`.
fn decode(text: &str) -> Option<String> {
    let query = format!("x={}", text.replace('+', "%2B").replace('&', "%26"));
    let decoded = url::form_urlencoded::parse(query.as_bytes()).next()?.1.into_owned();
    (!decoded.contains(char::REPLACEMENT_CHARACTER)).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_servers_exports_and_certificates() {
        let uri = NbdUri::parse("nbds://host.example/disk%201?tls-certificates=/etc/t").unwrap();
        assert_eq!(uri.transport, Transport::Tcp("host.example".into(), 10809));
        assert_eq!((&*uri.export, &*uri.server()), ("disk 1", "host.example:10809"));
        let tls = uri.tls.unwrap();
        assert_eq!((tls.authority, &*tls.name), ("/etc/t/ca-cert.pem".into(), "host.example"));
        let uri = NbdUri::parse("nbd+unix:///a+b&c?socket=/run/x.sock").unwrap();
        assert_eq!(uri.transport, Transport::Unix("/run/x.sock".into()));
        assert_eq!((&*uri.export, uri.tls.is_none()), ("a+b&c", true));
        let uri = NbdUri::parse("nbd://[::1]:99").unwrap();
        assert_eq!((&*uri.server(), &*uri.export), ("[::1]:99", ""));
        assert!(NbdUri::parse("nbd://127.0.0.1/x").is_ok());
        assert_eq!(uri.place(), "[::1]:99/");
        assert!(uri.relative_path().is_none());
        let relative = "nbds://host/x?tls-certificates=tls";
        assert_eq!(NbdUri::parse(relative).unwrap().relative_path(), Some(Path::new("tls")));
        let named = "nbds+unix:///x?socket=/s&tls-certificates=/t&tls-hostname=other";
        assert_eq!(NbdUri::parse(named).unwrap().tls.unwrap().name, "other");
    }

    #[test]
    fn what_is_wrong_is_refused_with_a_remedy() {
        for (text, part) in [
            ("nbd://10.0.0.1/x", "plain text"),
            ("nbd://localhost.example/x", "plain text"),
            ("nbds://host/x", "no certificates"),
            ("nbd+unix:///x", "no socket"),
            ("nbd+ssh://host/x", "not a way"),
            ("nbd:///x", "no host"),
            ("nbd://localhost/x?tls-certificates=/t", "no meaning"),
            ("nbd://localhost/%ff", "no valid export"),
            ("nbd://[::1/x", "not the URI"),
        ] {
            let error = NbdUri::parse(text).unwrap_err();
            assert!(error.message.contains(part) && !error.remedy.is_empty(), "{text}: {error:?}");
            assert!(NbdUri::is_meant(text));
        }
        for path in ["/var/nbd://x", "log", "nbd:/x", "file://x"] {
            assert!(!NbdUri::is_meant(path), "{path}");
        }
    }
}

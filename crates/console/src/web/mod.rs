//! `fathom web`: a page that shows what daemons do, live.
//!
//! It only looks: it asks the control interface for what may be read, and changes nothing.
//!
//! - `feed`: a thread for each host takes a sample each second, for all who look, and keeps some
//!   minutes of them.
//! - `routes`: the paths; `stream`: the answers that go on.
//! - `access`: who may look. `listen`: the connections.
//! - `query`: queries that somebody has typed.
//! - `assets/`: the page itself, which needs no build and nothing from the Internet.

mod access;
mod assets;
mod feed;
mod listen;
mod query;
mod routes;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use fathom_control::Client;
use fathom_tls::{Certificates, Tls};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure, reason};
use crate::output;
use access::Access;
use feed::Feed;
use listen::{Address, Listener};
use routes::{Host, Site};

/// The fewest characters of a token in a file.
const TOKEN_LENGTH_MIN: usize = 16;
/// The most characters of a token.
const TOKEN_LENGTH_MAX: usize = 128;

/// Options of `fathom web`.
#[derive(Debug, Args)]
#[command(after_help = "\
The page shows hosts, machines, containers and files, the history of each disk with what happened
meanwhile, slow requests, caches, pools, devices and problems, and runs queries. It changes nothing.

Only who has the token may look: open the address that the command prints. Beyond this host the page
is served with TLS alone. Without a certificate, forward its port:
  ssh -L 8470:127.0.0.1:8470 HOST

Examples:
  fathom web                                    one daemon, at http://127.0.0.1:8470
  fathom web --listen unix:/run/fathom/web.sock   for a proxy; who can open the socket may look
  fathom web --listen 0.0.0.0:8470 --certificate web.pem --key web.key --token-file token
  fathom web --host a=/run/a/control.sock --host b=/run/b/control.sock    two daemons")]
pub struct WebOptions {
    /// Where the page is served: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8470")]
    listen: Address,
    /// Show this daemon, with its control socket, under this name; may be repeated [default: the
    /// one of --control, under the name of this host]
    #[arg(long = "host", value_name = "NAME=SOCKET", value_parser = named, conflicts_with = "control")]
    hosts: Vec<(String, PathBuf)>,
    /// The token is the content of this file, of at least 16 characters [default: another one at
    /// each start]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The certificate, followed by its chain
    #[arg(long, value_name = "FILE", requires = "key")]
    certificate: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE", requires = "certificate")]
    key: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
}

/// Reads `NAME=SOCKET`.
fn named(text: &str) -> Result<(String, PathBuf), String> {
    let (name, socket) = text.split_once('=').ok_or("it has the form NAME=SOCKET")?;
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    if name.is_empty() || !name.chars().all(is_plain) {
        return Err("a name has letters, digits, -, _ and . only".into());
    }
    if socket.is_empty() {
        return Err("the control socket is missing".into());
    }
    Ok((name.into(), socket.into()))
}

impl WebOptions {
    fn tls(&self) -> CommandResult<Option<Tls>> {
        let (Some(certificate), Some(key)) = (&self.certificate, &self.key) else {
            if self.listen.is_remote() {
                let message = format!("{} can be reached from other hosts", self.listen);
                return Err(Failure::usage(message).advise(
                    "name a certificate and its key with --certificate and --key, or listen at \
                     127.0.0.1 and forward the port: ssh -L 8470:127.0.0.1:8470 HOST",
                ));
            }
            return Ok(None);
        };
        let (certificate, key) = (certificate.clone(), key.clone());
        let files = Certificates { certificate, key, authority: None };
        Tls::server(&files).map(Some).map_err(|error| Failure::new(reason(&error)))
    }

    /// The token, unless who can open the socket may look.
    fn token(&self) -> CommandResult<Option<String>> {
        match (&self.token_file, &self.listen) {
            (Some(file), _) => read_token(file).map(Some),
            (None, Address::Unix(_)) => Ok(None),
            (None, Address::Tcp(_)) => new_token().map(Some),
        }
    }

    fn hosts(&self) -> CommandResult<Vec<Host>> {
        let mut named = self.hosts.clone();
        if named.is_empty() {
            let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
            named.push((if name.is_empty() { "host".into() } else { name }, self.control.socket()));
        }
        let mut hosts: Vec<Host> = Vec::new();
        for (name, socket) in named {
            if hosts.iter().any(|host| host.name == name) {
                return Err(Failure::usage(format!("two hosts are called {name}")));
            }
            let client = Client::new(socket);
            let feed = Feed::start(client.clone())
                .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
            hosts.push(Host { name, client, feed });
        }
        Ok(hosts)
    }
}

fn read_token(file: &Path) -> CommandResult<String> {
    let text = std::fs::read_to_string(file).map_err(|error| Failure::io("read", file, &error))?;
    let token = text.trim();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if !(TOKEN_LENGTH_MIN..=TOKEN_LENGTH_MAX).contains(&token.len()) || !token.bytes().all(is_plain)
    {
        let message = format!(
            "{} has no token: {TOKEN_LENGTH_MIN} to {TOKEN_LENGTH_MAX} letters, digits, - and _",
            file.display()
        );
        return Err(
            Failure::new(message).advise("make one, for example with `openssl rand -hex 16`")
        );
    }
    Ok(token.to_owned())
}

/// 128 random bits.
fn new_token() -> CommandResult<String> {
    use std::io::Read as _;
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 16];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Failure::io("read", path, &error))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Carries out the command.
pub fn run(options: &WebOptions) -> CommandResult {
    let tls = options.tls()?;
    let token = options.token()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::new(format!("cannot start a runtime: {error}")))?;
    let outcome = runtime.block_on(async {
        let listener = Listener::bind(&options.listen, tls).await.map_err(|error| {
            let message = format!("cannot listen at {}: {}", options.listen, reason(&error));
            Failure::new(message).advise("choose another address with --listen")
        })?;
        let address = listener.url();
        let access = Access::new(token, &listener);
        let shown = access.invitation(&address);
        let site = Arc::new(Site::new(options.hosts()?, access));
        let mut signals = Signals::new()?;
        output::text_line(&format!("The page is at {shown}"))?;
        let served = axum::serve(listener, routes::router(site));
        // Answers that go on do not end by themselves.
        tokio::select! {
            served = served.into_future() => {
                served.map_err(|error| Failure::new(error.to_string()))
            }
            () = signals.received() => Ok(()),
        }
    });
    // Threads that read the rows of queries end with the process, and the queries with them.
    runtime.shutdown_background();
    outcome
}

/// SIGINT and SIGTERM.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> CommandResult<Self> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::new(format!("cannot receive signals: {error}")))
        };
        let (interrupt, terminate) = (SignalKind::interrupt(), SignalKind::terminate());
        Ok(Self { interrupt: listen(interrupt)?, terminate: listen(terminate)? })
    }

    async fn received(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_plain_names() {
        assert_eq!(named("a.b-1=/run/x"), Ok(("a.b-1".into(), "/run/x".into())));
        assert!(named("a").is_err() && named("=/x").is_err() && named("a=").is_err());
        assert!(named("<b>=/x").is_err() && named("a/b=/x").is_err());
    }

    #[test]
    fn a_token_is_long_enough_and_plain() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        for bad in ["", "short", "with a space in the middle", &"a".repeat(129)] {
            std::fs::write(&file, bad).unwrap();
            assert!(read_token(&file).is_err(), "{bad}");
        }
        std::fs::write(&file, "0123456789abcdef\n").unwrap();
        assert_eq!(read_token(&file).unwrap(), "0123456789abcdef");
        let (one, other) = (new_token().unwrap(), new_token().unwrap());
        assert!(one != other && one.len() == 32);
    }
}

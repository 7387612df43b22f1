//! A small blocking client of the control interface. Each feature's file has the methods for its
//! endpoints.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_failure::Failing;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connect::{connect, view_socket};
use crate::endpoint::{Change, Cost, Endpoint, Method, PathParameters, Query, has_body};
use crate::error::{ErrorBody, ErrorReply};
use crate::http::{exchange, exchange_bounded, request};
use crate::stream::AnswerStream;

/// How long the daemon may take to accept a connection.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);

/// A client of a daemon. It opens a connection for each request.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Option<Duration>,
    answer_bytes_max: Option<u64>,
}

/// Why a request failed.
#[derive(Debug)]
pub enum ClientError {
    /// The client could not connect.
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The connection broke.
    Broken {
        /// The socket.
        socket: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The daemon did not answer within the time limit.
    Silent {
        /// The socket.
        socket: PathBuf,
        /// How long the client waited.
        waited: Duration,
    },
    /// The answer does not conform to this interface.
    Unreadable(String),
    /// The daemon refused the request.
    Refused(ErrorBody),
}

impl Failing for ClientError {
    fn remedy(&self) -> String {
        match self {
            Self::Unreachable { source, .. } => match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    "start the daemon with `fathom serve`, or name its control socket with \
                     --control"
                        .into()
                }
                io::ErrorKind::PermissionDenied => {
                    "the user that the daemon runs as, root, and the members of `control_group` and \
                     `view_group` of [daemon] may use its sockets: try again as one of them"
                        .into()
                }
                _ => String::new(),
            },
            Self::Broken { .. } => "see the daemon's log".into(),
            Self::Silent { .. } => "its process is stopped or hangs: examine it with `systemctl \
                                    status fathom` or `ps`; `kill -CONT` continues a stopped \
                                    process"
                .into(),
            Self::Unreadable(_) => "the versions of daemon and command have to be compatible: \
                                    compare `fathom --version` with the daemon's"
                .into(),
            Self::Refused(body) => body.remedy.clone(),
        }
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { socket, source } => {
                write!(formatter, "no daemon answers at {}: {source}", socket.display())
            }
            Self::Broken { socket, source } => {
                write!(
                    formatter,
                    "the connection to the daemon at {} broke: {source}",
                    socket.display()
                )
            }
            Self::Silent { socket, waited } => {
                let seconds = waited.as_secs();
                write!(
                    formatter,
                    "the daemon at {} has not answered within {seconds} s",
                    socket.display()
                )
            }
            Self::Unreadable(what) => write!(formatter, "unexpected answer: {what}"),
            Self::Refused(body) => formatter.write_str(&body.message),
        }
    }
}

impl std::error::Error for ClientError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreachable { source, .. } | Self::Broken { source, .. } => Some(source),
            Self::Silent { .. } | Self::Unreadable(_) => None,
            Self::Refused(body) => Some(body),
        }
    }
}

impl Client {
    /// A client of the daemon whose control socket is `socket`. Does not connect yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), limit: None, answer_bytes_max: None }
    }

    /// The same client, with another limit on the time of each answer.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The same client, for a server that is not trusted: it reads at most `bytes` of an answer,
    /// all of which have to come within the limit on its time.
    #[must_use]
    pub fn bounded(self, bytes: u64) -> Self {
        Self { answer_bytes_max: Some(bytes), ..self }
    }

    /// The control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks `endpoint`, and reads its answer.
    pub(crate) fn ask<
        C: Cost,
        P: PathParameters,
        Q: Query,
        B: Serialize + 'static,
        A: DeserializeOwned,
    >(
        &self,
        endpoint: &Endpoint<C, P, Q, B, A>,
        parameters: &P,
        query: &Q,
        body: &B,
    ) -> Result<A, ClientError> {
        let answer = self.call(endpoint, parameters, query, body)?;
        serde_json::from_slice(&answer).map_err(|error| unreadable(&error))
    }

    /// Asks `endpoint`. Returns the body of its answer.
    pub(crate) fn call<C: Cost, P: PathParameters, Q: Query, B: Serialize + 'static, A>(
        &self,
        endpoint: &Endpoint<C, P, Q, B, A>,
        parameters: &P,
        query: &Q,
        body: &B,
    ) -> Result<Vec<u8>, ClientError> {
        let limit = self.limit.unwrap_or(C::ANSWER_TIME_MAX).saturating_add(query.wait());
        let body = has_body::<B>().then(|| serde_json::to_vec(body)).transpose();
        let body = body.map_err(|error| unreadable(&error))?;
        let path = endpoint.filled(parameters, query);
        self.exchange(endpoint.method(), &path, body.as_deref(), limit)
    }

    /// Asks `endpoint`. Returns its answer as it arrives, without a limit on its time.
    pub(crate) fn stream<C: Cost, P: PathParameters, Q: Query, A>(
        &self,
        endpoint: &Endpoint<C, P, Q, (), A>,
        parameters: &P,
        query: &Q,
    ) -> Result<AnswerStream, ClientError> {
        let limit = self.limit.unwrap_or(C::ANSWER_TIME_MAX);
        let broken = |source| self.broken(source, limit);
        let mut stream = self.connect(limit)?;
        let (method, path) = (endpoint.method().name(), endpoint.filled(parameters, query));
        request(&mut stream, method, &path, None).map_err(broken)?;
        let (status, mut answer) = AnswerStream::begin(stream).map_err(broken)?;
        if status == 200 {
            // A disk may have no events for a long time.
            answer.connection().and_then(|s| s.set_read_timeout(None)).map_err(broken)?;
            return Ok(answer);
        }
        let mut body = Vec::new();
        answer.by_ref().take(1 << 20).read_to_end(&mut body).map_err(broken)?;
        Err(refused(status, &body))
    }

    /// Sends any request whose answer is JSON, and waits for it as for a change. The parts of the
    /// path have to be encoded with [`escape`](crate::escape).
    ///
    /// # Errors
    /// When there is no answer, or the daemon refuses the request.
    pub fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<serde_json::Value, ClientError> {
        let limit = self.limit.unwrap_or(Change::ANSWER_TIME_MAX);
        let body = body.map(serde_json::to_vec).transpose().map_err(|error| unreadable(&error))?;
        let answer = self.exchange(method, path, body.as_deref(), limit)?;
        serde_json::from_slice(&answer).map_err(|error| unreadable(&error))
    }

    fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&[u8]>,
        limit: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        let mut stream = self.connect(limit)?;
        let exchanged = match self.answer_bytes_max {
            None => exchange(&mut stream, method.name(), path, body),
            Some(bytes) => {
                let end = Instant::now() + limit;
                exchange_bounded(&mut stream, method.name(), path, body, (bytes, end))
            }
        };
        let (status, answer) = exchanged.map_err(|source| self.broken(source, limit))?;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        Err(refused(status, &answer))
    }

    /// Opens a connection whose reads and writes wait for at most `limit`. A user who may not use
    /// the control socket gets the one for those who only look.
    fn connect(&self, limit: Duration) -> Result<UnixStream, ClientError> {
        let begun = Instant::now();
        let end = begun + limit.min(CONNECT_TIME_MAX);
        let connected = connect(&self.socket, end).or_else(|refused| {
            if refused.kind() != io::ErrorKind::PermissionDenied {
                return Err(refused);
            }
            // What went wrong with the socket that was asked for says more.
            connect(&view_socket(&self.socket), end).map_err(|_| refused)
        });
        let stream = connected.map_err(|source| {
            let socket = self.socket.clone();
            match source.kind() {
                io::ErrorKind::WouldBlock => {
                    ClientError::Silent { socket, waited: begun.elapsed() }
                }
                _ => ClientError::Unreachable { socket, source },
            }
        })?;
        let set = stream.set_read_timeout(Some(limit));
        set.and_then(|()| stream.set_write_timeout(Some(limit)))
            .map_err(|source| self.broken(source, limit))?;
        Ok(stream)
    }

    /// The error for `source` on a connection with the time limit `waited`.
    fn broken(&self, source: io::Error, waited: Duration) -> ClientError {
        let socket = self.socket.clone();
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ClientError::Silent { socket, waited }
            }
            _ => ClientError::Broken { socket, source },
        }
    }
}

/// The error for an answer whose status is not a success.
fn refused(status: u16, answer: &[u8]) -> ClientError {
    match serde_json::from_slice::<ErrorReply>(answer) {
        Ok(reply) => ClientError::Refused(reply.error),
        Err(_) => ClientError::Unreadable(format!("HTTP status {status}")),
    }
}

fn unreadable(error: &serde_json::Error) -> ClientError {
    ClientError::Unreadable(error.to_string())
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, SockAddr, Socket, Type};

    use super::*;
    use crate::error::ErrorCode;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    fn client_with_answer(answer: &'static str) -> (Client, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        });
        (Client::new(path), folder)
    }

    #[test]
    fn a_refusal_has_a_code_and_a_remedy() {
        let (client, _folder) = client_with_answer(
            "HTTP/1.1 404 Not Found\r\n\r\n{\"error\": {\"code\": \"not-found\", \
             \"message\": \"there is no disk \\\"a\\\"\", \"remedy\": \"see `fathom disk list`\"}}",
        );
        match client.disk("a") {
            Err(ClientError::Refused(body)) => {
                assert_eq!(body.code, ErrorCode::NotFound);
                assert_eq!(body.remedy, "see `fathom disk list`");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_server_that_is_not_trusted_gives_no_more_and_takes_no_longer() {
        let answer = "HTTP/1.1 200 OK\r\n\r\n{\"leased\": 3}";
        let (client, _folder) = client_with_answer(answer);
        assert_eq!(client.bounded(4096).renew_leases().unwrap().leased, 3);
        let (client, _folder) = client_with_answer(answer);
        let error = client.bounded(20).renew_leases().unwrap_err();
        assert!(matches!(error, ClientError::Broken { .. }), "{error}");
        // One that sends a byte now and then, for ever.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let client = Client::new(path).with_limit(Duration::from_millis(200)).bounded(1 << 30);
        let error = client.renew_leases().unwrap_err();
        assert!(matches!(error, ClientError::Silent { .. }), "{error}");
    }

    #[test]
    fn the_remedy_for_an_absent_daemon_is_to_start_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = Client::new(folder.path().join("none.sock")).daemon().unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }));
        assert!(error.remedy().contains("fathom serve"));
    }

    #[test]
    fn a_truncated_answer_is_an_error() {
        let (client, _folder) =
            client_with_answer("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{");
        assert!(matches!(client.daemon(), Err(ClientError::Broken { .. })));
    }

    #[test]
    fn the_wait_for_a_stopped_daemon_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        // It listens, and accepts no connection.
        let _listener = UnixListener::bind(&path).unwrap();
        let client = Client::new(&path).with_limit(Duration::from_millis(200));
        let begun = Instant::now();
        let error = client.daemon().unwrap_err();
        assert!(matches!(error, ClientError::Silent { .. }), "{error}");
        assert!(error.remedy().contains("kill -CONT"), "{error}");
        // The same with a full queue.
        let address = SockAddr::unix(&path).unwrap();
        let mut waiting = Vec::new();
        loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            if socket.connect(&address).is_err() {
                break;
            }
            waiting.push(socket);
        }
        let error = client.daemon().unwrap_err();
        assert!(matches!(error, ClientError::Silent { .. }), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

//! A small blocking client of the control interface.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::daemon::{DaemonInfo, Done, EventList, ReloadReport};
use crate::definition::{DiskChange, DiskDefinition};
use crate::disk::{DiskList, DiskStatus};
use crate::error::{ErrorBody, ErrorReply};
use crate::http::{escape, exchange, request};
use crate::insight::{GuestList, SlowReport};
use crate::monitor::MonitorStatus;
use crate::query::QueryList;
use crate::statistics::Statistics;
use crate::stream::AnswerStream;
use crate::usage::UsageReport;
use fathom_options::Bytes;

/// How long the answer to a question may take unless the caller says otherwise. A daemon answers
/// within milliseconds, whatever its disks do.
const QUESTION_TIME_MAX: Duration = Duration::from_secs(10);
/// The same for changes, for which a daemon waits up to 45 s by itself.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the daemon may take to accept a connection.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);
/// How often a connection is tried again while the daemon's queue is full.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Asks a daemon, one connection a question.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Option<Duration>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum ClientError {
    /// Nobody could be asked.
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or took too long.
    Broken {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is a daemon, but it does not answer in time.
    Silent {
        /// The socket.
        socket: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The answer is not of this interface.
    Unreadable(String),
    /// The daemon says no.
    Refused(ErrorBody),
}

impl ClientError {
    /// What to do next; may be empty.
    pub fn remedy(&self) -> String {
        match self {
            Self::Unreachable { source, .. } => match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    "start the daemon with `fathom serve`, or name its control socket with \
                     --control"
                        .into()
                }
                io::ErrorKind::PermissionDenied => {
                    "only the user that the daemon runs as may ask it: try again as that user or \
                     as root"
                        .into()
                }
                _ => String::new(),
            },
            Self::Broken { .. } => "see the daemon's log".into(),
            Self::Silent { .. } => "its process is stopped or hangs: look at it with `systemctl \
                                    status fathom` or `ps`; a process that was stopped goes on \
                                    after `kill -CONT`"
                .into(),
            Self::Unreadable(_) => "daemon and command must be of versions that fit: compare \
                                    `fathom --version` with the daemon's"
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
                write!(formatter, "the daemon at {} broke off: {source}", socket.display())
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
    /// A client of the daemon whose control socket is `socket`. Asks nothing yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), limit: None }
    }

    /// The same client, with another limit to how long an answer may take.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What the daemon is.
    ///
    /// # Errors
    /// When there is no answer; so for all questions here.
    pub fn daemon(&self) -> Result<DaemonInfo, ClientError> {
        self.get("/v1/daemon")
    }

    /// The link to the centre.
    ///
    /// # Errors
    /// When there is no answer, or no link.
    pub fn monitor(&self) -> Result<MonitorStatus, ClientError> {
        self.get("/v1/monitor")
    }

    /// All disks.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn disks(&self) -> Result<DiskList, ClientError> {
        self.get("/v1/disks")
    }

    /// One disk.
    ///
    /// # Errors
    /// When there is no answer, or no such disk.
    pub fn disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.get(&disk_path(name))
    }

    /// Has the daemon serve one disk more.
    ///
    /// # Errors
    /// When there is no answer, or the disk cannot be served.
    pub fn add_disk(&self, definition: &DiskDefinition) -> Result<DiskStatus, ClientError> {
        self.send("POST", "/v1/disks", Some(definition))
    }

    /// Changes a disk while it is in use.
    ///
    /// # Errors
    /// When there is no answer, no such disk, or the change cannot be made.
    pub fn change_disk(&self, name: &str, change: &DiskChange) -> Result<DiskStatus, ClientError> {
        self.send("PATCH", &disk_path(name), Some(change))
    }

    /// Gives a disk another size. A smaller one is refused unless `shrink`.
    ///
    /// # Errors
    /// When there is no answer, no such disk, or the back end's size is given by something else.
    pub fn resize_disk(
        &self,
        name: &str,
        capacity_bytes: u64,
        shrink: bool,
    ) -> Result<DiskStatus, ClientError> {
        let change =
            DiskChange { capacity: Some(Bytes(capacity_bytes)), shrink, ..DiskChange::default() };
        self.change_disk(name, &change)
    }

    /// Has a disk take writes again that takes none because acknowledged ones may be lost. What was
    /// lost stays lost.
    ///
    /// # Errors
    /// When there is no answer, no such disk, nothing to recover from, or the store still fails.
    pub fn recover_disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.send::<(), _>("POST", &format!("{}/recover", disk_path(name)), None)
    }

    /// Has the daemon serve a disk no more; with `force` also if a machine or an NBD client uses it.
    ///
    /// # Errors
    /// When there is no answer, or no such disk; without `force`, [`ErrorCode::Conflict`] for a
    /// disk in use.
    ///
    /// [`ErrorCode::Conflict`]: crate::ErrorCode::Conflict
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<Done, ClientError> {
        let query = if force { "?force=true" } else { "" };
        self.send::<(), _>("DELETE", &format!("{}{query}", disk_path(name)), None)
    }

    /// A sample of what all disks have done.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn statistics(&self) -> Result<Statistics, ClientError> {
        self.get("/v1/statistics")
    }

    /// Who caused how much: on all disks, or on that called `disk`, or on those of `vm`.
    ///
    /// # Errors
    /// When there is no answer, or no such disk.
    pub fn usage(&self, disk: Option<&str>, vm: Option<&str>) -> Result<UsageReport, ClientError> {
        self.get(&with_query("/v1/usage", &[("disk", disk), ("vm", vm)]))
    }

    /// The slowest requests of late, at most `count` of each disk or of that called `disk`.
    ///
    /// # Errors
    /// When there is no answer, or no such disk.
    pub fn slow(&self, disk: Option<&str>, count: usize) -> Result<SlowReport, ClientError> {
        let count = count.to_string();
        self.get(&with_query("/v1/slow", &[("disk", disk), ("count", Some(&count))]))
    }

    /// All guests, and how far they have been understood.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn guests(&self) -> Result<GuestList, ClientError> {
        self.get("/v1/guests")
    }

    /// The queries that the daemon keeps.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn queries(&self) -> Result<QueryList, ClientError> {
        self.get("/v1/queries")
    }

    /// Sends any request whose answer is JSON. The path has to be encoded: see
    /// [`escape`](crate::escape).
    ///
    /// # Errors
    /// When there is no answer, or the daemon says no.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<serde_json::Value, ClientError> {
        self.send(method, path, body)
    }

    /// The events after number `after`. Where there are none yet, waits for one up to `wait`.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn events(&self, after: u64, wait: Duration) -> Result<EventList, ClientError> {
        let path = format!("/v1/events?after={after}&wait_ms={}", wait.as_millis());
        let limit = self.limit.unwrap_or(QUESTION_TIME_MAX);
        self.clone().with_limit(limit.saturating_add(wait)).get(&path)
    }

    /// The events of disks as they come, or those of all disks: a recording, as
    /// `docs/recording.md` draws it. With `pulse` it says so often up to when everything was told.
    ///
    /// # Errors
    /// When there is no answer, or no such disk.
    pub fn recording(
        &self,
        disks: &[String],
        pulse: Option<Duration>,
    ) -> Result<AnswerStream, ClientError> {
        let pulse = pulse.map(|pulse| pulse.as_millis().clamp(1, 60_000).to_string());
        let mut parameters: Vec<(&str, Option<&str>)> =
            disks.iter().map(|disk| ("disk", Some(disk.as_str()))).collect();
        parameters.push(("pulse_ms", pulse.as_deref()));
        let path = with_query("/v1/recording", &parameters);
        let limit = self.limit.unwrap_or(QUESTION_TIME_MAX);
        let broken = |source| self.broken(source, limit);
        let mut stream = self.connect(limit)?;
        request(&mut stream, "GET", &path, None).map_err(broken)?;
        let (status, mut answer) = AnswerStream::begin(stream).map_err(broken)?;
        if status == 200 {
            // A disk may do nothing for long.
            answer.connection().and_then(|s| s.set_read_timeout(None)).map_err(broken)?;
            return Ok(answer);
        }
        let mut body = Vec::new();
        answer.by_ref().take(1 << 20).read_to_end(&mut body).map_err(broken)?;
        Err(refused(status, &body))
    }

    /// Has the daemon read its configuration again.
    ///
    /// # Errors
    /// When there is no answer, or the configuration is wrong.
    pub fn reload(&self) -> Result<ReloadReport, ClientError> {
        self.send::<(), _>("POST", "/v1/reload", None)
    }

    /// Has the daemon end. The answer comes before the end.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn shutdown(&self) -> Result<Done, ClientError> {
        self.send::<(), _>("POST", "/v1/shutdown", None)
    }

    /// The metrics, in Prometheus' text format.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let body = self.ask("GET", "/metrics", None)?;
        String::from_utf8(body).map_err(|error| ClientError::Unreadable(error.to_string()))
    }

    fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ClientError> {
        self.send::<(), _>("GET", path, None)
    }

    fn send<B: Serialize, A: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&B>,
    ) -> Result<A, ClientError> {
        let unreadable = |error: serde_json::Error| ClientError::Unreadable(error.to_string());
        let body = body.map(serde_json::to_vec).transpose().map_err(unreadable)?;
        let answer = self.ask(method, path, body.as_deref())?;
        serde_json::from_slice(&answer).map_err(unreadable)
    }

    fn ask(&self, method: &str, path: &str, body: Option<&[u8]>) -> Result<Vec<u8>, ClientError> {
        let default = if method == "GET" { QUESTION_TIME_MAX } else { CHANGE_TIME_MAX };
        let limit = self.limit.unwrap_or(default);
        let mut stream = self.connect(limit)?;
        let (status, answer) = exchange(&mut stream, method, path, body)
            .map_err(|source| self.broken(source, limit))?;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        Err(refused(status, &answer))
    }

    /// A connection on which nothing waits for longer than `limit`.
    fn connect(&self, limit: Duration) -> Result<UnixStream, ClientError> {
        let unreachable = |source| ClientError::Unreachable { socket: self.socket.clone(), source };
        let broken = |source| self.broken(source, limit);
        let address = SockAddr::unix(&self.socket).map_err(unreachable)?;
        let begun = Instant::now();
        let waited_max = limit.min(CONNECT_TIME_MAX);
        loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(broken)?;
            // A blocking attempt would wait for ever for a daemon that is stopped while the queue
            // of its socket is full; this one fails at once, and is tried again for a while.
            socket.set_nonblocking(true).map_err(broken)?;
            match socket.connect(&address) {
                Ok(()) => {
                    socket.set_nonblocking(false).map_err(broken)?;
                    let stream = UnixStream::from(std::os::fd::OwnedFd::from(socket));
                    stream.set_read_timeout(Some(limit)).map_err(broken)?;
                    stream.set_write_timeout(Some(limit)).map_err(broken)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let waited = begun.elapsed();
                    if waited >= waited_max {
                        return Err(ClientError::Silent { socket: self.socket.clone(), waited });
                    }
                    std::thread::sleep(CONNECT_INTERVAL);
                }
                Err(error) => return Err(unreachable(error)),
            }
        }
    }

    /// What `source` means on a connection whose time limit is `waited`.
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

/// What an answer that is no success means.
fn refused(status: u16, answer: &[u8]) -> ClientError {
    match serde_json::from_slice::<ErrorReply>(answer) {
        Ok(reply) => ClientError::Refused(reply.error),
        Err(_) => ClientError::Unreadable(format!("HTTP status {status}")),
    }
}

/// `path` with those of `parameters` that are there.
fn with_query(path: &str, parameters: &[(&str, Option<&str>)]) -> String {
    let mut path = path.to_owned();
    let mut mark = '?';
    for (name, value) in parameters {
        let Some(value) = value else { continue };
        path.push(mark);
        path.push_str(name);
        path.push('=');
        path.push_str(&escape(value));
        mark = '&';
    }
    path
}

fn disk_path(name: &str) -> String {
    format!("/v1/disks/{}", escape(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    fn answering(answer: &'static str) -> (Client, tempfile::TempDir) {
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
    fn a_refusal_carries_code_and_remedy() {
        let (client, _folder) = answering(
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
    fn where_nobody_listens_the_remedy_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let error = Client::new(folder.path().join("none.sock")).daemon().unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }));
        assert!(error.remedy().contains("fathom serve"));
    }

    #[test]
    fn a_cut_answer_is_no_answer() {
        let (client, _folder) = answering("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{");
        assert!(matches!(client.daemon(), Err(ClientError::Broken { .. })));
    }

    #[test]
    fn a_daemon_that_is_stopped_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        // It listens and accepts nobody.
        let _listener = UnixListener::bind(&path).unwrap();
        let client = Client::new(&path).with_limit(Duration::from_millis(200));
        let begun = Instant::now();
        let error = client.daemon().unwrap_err();
        assert!(matches!(error, ClientError::Silent { .. }), "{error}");
        assert!(error.remedy().contains("kill -CONT"), "{error}");
        // The same with its queue full.
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

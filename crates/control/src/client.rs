//! A small blocking client of the control interface.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::background::BackgroundList;
use crate::cache::CacheReport;
use crate::configuration::{ConfigurationReport, RevertRequest};
use crate::connect::connect;
use crate::daemon::{DaemonInfo, Done, EventList, ReloadReport};
use crate::definition::{DiskChange, DiskDefinition};
use crate::device::DeviceList;
use crate::dirty::{DirtyReport, DirtyRequest};
use crate::disk::{DiskList, DiskStatus};
use crate::error::{ErrorBody, ErrorReply};
use crate::flush::{FlushReport, FlushRequest, FlushWay};
use crate::http::{escape, exchange, request};
use crate::insight::{GuestList, SlowReport};
use crate::log::{LogAnswer, LogDecision, LogRequest};
use crate::monitor::MonitorStatus;
use crate::offload::{OffloadAnswer, OffloadHistory, OffloadReport, OffloadRequest};
use crate::query::QueryList;
use crate::statistics::Statistics;
use crate::stream::AnswerStream;
use crate::usage::UsageReport;
use fathom_options::Bytes;

/// How long the answer to a query may take, unless the caller sets a limit. A daemon answers
/// queries within milliseconds, even if its disks hang.
const QUERY_TIME_MAX: Duration = Duration::from_secs(10);
/// How long the answer to a change may take. The daemon itself waits for up to 45 s for a change.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the daemon may take to accept a connection.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);

/// A client of a daemon. It opens a connection for each request.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Option<Duration>,
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

impl ClientError {
    /// What the user can do next; may be empty.
    pub fn remedy(&self) -> String {
        match self {
            Self::Unreachable { source, .. } => match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    "start the daemon with `fathom serve`, or name its control socket with \
                     --control"
                        .into()
                }
                io::ErrorKind::PermissionDenied => {
                    "only the user that the daemon runs as may use its control socket: try again \
                     as that user or as root"
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
        Self { socket: socket.into(), limit: None }
    }

    /// The same client, with another limit on the time of each answer.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The daemon's version, state and listeners.
    ///
    /// # Errors
    /// When there is no answer; the same holds for all methods.
    pub fn daemon(&self) -> Result<DaemonInfo, ClientError> {
        self.get("/v1/daemon")
    }

    /// The state of the link to the centre.
    ///
    /// # Errors
    /// When there is no answer, or the daemon has no link to a centre.
    pub fn monitor(&self) -> Result<MonitorStatus, ClientError> {
        self.get("/v1/monitor")
    }

    /// The status of all disks.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn disks(&self) -> Result<DiskList, ClientError> {
        self.get("/v1/disks")
    }

    /// The status of one disk.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.get(&disk_path(name))
    }

    /// Adds a disk to the running daemon.
    ///
    /// # Errors
    /// When there is no answer, or the disk cannot be served.
    pub fn add_disk(&self, definition: &DiskDefinition) -> Result<DiskStatus, ClientError> {
        self.send("POST", "/v1/disks", Some(definition))
    }

    /// Adds a disk to the running daemon until the daemon ends.
    ///
    /// # Errors
    /// When there is no answer, or the disk cannot be served.
    pub fn add_disk_for_now(&self, definition: &DiskDefinition) -> Result<DiskStatus, ClientError> {
        self.send("POST", "/v1/disks?temporary=true", Some(definition))
    }

    /// Changes a disk that is in use.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the change is not possible.
    pub fn change_disk(&self, name: &str, change: &DiskChange) -> Result<DiskStatus, ClientError> {
        self.send("PATCH", &disk_path(name), Some(change))
    }

    /// Changes the size of a disk. A smaller size is refused unless `shrink`.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the size of the back end cannot be
    /// changed.
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

    /// Makes a disk accept writes again after it stopped because acknowledged writes may be lost.
    /// Lost writes stay lost.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, nothing to recover from, or the store still
    /// fails.
    pub fn recover_disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.send::<(), _>("POST", &format!("{}/recover", disk_path(name)), None)
    }

    /// Tries at once to serve a disk of the configuration that is not served.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, nothing to try, or the disk still cannot be served.
    pub fn retry_disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.send::<(), _>("POST", &format!("{}/retry", disk_path(name)), None)
    }

    /// Decides about the log of a disk that is not served because its log was refused. Then tries to serve the
    /// disk at once.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, the disk is served, or the log cannot be settled so.
    pub fn decide_log(&self, name: &str, decision: LogDecision) -> Result<LogAnswer, ClientError> {
        self.send("POST", &format!("{}/log", disk_path(name)), Some(&LogRequest { decision }))
    }

    /// Removes a disk from the running daemon; with `force` also while a VMM or an NBD client uses
    /// it.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name; without `force`, [`ErrorCode::Conflict`]
    /// for a disk in use.
    ///
    /// [`ErrorCode::Conflict`]: crate::ErrorCode::Conflict
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<Done, ClientError> {
        let query = if force { "?force=true" } else { "" };
        self.send::<(), _>("DELETE", &format!("{}{query}", disk_path(name)), None)
    }

    /// Removes a disk from the running daemon until the daemon ends.
    ///
    /// # Errors
    /// The same as those of [`Self::remove_disk`].
    pub fn remove_disk_for_now(&self, name: &str, force: bool) -> Result<Done, ClientError> {
        let path = format!("{}?temporary=true&force={force}", disk_path(name));
        self.send::<(), _>("DELETE", &path, None)
    }

    /// How the running daemon differs from its configuration file.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn configuration(&self) -> Result<ConfigurationReport, ClientError> {
        self.get("/v1/configuration")
    }

    /// Brings a disk, or all, back to what the configuration file says.
    ///
    /// # Errors
    /// When there is no answer, or the disk has no change in use.
    pub fn revert(&self, request: &RevertRequest) -> Result<ReloadReport, ClientError> {
        self.send("POST", "/v1/configuration/revert", Some(request))
    }

    /// A sample of the statistics of all disks.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn statistics(&self) -> Result<Statistics, ClientError> {
        self.get("/v1/statistics")
    }

    /// The devices beneath the disks, and their activity.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn devices(&self) -> Result<DeviceList, ClientError> {
        self.get("/v1/devices")
    }

    /// The background work of the disks' layers.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn background(&self) -> Result<BackgroundList, ClientError> {
        self.get("/v1/background")
    }

    /// The caches: of all disks, or that of the disk `disk`. Curves have at most `points` points, and
    /// each disk at most `files` files.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn caches(
        &self,
        disk: Option<&str>,
        points: usize,
        files: usize,
    ) -> Result<CacheReport, ClientError> {
        let (points, files) = (points.to_string(), files.to_string());
        let query = [("disk", disk), ("points", Some(&*points)), ("files", Some(&*files))];
        self.get(&with_query("/v1/caches", &query))
    }

    /// The disks whose load can be carried elsewhere, or only the disk `disk`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn offload(&self, disk: Option<&str>) -> Result<OffloadReport, ClientError> {
        self.get(&with_query("/v1/offload", &[("disk", disk)]))
    }

    /// The last minutes of a disk's forecast.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the disk has no layer `offload`.
    pub fn offload_history(&self, disk: &str) -> Result<OffloadHistory, ClientError> {
        self.get(&format!("{}/offload", disk_path(disk)))
    }

    /// Removes a volume from a cluster.
    ///
    /// # Errors
    /// When there is no answer, no such cluster, or the volume is in use.
    pub fn forget_volume(&self, cluster: &str, volume: &str) -> Result<Done, ClientError> {
        let (cluster, volume) = (escape(cluster), escape(volume));
        self.send::<(), _>("DELETE", &format!("/v1/clusters/{cluster}/volumes/{volume}"), None)
    }

    /// Starts or stops the offload of a disk.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the disk has no layer `offload`.
    pub fn change_offload(
        &self,
        disk: &str,
        request: OffloadRequest,
    ) -> Result<OffloadAnswer, ClientError> {
        self.send("POST", &format!("{}/offload", disk_path(disk)), Some(&request))
    }

    /// The usage by file, control group and process: of all disks, of the disk `disk`, or of the
    /// disks of `vm`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn usage(&self, disk: Option<&str>, vm: Option<&str>) -> Result<UsageReport, ClientError> {
        self.get(&with_query("/v1/usage", &[("disk", disk), ("vm", vm)]))
    }

    /// The slowest recent requests, at most `count` of each disk, or only of the disk `disk`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn slow(&self, disk: Option<&str>, count: usize) -> Result<SlowReport, ClientError> {
        let count = count.to_string();
        self.get(&with_query("/v1/slow", &[("disk", disk), ("count", Some(&count))]))
    }

    /// All guests, each with the state of its introspection.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn guests(&self) -> Result<GuestList, ClientError> {
        self.get("/v1/guests")
    }

    /// Counts the dirty pages of all guests, or of the guest with this name, number or disk.
    ///
    /// # Errors
    /// When there is no answer, or no such guest.
    pub fn dirty(
        &self,
        guest: Option<&str>,
        request: DirtyRequest,
    ) -> Result<DirtyReport, ClientError> {
        let files = request.files.map(|count| count.to_string());
        let tables = request.tables.map(|stride| stride.to_string());
        let written = request.written_ms.map(|time| time.to_string());
        let limit = self.limit.unwrap_or(QUERY_TIME_MAX);
        let wait = Duration::from_millis(request.written_ms.unwrap_or(0));
        self.clone().with_limit(limit.saturating_add(wait)).get(&with_query(
            "/v1/dirty",
            &[
                ("guest", guest),
                ("files", files.as_deref()),
                ("mapped", request.mapped.then_some("true")),
                ("tables", tables.as_deref()),
                ("written_ms", written.as_deref()),
            ],
        ))
    }

    /// Makes the guest of `vm` write its dirty data, and waits for it.
    ///
    /// # Errors
    /// When there is no answer, no guest of this name, or no way that the configuration allows.
    pub fn flush_guest(&self, vm: &str, by: Option<FlushWay>) -> Result<FlushReport, ClientError> {
        let path = format!("/v1/guests/{}/flush", escape(vm));
        self.send("POST", &path, Some(&FlushRequest { by }))
    }

    /// The daemon's standing queries.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn queries(&self) -> Result<QueryList, ClientError> {
        self.get("/v1/queries")
    }

    /// Sends any request whose answer is JSON. The parts of the path have to be encoded with
    /// [`escape`](crate::escape).
    ///
    /// # Errors
    /// When there is no answer, or the daemon refuses the request.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<serde_json::Value, ClientError> {
        self.send(method, path, body)
    }

    /// The daemon's events after number `after`. If there are none yet, waits for one for up to
    /// `wait`.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn events(&self, after: u64, wait: Duration) -> Result<EventList, ClientError> {
        let path = format!("/v1/events?after={after}&wait_ms={}", wait.as_millis());
        let limit = self.limit.unwrap_or(QUERY_TIME_MAX);
        self.clone().with_limit(limit.saturating_add(wait)).get(&path)
    }

    /// The events of some disks, or of all disks if `disks` is empty, as they occur: a recording in
    /// the format of `docs/recording.md`. It has the named `streams`, or `IOstream` alone if there are
    /// no names. With `pulse`, the daemon states at this interval up to
    /// which time the recording is complete.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn recording(
        &self,
        disks: &[String],
        streams: &[&str],
        pulse: Option<Duration>,
    ) -> Result<AnswerStream, ClientError> {
        let pulse = pulse.map(|pulse| pulse.as_millis().clamp(1, 60_000).to_string());
        let mut parameters: Vec<(&str, Option<&str>)> =
            disks.iter().map(|disk| ("disk", Some(disk.as_str()))).collect();
        parameters.extend(streams.iter().map(|stream| ("stream", Some(*stream))));
        parameters.push(("pulse_ms", pulse.as_deref()));
        let path = with_query("/v1/recording", &parameters);
        let limit = self.limit.unwrap_or(QUERY_TIME_MAX);
        let broken = |source| self.broken(source, limit);
        let mut stream = self.connect(limit)?;
        request(&mut stream, "GET", &path, None).map_err(broken)?;
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

    /// Makes the daemon read its configuration again.
    ///
    /// # Errors
    /// When there is no answer, or the configuration is invalid.
    pub fn reload(&self) -> Result<ReloadReport, ClientError> {
        self.send::<(), _>("POST", "/v1/reload", None)
    }

    /// Makes the daemon shut down. The answer arrives before the daemon ends.
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
        let body = self.call("GET", "/metrics", None)?;
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
        let answer = self.call(method, path, body.as_deref())?;
        serde_json::from_slice(&answer).map_err(unreadable)
    }

    fn call(&self, method: &str, path: &str, body: Option<&[u8]>) -> Result<Vec<u8>, ClientError> {
        let default = if method == "GET" { QUERY_TIME_MAX } else { CHANGE_TIME_MAX };
        let limit = self.limit.unwrap_or(default);
        let mut stream = self.connect(limit)?;
        let (status, answer) = exchange(&mut stream, method, path, body)
            .map_err(|source| self.broken(source, limit))?;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        Err(refused(status, &answer))
    }

    /// Opens a connection whose reads and writes wait for at most `limit`.
    fn connect(&self, limit: Duration) -> Result<UnixStream, ClientError> {
        let begun = Instant::now();
        let stream =
            connect(&self.socket, begun + limit.min(CONNECT_TIME_MAX)).map_err(|source| {
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

/// `path` with a query string of those `parameters` that have a value.
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

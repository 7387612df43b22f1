//! A client of QEMU's machine protocol (QMP): each message is a line of JSON. It sends one command
//! and disconnects, because QEMU serves one client of a socket at a time.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

/// The longest line that is read, in bytes.
const LINE_MAX: usize = 64 << 10;
/// The interval between attempts to connect to a busy socket.
const RETRY: Duration = Duration::from_millis(20);

/// Why a command was not carried out.
#[derive(Debug)]
pub(crate) enum QmpError {
    /// The socket cannot be connected to.
    Connect(io::Error),
    /// There is no answer in time: probably another client is connected.
    Busy,
    /// The other side does not send QMP.
    Foreign,
    /// QEMU's error.
    Refused(String),
}

impl fmt::Display for QmpError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => write!(formatter, "it cannot be reached: {error}"),
            Self::Busy => formatter.write_str("it does not answer"),
            Self::Foreign => formatter.write_str("its answer is not QMP"),
            Self::Refused(text) => write!(formatter, "QEMU refuses the command: {text}"),
        }
    }
}

impl QmpError {
    /// What the operator can do.
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Self::Connect(_) => {
                "start QEMU with `-qmp unix:PATH,server=on,wait=off`, and let the daemon access \
                 the socket"
            }
            Self::Busy => "give the daemon a QMP socket that no other program is connected to",
            Self::Foreign => "name a socket of QEMU's machine protocol",
            Self::Refused(_) => "see QEMU's message",
        }
    }
}

/// Presses and releases `keys` together; their names are those of QEMU's `QKeyCode`.
pub(crate) fn send_keys(path: &Path, keys: &[&str], limit: Duration) -> Result<(), QmpError> {
    let keys: Vec<Value> = keys.iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
    let command = json!({ "execute": "send-key", "arguments": { "keys": keys } });
    let mut connection = Connection::open(path, Instant::now() + limit)?;
    connection.command(&json!({ "execute": "qmp_capabilities" }))?;
    connection.command(&command)
}

struct Connection {
    stream: UnixStream,
    end: Instant,
    received: Vec<u8>,
}

impl Connection {
    /// Connects, and waits for the greeting.
    fn open(path: &Path, end: Instant) -> Result<Self, QmpError> {
        let stream = connect(path, end)?;
        let mut connection = Self { stream, end, received: Vec::new() };
        loop {
            // An event may precede the greeting.
            let message = connection.message()?;
            if message.get("QMP").is_some() {
                return Ok(connection);
            }
            if message.get("event").is_none() {
                return Err(QmpError::Foreign);
            }
        }
    }

    /// Sends a command and waits for its result.
    fn command(&mut self, command: &Value) -> Result<(), QmpError> {
        self.set_timeouts()?;
        self.stream.write_all(format!("{command}\n").as_bytes()).map_err(|error| failed(&error))?;
        loop {
            let message = self.message()?;
            if message.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = message.get("error") {
                let text = error["desc"].as_str().unwrap_or("without a reason");
                let text = text.chars().filter(|c| !c.is_control()).take(200).collect();
                return Err(QmpError::Refused(text));
            }
            if message.get("event").is_none() {
                return Err(QmpError::Foreign);
            }
        }
    }

    /// The next message.
    fn message(&mut self) -> Result<Value, QmpError> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|_| QmpError::Foreign);
            }
            if self.received.len() > LINE_MAX {
                return Err(QmpError::Foreign);
            }
            self.set_timeouts()?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(QmpError::Connect(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.received.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(&error)),
            }
        }
    }

    /// Limits the next read or write to the remaining time.
    fn set_timeouts(&self) -> Result<(), QmpError> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(QmpError::Busy);
        }
        let set = self.stream.set_read_timeout(Some(left));
        set.and_then(|()| self.stream.set_write_timeout(Some(left))).map_err(QmpError::Connect)
    }
}

fn failed(error: &io::Error) -> QmpError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpError::Busy,
        kind => QmpError::Connect(kind.into()),
    }
}

/// Connects to the socket at `path`. An ordinary connect could wait for ever for a listener that
/// accepts no clients.
fn connect(path: &Path, end: Instant) -> Result<UnixStream, QmpError> {
    let address = SocketAddrUnix::new(path).map_err(|error| QmpError::Connect(error.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| QmpError::Connect(error.into()))?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false).map_err(QmpError::Connect)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN) if Instant::now() < end => std::thread::sleep(RETRY),
            Err(Errno::AGAIN) => return Err(QmpError::Busy),
            Err(Errno::INTR) => {}
            Err(error) => return Err(QmpError::Connect(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// The outcome of a command to a peer that sends `answers`, each after a message of the client
    /// except for the first.
    fn outcome(answers: &'static [&'static [u8]]) -> Result<(), QmpError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                if stream.write_all(answer).is_err() || stream.read(&mut [0; 4096]).is_err() {
                    return;
                }
            }
        });
        let outcome = send_keys(&path, &["alt", "sysrq", "s"], Duration::from_millis(500));
        peer.join().unwrap();
        outcome
    }

    static LONG: [u8; LINE_MAX + 1] = [b'x'; LINE_MAX + 1];
    static TOO_LONG: [&[u8]; 1] = [&LONG];
    const GREETING: &[u8] = b"{\"event\": \"SHUTDOWN\"}\r\n{\"QMP\": {}}\r\n";
    const DONE: &[u8] = b"{\"event\": \"RESUME\"}\n{\"return\": {}}\n";

    #[test]
    fn a_command_succeeds_among_events() {
        assert!(outcome(&[GREETING, DONE, DONE]).is_ok());
    }

    #[test]
    fn malformed_peers_are_errors() {
        let refused = outcome(&[GREETING, b"{\"error\": {\"desc\": \"no\\u001b[2J\"}}\n"]);
        assert!(matches!(refused, Err(QmpError::Refused(text)) if text == "no[2J"));
        assert!(matches!(outcome(&[b"220 mail.example\r\n"]), Err(QmpError::Foreign)));
        assert!(matches!(outcome(&[b"{\"return\": {}}\n"]), Err(QmpError::Foreign)));
        assert!(matches!(outcome(&[b"[1, 2]\n"]), Err(QmpError::Foreign)));
        assert!(matches!(outcome(&TOO_LONG), Err(QmpError::Foreign)));
        assert!(matches!(outcome(&[]), Err(QmpError::Connect(_))));
        assert!(matches!(outcome(&[GREETING]), Err(QmpError::Connect(_))));
    }

    #[test]
    fn a_silent_peer_and_a_full_backlog_end_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut waiting = Vec::new();
        // The first connections wait in the backlog for a greeting; later ones find it full.
        let begun = Instant::now();
        let is_full = (0..5000).any(|_| match connect(&path, Instant::now()) {
            Ok(stream) => {
                waiting.push(stream);
                false
            }
            Err(error) => matches!(error, QmpError::Busy),
        });
        assert!(is_full, "{} connections", waiting.len());
        let outcome = send_keys(&path, &["s"], Duration::from_millis(100));
        assert!(matches!(outcome, Err(QmpError::Busy)));
        waiting.pop();
        drop(waiting);
        assert!(begun.elapsed() < Duration::from_secs(60));
        let missing = send_keys(&folder.path().join("missing"), &["s"], Duration::from_secs(1));
        assert!(matches!(missing, Err(QmpError::Connect(_))));
    }
}

//! Messages of QEMU's machine protocol (QMP) and of its guest agent: lines of JSON on a Unix
//! socket. Every length and every wait is bounded, because the agent's answers come from the guest.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The longest line that is read, in bytes.
pub(crate) const LINE_MAX: usize = 64 << 10;
/// The longest text of an error that is shown, in characters.
const TEXT_MAX: usize = 200;

/// Why a command was not carried out.
#[derive(Debug)]
pub(crate) enum PeerError {
    /// The socket cannot be connected to.
    Connect(io::Error),
    /// There is no answer in time: probably another client is connected.
    Busy,
    /// The other side does not send this protocol.
    Foreign,
    /// The error in the answer.
    Refused(String),
}

impl fmt::Display for PeerError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => write!(formatter, "it cannot be reached: {error}"),
            Self::Busy => formatter.write_str("it does not answer"),
            Self::Foreign => formatter.write_str("its answer is not of this protocol"),
            Self::Refused(text) => write!(formatter, "the command is refused: {text}"),
        }
    }
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Busy,
            _ => Self::Connect(error),
        }
    }
}

/// A message.
#[derive(Debug, PartialEq)]
pub(crate) enum Message {
    /// The first message of QMP.
    Greeting,
    /// An event of QMP.
    Event,
    /// The result of a command.
    Return(Value),
    /// The error of a command, without control characters.
    Error(String),
}

impl Message {
    /// Reads a line; `None` if it is not a message.
    pub(crate) fn read(line: &[u8]) -> Option<Self> {
        Self::read_numbered(line).map(|(message, _)| message)
    }

    /// The same, with the number of the command that the message answers, if it names one.
    fn read_numbered(line: &[u8]) -> Option<(Self, Option<Value>)> {
        let mut value: Value = serde_json::from_slice(line).ok()?;
        let object = value.as_object_mut()?;
        let number = object.remove("id");
        Some((Self::of(object)?, number))
    }

    fn of(object: &mut serde_json::Map<String, Value>) -> Option<Self> {
        if let Some(result) = object.remove("return") {
            return Some(Self::Return(result));
        }
        if let Some(error) = object.get("error") {
            let text = error["desc"].as_str().unwrap_or("without a reason");
            let shown = text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect();
            return Some(Self::Error(shown));
        }
        if object.contains_key("QMP") {
            return Some(Self::Greeting);
        }
        object.contains_key("event").then_some(Self::Event)
    }
}

/// Divides received bytes into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    received: Vec<u8>,
    /// How many of the bytes have been searched for the end of a line.
    searched: usize,
}

impl Lines {
    /// Adds received bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The next complete line; `None` until there is one.
    ///
    /// # Errors
    /// If it is too long.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, PeerError> {
        let new = &self.received[self.searched..];
        let Some(end) = new.iter().position(|byte| *byte == b'\n').map(|at| self.searched + at)
        else {
            self.searched = self.received.len();
            let is_long = self.searched > LINE_MAX;
            return if is_long { Err(PeerError::Foreign) } else { Ok(None) };
        };
        self.searched = 0;
        let line: Vec<u8> = self.received.drain(..=end).collect();
        if line.len() > LINE_MAX { Err(PeerError::Foreign) } else { Ok(Some(line)) }
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct LineStream {
    stream: UnixStream,
    lines: Lines,
}

impl LineStream {
    /// Connects by `end`.
    pub(crate) fn open(path: &Path, end: Instant) -> Result<Self, PeerError> {
        Ok(Self::on(fathom_control::connect(path, end)?))
    }

    /// Uses a connection.
    pub(crate) fn on(stream: UnixStream) -> Self {
        Self { stream, lines: Lines::default() }
    }

    /// Sends `prefix` and a command by `end`.
    pub(crate) fn send(
        &mut self,
        prefix: &[u8],
        command: &Value,
        end: Instant,
    ) -> Result<(), PeerError> {
        let mut bytes = prefix.to_vec();
        bytes.extend_from_slice(format!("{command}\n").as_bytes());
        self.set_timeouts(end)?;
        self.stream.write_all(&bytes).map_err(PeerError::from)
    }

    /// The next line, which has to come by `end`.
    pub(crate) fn next(&mut self, end: Instant) -> Result<Vec<u8>, PeerError> {
        loop {
            if let Some(line) = self.lines.next()? {
                return Ok(line);
            }
            self.set_timeouts(end)?;
            self.fill()?;
        }
    }

    /// The result of the command with this number, if it has one, which has to come by `end`.
    /// Events and late answers to other commands are ignored.
    pub(crate) fn result(&mut self, number: Option<u64>, end: Instant) -> Result<Value, PeerError> {
        loop {
            let line = self.next(end)?;
            if let Some(result) = result(&line, number)? {
                return Ok(result);
            }
        }
    }

    /// The result of a command if it is there, without waiting.
    pub(crate) fn available_result(&mut self) -> Result<Option<Value>, PeerError> {
        self.stream.set_nonblocking(true)?;
        let read = self.fill();
        self.stream.set_nonblocking(false)?;
        match read {
            Ok(()) | Err(PeerError::Busy) => {}
            Err(error) => return Err(error),
        }
        while let Some(line) = self.lines.next()? {
            if let Some(result) = result(&line, None)? {
                return Ok(Some(result));
            }
        }
        Ok(None)
    }

    /// Reads once.
    fn fill(&mut self) -> Result<(), PeerError> {
        let mut piece = [0; 4096];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(PeerError::Connect(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.lines.add(&piece[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Limits the next read or write to the time until `end`.
    fn set_timeouts(&self, end: Instant) -> Result<(), PeerError> {
        let left = end.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) {
            return Err(PeerError::Busy);
        }
        self.stream.set_read_timeout(Some(left))?;
        Ok(self.stream.set_write_timeout(Some(left))?)
    }
}

/// The result in a line; `None` for an event, and for the answer to a command with another number.
fn result(line: &[u8], number: Option<u64>) -> Result<Option<Value>, PeerError> {
    let (message, of) = Message::read_numbered(line).ok_or(PeerError::Foreign)?;
    let is_other = of.zip(number).is_some_and(|(of, number)| of.as_u64() != Some(number));
    match message {
        Message::Return(_) | Message::Error(_) if is_other => Ok(None),
        Message::Return(result) => Ok(Some(result)),
        Message::Error(text) => Err(PeerError::Refused(text)),
        Message::Event => Ok(None),
        Message::Greeting => Err(PeerError::Foreign),
    }
}

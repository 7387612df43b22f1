//! A client of QEMU's machine protocol (QMP). Each command has a number, which QEMU repeats in its
//! answer: an answer that comes after the time limit of its command is not taken for the answer to
//! a later one.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::line::{LineStream, Message, PeerError};

/// A connection to QEMU.
#[derive(Debug)]
pub(crate) struct Qmp {
    line: LineStream,
    /// The number of the last command.
    number: u64,
}

impl Qmp {
    /// Connects, for at most `limit`.
    pub(crate) fn open(path: &Path, limit: Duration) -> Result<Self, PeerError> {
        let line = LineStream::open(path, Instant::now() + limit)?;
        Self::greet(line, limit)
    }

    /// The same on a connection.
    pub(crate) fn on(stream: UnixStream, limit: Duration) -> Result<Self, PeerError> {
        Self::greet(LineStream::on(stream), limit)
    }

    fn greet(mut line: LineStream, limit: Duration) -> Result<Self, PeerError> {
        let end = Instant::now() + limit;
        loop {
            // An event may precede the greeting.
            match Message::read(&line.next(end)?) {
                Some(Message::Greeting) => break,
                Some(Message::Event) => {}
                _ => return Err(PeerError::Foreign),
            }
        }
        let mut qmp = Self { line, number: 0 };
        qmp.command("qmp_capabilities", &json!({}), limit)?;
        Ok(qmp)
    }

    /// Carries out a command within `limit`.
    pub(crate) fn command(
        &mut self,
        name: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, PeerError> {
        let end = Instant::now() + limit;
        self.number += 1;
        let command = json!({ "execute": name, "arguments": arguments, "id": self.number });
        self.line.send(b"", &command, end)?;
        self.line.result(Some(self.number), end)
    }
}

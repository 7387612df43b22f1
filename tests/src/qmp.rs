//! QEMU's machine protocol (QMP): each message is a line of JSON.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::{Error, Result, patience};

/// A connection to the machine protocol.
pub struct Qmp {
    inner: Mutex<Inner>,
}

struct Inner {
    reader: BufReader<UnixStream>,
    events: Vec<Value>,
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// When there is no listener, or the listener is not QEMU.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        let reader = BufReader::new(stream);
        let mut inner = Inner { reader, events: Vec::new(), partial: Vec::new() };
        loop {
            // QEMU may send an event to a new client before the greeting, if another client has
            // just disconnected.
            let message = inner.read(patience(20))?;
            if message.get("event").is_some() {
                inner.events.push(message);
            } else if message.get("QMP").is_some() {
                break;
            } else {
                return Err(Error::new(format!("not QMP: {message}")));
            }
        }
        let qmp = Self { inner: Mutex::new(inner) };
        qmp.command(&json!({"execute": "qmp_capabilities"}))?;
        Ok(qmp)
    }

    /// Sends a command, such as `{"execute": "query-status"}`, and returns its result.
    ///
    /// # Errors
    /// QEMU's error, with its text; or when there is no answer.
    pub fn command(&self, command: &Value) -> Result<Value> {
        let mut inner = self.inner.lock();
        inner.reader.get_mut().write_all(format!("{command}\n").as_bytes())?;
        loop {
            let mut message = inner.read(patience(60))?;
            if message.get("event").is_some() {
                inner.events.push(message);
            } else if let Some(error) = message.get("error") {
                return Err(Error::new(format!("QMP {command}: {error}")));
            } else {
                return Ok(message["return"].take());
            }
        }
    }

    /// Waits for the event `name` and returns it. Other events are kept for later calls.
    ///
    /// # Errors
    /// After `limit`.
    pub fn event(&self, name: &str, limit: Duration) -> Result<Value> {
        let end = Instant::now() + limit;
        let mut inner = self.inner.lock();
        loop {
            if let Some(position) = inner.events.iter().position(|event| event["event"] == name) {
                return Ok(inner.events.remove(position));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(format!("no QMP event {name}")));
            }
            let message = inner.read(left)?;
            inner.events.push(message);
        }
    }
}

impl Inner {
    fn read(&mut self, limit: Duration) -> Result<Value> {
        self.reader.get_ref().set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        match self.reader.read_until(b'\n', &mut self.partial) {
            Ok(0) => Err(Error::new("QMP: the connection is closed")),
            Ok(_) => Ok(serde_json::from_slice(&std::mem::take(&mut self.partial))?),
            Err(error) => Err(Error::new(format!("QMP: {error}"))),
        }
    }
}

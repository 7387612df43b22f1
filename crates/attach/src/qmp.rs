//! Handing a descriptor to QEMU over its machine protocol.

use std::io::{self, BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

/// QEMU answers within this time.
const TIME_MAX: Duration = Duration::from_secs(5);
/// The longest line that is accepted, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// The most lines until an answer, such as events.
const LINES_MAX: u32 = 1000;
/// QEMU's name for the descriptor: a second one with this name takes the place of the first.
const NAME: &str = "fathom-pager";

/// A connection to QEMU's machine protocol.
#[derive(Debug)]
pub(crate) struct Monitor {
    reader: BufReader<UnixStream>,
    deadline: Instant,
}

impl Monitor {
    /// Connects.
    ///
    /// # Errors
    /// When nobody answers, or something else than QEMU does.
    pub fn connect(path: &Path) -> Result<Self, Failure> {
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.set_write_timeout(Some(TIME_MAX))?;
            let reader = BufReader::new(stream);
            let mut monitor = Self { reader, deadline: Instant::now() + TIME_MAX };
            monitor.until(|message| message.get("QMP").is_some())?;
            monitor.command(&json!({"execute": "qmp_capabilities"}), None)?;
            Ok(monitor)
        });
        connected.map_err(|error| {
            Failure::new(format!("QEMU does not answer at {}: {error}", path.display()))
                .advise("the socket serves one client at a time: give one that nothing else uses")
        })
    }

    /// Gives QEMU a descriptor; it keeps it until [`take_back`](Self::take_back).
    ///
    /// # Errors
    /// When it refuses.
    pub fn hand_over(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let command = json!({"execute": "getfd", "arguments": {"fdname": NAME}});
        self.command(&command, Some(descriptor))
    }

    /// Has QEMU close the descriptor.
    ///
    /// # Errors
    /// When it refuses.
    pub fn take_back(&mut self) -> io::Result<()> {
        self.command(&json!({"execute": "closefd", "arguments": {"fdname": NAME}}), None)
    }

    fn command(&mut self, command: &Value, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.deadline = Instant::now() + TIME_MAX;
        let text = format!("{command}\n");
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let parts = [IoSlice::new(text.as_bytes())];
        let socket = self.reader.get_ref().as_fd();
        if sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)? != text.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let answer = self
            .until(|message| message.get("return").is_some() || message.get("error").is_some())?;
        match answer.get("error") {
            None => Ok(()),
            Some(error) => {
                let text = error["desc"].as_str().unwrap_or("an error without a description");
                Err(io::Error::other(fathom_failure::text::foreign(text)))
            }
        }
    }

    /// The next message for which `is_it` holds.
    fn until(&mut self, is_it: impl Fn(&Value) -> bool) -> io::Result<Value> {
        for _ in 0..LINES_MAX {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            let mut line = Vec::new();
            let mut limited = self.reader.by_ref().take(LINE_BYTES_MAX);
            match limited.read_until(b'\n', &mut line) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
            let message: Value = serde_json::from_slice(&line)?;
            if is_it(&message) {
                return Ok(message);
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))
    }
}

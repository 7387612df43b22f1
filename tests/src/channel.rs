//! The harness's end of the command channel: sends scripts, and receives their output and exit
//! status.
//!
//! The guest's end, which also defines the format of the messages, is `scripts/guest-files/agent`.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

/// The longest script, in bytes. The buffer of the guest's serial port is little larger.
const SCRIPT_LENGTH_MAX: usize = 32 << 10;

/// The result of a command in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its exit status; 128 plus the signal's number if a signal ended it.
    pub status: i32,
    /// Its standard output and standard error.
    pub text: String,
}

/// A handle of a command that runs in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

#[derive(Default)]
struct Answers {
    finished: HashMap<u64, Output>,
    closed: bool,
}

type Shared = Arc<(Mutex<Answers>, Condvar)>;

/// A connection to the agent in the guest.
pub(crate) struct Channel {
    stream: Mutex<UnixStream>,
    shared: Shared,
}

impl Channel {
    pub(crate) fn connect(path: &Path) -> std::io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let reader = BufReader::new(stream.try_clone()?);
        let shared = Shared::default();
        let readers_share = Arc::clone(&shared);
        std::thread::spawn(move || read_answers(reader, &readers_share));
        Ok(Self { stream: Mutex::new(stream), shared })
    }

    /// Starts a shell script in the guest.
    pub(crate) fn send(&self, script: &str) -> Result<Ticket> {
        // Unique in the process, because after a migration the answer arrives on another channel.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if script.len() > SCRIPT_LENGTH_MAX {
            return Err(Error::new(format!("a script of {} bytes is too long", script.len())));
        }
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let line = format!("{id} {}\n", base64(script.as_bytes()));
        self.stream.lock().write_all(line.as_bytes())?;
        Ok(Ticket(id))
    }

    /// Waits for a command to end; `None` after `limit`.
    pub(crate) fn wait(&self, ticket: Ticket, limit: Duration) -> Result<Option<Output>> {
        let (lock, changed) = &*self.shared;
        let end = Instant::now() + limit;
        let mut answers = lock.lock();
        loop {
            if let Some(output) = answers.finished.remove(&ticket.0) {
                return Ok(Some(output));
            }
            if answers.closed {
                return Err(Error::new("the command channel is closed: QEMU has ended"));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            changed.wait_for(&mut answers, left);
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Ends the reader's thread.
        let _ = self.stream.lock().shutdown(std::net::Shutdown::Both);
    }
}

fn read_answers(mut reader: BufReader<UnixStream>, shared: &Shared) {
    let (lock, changed) = &**shared;
    while let Ok(Some((id, output))) = read_answer(&mut reader) {
        lock.lock().finished.insert(id, output);
        changed.notify_all();
    }
    lock.lock().closed = true;
    changed.notify_all();
}

/// Reads the next answer. Other lines, such as those of a reboot, are skipped.
fn read_answer(reader: &mut BufReader<UnixStream>) -> std::io::Result<Option<(u64, Output)>> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&line);
        let Some(rest) = text.find("fathom ").map(|start| &text[start + 7..]) else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let [id, status, length] = words[..] else { continue };
        let (Ok(id), Ok(status), Ok(length)) =
            (id.parse(), status.parse(), length.parse::<usize>())
        else {
            continue;
        };
        let mut bytes = vec![0; length];
        reader.read_exact(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        return Ok(Some((id, Output { status, text })));
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte))
            << (8 * (3 - chunk.len()));
        for position in 0..4 {
            let sextet = (word >> (18 - 6 * position) & 63) as usize;
            text.push(if position <= chunk.len() { char::from(ALPHABET[sextet]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_of_every_remainder() {
        assert_eq!(base64(b""), "");
        assert_eq!(base64(b"f"), "Zg==");
        assert_eq!(base64(b"fo"), "Zm8=");
        assert_eq!(base64(b"foo"), "Zm9v");
        assert_eq!(base64(b"foobar\xff"), "Zm9vYmFy/w==");
    }
}

//! How commands reach a pager: a socket beside its record. A request is a word and a line feed, the
//! answer a [`PagerStatus`] as JSON.

use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::counts::PagerStatus;
use crate::record::PagerRecord;
use crate::vmm::Vmm;

/// A client says what it wants within this time.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(1);
/// A pager has detached, and a client has its answer, within this time.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);
/// The longest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 16;
/// The longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// What a pager can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Its state.
    Status,
    /// To detach. The answer is its last state.
    Detach,
}

impl Request {
    fn word(self) -> &'static str {
        match self {
            Self::Status => "status\n",
            Self::Detach => "detach\n",
        }
    }
}

/// A pager's socket, and the thread that serves it.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    stop: UnixStream,
    last: SyncSender<PagerStatus>,
    answered: Receiver<()>,
}

impl Control {
    /// Opens the socket. `stop` of the result is readable when the pager has to detach: by a
    /// request, or when something is written to the second part of the result.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn start(
        folder: &Path,
        process: i32,
        status: Arc<Mutex<PagerStatus>>,
    ) -> io::Result<(Self, UnixStream)> {
        let path = path(folder, process);
        // One of an earlier pager; this one has the lock.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let (stop, signal) = UnixStream::pair()?;
        let mut asker = signal.try_clone()?;
        let (last, end) = sync_channel(1);
        let (answer, answered) = sync_channel(1);
        std::thread::Builder::new().name("control".into()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                match read_request(&mut stream) {
                    Some(Request::Status) => {
                        let mut found = status.lock().clone();
                        found.registered_bytes = registered_bytes(process);
                        let _ = reply(&mut stream, &found);
                    }
                    Some(Request::Detach) => {
                        let _ = asker.write_all(&[0]);
                        if let Ok(found) = end.recv_timeout(ANSWER_TIME_MAX) {
                            let _ = reply(&mut stream, &found);
                        }
                        let _ = answer.try_send(());
                    }
                    None => {}
                }
            }
        })?;
        Ok((Self { path, stop, last, answered }, signal))
    }

    /// Closes the socket, and gives who has asked for it the last state.
    pub fn end(self, status: &PagerStatus) {
        let _ = fs::remove_file(&self.path);
        if self.last.send(status.clone()).is_ok() && was_asked(&self.stop) {
            let _ = self.answered.recv_timeout(REQUEST_TIME_MAX);
        }
    }
}

/// Readable when the pager has to detach.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }
}

/// Whether a request has asked for the end, rather than a signal, which writes something else.
fn was_asked(stop: &UnixStream) -> bool {
    let mut byte = [1];
    let _ = stop.set_nonblocking(true);
    matches!((&mut &*stop).read(&mut byte), Ok(1) if byte[0] == 0)
}

fn path(folder: &Path, process: i32) -> PathBuf {
    folder.join(format!("{process}.sock"))
}

fn registered_bytes(process: i32) -> u64 {
    Vmm::open(process).ok().and_then(|vmm| vmm.registered_bytes().ok()).unwrap_or(0)
}

fn read_request(stream: &mut UnixStream) -> Option<Request> {
    stream.set_read_timeout(Some(REQUEST_TIME_MAX)).ok()?;
    stream.set_write_timeout(Some(REQUEST_TIME_MAX)).ok()?;
    let mut text = String::new();
    // One call: a request is short, and a slow client must not keep others waiting.
    let mut bytes = [0; REQUEST_BYTES_MAX as usize];
    let length = stream.read(&mut bytes).ok()?;
    text.push_str(std::str::from_utf8(&bytes[..length]).ok()?);
    [Request::Status, Request::Detach].into_iter().find(|request| request.word() == text)
}

fn reply(stream: &mut UnixStream, status: &PagerStatus) -> io::Result<()> {
    stream.write_all(&serde_json::to_vec(status)?)
}

/// Asks the pager of a VMM.
///
/// # Errors
/// When there is none, or it does not answer.
pub fn ask(folder: &Path, process: i32, request: Request) -> io::Result<PagerStatus> {
    let mut stream = UnixStream::connect(path(folder, process))?;
    stream.set_read_timeout(Some(ANSWER_TIME_MAX))?;
    stream.set_write_timeout(Some(REQUEST_TIME_MAX))?;
    stream.write_all(request.word().as_bytes())?;
    let mut bytes = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// The VMMs that have a record, with the state of their pagers, in ascending order.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(folder: &Path) -> io::Result<Vec<PagerStatus>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let Ok(bytes) = fs::read(&path) else { continue };
        let Ok(record) = serde_json::from_slice::<PagerRecord>(&bytes) else { continue };
        found.push(state(folder, &record));
    }
    found.sort_by_key(|status| status.process);
    Ok(found)
}

fn state(folder: &Path, record: &PagerRecord) -> PagerStatus {
    let process = record.process;
    let mut status = PagerStatus { process, ..PagerStatus::default() };
    let vmm = Vmm::open(process).ok().filter(|vmm| vmm.start_ticks() == record.start_ticks);
    if vmm.is_none() {
        "ended".clone_into(&mut status.state);
        return status;
    }
    if let Ok(status) = ask(folder, process, Request::Status) {
        return status;
    }
    let state = if record.is_attached { "orphaned" } else { "detached" };
    state.clone_into(&mut status.state);
    status.registered_bytes = registered_bytes(process);
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_state_and_who_says_nothing_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let status = PagerStatus { process: 7, state: "attached".into(), ..PagerStatus::default() };
        let shared = Arc::new(Mutex::new(status.clone()));
        let (control, _signal) = Control::start(folder.path(), 7, shared).unwrap();
        let mut rubbish = UnixStream::connect(path(folder.path(), 7)).unwrap();
        rubbish.write_all(&[0xff; 64]).unwrap();
        let silent = UnixStream::connect(path(folder.path(), 7)).unwrap();
        assert_eq!(ask(folder.path(), 7, Request::Status).unwrap(), status);
        drop(silent);
        let place = folder.path().to_owned();
        let asker = std::thread::spawn(move || ask(&place, 7, Request::Detach).unwrap());
        let mut polled = [rustix::event::PollFd::new(&control, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, None).unwrap(), 1);
        control.end(&PagerStatus { state: "detached".into(), ..status });
        assert_eq!(asker.join().unwrap().state, "detached");
        assert!(ask(folder.path(), 7, Request::Status).is_err());
        assert!(list(&folder.path().join("none")).unwrap().is_empty());
    }
}

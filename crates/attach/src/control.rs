//! How commands reach a pager: a socket beside its record. A request is a line, the answer a
//! [`PagerStatus`] as JSON.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::counts::PagerStatus;
use crate::limit::LimitHandle;
use crate::record::PagerRecord;
use crate::store::{self, PAGE};
use crate::vmm::Vmm;

/// A client says what it wants within this time.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(1);
/// A client has its answer within this time, but for the last state.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);
/// The longest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 64;
/// How often who waits for the last state asks for the present one.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// The longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// What a pager can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Its state.
    Status,
    /// To detach. The answer is its last state.
    Detach,
    /// To have at most so many bytes of the guest's memory in the host's; 0 for no limit. The
    /// answer is the state; `refused` says why it was not set.
    Limit(u64),
}

impl Request {
    fn line(self) -> String {
        match self {
            Self::Status => "status\n".into(),
            Self::Detach => "detach\n".into(),
            Self::Limit(bytes) => format!("limit {bytes}\n"),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        match line {
            "status\n" => Some(Self::Status),
            "detach\n" => Some(Self::Detach),
            _ => line.strip_prefix("limit ")?.trim_end().parse().ok().map(Self::Limit),
        }
    }
}

/// A pager's socket, and the thread that serves it.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    stop: UnixStream,
    /// Who has asked the pager to detach, and waits for its last state.
    waiting: Arc<Mutex<Vec<UnixStream>>>,
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
        limit: LimitHandle,
    ) -> io::Result<(Self, UnixStream)> {
        let path = path(folder, process);
        // One of an earlier pager; this one has the lock.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let (stop, signal) = UnixStream::pair()?;
        let mut asker = signal.try_clone()?;
        let waiting: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let waiters = Arc::clone(&waiting);
        std::thread::Builder::new().name("control".into()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                let found = || PagerStatus {
                    registered_bytes: registered_bytes(process),
                    ..status.lock().clone()
                };
                match read_request(&mut stream) {
                    Some(Request::Status) => drop(reply(&mut stream, &found())),
                    Some(Request::Limit(bytes)) => {
                        let refused = limit.set(Some(bytes).filter(|bytes| *bytes > 0)).err();
                        let refused = refused.unwrap_or_default();
                        let _ = reply(&mut stream, &PagerStatus { refused, ..found() });
                    }
                    Some(Request::Detach) => {
                        waiters.lock().push(stream);
                        let _ = asker.write_all(&[0]);
                    }
                    None => {}
                }
            }
        })?;
        Ok((Self { path, stop, waiting }, signal))
    }

    /// Closes the socket, and gives those who have asked for it the last state.
    pub fn end(self, status: &PagerStatus) {
        let _ = fs::remove_file(&self.path);
        for mut stream in self.waiting.lock().drain(..) {
            let _ = reply(&mut stream, status);
        }
    }
}

/// Readable when the pager has to detach.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }
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
    // One call: a request is short, and a slow client must not keep others waiting.
    let mut bytes = [0; REQUEST_BYTES_MAX as usize];
    let length = stream.read(&mut bytes).ok()?;
    Request::parse(std::str::from_utf8(&bytes[..length]).ok()?)
}

fn reply(stream: &mut UnixStream, status: &PagerStatus) -> io::Result<()> {
    stream.write_all(&serde_json::to_vec(status)?)
}

fn send(folder: &Path, process: i32, request: Request) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path(folder, process))?;
    stream.set_read_timeout(Some(ANSWER_TIME_MAX))?;
    stream.set_write_timeout(Some(REQUEST_TIME_MAX))?;
    stream.write_all(request.line().as_bytes())?;
    Ok(stream)
}

/// Asks the pager of a VMM.
///
/// # Errors
/// When there is none, or it does not answer.
pub fn ask(folder: &Path, process: i32, request: Request) -> io::Result<PagerStatus> {
    let stream = send(folder, process, request)?;
    let mut bytes = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// Asks the pager of a VMM to detach, and waits for its last state. All pages come in before, which
/// takes about ten seconds for each GiB: `wait` is called once a second with the present state.
///
/// # Errors
/// When there is none, or it ends without an answer.
pub fn ask_to_detach(
    folder: &Path,
    process: i32,
    wait: &mut dyn FnMut(&PagerStatus),
) -> io::Result<PagerStatus> {
    let mut stream = send(folder, process, Request::Detach)?;
    stream.set_read_timeout(Some(PROGRESS_INTERVAL))?;
    let mut bytes = Vec::new();
    loop {
        let mut part = [0; 4096];
        match stream.read(&mut part) {
            Ok(0) => return Ok(serde_json::from_slice(&bytes)?),
            Ok(length) if (bytes.len() + length) as u64 <= ANSWER_BYTES_MAX => {
                bytes.extend_from_slice(&part[..length]);
            }
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // It may have ended in between.
                if let Ok(status) = ask(folder, process, Request::Status) {
                    wait(&status);
                }
            }
            Err(error) => return Err(error),
        }
    }
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
    if let (Some(store), Some(vmm)) = (&record.store, &vmm) {
        // Its guard serves.
        status.guard = record.guard;
        status.eviction.limit_bytes = record.limit.unwrap_or(0);
        status.eviction.away_bytes = store::count_entries(store, vmm) * PAGE;
    }
    status.registered_bytes = registered_bytes(process);
    status
}

#[cfg(test)]
mod tests {
    use fathom_failure::Failure;

    use super::*;

    #[test]
    fn who_asks_gets_the_state_and_who_says_nothing_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let status = PagerStatus { process: 7, state: "attached".into(), ..PagerStatus::default() };
        let shared = Arc::new(Mutex::new(status.clone()));
        let limit = LimitHandle::new().unwrap();
        let pager = limit.clone();
        let (control, _signal) = Control::start(folder.path(), 7, shared, limit).unwrap();
        let mut rubbish = UnixStream::connect(path(folder.path(), 7)).unwrap();
        rubbish.write_all(&[0xff; 64]).unwrap();
        let silent = UnixStream::connect(path(folder.path(), 7)).unwrap();
        assert_eq!(ask(folder.path(), 7, Request::Status).unwrap(), status);
        drop(silent);
        let place = folder.path().to_owned();
        let asker = std::thread::spawn(move || ask(&place, 7, Request::Limit(4096)).unwrap());
        let mut polled = [rustix::event::PollFd::new(&pager, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, None).unwrap(), 1);
        pager.answer(|bytes| Err(Failure::new(format!("{bytes:?}")).advise("try another")));
        assert_eq!(asker.join().unwrap().refused, "Some(4096); try another");
        let place = folder.path().to_owned();
        let mut waits = 0;
        let asker = std::thread::spawn(move || {
            (ask_to_detach(&place, 7, &mut |_| waits += 1).unwrap(), waits)
        });
        let mut polled = [rustix::event::PollFd::new(&control, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, None).unwrap(), 1);
        std::thread::sleep(PROGRESS_INTERVAL + REQUEST_TIME_MAX / 2);
        control.end(&PagerStatus { state: "detached".into(), ..status });
        let (last, waits) = asker.join().unwrap();
        assert!(last.state == "detached" && waits > 0, "{waits}: {last:?}");
        assert!(ask(folder.path(), 7, Request::Status).is_err());
        assert!(list(&folder.path().join("none")).unwrap().is_empty());
    }
}

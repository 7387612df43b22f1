//! Threads that may wait for ever in the kernel, for a disk or another user's folder.
//!
//! Such a thread cannot be killed, and whatever it has open stays open after its process's death:
//! then the guard would not notice the death, and the next pager would not get its locks. So it has
//! a table of descriptors of its own, with nothing in it but what it opens.

#![expect(unsafe_code, reason = "a table of descriptors for a thread")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fd::AsRawFd;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::trace;

/// Starts a thread that has nothing open but a descriptor that refers to the same as `kept`, and
/// waits until that is so. Signals are for other threads.
///
/// # Errors
/// When it cannot be started, or not be given a table of its own.
pub(crate) fn spawn(
    name: &str,
    kept: Option<BorrowedFd<'_>>,
    work: impl FnOnce(Option<OwnedFd>) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let kept = kept.map(|kept| kept.as_fd().as_raw_fd());
    let thread =
        std::thread::Builder::new().name(name.into()).spawn(move || match isolate(kept) {
            Ok(kept) => {
                let _ = sender.send(Ok(()));
                drop(sender);
                work(kept);
            }
            Err(error) => drop(sender.send(Err(error))),
        })?;
    receiver.recv().map_err(io::Error::other)??;
    Ok(thread)
}

/// Has such a thread do something, and waits for it for at most so long.
///
/// # Errors
/// Those of the work, and `TimedOut`; the thread goes on then.
pub(crate) fn within<T: Send + 'static>(
    name: &str,
    time: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    spawn(name, None, move |_| drop(sender.send(work())))?;
    match receiver.recv_timeout(time) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Gives this thread a table of its own, with only `kept` in it.
fn isolate(kept: Option<i32>) -> io::Result<Option<OwnedFd>> {
    trace::block_signals(&trace::SYNCHRONOUS)?;
    // SAFETY: from here on this thread uses no descriptor that it has not opened itself, but for
    // `kept`, which is open until the caller of `spawn` knows that this function has returned.
    unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
    let last = libc::c_uint::MAX;
    let ranges = match kept.and_then(|kept| libc::c_uint::try_from(kept).ok()) {
        Some(0) => [(1, last), (1, last)],
        Some(kept) => [(0, kept - 1), (kept + 1, last)],
        None => [(0, last), (0, last)],
    };
    for (first, last) in ranges {
        // SAFETY: the table is this thread's own, and nothing of this thread uses it.
        if unsafe { libc::close_range(first, last, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: it is open in the table of this thread, which has no other owner of it.
    Ok(kept.map(|kept| unsafe { OwnedFd::from_raw_fd(kept) }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    #[test]
    fn a_thread_has_nothing_open_and_the_process_all_that_it_had() {
        let (read, write) = std::io::pipe().unwrap();
        let count = || std::fs::read_dir("/proc/thread-self/fd").map(Iterator::count);
        let open = within("test", Duration::from_secs(5), count).unwrap();
        // That of the folder itself.
        assert_eq!(open, 1);
        let (sender, receiver) = mpsc::channel();
        let thread = spawn("test", Some(write.as_fd()), move |kept| {
            let open = std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
            File::from(kept.unwrap()).write_all(b"x").unwrap();
            sender.send(open).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(receiver.recv().unwrap(), 2);
        let mut byte = [0];
        std::io::Read::read_exact(&mut &read, &mut byte).unwrap();
        (&write).write_all(b"y").unwrap();
        let slow = || {
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        let error = within("test", Duration::from_millis(10), slow).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

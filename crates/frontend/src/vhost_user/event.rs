//! Event descriptors from a VMM: for the kicks that it sends, and for the interrupts that it gets.
//!
//! The VMM holds the same open file: it can fill or empty the counter and change the flags at any
//! time. So the code here relies on a checked state no longer than necessary, and a call that might
//! still block can be [interrupted](interrupt).

#![expect(unsafe_code, reason = "a signal to a thread")]

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// Interrupts a blocked system call of a thread. The default action of this signal is to ignore it.
const WAKE_SIGNAL: libc::c_int = libc::SIGURG;

/// Refuses a file that is not an event descriptor: a write to a pipe, a socket or a file may wait
/// for its other side, and some files are always readable.
pub(super) fn check(file: &File, what: &str) -> io::Result<()> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if link.as_os_str() == "anon_inode:[eventfd]" {
        return Ok(());
    }
    let text = format!("the {what} descriptor is not an event descriptor (eventfd)");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Resets the counter of a kick descriptor, without waiting.
pub(super) fn take(kick: &File) {
    let mut count = [0_u8; 8];
    // The offset stands for the descriptor's position. The old value of the counter does not
    // matter.
    let parts = &mut [IoSliceMut::new(&mut count)];
    let _ = preadv2(kick, parts, u64::MAX, ReadWriteFlags::NOWAIT);
}

/// The descriptor that receives a ring's interrupts.
pub(super) struct Call {
    file: File,
    /// Whether the VMM has set the descriptor to non-blocking. A VMM that waits for interrupts by
    /// reading has not, and the daemon must not change its flags.
    nonblocking: bool,
}

impl Call {
    /// Sends interrupts through `file`.
    pub(super) fn new(file: File) -> io::Result<Self> {
        check(&file, "call")?;
        let nonblocking = fcntl_getfl(&file)?.contains(OFlags::NONBLOCK);
        Ok(Self { file, nonblocking })
    }

    /// A second handle for the same descriptor.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, nonblocking: self.nonblocking })
    }

    /// Sends an interrupt, unless the counter is full. `writing` is true during the write.
    pub(super) fn signal(&mut self, writing: &AtomicBool) {
        if !self.nonblocking && !self.is_writable() {
            return;
        }
        writing.store(true, Ordering::Relaxed);
        let count = 1_u64.to_ne_bytes();
        let result = rustix::io::write(&self.file, &count);
        writing.store(false, Ordering::Relaxed);
        if result == Err(Errno::INTR) {
            // The write has blocked: the VMM has filled the counter meanwhile, or changed the
            // flags.
            self.nonblocking = false;
        }
    }

    fn is_writable(&self) -> bool {
        let mut polls = [PollFd::new(&self.file, PollFlags::OUT)];
        poll(&mut polls, Some(&Timespec::default())) == Ok(1)
            && polls[0].revents().contains(PollFlags::OUT)
    }
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Makes threads of this process [interruptible](interrupt).
pub(super) fn allow_interrupts() {
    static ALLOWED: Once = Once::new();
    ALLOWED.call_once(|| {
        // SAFETY: the handler does nothing. Without SA_RESTART the signal interrupts a blocked
        // system call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int) = do_nothing;
            action.sa_sigaction = handler as libc::sighandler_t;
            libc::sigaction(WAKE_SIGNAL, &raw const action, std::ptr::null_mut());
        }
    });
}

/// Interrupts the system call in which `thread` is blocked, if there is one.
pub(super) fn interrupt(thread: &JoinHandle<()>) {
    // SAFETY: the thread has not been joined, so its handle is valid.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), WAKE_SIGNAL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    fn event(flags: EventfdFlags) -> File {
        File::from(eventfd(0, flags).unwrap())
    }

    fn fill(file: &File) {
        use std::io::Write as _;
        (&mut &*file).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
    }

    #[test]
    fn other_files_than_event_descriptors_are_refused() {
        assert!(Call::new(event(EventfdFlags::empty())).is_ok());
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(Call::new(File::from(OwnedFd::from(socket))).is_err());
        assert!(Call::new(File::open("/dev/null").unwrap()).is_err());
        assert!(Call::new(File::open("/tmp").unwrap()).is_err());
    }

    #[test]
    fn a_full_counter_is_left_alone() {
        let writing = AtomicBool::new(false);
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            let file = event(flags);
            fill(&file);
            Call::new(file.try_clone().unwrap()).unwrap().signal(&writing);
            take(&file);
            take(&file);
        }
    }

    #[test]
    fn a_write_that_waits_can_be_ended() {
        allow_interrupts();
        let file = event(EventfdFlags::empty());
        fill(&file);
        // As if the VMM had filled the counter and changed the flags a moment before.
        let mut call = Call { file, nonblocking: true };
        let thread = std::thread::spawn(move || {
            let writing = AtomicBool::new(false);
            call.signal(&writing);
            assert!(!call.nonblocking);
            call.signal(&writing);
        });
        while !thread.is_finished() {
            interrupt(&thread);
            std::thread::sleep(Duration::from_millis(5));
        }
        thread.join().unwrap();
    }
}

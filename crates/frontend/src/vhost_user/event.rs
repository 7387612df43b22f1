//! Event descriptors that a VMM hands over: kicks that it sends, interrupts that it gets.
//!
//! The VMM holds the same open file: it can fill or empty the counter and change the flags at any
//! moment. So nothing here relies on what an earlier look has shown for longer than it must, and
//! whatever might wait all the same can be [interrupted](interrupt).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Ends a system call of a thread that waits. The default action of this signal is none.
const WAKE_SIGNAL: libc::c_int = libc::SIGURG;

/// Refuses what is no event descriptor: a write to a pipe, a socket or a file may wait for its
/// other side, and some are readable for ever.
pub(super) fn check(file: &File, what: &str) -> io::Result<()> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if link.as_os_str() == "anon_inode:[eventfd]" {
        return Ok(());
    }
    let text = format!("the {what} descriptor is no event descriptor (eventfd)");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Sets the counter of a kick descriptor back, without waiting.
pub(super) fn take(kick: &File) {
    let mut count = [0_u8; 8];
    let part = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
    // SAFETY: the memory lives through the call. Whether the counter was 0 is of no interest.
    unsafe { libc::preadv2(kick.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
}

/// Where a ring's interrupts go.
pub(super) struct Call {
    file: File,
    /// Whether the VMM has said that writes are not to wait. A VMM that waits for interrupts by
    /// reading has not, and its flags are not ours to change.
    nonblocking: bool,
}

impl Call {
    /// Interrupts by way of `file`.
    pub(super) fn new(file: File) -> io::Result<Self> {
        check(&file, "call")?;
        let nonblocking = flags(&file)? & libc::O_NONBLOCK != 0;
        Ok(Self { file, nonblocking })
    }

    /// A second handle for the same.
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
        // SAFETY: the memory lives through the call.
        let result =
            unsafe { libc::write(self.file.as_raw_fd(), count.as_ptr().cast(), count.len()) };
        writing.store(false, Ordering::Relaxed);
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
            // It has waited: the VMM has filled the counter meanwhile, or changed the flags.
            self.nonblocking = false;
        }
    }

    fn is_writable(&self) -> bool {
        let mut poll =
            libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the structure lives through the call, which does not wait.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLOUT != 0 }
    }
}

fn flags(file: &File) -> io::Result<libc::c_int> {
    // SAFETY: a system call on a descriptor that we own.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags) }
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Makes threads of this process [interruptible](interrupt).
pub(super) fn allow_interrupts() {
    static ALLOWED: Once = Once::new();
    ALLOWED.call_once(|| {
        // SAFETY: the handler does nothing. Without SA_RESTART a system call that waits ends.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int) = do_nothing;
            action.sa_sigaction = handler as libc::sighandler_t;
            libc::sigaction(WAKE_SIGNAL, &raw const action, std::ptr::null_mut());
        }
    });
}

/// Ends the system call in which `thread` waits, if it does.
pub(super) fn interrupt(thread: &JoinHandle<()>) {
    // SAFETY: the thread has not been joined, so that its handle stands for it.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), WAKE_SIGNAL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    fn event(count: libc::c_uint, flags: libc::c_int) -> File {
        // SAFETY: the call returns a new descriptor, which is checked and ours alone.
        unsafe {
            let descriptor = libc::eventfd(count, flags);
            assert!(descriptor >= 0);
            File::from_raw_fd(descriptor)
        }
    }

    fn fill(file: &File) {
        use std::io::Write as _;
        (&mut &*file).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
    }

    #[test]
    fn what_is_no_event_descriptor_is_refused() {
        assert!(Call::new(event(0, 0)).is_ok());
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(Call::new(File::from(OwnedFd::from(socket))).is_err());
        assert!(Call::new(File::open("/dev/null").unwrap()).is_err());
        assert!(Call::new(File::open("/tmp").unwrap()).is_err());
    }

    #[test]
    fn a_full_counter_is_left_alone() {
        let writing = AtomicBool::new(false);
        for flags in [0, libc::EFD_NONBLOCK] {
            let file = event(0, flags);
            fill(&file);
            Call::new(file.try_clone().unwrap()).unwrap().signal(&writing);
            take(&file);
            take(&file);
        }
    }

    #[test]
    fn a_write_that_waits_can_be_ended() {
        allow_interrupts();
        let file = event(0, 0);
        fill(&file);
        // As if the VMM had filled the counter and changed the flags just now.
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

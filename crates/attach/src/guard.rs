//! The guard: a small process that waits for its pager's death, and then leaves the faults to the
//! kernel again.
//!
//! Threads of the guest that meet a missing page wait for the pager. The VMM keeps the userfaultfd
//! open, so the kernel does not notice that nobody serves it. The guard does: it has a copy of the
//! userfaultfd, and a connection that ends with the pager. As long as nothing has left the guest's
//! memory, a fault that the kernel serves itself is right.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::memory::MappedMemory;
use crate::trace;
use crate::userfault::{MISSING_SHMEM, UserFault};

/// What the guard says when it is ready.
const READY: u8 = b'r';
/// What the pager says when it has detached: the guard ends.
const OVER: u8 = b'o';
/// A guard is ready, and has ended, within this time.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The longest message, in bytes: the mappings of a VMM.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A running guard, as its pager has it.
#[derive(Debug)]
pub(crate) struct Guard {
    child: Child,
    link: UnixStream,
}

impl Guard {
    /// Starts a guard by `command`. Returns when it waits.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        mut command: Command,
        faults: &UserFault,
        lock: BorrowedFd<'_>,
        memory: &[MappedMemory],
    ) -> Result<Self, Failure> {
        let started = (|| {
            let (link, other) = UnixStream::pair()?;
            let stdin = Stdio::from(OwnedFd::from(other));
            let child = command.stdin(stdin).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            // The command keeps the other end open.
            drop(command);
            let mut guard = Self { child, link };
            guard.greet(faults, lock, memory)?;
            Ok::<_, io::Error>(guard)
        })();
        started.map_err(|error| Failure::new(format!("the pager's guard does not start: {error}")))
    }

    fn greet(
        &mut self,
        faults: &UserFault,
        lock: BorrowedFd<'_>,
        memory: &[MappedMemory],
    ) -> io::Result<()> {
        let message = serde_json::to_vec(memory)?;
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the guest's memory has too many parts"));
        }
        let descriptors = [faults.as_fd(), lock];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let parts = [IoSlice::new(&message)];
        if sendmsg(&self.link, &parts, &mut control, SendFlags::NOSIGNAL)? != message.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.link.set_read_timeout(Some(TIME_MAX))?;
        let mut answer = [0];
        self.link.read_exact(&mut answer)?;
        if answer[0] == READY { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Ends the guard, which leaves everything as it is.
    pub fn end(mut self) {
        let _ = self.link.write_all(&[OVER]);
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > TIME_MAX {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Collects a guard that has ended.
    pub fn bury(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The guard's process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

/// Readable when the guard has ended.
impl AsFd for Guard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// The life of a guard, in a process that does nothing else. Its standard input is the connection
/// to its pager.
///
/// # Errors
/// When it is not started by a pager.
pub fn guard() -> io::Result<()> {
    trace::block_signals()?;
    // A signal to the pager's group or session is not meant for it.
    let _ = rustix::process::setsid();
    let mut link = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (memory, faults, _lock) = receive(&link)?;
    link.write_all(&[READY])?;
    let mut word = [0];
    let is_over = matches!(link.read(&mut word), Ok(1) if word[0] == OVER);
    if !is_over {
        release(&faults, &memory);
    }
    Ok(())
}

fn receive(link: &UnixStream) -> io::Result<(Vec<MappedMemory>, UserFault, OwnedFd)> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let length = recvmsg(link, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    let mut files = files.into_iter();
    match (files.next(), files.next()) {
        (Some(faults), Some(lock)) => {
            let memory = serde_json::from_slice(&bytes[..length])?;
            Ok((memory, UserFault::adopt(faults, MISSING_SHMEM)?, lock))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Leaves the faults of all memory to the kernel, and lets waiting threads go on. A part that is
/// not mapped any more has none.
pub(crate) fn release(faults: &UserFault, memory: &[MappedMemory]) {
    for part in memory {
        let _ = faults.unregister(&part.range());
    }
}

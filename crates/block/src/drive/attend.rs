//! Keeps a queue of a disk open while no front end has one, so that its layers go on with work of
//! their own, such as the write-back of a log.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use fathom_reactor::{Event, OwnerGroup, Reactor};
use parking_lot::{Mutex, MutexGuard};

use super::{DriveThread, RequestSource, Wake};
use crate::clock::Clock;
use crate::disk::Disk;
use crate::stack::Stack;

/// The number of entries of the thread's ring.
const RING_ENTRIES: u32 = 64;

/// The answer to an attempt to attend a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attended {
    /// The queue has been opened.
    Begun,
    /// An earlier queue has not ended.
    Already,
    /// There are no more such queues; see [`Attendance::end`].
    Over,
}

/// The queue of a disk that no front end has. It sleeps while no layer has work that is due.
#[derive(Default)]
pub struct Attendance {
    state: Mutex<State>,
    is_over: AtomicBool,
    /// Wakes the latest thread when the layers of the disk change, because its queue has to take
    /// part.
    wake: Mutex<Weak<Wake>>,
}

#[derive(Default)]
struct State {
    thread: Option<DriveThread<Attendant>>,
    /// Whether it is called at each change of the disk.
    listens: bool,
}

impl Attendance {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn latest(&self) -> MutexGuard<'_, Weak<Wake>> {
        self.wake.lock()
    }

    /// Wakes the thread at each change of the disk.
    fn listen(self: &Arc<Self>, disk: &Disk) {
        let weak = Arc::downgrade(self);
        disk.listen(Box::new(move |_| {
            let Some(attendance) = weak.upgrade() else { return false };
            let wake = attendance.latest().upgrade();
            if let Some(wake) = wake {
                wake.wake();
            }
            true
        }));
    }

    /// Opens a queue of `disk` on a thread of its own, until `is_done`, which is asked after each
    /// round of the queue and must not block. `failed` is called if the thread panics. Blocks while
    /// the queue is opened.
    ///
    /// # Errors
    /// When the host has no thread or ring left, or the disk cannot open a queue.
    pub fn begin(
        self: &Arc<Self>,
        disk: &Arc<Disk>,
        is_done: impl FnMut() -> bool + Send + 'static,
        failed: impl FnOnce() + Send + 'static,
    ) -> io::Result<Attended> {
        let mut state = self.state();
        if self.is_over.load(Ordering::Acquire) {
            return Ok(Attended::Over);
        }
        if state.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Ok(Attended::Already);
        }
        let name = format!("attend-{}", disk.name());
        let thread = DriveThread::start(name, RING_ENTRIES, 0, failed, |_| {})?;
        *self.latest() = Arc::downgrade(&thread.wake());
        if !std::mem::replace(&mut state.listens, true) {
            self.listen(disk);
        }
        let (attendance, disk) = (Arc::clone(self), Arc::clone(disk));
        thread.add(move |reactor| {
            let group = reactor.group();
            let stack = disk.open_queue(reactor, Clock::System)?;
            let is_done = Box::new(is_done);
            Ok(Attendant { stack, group, is_done, has_ended: false, attendance })
        })?;
        state.thread = Some(thread);
        Ok(Attended::Begun)
    }

    /// From now on, no queue is opened.
    pub fn forbid(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Ends the queue, if there is one, and waits for its end: for up to 10 s, if its layers do not
    /// finish what they have begun. From now on, no queue is opened. Not for the threads of queues.
    pub fn end(&self) {
        self.forbid();
        let thread = self.state().thread.take();
        // The thread ends when its source has: the mail of `await_ended` wakes it.
        if let Some(thread) = thread {
            thread.await_ended();
        }
    }
}

/// A queue without requests.
struct Attendant {
    stack: Stack,
    group: OwnerGroup,
    is_done: Box<dyn FnMut() -> bool + Send>,
    has_ended: bool,
    attendance: Arc<Attendance>,
}

impl RequestSource for Attendant {
    fn stack(&mut self) -> &mut Stack {
        &mut self.stack
    }

    fn group(&self) -> OwnerGroup {
        self.group
    }

    fn take(&mut self, _: &mut Reactor) -> bool {
        false
    }

    fn give(&mut self, _: &mut Reactor) -> bool {
        let ends = self.attendance.is_over.load(Ordering::Acquire) || (self.is_done)();
        // Once it has ended, it stays so.
        ends && !std::mem::replace(&mut self.has_ended, true)
    }

    fn signal(&mut self, _: &Event, _: &mut Reactor) {}

    fn is_ready(&mut self, _: &mut Reactor) -> bool {
        false
    }

    fn rest(&mut self, _: u64, _: &mut Reactor) -> u64 {
        u64::MAX
    }

    fn arm(&mut self, _: &mut Reactor) -> bool {
        // Mail wakes the thread.
        false
    }

    fn disarm(&mut self) {}

    fn fail(&mut self, _: &io::Error) {
        self.has_ended = true;
    }

    fn is_ended(&self) -> bool {
        self.has_ended
    }
}

impl Drop for Attendant {
    /// Lets the thread end, unless somebody else waits for that, or it has failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let thread = self.attendance.state().thread.take();
        drop(thread);
    }
}

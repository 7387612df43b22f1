//! The limit of a guest's memory, as other threads than the pager's set it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

/// A pager that serves answers within this time.
const TIME_MAX: Duration = Duration::from_secs(15);

/// A limit in bytes; `None` for no limit.
type Limit = Option<u64>;

#[derive(Debug, Default)]
struct State {
    wanted: Option<Limit>,
    answer: Option<Result<(), String>>,
}

/// Sets the limit of a pager that serves.
#[derive(Clone, Debug)]
pub struct LimitHandle {
    state: Arc<(Mutex<State>, Condvar)>,
    bell: Arc<OwnedFd>,
}

impl LimitHandle {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Arc::default(), bell: Arc::new(bell) })
    }

    /// Has the pager set its limit, in bytes; `None` for no limit. One thread at a time.
    ///
    /// # Errors
    /// Why it was not set, as text.
    pub fn set(&self, limit: Limit) -> Result<(), String> {
        let (state, answered) = &*self.state;
        let mut state = state.lock();
        state.wanted = Some(limit);
        state.answer = None;
        let _ = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes());
        let deadline = Instant::now() + TIME_MAX;
        while state.answer.is_none() {
            if answered.wait_until(&mut state, deadline).timed_out() {
                state.wanted = None;
                return Err("the pager does not answer".into());
            }
        }
        state.answer.take().unwrap_or(Ok(()))
    }

    /// Carries out what was wanted, if anything was.
    pub(crate) fn answer(&self, set: impl FnOnce(Limit) -> Result<(), Failure>) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.bell, &mut count);
        let wanted = self.state.0.lock().wanted.take();
        if let Some(limit) = wanted {
            let answer = set(limit).map_err(|failure| format!("{failure:#}"));
            self.state.0.lock().answer = Some(answer);
            self.state.1.notify_all();
        }
    }
}

/// Readable when a limit is wanted.
impl AsFd for LimitHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

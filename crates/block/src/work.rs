//! Computations of layers, on threads that serve no queue.
//!
//! A queue's thread serves many requests, perhaps of several queues: a hash or a compression of a
//! large one would keep all of them waiting. A layer's part hands such a computation to its
//! [`Work`], and fetches the answer when it is woken. The threads belong to the process: as many as
//! it may use processors, started as they are needed, ended when they have had nothing to do for a
//! while.
//!
//! No part's computations keep those of another waiting for long: parts that have some are served in
//! turn, one computation each. Those that requests wait for go before those that no request waits
//! for, but for one of [`BACKGROUND_SHARE`], so that these come to an end too.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::waker::Waker;

/// How many computations of a part may be under way.
const UNDER_WAY_MAX: usize = 256;
/// While requests wait for computations, one of so many is one that no request waits for.
const BACKGROUND_SHARE: u32 = 8;
/// How long a thread of the process waits for the next computation before it ends.
const IDLE: Duration = Duration::from_secs(5);

/// Who waits for a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A request does.
    Request,
    /// None does: it is part of work in the background.
    Background,
}

type Job = Box<dyn FnOnce() + Send>;

/// The computations of one part that have not begun.
#[derive(Default)]
struct Lane {
    jobs: Mutex<VecDeque<Job>>,
}

impl Lane {
    fn jobs(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads, and what waits for them.
struct Pool {
    state: Mutex<State>,
    wanted: Condvar,
    threads_max: usize,
    /// How long a thread waits for the next computation before it ends.
    idle: Duration,
}

#[derive(Default)]
struct State {
    /// Lanes with computations that have not begun, those that requests wait for and the others, in
    /// the order in which they are served.
    ready: [VecDeque<Arc<Lane>>; 2],
    /// How many for requests were taken since the last other.
    for_requests: u32,
    threads: usize,
    idle: usize,
}

impl State {
    /// The next computation.
    fn next(&mut self) -> Option<Job> {
        loop {
            let others = self.ready[0].is_empty()
                || self.for_requests >= BACKGROUND_SHARE - 1 && !self.ready[1].is_empty();
            let ready = &mut self.ready[usize::from(others)];
            let lane = ready.pop_front()?;
            let mut jobs = lane.jobs();
            // None where the part is gone by now.
            let Some(job) = jobs.pop_front() else { continue };
            if !jobs.is_empty() {
                drop(jobs);
                ready.push_back(lane);
            }
            self.for_requests = if others { 0 } else { self.for_requests.saturating_add(1) };
            return Some(job);
        }
    }
}

impl Pool {
    fn new(threads_max: usize, idle: Duration) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), wanted: Condvar::new(), threads_max, idle })
    }

    /// That of the process.
    fn of_process() -> &'static Arc<Self> {
        static POOL: OnceLock<Arc<Pool>> = OnceLock::new();
        let threads_max = || std::thread::available_parallelism().map_or(1, usize::from);
        POOL.get_or_init(|| Self::new(threads_max(), IDLE))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread run `job` for `lane`. Returns whether there is a thread that will.
    fn add(self: &Arc<Self>, lane: &Arc<Lane>, urgency: Urgency, job: Job) -> bool {
        let mut state = self.state();
        let mut jobs = lane.jobs();
        jobs.push_back(job);
        if jobs.len() == 1 {
            state.ready[urgency as usize].push_back(Arc::clone(lane));
        }
        drop(jobs);
        if state.idle > 0 {
            drop(state);
            self.wanted.notify_one();
            return true;
        }
        if state.threads < self.threads_max {
            let pool = Arc::clone(self);
            let started = std::thread::Builder::new().name("work".into()).spawn(move || pool.run());
            state.threads += usize::from(started.is_ok());
        }
        if state.threads == 0 {
            // No thread has seen it, and none will.
            lane.jobs().pop_back();
        }
        state.threads > 0
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.next() {
                drop(state);
                job();
                state = self.state();
                continue;
            }
            state.idle += 1;
            let waited = self.wanted.wait_timeout(state, self.idle);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.ready.iter().all(VecDeque::is_empty) {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// An answer's token and what the computation gave; `None` where it failed.
type Answer<T> = (u64, Option<T>);

/// What a part and its computations share.
struct Answers<T> {
    done: Mutex<VecDeque<Answer<T>>>,
    /// Nobody fetches answers any more.
    closed: AtomicBool,
    waker: Waker,
}

/// The computations of a layer's part in one queue, as
/// [`OpenContext::work`](crate::OpenContext::work) gave it. When one is done, the part is woken
/// ([`advance`](crate::LayerQueue::advance)) and fetches its answer ([`answer`](Self::answer)).
///
/// A computation owns what it works on. It must not read a request's buffers, which are the guest's
/// memory: the guest may write to it meanwhile.
///
/// Computations that have not begun when this is dropped never do.
pub struct Work<T: Send + 'static> {
    urgency: Urgency,
    lane: Arc<Lane>,
    answers: Arc<Answers<T>>,
    under_way: usize,
    /// Those of all parts of the queue.
    of_queue: Arc<AtomicUsize>,
    /// `None` computes at once: for a clock that is simulated, so that a run can be repeated.
    pool: Option<Arc<Pool>>,
}

impl<T: Send + 'static> Work<T> {
    pub(crate) fn new(
        urgency: Urgency,
        waker: Waker,
        of_queue: &Arc<AtomicUsize>,
        simulated: bool,
    ) -> Self {
        let pool = (!simulated).then(|| Arc::clone(Pool::of_process()));
        let answers = Answers { done: Mutex::default(), closed: AtomicBool::new(false), waker };
        Self {
            urgency,
            lane: Arc::default(),
            answers: Arc::new(answers),
            under_way: 0,
            of_queue: Arc::clone(of_queue),
            pool,
        }
    }

    /// Has a thread compute `job`. Returns whether that is so: not where 256 are under way, and not
    /// where the host has no thread left. The part then computes it itself, or waits for an answer.
    pub fn begin(&mut self, token: u64, job: impl FnOnce() -> T + Send + 'static) -> bool {
        if self.under_way >= UNDER_WAY_MAX {
            return false;
        }
        let answers = Arc::clone(&self.answers);
        let job = move || {
            if answers.closed.load(Ordering::Acquire) {
                return;
            }
            let answer = catch_unwind(AssertUnwindSafe(job)).ok();
            answers.done.lock().unwrap_or_else(PoisonError::into_inner).push_back((token, answer));
            answers.waker.wake();
        };
        match &self.pool {
            None => job(),
            Some(pool) if pool.add(&self.lane, self.urgency, Box::new(job)) => {}
            Some(_) => return false,
        }
        self.under_way += 1;
        self.of_queue.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The token and the result of a computation that is done, in whatever order they come. The
    /// result is `None` where the computation has panicked.
    pub fn answer(&mut self) -> Option<(u64, Option<T>)> {
        let answer =
            self.answers.done.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        self.under_way -= 1;
        self.of_queue.fetch_sub(1, Ordering::Relaxed);
        Some(answer)
    }

    /// How many have begun whose answer was not [fetched](Self::answer).
    pub fn under_way(&self) -> usize {
        self.under_way
    }
}

impl<T: Send + 'static> Drop for Work<T> {
    fn drop(&mut self) {
        self.answers.closed.store(true, Ordering::Release);
        let jobs = std::mem::take(&mut *self.lane.jobs());
        // What they own is dropped without the lock.
        drop(jobs);
        self.of_queue.fetch_sub(self.under_way, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

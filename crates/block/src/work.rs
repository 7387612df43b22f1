//! Computations of layers, on threads that serve no queue.
//!
//! A queue's thread serves many requests, perhaps of several queues: hashing or compressing a large
//! request would delay all of them. A layer's part hands such a computation to its [`Work`], and
//! fetches the answer when it is woken. The threads belong to the process. There are at most as
//! many as processors that it may use. They start when they are needed and end after an idle time.
//!
//! No part's computations delay those of another part for long: the threads serve the parts in
//! rotation, one computation each. Computations that requests wait for have priority over
//! background computations, except that one of [`BACKGROUND_SHARE`] is a background one, so that
//! these make progress too.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::waker::Waker;

/// The most computations of a part in flight.
const IN_FLIGHT_MAX: usize = 256;
/// While requests wait for computations, one of this many computations is a background one.
const BACKGROUND_SHARE: u32 = 8;
/// The idle time after which a thread of the process ends.
const IDLE: Duration = Duration::from_secs(5);

/// The urgency of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A request waits for it.
    Request,
    /// It is part of background work; no request waits for it.
    Background,
}

type Job = Box<dyn FnOnce() + Send>;

/// The computations of one part that have not started.
#[derive(Default)]
struct Lane {
    jobs: Mutex<VecDeque<Job>>,
}

impl Lane {
    fn jobs(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.jobs.lock()
    }
}

/// The threads, and the computations that wait for them.
struct Pool {
    state: Mutex<State>,
    wanted: Condvar,
    threads_max: usize,
    /// The idle time after which a thread ends.
    idle: Duration,
}

#[derive(Default)]
struct State {
    /// Lanes with computations that have not started, in the order of service: first the lanes that
    /// requests wait for, then the background lanes.
    ready: [VecDeque<Arc<Lane>>; 2],
    /// The number of computations for requests since the last background computation.
    for_requests: u32,
    threads: usize,
    idle: usize,
}

impl State {
    /// Takes the next computation.
    fn next(&mut self) -> Option<Job> {
        loop {
            let others = self.ready[0].is_empty()
                || self.for_requests >= BACKGROUND_SHARE - 1 && !self.ready[1].is_empty();
            let ready = &mut self.ready[usize::from(others)];
            let lane = ready.pop_front()?;
            let mut jobs = lane.jobs();
            // The lane is empty if its part has been dropped.
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

    /// The pool of the process.
    fn of_process() -> &'static Arc<Self> {
        static POOL: OnceLock<Arc<Pool>> = OnceLock::new();
        let threads_max = || std::thread::available_parallelism().map_or(1, usize::from);
        POOL.get_or_init(|| Self::new(threads_max(), IDLE))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues `job` in `lane`. Returns whether there is a thread to run it.
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
            // No thread has seen the job, and none will.
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
            let waited = self.wanted.wait_for(&mut state, self.idle);
            state.idle -= 1;
            if waited.timed_out() && state.ready.iter().all(VecDeque::is_empty) {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// A computation's token and result; `None` if it panicked.
type Answer<T> = (u64, Option<T>);

/// State that a part and its computations share.
struct Answers<T> {
    done: Mutex<VecDeque<Answer<T>>>,
    /// Whether the part has been dropped, so that no answers are fetched.
    closed: AtomicBool,
    waker: Waker,
}

/// The computations of a layer's part in one queue, made by
/// [`OpenContext::work`](crate::OpenContext::work). When a computation has finished, the part is
/// woken ([`advance`](crate::LayerQueue::advance)) and fetches its answer
/// ([`answer`](Self::answer)).
///
/// A computation owns its input. It must not read a request's buffers: they are the guest's memory,
/// which the guest may change meanwhile.
///
/// Computations that have not started when this is dropped never start.
pub struct Work<T: Send + 'static> {
    urgency: Urgency,
    lane: Arc<Lane>,
    answers: Arc<Answers<T>>,
    in_flight: usize,
    /// The number of computations of all parts of the queue in flight.
    of_queue: Arc<AtomicUsize>,
    /// `None` computes in the calling thread: for a simulated clock, so that a run can be repeated.
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
            in_flight: 0,
            of_queue: Arc::clone(of_queue),
            pool,
        }
    }

    /// Lets a thread compute `job`. Returns false if 256 computations of this part are in flight,
    /// or if the host cannot provide a thread. The part then computes the job itself, or waits for
    /// an answer.
    pub fn begin(&mut self, token: u64, job: impl FnOnce() -> T + Send + 'static) -> bool {
        if self.in_flight >= IN_FLIGHT_MAX {
            return false;
        }
        let answers = Arc::clone(&self.answers);
        let job = move || {
            if answers.closed.load(Ordering::Acquire) {
                return;
            }
            let answer = catch_unwind(AssertUnwindSafe(job)).ok();
            answers.done.lock().push_back((token, answer));
            answers.waker.wake();
        };
        match &self.pool {
            None => job(),
            Some(pool) if pool.add(&self.lane, self.urgency, Box::new(job)) => {}
            Some(_) => return false,
        }
        self.in_flight += 1;
        self.of_queue.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The token and the result of a finished computation, in any order. The result is `None` if
    /// the computation has panicked.
    pub fn answer(&mut self) -> Option<(u64, Option<T>)> {
        let answer = self.answers.done.lock().pop_front()?;
        self.in_flight -= 1;
        self.of_queue.fetch_sub(1, Ordering::Relaxed);
        Some(answer)
    }

    /// The number of computations whose answers have not been [fetched](Self::answer).
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl<T: Send + 'static> Drop for Work<T> {
    fn drop(&mut self) {
        self.answers.closed.store(true, Ordering::Release);
        let jobs = std::mem::take(&mut *self.lane.jobs());
        // The jobs' contents are dropped without the lock.
        drop(jobs);
        self.of_queue.fetch_sub(self.in_flight, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

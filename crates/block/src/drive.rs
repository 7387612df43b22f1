//! The loop of a thread that serves queues.
//!
//! A [`Source`] brings requests to one queue: a guest's ring, a client's connection. A thread
//! drives one or more sources with one reactor: it takes their requests, passes them down, gives
//! back the completed ones, and sleeps when there is no work. No source waits for another: if a
//! disk does not answer, its requests stay in flight, and the thread continues with the other
//! sources.

mod attend;
mod mailbox;
mod spin;
mod thread;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_reactor::{Event, OperationOwner, OwnerGroup, Pending, Reactor};

use crate::clock::Clock;
use crate::stack::Stack;
pub use attend::{Attendance, Attended};
pub use mailbox::{Mail, Mailbox, Wake};
use spin::{Spin, preemptions};
pub use thread::DriveThread;

/// The number of polls of the sources between two readings of the clock.
const POLLS: u32 = 64;
/// How long a failed thread waits for the kernel's operations to end, and how long the layers of an
/// ended queue may take to finish their work.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// How long a queue then waits for requests of its layers that
/// [may be left](crate::LayerQueue::may_be_left).
const LEFT_LIMIT_NS: u64 = 2_000_000_000;
/// How long a thread pauses after the kernel has refused its ring.
const PAUSE: Duration = Duration::from_millis(20);
const WAKE: u64 = 0;

/// A source of requests of one queue. Only its thread calls it.
pub trait RequestSource {
    /// The queue's stack.
    fn stack(&mut self) -> &mut Stack;

    /// Further stacks of the source, which the thread drives as it does that of the queue. None of
    /// them has a request in flight when the source [has ended](Self::is_ended), unless it has
    /// [failed](Self::fail).
    fn further_stacks(&mut self) -> &mut [Stack] {
        &mut []
    }

    /// The group of the source's own owners, separate from that of its stack.
    fn group(&self) -> OwnerGroup;

    /// Takes at most a batch of new requests and begins them. Returns whether there were any.
    fn take(&mut self, reactor: &mut Reactor) -> bool;

    /// Gives back completed requests, and carries out requests of other threads. Returns whether
    /// there was anything to do.
    fn give(&mut self, reactor: &mut Reactor) -> bool;

    /// Handles an event of the source's own owners.
    fn signal(&mut self, event: &Event, reactor: &mut Reactor);

    /// Whether there may be something to [take](Self::take). It must be cheap: the thread calls it
    /// repeatedly while it polls.
    fn is_ready(&mut self, reactor: &mut Reactor) -> bool;

    /// Called before the thread polls for work and then sleeps: the source does the work that is
    /// due by `now_ns`. Returns when the next work is due, in nanoseconds of the system clock;
    /// `u64::MAX` is never.
    fn rest(&mut self, now_ns: u64, reactor: &mut Reactor) -> u64;

    /// Called before the thread sleeps: from now on new requests have to wake it. Returns whether
    /// there already are some, so that it does not sleep.
    fn arm(&mut self, reactor: &mut Reactor) -> bool;

    /// Called after the thread has woken: it polls for new requests again, which need not wake it.
    fn disarm(&mut self);

    /// Called when the kernel has refused the thread's ring: the source must end.
    fn fail(&mut self, error: &io::Error);

    /// Whether the source has ended. It then has no requests in flight, unless it has
    /// [failed](Self::fail).
    fn is_ended(&self) -> bool;
}

/// Calls `visit` with each stack of a source.
fn each_stack<S: RequestSource>(source: &mut S, mut visit: impl FnMut(&mut Stack)) {
    visit(source.stack());
    source.further_stacks().iter_mut().for_each(visit);
}

/// When the next work of a source's stacks is due, in nanoseconds; `u64::MAX` is never.
fn deadline_of<S: RequestSource>(source: &mut S) -> u64 {
    let mut deadline_ns = u64::MAX;
    each_stack(source, |stack| {
        deadline_ns = deadline_ns.min(stack.deadline_ns().unwrap_or(u64::MAX));
    });
    deadline_ns
}

/// The stack of a source to which an event belongs.
fn owner_of<'s, S: RequestSource>(source: &'s mut S, event: &Event) -> Option<&'s mut Stack> {
    if source.stack().owns(event) {
        return Some(source.stack());
    }
    source.further_stacks().iter_mut().find(|stack| stack.owns(event))
}

/// A change for the thread to make.
type Change<S> = Box<dyn FnOnce(&mut Drive<S>) + Send>;

/// A source that has ended, while its layers still finish their work.
struct Leaving<S> {
    source: S,
    until_ns: u64,
    /// The latest end if only requests that may be left are in flight.
    left_until_ns: u64,
}

impl<S> Leaving<S> {
    /// When to look whether only requests that may be left are in flight, in nanoseconds.
    fn left_deadline_ns(&self, now_ns: u64) -> u64 {
        if self.left_until_ns > now_ns { self.left_until_ns } else { u64::MAX }
    }
}

/// A thread's reactor and the sources that it drives.
pub struct Drive<S: RequestSource> {
    reactor: Reactor,
    group: OwnerGroup,
    pending: Pending,
    owner: OperationOwner,
    mailbox: Arc<Mailbox<Change<S>>>,
    sources: Vec<S>,
    leaving: Vec<Leaving<S>>,
    /// How long to poll while no requests are in flight, and how long while some are. The two are
    /// separate because a disk that completes requests in groups takes long, while the client's
    /// answer to a group comes soon.
    spins: [Spin; 2],
    clock: Clock,
    events: Vec<Event>,
    ended: bool,
}

impl<S: RequestSource> Drive<S> {
    /// A loop without sources, whose ring has `entries` submissions. It polls for work for at most
    /// `spin_ns` nanoseconds before it sleeps.
    fn new(entries: u32, spin_ns: u64, mailbox: Arc<Mailbox<Change<S>>>) -> io::Result<Self> {
        let mut reactor = Reactor::new(entries)?;
        let group = reactor.begin_group();
        let owner = reactor.register();
        reactor.watch_always(owner, WAKE, mailbox.wake().descriptor());
        Ok(Self {
            group,
            pending: reactor.pending(),
            reactor,
            owner,
            mailbox,
            sources: Vec::new(),
            leaving: Vec::new(),
            spins: [Spin::new(spin_ns), Spin::without_trials(spin_ns)],
            clock: Clock::System,
            events: Vec::new(),
            ended: false,
        })
    }

    /// Adds the source that `open` makes.
    fn add(&mut self, open: impl FnOnce(&mut Reactor) -> io::Result<S>) -> io::Result<()> {
        let group = self.reactor.begin_group();
        let source = open(&mut self.reactor);
        self.reactor.enter(self.group, &self.pending);
        match source {
            Ok(source) => {
                debug_assert_eq!(
                    source.group(),
                    group,
                    "a source registers with the current group"
                );
                self.sources.push(source);
                Ok(())
            }
            Err(error) => {
                self.reactor.retire_group(group);
                Err(error)
            }
        }
    }

    fn run(&mut self) {
        while !self.ended || !self.leaving.is_empty() {
            let mut busy = false;
            for source in &mut self.sources {
                busy |= source.take(&mut self.reactor);
            }
            busy |= self.take_events();
            let mut ended = false;
            for source in &mut self.sources {
                busy |= source.give(&mut self.reactor);
                ended |= source.is_ended();
            }
            if ended {
                self.remove_ended();
            }
            if !self.leaving.is_empty() {
                self.drop_finished();
            }
            if self.mailbox.is_pending() {
                busy = true;
                while let Mail::Due(change) = self.mailbox.next(|_| true) {
                    change(self);
                }
            }
            if !busy {
                self.idle();
            }
        }
    }

    /// Handles the reactor's events, and due work of the stacks.
    fn take_events(&mut self) -> bool {
        let mut busy = false;
        if self.reactor.is_ready() {
            let mut events = std::mem::take(&mut self.events);
            if let Err(error) = self.reactor.collect(&mut events) {
                self.fail(&error);
            }
            for event in events.drain(..) {
                busy = true;
                self.dispatch(&event);
            }
            self.events = events;
        }
        let leaving = self.leaving.iter_mut().map(|leaving| &mut leaving.source);
        for source in self.sources.iter_mut().chain(leaving) {
            each_stack(source, |stack| {
                if stack.deadline_ns().is_some_and(|deadline| deadline <= stack.now_ns()) {
                    stack.advance(&mut self.reactor);
                    busy = true;
                }
            });
        }
        if busy {
            self.submit();
        }
        busy
    }

    /// Submits what is queued. Makes no system call if there is nothing.
    fn submit(&mut self) {
        if self.reactor.has_unsubmitted() {
            if let Err(error) = self.reactor.submit() {
                self.fail(&error);
            }
        }
    }

    /// Passes `event` to its owner.
    fn dispatch(&mut self, event: &Event) {
        if event.group == self.group {
            self.mailbox.wake().take();
            if !event.more {
                self.reactor.watch_always(self.owner, WAKE, self.mailbox.wake().descriptor());
            }
            return;
        }
        for source in &mut self.sources {
            if source.group() == event.group {
                return source.signal(event, &mut self.reactor);
            }
            if let Some(stack) = owner_of(source, event) {
                return stack.event(event, &mut self.reactor);
            }
        }
        for leaving in &mut self.leaving {
            if let Some(stack) = owner_of(&mut leaving.source, event) {
                return stack.event(event, &mut self.reactor);
            }
        }
    }

    /// Removes the sources that have ended, and closes their queues.
    #[cold]
    fn remove_ended(&mut self) {
        let now_ns = self.clock.now_ns();
        let until_ns = now_ns.saturating_add(DRAIN_LIMIT.as_nanos() as u64);
        let left_until_ns = now_ns.saturating_add(LEFT_LIMIT_NS);
        while let Some(index) = self.sources.iter().position(RequestSource::is_ended) {
            let mut source = self.sources.remove(index);
            self.reactor.retire_group(source.group());
            each_stack(&mut source, |stack| {
                if stack.in_flight() == 0 {
                    stack.close(&mut self.reactor);
                }
            });
            self.leaving.push(Leaving { source, until_ns, left_until_ns });
        }
    }

    /// Drops removed sources whose layers have finished or have taken too long.
    #[cold]
    fn drop_finished(&mut self) {
        let now_ns = self.clock.now_ns();
        for leaving in &mut self.leaving {
            let stack = leaving.source.stack();
            let has_finished = stack.is_drained() && !stack.is_pending();
            let is_left = stack.has_finished() && leaving.left_until_ns <= now_ns;
            if is_left && !has_finished {
                self.reactor.leave_behind();
            }
            if has_finished || is_left || leaving.until_ns <= now_ns {
                each_stack(&mut leaving.source, |stack| stack.end(&mut self.reactor));
                leaving.until_ns = 0;
            }
        }
        self.leaving.retain(|leaving| leaving.until_ns > 0);
    }

    /// Ends the sources after the kernel has refused the ring. The thread continues without a ring
    /// until it has to end.
    #[cold]
    fn fail(&mut self, error: &io::Error) {
        for source in &mut self.sources {
            source.fail(error);
        }
        std::thread::sleep(PAUSE);
    }

    /// Polls for work, for a time that depends on the success of recent polls, then sleeps.
    fn idle(&mut self) {
        let mut done = false;
        let mut awaited = false;
        for source in &mut self.sources {
            each_stack(source, |stack| {
                stack.advance(&mut self.reactor);
                done |= stack.has_completed();
                awaited |= stack.in_flight() > 0;
            });
        }
        for leaving in &mut self.leaving {
            each_stack(&mut leaving.source, |stack| stack.advance(&mut self.reactor));
        }
        if done {
            return;
        }
        let start_ns = self.clock.now_ns();
        let mut deadline_ns = u64::MAX;
        for source in &mut self.sources {
            deadline_ns = deadline_ns.min(source.rest(start_ns, &mut self.reactor));
            deadline_ns = deadline_ns.min(deadline_of(source));
        }
        for leaving in &mut self.leaving {
            deadline_ns = deadline_ns.min(leaving.until_ns).min(leaving.left_deadline_ns(start_ns));
            deadline_ns = deadline_ns.min(deadline_of(&mut leaving.source));
        }
        let spin = usize::from(awaited);
        let poll_ns = self.spins[spin].limit_ns(start_ns).min(deadline_ns.saturating_sub(start_ns));
        if poll_ns > 0 {
            self.submit();
        }
        let Some(now_ns) = self.poll(spin, start_ns, poll_ns) else { return };
        for index in 0..self.sources.len() {
            if self.sources[index].arm(&mut self.reactor) {
                self.sources[..=index].iter_mut().for_each(RequestSource::disarm);
                return self.submit();
            }
        }
        // Submits, too: a thread that does not poll makes one system call.
        let limit = (deadline_ns != u64::MAX)
            .then(|| Duration::from_nanos(deadline_ns.saturating_sub(now_ns)));
        if let Err(error) = self.reactor.wait(limit) {
            self.fail(&error);
        }
        self.sources.iter_mut().for_each(RequestSource::disarm);
        self.spins[spin].slept(self.clock.now_ns().saturating_sub(start_ns));
    }

    /// Polls for work, for at most `limit_ns` nanoseconds. Returns `None` if there is some,
    /// otherwise the time at the end of the poll, in nanoseconds.
    fn poll(&mut self, spin: usize, start_ns: u64, limit_ns: u64) -> Option<u64> {
        let mut now_ns = start_ns;
        while now_ns - start_ns < limit_ns {
            for _ in 0..POLLS {
                let reactor = &mut self.reactor;
                if self.sources.iter_mut().any(|source| source.is_ready(reactor))
                    || self.reactor.is_ready()
                {
                    self.spins[spin].found();
                    return None;
                }
                std::hint::spin_loop();
            }
            let before_ns = now_ns;
            now_ns = self.clock.now_ns();
            if !self.spins[spin].step(before_ns, now_ns, preemptions) {
                break;
            }
        }
        Some(now_ns)
    }
}

impl<S: RequestSource> Drop for Drive<S> {
    /// After a failure requests may be in flight, and the kernel may still use their memory. This
    /// waits for its operations; the owners of the memory [keep](Stack::is_pending) what the kernel
    /// still uses after that.
    fn drop(&mut self) {
        self.reactor.drain(DRAIN_LIMIT);
    }
}

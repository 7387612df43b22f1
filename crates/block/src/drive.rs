//! The loop of a thread that serves queues.
//!
//! A [`Source`] brings requests to one queue: a guest's ring, a client's connection. A thread drives
//! one or more of them over one reactor: it takes what they have, hands it down, gives back what is
//! done, and sleeps where nothing is left to do. No source waits for another: a disk that does not
//! answer keeps its requests in flight, and the thread goes on with the others.

mod mailbox;
mod spin;
mod thread;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_reactor::{Event, Group, Owner, Pending, Reactor};

use crate::clock::Clock;
use crate::stack::Stack;
pub use mailbox::{Mail, Mailbox, Wake};
use spin::{Spin, preemptions};
pub use thread::DriveThread;

/// How often the sources are looked at between two looks at the clock.
const LOOKS: u32 = 64;
/// How long a thread that fails waits for what the kernel still does, and how long the layers of a
/// queue that has ended may take to finish what they have begun.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// How long a thread pauses whose ring the kernel has refused.
const PAUSE: Duration = Duration::from_millis(20);
const WAKE: u64 = 0;

/// What brings requests to a queue. Its thread alone calls it.
pub trait Source {
    /// The queue's way through its disk.
    fn stack(&mut self) -> &mut Stack;

    /// The owners of the source itself, beside those of its stack.
    fn group(&self) -> Group;

    /// Takes new requests and begins them, a batch at most. Returns whether there were any.
    fn take(&mut self, reactor: &mut Reactor) -> bool;

    /// Gives back what is done, and does what other threads have asked for. Returns whether there
    /// was anything to do.
    fn give(&mut self, reactor: &mut Reactor) -> bool;

    /// An event of the source's own owners.
    fn signal(&mut self, event: &Event, reactor: &mut Reactor);

    /// Whether there may be something to [take](Self::take). Cheap: the thread asks it again and
    /// again while it looks for work.
    fn is_ready(&mut self, reactor: &mut Reactor) -> bool;

    /// The thread is about to look for work and then to sleep: the source does what is due by
    /// `now_ns`, and says when it wants to be asked again; `u64::MAX` is never.
    fn rest(&mut self, now_ns: u64, reactor: &mut Reactor) -> u64;

    /// The thread sleeps next: new requests are to wake it. Returns whether there are some already,
    /// so that it does not sleep.
    fn arm(&mut self, reactor: &mut Reactor) -> bool;

    /// The thread is awake and looks for new requests by itself.
    fn disarm(&mut self);

    /// The kernel has refused the thread's ring: nothing goes on.
    fn fail(&mut self, error: &io::Error);

    /// Whether the source is at its end. Nothing of its own is in flight then, unless it has
    /// [failed](Self::fail).
    fn is_ended(&self) -> bool;
}

/// A change that the thread is to make.
type Change<S> = Box<dyn FnOnce(&mut Drive<S>) + Send>;

/// A source that has ended, whose layers have not.
struct Leaving<S> {
    source: S,
    until_ns: u64,
}

/// A thread's reactor and the sources that it drives.
pub struct Drive<S: Source> {
    reactor: Reactor,
    group: Group,
    pending: Pending,
    owner: Owner,
    mailbox: Arc<Mailbox<Change<S>>>,
    sources: Vec<S>,
    leaving: Vec<Leaving<S>>,
    /// How long to look for new requests, and, where disks work on something, for what comes first
    /// of the two. A disk that completes its requests in groups is awaited long, the answer to a
    /// group is not: what the one teaches does not hold for the other.
    spins: [Spin; 2],
    clock: Clock,
    events: Vec<Event>,
    ended: bool,
}

impl<S: Source> Drive<S> {
    /// A loop without sources, whose ring has room for `entries` submissions and which looks for
    /// work for `spin_ns` at the longest before it sleeps.
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
                    "a source registers with the group it finds"
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
                self.let_go();
            }
            if !self.leaving.is_empty() {
                self.see_off();
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

    /// Handles what the reactor has, and what is due.
    fn take_events(&mut self) -> bool {
        let mut busy = false;
        if self.reactor.is_ready() {
            let mut events = std::mem::take(&mut self.events);
            if let Err(error) = self.reactor.collect(&mut events) {
                self.fail(&error);
            }
            for event in events.drain(..) {
                busy = true;
                self.hand_out(&event);
            }
            self.events = events;
        }
        let leaving = self.leaving.iter_mut().map(|leaving| &mut leaving.source);
        for source in self.sources.iter_mut().chain(leaving) {
            let stack = source.stack();
            if stack.deadline_ns().is_some_and(|deadline| deadline <= stack.now_ns()) {
                stack.advance(&mut self.reactor);
                busy = true;
            }
        }
        if busy && self.reactor.has_unsubmitted() {
            if let Err(error) = self.reactor.submit() {
                self.fail(&error);
            }
        }
        busy
    }

    /// Gives `event` to whom it belongs.
    fn hand_out(&mut self, event: &Event) {
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
            if source.stack().owns(event) {
                return source.stack().event(event, &mut self.reactor);
            }
        }
        for leaving in &mut self.leaving {
            if leaving.source.stack().owns(event) {
                return leaving.source.stack().event(event, &mut self.reactor);
            }
        }
    }

    /// Parts with the sources that have ended.
    #[cold]
    fn let_go(&mut self) {
        let until_ns = self.clock.now_ns().saturating_add(DRAIN_LIMIT.as_nanos() as u64);
        while let Some(index) = self.sources.iter().position(Source::is_ended) {
            let mut source = self.sources.remove(index);
            self.reactor.retire_group(source.group());
            if source.stack().in_flight() == 0 {
                source.stack().close(&mut self.reactor);
            }
            self.leaving.push(Leaving { source, until_ns });
        }
    }

    /// Drops what has left as soon as its layers have finished.
    #[cold]
    fn see_off(&mut self) {
        let now_ns = self.clock.now_ns();
        for leaving in &mut self.leaving {
            let stack = leaving.source.stack();
            if stack.is_drained() && !stack.is_under_way() || leaving.until_ns <= now_ns {
                stack.end(&mut self.reactor);
                leaving.until_ns = 0;
            }
        }
        self.leaving.retain(|leaving| leaving.until_ns > 0);
    }

    /// Ends the sources. The thread goes on without a ring: it is asked for nothing but its end.
    #[cold]
    fn fail(&mut self, error: &io::Error) {
        for source in &mut self.sources {
            source.fail(error);
        }
        std::thread::sleep(PAUSE);
    }

    /// Looks for work for a while if that pays, then sleeps.
    fn idle(&mut self) {
        let mut done = false;
        let mut awaited = false;
        for source in &mut self.sources {
            let stack = source.stack();
            stack.advance(&mut self.reactor);
            done |= stack.has_completed();
            awaited |= stack.in_flight() > 0;
        }
        for leaving in &mut self.leaving {
            leaving.source.stack().advance(&mut self.reactor);
        }
        if done {
            return;
        }
        let start_ns = self.clock.now_ns();
        let mut deadline_ns = u64::MAX;
        for source in &mut self.sources {
            deadline_ns = deadline_ns.min(source.rest(start_ns, &mut self.reactor));
            deadline_ns = deadline_ns.min(source.stack().deadline_ns().unwrap_or(u64::MAX));
        }
        for leaving in &mut self.leaving {
            deadline_ns = deadline_ns.min(leaving.until_ns);
            deadline_ns = deadline_ns.min(leaving.source.stack().deadline_ns().unwrap_or(u64::MAX));
        }
        if self.reactor.has_unsubmitted() {
            if let Err(error) = self.reactor.submit() {
                self.fail(&error);
            }
        }
        let spin = usize::from(awaited);
        let Some(now_ns) = self.look(spin, start_ns, deadline_ns) else { return };
        for index in 0..self.sources.len() {
            if self.sources[index].arm(&mut self.reactor) {
                self.sources[..=index].iter_mut().for_each(Source::disarm);
                return;
            }
        }
        let limit = (deadline_ns != u64::MAX)
            .then(|| Duration::from_nanos(deadline_ns.saturating_sub(now_ns)));
        if let Err(error) = self.reactor.wait(limit) {
            self.fail(&error);
        }
        self.sources.iter_mut().for_each(Source::disarm);
        self.spins[spin].slept(self.clock.now_ns().saturating_sub(start_ns));
    }

    /// Looks for work. Returns the time once that pays no more; `None` where there is some.
    fn look(&mut self, spin: usize, start_ns: u64, deadline_ns: u64) -> Option<u64> {
        let limit_ns =
            self.spins[spin].limit_ns(start_ns).min(deadline_ns.saturating_sub(start_ns));
        let mut now_ns = start_ns;
        while now_ns - start_ns < limit_ns {
            for _ in 0..LOOKS {
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

impl<S: Source> Drop for Drive<S> {
    /// After a failure requests may be in flight, and the kernel may still use their memory: it is
    /// waited for, and what it still has is [kept](Stack::is_under_way) by those who own it.
    fn drop(&mut self) {
        self.reactor.drain(DRAIN_LIMIT);
    }
}

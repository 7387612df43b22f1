//! Requests whose pages the guest's pager has taken away.
//!
//! An access to such a page is refused, and the pager knows that it is wanted. The request is put
//! aside and begun again from its descriptors, a little later each time, until its pages are there;
//! the ring and its thread go on meanwhile. It stays recorded as in flight, and a command that
//! waits until nothing is in flight does not wait for it. After [`ABSENT_TIME_NS`] it fails; while
//! the pager brings one of its pages in, which may be on a slow disk, after [`ARRIVING_TIME_NS`].
//!
//! A failure has to be written to the request's status byte. Without it, a guest would take the
//! byte that it finds there for the result. So while the page of that byte is away, too, the
//! request stays aside, as the guest's own processor would wait for that page; a ring that stops
//! then does not give it back.

use fathom_block::ErrorKind;
use fathom_guest_memory::{Purpose, absences, arrivals};
use fathom_reactor::Reactor;

use super::super::request;
use super::{BATCH, Taken, Worker};

/// How long a request waits for its pages, in nanoseconds.
const ABSENT_TIME_NS: u64 = 5_000_000_000;
/// The same while one of them is on its way: longer than a pager tries to read it.
const ARRIVING_TIME_NS: u64 = 75_000_000_000;
/// The shortest and the longest pause between two attempts, in nanoseconds.
const PAUSE_MIN_NS: u64 = 50_000;
const PAUSE_MAX_NS: u64 = 5_000_000;
/// The pause when only requests are left that cannot even fail.
const PAUSE_STUCK_NS: u64 = 100_000_000;

/// A request that waits.
#[derive(Clone, Copy)]
struct AbsentRequest {
    head: u16,
    /// When it began to wait, in nanoseconds.
    since_ns: u64,
    /// Whether it has failed, and its status byte is away.
    has_failed: bool,
}

/// The requests of a ring that wait for pages.
#[derive(Default)]
pub(super) struct AbsentRequests {
    list: Vec<AbsentRequest>,
    /// When to try again, in nanoseconds.
    due_ns: u64,
    pause_ns: u64,
    /// The one that is being begun again, with the time at which it began to wait.
    repeated: Option<AbsentRequest>,
    was_reported: bool,
}

impl AbsentRequests {
    /// When to try again, in nanoseconds; `u64::MAX` if nothing waits.
    fn due_ns(&self) -> u64 {
        if self.list.is_empty() { u64::MAX } else { self.due_ns }
    }

    /// Whether the request of `head` is the one that was put aside last.
    fn is_last(&self, head: u16) -> bool {
        self.list.last().is_some_and(|request| request.head == head)
    }
}

/// What became of the report of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportedFailure {
    /// The guest has it.
    Reported,
    /// The request has no status byte.
    NoStatus,
    /// The byte, or the way to it, is away.
    Absent,
}

impl Worker {
    /// The requests that are put aside: those that were taken back from the disk's layers, and
    /// those that wait for pages.
    pub(super) fn put_aside(&self) -> impl Iterator<Item = u16> + '_ {
        let absent = self.absent.list.iter().map(|request| request.head);
        self.deferred.iter().copied().chain(absent)
    }

    /// Puts a request aside if a page was away since there were `before` absences. Returns whether
    /// it was.
    pub(super) fn wait_for_pages(&mut self, head: u16, before: u64) -> bool {
        if absences() == before {
            return false;
        }
        let now_ns = self.stack.now_ns();
        self.taken[usize::from(head)] = Taken::FREE;
        let absent = &mut self.absent;
        let again = absent.repeated.take().filter(|request| request.head == head);
        if again.is_none() {
            absent.pause_ns = PAUSE_MIN_NS;
            absent.due_ns = now_ns.saturating_add(PAUSE_MIN_NS);
        }
        absent.list.push(again.unwrap_or(AbsentRequest {
            head,
            since_ns: now_ns,
            has_failed: false,
        }));
        true
    }

    /// Whether requests that wait for pages are to be begun again.
    pub(super) fn is_absent_due(&self) -> bool {
        !self.absent.list.is_empty() && self.absent_deadline_ns() <= self.stack.now_ns()
    }

    /// Whether the next request that waits for pages has to be begun alone, and others are in
    /// flight.
    pub(super) fn is_absent_held(&self) -> bool {
        self.careful && self.stack.in_flight() > 0 && self.absent.due_ns() <= self.stack.now_ns()
    }

    /// Begins requests again that wait for pages, or has them fail.
    pub(super) fn repeat_absent(&mut self, reactor: &Reactor) {
        let now_ns = self.stack.now_ns();
        let all = std::mem::take(&mut self.absent.list);
        let count = all.len().min(if self.careful { 1 } else { BATCH });
        let (now, later) = all.split_at(count);
        self.absent.list.extend(later);
        let mut are_stuck = true;
        for request in now {
            if request.has_failed {
                self.fail(request.head);
                are_stuck &= self.absent.is_last(request.head);
                continue;
            }
            self.absent.repeated = Some(*request);
            let before = arrivals();
            self.begin(request.head, reactor);
            self.absent.repeated = None;
            // Its pages may have come while the ring did something else.
            let time_ns = if arrivals() == before { ABSENT_TIME_NS } else { ARRIVING_TIME_NS };
            let is_over = now_ns.saturating_sub(request.since_ns) >= time_ns;
            if is_over && self.absent.is_last(request.head) {
                self.absent.list.pop();
                self.fail_absent(request.head);
            } else {
                are_stuck = false;
            }
        }
        are_stuck &= later.is_empty();
        // The attempts themselves may have taken longer than the pause.
        let now_ns = self.stack.now_ns();
        let absent = &mut self.absent;
        absent.pause_ns = absent.pause_ns.saturating_mul(2).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
        let pause_ns = if are_stuck { PAUSE_STUCK_NS } else { absent.pause_ns };
        absent.due_ns = now_ns.saturating_add(pause_ns);
    }

    fn fail_absent(&mut self, head: u16) {
        if !std::mem::replace(&mut self.absent.was_reported, true) {
            tracing::error!(
                disk = self.disk.name(),
                vm = self.disk.vm(),
                "requests fail: the guest's pager has not brought their pages in; see `fathom pager \
                 list`"
            );
        }
        self.fail(head);
    }

    /// Has the request of `head` fail, of which only the descriptors are known. As long as this
    /// cannot be reported, it waits.
    pub(super) fn fail(&mut self, head: u16) {
        match self.report_failure(head) {
            ReportedFailure::Reported => {}
            ReportedFailure::NoStatus => {
                self.return_head(head, 0);
                self.publish();
            }
            ReportedFailure::Absent => {
                if self.absent.list.is_empty() {
                    self.absent.due_ns = self.stack.now_ns().saturating_add(PAUSE_STUCK_NS);
                }
                self.absent.list.push(AbsentRequest { head, since_ns: 0, has_failed: true });
            }
        }
    }

    /// When requests that wait for pages are to be begun again, in nanoseconds.
    pub(super) fn absent_deadline_ns(&self) -> u64 {
        let is_repeated = self.is_serving() || self.finish_ns.is_some();
        // After failures of earlier daemons, each request is carried out alone.
        let is_alone = !self.careful || self.stack.in_flight() == 0;
        if is_repeated && is_alone { self.absent.due_ns() } else { u64::MAX }
    }

    /// Reports the failure of a request of which only the descriptors are known.
    pub(super) fn report_failure(&mut self, head: u16) -> ReportedFailure {
        let before = absences();
        let status = self.chain.read(&self.ring, head).ok().and_then(|()| {
            let memory = self.ring.memory();
            let status = request::cut_status(memory, &mut self.chain).ok()?;
            Some((status, memory.lease(status, 1, Purpose::Write)?))
        });
        let Some((status, status_lease)) = status else {
            let is_absent = absences() != before;
            return if is_absent { ReportedFailure::Absent } else { ReportedFailure::NoStatus };
        };
        self.taken[usize::from(head)] = Taken { left: 1, status, status_lease, ..Taken::FREE };
        self.finish(head, Err(ErrorKind::Io));
        ReportedFailure::Reported
    }

    /// Forgets the requests of these heads, which wait for pages.
    pub(super) fn forget_absent(&mut self, heads: &[u16]) {
        self.absent.list.retain(|request| !heads.contains(&request.head));
    }

    /// Forgets all requests that wait for pages. Returns their heads.
    pub(super) fn take_absent(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.absent.list).iter().map(|request| request.head).collect()
    }
}

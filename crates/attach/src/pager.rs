//! A pager at work: it serves the faults of the guest's memory until it is asked to detach.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::attach::Helpers;
use crate::counts::PagerStatus;
use crate::guard::{self, Guard};
use crate::memory::MappedMemory;
use crate::record::{PagerRecord, RecordPlace};
use crate::tripwire::Tripwire;
use crate::userfault::UserFault;
use crate::vmm::Vmm;

/// A page, in bytes.
const PAGE: u64 = 4096;
/// A missing page comes into being with its neighbours: so many pages, from a multiple of it.
pub const RUN_PAGES: u64 = 16;
const RUN: u64 = RUN_PAGES * PAGE;

/// Why serving has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeEnd {
    /// As asked.
    Asked,
    /// The VMM has ended.
    VmmEnded,
    /// No guard can be started: without one, the pager's death would stop the guest.
    Unguarded,
}

/// A pager that is attached. If it is dropped without [`detach`](Self::detach), its guard does the
/// same as after its death.
#[derive(Debug)]
pub struct Pager {
    pub(crate) vmm: Vmm,
    pub(crate) place: RecordPlace,
    pub(crate) record: PagerRecord,
    pub(crate) faults: UserFault,
    pub(crate) memory: Vec<MappedMemory>,
    pub(crate) guard: Option<Guard>,
    pub(crate) helpers: Helpers,
    pub(crate) status: Arc<Mutex<PagerStatus>>,
    pub(crate) _tripwires: Vec<Tripwire>,
}

impl Pager {
    /// The state, which other threads may read.
    pub fn status(&self) -> Arc<Mutex<PagerStatus>> {
        Arc::clone(&self.status)
    }

    /// The VMM.
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// Serves faults until `stop` is readable. It sleeps while there are none.
    ///
    /// # Errors
    /// Those of the descriptors.
    pub fn serve(&mut self, stop: BorrowedFd<'_>) -> io::Result<ServeEnd> {
        loop {
            let Some(guard) = &self.guard else { return Ok(ServeEnd::Unguarded) };
            let mut polled = [
                PollFd::new(&self.faults, PollFlags::IN),
                PollFd::new(&self.vmm, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(guard, PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let [has_faults, has_ended, is_asked, is_alone] =
                polled.map(|one| !one.revents().is_empty());
            if has_ended {
                return Ok(ServeEnd::VmmEnded);
            }
            if has_faults {
                self.serve_faults()?;
            }
            if is_asked {
                return Ok(ServeEnd::Asked);
            }
            if is_alone {
                self.replace_guard();
            }
        }
    }

    fn serve_faults(&self) -> io::Result<()> {
        let mut status = self.status.lock();
        let counts = &mut status.counts;
        self.faults.faults(|address| {
            let begun = Instant::now();
            counts.faults += 1;
            match serve_fault(&self.faults, &self.memory, address) {
                Served::Zeroed(bytes) => counts.zeroed_bytes += bytes,
                Served::Present => counts.repeated += 1,
                Served::Stray => counts.strays += 1,
                Served::Released => counts.released += 1,
            }
            counts.fault_ns.record(begun.elapsed().as_nanos() as u64, 1);
        })
    }

    fn replace_guard(&mut self) {
        if let Some(guard) = self.guard.take() {
            guard.bury();
        }
        let lock = self.place.lock.as_fd();
        self.guard = Guard::start(self.helpers.guard(), &self.faults, lock, &self.memory).ok();
        let mut status = self.status.lock();
        status.counts.guards_lost += 1;
        status.guard = self.guard.as_ref().map_or(0, Guard::process);
    }

    /// Leaves the guest's memory to the kernel again. The VMM keeps the userfaultfd, which then
    /// does nothing, for the next pager.
    pub fn detach(mut self) -> PagerStatus {
        guard::release(&self.faults, &self.memory);
        self.record.is_attached = false;
        // A record that says otherwise costs nothing: the next pager adopts what there is.
        let _ = self.place.write(&self.record);
        if let Some(guard) = self.guard.take() {
            guard.end();
        }
        let has_ended = crate::vmm::Vmm::open(self.vmm.process())
            .map_or(true, |now| now.start_ticks() != self.vmm.start_ticks());
        let mut status = self.status.lock().clone();
        if has_ended {
            self.place.remove();
            "ended".clone_into(&mut status.state);
        } else {
            "detached".clone_into(&mut status.state);
        }
        status.registered_bytes = 0;
        status.guard = 0;
        status
    }
}

/// What became of a fault.
enum Served {
    /// So many bytes of zeroes came into being.
    Zeroed(u64),
    /// The page was there.
    Present,
    /// There is no such memory any more.
    Stray,
    /// The kernel could not make a page for the pager. It serves the faults itself now.
    Released,
}

fn serve_fault(faults: &UserFault, memory: &[MappedMemory], address: u64) -> Served {
    let page = address & !(PAGE - 1);
    let own = page..page + PAGE;
    let Some(part) = memory.iter().find(|part| part.range().contains(&page)) else {
        let _ = faults.wake(&own);
        return Served::Stray;
    };
    let run = run_of(page, &part.range());
    // From the beginning of the run, as if it were all missing; else from the page on.
    let mut zeroed = 0;
    for attempt in [run.clone(), page..run.end] {
        match faults.zero(&attempt) {
            Ok(bytes) => {
                zeroed += bytes;
                if attempt.start + bytes > page {
                    return Served::Zeroed(zeroed);
                }
            }
            Err(error) => match Errno::from_io_error(&error) {
                // The VMM changes its mappings at this moment: the thread tries again.
                Some(Errno::EXIST | Errno::AGAIN) => {}
                Some(Errno::NOENT | Errno::SRCH) => {
                    let _ = faults.wake(&own);
                    return Served::Stray;
                }
                _ => {
                    let _ = faults.unregister(&part.range());
                    return Served::Released;
                }
            },
        }
    }
    let _ = faults.wake(&own);
    Served::Present
}

/// The run of pages that comes into being with `page`, within its mapping.
fn run_of(page: u64, part: &Range<u64>) -> Range<u64> {
    let start = page & !(RUN - 1);
    start.max(part.start)..(start + RUN).min(part.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_lies_in_its_mapping() {
        let part = 0x1_3000..0x4_2000;
        assert_eq!(run_of(0x2_5000, &part), 0x2_0000..0x3_0000);
        assert_eq!(run_of(0x1_3000, &part), 0x1_3000..0x2_0000);
        assert_eq!(run_of(0x4_1000, &part), 0x4_0000..0x4_2000);
    }
}

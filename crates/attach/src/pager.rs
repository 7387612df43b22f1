//! A pager at work: it serves the faults of the guest's memory until it is asked to detach.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::attach::Helpers;
use crate::counts::PagerStatus;
use crate::guard::{self, Guard};
use crate::memory::MappedMemory;
use crate::record::{PagerRecord, RecordPlace};
use crate::refusal;
use crate::shadow::Shadow;
use crate::tripwire::Tripwire;
use crate::userfault::{PageFault, UserFault};
use crate::vmm::{ProcessMap, Vmm};

/// A page, in bytes.
const PAGE: u64 = 4096;
/// A missing page comes into being with its neighbours: so many pages, from a multiple of it.
pub const RUN_PAGES: u64 = 16;
const RUN: u64 = RUN_PAGES * PAGE;
/// How often a pager with a shadow looks who maps the guest's memory.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// The same while the guest does nothing.
const QUIET_INTERVAL: Duration = Duration::from_secs(10);
/// How often a daemon that takes leases is asked whether pages may leave.
const ASK_INTERVAL: Duration = Duration::from_secs(30);
/// The pause between two steps of a sweep.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);

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
    pub(crate) maps: Vec<ProcessMap>,
    pub(crate) tripwires: Vec<Tripwire>,
    pub(crate) shadow: Option<ShadowWork>,
}

/// How shadow eviction works.
pub struct ShadowOptions {
    /// Where the tables of leases are: [`fathom_guest_memory::LEASE_FOLDER`], but for tests.
    pub folder: PathBuf,
    /// The most bytes that are copied at a time.
    pub bytes: u64,
    /// Asks the daemons to take leases. It must return within a few seconds, and runs in a thread
    /// of its own.
    pub ask: Arc<dyn Fn() + Send + Sync>,
}

/// Shadow eviction, and when it looks around.
pub(crate) struct ShadowWork {
    shadow: Shadow,
    ask: Arc<dyn Fn() + Send + Sync>,
    /// The thread that asks the daemons.
    asking: Option<JoinHandle<()>>,
    looked: Option<Instant>,
    asked: Option<Instant>,
}

impl std::fmt::Debug for ShadowWork {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shadow.fmt(formatter)
    }
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

    /// Begins shadow eviction.
    ///
    /// # Errors
    /// When the machine or this user does not allow it. The pager serves faults all the same.
    pub fn start_shadow(&mut self, options: ShadowOptions) -> Result<(), Failure> {
        let ShadowOptions { folder, bytes, ask } = options;
        let shadow = Shadow::start(&self.vmm, &self.faults, &self.memory, &folder, bytes)?;
        self.shadow = Some(ShadowWork { shadow, ask, asking: None, looked: None, asked: None });
        self.look_around();
        Ok(())
    }

    /// Looks who maps the memory, now and then, and whether all of them take leases. Returns how
    /// long the pager may sleep.
    fn look_around(&mut self) -> Option<Duration> {
        let work = self.shadow.as_mut()?;
        let interval = if work.shadow.is_quiet() { QUIET_INTERVAL } else { LOOK_INTERVAL };
        if work.looked.is_none_or(|looked| looked.elapsed() >= interval) {
            work.looked = Some(Instant::now());
            work.shadow.rest();
            let found = refusal::find_daemons(&self.vmm, &self.maps)
                .map_err(|refusal| refusal.to_string())
                .and_then(|daemons| work.shadow.check_holders(&daemons));
            let reason = found.err().unwrap_or_default();
            work.shadow.suspend(&self.faults, &reason);
            let is_asking = work.asking.as_ref().is_some_and(|thread| !thread.is_finished());
            let is_due = work.asked.is_none_or(|asked| asked.elapsed() >= ASK_INTERVAL);
            let is_asked = !reason.is_empty() || work.shadow.has_obstacle() && is_due;
            if is_asked && !is_asking {
                work.asked = Some(Instant::now());
                let ask = Arc::clone(&work.ask);
                let thread = std::thread::Builder::new().name("ask".into()).spawn(move || ask());
                work.asking = thread.ok();
            }
            self.status.lock().shadow = work.shadow.counts();
        }
        if work.shadow.is_busy() {
            return Some(SWEEP_PAUSE);
        }
        Some(interval)
    }

    fn sweep(&mut self) {
        if let Some(work) = self.shadow.as_mut().filter(|work| work.shadow.is_busy()) {
            work.shadow.sweep(&self.faults, &self.tripwires);
            self.status.lock().shadow = work.shadow.counts();
        }
    }

    /// Serves faults until `stop` is readable. It sleeps while there are none.
    ///
    /// # Errors
    /// Those of the descriptors.
    pub fn serve(&mut self, stop: BorrowedFd<'_>) -> io::Result<ServeEnd> {
        loop {
            let pause = self.look_around().map(|pause| Timespec {
                tv_sec: pause.as_secs() as i64,
                tv_nsec: i64::from(pause.subsec_nanos()),
            });
            let Some(guard) = &self.guard else { return Ok(ServeEnd::Unguarded) };
            let mut polled = [
                PollFd::new(&self.faults, PollFlags::IN),
                PollFd::new(&self.vmm, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(guard, PollFlags::IN),
            ];
            match poll(&mut polled, pause.as_ref()) {
                Ok(0) => {
                    self.sweep();
                    continue;
                }
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

    fn serve_faults(&mut self) -> io::Result<()> {
        let Self { status, faults, memory, tripwires, shadow, .. } = self;
        let mut status = status.lock();
        let counts = &mut status.counts;
        let mut shadow = shadow.as_mut().map(|work| &mut work.shadow);
        let served = faults.faults(|PageFault { address, is_protection }| {
            let begun = Instant::now();
            if is_protection {
                match &mut shadow {
                    Some(shadow) => shadow.write_fault(address, faults, tripwires),
                    // An earlier pager has protected it.
                    None => drop(faults.protect(&page_of(address), false)),
                }
                counts.fault_ns.record(begun.elapsed().as_nanos() as u64, 1);
                return;
            }
            counts.faults += 1;
            if let (Some(shadow), Some(part)) = (&mut shadow, part_of(memory, address)) {
                let run = run_of(page_of(address).start, &part.range());
                shadow.missing(run, faults, tripwires);
            }
            match serve_fault(faults, memory, address) {
                Served::Zeroed(bytes) => counts.zeroed_bytes += bytes,
                Served::Present => counts.repeated += 1,
                Served::Stray => counts.strays += 1,
                Served::Released => counts.released += 1,
            }
            counts.fault_ns.record(begun.elapsed().as_nanos() as u64, 1);
        });
        if let Some(shadow) = shadow {
            status.shadow = shadow.counts();
        }
        served
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
        let ask = self.shadow.take().map(|work| {
            self.status.lock().shadow = work.shadow.finish(&self.faults, &self.tripwires);
            work.ask
        });
        guard::release(&self.faults, &self.memory);
        // Daemons need take no leases any more.
        if let Some(ask) = ask {
            ask();
        }
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

/// The page of an address.
fn page_of(address: u64) -> Range<u64> {
    let page = address & !(PAGE - 1);
    page..page + PAGE
}

fn part_of(memory: &[MappedMemory], address: u64) -> Option<&MappedMemory> {
    memory.iter().find(|part| part.range().contains(&address))
}

fn serve_fault(faults: &UserFault, memory: &[MappedMemory], address: u64) -> Served {
    let own = page_of(address);
    let page = own.start;
    let Some(part) = part_of(memory, address) else {
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

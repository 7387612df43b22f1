//! A pager at work: it serves the faults of the guest's memory, copies pages or takes them away,
//! until it is asked to detach.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::attach::{Helpers, start_guard};
use crate::away::AwayPages;
use crate::counts::PagerStatus;
use crate::evict::{Eviction, count_descriptors};
use crate::faults::{Served, page_of, part_of, run_of, serve_missing, serve_protected};
use crate::guard::{self, Guard, StorePlace, Ward};
use crate::hazard;
use crate::limit::LimitHandle;
use crate::look::{self, Ask, Look, Seen};
use crate::memory::{self, MappedMemory};
use crate::publish::Publisher;
use crate::record::{PagerRecord, RecordPlace};
use crate::refusal;
use crate::shadow::Shadow;
use crate::store::{PAGE, SwapOptions};
use crate::tripwire::Tripwire;
use crate::userfault::{PageFault, UserFault};
use crate::vmm::{ProcessMap, Vmm};

/// The pause between two steps of a shadow's sweep.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);
/// How often the number of the VMM's descriptors is looked at while pages are away.
const GLANCE_INTERVAL: Duration = Duration::from_millis(200);
/// How often the result of a look is waited for.
const SEEN_PAUSE: Duration = Duration::from_millis(5);
/// How long pages leave, or come in, at a time. Faults wait meanwhile.
const STEP_TIME: Duration = Duration::from_micros(500);
/// For how long the next fault is looked for after a fault, without sleeping.
const SPIN_TIME: Duration = Duration::from_micros(50);
/// How long pages leave after a fault of a guest that is far over its limit.
const FAULT_TIME: Duration = Duration::from_micros(200);
/// The pause when pages have to come in and cannot.
const STUCK_PAUSE: Duration = Duration::from_millis(10);

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
    pub(crate) work: Work,
    pub(crate) look: Option<Look>,
    pub(crate) limit: LimitHandle,
    pub(crate) options: Option<EvictionOptions>,
    /// The number of the VMM's descriptors at the last look.
    pub(crate) descriptors: u64,
    /// Why all pages come in before serving ends.
    pub(crate) ending: Option<ServeEnd>,
    /// Whether pages have to come in, and none can for the moment.
    pub(crate) is_stuck: bool,
    /// Shows the daemon what it does.
    pub(crate) publisher: Publisher,
}

/// What a pager does beside serving faults.
#[derive(Debug, Default)]
pub(crate) enum Work {
    /// Nothing.
    #[default]
    None,
    /// It copies pages, and compares them later.
    Shadow(Box<Shadow>),
    /// It takes pages away.
    Eviction(Box<Eviction>),
}

/// How shadow eviction works.
pub struct ShadowOptions {
    /// Where the tables of leases are: [`fathom_guest_memory::LEASE_FOLDER`], but for tests.
    pub folder: PathBuf,
    /// The most bytes that are copied at a time.
    pub bytes: u64,
    /// Asks the daemons to take leases. It must return within a few seconds, and runs in a thread
    /// of its own.
    pub ask: Ask,
}

/// How eviction works, once there is a limit.
#[derive(Clone)]
pub struct EvictionOptions {
    /// Where the tables of leases are: [`fathom_guest_memory::LEASE_FOLDER`], but for tests.
    pub leases: PathBuf,
    /// Where the store is: a folder in memory.
    pub store: PathBuf,
    /// The swap file of the store; `None` for none.
    pub swap: Option<SwapOptions>,
    /// Asks the daemons to take leases, as in [`ShadowOptions`].
    pub ask: Ask,
}

impl std::fmt::Debug for EvictionOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("EvictionOptions")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl Pager {
    /// The state, which other threads may read.
    pub fn status(&self) -> Arc<Mutex<PagerStatus>> {
        Arc::clone(&self.status)
    }

    /// The limit, which other threads may change.
    pub fn limit(&self) -> LimitHandle {
        self.limit.clone()
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
        if matches!(self.work, Work::Eviction(_)) {
            return Err(Failure::new("pages of the machine are away, or may be")
                .advise("detach first, or leave out --shadow"));
        }
        let shadow = Shadow::start(&self.vmm, &self.faults, &self.memory, &folder, bytes)?;
        self.work = Work::Shadow(Box::new(shadow));
        self.look = Some(Look::new(ask));
        self.look_around();
        Ok(())
    }

    /// Says how pages leave when there is a limit. The pager has to have it before pages can. What
    /// an earlier pager has begun goes on where it was.
    ///
    /// # Errors
    /// When a swap file is wanted, and pages are away already without one.
    pub fn allow_eviction(&mut self, options: EvictionOptions) -> Result<(), Failure> {
        if let Work::Eviction(eviction) = &mut self.work {
            // An earlier pager has begun.
            self.look = Some(Look::new(Arc::clone(&options.ask)));
            if let Some(swap) = &options.swap {
                let path = eviction.away.store().swap_path();
                if path.and_then(Path::parent) != Some(swap.folder.as_path()) {
                    let file = path.map_or("without a swap file".to_owned(), |path| {
                        format!("with the swap file {}", path.display())
                    });
                    return Err(Failure::new(format!("pages are away already, in a store {file}"))
                        .advise("detach first; or leave out --swap, to go on as before"));
                }
                eviction.away.set_memory_max(swap.memory_max);
            }
        }
        self.options = Some(options);
        let limit = self.record.limit;
        if let Work::Eviction(eviction) = &mut self.work {
            eviction.set_limit(limit);
        }
        Ok(())
    }

    /// Sets the most bytes of the guest's memory that are to be in the host's memory; `None` for no
    /// limit. Pages leave while it serves.
    ///
    /// # Errors
    /// When the machine or this user does not allow it. The pager serves faults all the same.
    pub fn set_limit(&mut self, bytes: Option<u64>) -> Result<(), Failure> {
        if bytes.is_some() {
            self.start_eviction()?;
        }
        if let Work::Eviction(eviction) = &mut self.work {
            eviction.set_limit(bytes);
            eviction.measure(&self.tripwires);
            self.status.lock().eviction = eviction.counts();
            self.publisher.publish(eviction.away.tables(), &self.status.lock());
            self.record.limit = bytes;
            // Without it, the next pager has to be given the limit.
            let _ = self.place.write(&self.record);
        }
        if let Some(look) = &mut self.look {
            look.hurry();
        }
        Ok(())
    }

    /// Makes what is needed before a page may leave.
    fn start_eviction(&mut self) -> Result<(), Failure> {
        let Some(options) = self.options.clone() else {
            return Err(Failure::new("this pager takes no pages away"));
        };
        if matches!(self.work, Work::Shadow(_)) {
            return Err(Failure::new("this pager only copies pages (--shadow)")
                .advise("detach it, and attach without --shadow"));
        }
        if !self.faults.can_protect() {
            return Err(Failure::new("the VMM's userfaultfd cannot protect pages").advise(
                "an earlier version has made it, or this kernel is too old: restart the machine",
            ));
        }
        // An earlier pager has begun: what is unsafe has all pages come in.
        if let Work::Eviction(eviction) = &self.work {
            return can_evict(eviction);
        }
        hazard::check_command(&self.vmm)
            .and_then(|()| hazard::check_mappings(&self.maps))
            .and_then(|()| hazard::check_now(&self.vmm))
            .map_err(|refusal| Failure::from(refusal).about("pages cannot leave"))?;
        if memory::is_mapped_twice(&self.memory) {
            return Err(Failure::new("the VMM maps a part of its guest's memory twice"));
        }
        let EvictionOptions { leases, store, swap, ask } = options;
        let away = AwayPages::create(&self.vmm, &self.memory, &leases, &store, swap.as_ref())?;
        let eviction = Eviction::new(away, &self.vmm, &self.memory);
        let made = eviction.away.store();
        let place = StorePlace {
            store: made.path().to_owned(),
            swap: made.swap_path().map(Path::to_owned),
            leases,
        };
        // The record first: a pager that dies has left a store that the next one finds.
        let begun = can_evict(&eviction).and_then(|()| {
            let record = &mut self.record;
            record.store = Some(place.store.clone());
            (record.swap, record.leases) = (place.swap.clone(), place.leases.clone());
            self.place
                .write(&self.record)
                .map_err(|error| Failure::new(format!("cannot write the record: {error}")))?;
            let no_guard = || Failure::new("the pager has no guard");
            self.guard.as_mut().ok_or_else(no_guard)?.open_store(&place)
        });
        if let Err(failure) = begun {
            (self.record.store, self.record.swap) = (None, None);
            // A record that names a store has to find it.
            if self.place.write(&self.record).is_ok() {
                eviction.away.end(false);
            }
            // It may not have answered.
            self.replace_guard();
            return Err(failure);
        }
        self.work = Work::Eviction(Box::new(eviction));
        self.look = Some(Look::new(ask));
        self.helpers.clean(&place.leases, swap.as_ref().map(|swap| swap.folder.as_path()));
        Ok(())
    }

    /// Looks who has the memory, now and then, and whether all of them take leases. Returns how
    /// long the pager may sleep.
    fn look_around(&mut self) -> Option<Duration> {
        let Self { work, look, vmm, maps, faults, descriptors, .. } = self;
        let look = look.as_mut()?;
        match work {
            Work::None => None,
            Work::Shadow(shadow) => {
                let interval = Look::interval(shadow.is_quiet());
                if look.is_due(interval) {
                    shadow.rest();
                    let found = refusal::find_daemons(vmm, maps)
                        .map_err(|refusal| refusal.to_string())
                        .and_then(|daemons| shadow.check_holders(&daemons));
                    let reason = found.err().unwrap_or_default();
                    shadow.suspend(faults, &reason);
                    if !reason.is_empty() || shadow.has_obstacle() {
                        look.ask(reason.is_empty());
                    }
                    self.status.lock().shadow = shadow.counts();
                }
                Some(if shadow.is_busy() { SWEEP_PAUSE } else { interval })
            }
            Work::Eviction(eviction) => {
                look.is_quiet &= !eviction.is_busy();
                let interval = Look::interval(look.is_quiet);
                // A change that comes during a look is looked at again.
                let now = count_descriptors(vmm);
                if *descriptors != now {
                    *descriptors = now;
                    look.hurry();
                }
                if look.is_due(interval) {
                    look.begin(vmm, maps);
                }
                if let Some(seen) = look.take() {
                    apply(eviction, &seen, look, faults);
                    look.is_quiet = !eviction.was_active() && !eviction.is_busy();
                    eviction.measure(&self.tripwires);
                    eviction.set_doubt(look.doubt());
                    self.status.lock().eviction = eviction.counts();
                    self.publisher.publish(eviction.away.tables(), &self.status.lock());
                }
                eviction.set_doubt(look.doubt());
                let is_at_work = eviction.is_busy() || eviction.is_retreating();
                let mut pause = if is_at_work { Duration::ZERO } else { interval };
                if look.is_looking() {
                    pause = pause.min(SEEN_PAUSE);
                } else if eviction.away.count() > 0 || !look.doubt().is_empty() {
                    pause = pause.min(GLANCE_INTERVAL);
                }
                let rests = [eviction.rest(), eviction.away.store().next_swap_work()];
                Some(rests.into_iter().flatten().fold(pause, Duration::min))
            }
        }
    }

    /// What there is to do when no fault waits.
    fn do_work(&mut self) {
        let is_bringing = self.is_bringing();
        let Self { work, faults, tripwires, status, publisher, .. } = self;
        match work {
            Work::Shadow(shadow) if shadow.is_busy() => {
                shadow.sweep(faults, tripwires);
                status.lock().shadow = shadow.counts();
            }
            Work::Eviction(eviction) => {
                eviction.away.set_spilling(!is_bringing);
                if is_bringing {
                    let can_go_on = eviction.away.bring_some(faults, STEP_TIME);
                    eviction.measure(tripwires);
                    self.is_stuck = !can_go_on && !eviction.away.is_complete();
                } else {
                    eviction.evict_some(faults, tripwires, STEP_TIME, false);
                }
                eviction.progress(faults);
                let mut status = status.lock();
                status.eviction = eviction.counts();
                publisher.publish_if_due(eviction.away.tables(), &status);
            }
            _ => {}
        }
    }

    /// Whether daemons cannot wake it.
    fn is_deaf(&self) -> bool {
        self.away().is_some_and(|away| away.wanted().is_empty() && away.count() > 0)
    }

    /// The pages that are away, if any may be.
    fn away(&self) -> Option<&AwayPages> {
        match &self.work {
            Work::Eviction(eviction) => Some(&eviction.away),
            _ => None,
        }
    }

    /// Whether all pages have to come in.
    fn is_bringing(&self) -> bool {
        match &self.work {
            Work::Eviction(eviction) => self.ending.is_some() || eviction.is_retreating(),
            _ => false,
        }
    }

    /// Whether all pages are back.
    fn is_complete(&self) -> bool {
        self.away().is_none_or(AwayPages::is_complete)
    }

    /// Serves faults until `stop` is readable, and all pages have come in. It sleeps while there is
    /// nothing to do.
    ///
    /// # Errors
    /// Those of the descriptors.
    pub fn serve(&mut self, stop: BorrowedFd<'_>) -> io::Result<ServeEnd> {
        loop {
            if let Some(end) = self.ending.filter(|_| self.is_complete()) {
                return Ok(end);
            }
            let pause = self.look_around();
            let pause = match self.ending {
                // What it waits for wakes it: a page that has been read, a fault.
                _ if std::mem::take(&mut self.is_stuck) => Some(STUCK_PAUSE),
                Some(_) => Some(Duration::ZERO),
                None => pause,
            };
            let woken = self.wait(pause, stop)?;
            // One fault is followed by others: a thread that sleeps is slow to wake.
            let is_spinning = woken.has_faults && matches!(self.work, Work::Eviction(_));
            if woken.has_ended {
                return Ok(ServeEnd::VmmEnded);
            }
            if woken.is_wanted {
                if let Work::Eviction(eviction) = &mut self.work {
                    for address in eviction.away.serve_wanted(&self.faults) {
                        eviction.touched(address, PAGE, true);
                    }
                }
            }
            if woken.has_faults {
                self.serve_faults()?;
                let begun = Instant::now();
                while is_spinning && !self.faults.has_faults() && begun.elapsed() < SPIN_TIME {
                    std::hint::spin_loop();
                }
            }
            if woken.is_swapped {
                if let Work::Eviction(eviction) = &mut self.work {
                    eviction.progress(&self.faults);
                }
            }
            // A guest that always has a fault must not keep its pages from coming in.
            if pause.is_some() && (!woken.has_faults || self.is_bringing()) {
                self.do_work();
            }
            if woken.is_asked {
                self.end_with(ServeEnd::Asked);
            }
            if woken.is_limited {
                let limit = self.limit.clone();
                limit.answer(|bytes| self.set_limit(bytes));
            }
            if woken.is_alone {
                self.replace_guard();
            }
            if self.guard.is_none() {
                self.end_with(ServeEnd::Unguarded);
            }
        }
    }

    fn end_with(&mut self, end: ServeEnd) {
        if self.ending.is_none() {
            self.ending = Some(end);
            "detaching".clone_into(&mut self.status.lock().state);
        }
    }

    /// Waits until something happens, at most for `pause`.
    fn wait(&self, pause: Option<Duration>, stop: BorrowedFd<'_>) -> io::Result<Woken> {
        let pause = pause.map(|pause| Timespec {
            tv_sec: pause.as_secs() as i64,
            tv_nsec: i64::from(pause.subsec_nanos()),
        });
        let input = PollFlags::IN;
        let mut polled = vec![
            PollFd::new(&self.faults, input),
            PollFd::new(&self.vmm, input),
            PollFd::new(&self.limit, input),
        ];
        // Not twice: it stays readable.
        let stop = Some(stop).filter(|_| self.ending.is_none());
        polled.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, input)));
        polled.extend(self.guard.as_ref().map(|guard| PollFd::new(guard, input)));
        let away = self.away();
        let swap = away.and_then(|away| away.store().swap_bell());
        polled.extend(swap.map(|bell| PollFd::from_borrowed_fd(bell, input)));
        let wanted = away.into_iter().flat_map(AwayPages::wanted);
        polled.extend(wanted.map(|wanted| PollFd::new(wanted, input)));
        match poll(&mut polled, pause.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Woken::default()),
            Err(error) => return Err(error.into()),
        }
        let mut ready = polled.iter().map(|one| !one.revents().is_empty());
        let mut next = |is_polled: bool| is_polled && ready.next().unwrap_or(false);
        Ok(Woken {
            has_faults: next(true),
            has_ended: next(true),
            is_limited: next(true),
            is_asked: next(stop.is_some()),
            is_alone: next(self.guard.is_some()),
            is_swapped: next(swap.is_some()),
            is_wanted: ready.any(|is_ready| is_ready) || self.is_deaf(),
        })
    }

    fn serve_faults(&mut self) -> io::Result<()> {
        let Self { status, faults, memory, tripwires, work, .. } = self;
        let mut found = Vec::new();
        faults.faults(|fault| found.push(fault))?;
        for PageFault { address, is_protection } in found {
            let begun = Instant::now();
            let mut status = status.lock();
            let counts = &mut status.counts;
            counts.faults += u64::from(!is_protection);
            let served = match (is_protection, &mut *work) {
                (true, Work::Shadow(shadow)) => {
                    shadow.write_fault(address, faults, tripwires);
                    None
                }
                (true, Work::Eviction(eviction)) => {
                    serve_protected(faults, Some(&mut eviction.away), address);
                    None
                }
                // An earlier pager has protected it.
                (true, Work::None) => {
                    serve_protected(faults, None, address);
                    None
                }
                (false, Work::Shadow(shadow)) => {
                    if let Some(part) = part_of(memory, address) {
                        let run = run_of(page_of(address).start, &part.range());
                        shadow.missing(run, faults, tripwires);
                    }
                    Some(serve_missing(faults, memory, None, address))
                }
                (false, Work::Eviction(eviction)) => {
                    Some(serve_missing(faults, memory, Some(&mut eviction.away), address))
                }
                (false, Work::None) => Some(serve_missing(faults, memory, None, address)),
            };
            match served {
                Some(Served::Zeroed(bytes)) => counts.zeroed_bytes += bytes,
                Some(Served::Present) => counts.repeated += 1,
                Some(Served::Stray) => counts.strays += 1,
                Some(Served::Released) => counts.released += 1,
                Some(Served::Brought | Served::Later | Served::Reading) | None => {}
            }
            if served != Some(Served::Reading) {
                counts.fault_ns.record(begun.elapsed().as_nanos() as u64, 1);
            }
            drop(status);
            if let Work::Eviction(eviction) = work {
                let page = page_of(address).start;
                match served {
                    Some(Served::Zeroed(bytes)) => eviction.touched(page, bytes, false),
                    Some(Served::Brought) => {
                        eviction.note_fault(begun.elapsed());
                        eviction.touched(page, page_of(page).end - page, true);
                    }
                    _ => {}
                }
                if eviction.is_far_over() && self.ending.is_none() {
                    eviction.evict_some(faults, tripwires, FAULT_TIME, true);
                }
            }
        }
        let mut status = status.lock();
        match work {
            Work::Shadow(shadow) => status.shadow = shadow.counts(),
            Work::Eviction(eviction) => status.eviction = eviction.counts(),
            Work::None => {}
        }
        Ok(())
    }

    fn replace_guard(&mut self) {
        if let Some(guard) = self.guard.take() {
            guard.bury();
        }
        let ward = Ward::of(&self.vmm, &self.memory, &self.place);
        let Self { helpers, faults, place, record, .. } = self;
        self.guard = start_guard(helpers, faults, place, &ward, record).ok();
        let mut status = self.status.lock();
        status.counts.guards_lost += 1;
        status.guard = self.guard.as_ref().map_or(0, Guard::process);
        self.record.guard = status.guard;
        let _ = self.place.write(&self.record);
    }

    /// Leaves the guest's memory to the kernel again. The VMM keeps the userfaultfd, which then
    /// does nothing, for the next pager. If pages are away, because [`serve`](Self::serve) has
    /// failed or they cannot come, they are left to the guard, and the state is `orphaned`.
    pub fn detach(mut self) -> PagerStatus {
        let has_ended = self.vmm.has_ended();
        if let Work::Eviction(eviction) = &mut self.work {
            self.status.lock().eviction = eviction.counts();
            // Serving has not ended as it should, or a page is damaged, which stays an error, and
            // not zeroes, only while it is registered.
            if !has_ended && eviction.away.count() > 0 {
                let mut status = self.status.lock().clone();
                "orphaned".clone_into(&mut status.state);
                self.publisher.publish(eviction.away.tables(), &status);
                return status;
            }
        }
        let eviction = match std::mem::take(&mut self.work) {
            Work::Shadow(shadow) => {
                self.status.lock().shadow = shadow.finish(&self.faults, &self.tripwires, has_ended);
                None
            }
            Work::Eviction(eviction) => Some(eviction),
            Work::None => None,
        };
        guard::release(&self.faults, &self.memory);
        if let Some(eviction) = &eviction {
            let mut status = self.status.lock().clone();
            "detached".clone_into(&mut status.state);
            self.publisher.publish(eviction.away.tables(), &status);
        }
        self.record.is_attached = false;
        (self.record.store, self.record.swap, self.record.limit) = (None, None, None);
        // A record that says otherwise costs nothing, but for one that names a store: the next
        // pager adopts what there is.
        if self.place.write(&self.record).is_ok() || has_ended {
            if let Some(eviction) = eviction {
                let leases = eviction.away.leases().to_owned();
                eviction.away.end(has_ended);
                if has_ended {
                    self.helpers.clean(&leases, None);
                }
            }
        }
        if let Some(guard) = self.guard.take() {
            guard.end();
        }
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

/// What has happened while a pager waited.
#[derive(Clone, Copy, Debug, Default)]
struct Woken {
    has_faults: bool,
    has_ended: bool,
    is_asked: bool,
    is_limited: bool,
    is_alone: bool,
    is_swapped: bool,
    is_wanted: bool,
}

fn can_evict(eviction: &Eviction) -> Result<(), Failure> {
    if eviction.can_evict() {
        return Ok(());
    }
    Err(Failure::new("this user does not see where pages are and what they are part of")
        .advise("run the pager as root"))
}

/// Notes what a look has found: what keeps pages from leaving, or has them come in.
fn apply(eviction: &mut Eviction, seen: &Seen, look: &mut Look, faults: &UserFault) {
    if let Some(maps) = &seen.maps {
        eviction.away.retain(|memory| hazard::is_mapped(maps, memory));
        // A mapping that was made anew is not registered.
        for part in (0..).map_while(|part| eviction.away.mapping(part)) {
            if part.length() > 0 {
                let _ = faults.register(&part.range());
            }
        }
    }
    let (mut obstacle, mut retreat) = (String::new(), String::new());
    let mut is_suspicious = false;
    match &seen.daemons {
        Err(refusal) => retreat = refusal.to_string(),
        Ok(daemons) => {
            let tables = eviction.away.tables();
            let admitted = look::admit(tables, daemons);
            let found = look::check_holders(tables, daemons);
            let has_leases = found.is_ok();
            obstacle = found.unwrap_or_else(|reason| reason);
            if !obstacle.is_empty() {
                look.ask(has_leases);
            }
            // One that has a place in the table takes leases for what it maps. Whether it has
            // mappings from before matters only to pages that have not left yet. One that maps the
            // memory at this moment takes its place at once, and the next look finds it.
            if let Err(reason) = look::check_members(tables, daemons) {
                if look.is_suspicious {
                    retreat = admitted.err().unwrap_or(reason);
                } else {
                    look.hurry();
                }
                is_suspicious = true;
            }
        }
    }
    look.is_suspicious = is_suspicious;
    // The kernel may have been set to make huge pages since.
    if let Err(refusal) = &seen.pages {
        obstacle = refusal.to_string();
    }
    eviction.set_obstacle(&obstacle);
    eviction.set_retreat(&retreat);
}

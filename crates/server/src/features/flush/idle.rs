//! Makes the guest with the most dirty data for a device write it while the device is idle.
//!
//! A thread samples the devices of the guests whose configuration allows it, some times a second.
//! It sleeps while there is no such guest. A device is idle when no request of any program has been
//! in flight or completed for some time. A flush by `tunables` ends early when other requests come.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fathom_block::Operation;
use fathom_control::{DirtyQuery, GuestDirty};
use fathom_devices::{Medium, MediumKind, SysDevices};
use fathom_layers::Tap;
use parking_lot::Mutex;

use crate::daemon::{Daemon, Served};
use crate::features::flush::Flusher;
use crate::features::flush::options::GuestOptions;

/// The interval between two samples of the devices' counters.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// How long a device must have been idle before a guest is made to write.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// The interval between two counts of the dirty data of an idle device's guests.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// The interval between two searches for the devices beneath the disks.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// What a device has done, and since when it is idle.
struct Watched {
    completed: u64,
    idle_since: Instant,
    /// When the dirty data of its guests was last counted.
    counted: Option<Instant>,
}

impl Watched {
    fn new(completed: u64, now: Instant) -> Self {
        Self { completed, idle_since: now, counted: None }
    }
}

/// A guest that may be made to write to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    vm: String,
    /// Its dirty data for the device, in bytes.
    dirty: u64,
    /// The least dirty data for which it is made to write, in bytes.
    dirty_min: u64,
}

/// Whether the dirty data of a guest has to be counted: it has a disk among those of `vms`, and was
/// not flushed lately; `rested` is the time since its last flush. A count takes time.
fn may_be_chosen(guest: &GuestOptions, vms: &BTreeSet<&str>, rested: Option<Duration>) -> bool {
    let rest_min = Duration::from_nanos(guest.flush_interval.0);
    vms.contains(guest.vm.as_str()) && rested.is_none_or(|rested| rested >= rest_min)
}

/// The guests of a device that have had their turns in the current round.
type Round = BTreeSet<String>;

/// The guest that is to write to a device which has been idle for `idle`: that with the most dirty
/// data, of those that have enough and have not had their turn in this round. When all have had
/// theirs, the next round begins: how much is dirty, the guest says, and one that always says the
/// most gets no more turns than others.
fn choose<'c>(
    candidates: &'c [Candidate],
    idle: Duration,
    round: &mut Round,
) -> Option<&'c Candidate> {
    if idle < IDLE_TIME {
        return None;
    }
    let is_due = |guest: &&Candidate| guest.dirty >= guest.dirty_min.max(1);
    let due: Vec<&Candidate> = candidates.iter().filter(is_due).collect();
    if due.iter().all(|guest| round.contains(&guest.vm)) {
        round.clear();
    }
    let waiting = due.into_iter().filter(|guest| !round.contains(&guest.vm));
    let chosen = waiting.max_by_key(|guest| guest.dirty)?;
    round.insert(chosen.vm.clone());
    Some(chosen)
}

/// The thread that flushes guests whose devices are idle, once there has been such a guest.
#[derive(Default)]
pub(crate) struct IdleFlusher {
    pub thread: OnceLock<Option<Thread>>,
}

/// The requests of a device.
#[derive(Clone, Copy, Default)]
struct Requests {
    in_flight: u64,
    completed: u64,
}

impl Daemon {
    /// Starts the thread if a guest is to be flushed while its device is idle, and wakes it.
    pub(crate) fn begin_idle_flushes(self: &Arc<Self>) {
        let flusher = &self.part::<IdleFlusher>().thread;
        if self.part::<Flusher>().idle_guests().is_empty() && flusher.get().is_none() {
            return;
        }
        let thread = flusher.get_or_init(|| {
            let daemon = Arc::downgrade(self);
            let body = move || run(&daemon);
            match thread::Builder::new().name("idle-flush".into()).spawn(body) {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "guests are not flushed: a thread cannot be started");
                    None
                }
            }
        });
        thread.iter().for_each(Thread::unpark);
    }

    /// The requests of Fathom's disks on `medium` and, for a device of the host, of all programs.
    /// `None` if they are not counted.
    fn requests_of(&self, medium: &Medium, sys: &SysDevices) -> Option<Requests> {
        let mut sum = Requests::default();
        for served in self.served_on(medium) {
            let tap = served.part::<Tap>()?;
            let counts = tap.counts();
            sum.in_flight += counts.in_flight;
            sum.completed += counts.total();
        }
        if medium.kind == MediumKind::Device {
            let host = sys.activity(&medium.name)?;
            sum.in_flight += host.in_flight;
            sum.completed += host.reads + host.writes + host.discards + host.flushes;
        }
        Some(sum)
    }

    fn served_on(&self, medium: &Medium) -> Vec<Arc<Served>> {
        let mut served = self.served();
        served.retain(|served| served.lies_on(medium));
        served
    }

    /// The requests on `medium` that the flush of the guest of `vm` does not cause: those of other
    /// disks, and its own reads. Requests of other programs are not included, because the host
    /// writes the guest's data too.
    fn disturbances(&self, medium: &Medium, vm: &str) -> u64 {
        let mut sum = 0;
        for served in self.served_on(medium) {
            let Some(tap) = served.part::<Tap>() else { continue };
            let counts = tap.counts();
            sum += if served.disk.vm() == vm {
                counts.completed[Operation::Read as usize]
            } else {
                counts.total() + counts.in_flight
            };
        }
        sum
    }

    /// The dirty data of a guest for `medium`, in bytes; `None` if it is not known.
    fn dirty_on(&self, guest: &GuestDirty, medium: &Medium) -> Option<u64> {
        let on_medium: Vec<String> =
            self.served_on(medium).iter().map(|served| served.disk.name().to_owned()).collect();
        let devices = guest.devices.as_ref()?.iter();
        let beneath = devices.filter(|it| it.disks.iter().any(|disk| on_medium.contains(disk)));
        Some(beneath.map(|device| device.dirty_bytes).sum())
    }

    /// The media beneath the disks of these guests.
    fn media_of(&self, guests: &[GuestOptions]) -> Vec<Medium> {
        let mut media = Vec::new();
        for served in self.served() {
            if guests.iter().any(|guest| guest.vm == served.disk.vm()) {
                media.extend(served.placements().0.media);
            }
        }
        media.sort();
        media.dedup();
        media.retain(|medium| medium.kind != MediumKind::Unknown);
        media
    }
}

/// The thread.
fn run(daemon: &Weak<Daemon>) {
    let sys = SysDevices::default();
    let mut watched: BTreeMap<Medium, Watched> = BTreeMap::new();
    let mut flushed: BTreeMap<String, Instant> = BTreeMap::new();
    let mut rounds: BTreeMap<Medium, Round> = BTreeMap::new();
    let flushing: Arc<Mutex<BTreeSet<Medium>>> = Arc::default();
    let mut searched: Option<Instant> = None;
    loop {
        let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        let guests = daemon.part::<Flusher>().idle_guests();
        if guests.is_empty() {
            watched.clear();
            drop(daemon);
            thread::park();
            continue;
        }
        if searched.is_none_or(|at| at.elapsed() > SEARCH_INTERVAL) {
            daemon.find_devices();
            searched = Some(Instant::now());
        }
        let media = daemon.media_of(&guests);
        watched.retain(|medium, _| media.contains(medium));
        rounds.retain(|medium, _| media.contains(medium));
        for medium in media {
            let now = Instant::now();
            if flushing.lock().contains(&medium) {
                watched.remove(&medium);
                continue;
            }
            let Some(requests) = daemon.requests_of(&medium, &sys) else { continue };
            let known =
                watched.entry(medium.clone()).or_insert_with(|| Watched::new(u64::MAX, now));
            if requests.in_flight > 0 || requests.completed != known.completed {
                *known = Watched::new(requests.completed, now);
                continue;
            }
            let idle = now - known.idle_since;
            let is_counted = known.counted.is_some_and(|at| now - at < COUNT_INTERVAL);
            if idle < IDLE_TIME || is_counted {
                continue;
            }
            known.counted = Some(now);
            let served = daemon.served_on(&medium);
            let vms: BTreeSet<&str> = served.iter().map(|served| served.disk.vm()).collect();
            let candidates: Vec<Candidate> = guests
                .iter()
                .filter(|guest| {
                    let rested = flushed.get(&guest.vm).map(Instant::elapsed);
                    may_be_chosen(guest, &vms, rested) && !daemon.is_migrating(&guest.vm)
                })
                .filter_map(|guest| daemon.candidate(guest, &medium))
                .collect();
            let round = rounds.entry(medium.clone()).or_default();
            if let Some(guest) = choose(&candidates, idle, round) {
                flushed.insert(guest.vm.clone(), now);
                begin(&daemon, guest.clone(), medium, &flushing);
            }
        }
        flushed.retain(|vm, _| guests.iter().any(|guest| guest.vm == *vm));
        drop(daemon);
        thread::park_timeout(SAMPLE_INTERVAL);
    }
}

impl Daemon {
    fn candidate(&self, guest: &GuestOptions, medium: &Medium) -> Option<Candidate> {
        let query = DirtyQuery { guest: Some(guest.vm.clone()), ..DirtyQuery::default() };
        let report = self.dirty(&query, None).ok()?;
        let guests = report.guests.iter().filter(|found| found.vm == guest.vm);
        let dirty = guests.filter_map(|found| self.dirty_on(found, medium)).max()?;
        Some(Candidate { vm: guest.vm.clone(), dirty, dirty_min: guest.flush_min.0 })
    }
}

/// Flushes a guest on a thread of its own, because it may take long. One guest at a time is flushed
/// to a device.
fn begin(
    daemon: &Arc<Daemon>,
    guest: Candidate,
    medium: Medium,
    flushing: &Arc<Mutex<BTreeSet<Medium>>>,
) {
    flushing.lock().insert(medium.clone());
    let (daemon, for_thread, device) = (Arc::clone(daemon), Arc::clone(flushing), medium.clone());
    let body = move || {
        flush(&daemon, &guest, &medium);
        for_thread.lock().remove(&medium);
    };
    if let Err(error) = thread::Builder::new().name("flush".into()).spawn(body) {
        tracing::error!(%error, "a guest is not flushed: a thread cannot be started");
        flushing.lock().remove(&device);
    }
}

/// Makes a guest write, until it has or until other requests come.
fn flush(daemon: &Arc<Daemon>, guest: &Candidate, medium: &Medium) {
    let before = daemon.disturbances(medium, &guest.vm);
    let is_disturbed = || daemon.disturbances(medium, &guest.vm) != before;
    let (vm, device) = (guest.vm.as_str(), medium.name.as_str());
    match daemon.flush_guest_until(vm, None, &is_disturbed) {
        Ok(report) => tracing::debug!(
            vm,
            device,
            "the guest wrote {} bytes while its device was idle",
            report.written_bytes
        ),
        Err(error) => {
            tracing::warn!(vm, device, "the guest cannot be flushed: {}", error.message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(vm: &str, dirty: u64) -> Candidate {
        Candidate { vm: vm.into(), dirty, dirty_min: 100 }
    }

    #[test]
    fn only_rested_guests_on_the_device_are_counted() {
        let guest = GuestOptions { vm: "web".into(), ..GuestOptions::default() };
        assert_eq!(guest.flush_interval.0, 30_000_000_000);
        let rested = |seconds| Some(Duration::from_secs(seconds));
        let vms = BTreeSet::from(["db", "web"]);
        assert!(may_be_chosen(&guest, &vms, None) && may_be_chosen(&guest, &vms, rested(30)));
        assert!(!may_be_chosen(&guest, &vms, rested(29)), "too soon");
        assert!(!may_be_chosen(&guest, &BTreeSet::from(["db"]), None), "on another device");
    }

    #[test]
    fn the_guest_with_the_most_dirty_data_is_chosen() {
        let guests = [candidate("little", 99), candidate("some", 500), candidate("most", 900)];
        let chosen = |guests: &[Candidate], idle: Duration| {
            choose(guests, idle, &mut Round::new()).map(|guest| guest.vm.clone())
        };
        assert_eq!(chosen(&guests, IDLE_TIME).as_deref(), Some("most"));
        assert_eq!(chosen(&guests, Duration::from_millis(999)), None);
        assert_eq!(chosen(&guests[..1], IDLE_TIME), None, "too little");
        let nothing = Candidate { dirty_min: 0, ..candidate("clean", 0) };
        assert_eq!(chosen(&[nothing], IDLE_TIME), None);
    }

    #[test]
    fn a_guest_that_always_claims_the_most_has_one_turn_in_a_round() {
        let guests = [candidate("a", 500), candidate("liar", u64::MAX), candidate("b", 900)];
        let mut round = Round::new();
        let mut next = |guests: &[Candidate]| {
            choose(guests, IDLE_TIME, &mut round).map(|guest| guest.vm.clone()).unwrap()
        };
        let turns: Vec<String> = (0..6).map(|_| next(&guests)).collect();
        assert_eq!(turns, ["liar", "b", "a", "liar", "b", "a"]);
        // Those that have nothing to write now do not hold the round up.
        assert_eq!(next(&guests[..2]), "liar");
        assert_eq!(next(&guests[1..2]), "liar");
    }
}

//! Eviction: which pages leave, and when.
//!
//! While more of the guest's memory is in the host's than its limit, a hand goes around the memory,
//! as that of a clock. It takes away what it meets, but for pages that have come back, or into
//! being, since it was there last: these are *hot* for some rounds. Nor does it take pages that do
//! not become smaller. What the guest reads and writes without a fault is not seen, so a page in
//! use may leave; it comes back at the price of one fault, and stays for longer then.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::fstat;

use crate::away::{AwayPages, EVICTED_AT_ONCE, Evicted};
use crate::counts::EvictionCounts;
use crate::folios::{Folio, Folios};
use crate::memory::MappedMemory;
use crate::store::PAGE;
use crate::tripwire::Tripwire;
use crate::userfault::UserFault;
use crate::vmm::Vmm;

/// The pages at which the hand looks at a time.
const BATCH: u64 = EVICTED_AT_ONCE as u64;
/// For how many rounds of the hand a page that came back stays.
const HOT_ROUNDS: u8 = 4;
/// The same for a page that came into being.
const NEW_ROUNDS: u8 = 1;
/// For how long a page stays that does not become smaller, in seconds: what is in it may change.
const HARD_S: u32 = 60;
/// The hand rests when it has found nothing in so many rounds.
const FRUITLESS_ROUNDS: u64 = HOT_ROUNDS as u64 + 1;
/// For how long it rests then, and when the store has no memory.
const REST: Duration = Duration::from_secs(1);
/// It rests for twice as long each time, up to this.
const REST_MAX: Duration = Duration::from_secs(32);
/// The pause before room in the store is looked for again.
const ROOM_PAUSE: Duration = Duration::from_micros(50);
/// How far below its limit a guest is brought, at most: a 64th of the limit, and so many bytes.
const SLACK_MAX: u64 = 4 << 20;
/// A guest that grows faster than pages leave waits when it is so much over its limit: a 32nd of
/// the limit, but not more than this.
const OVERSHOOT_MAX: u64 = 16 << 20;

/// The eviction of a guest.
#[derive(Debug)]
pub(crate) struct Eviction {
    pub away: AwayPages,
    /// None without the right: nothing leaves then.
    folios: Option<Folios>,
    /// For how many rounds each page is hot, by mapping.
    heat: Vec<Vec<u8>>,
    /// Until which second of this pager's life each page stays, by mapping, because it does not
    /// become smaller.
    hard: Vec<Vec<u32>>,
    begun: Instant,
    /// The pager's view of each mapping, by its number.
    views: Vec<Option<usize>>,
    hand: (usize, u64),
    /// The pages at which the hand has looked since a page has left.
    fruitless: u64,
    rests_until: Option<Instant>,
    next_rest: Duration,
    limit: u64,
    resident: u64,
    is_over: bool,
    /// Whether pages have come or gone since the last look.
    is_active: bool,
    doubt: &'static str,
    counts: EvictionCounts,
}

impl Eviction {
    /// Eviction of `memory`, whose mappings have the views of the same numbers.
    pub fn new(away: AwayPages, vmm: &Vmm, memory: &[MappedMemory]) -> Self {
        let mapped: Vec<MappedMemory> =
            (0..).map_while(|part| away.mapping(part).cloned()).collect();
        let view = |part: &MappedMemory| memory.iter().position(|other| other.start == part.start);
        let folios = Folios::open(vmm)
            .ok()
            .filter(|folios| memory.first().is_none_or(|part| folios.at(part.start, 1).is_ok()));
        Self {
            folios,
            heat: mapped.iter().map(|part| vec![0; (part.length() / PAGE) as usize]).collect(),
            hard: mapped.iter().map(|part| vec![0; (part.length() / PAGE) as usize]).collect(),
            begun: Instant::now(),
            views: mapped.iter().map(view).collect(),
            away,
            hand: (0, 0),
            fruitless: 0,
            rests_until: None,
            next_rest: REST,
            limit: u64::MAX,
            resident: 0,
            is_over: false,
            is_active: false,
            doubt: "",
            counts: EvictionCounts::default(),
        }
    }

    /// Whether the kernel says what pages are part of, without which none may leave.
    pub fn can_evict(&self) -> bool {
        self.folios.is_some()
    }

    /// Sets the most bytes of the guest's memory that are to be in the host's; `None` for no limit.
    pub fn set_limit(&mut self, bytes: Option<u64>) {
        self.limit = bytes.unwrap_or(u64::MAX);
        self.counts.limit_bytes = bytes.unwrap_or(0);
        self.is_over = false;
        self.fruitless = 0;
        self.rests_until = None;
        self.next_rest = REST;
    }

    /// What has left, and what has come back.
    pub fn counts(&self) -> EvictionCounts {
        let store = self.away.store();
        let (filled, _) = store.entries();
        let swapped = store.swap_counts();
        let counts = self.away.counts();
        EvictionCounts {
            resident_bytes: self.resident,
            away_bytes: self.away.count() * PAGE,
            filled_bytes: filled * PAGE,
            store_bytes: store.bytes(),
            file_bytes: store.swap_bytes(),
            file_written: swapped.written,
            file_read: swapped.read,
            file_failed: swapped.failed,
            file_obstacle: store.swap_obstacle().to_owned(),
            evicted: counts.evicted,
            brought: counts.brought,
            wanted: counts.wanted,
            overwritten: counts.overwritten,
            existing: counts.existing,
            damaged: self.away.known_damaged(),
            obstacle: if self.counts.obstacle.is_empty() {
                self.doubt.to_owned()
            } else {
                self.counts.obstacle.clone()
            },
            ..self.counts.clone()
        }
    }

    /// No page leaves for this reason; pages may if it is empty.
    pub fn set_obstacle(&mut self, reason: &str) {
        if self.counts.obstacle != reason {
            reason.clone_into(&mut self.counts.obstacle);
        }
    }

    /// No page leaves for the moment, until it is known who has the memory; pages may if it is
    /// empty.
    pub fn set_doubt(&mut self, reason: &'static str) {
        self.doubt = reason;
    }

    /// All pages come in for this reason, and none leaves; it ends with an empty one.
    pub fn set_retreat(&mut self, reason: &str) {
        if self.counts.retreat != reason {
            reason.clone_into(&mut self.counts.retreat);
        }
    }

    /// Whether pages have to come in now.
    pub fn is_retreating(&self) -> bool {
        !self.counts.retreat.is_empty() && !self.away.is_complete()
    }

    /// Whether pages have to leave now, and can.
    pub fn is_busy(&self) -> bool {
        self.is_wanted() && self.away.store().has_room()
    }

    /// Whether pages have to leave now.
    fn is_wanted(&self) -> bool {
        self.is_over
            && self.counts.retreat.is_empty()
            && self.counts.obstacle.is_empty()
            && self.doubt.is_empty()
            && self.folios.is_some()
            && self.rests_until.is_none_or(|until| until <= Instant::now())
    }

    /// When the hand goes on, if it rests though pages have to leave.
    pub fn rest(&self) -> Option<Duration> {
        let now = Instant::now();
        let until = self.rests_until.filter(|until| self.is_over && *until > now)?;
        Some(until - now)
    }

    /// How far below the limit pages leave.
    fn slack(&self) -> u64 {
        (self.limit / 64).min(SLACK_MAX)
    }

    /// Counts what of the memory's files is in memory. The kernel counts what it has swapped out,
    /// too.
    pub fn measure(&mut self, tripwires: &[Tripwire]) {
        let mut seen = Vec::new();
        let mut resident = 0;
        let is_mapped =
            |part: &usize| self.away.mapping(*part).is_some_and(|mapping| mapping.length() > 0);
        for view in (0..self.views.len()).filter(is_mapped).filter_map(|part| self.views[part]) {
            let Some(found) = tripwires.get(view).and_then(|view| fstat(view.file()).ok()) else {
                continue;
            };
            let file = (found.st_dev, found.st_ino);
            if !seen.contains(&file) {
                seen.push(file);
                resident += found.st_blocks as u64 * 512;
            }
        }
        self.resident = resident;
        self.is_over |= resident > self.limit;
        self.is_over &= resident > self.limit.saturating_sub(self.slack());
    }

    /// Whether pages have come or gone since this was last asked.
    pub fn was_active(&mut self) -> bool {
        std::mem::take(&mut self.is_active)
    }

    /// Whether the guest has to wait until pages have left.
    pub fn is_far_over(&self) -> bool {
        let most = self.limit.saturating_add((self.limit / 32).min(OVERSHOOT_MAX));
        self.resident > most && self.is_wanted()
    }

    /// Pages of a range of addresses have come back, or into being.
    pub fn touched(&mut self, address: u64, bytes: u64, is_back: bool) {
        if !is_back && self.next_rest > REST {
            // There is something new to look at.
            self.next_rest = REST;
            self.rests_until = self.rests_until.map(|until| until.min(Instant::now() + REST));
        }
        let rounds = if is_back { HOT_ROUNDS } else { NEW_ROUNDS };
        for (part, heat) in self.heat.iter_mut().enumerate() {
            let Some(memory) = self.away.mapping(part) else { continue };
            if memory.range().contains(&address) {
                let first = ((address - memory.start) / PAGE) as usize;
                let last = (first + (bytes / PAGE) as usize).min(heat.len());
                heat[first..last].iter_mut().for_each(|heat| *heat = rounds.max(*heat));
            }
        }
        self.resident += bytes;
        self.is_active = true;
        // Not only at the next look.
        self.is_over |= self.resident > self.limit;
    }

    /// Takes pages away until the guest is below its limit, for at most `time`, or until a fault
    /// waits. For room in the store it waits for the swap file only if `has_to_wait`.
    pub fn evict_some(
        &mut self,
        faults: &UserFault,
        tripwires: &[Tripwire],
        time: Duration,
        has_to_wait: bool,
    ) {
        let begun = Instant::now();
        self.measure(tripwires);
        while self.is_wanted() && begun.elapsed() < time {
            if !self.away.store().has_room() {
                self.progress(faults);
                if !self.away.store().has_room() {
                    if !has_to_wait {
                        break;
                    }
                    std::thread::sleep(ROOM_PAUSE);
                    continue;
                }
            }
            self.look(faults, tripwires);
            self.measure(tripwires);
            if faults.has_faults() {
                break;
            }
        }
    }

    /// Looks at the next pages.
    fn look(&mut self, faults: &UserFault, tripwires: &[Tripwire]) {
        let all: u64 = self.heat.iter().map(|part| part.len() as u64).sum();
        if self.fruitless > all * FRUITLESS_ROUNDS {
            self.have_rest();
            return;
        }
        let (part, page) = self.hand;
        let Some(heat) = self.heat.get_mut(part) else {
            // A guest without memory that could leave rests, too.
            self.hand = (0, 0);
            self.fruitless += 1;
            return;
        };
        let end = (page + BATCH).min(heat.len() as u64);
        self.hand = if end < heat.len() as u64 { (part, end) } else { (part + 1, 0) };
        self.fruitless += end - page;
        let mut cold = Vec::new();
        let now = self.begun.elapsed().as_secs() as u32;
        let range = page as usize..end as usize;
        let pages = heat[range.clone()].iter_mut().zip(&self.hard[part][range]);
        for (at, (heat, hard_until)) in (page..end).zip(pages) {
            if *heat > 0 {
                *heat -= 1;
            } else if *hard_until <= now {
                cold.push(at);
            }
        }
        let view = self.views[part].and_then(|view| tripwires.get(view));
        let mapping = self.away.mapping(part).filter(|mapping| mapping.length() > 0);
        let (Some(view), Some(mapping), Some(folios)) = (view, mapping, &self.folios) else {
            return;
        };
        if cold.is_empty() {
            return;
        }
        let start = mapping.start;
        // A VMM that has unmapped it has none.
        let Ok(found) = folios.at(start + page * PAGE, (end - page) as usize) else { return };
        let is_large = |at: &&u64| found[(**at - page) as usize] == Folio::Large;
        self.counts.large += cold.iter().filter(is_large).count() as u64;
        cold.retain(|at| found[(at - page) as usize] == Folio::Single);
        let mut outcomes = Vec::new();
        for run in cold.chunk_by(|one, next| one + 1 == *next) {
            let addresses = start + run[0] * PAGE..start + (run[run.len() - 1] + 1) * PAGE;
            let each = &mut |at, outcome| outcomes.push((run[0] + at, outcome));
            self.away.evict(part, addresses, faults, view.file(), each);
        }
        for (at, outcome) in outcomes {
            self.note(outcome, part, at);
        }
    }

    fn note(&mut self, outcome: Evicted, part: usize, page: u64) {
        match outcome {
            Evicted::Gone => {
                self.fruitless = 0;
                self.next_rest = REST;
                self.is_active = true;
            }
            Evicted::Leased => self.counts.leased += 1,
            Evicted::Disturbed => self.counts.disturbed += 1,
            Evicted::Incompressible => {
                self.counts.incompressible += 1;
                let until = self.begun.elapsed().as_secs() as u32 + HARD_S;
                self.hard[part][page as usize] = until;
            }
            Evicted::Full => {
                self.counts.full += 1;
                self.have_rest();
            }
        }
    }

    fn have_rest(&mut self) {
        self.fruitless = 0;
        self.rests_until = Some(Instant::now() + self.next_rest);
        self.next_rest = (self.next_rest * 2).min(REST_MAX);
    }

    /// Goes on with the swap file, if there is one: pages that have been read come back.
    pub fn progress(&mut self, faults: &UserFault) {
        for (address, time) in self.away.progress(faults) {
            self.touched(address, PAGE, true);
            if let Some(time) = time {
                self.counts.file_fault_ns.record(time.as_nanos() as u64, 1);
                self.note_fault(time);
            }
        }
    }

    /// Notes how long the fault of a page that was away took.
    pub fn note_fault(&mut self, time: Duration) {
        let time_ns = time.as_nanos() as u64;
        self.counts.fault_ns.record(time_ns, 1);
        self.counts.fault_sum_ns = self.counts.fault_sum_ns.saturating_add(time_ns);
    }
}

/// How many descriptors a VMM has; 0 if the kernel does not say it so (before Linux 6.2). A device
/// that is plugged in, or a peer that gets the guest's memory, changes it.
pub(crate) fn count_descriptors(vmm: &Vmm) -> u64 {
    std::fs::metadata(vmm.path("fd")).map_or(0, |found| found.size())
}

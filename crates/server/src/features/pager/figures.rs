//! What the pagers of guests report, from the tables that they share with the daemon.

use std::path::Path;
use std::sync::Arc;

use fathom_control::{GuestPager, GuestPagerHold, GuestPagerState};
use fathom_guest_memory::{
    EvictionHold, LEASE_FOLDER, PagerFigures, PagerPhase, TableOwner, published_now_ns,
};
use fathom_layers::guest_pages::GuestPages;

use super::pages_of;
use crate::daemon::{Daemon, Served};

/// A pager that has reported nothing for longer is silent. It looks around each 10 s at least.
const SILENCE_NS: u64 = 30_000_000_000;

/// A machine with a pager.
pub(super) struct PagedMachine {
    /// Its name; may be empty.
    pub vm: String,
    pub pager: GuestPager,
}

impl PagedMachine {
    /// Its name for messages, and for programs: its process without a name.
    pub fn name(&self) -> String {
        if self.vm.is_empty() { self.pager.process.to_string() } else { self.vm.clone() }
    }
}

/// The pager of a guest, if it has one: a look into a file in memory for each file of its memory.
pub(super) fn of_pages(pages: &GuestPages) -> Option<GuestPager> {
    let (owner, figures) = PagerFigures::read(Path::new(LEASE_FOLDER), &pages.files())?;
    Some(report(owner, &figures, published_now_ns()))
}

fn report(owner: TableOwner, figures: &PagerFigures, now_ns: u64) -> GuestPager {
    let age_ns = now_ns.saturating_sub(figures.published_ns);
    let is_silent = age_ns > SILENCE_NS;
    GuestPager {
        process: owner.process,
        pager: figures.process,
        state: match figures.phase {
            PagerPhase::Detached => GuestPagerState::Detached,
            PagerPhase::Orphaned => GuestPagerState::Orphaned,
            _ if is_silent => GuestPagerState::Silent,
            PagerPhase::Attached => GuestPagerState::Attached,
            PagerPhase::Detaching => GuestPagerState::Detaching,
            PagerPhase::Unknown => GuestPagerState::Unknown,
        },
        age_ns,
        hold: match figures.hold {
            EvictionHold::None => GuestPagerHold::None,
            EvictionHold::Looking => GuestPagerHold::Looking,
            EvictionHold::Obstacle => GuestPagerHold::Obstacle,
            EvictionHold::Retreat => GuestPagerHold::Retreat,
            EvictionHold::Unknown => GuestPagerHold::Unknown,
        },
        held_ns: now_ns.saturating_sub(figures.held_since_ns),
        limit_bytes: figures.limit_bytes,
        resident_bytes: figures.resident_bytes,
        away_bytes: figures.away_bytes,
        filled_bytes: figures.filled_bytes,
        store_bytes: figures.store_bytes,
        file_bytes: figures.file_bytes,
        evicted_pages: figures.evicted,
        brought_pages: figures.brought,
        wanted_pages: figures.wanted,
        existing_pages: figures.existing,
        damaged_pages: figures.damaged,
        overwritten_pages: figures.overwritten,
        faults: figures.faults,
        away_faults: figures.away_faults,
        fault_sum_ns: figures.fault_sum_ns,
        fault_p99_ns: figures.fault_p99_ns,
    }
}

impl Daemon {
    /// The machines with a pager on vhost-user disks, each once.
    pub(super) fn paged_machines(&self) -> Vec<PagedMachine> {
        let mut guests: Vec<(Arc<GuestPages>, Option<GuestPager>)> = Vec::new();
        let mut machines: Vec<PagedMachine> = Vec::new();
        for served in self.served() {
            let Some(pages) = pages_of(&served) else { continue };
            let known = guests.iter().find(|(other, _)| Arc::ptr_eq(other, &pages));
            let pager = known.map_or_else(|| of_pages(&pages), |(_, pager)| pager.clone());
            if let Some(pager) = &pager {
                add(&mut machines, &served, pager);
            }
            if known.is_none() {
                guests.push((pages, pager));
            }
        }
        machines
    }
}

/// Adds the machine of a disk, unless another disk of it was there.
fn add(machines: &mut Vec<PagedMachine>, served: &Served, pager: &GuestPager) {
    let vm = served.live().definition.vm.clone();
    // Disks whose connections see the memory differently for a moment are of one machine.
    match machines.iter_mut().find(|machine| machine.pager.process == pager.process) {
        Some(machine) if machine.vm.is_empty() => machine.vm = vm,
        Some(_) => {}
        None => machines.push(PagedMachine { vm, pager: pager.clone() }),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_pager_that_does_not_report_is_silent_and_its_figures_stay() {
        let owner = TableOwner { process: 7, start_ticks: 0, namespace: 0 };
        let figures = PagerFigures {
            process: 8,
            published_ns: 100 * S,
            held_since_ns: 90 * S,
            phase: PagerPhase::Attached,
            away_bytes: 4096,
            ..PagerFigures::default()
        };
        let at = |seconds: u64| report(owner, &figures, seconds * S);
        assert_eq!((at(130).state, at(130).age_ns), (GuestPagerState::Attached, 30 * S));
        let silent = report(owner, &figures, 145 * S);
        assert_eq!((silent.state, silent.age_ns), (GuestPagerState::Silent, 45 * S));
        assert_eq!((silent.process, silent.pager, silent.away_bytes), (7, 8, 4096));
        assert_eq!((silent.hold, silent.held_ns), (GuestPagerHold::None, 55 * S));
        // One that has said that it ends is not silent.
        for (phase, state) in [
            (PagerPhase::Detached, GuestPagerState::Detached),
            (PagerPhase::Orphaned, GuestPagerState::Orphaned),
        ] {
            let ended = PagerFigures { phase, ..figures };
            assert_eq!(report(owner, &ended, 1000 * S).state, state);
        }
        // From the future, as only a hostile table has it.
        let hostile = PagerFigures {
            published_ns: u64::MAX,
            held_since_ns: u64::MAX,
            hold: EvictionHold::Unknown,
            phase: PagerPhase::Unknown,
            away_bytes: u64::MAX,
            ..figures
        };
        let found = report(owner, &hostile, S);
        assert_eq!((found.age_ns, found.held_ns, found.away_bytes), (0, 0, u64::MAX));
        assert_eq!((found.state, found.hold), (GuestPagerState::Unknown, GuestPagerHold::Unknown));
    }
}

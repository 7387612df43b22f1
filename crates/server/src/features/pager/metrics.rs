//! Metrics of guests' memory that the host has swapped out, or their pagers have taken away.

use fathom_control::{GuestPager, GuestPagerHold, GuestPagerState};

use super::WatchedDisk;
use super::figures::PagedMachine;
use crate::daemon::metrics::{Family, MetricsText};

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// What the pagers report.
const FAMILIES: &[Family<'_, GuestPager, f64>] = &[
    ("fathom_pager_age_seconds", GAUGE, "Time since the pager has reported.", |pager| {
        pager.age_ns as f64 / 1e9
    }),
    (
        "fathom_pager_limit_bytes",
        GAUGE,
        "The most memory of the guest that is to be in the host's memory; 0 without a limit.",
        |pager| pager.limit_bytes as f64,
    ),
    ("fathom_pager_resident_bytes", GAUGE, "Memory of the guest that is there.", |pager| {
        pager.resident_bytes as f64
    }),
    ("fathom_pager_away_bytes", GAUGE, "Memory of the guest that is away.", |pager| {
        pager.away_bytes as f64
    }),
    (
        "fathom_pager_filled_bytes",
        GAUGE,
        "The part of it that is kept as a number for each page.",
        |pager| pager.filled_bytes as f64,
    ),
    (
        "fathom_pager_store_bytes",
        GAUGE,
        "Memory of the host that the contents of the rest take.",
        |pager| pager.store_bytes as f64,
    ),
    (
        "fathom_pager_file_bytes",
        GAUGE,
        "Bytes of the pager's swap file that contents take.",
        |pager| pager.file_bytes as f64,
    ),
    (
        "fathom_pager_held",
        GAUGE,
        "Whether no page leaves, because somebody is not ready for it or it is not safe.",
        |pager| {
            let is_held = matches!(pager.hold, GuestPagerHold::Obstacle | GuestPagerHold::Retreat);
            f64::from(u8::from(is_held))
        },
    ),
    ("fathom_pager_evicted_pages_total", COUNTER, "Pages that have left.", |pager| {
        pager.evicted_pages as f64
    }),
    ("fathom_pager_brought_pages_total", COUNTER, "Pages that have come back.", |pager| {
        pager.brought_pages as f64
    }),
    (
        "fathom_pager_wanted_pages_total",
        COUNTER,
        "Of these, pages that the daemon wanted.",
        |pager| pager.wanted_pages as f64,
    ),
    (
        "fathom_pager_overwritten_pages_total",
        COUNTER,
        "Pages that came back as zeroes, because a device was going to overwrite them.",
        |pager| pager.overwritten_pages as f64,
    ),
    (
        "fathom_pager_existing_pages_total",
        COUNTER,
        "Pages that existed when they were to come back.",
        |pager| pager.existing_pages as f64,
    ),
    (
        "fathom_pager_damaged_pages",
        GAUGE,
        "Pages whose content is damaged, so that they cannot come back.",
        |pager| pager.damaged_pages as f64,
    ),
    ("fathom_pager_faults_total", COUNTER, "Faults of missing pages.", |pager| pager.faults as f64),
    (
        "fathom_pager_away_faults_total",
        COUNTER,
        "Of these, faults of pages that were away.",
        |pager| pager.away_faults as f64,
    ),
    (
        "fathom_pager_away_fault_seconds_total",
        COUNTER,
        "The time of the faults of pages that were away.",
        |pager| pager.fault_sum_ns as f64 / 1e9,
    ),
    (
        "fathom_pager_away_fault_p99_seconds",
        GAUGE,
        "The 99th percentile of these times, since the pager began.",
        |pager| pager.fault_p99_ns as f64 / 1e9,
    ),
];

/// The pagers of guests. There are no samples of a machine without one, nor after its detaching but
/// for the state.
pub(super) fn of_pagers(page: &mut MetricsText, machines: &[PagedMachine]) {
    if machines.is_empty() {
        return;
    }
    let processes: Vec<String> =
        machines.iter().map(|machine| machine.pager.process.to_string()).collect();
    let labelled = machines.iter().zip(&processes);
    let labelled = labelled.map(|(machine, process)| {
        ([("vm", machine.vm.as_str()), ("process", process.as_str())], &machine.pager)
    });
    let state = "fathom_pager_state";
    page.family(state, GAUGE, "What the pager of the guest is doing: 1 for the current state.");
    for ([vm, process], pager) in labelled.clone() {
        for of in GuestPagerState::ALL {
            let labels = [vm, process, ("state", of.name())];
            page.sample(state, &labels, u8::from(pager.state == of));
        }
    }
    page.families(FAMILIES, &labelled.filter(|(_, pager)| !pager.has_detached()));
}

/// The memory of the guest of each disk with the layer `swap-watch`.
pub(super) fn of_memory(page: &mut MetricsText, disks: &[WatchedDisk]) {
    let families = [
        (
            "fathom_guest_memory_resident_bytes",
            "Memory of the disk's guest that is in the host's memory.",
        ),
        (
            "fathom_guest_memory_swapped_bytes",
            "Memory of the disk's guest that the host has swapped out.",
        ),
    ];
    for (place, (name, help)) in families.into_iter().enumerate() {
        page.family(name, "gauge", help);
        for disk in disks {
            if let Ok(found) = disk.measured.found {
                let labels = [("disk", disk.name.as_str()), ("vm", &disk.vm)];
                page.sample(name, &labels, [found.resident, found.swapped][place]);
            }
        }
    }
}

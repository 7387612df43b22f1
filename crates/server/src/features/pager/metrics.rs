//! Metrics of guests' memory that the host has swapped out.

use super::WatchedDisk;
use crate::daemon::metrics::MetricsText;

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

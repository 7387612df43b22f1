//! Metrics of the guests' dirty pages, by guest and by disk, and of flushes.

use std::collections::BTreeMap;

use fathom_control::{DirtyReport, GuestDirty};

use crate::daemon::metrics::MetricsText;

/// The value of a family for one guest; `None` if it is not known.
type Value = fn(&GuestDirty) -> Option<f64>;

/// The dirty pages of each guest, and of each disk those that the guest will write to it.
pub(crate) fn of_dirty(page: &mut MetricsText, report: &DirtyReport) {
    let families: [(&str, &str, Value); 3] = [
        ("fathom_guest_dirty_bytes", "Dirty pages in the guest's memory.", |guest| {
            guest.dirty_bytes.map(|bytes| bytes as f64)
        }),
        (
            "fathom_guest_writeback_bytes",
            "Pages in the guest's memory that are being written.",
            |guest| guest.writeback_bytes.map(|bytes| bytes as f64),
        ),
        ("fathom_guest_dirty_count_seconds", "Time of the count of dirty pages.", |guest| {
            guest.dirty_bytes.map(|_| guest.count_ns as f64 / 1e9)
        }),
    ];
    for (name, help, value) in families {
        page.family(name, "gauge", help);
        for guest in &report.guests {
            let number = guest.number.to_string();
            if let Some(value) = value(guest) {
                page.sample(name, &[("guest", &number), ("vm", &guest.vm)], value);
            }
        }
    }
    let mut disks: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for guest in &report.guests {
        let devices = guest.devices.iter().flatten();
        for (disk, device) in
            devices.flat_map(|device| device.disks.iter().map(move |disk| (disk, device)))
        {
            let sums = disks.entry((disk, &guest.vm)).or_default();
            sums.0 += device.dirty_bytes;
            sums.1 += device.writeback_bytes;
        }
    }
    let families = [
        (
            "fathom_disk_dirty_bytes",
            "Dirty pages in the guest's memory for the disk. Pages of a device on several disks \
             count for each of them.",
        ),
        ("fathom_disk_writeback_bytes", "Pages that the guest is writing to the disk, likewise."),
    ];
    for (place, (name, help)) in families.into_iter().enumerate() {
        page.family(name, "gauge", help);
        for ((disk, vm), (dirty, writeback)) in &disks {
            page.sample(name, &[("disk", disk), ("vm", vm)], [dirty, writeback][place]);
        }
    }
}

//! The metrics of flushes.

use std::collections::BTreeMap;

use super::FlushCounts;
use crate::daemon::metrics::{Family, MetricsText};

/// The flushes of each virtual machine.
pub(crate) fn of_flushes(page: &mut MetricsText, counts: &BTreeMap<String, FlushCounts>) {
    let families: [Family<'_, FlushCounts>; 3] = [
        ("fathom_guest_flushes_total", "counter", "Flushes of the guest.", |counts| counts.flushes),
        (
            "fathom_guest_flushes_incomplete_total",
            "counter",
            "Flushes that ended before all dirty data was written.",
            |counts| counts.incomplete,
        ),
        (
            "fathom_guest_flushed_bytes_total",
            "counter",
            "Bytes that the guest wrote during its flushes.",
            |counts| counts.written_bytes,
        ),
    ];
    page.families(&families, &counts.iter().map(|(vm, counts)| ([("vm", vm.as_str())], counts)));
}

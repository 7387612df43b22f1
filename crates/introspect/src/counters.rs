//! The kernel's own counters of its memory.

use crate::kernel::Kernel;
use crate::layout::Types;

/// The addresses of the counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct CounterPlaces {
    nodes: Option<u64>,
    dirty: Option<u64>,
    writeback: Option<u64>,
    file_pages: Option<u64>,
    free: Option<u64>,
    total: Option<u64>,
}

impl CounterPlaces {
    pub fn new(types: &Types<'_>, symbol: impl Fn(&str) -> Option<u64>) -> Self {
        let node = |name| {
            let index = types.enumerator("node_stat_item", name)?;
            Some(symbol("vm_node_stat")?.wrapping_add(index.wrapping_mul(8)))
        };
        let zone = |name| {
            let index = types.enumerator("zone_stat_item", name)?;
            Some(symbol("vm_zone_stat")?.wrapping_add(index.wrapping_mul(8)))
        };
        Self {
            nodes: symbol("vm_node_stat"),
            dirty: node("NR_FILE_DIRTY"),
            writeback: node("NR_WRITEBACK"),
            file_pages: node("NR_FILE_PAGES"),
            free: zone("NR_FREE_PAGES"),
            total: symbol("_totalram_pages"),
        }
    }

    /// The address of the counters of all memory nodes together.
    pub fn node_counts(&self) -> Option<u64> {
        self.nodes
    }
}

/// The counters of a kernel, in bytes; `None` if a counter cannot be read. Each processor of the
/// guest counts some pages locally before it adds them to these counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Dirty pages of files (`NR_FILE_DIRTY`).
    pub dirty: Option<u64>,
    /// Pages that are being written (`NR_WRITEBACK`).
    pub writeback: Option<u64>,
    /// Pages of files in memory, including buffers (`NR_FILE_PAGES`).
    pub file_pages: Option<u64>,
    /// Free memory (`NR_FREE_PAGES`).
    pub free: Option<u64>,
    /// Memory that the kernel manages.
    pub total: Option<u64>,
}

impl Kernel {
    /// Reads the current values of the kernel's counters.
    pub fn counters(&self) -> Counters {
        let bytes = |place: Option<u64>| {
            // The sum of the processors' parts can be negative for a moment.
            let pages = (self.u64(place?)? as i64).max(0) as u64;
            pages.checked_mul(crate::vmcoreinfo::PAGE)
        };
        let places = &self.counters;
        Counters {
            dirty: bytes(places.dirty),
            writeback: bytes(places.writeback),
            file_pages: bytes(places.file_pages),
            free: bytes(places.free),
            total: bytes(places.total),
        }
    }
}

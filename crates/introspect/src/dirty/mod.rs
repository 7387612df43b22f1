//! The dirty pages of a guest, read from outside: how many there are, the disks that will get them,
//! and the files that they belong to.
//!
//! The kernel itself counts its dirty pages: for the whole system (`vm_node_stat`, the source of
//! `/proc/meminfo`), and for each device that receives them (`bdi_writeback`). Each processor
//! collects small changes in a part of its own before it adds them to the shared counter, so the
//! exact number is the shared counter and the parts of all processors.
//!
//! ```text
//!  bdi_list ─▶ backing_dev_info ─▶ wb_list ─▶ bdi_writeback (one for each control group)
//!                │ owner                       ├─ stat: pages that are dirty, that are being written
//!                ▼                             └─ b_dirty, b_io, b_more_io, b_dirty_time
//!              block_device ─▶ gendisk                     └─▶ inode ─▶ i_pages (xarray, marked)
//!                                └─ slave_bdevs ─▶ the disks beneath (device mapper, md, bcache)
//! ```
//!
//! Nothing is counted until a count is requested. The kernel changes the lists meanwhile: every
//! link must point back, every writer must name its device, and a walk that finds a contradiction
//! is repeated and then reports that the answer is unknown.

mod budget;
mod devices;
mod files;
mod list;
mod mapped;
mod tables;
mod trail;
mod written;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::kernel::Kernel;
use crate::layout::Types;
use crate::vmcoreinfo::PAGE;
pub(crate) use budget::Budget;

pub(crate) use devices::KnownSuperBlocks;
pub use files::{DirtyFile, DirtyFiles};
pub use mapped::MappedDirty;
pub use tables::WrittenPages;
pub(crate) use trail::Trail;
pub use written::{ChangedPages, PageSample};

/// The most processors of a guest.
const PROCESSORS_MAX: u32 = 8192;
/// The most memory nodes of a guest.
const NODES_MAX: u32 = 1024;
/// The most steps of one count, each of which is an entry of a list or a part of a counter, and its
/// longest time.
const STEPS_MAX: u64 = 1 << 18;
const TIME_MAX: Duration = Duration::from_secs(2);
/// How often a walk is repeated that met a change.
const TRIES: usize = 4;

/// The addresses of the counters and lists.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirtyPlaces {
    /// The indexes of the two counters in `vm_node_stat`.
    node_dirty: Option<u64>,
    node_writeback: Option<u64>,
    /// Their indexes in `bdi_writeback.stat`.
    writer_dirty: Option<u64>,
    writer_writeback: Option<u64>,
    nodes: Option<Nodes>,
    pub node_count: Option<u64>,
    pub processor_count: Option<u64>,
    processor_offsets: Option<u64>,
    pub bdi_list: Option<u64>,
    /// The bit of `page.flags` that marks a dirty page.
    dirty_bit: Option<u64>,
}

/// Where the kernel has its memory nodes.
#[derive(Clone, Copy, Debug)]
enum Nodes {
    /// An array of pointers (`CONFIG_NUMA`).
    Array(u64),
    /// The only node.
    One(u64),
}

impl DirtyPlaces {
    pub fn new(types: &Types<'_>, symbol: impl Fn(&str) -> Option<u64>) -> Self {
        let node = |name| types.enumerator("node_stat_item", name);
        let writer = |name| types.enumerator("wb_stat_item", name).filter(|index| *index < 64);
        Self {
            node_dirty: node("NR_FILE_DIRTY"),
            node_writeback: node("NR_WRITEBACK"),
            writer_dirty: writer("WB_RECLAIMABLE"),
            writer_writeback: writer("WB_WRITEBACK"),
            nodes: symbol("node_data")
                .map(Nodes::Array)
                .or_else(|| symbol("contig_page_data").map(Nodes::One)),
            node_count: symbol("nr_node_ids"),
            processor_count: symbol("nr_cpu_ids"),
            processor_offsets: symbol("__per_cpu_offset"),
            bdi_list: symbol("bdi_list"),
            dirty_bit: types.enumerator("pageflags", "PG_dirty").filter(|bit| *bit < 64),
        }
    }
}

/// The guest kernel's object for a disk (`gendisk`), which the disk's requests lead to. One is
/// shared by the queues of a disk and by whoever counts.
#[derive(Debug, Default)]
pub struct DiskObject {
    address: AtomicU64,
}

impl DiskObject {
    /// Sets the address of the object; 0 if it is not known.
    pub(crate) fn set(&self, address: u64) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// The address of the object; 0 if it is not known.
    pub(crate) fn get(&self) -> u64 {
        self.address.load(Ordering::Relaxed)
    }

    /// Forgets the object: the disk has another guest.
    pub fn clear(&self) {
        self.set(0);
    }
}

/// A guest's dirty pages, in bytes; `None` if a number is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Dirty pages as the guest's `/proc/meminfo` shows them: without the parts of the processors.
    pub shown: Option<u64>,
    /// Pages in write-back, likewise.
    pub writeback_shown: Option<u64>,
    /// All dirty pages.
    pub dirty: Option<u64>,
    /// All pages in write-back.
    pub writeback: Option<u64>,
    /// The devices with dirty pages or with pages in write-back, and all devices on the given
    /// disks.
    pub devices: Option<Vec<DirtyDevice>>,
}

/// The dirty pages for one device of the guest: a disk with its partitions, a logical volume, or a
/// file system with several devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirtyDevice {
    /// The kernel's name of the device, such as `vda`, `dm-0` or `btrfs-1`.
    pub name: String,
    /// Dirty pages, in bytes.
    pub dirty: u64,
    /// Pages in write-back, in bytes.
    pub writeback: u64,
    /// Which of the given disks it lies on, by their place in the list.
    pub disks: Vec<usize>,
    /// Whether it also lies on devices that are not among the given disks.
    pub lies_elsewhere: bool,
}

impl Kernel {
    /// Counts the dirty pages now. `disks` are the disks to which devices are assigned. The effort
    /// is bounded, whatever the guest's memory says: what is too much is not known.
    pub fn dirty(&self, disks: &[Arc<DiskObject>]) -> Dirty {
        let mut budget = Budget::new(STEPS_MAX, TIME_MAX);
        if self.trail.is_due() {
            budget.remember();
        }
        let parts = self.processor_offsets(&budget);
        let parts = parts.as_deref();
        let mut found = self.total(parts, &budget);
        found.devices =
            parts.and_then(|parts| (0..TRIES).find_map(|_| self.devices(parts, disks, &budget)));
        if let Some(lines) = budget.into_lines() {
            self.trail.set(lines);
        }
        found
    }

    /// Counts the dirty pages now, without the devices that will get them.
    pub fn dirty_total(&self) -> Dirty {
        let budget = Budget::new(STEPS_MAX, TIME_MAX);
        self.total(self.processor_offsets(&budget).as_deref(), &budget)
    }

    /// The numbers of the whole system. `parts` are the offsets of the processors.
    fn total(&self, parts: Option<&[u64]>, budget: &Budget) -> Dirty {
        let shown = |index: Option<u64>| {
            let place = self.counters.node_counts()?.wrapping_add(index?.checked_mul(8)?);
            self.note(place, budget);
            Some(self.u64(place)? as i64)
        };
        let (dirty, writeback) = (shown(self.dirty.node_dirty), shown(self.dirty.node_writeback));
        let exact = |sum: Option<i64>, index: Option<u64>| {
            let own = self.node_parts(parts?, index?, budget)?;
            self.pages_in_bytes(sum?.checked_add(own)?)
        };
        Dirty {
            shown: dirty.and_then(|pages| self.pages_in_bytes(pages)),
            writeback_shown: writeback.and_then(|pages| self.pages_in_bytes(pages)),
            dirty: exact(dirty, self.dirty.node_dirty),
            writeback: exact(writeback, self.dirty.node_writeback),
            devices: None,
        }
    }

    /// A count of pages in bytes. A sum of parts that change can be negative for a moment. `None`
    /// if there is not so much memory.
    fn pages_in_bytes(&self, pages: i64) -> Option<u64> {
        let bytes = (pages.max(0) as u64).checked_mul(PAGE)?;
        (bytes <= self.memory.length()).then_some(bytes)
    }

    /// The numbers that are added to an address of a variable of each processor to get the
    /// processor's own.
    fn processor_offsets(&self, budget: &Budget) -> Option<Vec<u64>> {
        let count = self.u32(self.dirty.processor_count?)?;
        let place = self.dirty.processor_offsets?;
        if !(1..=PROCESSORS_MAX).contains(&count) {
            return None;
        }
        budget.take(u64::from(count))?;
        self.note(self.dirty.processor_count?, budget);
        for index in 0..u64::from(count) {
            self.note(place.wrapping_add(index * 8), budget);
        }
        (0..u64::from(count)).map(|index| self.u64(place.wrapping_add(index * 8))).collect()
    }

    /// The sum of all processors' parts of a counter of all nodes.
    fn node_parts(&self, offsets: &[u64], index: u64, budget: &Budget) -> Option<i64> {
        let place = self.layout.node_parts?;
        let counts = self.layout.node_part_counts?;
        let of_node = |node: u64| {
            budget.take(offsets.len() as u64)?;
            let parts = self.pointer(node.wrapping_add(place))?;
            let part = parts.wrapping_add(counts).wrapping_add(index);
            self.note(node.wrapping_add(place), budget);
            for offset in offsets {
                self.note(part.wrapping_add(*offset), budget);
            }
            offsets.iter().try_fold(0, |sum, offset| {
                Some(sum + i64::from(self.u8(part.wrapping_add(*offset))? as i8))
            })
        };
        match self.dirty.nodes? {
            Nodes::One(node) => of_node(node),
            Nodes::Array(array) => {
                let count = self.dirty.node_count.map_or(Some(1), |place| self.u32(place))?;
                if count > NODES_MAX {
                    return None;
                }
                self.note(array, budget);
                (0..u64::from(count)).try_fold(0, |sum, index| {
                    match self.u64(array.wrapping_add(index * 8))? {
                        // A number of a node without memory or processors.
                        0 => Some(sum),
                        node => Some(sum + of_node(node)?),
                    }
                })
            }
        }
    }

    /// The value of the `percpu_counter` at an address, with the parts of all processors.
    fn split_counter(&self, address: u64, offsets: &[u64], budget: &Budget) -> Option<i64> {
        budget.take(offsets.len() as u64)?;
        let sum = self.u64(address.wrapping_add(self.layout.counter_sum?))? as i64;
        let parts = self.pointer(address.wrapping_add(self.layout.counter_parts?))?;
        self.note(address.wrapping_add(self.layout.counter_sum?), budget);
        self.note(address.wrapping_add(self.layout.counter_parts?), budget);
        for offset in offsets {
            self.note(parts.wrapping_add(*offset), budget);
        }
        offsets.iter().try_fold(sum, |sum, offset| {
            let part = self.u32(parts.wrapping_add(*offset))? as i32;
            sum.checked_add(i64::from(part))
        })
    }
}

//! Finds out how long what a guest writes lives.
//!
//! Read [`LifetimesOptions`] first. The layer observes writes, and needs the insights of `classify`
//! above it. Content is born when the guest made it, and dies when its place in the file or on the
//! disk is written again, when its file becomes shorter or is deleted, and when the guest discards
//! the block. Nobody reports a deletion to a disk: somebody calls [`Lifetimes::check`] again and
//! again, which looks at the inodes of the files in the guest's memory. `docs/lifetimes.md` has the
//! rules.
//!
//! The paper, *Improving Virtualized Storage Performance with Sky* (Arulraj, Arpaci-Dusseau,
//! Arpaci-Dusseau), has these lifetimes in section 6.2, by system calls.

mod groups;
mod table;
#[cfg(test)]
mod tests;

use std::hash::BuildHasher;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_block::{
    Capabilities, Figure, Layer, LayerPart, LayerReport, Observer, ObserverPosition, OpenContext,
    Operation, Outcome, Request,
};
use fathom_failure::Failure;
use fathom_insight::Names;
use fathom_introspect::{FileState, Kernel, PresentFile};
use fathom_options::{Bytes, Check, Key};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use groups::{Cause, GroupBy, Lives};

use crate::GuestSlot;
use crate::kind::{LayerContext, LayerOptions, Rank};
use table::{BLOCK_MEMORY, Table, Write, is_of_file};

/// The smallest and the greatest table, in bytes.
const MEMORY_MIN: u64 = 64 << 10;
/// See [`MEMORY_MIN`].
const MEMORY_MAX: u64 = 4 << 30;
/// The files that are checked at a time, while the disk's queues wait.
const CHECKED: usize = 256;
/// The time after the last write in which files are checked, in nanoseconds: a file system writes
/// what a deletion changes within half a minute, unless somebody has set another time.
const ACTIVE_NS: u64 = 60_000_000_000;

/// The configuration of the layer `lifetimes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LifetimesOptions {
    /// The memory for blocks that are followed.
    pub memory: Bytes,
}

impl Default for LifetimesOptions {
    fn default() -> Self {
        Self { memory: Bytes(8 << 20) }
    }
}

impl LayerOptions for LifetimesOptions {
    const KIND: &'static str = "lifetimes";
    const RANK: Rank = Rank::Pattern;
    const MEANING: &'static str = "finds out how long what a guest writes lives, until it is overwritten, truncated or deleted ([lifetimes](lifetimes.md))";
    const KEYS: &'static [Key] = &[Key::new(
        "memory",
        "\"8MiB\"",
        "the memory for blocks that are followed: 160 bytes for each block of 4 KiB. Of more \
         blocks, a sample is followed",
    )];
    const ONCE: Option<&'static str> = Some("it would count everything twice");
    const BENEATH: Option<&'static str> =
        Some("it does not see requests that the layers above hold or answer");

    fn check(&self, check: &mut Check<'_>) {
        if !(MEMORY_MIN..=MEMORY_MAX).contains(&self.memory.0) {
            let message = format!("`memory` is {}", self.memory);
            check.problem("memory", message, "use a size from 64KiB to 4GiB");
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let guest = context.guest.map(Arc::clone).unwrap_or_default();
        Ok(Some(Arc::new(Lifetimes::new(guest, Arc::clone(context.names), *self))))
    }
}

struct Shared {
    table: Mutex<Table>,
    guest: Arc<GuestSlot>,
    names: Arc<Names>,
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Queues that ended their examination because of a bug.
    failures: AtomicU64,
}

/// The layer that finds out lifetimes.
#[derive(Clone)]
pub struct Lifetimes {
    shared: Arc<Shared>,
}

/// What is known about the lifetimes of a disk's content.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LifetimesSnapshot {
    /// When the disk was first written, in nanoseconds of the stack's clock.
    pub begun_ns: Option<u64>,
    /// The share of all blocks that are followed, from 0 to 1.
    pub share: f64,
    /// The blocks that are followed, those that only the naive view believes to live included.
    pub blocks: u64,
    /// The files with such blocks.
    pub files: u64,
    /// The bytes that live.
    pub living: u64,
    /// The lives of groups, that of the disk first.
    pub groups: Vec<(GroupBy, Lives)>,
}

impl Lifetimes {
    /// A layer with an empty table. `guest` has the memory in which files are looked up, `names`
    /// the texts of the insights.
    pub fn new(guest: Arc<GuestSlot>, names: Arc<Names>, options: LifetimesOptions) -> Self {
        let seed = hashbrown::DefaultHashBuilder::default().hash_one(0_u64);
        let blocks_max = (options.memory.0 / BLOCK_MEMORY) as usize;
        let table = Mutex::new(Table::new(blocks_max, seed));
        let failures = AtomicU64::new(0);
        let wake = OnceLock::new();
        Self { shared: Arc::new(Shared { table, guest, names, wake, failures }) }
    }

    /// The layer, if it is one of this kind.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// The texts of the insights.
    pub fn names(&self) -> &Arc<Names> {
        &self.shared.names
    }

    /// Whether files may have been deleted since the last [`check`](Self::check), at `now_ns` of
    /// the stack's clock.
    pub fn is_due(&self, now_ns: u64) -> bool {
        is_active(&self.shared.table.lock(), now_ns)
    }

    /// Calls `wake` whenever [`is_due`](Self::is_due) becomes true, in the thread of a queue.
    pub fn on_use(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.wake.set(Box::new(wake));
    }

    /// Looks at all files in the guest's memory, at `now_ns` of the stack's clock. Takes less than
    /// a microsecond for each file; the disk's queues wait for a few of them at a time.
    pub fn check(&self, now_ns: u64) {
        let Some(kernel) = self.shared.guest.guest().and_then(|guest| guest.kernel()) else {
            return;
        };
        let look = |address, number| kernel.file_state(address, number);
        let mut from = Some(0);
        while let Some(place) = from {
            from = self.shared.table.lock().check(look, place, CHECKED, now_ns);
        }
    }

    /// What is known.
    pub fn snapshot(&self) -> LifetimesSnapshot {
        let table = self.shared.table.lock();
        let (blocks, files) = table.counts();
        LifetimesSnapshot {
            begun_ns: table.begun_ns,
            share: table.share(),
            blocks: blocks as u64,
            files: files as u64,
            living: table.living(),
            groups: table.groups.report(),
        }
    }
}

/// Whether the disk was written lately.
fn is_active(table: &Table, now_ns: u64) -> bool {
    now_ns.saturating_sub(table.written_ns) < ACTIVE_NS
}

impl Layer for Lifetimes {
    fn name(&self) -> &'static str {
        LifetimesOptions::KIND
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let failures = self.shared.failures.load(Ordering::Relaxed);
        let table = self.shared.table.lock();
        let Lives { born, died, .. } = *table.groups.all();
        let (blocks, files) = table.counts();
        drop(table);
        let died: u64 = died.iter().sum();
        LayerReport { figures: figures(born, died, blocks, files, failures), problems: Vec::new() }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::observer(LifetimesQueue {
            shared: Arc::clone(&self.shared),
            has_failed: false,
        }))
    }
}

fn figures(born: u64, died: u64, blocks: usize, files: usize, failures: u64) -> Vec<Figure> {
    vec![
        Figure::counter("born_bytes_total", "Bytes whose lifetime is followed.", born),
        Figure::counter("died_bytes_total", "Bytes of these that have died.", died),
        Figure::gauge("blocks", "Blocks in the table.", blocks as u64),
        Figure::gauge("files", "Files in the table.", files as u64),
        Figure::counter(
            "failures_total",
            "Queues that ended the examination because of a bug.",
            failures,
        ),
    ]
}

struct LifetimesQueue {
    shared: Arc<Shared>,
    has_failed: bool,
}

/// A file in a guest's memory, and since when it is dirty.
type Found = (PresentFile, u64);

fn find(kernel: Option<&Kernel>, address: u64, number: u64) -> Option<Found> {
    let kernel = kernel?;
    match kernel.file_state(address, number)? {
        FileState::Present(file) => Some((file, kernel.dirty_for_ns(address).unwrap_or(0))),
        FileState::Deleted | FileState::Gone => None,
    }
}

impl LifetimesQueue {
    fn observe(&self, request: &Request, kernel: Option<&Kernel>, now_ns: u64) {
        let shared = &self.shared;
        match request.operation {
            Operation::Write => {}
            Operation::Discard | Operation::WriteZeroes => {
                shared.table.lock().discard(request.offset, request.length, now_ns);
                return;
            }
            Operation::Read | Operation::Flush | Operation::GetId | Operation::Extents => return,
        }
        let mut is_woken = false;
        let mut last: Option<(u64, Option<Found>)> = None;
        for part in request.insight.parts(request.length) {
            let facts = &part.facts;
            // Guest memory is read before the table is locked.
            let found = is_of_file(facts).then(|| match last {
                Some((address, found)) if address == facts.inode_address => found,
                _ => {
                    let found = find(kernel, facts.inode_address, facts.inode);
                    last = Some((facts.inode_address, found));
                    found
                }
            });
            let found = found.flatten();
            // What passes the page cache is as old as the inode has been dirty, at most.
            let is_cached = part.file_offset.is_some();
            let dirty_ns = found.filter(|_| is_cached).map_or(0, |(_, dirty_ns)| dirty_ns);
            let write = Write {
                offset: request.offset.saturating_add(part.offset),
                length: part.length,
                facts,
                file_offset: part.file_offset,
                file: found.map(|(file, _)| file),
                born_ns: now_ns.saturating_sub(dirty_ns),
                now_ns,
            };
            let mut table = shared.table.lock();
            is_woken |= !is_active(&table, now_ns);
            table.write(&write, &shared.names);
        }
        if let (true, Some(wake)) = (is_woken, shared.wake.get()) {
            wake();
        }
    }
}

impl Observer for LifetimesQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        let has_change = requests.iter().any(|request| request.operation.modifies());
        if self.has_failed || !has_change {
            return;
        }
        let guest = self.shared.guest.try_guest().and_then(|(_, guest)| guest);
        let kernel = guest.and_then(|guest| guest.kernel());
        let now_ns = place.round_ns();
        let observed = catch_unwind(AssertUnwindSafe(|| {
            for request in &*requests {
                self.observe(request, kernel.as_deref(), now_ns);
            }
        }));
        if observed.is_err() {
            self.has_failed = true;
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn up(&mut self, _: &mut [(Box<Request>, Outcome)], _: ObserverPosition<'_>) {}
}

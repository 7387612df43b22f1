//! A queue's own requests to the device of its pool.

use fathom_block::{BackendContext, BackendQueue, Operation, Outcome, Request};
use hashbrown::HashMap;

use crate::catalogue::PageId;
use crate::entry::MapEntry;
use crate::layout::BLOCK;
use crate::pages::TableEntry;
use crate::scrub::PageRead;
use crate::walk::WalkRead;

/// The bit that the numbers of own requests have, and those of guests do not.
const OWN: u64 = 1 << 63;
/// The most boxes that are kept.
const KEPT_MAX: usize = 256;

/// What a request to the device is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// A part of the batch with this sequence.
    Batch(u64),
    /// Some blocks of a read, from this one of those that were looked up. They are read a second
    /// time if they have the wrong content.
    Piece {
        read: u64,
        from: usize,
        is_again: bool,
    },
    /// A whole read, which is the guest's own request.
    Whole {
        read: u64,
    },
    /// The block at the beginning or the end of a change, of which the change has only a part.
    Edge {
        change: u64,
        edge: usize,
        entry: MapEntry,
        interval: u64,
    },
    /// A page of a map, or its second copy.
    Load {
        id: PageId,
        entry: TableEntry,
        interval: u64,
        is_copy: bool,
    },
    /// A page for the walk.
    Walk {
        read: WalkRead,
        interval: u64,
        is_copy: bool,
    },
    /// A page of the fingerprint table.
    Fingerprints {
        page: u32,
    },
    /// Pages of the fingerprint table from this one on, to find their hooks.
    Scan {
        page: u32,
    },
    /// Blocks that may be equal to those of a draft, from this one of its parts on.
    Compare {
        draft: u64,
        part: usize,
    },
    /// Pages of the fingerprint table from this one on, for a merge.
    MergeTable {
        page: u32,
    },
    /// The blocks of the victims of a run of a merge, and those that are to be kept.
    MergeVictims {
        run: u64,
    },
    MergeKept {
        run: u64,
    },
    /// A request of the lot that is being relocated, for so many blocks of it from this one on.
    Relocate {
        first: usize,
        count: usize,
    },
    /// A discard of so many segments from this one on.
    Punch {
        first: u32,
        count: u32,
    },
    /// A page for the scrub, perhaps for the second time.
    ScrubPage {
        read: PageRead,
        is_again: bool,
    },
    /// Some blocks of the scrub's lot, from this one on.
    ScrubBlocks {
        first: usize,
        count: usize,
        is_again: bool,
    },
    /// Pages of the tables for the scrub.
    ScrubTables {
        is_again: bool,
    },
    Flush,
    Checkpoint,
}

/// See the module.
pub(super) struct Device {
    queue: Box<dyn BackendQueue>,
    purposes: HashMap<u64, Purpose>,
    completed: Vec<(Box<Request>, Outcome)>,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    boxes: Vec<Box<Request>>,
    made: u64,
    /// The requests in flight of a checkpoint, of a walk, and of a scan of the fingerprint table.
    of_checkpoint: usize,
    of_walk: usize,
    of_scan: usize,
}

impl Device {
    pub(super) fn new(queue: Box<dyn BackendQueue>) -> Self {
        let (purposes, completed, boxes) = (HashMap::new(), Vec::new(), Vec::new());
        Self {
            queue,
            purposes,
            completed,
            boxes,
            made: 0,
            of_checkpoint: 0,
            of_walk: 0,
            of_scan: 0,
        }
    }

    /// A blank request.
    pub(super) fn take(&mut self) -> Box<Request> {
        let mut request = self.boxes.pop().unwrap_or_default();
        self.made += 1;
        request.id = OWN | self.made;
        request
    }

    /// A request that reads so many blocks into memory of its own.
    pub(super) fn read(&mut self, block: u64, count: usize) -> Box<Request> {
        let mut request = self.take();
        let length = count as u64 * BLOCK;
        (request.operation, request.offset) = (Operation::Read, block * BLOCK);
        request.length = length;
        request.buffers.allocate(length as usize);
        request
    }

    /// The same for work that no request waits for.
    pub(super) fn read_in_background(&mut self, block: u64, count: usize) -> Box<Request> {
        let mut request = self.read(block, count);
        request.flags.background = true;
        request
    }

    pub(super) fn give(&mut self, mut request: Box<Request>) {
        if self.boxes.len() < KEPT_MAX {
            request.reset();
            self.boxes.push(request);
        }
    }

    pub(super) fn submit(
        &mut self,
        request: Box<Request>,
        purpose: Purpose,
        context: &mut BackendContext<'_>,
    ) {
        self.purposes.insert(request.id, purpose);
        self.of_checkpoint += usize::from(matches!(purpose, Purpose::Checkpoint));
        self.of_walk += usize::from(matches!(purpose, Purpose::Walk { .. }));
        self.of_scan += usize::from(matches!(purpose, Purpose::Scan { .. }));
        self.queue.submit(request, &mut context.nested(&mut self.completed));
    }

    /// Passes a call on to the queue of the device.
    pub(super) fn call(
        &mut self,
        context: &mut BackendContext<'_>,
        call: impl FnOnce(&mut dyn BackendQueue, &mut BackendContext<'_>),
    ) {
        call(&mut *self.queue, &mut context.nested(&mut self.completed));
    }

    /// Takes a request that has completed.
    pub(super) fn completed(&mut self) -> Option<(Box<Request>, Outcome, Purpose)> {
        let (request, outcome) = self.completed.pop()?;
        let purpose = self.purposes.remove(&request.id)?;
        self.of_checkpoint -= usize::from(matches!(purpose, Purpose::Checkpoint));
        self.of_walk -= usize::from(matches!(purpose, Purpose::Walk { .. }));
        self.of_scan -= usize::from(matches!(purpose, Purpose::Scan { .. }));
        Some((request, outcome, purpose))
    }

    pub(super) fn has_completed(&self) -> bool {
        !self.completed.is_empty()
    }

    /// The requests in flight of a checkpoint.
    pub(super) fn of_checkpoint(&self) -> usize {
        self.of_checkpoint
    }

    /// The requests in flight of a walk.
    pub(super) fn of_walk(&self) -> usize {
        self.of_walk
    }

    /// The requests in flight of a scan of the fingerprint table.
    pub(super) fn of_scan(&self) -> usize {
        self.of_scan
    }

    /// The purposes of the requests in flight.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = &Purpose> {
        self.purposes.values()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.purposes.is_empty() && self.queue.is_idle()
    }
}

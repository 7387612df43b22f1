//! Block status: the extents of the chosen contexts, from the disk and from its comparisons with
//! earlier states, gathered for one reply.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use fathom_block::{Clock, ErrorKind, Extent, Operation, Outcome, Request, Stack};
use fathom_reactor::Reactor;

use super::super::bitmaps::{BitmapRefusal, Bitmaps};
use super::super::exports::Export;
use super::super::negotiation::Contexts;
use super::super::wire::{
    BASE_ALLOCATION_ID, DIRTY_BITMAP_ID, RequestHeader, command, error, flag,
};
use super::outcome::error_number;
use super::{Phase, Transmission, answered};

/// The memory that the answer of a bitmap takes until its reply has been sent, in bytes.
const BITMAP_CHARGE: u64 = 128 << 10;

/// The contexts of a connection.
pub(super) struct BlockStatus {
    base_allocation: bool,
    bitmaps: Option<Arc<dyn Bitmaps>>,
    /// Of each bitmap.
    pub(super) stacks: Vec<Stack>,
    /// The answers so far, by the slot of the request.
    gathered: BTreeMap<u32, Gathered>,
}

struct Gathered {
    awaited: usize,
    outcome: Outcome,
    contexts: Vec<(u32, Vec<Extent>)>,
}

impl BlockStatus {
    /// Opens the chosen contexts.
    ///
    /// # Errors
    /// If an earlier state has gone since it was chosen.
    pub(super) fn open(
        export: &Export,
        contexts: &Contexts,
        reactor: &mut Reactor,
    ) -> io::Result<Self> {
        let bitmaps = export.bitmaps().filter(|_| !contexts.bitmaps.is_empty()).cloned();
        let mut stacks = Vec::new();
        for name in &contexts.bitmaps {
            let opened = bitmaps.as_ref().ok_or(BitmapRefusal::Unknown);
            let disk = opened.and_then(|bitmaps| bitmaps.open(name)).map_err(|refusal| {
                let why = match refusal {
                    BitmapRefusal::Unknown => "it has gone".to_owned(),
                    BitmapRefusal::Unavailable(why) => why,
                };
                io::Error::other(format!("the bitmap {name}: {why}"))
            })?;
            stacks.push(disk.open_queue(reactor, Clock::System)?);
        }
        let (base_allocation, gathered) = (contexts.base_allocation, BTreeMap::new());
        Ok(Self { base_allocation, bitmaps, stacks, gathered })
    }

    /// The requests in flight to bitmaps.
    pub(super) fn in_flight(&self) -> usize {
        self.stacks.iter().map(Stack::in_flight).sum()
    }

    /// The bytes of the connection's budget that a request takes.
    pub(super) fn charge(&self) -> u64 {
        self.stacks.len() as u64 * BITMAP_CHARGE
    }

    /// Checks whether a request can be answered. Returns the error number and its text.
    pub(super) fn check(&self) -> Result<(), (u32, &'static str)> {
        if !self.base_allocation && self.stacks.is_empty() {
            return Err((error::INVALID, "no metadata context was chosen"));
        }
        match &self.bitmaps {
            Some(bitmaps) if !bitmaps.is_complete() => {
                Err((error::IO, "a layer holds changes back"))
            }
            _ => Ok(()),
        }
    }
}

impl Transmission {
    /// Begins a request for block status.
    pub(super) fn begin_status(&mut self, header: &RequestHeader, reactor: &mut Reactor) {
        let slot = self.slot(header);
        let status = &mut self.status;
        let awaited = usize::from(status.base_allocation) + status.stacks.len();
        status.gathered.insert(slot, Gathered { awaited, outcome: Ok(()), contexts: Vec::new() });
        let request = |stack: &mut Stack| {
            let mut request = stack.request();
            (request.operation, request.token) = (Operation::Extents, u64::from(slot));
            (request.offset, request.length) = (header.offset, header.length);
            request
        };
        for stack in &mut status.stacks {
            let request = request(stack);
            stack.submit(request, reactor);
        }
        if status.base_allocation {
            let request = request(&mut self.stack);
            self.stack.submit(request, reactor);
        }
    }

    /// Gathers the completed requests of bitmaps. Returns whether there were any.
    pub(super) fn reap_bitmaps(&mut self) -> bool {
        let mut progress = false;
        for index in 0..self.status.stacks.len() {
            while let Some((mut request, outcome)) = self.status.stacks[index].completed() {
                progress = true;
                let extents = std::mem::take(&mut request.extents);
                let slot = request.token as u32;
                self.status.stacks[index].recycle(request);
                self.gather(slot, DIRTY_BITMAP_ID + index as u32, extents, outcome);
            }
        }
        progress
    }

    /// Gathers what the disk itself has answered.
    pub(super) fn gather_allocation(&mut self, mut request: Box<Request>, outcome: Outcome) {
        let extents = std::mem::take(&mut request.extents);
        let slot = request.token as u32;
        self.stack.recycle(request);
        self.gather(slot, BASE_ALLOCATION_ID, extents, outcome);
    }

    /// Adds the answer of a context, and queues the reply if it is the last one.
    fn gather(&mut self, slot: u32, id: u32, extents: Vec<Extent>, outcome: Outcome) {
        let Some(gathered) = self.status.gathered.get_mut(&slot) else { return };
        gathered.awaited -= 1;
        debug_assert!(outcome.is_err() || !extents.is_empty(), "extents are never empty");
        let outcome = if extents.is_empty() { outcome.and(Err(ErrorKind::Io)) } else { outcome };
        gathered.outcome = gathered.outcome.and(outcome);
        gathered.contexts.push((id, extents));
        if gathered.awaited > 0 {
            return;
        }
        let Some(mut gathered) = self.status.gathered.remove(&slot) else { return };
        if self.phase == Phase::Lost {
            return self.release(slot);
        }
        self.free.push(slot);
        let super::Slot { header, charged, .. } = self.slots[slot as usize];
        debug_assert_eq!(header.command, command::BLOCK_STATUS);
        let answered = answered(&header);
        match gathered.outcome {
            Ok(()) => {
                gathered.contexts.sort_unstable_by_key(|(id, _)| *id);
                let one = header.flags & flag::REQUEST_ONE != 0;
                self.replies.extents(&answered, &gathered.contexts, one, charged);
            }
            Err(kind) => {
                let number = error_number(kind, &header);
                self.replies.failure(&answered, number, kind.name(), charged);
            }
        }
    }
}

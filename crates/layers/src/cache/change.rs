//! Changes of the disk: writes, zeroes and discards.

use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Crossing, ErrorKind, Flags, Operation, Outcome, Request, faults};
use fathom_cache::{BlockAccess, Continued, Touch};

use super::class::class;
use super::insert::Part;
use super::queue::{CacheQueue, purpose};
use super::shard::Reason;
use super::{Ending, Inner};

/// Changes of more blocks than this are noted as ranges.
const BLOCKS_MAX: u64 = 1024;

/// A change in flight.
pub(super) struct Changing {
    offset: u64,
    length: u64,
    /// The guest's request, if the data is written from other memory.
    request: Option<Box<Request>>,
    /// The bytes of the copy.
    pub(super) copied: u64,
    /// For a change of many blocks: its number in each shard.
    pub(super) ranges: Vec<u64>,
    access: BlockAccess,
    /// The blocks that a request shortly before it has used.
    continued: Continued,
}

impl CacheQueue {
    pub(super) fn change(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if !self.waiting.is_empty() {
            // Changes begin in the order in which they came.
            return self.waiting.push_back(request);
        }
        if let Some(request) = self.begin_change(request, next) {
            self.waiting.push_back(request);
            self.waiting_ns = next.round_ns();
            self.look_at_changes(next);
            self.tend(next);
        }
    }

    /// Begins the changes that wait.
    pub(super) fn begin_waiting(&mut self, next: &mut Crossing<'_>) {
        while let Some(request) = self.waiting.pop_front() {
            if let Some(request) = self.begin_change(request, next) {
                return self.waiting.push_front(request);
            }
            self.waiting_ns = next.round_ns();
        }
    }

    /// Begins a change. Returns it if it has to wait.
    fn begin_change(
        &mut self,
        mut request: Box<Request>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let reason = match request.operation {
            Operation::Write => Reason::Write,
            Operation::Discard | Operation::WriteZeroes => Reason::Discard,
            // They change nothing, and are not passed here.
            Operation::Read | Operation::Flush | Operation::GetId | Operation::Extents => {
                next.submit(request);
                return None;
            }
        };
        let inner = Arc::clone(&self.inner);
        let volume = &inner.volume;
        let (offset, length) = (request.offset, request.length);
        if volume.has_failed() {
            return self.change_without_volume(request, next);
        }
        if volume.is_kept && !self.begin_in_regions(offset, length, next.round_ns()) {
            return Some(request);
        }
        self.note_in_curves(&request, next.round_ns());
        if request.operation == Operation::Write {
            self.follow_write(&request);
        }
        let access = self.access(&request);
        let continued = self.continued(&request);
        let size = u64::from(volume.format.block_size);
        let count = (offset + length).div_ceil(size) - offset / size;
        let (mut ranges, mut swept) = (Vec::new(), None);
        if count > BLOCKS_MAX {
            let keys = self.key(offset / size)..self.key((offset + length).div_ceil(size));
            ranges = begin_ranges(&inner, &keys);
            swept = Some((keys, reason));
        } else {
            for (block, start, length) in Self::blocks(offset, length, size) {
                let key = self.key(block);
                let mask = Self::touched(start, length, size);
                volume.shard(volume.shard_of(key)).begin_change(key, mask, reason);
            }
        }
        self.count += 1;
        let number = self.count;
        let inserts = request.operation == Operation::Write
            && inner.mode().inserts_writes()
            && ranges.is_empty()
            && length <= volume.policy.write_inserted_max(access.class)
            && volume.is_usable()
            && volume.reserve_copy(length);
        let changing =
            Changing { offset, length, request: None, copied: 0, ranges, access, continued };
        if inserts {
            self.write_copy(number, request, changing, next);
            return None;
        }
        self.changes.insert(number, changing);
        *next.word(&mut request) = number;
        match swept {
            Some(swept) => self.hold_for_sweep(number, request, swept, next),
            None => next.submit(request),
        }
        None
    }

    /// Begins a change while the volume is out of service. Returns it if it has to wait.
    fn change_without_volume(
        &mut self,
        request: Box<Request>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        match self.end_of_use(next) {
            Ending::Ended => next.submit(request),
            Ending::Failed => next.complete(request, Err(ErrorKind::Io)),
            Ending::InUse => return Some(request),
        }
        None
    }

    /// Begins a change in its regions. Returns false if it has to wait for their notes.
    #[inline]
    fn begin_in_regions(&self, offset: u64, length: u64, now_ns: u64) -> bool {
        let begun =
            self.inner.disk.regions.attempt(&self.waker, |regions| {
                regions.begin(offset, length, now_ns).then_some(())
            });
        if begun.is_none() {
            self.inner.volume.keeper.access(|keeper| keeper.is_urgent = true);
        }
        begun.is_some()
    }

    /// Sends a copy of a write, which goes into the cache when it has completed: the guest may
    /// change its memory meanwhile.
    #[inline]
    fn write_copy(
        &mut self,
        number: u64,
        request: Box<Request>,
        mut changing: Changing,
        next: &mut Crossing<'_>,
    ) {
        let (offset, length) = (request.offset, request.length);
        let mut own = next.request();
        own.operation = Operation::Write;
        (own.offset, own.length, own.flags) = (offset, length, request.flags);
        own.inherit(&request, 0);
        own.token = number << purpose::BITS | purpose::WRITE;
        own.buffers.allocate(length as usize);
        let before = faults();
        if let Some(memory) = own.buffers.owned_mut() {
            request.buffers.copy_to(0, memory);
        }
        if faults() == before {
            (changing.copied, changing.request) = (length, Some(request));
            self.changes.insert(number, changing);
            return next.submit(own);
        }
        // The guest's memory was lost, and the copied bytes are invalid.
        next.recycle(own);
        self.inner.volume.end_copy(length);
        self.changes.insert(number, changing);
        self.end_change(number, None, Err(ErrorKind::Memory), next);
        next.complete(request, Err(ErrorKind::Memory));
    }

    /// Notes a change in the miss-ratio curves: what is written comes into the cache or leaves it.
    fn note_in_curves(&mut self, request: &Request, now_ns: u64) {
        let size = u64::from(self.inner.volume.format.block_size);
        let blocks = (request.offset / size, (request.offset + request.length).div_ceil(size));
        let is_write = request.operation == Operation::Write;
        let length_max = self.inner.volume.policy.write_inserted_max(class(&request.insight));
        let inserts =
            is_write && request.length <= length_max && self.inner.mode().inserts_writes();
        let touch = if inserts { Touch::Insertion } else { Touch::Removal };
        self.account.change(&request.insight, blocks, touch, now_ns);
    }

    /// A write from the layer's own memory has completed.
    pub(super) fn written(
        &mut self,
        number: u64,
        mut data: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let changing = self.changes.get_mut(&number);
        if let Some(mut request) = changing.and_then(|changing| changing.request.take()) {
            request.course.follow(&data.course);
            // The content is in the cache later. Until then, reads get it from the disk beneath.
            data.flags = Flags::default();
            self.end_change(number, Some(data), outcome, next);
            return next.complete(request, outcome);
        }
        next.recycle(data);
    }

    /// A change has ended. Inserts the content of `data`.
    pub(super) fn end_change(
        &mut self,
        number: u64,
        data: Option<Box<Request>>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let Some(changing) = self.changes.remove(&number) else { return };
        let inner = Arc::clone(&self.inner);
        let volume = &inner.volume;
        let Changing { offset, length, access, continued, .. } = changing;
        let size = u64::from(volume.format.block_size);
        let ends = (offset / size, (offset + length).saturating_sub(1) / size);
        let mut parts = self.parts();
        if changing.ranges.is_empty() {
            for (block, start, length) in Self::blocks(offset, length, size) {
                let key = self.key(block);
                let shard = volume.shard_of(key);
                let mask = Self::covered(start, length, size);
                let inserts = data.is_some() && outcome.is_ok() && mask != 0;
                let access = BlockAccess { is_continued: continued.is_of(block, ends), ..access };
                let access = (inserts && volume.is_usable()).then_some(&access);
                let number = volume.shard(shard).end_change(key, access);
                if number != 0 {
                    parts.push(Part { key, shard, number, mask, block: block * size });
                }
            }
        }
        for (shard, number) in changing.ranges.iter().enumerate() {
            volume.shard(shard).end_range(*number);
        }
        if volume.is_kept {
            let now_ns = next.round_ns();
            let tables = volume.next_tables();
            let has_succeeded = outcome.is_ok();
            inner.disk.regions.access(|regions| {
                regions.end(offset, length, now_ns, tables, has_succeeded);
            });
        }
        match data {
            Some(data) => self.insert(data, parts, access, 0, next),
            None => self.keep_parts(parts),
        }
        self.note_change(next);
    }
}

/// A change of many blocks begins: none of them gets into a shard any more. Returns its numbers.
fn begin_ranges(inner: &Inner, keys: &Range<u64>) -> Vec<u64> {
    let volume = &inner.volume;
    let shards = 0..volume.shards.len();
    shards.map(|shard| volume.shard(shard).begin_range(keys.clone())).collect()
}

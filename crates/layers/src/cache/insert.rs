//! Puts content into the cache.

use fathom_block::{Crossing, Operation, Outcome, Request};
use fathom_cache::BlockAccess;

use super::format::{GRANULE, checksum};
use super::queue::CacheQueue;
use super::shard::Room;

/// The insertions and reads whose memory is kept for later ones.
pub(super) const SPARE_MAX: usize = 64;

/// The memory of an insertion that has ended.
pub(super) type SpareRooms = (Vec<(Part, Room)>, Vec<u16>);

/// A block whose content a request has.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) key: u64,
    pub(super) shard: usize,
    /// The number of the insertion.
    pub(super) number: u64,
    /// The granules that the request has, as bits.
    pub(super) mask: u16,
    /// The offset of the block, in bytes of the disk.
    pub(super) block: u64,
}

/// An insertion in flight.
pub(super) struct Inserting {
    /// The bytes of the copied content.
    pub(super) length: u64,
    /// When its writing to the store began, in nanoseconds.
    pub(super) asked_ns: u64,
    pub(super) rooms: Vec<(Part, Room)>,
    /// The checksums of the granules of each block.
    sums: Vec<u16>,
    access: BlockAccess,
    /// The number of the read-ahead that has read the content; 0 is none.
    pub(super) fetch: u64,
}

/// The runs of granules in a mask: the first byte within the block and the number of bytes of each.
fn runs(mut mask: u16) -> impl Iterator<Item = (u64, u64)> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let first = mask.trailing_zeros();
        let count = (mask >> first).trailing_ones();
        mask &= !((u16::MAX >> (16 - count)) << first);
        Some((u64::from(first * GRANULE), u64::from(count * GRANULE)))
    })
}

impl CacheQueue {
    /// Writes the content of `parts` to slots. `data` is a request of this layer with memory of its
    /// own, which has been reserved as a copy. `fetch` is the number of the read-ahead that has
    /// read it, or 0.
    pub(super) fn insert(
        &mut self,
        data: Box<Request>,
        mut parts: Vec<Part>,
        access: BlockAccess,
        fetch: u64,
        next: &mut Crossing<'_>,
    ) {
        let (rooms, sums) = self.rooms(&data, &mut parts);
        self.keep_parts(parts);
        let inserting = Inserting { length: data.length, asked_ns: 0, rooms, sums, access, fetch };
        if inserting.rooms.is_empty() {
            // Slots may have been taken out of use.
            next.recycle(data);
            return self.inserted(inserting, Ok(()), next);
        }
        if let Some(outcome) = self.write_now(&data, &inserting.rooms, next) {
            if let Err(kind) = outcome {
                self.inner.volume.fail(kind);
            }
            next.recycle(data);
            return self.inserted(inserting, outcome, next);
        }
        self.write(data, inserting, next);
    }

    /// Takes slots for `parts`, with the checksums of their granules.
    fn rooms(&mut self, data: &Request, parts: &mut Vec<Part>) -> SpareRooms {
        let (mut rooms, mut sums) = self.spare_rooms.pop().unwrap_or_default();
        let volume = &self.inner.volume;
        let granules = volume.format.granules() as usize;
        let regions = &self.inner.disk.regions;
        let may_replace =
            || regions.access(|regions| regions.may_replace(data.offset, data.length));
        for part in parts.drain(..) {
            if volume.has_failed() || volume.is_silent() {
                volume.shard(part.shard).cancel(part.key, part.number);
                continue;
            }
            let Part { key, number, mask, .. } = part;
            let room = volume.shard(part.shard).begin_insertion(key, number, mask, may_replace);
            let Some(room) = room else { continue };
            for granule in 0..granules {
                let place = part.block + granule as u64 * u64::from(GRANULE);
                let is_written = volume.is_kept && room.mask >> granule & 1 == 1;
                let from = place.wrapping_sub(data.offset) as usize;
                let bytes = data.buffers.owned().filter(|_| is_written);
                let bytes = bytes.and_then(|bytes| bytes.get(from..from + GRANULE as usize));
                sums.push(bytes.map_or(0, checksum));
            }
            rooms.push((part, room));
        }
        (rooms, sums)
    }

    /// Copies the content into the slots of a cache in memory. `None` if the cache is not in
    /// memory. No lock is held meanwhile: the slots are pinned.
    fn write_now(
        &self,
        data: &Request,
        rooms: &[(Part, Room)],
        next: &mut Crossing<'_>,
    ) -> Option<Outcome> {
        let volume = &self.inner.volume;
        // What a volume is to hold is not yet durable.
        let content = data.buffers.owned().filter(|_| !volume.is_kept)?;
        let mut outcome = Ok(());
        for (part, room) in rooms {
            let place = volume.place(part.shard, room.slot);
            for (from, count) in runs(room.mask) {
                let start = (part.block + from - data.offset) as usize;
                let bytes = content.get(start..start + count as usize)?;
                outcome = outcome.and(next.write_now(self.store, place + from, bytes)?);
            }
        }
        Some(outcome)
    }

    /// Begins to write the content to its slots.
    fn write(&mut self, mut data: Box<Request>, mut inserting: Inserting, next: &mut Crossing<'_>) {
        inserting.asked_ns = self.watch(next);
        self.count += 1;
        let number = self.count;
        *next.word(&mut data) = number;
        let start = data.offset;
        let split = next.split(data);
        for (part, room) in &inserting.rooms {
            let place = self.inner.volume.place(part.shard, room.slot);
            for (from, count) in runs(room.mask) {
                let mut piece = next.piece(split, part.block + from - start, count);
                piece.operation = Operation::Write;
                piece.flags = fathom_block::Flags { background: true, ..Default::default() };
                piece.offset = place + from;
                next.submit_to(self.store, piece);
            }
        }
        self.insertions.insert(number, inserting);
        next.join(split);
    }

    /// The content has been written to its slots.
    pub(super) fn inserted(
        &mut self,
        inserting: Inserting,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let Inserting { length, rooms, sums, access, fetch, .. } = inserting;
        let volume = &self.inner.volume;
        volume.end_copy(length);
        let granules = volume.format.granules() as usize;
        for (index, (part, room)) in rooms.iter().enumerate() {
            let sums = &sums[index * granules..(index + 1) * granules];
            let sums = (outcome.is_ok() && !volume.has_failed()).then_some(sums);
            let mut shard = volume.shard(part.shard);
            let is_new = shard.end_insertion(part.key, part.number, *room, sums, &access);
            if is_new && fetch != 0 {
                shard.mark_ahead(room.slot);
            }
        }
        self.keep_rooms(rooms, sums);
        self.note_change(next);
        self.fetch_ended(fetch, next);
    }

    /// Keeps the memory of an insertion.
    fn keep_rooms(&mut self, mut rooms: Vec<(Part, Room)>, mut sums: Vec<u16>) {
        if self.spare_rooms.len() < SPARE_MAX {
            rooms.clear();
            sums.clear();
            self.spare_rooms.push((rooms, sums));
        }
    }
}

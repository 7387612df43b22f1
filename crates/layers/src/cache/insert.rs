//! Puts content into the cache.

use fathom_block::{Crossing, Operation, Outcome, Request};
use fathom_cache::Access;

use super::format::{GRANULE, checksum};
use super::queue::CacheQueue;
use super::shard::Room;

/// The insertions whose memory is kept for later ones.
const SPARE_MAX: usize = 64;

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
    pub(super) rooms: Vec<(Part, Room)>,
    /// The checksums of the granules of each block.
    sums: Vec<u16>,
    access: Access,
    /// The number of the read-ahead that has read the content; 0 is none.
    fetch: u64,
}

impl CacheQueue {
    /// Writes the content of `parts` to slots. `data` is a request of this layer with memory of its own,
    /// which has been reserved as a copy. `fetch` is the number of the read-ahead that has read it, or 0.
    pub(super) fn insert(
        &mut self,
        mut data: Box<Request>,
        mut parts: Vec<Part>,
        access: Access,
        fetch: u64,
        next: &mut Crossing<'_>,
    ) {
        let volume = std::sync::Arc::clone(&self.inner.volume);
        let granules = volume.format.granules() as usize;
        let (offset, length) = (data.offset, data.length);
        let (mut rooms, mut sums) = self.spare_rooms.pop().unwrap_or_default();
        let regions = &self.inner.disk.regions;
        let may_replace = || regions.access(|regions| regions.may_replace(offset, length));
        for part in parts.drain(..) {
            if volume.has_failed() {
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
        self.keep_parts(parts);
        if rooms.is_empty() {
            self.keep_rooms(rooms, sums);
            volume.end_copy(length);
            next.recycle(data);
            // Slots may have been taken out of use.
            self.note_change(next);
            return self.fetch_ended(fetch, next);
        }
        self.count += 1;
        let number = self.count;
        *next.word(&mut data) = number;
        let start = data.offset;
        let split = next.split(data);
        for (part, room) in &rooms {
            let place = volume.place(part.shard, room.slot);
            let mut mask = room.mask;
            while mask != 0 {
                let first = mask.trailing_zeros();
                let count = (mask >> first).trailing_ones();
                mask &= !((u16::MAX >> (16 - count)) << first);
                let from = u64::from(first * GRANULE);
                let bytes = u64::from(count * GRANULE);
                let mut piece = next.piece(split, part.block + from - start, bytes);
                piece.operation = Operation::Write;
                piece.flags = fathom_block::Flags { background: true, ..Default::default() };
                piece.offset = place + from;
                next.submit_to(self.store, piece);
            }
        }
        self.insertions.insert(number, Inserting { length, rooms, sums, access, fetch });
        next.join(split);
    }

    /// The content has been written to its slots.
    pub(super) fn inserted(
        &mut self,
        number: u64,
        data: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        next.recycle(data);
        let Some(inserting) = self.insertions.remove(&number) else { return };
        let volume = std::sync::Arc::clone(&self.inner.volume);
        volume.end_copy(inserting.length);
        let granules = volume.format.granules() as usize;
        for (index, (part, room)) in inserting.rooms.iter().enumerate() {
            let sums = &inserting.sums[index * granules..(index + 1) * granules];
            let sums = (outcome.is_ok() && !volume.has_failed()).then_some(sums);
            let mut shard = volume.shard(part.shard);
            let is_new = shard.end_insertion(part.key, part.number, *room, sums, &inserting.access);
            if is_new && inserting.fetch != 0 {
                shard.mark_ahead(room.slot);
            }
        }
        let Inserting { rooms, sums, fetch, .. } = inserting;
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

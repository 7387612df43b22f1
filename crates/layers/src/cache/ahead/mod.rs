//! Reads files ahead of the guest.
//!
//! A guest that reads a file in order is followed (`streams`), in each queue by itself. When the
//! cache has missed some of the reads, the next bytes of the file are read from home into the cache
//! before the guest wants them: up to the file's end, and where the file is not in one piece, at
//! the places where it was seen to go on (`joints`). The file, the offsets in it and its size are
//! those of the insight; they are hints, so that a wrong one costs time only.
//!
//! What is read ahead is inserted like what a guest reads (`fetch`): a change of a block that
//! begins meanwhile makes its insertion invalid. A guest's read of bytes that are on their way
//! waits for them.
//!
//! Reading ahead gives way: nothing is begun while a read of the disk that belongs to no stream
//! waits for home. At most [`IN_FLIGHT_MAX`] bytes are on their way for all disks of a cache, a
//! quarter of them for one disk.

mod fetch;
mod joints;
mod streams;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fathom_block::Request;
use fathom_insight::Facts;
use parking_lot::Mutex;

pub(super) use fetch::{Ahead, Followed, Parked};
use joints::{File, Joints, Piece};

use super::volume::reserve;

/// The most bytes on their way for all disks of a cache.
const IN_FLIGHT_MAX: u64 = 32 << 20;
/// The most bytes on their way for a disk.
const OF_DISK_MAX: u64 = IN_FLIGHT_MAX / 4;

/// What the queues of a disk share of its read-ahead.
#[derive(Debug, Default)]
pub(super) struct AheadState {
    /// The greatest window of a stream, in bytes; 0 if nothing is read ahead.
    window_max: AtomicU64,
    /// The bytes on their way.
    in_flight: AtomicU64,
    /// The guests' reads at home that belong to no stream.
    others: AtomicU32,
    joints: Mutex<Joints>,
}

impl AheadState {
    /// Sets the greatest window of a stream, in bytes; 0 ends the read-ahead.
    pub(super) fn set_window(&self, bytes: u64) {
        self.window_max.store(bytes, Ordering::Relaxed);
    }

    /// The greatest window of a stream, in bytes.
    #[inline]
    fn window_max(&self) -> u64 {
        self.window_max.load(Ordering::Relaxed)
    }

    /// Reserves a part of the bytes on their way, of the disk and of all disks of the cache.
    fn reserve(&self, of_all: &AtomicU64, length: u64) -> bool {
        if !reserve(&self.in_flight, length, OF_DISK_MAX) {
            return false;
        }
        let is_reserved = reserve(of_all, length, IN_FLIGHT_MAX);
        if !is_reserved {
            self.in_flight.fetch_sub(length, Ordering::Relaxed);
        }
        is_reserved
    }

    fn release(&self, of_all: &AtomicU64, length: u64) {
        self.in_flight.fetch_sub(length, Ordering::Relaxed);
        of_all.fetch_sub(length, Ordering::Relaxed);
    }
}

/// The parts of a request that belong to files whose offsets are known.
fn pieces(request: &Request) -> impl Iterator<Item = (File, Piece, Facts)> + '_ {
    request.insight.parts(request.length).filter_map(|part| {
        let (file, file_offset) = (File::of(&part.facts)?, part.file_offset?);
        let place = request.offset.checked_add(part.offset)?;
        file_offset.checked_add(part.length)?;
        let piece = Piece { file_offset, place, length: part.length };
        Some((file, piece, part.facts))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_part_of_the_bytes_in_flight() {
        let (disks, of_all) = ([(); 6].map(|()| AheadState::default()), AtomicU64::new(0));
        for disk in &disks[..4] {
            assert!(disk.reserve(&of_all, OF_DISK_MAX) && !disk.reserve(&of_all, 1));
        }
        assert!(!disks[4].reserve(&of_all, 1), "the cache has no more");
        disks[0].release(&of_all, 4096);
        assert!(disks[4].reserve(&of_all, 4096) && !disks[5].reserve(&of_all, 1));
        assert_eq!(disks[5].in_flight.load(Ordering::Relaxed), 0);
    }
}

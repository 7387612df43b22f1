//! In-flight requests in memory that outlives the daemon.
//!
//! The front end keeps a shared file in which the daemon records, for each ring, the requests that
//! it has taken and not yet given back. A daemon that is killed and started again receives the file
//! and repeats the recorded requests. A read or a write may happen twice, but none is lost. The
//! layout and the steps are those of the vhost-user specification, "Inflight I/O tracking", for
//! split virtqueues:
//!
//! ```text
//!  region of a queue (little-endian, native to both sides)
//!  0  u64 features      0
//!  8  u16 version       1
//! 10  u16 desc_num      the number of descriptor entries
//! 12  u16 last_batch_head
//! 14  u16 used_idx      the used index when the last batch was complete
//! 16  desc_num × { u8 inflight, u8 repeats, 4 bytes unused, u16 next, u64 counter }
//! ```
//!
//! Giving back a batch has these steps: link each head into a list that begins at
//! `last_batch_head`; move the ring's used index; clear `inflight` of each head; copy the used
//! index. After a crash between the second step and the last, the two indexes differ, and the list
//! gives the heads to clear.
//!
//! `repeats` is a byte that the specification leaves free: how often daemons or connections that
//! did not complete the request have repeated it. A request that ends each of them must not be
//! repeated for ever.
//!
//! Each region has entries for the longest ring, independent of the size that the front end
//! requests: QEMU 10.0.13 requests `queue-size` (128) but offers its guest rings of 1024.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use fathom_guest_memory::{Mapping, MemoryAccess, MemoryOwner};

use super::memory_file::memory_file;
use super::ring::RING_SIZE_MAX;

const HEADER_LENGTH: usize = 16;
const ENTRY_LENGTH: usize = 16;
/// Each queue's region begins at a multiple of this, in bytes.
const REGION_ALIGNMENT: usize = 64;
const VERSION: u16 = 1;
/// The longest file that is mapped, in bytes: four times the length for the most queues of the
/// largest size.
const LENGTH_MAX: u64 = 16 << 20;

/// The length of the region of a queue of `size` descriptors, in bytes.
fn region_length(size: u16) -> usize {
    (HEADER_LENGTH + ENTRY_LENGTH * usize::from(size)).next_multiple_of(REGION_ALIGNMENT)
}

/// The shared file of all queues.
#[derive(Clone)]
pub(super) struct Inflight {
    map: Arc<Mapping>,
    queues: u16,
    /// The length of each queue's region, in bytes.
    region: usize,
    /// The number of descriptor entries in a region.
    size: u16,
}

impl Inflight {
    /// Creates a file for `queues` rings of at least `size` descriptors. Returns it with its length
    /// in bytes.
    pub(super) fn create(
        queues: u16,
        size: u16,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<(Self, File, u64)> {
        Self::check(queues, size)?;
        let length = (region_length(RING_SIZE_MAX) * usize::from(queues)) as u64;
        let file = memory_file(c"fathom-inflight", length)?;
        let inflight = Self::open(&file, (0, length), queues, size, owner)?;
        for queue in 0..queues {
            if let Some(region) = inflight.queue(queue) {
                region.half(8).store(VERSION, Ordering::Relaxed);
                region.half(10).store(RING_SIZE_MAX, Ordering::Release);
            }
        }
        Ok((inflight, file, length))
    }

    /// Opens the part (offset and length, in bytes) of a file that the front end has kept. Its
    /// regions have equal lengths, each with entries for at least `size` descriptors.
    pub(super) fn open(
        file: &File,
        (offset, length): (u64, u64),
        queues: u16,
        size: u16,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<Self> {
        Self::check(queues, size)?;
        if length < (region_length(size) * usize::from(queues)) as u64 || offset % 8 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the in-flight memory is too short for its queues",
            ));
        }
        if length > LENGTH_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the in-flight memory is longer than its queues can need",
            ));
        }
        let region = length / u64::from(queues) / REGION_ALIGNMENT as u64 * REGION_ALIGNMENT as u64;
        let region = usize::try_from(region).map_err(io::Error::other)?;
        let size = ((region - HEADER_LENGTH) / ENTRY_LENGTH).min(usize::from(RING_SIZE_MAX)) as u16;
        Ok(Self { map: Arc::new(Mapping::new(file, offset, length, owner)?), queues, region, size })
    }

    fn check(queues: u16, size: u16) -> io::Result<()> {
        if queues == 0 || queues > 256 || size == 0 || size > RING_SIZE_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "in-flight memory for no queues, or with too many or too large queues",
            ));
        }
        Ok(())
    }

    /// Records that nothing is in flight.
    pub(super) fn clear(&self) {
        for queue in (0..self.queues).filter_map(|index| self.queue(index)) {
            (0..queue.size).for_each(|head| queue.flag(head).store(0, Ordering::Release));
        }
    }

    /// The region of queue `index`; `None` if there is no such queue.
    pub(super) fn queue(&self, index: u16) -> Option<QueueInflight> {
        if index >= self.queues {
            return None;
        }
        let region = self.map.hold(self.region * usize::from(index), self.region)?;
        Some(QueueInflight { region, size: self.size, counter: 0, batch: Vec::new() })
    }
}

/// One queue's region.
pub(super) struct QueueInflight {
    /// It begins at a multiple of 8. Heads are below `size` (`take` and `recover` check it), and so
    /// their entries are within it.
    region: MemoryAccess<'static>,
    size: u16,
    /// Counts the requests taken, so that a later daemon repeats them in order.
    counter: u64,
    /// The heads of the batch that is being given back.
    batch: Vec<u16>,
}

impl QueueInflight {
    fn half(&self, offset: usize) -> &AtomicU16 {
        &self.region.u16s()[offset / 2]
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        &self.region.u8s()[Self::entry(head)]
    }

    fn repeats(&self, head: u16) -> &AtomicU8 {
        &self.region.u8s()[Self::entry(head) + 1]
    }

    fn count(&self, head: u16) -> &AtomicU64 {
        &self.region.u64s()[Self::entry(head) / 8 + 1]
    }

    fn entry(head: u16) -> usize {
        HEADER_LENGTH + ENTRY_LENGTH * usize::from(head)
    }

    /// The number of descriptor entries in the region.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Records that the new request at `head`, which is below [`size`](Self::size), has been taken.
    pub(super) fn take(&mut self, head: u16) {
        assert!(head < self.size, "a head has an entry in the in-flight memory");
        self.repeats(head).store(0, Ordering::Relaxed);
        self.retake(head);
    }

    /// Records that the request at `head` is about to be repeated. Returns the number of its
    /// earlier repetitions.
    pub(super) fn repeat(&mut self, head: u16) -> u8 {
        let before = self.repeats(head).load(Ordering::Relaxed);
        self.repeats(head).store(before.saturating_add(1), Ordering::Relaxed);
        self.retake(head);
        before
    }

    /// Whether the request at `head` has been repeated before.
    pub(super) fn is_repeated(&self, head: u16) -> bool {
        self.repeats(head).load(Ordering::Relaxed) > 0
    }

    fn retake(&mut self, head: u16) {
        self.count(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// Records that the request at `head` is not taken: the guest's ring still has it.
    pub(super) fn put_back(&mut self, head: u16) {
        self.flag(head).store(0, Ordering::Release);
    }

    /// Records that the request at `head` is given back with the next batch.
    pub(super) fn give_back(&mut self, head: u16) {
        let last = self.half(12).load(Ordering::Relaxed);
        self.half(Self::entry(head) + 6).store(last, Ordering::Relaxed);
        self.half(12).store(head, Ordering::Release);
        self.batch.push(head);
    }

    /// Ends the batch: the used index has moved to `used_index`.
    pub(super) fn published(&mut self, used_index: u16) {
        std::sync::atomic::fence(Ordering::SeqCst);
        for index in 0..self.batch.len() {
            self.flag(self.batch[index]).store(0, Ordering::Relaxed);
        }
        self.batch.clear();
        self.half(14).store(used_index, Ordering::Release);
    }

    /// Finishes the steps that a crash interrupted. Returns the heads that are still in flight, in
    /// the order in which they were taken. `used_index` is the ring's. The region's contents are
    /// untrusted: invalid contents result in wrong heads below [`size`](Self::size), and nothing
    /// worse.
    pub(super) fn recover(&mut self, used_index: u16) -> Vec<u16> {
        let mut left = used_index.wrapping_sub(self.half(14).load(Ordering::Acquire));
        if left > 0 && left <= self.size {
            let mut head = self.half(12).load(Ordering::Acquire);
            while left > 0 && head < self.size {
                self.flag(head).store(0, Ordering::Relaxed);
                head = self.half(Self::entry(head) + 6).load(Ordering::Relaxed);
                left -= 1;
            }
        }
        self.half(14).store(used_index, Ordering::Release);
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.flag(head).load(Ordering::Acquire) != 0)
            .map(|head| (self.count(head).load(Ordering::Relaxed), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |&(count, _)| count.wrapping_add(1));
        heads.into_iter().map(|(_, head)| head).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn create(queues: u16, size: u16) -> io::Result<(Inflight, File, u64)> {
        Inflight::create(queues, size, &Arc::default())
    }

    fn open(file: &File, part: (u64, u64), queues: u16, size: u16) -> io::Result<Inflight> {
        Inflight::open(file, part, queues, size, &Arc::default())
    }

    #[test]
    fn repetitions_are_counted_until_the_head_is_taken_anew() {
        let (inflight, file, length) = create(1, 8).unwrap();
        inflight.queue(0).unwrap().take(3);
        for before in 0..5 {
            let again = open(&file, (0, length), 1, 8).unwrap();
            let mut queue = again.queue(0).unwrap();
            assert_eq!((queue.recover(0), queue.is_repeated(3)), (vec![3], before > 0));
            assert_eq!(queue.repeat(3), before);
        }
        let mut queue = inflight.queue(0).unwrap();
        queue.take(3);
        assert!(!queue.is_repeated(3));
    }

    #[test]
    fn requests_taken_and_not_given_back_are_found_again_in_order() {
        let (inflight, file, length) = create(2, 8).unwrap();
        let mut queue = inflight.queue(1).unwrap();
        assert!(inflight.queue(2).is_none());
        assert!(queue.recover(0).is_empty());
        for head in [5, 1, 7, 2] {
            queue.take(head);
        }
        queue.give_back(1);
        queue.published(1);
        drop((inflight, queue));
        let again = open(&file, (0, length), 2, 8).unwrap();
        assert_eq!(again.queue(1).unwrap().recover(1), [5, 7, 2]);
        assert!(again.queue(0).unwrap().recover(0).is_empty());
    }

    #[test]
    fn a_crash_between_the_index_and_the_flags_gives_nothing_back_twice() {
        let (inflight, file, length) = create(1, 8).unwrap();
        let mut queue = inflight.queue(0).unwrap();
        queue.recover(65534);
        for head in [0, 3, 4] {
            queue.take(head);
        }
        queue.give_back(0);
        queue.give_back(4);
        // The ring's index has moved by two; the crash precedes `published`.
        drop(queue);
        let again = open(&file, (0, length), 1, 8).unwrap();
        assert_eq!(again.queue(0).unwrap().recover(0), [3]);
        // The same crash before the index moved: all three are repeated.
        let (inflight, ..) = create(1, 8).unwrap();
        let mut queue = inflight.queue(0).unwrap();
        for head in [0, 3, 4] {
            queue.take(head);
        }
        queue.give_back(0);
        queue.give_back(4);
        assert_eq!(inflight.queue(0).unwrap().recover(0), [0, 3, 4]);
    }

    #[test]
    fn invalid_bytes_in_the_region_give_heads_within_the_ring() {
        let (inflight, file, length) = create(1, 16).unwrap();
        let rubbish: Vec<u8> = (0..length).map(|byte| (byte * 167 + 13) as u8 | 1).collect();
        file.write_all_at(&rubbish, 0).unwrap();
        for used_index in [0, 3, 16, 999, u16::MAX] {
            let heads = inflight.queue(0).unwrap().recover(used_index);
            let size = RING_SIZE_MAX;
            assert!(heads.len() <= size.into() && heads.iter().all(|&head| head < size));
        }
        assert!(open(&file, (0, 271), 1, 16).is_err());
        assert!(open(&file, (8, length), 1, 16).is_err());
        assert!(open(&file, (0, length), 1, 0).is_err());
        assert!(create(0, 16).is_err());
    }

    #[test]
    fn a_ring_may_be_longer_than_the_front_end_requested() {
        let (inflight, file, length) = create(2, 128).unwrap();
        let mut queue = inflight.queue(1).unwrap();
        assert_eq!(queue.size(), RING_SIZE_MAX);
        queue.recover(0);
        queue.take(1000);
        let again = open(&file, (0, length), 2, 128).unwrap();
        assert_eq!(again.queue(1).unwrap().recover(0), [1000]);
        assert!(again.queue(0).unwrap().recover(0).is_empty());
        // A file with entries only for the requested size, as other daemons make it.
        let short = (region_length(128) * 2) as u64;
        let tight = open(&file, (0, short), 2, 128).unwrap();
        let size = tight.queue(1).unwrap().size();
        assert!((128..132).contains(&size), "{size}");
    }
}

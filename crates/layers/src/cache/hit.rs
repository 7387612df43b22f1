//! Hits of a cache in memory: they are answered without a lock, and what a batch of them needs is
//! fetched into the processor's caches together.

use fathom_block::{CacheHit, Crossing, Operation, Request};
use fathom_cache::BlockAccess;

use super::queue::CacheQueue;

/// The requests of a batch for which memory is fetched at a time: what is fetched for them fits
/// into the processor's smallest cache.
const TOGETHER: usize = 32;

/// Whether a read was answered at once.
pub(super) enum AtOnce {
    Served,
    /// The cache has no hit of the read's block that can be found without a lock.
    Missed(Box<Request>),
    /// Nothing is known: it is a read of several blocks, or not of a cache in memory.
    Unknown(Box<Request>),
}

impl CacheQueue {
    /// Fetches what reads of one block need of the index and of a cache in memory, so that not each
    /// read waits for memory several times, one after the other.
    pub(super) fn prepare(&mut self, requests: &[Box<Request>], next: &mut Crossing<'_>) {
        let mut prepared = std::mem::take(&mut self.prepared);
        prepared.clear();
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        let key = |request: &Request| self.key(request.offset >> size.trailing_zeros());
        for requests in requests.chunks(TOGETHER) {
            let reads = || requests.iter().filter(|request| request.operation == Operation::Read);
            for request in reads() {
                volume.prefetch_index(key(request));
            }
            for request in reads() {
                let key = key(request);
                let Some((shard, slot)) = volume.prefetch_slot(key) else { continue };
                if !volume.is_kept {
                    let place = volume.place(shard, slot);
                    next.expect(self.store, place + (request.offset & (size - 1)));
                    prepared.push_back((key, (shard, slot)));
                }
            }
        }
        self.prepared = prepared;
    }

    /// The slot that a batch's next read probably hits, if it is a read of the block `key`.
    #[inline]
    fn take_prepared(&mut self, key: u64) -> Option<(usize, u32)> {
        let (expected, place) = *self.prepared.front()?;
        (expected == key).then(|| {
            self.prepared.pop_front();
            place
        })
    }

    /// Answers a read of a part of one block that a cache in memory has: it is copied without a
    /// lock, because the guest's memory may have to be fetched first.
    #[inline]
    pub(super) fn serve_at_once(
        &mut self,
        mut request: Box<Request>,
        access: &BlockAccess,
        begin_ns: u64,
        next: &mut Crossing<'_>,
    ) -> AtOnce {
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        let (offset, length) = (request.offset, request.length);
        let block = offset >> size.trailing_zeros();
        let within = offset & (size - 1);
        // What a volume returns is compared with checksums.
        if volume.is_kept || length == 0 || length > size - within {
            return AtOnce::Unknown(request);
        }
        let key = self.key(block);
        let wanted = Self::touched(offset, length, size);
        let prepared = self.take_prepared(key);
        let volume = &self.inner.volume;
        let hit = prepared.and_then(|place| {
            volume.hit_at(place, key, wanted, access).map(|slot| (place.0, slot))
        });
        let hit = hit.or_else(|| {
            let shard = volume.shard_of(key);
            volume.hit(shard, key, wanted, access).map(|slot| (shard, slot))
        });
        let Some((shard, slot)) = hit else { return AtOnce::Missed(request) };
        let place = volume.place(shard, slot) + within;
        let copied = next.read_now(self.store, place, &mut request, 0..length);
        volume.unpin(shard, slot);
        let Some(outcome) = copied else { return AtOnce::Unknown(request) };
        self.hits.observe(key, access, begin_ns);
        let (blocks, counted) = ((block, block + 1), (length, length, access.miss_ns.into()));
        self.account.read_begins(&request.insight, access.class, blocks, counted, begin_ns);
        let followed = self.follow(&request, access, false);
        request.course.cache_hit = CacheHit::Hit;
        next.complete(request, outcome);
        if let Some(wanted) = followed.wanted {
            self.read_ahead(&wanted, next);
        }
        AtOnce::Served
    }
}

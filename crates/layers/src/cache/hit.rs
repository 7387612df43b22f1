//! Hits of a cache in memory: they are answered without a lock, and what a batch of them needs is fetched into the
//! processor's caches together.

use fathom_block::{CacheHit, Crossing, Operation, Request};
use fathom_cache::Access;

use super::queue::CacheQueue;

/// The requests of a batch for which memory is fetched at a time: what is fetched for them fits into the
/// processor's smallest cache.
const TOGETHER: usize = 32;

impl CacheQueue {
    /// Fetches what reads of one block need of the index and of a cache in memory, so that not each read
    /// waits for memory several times, one after the other.
    pub(super) fn prepare(&self, requests: &[Box<Request>], next: &mut Crossing<'_>) {
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        let key = |request: &Request| self.key(request.offset >> size.trailing_zeros());
        for requests in requests.chunks(TOGETHER) {
            let reads = || requests.iter().filter(|request| request.operation == Operation::Read);
            for request in reads() {
                volume.prefetch_index(key(request));
            }
            for request in reads() {
                let Some(place) = volume.prefetch_slot(key(request)) else { continue };
                if !volume.is_kept {
                    next.expect(self.store, place + (request.offset & (size - 1)));
                }
            }
        }
    }

    /// Answers a read of a part of one block that a cache in memory has: it is copied without a lock, because the
    /// guest's memory may have to be fetched first. Otherwise returns the request.
    #[inline]
    pub(super) fn serve_at_once(
        &mut self,
        mut request: Box<Request>,
        access: &Access,
        begin_ns: u64,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        let (offset, length) = (request.offset, request.length);
        let block = offset >> size.trailing_zeros();
        let within = offset & (size - 1);
        // What a volume returns is compared with checksums.
        if volume.is_kept || length == 0 || length > size - within {
            return Some(request);
        }
        let key = self.key(block);
        let shard = volume.shard_of(key);
        let wanted = Self::touched(offset, length, size);
        let Some(slot) = volume.hit(shard, key, wanted, access) else { return Some(request) };
        let place = volume.place(shard, slot) + within;
        let copied = next.read_now(self.store, place, &mut request, 0..length);
        volume.unpin(shard, slot);
        let Some(outcome) = copied else { return Some(request) };
        self.hits.observe(key, access, begin_ns);
        let (blocks, counted) = ((block, block + 1), (length, length, access.miss_ns.into()));
        self.account.read_begins(&request.insight, access.class, blocks, counted, begin_ns);
        let followed = self.follow(&request, access, false);
        request.course.cache_hit = CacheHit::Hit;
        next.complete(request, outcome);
        if let Some(wanted) = followed.wanted {
            self.read_ahead(&wanted, next);
        }
        None
    }
}

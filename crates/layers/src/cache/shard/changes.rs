//! Changes of blocks: what they make invalid, and whether the new content may be inserted.

use std::ops::Range;

use fathom_cache::{BlockAccess, Kept};

use super::{IMAGED, Reason, Shard};

impl Shard {
    /// A change of the granules `mask` of a block begins. Their content is not valid any more.
    pub(in crate::cache) fn begin_change(&mut self, key: u64, mask: u16, reason: Reason) {
        let is_in_range = self.ranges.iter().any(|(_, range)| range.contains(&key));
        let busy = self.busy.entry(key).or_default();
        busy.changes += 1;
        busy.is_contested |= busy.changes > 1 || is_in_range;
        busy.insertion = 0;
        let kept = self.invalidate(key, mask, reason).filter(|_| reason == Reason::Write);
        if let (Some(kept), Some(busy)) = (kept, self.busy.get_mut(&key)) {
            busy.kept = Some(kept);
        }
    }

    /// Takes a block out of the cache.
    pub(in crate::cache) fn forget(&mut self, key: u64) {
        self.take_out(key, Reason::Discard);
    }

    /// Takes a block out of the cache, for this reason.
    pub(in crate::cache) fn take_out(&mut self, key: u64, reason: Reason) {
        self.invalidate(key, u16::MAX, reason);
    }

    /// The content of granules is not valid any more. Returns the place of the block if it was the
    /// last of it.
    fn invalidate(&mut self, key: u64, mask: u16, reason: Reason) -> Option<Kept> {
        let slot = self.find(key)?;
        self.blocks.take_valid(slot, mask);
        if self.valid(slot) != 0 {
            if self.flags[slot as usize] & IMAGED != 0 {
                self.dirty.insert(slot / self.per_page);
            }
            return None;
        }
        match reason {
            Reason::Write => self.counts.overwritten += 1,
            Reason::Discard => self.counts.discarded += 1,
        }
        let kept = self.replacement.remove(slot, key);
        self.unmap(slot);
        kept
    }

    /// A change of a block has ended. If `access` is given, the new content may be inserted with
    /// the returned number, if that is not 0.
    pub(in crate::cache) fn end_change(&mut self, key: u64, access: Option<&BlockAccess>) -> u64 {
        let Some(busy) = self.busy.get_mut(&key) else { return 0 };
        busy.changes -= 1;
        if busy.changes > 0 {
            return 0;
        }
        let (is_contested, kept) = (busy.is_contested, busy.kept);
        self.busy.remove(&key);
        let Some(access) = access.filter(|_| !is_contested) else { return 0 };
        match self.find(key) {
            Some(slot) => self.hit(slot, key, access),
            // It counts as a hit when its content is there again.
            None if kept.is_some() => {}
            None if self.replacement.admits(key, access) => {}
            None => {
                self.counts.refused += 1;
                return 0;
            }
        }
        let number = self.expect(key);
        if let Some(busy) = self.busy.get_mut(&key) {
            busy.kept = kept;
        }
        number
    }

    /// A long change of the blocks with `keys` begins: as [`begin_change`](Self::begin_change) for
    /// each. The caller then takes these blocks out.
    pub(in crate::cache) fn begin_range(&mut self, keys: Range<u64>) -> u64 {
        self.numbers += 1;
        self.busy.retain(|key, busy| {
            if keys.contains(key) {
                (busy.insertion, busy.is_contested) = (0, true);
            }
            busy.changes > 0 || busy.insertion != 0
        });
        self.ranges.push((self.numbers, keys));
        self.numbers
    }

    /// Takes the blocks with `keys` out of at most `count` slots from `from` on.
    pub(in crate::cache) fn sweep(
        &mut self,
        keys: &Range<u64>,
        from: u32,
        count: u32,
        reason: Reason,
    ) {
        let end = from.saturating_add(count).min(self.slots());
        self.sweep_where(from..end, reason, |key| keys.contains(&key));
    }

    /// Takes the blocks whose keys have this property out of these slots.
    pub(in crate::cache) fn sweep_where(
        &mut self,
        slots: Range<u32>,
        reason: Reason,
        is_meant: impl Fn(u64) -> bool,
    ) {
        for slot in slots {
            if self.is_mapped(slot) && is_meant(self.key(slot)) {
                self.invalidate(self.key(slot), u16::MAX, reason);
            }
        }
    }

    /// A long change has ended.
    pub(in crate::cache) fn end_range(&mut self, number: u64) {
        self.ranges.retain(|(other, _)| *other != number);
    }
}

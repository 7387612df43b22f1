//! Loads the tables of the volume, in one of the queues. Meanwhile the disks are served without the
//! cache.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, Operation, Outcome, Request};
use fathom_cache::BlockAccess;

use super::format::{BLOCK_BITS, PAGE_LENGTH};
use super::queue::{CacheQueue, purpose};
use super::volume::{CacheVolume, DiskState};

/// The number of pages that are read at once.
const PAGES: u32 = 64;

/// A part of the tables that is being read.
pub(super) struct Loading {
    first: u32,
    count: u32,
    /// When it began, in nanoseconds.
    pub(super) asked_ns: u64,
}

impl CacheQueue {
    /// Reads the next pages, if no other queue does.
    pub(super) fn load(&mut self, next: &mut Crossing<'_>) {
        let volume = Arc::clone(&self.inner.volume);
        if volume.is_loaded() || volume.has_failed() || self.loading.is_some() || self.is_closed {
            return;
        }
        let is_mine =
            volume.keeper.access(|keeper| *keeper.loader.get_or_insert(self.number) == self.number);
        if !is_mine {
            return;
        }
        let total = volume.format.pages() - volume.format.table_first();
        let first = volume.load_next.load(Ordering::Relaxed) as u32;
        if first == 0 {
            for number in 0..volume.shards.len() {
                volume.shard(number).begin_load();
            }
        }
        if first >= total {
            volume.is_loaded.store(true, Ordering::Release);
            return self.note_change(next);
        }
        let count = PAGES.min(total - first);
        let asked_ns = self.watch(next);
        self.loading = Some(Loading { first, count, asked_ns });
        let mut own = next.request();
        (own.operation, own.token) = (Operation::Read, purpose::LOAD);
        own.offset = volume.format.page_offset(volume.format.table_first() + first, 0);
        own.length = u64::from(count) * 2 * PAGE_LENGTH as u64;
        own.buffers.allocate(own.length as usize);
        next.submit_to(self.store, own);
    }

    /// Pages have been read.
    pub(super) fn loaded(
        &mut self,
        request: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let loading = self.loading.take();
        if let (Some(Loading { first, count, .. }), Ok(())) = (loading, outcome) {
            let volume = Arc::clone(&self.inner.volume);
            let mut disks = volume.keeper.access(|keeper| keeper.disks.clone());
            // A disk without a state does not use the cache any more.
            disks.retain(|_, disk| disk.record.lock().generation != 0);
            let bytes = request.buffers.owned().unwrap_or_default();
            for (index, copies) in bytes.chunks(2 * PAGE_LENGTH).enumerate() {
                volume.load_page(first + index as u32, copies, &disks);
            }
            volume.load_next.store(u64::from(first + count), Ordering::Relaxed);
        }
        Self::give_back(request, next);
        self.tend(next);
    }
}

impl CacheVolume {
    /// Takes over the mappings of a page of the tables.
    fn load_page(&self, index: u32, copies: &[u8], disks: &BTreeMap<u16, Arc<DiskState>>) {
        let format = &self.format;
        let page = format.table_first() + index;
        let per_page = format.entries_per_page();
        let first = index * per_page;
        let slots = first..(first + per_page).min(format.slots);
        let shard_number = (first / self.shard_slots) as usize;
        let mut shard = self.shard(shard_number);
        let within = first % self.shard_slots;
        let mut sums = vec![0; format.granules() as usize];
        if let Some((sequence, bytes)) = format.valid(page, copies) {
            self.keeper.access(|keeper| keeper.sequences[page as usize] = sequence);
            // A copy that is neither sound nor blank may have been the newer one.
            let copies = copies.chunks(PAGE_LENGTH).enumerate();
            let is_certain =
                { copies }.all(|(index, copy)| format.is_sound_or_blank(page, index, copy));
            for slot in slots.clone() {
                let entry = format.read_entry(bytes, slot - first, &mut sums);
                let Some(entry) = entry else { continue };
                let block = entry.key & ((1 << BLOCK_BITS) - 1);
                let is_quiet = |disk: &Arc<DiskState>| {
                    let offset = block.checked_mul(u64::from(format.block_size))?;
                    let is_active = disk.regions.access(|regions| regions.is_active(offset));
                    let is_within = offset < disk.capacity.load(Ordering::Acquire);
                    (is_within && !is_active).then_some(())
                };
                let disk = disks.get(&((entry.key >> BLOCK_BITS) as u16));
                let is_current = is_certain
                    && self.shard_of(entry.key) == shard_number
                    && disk.and_then(is_quiet).is_some();
                let access = BlockAccess { class: entry.class, ..BlockAccess::default() };
                shard.load(within + slot - first, &entry, is_current, &access);
            }
        }
        shard.end_load(within, slots.end - slots.start);
    }
}

//! Writes the tables of the volume, in any open queue of any of its disks.
//!
//! A writing has two steps: it writes pages, each over the older of its two copies, and then
//! flushes the volume. A *complete* writing has all pages with changes. Its tables have only
//! mappings whose content an earlier flush has covered. A writing that a request waits for has only
//! the pages of disks and of regions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, Flags, Operation, Outcome, Request};
use fathom_persistence::Identity;

use super::ending::{Ending, RETRY_NS};
use super::queue::{CacheQueue, purpose};
use super::volume::{DiskState, WrittenPage};

/// The most pages in flight.
const PAGES_MAX: usize = 32;

/// A writing in progress.
pub(super) struct Writing {
    /// The number of the tables, if all are written.
    tables: Option<u64>,
    /// Pages of disks and regions that are not sent.
    pages: VecDeque<(u32, WrittenPage)>,
    /// The next page of a table: its shard, and the page within the shard.
    next: (usize, u32),
    /// The pages that were sent.
    written: Vec<(u32, WrittenPage)>,
    in_flight: usize,
    /// When the last of its requests was sent or answered, in nanoseconds.
    pub(super) asked_ns: u64,
    is_flushing: bool,
    /// The disks, each with the number of its last bit on these pages.
    bits: Vec<(Arc<DiskState>, u64)>,
}

impl Writing {
    /// The number of its requests that the store has not answered.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl CacheQueue {
    /// Continues the work that can continue now.
    pub(super) fn tend(&mut self, next: &mut Crossing<'_>) {
        if self.inner.volume.is_kept {
            self.load(next);
            self.write_tables(next);
            self.tend_regions(next);
            self.tend_notes(next);
            self.tend_return(next);
            self.tend_mark(next);
        }
        self.begin_waiting(next);
        if self.inner.volume.has_failed() {
            let is_awaited = !self.waiting.is_empty() || self.inner.are_notes_awaited();
            if is_awaited && self.end_of_use(next) == Ending::Failed {
                next.wake_at(next.round_ns() + RETRY_NS);
            }
        }
    }

    /// Notes that mappings have changed: the tables are written within an interval.
    pub(super) fn note_change(&mut self, next: &mut Crossing<'_>) {
        let volume = &self.inner.volume;
        if !volume.is_kept || volume.has_changed.swap(true, Ordering::Relaxed) {
            return;
        }
        let due_ns = next.round_ns() + volume.times.write_ns;
        let due_ns = volume.keeper.access(|keeper| {
            if keeper.due_ns == 0 {
                keeper.due_ns = due_ns;
            }
            keeper.due_ns
        });
        next.wake_at(due_ns);
    }

    fn write_tables(&mut self, next: &mut Crossing<'_>) {
        if self.writing.is_none() && !self.is_closed {
            self.writing = self.begin_tables(next);
        }
        loop {
            let Some(writing) = &mut self.writing else { return };
            if writing.in_flight >= PAGES_MAX || writing.is_flushing {
                return;
            }
            if self.inner.volume.has_failed() {
                if writing.in_flight == 0 {
                    self.abandon_tables();
                }
                return;
            }
            if let Some(page) = self.next_page() {
                self.write_page(page, next);
                continue;
            }
            let Some(writing) = &mut self.writing else { return };
            if writing.in_flight > 0 {
                return;
            }
            writing.is_flushing = true;
            if writing.tables.is_some() {
                for number in 0..self.inner.volume.shards.len() {
                    self.inner.volume.shard(number).capture();
                }
            }
            writing.in_flight = 1;
            self.ask(next);
            let mut own = next.request();
            (own.operation, own.token) = (Operation::Flush, purpose::VOLUME_FLUSH);
            next.submit_to(self.store, own);
        }
    }

    fn begin_tables(&mut self, next: &mut Crossing<'_>) -> Option<Writing> {
        let volume = Arc::clone(&self.inner.volume);
        let is_loaded = volume.is_loaded();
        let now_ns = next.round_ns();
        let mut wake_ns = None;
        let begun = volume.keeper.access(|keeper| {
            if keeper.writer.is_some() || keeper.failed.is_some() {
                return None;
            }
            let is_due = keeper.due_ns != 0 && (keeper.is_saving || now_ns >= keeper.due_ns);
            let is_complete = is_due && is_loaded;
            if !is_complete && !keeper.is_urgent {
                wake_ns = (keeper.due_ns != 0 && is_loaded).then_some(keeper.due_ns);
                return None;
            }
            keeper.writer = Some(self.number);
            keeper.is_urgent = false;
            if is_complete {
                (keeper.tables, keeper.due_ns) = (keeper.tables + 1, 0);
                volume.has_changed.store(false, Ordering::Relaxed);
            }
            let quiet_ns = if keeper.is_saving { 0 } else { volume.times.quiet_ns };
            let disks: Vec<Arc<DiskState>> = keeper.disks.values().map(Arc::clone).collect();
            let tables = is_complete.then_some(keeper.tables);
            Some((tables, keeper.tables_durable, quiet_ns, disks))
        });
        if let Some(wake_ns) = wake_ns {
            next.wake_at(wake_ns);
        }
        let (tables, tables_durable, quiet_ns, disks) = begun?;
        if let Some(tables) = tables {
            for number in 0..volume.shards.len() {
                volume.shard(number).begin_tables(tables);
            }
        }
        let (mut pages, mut bits) = (VecDeque::new(), Vec::new());
        for disk in disks {
            if !disk.is_attached.load(Ordering::Relaxed) {
                continue;
            }
            let number = disk.number;
            if disk.is_record_dirty.swap(false, Ordering::Relaxed) {
                let page = WrittenPage::Disk(number, Identity::NONE);
                pages.push_back((volume.format.disk_page(number), page));
            }
            let last = disk.regions.access(|regions| {
                if tables.is_some() {
                    regions.clear_quiet(now_ns, quiet_ns, tables_durable);
                }
                while let Some((page, bits)) = regions.take_dirty() {
                    let place = volume.format.bitmap_first(number) + page;
                    pages.push_back((place, WrittenPage::Bitmap(number, page, bits)));
                }
                regions.bits()
            });
            bits.push((disk, last));
        }
        let (next, written) = ((0, 0), Vec::new());
        let is_flushing = false;
        Some(Writing { tables, pages, next, written, in_flight: 0, asked_ns: 0, is_flushing, bits })
    }

    /// The next page of the writing.
    fn next_page(&mut self) -> Option<(u32, WrittenPage)> {
        let writing = self.writing.as_mut()?;
        if let Some(page) = writing.pages.pop_front() {
            return Some(page);
        }
        writing.tables?;
        let volume = &self.inner.volume;
        while writing.next.0 < volume.shards.len() {
            let (number, from) = writing.next;
            let Some(page) = volume.shard(number).take_dirty(from) else {
                writing.next = (number + 1, 0);
                continue;
            };
            writing.next = (number, page + 1);
            let per_page = volume.format.entries_per_page();
            let place =
                volume.format.table_first() + number as u32 * (volume.shard_slots / per_page);
            return Some((place + page, WrittenPage::Table(number, page)));
        }
        None
    }

    fn write_page(&mut self, (page, mut kind): (u32, WrittenPage), next: &mut Crossing<'_>) {
        let volume = Arc::clone(&self.inner.volume);
        let format = &volume.format;
        let (sequence, disk) = volume.keeper.access(|keeper| {
            let disk = match kind {
                WrittenPage::Disk(number, _) => keeper.disks.get(&number).map(Arc::clone),
                WrittenPage::Bitmap(..) | WrittenPage::Table(..) => None,
            };
            (keeper.sequences[page as usize] + 1, disk)
        });
        let bytes = match &mut kind {
            WrittenPage::Disk(_, log) => {
                let record = disk.map(|disk| disk.record.lock().clone()).unwrap_or_default();
                *log = record.log;
                format.disk_bytes(page, sequence, &record)
            }
            WrittenPage::Bitmap(_, _, bits) => format.bitmap_bytes(page, sequence, bits),
            WrittenPage::Table(number, within) => {
                let mut shard = volume.shard(*number);
                format.table_bytes(page, sequence, shard.entries(*within))
            }
        };
        let Some(writing) = &mut self.writing else { return };
        writing.written.push((page, kind));
        writing.in_flight += 1;
        self.ask(next);
        let mut own = next.request();
        (own.operation, own.token) = (Operation::Write, purpose::PAGE);
        (own.offset, own.length) = (format.page_offset(page, sequence), bytes.len() as u64);
        own.flags = Flags { background: true, ..Flags::default() };
        own.buffers.allocate(bytes.len());
        own.buffers.copy_from(0, &bytes);
        next.submit_to(self.store, own);
    }

    /// A request of the writing is sent.
    fn ask(&mut self, next: &mut Crossing<'_>) {
        let asked_ns = self.watch(next);
        if let Some(writing) = &mut self.writing {
            writing.asked_ns = asked_ns;
        }
    }

    /// A page or the flush of the writing has completed. Errors were noted before.
    pub(super) fn table_returned(&mut self, outcome: Outcome, next: &mut Crossing<'_>) {
        let Some(writing) = &mut self.writing else { return };
        writing.in_flight -= 1;
        writing.asked_ns = next.round_ns();
        if writing.is_flushing && outcome.is_ok() && !self.inner.volume.has_failed() {
            self.end_tables(next);
        }
        self.tend(next);
    }

    /// All pages of the writing are durable.
    fn end_tables(&mut self, next: &mut Crossing<'_>) {
        let Some(Writing { tables, written, bits, .. }) = self.writing.take() else { return };
        let now_ns = next.round_ns();
        let volume = Arc::clone(&self.inner.volume);
        let disks = volume.keeper.access(|keeper| {
            for (page, _) in &written {
                keeper.sequences[*page as usize] += 1;
            }
            if let Some(tables) = tables {
                keeper.tables_durable = tables;
            }
            keeper.disks.clone()
        });
        for (_, page) in written {
            match page {
                WrittenPage::Bitmap(number, page, bits) => {
                    if let Some(disk) = disks.get(&number) {
                        disk.regions.access(|regions| regions.page_durable(page, &bits, now_ns));
                    }
                }
                WrittenPage::Disk(number, log) => {
                    if let Some(disk) = disks.get(&number) {
                        disk.note_log(log);
                    }
                }
                WrittenPage::Table(..) => {}
            }
        }
        for (disk, last) in bits {
            disk.regions.access(|regions| regions.bits_durable(last));
            disk.regions.wake();
        }
        let mut has_changes = false;
        if let Some(tables) = tables {
            for number in 0..volume.shards.len() {
                let mut shard = volume.shard(number);
                shard.flushed(Some(tables));
                has_changes |= shard.has_changes();
            }
        }
        volume.keeper.access(|keeper| {
            keeper.writer = None;
            // Another disk may wait for the next writing.
            if keeper.is_urgent || keeper.is_saving {
                keeper.wake_queues();
            }
        });
        volume.keeper.wake();
        if has_changes {
            self.note_change(next);
        }
    }

    /// Ends the writing without a result: its pages are written again.
    pub(super) fn abandon_tables(&mut self) {
        let Some(writing) = self.writing.take() else { return };
        let volume = &self.inner.volume;
        if writing.in_flight > 0 {
            // A page may still be written later, over a copy that is valid by then.
            volume.fail(ErrorKind::Io);
        }
        let disks = volume.keeper.access(|keeper| keeper.disks.clone());
        for (_, page) in writing.written.into_iter().chain(writing.pages) {
            match page {
                WrittenPage::Disk(number, _) => {
                    if let Some(disk) = disks.get(&number) {
                        disk.is_record_dirty.store(true, Ordering::Relaxed);
                    }
                }
                WrittenPage::Bitmap(number, page, _) => {
                    if let Some(disk) = disks.get(&number) {
                        disk.regions.access(|regions| regions.put_dirty(page));
                    }
                }
                WrittenPage::Table(number, page) => volume.shard(number).put_dirty(page),
            }
        }
        if writing.tables.is_some() {
            for number in 0..volume.shards.len() {
                volume.shard(number).abandon_capture();
            }
        }
        volume.keeper.access(|keeper| {
            (keeper.writer, keeper.is_urgent, keeper.due_ns) = (None, true, 1);
            keeper.wake_queues();
        });
    }

    /// Clears the bits of regions without changes: flushes home, and has the tables written.
    /// Flushes home at once for a disk that has just got the cache.
    fn tend_regions(&mut self, next: &mut Crossing<'_>) {
        let volume = Arc::clone(&self.inner.volume);
        if self.is_closed || !volume.is_loaded() || volume.has_failed() {
            return;
        }
        let now_ns = next.round_ns();
        let is_saving = volume.keeper.access(|keeper| keeper.is_saving);
        let quiet_ns = if is_saving { 0 } else { volume.times.quiet_ns };
        let is_first = !self.inner.disk.is_home_flushed.load(Ordering::Acquire);
        let (needs_flush, quiet_ns, flush) = self.inner.disk.regions.access(|regions| {
            let needs_flush =
                self.below.flush && (is_first || regions.needs_flush(now_ns, quiet_ns));
            let is_due = self.flushing_home.is_none() && now_ns >= self.flush_home_ns;
            let begins = needs_flush && is_due;
            let flush = begins.then(|| regions.begin_flush());
            (needs_flush, regions.next_quiet_ns(quiet_ns), flush)
        });
        if let Some(number) = flush {
            self.flushing_home = Some(number);
            let mut own = next.request();
            (own.operation, own.token) = (Operation::Flush, purpose::HOME_FLUSH);
            own.flags.background = true;
            next.submit(own);
        }
        if needs_flush && now_ns < self.flush_home_ns {
            next.wake_at(self.flush_home_ns);
        }
        let Some(quiet_ns) = quiet_ns else { return };
        if quiet_ns > now_ns {
            return next.wake_at(quiet_ns);
        }
        if !needs_flush {
            self.note_change(next);
        }
    }

    /// Ends the use of a cache that has failed, or does not answer: from then on, the image's mark
    /// rejects the content of the cache, and changes are not noted in it.
    pub(super) fn end_of_use(&mut self, next: &mut Crossing<'_>) -> Ending {
        self.take_ending();
        if !self.inner.volume.is_kept {
            return Ending::Ended;
        }
        let now_ns = next.round_ns();
        match self.inner.ending(now_ns) {
            Ending::InUse if self.ending.in_flight() == 0 => {
                let inner = Arc::clone(&self.inner);
                if !self.ending.begin(0, move || inner.end_use()) {
                    next.wake_at(now_ns + 10_000_000);
                }
                Ending::InUse
            }
            state @ (Ending::InUse | Ending::Ended | Ending::Failed) => state,
        }
    }

    /// Takes the answer of a thread that was to change the mark. It has noted what it has done.
    pub(super) fn take_ending(&mut self) {
        while let Some((_, answer)) = self.ending.answer() {
            if answer.is_none() {
                self.inner.end(false);
            }
        }
    }

    /// Takes back a request of the layer.
    pub(super) fn give_back(request: Box<Request>, next: &mut Crossing<'_>) {
        next.recycle(request);
    }
}

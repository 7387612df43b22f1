//! Puts waiting changes into records, and writes these.

use fathom_block::{Crossing, ErrorKind, HeldBy, Operation, Request, faults};
use fathom_wal::{Entry, EntryKind, Record, Reservation, entries_max, finish};

use super::{RECORDS_MAX, WalQueue, purpose};
use crate::wal::Completion;

/// A record without a reserved place.
pub(super) struct Prepared {
    pub(super) own: Box<Request>,
    pub(super) entries: Vec<Entry>,
    /// The changes that are completely in records with this one.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    pub(super) whole: Vec<Box<Request>>,
}

impl WalQueue {
    /// Fails the changes of a record.
    pub(super) fn fail_prepared(
        &mut self,
        prepared: Prepared,
        kind: ErrorKind,
        next: &mut Crossing<'_>,
    ) {
        self.full_since_ns = None;
        next.recycle(prepared.own);
        for request in prepared.whole {
            self.end_change(request, Err(kind), next);
        }
        if self.pending.front().is_some_and(|pending| pending.done > 0) {
            if let Some(pending) = self.pending.pop_front() {
                self.end_change(pending.request, Err(kind), next);
            }
        }
    }

    /// Writes waiting changes in records, as far as there is space.
    pub(super) fn pump(&mut self, next: &mut Crossing<'_>) {
        while self.records.len() < RECORDS_MAX {
            let Some(prepared) = self.prepared.take().or_else(|| self.prepare(next)) else {
                return;
            };
            let now_ns = next.round_ns();
            let has_fua = prepared.whole.iter().any(|request| request.flags.force_unit_access);
            let (mut is_alone, mut was_empty) = (false, false);
            let reserved = self.inner.shared.attempt(&self.waker, |state| {
                if let Some(kind) = state.refuses() {
                    return Some(Err(kind));
                }
                was_empty = state.log.is_empty();
                if was_empty {
                    state.since_ns = now_ns;
                }
                let was_pressed = self.inner.is_pressed(state);
                is_alone = state.log.is_settled() && state.checkpoint_flush.is_none();
                let reserved = state.log.reserve(prepared.entries.clone());
                state.is_space_awaited |= reserved.is_err();
                if self.inner.is_pressed(state) && !was_pressed {
                    // A round may wait for an idle time.
                    state.wake_queues();
                }
                match reserved {
                    Ok(reservation) => {
                        if let Some(carry) = &mut state.carry {
                            carry.reserved(&reservation.record);
                        }
                        if has_fua {
                            state.wanted = state.wanted.max(reservation.record.sequence + 1);
                        }
                        Some(Ok(reservation))
                    }
                    Err(_) => state.home_failed.map(Err),
                }
            });
            match reserved {
                None => {
                    self.prepared = Some(prepared);
                    self.full_since_ns.get_or_insert(now_ns);
                    return;
                }
                Some(Err(kind)) => self.fail_prepared(prepared, kind, next),
                Some(Ok(mut reservation)) => {
                    if let Some(call) = self.inner.on_changes.get().filter(|_| was_empty) {
                        call();
                    }
                    let mut prepared = prepared;
                    let start_ns = self.inner.clock_start_ns;
                    reservation.record.time_ns = if start_ns == 0 { 0 } else { start_ns + now_ns };
                    self.note_wait(&mut prepared.whole, now_ns);
                    let is_awaited = has_fua || self.inner.completion == Completion::Durable;
                    if is_alone && is_awaited && self.inner.volume.begin_forced() {
                        self.forced = Some(reservation.record.sequence);
                        prepared.own.flags.force_unit_access = true;
                    }
                    self.write(prepared, &reservation, next);
                }
            }
        }
    }

    /// Notes in changes how long they have waited for space in the log: in those of a record that
    /// has its space now, and in those that come after it.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    fn note_wait(&mut self, whole: &mut Vec<Box<Request>>, now_ns: u64) {
        let Some(full_ns) = self.full_since_ns.take() else { return };
        let by = if self.is_switched { HeldBy::Offload } else { HeldBy::Wal };
        for request in whole {
            request.course.hold(by, now_ns.saturating_sub(full_ns));
        }
        for pending in &mut self.pending {
            let since_ns = pending.since_ns.max(full_ns);
            pending.request.course.hold(by, now_ns.saturating_sub(since_ns));
        }
    }

    /// Puts as many waiting changes into a record as fit.
    fn prepare(&mut self, next: &mut Crossing<'_>) -> Option<Prepared> {
        let block_size = self.inner.superblock.block_size;
        let data_max = self.inner.shared.access(|state| state.log.data_length_max());
        let mut lengths = Vec::new();
        let mut room = data_max;
        for pending in self.pending.iter().take(entries_max(block_size)) {
            let left = pending.request.length - pending.done;
            if pending.request.operation != Operation::Write {
                lengths.push(left);
                continue;
            }
            let length = left.min(room);
            if length == 0 {
                break;
            }
            lengths.push(length);
            room -= length.next_multiple_of(u64::from(block_size));
            if length < left {
                break;
            }
        }
        if lengths.is_empty() {
            return None;
        }
        let mut own = next.request();
        own.buffers.allocate((u64::from(block_size) + data_max - room) as usize);
        let mut prepared = Prepared { own, entries: Vec::new(), whole: Vec::new() };
        let mut at = block_size as usize;
        for length in lengths {
            let Some(pending) = self.pending.front_mut() else { break };
            let request = &pending.request;
            let (offset, flags) = (request.offset + pending.done, request.flags);
            let kind = match request.operation {
                Operation::Write => {
                    let memory = prepared.own.buffers.owned_mut()?;
                    let padded = length.next_multiple_of(u64::from(block_size)) as usize;
                    let (data, padding) = memory[at..at + padded].split_at_mut(length as usize);
                    let before = faults();
                    request.buffers.copy_to(pending.done, data);
                    if faults() != before {
                        // The guest's memory was lost, and the copied bytes are invalid.
                        if let Some(pending) = self.pending.pop_front() {
                            self.end_change(pending.request, Err(ErrorKind::Memory), next);
                        }
                        break;
                    }
                    padding.fill(0);
                    at += padded;
                    EntryKind::Data { checksum: fathom_wal::checksum(data) }
                }
                Operation::WriteZeroes => {
                    EntryKind::Zeroes { keep_allocated: flags.keep_allocated }
                }
                Operation::Discard => EntryKind::Discard,
                // None of these waits for a record; a bug loses its request, never data.
                Operation::Read | Operation::Flush | Operation::GetId | Operation::Extents => {
                    if let Some(pending) = self.pending.pop_front() {
                        self.end_change(pending.request, Err(ErrorKind::Unsupported), next);
                    }
                    break;
                }
            };
            prepared.entries.push(Entry { offset, length, kind });
            pending.done += length;
            if pending.done == pending.request.length {
                prepared.whole.extend(self.pending.pop_front().map(|pending| pending.request));
            }
        }
        prepared.own.buffers.truncate(at as u64);
        Some(prepared)
    }

    fn write(&mut self, prepared: Prepared, reservation: &Reservation, next: &mut Crossing<'_>) {
        let Prepared { mut own, whole, .. } = prepared;
        let block_size = self.inner.superblock.block_size as usize;
        let sequence = reservation.record.sequence;
        if let Some(memory) = own.buffers.owned_mut() {
            finish(&mut memory[..block_size], &self.inner.superblock, &reservation.record);
        }
        (own.offset, own.length) = (self.inner.base + reservation.offset, own.buffers.length());
        self.send_record(own, sequence, next);
        self.waiting.extend(whole.into_iter().map(|request| (sequence, request)));
    }

    fn send_record(&mut self, mut own: Box<Request>, sequence: u64, next: &mut Crossing<'_>) {
        own.operation = Operation::Write;
        own.token = sequence << purpose::BITS | purpose::RECORD;
        self.records.push(sequence);
        next.submit_to(self.store, own);
    }

    /// Writes an empty record in the place of one that its queue did not write.
    pub(super) fn adopt(&mut self, next: &mut Crossing<'_>) {
        if self.is_closed {
            return;
        }
        let adopted = self.inner.shared.access(|state| {
            if state.failed.is_some() {
                return None;
            }
            let sequence = state.orphans.pop()?;
            state.log.void(sequence)
        });
        let Some(Reservation { record, offset }) = adopted else { return };
        let Record { sequence, .. } = record;
        let block_size = self.inner.superblock.block_size as usize;
        let mut own = next.request();
        own.buffers.allocate(block_size);
        if let Some(memory) = own.buffers.owned_mut() {
            finish(memory, &self.inner.superblock, &record);
        }
        (own.offset, own.length) = (self.inner.base + offset, block_size as u64);
        self.send_record(own, sequence, next);
    }
}

//! The state of the log: which records are reserved, written, durable, and at home.
//!
//! ```text
//!        tail           durable          shown          head
//!    ──────┬───────────────┬───────────────┬──────────────┬──────
//!     free │ durable       │ written       │ being        │ free
//!          │          in the map           │ written      │
//!    ──────┴───────────────┴───────────────┴──────────────┴──────
//! ```
//! - Records are reserved at the head, in one order. Any thread may write them, in any order.
//! - A record is durable once a flush that began after its write has completed, and all records
//!   before it are durable: a scan ends at the first missing record. A scan after a crash finds all
//!   records that were durable.
//! - A record enters the map, and is *shown*, when it is durable. A caller that lets changes
//!   complete before they are durable shows records that are only written
//!   ([`show_written`](Log::show_written)).
//! - Content is written back home in rounds. The tail advances once all content of the records
//!   before it is durable at home, or is replaced by content of a later record that is durable.
//!   Space is free once the superblock with the new tail is durable and no reader has the space
//!   pinned.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use fathom_persistence::{Ages, Mismatch, SUPERBLOCK_LENGTH, Superblock as _};

use crate::held::Held;
use crate::map::{ContentLocation, Map, Segment};
use crate::record::{DATA_LENGTH_MAX, Entry, EntryKind, Record};
use crate::scan::FoundRecord;
use crate::superblock::{Owner, Superblock};
use crate::witness::{Sample, Witness};

/// The most ranges in the map, which bounds its memory.
const PLACES_MAX: usize = 1 << 20;

/// The log has no space now. A write-back round and a checkpoint free some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The space reserved for one record. Its holder writes the record there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The record's header.
    pub record: Record,
    /// Where to write it, in bytes from the start of the region.
    pub offset: u64,
}

/// Keeps the ring's space that was in use when it was made, for a reader.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is not released keeps its space forever"]
pub struct Pin(u64);

/// One round of write-back.
#[derive(Debug, PartialEq, Eq)]
pub struct Round {
    /// The sequence of the last record with content in this round.
    pub last: u64,
    /// The records before this one have replaced content of the round. They have to be durable
    /// before the round completes.
    pub shown: u64,
    /// The segments to write home, in order of their offsets.
    pub segments: Vec<Segment>,
}

/// A superblock to be written and flushed.
#[derive(Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where to write it, in bytes from the start of the region.
    pub offset: u64,
    /// Its bytes.
    pub bytes: Box<[u8; SUPERBLOCK_LENGTH]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    /// The flush with this number, or a later one, makes the record durable.
    Written(u64),
    Durable,
}

#[derive(Debug)]
struct Live {
    record: Record,
    state: State,
}

/// The state of a log. See the module.
#[derive(Debug)]
pub struct Log {
    /// The durable superblock.
    superblock: Superblock,
    /// The superblock that is being written.
    next: Option<Superblock>,
    /// The records from the tail to the head.
    live: VecDeque<Live>,
    head_position: u64,
    head_sequence: u64,
    /// The sequence of the first record that is not durable.
    durable: u64,
    /// The sequence of the first record that is not in the map; not before `durable`.
    shown: u64,
    /// The age of new records, and the highest one of all records and confirmed marks so far.
    stamp: u64,
    newest: u64,
    /// When the log was opened, in nanoseconds since 1970; 0 if that is not known.
    time_ns: u64,
    /// Whether earlier records prove nothing from the next epoch on.
    gives_up: bool,
    map: Map,
    pins: BTreeMap<u64, usize>,
}

impl Log {
    /// A log with the durable `superblock`, and no records yet. After a start, each record that a
    /// scan finds is given to [`recover`](Self::recover).
    pub fn new(superblock: Superblock) -> Self {
        Self {
            next: None,
            live: VecDeque::new(),
            head_position: superblock.tail_position,
            head_sequence: superblock.tail_sequence,
            durable: superblock.tail_sequence,
            shown: superblock.tail_sequence,
            stamp: superblock.ages.age,
            newest: superblock.ages.newest,
            time_ns: 0,
            gives_up: false,
            map: Map::default(),
            pins: BTreeMap::new(),
            superblock,
        }
    }

    /// Adds a record that a scan found.
    pub fn recover(&mut self, found: &FoundRecord<'_>) {
        let record = found.record.clone();
        self.head_position = record.end();
        self.head_sequence = record.sequence + 1;
        self.newest = self.newest.max(record.age);
        self.live.push_back(Live { record, state: State::Writing });
        self.make_durable();
    }

    /// What was durable behind the found records is given up, if something was, and with
    /// `discards`, so are they. The next superblock has an epoch above `epoch`, the highest one
    /// that was seen.
    pub fn give_up(&mut self, epoch: u64, discards: bool) {
        self.superblock.epoch = self.superblock.epoch.max(epoch);
        self.gives_up = true;
        if discards {
            self.map.cut(&(0..u64::MAX));
            self.live.clear();
            self.superblock.tail_position = self.head_position;
            self.superblock.tail_sequence = self.head_sequence;
        }
    }

    /// Begins a new epoch for `owner`, after the records that a scan found, all of which are
    /// durable. If the ring is empty, its length becomes `ring_length` bytes. The caller reserves
    /// nothing before the superblock is durable.
    pub fn resume(&mut self, owner: &Owner, ring_length: u64) -> Checkpoint {
        let mut next = self.superblock.clone();
        next.epoch += 1;
        next.ages.open();
        if std::mem::take(&mut self.gives_up) {
            next.proofs_since = next.epoch;
        }
        next.owner.clone_from(owner);
        if self.is_empty() {
            // Records of earlier epochs have lower positions, wherever they are in the ring.
            next.ring_length = ring_length;
            next.tail_epoch = next.epoch;
        }
        self.write(next)
    }

    /// Continues the log `before`, whose volume has failed, with the records that a scan has found
    /// meanwhile. The places of the other records stay unused until nothing of the log is needed
    /// any more: a store may still carry out a write that it has reported as failed. So the caller
    /// reserves nothing before the log is empty, and the superblock of that is durable.
    pub fn succeed(&mut self, before: &Self) -> Checkpoint {
        (self.head_position, self.head_sequence) = (before.head_position, before.head_sequence);
        (self.durable, self.shown) = (self.head_sequence, self.head_sequence);
        let mut next = self.superblock.clone();
        if self.live.is_empty() {
            (next.tail_position, next.tail_sequence) = (self.head_position, self.head_sequence);
            next.tail_epoch = self.superblock.epoch;
        }
        self.write(next)
    }

    /// Takes the pins of `before`, whose place this log takes.
    pub fn take_pins(&mut self, before: &mut Self) {
        self.pins = std::mem::take(&mut before.pins);
    }

    /// No later flush makes records durable that have been written so far: the volume may have lost
    /// them.
    pub fn lose_written(&mut self) {
        for live in &mut self.live {
            if matches!(live.state, State::Written(_)) {
                live.state = State::Writing;
            }
        }
    }

    /// The durable superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The most data that a record may have, in bytes: a longer record might never fit the ring.
    pub fn data_length_max(&self) -> u64 {
        let block_size = u64::from(self.superblock.block_size);
        DATA_LENGTH_MAX.min(self.superblock.ring_length / 4 / block_size * block_size)
    }

    /// The first position that must not be overwritten.
    fn floor(&self) -> u64 {
        let pinned = self.pins.keys().next().copied().unwrap_or(u64::MAX);
        self.superblock.tail_position.min(pinned)
    }

    /// Reserves space for the next record.
    ///
    /// # Errors
    /// If there is no space for it now.
    pub fn reserve(&mut self, entries: Vec<Entry>) -> Result<Reservation, Full> {
        let block_size = self.superblock.block_size;
        let data: u64 = entries.iter().map(|entry| entry.data_length(block_size)).sum();
        let length = u64::from(block_size) + data;
        let ring_length = self.superblock.ring_length;
        let mut position = self.head_position;
        if position % ring_length + length > ring_length {
            position = position.next_multiple_of(ring_length);
        }
        if position + length - self.floor() > ring_length || self.map.len() >= PLACES_MAX {
            return Err(Full);
        }
        let (epoch, sequence) = (self.superblock.epoch, self.head_sequence);
        let (durable, age) = (self.durable, self.stamp);
        let record =
            Record { epoch, sequence, position, length, durable, age, time_ns: 0, entries };
        self.newest = self.newest.max(age);
        self.head_position = record.end();
        self.head_sequence += 1;
        self.live.push_back(Live { record: record.clone(), state: State::Writing });
        Ok(Reservation { offset: self.place(position), record })
    }

    /// Record `sequence` has been written. The flush with number `flush`, and each later one,
    /// begins after this call; 0 if the record is durable already.
    pub fn written(&mut self, sequence: u64, flush: u64) {
        if let Some(live) = self.live_mut(sequence) {
            live.state = State::Written(flush);
        }
    }

    /// The holder of the reservation of record `sequence` will not write it. Returns a reservation
    /// of the same space for a record without entries, which keeps the sequence without a gap;
    /// `None` if the record has been written.
    pub fn void(&mut self, sequence: u64) -> Option<Reservation> {
        let live = self.live_mut(sequence).filter(|live| live.state == State::Writing)?;
        live.record.entries.clear();
        let record = live.record.clone();
        Some(Reservation { offset: self.place(record.position), record })
    }

    /// The flush with number `flush` has completed. Returns whether it made any record durable.
    pub fn flushed(&mut self, flush: u64) -> bool {
        let before = self.durable;
        while let Some(live) = self.live_mut(self.durable) {
            if !matches!(live.state, State::Written(needed) if needed <= flush) {
                break;
            }
            self.make_durable();
        }
        self.durable > before
    }

    /// Makes the first record durable that is not.
    fn make_durable(&mut self) {
        if self.shown == self.durable {
            self.show();
        }
        if let Some(live) = self.live_mut(self.durable) {
            live.state = State::Durable;
            self.durable += 1;
        }
    }

    /// Shows the records that have been written, up to the first that has not. Returns whether
    /// there are some.
    pub fn show_written(&mut self) -> bool {
        let before = self.shown;
        while self.live_mut(self.shown).is_some_and(|live| live.state != State::Writing) {
            self.show();
        }
        self.shown > before
    }

    /// Adds the entries of the first record that is not shown to the map.
    fn show(&mut self) {
        let block_size = self.superblock.block_size;
        let index = (self.shown - self.first()) as usize;
        let Some(live) = self.live.get_mut(index) else { return };
        for (entry, position) in live.record.places(block_size) {
            let source = match entry.kind {
                EntryKind::Data { .. } => ContentLocation::Ring(position),
                EntryKind::Zeroes { keep_allocated } => ContentLocation::Zeroes { keep_allocated },
                EntryKind::Discard => ContentLocation::Discard,
            };
            self.map.insert(
                entry.offset..entry.offset + entry.length,
                live.record.sequence,
                source,
            );
        }
        live.record.entries = Vec::new();
        self.shown += 1;
    }

    /// The sequence of the first record that is not in the map.
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// The sequence of the first record that is not durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// The sequence at which a scan of the volume ends at the earliest: that behind the last
    /// durable record.
    pub fn durable_end(&self) -> u64 {
        // After a recovery in use, records are missing that were not found.
        let first = self.first();
        first + (self.durable - first).min(self.live.len() as u64)
    }

    /// Compares the log, all of whose records were found, with the age of the image's mark.
    ///
    /// # Errors
    /// If they do not belong together.
    pub fn compare(&self, mark: u64) -> Result<(), Mismatch> {
        Ages { newest: self.newest, ..self.superblock.ages }.compare(mark)
    }

    /// The image's mark durably has this age: new records get it. The caller reserves nothing
    /// before the superblock is durable.
    pub fn pair(&mut self, mark: u64) -> Checkpoint {
        self.stamp = mark;
        let mut next = self.superblock.clone();
        next.ages.newest = self.newest;
        next.ages.pair(mark);
        self.newest = next.ages.newest;
        self.write(next)
    }

    /// The image has all changes, and no later ones come to this log. If it `has_mark` that could
    /// not be removed, the mark is void. Otherwise all marks are too old for the log.
    pub fn part(&mut self, has_mark: bool) -> Checkpoint {
        let mut next = self.superblock.clone();
        next.ages.newest = self.newest;
        next.ages.part(has_mark);
        self.newest = next.ages.newest;
        self.write(next)
    }

    /// Whether a checkpoint is being written.
    pub fn is_checkpointing(&self) -> bool {
        self.next.is_some()
    }

    /// The log is opened at this time, in nanoseconds since 1970.
    pub fn set_time(&mut self, time_ns: u64) {
        self.time_ns = time_ns;
    }

    /// The records that are not known to be at home.
    pub fn held(&self) -> Held {
        let times = || self.live.iter().map(|live| live.record.time_ns).filter(|time| *time > 0);
        Held {
            records: self.live.len() as u64,
            bytes: self.live.iter().map(|live| live.record.length).sum(),
            first_ns: times().min().unwrap_or(0),
            last_ns: times().max().unwrap_or(0),
        }
    }

    /// The number of the flush that makes the oldest non-durable records durable; `None` while the
    /// first of them is being written, or if all records are durable.
    pub fn awaited_flush(&self) -> Option<u64> {
        let index = (self.durable - self.first()) as usize;
        let mut needed = None;
        for live in self.live.range(index.min(self.live.len())..) {
            let State::Written(flush) = live.state else { break };
            needed = needed.max(Some(flush));
        }
        needed
    }

    /// Whether all reserved records are durable.
    pub fn is_settled(&self) -> bool {
        self.durable == self.head_sequence
    }

    /// Whether all content is at home and the durable superblock has no records.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// Whether record `sequence` is the only one.
    pub fn is_only(&self, sequence: u64) -> bool {
        self.live.len() == 1 && self.first() == sequence
    }

    /// The bytes of the ring that are in use.
    pub fn used(&self) -> u64 {
        self.head_position - self.floor()
    }

    /// The ranges of the disk whose newest content is in the log.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Removes ranges beyond the end of a disk of `capacity` bytes from the map.
    pub fn clip(&mut self, capacity: u64) {
        self.map.cut(&(capacity..u64::MAX));
    }

    /// Calls `visit` with the segments of `range`, in order. The pin keeps the space of the
    /// segments that are in the ring until [`unpin`](Self::unpin).
    pub fn pin(&mut self, range: Range<u64>, visit: impl FnMut(Segment)) -> Pin {
        self.map.segments(range, visit);
        let tail = self.superblock.tail_position;
        *self.pins.entry(tail).or_default() += 1;
        Pin(tail)
    }

    /// Keeps the space of the ring from `position` on, which is at most the head's, until
    /// [`unpin`](Self::unpin).
    pub fn hold(&mut self, position: u64) -> Pin {
        *self.pins.entry(position).or_default() += 1;
        Pin(position)
    }

    /// The position of the next record.
    pub fn head(&self) -> u64 {
        self.head_position
    }

    /// The sequence of the next record.
    pub fn head_sequence(&self) -> u64 {
        self.head_sequence
    }

    /// Releases a pin.
    #[expect(clippy::needless_pass_by_value, reason = "a pin is released once")]
    pub fn unpin(&mut self, pin: Pin) {
        let Pin(tail) = pin;
        if let Some(count) = self.pins.get_mut(&tail) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&tail);
            }
        }
    }

    /// The place of a position of the ring, in bytes from the start of the region.
    pub fn place(&self, position: u64) -> u64 {
        crate::RING_OFFSET + position % self.superblock.ring_length
    }

    /// The next round of write-back: the content of the oldest durable records, about `limit` bytes
    /// of the ring. `None` if there is none, or while a checkpoint is being written.
    pub fn round(&self, limit: u64) -> Option<Round> {
        let tail = self.superblock.tail_position;
        let mut last = None;
        for live in &self.live {
            if live.state != State::Durable {
                break;
            }
            last = Some(live.record.sequence);
            if live.record.end() - tail >= limit {
                break;
            }
        }
        let last = last.filter(|_| self.next.is_none())?;
        Some(Round { last, shown: self.shown, segments: self.map.until(last).collect() })
    }

    /// Keeps the witnesses of home for which `is_kept`. The caller reserves nothing before the next
    /// superblock is durable.
    pub fn retain_witnesses(&mut self, mut is_kept: impl FnMut(&Map, &Witness) -> bool) {
        self.superblock.witnesses.retain(|witness| is_kept(&self.map, witness));
    }

    /// Completes the round up to record `last`, whose content is durable at home, and a `sample` of
    /// it. Returns the checkpoint to write and flush.
    pub fn checkpoint(&mut self, last: u64, sample: Sample) -> Checkpoint {
        let mut earlier = self.superblock.witnesses.clone();
        earlier.retain(|witness| !witness.has_content(&self.map, last));
        self.map.forget(last);
        let kept = (last + 1 - self.first()) as usize;
        let mut next = self.superblock.clone();
        (next.tail_position, next.tail_sequence, next.tail_epoch) = match self.live.get(kept) {
            Some(Live { record, .. }) => (record.position, record.sequence, record.epoch),
            None => (self.head_position, self.head_sequence, self.superblock.epoch),
        };
        next.witnesses = sample.join(&earlier);
        self.write(next)
    }

    fn write(&mut self, mut next: Superblock) -> Checkpoint {
        next.number += 1;
        next.durable = self.durable_end();
        next.ages.newest = self.newest;
        next.time_ns = self.time_ns.max(next.time_ns);
        let checkpoint = Checkpoint { offset: next.offset(), bytes: Box::new(next.encode()) };
        self.next = Some(next);
        checkpoint
    }

    /// The checkpoint is durable, and is written once more, in the place of the other superblock.
    /// So the tail is safe even if one of both is replaced by an older one. `None` if there is no
    /// checkpoint.
    pub fn repeat(&mut self) -> Option<Checkpoint> {
        let next = self.next.clone()?;
        Some(self.write(next))
    }

    /// The checkpoint is durable: the space before its tail is free.
    pub fn checkpointed(&mut self) {
        let Some(next) = self.next.take() else { return };
        while self.live.front().is_some_and(|live| live.record.sequence < next.tail_sequence) {
            self.live.pop_front();
        }
        self.superblock = next;
    }

    /// The sequence of the first live record.
    fn first(&self) -> u64 {
        self.live.front().map_or(self.head_sequence, |live| live.record.sequence)
    }

    fn live_mut(&mut self, sequence: u64) -> Option<&mut Live> {
        let index = sequence.checked_sub(self.first())? as usize;
        self.live.get_mut(index)
    }
}

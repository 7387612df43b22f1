//! The log as a state: what is reserved, written, durable, at home.
//!
//! ```text
//!        tail                    durable            head
//!    ──────┬────────────────────────┬─────────────────┬──────
//!     free │ durable, in the map    │ being written   │ free
//!    ──────┴────────────────────────┴─────────────────┴──────
//! ```
//! - Records are reserved at the head, in one order. They are written in any order, by whomever.
//! - A record is durable when a flush that began after it was written has come back, and all
//!   records before it are durable: a scan ends at the first that is missing. Then, and not
//!   before, it is in the map: whatever the map names would be found after a crash.
//! - What the map names is brought home in rounds. The tail moves on when all that its records
//!   hold is at home and durable there. Space is free when the superblock that says so is durable,
//!   and when nobody reads there any more.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::map::{Map, Segment, Source};
use crate::record::{DATA_LENGTH_MAX, Entry, EntryKind, Record};
use crate::scan::Found;
use crate::superblock::{Owner, SUPERBLOCK_LENGTH, Superblock};

/// The most parts of a disk that are in the log, which bounds its memory.
const PLACES_MAX: usize = 1 << 20;

/// There is no space: a round home and a checkpoint give some back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A record's place, which is its alone. Whoever has it writes the record there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The record's header.
    pub record: Record,
    /// Where it goes, in bytes from the start of the region.
    pub offset: u64,
}

/// Keeps the space that was in use when it was taken, for somebody who reads there.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is not given back keeps its space for good"]
pub struct Pin(u64);

/// What is to be brought home at one go.
#[derive(Debug, PartialEq, Eq)]
pub struct Round {
    /// The sequence of the last record whose content is in it.
    pub last: u64,
    /// What to write, in order of the disk.
    pub segments: Vec<Segment>,
}

/// A superblock to be written and flushed.
#[derive(Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where it goes, in bytes from the start of the region.
    pub offset: u64,
    /// Its bytes.
    pub bytes: Box<[u8; SUPERBLOCK_LENGTH]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    /// The flush with this number makes it durable.
    Written(u64),
    Durable,
}

#[derive(Debug)]
struct Live {
    record: Record,
    state: State,
}

/// See the module.
#[derive(Debug)]
pub struct Log {
    /// The one that is durable.
    superblock: Superblock,
    /// The one that is being written.
    next: Option<Superblock>,
    /// The records from the tail to the head.
    live: VecDeque<Live>,
    head_position: u64,
    head_sequence: u64,
    /// The sequence of the first record that is not durable.
    durable: u64,
    map: Map,
    pins: BTreeMap<u64, usize>,
}

impl Log {
    /// The log whose superblock is durable, without its records. After a start each record that a
    /// scan finds is given to [`recover`](Self::recover).
    pub fn new(superblock: Superblock) -> Self {
        Self {
            next: None,
            live: VecDeque::new(),
            head_position: superblock.tail_position,
            head_sequence: superblock.tail_sequence,
            durable: superblock.tail_sequence,
            map: Map::default(),
            pins: BTreeMap::new(),
            superblock,
        }
    }

    /// Takes up a record that a scan has found.
    pub fn recover(&mut self, found: &Found<'_>) {
        let record = found.record.clone();
        self.head_position = record.end();
        self.head_sequence = record.sequence + 1;
        self.live.push_back(Live { record, state: State::Writing });
        self.make_durable();
    }

    /// Begins a new epoch, behind what a scan has found, for `owner`. The ring has `ring_length`
    /// bytes from now on where it is empty. Nothing may be reserved before the superblock and all
    /// that was found are durable.
    pub fn resume(&mut self, owner: &Owner, ring_length: u64) -> Checkpoint {
        let mut next = self.superblock.clone();
        next.epoch += 1;
        next.owner.clone_from(owner);
        if self.is_empty() {
            // What is left of before has earlier positions, wherever it stands.
            next.ring_length = ring_length;
            next.tail_epoch = next.epoch;
        }
        self.write(next)
    }

    /// The superblock that is durable.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The most data that a record may have, in bytes: one that is longer may never fit the ring.
    pub fn data_length_max(&self) -> u64 {
        let block_size = u64::from(self.superblock.block_size);
        DATA_LENGTH_MAX.min(self.superblock.ring_length / 4 / block_size * block_size)
    }

    /// The first position that must not be overwritten.
    fn floor(&self) -> u64 {
        let pinned = self.pins.keys().next().copied().unwrap_or(u64::MAX);
        self.superblock.tail_position.min(pinned)
    }

    /// Reserves the next record's place.
    ///
    /// # Errors
    /// When there is no space for it now.
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
        let record = Record { epoch, sequence, position, length, entries };
        self.head_position = record.end();
        self.head_sequence += 1;
        self.live.push_back(Live { record: record.clone(), state: State::Writing });
        Ok(Reservation { offset: self.place(position), record })
    }

    /// Record `sequence` has been written. The flush with number `flush`, and each later one,
    /// begins after this.
    pub fn written(&mut self, sequence: u64, flush: u64) {
        if let Some(live) = self.live_mut(sequence) {
            live.state = State::Written(flush);
        }
    }

    /// Record `sequence` will not be written by whom its place was reserved for. Its place is given
    /// out again, for a record without entries, which keeps the order of the others whole.
    pub fn void(&mut self, sequence: u64) -> Option<Reservation> {
        let live = self.live_mut(sequence).filter(|live| live.state == State::Writing)?;
        live.record.entries.clear();
        let record = live.record.clone();
        Some(Reservation { offset: self.place(record.position), record })
    }

    /// The flush with number `flush` has come back. Whether more is durable than before.
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

    /// The first record that is not durable is.
    fn make_durable(&mut self) {
        let block_size = self.superblock.block_size;
        let index = (self.durable - self.first()) as usize;
        let Some(live) = self.live.get_mut(index) else { return };
        live.state = State::Durable;
        for (entry, position) in live.record.places(block_size) {
            let source = match entry.kind {
                EntryKind::Data { .. } => Source::Ring(position),
                EntryKind::Zeroes { keep_allocated } => Source::Zeroes { keep_allocated },
                EntryKind::Discard => Source::Discard,
            };
            self.map.insert(
                entry.offset..entry.offset + entry.length,
                live.record.sequence,
                source,
            );
        }
        live.record.entries = Vec::new();
        self.durable += 1;
    }

    /// The sequence of the first record that is not durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// The flush that makes the first records durable that are not; `None` while the first of them
    /// is being written, or where all are durable.
    pub fn awaits(&self) -> Option<u64> {
        let index = (self.durable - self.first()) as usize;
        let mut needed = None;
        for live in self.live.range(index.min(self.live.len())..) {
            let State::Written(flush) = live.state else { break };
            needed = needed.max(Some(flush));
        }
        needed
    }

    /// Whether no record is on its way to be durable.
    pub fn is_settled(&self) -> bool {
        self.durable == self.head_sequence
    }

    /// Whether all is at home, and the log says so.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// The bytes of the ring that are in use.
    pub fn used(&self) -> u64 {
        self.head_position - self.floor()
    }

    /// Which parts of the disk are newer in the log.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Forgets what lies behind the end of a disk of `capacity` bytes.
    pub fn clip(&mut self, capacity: u64) {
        self.map.cut(&(capacity..u64::MAX));
    }

    /// Calls `visit` with the parts of `range`, in order, and keeps the space of those that are in
    /// the ring until the pin is [given back](Self::unpin).
    pub fn look(&mut self, range: Range<u64>, visit: impl FnMut(Segment)) -> Pin {
        self.map.segments(range, visit);
        let tail = self.superblock.tail_position;
        *self.pins.entry(tail).or_default() += 1;
        Pin(tail)
    }

    /// Whoever has read is done.
    #[expect(clippy::needless_pass_by_value, reason = "a pin is given back once")]
    pub fn unpin(&mut self, pin: Pin) {
        let Pin(tail) = pin;
        if let Some(count) = self.pins.get_mut(&tail) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&tail);
            }
        }
    }

    /// Where a position of the ring is, in bytes from the start of the region.
    pub fn place(&self, position: u64) -> u64 {
        crate::RING_OFFSET + position % self.superblock.ring_length
    }

    /// What to bring home next: the content of the oldest durable records, of about `limit` bytes of
    /// the ring. `None` where there is none, or a checkpoint is on its way.
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
        Some(Round { last, segments: self.map.until(last).collect() })
    }

    /// A round is over: all of it is durable at home. The checkpoint is to be written and flushed.
    pub fn home(&mut self, last: u64) -> Checkpoint {
        self.map.forget(last);
        let kept = (last + 1 - self.first()) as usize;
        let mut next = self.superblock.clone();
        (next.tail_position, next.tail_sequence, next.tail_epoch) = match self.live.get(kept) {
            Some(Live { record, .. }) => (record.position, record.sequence, record.epoch),
            None => (self.head_position, self.head_sequence, self.superblock.epoch),
        };
        self.write(next)
    }

    fn write(&mut self, mut next: Superblock) -> Checkpoint {
        next.number += 1;
        let checkpoint = Checkpoint { offset: next.offset(), bytes: Box::new(next.encode()) };
        self.next = Some(next);
        checkpoint
    }

    /// The checkpoint is durable: what is before its tail is free.
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

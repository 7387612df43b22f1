//! The frames that wait for the centre, within limits.
//!
//! Frames are kept until the centre acknowledges them, so that a lost connection loses no frame
//! that fits. If there is no room, the oldest rows that are not in flight are dropped: older rows
//! would arrive too late. Dropped rows are counted. A relation without one of its changes would
//! stay wrong, so all of its waiting changes are dropped, and it is sent again as a whole.

use std::collections::{BTreeSet, VecDeque};

use super::super::frame::FromHost;

/// The kinds of frames that the queue distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Rows of a stream.
    Stream { rows: u64 },
    /// Changes of a relation; `whole` if they are part of a complete relation.
    Relation { fragment: u16, whole: bool },
    /// A watermark.
    Watermark,
    /// The numbers of missing events and rows.
    Dropped,
}

#[derive(Debug)]
struct Queued {
    number: u64,
    kind: Kind,
    bytes: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Outbox {
    queue: VecDeque<Queued>,
    /// The number of frames of the queue that are in flight.
    sent: usize,
    /// The bytes of the frames in flight.
    sent_bytes: usize,
    /// The bytes of all frames.
    bytes: usize,
    bytes_max: usize,
    number: u64,
    /// Missing events and rows that have not been reported.
    events: u64,
    rows: u64,
    /// Missing events and rows since the start.
    pub dropped_events: u64,
    pub dropped_rows: u64,
    /// Relations that have to be sent as a whole.
    stale: BTreeSet<u16>,
}

impl Outbox {
    /// An empty outbox for at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            sent: 0,
            sent_bytes: 0,
            bytes: 0,
            bytes_max,
            number: 0,
            events: 0,
            rows: 0,
            dropped_events: 0,
            dropped_rows: 0,
            stale: BTreeSet::new(),
        }
    }

    fn push(&mut self, kind: Kind, write: impl FnOnce(u64, &mut Vec<u8>)) {
        self.number += 1;
        let mut bytes = Vec::new();
        write(self.number, &mut bytes);
        self.bytes += bytes.len();
        self.queue.push_back(Queued { number: self.number, kind, bytes });
        while self.bytes > self.bytes_max && self.drop_oldest() {}
    }

    /// Adds rows of a stream.
    pub fn stream(&mut self, fragment: u16, block: &[u8], rows: u64) {
        self.push(Kind::Stream { rows }, |number, out| {
            FromHost::Rows { number, fragment, reset: false, block }.write(out);
        });
    }

    /// Adds changes of a relation, unless it has to be sent as a whole.
    pub fn relation(&mut self, fragment: u16, block: &[u8]) {
        if !self.stale.contains(&fragment) {
            self.push(Kind::Relation { fragment, whole: false }, |number, out| {
                FromHost::Rows { number, fragment, reset: false, block }.write(out);
            });
        }
    }

    /// Adds a part of a complete relation; `reset` for the first part.
    pub fn whole(&mut self, fragment: u16, reset: bool, block: &[u8]) {
        self.stale.remove(&fragment);
        self.push(Kind::Relation { fragment, whole: true }, |number, out| {
            FromHost::Rows { number, fragment, reset, block }.write(out);
        });
    }

    /// Adds a watermark, in nanoseconds, with the number of events processed.
    pub fn watermark(&mut self, time_ns: i64, events: u64) {
        // The new watermark replaces one directly before it.
        let last = self.queue.len().wrapping_sub(1);
        let repeats = self.queue.back().is_some_and(|queued| queued.kind == Kind::Watermark);
        if repeats && last >= self.sent {
            self.remove(last);
        }
        self.push(Kind::Watermark, |number, out| {
            FromHost::Watermark { number, time_ns, events }.write(out);
        });
    }

    /// Counts events that the fragments did not get.
    pub fn missed(&mut self, events: u64) {
        self.events = self.events.saturating_add(events);
        self.dropped_events = self.dropped_events.saturating_add(events);
    }

    /// Drops the oldest rows. Returns whether there were any.
    fn drop_oldest(&mut self) -> bool {
        let droppable = |queued: &Queued| match queued.kind {
            Kind::Stream { .. } => true,
            Kind::Relation { whole, .. } => !whole,
            Kind::Watermark | Kind::Dropped => false,
        };
        let Some(at) = (self.sent..self.queue.len()).find(|&at| droppable(&self.queue[at])) else {
            return false;
        };
        match self.queue[at].kind {
            Kind::Relation { fragment, .. } => self.drop_relation(fragment),
            Kind::Stream { rows } => {
                self.rows = self.rows.saturating_add(rows);
                self.dropped_rows = self.dropped_rows.saturating_add(rows);
                self.remove(at);
            }
            Kind::Watermark | Kind::Dropped => {}
        }
        // The watermark between the removed rows is redundant.
        let watermark =
            |at: usize| self.queue.get(at).is_some_and(|queued| queued.kind == Kind::Watermark);
        if at > self.sent && watermark(at - 1) && watermark(at) {
            self.remove(at - 1);
        }
        true
    }

    fn remove(&mut self, at: usize) {
        if let Some(removed) = self.queue.remove(at) {
            self.bytes -= removed.bytes.len();
        }
    }

    fn drop_relation(&mut self, fragment: u16) {
        self.stale.insert(fragment);
        for at in (self.sent..self.queue.len()).rev() {
            let kind = self.queue[at].kind;
            if matches!(kind, Kind::Relation { fragment: other, .. } if other == fragment) {
                self.remove(at);
            }
        }
    }

    /// The relations that have to be sent as a whole; none until there is room for them.
    pub fn stale(&self) -> Vec<u16> {
        if self.bytes > self.bytes_max / 2 {
            return Vec::new();
        }
        self.stale.iter().copied().collect()
    }

    /// Marks relations to be sent as a whole, because the centre has no rows of them.
    pub fn forget_relations(&mut self, fragments: impl IntoIterator<Item = u16>) {
        for fragment in fragments {
            self.drop_relation(fragment);
        }
    }

    /// Appends the next frames to `out`, up to about `most` bytes.
    pub fn send(&mut self, most: usize, out: &mut Vec<u8>) {
        self.push_dropped();
        while out.len() < most && self.sent_bytes <= self.bytes_max / 2 {
            let Some(next) = self.queue.get(self.sent) else { return };
            out.extend_from_slice(&next.bytes);
            self.sent_bytes += next.bytes.len();
            self.sent += 1;
        }
    }

    /// Adds a frame with the numbers of missing events and rows, if there are any.
    fn push_dropped(&mut self) {
        if self.events == 0 && self.rows == 0 {
            return;
        }
        let (events, rows) = (std::mem::take(&mut self.events), std::mem::take(&mut self.rows));
        // Frames are numbered in the order of the queue, so this frame is added at the end.
        self.push(Kind::Dropped, |number, out| {
            FromHost::Dropped { number, events, rows }.write(out);
        });
    }

    /// Removes the frames up to a number, which the centre has received.
    pub fn acknowledge(&mut self, number: u64) {
        while self.sent > 0 && self.queue.front().is_some_and(|first| first.number <= number) {
            if let Some(first) = self.queue.pop_front() {
                self.sent -= 1;
                self.sent_bytes -= first.bytes.len();
                self.bytes -= first.bytes.len();
            }
        }
    }

    /// Begins a new connection to a centre that has received all frames up to a number.
    pub fn resume(&mut self, number: u64) {
        self.acknowledge(number);
        (self.sent, self.sent_bytes) = (0, 0);
    }

    /// Removes all frames. Rows that were not acknowledged are counted as dropped.
    pub fn clear(&mut self) {
        for queued in &self.queue {
            if let Kind::Stream { rows } = queued.kind {
                self.rows = self.rows.saturating_add(rows);
                self.dropped_rows = self.dropped_rows.saturating_add(rows);
            }
        }
        self.queue.clear();
        self.stale.clear();
        (self.sent, self.sent_bytes, self.bytes) = (0, 0, 0);
    }

    /// Begins other fragments, whose frames are numbered from 1.
    pub fn begin(&mut self) {
        self.clear();
        self.number = 0;
    }

    /// Whether no frames wait.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.stale.is_empty()
    }

    /// The number of bytes that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::{Inbox, Sender};
    use super::*;

    /// The frames that would be sent now, each as a text.
    fn sent(outbox: &mut Outbox) -> Vec<String> {
        let mut bytes = Vec::new();
        outbox.send(usize::MAX, &mut bytes);
        let mut inbox = Inbox::new(Sender::Host);
        inbox.add(&bytes);
        let mut all = Vec::new();
        while let Some((kind, frame)) = inbox.next().unwrap() {
            all.push(match FromHost::read(kind, frame).unwrap() {
                FromHost::Rows { number, fragment, reset, block } => {
                    let reset = if reset { "!" } else { "" };
                    format!("{number}: {fragment}{reset} {}", block[0])
                }
                FromHost::Watermark { number, time_ns, events } => {
                    format!("{number}: to {time_ns} {events}")
                }
                FromHost::Dropped { number, events, rows } => {
                    format!("{number}: without {events} {rows}")
                }
                other => panic!("{other:?}"),
            });
        }
        all
    }

    fn block(mark: u8) -> Vec<u8> {
        vec![mark; 100]
    }

    #[test]
    fn frames_without_acknowledgement_are_sent_again() {
        let mut outbox = Outbox::new(1 << 20);
        outbox.stream(0, &block(1), 10);
        outbox.watermark(5, 10);
        assert_eq!(sent(&mut outbox), ["1: 0 1", "2: to 5 10"]);
        outbox.stream(0, &block(2), 10);
        outbox.acknowledge(1);
        assert_eq!(sent(&mut outbox), ["3: 0 2"]);
        outbox.resume(1);
        assert_eq!(sent(&mut outbox), ["2: to 5 10", "3: 0 2"]);
        // A frame that has not been sent cannot have been received.
        outbox.stream(0, &block(3), 10);
        outbox.acknowledge(100);
        assert_eq!(sent(&mut outbox), ["4: 0 3"]);
        outbox.acknowledge(4);
        assert!(outbox.is_empty() && outbox.bytes() == 0);
    }

    #[test]
    fn the_newest_rows_are_kept_and_the_others_counted() {
        let mut outbox = Outbox::new(500);
        outbox.stream(0, &block(0), 1);
        assert_eq!(sent(&mut outbox), ["1: 0 0"]);
        for mark in 1..=20 {
            outbox.stream(0, &block(mark), 10);
            outbox.watermark(i64::from(mark), 0);
            assert!(outbox.bytes() <= 500 + 200, "{}", outbox.bytes());
        }
        outbox.missed(7);
        assert_eq!(outbox.dropped_rows % 10, 0);
        let kept = 20 - outbox.dropped_rows / 10;
        assert!((2..=4).contains(&kept), "{kept}");
        outbox.resume(1);
        let all = sent(&mut outbox);
        let rows: Vec<&String> = all.iter().filter(|frame| frame.contains(": 0 ")).collect();
        let first = 21 - kept;
        assert!(rows[0].ends_with(&format!(" {first}")), "{all:?}");
        assert!(all.len() < 12, "{all:?}");
        outbox.acknowledge(u64::MAX);
        let received = [all, sent(&mut outbox)].concat();
        assert!(
            received.iter().any(|frame| frame.ends_with(&format!("7 {}", outbox.dropped_rows)))
        );
    }

    #[test]
    fn a_relation_without_one_of_its_changes_is_sent_as_a_whole() {
        let mut outbox = Outbox::new(500);
        for mark in 1..=20 {
            outbox.relation(3, &block(mark));
        }
        assert_eq!((outbox.stale(), outbox.bytes(), outbox.dropped_rows), (vec![3], 0, 0));
        outbox.relation(3, &block(21));
        assert!(sent(&mut outbox).is_empty() && !outbox.is_empty());
        outbox.whole(3, true, &block(22));
        outbox.whole(3, false, &block(23));
        outbox.relation(3, &block(24));
        let all = sent(&mut outbox);
        let ends: Vec<&str> = all.iter().map(|frame| frame.split(": ").nth(1).unwrap()).collect();
        assert_eq!(ends, ["3! 22", "3 23", "3 24"]);
        outbox.acknowledge(u64::MAX);
        outbox.forget_relations([3, 4]);
        assert_eq!(outbox.stale(), [3, 4]);
    }
}

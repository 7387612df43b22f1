//! What waits for the centre, within bounds.
//!
//! Frames are kept until the centre has them, so that a cut loses nothing that fits. Where there
//! is no room the oldest rows that are not on their way go first: the newest are kept, since older
//! ones would come too late. What goes is counted. A relation of which a change is lost would be
//! wrong for ever, so all that waits of it goes, and it is told anew as a whole.

use std::collections::{BTreeSet, VecDeque};

use super::super::frame::FromHost;

/// What a frame is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Rows of a stream.
    Stream { rows: u64 },
    /// Changes of a relation; `whole` where they are all of it.
    Relation { fragment: u16, whole: bool },
    /// Up to when everything is told, by how many events.
    Watermark,
    /// What is missing.
    Dropped,
}

#[derive(Debug)]
struct Queued {
    number: u64,
    what: What,
    bytes: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Outbox {
    queue: VecDeque<Queued>,
    /// How many frames of the queue are on their way.
    sent: usize,
    /// Their bytes, and those of all.
    sent_bytes: usize,
    bytes: usize,
    bytes_max: usize,
    number: u64,
    /// Missing, and not told yet.
    events: u64,
    rows: u64,
    /// Missing since the start.
    pub dropped_events: u64,
    pub dropped_rows: u64,
    /// Relations that are to be told as a whole.
    stale: BTreeSet<u16>,
}

impl Outbox {
    /// Room for so many bytes.
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

    fn push(&mut self, what: What, write: impl FnOnce(u64, &mut Vec<u8>)) {
        self.number += 1;
        let mut bytes = Vec::new();
        write(self.number, &mut bytes);
        self.bytes += bytes.len();
        self.queue.push_back(Queued { number: self.number, what, bytes });
        while self.bytes > self.bytes_max && self.drop_oldest() {}
    }

    /// Rows of a stream.
    pub fn stream(&mut self, fragment: u16, block: &[u8], rows: u64) {
        self.push(What::Stream { rows }, |number, out| {
            FromHost::Rows { number, fragment, reset: false, block }.write(out);
        });
    }

    /// Changes of a relation. Those of one that is to be told as a whole are left out.
    pub fn relation(&mut self, fragment: u16, block: &[u8]) {
        if !self.stale.contains(&fragment) {
            self.push(What::Relation { fragment, whole: false }, |number, out| {
                FromHost::Rows { number, fragment, reset: false, block }.write(out);
            });
        }
    }

    /// A part of all of a relation; `reset` for the first.
    pub fn whole(&mut self, fragment: u16, reset: bool, block: &[u8]) {
        self.stale.remove(&fragment);
        self.push(What::Relation { fragment, whole: true }, |number, out| {
            FromHost::Rows { number, fragment, reset, block }.write(out);
        });
    }

    /// Nothing from before an instant comes any more.
    pub fn watermark(&mut self, time_ns: i64, events: u64) {
        // One behind the other says nothing more.
        let last = self.queue.len().wrapping_sub(1);
        let repeats = self.queue.back().is_some_and(|queued| queued.what == What::Watermark);
        if repeats && last >= self.sent {
            self.remove(last);
        }
        self.push(What::Watermark, |number, out| {
            FromHost::Watermark { number, time_ns, events }.write(out);
        });
    }

    /// So many events were not seen.
    pub fn missed(&mut self, events: u64) {
        self.events = self.events.saturating_add(events);
        self.dropped_events = self.dropped_events.saturating_add(events);
    }

    /// Makes room. Says whether there was something to drop.
    fn drop_oldest(&mut self) -> bool {
        let droppable = |queued: &Queued| match queued.what {
            What::Stream { .. } => true,
            What::Relation { whole, .. } => !whole,
            What::Watermark | What::Dropped => false,
        };
        let Some(at) = (self.sent..self.queue.len()).find(|&at| droppable(&self.queue[at])) else {
            return false;
        };
        match self.queue[at].what {
            What::Relation { fragment, .. } => self.drop_relation(fragment),
            What::Stream { rows } => {
                self.rows = self.rows.saturating_add(rows);
                self.dropped_rows = self.dropped_rows.saturating_add(rows);
                self.remove(at);
            }
            What::Watermark | What::Dropped => {}
        }
        // What stood between rows that have gone says nothing more.
        let watermark =
            |at: usize| self.queue.get(at).is_some_and(|queued| queued.what == What::Watermark);
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
            let what = self.queue[at].what;
            if matches!(what, What::Relation { fragment: other, .. } if other == fragment) {
                self.remove(at);
            }
        }
    }

    /// The relations that are to be told as a whole, once there is room for that.
    pub fn stale(&self) -> Vec<u16> {
        if self.bytes > self.bytes_max / 2 {
            return Vec::new();
        }
        self.stale.iter().copied().collect()
    }

    /// All relations are to be told as a whole: the centre has nothing of them.
    pub fn forget_relations(&mut self, fragments: impl IntoIterator<Item = u16>) {
        for fragment in fragments {
            self.drop_relation(fragment);
        }
    }

    /// Adds frames that are to be sent next to `out`, at most about so many bytes.
    pub fn send(&mut self, most: usize, out: &mut Vec<u8>) {
        self.tell_dropped();
        while out.len() < most && self.sent_bytes <= self.bytes_max / 2 {
            let Some(next) = self.queue.get(self.sent) else { return };
            out.extend_from_slice(&next.bytes);
            self.sent_bytes += next.bytes.len();
            self.sent += 1;
        }
    }

    /// Says what is missing before anything else is sent.
    fn tell_dropped(&mut self) {
        if self.events == 0 && self.rows == 0 {
            return;
        }
        let (events, rows) = (std::mem::take(&mut self.events), std::mem::take(&mut self.rows));
        // Its number has to stand between those of its neighbours, so that it goes last.
        self.push(What::Dropped, |number, out| {
            FromHost::Dropped { number, events, rows }.write(out);
        });
    }

    /// The centre has everything up to a number.
    pub fn acknowledge(&mut self, number: u64) {
        while self.sent > 0 && self.queue.front().is_some_and(|first| first.number <= number) {
            if let Some(first) = self.queue.pop_front() {
                self.sent -= 1;
                self.sent_bytes -= first.bytes.len();
                self.bytes -= first.bytes.len();
            }
        }
    }

    /// A new connection begins, of a centre that has everything up to a number.
    pub fn resume(&mut self, number: u64) {
        self.acknowledge(number);
        (self.sent, self.sent_bytes) = (0, 0);
    }

    /// Lets go of everything. What was not told is counted.
    pub fn clear(&mut self) {
        for queued in &self.queue {
            if let What::Stream { rows } = queued.what {
                self.rows = self.rows.saturating_add(rows);
                self.dropped_rows = self.dropped_rows.saturating_add(rows);
            }
        }
        self.queue.clear();
        self.stale.clear();
        (self.sent, self.sent_bytes, self.bytes) = (0, 0, 0);
    }

    /// Other fragments begin: numbers begin anew.
    pub fn begin(&mut self) {
        self.clear();
        self.number = 0;
    }

    /// Whether the centre has everything.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.stale.is_empty()
    }

    /// How many bytes wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::{Inbox, Sender};
    use super::*;

    /// What would be sent now, each frame in words.
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
    fn what_the_centre_has_not_is_sent_again() {
        let mut outbox = Outbox::new(1 << 20);
        outbox.stream(0, &block(1), 10);
        outbox.watermark(5, 10);
        assert_eq!(sent(&mut outbox), ["1: 0 1", "2: to 5 10"]);
        outbox.stream(0, &block(2), 10);
        outbox.acknowledge(1);
        assert_eq!(sent(&mut outbox), ["3: 0 2"]);
        outbox.resume(1);
        assert_eq!(sent(&mut outbox), ["2: to 5 10", "3: 0 2"]);
        // What is not on its way cannot have come.
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
        let told = [all, sent(&mut outbox)].concat();
        assert!(told.iter().any(|frame| frame.ends_with(&format!("7 {}", outbox.dropped_rows))));
    }

    #[test]
    fn a_relation_that_lost_a_change_is_reported_as_a_whole() {
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

//! Queues of slots that share one pool of memory.
//!
//! A queue is a list of chunks, so that an entry needs little more than the four bytes of its
//! slot's number, and any queue can hold all of them. The pool has room for each slot once, for
//! some entries more, and for the first and the last chunk of each queue, which are not full.

/// The greatest number of entries of a chunk. Small pools have smaller chunks.
const CHUNK_MAX: usize = 64;
/// No chunk.
const NONE: u32 = u32::MAX;

/// One queue.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// The first chunk, from which entries are taken, and the last, to which they are added.
    first: u32,
    last: u32,
    /// The position of the next entry in the first chunk, and of the end in the last one.
    begin: u32,
    end: u32,
    entries: u32,
}

const EMPTY: Queue = Queue { first: NONE, last: NONE, begin: 0, end: 0, entries: 0 };

/// First-in-first-out queues of slots.
#[derive(Debug)]
pub struct Queues {
    lists: Vec<Queue>,
    /// The next chunk of each chunk.
    next: Vec<u32>,
    /// The time at which the first entry of each chunk was added.
    times: Vec<u32>,
    entries: Vec<u32>,
    free: u32,
    chunk: usize,
}

impl Queues {
    /// Makes `queues` queues that hold at most `entries_max` entries in all.
    pub fn new(queues: usize, entries_max: usize) -> Self {
        let chunk = (entries_max / (8 * queues)).next_power_of_two().clamp(4, CHUNK_MAX);
        let chunks = entries_max.div_ceil(chunk) + 2 * queues;
        let next = |index: usize| if index + 1 == chunks { NONE } else { index as u32 + 1 };
        Self {
            lists: vec![EMPTY; queues],
            next: (0..chunks).map(next).collect(),
            times: vec![0; chunks],
            entries: vec![0; chunks * chunk],
            free: 0,
            chunk,
        }
    }

    /// Adds `queues` queues, and the memory for their chunks that are not full.
    pub fn add(&mut self, queues: usize) {
        self.lists.resize(self.lists.len() + queues, EMPTY);
        let (before, after) = (self.times.len(), self.times.len() + 2 * queues);
        self.next.extend((before..after).map(|index| index as u32 + 1));
        if let Some(last) = self.next.last_mut() {
            *last = std::mem::replace(&mut self.free, before as u32);
        }
        self.times.resize(after, 0);
        self.entries.resize(after * self.chunk, 0);
    }

    /// The number of entries of a queue.
    pub fn length(&self, queue: usize) -> u32 {
        self.lists[queue].entries
    }

    /// Adds an entry at the end of a queue. The caller adds at most as many entries as the pool
    /// has.
    pub fn push(&mut self, queue: usize, slot: u32, time: u32) {
        let target = &mut self.lists[queue];
        if target.last == NONE || target.end as usize == self.chunk {
            let chunk = self.free;
            assert_ne!(chunk, NONE, "the queues have no more entries than the pool");
            self.free = std::mem::replace(&mut self.next[chunk as usize], NONE);
            self.times[chunk as usize] = time;
            if target.last == NONE {
                (target.first, target.begin) = (chunk, 0);
            } else {
                self.next[target.last as usize] = chunk;
            }
            (target.last, target.end) = (chunk, 0);
        }
        self.entries[target.last as usize * self.chunk + target.end as usize] = slot;
        target.end += 1;
        target.entries += 1;
    }

    /// Takes the first entry out of a queue.
    pub fn pop(&mut self, queue: usize) -> Option<u32> {
        let source = &mut self.lists[queue];
        if source.entries == 0 {
            return None;
        }
        let chunk = source.first as usize;
        let slot = self.entries[chunk * self.chunk + source.begin as usize];
        source.begin += 1;
        source.entries -= 1;
        if source.entries == 0 || source.begin as usize == self.chunk {
            let next = std::mem::replace(&mut self.next[chunk], self.free);
            self.free = chunk as u32;
            (source.first, source.begin) = (next, 0);
            if source.entries == 0 {
                *source = EMPTY;
            }
        }
        Some(slot)
    }

    /// About when the first entry of a queue was added. Only the times of chunks are kept: within a
    /// chunk, entries count as evenly spread.
    pub fn first_time(&self, queue: usize, now: u32) -> Option<u32> {
        let list = &self.lists[queue];
        if list.entries == 0 {
            return None;
        }
        let (begin, mut end, mut chunk) = (self.times[list.first as usize], now, self.chunk as u32);
        let next = self.next[list.first as usize];
        match next {
            NONE => chunk = list.end.max(1),
            next => end = self.times[next as usize],
        }
        let span = u64::from(end.wrapping_sub(begin)) * u64::from(list.begin) / u64::from(chunk);
        Some(begin.wrapping_add(span as u32))
    }

    /// The memory of the queues, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&self.lists[..])
            + size_of_val(&self.next[..])
            + size_of_val(&self.times[..])
            + size_of_val(&self.entries[..])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn queues_are_those_of_a_plain_model() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (count, capacity) = (random.usize(1..9), random.usize(1..2000));
            let mut queues = Queues::new(count, capacity);
            let mut model = vec![VecDeque::new(); count];
            let mut count = count;
            let (mut entries, mut time) = (0, 0);
            for step in 0..5000 {
                if random.u32(0..2000) == 0 {
                    let more = random.usize(1..4);
                    queues.add(more);
                    count += more;
                    model.resize(count, VecDeque::new());
                }
                let queue = random.usize(0..count);
                time += random.u32(0..3);
                // Long stretches of filling and of emptying.
                if entries < capacity && random.u32(0..10) < 3 + 4 * (step / 1000 % 2) {
                    let slot = random.u32(..);
                    queues.push(queue, slot, time);
                    model[queue].push_back((slot, time));
                    entries += 1;
                } else {
                    let first_time = queues.first_time(queue, time);
                    let popped = queues.pop(queue);
                    let expected = model[queue].pop_front();
                    entries -= usize::from(expected.is_some());
                    assert_eq!(popped, expected.map(|(slot, _)| slot));
                    assert_eq!(first_time.is_some(), expected.is_some());
                    assert!(first_time <= Some(time));
                    assert_eq!(queues.length(queue) as usize, model[queue].len());
                }
            }
        }
    }
}

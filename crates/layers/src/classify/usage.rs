//! The accounts of a disk. Threads of its queues write them and never wait; other threads read
//! them.
//!
//! Each queue counts all whole requests in separate cells. Parts with a known meaning are counted
//! in the disk's table. They wait in a short list, which the queue's thread moves into the table
//! unless another thread has the table locked. A reader moves all lists into the table before it
//! reads. If a list reaches its limit meanwhile, further parts are dropped and counted.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{Facts, Insight, Operation, Outcome, Request};
use fathom_insight::{Kind, Names};
use parking_lot::{Mutex, MutexGuard};

use super::cells::{Accounts, Direction, Totals, TotalsSnapshot, merge};
use super::groups::GroupSnapshot;
use super::slow::{Slow, SlowRequest};
use super::table::{Record, Table, UsageRow, UsageSubject};

/// The number of waiting parts at which a queue moves them into the table.
const BATCH_MIN: usize = 32;
/// The most parts of one queue that wait for the table.
const PENDING_MAX: usize = 4096;

/// The limits of the accounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageOptions {
    /// The most rows of the disk's table.
    pub rows_max: usize,
    /// The most control groups with accounts of their own, for metrics.
    pub groups_max: usize,
    /// The most slow requests kept in one minute.
    pub slow_max: usize,
}

impl Default for UsageOptions {
    /// 4,096 rows, 100 groups, 64 slow requests.
    fn default() -> Self {
        Self { rows_max: 4096, groups_max: 100, slow_max: 64 }
    }
}

/// The accounts of a disk's requests since the accounts were opened.
#[derive(Clone, Debug, Default)]
pub struct UsageSnapshot {
    /// The counts of all whole requests.
    pub totals: TotalsSnapshot,
    /// The rows of requests with a known meaning, one for each subject.
    pub rows: Vec<UsageRow>,
    /// The counts of removed rows.
    pub others: Accounts,
    /// The number of removed rows.
    pub folded: u64,
    /// Parts of requests that are in no row, because the table was locked for too long.
    pub dropped: u64,
    /// The bytes of the dropped parts.
    pub dropped_bytes: u64,
}

/// The state that one queue shares with readers.
#[derive(Default)]
struct Shard {
    totals: Totals,
    /// Parts that wait for the table.
    pending: Mutex<Vec<Record>>,
    dropped: AtomicU64,
    dropped_bytes: AtomicU64,
}

/// The queues of a disk.
#[derive(Default)]
struct Shards {
    open: Vec<Arc<Shard>>,
    /// The counts of closed queues.
    past: TotalsSnapshot,
    dropped_past: u64,
    dropped_bytes_past: u64,
}

/// The accounts of one disk.
pub(super) struct Usage {
    names: Arc<Names>,
    shards: Mutex<Shards>,
    table: Mutex<Table>,
    slow: Slow,
}

impl Usage {
    pub(super) fn new(names: Arc<Names>, options: UsageOptions) -> Self {
        Self {
            names,
            shards: Mutex::default(),
            table: Mutex::new(Table::new(options.rows_max, options.groups_max)),
            slow: Slow::new(options.slow_max),
        }
    }

    pub(super) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    pub(super) fn snapshot(&self) -> UsageSnapshot {
        let shards = self.shards.lock();
        let mut totals = shards.past.clone();
        let (mut dropped, mut dropped_bytes) = (shards.dropped_past, shards.dropped_bytes_past);
        for shard in &shards.open {
            totals.merge(&shard.totals.read());
            dropped += shard.dropped.load(Ordering::Relaxed);
            dropped_bytes += shard.dropped_bytes.load(Ordering::Relaxed);
        }
        let table = self.settled(&shards);
        let (rows, others, folded) = (table.rows(), table.others(), table.folded());
        drop((table, shards));
        UsageSnapshot { totals, rows: merge_rows(rows), others, folded, dropped, dropped_bytes }
    }

    pub(super) fn groups(&self) -> (TotalsSnapshot, Vec<GroupSnapshot>) {
        let shards = self.shards.lock();
        let mut totals = shards.past.clone();
        for shard in &shards.open {
            totals.merge(&shard.totals.read());
        }
        let groups = self.settled(&shards).groups();
        (totals, groups)
    }

    pub(super) fn slow(&self, now_ns: u64, count: usize) -> Vec<SlowRequest> {
        self.slow.list(now_ns, count)
    }

    /// The table, with all waiting parts counted.
    fn settled(&self, shards: &Shards) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        for shard in &shards.open {
            // The queue's thread finds its list locked only during this swap.
            let mut records = table.take_spare();
            std::mem::swap(&mut records, &mut *shard.pending.lock());
            for record in records.drain(..) {
                table.add(&record, &self.names);
            }
            table.give_spare(records);
        }
        table
    }
}

/// Merges rows with the same subject: a name that was removed and added again has a new number.
fn merge_rows(rows: Vec<UsageRow>) -> Vec<UsageRow> {
    let mut places: HashMap<UsageSubject, usize> = HashMap::with_capacity(rows.len());
    let mut merged: Vec<UsageRow> = Vec::with_capacity(rows.len());
    for row in rows {
        if let Some(place) = places.get(&row.subject) {
            let first = &mut merged[*place];
            merge(&mut first.accounts, &row.accounts);
            if row.instance > first.instance {
                (first.file_size, first.owner) = (row.file_size, row.owner);
            }
            first.instance = first.instance.min(row.instance);
        } else {
            places.insert(row.subject.clone(), merged.len());
            merged.push(row);
        }
    }
    merged
}

/// The accounts as one queue writes them.
pub(super) struct UsageQueue {
    usage: Arc<Usage>,
    shard: Arc<Shard>,
    queue: u64,
    /// Parts that arrived while the list was locked.
    waiting: Vec<Record>,
}

/// Whether a request has a known meaning.
fn is_known(insight: &Insight) -> bool {
    insight.facts.kind != Kind::Unknown
        || !insight.parts.is_empty()
        || insight.facts != Facts::default()
}

impl UsageQueue {
    pub(super) fn open(usage: Arc<Usage>, queue: u64) -> Self {
        let shard: Arc<Shard> = Arc::default();
        usage.shards.lock().open.push(Arc::clone(&shard));
        Self { usage, shard, queue, waiting: Vec::new() }
    }

    /// Accounts for a request that arrived at `start_ns` and completed at `now_ns`.
    pub(super) fn add(&mut self, request: &Request, outcome: Outcome, start_ns: u64, now_ns: u64) {
        self.usage.slow.offer(request, self.queue, outcome, start_ns, now_ns);
        let direction = Direction::of(request.operation);
        if outcome.is_err() {
            self.shard.totals.add_error(direction);
            return;
        }
        let latency_ns = now_ns.saturating_sub(start_ns);
        let known = is_known(&request.insight);
        let bytes = accounted_bytes(request);
        let cache_hit = request.course.cache_hit;
        self.shard.totals.add(direction, known, bytes, latency_ns, cache_hit);
        if known {
            self.add_parts(request, bytes, direction, latency_ns, now_ns);
        }
    }

    fn add_parts(
        &mut self,
        request: &Request,
        bytes: u64,
        direction: Direction,
        latency_ns: u64,
        now_ns: u64,
    ) {
        let parts = request.insight.parts(bytes);
        let records = parts.map(|part| Record {
            facts: part.facts,
            direction,
            bytes: part.length,
            latency_ns,
            now_ns,
            cache_hit: request.course.cache_hit,
        });
        let Some(mut pending) = self.shard.pending.try_lock() else {
            // A reader is swapping the list now.
            for record in records {
                keep(&self.shard, &mut self.waiting, record);
            }
            return;
        };
        for record in self.waiting.drain(..).chain(records) {
            keep(&self.shard, &mut pending, record);
        }
        if pending.len() >= BATCH_MIN {
            if let Some(mut table) = self.usage.table.try_lock() {
                for record in pending.drain(..) {
                    table.add(&record, &self.usage.names);
                }
            }
        }
    }
}

/// The bytes for which a successful request is accounted.
fn accounted_bytes(request: &Request) -> u64 {
    match request.operation {
        Operation::Read | Operation::Write | Operation::Discard | Operation::WriteZeroes => {
            request.length
        }
        Operation::Flush | Operation::GetId | Operation::Extents => 0,
    }
}

fn keep(shard: &Shard, list: &mut Vec<Record>, record: Record) {
    if list.len() < PENDING_MAX {
        list.push(record);
        return;
    }
    shard.dropped.fetch_add(1, Ordering::Relaxed);
    shard.dropped_bytes.fetch_add(record.bytes, Ordering::Relaxed);
}

impl Drop for UsageQueue {
    fn drop(&mut self) {
        let mut shards = self.usage.shards.lock();
        self.shard.pending.lock().append(&mut self.waiting);
        drop(self.usage.settled(&shards));
        shards.past.merge(&self.shard.totals.read());
        shards.dropped_past += self.shard.dropped.load(Ordering::Relaxed);
        shards.dropped_bytes_past += self.shard.dropped_bytes.load(Ordering::Relaxed);
        shards.open.retain(|shard| !Arc::ptr_eq(shard, &self.shard));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_insight::ClassTable;

    fn request(inode: u64, length: u64) -> Request {
        let mut request = Request::default();
        (request.operation, request.length) = (Operation::Write, length);
        request.insight.facts = Facts { kind: Kind::Data, inode, ..Facts::default() };
        request
    }

    fn usage() -> Arc<Usage> {
        Arc::new(Usage::new(Arc::default(), UsageOptions::default()))
    }

    fn bytes(rows: &[UsageRow], inode: u64) -> u64 {
        let row = rows.iter().find(|row| row.subject.inode == inode);
        row.map_or(0, |row| row.accounts[Direction::Write as usize].bytes)
    }

    #[test]
    fn parts_go_to_their_rows_and_totals_add_up() {
        let usage = usage();
        let mut queue = UsageQueue::open(Arc::clone(&usage), 0);
        let mut both = request(0, 12_288);
        both.insight.clear();
        for (length, inode) in [(4096, 1), (8192, 2)] {
            both.insight.push(length, Facts { kind: Kind::Data, inode, ..Facts::default() });
        }
        both.insight.finish(&ClassTable::default());
        queue.add(&both, Ok(()), 100, 5_100);
        queue.add(&request(1, 512), Ok(()), 100, 200);
        queue.add(&request(1, 7), Err(fathom_block::ErrorKind::Io), 0, 1);
        let mut nothing = request(0, 1024);
        nothing.insight.clear();
        queue.add(&nothing, Ok(()), 0, 1);
        for snapshot in [usage.snapshot(), {
            drop(queue);
            usage.snapshot()
        }] {
            assert_eq!((bytes(&snapshot.rows, 1), bytes(&snapshot.rows, 2)), (4608, 8192));
            let write = Direction::Write as usize;
            let all = snapshot.totals.all()[write];
            assert_eq!((all.requests, all.bytes), (3, 12_288 + 512 + 1024));
            assert_eq!(snapshot.totals.unknown[write].bytes, 1024);
            assert_eq!(snapshot.totals.errors[write], 1);
            assert_eq!(all.latency.iter().sum::<u64>(), 3);
            assert_eq!((all.latency_max_ns, snapshot.dropped), (5_000, 0));
        }
        assert_eq!(usage.slow(10_000, 9).len(), 4);
    }

    #[test]
    fn hits_of_a_cache_are_counted_by_subject() {
        use fathom_block::CacheHit;
        let usage = usage();
        let mut queue = UsageQueue::open(Arc::clone(&usage), 0);
        let hits =
            [CacheHit::Hit, CacheHit::Miss, CacheHit::Part, CacheHit::Hit, CacheHit::Unknown];
        for (number, cache_hit) in hits.into_iter().enumerate() {
            let mut read = request(1 + number as u64 % 3, 512);
            (read.operation, read.course.cache_hit) = (Operation::Read, cache_hit);
            queue.add(&read, Ok(()), 0, 1);
        }
        let snapshot = usage.snapshot();
        let read = Direction::Read as usize;
        let all = snapshot.totals.all()[read];
        assert_eq!((all.requests, all.cache_requests, all.cache_hits), (5, 4, 2));
        let of = |inode: u64| {
            let row = snapshot.rows.iter().find(|row| row.subject.inode == inode).expect("a row");
            (row.accounts[read].cache_requests, row.accounts[read].cache_hits)
        };
        assert_eq!([of(1), of(2), of(3)], [(2, 2), (1, 0), (1, 0)]);
    }

    #[test]
    fn a_queue_never_waits_and_counts_what_it_drops() {
        let usage = usage();
        let mut queue = UsageQueue::open(Arc::clone(&usage), 0);
        // A reader holds the lock of the table, and then also that of the list.
        let table = usage.table.lock();
        for _ in 0..PENDING_MAX {
            queue.add(&request(1, 10), Ok(()), 0, 1);
        }
        let shard = Arc::clone(&queue.shard);
        let list = shard.pending.lock();
        for _ in 0..PENDING_MAX + 5 {
            queue.add(&request(2, 10), Ok(()), 0, 1);
        }
        drop((table, list));
        queue.add(&request(3, 10), Ok(()), 0, 1);
        let snapshot = usage.snapshot();
        let write = Direction::Write as usize;
        assert_eq!(snapshot.totals.known[write].requests, 2 * PENDING_MAX as u64 + 6);
        let in_rows: u64 = snapshot.rows.iter().map(|row| row.accounts[write].requests).sum();
        assert_eq!(in_rows + snapshot.dropped, 2 * PENDING_MAX as u64 + 6);
        assert_eq!(snapshot.dropped_bytes, 10 * snapshot.dropped);
        assert_eq!(bytes(&snapshot.rows, 1), 10 * PENDING_MAX as u64);
        drop(queue);
    }

    #[test]
    fn readers_and_queues_agree_in_the_end() {
        const COUNT: u64 = 20_000;
        let usage = usage();
        std::thread::scope(|scope| {
            for number in 0..2 {
                let usage = Arc::clone(&usage);
                scope.spawn(move || {
                    let mut queue = UsageQueue::open(usage, number);
                    for round in 0..COUNT {
                        queue.add(&request(round % 100, 1), Ok(()), round, round + 1);
                    }
                });
            }
            for _ in 0..50 {
                let snapshot = usage.snapshot();
                assert!(snapshot.rows.len() <= 100);
            }
        });
        let snapshot = usage.snapshot();
        let write = Direction::Write as usize;
        let in_rows: u64 = snapshot.rows.iter().map(|row| row.accounts[write].bytes).sum();
        assert_eq!(in_rows + snapshot.dropped, 2 * COUNT);
    }
}

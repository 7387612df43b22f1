//! The accounts by subject: a bounded table of rows.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::Arc;

use fathom_block::CacheHit;
use fathom_insight::{Database, Facts, Kind, Name, Names};

use super::cells::{Account, Accounts, Direction};
use super::groups::{AccountSlot, GroupSnapshot, Groups};

/// The subject of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    inode: u64,
    path: Name,
    file_system: Name,
    device: Name,
    cgroup: Name,
    process: Name,
    process_id: u32,
    process_start: u32,
    kind: Kind,
    database: Database,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        state.write_u64(self.inode);
        state.write_u64(pair(self.path.0, self.process_id));
        state.write_u64(pair(self.file_system.0, self.device.0));
        state.write_u64(pair(self.cgroup.0, self.process.0));
        let Database { system, part, index } = self.database;
        let bytes = u32::from_le_bytes([self.kind as u8, system as u8, part as u8, 0]);
        state.write_u64(pair(bytes, index));
    }
}

impl Key {
    fn of(facts: &Facts) -> Self {
        Self {
            inode: facts.inode,
            path: facts.path,
            file_system: facts.file_system,
            device: facts.device,
            cgroup: facts.cgroup,
            process: facts.process,
            process_id: facts.process_id,
            process_start: facts.process_start,
            kind: facts.kind,
            database: facts.database,
        }
    }
}

/// A seeded hash function for keys, one of which is hashed for each request. It is faster than the
/// standard library's. Each table has a random seed, so that no guest can choose files that
/// collide.
#[derive(Clone)]
struct Seed(u64);

impl Seed {
    fn new() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Seed {
    type Hasher = Mix;

    fn build_hasher(&self) -> Mix {
        Mix(self.0)
    }
}

/// Folds words into one by multiplications.
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, word: u64) {
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0 ^ word) * u128::from(FACTOR ^ self.0.rotate_left(32) | 1);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u8(*byte);
        }
    }
}

/// A part of a completed request, to be counted in the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) facts: Facts,
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    pub(super) latency_ns: u64,
    pub(super) now_ns: u64,
    pub(super) cache_hit: CacheHit,
}

/// The subject of a row as texts, which remain valid after the numbers of names are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct UsageSubject {
    /// The kind of data.
    pub kind: Kind,
    /// The file's inode number in its file system; 0 if there is no file, or if it is unknown.
    pub inode: u64,
    /// The file's path from the root of its file system.
    pub path: Option<Arc<str>>,
    /// The type of the file system.
    pub file_system: Option<Arc<str>>,
    /// The name of the file system's block device.
    pub device: Option<Arc<str>>,
    /// The path of the control group.
    pub cgroup: Option<Arc<str>>,
    /// The command of the process.
    pub process: Option<Arc<str>>,
    /// The number of the process; 0 if unknown.
    pub process_id: u32,
    /// Its start, in hundredths of a second since the guest's boot; 0 if unknown.
    pub process_start: u32,
    /// The part of a database.
    pub database: Database,
}

/// The index of a missing account.
const NONE: u32 = u32::MAX;

struct Row {
    key: Key,
    subject: UsageSubject,
    instance: u64,
    file_size: u64,
    owner: u32,
    /// Whether the row was used since the hand last passed it.
    used: bool,
    /// The indexes of the accounts by direction.
    accounts: [u32; Direction::ALL.len()],
    group: AccountSlot,
}

/// A row of the table.
#[derive(Clone, Debug, Default)]
pub struct UsageRow {
    /// The subject of the row.
    pub subject: UsageSubject,
    /// Changes when the row was removed and made again. The counts of the removed row are then in
    /// the account of other rows.
    pub instance: u64,
    /// The file's size when it was last seen, in bytes; 0 if unknown.
    pub file_size: u64,
    /// The file's owner, as a user ID of the guest.
    pub owner: u32,
    /// The counts, by [`Direction`].
    pub accounts: Accounts,
}

/// The rows of a disk, at most `rows_max`. A new row replaces one that has not been used recently,
/// whose counts are added to the account of others (a clock replacement).
pub(super) struct Table {
    rows_max: usize,
    rows: Vec<Row>,
    index: HashMap<Key, u32, Seed>,
    /// The row of the last record. The next record often belongs to the same row.
    last: u32,
    /// The next row to consider for replacement.
    hand: usize,
    accounts: Vec<Account>,
    free: Vec<u32>,
    others: Accounts,
    folded: u64,
    instances: u64,
    groups: Groups,
    /// An empty list with capacity, which a reader exchanges for a queue's list.
    spare: Vec<Record>,
}

impl Table {
    pub(super) fn new(rows_max: usize, groups_max: usize) -> Self {
        Self {
            rows_max: rows_max.max(1),
            rows: Vec::new(),
            index: HashMap::with_hasher(Seed::new()),
            last: 0,
            hand: 0,
            accounts: Vec::new(),
            free: Vec::new(),
            others: Accounts::default(),
            folded: 0,
            instances: 0,
            groups: Groups::new(groups_max),
            spare: Vec::new(),
        }
    }

    /// Takes the empty list with capacity.
    pub(super) fn take_spare(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.spare)
    }

    /// Stores a list for the next [`take_spare`](Self::take_spare).
    pub(super) fn give_spare(&mut self, spare: Vec<Record>) {
        self.spare = spare;
    }

    /// Counts a part of a request.
    pub(super) fn add(&mut self, record: &Record, names: &Names) {
        let place = self.row(record, names);
        let row = &mut self.rows[place as usize];
        row.file_size = record.facts.file_size;
        row.owner = record.facts.owner;
        if self.groups.is_stale(row.group, record.now_ns) {
            row.group = self.groups.place(row.subject.cgroup.as_ref(), record.now_ns);
        }
        let Record { direction, bytes, latency_ns, now_ns, cache_hit, .. } = *record;
        self.groups.add(row.group, row.key.kind, direction, bytes, latency_ns, now_ns);
        let account = &mut row.accounts[direction as usize];
        if *account == NONE {
            *account = self.free.pop().unwrap_or_else(|| {
                self.accounts.push(Account::default());
                self.accounts.len() as u32 - 1
            });
        }
        self.accounts[*account as usize].add(bytes, latency_ns, cache_hit);
    }

    /// The index of the row of `record`.
    fn row(&mut self, record: &Record, names: &Names) -> u32 {
        let key = Key::of(&record.facts);
        let last = self.rows.get(self.last as usize);
        if !last.is_some_and(|row| row.key == key) {
            if let Some(place) = self.index.get(&key) {
                self.last = *place;
            } else {
                self.last = self.new_row(key, record, names);
                return self.last;
            }
        }
        // A new row is not marked as used, so a file that is used only once is replaced before a
        // file that is used twice.
        self.rows[self.last as usize].used = true;
        self.last
    }

    fn new_row(&mut self, key: Key, record: &Record, names: &Names) -> u32 {
        let text = |name| names.text(name);
        let subject = UsageSubject {
            kind: key.kind,
            inode: key.inode,
            path: text(key.path),
            file_system: text(key.file_system),
            device: text(key.device),
            cgroup: text(key.cgroup),
            process: text(key.process),
            process_id: key.process_id,
            process_start: key.process_start,
            database: key.database,
        };
        self.instances += 1;
        let row = Row {
            key,
            group: self.groups.place(subject.cgroup.as_ref(), record.now_ns),
            subject,
            instance: self.instances,
            file_size: 0,
            owner: 0,
            used: false,
            accounts: [NONE; Direction::ALL.len()],
        };
        let place = if self.rows.len() < self.rows_max {
            self.rows.push(row);
            self.rows.len() - 1
        } else {
            let place = self.make_room();
            self.rows[place] = row;
            place
        };
        self.index.insert(key, place as u32);
        place as u32
    }

    /// Removes a row that was not used since the hand last passed it, and returns its index. Its
    /// counts are added to the account of others.
    fn make_room(&mut self) -> usize {
        loop {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.rows.len();
            let row = &mut self.rows[place];
            if std::mem::take(&mut row.used) {
                continue;
            }
            for (account, others) in row.accounts.iter().zip(&mut self.others) {
                if *account != NONE {
                    others.merge(&std::mem::take(&mut self.accounts[*account as usize]));
                    self.free.push(*account);
                }
            }
            self.index.remove(&row.key);
            self.folded += 1;
            return place;
        }
    }

    /// The counts of removed rows.
    pub(super) fn others(&self) -> Accounts {
        self.others
    }

    /// The number of removed rows.
    pub(super) fn folded(&self) -> u64 {
        self.folded
    }

    /// All rows.
    pub(super) fn rows(&self) -> Vec<UsageRow> {
        let account = |place: u32| {
            if place == NONE { Account::default() } else { self.accounts[place as usize] }
        };
        self.rows
            .iter()
            .map(|row| UsageRow {
                subject: row.subject.clone(),
                instance: row.instance,
                file_size: row.file_size,
                owner: row.owner,
                accounts: row.accounts.map(account),
            })
            .collect()
    }

    /// The accounts by control group.
    pub(super) fn groups(&self) -> Vec<GroupSnapshot> {
        self.groups.snapshot()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(inode: u64, bytes: u64) -> Record {
        let facts = Facts { kind: Kind::Data, inode, ..Facts::default() };
        let (direction, cache_hit) = (Direction::Write, CacheHit::Unknown);
        Record { facts, direction, bytes, latency_ns: 5_000, now_ns: 1, cache_hit }
    }

    #[test]
    fn unused_rows_are_replaced_and_their_counts_kept() {
        let names = Names::default();
        let mut table = Table::new(4, 2);
        for round in 0..100 {
            table.add(&record(1, 1), &names);
            table.add(&record(10 + round, 100), &names);
        }
        let rows = table.rows();
        assert_eq!(rows.len(), 4);
        let hot = rows.iter().find(|row| row.subject.inode == 1).expect("the hot row stays");
        assert_eq!((hot.accounts[1].requests, hot.accounts[1].bytes), (100, 100));
        let bytes: u64 = rows.iter().map(|row| row.accounts[1].bytes).sum();
        assert_eq!(bytes + table.others()[1].bytes, 100 + 100 * 100);
        assert_eq!(table.folded(), 97);
        assert!(table.accounts.len() <= 5, "accounts are used again");
        assert_eq!(table.index.len(), 4);
    }

    #[test]
    fn a_row_keeps_its_texts_when_names_are_removed() {
        let names = Names::new(1);
        let mut table = Table::new(4, 2);
        let mut first = record(1, 1);
        first.facts.path = names.number("/first");
        table.add(&first, &names);
        names.number("/second");
        assert_eq!(table.rows()[0].subject.path.as_deref(), Some("/first"));
    }
}

//! Runs the log, by seed, over a region in memory that loses and tears unflushed writes. A scan
//! finds the durable records and perhaps more, in order, and never takes a stale record for a new
//! one. Half of the seeds show records that are only written.

use std::collections::{BTreeMap, BTreeSet};

use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, seal};
use fathom_wal::{
    ContentLocation, Damage, Entry, EntryKind, Full, Log, Owner, RING_OFFSET, RecordError,
    Reservation, Sample, ScanEnd, Scanner, Superblock, find_damage, finish, fuzz_log,
};

const SECTOR: usize = 512;
/// The size of the disk, in bytes.
const CAPACITY: u64 = 16 << 10;

/// A log, the entries that were found with their data, and the scan's end.
type Opened = (Log, Vec<(Entry, Vec<u8>)>, ScanEnd);

/// A store with a volatile cache.
struct Region {
    durable: Vec<u8>,
    visible: Vec<u8>,
    /// The sectors written since the last flush, each with all contents written to it since.
    versions: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl Region {
    fn new(length: u64) -> Self {
        let bytes = vec![0; length as usize];
        Self { durable: bytes.clone(), visible: bytes, versions: BTreeMap::new() }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.visible[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = offset as usize / SECTOR + index;
            self.versions.entry(at).or_default().push(sector.to_vec());
        }
    }

    fn flush(&mut self) {
        self.durable.clone_from(&self.visible);
        self.versions.clear();
    }

    fn crash(&mut self, random: &mut fastrand::Rng) {
        for (sector, versions) in std::mem::take(&mut self.versions) {
            if let Some(bytes) = versions.get(random.usize(0..=versions.len())) {
                self.durable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            }
        }
        self.visible.clone_from(&self.durable);
    }

    fn make(&mut self, block_size: u32) {
        let owner = Owner::new("disk", "image").unwrap();
        let ring_length = self.visible.len() as u64 - RING_OFFSET;
        let mut superblock =
            Superblock::new(Identity(*b"a log of a test."), owner, block_size, ring_length);
        for number in 0..2 {
            superblock.number = number;
            self.write(superblock.offset(), &superblock.encode());
            self.flush();
        }
    }

    /// Recovers the log. Returns it with the found entries and their data, by sequence, and the
    /// scan's end.
    fn open(&mut self) -> Opened {
        let opened = self.try_open();
        opened.unwrap_or_else(|damage| panic!("a crash is no damage: {damage}"))
    }

    /// As [`open`](Self::open), unless the log is damaged.
    fn try_open(&mut self) -> Result<Opened, Damage> {
        let superblock = Superblock::select(&self.visible[..2 * SUPERBLOCK_LENGTH]).unwrap();
        let mut scanner = Scanner::new(&superblock);
        let mut log = Log::new(superblock.clone());
        let mut entries = Vec::new();
        while let Some((offset, length)) = scanner.next_read() {
            let bytes = &self.visible[offset as usize..][..length];
            if let Some(found) = scanner.feed(bytes) {
                for (entry, place) in found.record.places(superblock.block_size) {
                    let start = (place - found.record.position) as usize;
                    let data = match entry.kind {
                        EntryKind::Data { .. } => &found.bytes[start..][..entry.length as usize],
                        EntryKind::Zeroes { .. } | EntryKind::Discard => &[],
                    };
                    entries.push((*entry, data.to_vec()));
                }
                log.recover(&found);
            }
        }
        let end = scanner.end().unwrap();
        let read = |offset: u64, length: u64| {
            Ok::<_, ()>(self.visible[offset as usize..][..length as usize].to_vec())
        };
        if let Some(damage) = find_damage(&superblock, end, read).unwrap() {
            return Err(damage);
        }
        self.flush();
        let checkpoint = log.resume(&superblock.owner, superblock.ring_length);
        self.write(checkpoint.offset, &*checkpoint.bytes);
        self.flush();
        log.checkpointed();
        Ok((log, entries, end))
    }
}

fn data(content: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    fastrand::Rng::with_seed(content).fill(&mut bytes);
    bytes
}

fn apply(disk: &mut [u8], entry: &Entry, data: &[u8]) {
    let range = &mut disk[entry.offset as usize..][..entry.length as usize];
    match entry.kind {
        EntryKind::Data { .. } => range.copy_from_slice(data),
        EntryKind::Zeroes { .. } | EntryKind::Discard => range.fill(0),
    }
}

fn encode(log: &Log, reservation: &Reservation, data: &[Vec<u8>]) -> Vec<u8> {
    let block_size = log.superblock().block_size;
    let record = &reservation.record;
    let mut bytes = vec![0; record.length as usize];
    finish(&mut bytes[..block_size as usize], log.superblock(), record);
    for ((_, place), data) in record.places(block_size).zip(data) {
        bytes[(place - record.position) as usize..][..data.len()].copy_from_slice(data);
    }
    bytes
}

/// The disk with the records before `until`, of which `applied` have been applied.
fn advance(
    disk: &mut [u8],
    applied: &mut usize,
    until: u64,
    history: &[(Vec<Entry>, Vec<Vec<u8>>)],
) {
    for (entries, data) in &history[*applied..until as usize] {
        for (entry, data) in entries.iter().zip(data) {
            apply(disk, entry, data);
        }
    }
    *applied = until as usize;
}

/// One life after another. Each begins with the data that the crash before it left.
#[expect(clippy::too_many_lines, reason = "one life from its start to its crash")]
fn lives(seed: u64) -> (usize, usize, BTreeSet<&'static str>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let block_size = if random.bool() { 512 } else { 1024 };
    let shows_written = seed % 2 == 1;
    let mut region = Region::new(RING_OFFSET + 24 * 1024);
    region.make(block_size);
    // Home is written through: written content is durable. The layer is responsible for the order
    // of home's own flush.
    let mut home = vec![0; CAPACITY as usize];
    // All records reserved since the last recovery. Those not in `base` need not be found.
    let mut history: Vec<(Vec<Entry>, Vec<Vec<u8>>)> = Vec::new();
    let mut base = home.clone();
    let (mut found_more, mut laps, mut reasons) = (0, 0, BTreeSet::new());
    let mut content = seed << 32;
    for _life in 0..8 {
        let (mut log, entries, end) = region.open();
        reasons.insert(match end.reason {
            RecordError::Missing => "missing",
            RecordError::Stale => "stale",
            RecordError::TornHeader => "torn header",
            RecordError::TornData => "torn data",
            RecordError::Malformed => panic!("a malformed record, which the test never writes"),
        });
        let mut disk = home.clone();
        for (entry, data) in &entries {
            apply(&mut disk, entry, data);
        }
        // The found records are a prefix of the written ones, and include all durable ones.
        let mut expected = base.clone();
        let mut matched = (expected == disk).then_some(0);
        for (index, (entries, data)) in history.iter().enumerate() {
            for (entry, data) in entries.iter().zip(data) {
                apply(&mut expected, entry, data);
            }
            if expected == disk {
                matched = Some(index + 1);
            }
        }
        let count = matched.expect("the found records are a prefix of the written ones");
        found_more += usize::from(count > 0);
        base.clone_from(&disk);
        history.clear();
        let mut flushes = 0;
        let mut waiting: Vec<(Reservation, Vec<Vec<u8>>)> = Vec::new();
        let mut pins = Vec::new();
        let (mut durable_disk, mut applied) = (disk.clone(), 0);
        let (mut shown_disk, mut shown) = (disk.clone(), 0);
        let first = log.durable();
        for _step in 0..random.usize(0..120) {
            match random.u8(0..12) {
                0..=4 => {
                    let mut entries = Vec::new();
                    let mut contents = Vec::new();
                    for _ in 0..random.usize(1..4) {
                        let offset = random.u64(0..24) * 512;
                        let length = random.u64(1..=6) * 512;
                        content += 1;
                        let bytes = data(content, length);
                        let (kind, bytes) = match random.u8(0..6) {
                            0 => (EntryKind::Discard, Vec::new()),
                            1 => (EntryKind::Zeroes { keep_allocated: true }, Vec::new()),
                            _ => (EntryKind::Data { checksum: crc32c::crc32c(&bytes) }, bytes),
                        };
                        entries.push(Entry { offset, length, kind });
                        contents.push(bytes);
                    }
                    match log.reserve(entries.clone()) {
                        Ok(reservation) => {
                            history.push((entries, contents.clone()));
                            waiting.push((reservation, contents));
                        }
                        Err(Full) => assert!(log.used() > 4096, "a log that is empty is not full"),
                    }
                }
                5..=7 if !waiting.is_empty() => {
                    let (reservation, data) = waiting.swap_remove(random.usize(0..waiting.len()));
                    let bytes = encode(&log, &reservation, &data);
                    region.write(reservation.offset, &bytes);
                    log.written(reservation.record.sequence, flushes + 1);
                }
                8 | 9 => {
                    region.flush();
                    flushes += 1;
                    // A record written after the flush began waits for the next flush.
                    if random.bool() && !waiting.is_empty() {
                        let (reservation, data) = waiting.pop().unwrap();
                        region.write(reservation.offset, &encode(&log, &reservation, &data));
                        log.written(reservation.record.sequence, flushes + 1);
                    }
                    log.flushed(flushes);
                }
                10 => {
                    let Some(round) = log.round(random.u64(1..8192)) else { continue };
                    assert!(
                        round.shown >= log.durable()
                            && (shows_written || log.shown() == log.durable())
                    );
                    for segment in &round.segments {
                        let range =
                            segment.offset as usize..(segment.offset + segment.length) as usize;
                        match segment.source.unwrap() {
                            ContentLocation::Ring(position) => {
                                let place = log.place(position) as usize;
                                let bytes = &region.visible[place..][..range.len()];
                                home[range].copy_from_slice(bytes);
                            }
                            ContentLocation::Zeroes { .. } | ContentLocation::Discard => {
                                home[range].fill(0);
                            }
                        }
                    }
                    if log.durable() < round.shown {
                        // Records that are not durable have replaced content of the round.
                        region.flush();
                        flushes += 1;
                        log.flushed(flushes);
                        advance(&mut durable_disk, &mut applied, log.durable() - first, &history);
                    }
                    let checkpoint = log.checkpoint(round.last, Sample::default());
                    region.write(checkpoint.offset, &*checkpoint.bytes);
                    // Also crash before the checkpoint is durable.
                    if random.u8(0..4) == 0 {
                        break;
                    }
                    region.flush();
                    log.checkpointed();
                    laps = laps.max(log.superblock().tail_position / log.superblock().ring_length);
                }
                _ => {
                    // A reader sees the content that was shown for as long as it holds its pin.
                    let mut parts = Vec::new();
                    let pin = log.pin(0..CAPACITY, |segment| parts.push(segment));
                    pins.push((pin, parts));
                    if pins.len() > 2 {
                        let (pin, parts) = pins.remove(0);
                        log.unpin(pin);
                        drop(parts);
                    }
                    let (_, parts) = &pins[pins.len() - 1];
                    for part in parts {
                        let range = part.offset as usize..(part.offset + part.length) as usize;
                        let expected = &shown_disk[range.clone()];
                        match part.source {
                            None => assert!(home[range] == *expected),
                            Some(ContentLocation::Ring(position)) => {
                                let place = log.place(position) as usize;
                                assert!(region.visible[place..][..range.len()] == *expected);
                            }
                            Some(_) => assert!(expected.iter().all(|byte| *byte == 0)),
                        }
                    }
                }
            }
            if shows_written {
                log.show_written();
            }
            advance(&mut durable_disk, &mut applied, log.durable() - first, &history);
            advance(&mut shown_disk, &mut shown, log.shown() - first, &history);
        }
        region.crash(&mut random);
        // At least the durable content must be found.
        base.clone_from(&durable_disk);
        history.drain(..applied);
    }
    (found_more, laps as usize, reasons)
}

#[test]
fn a_scan_finds_the_durable_records_and_perhaps_more_in_order() {
    let (mut found, mut laps, mut reasons) = (0, 0, BTreeSet::new());
    for seed in 0..2000 {
        let result = std::panic::catch_unwind(|| lives(seed));
        let (more, lap, why) = result.unwrap_or_else(|_| panic!("seed {seed}"));
        found += more;
        laps = laps.max(lap);
        reasons.extend(why);
    }
    assert!(found > 1000 && laps >= 2, "{found} records that were not durable, {laps} laps");
    assert_eq!(reasons.len(), 4, "{reasons:?}");
}

fn small() -> (Region, Log) {
    let mut region = Region::new(RING_OFFSET + 16 * 512);
    region.make(512);
    let log = region.open().0;
    (region, log)
}

fn entry(content: u64) -> (Vec<Entry>, Vec<Vec<u8>>) {
    let data = data(content, 512);
    let kind = EntryKind::Data { checksum: crc32c::crc32c(&data) };
    (vec![Entry { offset: content * 512, length: 512, kind }], vec![data])
}

/// Records 0 to 3 are written, and the second is torn. An opening finds the first, and writes
/// another second record. The third record of the first opening fits behind it except for its
/// epoch.
#[test]
fn a_record_behind_a_torn_one_is_never_recovered() {
    for moved in [false, true] {
        let (mut region, mut log) = small();
        for content in 0..4 {
            let (entries, data) = entry(content);
            let reservation = log.reserve(entries).unwrap();
            let mut bytes = encode(&log, &reservation, &data);
            if content == 1 {
                bytes[600] ^= 1;
            }
            region.write(reservation.offset, &bytes);
        }
        region.flush();
        let (mut log, entries, end) = region.open();
        assert_eq!((entries.len(), end.sequence, end.reason), (1, 1, RecordError::TornData));
        let (entries, data) = entry(9);
        let reservation = log.reserve(entries).unwrap();
        region.write(reservation.offset, &encode(&log, &reservation, &data));
        log.written(1, 1);
        region.flush();
        assert!(log.flushed(1));
        if moved {
            // The record before is no longer in the log: only the superblock has its epoch.
            let round = log.round(u64::MAX).unwrap();
            let checkpoint = log.checkpoint(round.last, Sample::default());
            region.write(checkpoint.offset, &*checkpoint.bytes);
            region.flush();
        }
        let (_, entries, end) = region.open();
        let offsets: Vec<u64> = entries.iter().map(|(entry, _)| entry.offset).collect();
        assert_eq!(offsets, if moved { vec![] } else { vec![0, 9 * 512] });
        assert_eq!((end.sequence, end.reason), (2, RecordError::Stale));
    }
}

/// A log whose records are all durable, and what is expected of it.
struct Written {
    region: Region,
    home: Vec<u8>,
    /// The disk before each record.
    states: Vec<Vec<u8>>,
    /// All records before this sequence are proved to have been durable.
    proved: u64,
}

/// Writes records, some of them together, and brings some home.
fn write_records(random: &mut fastrand::Rng) -> Written {
    let mut region = Region::new(RING_OFFSET + 24 * 1024);
    region.make(if random.bool() { 512 } else { 1024 });
    let mut log = region.open().0;
    let mut home = vec![0; CAPACITY as usize];
    let mut states = vec![home.clone()];
    let (mut flushes, mut proved) = (0, 0);
    for _ in 0..random.usize(3..60) {
        let mut reserved = Vec::new();
        for _ in 0..random.usize(1..4) {
            let content = random.u64(1..1 << 40);
            let (offset, length) = (random.u64(0..24) * 512, random.u64(1..=3) * 512);
            let bytes = data(content, length);
            let kind = EntryKind::Data { checksum: crc32c::crc32c(&bytes) };
            let entry = Entry { offset, length, kind };
            let Ok(reservation) = log.reserve(vec![entry]) else { break };
            let mut state = states[states.len() - 1].clone();
            apply(&mut state, &entry, &bytes);
            states.push(state);
            proved = proved.max(reservation.record.durable);
            reserved.push((reservation, bytes));
        }
        for (reservation, bytes) in reserved {
            region.write(reservation.offset, &encode(&log, &reservation, &[bytes]));
            log.written(reservation.record.sequence, flushes + 1);
        }
        region.flush();
        flushes += 1;
        log.flushed(flushes);
        if random.u8(..4) > 0 && log.used() < 12 << 10 {
            continue;
        }
        let Some(round) = log.round(random.u64(1..16 << 10)) else { continue };
        for segment in &round.segments {
            let Some(ContentLocation::Ring(position)) = segment.source else { continue };
            let bytes = &region.visible[log.place(position) as usize..];
            let target = &mut home[segment.offset as usize..][..segment.length as usize];
            target.copy_from_slice(&bytes[..segment.length as usize]);
        }
        let checkpoint = log.checkpoint(round.last, Sample::default());
        region.write(checkpoint.offset, &*checkpoint.bytes);
        region.flush();
        log.checkpointed();
        proved = proved.max(log.superblock().durable);
    }
    Written { region, home, states, proved }
}

/// By seed: whichever byte of a log rots, the disk is as it was after a record that nothing proves
/// not to be the last one, or the log is refused.
#[test]
fn a_byte_that_rots_is_never_silent() {
    let (mut refused, mut shorter) = (0, 0);
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let Written { region, home, states, proved } = write_records(&mut random);
        for _ in 0..100 {
            let mut rotted = Region { versions: BTreeMap::new(), ..Region::new(0) };
            rotted.visible.clone_from(&region.visible);
            let places = if random.u8(..8) == 0 { 0..RING_OFFSET } else { RING_OFFSET..32 << 10 };
            let at = random.usize(places.start as usize..places.end as usize);
            rotted.visible[at] ^= 1 << random.u8(..8);
            let (_, entries, end) = match rotted.try_open() {
                Ok(opened) => opened,
                Err(damage) => {
                    let Damage { sequence, durable, .. } = damage;
                    assert!(sequence < durable && durable <= proved, "seed {seed}: {damage}");
                    refused += 1;
                    continue;
                }
            };
            let mut disk = home.clone();
            for (entry, data) in &entries {
                apply(&mut disk, entry, data);
            }
            assert!(end.sequence >= proved, "seed {seed}, byte {at}: a durable record is gone");
            assert!(disk == states[end.sequence as usize], "seed {seed}, byte {at}");
            shorter += usize::from(end.sequence as usize + 1 < states.len());
        }
    }
    assert!(refused > 1000 && shorter > 10, "{refused} refused, {shorter} without the last record");
}

/// Copies of headers of the log itself in its data, as of a guest that stores its log, prove
/// nothing new.
#[test]
fn a_copy_of_a_header_in_the_data_of_a_record_is_harmless() {
    let (mut region, mut log) = small();
    let mut ring = Vec::new();
    for round in 0..6 {
        let length = 1536;
        let copy = ring.get(512 * (round % 3)..).unwrap_or_default();
        let mut bytes = copy[..copy.len().min(length)].to_vec();
        bytes.resize(length, 0);
        let kind = EntryKind::Data { checksum: crc32c::crc32c(&bytes) };
        let reservation = log.reserve(vec![Entry { offset: 0, length: 1536, kind }]).unwrap();
        let mut record = encode(&log, &reservation, &[bytes]);
        if round == 5 {
            // It was in flight.
            record[600] ^= 1;
        }
        region.write(reservation.offset, &record);
        ring = region.visible[RING_OFFSET as usize..].to_vec();
        region.flush();
        log.written(reservation.record.sequence, round as u64 + 1);
        if round == 5 {
            break;
        }
        log.flushed(round as u64 + 1);
        if round % 2 == 1 {
            let last = log.round(u64::MAX).unwrap().last;
            let checkpoint = log.checkpoint(last, Sample::default());
            region.write(checkpoint.offset, &*checkpoint.bytes);
            region.flush();
            log.checkpointed();
        }
    }
    let (_, entries, end) = region.open();
    assert_eq!((entries.len(), end.sequence, end.reason), (1, 5, RecordError::TornData));
}

/// Makes what was written a log of format 1.
fn make_first_format(region: &mut Region, count: usize) {
    for start in [0, SUPERBLOCK_LENGTH] {
        let superblock = &mut region.visible[start..][..512];
        superblock[8] = 1;
        superblock[424..508].fill(0);
        seal(superblock);
    }
    let mut at = RING_OFFSET as usize;
    for _ in 0..count {
        let header = &mut region.visible[at..][..512];
        at += u64::from_le_bytes(header[40..48].try_into().unwrap()) as usize;
        header[..4].copy_from_slice(b"WREC");
        header[56..96].fill(0);
        header.copy_within(96..480, 64);
        header[448..].fill(0);
        let checksum = crc32c::crc32c(&[&header[..4], &header[8..]].concat());
        header[4..8].copy_from_slice(&checksum.to_le_bytes());
    }
    region.flush();
}

#[test]
fn a_log_of_format_1_is_read_and_continued() {
    let (mut region, mut log) = small();
    let write = |region: &mut Region, log: &mut Log, content| {
        let (entries, data) = entry(content);
        let reservation = log.reserve(entries).unwrap();
        region.write(reservation.offset, &encode(log, &reservation, &data));
    };
    for content in 0..3 {
        write(&mut region, &mut log, content);
    }
    make_first_format(&mut region, 3);
    let (mut log, entries, end) = region.open();
    assert_eq!((entries.len(), end.sequence, log.superblock().durable), (3, 3, 3));
    for content in 3..5 {
        write(&mut region, &mut log, content);
    }
    region.flush();
    let (_, entries, _) = region.open();
    let offsets: Vec<u64> = entries.iter().map(|(entry, _)| entry.offset / 512).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 4]);
    // The records of format 1 are known to have been durable by now.
    region.visible[RING_OFFSET as usize + 100] ^= 1;
    assert_eq!(region.try_open().unwrap_err().durable, 5);
}

#[test]
fn an_unwritten_place_is_reserved_again() {
    let (mut region, mut log) = small();
    let (entries, data) = entry(1);
    let lost = log.reserve(entries.clone()).unwrap();
    let next = log.reserve(entries).unwrap();
    region.write(next.offset, &encode(&log, &next, &data));
    log.written(1, 1);
    assert!(!log.flushed(1), "the first one is missing");
    let void = log.void(lost.record.sequence).unwrap();
    assert_eq!((void.offset, void.record.length), (lost.offset, lost.record.length));
    region.write(void.offset, &encode(&log, &void, &[]));
    log.written(0, 2);
    assert_eq!(log.void(0), None);
    assert!(log.flushed(2) && log.is_settled());
    region.flush();
    assert_eq!(region.open().1.len(), 1);
}

#[test]
fn a_full_log_rejects_a_reservation_and_a_pin_keeps_its_space() {
    let (_, mut log) = small();
    let mut count = 0;
    while log.reserve(entry(1).0).is_ok() {
        count += 1;
    }
    assert_eq!((count, log.used()), (8, 16 * 512));
    for sequence in 0..8 {
        log.written(sequence, 1);
    }
    log.flushed(1);
    let pin = log.pin(0..CAPACITY, |_| ());
    let round = log.round(u64::MAX).unwrap();
    assert_eq!((round.last, round.segments.len()), (7, 1));
    log.checkpoint(round.last, Sample::default());
    assert_eq!((log.round(u64::MAX), log.reserve(entry(1).0)), (None, Err(Full)));
    log.checkpointed();
    assert_eq!(log.reserve(entry(1).0), Err(Full), "a reader has pinned the space");
    log.unpin(pin);
    assert!(log.is_empty() && log.reserve(entry(1).0).is_ok());
}

#[test]
fn arbitrary_bytes_are_read_without_a_panic() {
    let (mut region, mut log) = small();
    for content in 0..6 {
        let (entries, data) = entry(content);
        let reservation = log.reserve(entries).unwrap();
        region.write(reservation.offset, &encode(&log, &reservation, &data));
    }
    let whole: Vec<u8> = [&[1], &region.visible[..]].concat();
    fuzz_log(&whole);
    for seed in 0..20_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = whole.clone();
        bytes[0] = random.u8(..);
        for _ in 0..random.usize(1..8) {
            // Mostly places with content.
            let start = [0, 4096, 8192, 8704][random.usize(0..4)];
            let at = 1 + start + random.usize(0..128);
            match random.u8(0..3) {
                0 => bytes[at] = random.u8(..),
                1 => bytes[at] ^= 1 << random.u8(0..8),
                _ => bytes[at..at + 8].copy_from_slice(&random.u64(..).to_le_bytes()),
            }
        }
        bytes.truncate(random.usize(bytes.len() / 2..=bytes.len()));
        let result = std::panic::catch_unwind(|| fuzz_log(&bytes));
        assert!(result.is_ok(), "seed {seed}");
    }
}

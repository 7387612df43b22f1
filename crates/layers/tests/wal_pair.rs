//! Logs that are damaged, and logs and images that do not belong together.

use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, Clock, Disk, DiskOptions, Flags, Layer, Operation};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, HomeStore, HomeTimes, Life, LogVolume, WalError, WalOptions};
use fathom_persistence::{Identity, Mismatch, SUPERBLOCK_LENGTH, Stamp};
use fathom_sim::{Action, Harness, HarnessOptions, SimBackend, SimOptions};
use fathom_wal::RING_OFFSET;

const CAPACITY: u64 = 64 << 10;
const LOG_CAPACITY: u64 = RING_OFFSET + (256 << 10);

fn options() -> WalOptions {
    WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: 0,
        block_size: 512,
        identity: Identity(*b"identity of test"),
        age_ns: u64::MAX,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    }
}

fn store(capacity: u64, image: Vec<u8>) -> Arc<SimBackend> {
    let options = SimOptions { rounds_max: 0, ..SimOptions::new(capacity) };
    Arc::new(SimBackend::with_image(options, 1, image))
}

fn volume(image: Vec<u8>) -> (Arc<SimBackend>, Arc<LogVolume>) {
    let store = store(LOG_CAPACITY, image);
    let volume = LogVolume::new(Arc::clone(&store) as Arc<dyn Backend>);
    (store, Arc::new(volume))
}

fn disk(wal: &Wal, home: &Arc<SimBackend>) -> Arc<Disk> {
    let home = Arc::clone(home) as Arc<dyn Backend>;
    Disk::new(DiskOptions::default(), vec![Arc::new(wal.clone())], home).unwrap()
}

/// Writes 4 KiB each at the start of the disk, one after the other, through the log.
fn write(wal: &Wal, home: &Arc<SimBackend>, count: u64) {
    let disk = disk(wal, home);
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    for content in 0..count {
        let (operation, flags) = (Operation::Write, Flags::default());
        let action = Action { operation, offset: 0, length: 4096, flags, content: content + 1 };
        harness.submit(0, &action);
        harness.drain(|_| {});
    }
}

/// Ten changes that were acknowledged, and a bit that rots in one of them.
#[test]
fn a_log_that_has_rotted_in_the_middle_is_refused() {
    let (log, logs) = volume(vec![0; LOG_CAPACITY as usize]);
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let wal = Wal::open(&logs, &options()).unwrap();
    write(&wal, &home, 10);
    drop((wal, logs));
    let record = 512 + 4096;
    let opened = |at: u64| {
        let mut image = log.durable();
        image[at as usize] ^= 1;
        let (log, logs) = volume(image.clone());
        let result = Wal::open(&logs, &options());
        assert!(result.is_ok() || log.image() == image, "a refused log is not changed");
        result
    };
    for number in 0..10 {
        for at in [0, 8, 16, 60, 100, 512, 512 + 4095] {
            let result = opened(RING_OFFSET + number * record + at);
            match result.map(|wal| wal.status().used) {
                // Nothing proves that the last one was durable.
                Ok(used) => assert_eq!((number, used), (9, 9 * record)),
                Err(WalError::Damaged(damage)) => {
                    assert_eq!((damage.sequence, damage.durable), (number, 9));
                    assert_eq!(damage.offset, RING_OFFSET + number * record);
                }
                Err(error) => panic!("record {number}, byte {at}: {error}"),
            }
        }
    }
    // An opening makes what it has found durable, and says so.
    drop(Wal::open(&volume(log.durable()).1, &options()).unwrap());
    let (log, logs) = volume(log.durable());
    drop(Wal::open(&logs, &options()).unwrap());
    let mut image = log.durable();
    image[(RING_OFFSET + 9 * record) as usize + 600] ^= 1;
    let error = Wal::open(&volume(image).1, &options()).err().unwrap();
    assert!(matches!(error, WalError::Damaged(_)), "{error}");
    let text = format!("{:#}", error.failure("a"));
    assert!(text.contains("at least 1 record ") && text.contains("; restore"), "{text}");
}

/// The changes are at home, and the newest superblock, which says so, rots: the older one is used
/// as long as all records behind its tail exist.
#[test]
fn a_superblock_that_rots_loses_nothing() {
    let (log, logs) = volume(vec![0; LOG_CAPACITY as usize]);
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let wal = Wal::open(&logs, &options()).unwrap();
    let mut refused = 0;
    for round in 0..120 {
        write(&wal, &home, round % 4 + 1);
        if round % 3 == 2 {
            wal.drain(&disk(&wal, &home), Duration::from_secs(20)).unwrap();
        }
        for superblock in [0, 4096] {
            let mut image = log.durable();
            image[superblock + 40] ^= 1;
            match Wal::open(&volume(image).1, &options()) {
                // All that is not at home is there: at least what the sound log has.
                Ok(found) => assert!(found.status().used >= wal.status().used, "round {round}"),
                Err(WalError::Damaged(_)) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(refused > 0);
}

/// The result of an opening of the log in `image` for a disk's store whose mark has the age `mark`,
/// and the log.
fn opened(image: Vec<u8>, mark: Option<u64>) -> (Result<Wal, WalError>, Arc<SimBackend>) {
    let (log, logs) = volume(image);
    let expected = mark.map(|_| options().identity);
    (Wal::open(&logs, &WalOptions { expected, mark, ..options() }), log)
}

fn mismatch(image: Vec<u8>, mark: u64) -> Option<Mismatch> {
    match opened(image, Some(mark)).0 {
        Ok(_) => None,
        Err(WalError::Mismatched { mismatch, .. }) => Some(mismatch),
        Err(error) => panic!("{error}"),
    }
}

/// One opening after the other, which may end at each of its steps, with changes in between.
#[test]
fn an_older_copy_of_a_log_or_an_image_is_refused() {
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (mut image, mut mark, mut copies) = (vec![0; LOG_CAPACITY as usize], None, Vec::new());
    for round in 0..8 {
        let (wal, log) = opened(image, mark);
        let wal = wal.unwrap();
        assert_eq!(wal.age(), round + 1);
        // Every third opening dies before the mark is written, or behind it.
        if round % 3 != 1 {
            mark = Some(wal.age());
        }
        if round % 3 == 0 {
            wal.pair(wal.age()).unwrap();
            write(&wal, &home, 1);
            copies.push((log.durable(), wal.age()));
        }
        image = log.durable();
    }
    let mark = mark.unwrap();
    assert_eq!(mismatch(image.clone(), mark), None);
    for (copy, age) in copies.iter().take(2) {
        assert_eq!(mismatch(copy.clone(), mark), Some(Mismatch::OlderStore));
        assert_eq!(mismatch(image.clone(), *age), Some(Mismatch::OlderImage));
        // Those that belong together are used together.
        assert_eq!(mismatch(copy.clone(), *age), None);
    }
    let error = opened(copies[0].0.clone(), Some(mark)).0.err().unwrap().to_string();
    assert!(error.contains("the log is an older copy with 1 record of changes"), "{error}");
    let error = opened(image, Some(copies[0].1)).0.err().unwrap().to_string();
    assert!(error.contains("has 3 records of changes"), "{error}");
}

/// The mark cannot be written anew: the pair keeps its age, and both are used again.
#[test]
fn a_log_is_used_with_a_mark_that_cannot_be_written_anew() {
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (wal, log) = opened(vec![0; LOG_CAPACITY as usize], None);
    let wal = wal.unwrap();
    wal.pair(1).unwrap();
    write(&wal, &home, 1);
    let has_problem = |wal: &Wal| !Layer::status(wal).problems.is_empty();
    assert!(!has_problem(&wal));
    let mut image = log.durable();
    for round in 2..5 {
        let (wal, log) = opened(image, Some(1));
        let wal = wal.unwrap();
        assert_eq!(wal.age(), round);
        wal.pair(1).unwrap();
        assert!(has_problem(&wal));
        write(&wal, &home, 1);
        image = log.durable();
    }
    // Now it can.
    let (wal, log) = opened(image, Some(1));
    let wal = wal.unwrap();
    wal.pair(wal.age()).unwrap();
    let image = log.durable();
    assert_eq!(mismatch(image.clone(), 1), Some(Mismatch::OlderImage));
    assert_eq!(mismatch(image, 5), None);
}

/// The image gets all changes. Its mark is removed; or it cannot be, and is void until the log is
/// used again.
#[test]
fn a_log_that_is_given_up_knows_whether_a_mark_is_left() {
    let is_void = |image: &[u8], mark| {
        let superblocks = image[..2 * SUPERBLOCK_LENGTH].try_into().unwrap();
        let mark = Stamp { identity: options().identity, age: mark };
        fathom_layers::wal::is_void(superblocks, mark)
    };
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (wal, log) = opened(vec![0; LOG_CAPACITY as usize], None);
    let wal = wal.unwrap();
    wal.pair(1).unwrap();
    write(&wal, &home, 1);
    assert!(wal.part(true).is_err(), "it has changes");
    wal.drain(&disk(&wal, &home), Duration::from_secs(20)).unwrap();
    let drained = log.durable();
    wal.part(true).unwrap();
    assert!(!is_void(&drained, 1) && is_void(&log.durable(), 1) && !is_void(&log.durable(), 2));
    assert!(!fathom_layers::wal::is_void(
        log.durable()[..2 * SUPERBLOCK_LENGTH].try_into().unwrap(),
        Stamp { identity: Identity([1; 16]), age: 1 }
    ));
    // The next opening takes changes again.
    let (again, other) = opened(log.durable(), Some(1));
    again.unwrap();
    assert!(!is_void(&other.durable(), 1));
    // The mark is removed: a copy of the image that still has it does not fit.
    let (again, log) = opened(log.durable(), Some(1));
    again.unwrap().part(false).unwrap();
    assert_eq!(mismatch(log.durable(), 1), Some(Mismatch::OlderImage));
    assert!(!is_void(&log.durable(), 1) && opened(log.durable(), None).0.is_ok());
}

/// The image was made smaller, or changed by another program after the daemon's end.
#[test]
fn an_image_that_somebody_else_has_changed_is_refused() {
    const SECOND: u64 = 1_000_000_000;
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (log, logs) = volume(vec![0; LOG_CAPACITY as usize]);
    let before_ns = 1000 * SECOND + Clock::System.now_ns();
    let timed = WalOptions { clock_start_ns: 1000 * SECOND, ..options() };
    let wal = Wal::open(&logs, &timed).unwrap();
    let empty = log.durable();
    write(&wal, &home, 3);
    let image = log.durable();
    let open =
        |image: &[u8], options: &WalOptions| Wal::open(&volume(image.to_vec()).1, options).err();
    let smaller = WalOptions { home_capacity: 2048, ..options() };
    let error = open(&image, &smaller).unwrap();
    assert!(matches!(error, WalError::SmallerHome(2048, _)), "{error}");
    assert!(error.to_string().contains("made smaller, to 2048 bytes"), "{error}");
    assert!(open(&empty, &smaller).is_none());

    // Seconds after the opening: the change of the image, the end of the daemon, the start of the
    // host.
    let changed = |image: &[u8], changed: u64, end: Option<u64>, boot: u64, has_ended: bool| {
        let at = |seconds: u64| before_ns - 100 * SECOND + seconds * SECOND;
        let life = |time_ns, has_ended| Life { time_ns, has_ended };
        let lives = end.map(|end| {
            // Those before and after it do not matter.
            let others = [life(at(1)..at(50), true), life(at(600)..at(700), true)];
            others.into_iter().chain([life(at(99)..at(end), has_ended)]).collect()
        });
        let lives = lives.unwrap_or_default();
        let times = HomeTimes { changed_ns: at(changed), lives, boot_ns: at(boot) };
        match open(image, &WalOptions { times: Some(times), ..options() }) {
            Some(WalError::ChangedHome { .. }) => true,
            None => false,
            Some(error) => panic!("{error}"),
        }
    };
    for (seconds, end, boot, has_ended, is_refused) in [
        (101, Some(120), 0, false, false),
        (129, Some(120), 0, false, false),
        (131, Some(120), 0, false, true),
        (120, Some(120), 0, true, false),
        (121, Some(120), 0, true, true),
        // The last life was another one, on this host's earlier start or after it.
        (500, None, 0, false, false),
        (500, None, 200, false, true),
        (190, None, 200, false, false),
        (500, Some(80), 0, false, false),
    ] {
        let found = changed(&image, seconds, end, boot, has_ended);
        assert_eq!(found, is_refused, "{seconds} {end:?} {boot} {has_ended}");
        assert!(!changed(&empty, seconds, end, boot, has_ended), "there is nothing to write home");
    }
}

/// Writes 4 KiB through the log.
fn write_at(wal: &Wal, home: &Arc<SimBackend>, offset: u64, content: u64) {
    let mut harness = Harness::new(&disk(wal, home), &HarnessOptions::default(), 1);
    let (operation, flags) = (Operation::Write, Flags::default());
    harness.submit(0, &Action { operation, offset, length: 4096, flags, content });
    harness.drain(|_| {});
}

/// Home is in the state of an earlier pass of the log, which has later changes.
#[test]
fn a_home_that_was_set_back_is_refused() {
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (log, logs) = volume(vec![0; LOG_CAPACITY as usize]);
    let open = |logs: &Arc<LogVolume>, home: &Arc<SimBackend>| {
        let home_store = HomeStore(Some(Arc::clone(home) as Arc<dyn Backend>));
        Wal::open(logs, &WalOptions { home_store, ..options() })
    };
    let wal = open(&logs, &home).unwrap();
    // Two passes, and a change that stays in the log.
    let mut states = vec![home.durable()];
    for content in 1..3 {
        write_at(&wal, &home, 8192, content);
        write_at(&wal, &home, content * 16_384, content);
        wal.drain(&disk(&wal, &home), Duration::from_secs(20)).unwrap();
        states.push(home.durable());
    }
    write_at(&wal, &home, 4096, 3);
    let image = log.durable();
    let reopened = |image: &[u8], home: &[u8]| {
        open(&volume(image.to_vec()).1, &store(CAPACITY, home.to_vec())).map(drop)
    };
    assert!(reopened(&image, &states[2]).is_ok());
    for state in &states[..2] {
        let error = reopened(&image, state).unwrap_err();
        assert!(matches!(error, WalError::OtherContent { .. }), "{error}");
        let text = format!("{:#}", error.failure("a"));
        assert!(text.contains("; restore its last state") && text.contains("log keep a"), "{text}");
    }
    // A superblock of an earlier program has no witnesses, and neither has one whose second sector
    // is an older one.
    let mut earlier = image.clone();
    for superblock in [0, 4096] {
        earlier[superblock + 512..superblock + 1024].fill(0);
    }
    assert!(reopened(&earlier, &states[0]).is_ok());
    // A place of which the log has content may be at home already, or a part of it.
    for (offset, content) in [(8192, 4), (16_384, 4), (32_768, 4)] {
        write_at(&wal, &home, offset, content);
    }
    let mut torn = states[2].clone();
    for place in [8192, 16_384, 32_768] {
        torn[place + 512..place + 1024].fill(9);
    }
    assert!(reopened(&log.durable(), &torn).is_ok());
    // Without changes in the log, home is what its operator wants. What it has not any more is no
    // witness later.
    wal.drain(&disk(&wal, &home), Duration::from_secs(20)).unwrap();
    let (log, logs) = volume(log.durable());
    let restored = store(CAPACITY, states[1].clone());
    let wal = open(&logs, &restored).unwrap();
    write_at(&wal, &restored, 4096, 5);
    assert!(reopened(&log.durable(), &states[1]).is_ok());
}

/// Home is changed past the log, which has changes: the witnesses of an earlier use of the log do
/// not count.
#[test]
fn a_log_that_a_disk_in_use_gets_has_no_witnesses() {
    let home = store(CAPACITY, vec![0; CAPACITY as usize]);
    let (log, logs) = volume(vec![0; LOG_CAPACITY as usize]);
    let wal = Wal::open(&logs, &options()).unwrap();
    write_at(&wal, &home, 8192, 1);
    wal.drain(&disk(&wal, &home), Duration::from_secs(20)).unwrap();
    drop((wal, logs));
    let (log, logs) = volume(log.durable());
    // The disk is in use: nobody knows what home has at the switch.
    let wal = Wal::open(&logs, &options()).unwrap();
    write_at(&wal, &home, 4096, 2);
    let home_store =
        HomeStore(Some(store(CAPACITY, vec![7; CAPACITY as usize]) as Arc<dyn Backend>));
    assert!(Wal::open(&volume(log.durable()).1, &WalOptions { home_store, ..options() }).is_ok());
}

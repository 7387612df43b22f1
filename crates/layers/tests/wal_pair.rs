//! Logs that are damaged, and logs and images that do not belong together.

use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, Flags, Operation};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, LogVolume, WalError, WalOptions};
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
        identity: *b"identity of test",
        age_ns: u64::MAX,
        completion: Completion::Durable,
        expected: None,
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
    let text = error.to_string();
    assert!(text.contains("at least 1 record ") && text.contains("; restore"), "{text}");
}

/// The changes are at home, and the newest superblock, which says so, rots: the older one is used as long as
/// all records behind its tail exist.
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

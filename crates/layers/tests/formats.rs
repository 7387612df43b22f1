//! What layers with lasting state write is, byte for byte, what earlier builds wrote, and what
//! those wrote is read. Each image in `formats/` is that of a store as an earlier build left it.
//!
//! `FATHOM_WRITE_FORMATS=1` writes the images anew: only for a new version of a format.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, Flags, Operation};
use fathom_layers::wal::LogVolume;
use fathom_layers::{Offload, Wal};
use fathom_sim::{Action, Harness, HarnessOptions, SimBackend, SimOptions};

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;
#[path = "support/offload.rs"]
mod offload;
#[path = "support/write_back.rs"]
mod write_back;

use offload::{CAPACITY, LOG_LENGTH};

/// What a discard leaves here is the store's choice.
const DISCARDED: Range<u64> = 40960..45056;

/// The bytes of a line of an image.
const LINE: usize = 32;

fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/formats");
    folder.join(name).with_extension("txt")
}

/// An image as text: its length, and the lines that are not zero, each with its place.
fn text(image: &[u8]) -> String {
    let mut text = format!("{}\n", image.len());
    for (number, line) in image.chunks(LINE).enumerate() {
        if line.iter().any(|byte| *byte != 0) {
            let _ = write!(text, "{:x} ", number * LINE);
            for byte in line {
                let _ = write!(text, "{byte:02x}");
            }
            text.push('\n');
        }
    }
    text
}

/// The image with this name as an earlier build has left it.
fn earlier(name: &str) -> Vec<u8> {
    let text = std::fs::read_to_string(file(name)).unwrap();
    let mut lines = text.lines();
    let mut image = vec![0; lines.next().unwrap().parse().unwrap()];
    for line in lines {
        let (place, digits) = line.split_once(' ').unwrap();
        let place = usize::from_str_radix(place, 16).unwrap();
        for (index, byte) in image[place..][..digits.len() / 2].iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * index..][..2], 16).unwrap();
        }
    }
    image
}

/// Checks that `image` is what an earlier build has left. Returns the latter.
fn check(name: &str, image: &[u8]) -> Vec<u8> {
    if std::env::var_os("FATHOM_WRITE_FORMATS").is_some() {
        std::fs::write(file(name), text(image)).unwrap();
    }
    let earlier = earlier(name);
    let differs = (0..image.len()).find(|at| earlier.get(*at) != image.get(*at));
    assert_eq!((image.len(), differs), (earlier.len(), None), "{name}: the first other byte");
    earlier
}

fn store(image: &[u8]) -> Arc<SimBackend> {
    let options = SimOptions { rounds_max: 0, ..SimOptions::new(image.len() as u64) };
    Arc::new(SimBackend::with_image(options, 1, image.to_vec()))
}

fn harness(disk: &Arc<Disk>) -> Harness {
    let options = HarnessOptions { queues: 1, depth: 1, simulated: true };
    Harness::new(disk, &options, 1)
}

/// Changes of each kind, one after the other.
fn change(harness: &mut Harness, first: u64) {
    let keep = Flags { keep_allocated: true, ..Flags::default() };
    for (number, (operation, offset, length, flags)) in [
        (Operation::Write, 4096, 4096, Flags::default()),
        (Operation::Write, 512, 512, Flags { force_unit_access: true, ..Flags::default() }),
        (Operation::WriteZeroes, 16384, 8192, Flags::default()),
        (Operation::WriteZeroes, 32768, 4096, keep),
        (Operation::Discard, DISCARDED.start, 4096, Flags::default()),
        (Operation::Write, 8192, 1024, Flags::default()),
        (Operation::Flush, 0, 0, Flags::default()),
    ]
    .into_iter()
    .enumerate()
    {
        let content = first + number as u64;
        harness.submit(0, &Action { operation, offset, length, flags, content });
        harness.drain(|_| {});
    }
}

/// Checks that a disk with the log in `log` over `home` has what the same changes have made of a
/// disk without a log.
fn check_content(log: &[u8], home: &SimBackend, changes: impl Fn(&mut Harness)) {
    let plain = store(&vec![0; home.capacity() as usize]);
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::clone(&plain) as _).unwrap();
    changes(&mut harness(&disk));
    let [mut found, mut expected] = [images::with_log(log, &home.image()), plain.image()];
    for content in [&mut found, &mut expected] {
        content[DISCARDED.start as usize..DISCARDED.end as usize].fill(0);
    }
    assert!(found == expected, "the content of the disk");
}

/// Two lives of a log: the changes of the first are home, with witnesses, and those of the second
/// are in the log.
#[test]
fn a_log_is_as_it_was() {
    let log = store(&vec![0; LOG_LENGTH as usize]);
    let home = store(&vec![0; CAPACITY as usize]);
    let open = |log: &Arc<SimBackend>| {
        let volume = Arc::new(LogVolume::new(Arc::clone(log) as Arc<dyn Backend>));
        let mut options = offload::options();
        options.age_ns = u64::MAX;
        Wal::open(&volume, &options).unwrap()
    };
    for first in [1, 101] {
        let wal = open(&log);
        wal.pair(wal.age()).unwrap();
        let layers = vec![Arc::new(wal.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        change(&mut harness(&disk), first);
        if first == 1 {
            wal.drain(&disk, Duration::from_secs(20)).unwrap();
        }
    }
    let image = check("wal", &log.image());
    check_content(&image, &home, |harness| {
        change(harness, 1);
        change(harness, 101);
    });
    let wal = open(&store(&image));
    assert_eq!((wal.age(), wal.held().records), (3, 6));
}

/// A log that carries changes, behind the record of its trial.
#[test]
fn a_log_that_carries_is_as_it_was() {
    let log = store(&vec![0; LOG_LENGTH as usize]);
    let home = store(&vec![0; CAPACITY as usize]);
    let volume = |log: &Arc<SimBackend>| Arc::new(LogVolume::new(Arc::clone(log) as _));
    let mut options = offload::options();
    options.age_ns = u64::MAX;
    let offload = Offload::open(&volume(&log), &options, offload::settings()).unwrap();
    offload.wal().pair(offload.wal().age()).unwrap();
    let layers = vec![Arc::new(offload.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
    let mut harness = harness(&disk);
    offload.begin().unwrap();
    harness.step();
    change(&mut harness, 1);
    let image = check("offload", &log.image());
    check_content(&image, &home, |harness| change(harness, 1));
    let offload = Offload::open(&volume(&store(&image)), &options, offload::settings()).unwrap();
    assert_eq!((offload.wal().age(), offload.wal().held().records), (2, 7));
}

/// A cache with blocks and their tables, and with a change in its log.
#[test]
fn a_cache_is_as_it_was() {
    let rig = write_back::Rig::new(0, 0, 0.0, write_back::blank(0));
    let mut harness = kept::harness(&rig.disk, 0);
    let last = |harness: &mut Harness| {
        let (operation, flags) = (Operation::Write, Flags::default());
        harness.submit(0, &Action { operation, offset: 128 << 10, length: 512, flags, content: 9 });
        harness.drain(|_| {});
    };
    change(&mut harness, 1);
    for _ in 0..2 {
        // What is read again goes into the cache, too.
        write_back::wait(&mut harness, &rig, |_| {});
        harness.verify(CAPACITY);
    }
    write_back::wait(&mut harness, &rig, |_| {});
    last(&mut harness);
    let images = vec![check("cache", &rig.store.image()), rig.home.image()];
    let log = write_back::log_of(0, &images);
    check_content(log, &rig.home, |harness| {
        change(harness, 1);
        last(harness);
    });
    let content = write_back::content(0, &images);
    assert_eq!(images::mappings(&images[0], Some(log), &content), Ok(13));
    let again = write_back::Rig::new(0, 1, 0.0, images);
    assert_eq!(again.wal.held().records, 1);
}

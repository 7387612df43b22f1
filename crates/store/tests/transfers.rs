//! Snapshots go from pool to pool as streams: what arrives is what was sent, and nothing is left of
//! what is cut off, changed, or sent to the wrong place.

use std::sync::Arc;

use fathom_block::Backend;
use fathom_sim::{OneRequest, SimBackend, each_seed, pattern};
use fathom_store::{Pool, PoolError, PoolRefusal, SendOptions, TransferError, receive, send};

mod support;

use support::{blank_of, content, disk, fast, options};

const DEVICE: u64 = 4 << 20;
const SIZE: u64 = (1 << 20) + 512;

fn pool() -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, blank_of(DEVICE)));
    let pool = open(&device);
    (device, pool)
}

fn open(device: &Arc<SimBackend>) -> Pool {
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options()).expect("a sound pool")
}

fn stream(pool: &Pool, snapshot: &str, from: Option<&str>) -> Vec<u8> {
    let mut out = Vec::new();
    let options = SendOptions { volume: "web", snapshot, from };
    let sent = send(pool, &options, &mut out, |_, _| {}).unwrap();
    assert!(sent.data_bytes <= out.len() as u64);
    out
}

fn take(pool: &Pool, stream: &[u8]) -> Result<(), TransferError> {
    receive(pool, "copy", stream, false, |_, _| {}).map(drop)
}

/// Writes and zeroes at random.
fn change(pool: &Pool, random: &mut fastrand::Rng, size: u64) {
    let mut queue = OneRequest::open(&disk(pool.volume("web").unwrap()));
    for _ in 0..random.usize(1..12) {
        let length = random.u64(1..=64) * 512;
        let offset = random.u64(0..=(size - length) / 512) * 512;
        let mut bytes = vec![0; length as usize];
        if random.u8(..3) > 0 {
            pattern(&mut bytes, random.u64(1..));
        }
        queue.write(offset, &bytes).unwrap();
    }
}

/// The names of the volumes and snapshots, and the contents of the volumes.
fn all(pool: &Pool) -> Vec<(String, Vec<u8>)> {
    let names = pool.snapshots().into_iter().map(|found| (found.name, Vec::new()));
    let volumes = pool.volumes().into_iter();
    let contents = volumes.map(|found| {
        let backend = pool.volume(&found.name).unwrap();
        (found.name, content(backend))
    });
    names.chain(contents).collect()
}

#[test]
fn full_and_incremental_streams_make_the_same_snapshots_elsewhere() {
    each_seed(10, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ((_, from), (device, to)) = (pool(), pool());
        from.create_volume("web", SIZE).unwrap();
        let (mut size, mut names) = (SIZE, Vec::<String>::new());
        for number in 0..4 {
            change(&from, &mut random, size);
            if random.u8(..3) == 0 {
                size = random.u64(200..2500) * 512;
                from.volume("web").unwrap().resize(size).unwrap();
            }
            let name = format!("s{number}");
            from.take_snapshot(&["web"], &name, 100 + number).unwrap();
            let base = names.last().map(String::as_str);
            take(&to, &stream(&from, &name, base)).unwrap();
            names.push(name);
        }
        drop(to);
        let to = open(&device);
        for name in &names {
            let expected = content(from.snapshot("web", name).unwrap());
            assert!(content(to.snapshot("copy", name).unwrap()) == expected, "{name}");
        }
        let last = names.last().unwrap();
        assert!(
            content(to.volume("copy").unwrap()) == content(from.snapshot("web", last).unwrap())
        );
        assert_eq!(to.volumes().len(), 1);
        assert_eq!(to.snapshots()[2].time_s, 102);
        // And back again, over two snapshots at once.
        let options = SendOptions { volume: "copy", snapshot: last, from: Some(&names[1]) };
        let mut back = Vec::new();
        send(&to, &options, &mut back, |_, _| {}).unwrap();
        from.roll_back("web", &names[1]).unwrap();
        for name in &names[2..] {
            from.delete_snapshot("web", name).unwrap();
        }
        receive(&from, "web", &back[..], false, |_, _| {}).unwrap();
        assert!(content(from.volume("web").unwrap()) == content(to.volume("copy").unwrap()));
    });
}

#[test]
fn nothing_is_left_of_a_stream_that_is_cut_changed_or_reordered() {
    let ((_, from), (_, to)) = (pool(), pool());
    let mut random = fastrand::Rng::with_seed(1);
    from.create_volume("web", SIZE).unwrap();
    change(&from, &mut random, SIZE);
    from.take_snapshot(&["web"], "a", 1).unwrap();
    let full = stream(&from, "a", None);
    let check = |stream: &[u8], before: &[(String, Vec<u8>)]| {
        assert!(take(&to, stream).is_err());
        assert!(all(&to) == before, "something is left");
    };
    let spoil = |stream: &[u8], random: &mut fastrand::Rng, before: &[(String, Vec<u8>)]| {
        for _ in 0..25 {
            check(&stream[..random.usize(..stream.len())], before);
            let mut changed = stream.to_vec();
            changed[random.usize(..stream.len())] ^= 1 << random.u8(..8);
            check(&changed, before);
            // Two parts change places.
            let (length, end) = (random.usize(8..200), stream.len() - 400);
            let (one, two) = (random.usize(..end / 2), random.usize(end / 2..end) + 200);
            let mut changed = stream.to_vec();
            let piece = changed[one..one + length].to_vec();
            changed.copy_within(two..two + length, one);
            changed[two..two + length].copy_from_slice(&piece);
            if changed != stream {
                check(&changed, before);
            }
        }
        check(&stream[..stream.len() - 1], before);
        check(&[stream, &[0]].concat(), before);
    };
    spoil(&full, &mut random, &[]);
    take(&to, &full).unwrap();
    change(&from, &mut random, SIZE);
    from.volume("web").unwrap().resize(SIZE * 2).unwrap();
    from.take_snapshot(&["web"], "b", 2).unwrap();
    let increment = stream(&from, "b", Some("a"));
    let before = all(&to);
    spoil(&increment, &mut random, &before);
    take(&to, &increment).unwrap();
    assert!(content(to.volume("copy").unwrap()) == content(from.snapshot("web", "b").unwrap()));
}

#[test]
fn a_stream_is_not_merged_into_something_else() {
    let ((_, from), (_, to)) = (pool(), pool());
    let mut random = fastrand::Rng::with_seed(2);
    from.create_volume("web", SIZE).unwrap();
    for (name, time) in [("a", 1), ("b", 2), ("c", 3)] {
        change(&from, &mut random, SIZE);
        from.take_snapshot(&["web"], name, time).unwrap();
    }
    let (full, first, second) =
        (stream(&from, "a", None), stream(&from, "b", Some("a")), stream(&from, "c", Some("b")));
    let is_missing = |done: Result<(), TransferError>| {
        matches!(done, Err(TransferError::Pool(PoolError::Refused(PoolRefusal::NoVolume))))
    };
    assert!(is_missing(take(&to, &first)));
    take(&to, &full).unwrap();
    let before = all(&to);
    assert!(matches!(take(&to, &second), Err(TransferError::WrongBase(_))));
    let taken = take(&to, &full);
    assert!(matches!(taken, Err(TransferError::Pool(PoolError::Refused(PoolRefusal::NameTaken)))));
    // Another snapshot with the name and the time of the base, in which one byte differs.
    let (_, other) = pool();
    take(&other, &full).unwrap();
    let byte = content(other.volume("copy").unwrap())[5000] ^ 1;
    OneRequest::open(&disk(other.volume("copy").unwrap())).write(5000, &[byte]).unwrap();
    other.delete_snapshot("copy", "a").unwrap();
    other.take_snapshot(&["copy"], "a", 1).unwrap();
    assert!(matches!(take(&other, &first), Err(TransferError::WrongBase(_))));
    // What the volume has beyond the base is not given up, unless that is wanted.
    OneRequest::open(&disk(to.volume("copy").unwrap())).write(0, &[byte; 512]).unwrap();
    assert!(matches!(take(&to, &first), Err(TransferError::Changed(_))));
    assert_ne!(all(&to), before);
    receive(&to, "copy", &first[..], true, |_, _| {}).unwrap();
    take(&to, &second).unwrap();
    assert!(content(to.volume("copy").unwrap()) == content(from.snapshot("web", "c").unwrap()));
    assert!(matches!(take(&to, b"FATHOMSS\x02\0\0\0\0\0\0\0"), Err(TransferError::Newer(2))));
    assert!(matches!(take(&to, &[9; 100]), Err(TransferError::Unsound(_))));
    to.create_volume("+receiving", 4096).unwrap();
    let unfinished = receive(&to, "new", &full[..], false, |_, _| {});
    assert!(matches!(unfinished, Err(TransferError::Unfinished(_))));
}

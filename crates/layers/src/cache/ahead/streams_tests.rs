use fathom_insight::{Facts, Name};

use super::*;

const LIMITS: Limits = Limits { window: 1 << 20, unused: 16 << 20 };
const LENGTH: u64 = 64 << 10;

fn file(inode: u64) -> File {
    let facts =
        Facts { inode, device: Name(3), kind: fathom_insight::Kind::Data, ..Facts::default() };
    File::of(&facts).unwrap()
}

fn piece(offset: u64, place: u64, length: u64) -> Piece {
    Piece { file_offset: offset, place, length }
}

/// Reads the part of a file at `offset`, which lies on the disk in one piece. What is to be read
/// ahead is.
fn read(streams: &mut Streams, inode: u64, offset: u64, size: u64, is_miss: bool) -> Seen {
    let base = inode << 32;
    let seen =
        streams.read(file(inode), piece(offset, base + offset, LENGTH), size, is_miss, LIMITS);
    if let Some(ahead) = seen.ahead {
        let length = ahead.end - ahead.from.0;
        streams.sent(ahead.stream, piece(ahead.from.0, ahead.from.1, length), true);
    }
    seen
}

/// The window starts small, doubles as it is used, and ends with the file.
#[test]
fn the_window_grows_and_ends_with_the_file() {
    let mut streams = Streams::default();
    let size = 8 << 20;
    assert_eq!(read(&mut streams, 1, 0, size, true), Seen::default());
    let first = read(&mut streams, 1, LENGTH, size, true);
    let ahead = first.ahead.unwrap();
    assert!(first.is_followed && !first.is_joint);
    assert_eq!((ahead.from.0, ahead.end), (2 * LENGTH, 2 * LENGTH + WINDOW_MIN));
    let (mut furthest, mut widest, mut covered) = (ahead.end, 0, ahead.end);
    for offset in (2 * LENGTH..size).step_by(LENGTH as usize) {
        assert!(offset < furthest, "byte {offset} was read ahead");
        let seen = read(&mut streams, 1, offset, size, false);
        if let Some(ahead) = seen.ahead {
            assert_eq!(ahead.from.0, covered, "no byte twice, and none left out");
            assert_eq!(ahead.from.1, (1 << 32) + covered);
            (furthest, covered) = (ahead.end, ahead.end);
            widest = widest.max(ahead.end - offset - LENGTH);
        }
    }
    assert_eq!((furthest, widest), (size, LIMITS.window));
    assert_eq!(streams.unused, 0);
}

/// Reads at random places, and files that are in the cache, are not read ahead.
#[test]
fn what_is_not_in_order_or_does_not_miss_is_not_read_ahead() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut streams = Streams::default();
    for _ in 0..10_000 {
        let (inode, offset) = (random.u64(1..20), random.u64(0..10_000) * LENGTH * 2);
        assert!(read(&mut streams, inode, offset, 1 << 40, true).ahead.is_none());
    }
    for offset in (0..64 << 20).step_by(LENGTH as usize) {
        assert!(read(&mut streams, 5, offset, 64 << 20, false).ahead.is_none());
    }
    let large = piece(0, 0, LIMITS.window);
    for number in 0..9 {
        let at = number * LIMITS.window;
        let large = Piece { file_offset: at, place: at, ..large };
        let seen = streams.read(file(77), large, 1 << 40, true, LIMITS);
        assert!(!seen.is_followed, "the guest reads as much at once");
    }
    assert!(read(&mut Streams::default(), 1, 0, 0, true).ahead.is_none());
}

/// A guest that reads only the beginnings of files makes the queue cautious, and one that reads
/// whole files makes it bold again.
#[test]
fn unused_blocks_make_the_queue_cautious() {
    let mut streams = Streams::default();
    let size = 64 << 20;
    let mut begun = Vec::new();
    for inode in 1..400 {
        let is_begun = (0..3)
            .any(|index| read(&mut streams, inode, index * LENGTH, size, true).ahead.is_some());
        begun.push(is_begun);
    }
    let count = |begun: &[bool]| begun.iter().filter(|begun| **begun).count();
    assert!(count(&begun[..20]) > 10, "at first files are read ahead");
    assert!(count(&begun[300..]) < 5, "{} of 99", count(&begun[300..]));
    // Windows that nobody uses any more make room.
    let mut first = None;
    for index in 0..size / LENGTH {
        let is_miss = index * LENGTH >= streams.all.iter().map(|s| s.ahead.0).max().unwrap();
        let seen = read(&mut streams, 1000, index * LENGTH, size, is_miss || first.is_none());
        if seen.is_followed && first.is_none() {
            first = Some(index);
        }
    }
    let first = first.expect("the file is read ahead");
    assert!((2..=u64::from(MISSES << CAUTION_MAX)).contains(&first), "after {first} reads");
    assert_eq!(streams.caution, 0, "it was used");
}

/// A file that is elsewhere than expected ends what was read ahead, and the place is noted.
#[test]
fn a_file_that_is_elsewhere_is_a_joint() {
    let mut streams = Streams::default();
    read(&mut streams, 1, 0, 1 << 30, true);
    assert!(read(&mut streams, 1, LENGTH, 1 << 30, true).ahead.is_some());
    let elsewhere = piece(2 * LENGTH, 7 << 30, LENGTH);
    let seen = streams.read(file(1), elsewhere, 1 << 30, true, LIMITS);
    assert!(seen.is_joint && !seen.is_followed);
    assert_eq!((streams.unused, streams.caution), (0, 1));
    // The same for a write.
    let mut streams = Streams::default();
    assert!(!streams.write(file(1), piece(0, 4096, 4096)));
    assert!(!streams.write(file(1), piece(4096, 8192, 4096)));
    assert!(streams.write(file(1), piece(8192, 4096, 4096)));
    assert!(!streams.write(file(2), piece(12_288, 4096, 4096)));
}

/// Random reads, writes and failures by seed: the bytes that are counted as unused are those of the
/// pieces, and stay within their limit.
#[test]
fn the_unused_bytes_are_counted_and_bounded() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut streams = Streams::default();
        let limits = Limits { window: 512 << 10, unused: 1 << 20 };
        let mut positions = [0_u64; 40];
        let (mut begun, mut ended) = (0, 0);
        for _ in 0..3000 {
            let count = if random.u8(..) < 200 { 4 } else { 40 };
            let inode = random.usize(0..count);
            let position = &mut positions[inode];
            if random.u8(..) < 8 {
                *position = random.u64(0..1000) << 12;
            }
            let length = random.u64(1..32) << 12;
            let jump = if random.u8(..) < 8 { random.u64(0..1 << 20) << 12 } else { 0 };
            let read = piece(*position, ((inode as u64) << 40) + *position + jump, length);
            let size = random.u64(*position..*position + (1 << 24));
            let seen = streams.read(file(inode as u64 + 1), read, size, random.bool(), limits);
            *position += length + random.u64(0..2) * random.u64(0..4) * 4096;
            if let Some(ahead) = seen.ahead {
                assert!(ahead.end <= size && ahead.from.0 < ahead.end);
                let mut at = ahead.from;
                while at.0 < ahead.end {
                    let length = (random.u64(1..64) << 12).min(ahead.end - at.0);
                    streams.sent(ahead.stream, piece(at.0, at.1, length), random.u8(..) < 230);
                    at = (at.0 + length, at.1 + length);
                    begun += 1;
                }
            }
            if random.u8(..) < 4 {
                streams.failed(((inode as u64) << 40) + positions[inode] + 4096);
                ended += 1;
            }
            let pieces = streams.all.iter().flat_map(|stream| &stream.pieces);
            let unused: u64 = pieces.map(|piece| piece.length).sum();
            assert_eq!(streams.unused, unused, "seed {seed}");
            assert!(unused <= limits.unused, "seed {seed}: {unused}");
        }
        assert!(begun > 10 && ended > 10, "seed {seed}: {begun} {ended}");
    }
}

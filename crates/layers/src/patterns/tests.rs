//! Files that are written and read, without a disk.

use std::sync::Arc;

use fathom_insight::pattern::{Evidence, Pattern, PatternKind};
use fathom_insight::{Facts, Kind, Name, Names};

use super::PatternsOptions;
use super::content::PAGE;
use super::finder::{Content, CopyCall, Finder};

/// The largest piece in which a file is transferred.
const PIECE: usize = 128 << 10;

struct Scene {
    finder: Finder,
    names: Arc<Names>,
    now_ns: u64,
    inode: u64,
    /// The bytes of new ciphertext that were written.
    ciphertext: usize,
}

impl Scene {
    fn new() -> Self {
        let names = Arc::new(Names::default());
        let mut finder = Finder::new(Arc::clone(&names), PatternsOptions::default(), 7);
        finder.has_reader = true;
        Self { finder, names, now_ns: 1_000_000_000_000, inode: 100, ciphertext: 0 }
    }

    fn facts(&mut self, path: &str, size: usize) -> Facts {
        self.inode += 1;
        Facts {
            kind: Kind::Data,
            inode: self.inode,
            file_size: size as u64,
            path: self.names.number(path),
            device: self.names.number("vda1"),
            cgroup: self.names.number("/web"),
            ..Facts::default()
        }
    }

    fn transfer(&mut self, facts: &Facts, data: &[u8], is_write: bool) {
        for (number, piece) in data.chunks(PIECE).enumerate() {
            self.now_ns += 1_000_000;
            // The last page is filled with zeroes.
            let mut data = piece.to_vec();
            data.resize(piece.len().next_multiple_of(PAGE), 0);
            let offset = (number * PIECE) as u64;
            let now_ns = self.now_ns;
            let content = Content { facts, offset, is_in_file: true, data: &data, now_ns };
            if !is_write {
                self.finder.read(content);
            } else if self.finder.write(content) {
                self.ciphertext += data.len();
            }
        }
    }

    fn write(&mut self, path: &str, data: &[u8]) -> Facts {
        let facts = self.facts(path, data.len());
        self.transfer(&facts, data, true);
        facts
    }

    /// The path and the evidence of each encrypted file, the first one first.
    fn encrypted(&self) -> Vec<(String, Option<Evidence>)> {
        let (_, encrypted) = self.finder.records();
        let of = |record: &super::EncryptedRecord| (self.text(record.file.path), record.evidence);
        encrypted.iter().rev().map(of).collect()
    }

    fn text(&self, name: Name) -> String {
        self.names.text(name).as_deref().unwrap_or_default().to_owned()
    }

    /// The target, the source and the bytes of each copy, the first one first.
    fn copies(&mut self) -> Vec<(String, String, u64)> {
        self.finder.report_all(self.now_ns);
        let (copies, _) = self.finder.records();
        let of = |copy: &super::CopyRecord| {
            (self.text(copy.target.path), self.text(copy.source.path), copy.bytes)
        };
        copies.iter().rev().map(of).collect()
    }

    fn events(&mut self) -> Vec<Pattern> {
        let mut events = Vec::new();
        self.finder.ring.drain(&mut events);
        events
    }
}

fn random(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u8(..)).collect()
}

fn text(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let words = ["block", "guest", "journal", "copy", "a", "the", "of", "disk", "\n"];
    let mut text = Vec::new();
    while text.len() < length {
        text.extend(random.choice(words).unwrap_or_default().as_bytes());
        text.push(b' ');
    }
    text.truncate(length);
    text
}

/// The bytes of a format, then random ones.
fn with_start(start: &[u8], seed: u64, length: usize) -> Vec<u8> {
    let mut data = random(seed, length);
    data[..start.len()].copy_from_slice(start);
    data
}

#[test]
fn encrypted_files_have_a_sign() {
    let mut scene = Scene::new();
    // Formats, whatever the size.
    scene.write("/a/gpg", &with_start(b"\x8c\x0d\x04\x09\x03\x02", 1, 300_000));
    scene.write("/a/openssl", &with_start(b"Salted__", 2, 5000));
    // Random content in place of other content.
    let facts = scene.write("/a/report.xyz", &text(3, 700_000));
    scene.transfer(&facts, &random(4, 700_000), true);
    // A new file beside the one that it was made from, which was read.
    let source = scene.facts("/b/notes.org", 20_000);
    scene.transfer(&source, &text(5, 20_000), false);
    scene.write("/b/notes.org.locked", &random(6, 20_100));
    // One that has another name, but nearly the same size.
    scene.write("/b/6f1a", &random(7, 20_500));
    // A name that promises a format.
    scene.write("/c/photo.jpg", &random(8, 90_000));
    scene.write("/c/photo.jpg.enc", &random(9, 2 << 20));
    let expected = [
        ("/a/gpg", Evidence::Format),
        ("/a/openssl", Evidence::Format),
        ("/a/report.xyz", Evidence::Overwritten),
        ("/b/notes.org.locked", Evidence::Converted),
        ("/b/6f1a", Evidence::Converted),
        ("/c/photo.jpg", Evidence::Name),
        ("/c/photo.jpg.enc", Evidence::Name),
    ];
    let expected = expected.map(|(path, evidence)| (path.to_owned(), Some(evidence)));
    assert_eq!(scene.encrypted(), expected);
    let events = scene.events();
    let of = |kind: PatternKind| events.iter().filter(move |event| event.kind == kind as u8);
    assert_eq!(of(PatternKind::Encryption).count(), 7);
    // The first two may have come from elsewhere. With the last one, five were made here.
    assert_eq!(of(PatternKind::EncryptionInProgress).count(), 1);
    let states = scene.finder.in_progress(scene.now_ns);
    assert_eq!((states.len(), states[0].files, states[0].paths.len()), (1, 5, 3));
    assert!(scene.finder.in_progress(scene.now_ns + 61_000_000_000).is_empty());
    // A file is reported once.
    scene.transfer(&facts, &random(10, 700_000), true);
    assert_eq!(scene.encrypted().len(), 7);
}

#[test]
fn what_is_written_into_a_file_that_is_encrypted_here_is_new() {
    let mut scene = Scene::new();
    let size = 4 << 20;
    let source = scene.facts("/a/report", size);
    scene.transfer(&source, &text(1, size), false);
    // Encrypted elsewhere, and copied: nothing is known to be new.
    scene.write("/z/download.gpg", &with_start(b"\x8c\x0d\x04\x09\x03\x02", 1, size));
    scene.write("/b/copy", &text(1, size));
    scene.write("/tmp/random", &random(2, size));
    assert_eq!(scene.ciphertext, 0);
    let sealed = with_start(b"\x8c\x0d\x04\x09\x03\x02", 3, size + 500);
    let facts = scene.write("/a/report.gpg", &sealed);
    let found = scene.ciphertext;
    assert!(found > size - (5 << 18) && found < size, "{found}");
    // A copy of it is not.
    scene.transfer(&facts, &sealed, false);
    scene.write("/c/report.gpg", &sealed);
    assert_eq!(scene.ciphertext, found);
    // What takes its place is not, once there is enough of it.
    scene.transfer(&facts, &text(4, size), true);
    assert!(scene.ciphertext < found + (5 << 18), "{} after {found}", scene.ciphertext);
}

#[test]
fn copies_of_encrypted_files_are_not_encryption() {
    let mut scene = Scene::new();
    for (number, size) in [2000, 6000, 300_000, 3 << 20].into_iter().enumerate() {
        let content = with_start(b"Salted__", number as u64, size);
        let source = scene.facts(&format!("/a/{number}.enc"), size);
        scene.transfer(&source, &content, false);
        scene.write(&format!("/b/{number}.enc"), &content);
        assert_eq!(scene.encrypted(), []);
        // What is encrypted in place of the copy, is.
        let facts = Facts {
            inode: scene.inode,
            path: scene.names.number(&format!("/b/{number}.enc")),
            ..source
        };
        if number == 3 {
            scene.transfer(&facts, &with_start(b"Salted__", 9, size), true);
            assert_eq!(scene.encrypted().len(), 1);
        }
    }
    // The number of a deleted copy is used again.
    let plain = text(11, 300_000);
    scene.write("/d/plain", &plain);
    let copy = scene.write("/d/copy", &plain);
    let again = Facts { path: scene.names.number("/e/new.enc"), ..copy };
    scene.transfer(&again, &with_start(b"Salted__", 12, 300_000), true);
    assert_eq!(scene.encrypted().len(), 2);
    // A small one that was not read before.
    scene.write("/c/small.enc", &with_start(b"Salted__", 7, 500));
    assert_eq!(scene.encrypted().len(), 3);
    assert!(scene.finder.in_progress(scene.now_ns).is_empty());
}

#[test]
fn compressed_and_random_files_are_not_encrypted() {
    let mut scene = Scene::new();
    let starts: [(&str, &[u8]); 6] = [
        ("/a/x.tar.xz", b"\xfd7zXZ\0"),
        ("/a/film.mp4", b"\0\0\0\x20ftyp"),
        ("/a/x.deb", b"!<arch>\n"),
        ("/a/x.zip", b"PK\x03\x04\x14\0\0\0"),
        ("/a/volume", b"LUKS\xba\xbe"),
        ("/a/blob", b"\x28\xb5\x2f\xfd"),
    ];
    for (seed, (path, start)) in (1..).zip(starts) {
        let facts = scene.write(path, &with_start(start, seed, 2 << 20));
        // They may be written twice, also in place.
        scene.transfer(&facts, &with_start(start, seed + 50, 2 << 20), true);
    }
    // A file that is compressed beside its source, without a mark at its beginning.
    scene.write("/b/page.html", &text(20, 1 << 20));
    scene.write("/b/page.html.br", &random(21, 300_000));
    // A part of an archive, a file with a plain beginning, zeroes, and a small file.
    scene.write("/b/x.zip.002", &random(22, 1 << 20));
    let mut initrd = random(23, 1 << 20);
    initrd[..8192].fill(b'x');
    scene.write("/b/initrd", &initrd);
    scene.write("/b/zero", &vec![0; 1 << 20]);
    scene.write("/b/tiny", &random(24, 3000));
    // Random content alone is reported as such.
    scene.write("/tmp/random", &random(25, 1 << 20));
    let found = scene.encrypted();
    assert!(found.iter().all(|(_, evidence)| evidence.is_none()), "{found:?}");
    let paths: Vec<&str> = found.iter().map(|(path, _)| &**path).collect();
    assert_eq!(paths, ["/b/page.html.br", "/b/x.zip.002", "/tmp/random"]);
    assert!(scene.finder.in_progress(scene.now_ns).is_empty());
}

#[test]
fn a_number_that_is_used_again_is_another_file() {
    let mut scene = Scene::new();
    let old = scene.write("/a/old.txt", &text(1, 300_000));
    let new = Facts { path: scene.names.number("/b/stream"), ..old };
    scene.transfer(&new, &random(2, 300_000), true);
    assert_eq!(scene.encrypted(), [("/b/stream".to_owned(), None)]);
    // A file that was moved beside its old name stays the same.
    let moved = scene.write("/a/one.txt", &text(3, 300_000));
    let moved = Facts { path: scene.names.number("/a/one.txt.locked"), ..moved };
    scene.transfer(&moved, &random(4, 300_000), true);
    let locked = ("/a/one.txt.locked".to_owned(), Some(Evidence::Overwritten));
    assert_eq!(scene.encrypted().last(), Some(&locked));
}

#[test]
fn pages_may_come_in_any_order() {
    for first_last in [false, true] {
        let mut scene = Scene::new();
        let data = with_start(b"Salted__", 1, 1 << 20);
        let facts = scene.facts("/a/x", data.len());
        let mut pieces: Vec<usize> = (0..data.len() / PIECE).collect();
        if first_last {
            pieces.rotate_left(1);
        }
        for number in pieces {
            let (offset, now_ns) = ((number * PIECE) as u64, scene.now_ns);
            let data = &data[number * PIECE..][..PIECE];
            scene.finder.write(Content { facts: &facts, offset, is_in_file: true, data, now_ns });
        }
        assert_eq!(scene.encrypted(), [("/a/x".to_owned(), Some(Evidence::Format))]);
    }
}

#[test]
fn copies_name_their_sources() {
    let mut scene = Scene::new();
    // A source that is read, one that was just written, and one of a few pages.
    let (large, small) = (random(1, 3 << 20), random(2, 9000));
    let source = scene.facts("/a/large", large.len());
    scene.transfer(&source, &large, false);
    scene.write("/b/large", &large);
    scene.write("/a/small", &small);
    scene.write("/b/small", &small);
    // A copy of a copy has the first file as its source.
    scene.write("/c/large", &large);
    let of = |target: &str, source: &str, bytes| (target.to_owned(), source.to_owned(), bytes);
    let expected = [
        of("/b/large", "/a/large", 3 << 20),
        of("/b/small", "/a/small", 12288),
        of("/c/large", "/a/large", 3 << 20),
    ];
    assert_eq!(scene.copies(), expected);
    let copied: u64 = scene
        .events()
        .iter()
        .filter(|event| event.kind == PatternKind::Copy as u8)
        .map(|event| event.bytes)
        .sum();
    assert_eq!(copied, (6 << 20) + 12288);
    assert_eq!(scene.finder.counts().copied_bytes, copied);
}

#[test]
fn pages_that_occur_twice_belong_to_copies() {
    let mut scene = Scene::new();
    let mut content = random(1, 1 << 20);
    content[300_000..400_000].fill(0);
    content.copy_within(0..40_960, 500_000 / 4096 * 4096);
    scene.write("/a/program", &content);
    scene.write("/b/program", &content);
    let expected = ("/b/program".to_owned(), "/a/program".to_owned(), 1 << 20);
    assert_eq!(scene.copies(), [expected]);
}

#[test]
fn archives_have_copies_at_sectors() {
    let mut scene = Scene::new();
    let (one, two) = (text(1, 1 << 20), random(2, 300_000));
    scene.write("/a/one", &one);
    scene.write("/a/two", &two);
    // An archive as `tar` makes it: headers of a sector, content that fills sectors.
    let mut archive = Vec::new();
    for file in [&one, &two] {
        archive.extend(text(9, 512));
        archive.extend(file);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    scene.write("/x.tar", &archive);
    let copies = scene.copies();
    let bytes = |source: &str| {
        let own = copies.iter().filter(|(target, from, _)| target == "/x.tar" && from == source);
        own.map(|(_, _, bytes)| *bytes).sum::<u64>()
    };
    // All but the last bytes, which fill no sector, also of pages that two requests divide.
    assert!((one.len() as u64 - 512..=one.len() as u64).contains(&bytes("/a/one")), "{copies:?}");
    assert!((two.len() as u64 - 512..=two.len() as u64).contains(&bytes("/a/two")), "{copies:?}");
}

#[test]
fn other_content_is_no_copy() {
    let mut scene = Scene::new();
    scene.write("/a/one", &random(1, 1 << 20));
    scene.write("/a/two", &random(2, 1 << 20));
    // Zeroes, the same file again, and a few pages of another.
    scene.write("/a/zero", &vec![0; 1 << 20]);
    scene.write("/b/zero", &vec![0; 1 << 20]);
    let facts = scene.write("/a/log", &text(3, 1 << 20));
    scene.transfer(&facts, &text(3, 1 << 20), true);
    let mut mixed = random(4, 1 << 20);
    mixed[..8 * PAGE].copy_from_slice(&random(1, 8 * PAGE));
    scene.write("/a/mixed", &mixed);
    assert_eq!(scene.copies(), []);
}

#[test]
fn hostile_requests_are_bounded() {
    let mut scene = Scene::new();
    let page = random(1, PAGE);
    for number in 0..60_000_u64 {
        let facts = Facts {
            kind: Kind::Data,
            inode: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            file_size: if number % 3 == 0 { u64::MAX } else { number },
            path: Name(number as u32),
            process_id: number as u32,
            ..Facts::default()
        };
        let offset = if number % 2 == 0 { 0 } else { u64::MAX - 4095 - number % 7 };
        let now_ns = number.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let data = &page[..PAGE - (number % 9) as usize * 100];
        let content = Content { facts: &facts, offset, is_in_file: true, data, now_ns };
        if number % 5 == 0 {
            scene.finder.read(content);
        } else {
            scene.finder.write(content);
        }
    }
    let (copies, encrypted) = scene.finder.records();
    assert!(copies.len() <= 256 && encrypted.len() <= 256);
    assert!(scene.finder.counts().memory_bytes < 16 << 20);
}

impl Scene {
    /// A process copies a file by system calls.
    fn call(&mut self, target: &Facts, source: &Facts, bytes: u64) {
        let (process, process_id) = (self.names.number("cp"), 77);
        let target = Facts { process, process_id, ..*target };
        self.finder.call(&CopyCall { target: &target, source, bytes }, self.now_ns);
    }

    /// The sum of the bytes of all events of copies, those by calls, and the sum of the records.
    fn sums(&mut self) -> (u64, u64, u64) {
        let records = self.copies().iter().map(|(_, _, bytes)| bytes).sum();
        let mut events = Vec::new();
        self.finder.ring.drain(&mut events);
        events.retain(|event| event.kind == PatternKind::Copy as u8);
        let sum = |is_meant: &dyn Fn(&Pattern) -> bool| {
            events.iter().filter(|event| is_meant(event)).map(|event| event.bytes).sum()
        };
        (sum(&|_| true), sum(&|event| event.evidence == Evidence::Call as u8), records)
    }
}

#[test]
fn a_copy_by_a_call_is_reported_once() {
    let size = 3_000_000;
    let data = random(11, size);
    for order in 0..3 {
        let mut scene = Scene::new();
        let source = scene.write("/srv/a", &data);
        let target = scene.facts("/srv/b", size);
        match order {
            // It moves no data.
            0 => scene.call(&target, &source, size as u64),
            // The content is written back later.
            1 => {
                scene.call(&target, &source, 1_000_000);
                scene.call(&target, &source, size as u64 - 1_000_000);
                scene.now_ns += 30_000_000_000;
                scene.transfer(&target, &data, true);
            }
            // It is written back, and reported, before the call is known.
            _ => {
                scene.transfer(&target, &data, true);
                scene.finder.report_all(scene.now_ns);
                scene.call(&target, &source, size as u64);
            }
        }
        let (events, calls, records) = scene.sums();
        assert!(events.abs_diff(size as u64) < PAGE as u64, "{order}: {events}");
        assert_eq!((calls == events, records), (order < 2, events), "{order}");
        let copies = scene.copies();
        assert_eq!((&*copies[0].0, &*copies[0].1, copies.len()), ("/srv/b", "/srv/a", 1));
        let (records, _) = scene.finder.records();
        if order < 2 {
            let by = (records[0].evidence, records[0].actor.process_id);
            assert_eq!(by, (Some(Evidence::Call), 77));
        }
    }
}

#[test]
fn a_later_copy_is_another_one() {
    let (one, other) = (random(12, 1 << 20), random(13, 1 << 20));
    let mut scene = Scene::new();
    let (first, second) = (scene.write("/srv/one", &one), scene.write("/srv/other", &other));
    let target = scene.facts("/srv/target", 1 << 20);
    scene.call(&target, &first, 1 << 20);
    // A copy of itself is none, nor is one of nothing.
    scene.call(&target, &target, 1 << 20);
    scene.call(&target, &first, 0);
    assert_eq!(scene.sums(), (1 << 20, 1 << 20, 1 << 20));
    // What the call said is not waited for any more.
    scene.now_ns += 200_000_000_000;
    scene.transfer(&target, &other, true);
    assert_eq!(scene.sums(), (1 << 20, 0, 2 << 20));
    let copies = scene.copies();
    assert!(copies.iter().any(|copy| copy.1 == "/srv/other"), "{copies:?} {second:?}");
}

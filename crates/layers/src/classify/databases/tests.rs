//! Requests with pages of real databases (`crates/database/tests/pages`).

use fathom_block::Kind;

use super::*;

#[path = "../../../../database/tests/support/mod.rs"]
mod support;

use support::{Captured, File, captures};

/// A disk with one queue or more.
struct Case {
    databases: Databases,
    names: Names,
    queue: DatabaseQueue,
}

impl Case {
    fn new() -> Self {
        Self { databases: Databases::new(), names: Names::default(), queue: DatabaseQueue::new() }
    }

    fn file(&self, inode: u64, path: &str) -> Facts {
        Facts { kind: Kind::Data, inode, path: self.names.number(path), ..Facts::default() }
    }

    /// The parts of a request for `length` bytes of a file, at the same place of the disk.
    fn request(
        &mut self,
        facts: Facts,
        place: Option<u64>,
        disk: u64,
        length: u64,
        data: Option<&[u8]>,
    ) -> Insight {
        let mut insight = Insight::default();
        insight.push_at(length, facts, place);
        insight.finish(&ClassTable::default());
        self.examine(&mut insight, disk, length, data);
        insight
    }

    fn examine(&mut self, insight: &mut Insight, disk: u64, length: u64, data: Option<&[u8]>) {
        let mut buffers = Buffers::default();
        if let Some(data) = data {
            buffers.allocate(data.len());
            buffers.owned_mut().unwrap().copy_from_slice(data);
        }
        let subject = Subject { offset: disk, length, data: data.is_some().then_some(&buffers) };
        let table = ClassTable::default();
        self.queue.examine(&self.databases, &self.names, &table, &subject, insight);
    }
}

/// The only file of a capture, or the one with this path.
fn file(name: &str, path: &str) -> File {
    let files = captures(name).remove(name).expect("a capture");
    files.into_iter().find(|file| file.path == path).expect("the file")
}

fn is_true(page: &Captured, found: Database) -> bool {
    page.truth.is_none_or(|(part, index)| {
        found.part == part && (part == DatabasePart::Other || u64::from(found.index) == index)
    })
}

#[test]
fn a_read_is_known_before_its_data_by_what_was_written() {
    for (name, path, place_is_known) in [
        ("sqlite-3.40.1-4096", "shop.db", true),
        ("sqlite-3.46.1-1024", "shop.db", true),
        ("mariadb-10.11.18", "shop/part.ibd", false),
        ("mariadb-10.11.18", "shop/part.ibd", true),
        ("mysql-9.7.4", "shop/part.ibd", false),
    ] {
        let mut case = Case::new();
        let file = file(name, path);
        let facts = case.file(12, &format!("/srv/{path}"));
        let length = file.pages[0].bytes.len() as u64;
        let at = |page: &Captured| u64::from(page.number) * length;
        let place = |page: &Captured| place_is_known.then(|| at(page));
        // Three times: the pages above the leaves come after some of the leaves.
        for _ in 0..3 {
            for page in &file.pages {
                case.request(facts, place(page), 1 << 30 | at(page), length, Some(&page.bytes));
            }
        }
        // Another queue learns from the first.
        case.queue = DatabaseQueue::new();
        let mut known = 0;
        for page in &file.pages {
            let insight = case.request(facts, place(page), 1 << 30 | at(page), length, None);
            let found = insight.facts.database;
            assert_ne!(found.system, DatabaseSystem::None, "{name}");
            assert!(
                is_true(page, found),
                "{name}, page {}: {found:?} {:?}",
                page.number,
                page.truth
            );
            known += u32::from(found.part != DatabasePart::None && page.truth.is_some());
        }
        assert!(known > 30, "{name}: {known}");
    }
}

#[test]
fn a_read_is_known_by_its_data_at_the_latest() {
    let mut case = Case::new();
    let file = file("mariadb-11.8.9", "shop/part.ibd");
    let facts = case.file(12, "/mysql/shop/part.ibd");
    let page = file.pages.iter().find(|page| page.truth.is_some_and(|truth| truth.1 != 0)).unwrap();
    let mut insight = case.request(facts, None, 0, 16384, None);
    assert_eq!(insight.facts.database, Database::default());
    case.examine(&mut insight, 0, 16384, Some(&page.bytes));
    assert!(is_true(page, insight.facts.database), "{insight:?}");
    // Four thousand bytes from the middle of the page belong to it, if the place is known.
    let place = u64::from(page.number) * 16384;
    case.request(facts, Some(place), 0, 16384, Some(&page.bytes));
    let middle = case.request(facts, Some(place + 4096), 4096, 4096, Some(&page.bytes[4096..8192]));
    assert!(is_true(page, middle.facts.database), "{middle:?}");
}

#[test]
fn a_request_is_divided_by_pages() {
    let mut case = Case::new();
    let files = captures("postgresql-17.12").remove("postgresql-17.12").unwrap();
    let of = |part| {
        let is_of = |file: &&File| {
            file.pages.len() > 1 && file.pages.iter().all(|page| page.truth.unwrap().0 == part)
        };
        files.iter().find(is_of).expect("a relation").clone()
    };
    let (table, index) = (of(DatabasePart::Table), of(DatabasePart::Index));
    let (first, second) = (
        case.file(1, &format!("/main/{}", table.path)),
        case.file(2, &format!("/main/{}", index.path)),
    );
    let plain = case.file(3, "/etc/passwd");
    let data =
        [&table.pages[0].bytes[..], &index.pages[0].bytes, &index.pages[1].bytes, &[0; 4096]]
            .concat();
    let mut insight = Insight::default();
    insight.push_at(8192, first, Some(0));
    insight.push_at(16384, second, Some(8192));
    insight.push_at(4096, plain, Some(0));
    insight.finish(&ClassTable::default());
    case.examine(&mut insight, 0, 28672, Some(&data));
    let parts: Vec<_> =
        insight.parts(28672).map(|part| (part.length, part.facts.database.part)).collect();
    assert_eq!(
        parts,
        [(8192, DatabasePart::Table), (16384, DatabasePart::Index), (4096, DatabasePart::None)]
    );
    assert_eq!(insight.facts.database.part, DatabasePart::Index, "most bytes");
    assert_eq!(insight.facts.inode, 2);
    // A new page of a relation is `other`; the rest of the file does not change.
    let other = case.request(first, Some(8192), 8192, 8192, Some(&[0; 8192]));
    assert_eq!(other.facts.database.part, DatabasePart::Other);
    // A long request is sampled.
    let long = table.pages[0].bytes.repeat(1024);
    let insight = case.request(first, Some(0), 0, 8 << 20, Some(&long));
    assert_eq!((insight.parts.len(), insight.facts.database.part), (0, DatabasePart::Table));
}

#[test]
fn logs_are_recognised_by_name_or_by_their_beginning() {
    let mut case = Case::new();
    let mut part = |path: &str, place, data: &[u8]| {
        let facts = case.file(path.len() as u64, path);
        case.request(facts, Some(place), 0, data.len() as u64, Some(data)).facts.database.part
    };
    assert_eq!(part("/mysql/ib_logfile0", 8192, &[7; 512]), DatabasePart::Log);
    let mut log = [0; 4096];
    assert_eq!(part("/srv/shop.db-wal", 0, &log), DatabasePart::None);
    log[..4].copy_from_slice(&0x377f_0683_u32.to_be_bytes());
    assert_eq!(part("/srv/shop.db-wal", 4096, &log), DatabasePart::None);
    assert_eq!(part("/srv/shop.db-wal", 0, &log), DatabasePart::Log);
    assert_eq!(part("/srv/shop.db-wal", 8192, &[1; 4096]), DatabasePart::Log);
}

#[test]
fn a_database_of_sqlite_is_one_as_long_as_it_begins_like_one() {
    let mut case = Case::new();
    let file = file("sqlite-3.53.4-4096", "shop.db");
    let facts = case.file(9, "/srv/any name");
    let mut system = |place, data: &[u8]| {
        let length = data.len() as u64;
        case.request(facts, place, 4096, length, Some(data)).facts.database.system
    };
    let (first, leaf) = (&file.pages[0].bytes, &file.pages[9].bytes);
    assert_eq!(system(Some(4096), leaf), DatabaseSystem::None);
    assert_eq!(system(Some(4096), first), DatabaseSystem::None, "not the beginning of the file");
    assert_eq!(system(Some(0), first), DatabaseSystem::Sqlite);
    assert_eq!(system(Some(4096), leaf), DatabaseSystem::Sqlite);
    assert_eq!(system(Some(0), leaf), DatabaseSystem::None);
    assert_eq!(system(Some(4096), leaf), DatabaseSystem::None);
}

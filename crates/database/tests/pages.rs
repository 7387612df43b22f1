//! The parts of real databases' pages are those that the databases themselves tell.

mod support;

use std::collections::HashMap;

use fathom_database::innodb::Tablespace;
use fathom_database::postgresql::Relation;
use fathom_database::sqlite::{FIRST, Header, Tree};
use fathom_database::{DatabasePage, DatabasePart, Named, fuzz_pages, of_path};

use support::{Captured, File, captures};

/// Compares a page with the truth; counts the compared pages by part.
fn compare(
    name: &str,
    page: &Captured,
    found: DatabasePage,
    counts: &mut HashMap<DatabasePart, u32>,
) {
    let Some((part, index)) = page.truth else { return };
    assert_eq!(found.part, part, "{name}, page {}", page.number);
    if part != DatabasePart::Other {
        assert_eq!(u64::from(found.index), index, "{name}, page {}", page.number);
    }
    *counts.entry(part).or_default() += 1;
}

/// The trees of pages, learned from the pages above the leaves in the order of the file, twice: a
/// page may come before the one that names it.
fn trees(header: Header, file: &File) -> HashMap<u32, Tree> {
    let mut trees = HashMap::from([(FIRST, Tree { part: DatabasePart::Table, root: FIRST })]);
    for page in file.pages.iter().chain(&file.pages).chain(&file.pages) {
        let number = page.number + 1;
        let Some(tree) = trees.get(&number).copied() else { continue };
        header.children(&page.bytes, number, |child| {
            trees.insert(child, tree);
        });
        if tree.root == FIRST {
            header.roots(&page.bytes, number, |tree| {
                trees.insert(tree.root, tree);
            });
        }
    }
    trees
}

#[test]
fn pages_of_sqlite_are_what_dbstat_says() {
    let captures = captures("sqlite-");
    assert!(captures.len() >= 6, "three versions with two page lengths");
    for (name, files) in captures {
        let [file] = &files[..] else { panic!("one file") };
        let header = Header::of(&file.pages[0].bytes[..]).expect("a database");
        assert_eq!(header.page_length as usize, file.pages[0].bytes.len(), "{name}");
        let trees = trees(header, file);
        let mut counts = HashMap::new();
        for page in &file.pages {
            let number = page.number + 1;
            let found = header.page(&page.bytes[..], number);
            compare(&name, page, header.judge(found, trees.get(&number).copied()), &mut counts);
        }
        for part in [DatabasePart::Table, DatabasePart::Index, DatabasePart::Other] {
            assert!(counts.get(&part).is_some_and(|count| *count >= 2), "{name}: {part:?}");
        }
    }
}

#[test]
fn pages_of_innodb_are_what_the_dictionary_says() {
    let captures: Vec<_> = captures("mariadb-").into_iter().chain(captures("mysql-")).collect();
    assert!(captures.len() >= 4, "four versions");
    for (name, files) in captures {
        let mut counts = HashMap::new();
        let (mut others, mut packed) = (0, 0);
        for file in &files {
            let path = format!("/var/lib/mysql/{}", file.path);
            let name = format!("{name}: {}", file.path);
            let is_system = match of_path(&path) {
                Some(Named::Tablespace { is_system }) => is_system,
                Some(Named::Whole(database)) => {
                    assert_eq!(database.part, DatabasePart::Log, "{path}");
                    continue;
                }
                other => panic!("{path}: {other:?}"),
            };
            // Pages may be seen in any order: the file's own, and backwards.
            for is_backwards in [false, true] {
                let mut pages: Vec<_> = file.pages.iter().collect();
                if is_backwards {
                    pages.reverse();
                }
                let mut tablespace = Tablespace { is_system, ..Tablespace::default() };
                for page in pages {
                    let length = page.bytes.len() as u64;
                    let place = Some(u64::from(page.number) * length);
                    let found = tablespace.page(&page.bytes[..], place);
                    assert_eq!(found, Tablespace { ..tablespace }.page(&page.bytes[..], place));
                    if file.path.contains("packed") {
                        // The first page tells that the others are compressed.
                        let is_told = !is_backwards || page.number == 0;
                        let expected = is_told.then_some(DatabasePage::OTHER);
                        assert_eq!(found, expected, "{name}: page {}", page.number);
                        packed += 1;
                        continue;
                    }
                    // The doublewrite buffer does not tell which file it is in.
                    let Some(found) = found else {
                        assert!(
                            is_system && tablespace.page_length == 0,
                            "{name}: page {}",
                            page.number
                        );
                        continue;
                    };
                    // Before the clustered index is known, or if there are several, pages above the
                    // leaves and small roots are `other`.
                    let is_open = matches!(tablespace.clustered, 0 | Tablespace::SEVERAL);
                    if found.part == DatabasePart::Other && is_open && found.index != 0 {
                        others += 1;
                        continue;
                    }
                    compare(&name, page, found, &mut counts);
                }
            }
        }
        assert!(others < 30, "{name}: {others}");
        assert!(packed >= 10, "{name}: {packed} compressed pages");
        for part in [DatabasePart::Table, DatabasePart::Index] {
            assert!(counts.get(&part).is_some_and(|count| *count >= 40), "{name}: {counts:?}");
        }
    }
}

#[test]
fn pages_of_postgresql_are_what_the_catalogue_says() {
    let captures = captures("postgresql-");
    assert!(captures.len() >= 4, "four versions");
    for (name, files) in captures {
        let mut counts = HashMap::new();
        for file in &files {
            let Some(Named::Relation(node)) = of_path(&format!("/main/{}", file.path)) else {
                panic!("{}", file.path)
            };
            for page in &file.pages {
                let found = Relation { node }.page(&page.bytes[..]).expect("a page");
                assert_eq!(found.length, 8192);
                compare(&format!("{name}: {}", file.path), page, found.page, &mut counts);
                // The second half of a page is not the beginning of one.
                assert_eq!(Relation { node }.page(&page.bytes[4096..]), None);
            }
        }
        assert!(
            counts[&DatabasePart::Table] >= 10 && counts[&DatabasePart::Index] >= 20,
            "{name}: {counts:?}"
        );
    }
}

#[test]
fn a_torn_page_of_innodb_is_no_page() {
    let captures = captures("mariadb-10.11.18");
    let pages = &captures["mariadb-10.11.18"][0].pages;
    let mut count = 0;
    for pair in pages.windows(2) {
        let (first, second) = (&pair[0].bytes, &pair[1].bytes);
        let is_same = first[16..24] == second[16..24];
        let torn = [&first[..8192], &second[8192..]].concat();
        let mut tablespace = Tablespace::default();
        assert!(tablespace.page(&first[..], None).is_some());
        if !is_same {
            count += 1;
            assert_eq!(tablespace.page(&torn[..], None), None);
        }
    }
    assert!(count > 20);
}

#[test]
fn an_encrypted_page_is_other() {
    let captures = captures("mariadb-10.11.18");
    let file = &captures["mariadb-10.11.18"][0];
    let page = file.pages.iter().find(|page| page.truth.is_some_and(|truth| truth.1 != 0)).unwrap();
    let mut bytes = page.bytes.clone();
    // The version of the key comes first in pages with full_crc32.
    bytes[3] = 1;
    assert_eq!(Tablespace::default().page(&bytes[..], None), Some(DatabasePage::OTHER));
    // Of a page that is encrypted without this mark, the first record is not readable.
    let mut bytes = page.bytes.clone();
    for byte in &mut bytes[38..16376] {
        *byte = byte.wrapping_mul(167).wrapping_add(13);
    }
    assert_eq!(Tablespace::default().page(&bytes[..], None), Some(DatabasePage::OTHER));
}

/// Damages captured pages by seed, and reads them.
fn mutate(seeds: std::ops::Range<u64>) {
    let files: Vec<File> = captures("").into_values().flatten().collect();
    let pages: Vec<&Captured> = files.iter().flat_map(|file| &file.pages).collect();
    for seed in seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = pages[random.usize(..pages.len())].bytes.clone();
        for _ in 0..random.usize(1..8) {
            // Most of what is read is at the beginning and at the end.
            let at = match random.u8(..4) {
                0 => bytes.len() - 1 - random.usize(..64.min(bytes.len())),
                1 => random.usize(..bytes.len()),
                _ => random.usize(..128.min(bytes.len())),
            };
            match random.u8(..6) {
                0 => bytes[at] = random.u8(..),
                1 => bytes[at] ^= 1 << random.u8(..8),
                2 => bytes[at] = if random.bool() { 0xff } else { 0 },
                3 => {
                    let other = &pages[random.usize(..pages.len())].bytes;
                    let end = bytes.len().min(other.len()).min(at + random.usize(1..300));
                    if at < end {
                        bytes[at..end].copy_from_slice(&other[at..end]);
                    }
                }
                4 => bytes.truncate(at.max(64)),
                _ => drop(bytes.drain(..at.min(bytes.len() - 64))),
            }
        }
        let result = std::panic::catch_unwind(|| fuzz_pages(&bytes));
        assert!(result.is_ok(), "seed {seed}");
    }
}

#[test]
fn damaged_pages_keep_the_promises() {
    mutate(0..20_000);
}

/// Part of `make soak`.
#[test]
#[ignore = "ten seconds"]
fn a_million_damaged_pages_keep_the_promises() {
    mutate(0..1_000_000);
}

//! Reads arbitrary bytes as pages: for the fuzzer, and for tests with seeded inputs.

use crate::innodb::Tablespace;
use crate::postgresql::Relation;
use crate::sqlite::{self, FIRST, Header, Tree};
use crate::{DatabasePage, DatabasePart, of_path};

/// The part of a path that is read.
const PATH_MAX: usize = 200;

/// Whether a page can be reported.
fn check(page: DatabasePage) {
    assert_ne!(page.part, DatabasePart::None, "an examined page has a part");
    assert!(page.part != DatabasePart::Log || page.index == 0, "logs have no number");
}

/// Reads `data` as a path and as pages of each system, and panics if a promise is broken.
pub fn fuzz_pages(data: &[u8]) {
    let path = String::from_utf8_lossy(&data[..data.len().min(PATH_MAX)]);
    of_path(&path);
    sqlite::is_log(data);
    let header = Header::of(data);
    if let Some(header) = header {
        assert!(header.page_length.is_power_of_two() && header.page_length >= 512);
    }
    let header = header.unwrap_or(Header { page_length: 4096, reserved: 0 });
    for number in [0, FIRST, 7] {
        let found = header.page(data, number);
        for part in [DatabasePart::Table, DatabasePart::Index] {
            check(header.judge(found, Some(Tree { part, root: 5 })));
        }
        check(header.judge(found, None));
        let mut count = 0;
        header.children(data, number, |_| count += 1);
        header.roots(data, number, |tree| {
            assert!(tree.root > FIRST);
            count += 1;
        });
        assert!(count <= data.len() / 2 + 1, "each cell has a place of two bytes");
    }
    for is_system in [false, true] {
        let mut tablespace = Tablespace { is_system, ..Tablespace::default() };
        for place in [None, Some(0), Some(16384)] {
            if let Some(page) = tablespace.page(data, place) {
                check(page);
                assert!(tablespace.page_length.is_power_of_two(), "{tablespace:?}");
            }
        }
    }
    let mut rest = data;
    while rest.len() >= 512 {
        if let Some(found) = (Relation { node: 9 }).page(rest) {
            check(found.page);
            assert!((1024..=32768).contains(&found.length), "{found:?}");
        }
        rest = &rest[512..];
    }
}

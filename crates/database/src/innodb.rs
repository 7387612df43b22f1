//! Pages of InnoDB, the storage of MySQL and MariaDB: the header of each page (`fil0fil.h`), and
//! that of pages of indexes (`page0page.h`).
//!
//! The rows of a table are in its clustered index. A leaf of another index has the latest
//! transaction that changed it (`PAGE_MAX_TRX_ID`); a leaf of a clustered index has not, because
//! its rows do. A page above the leaves tells only its index, so the clustered index of a
//! tablespace is learned from its leaves and from page 3.
//!
//! The beginning and the end of a page both have the low half of the page's LSN. So a torn page, or
//! a part of another, is detected without the checksum, which would take all bytes of the page.

use fathom_insight::DatabasePart;

use crate::{DatabasePage, PageBytes, be16, be32, be64, take};

/// The length of the header of a page, and of the header of an index page after it.
const HEADER: usize = 38;
const INDEX_HEADER: usize = 36;
/// The bytes that are read of the beginning of a page: the headers, the two addresses of segments
/// in a root, and the first record, whose text is the same in every page.
const HEAD: usize = 112;
/// The place of the text of the first record, in the compact format of records and in the old one.
const FIRST_COMPACT: usize = 99;
const FIRST_OLD: usize = 101;
const FIRST: &[u8; 8] = b"infimum\0";
/// The page sizes that a server can be configured with, in the order in which they are tried.
const SIZES: [u32; 5] = [16384, 4096, 8192, 32768, 65536];
/// The greatest height of a tree.
const LEVEL_MAX: u16 = 64;

const TYPE_UNDO: u16 = 2;
const TYPE_SPACE: u16 = 8;
const TYPE_INSTANT: u16 = 18;
const TYPE_RTREE: u16 = 17854;
const TYPE_INDEX: u16 = 17855;

/// What is known about a tablespace from its pages so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tablespace {
    /// Whether it is the system's own tablespace, whose number is 0. It also has the doublewrite
    /// buffer: pages of others.
    pub is_system: bool,
    /// The length of its pages; 0 until a page is recognised.
    pub page_length: u32,
    /// Its number, which each page has.
    pub space: u32,
    /// Whether its pages are compressed (`ROW_FORMAT=COMPRESSED`), which its first page tells.
    pub is_compressed: bool,
    /// The number of the clustered index; 0 until it is known, [`SEVERAL`](Self::SEVERAL) if there
    /// are several.
    pub clustered: u64,
}

impl Tablespace {
    /// The value of [`clustered`](Self::clustered) for a tablespace of several tables.
    pub const SEVERAL: u64 = u64::MAX;

    /// Examines the page that `bytes` begins with. `place` is its place in the file in bytes, if
    /// that is known. `None` if no page begins there.
    ///
    /// The first page that is recognised, all of which has to be there, determines the length and
    /// the tablespace of later ones.
    pub fn page(
        &mut self,
        bytes: &(impl PageBytes + ?Sized),
        place: Option<u64>,
    ) -> Option<DatabasePage> {
        let head: [u8; HEAD] = take(bytes, 0)?;
        let (number, lsn) = (be32(&head, 4), be64(&head, 16));
        let (kind, space) = (be16(&head, 24), be32(&head, 34));
        let is_placed =
            |length: u32| place.is_none_or(|place| place == u64::from(number) * u64::from(length));
        let is_known = self.page_length != 0;
        if self.is_compressed || !is_known {
            let length = if is_known { self.page_length } else { compressed_length(&head) };
            if length != 0 && is_placed(length) && (!is_known || space == self.space) {
                (self.page_length, self.space, self.is_compressed) = (length, space, true);
                return (lsn != 0 && is_type(kind)).then_some(DatabasePage::OTHER);
            }
        }
        if self.is_compressed {
            return None;
        }
        let length = if is_known {
            self.page_length
        } else {
            if (space == 0) != self.is_system {
                return None;
            }
            let is_page = |length: &u32| {
                let ending = ending(bytes, *length, lsn);
                is_placed(*length) && matches!(ending, Ending::Plain | Ending::Full)
            };
            SIZES.into_iter().find(is_page)?
        };
        let ending = ending(bytes, length, lsn);
        if lsn == 0 || ending == Ending::Torn || !is_type(kind) {
            return None;
        }
        if is_known && (space != self.space || !is_placed(length)) {
            // A copy in the doublewrite buffer.
            let part = if self.is_system { DatabasePart::Log } else { DatabasePart::Other };
            return Some(DatabasePage { part, index: 0 });
        }
        (self.page_length, self.space) = (length, space);
        let is_encrypted = match ending {
            // The first field has the version of the key, and not a checksum.
            Ending::Full => be32(&head, 0) != 0,
            _ => number != 0 && be32(&head, 26) != 0 && !self.is_system,
        };
        if is_encrypted {
            return Some(DatabasePage::OTHER);
        }
        Some(match kind {
            TYPE_INDEX | TYPE_INSTANT | TYPE_RTREE => self.index_page(&head, kind, number),
            TYPE_UNDO => DatabasePage { part: DatabasePart::Log, index: 0 },
            // Long values of rows. Only clustered indexes have some.
            10..=12 | 22..=29 => DatabasePage { part: DatabasePart::Table, index: 0 },
            _ => DatabasePage::OTHER,
        })
    }

    /// A page of an index.
    fn index_page(&mut self, head: &[u8; HEAD], kind: u16, number: u32) -> DatabasePage {
        let header = &head[HEADER..HEADER + INDEX_HEADER];
        let (slots, latest, level, index) =
            (be16(header, 0), be64(header, 18), be16(header, 26), be64(header, 28));
        let has_first = [FIRST_COMPACT, FIRST_OLD]
            .into_iter()
            .any(|at| head.get(at..at + FIRST.len()).is_some_and(|text| text == FIRST));
        // A root with changed columns uses the place of the text for other values. It is page 3.
        let is_changed = kind == TYPE_INSTANT && number == 3;
        let is_valid = slots != 0 && level < LEVEL_MAX && index != 0 && index != Self::SEVERAL;
        if !is_valid || !(has_first && kind != TYPE_INSTANT || is_changed) {
            return DatabasePage::OTHER;
        }
        let number_of_index = u32::try_from(index).unwrap_or(0);
        let page = |part| DatabasePage { part, index: number_of_index };
        if kind == TYPE_RTREE {
            return page(DatabasePart::Index);
        }
        // A root has the addresses of its segments. The root of a clustered index of MariaDB has
        // the next automatic number where other pages have the latest transaction.
        let is_root = head[HEADER + INDEX_HEADER..][..20].iter().any(|byte| *byte != 0);
        let is_sure_leaf = level == 0 && !is_root;
        let has_several = self.is_system || self.clustered == Self::SEVERAL;
        let is_first = !has_several && number == 3 && is_root;
        let is_clustered = if is_changed || is_first || is_sure_leaf && latest == 0 {
            let is_one = !has_several && (self.clustered == 0 || self.clustered == index);
            self.clustered = if is_one { index } else { Self::SEVERAL };
            Some(true)
        } else if is_sure_leaf {
            Some(false)
        } else if !has_several && self.clustered != 0 {
            Some(self.clustered == index)
        } else {
            (level == 0 && latest != 0).then_some(false)
        };
        match is_clustered {
            Some(true) => page(DatabasePart::Table),
            Some(false) => page(DatabasePart::Index),
            // Above the leaves or a small root, and the clustered index is not known.
            None => page(DatabasePart::Other),
        }
    }
}

/// The length of the pages of a compressed tablespace, from the head of its first page
/// (`fsp0types.h`); 0 if it is not the first page of one. Compressed pages do not end with their
/// LSN, so this is the only page that tells.
fn compressed_length(head: &[u8; HEAD]) -> u32 {
    let (number, kind, space) = (be32(head, 4), be16(head, 24), be32(head, 34));
    // The header of the tablespace repeats its number.
    if number != 0 || kind != TYPE_SPACE || space == 0 || be32(head, HEADER) != space {
        return 0;
    }
    let flags = be32(head, HEADER + 16);
    match flags >> 1 & 0xf {
        // Without bit 0 the flags have another format.
        size @ 1..=5 if flags & 1 != 0 => 512 << size,
        _ => 0,
    }
}

/// The end of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The checksum is at the beginning, the LSN in the last four bytes.
    Plain,
    /// `full_crc32` of MariaDB: the checksum is in the last four bytes, after the LSN.
    Full,
    /// The request does not have the end of the page.
    Absent,
    /// The end belongs to another state of the page, or to another page.
    Torn,
}

fn ending(bytes: &(impl PageBytes + ?Sized), length: u32, lsn: u64) -> Ending {
    let Some(words) = take::<8>(bytes, u64::from(length) - 8) else { return Ending::Absent };
    let low = lsn as u32;
    if be32(&words, 4) == low {
        Ending::Plain
    } else if be32(&words, 0) == low {
        Ending::Full
    } else {
        Ending::Torn
    }
}

/// Whether a number is the type of a page. 14 to 17, 34354 and 37401 are compressed or encrypted
/// pages.
fn is_type(kind: u16) -> bool {
    kind <= 30
        || matches!(kind, 17853..=17855 | 34354 | 37401)
        || kind & 0x8000 != 0 && kind & 0x7fff <= 255
}

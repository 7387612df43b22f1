//! Pages of SQLite: <https://www.sqlite.org/fileformat2.html>.
//!
//! The first byte of a page of a tree tells whether the tree is a table or an index, but not which.
//! The first page has the roots of all trees (or the root of a tree of them), and the pages above
//! the leaves have the numbers of their children. [`Header::roots`] and [`Header::children`] read
//! these, so that the tree of a page is known before the page itself is seen.

use fathom_insight::DatabasePart;

use crate::{DatabasePage, PageBytes, be16, be32, take};

/// The first bytes of a database.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// The length of the database's header, which precedes the page's header on the first page.
const HEADER: usize = 100;
/// The first bytes of a write-ahead log, without the lowest bit, and those of a journal.
const WAL_MAGIC: u32 = 0x377f_0682;
const JOURNAL_MAGIC: [u8; 8] = [0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7];

/// The number of the first page, which is the root of the tree of all trees.
pub const FIRST: u32 = 1;
/// The length of the beginning of a file by which a database is recognised.
pub const HEADER_LENGTH: u64 = HEADER as u64;

const INNER_INDEX: u8 = 2;
const INNER_TABLE: u8 = 5;
const LEAF_INDEX: u8 = 10;
const LEAF_TABLE: u8 = 13;

/// The greatest number of free bytes between cells that a page has.
const FRAGMENTS_MAX: u8 = 60;
/// The longest part of a schema's record that is read: the record's own header.
const RECORD_HEADER_MAX: usize = 64;

/// Whether a file begins like a write-ahead log or a journal.
pub fn is_log(bytes: &(impl PageBytes + ?Sized)) -> bool {
    take::<8>(bytes, 0)
        .is_some_and(|head| head == JOURNAL_MAGIC || be32(&head, 0) & !1 == WAL_MAGIC)
}

/// A tree of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Whether it is a table or an index. A table without row numbers has the pages of an index.
    pub part: DatabasePart,
    /// The number of its root page.
    pub root: u32,
}

/// A page of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreePage {
    /// Whether the page has the form of a table's or of an index's pages.
    pub part: DatabasePart,
    /// Whether it has no children.
    pub is_leaf: bool,
}

/// The properties of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The length of a page: a power of two from 512 to 65,536.
    pub page_length: u32,
    /// The bytes at the end of each page that are not used.
    pub reserved: u8,
}

impl Header {
    /// The properties of the database that `bytes` begins with; `None` if no database begins there.
    pub fn of(bytes: &(impl PageBytes + ?Sized)) -> Option<Self> {
        let head: [u8; HEADER] = take(bytes, 0)?;
        let page_length = match be16(&head, 16) {
            1 => 65536,
            length => u32::from(length),
        };
        let is_database = head.starts_with(MAGIC)
            && page_length.is_power_of_two()
            && page_length >= 512
            && (1..=2).contains(&head[18])
            && (1..=2).contains(&head[19])
            && head[20] <= 32
            && head[21..24] == [64, 32, 32];
        is_database.then_some(Self { page_length, reserved: head[20] })
    }

    /// The usable length of a page.
    fn usable(self) -> usize {
        self.page_length as usize - usize::from(self.reserved)
    }

    /// The place of the header of page `number`.
    fn start(number: u32) -> usize {
        if number == FIRST { HEADER } else { 0 }
    }

    /// Examines page `number` (0 if it is not known), with which `bytes` begins; `None` if it is
    /// not a page of a tree.
    pub fn page(self, bytes: &(impl PageBytes + ?Sized), number: u32) -> Option<TreePage> {
        let start = Self::start(number);
        let head: [u8; 14] = take(bytes, start as u64)?;
        let (part, is_leaf) = match head[0] {
            INNER_INDEX => (DatabasePart::Index, false),
            INNER_TABLE => (DatabasePart::Table, false),
            LEAF_INDEX => (DatabasePart::Index, true),
            LEAF_TABLE => (DatabasePart::Table, true),
            _ => return None,
        };
        let usable = self.usable();
        let (free, count) = (usize::from(be16(&head, 1)), usize::from(be16(&head, 3)));
        let content = match be16(&head, 5) {
            0 => 65536,
            place => usize::from(place),
        };
        let cells = start + if is_leaf { 8 } else { 12 };
        let end = cells + 2 * count;
        let is_valid = (free == 0 || (end..usable.saturating_sub(3)).contains(&free))
            && end <= content
            && content <= usable
            && head[7] <= FRAGMENTS_MAX
            && (is_leaf || be32(&head, 8) > FIRST);
        if !is_valid {
            return None;
        }
        // The first cell is within the content.
        if count > 0 {
            let place = take::<2>(bytes, cells as u64).map(|place| usize::from(be16(&place, 0)));
            if place.is_some_and(|place| place < content || place + 4 > usable) {
                return None;
            }
        }
        Some(TreePage { part, is_leaf })
    }

    /// What page `number` is, of which `tree` has been known before.
    pub fn judge(self, found: Option<TreePage>, tree: Option<Tree>) -> DatabasePage {
        let Some(found) = found else { return DatabasePage::OTHER };
        // A page that has left its tree may have got into another. A table without row numbers has
        // pages of an index.
        let tree = tree.filter(|tree| tree.part == found.part || found.part == DatabasePart::Index);
        let part = tree.map_or(found.part, |tree| tree.part);
        DatabasePage { part, index: tree.map_or(0, |tree| tree.root) }
    }

    /// Calls `visit` with the number of each child of page `number`, all of whose bytes are `page`.
    pub fn children(self, page: &[u8], number: u32, mut visit: impl FnMut(u32)) {
        let Some(TreePage { is_leaf: false, .. }) = self.page(page, number) else { return };
        self.cells(page, number, |cell| {
            if let Some(child) = cell.get(..4) {
                visit(be32(child, 0));
            }
        });
        if let Some(last) = page.get(Self::start(number) + 8..).and_then(|rest| rest.get(..4)) {
            visit(be32(last, 0));
        }
    }

    /// Calls `visit` with each tree that page `number` lists, all of whose bytes are `page`: a leaf
    /// of the tree of all trees.
    pub fn roots(self, page: &[u8], number: u32, mut visit: impl FnMut(Tree)) {
        let leaf = TreePage { part: DatabasePart::Table, is_leaf: true };
        if self.page(page, number) != Some(leaf) {
            return;
        }
        self.cells(page, number, |cell| {
            if let Some(tree) = tree(cell).filter(|tree| tree.root > FIRST) {
                visit(tree);
            }
        });
    }

    /// Calls `visit` with the bytes of a page from each cell on.
    fn cells<'a>(self, page: &'a [u8], number: u32, mut visit: impl FnMut(&'a [u8])) {
        let start = Self::start(number);
        let page = page.get(..self.usable()).unwrap_or(page);
        let Some(head) = page.get(start..).filter(|head| head.len() >= 12) else { return };
        let length = if matches!(head[0], INNER_INDEX | INNER_TABLE) { 12 } else { 8 };
        // No page has more cells than places for them.
        let count = usize::from(be16(head, 3));
        for place in head[length..].chunks_exact(2).take(count) {
            if let Some(cell) = page.get(usize::from(be16(place, 0))..) {
                visit(cell);
            }
        }
    }
}

/// A number of up to nine bytes, and the bytes after it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0_u64;
    for (place, byte) in bytes.iter().enumerate().take(9) {
        if place == 8 {
            return Some((value << 8 | u64::from(*byte), &bytes[9..]));
        }
        value = value << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[place + 1..]));
        }
    }
    None
}

/// The length of a value with a serial type.
fn length_of(serial_type: u64) -> Option<usize> {
    Some(match serial_type {
        0 | 8 | 9 => 0,
        1..=4 => serial_type as usize,
        5 => 6,
        6 | 7 => 8,
        12.. => usize::try_from((serial_type - 12) / 2).ok()?,
        _ => return None,
    })
}

/// The tree that a cell of the schema describes: `(type, name, tbl_name, rootpage, sql)`.
fn tree(cell: &[u8]) -> Option<Tree> {
    let (_, rest) = varint(cell)?;
    let (_, record) = varint(rest)?;
    let (header_length, mut header) = varint(record)?;
    let header_length = usize::try_from(header_length).ok()?;
    if header_length > RECORD_HEADER_MAX {
        return None;
    }
    let mut types = [0; 4];
    for serial_type in &mut types {
        (*serial_type, header) = varint(header)?;
    }
    let kind = record.get(header_length..)?.get(..length_of(types[0])?)?;
    let part = match kind {
        b"table" => DatabasePart::Table,
        b"index" => DatabasePart::Index,
        _ => return None,
    };
    let before = types[..3]
        .iter()
        .try_fold(header_length, |sum, serial_type| sum.checked_add(length_of(*serial_type)?))?;
    let root = match types[3] {
        0 | 7 | 12.. => return None,
        8 => 0,
        9 => 1,
        _ => {
            let bytes = record.get(before..)?.get(..length_of(types[3])?)?;
            bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        }
    };
    Some(Tree { part, root: u32::try_from(root).ok()? })
}

//! Pages of PostgreSQL (since 8.3): the header, and the end of the page, which an access method
//! uses for itself. The formats are those of `bufpage.h` and of the access methods' headers.

use fathom_insight::DatabasePart;

use crate::{DatabasePage, PageBytes, le16, take};

/// The length of a page's header.
const HEADER: u16 = 24;
/// The version of the layout, in the low byte of the field that also has the page's size.
const VERSION: u16 = 4;
/// The flags of a page that are defined (`PD_VALID_FLAG_BITS`).
const FLAGS: u16 = 7;

/// The largest cycle number of a B-tree page's last field (`MAX_BT_CYCLE_ID`). Other access methods
/// mark their pages there with numbers above it.
const CYCLE_MAX: u16 = 0xff7f;
const HASH: u16 = 0xff80;
const GIST: u16 = 0xff81;
const SPGIST: u16 = 0xff82;
const BLOOM: u16 = 0xff83;
const BRIN: [u16; 3] = [0xf091, 0xf092, 0xf093];
/// The first word of the special area of a sequence (`SEQ_MAGIC`).
const SEQUENCE: u16 = 0x1717;
/// The flags of a GIN page that are defined.
const GIN_FLAGS: u16 = 0x1ff;
/// The flags of a B-tree page that are defined.
const BTREE_FLAGS: u16 = 0x1ff;

/// A relation: a table, an index or a sequence, by the number of its file (its file node).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relation {
    /// The file node.
    pub node: u32,
}

/// A page that passed the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedPage {
    /// What it is.
    pub page: DatabasePage,
    /// Its length in bytes.
    pub length: u32,
}

impl Relation {
    /// Examines the page that `bytes` begins with; `None` if no page begins there, or if it is new
    /// and so still empty.
    pub fn page(self, bytes: &(impl PageBytes + ?Sized)) -> Option<CheckedPage> {
        let header: [u8; HEADER as usize] = take(bytes, 0)?;
        let [flags, lower, upper, special, size_version] =
            [10, 12, 14, 16, 18].map(|at| le16(&header, at));
        let length = size_version & 0xff00;
        let is_page = length.is_power_of_two()
            && (1024..=32768).contains(&length)
            && size_version & 0xff == VERSION
            && flags & !FLAGS == 0
            && (HEADER..=upper).contains(&lower)
            && upper <= special
            && special <= length
            && special % 8 == 0;
        if !is_page {
            return None;
        }
        let part = Self::part(bytes, special, length - special);
        let index = if part == DatabasePart::Other { 0 } else { self.node };
        Some(CheckedPage { page: DatabasePage { part, index }, length: length.into() })
    }

    /// The part of a page, from the area that its access method uses. A request may have only the
    /// beginning of a page; then the length of the area is the only evidence.
    fn part(bytes: &(impl PageBytes + ?Sized), special: u16, length: u16) -> DatabasePart {
        let area = u64::from(special);
        match length {
            0 => DatabasePart::Table,
            8 => match take::<8>(bytes, area) {
                Some(words) if le16(&words, 0) == SEQUENCE && le16(&words, 2) == 0 => {
                    DatabasePart::Other
                }
                Some(words) => {
                    let last = le16(&words, 6);
                    let is_known = last & !GIN_FLAGS == 0
                        || last == SPGIST
                        || last == BLOOM
                        || BRIN.contains(&last);
                    if is_known { DatabasePart::Index } else { DatabasePart::Other }
                }
                None => DatabasePart::Index,
            },
            16 => match take::<16>(bytes, area) {
                Some(words) => {
                    let (flags, last) = (le16(&words, 12), le16(&words, 14));
                    let is_btree = last <= CYCLE_MAX && flags & !BTREE_FLAGS == 0;
                    let is_known = is_btree || last == HASH || last == GIST;
                    if is_known { DatabasePart::Index } else { DatabasePart::Other }
                }
                None => DatabasePart::Index,
            },
            _ => DatabasePart::Other,
        }
    }
}

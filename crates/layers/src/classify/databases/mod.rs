//! Which part of a database the bytes of a request belong to.
//!
//! The content of a write is in its buffers when it comes; that of a read when it completes.
//! Before, the part of a read is the one that its pages had when they were last transferred
//! ([`memory`]); the tree of a page of SQLite is also known from the page above it.
//!
//! A part of a request is divided into parts by page. The request's own facts are those of most of
//! its bytes, as always.

mod files;
mod memory;

use fathom_block::{Buffers, Cursor, Facts, Insight, Part};
use fathom_database::postgresql::Relation;
use fathom_database::sqlite::{self, FIRST, Tree};
use fathom_database::{Database, DatabasePage, DatabasePart, DatabaseSystem, PageBytes};
use fathom_insight::{ClassTable, Names};

use files::{Content, FileCache, FileKey, Files};
use memory::PageMemory;

/// The most pages of a part of a request that are examined. If there are more, every n-th is, and
/// those after it count as the same.
const PAGES_MAX: u64 = 64;
/// The smallest unit of memory in a guest's request. Where the place in a file is not known, pages
/// are searched for at its multiples.
const BLOCK: u64 = 4096;
/// Marks the numbers of places on the disk, which are used where the place in the file is not
/// known.
const ON_DISK: u64 = 1 << 63;

/// What the queues of a disk know about databases.
pub(super) struct Databases {
    files: Files,
    pages: PageMemory,
}

impl Databases {
    pub(super) fn new() -> Self {
        Self { files: Files::default(), pages: PageMemory::new() }
    }
}

/// The request whose parts are examined.
pub(super) struct Subject<'a> {
    /// Its offset on the disk.
    pub offset: u64,
    pub length: u64,
    /// Its data, if the buffers have it.
    pub data: Option<&'a Buffers>,
}

/// Finds out the parts of databases for one queue.
pub(super) struct DatabaseQueue {
    cache: FileCache,
    /// The parts of a request, without those of databases.
    whole: Insight,
    /// The bytes of one page.
    page: Vec<u8>,
}

/// The bytes of a page in a request's buffers.
struct InBuffers<'a> {
    buffers: &'a Buffers,
    cursor: std::cell::Cell<Cursor>,
    start: u64,
    length: u64,
}

impl PageBytes for InBuffers<'_> {
    fn read(&self, at: u64, target: &mut [u8]) -> bool {
        let is_within = at.checked_add(target.len() as u64).is_some_and(|end| end <= self.length);
        let mut cursor = self.cursor.get();
        let is_read = is_within && self.buffers.peek(&mut cursor, self.start + at, target);
        self.cursor.set(cursor);
        is_read
    }
}

/// Whether bytes with these facts may belong to a database.
fn is_candidate(facts: &Facts) -> bool {
    facts.inode != 0 && facts.kind.is_content()
}

impl DatabaseQueue {
    pub(super) fn new() -> Self {
        Self { cache: FileCache::new(), whole: Insight::default(), page: Vec::new() }
    }

    /// Adds the parts of databases to `insight`.
    pub(super) fn examine(
        &mut self,
        databases: &Databases,
        names: &Names,
        table: &ClassTable,
        subject: &Subject<'_>,
        insight: &mut Insight,
    ) {
        let mut is_database = false;
        for part in insight.parts(subject.length) {
            if is_candidate(&part.facts) {
                is_database |= self.recognise(databases, names, subject, &part);
            }
        }
        if !is_database {
            return;
        }
        let mut whole = std::mem::take(&mut self.whole);
        whole.parts.clear();
        for part in insight.parts(subject.length) {
            let facts = Facts { database: Database::default(), ..part.facts };
            whole.push_at(part.length, facts, part.file_offset);
        }
        insight.parts.clear();
        for part in &whole.parts {
            let content = is_candidate(&part.facts)
                .then(|| self.cache.content(&part.facts, &databases.files, names))
                .flatten();
            match content {
                None | Some(Content::Plain | Content::SqliteLog) => {
                    insight.push_at(part.length, part.facts, part.file_offset);
                }
                Some(Content::Whole(database)) => {
                    let facts = Facts { database, ..part.facts };
                    insight.push_at(part.length, facts, part.file_offset);
                }
                Some(content) => self.divide(databases, subject, part, content, insight),
            }
        }
        whole.parts.shrink_to(PAGES_MAX as usize);
        self.whole = whole;
        insight.finish(table);
    }

    /// Whether a part of a request belongs to a database. Recognises one that begins with this
    /// part.
    fn recognise(
        &mut self,
        databases: &Databases,
        names: &Names,
        subject: &Subject<'_>,
        part: &Part,
    ) -> bool {
        let Some(content) = self.cache.content(&part.facts, &databases.files, names) else {
            return false;
        };
        let is_start = matches!(part.file_offset, None | Some(0));
        let bytes = match content {
            Content::Plain | Content::SqliteLog | Content::Sqlite(_) if is_start => {
                subject.data.map(|buffers| within(buffers, part.offset, part.length))
            }
            Content::Plain | Content::SqliteLog => return false,
            Content::Sqlite(_)
            | Content::InnoDb(_)
            | Content::PostgreSql(..)
            | Content::Whole(_) => return true,
        };
        let Some(bytes) = bytes else { return matches!(content, Content::Sqlite(_)) };
        let found = match content {
            Content::SqliteLog if sqlite::is_log(&bytes) => Content::Whole(Database {
                system: DatabaseSystem::Sqlite,
                part: DatabasePart::Log,
                index: 0,
            }),
            Content::SqliteLog => return false,
            Content::Plain
            | Content::Sqlite(_)
            | Content::InnoDb(_)
            | Content::PostgreSql(..)
            | Content::Whole(_) => match (sqlite::Header::of(&bytes), part.file_offset) {
                (Some(header), _) => Content::Sqlite(header),
                // It begins with something else now.
                (None, Some(0)) => Content::Plain,
                (None, _) => content,
            },
        };
        self.cache.learn(&part.facts, found, &databases.files);
        !matches!(found, Content::Plain)
    }

    /// Divides a part of a request by the pages of a database.
    fn divide(
        &mut self,
        databases: &Databases,
        subject: &Subject<'_>,
        part: &Part,
        content: Content,
        insight: &mut Insight,
    ) {
        let mut content = content;
        let system = match content {
            Content::Sqlite(_) => DatabaseSystem::Sqlite,
            Content::InnoDb(_) => DatabaseSystem::InnoDb,
            Content::Plain | Content::SqliteLog | Content::PostgreSql(..) | Content::Whole(_) => {
                DatabaseSystem::PostgreSql
            }
        };
        let file = FileKey::of(&part.facts).number();
        let mut length = page_length(content);
        if length == 0 {
            let found = subject.data.and_then(|buffers| first_page(buffers, part, &mut content));
            self.cache.learn(&part.facts, content, &databases.files);
            let Some(found) = found else {
                insight.push_at(part.length, part.facts, part.file_offset);
                return;
            };
            length = u64::from(found);
        }
        let stride = (part.length / length).div_ceil(PAGES_MAX).max(1);
        let mut done = 0;
        while done < part.length {
            let place = part.file_offset.map(|offset| offset + done);
            // The bytes of the page before this place.
            let skipped = place.map_or(0, |place| place % length);
            let number = place.map_or_else(
                || ON_DISK | (subject.offset + part.offset + done) / BLOCK.min(length),
                |place| place / length,
            );
            let rest = (length - skipped).min(part.length - done);
            let key = databases.pages.key(file, number);
            let known = databases.pages.get(key);
            let data = subject.data.filter(|_| skipped == 0);
            let page = match data {
                Some(buffers) => {
                    let bytes = within(buffers, part.offset + done, rest);
                    let found = self.judge(databases, file, &mut content, &bytes, place, known);
                    if found.is_some() || place.is_some() {
                        databases.pages.put(key, found.unwrap_or(DatabasePage::OTHER));
                    }
                    // Without its place, it may be the middle of a page.
                    found.map(|page| (page, rest)).or(place.map(|_| (DatabasePage::OTHER, rest)))
                }
                None => known.map(|page| (page, rest)),
            };
            let unknown = DatabasePage { part: DatabasePart::None, index: 0 };
            let step = if place.is_some() { rest } else { BLOCK.min(rest) };
            let (page, covered) = page.unwrap_or((unknown, step));
            let covered = (covered + (stride - 1) * length).min(part.length - done);
            let DatabasePage { part: database, index } = page;
            let database = Database { system, part: database, index };
            insight.push_at(covered, Facts { database, ..part.facts }, place);
            done += covered;
        }
        self.cache.learn(&part.facts, content, &databases.files);
    }

    /// What the page is that `bytes` begin with, at `place` of its file; `None` if it is none.
    fn judge(
        &mut self,
        databases: &Databases,
        file: u64,
        content: &mut Content,
        bytes: &InBuffers<'_>,
        place: Option<u64>,
        known: Option<DatabasePage>,
    ) -> Option<DatabasePage> {
        match content {
            Content::InnoDb(tablespace) => tablespace.page(bytes, place),
            Content::PostgreSql(node, _) => {
                Relation { node: *node }.page(bytes).map(|found| found.page)
            }
            Content::Sqlite(header) => {
                let length = u64::from(header.page_length);
                let number = place.map_or(0, |place| (place / length).saturating_add(1));
                let number = u32::try_from(number).unwrap_or(0);
                let found = header.page(bytes, number);
                if found.is_none() && place.is_none() {
                    return None;
                }
                let known = known.filter(|known| known.index != 0);
                let known = known.map(|known| Tree { part: known.part, root: known.index });
                let tree = if number == FIRST {
                    Some(Tree { part: DatabasePart::Table, root: FIRST })
                } else {
                    known
                };
                // The pages above the leaves, and those that list all trees, lead to others.
                if let (Some(page), Some(tree), true) = (found, tree, number != 0) {
                    if !page.is_leaf || tree.root == FIRST {
                        self.page.resize(header.page_length as usize, 0);
                        if bytes.read(0, &mut self.page) {
                            let put = |number: u32, tree: Tree| {
                                let number = u64::from(number).wrapping_sub(1);
                                let page = DatabasePage { part: tree.part, index: tree.root };
                                databases.pages.put(databases.pages.key(file, number), page);
                            };
                            header.children(&self.page, number, |child| put(child, tree));
                            if tree.root == FIRST {
                                header.roots(&self.page, number, |tree| put(tree.root, tree));
                            }
                        }
                    }
                }
                Some(header.judge(found, tree))
            }
            Content::Plain | Content::SqliteLog | Content::Whole(_) => None,
        }
    }
}

/// The bytes of a part of a request.
fn within(buffers: &Buffers, start: u64, length: u64) -> InBuffers<'_> {
    InBuffers { buffers, cursor: std::cell::Cell::default(), start, length }
}

/// The length of a database's pages; 0 if it is not known.
fn page_length(content: Content) -> u64 {
    u64::from(match content {
        Content::Sqlite(header) => header.page_length,
        Content::InnoDb(tablespace) => tablespace.page_length,
        Content::PostgreSql(_, length) => length,
        Content::Plain | Content::SqliteLog | Content::Whole(_) => 0,
    })
}

/// Searches the beginning of a part of a request for a page from which the length of pages is
/// known.
fn first_page(buffers: &Buffers, part: &Part, content: &mut Content) -> Option<u32> {
    for block in 0..(part.length / BLOCK).min(16) {
        let done = block * BLOCK;
        let bytes = within(buffers, part.offset + done, part.length - done);
        let place = part.file_offset.map(|offset| offset + done);
        match content {
            Content::InnoDb(tablespace) => {
                if tablespace.page(&bytes, place).is_some() {
                    return Some(tablespace.page_length);
                }
            }
            Content::PostgreSql(node, length) => {
                if let Some(found) = (Relation { node: *node }).page(&bytes) {
                    let is_placed = place.is_none_or(|place| place % u64::from(found.length) == 0);
                    if is_placed {
                        *length = found.length;
                        return Some(found.length);
                    }
                }
            }
            Content::Plain | Content::SqliteLog | Content::Sqlite(_) | Content::Whole(_) => {
                return None;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;

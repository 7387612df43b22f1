//! The files of a disk that are databases.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::Facts;
use fathom_database::innodb::Tablespace;
use fathom_database::{Database, Named, of_path, sqlite};
use fathom_insight::{Name, Names};
use parking_lot::Mutex;

/// The most files that the queues of a disk share.
const FILES_MAX: usize = 4096;
/// The number of files in a queue's cache; a power of two.
const CACHE: usize = 512;

/// What a file is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Content {
    /// No database, as far as is known. A database of SQLite is recognised by its first page.
    #[default]
    Plain,
    /// A file that is a log of SQLite if it begins like one.
    SqliteLog,
    Sqlite(sqlite::Header),
    InnoDb(Tablespace),
    /// A relation's file node, and the length of its pages; 0 until one has passed the checks.
    PostgreSql(u32, u32),
    /// All bytes belong to one part.
    Whole(Database),
}

impl Content {
    fn of_path(path: &str) -> Self {
        match of_path(path) {
            None => Self::Plain,
            Some(Named::Whole(database)) => Self::Whole(database),
            Some(Named::Tablespace { is_system }) => {
                Self::InnoDb(Tablespace { is_system, ..Tablespace::default() })
            }
            Some(Named::Relation(node)) => Self::PostgreSql(node, 0),
            Some(Named::SqliteLog) => Self::SqliteLog,
        }
    }
}

/// A file: its number and the device of its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct FileKey {
    inode: u64,
    device: Name,
}

impl FileKey {
    pub(super) fn of(facts: &Facts) -> Self {
        Self { inode: facts.inode, device: facts.device }
    }

    /// The file as one number.
    pub(super) fn number(self) -> u64 {
        super::memory::mix(self.inode, u64::from(self.device.0) | 1 << 32)
    }
}

/// What the queues of a disk have learned about files from their content.
#[derive(Default)]
pub(super) struct Files {
    /// Increases with each change, so that queues forget what they have cached.
    generation: AtomicU64,
    learned: Mutex<Learned>,
}

#[derive(Default)]
struct Learned {
    files: HashMap<FileKey, (Name, Content)>,
    /// The files in the order in which they are removed.
    order: VecDeque<FileKey>,
}

/// A file in a queue's cache.
#[derive(Clone, Copy, Default)]
struct Cached {
    key: FileKey,
    path: Name,
    generation: u64,
    content: Content,
    /// Whether the queues do not know the content yet, because the lock was held.
    is_news: bool,
}

/// The files of a queue's latest requests.
pub(super) struct FileCache {
    files: Box<[Cached]>,
}

impl FileCache {
    pub(super) fn new() -> Self {
        // No file has the generation.
        let cached = Cached { generation: u64::MAX, ..Cached::default() };
        Self { files: vec![cached; CACHE].into() }
    }

    /// What the file with these facts is; `None` while the queues' list is locked.
    #[inline]
    pub(super) fn content(
        &mut self,
        facts: &Facts,
        files: &Files,
        names: &Names,
    ) -> Option<Content> {
        let key = FileKey::of(facts);
        let cached = &mut self.files[key.number() as usize % CACHE];
        let generation = files.generation.load(Ordering::Acquire);
        let is_current = cached.key == key && cached.path == facts.path;
        if !is_current || cached.generation != generation || cached.is_news {
            refresh(cached, is_current, key, facts.path, files, names)?;
        }
        Some(cached.content)
    }

    /// Sets what the file is, for all queues.
    pub(super) fn learn(&mut self, facts: &Facts, content: Content, files: &Files) {
        let key = FileKey::of(facts);
        let cached = &mut self.files[key.number() as usize % CACHE];
        if cached.key == key && cached.content != content {
            cached.content = content;
            cached.is_news = true;
            publish(cached, files);
        }
    }
}

/// Reads again what a file is.
#[cold]
fn refresh(
    cached: &mut Cached,
    is_current: bool,
    key: FileKey,
    path: Name,
    files: &Files,
    names: &Names,
) -> Option<()> {
    if is_current && cached.is_news {
        publish(cached, files);
        return Some(());
    }
    let (generation, learned) = {
        let learned = files.learned.try_lock()?;
        (files.generation.load(Ordering::Acquire), learned.files.get(&key).copied())
    };
    // A file with another path is another file, or has another purpose.
    let content = learned.filter(|learned| learned.0 == path).map(|learned| learned.1);
    let content = content.unwrap_or_else(|| {
        let text = names.text(path);
        text.map_or(Content::Plain, |text| Content::of_path(&text))
    });
    *cached = Cached { key, path, generation, content, is_news: false };
    Some(())
}

/// Makes what a file is known to all queues, unless the list is locked.
#[cold]
fn publish(cached: &mut Cached, files: &Files) {
    let Some(mut learned) = files.learned.try_lock() else { return };
    let learned = &mut *learned;
    if learned.files.insert(cached.key, (cached.path, cached.content)).is_none() {
        learned.order.push_back(cached.key);
        if learned.order.len() > FILES_MAX {
            let removed = learned.order.pop_front();
            removed.and_then(|removed| learned.files.remove(&removed));
        }
    }
    cached.generation = 1 + files.generation.fetch_add(1, Ordering::AcqRel);
    cached.is_news = false;
}

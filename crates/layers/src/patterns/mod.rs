//! Recognises copies and encryption of files by their content.
//!
//! Read [`PatternsOptions`] first. The layer observes: it needs the insights of `classify` above
//! it, and the bytes of files as they are read and written. It has a bounded table of files, with
//! what their content looks like (`files`, `content`, `formats`), and fingerprints of what was read
//! and written lately (`copies`). Copies that system calls make are reported to it
//! (`finder::calls`). Single blocks are never judged: a verdict is about a file, and needs a sign
//! besides random bytes, because of the bytes alone nobody can tell encryption from compression.
//! What is written into a file that is being encrypted is marked as new content
//! (`Insight::is_unique`), so that no back end looks for equal blocks.
//! `docs/patterns.md` has the rules.
//!
//! The paper, *Improving Virtualized Storage Performance with Sky* (Arulraj, Arpaci-Dusseau,
//! Arpaci-Dusseau), has both insights in section 3.5, by the names of programs and files.

mod alarm;
mod content;
mod copies;
mod files;
mod finder;
mod formats;
mod plain;
#[cfg(test)]
mod tests;

use std::hash::BuildHasher;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_block::{
    Capabilities, Figure, Layer, LayerPart, LayerReport, Observer, ObserverPosition, OpenContext,
    Operation, Outcome, Request,
};
use fathom_failure::Failure;
use fathom_insight::pattern::Pattern;
use fathom_insight::{Facts, Names};
use fathom_options::{Bytes, Check, Key, Nanoseconds};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use alarm::{Actor, EncryptionInProgress};
pub use finder::{CopyCall, CopyRecord, EncryptedRecord, PatternCounts, Subject};

use crate::kind::{LayerContext, LayerOptions, Rank};
use finder::{Content, Finder, is_examined};

/// The bytes that are examined at a time.
const CHUNK: usize = 128 << 10;
/// The smallest and the greatest table of fingerprints, in bytes.
const MEMORY_MIN: u64 = 64 << 10;
/// See [`MEMORY_MIN`].
const MEMORY_MAX: u64 = 4 << 30;

/// The configuration of the layer `patterns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PatternsOptions {
    /// Whether copies are recognised.
    pub copies: bool,
    /// Whether encryption is recognised.
    pub encryption: bool,
    /// The memory for fingerprints of content.
    pub memory: Bytes,
    /// The encrypted files that are encryption in progress.
    pub alarm_files: u64,
    /// The time within which they are encrypted.
    pub alarm_time: Nanoseconds,
}

impl Default for PatternsOptions {
    fn default() -> Self {
        Self {
            copies: true,
            encryption: true,
            memory: Bytes(8 << 20),
            alarm_files: 5,
            alarm_time: Nanoseconds(60_000_000_000),
        }
    }
}

impl LayerOptions for PatternsOptions {
    const KIND: &'static str = "patterns";
    const RANK: Rank = Rank::Pattern;
    const MEANING: &'static str = "recognises copies and encryption of a guest's files by their content ([patterns](patterns.md))";
    const KEYS: &'static [Key] = &[
        Key::new("copies", "true", "recognises copies of files"),
        Key::new("encryption", "true", "recognises encrypted files"),
        Key::new(
            "memory",
            "\"8MiB\"",
            "the memory for fingerprints of what was read and written lately: 4 MiB for each GiB",
        ),
        Key::new(
            "alarm_files",
            "5",
            "so many files that one process or container encrypts are encryption in progress, \
             which is a problem of the disk",
        ),
        Key::new(
            "alarm_time",
            "\"60s\"",
            "the time within which they are encrypted, and after which the problem ends",
        ),
    ];
    const ONCE: Option<&'static str> = Some("it would examine everything twice");
    const BENEATH: Option<&'static str> =
        Some("it does not see requests that the layers above hold or answer");

    fn check(&self, check: &mut Check<'_>) {
        if !(MEMORY_MIN..=MEMORY_MAX).contains(&self.memory.0) {
            let message = format!("`memory` is {}", self.memory);
            check.problem("memory", message, "use a size from 64KiB to 4GiB");
        }
        if self.alarm_files == 0 {
            check.problem("alarm_files", "`alarm_files` is 0", "use 1 or more");
        }
        if self.alarm_time.0 == 0 {
            check.problem("alarm_time", "`alarm_time` is 0", "use a time such as \"60s\"");
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        Ok(Some(Arc::new(Patterns::new(Arc::clone(context.names), *self))))
    }
}

struct Shared {
    finder: Mutex<Finder>,
    /// Queues that ended their examination because of a bug.
    failures: AtomicU64,
    names: Arc<Names>,
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The layer that recognises patterns.
#[derive(Clone)]
pub struct Patterns {
    shared: Arc<Shared>,
}

/// What a disk's layer has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PatternsSnapshot {
    /// The counts since the layer was made.
    pub counts: PatternCounts,
    /// The last copies, the newest first.
    pub copies: Vec<CopyRecord>,
    /// The last files that are encrypted or have random content, the newest first.
    pub encrypted: Vec<EncryptedRecord>,
    /// Who encrypts many files now.
    pub in_progress: Vec<EncryptionInProgress>,
}

impl Patterns {
    /// A layer with empty tables. `names` has the texts of the insights.
    pub fn new(names: Arc<Names>, options: PatternsOptions) -> Self {
        let seed = hashbrown::DefaultHashBuilder::default().hash_one(0_u64);
        let finder = Mutex::new(Finder::new(Arc::clone(&names), options, seed));
        let (failures, wake) = (AtomicU64::new(0), OnceLock::new());
        let shared = Shared { finder, failures, names, wake };
        Self { shared: Arc::new(shared) }
    }

    /// The layer, if it is one of this kind.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// What was found, at `now_ns` of the stack's clock.
    pub fn snapshot(&self, now_ns: u64) -> PatternsSnapshot {
        let mut finder = self.shared.finder.lock();
        finder.report_all(now_ns);
        let (copies, encrypted) = finder.records();
        let in_progress = finder.in_progress(now_ns);
        PatternsSnapshot { counts: finder.counts(), copies, encrypted, in_progress }
    }

    /// Examines content that is not of a request, at `offset` of a file, at `now_ns`: for
    /// evaluations with files of the host.
    pub fn examine(&self, facts: &Facts, offset: u64, data: &[u8], is_write: bool, now_ns: u64) {
        let content = Content { facts, offset, is_in_file: true, data, now_ns };
        let mut finder = self.shared.finder.lock();
        if is_write {
            finder.write(content);
        } else {
            finder.read(content);
        }
    }

    /// Notes a copy that a system call has made, at `now_ns` of the stack's clock.
    pub fn note_call(&self, call: &CopyCall<'_>, now_ns: u64) {
        self.shared.finder.lock().call(call, now_ns);
    }

    /// Who encrypts many files, at `now_ns` of the stack's clock.
    pub fn in_progress(&self, now_ns: u64) -> Vec<EncryptionInProgress> {
        self.shared.finder.lock().in_progress(now_ns)
    }

    /// The texts of the insights.
    pub fn names(&self) -> &Arc<Names> {
        &self.shared.names
    }

    /// A number that no other layer has while this one exists.
    pub fn key(&self) -> u64 {
        Arc::as_ptr(&self.shared) as u64
    }

    /// Calls `wake` whenever encryption in progress begins, in the thread of a queue.
    pub fn on_alarm(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.wake.set(Box::new(wake));
    }

    /// Begins to collect events; `None` while there is a reader.
    pub fn attach(&self) -> Option<PatternReader> {
        let mut finder = self.shared.finder.lock();
        if finder.has_reader {
            return None;
        }
        finder.ring.clear();
        finder.has_reader = true;
        let dropped_before = finder.ring.dropped();
        drop(finder);
        Some(PatternReader { shared: Arc::clone(&self.shared), dropped_before })
    }
}

/// The only reader of a layer's events. Dropping it ends the collection.
pub struct PatternReader {
    shared: Arc<Shared>,
    dropped_before: u64,
}

impl PatternReader {
    /// Moves all events into `events`, in order of time. `now_ns` is the time, of the stack's
    /// clock.
    pub fn drain(&mut self, events: &mut Vec<Pattern>, now_ns: u64) {
        let mut finder = self.shared.finder.lock();
        finder.report_old(now_ns);
        finder.ring.drain(events);
    }

    /// The number of events dropped because of a full ring since the reader was attached.
    pub fn dropped(&self) -> u64 {
        self.shared.finder.lock().ring.dropped() - self.dropped_before
    }
}

impl Drop for PatternReader {
    fn drop(&mut self) {
        self.shared.finder.lock().has_reader = false;
    }
}

impl Layer for Patterns {
    fn name(&self) -> &'static str {
        PatternsOptions::KIND
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let counts = self.shared.finder.lock().counts();
        let failures = self.shared.failures.load(Ordering::Relaxed);
        LayerReport { figures: figures(&counts, failures), problems: Vec::new() }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let shared = Arc::clone(&self.shared);
        Ok(LayerPart::observer(PatternsQueue { shared, data: Vec::new(), has_failed: false }))
    }
}

fn figures(counts: &PatternCounts, failures: u64) -> Vec<Figure> {
    vec![
        Figure::counter(
            "examined_bytes_total",
            "Bytes of files whose content was examined.",
            counts.examined_bytes,
        ),
        Figure::counter(
            "transformed_bytes_total",
            "Bytes of files that the guest encrypts or compresses itself, and which were not examined.",
            counts.transformed_bytes,
        ),
        Figure::counter("copies_total", "Copies of files.", counts.copies),
        Figure::counter("copied_bytes_total", "Bytes of these copies.", counts.copied_bytes),
        Figure::counter(
            "encrypted_files_total",
            "Files that were encrypted.",
            counts.encrypted_files,
        ),
        Figure::counter(
            "random_files_total",
            "Files with random content that nothing else says to be encrypted.",
            counts.random_files,
        ),
        Figure::gauge("memory_bytes", "Memory of the tables.", counts.memory_bytes),
        Figure::counter(
            "failures_total",
            "Queues that ended the examination because of a bug.",
            failures,
        ),
    ]
}

struct PatternsQueue {
    shared: Arc<Shared>,
    /// A copy of the bytes that are examined: a guest may change its own meanwhile.
    data: Vec<u8>,
    has_failed: bool,
}

impl PatternsQueue {
    /// Examines the content of a request. Returns whether all of it is written, and is new
    /// ciphertext or structures of the file system.
    fn examine(&mut self, request: &Request, now_ns: u64) -> bool {
        let is_write = match request.operation {
            Operation::Write => true,
            Operation::Read => false,
            Operation::Flush
            | Operation::Discard
            | Operation::WriteZeroes
            | Operation::GetId
            | Operation::Extents => return false,
        };
        let is_known = request.insight.parts(request.length).any(|part| is_examined(&part.facts));
        if self.has_failed || !is_known {
            return false;
        }
        let mut is_ciphertext = is_write;
        let data = &mut self.data;
        data.resize(CHUNK, 0);
        let examined = catch_unwind(AssertUnwindSafe(|| {
            let mut finder = self.shared.finder.lock();
            for part in request.insight.parts(request.length) {
                if !is_examined(&part.facts) {
                    is_ciphertext &= part.facts.kind.is_structure();
                    continue;
                }
                if part.facts.is_transformed {
                    finder.transformed(part.length);
                    // Btrfs compresses equal content to equal bytes.
                    let file_system = self.shared.names.text(part.facts.file_system);
                    is_ciphertext &= file_system.as_deref() != Some("btrfs");
                    continue;
                }
                let mut done = 0;
                while done < part.length {
                    let length = (part.length - done).min(CHUNK as u64) as usize;
                    let copied = request.buffers.copy_to(part.offset + done, &mut data[..length]);
                    if copied == 0 {
                        is_ciphertext = false;
                        break;
                    }
                    let start = part.file_offset.unwrap_or(request.offset + part.offset);
                    let content = Content {
                        facts: &part.facts,
                        offset: start.saturating_add(done),
                        is_in_file: part.file_offset.is_some(),
                        data: &data[..copied],
                        now_ns,
                    };
                    if is_write {
                        is_ciphertext &= finder.write(content);
                    } else {
                        finder.read(content);
                    }
                    done += copied as u64;
                }
            }
            std::mem::take(&mut finder.has_begun)
        }));
        if let Ok(true) = examined {
            if let Some(wake) = self.shared.wake.get() {
                wake();
            }
        }
        if examined.is_err() {
            self.has_failed = true;
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
        }
        is_ciphertext && examined.is_ok()
    }
}

impl Observer for PatternsQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        for request in requests {
            if request.operation == Operation::Write {
                request.insight.is_unique |= self.examine(request, place.round_ns());
            }
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        for (request, outcome) in requests {
            if request.operation == Operation::Read && outcome.is_ok() {
                self.examine(request, place.round_ns());
            }
        }
    }
}

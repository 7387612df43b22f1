//! Finds patterns in the content of files, as it is read and written.

mod calls;
mod copying;

use std::collections::VecDeque;
use std::sync::Arc;

use fathom_insight::pattern::{Evidence, Pattern, PatternKind};
use fathom_insight::{Facts, Kind, Name, Names, Ring};

use super::PatternsOptions;
use super::alarm::{Actor, Alarms, EncryptionInProgress, Threshold};
use super::content::{Frequencies, Look, PAGE};
use super::copies::{Fingerprints, Run};
use super::files::{File, FileId, Files, Process, Sample, Verdict, parts_of};
use super::formats::{Start, is_unmarked, promises_format};
use super::plain::Plains;

pub use calls::CopyCall;
pub(super) use calls::Settled;

/// The bytes of a sample, if the file has as many.
const SAMPLE: u64 = 256 << 10;
/// The most samples that a verdict needs.
const SAMPLES: u64 = 4;
/// The bytes that are written into a file until only some pages are examined.
const EVERY: u64 = SAMPLE * SAMPLES;
/// Then one page of so many is.
const STRIDE: u64 = 16;
/// The least size of a file about which there is a verdict by its content, in bytes.
const SIZE_MIN: u64 = PAGE as u64;
/// The least size of a file that is reported because its content is random, and for nothing else.
const RANDOM_MIN: u64 = SAMPLE;
/// The most copies and files that are kept for a report.
const RECORDS: usize = 256;
/// The bytes of a copy after which it is reported again.
const REPORT_BYTES: u64 = 16 << 20;
/// The age after which the rest of a copy is reported, in nanoseconds.
const REPORT_NS: u64 = 1_000_000_000;
/// The capacity of the ring of events.
const RING_EVENTS: usize = 4096;

/// A copy that was recognised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyRecord {
    /// The times of its first and last page, in nanoseconds of the stack's clock.
    pub begun_ns: u64,
    /// See [`begun_ns`](Self::begun_ns).
    pub last_ns: u64,
    /// The file that was written.
    pub target: Subject,
    /// The file with the same content.
    pub source: Subject,
    /// The bytes that were found.
    pub bytes: u64,
    /// Who copied.
    pub actor: Actor,
    /// [`Evidence::Call`] if a system call has copied it; `None` if only the content says so.
    pub evidence: Option<Evidence>,
}

/// A file in a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// The path.
    pub path: Name,
    /// The type of the file system.
    pub file_system: Name,
    /// The block device of the file system.
    pub device: Name,
    /// The file's number.
    pub inode: u64,
    /// The size in bytes.
    pub size: u64,
}

impl Subject {
    /// Whether both are the same file with the same path. Its size may have changed.
    fn is_same(&self, other: &Self) -> bool {
        Self { size: 0, ..*self } == Self { size: 0, ..*other }
    }

    fn of(facts: &Facts) -> Self {
        let Facts { path, file_system, device, inode, file_size, .. } = *facts;
        Self { path, file_system, device, inode, size: file_size }
    }
}

/// A file that was encrypted, or has random content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncryptedRecord {
    /// The time of the verdict, in nanoseconds of the stack's clock.
    pub time_ns: u64,
    /// The file.
    pub file: Subject,
    /// Why it is considered encrypted; `None` if it only has random content.
    pub evidence: Option<Evidence>,
    /// The path of the file that was encrypted, if it is known.
    pub source_path: Name,
    /// Who encrypted it.
    pub actor: Actor,
}

/// The counts of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatternCounts {
    /// The bytes of files that were examined, read and written.
    pub examined_bytes: u64,
    /// Copies.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Encrypted files.
    pub encrypted_files: u64,
    /// Files with random content that nothing else says to be encrypted.
    pub random_files: u64,
    /// The bytes of files that the guest encrypts or compresses itself, and which were therefore
    /// not examined.
    pub transformed_bytes: u64,
    /// The memory of the tables, in bytes.
    pub memory_bytes: u64,
}

/// What is found, for the queues of a disk together.
pub(super) struct Finder {
    names: Arc<Names>,
    options: PatternsOptions,
    files: Files,
    prints: Fingerprints,
    plains: Plains,
    alarms: Alarms,
    counts: PatternCounts,
    copies: VecDeque<(FileId, CopyRecord)>,
    encrypted: VecDeque<EncryptedRecord>,
    /// The files with bytes of copies that were not reported, and since when.
    unreported: VecDeque<(FileId, u64)>,
    pub ring: Ring<Pattern>,
    pub has_reader: bool,
    /// Whether encryption in progress has begun since this was last cleared.
    pub has_begun: bool,
}

/// Bytes of a file.
#[derive(Clone, Copy)]
pub(super) struct Content<'d> {
    pub facts: &'d Facts,
    /// Their place in the file; of direct I/O, that on the disk.
    pub offset: u64,
    /// Whether the place is one in the file.
    pub is_in_file: bool,
    pub data: &'d [u8],
    pub now_ns: u64,
}

/// Whether the content of bytes with these facts is examined.
pub(super) fn is_examined(facts: &Facts) -> bool {
    facts.inode != 0 && matches!(facts.kind, Kind::Data | Kind::Direct)
}

impl Finder {
    pub fn new(names: Arc<Names>, options: PatternsOptions, seed: u64) -> Self {
        let (files, plains) = (Files::new(), Plains::new());
        let memory = if options.copies { options.memory.0 } else { 0 };
        let prints = Fingerprints::new(memory, seed);
        let memory_bytes = files.memory() + prints.memory() + plains.memory();
        let counts = PatternCounts { memory_bytes, ..PatternCounts::default() };
        Self {
            names,
            options,
            files,
            prints,
            plains,
            alarms: Alarms::default(),
            counts,
            copies: VecDeque::new(),
            encrypted: VecDeque::new(),
            unreported: VecDeque::new(),
            ring: Ring::new(RING_EVENTS),
            has_reader: false,
            has_begun: false,
        }
    }

    fn threshold(&self) -> Threshold {
        Threshold { files: self.options.alarm_files, time_ns: self.options.alarm_time.0 }
    }

    pub fn counts(&self) -> PatternCounts {
        self.counts
    }

    /// Notes bytes that the guest transforms itself.
    pub fn transformed(&mut self, length: u64) {
        self.counts.transformed_bytes += length;
    }

    /// The copies and the encrypted files, the newest first.
    pub fn records(&self) -> (Vec<CopyRecord>, Vec<EncryptedRecord>) {
        let copies = self.copies.iter().rev().map(|(_, copy)| *copy).collect();
        (copies, self.encrypted.iter().rev().copied().collect())
    }

    /// The states in which files are being encrypted.
    pub fn in_progress(&mut self, now_ns: u64) -> Vec<EncryptionInProgress> {
        let threshold = self.threshold();
        self.alarms.states(now_ns, threshold).to_vec()
    }

    /// The file of some content, which is added if it is new.
    fn file(&mut self, facts: &Facts, now_ns: u64) -> FileId {
        let (id, is_new) = self.files.find(facts);
        let mut is_other = false;
        let Some(file) = self.files.get_mut(id) else { return id };
        if facts.cgroup.is_some() {
            file.cgroup = facts.cgroup;
        }
        file.size = facts.file_size;
        if is_new {
            if let Some(path) = self.names.text(facts.path) {
                let (folder, stem) = parts_of(&path);
                if file.path.is_some() && (file.folder, file.stem) != (folder, stem) {
                    // The number of a deleted file was used again, or a file was moved. What was
                    // known may be another file's.
                    file.is_plain = false;
                    file.verdict = Verdict::None;
                    file.sample = Sample::default();
                    is_other = true;
                    file.start = Start::Unknown;
                }
                (file.folder, file.stem, file.path) = (folder, stem, facts.path);
            }
        }
        if is_other {
            self.report_copy(id, now_ns);
            if let Some(file) = self.files.get_mut(id) {
                file.run = Run::default();
            }
        }
        id
    }

    /// Examines content that was read.
    pub fn read(&mut self, content: Content<'_>) {
        let id = self.file(content.facts, content.now_ns);
        self.counts.examined_bytes += content.data.len() as u64;
        let Some(file) = self.files.get_mut(id) else { return };
        let process = Process::of(content.facts);
        if process.is_known() {
            file.reader = process;
        }
        if self.options.encryption {
            self.look_at_first_page(id, content);
        }
        if self.options.copies {
            self.add_prints(id, content);
        }
    }

    /// Notes what the first page of a part of a file says.
    fn look_at_first_page(&mut self, id: FileId, content: Content<'_>) {
        let Some(file) = self.files.get_mut(id) else { return };
        let is_start = content.is_in_file && content.offset == 0;
        if file.is_plain && !is_start {
            self.plains.note(id, file, content.now_ns);
            return;
        }
        let page = &content.data[..content.data.len().min(PAGE)];
        let frequencies = Frequencies::of(page);
        let mut is_plain = frequencies.look() == Look::Plain;
        if is_start {
            file.start = Start::of(page, frequencies.may_start_random());
            is_plain = match file.start {
                Start::Format | Start::Plain => true,
                Start::Encrypted | Start::Random => false,
                Start::Unknown => is_plain,
            };
        }
        if is_plain {
            self.plains.note(id, file, content.now_ns);
        }
    }

    /// Adds the pages of content to the fingerprints.
    fn add_prints(&mut self, id: FileId, content: Content<'_>) {
        let Some(start) = content.offset.checked_next_multiple_of(PAGE as u64) else { return };
        let skip = start - content.offset;
        let pages = content.data.get(skip as usize..).unwrap_or_default().chunks_exact(PAGE);
        for (number, page) in (start / PAGE as u64..).zip(pages) {
            if let Some(print) = self.prints.of(page) {
                let files = &self.files;
                self.prints.add(print, id, number, |id| files.get(id).is_some());
            }
        }
    }

    /// Examines content that is written. Returns whether it is new ciphertext.
    pub fn write(&mut self, content: Content<'_>) -> bool {
        let id = self.file(content.facts, content.now_ns);
        self.counts.examined_bytes += content.data.len() as u64;
        let Some(file) = self.files.get_mut(id) else { return false };
        let process = Process::of(content.facts);
        if process.is_known() {
            file.writer = process;
        }
        // A copy of an encrypted file is not encryption, so copies are looked for first.
        if self.options.copies {
            self.find_copies(id, content);
            self.add_prints(id, content);
        }
        if self.options.encryption && content.is_in_file {
            self.judge(id, content);
        }
        self.files.get(id).is_some_and(File::is_ciphertext)
    }

    /// Adds written content to the sample of its file, and judges the file when there is enough.
    fn judge(&mut self, id: FileId, content: Content<'_>) {
        for (number, page) in content.data.chunks(PAGE).enumerate() {
            let offset = content.offset.saturating_add((number * PAGE) as u64);
            let Some(file) = self.files.get_mut(id) else { return };
            let sample = &mut file.sample;
            sample.bytes += page.len() as u64;
            sample.written += page.len() as u64;
            let is_start = offset == 0;
            let is_skipped =
                sample.is_plain || sample.written > EVERY && (offset / PAGE as u64) % STRIDE != 0;
            if is_start || !is_skipped {
                let frequencies = Frequencies::of(page);
                let look = frequencies.look();
                if is_start {
                    let before = file.start;
                    file.start = Start::of(page, frequencies.may_start_random());
                    if before.is_hidden().is_some_and(|was| file.start.is_hidden() != Some(was)) {
                        // Other content begins.
                        (file.sample.bytes, file.sample.is_plain) = (page.len() as u64, false);
                    }
                }
                let is_random = look == Look::Random;
                let is_header = is_start && matches!(file.start, Start::Random | Start::Encrypted);
                match look {
                    Look::Plain if !is_header => file.sample.is_plain = true,
                    _ if is_random => self.files.add(id, &frequencies),
                    Look::Plain | Look::Random | Look::Unclear => {}
                }
            }
            self.end_sample(id, content);
        }
        // A beginning that says it needs no sample.
        let file = self.files.get(id);
        if file.is_some_and(|it| it.start == Start::Encrypted && it.verdict == Verdict::None) {
            self.conclude(id, content);
        }
    }

    /// Ends the sample of a file if it is complete.
    fn end_sample(&mut self, id: FileId, content: Content<'_>) {
        let Some(file) = self.files.get_mut(id) else { return };
        let needed = match file.size {
            // Less than a whole sample, so that a file of exactly four has four.
            size if size >= 2 * SAMPLE => SAMPLE - 4 * PAGE as u64,
            size => size.saturating_sub(PAGE as u64 - 1).clamp(1, SAMPLE),
        };
        if file.sample.bytes < needed {
            return;
        }
        let is_plain = file.sample.is_plain;
        let result = self.files.end_sample(id);
        let Some(file) = self.files.get_mut(id) else { return };
        let sample = &mut file.sample;
        (sample.bytes, sample.is_plain) = (0, false);
        if is_plain {
            sample.results <<= 1;
            sample.complete = sample.complete.saturating_add(1);
            if file.start != Start::Random && file.start != Start::Encrypted {
                self.plains.note(id, file, content.now_ns);
            }
        } else if let Some(is_random) = result {
            sample.results = sample.results << 1 | u8::from(is_random);
            sample.complete = sample.complete.saturating_add(1);
        }
        self.conclude(id, content);
    }

    /// Decides about a file by its samples.
    fn conclude(&mut self, id: FileId, content: Content<'_>) {
        let Some(file) = self.files.get(id) else { return };
        let count = (file.size / SAMPLE).clamp(1, SAMPLES);
        let is_enough = match file.start {
            Start::Encrypted => file.sample.written + PAGE as u64 > file.size.min(EVERY),
            Start::Unknown | Start::Plain | Start::Format | Start::Random => {
                u64::from(file.sample.complete) >= count && file.size >= SIZE_MIN
            }
        };
        // Of a copy most of what was written is known.
        let is_copy = file.run.is_known && file.run.bytes() * 4 >= file.sample.written * 3;
        if !is_enough || is_copy {
            return;
        }
        let mask = (1_u8 << count) - 1;
        let is_random = file.sample.results & mask == mask;
        let before = file.verdict;
        let evidence = match file.start {
            // Its source need not be looked for again.
            Start::Encrypted if before == Verdict::Encrypted => return,
            Start::Encrypted => {
                let source = self.plains.source_of(id, file, &self.files, content.now_ns);
                Some((Evidence::Format, source))
            }
            Start::Random if is_random => self.evidence(id, file, content.now_ns),
            Start::Unknown | Start::Plain | Start::Format | Start::Random => None,
        };
        let is_random = is_random && file.start == Start::Random && file.size >= RANDOM_MIN;
        let is_unmarked = || self.names.text(file.path).is_some_and(|path| is_unmarked(&path));
        let verdict = match evidence {
            Some((Evidence::Format | Evidence::Overwritten, _)) => Verdict::Encrypted,
            Some(_) if !is_unmarked() => Verdict::Encrypted,
            _ if is_random => Verdict::Random,
            _ => Verdict::None,
        };
        if verdict == before {
            return;
        }
        if let Some(file) = self.files.get_mut(id) {
            file.verdict = verdict;
        }
        match verdict {
            Verdict::None => {}
            Verdict::Random if before == Verdict::Encrypted => {}
            Verdict::Random => self.report_file(id, None, content),
            Verdict::Encrypted => self.report_file(id, evidence, content),
        }
    }

    /// What says that a file with random content and without a known format is encrypted.
    fn evidence(&self, id: FileId, file: &File, now_ns: u64) -> Option<(Evidence, Option<FileId>)> {
        if file.is_plain {
            return Some((Evidence::Overwritten, None));
        }
        if let Some(source) = self.plains.source_of(id, file, &self.files, now_ns) {
            return Some((Evidence::Converted, Some(source)));
        }
        let path = self.names.text(file.path)?;
        promises_format(&path).then_some((Evidence::Name, None))
    }

    /// Reports a file that is encrypted, or random without `evidence`.
    fn report_file(
        &mut self,
        id: FileId,
        evidence: Option<(Evidence, Option<FileId>)>,
        content: Content<'_>,
    ) {
        let Some(file) = self.files.get(id) else { return };
        let actor = Actor::new(file.writer, file.cgroup);
        let source = evidence.and_then(|(_, source)| source).and_then(|id| self.files.get(id));
        let record = EncryptedRecord {
            time_ns: content.now_ns,
            file: Subject::of(content.facts),
            evidence: evidence.map(|(evidence, _)| evidence),
            source_path: source.map_or(Name::NONE, |source| source.path),
            actor,
        };
        let bytes = file.sample.written;
        // Files that come encrypted from elsewhere are not encryption in progress.
        let is_made_here = record.evidence.is_some_and(|evidence| {
            evidence != Evidence::Format || record.source_path.is_some() || file.is_plain
        });
        if let Some(file) = self.files.get_mut(id) {
            file.is_made_here = is_made_here;
        }
        if self.encrypted.len() == RECORDS {
            self.encrypted.pop_front();
        }
        self.encrypted.push_back(record);
        let event = |kind| Pattern {
            pattern_ts: content.now_ns,
            kind: kind as u8,
            evidence: record.evidence.map_or(0, |evidence| evidence as u8),
            source_path: record.source_path.0,
            bytes,
            files: 1,
            ..of_subject(&record.file, actor)
        };
        if evidence.is_none() {
            self.counts.random_files += 1;
            self.push(event(PatternKind::RandomContent));
            return;
        }
        self.counts.encrypted_files += 1;
        let encryption = event(PatternKind::Encryption);
        self.push(encryption);
        if !is_made_here {
            return;
        }
        let (path, threshold) = (record.file.path, self.threshold());
        let state = self.alarms.note(actor, path, bytes, content.now_ns, threshold);
        if let Some(state) = state {
            self.has_begun = true;
            let kind = PatternKind::EncryptionInProgress as u8;
            let EncryptionInProgress { files, bytes, .. } = state;
            self.push(Pattern { kind, files, bytes, evidence: 0, source_path: 0, ..encryption });
        }
    }

    fn push(&self, event: Pattern) {
        if self.has_reader {
            self.ring.push(event);
        }
    }
}

/// An event about a file.
fn of_subject(file: &Subject, actor: Actor) -> Pattern {
    Pattern {
        inode: file.inode,
        path: file.path.0,
        file_system: file.file_system.0,
        device: file.device.0,
        cgroup: actor.cgroup.0,
        process: actor.process.0,
        process_id: actor.process_id,
        process_start: actor.process_start,
        ..Pattern::default()
    }
}

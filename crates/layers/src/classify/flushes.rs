//! Whose flush it is.
//!
//! A flush of the disk has no data, and its process is known only if it waits for it. But a flush
//! makes durable what has been written before it. So the disk remembers the files that were written
//! since the last flush began, and a flush is given to the file, and so to the control group, whose
//! writes it most likely ends:
//!
//! 1. Files that another process is known to wait for are left out, if the flush has a process.
//! 2. Of the others, a file of the flush's own process comes first, then one whose writes a process
//!    waits for (`fsync`, `O_SYNC`), and then the one with the most bytes.
//! 3. A commit of a journal ends with a flush that ends nothing but the commit. It has the file of
//!    the flush before it, if the same process waits for both.
//!
//! The confidence is `likely`: nothing in the guest says so. The process stays as the guest's
//! kernel has it.

use fathom_insight::{Confidence, Facts, Insight, Kind, RequestFlags};
use parking_lot::Mutex;

/// The most files that are remembered between two flushes of a disk.
const FILES_MAX: usize = 16;
/// The most flushes of a queue in flight whose writes are kept.
const FLUSHES_MAX: usize = 16;

/// What was written to a file since the last flush.
#[derive(Clone, Copy)]
struct Written {
    facts: Facts,
    bytes: u64,
    /// Whether a process waits for one of the writes.
    is_awaited: bool,
}

#[derive(Default)]
struct Table {
    files: Vec<Written>,
    /// The facts of the last flush that has a file.
    last: Facts,
}

/// What was written to a disk since its last flush. Its queues share it. A queue that finds it
/// locked forgets its write: that costs a hint.
#[derive(Default)]
pub(super) struct Writes(Mutex<Table>);

/// Whether both facts have the same process, which is known.
fn is_same_process(one: &Facts, other: &Facts) -> bool {
    one.process_id != 0
        && (one.process_id, one.process_start) == (other.process_id, other.process_start)
}

impl Writes {
    /// Remembers a write of `length` bytes that has been carried out.
    pub(super) fn note(&self, insight: &Insight, length: u64) {
        if insight.facts.inode == 0 && insight.parts.is_empty() {
            return;
        }
        let Some(mut table) = self.0.try_lock() else { return };
        let is_awaited = insight.flags.contains(RequestFlags::SYNCHRONOUS);
        for part in insight.parts(length) {
            let facts = part.facts;
            if !facts.kind.is_content() || facts.inode == 0 {
                continue;
            }
            let is_it = |file: &&mut Written| {
                let of = |facts: &Facts| (facts.inode, facts.device, facts.cgroup);
                of(&file.facts) == of(&facts) && (file.facts.process_id == facts.process_id)
            };
            if let Some(file) = table.files.iter_mut().find(is_it) {
                file.bytes = file.bytes.saturating_add(part.length);
                file.is_awaited |= is_awaited;
                continue;
            }
            let written = Written { facts, bytes: part.length, is_awaited };
            if table.files.len() < FILES_MAX {
                table.files.push(written);
            } else if let Some(least) =
                table.files.iter_mut().min_by_key(|file| (file.is_awaited, file.bytes))
            {
                *least = written;
            }
        }
    }
}

/// The flushes of a queue in flight.
#[derive(Default)]
pub(super) struct FlushQueue {
    /// The requests, each with what it ends. The oldest one comes first.
    flushes: Vec<(u64, Vec<Written>)>,
    /// Empty lists, to be used again.
    spare: Vec<Vec<Written>>,
}

impl FlushQueue {
    /// A flush has come: what was written before is what it ends.
    pub(super) fn begin(&mut self, writes: &Writes, id: u64) {
        let mut files = self.spare.pop().unwrap_or_default();
        if let Some(mut table) = writes.0.try_lock() {
            std::mem::swap(&mut files, &mut table.files);
        }
        if self.flushes.len() == FLUSHES_MAX {
            let (_, oldest) = self.flushes.remove(0);
            self.give_back(oldest);
        }
        self.flushes.push((id, files));
    }

    /// A flush has been carried out: adds the file to it whose writes it ends. `insight` has its
    /// process, as far as it is known.
    pub(super) fn end(&mut self, writes: &Writes, id: u64, insight: &mut Insight) {
        let Some(files) = self.take(id) else { return };
        let facts = &mut insight.facts;
        if facts.inode == 0 && insight.parts.is_empty() {
            let found = likely(&files, facts).map(|file| file.facts);
            if let Some(mut table) = writes.0.try_lock() {
                let last = table.last;
                let is_commit = files.is_empty() && is_same_process(&last, facts);
                if let Some(of) = found.or(is_commit.then_some(last)) {
                    give(facts, &of);
                    table.last = *facts;
                }
            }
        }
        self.give_back(files);
    }

    /// A flush has failed, and ends nothing.
    pub(super) fn forget(&mut self, id: u64) {
        if let Some(files) = self.take(id) {
            self.give_back(files);
        }
    }

    fn take(&mut self, id: u64) -> Option<Vec<Written>> {
        let place = self.flushes.iter().position(|(flush, _)| *flush == id)?;
        Some(self.flushes.remove(place).1)
    }

    fn give_back(&mut self, mut files: Vec<Written>) {
        files.clear();
        self.spare.push(files);
    }
}

/// The file that a flush with the process of `flush` most likely ends.
fn likely<'a>(files: &'a [Written], flush: &Facts) -> Option<&'a Written> {
    let is_possible = |file: &&Written| {
        let (own, other) = (flush.process_id, file.facts.process_id);
        own == 0 || other == 0 || is_same_process(&file.facts, flush)
    };
    files
        .iter()
        .filter(is_possible)
        .max_by_key(|file| (is_same_process(&file.facts, flush), file.is_awaited, file.bytes))
}

/// Gives the file of `of` to a flush.
fn give(flush: &mut Facts, of: &Facts) {
    if flush.kind == Kind::Unknown {
        flush.kind = of.kind;
        flush.source = of.source;
    }
    flush.confidence = Confidence::Likely;
    flush.inode = of.inode;
    flush.inode_address = of.inode_address;
    flush.file_size = of.file_size;
    flush.owner = of.owner;
    flush.path = of.path;
    flush.file_system = of.file_system;
    flush.device = of.device;
    flush.database = of.database;
    if of.cgroup.is_some() {
        // The thread of a journal has the root group.
        flush.cgroup = of.cgroup;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_insight::{ClassTable, Name, ProcessRole};

    fn file(inode: u64, cgroup: u32, process_id: u32) -> Facts {
        let cgroup = Name(cgroup);
        let kind = Kind::Data;
        Facts { kind, inode, cgroup, process_id, path: Name(inode as u32), ..Facts::default() }
    }

    fn write(writes: &Writes, parts: &[(u64, Facts)], is_awaited: bool) {
        let mut insight = Insight::default();
        for (length, facts) in parts {
            insight.push(*length, *facts);
        }
        insight.finish(&ClassTable::default());
        if is_awaited {
            insight.flags.insert(RequestFlags::SYNCHRONOUS);
        }
        writes.note(&insight, parts.iter().map(|(length, _)| length).sum());
    }

    fn flush(queue: &mut FlushQueue, writes: &Writes, process_id: u32) -> Facts {
        queue.begin(writes, 7);
        end(queue, writes, 7, process_id)
    }

    fn end(queue: &mut FlushQueue, writes: &Writes, id: u64, process_id: u32) -> Facts {
        let mut insight = Insight::default();
        insight.facts.process_id = process_id;
        insight.facts.cgroup = Name(1);
        if process_id != 0 {
            insight.facts.process_role = ProcessRole::Waiter;
        }
        queue.end(writes, id, &mut insight);
        insight.facts
    }

    #[test]
    fn a_flush_is_that_of_the_awaited_file_and_then_of_the_one_with_most_bytes() {
        let (writes, mut queue) = (Writes::default(), FlushQueue::default());
        write(&writes, &[(1 << 20, file(5, 2, 0))], false);
        write(&writes, &[(4096, file(6, 3, 0))], true);
        let facts = flush(&mut queue, &writes, 0);
        assert_eq!((facts.inode, facts.cgroup, facts.kind), (6, Name(3), Kind::Data));
        assert_eq!(facts.confidence, Confidence::Likely);
        assert_eq!((facts.process_id, facts.process_role), (0, ProcessRole::None));
        // It has ended all of it.
        assert_eq!(flush(&mut queue, &writes, 0).inode, 0);
        write(&writes, &[(512, file(5, 2, 0)), (8192, file(6, 3, 0))], false);
        write(&writes, &[(4096, file(5, 2, 0)), (512, file(5, 2, 0))], false);
        assert_eq!(flush(&mut queue, &writes, 0).inode, 6);
    }

    #[test]
    fn the_process_of_a_flush_decides() {
        let (writes, mut queue) = (Writes::default(), FlushQueue::default());
        write(&writes, &[(1 << 20, file(5, 2, 70))], true);
        write(&writes, &[(4096, file(6, 3, 71))], false);
        write(&writes, &[(512, file(7, 3, 0))], true);
        let facts = flush(&mut queue, &writes, 71);
        assert_eq!((facts.inode, facts.process_id), (6, 71));
        // What another process waits for is not given to this one.
        write(&writes, &[(1 << 20, file(5, 2, 70))], true);
        assert_eq!(flush(&mut queue, &writes, 72).inode, 0);
    }

    #[test]
    fn the_flush_of_a_commit_has_the_file_of_the_one_before_it() {
        let (writes, mut queue) = (Writes::default(), FlushQueue::default());
        write(&writes, &[(4096, file(6, 3, 0))], true);
        assert_eq!(flush(&mut queue, &writes, 71).inode, 6);
        let journal = Facts { kind: Kind::Journal, ..Facts::default() };
        write(&writes, &[(4096, journal)], true);
        let commit = flush(&mut queue, &writes, 71);
        assert_eq!((commit.inode, commit.cgroup), (6, Name(3)));
        // Another process, and an unknown one, get nothing of it.
        assert_eq!(flush(&mut queue, &writes, 72).inode, 0);
        assert_eq!(flush(&mut queue, &writes, 0).inode, 0);
    }

    #[test]
    fn a_write_after_the_begin_of_a_flush_is_not_ended_by_it() {
        let (writes, mut queue) = (Writes::default(), FlushQueue::default());
        queue.begin(&writes, 1);
        write(&writes, &[(4096, file(6, 3, 0))], true);
        queue.begin(&writes, 2);
        assert_eq!(end(&mut queue, &writes, 1, 0).inode, 0);
        assert_eq!(end(&mut queue, &writes, 2, 0).inode, 6);
        // A flush that failed, and one that is not known.
        queue.begin(&writes, 3);
        queue.forget(3);
        assert_eq!(end(&mut queue, &writes, 3, 0).inode, 0);
        assert_eq!(end(&mut queue, &writes, 9, 0).inode, 0);
    }

    #[test]
    fn memory_is_bounded() {
        let (writes, mut queue) = (Writes::default(), FlushQueue::default());
        for inode in 1..1000 {
            write(&writes, &[(inode, file(inode, 1, 0))], inode == 3);
        }
        assert_eq!(writes.0.lock().files.len(), FILES_MAX);
        for id in 0..100 {
            queue.begin(&writes, id);
        }
        assert!(queue.flushes.len() <= FLUSHES_MAX && queue.spare.len() <= FLUSHES_MAX);
        write(&writes, &[(1, file(1, 1, 0))], true);
        let facts = flush(&mut queue, &writes, 0);
        assert_eq!(facts.inode, 1);
    }
}

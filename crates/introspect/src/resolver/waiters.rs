//! The processes that wait for requests: for data that they read, for pages in write-back, for a
//! journal, for a flush.

use fathom_insight::{Facts, Insight, Kind, ProcessRole};

use super::verdict::{Verdict, pages_of};
use super::{RequestView, Resolver};
use crate::bios::Bio;
use crate::completion::{Completion, Meaning};
use crate::kernel::Kernel;
use crate::paging::printable;
use crate::tasks::start_of;

/// The pages of a request that are examined for a process that waits for them, from the first one
/// on.
const AWAITED_MAX: usize = 16;
/// The pages of a write whose writers are forgotten when it has been carried out. What is left of a
/// longer one stays until the page is changed again.
const FORGOTTEN_MAX: usize = 8192;

impl Resolver {
    /// Adds the processes that wait for a request to its insight. The request has been carried out,
    /// and its end has not been reported to the guest yet. `pages` are those of
    /// [`resolve`](Self::resolve). Parts with a process keep it.
    pub fn find_waiters(
        &mut self,
        view: &RequestView,
        pages: impl Iterator<Item = (u64, u64)> + Clone,
        insight: &mut Insight,
    ) {
        if self.generation != self.guest.generation() {
            return;
        }
        let Some(kernel) = self.kernel.take() else { return };
        if view.is_flush() {
            if insight.facts.process_id == 0 {
                self.add_flusher(&kernel, view, insight);
            }
            self.kernel = Some(kernel);
            return;
        }
        if view.is_write && self.writers.is_some() {
            self.forget_writers(&kernel, pages.clone());
        }
        if view.is_write && insight.facts.kind == Kind::Journal {
            self.add_committer(&kernel, view, insight);
        } else {
            self.add_page_waiters(&kernel, view, pages, insight);
            if view.is_write && insight.facts.process_id == 0 && insight.facts.kind == Kind::Data {
                self.add_waiter_of_copy(&kernel, view, insight);
            }
        }
        self.kernel = Some(kernel);
    }

    /// Adds a process that waits for the first page of which a device's layer writes a copy.
    fn add_waiter_of_copy(&mut self, kernel: &Kernel, view: &RequestView, insight: &mut Insight) {
        if !insight.parts.is_empty() {
            return;
        }
        let mut find = || {
            let bio = kernel.memory.u64(first_bio(kernel, view)?)?;
            let (bio, _, passage) = kernel.origin(&kernel.bio(bio)?)?;
            let page = kernel.first_page(&bio).filter(|_| passage.is_copied)?;
            self.caches.pages.waiter(kernel, page, true)
        };
        let task = find();
        self.add_process(kernel, task, ProcessRole::Waiter, &mut insight.facts);
    }

    fn add_page_waiters(
        &mut self,
        kernel: &Kernel,
        view: &RequestView,
        pages: impl Iterator<Item = (u64, u64)>,
        insight: &mut Insight,
    ) {
        let can_wait = |facts: &Facts| {
            facts.process_id == 0 && !matches!(facts.kind, Kind::Direct | Kind::Journal)
        };
        let can_any_wait = match &insight.parts[..] {
            [] => can_wait(&insight.facts),
            parts => parts.iter().any(|part| can_wait(&part.facts)),
        };
        if !can_any_wait {
            return;
        }
        let mut offset = 0;
        let pages = pages.flat_map(|(address, length)| pages_of(address, length));
        for (address, count) in pages.take(AWAITED_MAX) {
            // The part of these bytes, which is the whole if there are no parts.
            let part = insight
                .parts
                .iter()
                .position(|part| (part.offset..part.offset + part.length).contains(&offset));
            let facts = part.map_or(insight.facts, |part| insight.parts[part].facts);
            let mut found = facts;
            if can_wait(&facts) {
                let page = kernel.page_of(address);
                let task = self.caches.pages.waiter(kernel, page, view.is_write);
                self.add_process(kernel, task, ProcessRole::Waiter, &mut found);
            }
            if found.process_id != facts.process_id {
                if let Some(part) = part {
                    insight.parts[part].facts = found;
                }
                // Those of most bytes.
                if insight.facts == facts {
                    insight.facts = found;
                }
                if insight.parts.is_empty() {
                    return;
                }
            }
            offset += count;
        }
    }

    /// Adds a process that waits for the journal, to the insight of a write to the journal.
    fn add_committer(&mut self, kernel: &Kernel, view: &RequestView, insight: &mut Insight) {
        if insight.facts.process_id != 0 || !insight.parts.is_empty() {
            return;
        }
        self.caches.files.begin();
        let mut find = || {
            let bio = kernel.memory.u64(first_bio(kernel, view)?)?;
            let (bio, meaning, _) = kernel.origin(&kernel.bio(bio)?)?;
            self.committer(kernel, meaning, &bio)
        };
        let task = find();
        self.add_process(kernel, task, ProcessRole::Waiter, &mut insight.facts);
    }

    /// Adds what is known about a flush to its insight: whose it is, and whether a journal needs
    /// it. If several processes need the flush, it is one of them.
    pub(super) fn add_flusher(
        &mut self,
        kernel: &Kernel,
        view: &RequestView,
        insight: &mut Insight,
    ) {
        self.caches.files.begin();
        self.caches.groups.begin();
        let (bios, count) = kernel.flushed(view.header);
        let mut found = None;
        for bio in &bios[..count] {
            let Some(bio) = kernel.bio(*bio) else { continue };
            let facts = self.flusher(kernel, &bio, view, insight);
            let is_better = facts.process_id != 0 || found.is_none();
            if is_better {
                found = Some(facts);
            }
            if facts.process_id != 0 {
                break;
            }
        }
        if let Some(facts) = found {
            insight.facts = facts;
        }
    }

    /// What is known about a bio that needs a flush.
    fn flusher(&mut self, kernel: &Kernel, bio: &Bio, view: &RequestView, of: &Insight) -> Facts {
        let group = self.group(kernel, bio, view.now_ns);
        let (mut facts, task) = match self.judge(kernel, bio, view, of.flags) {
            Verdict::All(facts) => (facts, None),
            Verdict::Each(each) => (Facts::default(), each.waiter),
            Verdict::First | Verdict::Page(..) => Default::default(),
        };
        if !facts.cgroup.is_some() {
            facts.cgroup = group.name;
        }
        // A thread of the kernel flushes for those that wait for it.
        let own = task.filter(|task| !kernel.is_kernel_thread(*task));
        self.add_process(kernel, own, ProcessRole::Submitter, &mut facts);
        if facts.process_id == 0 {
            let waiter = kernel
                .origin(bio)
                .and_then(|(bio, meaning, _)| self.committer(kernel, meaning, &bio));
            self.add_process(kernel, waiter, ProcessRole::Waiter, &mut facts);
        }
        if facts.process_id == 0 {
            // Data that has to be durable, in a page that is locked until then.
            let page = kernel.page_at(bio, 0);
            let waiter = page.and_then(|page| self.caches.pages.waiter(kernel, page, false));
            self.add_process(kernel, waiter, ProcessRole::Waiter, &mut facts);
        }
        if facts.process_id == 0 {
            self.add_process(kernel, task, ProcessRole::Submitter, &mut facts);
        }
        facts
    }

    /// The first task that waits until the file system of a bio has made its journal durable.
    fn committer(&mut self, kernel: &Kernel, meaning: Meaning, bio: &Bio) -> Option<u64> {
        let layout = &kernel.layout;
        if meaning == Meaning::Completion(Completion::XfsLog) {
            return kernel.first_waiter(bio.private.wrapping_add(layout.xfs_log_waiters?));
        }
        let super_block = self.caches.files.super_block_of(kernel, bio.device)?;
        let waiter = kernel.system_of(super_block)?.waiter?;
        waiter(kernel, kernel.pointer(super_block.wrapping_add(layout.sb_private?))?)
    }
}

/// The guest-physical address of the pointer to the first bio of a request.
fn first_bio(kernel: &Kernel, view: &RequestView) -> Option<u64> {
    let request = view.header.checked_sub(kernel.layout.request_size)?;
    request.checked_add(kernel.layout.request_bio)
}

impl Resolver {
    /// Whether the writers of pages are known, and of interest for the current request.
    pub(super) fn finds_writers(&self) -> bool {
        self.is_write && self.writers.is_some()
    }

    /// Adds the process that wrote the page with this number, if it is known.
    pub(super) fn add_writer(&self, frame: u64, facts: &mut Facts) {
        let Some(writer) = self.writers.as_ref().and_then(|writers| writers.writer(frame)) else {
            return;
        };
        facts.process = self.guest.names().number(&printable(writer.command()));
        facts.process_id = writer.process_id;
        facts.process_start = start_of(writer.start_ns);
        facts.process_role = ProcessRole::Writer;
    }

    /// Forgets the writers of pages that have been written and not changed since. What changes them
    /// next may not be seen.
    fn forget_writers(&mut self, kernel: &Kernel, pages: impl Iterator<Item = (u64, u64)>) {
        let Some(writers) = &self.writers else { return };
        let pages = pages.flat_map(|(address, length)| pages_of(address, length));
        for (address, _) in pages.take(FORGOTTEN_MAX) {
            // The entry is read first: if the page is changed after that, it gets another one.
            let frame = self.caches.pages.dirty_frame(kernel, address).map(|(frame, _)| frame);
            let Some(frame) = frame else { continue };
            let entry = writers.entry(frame);
            if entry == 0 {
                continue;
            }
            if let Some((_, false)) = self.caches.pages.dirty_frame(kernel, address) {
                writers.forget(frame, entry);
            }
        }
    }
}

//! Copies that system calls make.
//!
//! Such a copy may move data or not. If it does, its content is found to be a copy too: later, when
//! it is written back, or before the call is known. It is reported once.

use fathom_insight::Facts;
use fathom_insight::pattern::Evidence;

use super::super::content::PAGE;
use super::super::files::Process;
use super::Finder;

/// The time for which bytes that are known in one way wait for the other, in nanoseconds: a guest
/// writes data some seconds later, by default up to 30.
const SETTLE_NS: u64 = 120_000_000_000;

/// A copy that a system call has made.
#[derive(Clone, Copy, Debug)]
pub struct CopyCall<'f> {
    /// The file that was written, with the process that did it.
    pub target: &'f Facts,
    /// The file from which it was copied.
    pub source: &'f Facts,
    /// The bytes.
    pub bytes: u64,
}

/// The bytes of copies into a file that are known only by calls, or only by their content.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Settled {
    called: u64,
    found: u64,
    last_ns: u64,
}

impl Settled {
    fn renew(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.last_ns) >= SETTLE_NS {
            (self.called, self.found) = (0, 0);
        }
        self.last_ns = now_ns;
    }

    /// Whether calls have copied bytes whose content has not been found yet.
    pub(super) fn has_calls(&self, now_ns: u64) -> bool {
        self.called > 0 && now_ns.saturating_sub(self.last_ns) < SETTLE_NS
    }

    /// Bytes that a call has copied. Returns those that are not known by their content.
    pub(super) fn call(&mut self, bytes: u64, now_ns: u64) -> u64 {
        self.renew(now_ns);
        let rest = rest(bytes, &mut self.found);
        self.called = self.called.saturating_add(rest);
        rest
    }

    /// Bytes that are a copy by their content. Returns those that no call has copied.
    pub(super) fn find(&mut self, bytes: u64, now_ns: u64) -> u64 {
        self.renew(now_ns);
        let rest = rest(bytes, &mut self.called);
        self.found = self.found.saturating_add(rest);
        rest
    }
}

/// Takes bytes that are known in another way away. Content is found in whole pages.
fn rest(bytes: u64, known: &mut u64) -> u64 {
    let settled = bytes.min(*known);
    *known -= settled;
    let rest = bytes - settled;
    if settled > 0 && rest < PAGE as u64 { 0 } else { rest }
}

impl Finder {
    /// Notes a copy that a system call has made.
    pub fn call(&mut self, call: &CopyCall<'_>, now_ns: u64) {
        if !self.options.copies || call.bytes == 0 {
            return;
        }
        let source = self.file(call.source, now_ns);
        let target = self.file(call.target, now_ns);
        if source == target {
            return;
        }
        let process = Process::of(call.target);
        let Some(file) = self.files.get_mut(target) else { return };
        if process.is_known() {
            file.writer = process;
        }
        let bytes = file.settled.call(call.bytes, now_ns);
        if bytes == 0 {
            return;
        }
        let evidence = Some(Evidence::Call);
        if let Some(place) = self.begin_copy(target, source, evidence, now_ns) {
            self.add_to_copy(place, bytes, evidence, now_ns);
        }
    }
}

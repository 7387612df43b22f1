//! Which guests are being flushed, and which are being given their memory again.
//!
//! A guest is flushed in one way at a time. A restoration of its memory takes as long as QEMU's
//! socket hangs. It excludes only flushes by the balloon, and a shutdown does not wait for it: the
//! record of the memory stays.

use std::collections::{BTreeMap, BTreeSet};

use fathom_control::FlushWay;
use parking_lot::Mutex;

/// The marked virtual machines.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<Marked>);

#[derive(Debug, Default)]
struct Marked {
    /// Those that are being flushed, with the way.
    flushing: BTreeMap<String, FlushWay>,
    /// Those that are being given their memory again.
    restoring: BTreeSet<String>,
}

/// Why a guest is not marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// It is being flushed.
    Flushing,
    /// It is being given its memory again.
    Restoring,
}

impl Marks {
    /// Marks the guest of `vm` as being flushed `by` this way, until the result is dropped.
    pub(super) fn flush<'a>(&'a self, vm: &'a str, by: FlushWay) -> Result<Active<'a>, Busy> {
        let mut marked = self.0.lock();
        if marked.flushing.contains_key(vm) {
            return Err(Busy::Flushing);
        }
        if by == FlushWay::Balloon && marked.restoring.contains(vm) {
            return Err(Busy::Restoring);
        }
        marked.flushing.insert(vm.to_owned(), by);
        Ok(Active { marks: self, vm })
    }

    /// Marks the guest of `vm` as being given its memory again, until the result is dropped. `None`
    /// if it already is, or if its memory is being taken.
    pub(super) fn restore<'a>(&'a self, vm: &'a str) -> Option<Restoring<'a>> {
        let mut marked = self.0.lock();
        let is_taken = marked.flushing.get(vm) == Some(&FlushWay::Balloon);
        let is_free = !is_taken && marked.restoring.insert(vm.to_owned());
        is_free.then(|| Restoring { marks: self, vm })
    }

    /// Whether a guest is being flushed.
    pub(super) fn is_flushing(&self) -> bool {
        !self.0.lock().flushing.is_empty()
    }
}

/// A virtual machine that is being flushed, until this is dropped.
#[derive(Debug)]
pub(crate) struct Active<'a> {
    marks: &'a Marks,
    vm: &'a str,
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.marks.0.lock().flushing.remove(self.vm);
    }
}

/// A virtual machine that is being given its memory again, until this is dropped.
#[derive(Debug)]
pub(super) struct Restoring<'a> {
    marks: &'a Marks,
    vm: &'a str,
}

impl Drop for Restoring<'_> {
    fn drop(&mut self) {
        self.marks.0.lock().restoring.remove(self.vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restoration_excludes_only_the_balloon() {
        let marks = Marks::default();
        let restoring = marks.restore("web").unwrap();
        assert!(marks.restore("web").is_none() && marks.restore("db").is_some());
        assert!(!marks.is_flushing(), "a shutdown does not wait for it");
        assert_eq!(marks.flush("web", FlushWay::Balloon).unwrap_err(), Busy::Restoring);
        let active = marks.flush("web", FlushWay::Tunables).unwrap();
        assert_eq!(marks.flush("web", FlushWay::Sysrq).unwrap_err(), Busy::Flushing);
        drop(restoring);
        assert!(marks.is_flushing() && marks.restore("web").is_some());
        drop(active);
        let active = marks.flush("web", FlushWay::Balloon).unwrap();
        assert!(marks.restore("web").is_none(), "its memory is being taken");
        drop(active);
        assert!(!marks.is_flushing() && marks.restore("web").is_some());
    }
}

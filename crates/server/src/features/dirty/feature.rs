//! The dirty data of guests, as a feature of the daemon.

use fathom_control::DirtyQuery;

use super::metrics::of_dirty;
use crate::daemon::Daemon;
use crate::daemon::feature::Feature;
use crate::daemon::metrics::Page;

/// What guests have not written yet.
pub(crate) struct Dirty;

impl Feature for Dirty {
    fn metrics(&self, daemon: &Daemon, page: &mut Page) {
        // Without a name of a guest, a count of dirty pages does not fail.
        of_dirty(page, &daemon.dirty(&DirtyQuery::default(), None).unwrap_or_default());
    }
}

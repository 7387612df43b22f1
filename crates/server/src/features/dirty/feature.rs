//! The dirty data of guests, as a feature of the daemon.

use fathom_control::DirtyQuery;

use super::metrics::of_dirty;
use crate::daemon::feature::Feature;
use crate::daemon::metrics::{Page, Scrape};

/// What guests have not written yet.
pub(crate) struct Dirty;

impl Feature for Dirty {
    fn metrics(&self, scrape: &Scrape<'_>, page: &mut Page) {
        // Without a name of a guest, a count of dirty pages does not fail.
        of_dirty(page, &scrape.daemon.dirty(&DirtyQuery::default(), None).unwrap_or_default());
    }
}

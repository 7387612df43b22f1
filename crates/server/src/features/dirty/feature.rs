//! The dirty data of guests, as a feature of the daemon.

use std::time::Duration;

use fathom_control::{DirtyQuery, DirtyReport, ErrorBody, endpoints};

use super::metrics::of_dirty;
use crate::daemon::feature::Feature;
use crate::daemon::http::routes::{Routes, Waiter};
use crate::daemon::metrics::{MetricsText, Scrape};

/// What guests have not written yet.
pub(crate) struct Dirty;

impl Feature for Dirty {
    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        // Without a name of a guest, a count of dirty pages does not fail.
        of_dirty(page, &scrape.daemon.dirty(&DirtyQuery::default(), None).unwrap_or_default());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.waiting(&endpoints::DIRTY, |waiter, (), query, ()| dirty(waiter, query));
    }
}

/// Counts dirty pages. A count of what is written in an interval begins and ends on a thread, and
/// uses none in between.
#[deny(clippy::disallowed_methods)]
async fn dirty(waiter: Waiter, query: DirtyQuery) -> Result<DirtyReport, ErrorBody> {
    let Some(time) = query.written_ms.map(Duration::from_millis) else {
        return waiter.work(move |daemon| daemon.dirty(&query, None)).await;
    };
    let _permit = waiter.admit()?;
    let guest = query.guest.clone();
    let begun = waiter.work(move |daemon| daemon.begin_written(guest.as_deref(), time)).await?;
    tokio::time::sleep(time).await;
    waiter.work(move |daemon| daemon.dirty(&query, Some(begun))).await
}

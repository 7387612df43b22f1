//! Searches for what deletions would free, each on a thread of its own, one at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_control::{ErrorBody, ErrorCode, ReclaimEntry};
use fathom_failure::Failure;
use fathom_store::Pool;
use parking_lot::Mutex;

use super::refused;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_s;

/// The most pools of which the last search is kept.
const KEPT_MAX: usize = 64;
/// The most names that are asked for together.
const NAMES_MAX: usize = 1000;

/// The searches, by the paths of pools.
#[derive(Clone, Default)]
pub(crate) struct Reclaims(Arc<Mutex<BTreeMap<PathBuf, Arc<Search>>>>);

#[derive(Default)]
struct Search {
    entry: Mutex<ReclaimEntry>,
    is_ended: AtomicBool,
}

impl Reclaims {
    /// The search in progress in a pool, or the last one.
    pub(super) fn entry(&self, path: &Path) -> Option<ReclaimEntry> {
        let search = self.0.lock().get(path).cloned()?;
        let entry = search.entry.lock().clone();
        Some(entry)
    }

    /// Begins a search.
    ///
    /// # Errors
    /// If another one is in progress, in any pool, or there is nothing of a name.
    pub(super) fn begin(
        &self,
        path: &Path,
        pool: &Pool,
        together: &[String],
    ) -> Result<(), ErrorBody> {
        if together.len() > NAMES_MAX {
            let what = format!("more than {NAMES_MAX} volumes and snapshots are named");
            return Err(refusal(ErrorCode::Invalid, what, "name fewer, or VOLUME@*"));
        }
        ReclaimEntry::check_names(pool, together).map_err(refused)?;
        let mut searches = self.0.lock();
        if let Some(other) = searches.iter().find(|(_, it)| it.entry.lock().running) {
            let what = format!("what deletions would free is being found in {}", other.0.display());
            return Err(refusal(ErrorCode::Busy, what, "repeat the command when that has ended"));
        }
        while searches.len() >= KEPT_MAX && searches.pop_first().is_some() {}
        let entry =
            ReclaimEntry { running: true, begun_s: unix_time_s(), ..ReclaimEntry::default() };
        let search =
            Arc::new(Search { entry: Mutex::new(entry), is_ended: AtomicBool::new(false) });
        let (pool, together) = (pool.clone(), together.to_vec());
        let own = Arc::clone(&search);
        let work = move || own.carry_out(pool, &together);
        let started = std::thread::Builder::new().name("reclaim".into()).spawn(work);
        started.map_err(|error| {
            let what = format!("a thread cannot be started: {error}");
            refusal(ErrorCode::Failed, what, "repeat the command")
        })?;
        searches.insert(path.to_owned(), search);
        Ok(())
    }

    /// Ends the search in a pool, if one is in progress.
    pub(crate) fn end(&self, path: &Path) {
        if let Some(search) = self.0.lock().get(path) {
            search.is_ended.store(true, Ordering::Release);
        }
    }

    /// Ends all of them.
    pub(super) fn stop(&self) {
        self.0.lock().values().for_each(|it| it.is_ended.store(true, Ordering::Release));
    }
}

impl Search {
    fn carry_out(&self, pool: Pool, together: &[String]) {
        let found = ReclaimEntry::find(&pool, together, |visited, total| {
            let mut entry = self.entry.lock();
            (entry.visited_pages, entry.total_pages) = (visited, total);
            !self.is_ended.load(Ordering::Acquire)
        });
        // Nobody who sees the end finds the pool still open.
        drop(pool);
        let mut entry = self.entry.lock();
        let begun_s = entry.begun_s;
        *entry = match found {
            Ok(found) => ReclaimEntry { begun_s, ..found },
            Err(_) if self.is_ended.load(Ordering::Acquire) => {
                ReclaimEntry { begun_s, error: Some("it was ended".into()), ..entry.clone() }
            }
            Err(error) => {
                let failure = Failure::from(error);
                tracing::warn!("what deletions would free is not known: {failure}");
                ReclaimEntry { begun_s, error: Some(failure.to_string()), ..entry.clone() }
            }
        };
        (entry.running, entry.ended_s) = (false, Some(unix_time_s()));
    }
}

//! The caches of disks, as a feature of the daemon.

use std::io;
use std::path::Path;
use std::sync::Arc;

use fathom_block::Disk;
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, endpoints};
use fathom_layers::cache::Caches;

use super::Host;
use super::changes::check_answers;
use super::metrics::of_caches;
use crate::configuration::Configuration;
use crate::daemon::Served;
use crate::daemon::feature::{Feature, Leaving};
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::stack::{Equipment, refusal};
use crate::features::log::{CacheStores, DiskLog};

/// The caches above disks.
pub(crate) struct CachesOfDisks;

impl Feature for CachesOfDisks {
    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let memory =
            configuration.map(|configuration| configuration.daemon.definition.cache_index_memory());
        parts.add(memory.map_or_else(Caches::default, Caches::with_index_memory));
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        let log = disk.parts.get::<DiskLog>();
        match &disk.before {
            Some(before) if log.is_none() => {
                check_answers(&before.layers, &disk.definition.name, before.parts.get().as_ref())?;
            }
            Some(_) => {}
            None => super::reject(disk.definition, disk.records, disk.shared)?,
        }
        disk.cache_host = Some(Box::new(Host {
            definition: disk.definition,
            records: disk.records,
            stores: disk.shared.of::<CacheStores>(),
            log,
        }));
        Ok(())
    }

    fn exchanging(&self, disk: &Equipment<'_>) {
        if let Some(before) =
            disk.before.as_ref().filter(|_| disk.parts.find::<DiskLog>().is_none())
        {
            super::leave_log(&before.disk.layers());
        }
    }

    fn abandon(&self, disk: &Equipment<'_>) {
        if let Some(before) = &disk.before {
            super::note_log(&before.disk.layers(), before.parts.get().as_ref());
        }
    }

    fn equipped(&self, equipment: &Equipment<'_>, disk: &Arc<Disk>) {
        super::note_log(&disk.layers(), equipment.parts.get().as_ref());
    }

    fn forget_home(
        &self,
        definition: &DiskDefinition,
        records: &Path,
        parts: &Parts,
    ) -> Result<(), ErrorBody> {
        super::forget(definition, records, parts)
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_caches(page, &scrape.daemon.caches(None, 0, 0).unwrap_or_default());
    }

    fn objection_to_size(&self, served: &Served, is_smaller: bool) -> Option<ErrorBody> {
        if !is_smaller || !super::has_cache(&served.live().definition) {
            return None;
        }
        let name = served.disk.name();
        Some(refusal(
            ErrorCode::Unsupported,
            format!(
                "the disk {name:?} has a cache that outlives the daemon, which may have blocks beyond \
                 the new size"
            ),
            format!(
                "run `fathom cache detach {name}`, shrink the disk, and attach the cache again"
            ),
        ))
    }

    fn leaving(&self, served: &Served, stage: Leaving) -> io::Result<()> {
        match stage {
            Leaving::Home { .. } if served.part::<DiskLog>().is_some() => {
                // The log has been written home: the image has what its cache has.
                super::note_log(&served.disk.layers(), None);
            }
            Leaving::Home { .. } | Leaving::Begun | Leaving::Drained => {}
        }
        Ok(())
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::CACHES, |daemon, (), query, ()| {
            daemon.caches(query.disk.as_deref(), query.points, query.files)
        });
    }
}

//! The volumes and snapshots of pools, as a feature of the daemon.

use fathom_control::endpoints;

use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;

/// See the module.
pub(crate) struct VolumesOfPools;

impl Feature for VolumesOfPools {
    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::POOLS, |daemon, (), (), ()| Ok(daemon.pools()));
        routes.blocking(&endpoints::DIFFERENCE, |daemon, (), query, ()| daemon.difference(&query));
        routes.change(&endpoints::CHANGE_POOL, |daemon, (), (), request| {
            daemon.change_pool(&request.path, &request.change)
        });
    }
}

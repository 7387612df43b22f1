//! The lifetimes of what guests write, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::endpoints;

use super::{Checker, of};
use crate::configuration::Configuration;
use crate::daemon::feature::{Ending, Feature};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};

/// How long what guests write lives.
pub(crate) struct ContentLifetimes;

impl Feature for ContentLifetimes {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Checker::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let _ = daemon.part::<Checker>().daemon.set(Arc::downgrade(daemon));
    }

    fn stacked(&self, daemon: &Daemon, served: &Served) {
        let Some(layer) = of(served) else { return };
        let checker = daemon.part::<Checker>();
        checker.begin();
        if let Some(thread) = checker.thread() {
            layer.on_use(move || thread.unpark());
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            daemon.part::<Checker>().wake();
        }
        Vec::new()
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::LIFETIMES, |daemon, (), query, ()| {
            daemon.lifetimes(query.disk.as_deref())
        });
    }
}

//! The audit log as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{AuditEntry, endpoints};

use super::Audit;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Ending, Feature};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;

/// Who has changed what.
pub(crate) struct AuditLog;

impl Feature for AuditLog {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Arc::new(Audit::default()));
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        daemon.part::<Arc<Audit>>().set_path(daemon.lasting.folder().path());
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage != Ending::Results {
            return Vec::new();
        }
        daemon.audit_own("stop");
        let audit = Arc::clone(daemon.part::<Arc<Audit>>());
        vec![Task::new("the audit log".into(), move || audit.finish())]
    }

    fn requested(&self, daemon: &Daemon, entry: &AuditEntry) {
        daemon.audit(entry.clone());
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        found.extend(daemon.part::<Arc<Audit>>().problem());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::AUDIT, |daemon, (), query, ()| {
            daemon.part::<Arc<Audit>>().report(query)
        });
    }
}

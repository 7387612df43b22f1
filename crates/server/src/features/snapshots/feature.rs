//! Snapshots by rule, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, ProblemKind, ReloadReport};

use super::SnapshotRules;
use super::options::SnapshotRule;
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::Daemon;
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;

/// Rolling snapshots of volumes.
pub(crate) struct RollingSnapshots;

impl Feature for RollingSnapshots {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<SnapshotRule>()]
    }

    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(SnapshotRules::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            daemon.set_snapshot_rules(start.configuration.all());
        }
        Ok(Vec::new())
    }

    fn reload(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        if daemon.set_snapshot_rules(new.all()) {
            report.changed.push("other rules for snapshots".into());
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            daemon.part::<SnapshotRules>().end_others(&[]);
        }
        Vec::new()
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        for (rule, error) in daemon.part::<SnapshotRules>().failures() {
            let (message, remedy) = super::problem(&rule, &error);
            let mut problem = FoundProblem::new(ProblemKind::SnapshotFailed, message, remedy);
            problem.cause = rule;
            found.push(problem);
        }
    }
}

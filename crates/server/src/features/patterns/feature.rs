//! The patterns of disks, as a feature of the daemon.

use std::sync::Arc;

use fathom_block::Clock;
use fathom_control::{ErrorBody, ProblemKind, endpoints};

use super::calls::Collector;
use super::of;
use crate::configuration::Configuration;
use crate::daemon::feature::{Beginning, Feature, Start};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::{Daemon, Served};

/// Copies and encryption of guests' files.
pub(crate) struct FilePatterns;

impl Feature for FilePatterns {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Collector::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        _start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            let collector = daemon.part::<Collector>();
            collector.set(daemon);
            if daemon.served().iter().any(|served| of(served).is_some()) {
                collector.begin(daemon);
            }
        }
        Ok(Vec::new())
    }

    fn stacked(&self, daemon: &Daemon, served: &Served) {
        if let Some(patterns) = of(served) {
            patterns.on_alarm(daemon.problem_waker());
            daemon.part::<Collector>().begin(daemon);
        }
    }

    fn disk_problems(&self, _daemon: &Daemon, served: &Served, found: &mut Vec<FoundProblem>) {
        let Some(patterns) = of(served) else { return };
        for state in &patterns.in_progress(Clock::System.now_ns()) {
            let (message, remedy) = super::problem(state, patterns.names(), served.disk.name());
            let mut problem = FoundProblem::new(ProblemKind::EncryptionInProgress, message, remedy);
            // One process may encrypt in several containers, and several in one.
            problem.cause = super::cause(&state.actor, patterns.names());
            found.push(problem);
        }
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::PATTERNS, |daemon, (), query, ()| {
            daemon.patterns(query.disk.as_deref())
        });
    }
}

//! The patterns of disks, as a feature of the daemon.

use std::sync::Arc;

use fathom_block::Clock;
use fathom_control::{ErrorBody, ProblemKind, endpoints};

use super::calls::Collector;
use super::of;
use super::pin::Pins;
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
        parts.add(Arc::<Pins>::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        _start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            let (collector, pins) = (daemon.part::<Collector>(), daemon.part::<Arc<Pins>>());
            collector.set(daemon);
            pins.set(daemon);
            daemon.served().iter().filter(|it| of(it).is_some()).for_each(|it| pins.begin(it));
            if daemon.served().iter().any(|served| of(served).is_some()) {
                collector.begin(daemon);
            }
        }
        Ok(Vec::new())
    }

    fn stacked(&self, daemon: &Daemon, served: &Served) {
        if let Some(patterns) = of(served) {
            let wake = daemon.problem_waker();
            let pins = Arc::clone(daemon.part::<Arc<Pins>>());
            patterns.on_alarm(move || {
                wake();
                pins.wake();
            });
            daemon.part::<Collector>().begin(daemon);
            daemon.part::<Arc<Pins>>().begin(served);
        }
    }

    fn disk_problems(&self, daemon: &Daemon, served: &Served, found: &mut Vec<FoundProblem>) {
        let Some(patterns) = of(served) else { return };
        for state in &patterns.in_progress(Clock::System.now_ns()) {
            let disk = served.disk.name();
            // One process may encrypt in several containers, and several in one.
            let cause = super::cause(&state.actor, patterns.names());
            let pin = daemon.part::<Arc<Pins>>().of(disk, &cause, state.begun_ns);
            let (message, remedy) = super::problem(state, patterns.names(), disk, pin.as_ref());
            let mut problem = FoundProblem::new(ProblemKind::EncryptionInProgress, message, remedy);
            problem.cause = cause;
            found.push(problem);
        }
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::PATTERNS, |daemon, (), query, ()| {
            daemon.patterns(query.disk.as_deref())
        });
    }
}

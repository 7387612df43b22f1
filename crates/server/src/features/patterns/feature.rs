//! The patterns of disks, as a feature of the daemon.

use fathom_block::Clock;
use fathom_control::{ProblemKind, endpoints};

use super::of;
use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;
use crate::daemon::problems::FoundProblem;
use crate::daemon::{Daemon, Served};

/// Copies and encryption of guests' files.
pub(crate) struct FilePatterns;

impl Feature for FilePatterns {
    fn stacked(&self, daemon: &Daemon, served: &Served) {
        if let Some(patterns) = of(served) {
            patterns.on_alarm(daemon.problem_waker());
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

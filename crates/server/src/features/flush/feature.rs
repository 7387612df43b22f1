//! The flushes of guests, as a feature of the daemon.

use std::sync::Arc;
use std::thread::Thread;

use fathom_control::{ErrorBody, ProblemKind, ReloadReport, endpoints};

use super::Flusher;
use super::idle::IdleFlusher;
use super::metrics::of_flushes;
use super::options::GuestOptions;
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::http::routes::{Routes, Share};
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, records_folder};
use crate::features::guests::Introspection;

/// Makes guests write their dirty data.
pub(crate) struct Flush;

impl Feature for Flush {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<GuestOptions>()]
    }

    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let Some(configuration) = configuration else { return };
        let control = &configuration.daemon.definition.control;
        parts.add(Flusher::new(configuration.all(), records_folder(control), control));
        parts.add(IdleFlusher::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let restoring = Arc::downgrade(daemon);
        daemon.part::<Arc<Introspection>>().on_attached(move || {
            if let Some(daemon) = restoring.upgrade() {
                daemon.restore_all_tunables();
            }
        });
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        _start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            daemon.begin_idle_flushes();
            daemon.begin_restorations();
        }
        Ok(Vec::new())
    }

    fn reload(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        if daemon.part::<Flusher>().set(new.all()) {
            report.changed.push("other options of guests".into());
            daemon.begin_idle_flushes();
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            daemon.part::<Flusher>().end();
            let thread = daemon.part::<IdleFlusher>().thread.get();
            thread.into_iter().flatten().for_each(Thread::unpark);
        }
        Vec::new()
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        let flusher = daemon.part::<Flusher>();
        for vm in flusher.left_frozen() {
            let (message, remedy) = flusher.frozen_problem(&vm);
            let mut problem = FoundProblem::new(ProblemKind::GuestFrozen, message, remedy);
            problem.cause = vm;
            found.push(problem);
        }
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_flushes(page, &scrape.daemon.part::<Flusher>().counts());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.change_within(
            Share::of_flushes(),
            &endpoints::FLUSH_GUEST,
            |daemon, vm, (), request| daemon.flush_guest(&vm, request.by),
        );
    }
}

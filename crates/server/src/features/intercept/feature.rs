//! The interception of guests, as a feature of the daemon.

use std::sync::{Arc, OnceLock};

use fathom_block::Clock;
use fathom_control::{ErrorBody, ErrorCode, ReloadReport};
use fathom_failure::Failure;

use super::hooks::problems;
use super::options::InterceptOptions;
use super::{Interceptors, NotedCalls};
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stack::refusal;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};
use crate::features::guests::usage::vm_of;
use crate::features::guests::{DiskGuest, Introspection};

/// The listener, if one is configured.
#[derive(Default)]
struct Listener(OnceLock<(InterceptOptions, Interceptors)>);

/// The writers of pages, by interceptors in the processes of virtual machines.
pub(crate) struct Interception;

impl Feature for Interception {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<InterceptOptions>()]
    }

    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Listener::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        let Some(placed) = start.configuration.one::<InterceptOptions>() else {
            return Ok(Vec::new());
        };
        if stage == Beginning::Observers {
            let options = placed.definition.clone();
            let guests = Arc::clone(daemon.part::<Arc<Introspection>>());
            let begun = Interceptors::listen(&options, guests).map_err(|error| {
                let path = options.socket.display();
                let message = format!("interceptors cannot connect to {path}: {error}");
                let remedy = "set another `socket` in [intercept], or remove what is there";
                ErrorBody::from(Failure::new(message).advise(remedy))
            });
            match begun {
                Ok(interceptors) => {
                    let _ = daemon.part::<Listener>().0.set((options, interceptors));
                }
                Err(refused) if start.is_strict => return Err(refused),
                Err(refused) => tracing::error!("{}: {}", refused.message, refused.remedy),
            }
        }
        Ok(Vec::new())
    }

    fn reread(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        let new = new.one::<InterceptOptions>().map(|placed| &placed.definition);
        let current = daemon.part::<Listener>().0.get().map(|(options, _)| options);
        if new != current {
            let refused = refusal(
                ErrorCode::Conflict,
                "[intercept] cannot change while the daemon runs",
                "restart it",
            );
            report.refused.push(refused.to_string());
        }
    }

    fn is_watched(&self, daemon: &Daemon) -> bool {
        // An interceptor does not say that it takes a hook away.
        daemon.part::<Listener>().0.get().is_some()
    }

    fn disk_problems(&self, daemon: &Daemon, served: &Served, found: &mut Vec<FoundProblem>) {
        let Some((options, _)) = daemon.part::<Listener>().0.get() else { return };
        let guest = served.part::<Arc<DiskGuest>>();
        if let Some(writers) = guest.and_then(|guest| guest.writers()) {
            found.extend(problems(&writers, options.stops_max, Clock::System.now_ns()));
        }
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        let name = "fathom_guest_stops_total";
        page.family(name, "counter", "Stops of the guest by its interceptor.");
        let guests = scrape.daemon.guests().guests;
        for guest in &guests {
            if let Some(stops) = guest.stops {
                let number = guest.number.to_string();
                page.sample(name, &[("guest", &number), ("vm", &guest.vm)], stops as f64);
            }
        }
        let name = "fathom_guest_hook_removals_total";
        page.family(name, "counter", "Hooks that were taken away because of too many stops.");
        for guest in &guests {
            let number = guest.number.to_string();
            for hook in &guest.hooks {
                let labels = [("guest", &*number), ("vm", &guest.vm), ("hook", hook.of.name())];
                page.sample(name, &labels, hook.removals as f64);
            }
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Observers {
            if let Some((_, interceptors)) = daemon.part::<Listener>().0.get() {
                interceptors.end();
            }
        }
        Vec::new()
    }
}

/// Whether system calls of guests are noted.
pub(crate) fn is_noting(daemon: &Daemon) -> bool {
    daemon.part::<Listener>().0.get().is_some_and(|(options, _)| !options.calls.is_empty())
}

/// The guests whose system calls are noted.
pub(crate) fn noted_calls(daemon: &Daemon) -> Vec<NotedCalls> {
    let listener = daemon.part::<Listener>().0.get();
    let mut noted = listener.map(|(_, interceptors)| interceptors.noted()).unwrap_or_default();
    let introspection = daemon.part::<Arc<Introspection>>();
    let served = daemon.served();
    for noted in &mut noted {
        vm_of(&served, &introspection.disks_of(&noted.guest)).clone_into(&mut noted.vm);
    }
    noted
}

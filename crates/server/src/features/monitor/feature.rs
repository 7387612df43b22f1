//! The link to the centre, as a feature of the daemon.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, MonitorStatus, ProblemKind, ReloadReport, endpoints};
use parking_lot::Mutex;

use super::Monitor;
use super::metrics::of_monitor;
use super::options::MonitorOptions;
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::Daemon;
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stack::refusal;
use crate::daemon::stop::Task;

/// How long the link may be away before that is a problem: longer than a restart of the centre.
const LINK_TIME_MAX: Duration = Duration::from_secs(10);

/// The link, if one is configured.
#[derive(Default)]
pub(crate) struct Link {
    pub monitor: OnceLock<Monitor>,
    /// When a check first saw that it does not run.
    away: Mutex<Option<Instant>>,
}

/// The link to the centre whose queries this host helps to answer.
pub(crate) struct Centre;

impl Feature for Centre {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<MonitorOptions>()]
    }

    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Link::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        let Some(monitor) = start.configuration.one::<MonitorOptions>() else {
            return Ok(Vec::new());
        };
        if stage == Beginning::Observers {
            if let Err(refused) = daemon.start_monitor(&monitor.definition) {
                if start.is_strict {
                    return Err(refused);
                }
                tracing::error!("{}: {}; then reload", refused.message, refused.remedy);
            }
        }
        Ok(Vec::new())
    }

    fn reread(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        let monitor = new.one().map(|placed| &placed.definition);
        let is_same = |old| monitor == Some(old);
        if let Some(options) = monitor.filter(|_| daemon.monitor_options().is_none_or(is_same)) {
            match daemon.refresh_monitor(options) {
                Ok(what) => report.changed.extend(what.map(str::to_owned)),
                Err(refused) => report.refused.push(refused.to_string()),
            }
        } else if monitor != daemon.monitor_options() {
            let what = "[monitor] cannot change while the daemon runs: restart it";
            report.refused.push(what.to_owned());
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Results {
            daemon.end_monitor();
        }
        Vec::new()
    }

    fn is_watched(&self, daemon: &Daemon) -> bool {
        daemon.monitor_options().is_some()
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        let Some(status) = daemon.part::<Link>().status() else { return };
        let mut away = daemon.part::<Link>().away.lock();
        let fails = status.state == "away" || status.problem.is_some() && status.fragments == 0;
        if !fails {
            *away = None;
        } else if away.get_or_insert_with(Instant::now).elapsed() >= LINK_TIME_MAX {
            found.push(no_events(&status));
        }
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        if let Some(monitor) = scrape.daemon.part::<Link>().status() {
            of_monitor(page, &monitor);
        }
    }

    fn routes(&self, routes: &mut Routes) {
        routes.at_once(&endpoints::MONITOR, |view, (), (), ()| {
            view.part::<Link>().status().ok_or_else(|| {
                refusal(
                    ErrorCode::NotFound,
                    "this daemon has no link to a centre",
                    "add [monitor] to its configuration",
                )
            })
        });
    }
}

fn no_events(status: &MonitorStatus) -> FoundProblem {
    let reason = status.problem.as_deref().unwrap_or("there has been no connection yet");
    let message = format!("the centre at {} gets no events: {reason}", status.address);
    let remedy = "start the centre, or correct [monitor]; `fathom monitor --status` shows the link";
    FoundProblem::new(ProblemKind::MonitorLink, message, remedy.to_owned())
}

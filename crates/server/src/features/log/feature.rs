//! The logs of disks, as a feature of the daemon.

use std::io;
use std::sync::Arc;

use fathom_block::Disk;
use fathom_control::{ErrorBody, ErrorCode, ProblemKind, ReloadReport, endpoints};
use fathom_layers::LayerKind;

use super::{CacheStores, DiskLog, LogVolumes, OffloadDefinition, WalDefinition};
use crate::configuration::Configuration;
use crate::daemon::feature::{Feature, Leaving};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stack::{Equipment, refusal};
use crate::daemon::{Daemon, Served};

/// The logs in which changes are durable before they are written home.
pub(crate) struct Logs;

impl Feature for Logs {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(LogVolumes::default());
        parts.add(CacheStores::default());
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        super::equip::equip(disk)
    }

    fn abandon(&self, disk: &Equipment<'_>) {
        super::equip::abandon(disk);
    }

    fn unopened(&self, parts: &Parts) {
        parts.get::<DiskLog>().iter().for_each(DiskLog::abandon);
    }

    fn equipped(&self, equipment: &Equipment<'_>, _disk: &Arc<Disk>) {
        super::equip::equipped(equipment);
    }

    fn prepare(&self, daemon: &Arc<Daemon>, configuration: &Configuration) {
        let logs = daemon.part::<LogVolumes>();
        logs.know(configuration.disks.iter().map(|disk| &disk.definition));
        logs.lives.begin(&daemon.options.control);
    }

    fn stacked(&self, _daemon: &Daemon, served: &Served) {
        let log = served.part::<DiskLog>();
        if let Some(log) = log {
            // Also while no front end has a queue, and after its volume has failed.
            log.attend(&served.disk);
            log.recover_when_failed(served.disk.name());
        }
    }

    fn reread(&self, daemon: &Arc<Daemon>, new: &Configuration, _report: &mut ReloadReport) {
        let disks = new.disks.iter().map(|disk| &disk.definition);
        daemon.part::<LogVolumes>().know(disks);
    }

    fn disk_problems(&self, daemon: &Daemon, served: &Served, found: &mut Vec<FoundProblem>) {
        let doubt = daemon.part::<LogVolumes>().doubt(served.disk.name());
        found.extend(
            doubt.map(|(message, remedy)| {
                FoundProblem::new(ProblemKind::LogUnknown, message, remedy)
            }),
        );
    }

    fn layers(&self) -> Vec<LayerKind> {
        vec![LayerKind::of::<WalDefinition>(), LayerKind::of::<OffloadDefinition>()]
    }

    fn objection_to_size(&self, served: &Served, is_smaller: bool) -> Option<ErrorBody> {
        served.part::<DiskLog>().filter(|_| is_smaller)?;
        let name = served.disk.name();
        Some(refusal(
            ErrorCode::Unsupported,
            format!("the disk {name:?} has a log, which may hold changes beyond the new size"),
            "remove its layer `wal`, shrink the disk, and add the layer again",
        ))
    }

    fn leaving(&self, served: &Served, stage: Leaving) -> io::Result<()> {
        let Some(log) = served.part::<DiskLog>() else { return Ok(()) };
        match stage {
            Leaving::Begun => log.forbid_attendance(),
            Leaving::Drained => log.end_attendance(),
            // Changes that are not written back are in the log, where the next daemon finds them.
            // The last flush makes them durable.
            Leaving::Home { time_max } => log.bring_home(&served.disk, time_max)?,
        }
        Ok(())
    }

    fn routes(&self, routes: &mut Routes) {
        routes.change(&endpoints::DECIDE_LOG, |daemon, name, (), request| {
            daemon.decide_log(&name, request.decision)
        });
    }
}

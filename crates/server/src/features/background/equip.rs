//! The scheduler of background work of a disk.

use std::sync::Arc;

use fathom_block::{Disk, Layer};
use fathom_control::DiskDefinition;

use super::{Activity, BackgroundWork, Scheduled};
use crate::configuration::layers;
use crate::daemon::parts::Parts;
use crate::daemon::stack::{Equipment, Fitted, LayerKey, Position};
use crate::daemon::{Daemon, Served};
use crate::stores::location::{SEARCH_TIME_MAX, placement_within};

/// How often background work had begun on a device when a disk began to be opened.
#[derive(Clone, Copy)]
pub(super) struct Beginnings(pub(super) u64);

/// Gives a disk its scheduler, and the layer that reports its requests to it. A disk keeps its
/// scheduler.
pub(super) fn equip(disk: &mut Equipment<'_>) {
    if disk.before.is_none() {
        disk.parts.add(Beginnings(disk.shared.of::<BackgroundWork>().beginnings()));
    }
    let had = disk.had::<Arc<Scheduled>>();
    let Some(device) = had.or_else(|| background_of(disk.definition, disk.shared)) else { return };
    if let Some(before) = &disk.before {
        before.disk.schedule_background(Arc::<Scheduled>::clone(&device));
    }
    let (scheduler, name) = (Arc::clone(&device), disk.definition.name.clone());
    disk.fitted.push(Fitted {
        key: LayerKey::Activity,
        position: Position::Device,
        make: Box::new(move || {
            Ok(Arc::new(Activity::new(Arc::clone(&scheduler), &name)) as Arc<dyn Layer>)
        }),
    });
    disk.parts.add(device);
}

/// Gives a new disk its scheduler.
pub(super) fn equipped(equipment: &Equipment<'_>, disk: &Disk) {
    let device = equipment.parts.get::<Arc<Scheduled>>();
    if let Some(device) = device.filter(|_| equipment.before.is_none()) {
        disk.schedule_background(device);
    }
}

/// The scheduler of background work for a disk that has such work, or whose devices are shared with
/// one that has. Without a scheduler, work is done when it is due.
fn background_of(definition: &DiskDefinition, parts: &Parts) -> Option<Arc<Scheduled>> {
    let has_work = layers::wal(definition).is_some();
    if !has_work && parts.of::<BackgroundWork>().is_empty() {
        return None;
    }
    let placement = placement_within(definition, SEARCH_TIME_MAX);
    let is_known = placement.problem.is_none();
    is_known.then(|| parts.of::<BackgroundWork>().of(&placement, has_work)).flatten()
}

impl Daemon {
    /// Observes the requests of disks that share devices with background work and were served
    /// before it began. Each wait for a disk is bounded.
    pub(crate) fn observe_disks(&self) {
        let is_observed = |served: &Served| served.part::<Arc<Scheduled>>().is_some();
        for served in self.served() {
            let name = served.disk.name();
            if is_observed(&served) {
                continue;
            }
            // A disk that is being removed, or that another change occupies for long, stays as it
            // is.
            let Ok(_change) = self.change(name) else { continue };
            let Ok(served) = self.find(name) else { continue };
            let definition = served.live().definition.clone();
            let is_left = is_observed(&served) || served.withdrawal().is_some();
            if is_left || background_of(&definition, &self.parts).is_none() {
                continue;
            }
            if let Err(refused) = self.restack(&served, definition) {
                let reason = refused.message;
                tracing::warn!(disk = name, "is not observed for background work: {reason}");
            }
        }
    }
}

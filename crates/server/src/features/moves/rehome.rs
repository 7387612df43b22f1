//! A disk in use gets another store.

use std::io;
use std::sync::Arc;

use fathom_block::{Backend, CHANGE_TIME_MAX};
use fathom_control::{DiskDefinition, ErrorBody};

use crate::daemon::changes::Claims;
use crate::daemon::disks::exchange;
use crate::daemon::stack::{Before, Equipment, LayerKey};
use crate::daemon::{Daemon, Served};
use crate::features::background::Scheduled;
use crate::stores::pools::Pools;

/// The kinds of layers that look for the devices of the store when they are made.
const OF_DEVICES: [&str; 1] = ["schedule"];

impl Daemon {
    /// Gives a disk the store `home`, which `definition` names. `commit` is called while no queue
    /// has a request in flight or takes one: it makes the content equal, and decides whether the
    /// disk changes over. Layers that the definition has stay with their state, but those that
    /// belong to the devices beneath. The caller has the right to change the disk.
    ///
    /// # Errors
    /// Why the disk keeps its store.
    pub(super) fn rehome(
        &self,
        served: &Served,
        definition: DiskDefinition,
        home: &Arc<dyn Backend>,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ErrorBody> {
        let disk = &served.disk;
        let (before, scheduler) = {
            let live = served.live();
            let is_kept = |(key, layer): &&(LayerKey, _)| -> bool {
                let layer: &Arc<dyn fathom_block::Layer> = layer;
                *key != LayerKey::Activity && !OF_DEVICES.contains(&layer.name())
            };
            let before = Before {
                disk,
                definition: live.definition.clone(),
                parts: live.parts.without::<Arc<Scheduled>>(),
                layers: live.layers.iter().filter(is_kept).cloned().collect(),
            };
            (before, live.parts.get::<Arc<Scheduled>>())
        };
        let former = before.definition.clone();
        let (records, number) = (self.records_folder(), self.instance());
        disk.unschedule_background();
        let made =
            Equipment::new(&definition, (&self.parts, &*records), home, number, Some(before))
                .and_then(|equipment| {
                    let restack =
                        |layers| disk.rehome(layers, Arc::clone(home), CHANGE_TIME_MAX, commit);
                    let made = exchange(disk, &equipment, restack);
                    let made = made.inspect_err(|_| equipment.abandon())?;
                    equipment.equipped(disk);
                    Ok((equipment.parts.clone(), made))
                });
        let (parts, made) = made.inspect_err(|_| match &scheduler {
            Some(scheduler) => disk.schedule_background(Arc::<Scheduled>::clone(scheduler)),
            None => disk.unschedule_background(),
        })?;
        *served.claims.lock() = Claims::new(&definition);
        self.adopt(served, definition, parts, made);
        if let Some(path) = &former.store {
            self.part::<Pools>().leave(path);
        }
        Ok(())
    }
}

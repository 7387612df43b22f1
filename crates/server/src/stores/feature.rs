//! The stores that disks share, as a feature of the daemon.

use std::sync::Arc;

use fathom_block::{Disk, Layer};
use fathom_control::{ChainFile, DiskStatus, ErrorBody, ReloadReport, WhenFull};
use fathom_layers::{LimitGroups, ScheduleDevices, WaitForRoom};

use super::clusters::Clusters;
use super::exports::{OpenExports, attend};
use super::kept::NotesFolder;
use super::models::ModelDevices;
use super::options::ClusterDefinition;
use super::pools::Pools;
use super::qemu::{self, QemuDisks};
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::feature::Feature;
use crate::daemon::parts::Parts;
use crate::daemon::stack::{Equipment, Fitted, LayerKey, Position};
use crate::daemon::{Daemon, Served};

/// The clusters, modelled devices, and what layers of several disks share.
pub(crate) struct Stores;

/// The files of a disk whose image QEMU serves.
#[derive(Clone)]
struct ImageChain(Vec<ChainFile>);

impl Feature for Stores {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<ClusterDefinition>()]
    }

    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let clusters = Clusters::default();
        clusters.set(configuration.map_or(&[], |configuration| configuration.all()));
        parts.add(clusters);
        parts.add(LimitGroups::default());
        parts.add(ScheduleDevices::default());
        parts.add(ModelDevices::default());
        let memory = configuration.map(|found| found.daemon.definition.store_index_memory.0);
        parts.add(Pools::new(memory));
        parts.add(OpenExports::default());
        parts.add(QemuDisks::default());
        parts.add(NotesFolder::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        daemon.part::<NotesFolder>().begin(&daemon.options.control);
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        let by_qemu = qemu::format(disk.definition).is_some();
        let qemu = disk.shared.of::<QemuDisks>().find(&disk.definition.name);
        if let Some(qemu) = qemu.filter(|_| by_qemu) {
            disk.parts.add(ImageChain(qemu::files(qemu.chain())));
            if !qemu::has_whole_log(disk.definition) {
                qemu.leave_log();
            }
        }
        // The model of a disk with a volume is that of its pool's device.
        let has_pool = disk.definition.store.is_some();
        if let Some(model) = disk.definition.model.as_ref().filter(|_| !has_pool) {
            let (devices, capacity) = (disk.shared.of::<ModelDevices>(), disk.home.capacity());
            disk.fitted.push(Fitted {
                key: LayerKey::Model(model.clone()),
                position: Position::Lowest,
                make: Box::new(move || {
                    Ok(Arc::new(devices.make(model, capacity)?) as Arc<dyn Layer>)
                }),
            });
        }
        let waits = disk.definition.when_full == WhenFull::Wait;
        let had = disk.had::<WaitForRoom>();
        let room = if disk.before.is_some() { had } else { waits.then(WaitForRoom::new) };
        if let Some(room) = room {
            let layer = room.clone();
            disk.fitted.push(Fitted {
                key: LayerKey::Room,
                position: Position::Lowest,
                make: Box::new(move || Ok(Arc::new(layer.clone()) as Arc<dyn Layer>)),
            });
            disk.parts.add(room);
        }
        Ok(())
    }

    fn equipped(&self, equipment: &Equipment<'_>, disk: &Arc<Disk>) {
        if equipment.before.is_none() {
            equipment.shared.of::<OpenExports>().attend(disk);
            if let Some(qemu) = equipment.shared.of::<QemuDisks>().find(disk.name()) {
                attend(qemu.remote(), disk);
            }
        }
        let room = equipment.parts.get::<WaitForRoom>();
        if let Some(room) = room.filter(|_| equipment.before.is_none()) {
            let weak = Arc::downgrade(disk);
            room.watch(move || {
                if let Some(disk) = weak.upgrade() {
                    disk.failures().call();
                }
            });
        }
    }

    fn status(&self, served: &Served, status: &mut DiskStatus) {
        let chain = served.live().parts.get::<ImageChain>();
        status.backend.chain = chain.map(|chain| chain.0).unwrap_or_default();
    }

    fn reread(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        if daemon.part::<Clusters>().set(new.all()) {
            report.changed.push("other clusters, for logs that are opened from now on".into());
        }
    }
}

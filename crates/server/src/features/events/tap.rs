//! The layer `tap` of a disk, whose events are collected.

use fathom_control::DiskDefinition;
use fathom_layers::{Tap, tap};
use std::sync::Arc;

use crate::daemon::change_log::physical_disk;
use crate::daemon::stack::{Equipment, names_layer};
use crate::daemon::statistics::TapNumber;

/// Gives a disk its tap, if its definition has one.
pub(super) fn equip(disk: &mut Equipment<'_>) {
    let Some(new) = make_tap(disk.definition, disk.number as u32) else { return };
    let had = disk.had::<Tap>().zip(disk.had::<TapNumber>());
    let (tap, number) = had.unwrap_or((new, TapNumber(disk.number)));
    disk.named.push(Arc::new(tap.clone()));
    disk.parts.add(tap);
    disk.parts.add(number);
}

/// The tap of a disk, if it has one.
fn make_tap(definition: &DiskDefinition, number: u32) -> Option<Tap> {
    (definition.tap || names_layer(definition, "tap")).then(|| {
        let labels = tap::Labels {
            vm_name: definition.vm.clone(),
            virtual_disk: definition.name.clone(),
            physical_disk: physical_disk(definition),
        };
        Tap::new(number, labels)
    })
}

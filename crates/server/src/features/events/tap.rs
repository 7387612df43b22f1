//! The layer `tap` of a disk, whose events are collected.

use std::sync::Arc;

use fathom_control::DiskDefinition;
use fathom_layers::{Tap, tap};

use crate::daemon::change_log::physical_disk;
use crate::daemon::stack::{Equipment, names_layer};
use crate::daemon::statistics::TapNumber;

/// Gives a disk its tap, if its definition has one.
pub(super) fn equip(disk: &mut Equipment<'_>) {
    let (definition, number) = (disk.definition, disk.number);
    if !definition.tap && !names_layer(definition, "tap") {
        return;
    }
    let had = disk.had::<Tap>().zip(disk.had::<TapNumber>());
    let (tap, number) = had.unwrap_or_else(|| (make(definition, number), TapNumber(number)));
    disk.named.push(Arc::new(tap.clone()));
    disk.parts.add(tap);
    disk.parts.add(number);
}

fn make(definition: &DiskDefinition, number: u64) -> Tap {
    Tap::new(number as u32, labels_of(definition))
}

/// What all events of a disk have in common.
pub(super) fn labels_of(definition: &DiskDefinition) -> tap::Labels {
    tap::Labels {
        vm_name: definition.vm.clone(),
        virtual_disk: definition.name.clone(),
        physical_disk: physical_disk(definition),
    }
}

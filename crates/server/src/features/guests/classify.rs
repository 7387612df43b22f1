//! The layer `classify` of a disk, and what it counts.

use std::sync::Arc;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_frontend::vhost_user::GuestObserver;
use fathom_insight::{ClassTable, Waiters};
use fathom_layers::Classify;
use fathom_layers::classify::{ClassifyOptions, UsageOptions};
use serde_json::Value;

use super::{DiskGuest, Introspection};
use crate::daemon::stack::{Equipment, names_layer, refusal};

/// The number of the accounts of `classify`: another one has other accounts.
#[derive(Clone, Copy)]
pub(crate) struct AccountsNumber(pub u64);

/// Gives a disk its guest, and the layer `classify` if its definition has one.
pub(super) fn equip(disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
    let definition = disk.definition;
    let is_wanted = is_classified(definition);
    let guest = disk.had::<Arc<DiskGuest>>().unwrap_or_else(|| {
        let introspection = disk.shared.of::<Arc<Introspection>>();
        DiskGuest::new(introspection, &definition.name, is_wanted)
    });
    disk.names = Arc::clone(guest.names());
    disk.guest = Some(Arc::clone(guest.slot()));
    if is_wanted {
        let table = class_table(definition)?;
        let (had, number) = (disk.had::<Classify>(), disk.had::<AccountsNumber>());
        let (classify, number) = had.zip(number).unwrap_or_else(|| {
            let groups_max = guest.groups_max();
            let options = UsageOptions { groups_max, ..UsageOptions::default() };
            let (slot, names) = (Arc::clone(guest.slot()), Arc::clone(guest.names()));
            (Classify::new(slot, table, names, options), AccountsNumber(disk.number))
        });
        disk.waiters = Some(Arc::clone(guest.slot()) as Arc<dyn Waiters>);
        disk.named.push(Arc::new(classify.clone()));
        disk.parts.add(classify);
        disk.parts.add(number);
    }
    disk.parts.add(Arc::<DiskGuest>::clone(&guest) as Arc<dyn GuestObserver>);
    disk.parts.add(guest);
    Ok(())
}

/// The disk has the layer, or has it no more.
pub(super) fn equipped(disk: &Equipment<'_>) {
    let classify = disk.parts.get::<Classify>();
    if let Some(classify) = &classify {
        classify.set_databases(finds_databases(disk.definition));
        if let Ok(table) = class_table(disk.definition) {
            classify.set_table(table);
        }
    }
    if let Some(guest) = disk.parts.get::<Arc<DiskGuest>>() {
        guest.set_wanted(classify.is_some());
    }
}

/// Whether the disk has a layer that finds out what requests mean.
fn is_classified(definition: &DiskDefinition) -> bool {
    definition.classify || names_layer(definition, "classify")
}

/// The table of I/O classes of a disk.
fn class_table(definition: &DiskDefinition) -> Result<ClassTable, ErrorBody> {
    let Some(bounds) = &definition.class_bounds else { return Ok(ClassTable::default()) };
    ClassTable::new(bounds.iter().map(|bound| bound.0).collect()).map_err(|error| {
        let message = format!("`class_bounds` is not valid: {error}");
        refusal(ErrorCode::Invalid, message, "list sizes in descending order")
    })
}

/// Whether the layer `classify` of a disk looks for databases: an option of the layer, if it is
/// listed.
fn finds_databases(definition: &DiskDefinition) -> bool {
    let listed = definition.layers.iter().find(|layer| layer.kind == "classify");
    let option = listed.and_then(|layer| layer.options.get("databases"));
    option.and_then(Value::as_bool).unwrap_or(ClassifyOptions::default().databases)
}

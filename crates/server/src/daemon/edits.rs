//! The changes of requests to the definitions of disks.

use fathom_control::{Bytes, DiskChange, DiskDefinition, ErrorBody, ErrorCode, LayerDefinition};

use crate::configuration::order::{self, Beside};
use crate::configuration::{Origins, Problems, check_disk, layers};
use crate::daemon::stack::{self, KeyedLayer, invalid, refusal};
use crate::stores::kinds::StoreKind;

/// Applies the change of a request to the layers of a definition, and checks them.
pub(crate) fn edit_layers(
    definition: &mut DiskDefinition,
    change: &DiskChange,
    made: &[KeyedLayer],
) -> Result<(), ErrorBody> {
    if let Some(tap) = change.tap {
        definition.tap = tap;
        if !tap && change.layers.is_none() {
            definition.layers.retain(|layer| layer.name() != "tap");
        }
    }
    if let Some(classify) = change.classify {
        definition.classify = classify;
        if !classify && change.layers.is_none() {
            definition.layers.retain(|layer| layer.name() != "classify");
        }
    }
    if let Some(layers) = &change.layers {
        definition.layers.clone_from(layers);
    }
    if let Some(kind) = &change.remove_layer {
        remove_layer(definition, kind)?;
    }
    if let Some(layer) = &change.set_layer {
        let beside = Beside { above: change.above.as_deref(), below: change.below.as_deref() };
        stack::set_layer(definition, layer, beside, made)?;
    }
    check_request(definition)
}

/// The definition of a disk with another size; `None` if its image has the size.
pub(crate) fn with_capacity(
    mut definition: DiskDefinition,
    capacity: Bytes,
) -> Option<DiskDefinition> {
    *StoreKind::of(&definition)?.size(&mut definition)? = capacity;
    Some(definition)
}

/// Removes the layers of a kind from a definition.
fn remove_layer(definition: &mut DiskDefinition, kind: &str) -> Result<(), ErrorBody> {
    let count = definition.layers.len();
    definition.layers.retain(|layer| layer.name() != kind);
    let is_implied = match kind {
        "tap" => std::mem::take(&mut definition.tap),
        "classify" => std::mem::take(&mut definition.classify),
        _ => false,
    };
    if definition.layers.len() == count && !is_implied {
        let names: Vec<&str> = definition.layers.iter().map(LayerDefinition::name).collect();
        let shown: String = kind.chars().take(60).collect();
        return Err(refusal(
            ErrorCode::NotFound,
            format!("the disk {:?} has no layer {shown:?}", definition.name),
            fathom_options::suggestion(&shown, &names),
        ));
    }
    Ok(())
}

/// Completes and checks a definition from a request.
pub(crate) fn check_request(definition: &mut DiskDefinition) -> Result<(), ErrorBody> {
    let (places, mut problems) = (Origins::default(), Problems::default());
    layers::complete(&mut definition.layers, &places, None, &mut problems);
    problems.none_or().map_err(|problems| invalid(&problems))?;
    check_disk(definition, &places).map_err(|problems| invalid(&problems))?;
    order::warn(definition);
    Ok(())
}

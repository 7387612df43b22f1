//! The modelled disks, and the modelled devices on which several disks lie.

use std::collections::HashMap;

use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_control::{Bytes, ErrorBody, ErrorCode, ModelDefinition, ModelKind};
use parking_lot::Mutex;

use crate::daemon::stack::refusal;

/// Disks on a modelled device begin at multiples of this, in bytes.
const DISK_ALIGNMENT: u64 = 1 << 20;

/// The modelled devices in use, by name.
#[derive(Default)]
pub(crate) struct ModelDevices {
    devices: Mutex<HashMap<String, Device>>,
}

struct Device {
    /// The definition by the disk that was opened first.
    definition: ModelDefinition,
    model: Model,
    /// The end of the last disk, in bytes.
    end: u64,
}

impl ModelDevices {
    /// The model of a disk of `capacity` bytes. A disk without an offset lies behind the disks that
    /// its modelled device already has.
    ///
    /// # Errors
    /// If the definitions of the disks of a modelled device differ, or the device is full.
    pub(crate) fn make(
        &self,
        definition: &ModelDefinition,
        capacity: u64,
    ) -> Result<Model, ErrorBody> {
        let name = &definition.device;
        let offset = definition.offset.map(|offset| offset.0);
        if name.is_empty() {
            return Ok(make(definition, capacity));
        }
        let mut devices = self.devices.lock();
        devices.retain(|_, device| device.model.is_shared());
        let same = ModelDefinition { offset: None, ..definition.clone() };
        let device = devices.entry(name.clone()).or_insert_with(|| Device {
            model: make(definition, capacity),
            definition: same.clone(),
            end: 0,
        });
        if device.definition != same {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("another disk defines the modelled device {name:?} differently"),
                "use the same `model` for all of its disks; only `offset` may differ",
            ));
        }
        let offset = offset.unwrap_or(device.end);
        let end = offset.saturating_add(capacity);
        let size = definition.size.unwrap_or(default_size(definition));
        if end > size.0 {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk ends behind the end of the modelled device {name:?}, at {size}"),
                "choose a larger `size` for all of the device's disks, or another `offset`",
            ));
        }
        device.end = device.end.max(end).next_multiple_of(DISK_ALIGNMENT);
        Ok(device.model.at(offset))
    }
}

/// The size of a modelled device if its definition has none.
fn default_size(definition: &ModelDefinition) -> Bytes {
    match definition.kind {
        ModelKind::Hdd => Bytes(HddParameters::default().capacity),
        // A place on a solid-state disk has no effect on the timing.
        ModelKind::Ssd | ModelKind::SataSsd => Bytes(1 << 60),
    }
}

fn make(definition: &ModelDefinition, capacity: u64) -> Model {
    let solid = |parameters: SsdParameters| {
        let power_loss_protected = definition.power_loss_protected;
        Model::ssd(SsdParameters { power_loss_protected, ..parameters }, definition.seed)
    };
    match definition.kind {
        ModelKind::Hdd => {
            let mut parameters = HddParameters::default();
            if definition.spanning {
                parameters = HddParameters::spanning(capacity);
            }
            if let Some(size) = definition.size {
                parameters.capacity = size.0;
            }
            if let Some(size) = definition.write_cache {
                parameters.write_cache = size.0;
            }
            Model::hdd(parameters, definition.seed)
        }
        ModelKind::Ssd => solid(SsdParameters::nvme()),
        ModelKind::SataSsd => solid(SsdParameters::sata()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(device: &str) -> ModelDefinition {
        ModelDefinition { device: device.into(), ..ModelDefinition::default() }
    }

    #[test]
    fn disks_of_a_device_share_its_model_until_the_last_is_closed() {
        let devices = ModelDevices::default();
        let first = devices.make(&on("a"), 1000).unwrap();
        let second = devices.make(&on("a"), 1000).unwrap();
        assert!(first.is_same(&second));
        assert!(!first.is_same(&devices.make(&on("b"), 1000).unwrap()));
        assert!(!first.is_same(&devices.make(&on(""), 1000).unwrap()));
        let other = ModelDefinition { seed: 1, ..on("a") };
        let refused = devices.make(&other, 1000).map(|_| ()).unwrap_err();
        assert!(refused.message.contains("differently"), "{refused:?}");
        drop((first, second));
        assert!(devices.make(&other, 1000).is_ok());
    }

    #[test]
    fn a_disk_has_to_fit_on_its_device() {
        let devices = ModelDevices::default();
        let small = ModelDefinition { size: Some(Bytes(10 << 20)), ..on("a") };
        let _first = devices.make(&small, (4 << 20) + 1).unwrap();
        let _second = devices.make(&small, 5 << 20).unwrap();
        let full = devices.make(&small, 1).map(|_| ()).unwrap_err();
        assert!(full.message.contains("behind the end"), "{full:?}");
        let placed = |offset| ModelDefinition { offset: Some(Bytes(offset)), ..small.clone() };
        assert!(devices.make(&placed(1 << 20), 9 << 20).is_ok());
        assert!(devices.make(&placed(u64::MAX), 9 << 20).is_err());
    }
}

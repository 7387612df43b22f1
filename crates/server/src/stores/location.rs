//! What the image and the log of a disk lie on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_control::{DiskDefinition, ModelDefinition};
use fathom_devices::{Medium, MediumKind, Placement, resolve, resolve_within};

use crate::configuration::layers;
use crate::stores::exports;

/// How long the search for the devices beneath a new disk may take.
pub(crate) const SEARCH_TIME_MAX: Duration = Duration::from_secs(1);

/// Where a store is to be looked for.
pub(crate) enum Location {
    Known(Placement),
    Path(PathBuf),
}

impl Location {
    fn new(path: &Path, model: Option<&ModelDefinition>, name: &str) -> Self {
        match model {
            Some(model) => Self::Known(Placement::on(medium_of_model(model, name))),
            None => Self::Path(path.to_owned()),
        }
    }

    fn find_within(&self, limit: Duration) -> Placement {
        match self {
            Self::Known(placement) => placement.clone(),
            Self::Path(path) => resolve_within(path, limit),
        }
    }

    /// May hang with the file system.
    pub(crate) fn find(&self) -> Placement {
        match self {
            Self::Known(placement) => placement.clone(),
            Self::Path(path) => resolve::resolve(path),
        }
    }
}

/// The modelled device of a store: one that several disks share, or its own.
fn medium_of_model(model: &ModelDefinition, name: &str) -> Medium {
    let shared = &model.device;
    let name = if shared.is_empty() { format!("{name} (model)") } else { shared.clone() };
    Medium::new(MediumKind::Model, name)
}

/// The locations of a disk's image and of its log.
pub(crate) fn locations(definition: &DiskDefinition) -> (Location, Option<Location>) {
    let name = &definition.name;
    let model = definition.model.as_ref();
    let image = match (definition.image.as_ref().or(definition.store.as_ref()), model) {
        (Some(path), _) => Location::new(path, model, name),
        (_, Some(model)) => Location::Known(Placement::on(medium_of_model(model, name))),
        (_, None) if definition.nbd.is_some() => {
            let server = exports::server(definition).unwrap_or_default();
            Location::Known(Placement::on(Medium::new(MediumKind::Network, server)))
        }
        (_, None) => Location::Known(Placement::on(Medium::memory())),
    };
    // Another host is no device of this one.
    let log = layers::wal(definition)
        .filter(|wal| wal.server().is_none())
        .map(|wal| Location::new(&wal.log, wal.model.as_ref(), &format!("log of {name}")));
    (image, log)
}

/// What the image of a disk lies on, as far as it is found within `limit`.
pub(crate) fn placement_within(definition: &DiskDefinition, limit: Duration) -> Placement {
    locations(definition).0.find_within(limit)
}

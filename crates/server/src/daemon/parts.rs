//! What features keep, found by its type: the daemon has no field for a feature.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::sync::Arc;

use crate::configuration::Configuration;
use crate::features::FEATURES;

/// What features keep for all disks, or of one. A clone has the same parts.
#[derive(Clone, Default)]
pub(crate) struct Parts(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Parts {
    /// What the features keep for all disks. A command that opens a disk without a daemon has no
    /// configuration.
    pub(crate) fn of_features(configuration: Option<&Configuration>) -> Self {
        let mut parts = Self::default();
        for feature in FEATURES {
            feature.keep(configuration, &mut parts);
        }
        parts
    }

    /// Adds a part. A type has one.
    pub(crate) fn add<T: Any + Send + Sync>(&mut self, part: T) {
        let former = self.0.insert(TypeId::of::<T>(), Arc::new(part));
        debug_assert!(former.is_none(), "two parts of the type {}", type_name::<T>());
    }

    /// The same parts without that of a type.
    pub(crate) fn without<T: Any>(&self) -> Self {
        let mut rest = self.clone();
        rest.0.remove(&TypeId::of::<T>());
        rest
    }

    /// The part of a type, if there is one.
    pub(crate) fn find<T: Any>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }

    /// A copy of the part of a type, if there is one.
    pub(crate) fn get<T: Any + Clone>(&self) -> Option<T> {
        self.find().cloned()
    }

    /// A part that a feature has added in [`keep`](crate::daemon::feature::Feature::keep).
    ///
    /// # Panics
    /// If no feature has: then the type is named wrongly, which the first call shows.
    pub(crate) fn of<T: Any>(&self) -> &T {
        self.find().unwrap_or_else(|| panic!("no feature keeps a {}", type_name::<T>()))
    }
}

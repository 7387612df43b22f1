//! What a disk gets from the features when it is opened or gets other layers.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use fathom_block::{Backend, Disk, Layer};
use fathom_control::{DiskDefinition, ErrorBody};
use fathom_insight::{Names, Waiters};
use fathom_layers::GuestSlot;
use fathom_layers::cache::CacheHost;

use super::layers::{KeyedLayer, LayerKey};
use crate::daemon::parts::Parts;
use crate::features::FEATURES;

/// Where a layer that no definition lists is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// Directly beneath the cache whose changes are in a log.
    Cache,
    /// Above what stands for the device. It is left out if the disk has too many layers.
    Device,
    /// Beneath all others, in the order in which they are added.
    Lowest,
}

/// A layer that no definition lists.
pub(crate) struct Fitted<'a> {
    pub key: LayerKey,
    pub position: Position,
    /// Makes it, if the disk does not have it yet.
    pub make: Box<dyn Fn() -> Result<Arc<dyn Layer>, ErrorBody> + 'a>,
}

/// What a disk in use has before it gets other layers.
pub(crate) struct Before<'a> {
    pub disk: &'a Arc<Disk>,
    pub definition: DiskDefinition,
    pub parts: Parts,
    pub layers: Vec<KeyedLayer>,
}

/// What a disk gets. The features add to it, one after the other.
pub(crate) struct Equipment<'a> {
    pub definition: &'a DiskDefinition,
    /// What the features keep for all disks.
    pub shared: &'a Parts,
    /// The folder for records that outlive the daemon.
    pub records: &'a Path,
    /// The store of the disk.
    pub home: &'a Arc<dyn Backend>,
    /// A number that no other disk, tap or account of this daemon has.
    pub number: u64,
    /// What it had; `None` while it is opened.
    pub before: Option<Before<'a>>,
    pub parts: Parts,
    /// The layers that a definition can name and of which the disk has one, whatever it says.
    pub named: Vec<Arc<dyn Layer>>,
    /// The layers that no definition lists.
    pub fitted: Vec<Fitted<'a>>,
    /// The texts of the numbers in insights.
    pub names: Arc<Names>,
    /// Who waits for requests in the guest, if that is known.
    pub waiters: Option<Arc<dyn Waiters>>,
    /// The place of the guest, which is empty while its memory is not examined.
    pub guest: Option<Arc<GuestSlot>>,
    /// What a cache needs of the daemon.
    pub cache_host: Option<Box<dyn CacheHost + 'a>>,
}

impl<'a> Equipment<'a> {
    /// Lets the features equip the disk.
    ///
    /// # Errors
    /// Why one of them cannot. What the others have begun is undone.
    pub(crate) fn new(
        definition: &'a DiskDefinition,
        (shared, records): (&'a Parts, &'a Path),
        home: &'a Arc<dyn Backend>,
        number: u64,
        before: Option<Before<'a>>,
    ) -> Result<Self, ErrorBody> {
        let mut equipment = Self {
            definition,
            shared,
            records,
            home,
            number,
            before,
            parts: Parts::default(),
            named: Vec::new(),
            fitted: Vec::new(),
            names: Arc::default(),
            waiters: None,
            guest: None,
            cache_host: None,
        };
        let equipped = FEATURES.iter().try_for_each(|feature| feature.equip(&mut equipment));
        if equipped.is_err() {
            equipment.abandon();
        }
        equipped.map(|()| equipment)
    }

    /// The part of a type that the disk had before.
    pub(crate) fn had<T: Any + Clone>(&self) -> Option<T> {
        self.before.as_ref()?.parts.get()
    }

    /// The layers of a disk are about to be exchanged.
    pub(crate) fn exchanging(&self) {
        for feature in FEATURES {
            feature.exchanging(self);
        }
    }

    /// The disk is not opened, or keeps its layers, after all.
    pub(crate) fn abandon(&self) {
        for feature in FEATURES.iter().rev() {
            feature.abandon(self);
        }
    }

    /// The disk has been made, or has its new layers.
    pub(crate) fn equipped(&self, disk: &Arc<Disk>) {
        for feature in FEATURES {
            feature.equipped(self, disk);
        }
    }
}

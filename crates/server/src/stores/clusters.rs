//! The Valkey clusters of the configuration, and the volumes in them.

use std::io;
use std::sync::Arc;

use fathom_block::Backend;
use fathom_valkey::{ClusterVolume, VolumeOptions};
use parking_lot::Mutex;

use crate::configuration::{ClusterDefinition, Placed};

/// A volume in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterPlace {
    /// The cluster's name.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
}

impl ClusterPlace {
    /// The text that stands for the path of a log volume, in messages and marks.
    pub(crate) fn path(&self) -> String {
        format!("cluster:{}/{}", self.cluster, self.volume)
    }
}

/// The clusters.
#[derive(Default)]
pub(crate) struct Clusters {
    known: Mutex<Vec<ClusterDefinition>>,
}

impl Clusters {
    /// Replaces the clusters. Open volumes stay as they are. Returns whether something differs.
    pub(crate) fn set(&self, clusters: &[Placed<ClusterDefinition>]) -> bool {
        let new: Vec<_> = clusters.iter().map(|placed| placed.definition.clone()).collect();
        let mut known = self.known.lock();
        let is_other = *known != new;
        *known = new;
        is_other
    }

    fn find(&self, name: &str) -> io::Result<ClusterDefinition> {
        let known = self.known.lock();
        let found = known.iter().find(|cluster| cluster.name == name);
        found.cloned().ok_or_else(|| {
            io::Error::other(format!(
                "there is no cluster {name:?}; add a table [[cluster]] with this name, and reload"
            ))
        })
    }

    /// Opens a volume of at least `capacity` bytes, or makes it if it `may_make`. This function
    /// blocks.
    pub(crate) fn open(
        &self,
        place: &ClusterPlace,
        capacity: u64,
        may_make: bool,
        disk: &str,
    ) -> io::Result<Arc<dyn Backend>> {
        let definition = self.find(&place.cluster)?;
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let volume = VolumeOptions {
            name: place.volume.clone(),
            capacity,
            may_make,
            owner: format!("{disk} on {host}"),
        };
        let opened = ClusterVolume::open(&definition.options(), &volume);
        Ok(Arc::new(opened.map_err(|error| io::Error::other(error.0))?))
    }

    /// Removes a volume with all of its content.
    pub(crate) fn forget(&self, place: &ClusterPlace) -> io::Result<u64> {
        let definition = self.find(&place.cluster)?;
        fathom_valkey::forget(&definition.options(), &place.volume)
            .map_err(|error| io::Error::other(error.0))
    }
}

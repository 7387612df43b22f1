//! The Valkey clusters of the configuration, and the volumes in them.

use std::sync::Arc;

use fathom_block::Backend;
use fathom_failure::Failure;
use fathom_valkey::{ClusterVolume, VolumeOptions};
use parking_lot::Mutex;

use crate::configuration::Placed;
use crate::stores::options::ClusterDefinition;

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

    fn find(&self, name: &str) -> Result<ClusterDefinition, Failure> {
        let known = self.known.lock();
        let found = known.iter().find(|cluster| cluster.name == name);
        found.cloned().ok_or_else(|| {
            let failure = Failure::new(format!("there is no cluster {name:?}"));
            failure.advise("add a table [[cluster]] with this name, and reload")
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
    ) -> Result<Arc<dyn Backend>, Failure> {
        let definition = self.find(&place.cluster)?;
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let volume = VolumeOptions {
            name: place.volume.clone(),
            capacity,
            may_make,
            owner: format!("{disk} on {host}"),
        };
        Ok(Arc::new(ClusterVolume::open(&definition.options(), &volume)?))
    }

    /// Removes a volume with all of its content.
    pub(crate) fn forget(&self, place: &ClusterPlace) -> Result<u64, Failure> {
        let definition = self.find(&place.cluster)?;
        fathom_valkey::forget(&definition.options(), &place.volume)
    }
}

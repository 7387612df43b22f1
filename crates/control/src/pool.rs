//! The pools of the block store that the daemon's disks use: their volumes and snapshots.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fathom_store::{BLOCK, DOMAIN, Pool, PoolError, PoolRefusal, ScrubOptions};
use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::difference::{DIFFERENCE, SNAPSHOT_STREAM};
use crate::endpoint::{AnyEndpoint, Blocking, Change, Endpoint};
use crate::reclaim::ReclaimEntry;
use crate::scrub::ScrubEntry;
use crate::written::WRITTEN_FILES;

/// The pools.
pub const POOLS: Endpoint<Blocking, (), (), (), PoolsReport> = Endpoint::get(
    "/v1/stores",
    "the [pools](#pools) that disks of the daemon use, with their volumes and snapshots",
);
/// Changes the volumes or snapshots of a pool.
pub const CHANGE_POOL: Endpoint<Change, (), (), PoolRequest, PoolEntry> = Endpoint::post(
    "/v1/stores",
    "the pool after the change of its [volumes and snapshots](#pools). 404 if no disk of the daemon \
     uses the pool",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] =
    &[&POOLS, &CHANGE_POOL, &DIFFERENCE, &WRITTEN_FILES, &SNAPSHOT_STREAM];

/// The pools that disks use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolsReport {
    /// The pools, by path.
    pub pools: Vec<PoolEntry>,
}

/// A pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolEntry {
    /// Its file or device.
    pub path: PathBuf,
    /// Its identity.
    pub identity: String,
    /// The bytes of all places for blocks.
    pub bytes: u64,
    /// The bytes in use, by blocks and by pages of maps.
    pub used_bytes: u64,
    /// The bytes of blocks that are kept once for several equal ones.
    pub shared_bytes: u64,
    /// The bytes that were not written since the pool was opened, because equal blocks were there.
    pub saved_bytes: u64,
    /// The free bytes that are kept for the guarantees of volumes.
    pub guaranteed_bytes: u64,
    /// Whether blocks may be in use that nothing refers to. A walk frees them.
    pub has_garbage: bool,
    /// The memory that the pool takes, in bytes, about.
    pub memory_bytes: u64,
    /// What is wrong with it, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// What the change did not achieve although it was made, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Its verification in progress, or the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubEntry>,
    /// What deletions would free: the search in progress, or the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<ReclaimEntry>,
    /// The volumes, in the order in which they were made.
    pub volumes: Vec<VolumeEntry>,
}

/// A volume of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeEntry {
    /// Its name; of a deleted volume that has snapshots, none.
    pub name: Option<String>,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// Equal blocks of volumes with the same domain are kept once. Absent if those of this volume
    /// are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The bytes of its own that it can always have, whatever others write, if it has a guarantee.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarantee_bytes: Option<u64>,
    /// The disk that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The snapshots, in the order in which they were taken.
    pub snapshots: Vec<SnapshotEntry>,
}

/// A snapshot of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotEntry {
    /// Its name.
    pub name: String,
    /// The size of the volume when it was taken, in bytes.
    pub size_bytes: u64,
    /// When it was taken, in seconds since 1970.
    pub time_s: u64,
    /// Why it is held, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
}

/// Whether guests' file systems are frozen while a snapshot is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Freeze {
    /// They are not.
    #[default]
    Off,
    /// Those of which the agent answers. The others have what a power loss would have left.
    Try,
    /// All; without them, there is no snapshot.
    Require,
}

impl Freeze {
    /// Whether no file system is frozen.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }
}

/// The beginning of the names that rules give their snapshots.
pub const RULE_PREFIX: &str = "auto.";

/// For how long a check pauses after a step while the pool is used, in durations of that step.
pub const CHECK_PAUSE: u32 = 1;

/// A request to change a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolRequest {
    /// The pool's file or device.
    pub path: PathBuf,
    /// The change.
    pub change: PoolChange,
}

/// A change of the volumes or snapshots of a pool. It is durable when the answer comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolChange {
    /// Makes an empty volume.
    Create {
        /// Its name.
        volume: String,
        /// Its size, in bytes.
        size_bytes: u64,
        /// Its domain, `default` if absent. With an empty one its blocks are not shared.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        domain: Option<String>,
    },
    /// Gives a volume another domain, for what is written from the next opening of its disk on.
    Domain {
        /// Its name.
        volume: String,
        /// The domain. With an empty one its blocks are not shared.
        domain: String,
    },
    /// Guarantees a volume that it can have some bytes of its own, whatever others write.
    Guarantee {
        /// Its name.
        volume: String,
        /// The bytes, at most its size; 0 takes the guarantee away.
        bytes: u64,
    },
    /// Looks for equal blocks that were written several times. All but one of each become free some
    /// time after the answer.
    Merge,
    /// Begins to verify all of the pool, unless that is in progress.
    Check {
        /// Only the maps and tables, not the content of each block.
        #[serde(default)]
        maps_only: bool,
    },
    /// Ends the verification in progress.
    EndCheck,
    /// Begins to find what deletions would free.
    FindReclaimable {
        /// What is to be deleted together, besides each volume and snapshot alone: `VOLUME`,
        /// `VOLUME@SNAPSHOT`, or `VOLUME@*` for all snapshots of a volume.
        #[serde(default)]
        together: Vec<String>,
    },
    /// Ends that search.
    EndReclaimable,
    /// Deletes a volume that no disk uses. Its snapshots stay.
    Delete {
        /// Its name.
        volume: String,
    },
    /// Gives a volume another name.
    Rename {
        /// Its name.
        volume: String,
        /// The new name.
        to: String,
    },
    /// Takes snapshots of several volumes at one instant, while they are used.
    Snapshot {
        /// The volumes.
        volumes: Vec<String>,
        /// The name of the snapshots.
        name: String,
        /// Whether the file systems of the disks' guests are frozen meanwhile.
        #[serde(default, skip_serializing_if = "Freeze::is_off")]
        freeze: Freeze,
    },
    /// Holds a snapshot: neither it nor its volume can be deleted until it is released.
    Hold {
        /// The volume.
        volume: String,
        /// The snapshot.
        name: String,
        /// Why: 1 to 128 bytes.
        reason: String,
    },
    /// Releases a snapshot that is held.
    Release {
        /// The volume.
        volume: String,
        /// The snapshot.
        name: String,
    },
    /// Deletes a snapshot.
    DeleteSnapshot {
        /// The volume.
        volume: String,
        /// The snapshot.
        name: String,
    },
    /// Makes a volume with the content of a snapshot.
    Clone {
        /// The volume of the snapshot.
        volume: String,
        /// The snapshot.
        name: String,
        /// The new volume.
        to: String,
    },
    /// Gives a volume that no disk uses the content of one of its snapshots.
    RollBack {
        /// The volume.
        volume: String,
        /// The snapshot.
        name: String,
    },
}

impl PoolEntry {
    /// What an open pool has. `disk_of` returns the disk that has a volume.
    pub fn of(path: &Path, pool: &Pool, disk_of: impl Fn(&str) -> Option<String>) -> Self {
        let status = pool.status();
        let mut volumes: BTreeMap<u32, VolumeEntry> = BTreeMap::new();
        for volume in pool.volumes() {
            let entry = VolumeEntry {
                disk: disk_of(&volume.name),
                name: Some(volume.name),
                size_bytes: volume.size,
                domain: Some(volume.domain).filter(|domain| !domain.is_empty()),
                guarantee_bytes: Some(volume.guarantee).filter(|bytes| *bytes > 0),
                snapshots: Vec::new(),
            };
            volumes.insert(volume.id, entry);
        }
        for snapshot in pool.snapshots() {
            volumes.entry(snapshot.volume).or_default().snapshots.push(SnapshotEntry {
                name: snapshot.name,
                size_bytes: snapshot.size,
                time_s: snapshot.time_s,
                hold: snapshot.hold,
            });
        }
        Self {
            path: path.to_owned(),
            identity: pool.identity().to_string(),
            bytes: status.bytes,
            used_bytes: status.used_bytes,
            shared_bytes: status.shared_bytes,
            saved_bytes: (status.counts.shared_blocks + status.counts.unchanged_blocks) * BLOCK,
            guaranteed_bytes: status.guaranteed_bytes,
            has_garbage: status.has_garbage,
            memory_bytes: status.memory_bytes,
            damage: pool.damage(),
            warning: None,
            scrub: pool.scrub().as_ref().map(ScrubEntry::of),
            reclaim: None,
            volumes: volumes.into_values().collect(),
        }
    }
}

impl PoolChange {
    /// Carries the change out. `time_s` is the time now, in seconds since 1970. No guest is frozen:
    /// a pool without a daemon has none.
    ///
    /// # Errors
    /// If it is refused, or the pool fails.
    pub fn carry_out(&self, pool: &Pool, time_s: u64) -> Result<(), PoolError> {
        match self {
            Self::Create { volume, size_bytes, domain } => {
                pool.create_volume_in(volume, *size_bytes, domain.as_deref().unwrap_or(DOMAIN))
            }
            Self::Domain { volume, domain } => pool.set_domain(volume, domain),
            Self::Guarantee { volume, bytes } => pool.set_guarantee(volume, *bytes),
            Self::Merge => {
                pool.request_merge();
                Ok(())
            }
            Self::Check { maps_only } => {
                let options = ScrubOptions { maps_only: *maps_only, pause: CHECK_PAUSE };
                pool.begin_scrub(options, None);
                Ok(())
            }
            Self::EndCheck => {
                pool.scrub().into_iter().for_each(|scrub| pool.end_scrub(scrub.number));
                Ok(())
            }
            // A daemon searches in the background.
            Self::FindReclaimable { together } => ReclaimEntry::check_names(pool, together),
            Self::EndReclaimable => Ok(()),
            Self::Delete { volume } => pool.delete_volume(volume),
            Self::Rename { volume, to } => pool.rename_volume(volume, to),
            Self::Snapshot { name, .. } if name.starts_with(RULE_PREFIX) => {
                Err(PoolRefusal::Reserved.into())
            }
            Self::Snapshot { volumes, name, .. } => {
                let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
                pool.take_snapshot(&volumes, name, time_s)
            }
            Self::Hold { volume, name, reason } => pool.hold_snapshot(volume, name, reason),
            Self::Release { volume, name } => pool.release_snapshot(volume, name),
            Self::DeleteSnapshot { volume, name } => pool.delete_snapshot(volume, name),
            Self::Clone { volume, name, to } => pool.clone_snapshot(volume, name, to),
            Self::RollBack { volume, name } => pool.roll_back(volume, name),
        }
    }
}

impl Client {
    /// The pools that disks of the daemon use.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn pools(&self) -> Result<PoolsReport, ClientError> {
        self.ask(&POOLS, &(), &(), &())
    }

    /// Changes a pool, and returns what it has afterwards.
    ///
    /// # Errors
    /// When there is no answer, or the change is refused.
    pub fn change_pool(&self, path: &Path, change: PoolChange) -> Result<PoolEntry, ClientError> {
        self.ask(&CHANGE_POOL, &(), &(), &PoolRequest { path: path.to_owned(), change })
    }
}

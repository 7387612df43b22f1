//! What deleting volumes and snapshots of a pool would free.

use fathom_store::{Pool, PoolError, ReclaimReport, Reclaimable, Snapshot};
use serde::{Deserialize, Serialize};

/// What deletions would free, as the last search has found it, and how a search goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimEntry {
    /// Whether the search is in progress.
    pub running: bool,
    /// When it began, in seconds since 1970.
    pub begun_s: u64,
    /// When it ended, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_s: Option<u64>,
    /// The visits of pages of maps so far.
    pub visited_pages: u64,
    /// About as many there are at most.
    pub total_pages: u64,
    /// The pages of maps that could not be read: what only they lead to is not counted.
    pub unread_pages: u64,
    /// Why it has found nothing, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Each deletion, without the others: volumes in the order in which they were made, each before
    /// its snapshots. A volume is deleted without its snapshots.
    pub deletions: Vec<DeletionEntry>,
    /// What was asked for together, and what deleting all of it would free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub together: Option<TogetherEntry>,
}

/// What a deletion would free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeletionEntry {
    /// The volume; absent if it was deleted, and only its snapshots are there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The snapshot; absent for the volume itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The bytes that nothing else refers to, with those of maps.
    pub bytes: u64,
}

/// What several deletions would free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TogetherEntry {
    /// The volumes and snapshots, as they were named.
    pub names: Vec<String>,
    /// The bytes that nothing else refers to, with those of maps.
    pub bytes: u64,
}

/// A volume or a snapshot, and its number.
struct Target {
    volume: Option<String>,
    snapshot: Option<String>,
    number: u32,
}

/// Volumes and their snapshots, in the order of the volumes.
fn targets(pool: &Pool) -> Vec<Target> {
    let (volumes, mut snapshots) = (pool.volumes(), pool.snapshots());
    let mut targets = Vec::with_capacity(volumes.len() + snapshots.len());
    for volume in volumes {
        let name = Some(volume.name);
        targets.push(Target { volume: name.clone(), snapshot: None, number: volume.id });
        let is_own = |snapshot: &Snapshot| snapshot.volume == volume.id;
        let (own, others) = snapshots.into_iter().partition::<Vec<_>, _>(is_own);
        snapshots = others;
        targets.extend(own.into_iter().map(|snapshot| Target {
            volume: name.clone(),
            snapshot: Some(snapshot.name),
            number: snapshot.id,
        }));
    }
    targets.extend(snapshots.into_iter().map(|snapshot| Target {
        volume: None,
        snapshot: Some(snapshot.name),
        number: snapshot.id,
    }));
    targets
}

/// The numbers of what is named: `VOLUME`, `VOLUME@SNAPSHOT`, or `VOLUME@*` for all of its
/// snapshots.
///
/// # Errors
/// If there is no such volume or snapshot.
fn numbers(pool: &Pool, names: &[String], all: &[Target]) -> Result<Vec<u32>, PoolError> {
    let mut numbers = Vec::new();
    for name in names {
        match name.split_once('@') {
            Some((volume, "*")) => {
                pool.number_of(volume, None)?;
                let own = |it: &&Target| it.volume.as_deref() == Some(volume);
                let own = all.iter().filter(own).filter(|it| it.snapshot.is_some());
                numbers.extend(own.map(|it| it.number));
            }
            Some((volume, snapshot)) => numbers.push(pool.number_of(volume, Some(snapshot))?),
            None => numbers.push(pool.number_of(name, None)?),
        }
    }
    Ok(numbers)
}

impl ReclaimEntry {
    /// Checks the names of a search: see [`find`](Self::find).
    ///
    /// # Errors
    /// If there is no such volume or snapshot.
    pub fn check_names(pool: &Pool, together: &[String]) -> Result<(), PoolError> {
        numbers(pool, together, &targets(pool)).map(drop)
    }

    /// Finds what deleting each volume and each snapshot would free, and what deleting those that
    /// are named `together` would: `VOLUME`, `VOLUME@SNAPSHOT`, or `VOLUME@*` for all snapshots of
    /// a volume. `progress` gets the visited pages, and about the most that there are, and ends the
    /// search by returning false. The times are the caller's.
    ///
    /// # Errors
    /// If there is no such volume or snapshot, the pool cannot be read, or the search was ended.
    pub fn find(
        pool: &Pool,
        together: &[String],
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<Self, PoolError> {
        let all = targets(pool);
        let wanted = numbers(pool, together, &all)?;
        let groups: Vec<Vec<u32>> = all.iter().map(|target| vec![target.number]).collect();
        let searches = 1 + u64::from(!together.is_empty());
        let total = pool.map_visits() * searches;
        let alone = pool.reclaimable(&groups, |visited| progress(visited, total))?;
        let before = alone.visited_pages;
        let joint = (!together.is_empty())
            .then(|| pool.reclaimable(&[wanted], |visited| progress(before + visited, total)))
            .transpose()?;
        let unread = |report: &ReclaimReport| report.unread_pages;
        let deletion = |(target, found): (Target, &Reclaimable)| DeletionEntry {
            volume: target.volume,
            snapshot: target.snapshot,
            bytes: found.bytes(),
        };
        Ok(Self {
            visited_pages: before + joint.as_ref().map_or(0, |joint| joint.visited_pages),
            total_pages: total,
            unread_pages: unread(&alone).max(joint.as_ref().map_or(0, unread)),
            deletions: all.into_iter().zip(&alone.groups).map(deletion).collect(),
            together: joint.map(|joint| TogetherEntry {
                names: together.to_vec(),
                bytes: joint.groups.iter().map(Reclaimable::bytes).sum(),
            }),
            ..Self::default()
        })
    }
}

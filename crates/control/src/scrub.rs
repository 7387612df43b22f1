//! The verification of pools in use: how far it has come, and what it has found.

use fathom_store::{DamageKind, FoundDamage, ScrubPosition, ScrubReport, ScrubState};
use serde::{Deserialize, Serialize};

/// How the verification of a pool goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubPhase {
    /// It is in progress.
    #[default]
    Running,
    /// All was verified.
    Complete,
    /// Somebody has ended it.
    Ended,
    /// The pool was closed meanwhile, because the daemon or the last disk ended. One by rule goes
    /// on when the pool is used again.
    Interrupted,
    /// The pool or its device fails.
    Failed,
    /// A phase of a newer daemon.
    #[serde(other)]
    Unknown,
}

/// What is damaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DamageOf {
    /// Blocks have other content than was written.
    #[default]
    Content,
    /// Blocks cannot be read.
    Unreadable,
    /// A page of a map: nothing that it describes can be read.
    Map,
    /// A page of what has changed since a snapshot: maps are compared instead.
    Changes,
    /// A kind of a newer daemon.
    #[serde(other)]
    Unknown,
}

/// A damaged part of a volume or a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DamagedPart {
    /// The volume; absent if it was deleted, or none is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The snapshot; absent for the volume itself. Others that share the blocks have the same
    /// damage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The first byte.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// What is damaged.
    pub kind: DamageOf,
    /// The disk that has the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// A file of the guest that a recent, slow request for these bytes was for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// The verification of a pool, in progress or the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubEntry {
    /// Its number since the pool was opened; 0 if that was earlier.
    pub number: u64,
    /// How it goes on.
    pub phase: ScrubPhase,
    /// When it began, in seconds since 1970.
    pub begun_s: u64,
    /// When it ended, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_s: Option<u64>,
    /// Whether only maps and tables are verified.
    pub maps_only: bool,
    /// The volumes that were visited.
    pub volumes: u64,
    /// The snapshots that were visited.
    pub snapshots: u64,
    /// The pages of maps that were read, and are right.
    pub map_pages: u64,
    /// The blocks of data to which maps refer.
    pub blocks: u64,
    /// Those of them that were read, and are right.
    pub verified_blocks: u64,
    /// The blocks in use when it began, with the pages of maps.
    pub used_blocks: u64,
    /// Pages that were damaged on the device only, and are written anew.
    pub mended_pages: u64,
    /// The damaged blocks.
    pub damaged_blocks: u64,
    /// The damaged pages of maps.
    pub damaged_pages: u64,
    /// The first 100 damaged parts.
    pub damages: Vec<DamagedPart>,
    /// The number of the volume or snapshot that it has come to.
    pub position_branch: u32,
    /// The block of that.
    pub position_block: u64,
}

impl ScrubEntry {
    /// What a report says.
    pub fn of(report: &ScrubReport) -> Self {
        let phase = match report.state {
            ScrubState::Running => ScrubPhase::Running,
            ScrubState::Complete => ScrubPhase::Complete,
            ScrubState::Ended => ScrubPhase::Ended,
            ScrubState::Failed => ScrubPhase::Failed,
        };
        Self {
            number: report.number,
            phase,
            begun_s: 0,
            ended_s: None,
            maps_only: report.maps_only,
            volumes: report.volumes,
            snapshots: report.snapshots,
            map_pages: report.map_pages,
            blocks: report.blocks,
            verified_blocks: report.verified_blocks,
            used_blocks: report.used_places,
            mended_pages: report.mended_pages,
            damaged_blocks: report.damaged_blocks,
            damaged_pages: report.damaged_pages,
            damages: report.damages.iter().map(DamagedPart::of).collect(),
            position_branch: report.position.branch,
            position_block: report.position.block,
        }
    }

    /// The report with which another scrub goes on from here.
    pub fn to_report(&self) -> ScrubReport {
        ScrubReport {
            number: 0,
            state: ScrubState::Ended,
            position: ScrubPosition { branch: self.position_branch, block: self.position_block },
            maps_only: self.maps_only,
            volumes: self.volumes,
            snapshots: self.snapshots,
            map_pages: self.map_pages,
            blocks: self.blocks,
            verified_blocks: self.verified_blocks,
            used_places: self.used_blocks,
            mended_pages: self.mended_pages,
            damaged_blocks: self.damaged_blocks,
            damaged_pages: self.damaged_pages,
            damages: self.damages.iter().map(DamagedPart::to_damage).collect(),
        }
    }

    /// The number of damaged blocks and pages.
    pub fn damage_count(&self) -> u64 {
        self.damaged_blocks.saturating_add(self.damaged_pages)
    }

    /// The bytes that were verified, and those of all that was in use.
    pub fn progress(&self) -> (u64, u64) {
        let done = self.map_pages.saturating_add(self.blocks).saturating_mul(4096);
        (done, self.used_blocks.saturating_mul(4096))
    }
}

impl DamagedPart {
    fn of(damage: &FoundDamage) -> Self {
        let kind = match damage.kind {
            DamageKind::Content => DamageOf::Content,
            DamageKind::Unreadable => DamageOf::Unreadable,
            DamageKind::Map => DamageOf::Map,
            DamageKind::Changes => DamageOf::Changes,
        };
        Self {
            volume: damage.volume.clone(),
            snapshot: damage.snapshot.clone(),
            offset: damage.offset,
            length: damage.length,
            kind,
            disk: None,
            file: None,
        }
    }

    fn to_damage(&self) -> FoundDamage {
        let kind = match self.kind {
            DamageOf::Content | DamageOf::Unknown => DamageKind::Content,
            DamageOf::Unreadable => DamageKind::Unreadable,
            DamageOf::Map => DamageKind::Map,
            DamageOf::Changes => DamageKind::Changes,
        };
        FoundDamage {
            volume: self.volume.clone(),
            snapshot: self.snapshot.clone(),
            offset: self.offset,
            length: self.length,
            kind,
        }
    }

    /// The damage as a sentence without a full stop.
    pub fn text(&self) -> String {
        let Self { offset, length, .. } = self;
        let volume = self.volume.as_deref().unwrap_or("(deleted)");
        let name = match &self.snapshot {
            Some(snapshot) => format!("{volume}@{snapshot}"),
            None => volume.to_owned(),
        };
        let end = offset.saturating_add(*length);
        let text = match self.kind {
            DamageOf::Content | DamageOf::Unknown => {
                format!("{name}: the content of bytes {offset} to {end} is damaged")
            }
            DamageOf::Unreadable => format!("{name}: bytes {offset} to {end} cannot be read"),
            DamageOf::Map => format!("{name}: the map of bytes {offset} to {end} is damaged"),
            DamageOf::Changes => {
                "a page of what has changed since a snapshot is damaged".to_owned()
            }
        };
        match &self.file {
            Some(file) => format!("{text}, perhaps of {file}"),
            None => text,
        }
    }
}

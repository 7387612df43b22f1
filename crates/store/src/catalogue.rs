//! The volumes and snapshots of a pool, and the changes of these.
//!
//! A volume is a branch: a name, a size and the root of a map. A snapshot is such a root that does
//! not change any more. A snapshot takes no time, because a root is a number: from then on, the
//! volume copies each page of its map before it changes it. To tell its own pages from those that
//! it shares, a volume has a *floor*: a page is its own if its birth is later. A floor only rises.

use std::collections::BTreeMap;

use crate::batch::CHANGE_LENGTH_MAX;
use crate::change_set::{ChangeSet, RetiredSets};
use crate::guarantee::FreshCount;
use crate::refusal::PoolRefusal;
use crate::words::{WordReader, WordWriter};

/// The longest name of a volume or a snapshot, in bytes.
pub const NAME_LENGTH_MAX: usize = 128;
/// The most volumes and snapshots of a pool together.
const ENTRIES_MAX: usize = 1 << 16;
/// The largest volume, in bytes: its map has four levels of 512 entries.
pub const VOLUME_SIZE_MAX: u64 = 1 << 48;

/// A page of a map; 0 is none.
pub(crate) type PageId = u32;
/// The time of the catalogue: it counts changes that make roots immutable.
pub(crate) type Epoch = u32;

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its number, which no other volume or snapshot of the pool ever has.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its size, in bytes.
    pub size: u64,
    /// The snapshot from which it was cloned, if any.
    pub origin: Option<u32>,
    /// Equal blocks of volumes of the same domain are kept once. The blocks of a volume without one
    /// are not shared, but for those of its snapshots and clones.
    pub domain: String,
    /// The bytes of its own that it can always have, whatever others write; 0 without a guarantee.
    pub guarantee: u64,
    pub(crate) root: PageId,
    pub(crate) floor: Epoch,
    pub(crate) changes: ChangeSet,
    /// What it has of these, if it has a guarantee.
    pub(crate) own: FreshCount,
}

impl Volume {
    /// A volume without a guarantee.
    fn new(id: u32, (name, domain): (String, String), size: u64, map: (PageId, Epoch)) -> Self {
        let ((root, floor), changes) = (map, ChangeSet::default());
        let (origin, guarantee, own) = (None, 0, FreshCount::NONE);
        Self { id, name, size, origin, domain, guarantee, root, floor, changes, own }
    }
}

/// A snapshot of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number.
    pub id: u32,
    /// The volume of which it is one. The volume may have been deleted.
    pub volume: u32,
    /// Its name, unique among the snapshots of its volume.
    pub name: String,
    /// The size of the volume when it was taken, in bytes.
    pub size: u64,
    /// When it was taken, in seconds since 1970.
    pub time_s: u64,
    /// The domain of the volume, which its clones get.
    pub domain: String,
    /// Why it is held, if it is: neither it nor its volume can be deleted until it is released.
    pub hold: Option<String>,
    pub(crate) root: PageId,
    pub(crate) changes: ChangeSet,
}

/// A change of the catalogue. The numbers of what it makes are part of it, so that a replay has the
/// same result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Create {
        id: u32,
        size: u64,
        name: String,
        domain: String,
    },
    Delete {
        id: u32,
    },
    Resize {
        id: u32,
        size: u64,
    },
    Rename {
        id: u32,
        name: String,
    },
    /// Snapshots of several volumes at one instant: pairs of volume and snapshot. The batches
    /// `in_flight` are in the volumes, and not in the snapshots. The batches `failed` are in
    /// neither.
    Snapshot {
        members: Vec<(u32, u32)>,
        name: String,
        time_s: u64,
        in_flight: Vec<u64>,
        failed: Vec<u64>,
    },
    DeleteSnapshot {
        id: u32,
    },
    Clone {
        snapshot: u32,
        id: u32,
        name: String,
    },
    Rollback {
        id: u32,
        snapshot: u32,
    },
    /// Gives a volume another domain.
    Domain {
        id: u32,
        domain: String,
    },
    /// Holds a snapshot for a reason, or for another one.
    Hold {
        id: u32,
        reason: String,
    },
    Release {
        id: u32,
    },
    /// Guarantees a volume so many bytes, or none.
    Guarantee {
        id: u32,
        bytes: u64,
    },
}

/// Whether a volume or a snapshot may have this name.
pub fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:+-".contains(&byte);
    (1..=NAME_LENGTH_MAX).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Whether a volume may have this domain: a name, or nothing.
pub(crate) fn is_domain(domain: &str) -> bool {
    domain.is_empty() || is_name(domain)
}

/// Whether a snapshot may be held for this reason.
pub(crate) fn is_reason(reason: &str) -> bool {
    (1..=NAME_LENGTH_MAX).contains(&reason.len()) && !reason.contains(char::is_control)
}

/// Whether a volume may have this size, in bytes.
pub fn is_size(size: u64) -> bool {
    (1..=VOLUME_SIZE_MAX).contains(&size) && size % 512 == 0
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Catalogue {
    pub(crate) volumes: BTreeMap<u32, Volume>,
    pub(crate) snapshots: BTreeMap<u32, Snapshot>,
    pub(crate) retired: RetiredSets,
    /// The number of the next volume or snapshot.
    pub(crate) next_id: u32,
    /// Pages that are made now have this birth.
    pub(crate) epoch: Epoch,
}

impl Catalogue {
    pub(crate) fn new() -> Self {
        Self { next_id: 1, epoch: 1, ..Self::default() }
    }

    pub(crate) fn volume(&self, name: &str) -> Result<&Volume, PoolRefusal> {
        self.volumes.values().find(|volume| volume.name == name).ok_or(PoolRefusal::NoVolume)
    }

    pub(crate) fn snapshot(&self, volume: u32, name: &str) -> Result<&Snapshot, PoolRefusal> {
        let is_it = |snapshot: &&Snapshot| snapshot.volume == volume && snapshot.name == name;
        self.snapshots.values().find(is_it).ok_or(PoolRefusal::NoSnapshot)
    }

    /// The root and the size of a volume or a snapshot.
    pub(crate) fn branch(&self, id: u32) -> Option<(PageId, u64)> {
        let volume = self.volumes.get(&id).map(|volume| (volume.root, volume.size));
        volume.or(self.snapshots.get(&id).map(|snapshot| (snapshot.root, snapshot.size)))
    }

    /// Whether `count` further volumes or snapshots fit.
    pub(crate) fn check_room(&self, count: usize) -> Result<(), PoolRefusal> {
        let used = self.volumes.len() + self.snapshots.len() + count;
        let has_numbers =
            (self.next_id as usize).checked_add(count).is_some_and(|end| end < 1 << 31);
        if used > ENTRIES_MAX || !has_numbers { Err(PoolRefusal::TooMany) } else { Ok(()) }
    }

    /// Whether a new volume may have this name.
    pub(crate) fn check_name(&self, name: &str) -> Result<(), PoolRefusal> {
        if !is_name(name) {
            return Err(PoolRefusal::BadName);
        }
        if self.volume(name).is_ok() { Err(PoolRefusal::NameTaken) } else { Ok(()) }
    }

    /// All roots. The pages that they lead to are in use, and no others.
    pub(crate) fn roots(&self) -> impl Iterator<Item = PageId> {
        let snapshots = self.snapshots.values().map(|snapshot| snapshot.root);
        self.live_roots().chain(snapshots.filter(|id| *id != 0))
    }

    /// The roots of the volumes.
    pub(crate) fn live_roots(&self) -> impl Iterator<Item = PageId> {
        self.volumes.values().map(|volume| volume.root).filter(|id| *id != 0)
    }

    /// A new epoch begins: all pages that exist now are shared, for a branch with this floor.
    pub(crate) fn raise(&mut self) -> Option<Epoch> {
        let before = self.epoch;
        self.epoch = before.checked_add(1)?;
        Some(before)
    }

    /// Carries out a change, which was checked when it was made. `None` if it does not fit the
    /// catalogue: then it is none of this pool. Returns whether pages may have become unused.
    pub(crate) fn apply(&mut self, change: &Change) -> Option<bool> {
        let mut has_garbage = false;
        match change {
            Change::Create { id, size, name, domain } => {
                let names = (name.clone(), domain.clone());
                self.add(Volume::new(*id, names, *size, (0, 0)))?;
            }
            Change::Delete { id } => {
                let volume = self.volumes.remove(id)?;
                has_garbage = self.end_set(volume.changes) || volume.root != 0;
            }
            Change::Resize { id, size } => self.volumes.get_mut(id)?.size = *size,
            Change::Rename { id, name } => self.volumes.get_mut(id)?.name.clone_from(name),
            Change::Snapshot { members, name, time_s, .. } => {
                let floor = self.raise()?;
                for (id, snapshot) in members {
                    // Its set is based on an earlier one.
                    (*snapshot >= self.next_id).then_some(())?;
                    let volume = self.volumes.get_mut(id)?;
                    volume.floor = floor;
                    volume.own = FreshCount::NONE;
                    let made = Snapshot {
                        id: *snapshot,
                        volume: *id,
                        name: name.clone(),
                        size: volume.size,
                        time_s: *time_s,
                        domain: volume.domain.clone(),
                        hold: None,
                        root: volume.root,
                        changes: volume.changes,
                    };
                    volume.changes = ChangeSet::none_since(*snapshot);
                    self.snapshots.insert(*snapshot, made);
                    self.next_id = self.next_id.max(snapshot.checked_add(1)?);
                }
            }
            Change::DeleteSnapshot { id } => {
                let snapshot = self.snapshots.remove(id)?;
                has_garbage = self.retire_set(*id, snapshot.changes) || snapshot.root != 0;
            }
            Change::Clone { snapshot, id, name } => {
                let floor = self.raise()?;
                let Snapshot { size, root, ref domain, .. } = *self.snapshots.get(snapshot)?;
                let names = (name.clone(), domain.clone());
                let volume = Volume::new(*id, names, size, (root, floor));
                let changes = ChangeSet::none_since(*snapshot);
                self.add(Volume { origin: Some(*snapshot), changes, ..volume })?;
            }
            Change::Rollback { id, snapshot } => {
                let floor = self.raise()?;
                let Snapshot { size, root, .. } = *self.snapshots.get(snapshot)?;
                let volume = self.volumes.get_mut(id)?;
                has_garbage = volume.root != root;
                (volume.root, volume.size, volume.floor) = (root, size, floor);
                volume.own = FreshCount::NONE;
                let none = ChangeSet::none_since(*snapshot);
                let changes = std::mem::replace(&mut volume.changes, none);
                has_garbage |= self.end_set(changes);
            }
            Change::Domain { id, domain } => {
                self.volumes.get_mut(id)?.domain.clone_from(domain);
            }
            Change::Hold { id, reason } => {
                self.snapshots.get_mut(id)?.hold = Some(reason.clone());
            }
            Change::Release { id } => self.snapshots.get_mut(id)?.hold = None,
            Change::Guarantee { id, bytes } => self.guarantee(*id, *bytes)?,
        }
        Some(has_garbage)
    }

    fn add(&mut self, volume: Volume) -> Option<()> {
        self.next_id = self.next_id.max(volume.id.checked_add(1)?);
        self.volumes.insert(volume.id, volume);
        Some(())
    }

    pub(crate) fn encode(&self, out: &mut WordWriter) {
        out.u32(self.next_id);
        out.u32(self.epoch);
        out.u32(self.volumes.len() as u32);
        for volume in self.volumes.values() {
            out.u32(volume.id);
            out.u64(volume.size);
            out.u32(volume.origin.unwrap_or(0));
            out.u32(volume.root);
            out.u32(volume.floor);
            out.text(&volume.name);
            out.text(&volume.domain);
            volume.changes.encode(out);
        }
        out.u32(self.snapshots.len() as u32);
        for snapshot in self.snapshots.values() {
            out.u32(snapshot.id);
            out.u32(snapshot.volume);
            out.u64(snapshot.size);
            out.u64(snapshot.time_s);
            out.u32(snapshot.root);
            out.text(&snapshot.name);
            out.text(&snapshot.domain);
            out.text(snapshot.hold.as_deref().unwrap_or_default());
            snapshot.changes.encode(out);
        }
        out.u32(self.retired.len() as u32);
        for (id, set) in &self.retired {
            out.u32(*id);
            set.encode(out);
        }
        self.encode_guarantees(out);
    }

    /// Reads the catalogue of a pool with this version of the format: 1 has no change sets, and 2
    /// no guarantees.
    pub(crate) fn decode(input: &mut WordReader<'_>, version: u32) -> Option<Self> {
        let (next_id, epoch) = (input.u32()?, input.u32()?);
        let set = |input: &mut WordReader<'_>, end: u32| match version {
            1 => Some(ChangeSet::default()),
            _ => ChangeSet::decode(input).filter(|set| set.since < end),
        };
        let count = input.u32()?;
        let volumes = input.list(count, |input| {
            let (id, size, origin) = (input.u32()?, input.u64()?, input.u32()?);
            let (root, floor, name) = (input.u32()?, input.u32()?, input.text()?);
            let domain = input.text()?;
            let origin = Some(origin).filter(|origin| *origin != 0);
            let changes = set(input, next_id)?;
            let is_sane = id != 0 && id < next_id && floor < epoch && is_size(size);
            let volume = Volume::new(id, (name, domain), size, (root, floor));
            is_sane.then_some((id, Volume { origin, changes, ..volume }))
        })?;
        let count = input.u32()?;
        let snapshots = input.list(count, |input| {
            let (id, volume, size) = (input.u32()?, input.u32()?, input.u64()?);
            let (time_s, root, name) = (input.u64()?, input.u32()?, input.text()?);
            let domain = input.text()?;
            let hold = Some(input.text()?).filter(|reason| !reason.is_empty());
            // A set is based on an earlier snapshot.
            let changes = set(input, id)?;
            let is_sane = id != 0 && id < next_id && is_size(size);
            let snapshot = Snapshot { id, volume, name, size, time_s, domain, hold, root, changes };
            is_sane.then_some((id, snapshot))
        })?;
        let count = if version == 1 { 0 } else { input.u32()? };
        let retired = input.list(count, |input| {
            let id = input.u32()?;
            Some((id, set(input, id)?)).filter(|(id, _)| *id < next_id)
        })?;
        let (volumes, snapshots) = (volumes.into_iter().collect(), snapshots.into_iter().collect());
        let retired = retired.into_iter().collect();
        let mut catalogue = Self { volumes, snapshots, retired, next_id, epoch };
        if version >= 3 {
            catalogue.decode_guarantees(input)?;
        }
        Some(catalogue)
    }
}

impl Change {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = WordWriter::default();
        match self {
            Self::Create { id, size, name, domain } => {
                out.u8(1);
                out.u32(*id);
                out.u64(*size);
                out.text(name);
                out.text(domain);
            }
            Self::Delete { id } => {
                out.u8(2);
                out.u32(*id);
            }
            Self::Resize { id, size } => {
                out.u8(3);
                out.u32(*id);
                out.u64(*size);
            }
            Self::Rename { id, name } => {
                out.u8(4);
                out.u32(*id);
                out.text(name);
            }
            Self::Snapshot { members, name, time_s, in_flight, failed } => {
                out.u8(5);
                out.u64(*time_s);
                out.text(name);
                out.u32(members.len() as u32);
                for (volume, snapshot) in members {
                    out.u32(*volume);
                    out.u32(*snapshot);
                }
                for batches in [in_flight, failed] {
                    out.u32(batches.len() as u32);
                    for sequence in batches {
                        out.u64(*sequence);
                    }
                }
            }
            Self::DeleteSnapshot { id } => {
                out.u8(6);
                out.u32(*id);
            }
            Self::Clone { snapshot, id, name } => {
                out.u8(7);
                out.u32(*snapshot);
                out.u32(*id);
                out.text(name);
            }
            Self::Rollback { id, snapshot } => {
                out.u8(8);
                out.u32(*id);
                out.u32(*snapshot);
            }
            Self::Domain { id, domain } => {
                out.u8(10);
                out.u32(*id);
                out.text(domain);
            }
            Self::Hold { id, reason } => {
                out.u8(9);
                out.u32(*id);
                out.text(reason);
            }
            Self::Release { id } => {
                out.u8(11);
                out.u32(*id);
            }
            Self::Guarantee { id, bytes } => {
                out.u8(12);
                out.u32(*id);
                out.u64(*bytes);
            }
        }
        out.0
    }

    /// Whether a header has room for it.
    pub(crate) fn fits(&self) -> bool {
        self.encode().len() <= CHANGE_LENGTH_MAX
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = WordReader(bytes);
        let change = match input.u8()? {
            1 => {
                let (id, size, name) = (input.u32()?, input.u64()?, input.text()?);
                Self::Create { id, size, name, domain: input.text()? }
            }
            2 => Self::Delete { id: input.u32()? },
            3 => Self::Resize { id: input.u32()?, size: input.u64()? },
            4 => Self::Rename { id: input.u32()?, name: input.text()? },
            5 => {
                let (time_s, name) = (input.u64()?, input.text()?);
                let count = input.u32()?;
                let members = input.list(count, |input| Some((input.u32()?, input.u32()?)))?;
                let count = input.u32()?;
                let in_flight = input.list(count, WordReader::u64)?;
                let count = input.u32()?;
                let failed = input.list(count, WordReader::u64)?;
                Self::Snapshot { members, name, time_s, in_flight, failed }
            }
            6 => Self::DeleteSnapshot { id: input.u32()? },
            7 => Self::Clone { snapshot: input.u32()?, id: input.u32()?, name: input.text()? },
            8 => Self::Rollback { id: input.u32()?, snapshot: input.u32()? },
            9 => Self::Hold { id: input.u32()?, reason: input.text()? },
            10 => Self::Domain { id: input.u32()?, domain: input.text()? },
            11 => Self::Release { id: input.u32()? },
            12 => Self::Guarantee { id: input.u32()?, bytes: input.u64()? },
            _ => return None,
        };
        input.0.is_empty().then_some(change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> Vec<Change> {
        let name = || "web-1".to_owned();
        vec![
            Change::Create { id: 1, size: 1 << 30, name: name(), domain: "x".into() },
            Change::Create { id: 2, size: 512, name: "b".into(), domain: String::new() },
            Change::Resize { id: 1, size: 2 << 30 },
            Change::Snapshot {
                members: vec![(1, 3), (2, 4)],
                name: "s".into(),
                time_s: 99,
                in_flight: vec![5, 7],
                failed: vec![6],
            },
            Change::Hold { id: 3, reason: "until the audit".into() },
            Change::Hold { id: 4, reason: "b".into() },
            Change::Release { id: 4 },
            Change::Clone { snapshot: 3, id: 5, name: "c".into() },
            Change::Rename { id: 2, name: "d".into() },
            Change::Domain { id: 5, domain: "y".into() },
            Change::Guarantee { id: 5, bytes: 1 << 20 },
            Change::Rollback { id: 1, snapshot: 3 },
            Change::DeleteSnapshot { id: 4 },
            Change::Delete { id: 2 },
        ]
    }

    #[test]
    fn changes_and_catalogues_are_read_as_written() {
        let mut catalogue = Catalogue::new();
        for change in changes() {
            let bytes = change.encode();
            assert_eq!(Change::decode(&bytes).as_ref(), Some(&change));
            assert_eq!(Change::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Change::decode(&[&bytes[..], &[0]].concat()), None);
            catalogue.apply(&change).unwrap();
        }
        let mut out = WordWriter::default();
        catalogue.encode(&mut out);
        assert_eq!(Catalogue::decode(&mut WordReader(&out.0), 3).as_ref(), Some(&catalogue));
        for length in 0..out.0.len() {
            assert_eq!(Catalogue::decode(&mut WordReader(&out.0[..length]), 3), None);
        }
        assert_eq!(catalogue.next_id, 6);
        let names: Vec<_> = catalogue.volumes.values().map(|volume| &volume.name[..]).collect();
        assert_eq!(names, ["web-1", "c"]);
        assert_eq!(catalogue.snapshots[&3].hold.as_deref(), Some("until the audit"));
    }

    #[test]
    fn each_snapshot_clone_and_rollback_raises_the_floor_of_its_branch() {
        let mut catalogue = Catalogue::new();
        let mut floors = Vec::new();
        for change in changes() {
            catalogue.apply(&change).unwrap();
            floors.push(catalogue.volumes[&1].floor);
        }
        assert_eq!(floors, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3]);
        assert_eq!((catalogue.volumes[&5].floor, catalogue.epoch), (2, 4));
        assert_eq!(catalogue.apply(&Change::Delete { id: 2 }), None);
        assert_eq!(catalogue.apply(&Change::Rollback { id: 1, snapshot: 4 }), None);
    }

    #[test]
    fn an_empty_reason_or_one_with_control_characters_is_refused() {
        assert!(is_reason("until the audit (J\u{e4}n)") && is_reason(&"a".repeat(128)));
        for reason in ["", "a\n", "\u{1b}[2J", &"a".repeat(129)] {
            assert!(!is_reason(reason), "{reason}");
        }
    }

    #[test]
    fn names_are_plain() {
        assert!(is_name("web.disk_1:a+b-c") && is_name(&"a".repeat(128)));
        for name in ["", "a b", "a/b", "\u{e4}", "a\n", &"a".repeat(129)] {
            assert!(!is_name(name), "{name}");
        }
    }
}

//! Accounts by control group and kind of data, for metrics: a bounded number, and no count ever
//! decreases.

use std::collections::HashMap;
use std::sync::Arc;

use fathom_insight::Kind;

use super::cells::Direction;

/// The name of the account of all groups without an account of their own.
pub const GROUP_OTHER: &str = "other";

/// The idle time after which a group's place may be given to another group, in nanoseconds.
const IDLE_NS: u64 = 600_000_000_000;
/// The time after which a group without a place tries again to get one, in nanoseconds.
const RETRY_NS: u64 = 10_000_000_000;

/// The counts of one group's requests of one kind and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupAccount {
    /// Requests that succeeded. A request of several parts counts once for each part.
    pub requests: u64,
    /// The sum of their bytes.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_sum_ns: u64,
}

impl GroupAccount {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.latency_sum_ns = self.latency_sum_ns.wrapping_add(other.latency_sum_ns);
    }
}

/// The accounts of one group, by [`Kind`] and [`Direction`].
#[derive(Clone, Debug)]
pub struct GroupSnapshot {
    /// The group's path; empty if it is unknown, [`GROUP_OTHER`] for groups without an account of
    /// their own.
    pub cgroup: Arc<str>,
    /// The group's accounts. Combinations that did not occur are zero.
    pub accounts: [[GroupAccount; Direction::ALL.len()]; Kind::ALL.len()],
}

/// The place of the account of a row's group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AccountSlot {
    slot: u32,
    generation: u32,
    /// When a group without a place of its own tries again to get one.
    retry_ns: u64,
}

struct Slot {
    group: GroupSnapshot,
    generation: u32,
    last_ns: u64,
}

/// The groups of a disk.
pub(super) struct Groups {
    /// First the slot of unknown groups, then the slot of other groups, then one slot for each
    /// group.
    slots: Vec<Slot>,
    /// The slot of each group that has a place of its own.
    index: HashMap<Arc<str>, usize>,
    named_max: usize,
}

const NAMELESS: u32 = 0;
const OTHERS: u32 = 1;

impl Groups {
    /// Makes accounts for at most `groups_max` groups at a time.
    pub(super) fn new(groups_max: usize) -> Self {
        let slots = vec![Slot::new(""), Slot::new(GROUP_OTHER)];
        Self { slots, index: HashMap::new(), named_max: groups_max }
    }

    /// The place where requests of `cgroup` are counted.
    pub(super) fn place(&mut self, cgroup: Option<&Arc<str>>, now_ns: u64) -> AccountSlot {
        let Some(cgroup) = cgroup else {
            return AccountSlot { slot: NAMELESS, ..AccountSlot::default() };
        };
        let own = self.index.get(cgroup).copied();
        match own.or_else(|| self.make_room(cgroup, now_ns)) {
            Some(index) => AccountSlot {
                slot: index as u32,
                generation: self.slots[index].generation,
                retry_ns: u64::MAX,
            },
            None => AccountSlot {
                slot: OTHERS,
                generation: 0,
                retry_ns: now_ns.saturating_add(RETRY_NS),
            },
        }
    }

    /// Finds a place for a new group: a free place, or that of a group that has long been idle.
    fn make_room(&mut self, cgroup: &Arc<str>, now_ns: u64) -> Option<usize> {
        if self.slots.len() - 2 < self.named_max {
            self.slots.push(Slot { last_ns: now_ns, ..Slot::new(cgroup) });
            self.index.insert(Arc::clone(cgroup), self.slots.len() - 1);
            return Some(self.slots.len() - 1);
        }
        let idle = self
            .slots
            .iter()
            .enumerate()
            .skip(2)
            .filter(|(_, slot)| now_ns.saturating_sub(slot.last_ns) > IDLE_NS)
            .min_by_key(|(_, slot)| slot.last_ns)?
            .0;
        let generation = self.slots[idle].generation.wrapping_add(1);
        self.index.remove(&self.slots[idle].group.cgroup);
        self.slots[idle] = Slot { generation, last_ns: now_ns, ..Slot::new(cgroup) };
        self.index.insert(Arc::clone(cgroup), idle);
        Some(idle)
    }

    /// Whether a row has to look up its place again.
    pub(super) fn is_stale(&self, place: AccountSlot, now_ns: u64) -> bool {
        let generation = self.slots.get(place.slot as usize).map(|slot| slot.generation);
        generation != Some(place.generation) || place.slot == OTHERS && now_ns >= place.retry_ns
    }

    /// Counts a part of a request.
    pub(super) fn add(
        &mut self,
        place: AccountSlot,
        kind: Kind,
        direction: Direction,
        bytes: u64,
        latency_ns: u64,
        now_ns: u64,
    ) {
        let Some(slot) = self.slots.get_mut(place.slot as usize) else { return };
        slot.last_ns = now_ns;
        let account = &mut slot.group.accounts[kind as usize][direction as usize];
        account.requests += 1;
        account.bytes += bytes;
        account.latency_sum_ns = account.latency_sum_ns.wrapping_add(latency_ns);
    }

    /// The accounts of all groups with requests.
    pub(super) fn snapshot(&self) -> Vec<GroupSnapshot> {
        let used = |group: &GroupSnapshot| {
            group.accounts.iter().flatten().any(|account| account.requests > 0)
        };
        self.slots.iter().map(|slot| &slot.group).filter(|group| used(group)).cloned().collect()
    }
}

impl Slot {
    fn new(cgroup: &str) -> Self {
        let group = GroupSnapshot { cgroup: cgroup.into(), accounts: Default::default() };
        Self { group, generation: 0, last_ns: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_groups_are_others_until_one_is_idle() {
        let mut groups = Groups::new(2);
        let named = |name: &str| Some(Arc::from(name));
        let (a, b, c): (Option<Arc<str>>, _, _) = (named("/a"), named("/b"), named("/c"));
        let place_of_a = groups.place(a.as_ref(), 1);
        groups.add(place_of_a, Kind::Data, Direction::Read, 10, 1, 1);
        let place = groups.place(b.as_ref(), 1);
        groups.add(place, Kind::Data, Direction::Read, 20, 1, IDLE_NS);
        let among_others = groups.place(c.as_ref(), 2);
        groups.add(among_others, Kind::Data, Direction::Write, 40, 1, 2);
        assert!(!groups.is_stale(among_others, 3) && !groups.is_stale(place_of_a, u64::MAX));
        let nameless = groups.place(None, 1);
        groups.add(nameless, Kind::Metadata, Direction::Write, 80, 1, 2);
        let bytes = |groups: &Groups| -> Vec<(String, u64)> {
            let sum = |group: &GroupSnapshot| {
                group.accounts.iter().flatten().map(|account| account.bytes).sum()
            };
            let all = groups.snapshot();
            all.iter().map(|group| (group.cgroup.to_string(), sum(group))).collect()
        };
        let expected = [("", 80), ("other", 40), ("/a", 10), ("/b", 20)];
        assert_eq!(bytes(&groups), expected.map(|(name, sum)| (name.to_owned(), sum)));
        // The first group has long been idle: its place is free, and its rows look up their place
        // again.
        let later = IDLE_NS + 3;
        assert!(groups.is_stale(among_others, later));
        let place = groups.place(c.as_ref(), later);
        groups.add(place, Kind::Data, Direction::Read, 5, 1, later);
        let expected = [("", 80), ("other", 40), ("/c", 5), ("/b", 20)];
        assert_eq!(bytes(&groups), expected.map(|(name, sum)| (name.to_owned(), sum)));
        assert!(groups.is_stale(place_of_a, later));
    }
}

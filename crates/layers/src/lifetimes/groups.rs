//! Distributions of lifetimes, by kind, container and ending of the file's name.

use std::collections::HashMap;

use fathom_histogram::Histogram;
use fathom_insight::{Facts, Kind, Name, Names};

/// The most containers, and the most endings, with a distribution of their own. Further ones share
/// the first.
const GROUPS_MAX: usize = 64;
/// The longest ending that is one, in bytes.
const ENDING_MAX: usize = 8;

/// The place of the ending of what belongs to no file.
pub(super) const NO_ENDING: u16 = u16::MAX;

/// Why content died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The same place, of the disk or of the file, was written again.
    Overwritten,
    /// The file became shorter.
    Truncated,
    /// The file was deleted.
    Deleted,
    /// The guest discarded the block.
    Discarded,
    /// The block was written for another file: it had been let go at an unknown time before.
    Reused,
}

impl Cause {
    /// Every cause, in order.
    pub const ALL: [Self; 5] =
        [Self::Overwritten, Self::Truncated, Self::Deleted, Self::Discarded, Self::Reused];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overwritten => "overwritten",
            Self::Truncated => "truncated",
            Self::Deleted => "deleted",
            Self::Discarded => "discarded",
            Self::Reused => "reused",
        }
    }
}

/// What a group is made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GroupBy {
    /// All of the disk.
    All,
    /// The kind of data.
    Kind(Kind),
    /// The control group that is charged; none if it is unknown.
    Container(Name),
    /// The ending of the file's name; none if there is no such.
    Ending(Name),
    /// The further containers.
    OtherContainers,
    /// The further endings.
    OtherEndings,
}

/// The lives of a group's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lives {
    /// The bytes that were written.
    pub born: u64,
    /// The bytes that died, by cause, in the order of [`Cause::ALL`].
    pub died: [u64; Cause::ALL.len()],
    /// The lifetimes in nanoseconds, each counted with its bytes.
    pub lifetimes: Histogram,
    /// The lifetimes as overwritten blocks of the disk alone would show them.
    pub naive: Histogram,
}

impl Lives {
    fn is_empty(&self) -> bool {
        self.born == 0
    }
}

/// The groups that a block belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Membership {
    kind: u8,
    container: u16,
    ending: u16,
}

/// The groups of one kind, found by name. The first one has what the others have no room for.
#[derive(Debug)]
struct Named {
    places: HashMap<Name, u16>,
    lives: Vec<(Name, Lives)>,
}

impl Default for Named {
    fn default() -> Self {
        Self { places: HashMap::new(), lives: vec![(Name::NONE, Lives::default())] }
    }
}

impl Named {
    fn place(&mut self, name: Name) -> u16 {
        if let Some(place) = self.places.get(&name) {
            return *place;
        }
        if self.lives.len() > GROUPS_MAX {
            return 0;
        }
        let place = self.lives.len() as u16;
        self.lives.push((name, Lives::default()));
        self.places.insert(name, place);
        place
    }
}

/// All groups of a disk.
#[derive(Debug, Default)]
pub(super) struct Groups {
    all: Lives,
    kinds: [Lives; Kind::ALL.len()],
    containers: Named,
    endings: Named,
}

impl Groups {
    /// The groups of a block with these facts, whose file has an ending at this place.
    pub fn membership(&mut self, facts: &Facts, ending: u16) -> Membership {
        let container = self.containers.place(facts.cgroup);
        Membership { kind: facts.kind as u8, container, ending }
    }

    /// The place of the ending of a path.
    pub fn ending(&mut self, path: Name, names: &Names) -> u16 {
        let ending = names.text(path).and_then(|path| ending_of(&path));
        self.endings.place(ending.map_or(Name::NONE, |ending| names.number(&ending)))
    }

    /// Applies a change to each group of a block.
    fn each(&mut self, of: Membership, change: impl Fn(&mut Lives)) {
        change(&mut self.all);
        if let Some(kind) = self.kinds.get_mut(usize::from(of.kind)) {
            change(kind);
        }
        for (groups, place) in
            [(&mut self.containers, of.container), (&mut self.endings, of.ending)]
        {
            if let Some((_, lives)) = groups.lives.get_mut(usize::from(place)) {
                change(lives);
            }
        }
    }

    pub fn born(&mut self, of: Membership, bytes: u64) {
        self.each(of, |lives| lives.born = lives.born.saturating_add(bytes));
    }

    pub fn died(&mut self, of: Membership, cause: Cause, lifetime_ns: u64, bytes: u64) {
        self.each(of, |lives| {
            let died = &mut lives.died[cause as usize];
            *died = died.saturating_add(bytes);
            lives.lifetimes.record(lifetime_ns, bytes);
        });
    }

    pub fn died_naively(&mut self, of: Membership, lifetime_ns: u64, bytes: u64) {
        self.each(of, |lives| lives.naive.record(lifetime_ns, bytes));
    }

    /// The lives of all groups that have any, that of the disk first.
    pub fn report(&self) -> Vec<(GroupBy, Lives)> {
        let kinds = Kind::ALL.into_iter().map(GroupBy::Kind).zip(&self.kinds);
        let containers = named(&self.containers, GroupBy::OtherContainers, GroupBy::Container);
        let endings = named(&self.endings, GroupBy::OtherEndings, GroupBy::Ending);
        let groups = kinds.chain(containers).chain(endings);
        let groups = groups.filter(|(_, lives)| !lives.is_empty());
        std::iter::once((GroupBy::All, &self.all))
            .chain(groups)
            .map(|(by, lives)| (by, lives.clone()))
            .collect()
    }

    /// The lives of all blocks.
    pub fn all(&self) -> &Lives {
        &self.all
    }
}

fn named(
    groups: &Named,
    others: GroupBy,
    by: fn(Name) -> GroupBy,
) -> impl Iterator<Item = (GroupBy, &Lives)> {
    groups
        .lives
        .iter()
        .enumerate()
        .map(move |(place, (name, lives))| (if place == 0 { others } else { by(*name) }, lives))
}

/// The ending of a path's last part, in lower case: `.log` of `/var/log/a.log`, and `.log.N` of
/// `/var/log/a.log.3`, since numbers count what is otherwise the same.
fn ending_of(path: &str) -> Option<String> {
    let name = path.rsplit('/').next()?;
    let (stem, ending) = name.rsplit_once('.')?;
    let is_number = !ending.is_empty() && ending.bytes().all(|byte| byte.is_ascii_digit());
    if is_number {
        return Some(format!("{}.N", ending_of(stem).unwrap_or_default()));
    }
    let is_ending = !stem.is_empty()
        && (1..=ENDING_MAX).contains(&ending.len())
        && ending.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    is_ending.then(|| format!(".{}", ending.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_short_and_without_numbers() {
        for (path, ending) in [
            ("/var/log/a.log", Some(".log")),
            ("/var/log/a.log.3", Some(".log.N")),
            ("/lib/libc.so.6", Some(".so.N")),
            ("/srv/x.12", Some(".N")),
            ("/srv/Photo.JPG", Some(".jpg")),
            ("/srv/db.sqlite-wal", None),
            ("/srv/a.db-wal", Some(".db-wal")),
            ("/home/.bashrc", None),
            ("/a.d/name", None),
            ("/a/strange.e\u{1b}", None),
            ("/a/dot.", None),
            ("", None),
        ] {
            assert_eq!(ending_of(path).as_deref(), ending, "{path}");
        }
    }
}

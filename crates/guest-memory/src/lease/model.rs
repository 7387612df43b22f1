//! All interleavings of a pager, its successor, holders, a device and a guest at one page.
//!
//! Each actor is a list of atomic steps; the explorer visits every state that any order of them can
//! reach. The words are those of [`PageWord`], by the same functions as in production. A rule that
//! is taken away changes one step, and must make the explorer find a wrong byte.

use std::collections::HashSet;

use super::word::{PageState, PageWord};
use crate::pager::Purpose;

/// What protects the page. Each is true in production.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// A lease ends a leaving.
    lease_ends_leaving: bool,
    /// A lease for writing makes the copy invalid.
    write_clears_copy: bool,
    /// A page with a lease does not begin to leave.
    leased_stay: bool,
    /// The page is protected before it is copied.
    protect_first: bool,
    /// The page is taken away only if the word still says that it leaves.
    evict_checks: bool,
    /// A comparison counts only if the copy is still valid after it.
    compare_checks: bool,
    /// What a dead holder may still be writing stays.
    dead_writers_stay: bool,
    /// A new pager drops the copies of the one before.
    successor_forgets: bool,
    /// Holders take leases at all.
    holders_lease: bool,
    /// The page is there again before the word says so.
    arrive_last: bool,
}

const ALL: Rules = Rules {
    lease_ends_leaving: true,
    write_clears_copy: true,
    leased_stay: true,
    protect_first: true,
    evict_checks: true,
    compare_checks: true,
    dead_writers_stay: true,
    successor_forgets: true,
    holders_lease: true,
    arrive_last: true,
};

/// What the pager does with the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mode {
    /// It copies the page and compares it at the guest's next write.
    Shadow,
    /// It takes the page away and puts it back.
    Evict,
}

/// The steps of the pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PagerAt {
    Idle,
    Left,
    Protected,
    Copied,
    /// Somebody had a lease: the page stays, and the pager begins anew.
    Disturbed,
    Shadowed,
    Checked,
    Comparing {
        is_equal: bool,
    },
    Evicted,
    Punched,
    Coming,
    Returned,
    /// It has died, and another one begins.
    Succeeded,
}

/// The steps of a holder that reads or writes through its own mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum HolderAt {
    Idle,
    Leased,
    Accessed,
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    word: PageWord,
    /// The content; none while it is away.
    page: Option<u8>,
    /// What the content has to be.
    truth: u8,
    is_protected: bool,
    /// The memory of the pager, which outlives it.
    copy: Option<u8>,
    pager: PagerAt,
    /// How often the pager may still begin, and die.
    rounds: u8,
    deaths: u8,
    reader: HolderAt,
    /// Writes through a device, which may go on after the holder's death.
    writer: HolderAt,
    writer_is_dead: bool,
    is_buried: bool,
    /// Writes that the guest's processor has still to make, and whether it waits for the pager.
    guest_writes: u8,
    is_guest_waiting: bool,
}

const READER: usize = 0;
const WRITER: usize = 1;

struct Explorer {
    rules: Rules,
    mode: Mode,
    seen: HashSet<World>,
}

type Found = Result<(), String>;

impl World {
    fn write(&mut self, value: u8) {
        self.truth = value;
        // While it is away, a device writes to the page that it has pinned, which is not the
        // guest's any more, and a processor makes a page of zeroes. Either way the write, or the
        // rest, is lost.
        if let Some(page) = &mut self.page {
            *page = value;
        }
    }
}

impl Explorer {
    fn lease(&self, word: PageWord, holder: usize, purpose: Purpose) -> Option<PageWord> {
        let mut leased = word.lease(holder, purpose)?;
        if !self.rules.lease_ends_leaving && word.state() == PageState::Leaving {
            leased.0 |= PageState::Leaving as u64;
        }
        if !self.rules.write_clears_copy && word.is_copied() {
            leased.0 |= 1 << 2;
        }
        Some(leased)
    }

    /// The page with its lease begins to leave.
    fn leave(&self, word: PageWord) -> Option<PageWord> {
        if self.rules.leased_stay || word.state() != PageState::Resident {
            return word.leave();
        }
        Some(PageWord(word.0 & !(1 << 2) | PageState::Leaving as u64))
    }

    fn pager(&self, world: &World) -> Result<Option<World>, String> {
        match world.pager {
            PagerAt::Idle
            | PagerAt::Left
            | PagerAt::Protected
            | PagerAt::Copied
            | PagerAt::Disturbed
            | PagerAt::Succeeded => Ok(self.copying(world)),
            PagerAt::Shadowed | PagerAt::Checked | PagerAt::Comparing { .. } => {
                self.comparing(world)
            }
            PagerAt::Evicted | PagerAt::Punched | PagerAt::Coming | PagerAt::Returned => {
                self.away(world)
            }
        }
    }

    fn copying(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        let rules = self.rules;
        match world.pager {
            PagerAt::Idle => {
                let word = self.leave(world.word).filter(|_| world.rounds > 0)?;
                (next.word, next.rounds, next.pager) = (word, world.rounds - 1, PagerAt::Left);
            }
            PagerAt::Left => {
                next.is_protected = rules.protect_first;
                next.pager = PagerAt::Protected;
            }
            PagerAt::Protected => {
                next.copy = world.page;
                next.pager = PagerAt::Copied;
            }
            PagerAt::Copied => {
                next.is_protected = true;
                let (word, forced, then) = match self.mode {
                    Mode::Shadow => (world.word.copied(), 1 << 2, PagerAt::Shadowed),
                    Mode::Evict => {
                        (world.word.evict(), PageState::Evicted as u64, PagerAt::Evicted)
                    }
                };
                let forced = PageWord(world.word.0 & !0b11 | forced);
                let word = word.or((!rules.evict_checks).then_some(forced));
                next.pager = if word.is_some() { then } else { PagerAt::Disturbed };
                next.word = word.unwrap_or(world.word);
            }
            PagerAt::Succeeded if !rules.successor_forgets && world.word.is_copied() => {
                // It protects the page again and takes what it finds for valid.
                (next.is_protected, next.pager) = (true, PagerAt::Shadowed);
            }
            PagerAt::Succeeded => {
                (next.word, next.copy, next.pager) = (world.word.stay(), None, PagerAt::Idle);
            }
            _ => {
                next.word = world.word.stay();
                (next.copy, next.is_protected) = (None, false);
                (next.pager, next.is_guest_waiting) = (PagerAt::Idle, false);
            }
        }
        Some(next)
    }

    /// After the guest's write fault.
    fn comparing(&self, world: &World) -> Result<Option<World>, String> {
        let mut next = world.clone();
        next.pager = match world.pager {
            PagerAt::Shadowed if !world.is_guest_waiting => return Ok(None),
            PagerAt::Shadowed if world.word.is_copied() => PagerAt::Checked,
            PagerAt::Checked => PagerAt::Comparing { is_equal: world.page == world.copy },
            PagerAt::Comparing { is_equal: false }
                if world.word.is_copied() || !self.rules.compare_checks =>
            {
                return Err("a page differs from its valid copy".into());
            }
            _ => PagerAt::Disturbed,
        };
        Ok(Some(next))
    }

    fn away(&self, world: &World) -> Result<Option<World>, String> {
        let mut next = world.clone();
        match world.pager {
            PagerAt::Evicted => {
                (next.page, next.pager) = (None, PagerAt::Punched);
            }
            PagerAt::Punched => {
                let Some(word) = world.word.come() else { return Err("evicted twice".into()) };
                (next.word, next.pager) = (word, PagerAt::Coming);
                if !self.rules.arrive_last {
                    next.word = word.arrive().unwrap_or(word);
                }
            }
            PagerAt::Coming => {
                // Not over a page that exists.
                next.page = world.page.or(world.copy);
                (next.is_protected, next.is_guest_waiting) = (false, false);
                next.pager = PagerAt::Returned;
            }
            _ => {
                next.word = world.word.arrive().unwrap_or(world.word);
                (next.pager, next.copy) = (PagerAt::Idle, None);
            }
        }
        Ok(Some(next))
    }

    /// The pager dies, its guard leaves the faults to the kernel, and another one begins. Only
    /// while nothing is away.
    fn death(&self, world: &World) -> Option<World> {
        let is_away = world.word.state().is_away();
        if world.deaths == 0 || is_away || world.page.is_none() || self.mode == Mode::Evict {
            return None;
        }
        let mut next = world.clone();
        next.deaths -= 1;
        (next.is_protected, next.is_guest_waiting) = (false, false);
        next.pager = PagerAt::Succeeded;
        Some(next)
    }

    fn reader(&self, world: &World) -> Result<Option<World>, String> {
        let mut next = world.clone();
        match world.reader {
            HolderAt::Idle if self.rules.holders_lease => {
                match self.lease(world.word, READER, Purpose::Read) {
                    Some(word) => (next.word, next.reader) = (word, HolderAt::Leased),
                    None => next.word = world.word.want(),
                }
            }
            HolderAt::Idle => next.reader = HolderAt::Leased,
            HolderAt::Leased => {
                if world.page != Some(world.truth) {
                    let page = world.page;
                    return Err(format!("a holder reads {page:?} instead of {}", world.truth));
                }
                next.reader = HolderAt::Accessed;
            }
            HolderAt::Accessed => {
                next.word = world.word.release(READER, Purpose::Read);
                next.reader = HolderAt::Done;
            }
            HolderAt::Done => return Ok(None),
        }
        Ok(Some(next))
    }

    fn writer(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        match world.writer {
            HolderAt::Idle | HolderAt::Accessed if world.writer_is_dead => return None,
            HolderAt::Idle if self.rules.holders_lease => {
                match self.lease(world.word, WRITER, Purpose::Write) {
                    Some(word) => (next.word, next.writer) = (word, HolderAt::Leased),
                    None => next.word = world.word.want(),
                }
            }
            HolderAt::Idle => next.writer = HolderAt::Leased,
            // Also after its death.
            HolderAt::Leased => {
                next.write(100);
                next.writer = HolderAt::Accessed;
            }
            HolderAt::Accessed => {
                next.word = world.word.release(WRITER, Purpose::Write);
                next.writer = HolderAt::Done;
            }
            HolderAt::Done => return None,
        }
        Some(next)
    }

    /// The writer dies; later somebody gives back what it had.
    fn burial(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        if !world.writer_is_dead {
            next.writer_is_dead = true;
            return (world.writer == HolderAt::Leased).then_some(next);
        }
        if world.is_buried {
            return None;
        }
        next.is_buried = true;
        next.word = world.word.give_back(WRITER);
        if !self.rules.dead_writers_stay {
            next.word = next.word.release(WRITER, Purpose::Write);
        }
        Some(next)
    }

    fn guest(world: &World) -> Option<World> {
        let mut next = world.clone();
        if world.guest_writes == 0 || world.is_guest_waiting {
            return None;
        }
        if world.is_protected || world.page.is_none() {
            next.is_guest_waiting = true;
        } else {
            next.write(world.guest_writes);
            next.guest_writes -= 1;
        }
        Some(next)
    }

    fn check(world: &World) -> Found {
        let is_quiet = !matches!(world.pager, PagerAt::Punched | PagerAt::Coming);
        if is_quiet && world.page.is_none() {
            return Err("the page is away, and nobody brings it in".into());
        }
        if let Some(page) = world.page.filter(|page| *page != world.truth) {
            return Err(format!("the page has {page} instead of {}", world.truth));
        }
        Ok(())
    }

    fn explore(&mut self, first: World) -> Found {
        let mut open = vec![first];
        while let Some(world) = open.pop() {
            if !self.seen.insert(world.clone()) {
                continue;
            }
            let show = |error| format!("{error}: {world:?}");
            Self::check(&world).map_err(show)?;
            let steps = [
                self.pager(&world).map_err(show)?,
                self.reader(&world).map_err(show)?,
                self.writer(&world),
                self.burial(&world),
                self.death(&world),
                Self::guest(&world),
            ];
            open.extend(steps.into_iter().flatten());
        }
        Ok(())
    }
}

/// Explores both modes. Returns the number of states.
fn explore(rules: Rules) -> Result<usize, String> {
    let mut count = 0;
    for mode in [Mode::Shadow, Mode::Evict] {
        let first = World {
            word: PageWord::default(),
            page: Some(50),
            truth: 50,
            is_protected: false,
            copy: None,
            pager: PagerAt::Idle,
            rounds: 2,
            deaths: 1,
            reader: HolderAt::Idle,
            writer: HolderAt::Idle,
            writer_is_dead: false,
            is_buried: false,
            guest_writes: 2,
            is_guest_waiting: false,
        };
        let mut explorer = Explorer { rules, mode, seen: HashSet::new() };
        explorer.explore(first)?;
        count += explorer.seen.len();
    }
    Ok(count)
}

#[test]
fn no_interleaving_loses_a_byte() {
    let states = explore(ALL).unwrap();
    println!("{states} states");
    assert!(states > 1000, "the model has become trivial: {states} states");
}

/// Takes a rule away.
type Removal = fn(&mut Rules);

#[test]
fn each_rule_is_needed() {
    let without: [(&str, Removal); 10] = [
        ("a lease ends a leaving", |rules| rules.lease_ends_leaving = false),
        ("a write clears the copy", |rules| rules.write_clears_copy = false),
        ("leased pages stay", |rules| rules.leased_stay = false),
        ("protect before the copy", |rules| rules.protect_first = false),
        ("evict only what still leaves", |rules| rules.evict_checks = false),
        ("compare only with a valid copy", |rules| rules.compare_checks = false),
        ("pages that the dead write stay", |rules| rules.dead_writers_stay = false),
        ("a new pager forgets", |rules| rules.successor_forgets = false),
        ("holders take leases", |rules| rules.holders_lease = false),
        ("the page comes before the word", |rules| rules.arrive_last = false),
    ];
    for (name, take_away) in without {
        let mut rules = ALL;
        take_away(&mut rules);
        let found = explore(rules);
        println!("without \"{name}\": {found:?}");
        assert!(found.is_err(), "no interleaving needs the rule: {name}");
    }
}

//! All interleavings of a pager that takes one page away and brings it back, and dies at any step;
//! its successor; holders that read and write through their own mappings, one of which dies; the
//! guest; and a VMM that gives the page back.
//!
//! This is the protocol that a pager follows (`crates/attach/src/away.rs`). The words are those of
//! [`PageWord`], by the same functions as in production. What outlives the pager is the guest's
//! file, the protection in the VMM (it stays registered while pages are away), the word, and the
//! *entry* of the store, which has the page's content:
//!
//! ```text
//! leave, protect, read, entry, evict, punch │ come, copy (protected), no entry, arrive, unprotect
//! ```
//! A page that the VMM gives back is zeroes, or has any content that the guest had in it since it
//! last wrote to it: balloon and free page reporting allow both. So what may be read is a set.

use std::collections::HashSet;

use super::word::{PageState, PageWord};
use crate::pager::Purpose;

/// What protects the page. Each has to be true in a pager.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The page is protected before it is read.
    protect_first: bool,
    /// The entry is there before the page goes.
    entry_first: bool,
    /// The page goes only if the word still says that it leaves.
    evict_checks: bool,
    /// A page that comes is protected until its entry has ended.
    unprotect_last: bool,
    /// The page is there before a holder may access it.
    arrive_after_copy: bool,
    /// A page that exists is not replaced by its entry.
    page_wins: bool,
    /// A fault makes zeroes only if the word does not say that the page is away.
    zeroes_check: bool,
    /// Holders make zeroes only with a lease.
    holders_lease: bool,
    /// A successor believes the words.
    successor_looks: bool,
    /// The faults of pages that are away wait when a pager has died; the kernel does not get them.
    faults_wait: bool,
    /// What a dead holder may still be writing stays.
    dead_writers_stay: bool,
    /// A page that has come is not one of which zeroes are enough any more.
    arrive_ends_overwrite: bool,
    /// Nor is one that leaves anew. The rules before and behind this one would be enough for the
    /// processes of one version.
    leave_ends_overwrite: bool,
    /// Zeroes are enough only for a page that was away when it was asked for.
    overwrite_only_away: bool,
}

const ALL: Rules = Rules {
    protect_first: true,
    entry_first: true,
    evict_checks: true,
    unprotect_last: true,
    arrive_after_copy: true,
    page_wins: true,
    zeroes_check: true,
    holders_lease: true,
    successor_looks: true,
    faults_wait: true,
    dead_writers_stay: true,
    arrive_ends_overwrite: true,
    leave_ends_overwrite: true,
    overwrite_only_away: true,
};

/// The step that the pager has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Idle,
    Left,
    Protected,
    Read,
    Entered,
    Evicted,
    Punched,
    Coming,
    Copied,
    Unentered,
    Arrived,
    /// The page stays after all: the entry has gone.
    Staying,
    /// It has died, and nobody serves.
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum HolderAt {
    Idle,
    Leased,
    Accessed,
    Done,
}

/// The contents that occur.
const FIRST: u8 = 1;
const GUEST: u8 = 2;
const DEVICE: u8 = 4;
const ZEROES: u8 = 0;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    word: PageWord,
    /// The content in the guest's file; none if the page is missing.
    page: Option<u8>,
    /// The contents that may be read, as bits.
    allowed: u8,
    is_protected: bool,
    /// What the pager has read, in memory that dies with it.
    read: Option<u8>,
    /// What outlives it.
    entry: Option<u8>,
    pager: At,
    rounds: u8,
    deaths: u8,
    discards: u8,
    reader: HolderAt,
    writer: HolderAt,
    writer_is_dead: bool,
    is_buried: bool,
    /// Whether the writer overwrites the whole page: the guest has given it away until then.
    overwrites: bool,
    /// Whether it has asked for the page, and has not written yet.
    is_given_away: bool,
    /// The writer was refused its lease, and is about to ask for the page.
    is_refused: bool,
    guest_reads: u8,
    guest_writes: u8,
    /// The guest's thread has met a fault and waits to be woken.
    is_guest_waiting: bool,
}

const READER: usize = 0;
const WRITER: usize = 1;

type Next = Result<Vec<World>, String>;

impl World {
    fn is_away(&self) -> bool {
        self.word.state().is_away()
    }

    fn wake(&mut self) {
        self.is_guest_waiting = false;
    }

    /// Somebody sees the page.
    fn see(&mut self, who: &str) -> Result<(), String> {
        match self.page {
            Some(page) if self.allowed & 1 << page != 0 => {
                self.allow(1 << page);
                Ok(())
            }
            found => Err(format!("{who} reads {found:?}")),
        }
    }

    /// Only these contents may be read from now on; zeroes too while the page is given away.
    fn allow(&mut self, contents: u8) {
        self.allowed = contents | u8::from(self.is_given_away) << ZEROES;
    }

    /// Somebody writes to the page, or to one that is not the guest's any more.
    fn write(&mut self, value: u8) {
        self.allow(1 << value);
        if self.page.is_some() {
            self.page = Some(value);
        }
    }

    /// Zeroes come into being, if the page is missing.
    fn zero(&mut self) {
        self.page = self.page.or(Some(ZEROES));
    }
}

fn with_overwrite(word: PageWord) -> PageWord {
    let state = word.0 & 0b11;
    let away = PageWord(word.0 & !0b11 | PageState::Evicted as u64).want_overwritten();
    PageWord(away.0 & !0b11 | state)
}

struct Explorer {
    rules: Rules,
    seen: HashSet<World>,
}

impl Explorer {
    fn pager(&self, world: &World) -> Vec<World> {
        let rules = self.rules;
        let mut next = world.clone();
        match world.pager {
            At::Idle => return self.idle(world),
            At::Dead => {
                // The next one begins: with what the word says.
                next.pager = match world.word.state() {
                    PageState::Evicted if rules.successor_looks => At::Punched,
                    PageState::Coming if rules.successor_looks => At::Coming,
                    _ => At::Staying,
                };
                if next.pager == At::Staying {
                    next.entry = None;
                }
            }
            At::Left => {
                next.is_protected |= rules.protect_first;
                next.pager = At::Protected;
            }
            At::Protected => {
                next.read = world.page;
                next.pager = if world.page.is_some() { At::Read } else { At::Staying };
            }
            At::Read => {
                next.entry = world.read.filter(|_| rules.entry_first);
                (next.is_protected, next.pager) = (true, At::Entered);
            }
            At::Entered => {
                let forced = PageWord(world.word.0 & !0b11 | PageState::Evicted as u64);
                let evicted = world.word.evict().or((!rules.evict_checks).then_some(forced));
                if let Some(word) = evicted {
                    (next.word, next.pager) = (word, At::Evicted);
                } else {
                    (next.entry, next.pager) = (None, At::Staying);
                }
            }
            At::Staying => {
                (next.word, next.is_protected, next.pager) = (world.word.stay(), false, At::Idle);
                next.wake();
            }
            At::Evicted => (next.page, next.pager) = (None, At::Punched),
            At::Punched if world.entry.is_none() && world.read.is_some() => next.entry = world.read,
            At::Punched => return self.come(world).into_iter().collect(),
            At::Coming | At::Copied | At::Unentered | At::Arrived => next = self.coming(world),
        }
        vec![next]
    }

    /// A fault, a holder that wants the page, or the end of the pager.
    fn come(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        if !self.rules.zeroes_check && world.is_guest_waiting {
            next.zero();
            next.wake();
            return Some(next);
        }
        next.word = world.word.come()?;
        next.pager = At::Coming;
        if !self.rules.arrive_after_copy {
            next.word = next.word.arrive()?;
        }
        Some(next)
    }

    fn coming(&self, world: &World) -> World {
        let rules = self.rules;
        let mut next = world.clone();
        match world.pager {
            At::Coming => {
                // Without an entry it was there already, and was given back since.
                let entry = world.entry.filter(|_| !world.word.is_overwritten());
                let content = entry.or(Some(ZEROES));
                next.page = if rules.page_wins { world.page.or(content) } else { content };
                next.is_protected = rules.unprotect_last;
                if !rules.unprotect_last {
                    next.wake();
                }
                next.pager = At::Copied;
            }
            At::Copied => (next.entry, next.read, next.pager) = (None, None, At::Unentered),
            At::Unentered => {
                next.word = world.word.arrive().unwrap_or(world.word);
                if world.word.is_overwritten() && !rules.arrive_ends_overwrite {
                    next.word = with_overwrite(next.word);
                }
                next.pager = At::Arrived;
            }
            _ => {
                (next.is_protected, next.pager) = (false, At::Idle);
                next.wake();
            }
        }
        next
    }

    fn idle(&self, world: &World) -> Vec<World> {
        let mut all = Vec::new();
        if world.is_guest_waiting {
            // The page is missing by right, or was protected by an earlier pager.
            let mut next = world.clone();
            next.zero();
            next.is_protected = false;
            next.wake();
            all.push(next);
        }
        if let Some(mut word) = world.word.leave().filter(|_| world.rounds > 0) {
            if world.word.is_overwritten() && !self.rules.leave_ends_overwrite {
                word = with_overwrite(word);
            }
            all.push(World { word, rounds: world.rounds - 1, pager: At::Left, ..world.clone() });
        }
        all
    }

    fn death(&self, world: &World) -> Option<World> {
        if world.deaths == 0 || world.pager == At::Dead {
            return None;
        }
        let deaths = world.deaths - 1;
        let mut next = World { deaths, pager: At::Dead, read: None, ..world.clone() };
        if !self.rules.faults_wait {
            // Its guard leaves the faults to the kernel.
            next.is_protected = false;
            next.zero();
            next.wake();
        }
        Some(next)
    }

    /// A holder asks for a lease. Returns the next state, and whether it has the lease; it makes
    /// zeroes then, if the page is missing by right. `None` while it waits.
    fn take(&self, world: &World, holder: usize, purpose: Purpose) -> Option<(World, bool)> {
        let mut next = world.clone();
        let leased = world.word.lease(holder, purpose);
        if leased.is_none() && self.rules.holders_lease {
            next.word = world.word.want();
            return (next != *world).then_some((next, false));
        }
        next.word = leased.unwrap_or(world.word);
        next.zero();
        Some((next, true))
    }

    fn reader(&self, world: &World) -> Next {
        let mut next = world.clone();
        match world.reader {
            HolderAt::Idle => match self.take(world, READER, Purpose::Read) {
                Some((taken, is_leased)) => {
                    next = taken;
                    next.reader = if is_leased { HolderAt::Leased } else { HolderAt::Idle };
                }
                None => return Ok(Vec::new()),
            },
            HolderAt::Leased => {
                // The VMM may have given the page back: a handler makes zeroes.
                next.zero();
                next.see("a holder")?;
                next.reader = HolderAt::Accessed;
            }
            HolderAt::Accessed => {
                next.word = world.word.release(READER, Purpose::Read);
                next.reader = HolderAt::Done;
            }
            HolderAt::Done => return Ok(Vec::new()),
        }
        Ok(vec![next])
    }

    fn writer(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        match world.writer {
            HolderAt::Idle | HolderAt::Accessed if world.writer_is_dead => return None,
            HolderAt::Idle if world.overwrites => return self.overwrite(world),
            HolderAt::Idle => {
                let (taken, is_leased) = self.take(world, WRITER, Purpose::Write)?;
                next = taken;
                next.writer = if is_leased { HolderAt::Leased } else { HolderAt::Idle };
            }
            // By a device, also after the holder's death.
            HolderAt::Leased => {
                next.is_given_away = false;
                if world.page.is_some() || world.is_away() {
                    next.write(DEVICE);
                } else {
                    // The VMM has given the page back meanwhile.
                    next.allowed |= 1 << DEVICE;
                }
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

    /// The writer asks for the page to overwrite it: a lease, and if that is refused, another step
    /// that asks for the page.
    fn overwrite(&self, world: &World) -> Option<World> {
        let mut next = world.clone();
        next.is_given_away = true;
        next.allow(world.allowed);
        if world.is_refused {
            next.is_refused = false;
            next.word = world.word.want_overwritten();
            if !self.rules.overwrite_only_away {
                next.word = with_overwrite(next.word);
            }
        } else if let Some(word) = world.word.lease(WRITER, Purpose::Overwrite) {
            (next.word, next.writer) = (word, HolderAt::Leased);
            next.zero();
        } else if !world.word.is_overwritten() {
            next.is_refused = true;
        }
        (next != *world).then_some(next)
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

    fn guest(world: &World) -> Next {
        if world.is_guest_waiting {
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        if world.guest_reads > 0 {
            let mut next = world.clone();
            if world.page.is_none() {
                next.is_guest_waiting = true;
            } else {
                next.guest_reads -= 1;
                next.see("the guest")?;
            }
            all.push(next);
        }
        if world.guest_writes > 0 {
            let mut next = world.clone();
            if world.page.is_none() || world.is_protected {
                next.is_guest_waiting = true;
            } else {
                next.write(GUEST + (world.guest_writes - 1));
                next.guest_writes -= 1;
            }
            all.push(next);
        }
        Ok(all)
    }

    /// The VMM gives the page back, because the guest does not need its content.
    fn discard(world: &World) -> Option<World> {
        let next = World {
            discards: world.discards.checked_sub(1)?,
            page: None,
            allowed: world.allowed | 1 << ZEROES,
            ..world.clone()
        };
        Some(next)
    }

    fn check(world: &World) -> Result<(), String> {
        match world.page {
            Some(page) if world.allowed & 1 << page == 0 => Err(format!("the page has {page}")),
            None if world.is_away() && world.pager == At::Idle => {
                Err("nobody brings the page in".into())
            }
            _ => Ok(()),
        }
    }

    fn explore(&mut self, first: World) -> Result<(), String> {
        let mut open = vec![first];
        while let Some(world) = open.pop() {
            if !self.seen.insert(world.clone()) {
                continue;
            }
            let show = |error| format!("{error}: {world:?}");
            Self::check(&world).map_err(show)?;
            let mut steps = self.pager(&world);
            steps.extend(self.reader(&world).map_err(show)?);
            steps.extend(self.writer(&world));
            steps.extend(Self::guest(&world).map_err(show)?);
            let is_stuck = steps.is_empty();
            if is_stuck && (world.is_guest_waiting || world.reader == HolderAt::Idle) {
                return Err(show("somebody waits for ever".into()));
            }
            let chances = [self.burial(&world), self.death(&world), Self::discard(&world)];
            open.extend(steps.into_iter().chain(chances.into_iter().flatten()));
        }
        Ok(())
    }
}

fn explore(rules: Rules) -> Result<usize, String> {
    Ok(explore_with(rules, false)? + explore_with(rules, true)?)
}

fn explore_with(rules: Rules, overwrites: bool) -> Result<usize, String> {
    let first = World {
        word: PageWord::default(),
        page: Some(FIRST),
        allowed: 1 << FIRST,
        is_protected: false,
        read: None,
        entry: None,
        pager: At::Idle,
        rounds: 2,
        deaths: 2,
        discards: 1,
        reader: HolderAt::Idle,
        writer: HolderAt::Idle,
        writer_is_dead: false,
        is_buried: false,
        overwrites,
        is_given_away: false,
        is_refused: false,
        guest_reads: 1,
        guest_writes: 2,
        is_guest_waiting: false,
    };
    let mut explorer = Explorer { rules, seen: HashSet::new() };
    explorer.explore(first)?;
    Ok(explorer.seen.len())
}

#[test]
fn no_interleaving_of_an_eviction_loses_a_byte() {
    let states = explore(ALL).unwrap();
    println!("{states} states");
    assert!(states > 10_000, "the model has become trivial: {states} states");
}

/// Takes a rule away.
type Removal = fn(&mut Rules);

#[test]
fn each_rule_of_eviction_is_needed() {
    let without: [(&str, Removal); 13] = [
        ("protect before the copy", |rules| rules.protect_first = false),
        ("the entry before the punch", |rules| rules.entry_first = false),
        ("evict only what still leaves", |rules| rules.evict_checks = false),
        ("unprotect when the entry has ended", |rules| rules.unprotect_last = false),
        ("the page comes before the word", |rules| rules.arrive_after_copy = false),
        ("a page that exists wins", |rules| rules.page_wins = false),
        ("zeroes only for what is not away", |rules| rules.zeroes_check = false),
        ("holders take leases", |rules| rules.holders_lease = false),
        ("a successor believes the words", |rules| rules.successor_looks = false),
        ("faults wait for a successor", |rules| rules.faults_wait = false),
        ("pages that the dead write stay", |rules| rules.dead_writers_stay = false),
        ("zeroes are enough only once", |rules| {
            (rules.arrive_ends_overwrite, rules.leave_ends_overwrite) = (false, false);
        }),
        ("zeroes are enough for what is away", |rules| {
            (rules.overwrite_only_away, rules.leave_ends_overwrite) = (false, false);
        }),
    ];
    for (name, take_away) in without {
        let mut rules = ALL;
        take_away(&mut rules);
        let found = explore(rules);
        println!("without \"{name}\": {found:?}");
        assert!(found.is_err(), "no interleaving needs the rule: {name}");
    }
}

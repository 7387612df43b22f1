//! Guarantees: places that the writes of a volume always find, whatever others write.
//!
//! A volume with a guarantee of *n* blocks can always have *n* blocks of its own. What it has of
//! them is counted: its *fresh* blocks, which are in pages of its own branch, so that to overwrite
//! one frees a place at once. A snapshot or a roll-back makes none of them fresh. For the blocks
//! that are not there yet, for the pages of the map that describe them, and for some that are
//! overwritten, places stay free: what the others need is not given to a batch.
//!
//! The count is exact but for one thing: a discard drops pages without reading them. Then the fresh
//! blocks are counted anew, from the first block on, while the volume is used: those behind the
//! point that was reached count as missing.
//!
//! The blocks of such a volume are not shared with others, since a shared one does not become free
//! when it is overwritten. So they get no fingerprints, and what it had before the guarantee counts
//! as not its own.

use crate::bitmap;
use crate::catalogue::{Catalogue, Change, Epoch, PageId, VOLUME_SIZE_MAX, Volume};
use crate::error::PoolError;
use crate::layout::BLOCK;
use crate::pages::{Fault, Pages, WORDS};
use crate::pool::Pool;
use crate::refusal::PoolRefusal;
use crate::state::State;
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL, index, span};
use crate::words::{WordReader, WordWriter};

/// The share of a guarantee for blocks that are overwritten before their places are free, and the
/// fewest and the most such blocks.
const OVERWRITTEN_SHARE: u64 = 16;
const OVERWRITTEN_MIN: u64 = 16;
const OVERWRITTEN_MAX: u64 = 4096;
/// The pages that a step of a count looks at.
const COUNT_STEP: usize = 16;

/// The fresh blocks of a volume, as far as they were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreshCount {
    pub(crate) fresh: u64,
    /// The first block that was not counted: a multiple of the blocks of a leaf.
    pub(crate) counted: u64,
}

impl FreshCount {
    /// The count of a volume without fresh blocks.
    pub(crate) const NONE: Self = Self { fresh: 0, counted: BLOCKS_MAX };
    /// Nothing was counted yet.
    pub(crate) const UNKNOWN: Self = Self { fresh: 0, counted: 0 };

    pub(crate) fn is_complete(&self) -> bool {
        self.counted >= BLOCKS_MAX
    }
}

/// The pages of a map, and of a set of changed blocks, that `blocks` further blocks of a volume of
/// `size` bytes make at most.
fn pages_for(blocks: u64, size: u64) -> u64 {
    let all = size.div_ceil(BLOCK);
    let pages = |span: u64| all.div_ceil(span).min(blocks);
    let levels = 0..=ROOT_LEVEL;
    levels.map(|level| pages(span(level + 1)) + pages(bitmap::span(level) * WORDS as u64)).sum()
}

impl Volume {
    /// The blocks of its own for which it has places: the guaranteed ones, and some that are
    /// overwritten. 0 without a guarantee.
    fn target(&self) -> u64 {
        let places = self.guarantee.div_ceil(BLOCK);
        let overwritten = (places / OVERWRITTEN_SHARE).clamp(OVERWRITTEN_MIN, OVERWRITTEN_MAX);
        if places == 0 { 0 } else { places + overwritten }
    }

    /// The places that have to stay free for it if it has so many blocks of its own.
    fn need(&self, own: u64) -> u64 {
        let missing = self.target().saturating_sub(own);
        missing + pages_for(missing, self.size)
    }
}

impl Catalogue {
    /// Gives a volume a guarantee, or takes it away. `None` if there is no such volume.
    pub(crate) fn guarantee(&mut self, id: u32, bytes: u64) -> Option<()> {
        let volume = self.volumes.get(&id)?;
        let (is_new, is_empty) = (volume.guarantee == 0 && bytes > 0, volume.root == 0);
        let floor = if is_new && !is_empty { Some(self.raise()?) } else { None };
        let volume = self.volumes.get_mut(&id)?;
        volume.guarantee = bytes;
        if is_new {
            volume.own = FreshCount::NONE;
        }
        volume.floor = floor.unwrap_or(volume.floor);
        Some(())
    }

    /// Appends the guarantees to a record.
    pub(crate) fn encode_guarantees(&self, out: &mut WordWriter) {
        let guaranteed = self.volumes.values().filter(|volume| volume.guarantee > 0);
        out.u32(guaranteed.clone().count() as u32);
        for Volume { id, guarantee, own, .. } in guaranteed {
            out.u32(*id);
            out.u64(*guarantee);
            out.u64(if own.is_complete() { own.fresh } else { u64::MAX });
        }
    }

    /// Takes the guarantees from the end of a record.
    pub(crate) fn decode_guarantees(&mut self, input: &mut WordReader<'_>) -> Option<()> {
        let count = input.u32()?;
        let found = input.list(count, |input| Some((input.u32()?, input.u64()?, input.u64()?)))?;
        let mut last = 0;
        for (id, guarantee, fresh) in found {
            let volume = self.volumes.get_mut(&id).filter(|volume| volume.guarantee == 0)?;
            let is_sane = id > last && (1..=VOLUME_SIZE_MAX).contains(&guarantee);
            volume.guarantee = Some(guarantee).filter(|_| is_sane)?;
            volume.own = match fresh {
                u64::MAX => FreshCount::UNKNOWN,
                _ if fresh <= BLOCKS_MAX => FreshCount { fresh, ..FreshCount::NONE },
                _ => return None,
            };
            last = id;
        }
        Some(())
    }
}

/// The volumes with guarantees.
#[derive(Debug, Default)]
pub(crate) struct Guarantees {
    volumes: Vec<u32>,
    /// What they need at most.
    most: u64,
}

impl Guarantees {
    pub(crate) fn of(catalogue: &Catalogue) -> Self {
        let guaranteed = catalogue.volumes.values().filter(|volume| volume.guarantee > 0);
        let volumes = guaranteed.clone().map(|volume| volume.id).collect();
        Self { volumes, most: guaranteed.map(|volume| volume.need(0)).sum() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.volumes.is_empty()
    }

    pub(crate) fn has(&self, volume: u32) -> bool {
        self.volumes.contains(&volume)
    }
}

/// Whether a batch gets places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// For so many blocks, as far as guarantees matter.
    Blocks(usize),
    /// For none now, but perhaps after a checkpoint or when others have ended.
    Later,
    /// For none.
    None,
}

impl Pages {
    /// The fresh entries of the leaf at a block, if the leaf is one of a branch with this floor,
    /// and the first block that is not in the same leaf, or in a larger part without such a leaf.
    ///
    /// # Errors
    /// The fault, and the first block behind what cannot be counted because of it.
    pub(crate) fn count_fresh(
        &self,
        root: PageId,
        floor: Epoch,
        at: u64,
    ) -> Result<(u64, u64), (Fault, u64)> {
        let mut id = root;
        for level in (0..=ROOT_LEVEL).rev() {
            let width = span(level + 1);
            let next = (at / width + 1) * width;
            if id == 0 || !self.is_own(id, floor) {
                return Ok((0, next));
            }
            let page = self.get(id).map_err(|fault| (fault, next))?;
            if level == 0 {
                let entries = (0..WORDS).filter_map(|index| Self::leaf_entry(page, index).ok());
                return Ok((entries.filter(|entry| entry.is_fresh()).count() as u64, next));
            }
            id = Self::child(page, index(at, level)).map_err(|fault| (fault, next))?;
        }
        Err((Fault::Damaged, BLOCKS_MAX))
    }
}

impl State {
    /// The places that have to stay free for the guarantees of volumes.
    pub(crate) fn guaranteed(&self) -> u64 {
        self.needs(|volume| volume.own.fresh)
    }

    /// The same if volumes have as many fresh blocks as `fresh` says.
    fn needs(&self, fresh: impl Fn(&Volume) -> u64) -> u64 {
        let volumes = self.guarantees.volumes.iter();
        let volumes = volumes.filter_map(|id| self.catalogue.volumes.get(id));
        let in_flight = self.all_places_in_flight();
        let of = |volume: &Volume| in_flight.get(&volume.id).copied().unwrap_or(0);
        volumes.map(|volume| volume.need(fresh(volume) + of(volume))).sum()
    }

    /// The places that are free for data, but for those that new pages of maps will take.
    fn room(&self) -> u64 {
        let pages = self.pages.new_count() + self.promised();
        self.space.room().saturating_sub(pages as u64)
    }

    /// The same after the next checkpoint.
    fn room_soon(&self) -> u64 {
        let pages = self.pages.new_count() + self.promised();
        (self.space.room() + self.space.returning()).saturating_sub(pages as u64)
    }

    /// How many of the places for `count` blocks of a volume the guarantees of others leave.
    pub(crate) fn share_of(&self, volume: u32, count: usize) -> Share {
        if count == 0 || self.guarantees.is_empty() || !self.rules.keeps_guarantees {
            return Share::Blocks(count);
        }
        let room = self.room();
        if room >= self.guarantees.most + count as u64 {
            return Share::Blocks(count);
        }
        let at_most =
            |blocks: u64| Share::Blocks(count.min(usize::try_from(blocks).unwrap_or(count)));
        let in_flight = self.places_in_flight(volume);
        if let Some(found) = self.catalogue.volumes.get(&volume) {
            let own = found.target().saturating_sub(found.own.fresh + in_flight);
            if own > 0 {
                return at_most(own);
            }
        }
        let needed = self.guaranteed();
        if room > needed {
            return at_most(room - needed);
        }
        let is_awaited = in_flight > 0
            || self.room_soon() + self.space.hidden() > needed
            || self.has_garbage
            || self.walk.is_some()
            || self.relocation.is_some();
        if is_awaited && !self.is_out_of_space { Share::Later } else { Share::None }
    }

    /// A batch of a volume gets no place because of guarantees.
    pub(crate) fn await_room(&mut self) {
        let (soon, needed) = (self.room_soon(), self.guaranteed());
        if soon <= needed && soon + self.space.hidden() > needed {
            self.space.want_hidden();
            self.is_checkpoint_wanted = true;
        }
        self.is_checkpoint_wanted |= soon > needed;
        self.has_garbage |= std::mem::take(&mut self.unsure) > 0;
    }

    /// Whether the guarantees could not be kept if these volumes had no fresh blocks.
    pub(crate) fn breaks_guarantees(&self, members: &[(u32, u32)]) -> bool {
        let is_member = |id: u32| members.iter().any(|(volume, _)| *volume == id);
        let fresh = |volume: &Volume| if is_member(volume.id) { 0 } else { volume.own.fresh };
        let is_any = self.guarantees.volumes.iter().any(|id| is_member(*id));
        is_any && self.rules.keeps_guarantees && self.needs(fresh) > self.room_soon()
    }

    /// Checks whether a volume may have a guarantee of so many bytes.
    fn check_guarantee(&self, volume: &Volume, bytes: u64) -> Result<(), PoolRefusal> {
        if bytes > volume.size {
            return Err(PoolRefusal::BadGuarantee);
        }
        let mut changed = volume.clone();
        changed.guarantee = bytes;
        let own = if volume.guarantee == 0 { 0 } else { volume.own.fresh };
        let own = own + self.places_in_flight(volume.id);
        let others = self.guaranteed().saturating_sub(volume.need(own));
        let is_less = bytes <= volume.guarantee;
        let has_room = others + changed.need(own) <= self.room_soon();
        if is_less || has_room { Ok(()) } else { Err(PoolRefusal::Guaranteed) }
    }

    /// The entry of a block of a volume has changed.
    pub(crate) fn note_fresh(&mut self, volume: u32, block: u64, was_fresh: bool, is_fresh: bool) {
        if was_fresh == is_fresh || self.guarantees.is_empty() {
            return;
        }
        let Some(found) = self.catalogue.volumes.get_mut(&volume) else { return };
        if found.guarantee > 0 && block < found.own.counted {
            let fresh = found.own.fresh + u64::from(is_fresh);
            found.own.fresh = fresh.saturating_sub(u64::from(was_fresh));
        }
    }

    /// So many fresh blocks of a part of a volume have become holes; if not `is_all`, some more.
    pub(crate) fn note_cleared(
        &mut self,
        volume: u32,
        part: &std::ops::Range<u64>,
        count: usize,
        is_all: bool,
    ) {
        if self.guarantees.is_empty() {
            return;
        }
        let Some(found) = self.catalogue.volumes.get_mut(&volume) else { return };
        let own = &mut found.own;
        if found.guarantee == 0 || part.start >= own.counted {
        } else if is_all && part.end <= own.counted {
            own.fresh = own.fresh.saturating_sub(count as u64);
        } else {
            *own = FreshCount::UNKNOWN;
        }
    }

    /// A volume of which the fresh blocks have to be counted.
    fn uncounted(&self) -> Option<&Volume> {
        let mut volumes = self.guarantees.volumes.iter();
        volumes.find_map(|id| self.catalogue.volumes.get(id).filter(|it| !it.own.is_complete()))
    }

    /// Whether fresh blocks have to be counted.
    pub(crate) fn has_uncounted(&self) -> bool {
        self.uncounted().is_some()
    }

    /// Counts some fresh blocks. Returns whether there are more to count.
    ///
    /// # Errors
    /// If a page is missing: the call is repeated when it is there.
    pub(crate) fn step_count(&mut self) -> Result<bool, Fault> {
        for _ in 0..COUNT_STEP {
            let Some(Volume { id, root, floor, own, .. }) = self.uncounted() else {
                return Ok(false);
            };
            let (id, own) = (*id, *own);
            let (fresh, next) = match self.pages.count_fresh(*root, *floor, own.counted) {
                Ok(counted) => counted,
                Err((fault @ Fault::Missing(_), _)) => return Err(fault),
                Err((Fault::Damaged, next)) => (0, next),
            };
            self.counted(id, fresh, next);
        }
        Ok(true)
    }

    /// The part of a volume that is counted next cannot be read: it counts as not fresh.
    pub(crate) fn skip_count(&mut self) {
        let Some(Volume { id, root, floor, own, .. }) = self.uncounted() else { return };
        let id = *id;
        if let Err((_, next)) = self.pages.count_fresh(*root, *floor, own.counted) {
            self.counted(id, 0, next);
        }
    }

    fn counted(&mut self, id: u32, fresh: u64, next: u64) {
        if let Some(found) = self.catalogue.volumes.get_mut(&id) {
            let fresh = found.own.fresh + fresh;
            found.own = FreshCount { fresh, counted: next };
            if found.own.is_complete() {
                self.note_change();
            }
        }
    }
}

impl Pool {
    /// Guarantees a volume that it can have `bytes` bytes of its own, whatever others write to the
    /// pool, or takes the guarantee away if `bytes` is 0. What the volume has already counts from
    /// the time on when it is written anew.
    ///
    /// # Errors
    /// If there is no such volume, it is smaller, or the pool has not as much space.
    pub fn set_guarantee(&self, name: &str, bytes: u64) -> Result<(), PoolError> {
        self.change(|state| {
            let volume = state.catalogue.volume(name)?;
            state.check_guarantee(volume, bytes)?;
            Ok(Change::Guarantee { id: volume.id, bytes })
        })
    }
}

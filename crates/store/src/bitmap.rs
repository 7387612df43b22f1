//! Sets of blocks: bitmaps as trees of pages.
//!
//! A page of the lowest level has a bit for each of 32,768 blocks. A word of a page above has the
//! number of a page below, 0 if none of its blocks is in the set, or [`ALL`] if all are. A page
//! belongs to one set alone, and is changed in place.

use std::ops::Range;

use crate::catalogue::{Epoch, PageId};
use crate::difference::ReadPages;
use crate::pages::{Fault, Page, Pages, WORDS};
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL};

/// The word of a page above the lowest level below which all blocks are in the set.
pub(crate) const ALL: u64 = u64::MAX;
/// The pages that change at most if adjoining blocks come into a set: those on the way to both
/// ends.
pub(crate) const PAGES_MAX: usize = 2 * PATH;
/// The pages on the way to a block, and those that change if all blocks from it on come into a set.
pub(crate) const PATH: usize = ROOT_LEVEL as usize + 1;
/// The blocks of a word, as a power of two.
const WORD_BITS: u32 = u64::BITS.trailing_zeros();
/// The bits of an index in a page.
const INDEX_BITS: u32 = WORDS.trailing_zeros();
/// The most pages of the lowest level that are united at a time.
const UNITED_MAX: usize = 16;

/// Some of the blocks of a set.
#[derive(Clone, Copy)]
pub(crate) enum Bits<'p> {
    None,
    All,
    /// Those of a page of the lowest level.
    Page(&'p Page),
}

impl Bits<'_> {
    /// The 64 blocks around one.
    pub(crate) fn word(&self, block: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::All => u64::MAX,
            Self::Page(page) => page[index(block, 0)],
        }
    }
}

/// What a union of two sets leaves behind.
#[derive(Debug, Default)]
pub(crate) struct United {
    /// The pages that belong to the other set now, and their levels.
    pub(crate) moved: Vec<(PageId, u32)>,
    /// Whether there may be pages that nothing refers to.
    pub(crate) has_garbage: bool,
    pages: usize,
}

/// The blocks of a word of a page.
pub(crate) fn span(level: u32) -> u64 {
    1 << (WORD_BITS + level * INDEX_BITS)
}

fn index(block: u64, level: u32) -> usize {
    (block / span(level)) as usize % WORDS
}

/// The pages that change at most if these blocks come into a set.
pub(crate) fn pages_of(blocks: &Range<u64>) -> usize {
    let page = |block: u64| block / (span(0) * WORDS as u64);
    if page(blocks.start) == page(blocks.end.saturating_sub(1)) { PATH } else { PAGES_MAX }
}

/// The bits `range` of a word, which is not empty.
fn mask(range: &Range<u64>) -> u64 {
    (u64::MAX >> (64 - (range.end - range.start))) << range.start
}

fn child(word: u64) -> Result<PageId, Fault> {
    PageId::try_from(word).map_err(|_| Fault::Damaged)
}

impl Pages {
    /// Puts blocks into the set with this root, 0 if it is empty. New pages get `birth`. Returns
    /// whether there may be pages that nothing refers to.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn put_bits(
        &mut self,
        root: &mut PageId,
        birth: Epoch,
        blocks: &Range<u64>,
    ) -> Result<bool, Fault> {
        let blocks = blocks.start..blocks.end.min(BLOCKS_MAX);
        if blocks.is_empty() {
            return Ok(false);
        }
        if *root == 0 {
            *root = self.add_empty(birth)?;
        }
        self.put_below(*root, ROOT_LEVEL, &blocks, birth)
    }

    fn put_below(
        &mut self,
        id: PageId,
        level: u32,
        blocks: &Range<u64>,
        birth: Epoch,
    ) -> Result<bool, Fault> {
        let width = span(level);
        let (mut at, mut has_garbage) = (blocks.start, false);
        while at < blocks.end {
            let start = at / width * width;
            let end = (start + width).min(blocks.end);
            let index = index(at, level);
            let word = self.get(id)?[index];
            if level == 0 {
                // In any case, so that the page stays in memory until the next checkpoint.
                self.change(id)?[index] |= mask(&(at - start..end - start));
            } else if word != ALL && end - at == width {
                self.change(id)?[index] = ALL;
                has_garbage |= self.drop_set(word, level - 1)?;
            } else if word != ALL {
                let mut below = child(word)?;
                if below == 0 {
                    below = self.add_empty(birth)?;
                    self.change(id)?[index] = u64::from(below);
                }
                has_garbage |= self.put_below(below, level - 1, &(at..end), birth)?;
            }
            at = end;
        }
        Ok(has_garbage)
    }

    /// Drops what a word of a page above `level` leads to. Returns whether a walk has to find the
    /// rest.
    fn drop_set(&mut self, word: u64, level: u32) -> Result<bool, Fault> {
        if word == 0 || word == ALL {
            return Ok(false);
        }
        if level == 0 {
            self.remove(child(word)?);
        }
        Ok(level > 0)
    }

    /// The blocks of a set around one, and the end of the blocks for which that is so.
    ///
    /// # Errors
    /// If a page is missing, or the set is damaged.
    pub(crate) fn bits_at<'p>(
        &'p self,
        root: PageId,
        block: u64,
        read: &'p ReadPages,
    ) -> Result<(Bits<'p>, u64), Fault> {
        let (mut id, mut level) = (root, ROOT_LEVEL);
        if id == 0 {
            return Ok((Bits::None, BLOCKS_MAX));
        }
        loop {
            let page = self.find_page(id, read)?;
            if level == 0 {
                let width = span(0) * WORDS as u64;
                return Ok((Bits::Page(page), (block / width + 1) * width));
            }
            let end = (block / span(level) + 1) * span(level);
            match page[index(block, level)] {
                0 => return Ok((Bits::None, end)),
                ALL => return Ok((Bits::All, end)),
                word => id = child(word)?,
            }
            level -= 1;
        }
    }

    /// Brings the blocks of the set `from` into the set `into`, or some of them. Returns whether
    /// `from` is empty now. At any time, the two together have all blocks.
    ///
    /// # Errors
    /// If a page is missing, or a set is damaged. The call may be repeated if one is missing.
    pub(crate) fn unite_bits(
        &mut self,
        from: &mut PageId,
        into: &mut PageId,
        united: &mut United,
    ) -> Result<bool, Fault> {
        if *from == 0 {
            return Ok(true);
        }
        if *into == 0 {
            united.moved.push((*from, ROOT_LEVEL));
            *into = std::mem::take(from);
            return Ok(true);
        }
        let is_done = self.unite_below(*from, *into, ROOT_LEVEL, united)?;
        if is_done {
            self.remove(std::mem::take(from));
        }
        Ok(is_done)
    }

    fn unite_below(
        &mut self,
        from: PageId,
        into: PageId,
        level: u32,
        united: &mut United,
    ) -> Result<bool, Fault> {
        if level == 0 {
            if united.pages == UNITED_MAX {
                return Ok(false);
            }
            united.pages += 1;
            let page = self.get(from)?.clone();
            let mut words = page.iter().zip(self.get(into)?.iter());
            if words.any(|(more, word)| more & !word != 0) {
                let target = self.change(into)?;
                target.iter_mut().zip(page.iter()).for_each(|(word, more)| *word |= more);
            }
            return Ok(true);
        }
        for index in 0..WORDS {
            let (more, word) = (self.get(from)?[index], self.get(into)?[index]);
            if more == 0 {
                continue;
            }
            if more == ALL || word == ALL {
                self.change(into)?[index] = ALL;
                united.has_garbage |= self.drop_set(more, level - 1)?;
                united.has_garbage |= self.drop_set(word, level - 1)?;
            } else if word == 0 {
                united.moved.push((child(more)?, level - 1));
                self.change(into)?[index] = more;
            } else if self.unite_below(child(more)?, child(word)?, level - 1, united)? {
                self.remove(child(more)?);
            } else {
                return Ok(false);
            }
            self.change(from)?[index] = 0;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::paged::Paged;
    use crate::rules::Rules;

    fn blocks_of(pages: &Pages, root: PageId, end: u64) -> BTreeSet<u64> {
        let (read, mut found, mut at) = (ReadPages::default(), BTreeSet::new(), 0);
        while at < end {
            let (bits, next) = pages.bits_at(root, at, &read).unwrap();
            assert!(next > at);
            for block in at..next.min(end) {
                if bits.word(block) >> (block % 64) & 1 == 1 {
                    found.insert(block);
                }
            }
            at = next;
        }
        found
    }

    /// Sets against plain ones, where pages end and begin, and their unions.
    #[test]
    fn sets_have_what_was_put_into_them() {
        // The beginning, the end of a page, and that of a page above.
        const PARTS: [u64; 3] = [0, (1 << 15) - 90, (1 << 24) - 90];
        const END: u64 = (1 << 24) + 400;
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut pages = Pages::new(Paged::new(0, 10), 1, 99, Rules::default());
            let mut sets = [(0, BTreeSet::new()), (0, BTreeSet::new())];
            for _ in 0..30 {
                let (root, plain) = &mut sets[random.usize(..2)];
                let start = random.choice(PARTS).unwrap() + random.u64(..180);
                let length = if random.u8(..9) == 0 { 1 << 16 } else { random.u64(1..200) };
                let blocks = start..(start + length).min(END);
                pages.put_bits(root, 1, &blocks).unwrap();
                plain.extend(blocks);
            }
            for (root, plain) in &sets {
                assert!(blocks_of(&pages, *root, END) == *plain, "seed {seed}");
            }
            let [(mut from, more), (mut into, mut plain)] = sets;
            plain.extend(more);
            let mut steps = 0;
            while !pages.unite_bits(&mut from, &mut into, &mut United::default()).unwrap() {
                steps += 1;
                assert!(steps < 99, "a union ends");
            }
            assert_eq!(from, 0);
            assert!(blocks_of(&pages, into, END) == plain, "seed {seed}");
        }
    }

    #[test]
    fn many_blocks_take_few_pages() {
        let mut pages = Pages::new(Paged::new(0, 4), 1, 99, Rules::default());
        let mut root = 0;
        pages.put_bits(&mut root, 1, &(70..BLOCKS_MAX)).unwrap();
        assert_eq!(pages.dirty_count(), ROOT_LEVEL as usize + 1);
        let read = ReadPages::default();
        assert_eq!(pages.bits_at(root, 0, &read).unwrap().0.word(0), 0);
        assert_eq!(pages.bits_at(root, 64, &read).unwrap().0.word(64), u64::MAX << 6);
        let (bits, end) = pages.bits_at(root, 1 << 34, &read).unwrap();
        assert!(matches!(bits, Bits::All) && end == (1 << 34) + (1 << 33));
        // All at once, again and again.
        for _ in 0..3 {
            pages.put_bits(&mut root, 1, &(0..BLOCKS_MAX)).unwrap();
        }
        assert_eq!(pages.bits_at(root, 0, &read).unwrap().1, 1 << 33);
    }
}

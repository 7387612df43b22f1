//! What differs by [change sets](crate::change_set), without a comparison of maps.

use std::ops::Range;

use fathom_block::Allocation;

use crate::bitmap::Bits;
use crate::catalogue::PageId;
use crate::difference::{ComparedRun, ReadPages, push};
use crate::pages::{Fault, Page, Pages, WORDS};
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL, index, span};

/// The runs after which a call ends.
const RUNS_MAX: usize = 1024;
/// The most leaves of a map that a call looks at.
const LEAVES_MAX: usize = 128;
/// The blocks of a word of a bitmap.
const WORD: u64 = 64;

/// Appends the runs of equal bits of a word, for the blocks of `range`, of which the word describes
/// those from a multiple of 64 on.
fn push_word(runs: &mut Vec<ComparedRun>, word: u64, range: Range<u64>) {
    let mut at = range.start;
    while at < range.end {
        let bits = word >> (at % WORD);
        let (count, state) = match bits & 1 {
            0 => (bits.trailing_zeros(), Allocation::Hole),
            _ => (bits.trailing_ones(), Allocation::Data),
        };
        // Zeroes come in from above.
        let count = u64::from(count).min(range.end - at);
        push(runs, count, state);
        at += count;
    }
}

impl Pages {
    /// Appends what has changed in a range of blocks, by the sets with these roots, from the
    /// beginning of the range on, until a page is missing or enough is done. Blocks from `new` on
    /// have changed in any case.
    ///
    /// # Errors
    /// If a set is damaged.
    pub(crate) fn changed_by_sets(
        &self,
        roots: &[PageId],
        new: u64,
        range: Range<u64>,
        read: &ReadPages,
        runs: &mut Vec<ComparedRun>,
        missing: &mut Vec<PageId>,
    ) -> Result<(), Fault> {
        if range.end > BLOCKS_MAX {
            return Err(Fault::Damaged);
        }
        let mut at = range.start;
        while at < range.end && runs.len() < RUNS_MAX {
            let mut end = if at < new { range.end.min(new) } else { range.end };
            let mut all = Vec::with_capacity(roots.len());
            for root in roots.iter().filter(|_| at < new) {
                match self.bits_at(*root, at, read) {
                    Ok((bits, limit)) => {
                        end = end.min(limit);
                        all.extend(Some(bits).filter(|bits| !matches!(bits, Bits::None)));
                    }
                    Err(Fault::Missing(id)) => missing.push(id),
                    Err(fault) => return Err(fault),
                }
            }
            if !missing.is_empty() {
                break;
            }
            if at >= new || all.iter().any(|bits| matches!(bits, Bits::All)) {
                push(runs, end - at, Allocation::Data);
            } else if all.is_empty() {
                push(runs, end - at, Allocation::Hole);
            } else {
                let mut block = at;
                while block < end {
                    let next = ((block / WORD + 1) * WORD).min(end);
                    let word = all.iter().fold(0, |word, bits| word | bits.word(block));
                    push_word(runs, word, block..next);
                    block = next;
                }
            }
            at = end;
        }
        Ok(())
    }

    /// The leaf of a map with a block, if there is one, and the end of the blocks for which that is
    /// so.
    pub(crate) fn leaf_at<'p>(
        &'p self,
        root: PageId,
        block: u64,
        read: &'p ReadPages,
    ) -> Result<(Option<&'p Page>, u64), Fault> {
        let mut id = root;
        for level in (0..=ROOT_LEVEL).rev() {
            if id == 0 {
                let width = span(level + 1);
                return Ok((None, (block / width + 1) * width));
            }
            let page = self.find_page(id, read)?;
            if level == 0 {
                return Ok((Some(page), (block / WORDS as u64 + 1) * WORDS as u64));
            }
            id = Self::child(page, index(block, level))?;
        }
        Err(Fault::Damaged)
    }

    /// Tells holes of a map from the rest of what has changed, in runs from block `first` on. Runs
    /// behind a missing page are left out.
    ///
    /// # Errors
    /// If the map is damaged.
    pub(crate) fn with_holes(
        &self,
        root: PageId,
        first: u64,
        runs: Vec<ComparedRun>,
        read: &ReadPages,
        missing: &mut Vec<PageId>,
    ) -> Result<Vec<ComparedRun>, Fault> {
        let (mut found, mut at, mut leaves) = (Vec::new(), first, 0);
        for run in runs {
            let end = at + run.count;
            if run.state == Allocation::Hole {
                if missing.is_empty() {
                    push(&mut found, run.count, run.state);
                }
                at = end;
                continue;
            }
            while at < end {
                if leaves == LEAVES_MAX {
                    return Ok(found);
                }
                leaves += 1;
                let (leaf, limit) = match self.leaf_at(root, at, read) {
                    Ok(leaf) => leaf,
                    Err(Fault::Missing(id)) => {
                        missing.push(id);
                        (None, (at / WORDS as u64 + 1) * WORDS as u64)
                    }
                    Err(fault) => return Err(fault),
                };
                let limit = limit.min(end);
                for block in at..limit {
                    if !missing.is_empty() {
                        break;
                    }
                    let Some(leaf) = leaf else {
                        push(&mut found, limit - at, Allocation::Zero);
                        break;
                    };
                    let is_hole = Self::leaf_entry(leaf, index(block, 0))?.is_hole();
                    let state = if is_hole { Allocation::Zero } else { Allocation::Data };
                    push(&mut found, 1, state);
                }
                at = limit;
            }
        }
        missing.sort_unstable();
        missing.dedup();
        Ok(found)
    }
}

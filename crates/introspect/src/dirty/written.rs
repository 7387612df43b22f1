//! Pages that were written lately, by their content: for guests that are not understood.
//!
//! A sample of the pages that the guest has touched is hashed twice. A page whose hash differs was
//! written meanwhile: by a program, by the kernel, or by a disk whose data was read. A page that
//! was written with the content that it had, or changed and changed back, is missed. The hash is
//! fast and not cryptographic: a guest that makes collisions hides its own writes from the number,
//! nothing else.
//!
//! The paper: *Design Choices for Utilizing Disk Idleness in a Virtual Machine Environment*
//! (Elango, Krishnakumaran, Arpaci-Dusseau), section 3.2.5, where each page has a checksum.

use fathom_guest_memory::GuestMemory;

use super::tables::sample;
use crate::vmcoreinfo::PAGE;

/// The most pages of a sample.
const SAMPLE_MAX: u64 = 1 << 16;
/// Numbers that mix the words of a page: odd, with as many zeroes as ones.
const FACTORS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0xd6e8_feb8_6659_fd93];

/// The hashes of a sample of a guest's pages.
#[derive(Clone, Debug, Default)]
pub struct PageSample {
    stride: u64,
    first: u64,
    /// The addresses of the pages with their hashes, in order.
    pages: Vec<(u64, u64)>,
    is_whole: bool,
}

/// Pages that were written between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangedPages {
    /// The pages that have changed, in bytes, multiplied by the stride.
    pub changed: u64,
    /// The standard error of this number, in bytes, estimated from the sample.
    pub error: u64,
    /// One page of so many is in the sample.
    pub stride: u64,
    /// The number of pages in the sample.
    pub examined: u64,
    /// Whether all pages of the sample were examined. Otherwise the time was over, and the numbers
    /// are those of a part of the memory.
    pub is_whole: bool,
}

impl PageSample {
    /// Hashes a sample of the pages that the guest has touched: all of a small guest, at most
    /// 65,536 of a large one. `first` is the number of a page with which the sample may begin. Ends
    /// early once `go_on`, which is called again and again, is false. Takes about 0.3 µs for each
    /// of them.
    pub fn take(memory: &GuestMemory, first: u64, go_on: &mut dyn FnMut() -> bool) -> Self {
        let stride = (memory.length() / PAGE).div_ceil(SAMPLE_MAX).max(1);
        Self::hash_pages(memory, stride, first, go_on)
    }

    /// The pages that have changed since this sample of the memory. A page that the guest touched
    /// first meanwhile counts, unless all its bytes are 0. Of a sample that ended early, only the
    /// part of the memory that it covers is examined.
    pub fn changed(&self, memory: &GuestMemory, go_on: &mut dyn FnMut() -> bool) -> ChangedPages {
        let Self { stride, first, .. } = *self;
        let mut now = Self::hash_pages(memory, stride, first, go_on);
        if !self.is_whole {
            let last = self.pages.last().map(|(page, _)| *page);
            now.pages.retain(|(page, _)| last.is_some_and(|last| *page <= last));
        }
        let empty = hash(std::iter::repeat_n(0, PAGE as usize / 8));
        let mut old = self.pages.iter().copied().peekable();
        let mut changed = 0_u64;
        for (page, hash) in &now.pages {
            // Pages that the guest has given back meanwhile are passed over.
            while old.next_if(|(earlier, _)| earlier < page).is_some() {}
            let earlier = old.next_if(|(earlier, _)| earlier == page);
            changed += u64::from(earlier.map_or(empty, |(_, earlier)| earlier) != *hash);
        }
        // The number in the sample is nearly binomial, without the part of the pages that is
        // certain.
        let (count, examined) = (changed as f64, now.pages.len().max(1) as f64);
        let variance = count * (1.0 - count / examined) * (1.0 - 1.0 / stride.max(1) as f64);
        let bytes = stride.saturating_mul(PAGE);
        ChangedPages {
            changed: changed.saturating_mul(bytes),
            error: (variance.max(0.0).sqrt() * bytes as f64) as u64,
            stride,
            examined: now.pages.len() as u64,
            is_whole: self.is_whole && now.is_whole,
        }
    }

    fn hash_pages(
        memory: &GuestMemory,
        stride: u64,
        first: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Self {
        let mut pages = Vec::new();
        let is_whole = sample(memory, stride.max(1), first, go_on, |page| {
            let window = memory.window(page);
            let words = (0..PAGE / 8).map(|index| window.u64(index * 8).unwrap_or(0));
            // Memory that grows meanwhile does not make the sample larger than it may be.
            if (pages.len() as u64) < SAMPLE_MAX {
                pages.push((page, hash(words)));
            }
        });
        Self { stride, first, pages, is_whole }
    }
}

/// A hash of the words of a page.
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    let mut lanes = FACTORS;
    for (index, word) in words.enumerate() {
        let lane = &mut lanes[index % 4];
        *lane = (*lane ^ word).wrapping_mul(FACTORS[index % 4]).rotate_left(29);
    }
    lanes.into_iter().fold(0, |sum, lane| (sum ^ lane).wrapping_mul(FACTORS[0]).rotate_left(31))
}

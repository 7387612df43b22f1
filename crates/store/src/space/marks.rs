//! The places that a walk has met.

use super::Space;
use crate::layout::SPACE_BITS;

impl Space {
    /// A walk begins: only places that are marked or taken until its end stay in use.
    pub(crate) fn begin_marking(&mut self) {
        self.marked = Some(vec![0; self.map.count() as usize * SPACE_BITS]);
    }

    /// A walk has found that something refers to a place.
    pub(crate) fn mark(&mut self, place: u64) {
        let (page, byte, bit) = self.bit(place);
        if let Some(marked) = &mut self.marked {
            marked[page * SPACE_BITS + byte] |= bit;
        }
    }

    /// A walk was given up.
    pub(crate) fn forget_marks(&mut self) {
        self.marked = None;
    }

    /// A walk has ended. Returns the number of places that it has freed.
    pub(crate) fn sweep(&mut self) -> u64 {
        let Some(marked) = self.marked.take() else { return 0 };
        let mut freed = 0;
        for (page, marked) in marked.chunks(SPACE_BITS).enumerate() {
            for (byte, marked) in marked.iter().enumerate() {
                let mut lost = self.map.page(page)[byte] & !marked;
                while lost != 0 {
                    let at = byte as u64 * 8 + u64::from(lost.trailing_zeros());
                    lost &= lost - 1;
                    let place = page as u64 * self.layout.places_in_page() + at;
                    if place >= self.layout.places() {
                        // A damaged map has places behind the end of the pool.
                        break;
                    }
                    self.free(place);
                    freed += 1;
                }
            }
        }
        freed
    }
}

//! The requests that wait for a flush of the disk.
//!
//! Linux sends one flush for all requests of a hardware queue that need one. The request of the
//! flush has no bio. It belongs to a structure (`blk_flush_queue`) with two lists: requests that
//! wait for the flush that runs now, and requests that wait for the next one.

use crate::completion::Meaning;
use crate::kernel::Kernel;

/// The most requests that are examined for a flush.
pub(crate) const FLUSHED_MAX: usize = 32;
/// The most entries of a list of waiting tasks that are examined.
const WAITERS_MAX: usize = 16;

impl Kernel {
    /// The addresses of the first bios of requests that wait for the flush whose virtio header is
    /// at a guest-physical address, and their number.
    pub(crate) fn flushed(&self, header: u64) -> ([u64; FLUSHED_MAX], usize) {
        let mut bios = [0; FLUSHED_MAX];
        let mut count = 0;
        let mut find = || {
            let layout = &self.layout;
            let request = header.checked_sub(layout.request_size)?;
            let context = self.memory.u64(request.checked_add(layout.request_context?)?)?;
            let queue = self.pointer(context.wrapping_add(layout.context_flush?))?;
            // The structures check each other, so an invalid address is detected.
            let own = self.pointer(queue.wrapping_add(layout.flush_request?))?;
            if self.space.direct(own) != Some(request) {
                return None;
            }
            let (place, bit) = layout.flush_running?;
            let running = self.u8(queue.wrapping_add(place))? >> bit & 1;
            let lists = queue.wrapping_add(layout.flush_lists?);
            let list = lists.wrapping_add(16 * u64::from(running));
            let (mut before, mut link) = (list, self.pointer(list)?);
            while link != list && count < FLUSHED_MAX {
                // Each link points back.
                if self.u64(link.wrapping_add(8))? != before {
                    return None;
                }
                let waiting = link.wrapping_sub(layout.request_flush_link?);
                // When its data has been written, a request has only its last bio.
                let bio = self.u64(waiting.wrapping_add(layout.request_bio))?;
                bios[count] = match layout.request_last_bio {
                    Some(place) if bio == 0 => self.u64(waiting.wrapping_add(place))?,
                    _ => bio,
                };
                count += usize::from(bios[count] != 0);
                (before, link) = (link, self.pointer(link)?);
            }
            Some(())
        };
        let _ = find();
        (bios, count)
    }

    /// The first task in the list of those that wait (`wait_queue_head`).
    pub(crate) fn first_waiter(&self, queue: u64) -> Option<u64> {
        let layout = &self.layout;
        let list = queue.wrapping_add(layout.wait_list?);
        let (mut before, mut link) = (list, self.pointer(list)?);
        for _ in 0..WAITERS_MAX {
            if link == list || self.u64(link.wrapping_add(8))? != before {
                return None;
            }
            let entry = link.wrapping_sub(layout.wait_link?);
            let function = self.u64(entry.wrapping_add(layout.wait_function?))?;
            if self.meanings.get(function) == Some(Meaning::TaskWait) {
                return self.pointer(entry.wrapping_add(layout.wait_private?));
            }
            (before, link) = (link, self.pointer(link)?);
        }
        None
    }
}

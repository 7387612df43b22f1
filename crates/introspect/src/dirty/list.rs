//! Doubly linked lists of the kernel.

use crate::kernel::Kernel;

/// The entries of a list, by the addresses of their links. Each link has to point back to the
/// previous one; an entry that does not ends the list as torn.
pub(crate) struct Links<'k> {
    kernel: &'k Kernel,
    head: u64,
    before: u64,
    left: usize,
    is_over: bool,
}

impl Kernel {
    /// The links of the list with its head at an address; at most `max`, and one more is an error.
    pub(crate) fn links(&self, head: u64, max: usize) -> Links<'_> {
        Links { kernel: self, head, before: head, left: max, is_over: false }
    }
}

impl Iterator for Links<'_> {
    /// `None` for a torn or an endless list, which ends with it.
    type Item = Option<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let link = || {
            let link = self.kernel.pointer(self.before)?;
            (self.kernel.u64(link.wrapping_add(8))? == self.before).then_some(link)
        };
        let found = link();
        if found == Some(self.head) {
            self.is_over = true;
            return None;
        }
        let found = found.filter(|_| self.left > 0);
        if let Some(link) = found {
            self.left -= 1;
            self.before = link;
        } else {
            self.is_over = true;
        }
        Some(found)
    }
}

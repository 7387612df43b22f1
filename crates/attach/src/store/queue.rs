//! The pages whose contents can go to the swap file, in the order in which they left.

use std::collections::VecDeque;

/// Pages, each at most once.
#[derive(Debug, Default)]
pub(super) struct PageQueue {
    pages: VecDeque<u32>,
    /// A bit for each page: whether it is in the queue.
    is_in: Vec<u64>,
}

impl PageQueue {
    /// An empty queue for a guest of so many pages, at most 2³².
    pub fn new(pages: u64) -> Self {
        Self { pages: VecDeque::new(), is_in: vec![0; pages.div_ceil(64) as usize] }
    }

    fn mark(&mut self, page: u64) -> bool {
        let Some(word) = self.is_in.get_mut((page / 64) as usize) else { return false };
        let is_new = *word & 1 << (page % 64) == 0;
        *word |= 1 << (page % 64);
        is_new
    }

    /// Adds a page at the end, unless it is in the queue.
    pub fn push(&mut self, page: u64) {
        if self.mark(page) {
            self.pages.push_back(page as u32);
        }
    }

    /// Puts a page back that was taken.
    pub fn put_back(&mut self, page: u64) {
        if self.mark(page) {
            self.pages.push_front(page as u32);
        }
    }

    /// Takes the first page.
    pub fn pop(&mut self) -> Option<u64> {
        let page = u64::from(self.pages.pop_front()?);
        self.is_in[(page / 64) as usize] &= !(1 << (page % 64));
        Some(page)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_in_a_queue_once() {
        let mut queue = PageQueue::new(100);
        for page in [3, 99, 3, 64, 500] {
            queue.push(page);
        }
        assert_eq!(queue.pop(), Some(3));
        queue.put_back(3);
        queue.put_back(64);
        let all: Vec<u64> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, [3, 99, 64]);
        assert!(queue.is_empty());
    }
}

//! The expected content of each block of a queue's part of the disk.
//!
//! A block's content is a sequence of pseudo-random words. Its seed depends on the seed of the run,
//! the block's number and its generation, which is the number of writes to it. So a stale, torn or
//! misplaced block differs. A block has at most one request in flight.

/// The bit of a block with a request in flight.
const BUSY: u32 = 1 << 31;

/// The generations of a range of blocks.
pub struct Ledger {
    seed: u64,
    first: u64,
    generations: Vec<u32>,
}

impl Ledger {
    pub fn new(seed: u64, first: u64, count: u64) -> Self {
        Self { seed, first, generations: vec![0; count as usize] }
    }

    /// Claims `block`, or the next free block after it; `None` if there is no free block nearby.
    pub fn claim(&mut self, block: u64) -> Option<u64> {
        let count = self.generations.len();
        let start = (block - self.first) as usize;
        for step in 0..count.min(1024) {
            let index = (start + step) % count;
            if self.generations[index] & BUSY == 0 {
                self.generations[index] |= BUSY;
                return Some(self.first + index as u64);
            }
        }
        None
    }

    /// The number of writes to the block.
    pub fn generation(&self, block: u64) -> u32 {
        self.generations[(block - self.first) as usize] & !BUSY
    }

    /// Frees a block after a read.
    pub fn release(&mut self, block: u64) {
        self.generations[(block - self.first) as usize] &= !BUSY;
    }

    /// Frees a block after a write of the given generation. Generation 0 means that the content is
    /// unknown, as after a failed write.
    pub fn written(&mut self, block: u64, generation: u32) {
        self.generations[(block - self.first) as usize] = generation;
    }

    /// The next written block, from `block` on.
    pub fn next_written(&self, block: u64) -> Option<u64> {
        let start = (block - self.first) as usize;
        let found = self.generations.get(start..)?.iter().position(|&g| g & !BUSY > 0)?;
        Some(block + found as u64)
    }

    pub fn first(&self) -> u64 {
        self.first
    }

    fn words(&self, block: u64, generation: u32) -> impl Iterator<Item = u64> + use<> {
        let mut state =
            crate::random::mix(self.seed ^ block.rotate_left(32) ^ u64::from(generation));
        std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        })
    }

    /// Fills a buffer with the block's content in that generation.
    pub fn fill(&self, block: u64, generation: u32, buffer: &mut [u8]) {
        for (chunk, word) in buffer.chunks_exact_mut(8).zip(self.words(block, generation)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Whether a buffer holds the block's content in that generation.
    pub fn matches(&self, block: u64, generation: u32, buffer: &[u8]) -> bool {
        buffer
            .chunks_exact(8)
            .zip(self.words(block, generation))
            .all(|(chunk, word)| chunk == word.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_generations_and_torn_writes_differ() {
        let ledger = Ledger::new(7, 100, 16);
        let mut buffer = vec![0; 4096];
        ledger.fill(100, 1, &mut buffer);
        assert!(ledger.matches(100, 1, &buffer));
        assert!(!ledger.matches(101, 1, &buffer));
        assert!(!ledger.matches(100, 2, &buffer));
        let mut torn = buffer.clone();
        ledger.fill(100, 2, &mut torn[..512]);
        assert!(!ledger.matches(100, 1, &torn));
        assert!(!ledger.matches(100, 2, &torn));
    }

    #[test]
    fn a_block_has_one_request_at_a_time() {
        let mut ledger = Ledger::new(7, 0, 2);
        assert_eq!(ledger.claim(1), Some(1));
        assert_eq!(ledger.claim(1), Some(0));
        assert_eq!(ledger.claim(1), None);
        ledger.written(1, 3);
        assert_eq!(ledger.generation(1), 3);
        assert_eq!(ledger.next_written(0), Some(1));
        ledger.release(0);
        assert_eq!(ledger.claim(0), Some(0));
    }
}

//! A device in memory that is larger than memory: of a block that repeats one word, it keeps the
//! word. It counts what is written.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities,
    ErrorKind, Geometry, Operation, Request,
};
use fathom_reactor::Event;
use fathom_store::BLOCK;
use parking_lot::Mutex;

const BLOCK_BYTES: usize = BLOCK as usize;

/// The blocks of a device.
struct Blocks {
    words: Vec<u64>,
    /// Those that do not repeat a word.
    others: HashMap<usize, Box<[u8]>>,
}

impl Blocks {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let is_one_word = bytes[..BLOCK_BYTES - 8] == bytes[8..];
        if is_one_word {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[..8]);
            self.words[at] = u64::from_le_bytes(word);
            self.others.remove(&at);
        } else {
            self.others.insert(at, bytes.into());
        }
    }

    fn get(&self, at: usize, bytes: &mut [u8]) {
        if let Some(other) = self.others.get(&at) {
            return bytes.copy_from_slice(other);
        }
        let word = self.words[at].to_le_bytes();
        bytes.chunks_exact_mut(8).for_each(|target| target.copy_from_slice(&word));
    }
}

/// What a device was given since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Blocks of 4 KiB.
    pub blocks: u64,
    pub requests: u64,
}

#[derive(Default)]
struct Counters {
    blocks: AtomicU64,
    requests: AtomicU64,
}

/// See the module. All requests have whole blocks.
pub struct Sparse {
    blocks: Arc<Mutex<Blocks>>,
    counters: Arc<Counters>,
    capacity: u64,
}

impl Sparse {
    pub fn new(capacity: u64) -> Self {
        let words = vec![0; (capacity / BLOCK) as usize];
        let blocks = Arc::new(Mutex::new(Blocks { words, others: HashMap::new() }));
        Self { blocks, counters: Arc::default(), capacity }
    }

    pub fn written(&self) -> Written {
        Written {
            blocks: self.counters.blocks.load(Ordering::Relaxed),
            requests: self.counters.requests.load(Ordering::Relaxed),
        }
    }
}

impl Backend for Sparse {
    fn name(&self) -> &'static str {
        "sparse"
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { extents: false, ..Capabilities::ALL }
    }

    fn open_queue(&self, _: &mut BackendOpenContext<'_>) -> io::Result<Box<dyn BackendQueue>> {
        let (blocks, counters) = (Arc::clone(&self.blocks), Arc::clone(&self.counters));
        Ok(Box::new(SparseQueue { blocks, counters, bytes: Vec::new() }))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

struct SparseQueue {
    blocks: Arc<Mutex<Blocks>>,
    counters: Arc<Counters>,
    bytes: Vec<u8>,
}

impl BackendQueue for SparseQueue {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        let length = request.length as usize;
        let (first, end) = ((request.offset / BLOCK) as usize, length / BLOCK_BYTES);
        let mut blocks = self.blocks.lock();
        match request.operation {
            Operation::Read => {
                self.bytes.resize(length, 0);
                for (at, bytes) in (first..).zip(self.bytes.chunks_exact_mut(BLOCK_BYTES)) {
                    blocks.get(at, bytes);
                }
                request.buffers.copy_from(0, &self.bytes);
            }
            Operation::Write => {
                self.bytes.resize(length, 0);
                request.buffers.copy_to(0, &mut self.bytes);
                for (at, bytes) in (first..).zip(self.bytes.chunks_exact(BLOCK_BYTES)) {
                    blocks.put(at, bytes);
                }
                self.counters.blocks.fetch_add(end as u64, Ordering::Relaxed);
                self.counters.requests.fetch_add(1, Ordering::Relaxed);
            }
            Operation::Discard | Operation::WriteZeroes => {
                for at in first..first + end {
                    blocks.words[at] = 0;
                    blocks.others.remove(&at);
                }
            }
            Operation::Flush | Operation::Extents | Operation::GetId => {}
        }
        drop(blocks);
        context.complete(request, Ok(()));
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}

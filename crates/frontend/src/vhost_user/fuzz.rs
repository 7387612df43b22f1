//! The entry point for fuzzing: arbitrary bytes as a ring and all of its requests.

use std::sync::Arc;

use fathom_block::Operation;

use super::chain::{CHAIN_LENGTH_MAX, Chain};
use super::memory::{Memory, RegionLayout};
use super::memory_file::memory_file;
use super::request;
use super::ring::{Ring, RingAddresses};

const MEMORY: u64 = 64 << 10;
const RING_SIZE: u16 = 64;

/// Parses the requests on the ring of a guest whose memory is `data`. The parser must end within
/// its bounds.
///
/// # Panics
/// When the parser breaks one of its guarantees, which is what the fuzzer looks for.
#[doc(hidden)]
pub fn fuzz_requests(data: &[u8]) {
    use std::os::unix::fs::FileExt;
    let mut memory = Memory::default();
    let Ok(file) = memory_file(c"fathom-fuzz", MEMORY) else { return };
    let length = data.len().min(MEMORY as usize);
    if file.write_all_at(&data[..length], 0).is_err() {
        return;
    }
    let layout = RegionLayout { guest_address: 0, length: MEMORY, user_address: 0, file_offset: 0 };
    if memory.add(layout, file, &Arc::default()).is_err() {
        return;
    }
    let addresses = RingAddresses { descriptors: 0, available: 0x400, used: 0x500 };
    let mut ring = Ring::new(&memory, addresses, RING_SIZE, true, 0)
        .unwrap_or_else(|error| panic!("{}", error.name()));
    let mut heads = Vec::new();
    let _ = ring.take(usize::from(RING_SIZE), &mut heads);
    assert!(heads.len() <= usize::from(RING_SIZE));
    let (mut chain, mut segments) = (Chain::default(), Vec::new());
    for head in heads {
        assert!(head < RING_SIZE);
        let read = chain.read(&ring, head);
        assert!(chain.readable.len() + chain.writable.len() <= CHAIN_LENGTH_MAX);
        if read.is_err() {
            continue;
        }
        let Ok(parsed) = request::parse(ring.memory(), &mut chain) else { continue };
        if let Some(operation @ (Operation::Discard | Operation::WriteZeroes)) = parsed.operation {
            let _ = request::segments(ring.memory(), &mut chain, operation, &mut segments);
            assert!(segments.len() <= request::SEGMENTS_MAX);
        }
        ring.give_back(head, 0);
    }
    ring.publish();
}

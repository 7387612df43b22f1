//! The layer `offload` with queues in threads of their own, while another thread starts and stops
//! it. The threads use the disk in turn, so that each read must find the last change, whichever
//! queue made it, while the queues write back and make copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_backend::Memory;
use fathom_block::{Clock, Disk, DiskOptions, Operation, Stack};
use fathom_layers::Offload;
use fathom_layers::offload::{OffloadOptions, OffloadState};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;
use parking_lot::Mutex;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const CAPACITY: u64 = BLOCKS * BLOCK;
const LOG_LENGTH: u64 = 256 << 10;
const COPIES: u64 = 16 * BLOCK;

struct Queue {
    reactor: Reactor,
    stack: Stack,
}

impl Queue {
    fn open(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(64).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        Self { reactor, stack }
    }

    /// Carries out one request. Returns the first byte of what was read.
    fn carry_out(&mut self, operation: Operation, block: u64, content: u8) -> u8 {
        let mut request = self.stack.request();
        request.operation = operation;
        if operation.has_range() {
            (request.offset, request.length) = (block * BLOCK, BLOCK);
        }
        if operation.carries_data() {
            request.buffers.allocate(BLOCK as usize);
            request.buffers.owned_mut().unwrap().fill(content);
        }
        self.stack.submit(request, &mut self.reactor);
        loop {
            if let Some((request, outcome)) = self.stack.completed() {
                assert_eq!(outcome, Ok(()));
                let bytes = request.buffers.owned().unwrap_or(&[0]);
                let first = bytes[0];
                assert!(bytes.iter().all(|byte| *byte == first), "a block has one content");
                self.stack.recycle(request);
                return first;
            }
            self.stack.wait(&mut self.reactor, Some(Duration::from_millis(10))).unwrap();
        }
    }

    /// Lets the layer work.
    fn rest(&mut self, rounds: u32) {
        for _ in 0..rounds {
            self.stack.wait(&mut self.reactor, Some(Duration::from_micros(20))).unwrap();
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn each_read_finds_the_last_change_of_any_queue() {
    const TURNS: u64 = 1500;
    let home = Arc::new(Memory::open(CAPACITY).unwrap());
    let volume = Arc::new(Memory::open(LOG_LENGTH + COPIES).unwrap());
    let volume = Arc::new(LogVolume::new(volume));
    let options = WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: LOG_LENGTH,
        block_size: 512,
        identity: Identity(*b"identity of test"),
        age_ns: 1_000_000,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    };
    let settings = OffloadOptions {
        copies: COPIES,
        region_shift: 13,
        block_shift: 12,
        window_ns: 20_000_000,
        ..OffloadOptions::default()
    };
    let offload = Offload::open(&volume, &options, settings).unwrap();
    let layers = vec![Arc::new(offload.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let contents = Arc::new(Mutex::new([0_u8; BLOCKS as usize]));
    let is_over = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..3)
        .map(|number| {
            let (disk, contents) = (Arc::clone(&disk), Arc::clone(&contents));
            std::thread::spawn(move || {
                let mut random = fastrand::Rng::with_seed(number);
                let mut queue = Queue::open(&disk);
                for _ in 0..TURNS {
                    // A queue that waits works on.
                    let mut contents = loop {
                        match contents.try_lock() {
                            Some(contents) => break contents,
                            None => queue.rest(1),
                        }
                    };
                    for _ in 0..random.u32(1..12) {
                        let reach = if random.bool() { 8 } else { BLOCKS };
                        let block = random.u64(..reach);
                        let content = &mut contents[block as usize];
                        match random.u8(..10) {
                            0..6 => {
                                let read = queue.carry_out(Operation::Read, block, 0);
                                assert_eq!(read, *content, "block {block}");
                            }
                            6..9 => {
                                *content = random.u8(..);
                                queue.carry_out(Operation::Write, block, *content);
                            }
                            _ if random.bool() => {
                                *content = 0;
                                queue.carry_out(Operation::WriteZeroes, block, 0);
                            }
                            _ => {
                                queue.carry_out(Operation::Flush, 0, 0);
                            }
                        }
                    }
                    drop(contents);
                    queue.rest(random.u32(..4));
                }
                queue.stack.finish(&mut queue.reactor, Duration::from_secs(5)).unwrap();
            })
        })
        .collect();
    let switch = std::thread::spawn({
        let (offload, is_over) = (offload.clone(), Arc::clone(&is_over));
        move || {
            let mut random = fastrand::Rng::with_seed(99);
            let mut states = [0_u32; 3];
            while !is_over.load(Ordering::Relaxed) {
                match random.u8(..5) {
                    0 => offload.start().unwrap(),
                    1 => offload.stop(),
                    2 => drop(offload.begin().unwrap()),
                    _ => {}
                }
                states[offload.status().state as usize] += 1;
                std::thread::sleep(Duration::from_micros(random.u64(..3000)));
            }
            states
        }
    });
    for thread in threads {
        thread.join().unwrap();
    }
    is_over.store(true, Ordering::Relaxed);
    let states = switch.join().unwrap();
    assert!(states.iter().all(|count| *count > 5), "{states:?}");
    let mut queue = Queue::open(&disk);
    offload.stop();
    let end = Instant::now() + Duration::from_secs(20);
    while offload.status().state != OffloadState::Resting {
        assert!(Instant::now() < end, "the log returns: {:?}", offload.status());
        queue.rest(10);
    }
    for block in 0..BLOCKS {
        let read = queue.carry_out(Operation::Read, block, 0);
        assert_eq!(read, contents.lock()[block as usize], "block {block}");
    }
    let status = offload.status();
    assert!(status.carried > 100 && status.hits > 10 && status.rounds > 10, "{status:?}");
    assert_eq!(status.copies_failed, 0);
    drop(queue);
    offload.drain(&disk, Duration::from_secs(5)).unwrap();
}

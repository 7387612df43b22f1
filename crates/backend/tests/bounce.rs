//! Direct I/O into misaligned memory: it is done in pieces, within a budget, and moves the right
//! bytes.

#![allow(unsafe_code)]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "test code")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Clock, Disk, DiskOptions, ErrorKind, Operation, Outcome, Stack};
use fathom_reactor::Reactor;
use tempfile::NamedTempFile;

const LENGTH: u64 = 32 << 20;

struct Opened {
    image: NamedTempFile,
    reactor: Reactor,
    stack: Stack,
    /// The memory that requests read into or write from, misaligned by one byte.
    memory: Vec<u8>,
}

/// A direct image of 32 MiB with a pattern; `None` without support for direct I/O.
fn open() -> Option<Opened> {
    let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes: Vec<u8> = (0..LENGTH).map(|at| (at ^ at >> 8 ^ at >> 17) as u8).collect();
    image.as_file().write_all_at(&bytes, 0).unwrap();
    image.as_file().sync_all().unwrap();
    let options = FileOptions { path: image.path().into(), direct: true, ..FileOptions::default() };
    let backend = match FileBackend::open(&options) {
        Ok(backend) => Arc::new(backend),
        Err(error) => {
            eprintln!("skipped: no direct I/O here: {error:?}");
            return None;
        }
    };
    let disk = Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap();
    let mut reactor = Reactor::new(64).unwrap();
    let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let memory = vec![0; LENGTH as usize + 1];
    Some(Opened { image, reactor, stack, memory })
}

impl Opened {
    fn begin(&mut self, operation: Operation, length: u64) {
        let mut request = self.stack.request();
        request.operation = operation;
        request.length = length;
        // The memory outlives the stack's requests: each test waits for all of them.
        let place = self.memory.as_mut_ptr().wrapping_add(1);
        unsafe { request.buffers.push(place, length as usize, None) };
        self.stack.submit(request, &mut self.reactor);
    }

    fn wait(&mut self) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let mut events = Vec::new();
        while self.stack.in_flight() > 0 {
            while let Some((request, outcome)) = self.stack.completed() {
                self.stack.recycle(request);
                outcomes.push(outcome);
            }
            if self.stack.in_flight() > 0 {
                self.reactor.wait(None).unwrap();
            }
            self.reactor.collect(&mut events).unwrap();
            for event in events.drain(..) {
                self.stack.event(&event, &mut self.reactor);
            }
        }
        outcomes
    }
}

/// The anonymous memory of this process, in bytes.
fn anonymous() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn many_long_misaligned_reads_use_little_memory_and_return_the_right_bytes() {
    let Some(mut opened) = open() else { return };
    // All of them read into the same memory, which is as long as each of them.
    opened.memory.fill(1);
    let before = anonymous();
    for _ in 0..24 {
        opened.begin(Operation::Read, LENGTH);
    }
    // Measured while all of them are in flight, with their buffers.
    let held = anonymous().saturating_sub(before);
    assert_eq!(opened.wait(), [Ok(()); 24]);
    assert!(held.max(anonymous().saturating_sub(before)) < 64 << 20, "{held} bytes");
    let wrong = (0..LENGTH)
        .position(|at| opened.memory[1 + at as usize] != (at ^ at >> 8 ^ at >> 17) as u8);
    assert_eq!(wrong, None);
}

#[test]
fn long_misaligned_writes_write_the_right_bytes() {
    let Some(mut opened) = open() else { return };
    for (at, byte) in opened.memory.iter_mut().enumerate() {
        *byte = (at * 7 ^ at >> 9) as u8;
    }
    let length = 3 * (256 << 10) + 4096;
    opened.begin(Operation::Write, length);
    opened.begin(Operation::Write, 4096);
    assert_eq!(opened.wait(), [Ok(()), Ok(())]);
    let mut bytes = vec![0; length as usize + 4096];
    opened.image.as_file().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes[..length as usize], opened.memory[1..=length as usize]);
    assert_eq!(bytes[length as usize], (length ^ length >> 8 ^ length >> 17) as u8);
}

#[test]
fn a_misaligned_read_of_a_truncated_image_fails() {
    let Some(mut opened) = open() else { return };
    opened.image.as_file().set_len(LENGTH / 2 + 512).unwrap();
    opened.begin(Operation::Read, LENGTH);
    assert_eq!(opened.wait(), [Err(ErrorKind::Io)]);
}

#[test]
fn an_unmapped_address_fails_only_its_request() {
    let Some(mut opened) = open() else { return };
    let mut request = opened.stack.request();
    (request.operation, request.length) = (Operation::Read, 4096);
    // No process has memory in the page at this address.
    unsafe { request.buffers.push(4096_usize as *mut u8, 4096, None) };
    opened.stack.submit(request, &mut opened.reactor);
    assert_eq!(opened.wait(), [Err(ErrorKind::Memory)]);
    opened.begin(Operation::Read, 4096);
    assert_eq!(opened.wait(), [Ok(())]);
}

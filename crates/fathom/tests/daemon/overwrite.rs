//! Clients that write until the daemon is killed.

use std::time::{Duration, Instant};

use crate::nbd::{Nbd, WRITE};
use crate::process::Daemon;

/// The blocks of each client.
const BLOCKS: u64 = 32;

/// Two clients of each of the disks "a" and "b" write their blocks of `block` bytes with `write`,
/// again and again for `time`, with other bytes in each `life`. `expected` gets the bytes of each
/// disk's blocks. A write of each client is in flight at the end.
pub fn overwrite(
    daemon: &Daemon,
    life: u8,
    time: Duration,
    block: u64,
    write: impl Fn(&mut Nbd, u64, u8) + Sync,
    expected: &mut [[u8; 64]; 2],
) {
    let (end, write) = (Instant::now() + time, &write);
    let written = std::thread::scope(|scope| {
        let writers = [("a", 0), ("a", BLOCKS), ("b", 0), ("b", BLOCKS)].map(|(name, first)| {
            scope.spawn(move || {
                let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), name);
                let mut written = [0; BLOCKS as usize];
                for count in 0_u64.. {
                    let at = count % BLOCKS;
                    let content = 1 + life * 40 + (count / BLOCKS % 40) as u8;
                    if Instant::now() > end {
                        break;
                    }
                    write(&mut nbd, first + at, content);
                    written[at as usize] = content;
                }
                nbd.send(WRITE, 0, (200 + first) * block, 4096, &[9; 4096]);
                (name, first, written)
            })
        });
        writers.map(|writer| writer.join().unwrap())
    });
    for (name, first, written) in written {
        let disk = usize::from(name == "b");
        for (at, content) in written.into_iter().enumerate().filter(|(_, found)| *found > 0) {
            expected[disk][first as usize + at] = content;
        }
    }
}

//! The memory of a client. A process of its own, so that no other test uses any.

mod support;

use fathom_sim::OneRequest;
use support::*;

#[test]
fn many_changes_without_a_flush_take_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let Some(_server) = nbdkit(&socket, &["memory", "8M"]) else { return };
    let before = memory();
    let served = disk(&open(&on_socket(&socket)));
    let mut queue = OneRequest::open(&served);
    for index in 0..512 {
        queue.write(index % 8 * MIB, &vec![index as u8; MIB as usize]).unwrap();
    }
    let grown = memory().saturating_sub(before);
    assert!(grown < 128 * MIB, "{} MiB", grown >> 20);
}

/// The resident memory of this process, in bytes.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

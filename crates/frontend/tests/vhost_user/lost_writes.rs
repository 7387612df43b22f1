//! A guest with several queues over a file whose device has a broken block.

use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Disk, DiskOptions};
use fathom_frontend::vhost_user::{Server, VhostUserOptions};
use fathom_sim::{DEVICE_BLOCK, FaultyDevice};

use crate::client::{Client, DATA, F_FLUSH, FLUSH, WRITE};

const BLOCKS: u64 = 64;
const BAD: u64 = 33;
const GOOD: u64 = 40;
const QUEUES: usize = 3;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;

struct Faulty {
    // In this order: the disk is closed before its device is removed.
    _server: Server,
    disk: Arc<Disk>,
    socket: std::path::PathBuf,
    _directory: tempfile::TempDir,
    device: FaultyDevice,
}

fn serve() -> Option<Faulty> {
    let device = FaultyDevice::new()?;
    let path = device.image("a.img", BLOCKS);
    device.break_block(&path, BAD);
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let backend = FileBackend::open(&FileOptions { path, ..FileOptions::default() }).unwrap();
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::new(backend)).unwrap();
    let mut options = VhostUserOptions::new(&socket);
    options.queues = QUEUES as u16;
    let server = Server::start(options, Arc::clone(&disk)).unwrap();
    Some(Faulty { _server: server, disk, socket, _directory: directory, device })
}

/// Runs one request on each queue concurrently. Returns their status bytes.
fn concurrently(client: &mut Client, requests: [(u32, u64); QUEUES]) -> [u8; QUEUES] {
    let place = |queue: usize| DATA + 0x4000 * queue as u64;
    for (queue, (kind, block)) in requests.into_iter().enumerate() {
        let (header, status, data) = (place(queue), place(queue) + 0x100, place(queue) + 0x1000);
        client.put_header(header, kind, block * DEVICE_BLOCK / 512);
        client.put(status, &[0xee]);
        let mut pieces = vec![(header, 16, false)];
        if kind == WRITE {
            client.put(data, &[7; DEVICE_BLOCK as usize]);
            pieces.push((data, DEVICE_BLOCK as u32, false));
        }
        pieces.push((status, 1, true));
        client.put_chain(queue, 0, &pieces);
        client.offer(queue, 0);
    }
    for queue in 0..QUEUES {
        client.kick(queue);
    }
    std::array::from_fn(|queue| {
        client.wait(queue);
        client.get(place(queue) + 0x100, 1)[0]
    })
}

#[test]
fn concurrent_flushes_on_all_queues_fail_together() {
    let Some(served) = serve() else { return };
    let mut client = Client::start(&served.socket, QUEUES, 0);
    for round in 0..10 {
        let mut data = [round; DEVICE_BLOCK as usize];
        assert_eq!(client.request(0, WRITE, BAD * DEVICE_BLOCK / 512, &mut data), OK, "cached");
        if round % 2 == 0 {
            served.device.write_back();
        }
        assert_eq!(concurrently(&mut client, [(FLUSH, 0); QUEUES]), [IO_ERROR; QUEUES], "{round}");
        assert_eq!(
            concurrently(&mut client, [(WRITE, GOOD); QUEUES]),
            [IO_ERROR; QUEUES],
            "{round}"
        );
        served.disk.backend().recover().unwrap();
        assert_eq!(concurrently(&mut client, [(FLUSH, 0); QUEUES]), [OK; QUEUES], "{round}");
    }
}

#[test]
fn a_durable_write_of_a_broken_block_fails_beside_good_ones() {
    let Some(served) = serve() else { return };
    // For a guest without a write cache, every write is durable.
    let mut client = Client::start(&served.socket, QUEUES, F_FLUSH);
    for round in 0..60 {
        let writes = [(WRITE, GOOD), (WRITE, BAD), (WRITE, GOOD + 8)];
        let status = concurrently(&mut client, writes);
        assert_eq!(status[1], IO_ERROR, "round {round}: {status:?}");
        served.disk.backend().recover().unwrap();
    }
}

//! Memory that a VMM truncates, or that its host does not have: the VMM is disconnected, and
//! another disk in the same process is still served. Without the handler each of these cases ends
//! the process.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

use crate::client::{
    Client, DATA, Descriptor, F_LOG_ALL, MEMORY, NEXT, READ, WRITABLE, WRITE, memfd, region,
};
use crate::{Served, serve, serve_file};

/// A disk whose guest is served, whatever happens to others.
struct Neighbour {
    served: Served,
    client: Client,
}

impl Neighbour {
    fn start() -> Self {
        let served = serve();
        let client = Client::start(&served.socket, 1, 0);
        Self { served, client }
    }

    fn assert_works(&mut self) {
        self.client.assert_works(0);
        let status = self.served.server.status();
        assert_eq!((status.lost, status.panics, status.connections), (0, 0, 1));
    }
}

/// Waits until the server has counted `count` losses.
fn wait_for_losses(served: &Served, count: u64) {
    let start = Instant::now();
    while served.server.status().lost < count {
        assert!(start.elapsed() < Duration::from_secs(20), "no loss is counted");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((served.server.status().lost, served.server.status().panics), (count, 0));
}

/// Offers a request whose data is at `place`, without waiting for it.
fn offer(client: &mut Client, kind: u32, place: u64) {
    client.put_header(DATA, kind, 0);
    let pieces = [(DATA, 16, false), (place, 4096, kind == READ), (DATA + 0x100, 1, true)];
    client.put_chain(0, 0, &pieces);
    client.offer(0, 0);
    client.kick(0);
}

#[test]
fn only_the_guest_whose_memory_is_truncated_is_disconnected() {
    let mut neighbour = Neighbour::start();
    let served = serve();
    // Truncates the data; the data and the status; all memory with the ring.
    let cuts = [(READ, MEMORY / 2), (WRITE, MEMORY / 2), (READ, 0), (WRITE, 0)];
    for (count, (kind, length)) in (1..).zip(cuts) {
        let mut client = Client::start(&served.socket, 1, 0);
        client.assert_works(0);
        if length > 0 {
            client.memory.set_len(length).unwrap();
            offer(&mut client, kind, length + 8192);
        } else {
            offer(&mut client, kind, DATA + 0x1000);
            client.wait(0);
            client.memory.set_len(length).unwrap();
            client.kick(0);
        }
        neighbour.assert_works();
        assert!(client.is_disconnected(), "cut to {length}");
        wait_for_losses(&served, count);
        neighbour.assert_works();
    }
    Client::start(&served.socket, 1, 0).assert_works(0);
    let mut data = [1; 512];
    let mut client = Client::start(&served.socket, 1, 0);
    assert_eq!(client.request(0, READ, 0, &mut data), 0);
    neighbour.assert_works();
}

#[test]
fn memory_that_the_kernel_cannot_reach_fails_only_its_request() {
    let mut neighbour = Neighbour::start();
    let served = serve_file();
    let mut client = Client::start(&served.socket, 1, 0);
    client.memory.set_len(MEMORY / 2).unwrap();
    for kind in [READ, WRITE] {
        offer(&mut client, kind, MEMORY / 2 + 8192);
        client.wait(0);
        assert_eq!(client.get(DATA + 0x100, 1), [1], "the status of {kind}");
    }
    client.assert_works(0);
    assert_eq!(served.server.status().lost, 0);
    neighbour.assert_works();
}

#[test]
fn a_truncated_in_flight_file_or_log_disconnects_only_its_guest() {
    let mut neighbour = Neighbour::start();
    let served = serve();
    let mut client = Client::connect(&served.socket, 1, 0);
    // An unsealed file, as another daemon may have created it.
    let (mut inflight, made) = client.new_inflight(1);
    drop(made);
    let file = memfd(inflight.mmap_size);
    inflight.mmap_offset = 0;
    client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    client.start_queue(0, 0);
    client.assert_works(0);
    file.set_len(0).unwrap();
    offer(&mut client, READ, DATA + 0x1000);
    assert!(client.is_disconnected());
    wait_for_losses(&served, 1);
    neighbour.assert_works();

    let mut client = Client::start(&served.socket, 1, 0);
    let log = memfd(MEMORY / 4096 / 8);
    let described = VhostUserDirtyLogRegion {
        mmap_size: MEMORY / 4096 / 8,
        mmap_offset: 0,
        mmap_handle: log.as_raw_fd(),
    };
    client.frontend.set_log_base(0, Some(described)).unwrap();
    client.frontend.set_features(client.features | F_LOG_ALL).unwrap();
    client.assert_works(0);
    log.set_len(0).unwrap();
    offer(&mut client, READ, DATA + 0x1000);
    assert!(client.is_disconnected());
    wait_for_losses(&served, 2);
    neighbour.assert_works();
}

#[test]
fn readers_of_the_memory_beside_the_rings_survive_its_loss() {
    let mut neighbour = Neighbour::start();
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    let memory = served.server.guest_memory();
    client.memory.set_len(4096).unwrap();
    // The same accesses as introspection.
    for region in memory.regions() {
        for at in (region.start..region.end()).step_by(4096) {
            memory.u64(at).unwrap();
        }
    }
    assert!(client.is_disconnected());
    wait_for_losses(&served, 1);
    neighbour.assert_works();
}

#[test]
fn a_request_that_was_repeated_too_often_fails() {
    let served = serve();
    let mut client = Client::connect(&served.socket, 1, 0);
    let (inflight, file) = client.new_inflight(1);
    let entry = |head: u64| 16 + 16 * head;
    // Head 0 was repeated earlier. Heads 3, 4 and 5 are in flight: one repeated as often as
    // allowed, one more often, and one never.
    file.write_all_at(&[0, 7], entry(0)).unwrap();
    for (head, repeats) in [(3, 8), (4, 9), (5, 0)] {
        file.write_all_at(&[1, repeats], entry(head)).unwrap();
        file.write_all_at(&u64::to_ne_bytes(head), entry(head) + 8).unwrap();
        let at = DATA + 0x1000 * head;
        client.put_header(at, WRITE, head);
        client.put(at + 1024, &[0xee]);
        let (first, second) = (head as u16, 40 + head as u16);
        let data = Descriptor { address: at, length: 528, flags: NEXT, next: second };
        let status = Descriptor { address: at + 1024, length: 1, flags: WRITABLE, next: 0 };
        client.put_descriptor(Client::places(0).0, first, data);
        client.put_descriptor(Client::places(0).0, second, status);
    }
    client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    client.set_available(0, 3);
    client.start_queue(0, 0);
    let back: Vec<(u32, u32)> = (0..3).map(|_| client.wait(0)).collect();
    assert_eq!(back, [(3, 1), (4, 0), (5, 1)]);
    let status = |head: u64| client.get(DATA + 0x1000 * head + 1024, 1)[0];
    assert_eq!((status(3), status(4), status(5)), (1, 0xee, 0));
    assert_eq!(served.server.status().refused, 2);
    client.assert_works(0);
    // The count of a new request begins at zero.
    let mut repeats = [0; 1];
    file.read_exact_at(&mut repeats, entry(0) + 1).unwrap();
    assert_eq!(repeats, [0]);
}

/// A tmpfs of 1 MiB, which is unmounted on drop; `None` where mounting is not allowed.
struct SmallFileSystem(PathBuf, #[expect(dead_code, reason = "removed last")] tempfile::TempDir);

impl SmallFileSystem {
    fn mount() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let (kind, flags) = (c"tmpfs", MountFlags::empty());
        if mount(kind, &path, kind, flags, c"size=1m").is_err() {
            eprintln!("skipped: no file system can be mounted here");
            return None;
        }
        Some(Self(path, directory))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// A well-behaved VMM, memory on a full file system, and a request for a page that was never
/// touched. The guest is disconnected a few times; then its request fails, and the guest continues.
#[test]
fn memory_on_a_full_file_system_fails_the_request_in_the_end() {
    let Some(small) = SmallFileSystem::mount() else { return };
    let mut neighbour = Neighbour::start();
    let served = serve();
    let mut open = File::options();
    open.read(true).write(true).create(true).truncate(true);
    let memory = open.open(small.0.join("memory")).unwrap();
    memory.set_len(MEMORY).unwrap();
    // The guest's used memory is allocated; then another file takes the rest of the space.
    memory.write_all_at(&[0; 0x4000], 0).unwrap();
    memory.write_all_at(&[0; 0x4000], DATA).unwrap();
    let filler = open.open(small.0.join("filler")).unwrap();
    let mut at = 0;
    while filler.write_at(&[1; 4096], at).is_ok_and(|count| count == 4096) {
        at += 4096;
    }
    let connect = || Client::connect_with(&served.socket, 1, 0, memory.try_clone().unwrap());
    let mut client = connect();
    let (inflight, file) = client.new_inflight(1);
    client.start_queue(0, 0);
    offer(&mut client, READ, MEMORY / 2);
    let mut losses = 0;
    loop {
        let completed = loop {
            if client.wait_for(0, Duration::from_millis(20)).is_some() {
                break true;
            }
            if served.server.status().lost > losses {
                break false;
            }
        };
        if completed {
            break;
        }
        assert!(client.is_disconnected());
        losses += 1;
        assert!(losses < 20, "the request is repeated for ever");
        neighbour.assert_works();
        client = connect();
        client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
        client.set_available(0, 1);
        // The last connection may be closed before it has answered everything.
        let _ = client.try_start_queue(0, 0);
    }
    assert!((4..=10).contains(&losses), "{losses}");
    assert_eq!(client.get(DATA + 0x100, 1), [1]);
    client.assert_works(0);
    neighbour.assert_works();
}

#[test]
fn more_memory_than_a_host_may_have_is_refused() {
    let mut neighbour = Neighbour::start();
    let served = serve();
    let huge = memfd(127 << 40);
    let client = Client::connect(&served.socket, 1, 0);
    assert!(client.frontend.set_mem_table(&[region(&huge, 0, 127 << 40)]).is_err());
    // In parts, over the most connections allowed.
    let mut mapped = 0;
    let clients: Vec<Client> = (0..10)
        .map(|_| {
            let mut client = Client::connect(&served.socket, 1, 0);
            for piece in 1..30 {
                if client.frontend.add_mem_region(&region(&huge, piece << 40, 1 << 39)).is_err() {
                    break;
                }
                mapped += 1 << 39;
            }
            client
        })
        .collect();
    assert!(mapped < 65_u64 << 40, "{} TiB", mapped >> 40);
    neighbour.assert_works();
    drop(clients);
    Client::start(&served.socket, 1, 0).assert_works(0);
}

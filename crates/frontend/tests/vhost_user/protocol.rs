//! Uses of the protocol by a VMM beside requests: reconnection, migration, memory hotplug, and the
//! announcement of a new size.

use std::io::Read as _;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

use crate::client::{
    Client, DATA, F_LOG_ALL, MEMORY, READ, RING_SIZE, USER_ADDRESS, WRITE, memfd, region,
};
use crate::{CAPACITY, serve};

#[test]
fn a_stopped_ring_continues_at_its_index() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    for _ in 0..100 {
        client.assert_works(0);
    }
    let base = client.frontend.get_vring_base(0).unwrap();
    assert_eq!(base, 200);
    assert_eq!(served.server.status().running_queues, 0);
    client.start_queue(0, base as u16);
    client.assert_works(0);
    // A disabled ring takes no requests.
    client.frontend.set_vring_enable(0, false).unwrap();
    client.put_header(DATA, READ, 0);
    client.put_chain(0, 0, &[(DATA, 16, false), (DATA + 0x1000, 512, true), (DATA + 9, 1, true)]);
    client.offer(0, 0);
    client.kick(0);
    assert!(client.wait_for(0, Duration::from_millis(50)).is_none());
    client.frontend.set_vring_enable(0, true).unwrap();
    client.kick(0);
    assert_eq!(client.wait(0).0, 0);
}

#[test]
fn requests_that_a_killed_daemon_had_taken_are_repeated() {
    let served = serve();
    let mut first = Client::connect(&served.socket, 1, 0);
    let (inflight, file) = first.new_inflight(1);
    drop(first);
    // The record of a killed daemon: heads 4 and 9 taken in this order, then 20; 20 given back,
    // with the used index moved and the flag not yet cleared.
    let entry = |head: u64| 16 + 16 * head;
    for (counter, head) in [(5_u64, 4), (6, 9), (7, 20)] {
        file.write_all_at(&[1], entry(head)).unwrap();
        file.write_all_at(&u64::to_ne_bytes(counter), entry(head) + 8).unwrap();
    }
    file.write_all_at(&u16::to_ne_bytes(20), 12).unwrap();
    file.write_all_at(&u16::to_ne_bytes(41), 14).unwrap();
    let mut client = Client::connect(&served.socket, 1, 0);
    client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    client.put(Client::places(0).2 + 2, &42_u16.to_le_bytes());
    client.set_used(0, 42);
    for head in [4_u16, 9, 20] {
        let at = DATA + 0x1000 * u64::from(head);
        client.put_header(at, WRITE, u64::from(head));
        client.put(at + 16, &[head as u8; 512]);
        client.put_chain(0, head, &[(at, 528, false), (at + 1024, 1, true)]);
    }
    // The front end's base counts only requests given back. The ring had 45 requests available, of
    // which the daemon had taken 44: 42 were given back and 2 are in flight.
    client.set_available(0, 44);
    client.put_header(DATA, WRITE, 1);
    client.put(DATA + 16, &[1; 512]);
    client.put_chain(0, 0, &[(DATA, 528, false), (DATA + 1024, 1, true)]);
    client.offer(0, 0);
    client.start_queue(0, 42);
    let heads: Vec<u32> = (0..3).map(|_| client.wait(0).0).collect();
    assert_eq!(heads, [4, 9, 0]);
    assert!(client.wait_for(0, Duration::from_millis(50)).is_none());
    assert_eq!(served.server.status().recovered, 2);
    let mut flags = [0; 1];
    for head in 0..u64::from(RING_SIZE) {
        file.read_exact_at(&mut flags, entry(head)).unwrap();
        assert_eq!(flags, [0], "head {head}");
    }
    let mut back = [0; 512];
    for (sector, value) in [(4, 4), (9, 9), (1, 1), (20, 0)] {
        assert_eq!(client.request(0, READ, sector, &mut back), 0);
        assert_eq!(back, [value; 512]);
    }
}

#[test]
fn every_page_that_the_device_writes_is_logged_for_a_migration() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    let log = memfd(MEMORY / 4096 / 8);
    let region = VhostUserDirtyLogRegion {
        mmap_size: MEMORY / 4096 / 8,
        mmap_offset: 0,
        mmap_handle: log.as_raw_fd(),
    };
    let dirty = || {
        let mut bits = vec![0; (MEMORY / 4096 / 8) as usize];
        log.read_exact_at(&mut bits, 0).unwrap();
        log.write_all_at(&vec![0; bits.len()], 0).unwrap();
        (0..MEMORY / 4096)
            .filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0)
            .collect::<Vec<u64>>()
    };
    client.frontend.set_log_base(0, Some(region)).unwrap();
    client.assert_works(0);
    served.server.mark_written(7 * 4096 + 100, 4);
    assert!(dirty().is_empty(), "nothing is logged before the VMM requests it");
    assert!(!served.server.is_logging());
    let features = client.features | F_LOG_ALL;
    client.frontend.set_features(features).unwrap();
    // A read of 8 KiB into three pages, with its status in another page.
    let (header, place, status) = (DATA, DATA + 0x1ff0, DATA + 0x8000);
    client.put_header(header, READ, 0);
    let pieces = [(header, 16, false), (place, 8192, true), (status, 1, true)];
    assert_eq!(client.request_chain(0, &pieces, status).0, 0);
    let page = |address: u64| address / 4096;
    let used = page(Client::places(0).2);
    let data = page(place);
    assert_eq!(dirty(), [used, data, data + 1, data + 2, page(status)]);
    // A write makes no data page dirty.
    client.put_header(header, WRITE, 0);
    let pieces = [(header, 16, false), (place, 512, false), (status, 1, true)];
    assert_eq!(client.request_chain(0, &pieces, status).0, 0);
    assert_eq!(dirty(), [used, page(status)]);
    // What other parts of the daemon write.
    assert!(served.server.is_logging());
    served.server.mark_written(7 * 4096 + 100, 4);
    assert_eq!(dirty(), [7]);
    client.frontend.set_features(client.features).unwrap();
    client.assert_works(0);
    served.server.mark_written(7 * 4096 + 100, 4);
    assert!(dirty().is_empty() && !served.server.is_logging());
}

#[test]
fn memory_is_added_and_removed_while_rings_run() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    assert_eq!(client.frontend.get_max_mem_slots().unwrap(), 32);
    let more = memfd(1 << 20);
    let added = region(&more, 1 << 30, 1 << 20);
    client.frontend.add_mem_region(&added).unwrap();
    assert_eq!(served.server.guest_memory().regions().len(), 2);
    more.write_all_at(&[3; 512], 4096).unwrap();
    client.put_header(DATA, WRITE, 9);
    let status = DATA + 0x100;
    let pieces = [(DATA, 16, false), ((1 << 30) + 4096, 512, false), (status, 1, true)];
    assert_eq!(client.request_chain(0, &pieces, status).0, 0);
    let mut back = [0; 512];
    assert_eq!(client.request(0, READ, 9, &mut back), 0);
    assert_eq!(back, [3; 512]);
    client.frontend.remove_mem_region(&added).unwrap();
    assert_eq!(client.request_chain(0, &pieces, status).0, 1);
    client.assert_works(0);
}

#[test]
fn a_new_size_is_announced_and_used() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    client.frontend.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);
    ours.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(client.request(0, READ, CAPACITY / 512, &mut [0; 512]), 1);
    served.disk.resize(2 * CAPACITY).unwrap();
    let mut message = [0; 12];
    ours.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(client.capacity() * 512, 2 * CAPACITY);
    assert_eq!(client.request(0, READ, CAPACITY / 512, &mut [0; 512]), 0);
    served.disk.resize(CAPACITY).unwrap();
    assert_eq!(client.request(0, READ, CAPACITY / 512, &mut [0; 512]), 1);
    client.assert_works(0);
}

#[test]
fn layers_change_under_a_running_guest() {
    let served = serve();
    let mut client = Client::start(&served.socket, 2, 0);
    client.assert_works(0);
    for round in 0..5 {
        served.disk.restack(Vec::new(), fathom_block::CHANGE_TIME_MAX).unwrap();
        client.assert_works(round % 2);
    }
}

#[test]
fn impossible_setups_are_refused_with_an_error() {
    let served = serve();
    let assert_refused = |setup: &dyn Fn(&mut Client) -> bool| {
        let mut client = Client::connect(&served.socket, 1, 0);
        assert!(setup(&mut client), "an impossible setup was accepted");
    };
    assert_refused(&|client| client.frontend.set_features(u64::MAX).is_err());
    assert_refused(&|client| {
        let short = memfd(4096);
        client.frontend.set_mem_table(&[region(&short, 0, 8192)]).is_err()
    });
    assert_refused(&|client| {
        let file = memfd(8192);
        let both = [region(&file, 0, 8192), region(&file, 4096, 4096)];
        client.frontend.set_mem_table(&both).is_err()
    });
    assert_refused(&|client| {
        let file = memfd(4096);
        client.frontend.remove_mem_region(&region(&file, 12345, 1)).is_err()
    });
    assert_refused(&|client| {
        let mut outside = Client::vring(0);
        outside.used_ring_addr = USER_ADDRESS + MEMORY - 4;
        client.frontend.set_vring_num(0, RING_SIZE).unwrap();
        client.frontend.set_vring_addr(0, &outside).unwrap();
        let kick = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        client.frontend.set_vring_kick(0, &kick).is_err()
    });
    assert_refused(&|client| client.frontend.set_vring_num(0, 2048).is_err());
    Client::start(&served.socket, 1, 0).assert_works(0);
}

#[test]
fn the_destination_of_a_migration_starts_when_the_source_has_stopped() {
    let served = serve();
    let mut source = Client::start(&served.socket, 1, 0);
    source.assert_works(0);
    let mut destination = Client::connect(&served.socket, 1, 0);
    assert_eq!(destination.capacity() * 512, CAPACITY);
    source.assert_works(0);
    let starting = std::thread::spawn(move || {
        destination.start_queue(0, 0);
        destination
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(!starting.is_finished());
    source.assert_works(0);
    source.frontend.get_vring_base(0).unwrap();
    let mut destination = starting.join().unwrap();
    destination.assert_works(0);
    assert_eq!(served.server.status().connections, 2);
    drop(source);
    destination.assert_works(0);
    drop(destination);
    // A VMM that dies gives up its right to run rings with its connection.
    Client::start(&served.socket, 1, 0).assert_works(0);
}

#[test]
fn a_shutdown_disconnects_the_client_and_removes_the_socket() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    let socket = served.socket.clone();
    served.server.shutdown();
    assert!(!socket.exists());
    assert!(client.frontend.get_features().is_err());
}

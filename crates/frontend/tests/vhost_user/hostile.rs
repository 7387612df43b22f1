//! Violations by a guest. Each is refused and counted; the queue, the connection or at least the
//! server continues.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::client::{
    Client, DATA, Descriptor, INDIRECT, MEMORY, NEXT, READ, RING_SIZE, WRITABLE, WRITE,
};
use crate::serve;

/// Offers head 0 with the given descriptors and expects it back without a written byte.
fn assert_refused(client: &mut Client, descriptors: &[Descriptor]) {
    for (index, descriptor) in descriptors.iter().enumerate() {
        client.put_descriptor(Client::places(0).0, index as u16, *descriptor);
    }
    client.offer(0, 0);
    client.kick(0);
    assert_eq!(client.wait(0), (0, 0), "{descriptors:?}");
}

#[test]
fn invalid_chains_are_refused() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.put_header(DATA, READ, 0);
    let header = Descriptor { address: DATA, length: 16, flags: NEXT, next: 1 };
    let status = Descriptor { address: DATA + 0x100, length: 1, flags: WRITABLE, next: 0 };
    let table = |length| Descriptor { address: DATA + 0x4000, length, flags: INDIRECT, next: 0 };
    // A table within a table, for the nested case.
    client.put_descriptor(DATA + 0x4000, 0, table(16));
    // A table that loops.
    let looped = Descriptor { address: DATA + 0x5000, length: 64, flags: INDIRECT, next: 0 };
    client.put_descriptor(DATA + 0x5000, 0, Descriptor { next: 0, ..header });
    let cases: Vec<Vec<Descriptor>> = vec![
        // Loops: a descriptor that links to itself, and two that link to each other.
        vec![Descriptor { next: 0, ..header }],
        vec![header, Descriptor { flags: WRITABLE | NEXT, next: 0, ..status }],
        // A link out of the table.
        vec![Descriptor { next: RING_SIZE, ..header }],
        vec![Descriptor { next: u16::MAX, ..header }],
        // Indirect tables: nested, looping, empty, odd in length, too long, outside memory, with a
        // link.
        vec![table(16)],
        vec![looped],
        vec![table(0)],
        vec![table(17)],
        vec![table(u32::MAX - 15)],
        vec![Descriptor { address: MEMORY - 8, ..table(16) }],
        vec![Descriptor { address: u64::MAX - 7, ..table(16) }],
        vec![Descriptor { flags: INDIRECT | NEXT, ..table(16) }],
        // Readable memory after writable memory.
        vec![
            Descriptor { next: 1, flags: WRITABLE | NEXT, ..status },
            Descriptor { flags: 0, ..header },
        ],
        // No status: no writable memory, an empty piece, one outside memory.
        vec![Descriptor { flags: 0, ..header }],
        vec![header, Descriptor { length: 0, ..status }],
        vec![header, Descriptor { address: MEMORY, ..status }],
        vec![header, Descriptor { address: u64::MAX, length: 2, ..status }],
        // A header that is truncated, or outside memory.
        vec![Descriptor { length: 15, ..header }, status],
        vec![Descriptor { address: MEMORY - 15, ..header }, status],
        vec![status],
    ];
    let count = cases.len() as u64;
    for descriptors in cases {
        assert_refused(&mut client, &descriptors);
    }
    client.assert_works(0);
    let status = served.server.status();
    assert_eq!((status.refused, status.broken_rings, status.panics), (count, 0, 0));
}

#[test]
fn data_outside_memory_and_wrong_lengths_are_errors_of_the_request() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    let (header, status) = (DATA, DATA + 0x100);
    let cases = [(MEMORY, 512), (MEMORY - 511, 512), (u64::MAX - 100, 512), (0, u32::MAX)];
    for kind in [READ, WRITE] {
        for (address, length) in cases {
            client.put_header(header, kind, 0);
            let pieces = [(header, 16, false), (address, length, kind == READ), (status, 1, true)];
            assert_eq!(client.request_chain(0, &pieces, status).0, 1, "{kind} {address:x}");
        }
    }
    // More data than a request may have, in existing memory.
    client.put_header(header, WRITE, 0);
    let mut pieces = vec![(header, 16, false)];
    pieces.extend([(0, MEMORY as u32, false); 5]);
    pieces.push((status, 1, true));
    assert_eq!(client.request_chain(0, &pieces, status).0, 1);
    client.assert_works(0);
    assert_eq!(served.server.status().panics, 0);
}

#[test]
fn a_ring_with_invalid_contents_stops_until_the_device_is_reset() {
    let served = serve();
    let mut client = Client::start(&served.socket, 2, 0);
    for round in 1..=2 {
        if round == 1 {
            client.set_available(0, RING_SIZE + 1);
        } else {
            // A head outside the ring.
            client.offer(0, RING_SIZE + 3);
        }
        client.kick(0);
        assert!(client.wait_for(0, Duration::from_millis(100)).is_none());
        let status = served.server.status();
        assert_eq!((status.broken_rings, status.broken_now), (round, 1));
        // The other queue continues.
        client.assert_works(1);
        // A reset: the ring is stopped, cleared and started again.
        client.frontend_stop(0);
        client.clear(0);
        client.start_queue(0, 0);
        client.assert_works(0);
        assert_eq!(served.server.status().broken_now, 0);
    }
}

impl Client {
    fn frontend_stop(&self, queue: usize) {
        use vhost::VhostBackend;
        self.frontend.get_vring_base(queue).unwrap();
    }
}

#[test]
fn a_head_that_is_available_twice_is_served_at_most_once() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.put_header(DATA, READ, 0);
    let pieces = [(DATA, 16, false), (DATA + 0x1000, 512, true), (DATA + 0x100, 1, true)];
    client.put_chain(0, 0, &pieces);
    for _ in 0..20 {
        client.offer(0, 0);
    }
    client.kick(0);
    // The memory disk completes requests immediately, so each may be given back before the next is
    // taken. Nothing may break except, perhaps, the ring.
    while client.wait_for(0, Duration::from_millis(100)).is_some() {}
    assert_eq!(served.server.status().panics, 0);
    drop(client);
    Client::start(&served.socket, 1, 0).assert_works(0);
}

#[test]
fn a_queue_with_random_contents_harms_no_other() {
    let served = serve();
    for seed in 1..=40_u64 {
        let mut client = Client::start(&served.socket, 1, 0);
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut bytes = vec![0; 0x3000];
        for byte in &mut bytes {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Small numbers are the more useful random values: addresses and links that exist.
            *byte = if state % 3 == 0 { (state >> 32) as u8 } else { (state >> 40) as u8 & 0x11 };
        }
        client.put(0, &bytes);
        let mut index = served.server.status().refused as u16;
        for _ in 0..20 {
            index = index.wrapping_add((seed % 60) as u16);
            client.set_available(0, index);
            client.kick(0);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    assert_eq!(served.server.status().panics, 0);
}

#[test]
fn invalid_messages_end_only_their_connection() {
    let served = serve();
    let messages: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 64],
        // A length far above that of any message.
        &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        // SET_MEM_TABLE without a body, without descriptors.
        &[5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        // SET_VRING_NUM of a queue that does not exist.
        &[8, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 0xff, 0xff, 0, 0, 64, 0, 0, 0],
        // Half a header.
        &[1, 0, 0],
    ];
    for message in messages {
        let mut stream = UnixStream::connect(&served.socket).unwrap();
        stream.write_all(message).unwrap();
        drop(stream);
    }
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    assert!(served.server.status().protocol_errors >= 4);
}

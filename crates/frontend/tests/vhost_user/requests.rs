//! The requests of a well-behaved guest.

use std::io;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request,
};
use parking_lot::Mutex;

use crate::client::{
    Client, DATA, DISCARD, Descriptor, F_EVENT_INDEX, F_FLUSH, FLUSH, GET_ID, INDIRECT, NEXT, READ,
    WRITABLE, WRITE, WRITE_ZEROES,
};
use crate::{CAPACITY, serve, serve_with};

#[test]
fn written_data_is_read_on_every_queue() {
    let served = serve();
    let mut client = Client::start(&served.socket, 3, 0);
    assert_eq!(client.capacity() * 512, CAPACITY);
    for queue in 0..3 {
        let mut data: Vec<u8> = (0..8192).map(|byte| (byte % 251) as u8 + queue as u8).collect();
        assert_eq!(client.request(queue, WRITE, 16 * queue as u64, &mut data), 0);
        assert!(client.interrupts(queue) > 0);
        let mut back = vec![0; 8192];
        let other = (queue + 1) % 3;
        assert_eq!(client.request(other, READ, 16 * queue as u64, &mut back), 0);
        assert_eq!(data, back);
    }
    assert_eq!(client.request(0, FLUSH, 0, &mut []), 0);
    let mut serial = [0; 20];
    assert_eq!(client.request(0, GET_ID, 0, &mut serial), 0);
    assert_eq!(&serial, b"serial-of-the-disk\0\0");
    let status = served.server.status();
    assert_eq!((status.running_queues, status.refused, status.connected), (3, 0, true));
    assert_eq!(status.memory, crate::client::MEMORY);
}

#[test]
fn the_same_without_event_index_and_through_indirect_tables() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, F_EVENT_INDEX);
    client.assert_works(0);
    client.assert_works(0);
    assert!(client.interrupts(0) > 0);
    // Header, data and status in an indirect table that is not aligned.
    let (table, header, place, status) = (DATA + 0x2003, DATA, DATA + 0x1000, DATA + 0x100);
    client.put_header(header, READ, 3);
    client.put(status, &[0xee]);
    let entries =
        [(header, 16, NEXT, 2), (status, 1, WRITABLE, 0), (place, 512, NEXT | WRITABLE, 1)];
    for (index, (address, length, flags, next)) in entries.into_iter().enumerate() {
        let descriptor = Descriptor { address, length, flags, next };
        client.put_descriptor(table, index as u16, descriptor);
    }
    let head = Descriptor { address: table, length: 48, flags: INDIRECT, next: 0 };
    client.put_descriptor(Client::places(0).0, 7, head);
    client.offer(0, 7);
    client.kick(0);
    assert_eq!(client.wait(0), (7, 513));
    assert_eq!(client.get(status, 1), [0]);
    assert_eq!(client.get(place, 512), [0x5a; 512]);
}

#[test]
fn the_framing_does_not_matter() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    // The header in three pieces, the last of which also has the first data byte.
    let (header, status) = (DATA, DATA + 0x9000);
    client.put_header(header, WRITE, 5);
    client.put(header + 16, &[7; 512]);
    let pieces = [
        (header, 1, false),
        (header + 1, 10, false),
        (header + 11, 6, false),
        (header + 17, 511, false),
        (status, 1, true),
    ];
    assert_eq!(client.request_chain(0, &pieces, status), (0, 1));
    // A read whose status is the byte after its data.
    client.put_header(header, READ, 5);
    let place = DATA + 0x2000;
    let pieces = [(header, 16, false), (place, 100, true), (place + 100, 413, true)];
    assert_eq!(client.request_chain(0, &pieces, place + 512), (0, 513));
    assert_eq!(client.get(place, 512), [7; 512]);
}

#[test]
fn discard_and_zeroes_take_several_segments() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    let mut data = vec![9; 64 * 512];
    assert_eq!(client.request(0, WRITE, 0, &mut data), 0);
    let segment = |sector: u64, count: u32, flags: u32| {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    };
    let mut both = [segment(0, 8, 0), segment(16, 8, 1)].concat();
    assert_eq!(client.request(0, WRITE_ZEROES, 0, &mut both), 0);
    let mut one = segment(32, 8, 0);
    assert_eq!(client.request(0, DISCARD, 0, &mut one), 0);
    let mut back = vec![1; 64 * 512];
    assert_eq!(client.request(0, READ, 0, &mut back), 0);
    for (sector, bytes) in back.chunks(512).enumerate() {
        let expected = if matches!(sector, 0..8 | 16..24 | 32..40) { 0 } else { 9 };
        assert!(bytes.iter().all(|&byte| byte == expected), "sector {sector}");
    }
    // Refused: unmap on a discard, unknown flags, no segments, a truncated segment, too many
    // segments, a range out of bounds.
    let cases = [
        (DISCARD, segment(0, 8, 1), 2),
        (WRITE_ZEROES, segment(0, 8, 2), 2),
        (DISCARD, Vec::new(), 1),
        (DISCARD, vec![0; 17], 1),
        (DISCARD, segment(0, 8, 0).repeat(17), 1),
        (DISCARD, segment(CAPACITY / 512 - 1, 8, 0), 1),
        (WRITE_ZEROES, segment(u64::MAX - 3, u32::MAX, 0), 1),
    ];
    for (kind, mut payload, status) in cases {
        assert_eq!(client.request(0, kind, 0, &mut payload), status, "{kind} {payload:?}");
    }
    client.assert_works(0);
}

#[test]
fn unsupported_operations_are_reported() {
    let served = serve_with(Vec::new(), true);
    let mut client = Client::start(&served.socket, 1, 0);
    assert_ne!(client.features & 1 << 5, 0, "the read-only feature");
    assert_eq!(client.features & (1 << 13 | 1 << 14), 0, "discard and write-zeroes");
    assert_eq!(client.request(0, WRITE, 0, &mut [1; 512]), 1);
    assert_eq!(client.request(0, READ, 0, &mut [1; 512]), 0);
    assert_eq!(client.request(0, 77, 0, &mut []), 2, "an unknown type");
    assert_eq!(client.request(0, READ, CAPACITY / 512, &mut [1; 512]), 1);
    assert_eq!(client.request(0, READ, u64::MAX, &mut [1; 512]), 1);
    assert_eq!(client.request(0, READ, 0, &mut []), 1);
}

/// Records the force-unit-access flag of every write.
#[derive(Default)]
struct Recorder(Arc<Mutex<Vec<bool>>>);

impl Layer for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(Self(Arc::clone(&self.0))))
    }
}

impl LayerQueue for Recorder {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if request.operation == Operation::Write {
            self.0.lock().push(request.flags.force_unit_access);
            assert!(request.header.is_some_and(|header| header.0 == DATA));
            assert_eq!(request.buffers.addresses().len(), request.buffers.count());
        }
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

#[test]
fn a_guest_without_flush_gets_durable_writes() {
    let recorder = Recorder::default();
    let seen = Arc::clone(&recorder.0);
    let served = serve_with(vec![Arc::new(recorder)], false);
    Client::start(&served.socket, 1, 0).assert_works(0);
    Client::start(&served.socket, 1, F_FLUSH).assert_works(0);
    assert_eq!(*seen.lock(), [false, true]);
}

//! Rings that share a thread: each is served, and none waits for another.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_backend::Memory;
use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request,
};
use vhost::VhostBackend;

use crate::client::{Client, DATA, READ, WRITE};
use crate::hanging::Hanging;
use crate::{CAPACITY, Served, serve_threads};

const QUEUES: usize = 4;

/// The number of threads that serve rings of the disk `name`.
fn threads(name: &str) -> usize {
    // The kernel keeps 15 bytes of a thread's name.
    let ending = format!("-{name}");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|task| task.starts_with('q') && task.trim_end().ends_with(&ending)).count()
}

fn serve(threads: u16, name: &str, layers: Vec<Arc<dyn Layer>>) -> Served {
    serve_threads(Arc::new(Memory::new(CAPACITY)), layers, Some(threads), name)
}

#[test]
fn rings_are_spread_over_the_threads() {
    for (count, name) in [(1, "one"), (3, "three"), (9, "four")] {
        let served = serve(count, name, Vec::new());
        let mut client = Client::start(&served.socket, QUEUES, 0);
        for queue in 0..QUEUES {
            client.assert_works(queue);
        }
        assert_eq!(threads(name), QUEUES.min(count.into()), "{name}");
        // A thread ends with its last ring, and the next ring starts a new one.
        for queue in 0..QUEUES {
            client.frontend.get_vring_base(queue).unwrap();
        }
        assert_eq!(threads(name), 0, "{name}");
        for queue in 0..QUEUES {
            client.clear(queue);
            client.start_queue(queue, 0);
            client.assert_works(queue);
        }
        assert_eq!(threads(name), QUEUES.min(count.into()), "{name}");
        served.server.shutdown();
        assert_eq!(threads(name), 0, "{name}");
    }
}

/// Begins a read of the first block on `queue`, into memory that no other request here uses.
fn begin_read(client: &mut Client, queue: usize) {
    let place = DATA + 0x10_0000 + 0x4000 * queue as u64;
    client.put_header(place, READ, 0);
    let pieces = [(place, 16, false), (place + 0x1000, 512, true), (place + 0x100, 1, true)];
    client.put_chain(queue, 0, &pieces);
    client.offer(queue, 0);
    client.kick(queue);
}

#[test]
fn a_ring_whose_disk_hangs_stops_no_other_ring_of_its_thread() {
    let layer = Hanging::default();
    let served = serve(1, "hangs", vec![Arc::new(layer.clone())]);
    let mut client = Client::start(&served.socket, QUEUES, 0);
    layer.0.store(true, Ordering::Relaxed);
    begin_read(&mut client, 0);
    for _ in 0..200 {
        client.assert_works(1);
        client.assert_works(2);
    }
    // Other rings start and stop meanwhile.
    for _ in 0..20 {
        client.frontend.get_vring_base(1).unwrap();
        client.clear(1);
        client.start_queue(1, 0);
        client.assert_works(1);
        client.assert_works(3);
    }
    assert!(client.wait_for(0, Duration::from_millis(20)).is_none(), "the read does not hang");
    layer.0.store(false, Ordering::Relaxed);
    client.wait(0);
    client.assert_works(0);
    assert_eq!(served.server.status().panics, 0);
    served.server.shutdown();
}

/// A layer that writes a block when its queue is closed.
#[derive(Clone, Default)]
struct Tidy {
    begun: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
}

impl Layer for Tidy {
    fn name(&self) -> &'static str {
        "tidy"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Tidy {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn close(&mut self, next: &mut Crossing<'_>) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let mut own = next.request();
        own.operation = Operation::Write;
        own.offset = 1 << 20;
        own.length = 4096;
        own.buffers.allocate(4096);
        let deadline_ns = next.now_ns() + 20_000_000;
        next.hold(own, None, deadline_ns);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        assert_eq!(outcome, Ok(()));
        self.done.fetch_add(1, Ordering::Relaxed);
        next.recycle(request);
    }
}

#[test]
fn the_layers_of_a_ring_that_stops_finish_their_own_requests() {
    let layer = Tidy::default();
    let served = serve(1, "tidy", vec![Arc::new(layer.clone())]);
    let mut client = Client::start(&served.socket, 2, 0);
    let mut data = [7; 512];
    assert_eq!(client.request(1, WRITE, 5, &mut data), 0);
    // The guest does not wait for the write.
    client.frontend.get_vring_base(1).unwrap();
    assert_eq!(layer.begun.load(Ordering::Relaxed), 1);
    client.assert_works(0);
    client.clear(1);
    client.start_queue(1, 0);
    client.assert_works(1);
    client.assert_works(0);
    served.server.shutdown();
    assert_eq!(layer.begun.load(Ordering::Relaxed), 3);
    assert_eq!(layer.done.load(Ordering::Relaxed), 3, "the end of the ring waits for the write");
}

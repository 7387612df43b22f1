//! Violations by a VMM: descriptors that are full, closed or of the wrong kind, and every message
//! in every state, while rings run. At most the VMM's connection ends. Another disk in the same
//! process is still served, and the server ends when it is stopped.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request,
};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::client::{Client, DATA, MEMORY, READ, RING_SIZE, USER_ADDRESS, memfd, region};
use crate::{Served, serve, serve_file, serve_with};

/// Runs `action` on another thread, which must end.
fn within<R: Send + 'static>(what: &str, action: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = channel();
    std::thread::spawn(move || drop(sender.send(action())));
    receiver.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("{what} hangs"))
}

/// Ends the server, which must not hang, and checks its counts.
fn end(served: Served) {
    assert_eq!(served.server.status().panics, 0);
    within("the end of the server", move || served.server.shutdown());
}

fn pair() -> (OwnedFd, OwnedFd) {
    let (one, other) = UnixStream::pair().unwrap();
    (one.into(), other.into())
}

/// A descriptor of each kind that is neither an event descriptor nor a file for memory, with the
/// descriptor that keeps its other side open.
fn wrong_kinds() -> Vec<(&'static str, OwnedFd, Option<OwnedFd>)> {
    let open =
        |path: &str| OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (socket, other) = pair();
    let (closed, _) = pair();
    vec![
        ("pipe's reader", reader.try_clone().unwrap(), Some(writer.try_clone().unwrap())),
        ("pipe's writer", writer, Some(reader)),
        ("socket", socket, Some(other)),
        ("closed socket", closed, None),
        ("/dev/null", open("/dev/null"), None),
        ("/dev/zero", open("/dev/zero"), None),
        ("directory", File::open("/tmp").unwrap().into(), None),
        ("epoll", epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(), None),
        ("timer", timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap(), None),
    ]
}

#[test]
fn descriptors_of_the_wrong_kind_end_only_their_connection() {
    let (served, beside) = (serve(), serve());
    let mut neighbour = Client::start(&beside.socket, 1, 0);
    let kinds = wrong_kinds();
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let file = OwnedFd::from(memfd(MEMORY));
    let as_event = |descriptor: &OwnedFd| {
        let descriptor = descriptor.try_clone().unwrap();
        unsafe { EventFd::from_raw_fd(std::os::fd::IntoRawFd::into_raw_fd(descriptor)) }
    };
    let no_event = kinds.iter().map(|(name, descriptor, _)| (*name, descriptor));
    for (name, descriptor) in no_event.chain([("file", &file)]) {
        for what in ["call", "kick"] {
            let mut client = Client::start(&served.socket, 1, 0);
            client.assert_works(0);
            let result = if what == "call" {
                client.frontend.set_vring_call(0, &as_event(descriptor))
            } else {
                client.frontend.set_vring_kick(0, &as_event(descriptor))
            };
            assert!(result.is_err(), "a {name} as {what}");
            neighbour.assert_works(0);
        }
    }
    let no_file = kinds.iter().map(|(name, descriptor, _)| (*name, descriptor));
    for (name, descriptor) in no_file.chain([("event", &event)]) {
        let file = File::from(descriptor.try_clone().unwrap());
        let client = Client::start(&served.socket, 1, 0);
        assert!(client.frontend.set_mem_table(&[region(&file, 0, 4096)]).is_err(), "{name}");
        let mut client = Client::start(&served.socket, 1, 0);
        let more = region(&file, 1 << 30, 4096);
        assert!(client.frontend.add_mem_region(&more).is_err(), "{name}");
        let mut client = Client::connect(&served.socket, 1, 0);
        let (inflight, _) = client.new_inflight(1);
        let result = client.frontend.set_inflight_fd(&inflight, file.as_raw_fd());
        assert!(result.is_err(), "a {name} for requests in flight");
        let client = Client::start(&served.socket, 1, 0);
        let log = vhost::VhostUserDirtyLogRegion {
            mmap_size: 4096,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        assert!(client.frontend.set_log_base(0, Some(log)).is_err(), "a {name} as log");
        neighbour.assert_works(0);
    }
    Client::start(&served.socket, 1, 0).assert_works(0);
    end(served);
}

/// Makes the next write to an event descriptor block, or fail if its flags say non-blocking.
fn fill(event: &EventFd) {
    let _ = event.read();
    event.write(u64::MAX - 1).unwrap();
}

fn set_flags(event: &EventFd, flags: libc::c_int) {
    assert_eq!(unsafe { libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags) }, 0);
}

#[test]
fn a_full_call_descriptor_stops_no_other_disk() {
    let (served, beside) = (serve(), serve());
    let mut neighbour = Client::start(&beside.socket, 1, 0);
    let mut client = Client::start(&served.socket, 2, 0);
    let call = EventFd::new(0).unwrap();
    call.write(u64::MAX - 1).unwrap();
    let frontend = client.frontend.clone();
    within("SET_VRING_CALL", move || frontend.set_vring_call(0, &call).unwrap());
    for _ in 0..10 {
        client.assert_works(0);
        client.assert_works(1);
    }
    let served = within("the status", move || {
        assert_eq!(served.server.status().running_queues, 2);
        served
    });
    neighbour.assert_works(0);
    end(served);
    // The same if the flags change afterwards, so that a write may block nevertheless.
    let served = serve();
    let mut client = Client::connect(&served.socket, 1, 0);
    client.calls[0] = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    client.start_queue(0, 0);
    client.assert_works(0);
    set_flags(&client.calls[0], 0);
    set_flags(&client.kicks[0], 0);
    let full = client.calls[0].try_clone().unwrap();
    set_flags(&full, libc::O_NONBLOCK);
    fill(&full);
    set_flags(&full, 0);
    client.put_header(DATA, READ, 0);
    client.put_chain(0, 0, &[(DATA, 16, false), (DATA + 0x1000, 512, true), (DATA + 256, 1, true)]);
    client.offer(0, 0);
    client.kick(0);
    // Its own queue may be blocked until a command interrupts it; other queues are not.
    assert!(client.wait_for(0, Duration::from_secs(20)).is_some());
    neighbour.assert_works(0);
    assert_eq!(served.server.status().running_queues, 1);
    end(served);
}

#[test]
fn a_kick_descriptor_that_the_vmm_empties_does_not_stop_its_ring() {
    let served = serve();
    // One thread of the server serves both rings.
    let mut client = Client::start(&served.socket, 2, 0);
    // A plain read of an empty counter would wait.
    set_flags(&client.kicks[0], 0);
    let served = within("a ring", move || {
        for round in 0..2000 {
            client.kick(0);
            // The server finds the kick and reads the counter, after a time that varies.
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(round % 100) {
                std::hint::spin_loop();
            }
            empty(&client.kicks[0]);
            assert_eq!(client.request(1, READ, 0, &mut [0; 512]), 0, "round {round}");
        }
        client.assert_works(0);
        served
    });
    end(served);
}

/// Empties the counter of an event descriptor without waiting and without a change of its flags,
/// which the server shares.
fn empty(event: &EventFd) {
    let event = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut count = [0; 8];
    match preadv2(event, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(8) | Err(Errno::AGAIN) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_ends_when_a_vmm_is_served() {
    let served = serve();
    let client = Client::connect(&served.socket, 1, 0);
    let event = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
    client.frontend.set_mem_table(&[region(&event, 0, 4096)]).unwrap_err();
    assert!(client.is_disconnected());
    assert!(served.server.status().refusal.is_some());
    // While a ring runs, a query of the status would end the refusal too.
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    client.raw.shutdown(Shutdown::Write).unwrap();
    assert!(client.is_disconnected());
    assert_eq!(served.server.status().refusal, None);
    end(served);
}

#[test]
fn the_size_of_a_running_ring_does_not_change() {
    let served = serve();
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    // The same size again is no change.
    client.frontend.set_vring_num(0, RING_SIZE).unwrap();
    client.frontend.set_vring_addr(0, &Client::vring(0)).unwrap();
    client.assert_works(0);
    // A larger size, without a reply: the ring must not be larger for the requests that follow.
    let mut larger = 0_u32.to_ne_bytes().to_vec();
    larger.extend(1024_u32.to_ne_bytes());
    send(&client.raw, SET_VRING_NUM, &larger, &[]);
    assert!(client.is_disconnected());
    Client::start(&served.socket, 1, 0).assert_works(0);
    assert_eq!(served.server.status().broken_rings, 0);
    end(served);
}

/// A layer that may be slow to open, and records the requests that it has seen.
#[derive(Default)]
struct Slow {
    opening: Duration,
    opened: Arc<Mutex<u64>>,
    seen: Arc<AtomicU64>,
}

impl Layer for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        *self.opened.lock() += 1;
        std::thread::sleep(self.opening);
        Ok(LayerPart::queue(Self { seen: Arc::clone(&self.seen), ..Self::default() }))
    }
}

impl LayerQueue for Slow {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        self.seen.fetch_add(1, Ordering::Relaxed);
        assert!(request.operation != Operation::Discard, "this layer fails at a discard");
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

#[test]
fn a_change_of_layers_is_not_lost_while_a_ring_starts() {
    let opening = Slow { opening: Duration::from_millis(500), ..Slow::default() };
    let opened = Arc::clone(&opening.opened);
    let served = serve_with(vec![Arc::new(opening)], false);
    let next = Slow::default();
    let seen = Arc::clone(&next.seen);
    let mut client = Client::connect(&served.socket, 1, 0);
    let starting = std::thread::spawn(move || {
        client.start_queue(0, 0);
        client
    });
    while *opened.lock() == 0 {
        std::thread::yield_now();
    }
    served.disk.restack(vec![Arc::new(next)], fathom_block::CHANGE_TIME_MAX).unwrap();
    let mut client = starting.join().unwrap();
    let start = Instant::now();
    while seen.load(Ordering::Relaxed) == 0 {
        client.assert_works(0);
        assert!(start.elapsed() < Duration::from_secs(20), "the ring still has the old layers");
    }
    end(served);
}

#[test]
fn a_disk_stays_usable_after_a_queue_fails_with_requests_in_flight() {
    let served = serve_file();
    served.disk.restack(vec![Arc::new(Slow::default())], fathom_block::CHANGE_TIME_MAX).unwrap();
    let mut client = Client::start(&served.socket, 1, 0);
    client.assert_works(0);
    // Reads, which enter the kernel's ring, and a discard, at which the layer fails.
    for head in 0..8 {
        let header = DATA + 0x100 * head;
        client.put_header(header, if head == 7 { crate::client::DISCARD } else { READ }, 0);
        client.put(header + 32, &[0; 16]);
        client.put(header + 40, &8_u32.to_le_bytes());
        let data = if head == 7 {
            (header + 32, 16, false)
        } else {
            (DATA + 0x1_0000 * (1 + head), 0x1_0000, true)
        };
        let pieces = [(header, 16, false), data, (header + 64, 1, true)];
        client.put_chain(0, 3 * head as u16, &pieces);
        client.offer(0, 3 * head as u16);
        client.kick(0);
    }
    let start = Instant::now();
    while served.server.status().panics == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "the queue's thread has not failed");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(client);
    served.disk.restack(Vec::new(), fathom_block::CHANGE_TIME_MAX).unwrap();
    Client::start(&served.socket, 1, 0).assert_works(0);
    within("the end of the server", move || served.server.shutdown());
}

const SET_VRING_NUM: u32 = 8;
/// The numbers of the messages that a front end may send, and of some that it may not.
const MESSAGES: u32 = 44;

/// Sends a message without a request for a reply.
fn send(stream: &UnixStream, request: u32, body: &[u8], descriptors: &[RawFd]) {
    let mut message = Vec::new();
    for word in [request, 1, body.len() as u32] {
        message.extend(word.to_ne_bytes());
    }
    message.extend(body);
    // A closed connection accepts no messages.
    let _ = stream.send_with_fds(&[&message[..]], descriptors);
}

struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }

    /// A random number that is sometimes meaningful.
    fn number(&mut self) -> u64 {
        match self.next(9) {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => USER_ADDRESS + self.next(MEMORY),
            4 => USER_ADDRESS + 0x1000 * self.next(16),
            5 => self.next(1 << 20),
            6 => 0x1000 * self.next(2048),
            7 => 1 << self.next(64),
            _ => self.next(300),
        }
    }
}

/// A body that a message of this number may have.
fn body(random: &mut Random, request: u32) -> (Vec<u8>, usize) {
    let long = |random: &mut Random, count| {
        (0..count).flat_map(|_| random.number().to_ne_bytes()).collect::<Vec<u8>>()
    };
    let state = |random: &mut Random| {
        let index = random.next(3) as u32;
        let number = random.number() as u32;
        [index.to_ne_bytes(), number.to_ne_bytes()].concat()
    };
    match request {
        2 | 16 => {
            // Features: the earlier ones, with some bits changed.
            let all = if request == 2 { 0x0000_0001_7000_7a44_u64 | 1 << 30 } else { 0xffff };
            ((all ^ random.number() & all).to_ne_bytes().to_vec(), 0)
        }
        5 => {
            let count = 1 + random.next(3) as u32;
            let mut bytes = [count.to_ne_bytes(), [0; 4]].concat();
            for index in 0..u64::from(count) {
                let base = index * MEMORY;
                for number in [base, MEMORY, USER_ADDRESS + base, 0] {
                    let number = if random.next(6) == 0 { random.number() } else { number };
                    bytes.extend(number.to_ne_bytes());
                }
            }
            (bytes, count as usize)
        }
        6 => (long(random, 2), 1),
        SET_VRING_NUM | 10 | 11 | 18 => (state(random), 0),
        9 => {
            let mut bytes = [(random.next(3) as u32).to_ne_bytes(), [0; 4]].concat();
            let (descriptors, available, used) = Client::places(random.next(2) as usize);
            for place in [descriptors, used, available, 0] {
                let place = USER_ADDRESS + place;
                let place = if random.next(5) == 0 { random.number() } else { place };
                bytes.extend(place.to_ne_bytes());
            }
            (bytes, 0)
        }
        12..=14 => {
            let none = random.next(4) == 0;
            let value = random.next(3) | u64::from(none) << 8;
            (value.to_ne_bytes().to_vec(), usize::from(!none))
        }
        31 | 32 => {
            let mut bytes = long(random, 2);
            bytes.extend((random.next(4) as u16).to_ne_bytes());
            bytes.extend((random.next(1200) as u16).to_ne_bytes());
            bytes.extend([0; 4]);
            (bytes, usize::from(request == 32))
        }
        21 => (Vec::new(), 1),
        37 | 38 => {
            let mut bytes = vec![0; 8];
            for number in [MEMORY + MEMORY * random.next(4), MEMORY, random.number(), 0] {
                bytes.extend(number.to_ne_bytes());
            }
            (bytes, usize::from(request == 37))
        }
        _ => {
            let count = random.next(4) as usize;
            (long(random, count), random.next(2) as usize)
        }
    }
}

/// Every message, in random order, with random descriptors, while a ring has requests.
#[test]
fn every_message_in_every_state_ends_at_most_the_connection() {
    let (served, beside) = (serve_file(), serve());
    let mut neighbour = Client::start(&beside.socket, 1, 0);
    let kinds = wrong_kinds();
    for seed in 1..=150_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut client = Client::connect(&served.socket, 2, 0);
        if seed % 3 == 0 {
            let (inflight, file) = client.new_inflight(2);
            client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
        }
        for queue in 0..2 {
            // The previous connection may still be ending.
            client.start_queue(queue, 0);
        }
        client.put_header(DATA, READ, 0);
        let pieces = [(DATA, 16, false), (DATA + 0x1000, 0x1_0000, true), (DATA + 256, 1, true)];
        let spare = memfd(MEMORY);
        for message in 0..24 {
            for head in 0..4 {
                client.put_chain(0, 3 * head, &pieces);
                client.offer(0, 3 * head);
            }
            client.kick(0);
            let request = random.next(u64::from(MESSAGES)) as u32;
            let (mut body, count) = body(&mut random, request);
            if random.next(12) == 0 {
                body.truncate(random.next(1 + body.len() as u64) as usize);
            }
            let count = if random.next(12) == 0 { random.next(3) as usize } else { count };
            let descriptors: Vec<RawFd> = (0..count)
                .map(|_| match random.next(5) {
                    0 => kinds[random.next(kinds.len() as u64) as usize].1.as_raw_fd(),
                    1 | 2 if (12..=14).contains(&request) => client.calls[0].as_raw_fd(),
                    2 => spare.as_raw_fd(),
                    3 => client.kicks[1].as_raw_fd(),
                    _ => client.memory.as_raw_fd(),
                })
                .collect();
            send(&client.raw, request, &body, &descriptors);
            if message == 12 && seed % 4 == 0 {
                let shorter = random.next(MEMORY / 4096) * 4096;
                client.memory.set_len(shorter).unwrap();
                client.memory.set_len(MEMORY).unwrap();
            }
        }
        drop(client);
        assert_eq!(served.server.status().panics, 0, "seed {seed}");
        if seed % 10 == 0 {
            neighbour.assert_works(0);
        }
    }
    Client::start(&served.socket, 2, 0).assert_works(1);
    neighbour.assert_works(0);
    end(served);
    end(beside);
}

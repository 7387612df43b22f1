//! A vhost-user-blk client that writes any ring contents that a test needs, valid or invalid.
//!
//! Guest memory is one file, which is mapped here. The parts of each queue have fixed places; data
//! is above them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

pub const MEMORY: u64 = 8 << 20;
/// The address at which the client claims to have mapped the memory in its own process.
pub const USER_ADDRESS: u64 = 0x7f00_0000_0000;
pub const RING_SIZE: u16 = 64;
/// The first address that is not part of a queue.
pub const DATA: u64 = 1 << 20;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const NEXT: u16 = 1;
pub const WRITABLE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const F_FLUSH: u64 = 1 << 9;
pub const F_EVENT_INDEX: u64 = 1 << 29;
pub const F_LOG_ALL: u64 = 1 << 26;

/// A descriptor of a test.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

pub struct Client {
    pub frontend: Frontend,
    /// A second handle of the connection, for messages that the library does not send.
    pub raw: UnixStream,
    pub memory: File,
    pub features: u64,
    pub kicks: Vec<EventFd>,
    pub calls: Vec<EventFd>,
    available: Vec<u16>,
    used: Vec<u16>,
}

pub fn memfd(length: u64) -> File {
    let file = File::from(memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(length).unwrap();
    file
}

pub fn region(memory: &File, guest_address: u64, length: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: guest_address,
        memory_size: length,
        userspace_addr: USER_ADDRESS + guest_address,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    }
}

impl Client {
    /// Connects, negotiates all features except `without`, and starts `queues` queues.
    pub fn start(socket: &Path, queues: usize, without: u64) -> Self {
        let mut client = Self::connect(socket, queues, without);
        for queue in 0..queues {
            client.start_queue(queue, 0);
        }
        client
    }

    /// Connects and negotiates all features except `without`.
    pub fn connect(socket: &Path, queues: usize, without: u64) -> Self {
        Self::connect_with(socket, queues, without, memfd(MEMORY))
    }

    /// The same with a memory of the test, [`MEMORY`] bytes long.
    pub fn connect_with(socket: &Path, queues: usize, without: u64, memory: File) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        let raw = stream.try_clone().unwrap();
        let mut frontend = Frontend::from_stream(stream, queues as u64);
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap() & !without & !F_LOG_ALL;
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        // Each message is acknowledged, so that the message that is refused fails.
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        frontend.set_features(features).unwrap();
        frontend.set_mem_table(&[region(&memory, 0, MEMORY)]).unwrap();
        let events = || (0..queues).map(|_| EventFd::new(libc::EFD_NONBLOCK).unwrap()).collect();
        Self {
            frontend,
            raw,
            memory,
            features,
            kicks: events(),
            calls: events(),
            available: vec![0; queues],
            used: vec![0; queues],
        }
    }

    pub fn places(queue: usize) -> (u64, u64, u64) {
        let base = queue as u64 * 0x4000;
        (base, base + 0x1000, base + 0x2000)
    }

    pub fn vring(queue: usize) -> VringConfigData {
        let (descriptors, available, used) = Self::places(queue);
        VringConfigData {
            queue_max_size: RING_SIZE,
            queue_size: RING_SIZE,
            flags: 0,
            desc_table_addr: USER_ADDRESS + descriptors,
            avail_ring_addr: USER_ADDRESS + available,
            used_ring_addr: USER_ADDRESS + used,
            log_addr: None,
        }
    }

    pub fn start_queue(&mut self, queue: usize, base: u16) {
        self.try_start_queue(queue, base).unwrap();
    }

    pub fn try_start_queue(&mut self, queue: usize, base: u16) -> vhost::Result<()> {
        let frontend = &mut self.frontend;
        frontend.set_vring_num(queue, RING_SIZE)?;
        frontend.set_vring_addr(queue, &Self::vring(queue))?;
        frontend.set_vring_base(queue, base)?;
        frontend.set_vring_call(queue, &self.calls[queue])?;
        frontend.set_vring_kick(queue, &self.kicks[queue])?;
        frontend.set_vring_enable(queue, true)
    }

    /// Clears the state of a queue, for a device that has been reset.
    pub fn clear(&mut self, queue: usize) {
        self.memory.write_all_at(&[0; 0x4000], Self::places(queue).0).unwrap();
        (self.available[queue], self.used[queue]) = (0, 0);
    }

    pub fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, address).unwrap();
    }

    pub fn get(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_exact_at(&mut bytes, address).unwrap();
        bytes
    }

    pub fn get_u16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.get(address, 2).try_into().unwrap())
    }

    pub fn put_descriptor(&self, table: u64, index: u16, descriptor: Descriptor) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&descriptor.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&descriptor.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&descriptor.next.to_le_bytes());
        self.put(table + 16 * u64::from(index), &bytes);
    }

    /// Links `pieces` (address, length, writable), beginning with descriptor `first`.
    pub fn put_chain(&self, queue: usize, first: u16, pieces: &[(u64, u32, bool)]) {
        for (place, &(address, length, writable)) in pieces.iter().enumerate() {
            let index = first + place as u16;
            let last = place + 1 == pieces.len();
            let flags = if writable { WRITABLE } else { 0 } | if last { 0 } else { NEXT };
            let descriptor = Descriptor { address, length, flags, next: index + 1 };
            self.put_descriptor(Self::places(queue).0, index, descriptor);
        }
    }

    pub fn put_header(&self, address: u64, kind: u32, sector: u64) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(address, &bytes);
    }

    /// Makes `head` available, without a kick.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = Self::places(queue).1;
        let slot = u64::from(self.available[queue] % RING_SIZE);
        self.put(ring + 4 + 2 * slot, &head.to_le_bytes());
        self.available[queue] = self.available[queue].wrapping_add(1);
        self.put(ring + 2, &self.available[queue].to_le_bytes());
        // With the event index, requests an interrupt for the next request given back.
        self.put(ring + 4 + 2 * u64::from(RING_SIZE), &self.used[queue].to_le_bytes());
    }

    pub fn set_available(&mut self, queue: usize, index: u16) {
        self.available[queue] = index;
        self.put(Self::places(queue).1 + 2, &index.to_le_bytes());
    }

    pub fn kick(&self, queue: usize) {
        self.kicks[queue].write(1).unwrap();
    }

    pub fn used_index(&self, queue: usize) -> u16 {
        self.get_u16(Self::places(queue).2 + 2)
    }

    /// Waits for the next request given back: its head and written length; `None` after `limit`.
    pub fn wait_for(&mut self, queue: usize, limit: Duration) -> Option<(u32, u32)> {
        let start = Instant::now();
        while self.used_index(queue) == self.used[queue] {
            if start.elapsed() > limit {
                return None;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let slot = u64::from(self.used[queue] % RING_SIZE);
        let bytes = self.get(Self::places(queue).2 + 4 + 8 * slot, 8);
        self.used[queue] = self.used[queue].wrapping_add(1);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        Some((word(0), word(4)))
    }

    /// Sets the index up to which the client has processed the used ring.
    pub fn set_used(&mut self, queue: usize, index: u16) {
        self.used[queue] = index;
    }

    pub fn wait(&mut self, queue: usize) -> (u32, u32) {
        self.wait_for(queue, Duration::from_secs(20)).expect("the request is given back")
    }

    pub fn interrupts(&self, queue: usize) -> u64 {
        self.calls[queue].read().unwrap_or(0)
    }

    /// Offers a chain and waits for it. Returns the status byte at `status` and the written length.
    pub fn request_chain(
        &mut self,
        queue: usize,
        pieces: &[(u64, u32, bool)],
        status: u64,
    ) -> (u8, u32) {
        self.put(status, &[0xee]);
        self.put_chain(queue, 0, pieces);
        self.offer(queue, 0);
        self.kick(queue);
        let (head, written) = self.wait(queue);
        assert_eq!(head, 0);
        (self.get(status, 1)[0], written)
    }

    /// An ordinary request with one descriptor each for header, data and status.
    pub fn request(&mut self, queue: usize, kind: u32, sector: u64, data: &mut [u8]) -> u8 {
        let (header, status, place) = (DATA, DATA + 0x100, DATA + 0x1000);
        self.put_header(header, kind, sector);
        self.put(place, data);
        let fills = matches!(kind, READ | GET_ID);
        let mut pieces = vec![(header, 16, false)];
        if !data.is_empty() {
            pieces.push((place, data.len() as u32, fills));
        }
        pieces.push((status, 1, true));
        let (code, _) = self.request_chain(queue, &pieces, status);
        if fills {
            data.copy_from_slice(&self.get(place, data.len()));
        }
        code
    }

    /// Asserts that the queue still works.
    pub fn assert_works(&mut self, queue: usize) {
        let mut data = [0x5a; 512];
        assert_eq!(self.request(queue, WRITE, 3, &mut data), 0);
        let mut back = [0; 512];
        assert_eq!(self.request(queue, READ, 3, &mut back), 0);
        assert_eq!(data, back);
    }

    pub fn config(&mut self) -> Vec<u8> {
        let blank = [0; 60];
        let flags = VhostUserConfigFlags::WRITABLE;
        self.frontend.get_config(0, 60, flags, &blank).unwrap().1
    }

    pub fn capacity(&mut self) -> u64 {
        u64::from_le_bytes(self.config()[..8].try_into().unwrap())
    }

    /// Whether the daemon closes the connection within some seconds.
    pub fn is_disconnected(&self) -> bool {
        use std::io::Read as _;
        self.raw.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = [0; 4096];
        loop {
            match (&self.raw).read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }

    pub fn new_inflight(&mut self, queues: u16) -> (VhostUserInflight, File) {
        let request = VhostUserInflight::new(0, 0, queues, RING_SIZE);
        self.frontend.get_inflight_fd(&request).unwrap()
    }
}

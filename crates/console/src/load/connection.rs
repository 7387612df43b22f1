//! The connection to the server: negotiation, shared memory, queues.
use std::{
    io,
    mem::{self, MaybeUninit},
    ops::Range,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    sync::Arc,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::SocketAddrUnix,
};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
    virtio_blk_max_queues,
};

use super::{
    BlockOrder, DEPTH_MAX, LoadError, LoadOptions,
    memory::SharedMemory,
    memory_table::MemoryTable,
    verify::Ledger,
    worker::{Buffers, Worker, WorkerTask},
};
use crate::process::CpuClock;

/// The most descriptors of a queue; a request takes three.
const QUEUE_SIZE_MAX: u16 = 1024;

/// A negotiated session with the server.
pub struct Connection {
    transport: Box<VirtioBlkTransport>,
    features: VirtioBlkFeatureFlags,
    capacity: u64,
    /// A duplicate of the connected socket, which the driver library does not expose.
    socket: Option<OwnedFd>,
}

impl Connection {
    /// Connects and negotiates.
    pub fn open(options: &LoadOptions) -> Result<Self, LoadError> {
        let failed = |error| LoadError::Connect(options.socket.clone(), error);
        let path = options
            .socket
            .to_str()
            .ok_or_else(|| LoadError::Option("the socket's path is not UTF-8".into()))?;
        let wanted = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::RO.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::BLK_SIZE.bits()
            | VirtioBlkFeatureFlags::MQ.bits();
        let direct = if options.memory_table { None } else { Some(VhostUser::new(path, wanted)) };
        let transport: Box<VirtioBlkTransport> = Box::new(match direct {
            Some(Ok(transport)) => transport,
            // The library requires memory slots; this server does not have them.
            Some(Err(error)) if !error.to_string().contains("protocol features") => {
                return Err(failed(error));
            }
            Some(Err(_)) | None => {
                let table = MemoryTable::start(&options.socket).map_err(failed)?;
                let socket = table.socket();
                VhostUser::new(&socket.to_string_lossy(), wanted).map_err(failed)?
            }
        });
        let features = VirtioBlkFeatureFlags::from_bits_truncate(transport.get_features());
        let config = transport.get_config().map_err(failed)?;
        let capacity = { config.capacity }.to_native() * 512;
        let queues_max = virtio_blk_max_queues(&*transport).map_err(failed)?;
        if options.queues == 0 || usize::from(options.queues) > queues_max {
            return Err(LoadError::Option(format!(
                "the disk offers {}, but {} were requested",
                fathom_control::count(queues_max, "queue"),
                options.queues
            )));
        }
        let socket = connected_socket(&options.socket);
        Ok(Self { transport, features, capacity, socket })
    }

    /// Checks the options against the disk. Returns the range in whole blocks.
    pub fn range(&self, options: &LoadOptions) -> Result<Range<u64>, LoadError> {
        let refuse = |message: String| Err(LoadError::Option(message));
        let block_size = u64::from(options.block_size);
        if block_size == 0 || block_size % 512 != 0 || block_size > 16 << 20 {
            return refuse(format!(
                "block size {block_size}: must be a multiple of 512, at most 16 MiB"
            ));
        }
        if options.depth == 0 || options.depth > DEPTH_MAX {
            return refuse(format!("depth {}: must be from 1 to {DEPTH_MAX}", options.depth));
        }
        if options.read_percent > 100 {
            return refuse(format!("{} percent reads: at most 100", options.read_percent));
        }
        if options.read_percent < 100 && self.features.contains(VirtioBlkFeatureFlags::RO) {
            return refuse("the disk is read-only, but writes were requested".into());
        }
        let bytes = options.range.clone().unwrap_or(0..self.capacity);
        if bytes.end > self.capacity {
            return refuse(format!(
                "the range ends at {}, but the disk at {}",
                bytes.end, self.capacity
            ));
        }
        let blocks = bytes.start.div_ceil(block_size)..bytes.end / block_size;
        let needed = u64::from(options.queues) * u64::from(options.depth);
        if blocks.end.saturating_sub(blocks.start) < needed {
            return refuse(format!(
                "the range holds fewer than {needed} blocks of {block_size} bytes"
            ));
        }
        Ok(blocks)
    }

    /// Shares memory with the server, sets up the queues and hands each to a worker.
    pub fn workers(
        &mut self,
        options: &LoadOptions,
        range: &Range<u64>,
    ) -> Result<Vec<Worker>, LoadError> {
        let failed = |error| LoadError::Connect(options.socket.clone(), error);
        let queue_size = (options.depth * 4).next_power_of_two().clamp(128, QUEUE_SIZE_MAX);
        let queues = VirtioBlkQueue::<u16>::setup_queues(
            &mut *self.transport,
            options.queues.into(),
            queue_size,
        )
        .map_err(failed)?;

        let queue_length = usize::from(options.depth) * options.block_size as usize;
        let memory = SharedMemory::new(queue_length * usize::from(options.queues))
            .map_err(|error| LoadError::System("shared memory", error))?;
        let memory = Arc::new(memory);
        self.transport
            .map_mem_region(memory.address() as usize, memory.length(), memory.fd(), 0)
            .map_err(failed)?;

        let share = (range.end - range.start) / u64::from(options.queues);
        let workers = queues.into_iter().enumerate().map(|(index, queue)| {
            // Each queue has its own blocks if two concurrent requests for one block would disturb
            // the result; else each queue uses all blocks.
            let start = range.start + share * index as u64;
            let own = start..start + share;
            let split = options.verify || options.order == BlockOrder::Sequential;
            Worker::new(
                index,
                queue,
                self.transport.get_submission_notifier(index),
                self.transport.get_completion_fd(index),
                Buffers::new(Arc::clone(&memory), index * queue_length, options),
                WorkerTask {
                    order: options.order,
                    read_percent: options.read_percent,
                    waiting: options.waiting,
                    blocks: if split { own.clone() } else { range.clone() },
                    ledger: options.verify.then(|| Ledger::new(options.seed, own.start, share)),
                    flushes: self.features.contains(VirtioBlkFeatureFlags::FLUSH),
                    duplicate_percent: options.duplicate_percent,
                    warms_up: !options.warmup.is_zero(),
                    seed: options.seed + index as u64,
                },
            )
        });
        Ok(workers.collect())
    }

    /// The server's CPU clock, if its process is visible from here.
    pub fn server(&self) -> Option<CpuClock> {
        let mut credentials = MaybeUninit::<libc::ucred>::uninit();
        let mut length = mem::size_of::<libc::ucred>() as libc::socklen_t;
        // `rustix` cannot be used: its process IDs are never 0, but a server in another PID
        // namespace has 0.
        // SAFETY: the option writes a `ucred` of the given length, which is read only after
        // success.
        let credentials = unsafe {
            let failed = libc::getsockopt(
                self.socket.as_ref()?.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                credentials.as_mut_ptr().cast(),
                &raw mut length,
            );
            if failed != 0 {
                return None;
            }
            credentials.assume_init()
        };
        (credentials.pid > 0).then(|| CpuClock::of(credentials.pid)).flatten()
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut polls = [PollFd::new(socket, PollFlags::RDHUP)];
        let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        poll(&mut polls, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            && polls[0].revents().intersects(closed)
    }
}

/// The newest descriptor of this process that is connected to the path. The driver library does not
/// expose its socket, and a second connection would not help, because servers serve one at a time.
fn connected_socket(path: &Path) -> Option<OwnedFd> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    let mut fds: Vec<RawFd> = entries
        .filter_map(io::Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    fds.sort_unstable_by(|left, right| right.cmp(left));
    fds.into_iter().find_map(|fd| {
        // SAFETY: the descriptor is borrowed only to duplicate it. If another thread closes it
        // meanwhile, or it already names another file, the duplication fails or the path differs.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok()?;
        (peer_path(&socket)? == path.as_os_str().as_bytes()).then_some(socket)
    })
}

/// The path of a connected Unix socket's other end.
fn peer_path(socket: &OwnedFd) -> Option<Vec<u8>> {
    let address = rustix::net::getpeername(socket).ok()??;
    let address = SocketAddrUnix::try_from(address).ok()?;
    Some(address.path_bytes()?.to_vec())
}

//! One connection of a VMM: the vhost-user messages, and the rings that they set up.

mod leases;

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use fathom_block::Disk;
use fathom_guest_memory::{DirtyLog, MemoryOwner};
use parking_lot::Mutex;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::VhostUserOptions;
use super::config::{self, LOG_ALL};
use super::event::{self, Call};
use super::inflight::Inflight;
use super::live::Live;
use super::mailbox::{Due, RingThread, WorkerHandle};
use super::memory::{Memory, RegionLayout};
use super::observer::GuestObserver;
use super::ring::{RING_SIZE_MAX, Ring, RingAddresses, RingError};
use super::ring_right::RingRight;
use super::status::Counters;
use super::worker::WorkerStart;

/// The most memory regions of a guest: the protocol library's limit for one table.
const REGIONS_MAX: usize = 32;
/// The readable length of the configuration space, in bytes; the bytes past its end are zeroes.
const CONFIG_READ_MAX: usize = 256;

/// A ring as the messages have described it so far.
#[derive(Default)]
struct RingSetup {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<File>,
    call: Option<Call>,
    enabled: bool,
    worker: Option<WorkerHandle>,
}

/// The parameters of a new session.
pub(super) struct SessionStart {
    /// Counts up from 0 for each connection.
    pub number: u64,
    pub disk: Arc<Disk>,
    pub options: VhostUserOptions,
    pub observer: Arc<dyn GuestObserver>,
    pub counters: Arc<Counters>,
    pub live: Arc<Mutex<Live>>,
    pub right: Arc<RingRight>,
    pub memory_owner: Arc<MemoryOwner>,
}

/// One connection.
pub(super) struct Session {
    number: u64,
    disk: Arc<Disk>,
    options: VhostUserOptions,
    observer: Arc<dyn GuestObserver>,
    counters: Arc<Counters>,
    live: Arc<Mutex<Live>>,
    right: Arc<RingRight>,
    /// The owner of shared memory, to which its loss is reported.
    memory_owner: Arc<MemoryOwner>,
    memory: Memory,
    features: u64,
    protocol_features: u64,
    rings: Vec<RingSetup>,
    /// The threads that serve rings; each lives as long as it does so. The thread `n` modulo the
    /// number of threads serves the ring `n`.
    threads: Vec<Weak<RingThread>>,
    log: Option<Arc<DirtyLog>>,
    inflight: Option<Inflight>,
    /// Whether the session has closed: no ring starts any more.
    closed: bool,
}

fn invalid(text: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, text.into()))
}

/// The error of a ring that cannot start. A ring outside the guest's memory has a separate kind,
/// because memory that is not shared is missing from the VMM's table.
fn ring_refused(index: usize, error: RingError) -> Error {
    let kind = match error {
        RingError::Place => io::ErrorKind::AddrNotAvailable,
        RingError::Size | RingError::AvailableIndex | RingError::Head => {
            io::ErrorKind::InvalidInput
        }
    };
    failed(io::Error::new(kind, format!("queue {index}: {}", error.name())))
}

fn failed(error: io::Error) -> Error {
    Error::ReqHandlerError(error)
}

impl Session {
    pub(super) fn new(start: SessionStart) -> Self {
        let SessionStart { number, disk, options, observer, counters, live, right, memory_owner } =
            start;
        let rings = (0..options.queues).map(|_| RingSetup::default()).collect();
        let threads = usize::from(options.threads_or_default());
        counters.connections.fetch_add(1, Ordering::Relaxed);
        counters.warned.store(false, Ordering::Relaxed);
        Self {
            number,
            disk,
            options,
            observer,
            counters,
            live,
            right,
            memory: Memory::default(),
            memory_owner,
            features: 0,
            protocol_features: 0,
            rings,
            threads: std::iter::repeat_with(Weak::new).take(threads).collect(),
            log: None,
            inflight: None,
            closed: false,
        }
    }

    fn live(&self) -> parking_lot::MutexGuard<'_, Live> {
        self.live.lock()
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingSetup> {
        let count = self.rings.len();
        self.rings
            .get_mut(index as usize)
            .ok_or_else(|| invalid(format!("there is no queue {index}: the disk has {count}")))
    }

    fn event_index(&self) -> bool {
        config::has(self.features, VIRTIO_RING_F_EVENT_IDX)
    }

    /// The log to write, while the guest is being migrated.
    fn active_log(&self) -> Option<Arc<DirtyLog>> {
        (self.features & LOG_ALL != 0).then(|| self.log.clone()).flatten()
    }

    /// Starts a ring if it is completely described.
    fn start(&mut self, index: usize) -> Result<()> {
        let (event_index, log) = (self.event_index(), self.active_log());
        let setup = &mut self.rings[index];
        let (Some(addresses), true) = (setup.addresses, setup.size > 0) else { return Ok(()) };
        if setup.worker.is_some() || setup.kick.is_none() || self.closed {
            return Ok(());
        }
        let ring = Ring::open(&self.memory, addresses, setup.size, event_index, setup.base)
            .map_err(|error| ring_refused(index, error))?;
        let inflight = self.inflight.as_ref().and_then(|inflight| inflight.queue(index as u16));
        if inflight.as_ref().is_some_and(|inflight| inflight.size() < setup.size) {
            return Err(invalid(format!("queue {index} is larger than its in-flight memory")));
        }
        if !self.right.acquire(self.number) {
            let text = "another VMM's guest is running on this disk";
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, text)));
        }
        let Some(kick) = setup.kick.take() else { return Ok(()) };
        let call = setup.call.as_ref().map(Call::try_clone).transpose().map_err(failed)?;
        let enabled = setup.enabled;
        let first = !self.is_running();
        if first {
            self.observer.started(self.number, self.memory.guest());
        }
        let private_memory = Arc::clone(&self.live().private_memory);
        let start = WorkerStart {
            disk: Arc::clone(&self.disk),
            ring,
            kick,
            call,
            enabled,
            write_back: config::has(self.features, VIRTIO_BLK_F_FLUSH),
            log,
            inflight,
            private_memory,
            memory_owner: Arc::clone(&self.memory_owner),
            counters: Arc::clone(&self.counters),
        };
        let started = self.thread(index).and_then(|thread| WorkerHandle::start(start, thread));
        let worker = match started {
            Ok(worker) => worker,
            Err(error) => {
                if first {
                    self.observer.stopped(self.number);
                }
                return Err(failed(error));
            }
        };
        let wake = worker.wake();
        self.rings[index].worker = Some(worker);
        let mut live = self.live();
        // A change of layers may have begun before the ring's wake-up was in the list.
        wake.wake();
        live.wakes.push((index, wake));
        live.running_queues += 1;
        Ok(())
    }

    /// The thread that serves the ring `index`.
    fn thread(&mut self, index: usize) -> io::Result<Arc<RingThread>> {
        let number = index % self.threads.len();
        if let Some(thread) = self.threads[number].upgrade().filter(|thread| !thread.is_finished())
        {
            return Ok(thread);
        }
        let spin_ns = self.options.spin_ns;
        let thread = Arc::new(RingThread::start(&self.disk, number, spin_ns, &self.counters)?);
        self.threads[number] = Arc::downgrade(&thread);
        Ok(thread)
    }

    /// Stops a ring once nothing is in flight, and keeps the count of requests taken from it.
    /// `is_gone` is whether the VMM has gone, or does without what the disk holds.
    fn stop(&mut self, index: usize, is_gone: bool) {
        let setup = &mut self.rings[index];
        let Some(worker) = setup.worker.take() else { return };
        if let Some(base) = worker.stop(is_gone) {
            setup.base = base;
        }
        let mut live = self.live();
        live.wakes.retain(|(ring, _)| *ring != index);
        live.running_queues -= 1;
        drop(live);
        if !self.is_running() {
            self.observer.stopped(self.number);
            self.right.release(self.number);
        }
    }

    /// Whether any ring runs.
    pub(super) fn is_running(&self) -> bool {
        self.rings.iter().any(|ring| ring.worker.is_some())
    }

    /// Completes the requests in flight. No ring starts any more. `is_gone` is whether the VMM has
    /// gone.
    pub(super) fn close(&mut self, is_gone: bool) {
        self.stop_all(is_gone);
        if !std::mem::replace(&mut self.closed, true) {
            self.observer.ended(self.number);
        }
    }

    fn stop_all(&mut self, is_gone: bool) {
        for index in 0..self.rings.len() {
            self.stop(index, is_gone);
        }
    }

    /// Gives running rings the current memory, addresses and log. Their size and their kind of
    /// notification stay as they were at the start.
    fn refresh(&mut self) -> Result<()> {
        (0..self.rings.len()).try_for_each(|index| self.refresh_ring(index))
    }

    /// The same for one ring; the other rings do not wait for its requests.
    fn refresh_ring(&mut self, index: usize) -> Result<()> {
        let (memory, log) = (self.memory.clone(), self.active_log());
        let setup = &self.rings[index];
        let (Some(worker), Some(addresses)) = (&setup.worker, setup.addresses) else {
            return Ok(());
        };
        let refreshed = worker.update(Due::Idle, move |worker| {
            worker.ring = worker.ring.moved(&memory, addresses)?;
            worker.ring.disable_notifications();
            worker.log = log;
            Ok(())
        });
        match refreshed {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                let error: RingError = error;
                // The ring is no longer in the guest's memory, so it must not be accessed.
                self.stop(index, true);
                return Err(invalid(format!("queue {index}: {}", error.name())));
            }
            None => self.stop(index, true),
        }
        Ok(())
    }

    fn set_memory(&mut self, memory: Memory) -> Result<()> {
        self.live().memory = memory.guest().clone();
        self.memory = memory;
        let refreshed = self.refresh();
        if self.is_running() {
            self.observer.moved(self.number, self.memory.guest());
        }
        refreshed
    }

    /// The owner of shared memory, to which its loss is reported.
    pub(super) fn memory_owner(&self) -> &Arc<MemoryOwner> {
        &self.memory_owner
    }

    /// The guest's memory as the VMM announced it.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Sets the channel for the daemon's own messages, which the VMM has handed over.
    pub(super) fn set_channel(&self, channel: UnixStream) {
        self.live().channel = Some(channel);
    }

    fn reset(&mut self) {
        self.stop_all(true);
        // What is recorded as in flight is the earlier device's.
        if let Some(inflight) = &self.inflight {
            inflight.clear();
        }
        for setup in &mut self.rings {
            *setup = RingSetup::default();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close(true);
        self.right.release(self.number);
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&self.disk))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config::features(&self.disk) != 0 {
            return Err(invalid("the VMM accepts features that were not offered"));
        }
        let changed = self.features ^ features;
        self.features = features;
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            for setup in &mut self.rings {
                setup.enabled = true;
            }
        }
        let log = self.active_log();
        let mut live = self.live();
        live.features = features;
        live.logging = features & LOG_ALL != 0;
        live.log = log;
        drop(live);
        if changed & LOG_ALL != 0 { self.refresh() } else { Ok(()) }
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        if regions.len() != files.len() || regions.len() > REGIONS_MAX {
            return Err(Error::IncorrectFds);
        }
        let mut memory = Memory::default();
        for (region, file) in regions.iter().zip(files) {
            let layout = RegionLayout {
                guest_address: region.guest_phys_addr,
                length: region.memory_size,
                user_address: region.user_addr,
                file_offset: region.mmap_offset,
            };
            memory.add(layout, file, &self.memory_owner).map_err(failed)?;
        }
        self.replace_memory(memory)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        let valid = u16::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= RING_SIZE_MAX);
        let ring = self.ring(index)?;
        let size = valid.ok_or_else(|| {
            invalid(format!("a ring of {size} entries is invalid: use a power of two up to 1024"))
        })?;
        if ring.worker.is_some() && ring.size != size {
            return Err(invalid(format!("queue {index} runs: its size cannot change")));
        }
        ring.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = RingAddresses { descriptors, available, used };
        self.ring(index)?.addresses = Some(addresses);
        self.refresh_ring(index as usize)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.ring(index)?.base = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        self.stop(index as usize, false);
        let setup = self.ring(index)?;
        setup.kick = None;
        setup.call = None;
        Ok(VhostUserVringState::new(index, u32::from(setup.base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?;
        let index = usize::from(index);
        self.stop(index, false);
        let Some(file) = file else {
            return Err(invalid("a queue without a kick descriptor is not served"));
        };
        event::check(&file, "kick").map_err(failed)?;
        self.rings[index].kick = Some(file);
        self.start(index)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let setup = self.ring(u32::from(index))?;
        setup.call = file.map(Call::new).transpose().map_err(failed)?;
        let call = setup.call.as_ref().map(Call::try_clone).transpose().map_err(failed)?;
        if let Some(worker) = &setup.worker {
            worker.update(Due::AtOnce, move |worker| {
                worker.call = call;
                // A pending interrupt may have gone to the old descriptor.
                worker.interrupt();
            });
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _file: Option<File>) -> Result<()> {
        self.ring(u32::from(index)).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(config::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol_features = features;
        self.live().protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let setup = self.ring(index)?;
        setup.enabled = enable;
        if let Some(worker) = &setup.worker {
            worker.update(Due::AtOnce, move |worker| worker.enabled = enable);
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let mut space = [0; CONFIG_READ_MAX];
        let known = config::space(&self.disk, self.options.queues);
        space[..known.len()].copy_from_slice(&known);
        let (start, length) = (offset as usize, size as usize);
        let end = start.checked_add(length).ok_or(Error::InvalidParam)?;
        space.get(start..end).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("no field of the configuration space can be written"))
    }

    fn set_backend_req_fd(&mut self, _backend: Backend) {
        // The descriptor has already been copied from the message; see `set_channel`.
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no display"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a disk shares no objects"))
    }

    fn get_inflight_fd(
        &mut self,
        request: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let (inflight, file, length) =
            Inflight::create(request.num_queues, request.queue_size, &self.memory_owner)
                .map_err(failed)?;
        self.inflight = Some(inflight);
        self.live().inflight = true;
        Ok((VhostUserInflight::new(length, 0, request.num_queues, request.queue_size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *given;
        let part = (mmap_offset, mmap_size);
        let inflight = Inflight::open(&file, part, num_queues, queue_size, &self.memory_owner)
            .map_err(failed)?;
        self.inflight = Some(inflight);
        self.live().inflight = true;
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        if self.memory.guest().regions().len() >= REGIONS_MAX {
            return Err(invalid("the guest has too many memory regions"));
        }
        let layout = RegionLayout {
            guest_address: region.guest_phys_addr,
            length: region.memory_size,
            user_address: region.user_addr,
            file_offset: region.mmap_offset,
        };
        let mut memory = self.memory.clone();
        memory.add(layout, file, &self.memory_owner).map_err(failed)?;
        self.replace_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let mut memory = self.memory.clone();
        if !memory.remove(region.guest_phys_addr, region.memory_size) {
            return Err(invalid("there is no such memory region to be removed"));
        }
        self.replace_memory(memory)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device has no state beyond its rings"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("the device has no state beyond its rings"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("the device has no shared memory regions"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::new(&file, log.mmap_offset, log.mmap_size, &self.memory_owner)
            .map_err(failed)?;
        self.log = Some(Arc::new(log));
        let log = self.active_log();
        self.live().log = log;
        self.refresh()
    }
}

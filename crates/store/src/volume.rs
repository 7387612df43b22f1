//! A volume or a snapshot as a back end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Figure,
    Geometry, Operation, StoreAccess,
};
use parking_lot::Mutex;

use crate::error::PoolError;
use crate::figures::of_sharing;
use crate::layout::BLOCK;
use crate::pool::{Inner, Pool};
use crate::queue::{StoreQueue, Wanted};
use crate::recent::RecentReads;

/// See the module.
#[derive(Clone)]
pub(crate) struct StoreVolume {
    use_: Arc<Use>,
    inner: Arc<Inner>,
    wanted: Wanted,
    capacity: Arc<AtomicU64>,
    recent: Arc<Mutex<RecentReads>>,
}

/// The use of volumes or snapshots, which ends when this is dropped.
struct Use {
    pool: Pool,
    wanted: Wanted,
}

impl Drop for Use {
    fn drop(&mut self) {
        self.pool.release(self.wanted);
    }
}

impl StoreVolume {
    pub(crate) fn new(pool: Pool, inner: Arc<Inner>, wanted: Wanted, size: u64) -> Self {
        let use_ = Arc::new(Use { pool, wanted });
        let (capacity, recent) = (Arc::new(AtomicU64::new(size)), Arc::default());
        Self { use_, inner, wanted, capacity, recent }
    }

    /// Zeroes the rest of the block in which a smaller volume ends: what is cut off does not come
    /// back.
    fn zero_end(&self, size: u64) -> io::Result<()> {
        let end = size.next_multiple_of(BLOCK).min(self.capacity());
        if end <= size {
            return Ok(());
        }
        let this: Arc<dyn Backend> = Arc::new(self.clone());
        let mut access = StoreAccess::open(&this)?;
        access.carry_out_long(Operation::WriteZeroes, size, end - size, &mut [])
    }
}

impl Backend for StoreVolume {
    fn name(&self) -> &'static str {
        "store"
    }

    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    fn geometry(&self) -> Geometry {
        Geometry { physical_block_size: BLOCK as u32, ..Geometry::default() }
    }

    fn capabilities(&self) -> Capabilities {
        let below = self.inner.device.capabilities();
        let all = Capabilities { rotational: below.rotational, ..Capabilities::ALL };
        match self.wanted {
            Wanted::Volume(_) if below.write => all,
            Wanted::Volume(_) | Wanted::Snapshot(_) | Wanted::Difference(_) | Wanted::Nothing => {
                all.read_only()
            }
        }
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let device = self.inner.device.open_queue(context)?;
        let waker = context.waker()?;
        let in_kernel = context.reactor().pending();
        let inner = Arc::clone(&self.inner);
        let recent = Arc::clone(&self.recent);
        Ok(Box::new(StoreQueue::new(inner, self.wanted, recent, device, (waker, in_kernel))))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let Wanted::Volume(id) = self.wanted else { return Err(ErrorKind::ReadOnly) };
        let before = self.capacity();
        if capacity < before {
            self.zero_end(capacity).map_err(|_| ErrorKind::Io)?;
            self.capacity.store(capacity, Ordering::Relaxed);
        }
        let resized = self.use_.pool.resize(id, capacity);
        self.capacity.store(self.use_.pool.size_of(id), Ordering::Relaxed);
        resized.map_err(|error| match error {
            PoolError::Refused(_) => ErrorKind::Misaligned,
            PoolError::Full => ErrorKind::NoSpace,
            PoolError::NoPool(_)
            | PoolError::NotBlank
            | PoolError::TooShort(_)
            | PoolError::BadSize(_)
            | PoolError::Damaged(_)
            | PoolError::Failed(_)
            | PoolError::Device(_) => ErrorKind::Io,
        })
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let mut problems = self.inner.device.problems();
        if let Some(text) = self.use_.pool.damage() {
            problems.push(BackendProblem::ContentWrong { text });
        }
        problems
    }

    fn figures(&self) -> Vec<Figure> {
        let status = self.use_.pool.status();
        let counts = &status.counts;
        let mut figures = vec![
            Figure::gauge("pool_bytes", "The bytes of the pool.", status.bytes),
            Figure::gauge("pool_used_bytes", "The bytes of the pool in use.", status.used_bytes),
            Figure::gauge(
                "pool_guaranteed_bytes",
                "The free bytes of the pool that are kept for guarantees.",
                status.guaranteed_bytes,
            ),
            Figure::gauge("pool_memory_bytes", "The memory of the pool.", status.memory_bytes),
            Figure::counter(
                "pool_written_blocks_total",
                "The blocks that volumes of the pool wrote.",
                counts.written_blocks,
            ),
            Figure::counter(
                "pool_map_pages_total",
                "The pages of maps that the pool wrote.",
                counts.map_pages,
            ),
            Figure::counter(
                "pool_page_copies_total",
                "The second copies of pages of maps that the pool wrote.",
                counts.page_copies,
            ),
            Figure::counter(
                "pool_mended_pages_total",
                "The pages of maps of which one copy was damaged, and that were written anew.",
                counts.mended_pages,
            ),
            Figure::counter(
                "pool_map_reads_total",
                "The pages of maps that the pool read.",
                counts.map_reads,
            ),
            Figure::counter(
                "pool_checkpoints_total",
                "The checkpoints of the pool.",
                counts.checkpoints,
            ),
            Figure::counter(
                "pool_walk_freed_blocks_total",
                "The blocks that the pool's walks freed.",
                counts.walk_freed_blocks,
            ),
            Figure::counter(
                "pool_wrong_blocks_total",
                "The blocks that had other content than was written.",
                counts.wrong_blocks,
            ),
        ];
        figures.extend(of_sharing(&status));
        figures
    }

    fn losses(&self) -> u64 {
        self.inner.device.losses()
    }

    fn inspect(&self) {
        self.inner.device.inspect();
    }

    fn recover(&self) -> io::Result<()> {
        self.inner.device.recover()
    }

    fn save_state(&self, limit: Duration) -> io::Result<()> {
        self.use_.pool.save(limit)
    }
}

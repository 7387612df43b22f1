//! The process of I/O for which no task waits, from the kernel's control block of it
//! (`struct kiocb`).
//!
//! The function that is called at the completion shows whose block it is:
//!
//! - With `io_uring` it is a part of the ring's request (`io_kiocb`), which has the task that
//!   submitted it, or that task's part of `io_uring` (`io_uring_task`, from 6.13 on).
//! - With libaio it is a part of `aio_kiocb`, whose context (`kioctx`) has no task. The programs
//!   that share the context have its ring in their memory, and the table of contexts of that memory
//!   has the context; the memory has an owner.
//! - overlayfs submits a block of its own for one of its files, which refers to the program's.

use crate::completion::Meaning;
use crate::kernel::Kernel;

/// The most control blocks of file systems above each other.
const STACKED_MAX: usize = 4;
/// The most mappings of a ring that are examined: a process that was forked has one, too.
const MAPPINGS_MAX: usize = 64;
/// The most contexts of a process (`aio_max_nr` limits them to fewer).
const CONTEXTS_MAX: u32 = 1 << 20;

/// The owner of a control block, by its completion function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submitter {
    /// A request of `io_uring`.
    Ring,
    /// A request of libaio.
    Context,
    /// A file system above another one, with `backing_aio`.
    Backing,
    /// overlayfs before 6.8, with `ovl_aio_req`.
    Overlay,
}

/// Who submitted I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// This task.
    Task(u64),
    /// It is not known: the function at this address completes it, and perhaps belongs to a module
    /// that was loaded later.
    Function(u64),
    /// It is not known.
    Unknown,
}

impl Submission {
    /// The task, if it is known.
    pub fn of(task: Option<u64>) -> Self {
        task.map_or(Self::Unknown, Self::Task)
    }
}

/// The completion functions of control blocks by name.
pub(crate) const SUBMITTERS: &[(&str, Submitter)] = &[
    ("io_complete_rw", Submitter::Ring),
    ("io_complete_rw_iopoll", Submitter::Ring),
    ("aio_complete_rw", Submitter::Context),
    ("backing_aio_rw_complete", Submitter::Backing),
    ("backing_aio_queue_completion", Submitter::Backing),
    ("ovl_aio_rw_complete", Submitter::Overlay),
    ("ovl_aio_queue_completion", Submitter::Overlay),
];

impl Kernel {
    /// The task of the process that submitted the I/O of a control block.
    pub(crate) fn submitter(&self, block: u64) -> Submission {
        let layout = &self.layout;
        let mut block = block;
        for _ in 0..STACKED_MAX {
            let complete = self.pointer(block.wrapping_add(layout.kiocb_complete));
            let Some(complete) = complete else { return Submission::Unknown };
            let Some(Meaning::Submitter(submitter)) = self.meanings.get(complete) else {
                return Submission::Function(complete);
            };
            let above = |own: Option<u64>, original: Option<u64>| {
                self.pointer(block.wrapping_sub(own?).wrapping_add(original?))
            };
            let next = match submitter {
                Submitter::Ring => return Submission::of(self.ring_task(block)),
                Submitter::Context => return Submission::of(self.context_task(block)),
                Submitter::Backing => above(layout.backing_block, layout.backing_original),
                Submitter::Overlay => above(layout.overlay_block, layout.overlay_original),
            };
            match next {
                Some(next) => block = next,
                None => break,
            }
        }
        Submission::Unknown
    }

    /// The task of a request of `io_uring`, which begins with its control block.
    pub(crate) fn ring_task(&self, block: u64) -> Option<u64> {
        let layout = &self.layout;
        if let Some(place) = layout.ring_task {
            return self.pointer(block.wrapping_add(place));
        }
        let context = self.pointer(block.wrapping_add(layout.ring_context?))?;
        self.pointer(context.wrapping_add(layout.ring_context_task?))
    }

    /// The task that owns the memory with the context of a request of libaio.
    fn context_task(&self, block: u64) -> Option<u64> {
        let layout = &self.layout;
        let request = block.wrapping_sub(layout.aio_block?);
        let context = self.pointer(request.wrapping_add(layout.aio_context?))?;
        let number = self.u32(context.wrapping_add(layout.context_number?))?;
        let ring = self.pointer(context.wrapping_add(layout.context_ring?))?;
        let mapping = self.pointer(ring.wrapping_add(layout.file_mapping?))?;
        let root = self.pointer(mapping.wrapping_add(layout.mapping_areas?))?;
        // Nodes of the tree that are still to be examined. Each step takes one out and adds at most
        // two, so a torn tree ends the search as well.
        let mut nodes = [root; MAPPINGS_MAX + 1];
        let mut count = 1_usize;
        for _ in 0..MAPPINGS_MAX {
            let Some(last) = count.checked_sub(1) else { break };
            count = last;
            let node = nodes[last];
            let area = node.wrapping_sub(layout.area_link?);
            let memory = self.pointer(area.wrapping_add(layout.area_memory?));
            if let Some(memory) = memory.filter(|memory| self.has_context(*memory, context, number))
            {
                return self.pointer(memory.wrapping_add(layout.memory_owner?));
            }
            for place in [layout.node_left?, layout.node_right?] {
                let child = self.pointer(node.wrapping_add(place));
                if let Some(child) = child.filter(|_| count < nodes.len()) {
                    nodes[count] = child;
                    count += 1;
                }
            }
        }
        None
    }

    /// Whether the table of a memory's contexts has this one at its number.
    fn has_context(&self, memory: u64, context: u64, number: u32) -> bool {
        let layout = &self.layout;
        let has = || {
            let table = self.pointer(memory.wrapping_add(layout.memory_contexts?))?;
            let count = self.u32(table.wrapping_add(layout.table_count?))?;
            if number >= count.min(CONTEXTS_MAX) {
                return None;
            }
            let entry = layout.table_entries?.wrapping_add(8 * u64::from(number));
            Some(self.u64(table.wrapping_add(entry))? == context)
        };
        has().unwrap_or(false)
    }
}

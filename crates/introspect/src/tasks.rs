//! The guest's tasks.

use std::collections::HashSet;

use crate::kernel::Kernel;

/// The most tasks that are returned.
const TASKS_MAX: usize = 1 << 16;
/// The longest name of a command, in bytes (`TASK_COMM_LEN`).
const COMMAND_MAX: usize = 16;

/// A process of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The process number.
    pub process_id: u32,
    /// The command's name, at most 15 bytes.
    pub command: String,
    /// The start, in hundredths of a second since the guest's boot, modulo 2³²; 0 if unknown.
    pub start: u32,
}

/// The flag of a task that is a thread of the kernel (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = 0x0020_0000;
/// The length of a tick of a process's start, in nanoseconds.
const TICK_NS: u64 = 10_000_000;

impl Kernel {
    /// The current processes (thread groups), including kernel threads but not the idle tasks. A
    /// list that changes while it is read ends early.
    pub fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        // A torn list may lead back to its middle.
        let mut seen = HashSet::new();
        let Some(first) = self.places.first_task else { return tasks };
        let mut task = first;
        while tasks.len() < TASKS_MAX {
            let Some(next) = self.pointer(task.wrapping_add(self.layout.task_list)) else { break };
            task = next.wrapping_sub(self.layout.task_list);
            if task == first || !seen.insert(task) {
                break;
            }
            let Some(found) = self.task(task) else { break };
            tasks.push(found);
        }
        tasks
    }

    /// The process of the `task_struct` at an address.
    pub(crate) fn task(&self, address: u64) -> Option<Task> {
        let process_id = self.u32(address.wrapping_add(self.layout.task_process))?;
        let mut named = address;
        if let Some(place) = self.layout.task_leader {
            named = self.pointer(address.wrapping_add(place))?;
            // The structures check each other, so an invalid address is detected.
            if self.pointer(named.wrapping_add(place)) != Some(named)
                || self.u32(named.wrapping_add(self.layout.task_process)) != Some(process_id)
            {
                return None;
            }
        }
        let command = self.text(named.wrapping_add(self.layout.task_command), COMMAND_MAX)?;
        // Process numbers are below PID_MAX_LIMIT.
        let start = self.start_ns(named).map_or(0, start_of);
        ((1..=4 << 20).contains(&process_id) && !command.is_empty()).then_some(Task {
            process_id,
            command,
            start,
        })
    }

    /// The start of a task, in nanoseconds since the guest's boot.
    pub(crate) fn start_ns(&self, task: u64) -> Option<u64> {
        self.u64(task.wrapping_add(self.layout.task_start?))
    }

    /// Whether a task is a thread of the kernel.
    pub(crate) fn is_kernel_thread(&self, task: u64) -> bool {
        let flags = || self.u32(task.wrapping_add(self.layout.task_flags?));
        flags().is_some_and(|flags| flags & KERNEL_THREAD != 0)
    }
}

/// The start of a process in hundredths of a second, from nanoseconds.
pub(crate) fn start_of(start_ns: u64) -> u32 {
    (start_ns / TICK_NS) as u32
}

/// The size and the alignment of a kernel stack (`THREAD_SIZE`).
pub(crate) const STACK: u64 = 16 << 10;
/// The number of stacks in a queue's cache; a power of two.
const STACKS: usize = 64;
/// The threads that a search examines, the youngest processes first, and the shortest time between
/// two searches. So searches take less than a hundredth of a queue's time.
const THREADS_MAX: usize = 512;
const SEARCH_PAUSE_NS: u64 = 20_000_000;

/// A cache of the tasks of kernel stacks, for one queue. An entry is checked before each use.
pub(crate) struct StackCache {
    /// The address of a stack and of its task.
    tasks: Box<[(u64, u64)]>,
    searched_ns: Option<u64>,
}

impl Default for StackCache {
    fn default() -> Self {
        Self { tasks: vec![(0, 0); STACKS].into(), searched_ns: None }
    }
}

impl StackCache {
    /// The task that waits for a `completion` on its stack, or is about to.
    pub fn waiter(&mut self, kernel: &Kernel, completion: u64, now_ns: u64) -> Option<u64> {
        let place = kernel.layout.task_stack?;
        let stack = completion & !(STACK - 1);
        // A task that has ended has no stack.
        if stack == 0 || completion % 8 != 0 {
            return None;
        }
        let is_of = |task: u64| task != 0 && kernel.u64(task.wrapping_add(place)) == Some(stack);
        let entry = &mut self.tasks[(stack / STACK) as usize & (STACKS - 1)];
        if entry.0 == stack && is_of(entry.1) {
            return Some(entry.1);
        }
        let mut found = kernel.completion_waiter(completion).filter(|task| is_of(*task));
        let is_due = self
            .searched_ns
            .is_none_or(|searched_ns| now_ns.saturating_sub(searched_ns) >= SEARCH_PAUSE_NS);
        if found.is_none() && is_due {
            self.searched_ns = Some(now_ns);
            found = kernel.find_thread(is_of);
        }
        *entry = (stack, found?);
        found
    }
}

impl Kernel {
    /// The first task that waits for a `completion`.
    pub(crate) fn completion_waiter(&self, completion: u64) -> Option<u64> {
        let layout = &self.layout;
        let list = completion.wrapping_add(layout.completion_waiters?);
        let first = self.pointer(list)?;
        // The link of the first one points back.
        if first == list || self.u64(first.wrapping_add(8)) != Some(list) {
            return None;
        }
        self.pointer(first.wrapping_sub(layout.waiter_link?).wrapping_add(layout.waiter_task?))
    }

    /// The first of some threads for which `is_it` holds, from the youngest process on.
    fn find_thread(&self, is_it: impl Fn(u64) -> bool) -> Option<u64> {
        let layout = &self.layout;
        let end = self.places.first_task?;
        let mut leader = end;
        let mut left = THREADS_MAX;
        while left > 0 {
            // The list leads from the first task to the youngest and back.
            let before = leader.wrapping_add(layout.task_list).wrapping_add(8);
            leader = self.pointer(before)?.wrapping_sub(layout.task_list);
            if leader == end {
                return None;
            }
            let signal = self.pointer(leader.wrapping_add(layout.task_signal?))?;
            let threads = signal.wrapping_add(layout.signal_threads?);
            let mut next = self.pointer(threads)?;
            while next != threads && left > 0 {
                left -= 1;
                let thread = next.wrapping_sub(layout.task_thread?);
                if is_it(thread) {
                    return Some(thread);
                }
                next = self.pointer(next)?;
            }
            // A torn list of threads may be empty.
            left = left.saturating_sub(1);
        }
        None
    }
}

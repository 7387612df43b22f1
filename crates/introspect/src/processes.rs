//! The processes of a guest: what they have read and written by the kernel's accounts, and the
//! system calls about files in which their threads wait.
//!
//! A thread that sleeps has saved its registers at the upper end of its kernel stack: the number of
//! the system call, and the call's arguments.

use std::collections::HashSet;
use std::time::Duration;

use fathom_insight::{Facts, Names};
use fathom_intercept::system_call;

use crate::dirty::Budget;
use crate::files::FileCache;
use crate::groups::GroupCache;
use crate::kernel::{Kernel, Object};
use crate::tasks::STACK;

/// The most processes that are returned, and the most threads that are examined.
const PROCESSES_MAX: usize = 1 << 16;
const THREADS_MAX: u64 = 1 << 17;
/// The most calls that are returned.
const CALLS_MAX: usize = 1 << 14;
/// The longest time of a search.
const TIME_MAX: Duration = Duration::from_secs(2);
/// The bytes that a kernel may leave free above the saved registers
/// (`TOP_OF_KERNEL_STACK_PADDING`).
const PADS: [u64; 2] = [0, 16];
/// The code segment of 64-bit programs (`__USER_CS`).
const USER_SEGMENT: u64 = 0x33;
/// The bit of the state of a task that cannot be woken by a signal (`TASK_UNINTERRUPTIBLE`).
const UNINTERRUPTIBLE: u32 = 2;
/// The place of the clock in the structure of its lock and itself (`tk_core`).
const CLOCK_PLACE: u64 = 8;
const SECOND_NS: u64 = 1_000_000_000;

/// The process of a guest.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// The process number.
    pub process_id: u32,
    /// The number of its parent; 0 if it has none.
    pub parent_id: u32,
    /// The command's name, at most 15 bytes.
    pub command: String,
    /// The start, in nanoseconds since the guest's boot.
    pub start_ns: Option<u64>,
    /// The path of its control group; empty if unknown.
    pub cgroup: String,
    /// Whether it is a thread of the kernel.
    pub is_kernel: bool,
    /// The number of its threads.
    pub threads: u32,
    /// The bytes that it has made the kernel read from disks (`read_bytes`), including those of
    /// threads that have ended and of children that it has waited for.
    pub read_bytes: Option<u64>,
    /// The bytes of pages that it has made dirty (`write_bytes`), and of direct I/O; the same.
    pub dirtied_bytes: Option<u64>,
    /// The bytes of dirty pages that it has removed before they were written, by truncating or
    /// deleting files (`cancelled_write_bytes`); the same.
    pub cancelled_bytes: Option<u64>,
    /// The system calls about files in which its threads wait.
    pub calls: Vec<WaitingCall>,
}

/// A system call in which a thread waits.
#[derive(Clone, Debug)]
pub struct WaitingCall {
    /// The thread's number.
    pub thread_id: u32,
    /// The name of the call.
    pub call: &'static str,
    /// The file that it reads, writes or makes durable; unknown for `sync`.
    pub file: Facts,
    /// The file from which it copies, if the call copies files.
    pub source: Option<Facts>,
    /// Whether the thread waits for a device or a lock of the kernel (`D` in `ps`).
    pub is_uninterruptible: bool,
}

/// The processes of a guest.
#[derive(Clone, Debug, Default)]
pub struct Processes {
    /// The processes, in the order of their start.
    pub processes: Vec<Process>,
    /// Whether the list was read to its end. Otherwise the guest changed it meanwhile, or it is too
    /// long.
    pub is_whole: bool,
    /// The time since the guest's boot, in nanoseconds, to a second or, of an idle guest, to some
    /// seconds.
    pub uptime_ns: Option<u64>,
}

/// The calls about files in which threads wait, by their numbers, in order.
const WAITS: &[u64] = &[
    0, 1, 17, 18, 19, 20, 26, 40, 73, 74, 75, 77, 78, 162, 217, 275, 277, 285, 295, 296, 306, 326,
    327, 328,
];

/// A walk through all processes.
struct Walk<'k> {
    kernel: &'k Kernel,
    names: &'k Names,
    files: FileCache,
    groups: GroupCache,
    budget: Budget,
    calls: usize,
}

impl Kernel {
    /// The processes with their accounts of I/O, and the calls about files in which their threads
    /// wait. Takes about half a microsecond for each thread, and about 2 µs for each call. `names`
    /// gets the texts of the files.
    pub fn processes(&self, names: &Names) -> Processes {
        let mut found = Processes { uptime_ns: self.uptime_ns(), ..Processes::default() };
        let mut walk = Walk {
            kernel: self,
            names,
            files: FileCache::default(),
            groups: GroupCache::default(),
            budget: Budget::new(THREADS_MAX, TIME_MAX),
            calls: 0,
        };
        let Some(first) = self.places.first_task else { return found };
        let mut seen = HashSet::new();
        let mut leader = first;
        while found.processes.len() < PROCESSES_MAX {
            let next = self.pointer(leader.wrapping_add(self.layout.task_list));
            let Some(next) = next else { return found };
            leader = next.wrapping_sub(self.layout.task_list);
            if leader == first {
                found.is_whole = true;
                break;
            }
            if !seen.insert(leader) {
                break;
            }
            let Some(process) = walk.process(leader) else { break };
            found.processes.push(process);
        }
        found
    }

    /// The time since the guest's boot.
    fn uptime_ns(&self) -> Option<u64> {
        let layout = &self.layout;
        let clock = self.places.clock?.wrapping_add(layout.clock_of_core.unwrap_or(CLOCK_PLACE));
        let seconds = self.u64(clock.wrapping_add(layout.clock_seconds?))?;
        let suspended = self.u64(clock.wrapping_add(layout.clock_suspended?))?;
        // A clock of more than a century is torn.
        seconds.checked_mul(SECOND_NS)?.checked_add(suspended).filter(|ns| *ns < 1 << 62)
    }

    /// The saved registers of a thread that sleeps in a system call of a 64-bit program.
    fn registers(&self, thread: u64) -> Option<Object<'_>> {
        let layout = &self.layout;
        let top = self.pointer(thread.wrapping_add(layout.task_stack?))?.wrapping_add(STACK);
        PADS.iter().find_map(|pad| {
            let registers = self.object(top.wrapping_sub(pad + layout.registers_size?));
            let segment = registers.u64(layout.registers_segment?)?;
            (segment & 0xffff == USER_SEGMENT).then_some(registers)
        })
    }

    /// The inode of the file with this descriptor of a thread.
    fn inode_of_descriptor(&self, thread: u64, descriptor: u64) -> Option<u64> {
        let layout = &self.layout;
        let files = self.pointer(thread.wrapping_add(layout.task_files?))?;
        let table = self.pointer(files.wrapping_add(layout.files_table?))?;
        let descriptor = descriptor & 0xffff_ffff;
        if descriptor >= u64::from(self.u32(table.wrapping_add(layout.file_count?))?) {
            return None;
        }
        let list = self.pointer(table.wrapping_add(layout.file_list?))?;
        let file = self.pointer(list.wrapping_add(8 * descriptor))?;
        self.pointer(file.wrapping_add(layout.file_inode))
    }
}

impl Walk<'_> {
    /// The process of a thread group's leader. `None` if it is torn, or if there was not enough
    /// time.
    fn process(&mut self, leader: u64) -> Option<Process> {
        let kernel = self.kernel;
        let layout = &kernel.layout;
        let task = kernel.task(leader)?;
        let parent = || {
            let parent = kernel.pointer(leader.wrapping_add(layout.task_parent?))?;
            kernel.u32(parent.wrapping_add(layout.task_process))
        };
        let mut process = Process {
            process_id: task.process_id,
            parent_id: parent().unwrap_or(0),
            command: task.command,
            start_ns: kernel.start_ns(leader),
            cgroup: self.group(leader).unwrap_or_default(),
            is_kernel: kernel.is_kernel_thread(leader),
            ..Process::default()
        };
        let signal =
            layout.task_signal.and_then(|place| kernel.pointer(leader.wrapping_add(place)));
        if let Some((signal, place)) = signal.zip(layout.signal_account) {
            add_account(kernel, signal.wrapping_add(place), &mut process);
        }
        let threads = || {
            let head = signal?.wrapping_add(layout.signal_threads?);
            Some((head, layout.task_thread?))
        };
        let Some((head, place)) = threads() else {
            self.budget.take(1)?;
            self.thread(leader, &mut process);
            return Some(process);
        };
        let mut link = kernel.pointer(head)?;
        while link != head {
            self.budget.take(1)?;
            self.thread(link.wrapping_sub(place), &mut process);
            link = kernel.pointer(link)?;
        }
        Some(process)
    }

    /// The path of the control group of a task.
    fn group(&mut self, task: u64) -> Option<String> {
        let kernel = self.kernel;
        let state = kernel.group_of_task(task)?;
        self.groups.begin();
        let found = self.groups.group(kernel, self.names, state, 0)?;
        Some(self.names.text(found.name)?.to_string())
    }

    /// Adds a thread to its process: the account, and the call in which it waits.
    fn thread(&mut self, thread: u64, process: &mut Process) {
        let layout = &self.kernel.layout;
        process.threads += 1;
        if let Some(place) = layout.task_account {
            add_account(self.kernel, thread.wrapping_add(place), process);
        }
        if !process.is_kernel && self.calls < CALLS_MAX {
            if let Some(call) = self.call(thread) {
                self.calls += 1;
                process.calls.push(call);
            }
        }
    }

    /// The call about a file in which a thread waits.
    fn call(&mut self, thread: u64) -> Option<WaitingCall> {
        let kernel = self.kernel;
        let layout = &kernel.layout;
        // The registers of a thread that runs may be those of an earlier call.
        let state =
            kernel.u32(thread.wrapping_add(layout.task_state?)).filter(|state| *state != 0)?;
        let registers = kernel.registers(thread)?;
        let number = registers.u64(layout.registers_call?)?;
        let call = system_call(number).filter(|_| WAITS.binary_search(&number).is_ok())?;
        let mut file = |argument: u8| {
            let place = match argument {
                0 => layout.registers_first,
                1 => layout.registers_second,
                _ => layout.registers_third,
            };
            let inode = kernel.inode_of_descriptor(thread, registers.u64(place?)?)?;
            self.files.begin();
            Some(self.files.inode(kernel, self.names, inode, 0)?.facts)
        };
        // Calls about anything but files, such as sockets, are of no interest.
        let found = match call.file {
            Some(argument) => file(argument),
            None => Some(Facts::default()),
        };
        let source = call.source.and_then(&mut file);
        if found.is_none() && source.is_none() {
            return None;
        }
        Some(WaitingCall {
            thread_id: kernel.u32(thread.wrapping_add(layout.task_number?))?,
            call: call.name,
            file: found.unwrap_or_default(),
            source,
            is_uninterruptible: state & UNINTERRUPTIBLE != 0,
        })
    }
}

/// Adds the account of I/O at an address (`task_io_accounting`) to a process.
fn add_account(kernel: &Kernel, account: u64, process: &mut Process) {
    let layout = &kernel.layout;
    for (sum, place) in [
        (&mut process.read_bytes, layout.account_read),
        (&mut process.dirtied_bytes, layout.account_dirtied),
        (&mut process.cancelled_bytes, layout.account_cancelled),
    ] {
        let Some(bytes) = place.and_then(|place| kernel.u64(account.wrapping_add(place))) else {
            continue;
        };
        *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_in_order() {
        assert!(WAITS.is_sorted());
        for number in WAITS {
            let call = system_call(*number).expect("a call with a name");
            // Three of the saved registers have places.
            assert!([call.file, call.source].into_iter().flatten().all(|argument| argument < 3));
        }
    }
}

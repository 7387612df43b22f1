//! Notes the system calls of chosen processes.
//!
//! The function that carries out the calls of 64-bit programs is hooked at its beginning, and where
//! it returns to, which the first stop finds on the stack. A thread is in one call at a time, so a
//! call is matched with its end by the thread, on whatever processor it ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_intercept::{
    Call, CallFile, CallPlaces, CallReaders, Calls, CommandPattern, Places, SystemCall, Writer,
    system_call,
};
use parking_lot::Mutex;

use crate::{Active, Plugin, now_ns};

/// The most calls in progress; of more, any one is given up. A thread that is killed in a call
/// leaves its own behind.
const PENDING_MAX: usize = 1 << 14;
/// The words of `pt_regs` of x86-64, and the places of some of them.
const REGISTERS: usize = 21;
const R10: usize = 7;
const R9: usize = 8;
const R8: usize = 9;
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const CALL: usize = 15;
const RIP: usize = 16;
const RSP: usize = 19;
/// The words of the part of a signal's frame that is read, and the places of registers in it
/// (`struct rt_sigframe`).
const FRAME: usize = 23;
const FRAME_RAX: usize = 19;
const FRAME_RSP: usize = 21;
const FRAME_RIP: usize = 22;
/// The most handlers of signals that begin at once.
const FRAMES_MAX: usize = 8;
/// The result of a call that a program makes again after the handler of a signal (`ERESTARTSYS`).
const INTERRUPTED: u64 = -512_i64 as u64;
/// The length of the instruction that makes a call, to which the kernel goes back to make it again.
const INSTRUCTION: u64 = 2;
/// The greatest number of a descriptor that is looked up.
const DESCRIPTOR_MAX: u64 = 1 << 20;
/// The calls that do not end, and those after which a program goes on elsewhere.
const EXIT: u64 = 60;
const EXIT_GROUP: u64 = 231;
const ELSEWHERE: [u64; 3] = [15, 59, 322];
/// The call for anything else, and two of its requests: to refer to all of another file, whose
/// descriptor is the next argument (`FICLONE`), or to a part of one, whose descriptor is in memory
/// there (`FICLONERANGE`).
const CONTROL: u64 = 16;
const CLONE: u64 = 0x4004_9409;
const CLONE_RANGE: u64 = 0x4020_940d;
/// The call with which the kernel continues one that a signal has interrupted.
const RESTART: u64 = 219;

/// What is noted of a kernel.
pub(crate) struct Noting {
    places: CallPlaces,
    commands: Vec<CommandPattern>,
    /// Whether the daemon decides about processes with other commands.
    others: bool,
    ring: Calls,
    /// Where the function returns to; 0 until it has been called.
    return_site: AtomicU64,
    pending: Mutex<HashMap<u64, Pending>>,
}

/// A call in progress.
struct Pending {
    call: Call,
    known: Option<&'static SystemCall>,
    /// The address of the open file whose position the call moves, or 0.
    file: u64,
    /// The address of the saved registers, and where the program goes on.
    registers: u64,
    next: u64,
    /// Whether the kernel makes the call again.
    is_restarted: bool,
}

impl Noting {
    pub fn new(places: &Places, ring: Calls) -> Self {
        let (calls, commands, others) = (places.calls, places.commands.clone(), places.others);
        let (return_site, pending) = (AtomicU64::new(0), Mutex::default());
        Self { places: calls, commands, others, ring, return_site, pending }
    }

    /// The addresses of the kernel's instructions at which calls begin and end; 0 is none yet.
    pub fn sites(&self) -> (u64, u64) {
        (self.places.entry, self.return_site.load(Ordering::Acquire))
    }

    /// Forgets the calls in progress.
    pub fn forget(&self) {
        self.pending.lock().clear();
    }

    /// Whether a process is meant by its command.
    fn has_command(&self, writer: &Writer) -> bool {
        self.commands.iter().any(|pattern| pattern.matches(&writer.command))
    }
}

impl Active {
    /// A thread is about to carry out a call.
    pub(crate) fn call_begins(&self, plugin: &Plugin, processor: usize) -> Option<()> {
        let noting = self.noting.as_ref()?;
        if noting.return_site.load(Ordering::Relaxed) == 0 {
            let stack = plugin.api.register(plugin.stack.load(Ordering::Relaxed));
            let site = plugin.api.read(stack).filter(|site| *site >> 63 == 1)?;
            noting.return_site.store(site, Ordering::Release);
            plugin.translate_again(self);
        }
        if !CallReaders::EACH.iter().any(|readers| noting.ring.has_reader(*readers)) {
            return None;
        }
        let task = self.task(plugin, processor)?;
        let (writer, leader) = self.writer(task)?;
        let has_command = noting.has_command(&writer);
        if !has_command && !noting.others {
            return None;
        }
        let process = self.slot(plugin, processor, &writer)?;
        let begun_ns = now_ns();
        if !has_command && self.writers.is_declined(process, begun_ns) {
            return None;
        }
        let address = plugin.api.register(plugin.first.load(Ordering::Relaxed));
        let mut registers = [0; REGISTERS];
        if !plugin.api.read_words(address, &mut registers) {
            return None;
        }
        let number = registers[CALL];
        {
            let mut pending = noting.pending.lock();
            if let Some(again) = pending.get_mut(&task).filter(|pending| pending.is_restarted) {
                // It began when the program called it.
                if number == again.call.number || number == RESTART {
                    (again.registers, again.is_restarted) = (address, false);
                    again.next = registers[RIP];
                    return Some(());
                }
            }
        }
        let mut arguments = [RDI, RSI, RDX, R10, R8, R9].map(|place| registers[place]);
        let (file, source) = self.files_of(plugin, task, number, &mut arguments);
        if source == 0 && !noting.ring.has_reader(CallReaders::All) {
            return None;
        }
        let call = Call {
            begun_ns,
            number,
            arguments,
            process,
            thread_id: self.memory.u32(task.wrapping_add(noting.places.task_number))?,
            task: leader,
            file: self.call_file(file),
            source: self.call_file(source),
            group: self.group(task).unwrap_or(0),
            program: self.program(task),
            ..Call::default()
        };
        if number == EXIT || number == EXIT_GROUP {
            noting.ring.add(&call);
            return Some(());
        }
        let pending = Pending {
            call,
            known: system_call(number),
            file,
            registers: address,
            next: registers[RIP],
            is_restarted: false,
        };
        let mut all = noting.pending.lock();
        if all.len() >= PENDING_MAX && !all.contains_key(&task) {
            let other = all.keys().next().copied();
            other.and_then(|other| all.remove(&other));
        }
        all.insert(task, pending);
        Some(())
    }

    /// The addresses of the open file of a call and of that from which it copies; 0 is none. The
    /// last three arguments of a clone of a part become the place in the source, the length and
    /// the place in the target.
    fn files_of(
        &self,
        plugin: &Plugin,
        task: u64,
        number: u64,
        arguments: &mut [u64; 6],
    ) -> (u64, u64) {
        let known = system_call(number);
        let mut range = [0; 4];
        let open_file =
            |place: Option<u8>| self.open_file(plugin, task, *arguments.get(usize::from(place?))?);
        let file = known.and_then(|known| open_file(known.file)).unwrap_or(0);
        let source = match (number, arguments[1] & 0xffff_ffff) {
            (CONTROL, CLONE) => self.open_file(plugin, task, arguments[2]),
            (CONTROL, CLONE_RANGE) if plugin.api.read_words(arguments[2], &mut range) => {
                self.open_file(plugin, task, range[0])
            }
            _ => known.and_then(|known| open_file(known.source)),
        };
        if source.is_some() && number == CONTROL {
            arguments[3..].copy_from_slice(&range[1..]);
        }
        (file, source.unwrap_or(0))
    }

    /// A thread has carried out a call.
    pub(crate) fn call_ends(&self, plugin: &Plugin, processor: usize) -> Option<()> {
        let noting = self.noting.as_ref()?;
        let task = self.task(plugin, processor)?;
        let mut pending = noting.pending.lock().remove(&task)?;
        let ended_ns = now_ns();
        let mut registers = [0; REGISTERS];
        if !plugin.api.read_words(pending.registers, &mut registers) {
            return None;
        }
        if registers[RIP] == pending.next.wrapping_sub(INSTRUCTION) {
            pending.is_restarted = true;
            noting.pending.lock().insert(task, pending);
            return None;
        }
        let Pending { mut call, known, file, next, .. } = pending;
        call.duration_ns = ended_ns.saturating_sub(call.begun_ns);
        call.result = if registers[RIP] == next || ELSEWHERE.contains(&call.number) {
            registers[RAX]
        } else {
            before_handlers(plugin, registers[RSP], next).unwrap_or(registers[RAX])
        };
        if file != 0 {
            let position = file.wrapping_add(noting.places.file_position);
            call.position = self.memory.u64(position).unwrap_or(0);
        }
        if known.is_some_and(|known| known.opens) {
            let opened = self.open_file(plugin, task, call.result);
            call.file = self.call_file(opened.unwrap_or(0));
        }
        noting.ring.add(&call);
        Some(())
    }

    /// The address of the open file with a descriptor.
    fn open_file(&self, plugin: &Plugin, task: u64, descriptor: u64) -> Option<u64> {
        let places = &self.noting.as_ref()?.places;
        // Programs use the lower half of the register.
        let descriptor = descriptor & 0xffff_ffff;
        if descriptor >= DESCRIPTOR_MAX {
            return None;
        }
        let memory = &self.memory;
        let files = memory.u64(task.wrapping_add(places.task_files))?;
        let table = memory.u64(files.wrapping_add(places.files_table))?;
        if descriptor >= u64::from(memory.u32(table.wrapping_add(places.file_count))?) {
            return None;
        }
        let list = memory.u64(table.wrapping_add(places.file_list))?;
        let entry = list.wrapping_add(8 * descriptor);
        // A large table is not in the map of all memory.
        let file = memory.u64(entry).or_else(|| plugin.api.read(entry))?;
        Some(file).filter(|file| *file != 0)
    }

    /// The address of the control group of a task.
    fn group(&self, task: u64) -> Option<u64> {
        let places = &self.noting.as_ref()?.places;
        if places.task_groups == 0 {
            return None;
        }
        let set = self.memory.u64(task.wrapping_add(places.task_groups))?;
        self.memory.u64(set.wrapping_add(places.groups_default))
    }

    /// The file of the program of a task.
    fn program(&self, task: u64) -> CallFile {
        let find = || {
            let places = &self.noting.as_ref()?.places;
            if places.memory_program == 0 {
                return None;
            }
            let memory = self.memory.u64(task.wrapping_add(places.task_memory))?;
            self.memory.u64(memory.wrapping_add(places.memory_program))
        };
        self.call_file(find().unwrap_or(0))
    }

    fn call_file(&self, file: u64) -> CallFile {
        let find = || {
            let places = &self.noting.as_ref()?.places;
            let address = self.memory.u64(file.wrapping_add(places.file_inode))?;
            let inode = self.memory.u64(address.wrapping_add(places.inode_number))?;
            Some(CallFile { address, inode })
        };
        if file == 0 { CallFile::default() } else { find().unwrap_or_default() }
    }
}

/// The result of a call after which the handlers of signals run first: the program's registers are
/// in the frame of the first of them on its stack.
fn before_handlers(plugin: &Plugin, mut stack: u64, next: u64) -> Option<u64> {
    for _ in 0..FRAMES_MAX {
        let mut frame = [0; FRAME];
        if !plugin.api.read_words(stack, &mut frame) {
            return None;
        }
        if frame[FRAME_RIP] == next {
            return Some(frame[FRAME_RAX]);
        }
        if frame[FRAME_RIP] == next.wrapping_sub(INSTRUCTION) {
            return Some(INTERRUPTED);
        }
        stack = frame[FRAME_RSP];
    }
    None
}

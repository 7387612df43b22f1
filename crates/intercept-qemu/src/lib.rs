//! A plugin for QEMU that notes which process of an emulated guest writes each page.
//!
//! Read [`qemu_plugin_install`] first. The crate must not know anything of the daemon but
//! `fathom-intercept`.
//!
//! QEMU loads the plugin with `-plugin libfathom_intercept_qemu.so,socket=PATH`. The plugin
//! connects to the daemon at that socket, which tells it where the guest's kernel marks pages as
//! dirty. Without a daemon, or without a guest that the daemon understands, nothing is intercepted,
//! and the guest runs as without the plugin. `docs/interception.md` describes it.

#![allow(unsafe_code)]
// Addresses of guests and offsets of mappings are checked for it.
#![allow(clippy::cast_ptr_alignment)]
#![warn(missing_docs)]

mod api;
mod bound;
mod calls;
mod guest;
mod level;
mod link;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_intercept::{Hook, Places, Slots, Writer, Writers};
use parking_lot::{Mutex, RwLock};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

use api::{Api, InstructionCall, Registers};
use bound::Bound;
use calls::Noting;
use guest::GuestMemory;

/// The most processors with a memory of their last process.
const PROCESSORS: usize = 256;
/// The flag of a task that is a thread of the kernel (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = 0x0020_0000;

/// The level of QEMU's interface, which QEMU reads after it has loaded the plugin.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: AtomicI32 = AtomicI32::new(4);

/// Sets the level when the plugin is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static SET_LEVEL: extern "C" fn() = set_level;

extern "C" fn set_level() {
    let level = catch_unwind(level::current).unwrap_or(4);
    qemu_plugin_version.store(level, Ordering::Relaxed);
}

/// What is intercepted of a kernel.
pub(crate) struct Active {
    places: Places,
    memory: GuestMemory,
    writers: Arc<Writers>,
    slots: Mutex<Slots>,
    /// The system calls, if they are noted.
    noting: Option<Noting>,
    /// The number of this translation of the guest's code.
    translation: AtomicU64,
}

/// What a processor has last seen.
#[derive(Default)]
struct Processor {
    /// The base of its area, for the kernel with this number.
    base: AtomicU64,
    epoch: AtomicU64,
    /// The writer whose slot is known.
    last: Mutex<(Writer, u32)>,
}

/// The plugin.
pub(crate) struct Plugin {
    id: u64,
    api: Api,
    /// The daemon's socket.
    socket: PathBuf,
    /// What is to be intercepted.
    active: RwLock<Option<Arc<Active>>>,
    /// The number of the translation that is wanted, and of the one that QEMU uses. Each kernel,
    /// and each function that is found later, needs another.
    wanted: AtomicU64,
    hooked: AtomicU64,
    /// The number of translations so far.
    translations: Mutex<u64>,
    /// Whether QEMU is about to take all calls away.
    is_resetting: AtomicBool,
    has_thread: AtomicBool,
    first: AtomicUsize,
    base: AtomicUsize,
    stack: AtomicUsize,
    processors: Vec<Processor>,
    /// The bounds on the stops at each hook, in the order of [`Hook::ALL`]. They outlive a kernel.
    bounds: [Bound; Hook::ALL.len()],
    /// Wakes the thread: a hook has been taken away.
    wake: OwnedFd,
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

impl Plugin {
    /// Intercepts this from now on, or nothing.
    pub(crate) fn set(&self, active: Option<Active>) {
        let active = active.filter(|active| active.places.page_dirtied != 0).map(Arc::new);
        if active.is_none() && self.active.read().is_none() {
            return;
        }
        let mut last = self.translations.lock();
        *last += 1;
        self.active.write().clone_from(&active);
        if let Some(active) = active {
            active.translation.store(*last, Ordering::Release);
        }
        self.wanted.store(*last, Ordering::Release);
        drop(last);
        self.keep_away();
    }

    /// Lets QEMU translate the guest's code again: other places of a kernel are to be intercepted.
    /// Returns the number of the last translation.
    fn translate_again(&self, active: &Active) -> u64 {
        let mut last = self.translations.lock();
        // Unless another kernel has taken its place.
        if active.translation.load(Ordering::Acquire) == *last {
            *last += 1;
            // First: what is translated in between is translated again.
            active.translation.store(*last, Ordering::Release);
            self.wanted.store(*last, Ordering::Release);
        }
        *last
    }

    fn active(&self) -> Option<Arc<Active>> {
        self.active.read().clone()
    }

    /// Lets QEMU translate everything again if something else is to be intercepted.
    fn follow(&self) {
        let is_followed =
            self.wanted.load(Ordering::Acquire) == self.hooked.load(Ordering::Acquire);
        if !is_followed && !self.is_resetting.swap(true, Ordering::AcqRel) {
            self.api.reset(self.id, reset);
        }
    }
}

/// Calls `act` with the plugin. A failure must not reach QEMU.
fn with(act: impl FnOnce(&'static Plugin)) {
    if let Some(plugin) = PLUGIN.get() {
        let _ = catch_unwind(AssertUnwindSafe(|| act(plugin)));
    }
}

extern "C" fn processor_begins(_id: u64, _processor: c_uint) {
    with(|plugin| {
        let Registers { first, stack, base } = plugin.api.registers();
        plugin.first.store(first, Ordering::Relaxed);
        plugin.base.store(base, Ordering::Relaxed);
        plugin.stack.store(stack, Ordering::Relaxed);
        if first == 0 || base == 0 {
            eprintln!(
                "fathom: this QEMU does not name the registers rdi and gs_base: nothing is intercepted"
            );
            return;
        }
        // Not before: QEMU may have become another process, which has no other threads.
        if !plugin.has_thread.swap(true, Ordering::AcqRel) {
            link::begin(plugin);
        }
    });
}

extern "C" fn processor_resumes(_id: u64, _processor: c_uint) {
    with(Plugin::follow);
}

/// Hooks the instructions in a block at which something is to be noted.
extern "C" fn block_translated(_id: u64, block: *mut c_void) {
    with(|plugin| {
        plugin.follow();
        let hooked = plugin.hooked.load(Ordering::Acquire);
        let Some(active) = plugin.active() else { return };
        if active.translation.load(Ordering::Acquire) != hooked {
            return;
        }
        let mut hooks: [(u64, InstructionCall); 3] =
            [(0, page_dirtied), (0, call_begins), (0, call_ends)];
        if plugin.bound(Hook::Pages).is_in(hooked) {
            hooks[0].0 = active.places.page_dirtied;
        }
        let has_calls = plugin.bound(Hook::Calls).is_in(hooked);
        if let Some(noting) = active.noting.as_ref().filter(|_| has_calls) {
            (hooks[1].0, hooks[2].0) = noting.sites();
        }
        plugin.api.hook(block, &hooks);
    });
}

/// Called by QEMU when it has taken all calls away.
extern "C" fn reset(id: u64) {
    with(|plugin| {
        plugin.hooked.store(plugin.wanted.load(Ordering::Acquire), Ordering::Release);
        plugin.api.register_calls(id, processor_begins, processor_resumes, block_translated);
        plugin.is_resetting.store(false, Ordering::Release);
    });
}

/// Called each time that the guest's kernel marks a page of a file as dirty: notes the process.
extern "C" fn page_dirtied(processor: c_uint, _data: *mut c_void) {
    with(|plugin| {
        if let Some(active) = plugin.stop(Hook::Pages) {
            let _ = active.note(plugin, processor as usize);
        }
    });
}

/// Called each time that the guest's kernel is about to carry out a system call.
extern "C" fn call_begins(processor: c_uint, _data: *mut c_void) {
    with(|plugin| {
        if let Some(active) = plugin.stop(Hook::Calls) {
            let _ = active.call_begins(plugin, processor as usize);
        }
    });
}

/// Called each time that the guest's kernel has carried out a system call.
extern "C" fn call_ends(processor: c_uint, _data: *mut c_void) {
    with(|plugin| {
        if let Some(active) = plugin.stop(Hook::Calls) {
            let _ = active.call_ends(plugin, processor as usize);
        }
    });
}

/// The host's monotonic clock.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

impl Active {
    /// Notes the writer of a page that becomes dirty.
    fn note(&self, plugin: &Plugin, processor: usize) -> Option<()> {
        let places = &self.places;
        let page = plugin.api.register(plugin.first.load(Ordering::Relaxed));
        let offset = page.wrapping_sub(places.pages);
        if offset % places.page_size != 0 {
            return None;
        }
        let task = self.task(plugin, processor)?;
        let (writer, _) = self.writer(task)?;
        let flags = self.memory.u32(task.wrapping_add(places.task_flags))?;
        let slot = self.slot(plugin, processor, &writer)?;
        // A thread of the kernel that continues the write-back of a page is not its writer.
        let keeps = flags & KERNEL_THREAD != 0;
        self.writers.note(offset / places.page_size, slot, keeps);
        Some(())
    }

    /// The address of the current task of a processor that runs the kernel.
    fn task(&self, plugin: &Plugin, processor: usize) -> Option<u64> {
        let places = &self.places;
        let processor = plugin.processors.get(processor)?;
        let mut base = processor.base.load(Ordering::Relaxed);
        if processor.epoch.load(Ordering::Relaxed) != places.epoch {
            base = plugin.api.register(plugin.base.load(Ordering::Relaxed));
            processor.base.store(base, Ordering::Relaxed);
            // Slots belong to one table, and each kernel has its own.
            *processor.last.lock() = Default::default();
            processor.epoch.store(places.epoch, Ordering::Relaxed);
        }
        let current = base.wrapping_add(places.current);
        self.memory.u64(current).or_else(|| plugin.api.read(current))
    }

    /// The process of a task, and the address of its leader.
    fn writer(&self, task: u64) -> Option<(Writer, u64)> {
        let places = &self.places;
        let leader = self.memory.u64(task.wrapping_add(places.task_leader))?;
        let command = leader.wrapping_add(places.task_command);
        let mut writer = Writer {
            process_id: self.memory.u32(leader.wrapping_add(places.task_process))?,
            start_ns: self.memory.u64(leader.wrapping_add(places.task_start))?,
            ..Writer::default()
        };
        // A text need not be aligned to eight bytes.
        for (place, part) in writer.command.chunks_exact_mut(4).enumerate() {
            let word = self.memory.u32(command.wrapping_add(4 * place as u64))?;
            part.copy_from_slice(&word.to_le_bytes());
        }
        Some((writer, leader))
    }

    /// The slot of a process.
    fn slot(&self, plugin: &Plugin, processor: usize, writer: &Writer) -> Option<u32> {
        let mut last = plugin.processors.get(processor)?.last.lock();
        if last.0 != *writer || last.1 == 0 {
            let mut slots = self.slots.lock();
            *last = (*writer, slots.slot(&self.writers, writer));
        }
        Some(last.1)
    }
}

/// The value of an argument `name=value`.
fn argument(count: c_int, values: *const *const c_char, name: &str) -> Option<String> {
    (0..usize::try_from(count).ok()?).find_map(|place| {
        // SAFETY: QEMU passes `count` texts.
        let text = unsafe { CStr::from_ptr(*values.add(place)) }.to_str().ok()?;
        let (key, value) = text.split_once('=')?;
        (key == name).then(|| value.to_owned())
    })
}

/// Called by QEMU once. Never fails: QEMU would end.
#[unsafe(no_mangle)]
pub extern "C" fn qemu_plugin_install(
    id: u64,
    _info: *const c_void,
    count: c_int,
    values: *const *const c_char,
) -> c_int {
    let _ = catch_unwind(|| {
        let Some(socket) = argument(count, values, "socket") else {
            eprintln!("fathom: nothing is intercepted: the plugin needs the argument socket=PATH");
            return;
        };
        let api = match Api::find() {
            Ok(api) => api,
            Err(name) => {
                eprintln!("fathom: nothing is intercepted: this QEMU has no function {name}");
                return;
            }
        };
        let wake = match eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
            Ok(wake) => wake,
            Err(error) => {
                eprintln!("fathom: nothing is intercepted: {error}");
                return;
            }
        };
        let plugin = PLUGIN.get_or_init(|| Plugin {
            id,
            api,
            socket: socket.into(),
            active: RwLock::default(),
            wanted: AtomicU64::new(0),
            hooked: AtomicU64::new(0),
            translations: Mutex::new(0),
            is_resetting: AtomicBool::new(false),
            has_thread: AtomicBool::new(false),
            first: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            stack: AtomicUsize::new(0),
            processors: (0..PROCESSORS).map(|_| Processor::default()).collect(),
            bounds: <[Bound; Hook::ALL.len()]>::default(),
            wake,
        });
        plugin.api.register_calls(id, processor_begins, processor_resumes, block_translated);
    });
    0
}

//! The injector: a process of its own that has a thread of the VMM make one system call.
//!
//! It blocks all signals, is killed by the kernel after [`TRACE_TIME_MAX`] of a trace even if it is
//! stopped, and may die at any step: see [`crate::frame`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::frame::{self, Gadgets, Place, SystemCall};
use crate::trace::{self, DeathTimer, Stop, Tracee};
use crate::vmm::Vmm;

/// When a thread has been traced for this time, the kernel kills the injector, and the VMM goes on.
pub const TRACE_TIME_MAX: Duration = Duration::from_millis(500);
/// How often the thread is stopped until it is in a system call that it can make again.
const ATTEMPTS_MAX: u32 = 50;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(2);
/// The most stops of the thread until it has made the call, such as for signals that come
/// meanwhile.
const STOPS_MAX: u32 = 64;
/// The most bytes of code of one mapping that are searched.
const CODE_BYTES_MAX: u64 = 64 << 20;

/// A step of an injection. All of them are over when it has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectStep {
    /// The thread is traced, and runs.
    Traced,
    /// The thread has stopped in a system call.
    Stopped,
    /// The way back is on its stack.
    Written,
    /// Its registers are set.
    Redirected,
    /// It is about to make the call.
    Entered,
    /// It has made the call.
    Left,
    /// It is not traced any more.
    Released,
}

/// What the injector reports to the process that started it, as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectReport {
    /// The result of the system call; `None` if it was not seen, or was not made.
    pub result: Option<i64>,
    /// How long the thread did not do its own work, in nanoseconds.
    pub pause_ns: u64,
    /// Why it was not made; empty if it was.
    pub error: String,
    /// Whether the right to do it is missing.
    pub is_forbidden: bool,
}

/// Carries out an injection, in a process that does nothing else. `step` is called after each step.
pub fn inject(thread: i32, call: SystemCall, step: &mut dyn FnMut(InjectStep)) -> InjectReport {
    let mut pause_ns = 0;
    let done = trace::block_signals(&[]).and_then(|()| attempt(thread, call, &mut pause_ns, step));
    match done {
        Ok(result) => InjectReport { result, pause_ns, ..InjectReport::default() },
        Err(error) => InjectReport {
            pause_ns,
            is_forbidden: error.kind() == io::ErrorKind::PermissionDenied,
            error: error.to_string(),
            ..InjectReport::default()
        },
    }
}

fn attempt(
    thread: i32,
    call: SystemCall,
    pause_ns: &mut u64,
    step: &mut dyn FnMut(InjectStep),
) -> io::Result<Option<i64>> {
    let timer = DeathTimer::new()?;
    let gadgets = find(thread)?;
    let memory = File::options().write(true).open(format!("/proc/{thread}/mem"))?;
    for _ in 0..ATTEMPTS_MAX {
        timer.arm(TRACE_TIME_MAX)?;
        let tracee = Tracee::seize(thread)?;
        step(InjectStep::Traced);
        let begun = Instant::now();
        let outcome = stop_and_call(&tracee, &memory, gadgets, call, step);
        let released = tracee.detach();
        let pause = begun.elapsed().as_nanos() as u64;
        timer.arm(Duration::ZERO)?;
        step(InjectStep::Released);
        *pause_ns = (*pause_ns).max(pause);
        if let Some(result) = outcome? {
            *pause_ns = pause;
            released?;
            return Ok(Some(result));
        }
        std::thread::sleep(PAUSE);
    }
    Err(io::Error::other("its main thread is never in a system call that it can make again"))
}

/// `None` if the thread was not in a suitable place; it is as it was then.
fn stop_and_call(
    tracee: &Tracee,
    memory: &File,
    gadgets: Gadgets,
    call: SystemCall,
    step: &mut dyn FnMut(InjectStep),
) -> io::Result<Option<i64>> {
    tracee.interrupt()?;
    let mut stop = tracee.wait()?;
    for _ in 0..STOPS_MAX {
        match stop {
            Stop::Interrupted | Stop::Group => break,
            Stop::Signal(signal) => tracee.go_on(signal)?,
            Stop::SystemCall | Stop::Other(_) => tracee.go_on(0)?,
        }
        stop = tracee.wait()?;
    }
    let registers = tracee.registers()?;
    if stop != Stop::Interrupted || frame::place(&registers) == Place::Unsuitable {
        return Ok(None);
    }
    step(InjectStep::Stopped);
    let extended = tracee.extended_state()?;
    let mask = tracee.signal_mask()?;
    let detour = frame::detour(&registers, &extended, mask, gadgets, call)
        .ok_or_else(|| io::Error::other("its registers cannot be put back from a stack"))?;
    memory.write_all_at(&detour.bytes, detour.address)?;
    step(InjectStep::Written);
    tracee.set_registers(&detour.registers)?;
    step(InjectStep::Redirected);
    let mut has_entered = false;
    tracee.go_on(0)?;
    for _ in 0..STOPS_MAX {
        let signal = match tracee.wait()? {
            Stop::Signal(signal) => signal,
            Stop::SystemCall => {
                let now = tracee.registers()?;
                // A handler of a signal makes other calls.
                if now.rip == gadgets.call + 2 && now.orig_rax == call.number {
                    if has_entered {
                        step(InjectStep::Left);
                        return Ok(Some(now.rax as i64));
                    }
                    has_entered = true;
                    step(InjectStep::Entered);
                }
                0
            }
            Stop::Interrupted | Stop::Group | Stop::Other(_) => 0,
        };
        tracee.go_on(signal)?;
    }
    Err(io::Error::other("its call was not seen among its signals"))
}

/// Searches the code of the process, that of its C library first.
fn find(process: i32) -> io::Result<Gadgets> {
    let memory = File::open(format!("/proc/{process}/mem"))?;
    let mut maps = Vmm::mappings_of(process)?;
    maps.retain(|map| map.is_executable && map.inode != 0);
    maps.sort_by_key(|map| !map.path.contains("/libc"));
    let (mut call, mut back) = (None, None);
    for map in maps {
        let length = (map.range.end - map.range.start).min(CODE_BYTES_MAX);
        let mut code = vec![0; length as usize];
        if memory.read_exact_at(&mut code, map.range.start).is_err() {
            continue;
        }
        let at = |pattern: &[u8]| {
            let place = code.windows(pattern.len()).position(|window| window == pattern);
            place.map(|place| map.range.start + place as u64)
        };
        call = call.or_else(|| at(frame::CALL));
        back = back.or_else(|| at(frame::RETURN));
        if let (Some(call), Some(back)) = (call, back) {
            return Ok(Gadgets { call, back });
        }
    }
    Err(io::Error::other("its code has no instructions by which a call could be made"))
}

//! The calls by which the injector stops a thread of another process, and what it protects itself
//! with.
//!
//! `nix` has two thirds of them. The thread's floating point state and signal mask would still be
//! calls of our own.

#![expect(unsafe_code, reason = "calls of ptrace, each with the argument that its number has")]

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// The set of registers that `PTRACE_GETREGSET` calls by this number: all that `XSAVE` saves.
const X86_XSTATE: usize = 0x202;
/// More than the kernel saves of any processor, in bytes.
const XSTATE_BYTES_MAX: usize = 64 << 10;

/// The registers of a stopped thread.
pub(crate) type Registers = libc::user_regs_struct;

/// How a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// As [`Tracee::interrupt`] has asked for.
    Interrupted,
    /// Before or after a system call.
    SystemCall,
    /// Before a signal is delivered; it has to be passed on.
    Signal(i32),
    /// With the whole process, by a signal such as SIGSTOP.
    Group,
    /// Something else, with its status.
    Other(i32),
}

/// A thread of another process that this one traces. It goes on by itself when this process ends.
#[derive(Debug)]
pub(crate) struct Tracee {
    thread: i32,
}

impl Tracee {
    /// Begins to trace a thread, which goes on.
    ///
    /// # Errors
    /// `EPERM` without the right, or if something else traces it; `ESRCH` if there is none.
    pub(crate) fn seize(thread: i32) -> io::Result<Self> {
        call(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        Ok(Self { thread })
    }

    /// Asks for a stop.
    pub(crate) fn interrupt(&self) -> io::Result<()> {
        call(libc::PTRACE_INTERRUPT, self.thread, 0, 0)
    }

    /// Waits for the next stop.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) fn wait(&self) -> io::Result<Stop> {
        let mut status = 0;
        loop {
            // SAFETY: the status goes to a local variable.
            let found = unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL) };
            if found == self.thread {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        if !libc::WIFSTOPPED(status) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let signal = libc::WSTOPSIG(status);
        Ok(match status >> 16 {
            libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupted,
            libc::PTRACE_EVENT_STOP => Stop::Group,
            0 if signal == libc::SIGTRAP | 0x80 => Stop::SystemCall,
            0 => Stop::Signal(signal),
            _ => Stop::Other(status),
        })
    }

    /// Lets the thread go on to its next system call, with a signal or 0.
    pub(crate) fn go_on(&self, signal: i32) -> io::Result<()> {
        call(libc::PTRACE_SYSCALL, self.thread, 0, signal as usize)
    }

    /// Stops to trace the thread, which goes on.
    pub(crate) fn detach(self) -> io::Result<()> {
        call(libc::PTRACE_DETACH, self.thread, 0, 0)
    }

    /// The registers.
    pub(crate) fn registers(&self) -> io::Result<Registers> {
        let mut registers = MaybeUninit::<Registers>::uninit();
        call(libc::PTRACE_GETREGS, self.thread, 0, registers.as_mut_ptr() as usize)?;
        // SAFETY: the call has succeeded, so the kernel has written all of them.
        Ok(unsafe { registers.assume_init() })
    }

    /// Sets all registers at once.
    pub(crate) fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        call(libc::PTRACE_SETREGS, self.thread, 0, &raw const *registers as usize)
    }

    /// The floating point and vector registers, as `XSAVE` writes them.
    pub(crate) fn extended_state(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0_u8; XSTATE_BYTES_MAX];
        let mut vector =
            libc::iovec { iov_base: bytes.as_mut_ptr().cast::<c_void>(), iov_len: bytes.len() };
        call(libc::PTRACE_GETREGSET, self.thread, X86_XSTATE, &raw mut vector as usize)?;
        bytes.truncate(vector.iov_len);
        Ok(bytes)
    }

    /// The signals that are blocked.
    pub(crate) fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0_u64;
        call(libc::PTRACE_GETSIGMASK as _, self.thread, 8, &raw mut mask as usize)?;
        Ok(mask)
    }
}

/// A call of ptrace, of which the kernel reads or writes what `data` points to, if it is a pointer.
/// Only the functions above call it, with the type that the request has.
fn call(request: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the callers above pass values, or pointers to variables that live through the call
    // and have the size that the request has. No memory of this process changes besides.
    match unsafe { libc::ptrace(request, thread, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The signals of a fault of the thread itself, which are not to be blocked.
pub(crate) const SYNCHRONOUS: [libc::c_int; 4] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL];

/// Blocks all signals that can be blocked in the calling thread, but for `others`. A fault whose
/// signal is blocked ends the process, whatever its handler would do.
///
/// # Errors
/// Those of the system call.
pub(crate) fn block_signals(others: &[libc::c_int]) -> io::Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call initialises the set, the others change or read it.
    let failed = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        for other in others {
            libc::sigdelset(all.as_mut_ptr(), *other);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut())
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(failed)) }
}

/// Has the kernel kill this process at a time, even if it is stopped then.
#[derive(Debug)]
pub(crate) struct DeathTimer {
    timer: libc::timer_t,
}

impl DeathTimer {
    /// A timer that is not armed.
    ///
    /// # Errors
    /// Those of the system call.
    pub(crate) fn new() -> io::Result<Self> {
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: zeroes are a valid value of the structure, and the pointers are those of local
        // variables.
        let failed = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGKILL;
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer)
        };
        if failed == 0 { Ok(Self { timer }) } else { Err(io::Error::last_os_error()) }
    }

    /// Lets this process live for `time`; forever if it is 0.
    ///
    /// # Errors
    /// Those of the system call.
    pub(crate) fn arm(&self, time: Duration) -> io::Result<()> {
        // SAFETY: zeroes are a valid value of the structure; the timer lives as long as the
        // process.
        let failed = unsafe {
            let mut setting: libc::itimerspec = std::mem::zeroed();
            setting.it_value.tv_sec = time.as_secs() as libc::time_t;
            setting.it_value.tv_nsec = libc::c_long::from(time.subsec_nanos() as i32);
            libc::timer_settime(self.timer, 0, &raw const setting, std::ptr::null_mut())
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// The end of the part `index` of what `XSAVE` writes, in bytes from its beginning; 0 if the
/// processor does not have it.
#[allow(unused_unsafe, reason = "newer compilers know that the instruction is safe")]
pub(crate) fn extended_part_end(index: u32) -> u32 {
    // SAFETY: each processor with 64 bits has the instruction; a part that it does not know is
    // zeroes.
    let part = unsafe { std::arch::x86_64::__cpuid_count(0xd, index) };
    if part.eax == 0 { 0 } else { part.ebx + part.eax }
}

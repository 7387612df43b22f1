//! Other processes: their CPU time and names, and how to start them; and the signals that end this
//! one.

#![expect(unsafe_code, reason = "the clock of another process, and a call between fork and exec")]

use std::{
    io,
    mem::MaybeUninit,
    os::unix::process::CommandExt,
    process::{Child, Command},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

/// A flag that SIGINT and SIGTERM set. If `impatient`, the second signal ends the process.
pub fn catch_signals(impatient: bool) -> io::Result<Arc<AtomicBool>> {
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        if impatient {
            flag::register_conditional_default(signal, Arc::clone(&signalled))?;
        }
        flag::register(signal, Arc::clone(&signalled))?;
    }
    Ok(signalled)
}

/// A process's CPU time, to the nanosecond.
#[derive(Clone, Copy, Debug)]
pub struct CpuClock {
    process_id: i32,
    clock: libc::clockid_t,
}

impl CpuClock {
    /// The clock of another process; `None` if there is no such process.
    pub fn of(process_id: i32) -> Option<Self> {
        let mut clock = 0;
        // SAFETY: the result goes to a local variable.
        let failed = unsafe { libc::clock_getcpuclockid(process_id, &raw mut clock) };
        (failed == 0).then_some(Self { process_id, clock })
    }

    /// This process's own clock.
    pub fn own() -> Self {
        Self { process_id: std::process::id() as i32, clock: libc::CLOCK_PROCESS_CPUTIME_ID }
    }

    /// CPU time used so far by all threads; `None` after the process has ended.
    pub fn now(&self) -> Option<Duration> {
        let mut time = MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: the result goes to a local variable, which is read only if it was written.
        let time = unsafe {
            if libc::clock_gettime(self.clock, time.as_mut_ptr()) != 0 {
                return None;
            }
            time.assume_init()
        };
        Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    /// The process ID.
    pub fn process_id(&self) -> i32 {
        self.process_id
    }
}

/// Starts a program that gets SIGTERM when this process ends.
pub fn spawn_bound(command: &mut Command) -> io::Result<Child> {
    // SAFETY: `prctl` is the only call between fork and exec, a plain system call, which is safe
    // there.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    command.spawn()
}

/// A process's name, as `ps` shows it. `None` if the process does not exist.
pub fn name(process_id: i32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{process_id}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_and_unknown_processes_have_none() {
        let clock = CpuClock::of(std::process::id() as i32).expect("this process exists");
        let before = clock.now().expect("it has a clock");
        let mut sum = 0u64;
        while clock.now().expect("it has a clock") == before {
            sum = sum.wrapping_add(1);
        }
        assert!(CpuClock::of(1 << 23).is_none());
        assert!(name(std::process::id() as i32).is_some());
    }
}

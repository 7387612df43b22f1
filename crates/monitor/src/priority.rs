//! The priority of threads that serve observers.

/// The amount by which a thread's nice value increases.
const NICE: i32 = 10;

/// Lowers the priority of the calling thread, and of the threads that it starts later, so that
/// other threads, such as those of disks' queues, run first. Work for observers may take longer; a
/// guest's requests may not. If the kernel refuses, the priority does not change.
pub fn give_way() {
    // In Linux the nice value belongs to the thread, not to the process.
    let _ = rustix::process::nice(NICE);
}

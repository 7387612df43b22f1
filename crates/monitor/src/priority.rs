//! The priority of threads that serve observers.

use std::sync::Once;

/// The amount by which a thread's nice value increases.
const NICE: i32 = 10;

/// Lowers the priority of the calling thread, and of the threads that it starts later, so that
/// other threads, such as those of disks' queues, run first. Work for observers may take longer; a
/// guest's requests may not. If the kernel refuses, the priority does not change, and the log has a
/// line about the first such thread.
pub fn give_way() {
    static REFUSED: Once = Once::new();
    // In Linux the nice value belongs to the thread, not to the process.
    if let Err(error) = rustix::process::nice(NICE) {
        REFUSED.call_once(|| {
            tracing::warn!(
                %error,
                "threads for observers cannot give way to those of disks: allow the system call \
                 setpriority"
            );
        });
    }
}

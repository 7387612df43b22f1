//! Which threads go first where processors are scarce.

/// How much nicer a thread becomes that gives way.
const NICE: i32 = 10;

/// Lets the calling thread, and those that it begins, give way to others such as those of disks'
/// queues: what is done for whoever watches may take longer, what a guest waits for may not. Where
/// that is refused, the thread is as it was.
pub fn give_way() {
    // In Linux this is about the thread alone.
    let _ = rustix::process::nice(NICE);
}

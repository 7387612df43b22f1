//! Measures the CPU time of counts of dirty pages in images of guests' memory, after other data has
//! filled the processor's caches: as if many guests were counted once a second.
//!
//!     cargo run --release -p fathom-introspect --example dirty_cost -- IMAGE…
//!
//! Prints the median, in nanoseconds for each guest. `bench/dirty` runs it.

use std::hint::black_box;
use std::path::Path;

use fathom_introspect::{GuestMemory, Kernel};
use rustix::time::{ClockId, clock_gettime};

/// The bytes that are read between two passes.
const SWEPT: usize = 128 << 20;
/// The number of passes over all images.
const PASSES: usize = 101;

/// The CPU time of this thread, in nanoseconds.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn main() {
    let kernels: Vec<Kernel> = std::env::args()
        .skip(1)
        .map(|path| {
            let memory = GuestMemory::open_image(Path::new(&path), 2 << 30).expect("an image");
            Kernel::attach(&memory, None).expect("a kernel")
        })
        .collect();
    assert!(!kernels.is_empty(), "the arguments are images of guests' memory");
    let other = vec![1_u8; SWEPT];
    let mut times: Vec<u64> = (0..PASSES)
        .map(|_| {
            black_box(other.iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>());
            let begun = cpu_ns();
            for kernel in &kernels {
                black_box(kernel.dirty(&[]));
            }
            (cpu_ns() - begun) / kernels.len() as u64
        })
        .collect();
    times.sort_unstable();
    println!("{}", times[times.len() / 2]);
}

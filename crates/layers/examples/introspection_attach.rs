//! Finds the kernel in an image of a guest's memory, and prints the duration of the search, the
//! dirty pages and the cached files.

use std::path::Path;
use std::time::Instant;

use fathom_insight::Names;
use fathom_introspect::{Kernel, WrittenPages, open_image};

fn main() {
    let path = std::env::args().nth(1).expect("an image");
    let memory = open_image(Path::new(&path), 2 << 30).expect("an image");
    let start = Instant::now();
    let kernel = Kernel::attach(&memory, None).expect("a kernel");
    println!("Linux {} after {:?}", kernel.release(), start.elapsed());
    println!("{} modules, {:?}", kernel.modules().len(), kernel.counters());
    let tasks = kernel.tasks();
    println!("{} tasks, last {:?}", tasks.len(), tasks.last());
    let start = Instant::now();
    let dirty = kernel.dirty(&[]);
    println!("{dirty:?} after {:?}", start.elapsed());
    let mut times: Vec<_> = (0..1000)
        .map(|_| {
            let start = Instant::now();
            std::hint::black_box(kernel.dirty(&[]));
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("a count of dirty pages takes {:?} (median of 1,000)", times[500]);
    let start = Instant::now();
    let mapped = kernel.mapped_dirty();
    println!("{mapped:?} after {:?}", start.elapsed());
    let whole = WrittenPages::count(&memory, 1, 0, &mut || true);
    println!("{whole:?}; relative error and time by stride:");
    for stride in [1_u64, 2, 5, 10, 20, 40, 60, 80, 100] {
        // The mean over as many beginnings, as the paper varies them.
        let (mut error, start) = (0.0, Instant::now());
        let beginnings = stride.min(10);
        for turn in 0..beginnings {
            let sample =
                WrittenPages::count(&memory, stride, turn * stride / beginnings, &mut || true);
            error += (sample.marked as f64 / whole.marked as f64 - 1.0).abs();
        }
        let (count, took) = (beginnings as f64, start.elapsed() / beginnings as u32);
        println!("{stride:4} {:6.1} % {took:?}", 100.0 * error / count);
    }
    let names = Names::default();
    let start = Instant::now();
    let files = kernel.dirty_files(&names, usize::MAX).expect("structures of files");
    let whole = if files.is_whole { "all" } else { "some" };
    println!("{whole} dirty files, {} bytes, after {:?}", files.dirty, start.elapsed());
    for file in files.files {
        let mut line = format!("{:8} {} ", file.dirty, file.device);
        file.facts.describe(&mut line, &names).expect("a string");
        println!("{line}");
    }
    let start = Instant::now();
    let files = kernel.cached_files(&names);
    println!("{} cached files after {:?}", files.len(), start.elapsed());
    for file in files {
        let mut line = format!("{:6} ", file.pages);
        file.facts.describe(&mut line, &names).expect("a string");
        println!("{line}");
    }
}

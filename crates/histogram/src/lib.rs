//! Distributions of numbers, such as latencies.
//!
//! Read [`Histogram`] first. The crate must not know what is counted.
//!
//! [`Histogram`] is a distribution that can be added to, subtracted and sent; [`Cells`] is a
//! distribution in which one thread counts while others read. Both have the same buckets, of a
//! fixed, logarithmic width: values below 32 have a bucket each, and above, each power of two is
//! cut into 32, so that a value is at most 3.1 % below the largest of its bucket. The value `v`
//! with the highest bit `e` lies in bucket `(e - 4) * 32 + ((v >> (e - 5)) & 31)`. That is the
//! layout of HDR histograms. It never changes, so histograms of different times, disks and daemons
//! can be added, and the difference of two samples of one growing histogram is the distribution in
//! between.
//!
//! The crate `hdrhistogram`, which the load generator uses where it needs three digits, has neither
//! counts that one thread writes while another reads without a lock, nor a JSON form that omits
//! empty buckets.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod cells;
mod sparse;

pub use cells::Cells;
pub use sparse::Histogram;

/// The bits within a power of two that a bucket resolves: 32 buckets.
const RESOLUTION_BITS: u32 = 5;
const RESOLUTION: u64 = 1 << RESOLUTION_BITS;

/// The bucket that `value` lies in.
fn index(value: u64) -> u32 {
    if value < RESOLUTION {
        return value as u32;
    }
    let exponent = value.ilog2();
    let part = (value >> (exponent - RESOLUTION_BITS)) & (RESOLUTION - 1);
    (exponent - RESOLUTION_BITS + 1) * RESOLUTION as u32 + part as u32
}

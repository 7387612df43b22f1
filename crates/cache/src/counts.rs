//! What a cache counts. Each counter is one line of a table here: its name, the name of its metric
//! and its meaning. The layer `cache`, the control interface and the metrics have these types.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The name of a counter's metric, its meaning, and its value.
pub type Counted = (&'static str, &'static str, u64);

/// Declares counts, each with the name of its metric and its meaning.
macro_rules! counts {
    ($(#[$of_counts:meta])* $counts:ident { $($count:ident: $metric:literal, $meaning:literal;)* }) => {
        $(#[$of_counts])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $counts {
            $(#[doc = $meaning] pub $count: u64,)*
        }

        impl $counts {
            /// Adds the counts of `other`.
            pub fn merge(&mut self, other: &Self) {
                $(self.$count += other.$count;)*
            }

            /// The difference to the earlier counts `before`.
            #[must_use]
            pub fn since(&self, before: &Self) -> Self {
                Self { $($count: self.$count.saturating_sub(before.$count),)* }
            }

            /// The counts as metrics.
            pub fn metrics(&self) -> impl Iterator<Item = Counted> + use<> {
                [$(($metric, $meaning, self.$count),)*].into_iter()
            }
        }
    };
}

/// Declares counts, and cells in which one thread counts while others read.
macro_rules! counts_with_cells {
    (
        $(#[$of_counts:meta])* $counts:ident,
        $(#[$of_cells:meta])* $cells:ident
        { $($count:ident: $metric:literal, $meaning:literal;)* }
    ) => {
        counts! { $(#[$of_counts])* $counts { $($count: $metric, $meaning;)* } }

        $(#[$of_cells])*
        #[derive(Debug, Default)]
        #[repr(align(64))]
        pub struct $cells {
            $(#[doc = $meaning] pub $count: AtomicU64,)*
        }

        impl $cells {
            /// The counts now.
            pub fn read(&self) -> $counts {
                $counts { $($count: self.$count.load(Ordering::Relaxed),)* }
            }

            /// Begins again.
            pub fn reset(&self) {
                $(self.$count.store(0, Ordering::Relaxed);)*
            }
        }
    };
}

counts_with_cells! {
    /// Counts of reads.
    CacheCounts,
    /// [`CacheCounts`] in one line of the processor's cache. Only one thread writes them.
    CacheCells
    {
        reads: "reads_total", "Reads.";
        hits: "hits_total", "Reads that the cache had wholly.";
        read_bytes: "read_bytes_total", "Bytes read.";
        hit_bytes: "hit_bytes_total", "Bytes read that the cache had.";
        avoided_ns: "avoided_nanoseconds_total",
            "Time that hits would have taken without the cache, as estimated.";
        hit_ns: "hit_nanoseconds_total", "Time of hits.";
        miss_ns: "miss_nanoseconds_total", "Time of reads that the cache had not wholly.";
    }
}

const _: () = assert!(size_of::<CacheCells>() == 64);

impl CacheCounts {
    /// The share of the reads that the cache had wholly, from 0 to 1; `None` without reads.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.reads > 0).then(|| self.hits as f64 / self.reads as f64)
    }

    /// The time that hits saved, in nanoseconds.
    pub fn saved_ns(&self) -> u64 {
        self.avoided_ns.saturating_sub(self.hit_ns)
    }
}

counts! {
    /// Counts of the blocks of a cache, of all its disks.
    BlockCounts {
        insertions: "insertions_total", "Blocks put into the cache, of all disks.";
        evictions: "evictions_total", "Blocks removed to make room, of all disks.";
        overwritten: "overwritten_total",
            "Blocks removed because they were written, of all disks.";
        discarded: "discarded_total",
            "Blocks removed because they were discarded or zeroed, or their disk shrank or left, of \
             all disks.";
        refused: "refused_total", "Blocks that the policy did not admit, of all disks.";
        no_room: "no_room_total",
            "Blocks that were not put into the cache because no slot was free, of all disks.";
        ahead: "read_ahead_total", "Blocks read ahead of the guest, of all disks.";
        ahead_used: "read_ahead_used_total",
            "Blocks read ahead that the guest has read, of all disks.";
        ahead_unused: "read_ahead_unused_total",
            "Blocks read ahead that have left the cache unread, of all disks.";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_and_subtracted() {
        let cells = CacheCells::default();
        cells.reads.store(5, Ordering::Relaxed);
        cells.miss_ns.store(7, Ordering::Relaxed);
        let first = cells.read();
        assert_eq!(first, CacheCounts { reads: 5, miss_ns: 7, ..CacheCounts::default() });
        let mut sum = first;
        sum.merge(&CacheCounts { reads: 1, hits: 3, ..CacheCounts::default() });
        assert_eq!((sum.hit_ratio(), sum.since(&first).hits), (Some(0.5), 3));
        assert_eq!(first.since(&sum), CacheCounts::default());
        assert!(
            sum.metrics()
                .any(|count| count == ("hits_total", "Reads that the cache had wholly.", 3))
        );
        cells.reset();
        assert_eq!(cells.read(), CacheCounts::default());
    }
}

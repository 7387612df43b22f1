//! What caches do for their disks, by class, and what other sizes would do.

use fathom_control::{CacheClass, CacheDisk, CacheReport};

use crate::daemon::metrics::{MetricsText, disk_labels};

type Count = fn(&CacheClass) -> u64;

const CLASSES: [(&str, &str, Count); 3] = [
    ("fathom_cache_reads_total", "Reads of a disk with a cache, by class.", |class| {
        class.counts.reads
    }),
    ("fathom_cache_hits_total", "Reads that the cache had wholly, by class.", |class| {
        class.counts.hits
    }),
    ("fathom_cache_hit_bytes_total", "Bytes read that the cache had, by class.", |class| {
        class.counts.hit_bytes
    }),
];

pub(crate) fn of_caches(page: &mut MetricsText, report: &CacheReport) {
    let disks = || report.caches.iter().flat_map(|cache| &cache.disks);
    if disks().next().is_none() {
        return;
    }
    for (name, meaning, count) in CLASSES {
        page.family(name, "counter", meaning);
        for disk in disks() {
            for class in &disk.classes {
                let labels = labels(disk, "class", &class.class);
                page.sample(name, &labels, count(class));
            }
        }
    }
    let name = "fathom_cache_used_bytes";
    page.family(name, "gauge", "The part of its cache with blocks of the disk.");
    for disk in disks() {
        page.sample(name, &disk_labels(&disk.name, &disk.vm), disk.used_bytes);
    }
    let name = "fathom_cache_miss_ratio_estimate";
    page.family(
        name,
        "gauge",
        "Estimated miss ratio of the last one to two hours with an LRU cache of a size in percent of \
         the present one.",
    );
    for disk in disks().filter(|disk| disk.curve.accesses > 0) {
        page.sample(name, &labels(disk, "size", "100"), disk.curve.miss_ratio);
        for estimate in &disk.curve.estimates {
            let size = estimate.percent.to_string();
            page.sample(name, &labels(disk, "size", &size), estimate.miss_ratio);
        }
    }
}

/// The labels of a disk, and one more.
fn labels<'a>(disk: &'a CacheDisk, name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut labels = disk_labels(&disk.name, &disk.vm).to_vec();
    labels.push((name, value));
    labels
}

#[cfg(test)]
mod tests {
    use fathom_control::{CacheCurve, CacheDisk, CacheInfo};

    use super::*;
    use crate::daemon::metrics::assert_documented;

    #[test]
    fn every_metric_is_documented() {
        let curve = CacheCurve { accesses: 1, ..CacheCurve::default() };
        let disks = vec![CacheDisk { curve, ..CacheDisk::default() }];
        let caches = vec![CacheInfo { disks, ..CacheInfo::default() }];
        let mut page = MetricsText::default();
        of_caches(&mut page, &CacheReport { caches, ..CacheReport::default() });
        assert_documented(&page.text);
    }
}

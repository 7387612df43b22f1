//! The sample against a model, and the spans of requests.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Span, find_spans};
use crate::guest_pages::sample::{Block, DiskCounts, Filter, PAGE, PageSample, blocks};

const WEIGHT: u64 = 8 * PAGE;

#[derive(Default)]
struct Scene {
    sample: PageSample,
    filter: Filter,
    disks: [Arc<DiskCounts>; 2],
}

impl Scene {
    fn associate(&mut self, frame: u64, disk: usize, offset: u64, checksum: u64) {
        let block = Block { disk: Arc::clone(&self.disks[disk]), offset, checksum };
        self.sample.associate(frame, block, WEIGHT, &self.filter);
    }

    fn out(&mut self, frame: u64) {
        self.sample.went_out(frame, WEIGHT);
    }

    fn back(&mut self, frame: u64, checksum: u64) {
        self.sample.came_in(frame, checksum, WEIGHT, &self.filter);
    }

    fn change(&mut self, disk: usize, offset: u64, length: u64) {
        let disk = Arc::clone(&self.disks[disk]);
        self.sample.forget_blocks(&disk, (offset, length), &self.filter);
    }

    /// Pages that went out, were silent, were changed, and blocks read again.
    fn counts(&self, disk: usize) -> [u64; 4] {
        let counts = &self.disks[disk];
        [&counts.out, &counts.silent, &counts.changed, &counts.reread].map(|estimate| {
            let load = |count: &std::sync::atomic::AtomicU64| {
                count.load(std::sync::atomic::Ordering::Relaxed)
            };
            assert_eq!(load(&estimate.bytes), load(&estimate.pages) * WEIGHT);
            load(&estimate.pages)
        })
    }
}

#[test]
fn a_page_is_judged_when_it_is_back() {
    let mut scene = Scene::default();
    scene.associate(1, 0, 0, 10);
    scene.associate(2, 0, 4096, 20);
    scene.associate(3, 1, 4096, 30);
    // A page that was never out is not judged.
    scene.back(1, 10);
    for frame in [1, 2, 3, 4] {
        scene.out(frame);
        scene.out(frame);
    }
    assert_eq!((scene.counts(0), scene.counts(1)), ([2, 0, 0, 0], [1, 0, 0, 0]));
    scene.back(1, 10);
    scene.back(2, 21);
    scene.back(2, 20);
    assert_eq!(scene.counts(0), [2, 1, 1, 0]);
    // What was changed is followed no more; what was not can go out again.
    scene.out(1);
    scene.out(2);
    assert_eq!((scene.counts(0), scene.sample.is_out(2)), ([3, 1, 1, 0], None));
    // A write of a page that is out reads it: that is a judgement.
    scene.associate(3, 0, 8192, 30);
    assert_eq!((scene.counts(1), scene.sample.is_out(3)), ([1, 1, 0, 0], Some(false)));
}

#[test]
fn what_is_read_into_or_changed_on_the_disk_is_not_judged() {
    let mut scene = Scene::default();
    for frame in 0..4 {
        scene.associate(frame, 0, frame * PAGE, frame);
        scene.out(frame);
    }
    scene.sample.forget_page(0, &scene.filter);
    scene.change(1, 0, u64::MAX);
    scene.change(0, 2 * PAGE - 512, 512);
    // More blocks than there are pages.
    scene.change(0, 3 * PAGE, u64::MAX);
    for frame in 0..4 {
        scene.back(frame, frame);
    }
    assert_eq!((scene.counts(0), scene.sample.len()), ([4, 1, 0, 0], 1));
    // The block is in another page now.
    scene.associate(9, 0, 2 * PAGE, 2);
    assert_eq!(scene.sample.frames(), [9]);
}

#[test]
fn a_block_is_read_again_while_its_page_is_out() {
    let mut scene = Scene::default();
    scene.associate(1, 0, 512, 1);
    scene.associate(2, 0, 8192, 2);
    scene.out(1);
    for offset in [0, 512, 4096, 8192, 12288] {
        scene.sample.reread(&scene.disks[0], offset, WEIGHT);
        scene.sample.reread(&scene.disks[1], offset, WEIGHT);
    }
    assert_eq!((scene.counts(0)[3], scene.counts(1)[3]), (1, 0));
}

/// Any sequence of steps leaves what a plain model has, and the filter never denies a block.
#[test]
fn the_sample_equals_a_plain_model() {
    let mut random = fastrand::Rng::with_seed(39);
    let mut scene = Scene::default();
    // Of each page: the disk, the offset, and whether it is out.
    let mut model: HashMap<u64, (usize, u64, bool)> = HashMap::new();
    for _ in 0..200_000 {
        let (frame, disk) = (random.u64(..24), random.usize(..2));
        let offset = random.u64(..256) * 512;
        match random.u8(..5) {
            0 => {
                scene.associate(frame, disk, offset, 0);
                let touches = |other: &(usize, u64, bool)| {
                    let of = |offset| blocks(offset, PAGE);
                    other.0 == disk && of(other.1).any(|block| of(offset).contains(&block))
                };
                model.retain(|page, other| *page != frame && !touches(other));
                model.insert(frame, (disk, offset, false));
            }
            1 => {
                scene.sample.forget_page(frame, &scene.filter);
                model.remove(&frame);
            }
            2 => {
                let length = random.u64(1..40) * 512;
                scene.change(disk, offset, length);
                model.retain(|_, other| {
                    let overlaps = other.1 < offset + length && offset < other.1 + PAGE;
                    other.0 != disk || !overlaps
                });
            }
            3 => {
                scene.out(frame);
                model.entry(frame).and_modify(|entry| entry.2 = true);
            }
            _ => {
                scene.back(frame, 0);
                model.entry(frame).and_modify(|entry| entry.2 = false);
            }
        }
        assert_eq!(scene.sample.len(), model.len());
        for (frame, (disk, offset, is_out)) in &model {
            assert_eq!(scene.sample.is_out(*frame), Some(*is_out));
            let disk = &scene.disks[*disk];
            assert!(blocks(*offset, PAGE).all(|block| scene.filter.may_have(disk, block)));
        }
    }
}

#[test]
fn contiguous_segments_are_one_span_and_pages_are_whole_or_touched() {
    let segments = [
        (4096, Some(0x1000)),
        (512, Some(0x2000)),
        (100, None),
        (1000, Some(0x2200)),
        (8192, Some(0x9fff)),
    ];
    let mut spans = vec![Span { address: 0, offset: 0, length: 1 }];
    find_spans(segments.into_iter(), &mut spans);
    let found: Vec<(u64, u64, u64)> =
        spans.iter().map(|span| (span.address, span.offset, span.length)).collect();
    assert_eq!(found, [(0x1000, 0, 4608), (0x2200, 4708, 1000), (0x9fff, 5708, 8192)]);
    let pages: Vec<_> = spans.iter().map(|span| (span.whole(), span.touched())).collect();
    assert_eq!(pages, [(1..2, 1..3), (3..3, 2..3), (10..11, 9..12)]);
    let last = Span { address: u64::MAX - 10, offset: 0, length: 4096 };
    assert!(last.whole().is_empty() && last.touched().count() == 1);
}

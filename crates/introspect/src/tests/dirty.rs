//! The dirty pages of synthetic guests, and of guests that mislead.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::recording;
use fathom_insight::{ClassTable, Insight, Names};

use super::SyntheticGuest;
use crate::dirty::{Dirty, DirtyDevice, DirtyFiles, DiskObject, PageSample, WrittenPages};
use crate::kernel::Kernel;
use crate::synthetic::dirty::{DEVICES, DIRTY, ENTRIES, FILES, MAPPED};
use crate::synthetic::{COUNTS, Shape, Store};

const PAGE: u64 = 4096;

fn shapes() -> [Shape; 3] {
    [Shape::default(), Shape::recent(), Shape::seven()]
}

/// A guest and its kernel.
struct Subject {
    guest: SyntheticGuest,
    kernel: Arc<Kernel>,
}

impl Subject {
    fn new(shape: &Shape) -> Self {
        let guest = SyntheticGuest::new(shape);
        let kernel = guest.guest().kernel().unwrap();
        Self { guest, kernel }
    }

    fn place(&self, address: u64) -> u64 {
        self.kernel.space.translate(&self.guest.memory, address).unwrap()
    }

    fn get(&self, address: u64) -> u64 {
        self.kernel.u64(address).unwrap()
    }

    fn set(&self, address: u64, value: u64) {
        self.guest.store.write_u64(self.place(address), value);
    }

    /// The address of a device's `backing_dev_info`.
    fn bdi(&self, name: &str) -> u64 {
        let mut bdis = self.kernel.bdis().unwrap().map(Option::unwrap);
        bdis.find(|bdi| self.kernel.device_name(*bdi).unwrap() == name).unwrap()
    }

    fn writer(&self, name: &str) -> u64 {
        self.kernel.writers(self.bdi(name), 10).unwrap().next().unwrap().unwrap()
    }

    fn count(&self) -> Dirty {
        self.kernel.dirty(&[])
    }

    fn files(&self) -> DirtyFiles {
        self.kernel.dirty_files(&Names::default(), 1000).unwrap()
    }

    /// The root entry of the tree of the first file of a device.
    fn root(&self, device: &str) -> u64 {
        let layout = &self.kernel.layout;
        let link = self.get(self.writer(device) + layout.writer_dirty.unwrap());
        let inode = link - layout.inode_writers.unwrap();
        inode + layout.inode_data + layout.mapping_pages.unwrap() + layout.pages_root.unwrap()
    }
}

#[test]
fn counts_are_exact() {
    for shape in shapes() {
        let subject = Subject::new(&shape);
        let found = subject.count();
        assert_eq!(found.shown, Some(COUNTS.dirty * PAGE));
        assert_eq!(found.writeback_shown, Some(COUNTS.writeback * PAGE));
        assert_eq!(found.dirty, Some(DIRTY.0 * PAGE));
        assert_eq!(found.writeback, Some(DIRTY.1 * PAGE));
        let devices = found.devices.unwrap();
        let expected = DEVICES.map(|(name, dirty, writeback, _)| DirtyDevice {
            name: name.into(),
            dirty: dirty * PAGE,
            writeback: writeback * PAGE,
            disks: Vec::new(),
            lies_elsewhere: true,
        });
        assert_eq!(devices, expected, "{}", shape.release);
        let sum: u64 = devices.iter().map(|device| device.dirty).sum();
        assert_eq!(Some(sum), found.dirty);
    }
}

#[test]
fn files_are_exact() {
    for shape in shapes() {
        let subject = Subject::new(&shape);
        let names = Names::default();
        let found = subject.kernel.dirty_files(&names, 1000).unwrap();
        let files: Vec<(String, u64)> = found
            .files
            .iter()
            .map(|file| (names.text(file.facts.path).unwrap().to_string(), file.dirty / PAGE))
            .collect();
        assert_eq!(files, FILES.map(|(path, pages)| (path.to_owned(), pages)), "{}", shape.release);
        assert_eq!((found.dirty, found.is_whole), (DIRTY.0 * PAGE, true));
        let first = subject.kernel.dirty_files(&names, 1).unwrap();
        assert_eq!((first.files.len(), first.dirty), (1, found.dirty));
    }
}

#[test]
fn a_request_leads_to_the_disk_of_its_device() {
    let subject = Subject::new(&Shape::default());
    let guest = subject.guest.guest();
    let object = Arc::new(DiskObject::default());
    let mut resolver = guest.resolver_of(Arc::clone(&object));
    assert_eq!(object.get(), 0);
    let request = subject.guest.linux.request("data");
    let pieces = request.pieces.iter().copied();
    resolver.resolve(&request.view, pieces, &ClassTable::default(), &mut Insight::default());
    let disks = |name: &str| {
        let found = guest.kernel().unwrap().dirty(std::slice::from_ref(&object));
        let device = found.devices.unwrap().into_iter().find(|device| device.name == name);
        device.map(|device| (device.disks, device.lies_elsewhere))
    };
    assert_eq!(disks("vda"), Some((vec![0], false)));
    assert_eq!(disks("dm-0"), Some((vec![], true)));
    // A disk without dirty pages appears if it is known, and so does a device on it.
    let layout = &subject.kernel.layout;
    let owner = subject.get(subject.bdi("vdb") + layout.bdi_owner.unwrap());
    let device = owner - layout.block_device_driver.unwrap();
    object.set(subject.get(device + layout.block_device_disk.unwrap()));
    assert_eq!(disks("vdb"), Some((vec![0], false)));
    assert_eq!(disks("dm-0"), Some((vec![0], false)));
    assert_eq!(disks("vda"), Some((vec![], true)));
    // An address that is no disk any more is none.
    object.set(subject.guest.linux.shape.direct + PAGE);
    assert_eq!(disks("vda"), Some((vec![], true)));
    object.clear();
    assert_eq!(disks("vdb"), None);
}

#[test]
fn btrfs_lies_on_its_devices() {
    let subject = Subject::new(&Shape::recent());
    let layout = &subject.kernel.layout;
    let owner = subject.get(subject.bdi("vdc") + layout.bdi_owner.unwrap());
    let device = owner - layout.block_device_driver.unwrap();
    let object = Arc::new(DiskObject::default());
    object.set(subject.get(device + layout.block_device_disk.unwrap()));
    let found = subject.kernel.dirty(&[object]).devices.unwrap();
    let found = found.iter().find(|device| device.name == "btrfs-1").unwrap();
    assert_eq!((&found.disks[..], found.lies_elsewhere), (&[0][..], false));
}

#[test]
fn a_super_block_that_was_found_before_is_checked() {
    let subject = Subject::new(&Shape::recent());
    let layout = &subject.kernel.layout;
    let lies_on = || {
        let owner = subject.get(subject.bdi("vdc") + layout.bdi_owner.unwrap());
        let device = owner - layout.block_device_driver.unwrap();
        let object = Arc::new(DiskObject::default());
        object.set(subject.get(device + layout.block_device_disk.unwrap()));
        let found = subject.kernel.dirty(&[object]).devices.unwrap();
        found.into_iter().find(|device| device.name == "btrfs-1").unwrap().disks
    };
    assert_eq!(lies_on(), [0]);
    // The second count does not read the whole list.
    let reads = || {
        let before = recording::count();
        subject.count();
        recording::count() - before
    };
    let short = reads();
    let bdi = subject.bdi("btrfs-1");
    let list = subject.kernel.places.super_blocks.unwrap();
    let mut links = subject.kernel.links(list, 100).map(Option::unwrap);
    let of = |link: &u64| link - layout.sb_list + layout.sb_bdi.unwrap();
    let link = links.find(|link| subject.get(of(link)) == bdi).unwrap();
    let others: Vec<u64> = subject
        .kernel
        .links(list, 100)
        .map(Option::unwrap)
        .filter(|other| *other != link)
        .collect();
    assert!(!others.is_empty());
    // The file system is gone, and its memory is as before: the list does not have it any more.
    let (next, previous) = (subject.get(link), subject.get(link + 8));
    subject.set(previous, next);
    subject.set(next + 8, previous);
    assert_eq!(lies_on(), [] as [usize; 0]);
    assert!(reads() > short, "the list is read again");
    subject.set(previous, link);
    subject.set(next + 8, link);
    assert_eq!(lies_on(), [0]);
    // It belongs to another device.
    subject.set(of(&link), subject.bdi("vda"));
    assert_eq!(lies_on(), [] as [usize; 0]);
}

#[test]
fn torn_lists_are_unknown() {
    for shape in shapes() {
        let subject = Subject::new(&shape);
        let layout = subject.kernel.layout.clone();
        let head = subject.kernel.dirty.bdi_list.unwrap();
        let writer = subject.writer("vda");
        let link = writer + layout.writer_list.unwrap();
        let places = [
            // The list of devices, and that of their writers: an entry that follows itself, one
            // that leads nowhere, and one that leads to another.
            (head, subject.get(subject.get(head))),
            (subject.get(head), subject.get(head)),
            (head, 0),
            (head, 0xdead_0000_0000_0100),
            (link, link),
            (link, 0),
            (link, head),
            // A writer of another device.
            (writer + layout.writer_bdi.unwrap(), subject.bdi("vdb")),
            // The parts of a counter are nowhere.
            (writer + layout.writer_counts.unwrap() + layout.counter_parts.unwrap(), 1 << 40),
            (writer + layout.writer_counts.unwrap() + layout.counter_parts.unwrap(), 0),
            // More pages than there are.
            (writer + layout.writer_counts.unwrap() + layout.counter_sum.unwrap(), 1 << 50),
            (writer + layout.writer_counts.unwrap() + layout.counter_sum.unwrap(), i64::MAX as u64),
        ];
        for (place, value) in places {
            let before = subject.get(place);
            subject.set(place, value);
            let found = subject.count();
            assert_eq!(found.devices, None, "{place:x} {value:x}");
            assert_eq!(found.dirty, Some(DIRTY.0 * PAGE), "the other counters are known");
            subject.set(place, before);
        }
        assert!(subject.count().devices.is_some());
    }
}

#[test]
fn counters_beyond_the_memory_are_unknown() {
    let subject = Subject::new(&Shape::default());
    let place = subject.kernel.counters.node_counts().unwrap() + 20 * 8;
    for (value, expected) in [
        (u64::MAX, Some(21 * PAGE)),
        (u64::MAX - 100, Some(0)),
        (i64::MAX as u64, None),
        (1 << 40, None),
    ] {
        subject.set(place, value);
        assert_eq!(subject.count().dirty, expected, "{value:x}");
    }
    subject.set(place, COUNTS.dirty);
    // Numbers of processors and nodes.
    for place in [subject.kernel.dirty.processor_count, subject.kernel.dirty.node_count] {
        let place = place.unwrap();
        let before = subject.get(place);
        for count in [u64::from(u32::MAX), 100_000] {
            subject.set(place, count);
            if Some(place) == subject.kernel.dirty.processor_count {
                let found = subject.count();
                assert_eq!((found.dirty, found.devices), (None, None));
                assert_eq!(found.shown, Some(COUNTS.dirty * PAGE));
            }
        }
        subject.set(place, before);
    }
    let recent = Subject::new(&Shape::recent());
    recent.set(recent.kernel.dirty.node_count.unwrap(), 100_000);
    assert_eq!(recent.count().dirty, None);
}

#[test]
fn trees_that_mislead() {
    for shape in shapes() {
        let subject = Subject::new(&shape);
        let layout = subject.kernel.layout.clone();
        // The tree of the image has two levels.
        let root = subject.root("dm-0");
        let entry = subject.get(root);
        let node = entry & !3;
        let slots = node + layout.tree_slots.unwrap();
        let child = subject.get(slots);
        let marks = node + layout.tree_marks.unwrap();
        let cases = [
            // A node below itself, a node of another tree, nodes that are nowhere.
            (slots, entry),
            (root, subject.get(subject.root("vda"))),
            (slots, subject.get(subject.root("vda"))),
            (root, 0xdead_beef_0000_0002),
            (root, 1),
            (root, 6),
            (slots, 0xdead_beef_0000_0002),
            // All entries are marked, and most are empty.
            (marks, u64::MAX),
            (child - 2 + layout.tree_parent.unwrap(), node + 64),
            (child - 2 + layout.tree_array.unwrap(), node),
        ];
        for (place, value) in cases {
            let before = subject.get(place);
            subject.set(place, value);
            let found = subject.files();
            let image = found.files.iter().find(|file| file.device == "dm-0");
            let pages = image.map_or(0, |file| file.dirty / PAGE);
            assert!(pages == 0 && !found.is_whole, "{place:x} {value:x}: {pages}");
            assert!(found.files.len() >= 4, "the others are known");
            subject.set(place, before);
        }
        assert_eq!(subject.files().dirty, DIRTY.0 * PAGE);
        // A shift that is not below the parent's.
        let shift = subject.place(node + layout.tree_shift.unwrap());
        for value in [0_u8, 7, 60, 66, 255] {
            subject.guest.store.write(shift, &[value]);
            let found = subject.files();
            assert!(!found.is_whole, "{value}");
        }
    }
}

#[test]
fn changes_through_mappings_are_exact() {
    for shape in shapes() {
        let found = Subject::new(&shape).kernel.mapped_dirty().unwrap();
        assert_eq!(
            (found.marked, found.unknown),
            (MAPPED.0 * PAGE, MAPPED.1 * PAGE),
            "{}",
            shape.release
        );
        assert_eq!((found.processes, found.is_whole), (1, true));
    }
}

#[test]
fn mappings_that_mislead() {
    for shape in shapes() {
        let subject = Subject::new(&shape);
        let layout = &subject.kernel.layout;
        let list = layout.task_list;
        let mut tasks = subject.kernel.links(subject.kernel.places.first_task.unwrap() + list, 10);
        let memory = tasks.find_map(|link| {
            let task = link.unwrap() - list;
            subject.kernel.pointer(task + layout.task_memory.unwrap())
        });
        let memory = memory.unwrap();
        let root = memory + layout.memory_areas.unwrap();
        let entry = subject.get(root);
        let node = entry & !255;
        let slots = node + layout.gaps_slots.unwrap();
        let leaf = subject.get(slots);
        let area_slot = (leaf & !255) + layout.range_slots.unwrap() + 8;
        let area = subject.get(area_slot);
        let tables = subject.get(memory + layout.memory_tables.unwrap());
        let cases = [
            // A node below itself, a node that was removed, nodes of another type or nowhere.
            (slots, entry & !2 | 4),
            (leaf & !255, leaf & !255),
            (root, 0xdead_beef_0000_100e),
            (root, node | 2),
            (root, node | 7 << 3 | 2),
            (slots, 0xdead_beef_0000_0000),
            // A mapping of another process, with an odd range, or nowhere.
            (area + layout.area_memory.unwrap(), memory + 64),
            (area + layout.area_end.unwrap(), 0),
            (area + layout.area_end.unwrap(), u64::MAX),
            (area + layout.area_file.unwrap(), 1 << 40),
            (area_slot, 0xdead_beef_0000_0000),
            // A file of another mapping.
            (subject.get(area + layout.area_file.unwrap()) + layout.file_mapping.unwrap(), memory),
            // Tables outside the memory.
            (memory + layout.memory_tables.unwrap(), 0xdead_beef_0000_0000),
            (memory + layout.memory_tables.unwrap(), tables | 1 << 45),
        ];
        for (place, value) in cases {
            let before = subject.get(place);
            subject.set(place, value);
            let found = subject.kernel.mapped_dirty().unwrap();
            assert!(!found.is_whole && found.marked <= MAPPED.0 * PAGE, "{place:x} {value:x}");
            subject.set(place, before);
        }
        // A range over all addresses, in tables that contain themselves.
        let top = subject.kernel.space.direct(tables).unwrap();
        let saved: Vec<u64> =
            (0..512).map(|index| subject.guest.memory.u64(top + index * 8).unwrap()).collect();
        for index in 0..512 {
            subject.guest.store.write_u64(top + index * 8, top | 0x67);
        }
        let (start, end) = (area + layout.area_start.unwrap(), area + layout.area_end.unwrap());
        let range = (subject.get(start), subject.get(end));
        subject.set(start, 0);
        subject.set(end, 1 << 47);
        let begun = Instant::now();
        let found = subject.kernel.mapped_dirty().unwrap();
        assert!(!found.is_whole && begun.elapsed() < Duration::from_secs(60));
        subject.set(start, range.0);
        subject.set(end, range.1);
        for (index, entry) in (0..).zip(saved) {
            subject.guest.store.write_u64(top + index * 8, entry);
        }
        assert!(subject.kernel.mapped_dirty().unwrap().is_whole);
    }
}

#[test]
fn written_pages_are_found_by_page_tables_alone() {
    for shape in shapes() {
        let guest = SyntheticGuest::new(&shape);
        let written =
            |stride, first| WrittenPages::count(&guest.memory, stride, first, &mut || true);
        let whole = written(1, 0);
        assert_eq!((whole.marked, whole.tables), (ENTRIES * PAGE, 3), "{}", shape.release);
        assert_eq!((whole.error, whole.is_whole), (Some(0), true));
        // The samples of all beginnings together are the whole.
        for stride in [2, 3, 20] {
            let samples = (0..stride).map(|first| written(stride, first));
            let sums = samples.fold((0, 0), |(marked, tables), sample| {
                (marked + sample.marked, tables + sample.tables)
            });
            assert_eq!(sums, (whole.marked * stride, whole.tables));
        }
        assert_eq!(written(0, 7).marked, whole.marked, "a stride of 0 is 1");
        let none = written(u64::MAX, 1 << 63);
        assert_eq!((none.tables, none.error), (0, None));
    }
}

/// Sampling errors follow the estimated error: for a table among `stride` pages, the estimate is 0
/// or `stride` times its marks.
#[test]
fn the_error_of_a_sample_is_estimated() {
    let guest = SyntheticGuest::new(&Shape::default());
    let whole = WrittenPages::count(&guest.memory, 1, 0, &mut || true).marked as f64;
    for stride in [2, 5, 20] {
        let samples = (0..stride)
            .map(|first| WrittenPages::count(&guest.memory, stride, first, &mut || true));
        let (mut actual, mut estimated) = (0.0, 0.0);
        for sample in samples {
            actual += (sample.marked as f64 - whole).powi(2);
            estimated += (sample.error.unwrap_or(0) as f64).powi(2);
        }
        let ratio = (estimated / actual).sqrt();
        assert!((0.7..1.4).contains(&ratio), "stride {stride}: {ratio}");
    }
}

#[test]
fn the_search_for_page_tables_ends_when_its_time_is_over() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut left = 2;
    let part = WrittenPages::count(&guest.memory, 1, 0, &mut || {
        left -= 1;
        left > 0
    });
    assert!(!part.is_whole && (1..=64).contains(&part.examined), "{part:?}");
    let none = WrittenPages::count(&guest.memory, 1, 0, &mut || false);
    assert_eq!((none.is_whole, none.examined), (false, 0));
}

#[test]
fn pages_that_were_written_are_found_by_their_content() {
    let store = Store::new(&[(0, 64 << 20), (1 << 32, 64 << 20)]).unwrap();
    let memory = store.memory();
    // Every third page has content, and some of the others have been touched.
    for page in (0..8192).step_by(3) {
        store.write_u64(page * PAGE + 8, 0x5555 ^ page);
    }
    store.write_u64(PAGE, 0);
    let before = PageSample::take(&memory, 7, &mut || true);
    let same = before.changed(&memory, &mut || true);
    assert_eq!((same.changed, same.error, same.stride, same.is_whole), (0, 0, 1, true));
    assert_eq!(same.examined, 8192_u64.div_ceil(3) + 1);
    // The last word of a page, a page in the other region, one that was empty, a new page, a new
    // page that stays empty, and a word that is written with its own value.
    for (address, value) in [
        (3 * PAGE - 8 + PAGE, 1),
        ((1 << 32) + 6 * PAGE, 2),
        (PAGE, 3),
        (2 * PAGE + 64, 4),
        (5 * PAGE, 0),
        (9 * PAGE + 8, 0x5555 ^ 9),
    ] {
        store.write_u64(address, value);
    }
    let found = before.changed(&memory, &mut || true);
    assert_eq!((found.changed, found.error, found.is_whole), (4 * PAGE, 0, true), "{found:?}");
    // A time that is over: the rest of the memory does not count as written.
    let part = PageSample::take(&memory, 0, &mut || false).changed(&memory, &mut || true);
    assert_eq!((part.changed, part.examined, part.is_whole), (0, 0, false));
    let mut left = 3;
    let early = PageSample::take(&memory, 0, &mut || {
        left -= 1;
        left > 0
    });
    let part = early.changed(&memory, &mut || true);
    assert_eq!((part.changed, part.is_whole), (0, false), "{part:?}");
    assert!((1..=128).contains(&part.examined), "{part:?}");
    assert!(!before.changed(&memory, &mut || false).is_whole);
}

#[test]
fn a_sample_of_written_pages_has_an_error_as_large_as_estimated() {
    // Every second page of 512 MiB is in the sample. A tenth of the touched ones changes.
    let store = Store::new(&[(0, 512 << 20)]).unwrap();
    let memory = store.memory();
    for page in 0..16_384 {
        store.write_u64(page * PAGE, 1);
    }
    let (mut random, mut beyond) = (fastrand::Rng::with_seed(12), 0);
    for turn in 0..20 {
        let before = PageSample::take(&memory, turn, &mut || true);
        let mut written = 0;
        for page in 0..16_384 {
            if random.u8(..) < 26 {
                store.write_u64(page * PAGE, 2 + turn);
                written += PAGE;
            }
        }
        let found = before.changed(&memory, &mut || true);
        assert_eq!((found.stride, found.examined), (2, 8192));
        assert!(found.error > 0 && found.error < written / 20, "{found:?}");
        beyond += usize::from(found.changed.abs_diff(written) > 2 * found.error);
    }
    // Two standard errors have 95 % of the samples.
    assert!(beyond <= 4, "{beyond} of 20");
}

impl Subject {
    /// Makes a list of links at the guest-physical addresses `first`, `first + stride` and so on.
    fn chain(&self, head: u64, first: u64, stride: u64, count: u64) {
        let direct = self.guest.linux.shape.direct;
        let mut before = head;
        for link in (0..count).map(|index| direct + first + index * stride).chain([head]) {
            self.set(before, link);
            self.set(link + 8, before);
            before = link;
        }
    }
}

/// A thousand devices, for each of which a thousand file systems would be looked at.
#[test]
fn the_effort_of_all_lists_together_is_bounded() {
    const COUNT: u64 = 1000;
    let subject = Subject::new(&Shape { room: (2 << 20, 12 << 20), ..Shape::default() });
    let layout = &subject.kernel.layout;
    let (file_systems, devices) = (8 << 20, 9 << 20);
    subject.chain(subject.kernel.places.super_blocks.unwrap(), file_systems, 16, COUNT);
    let list = subject.kernel.dirty.bdi_list.unwrap();
    subject.chain(list, devices + layout.bdi_list.unwrap(), PAGE, COUNT);
    for bdi in subject.kernel.bdis().unwrap().map(Option::unwrap) {
        let writers = bdi + layout.bdi_writers.unwrap();
        subject.set(writers, writers);
        subject.set(writers + 8, writers);
    }
    let before = recording::count();
    let found = subject.count();
    let reads = recording::count() - before;
    assert!(reads < 2_000_000, "{reads}");
    assert_eq!((found.dirty, found.devices), (Some(DIRTY.0 * PAGE), None));
    // What needs no device is not affected.
    let before = recording::count();
    assert_eq!(subject.kernel.dirty_total().dirty, Some(DIRTY.0 * PAGE));
    assert!(recording::count() - before < 1000);
}

/// The greatest effort: many processors, and lists of writers and files that do not end.
#[test]
fn the_effort_of_a_count_is_bounded() {
    let subject = Subject::new(&Shape::default());
    let layout = &subject.kernel.layout;
    // All nodes of a tree share one child, so that the number of paths grows with each level.
    let root = subject.root("dm-0");
    let node = subject.get(root) & !3;
    let slots = node + layout.tree_slots.unwrap();
    let child = subject.get(slots);
    for slot in 0..64 {
        subject.set(slots + slot * 8, child);
    }
    subject.set(node + layout.tree_marks.unwrap(), u64::MAX);
    // The greatest number of processors, all with the variables of the first.
    subject.set(subject.kernel.dirty.processor_count.unwrap(), 8192);
    let begun = Instant::now();
    let before = recording::count();
    let _ = (subject.count(), subject.files());
    let reads = recording::count() - before;
    assert!(reads < 2_000_000, "{reads}");
    // A step has few reads, and four tries have no more steps than one.
    let before = recording::count();
    let _ = subject.count();
    let reads = recording::count() - before;
    assert!(reads < 4 << 18, "{reads}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

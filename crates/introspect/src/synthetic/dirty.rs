//! The dirty pages of a synthetic guest: its counters, with the parts of two processors; its
//! devices, one of them on another; and files whose pages are marked in trees.

use super::PAGE;
use super::builder::Builder;
use super::objects::Device;

/// The number of processors.
pub(crate) const PROCESSORS: u32 = 2;
/// The address of the first variable of each processor, before its offset is added.
const VARIABLES: u64 = 0x5000;
/// The parts of the processors in the number of dirty pages and of pages in write-back.
const PARTS: [(i8, i8); 2] = [(25, 1), (-3, -1)];

/// The true number of dirty pages, and of pages in write-back.
pub const DIRTY: (u64, u64) = (27, 2);
/// The devices with dirty pages: the name, the pages, the pages in write-back, and the disk.
#[cfg(test)]
pub const DEVICES: [(&str, u64, u64, &str); 3] =
    [("vda", 20, 2, "vda"), ("dm-0", 4, 0, "vdb"), ("btrfs-1", 3, 0, "vdc")];
/// The files with dirty pages, those with the most first.
#[cfg(test)]
pub const FILES: [(&str, u64); 5] = [
    ("/var/lib/db/main.db", 17),
    ("/image", 4),
    ("/home/data", 3),
    ("/srv/mail/inbox", 2),
    ("/gone (deleted)", 1),
];

/// The pages that a process has changed through mappings, and those of them that the kernel does
/// not count.
#[cfg(test)]
pub const MAPPED: (u64, u64) = (2, 1);

/// The pages of marked entries of page tables of programs: of two tables of pages, and of a large
/// page in the table above them.
#[cfg(test)]
pub const ENTRIES: u64 = 5 + 512;

/// The place and the order of a large page that is marked in the tree, but is no longer dirty.
const STALE: (u64, u32) = (70_016, 4);

/// The variables of the image.
pub(crate) struct Globals {
    /// The addresses of the array of nodes or of the only node.
    pub nodes: u64,
    pub node_count: u64,
    pub processor_count: u64,
    pub offsets: u64,
    pub bdi_list: u64,
    /// The number that the image has for the whole system, in pages.
    pub shown: u64,
}

/// The devices and files that exist.
pub(crate) struct Objects {
    pub vda: Device,
    pub vdb: Device,
    pub dm: Device,
    pub vdc: Device,
    pub btrfs: u64,
    pub inbox: u64,
    pub database: u64,
    pub gone: u64,
    pub image: u64,
    pub data: u64,
    /// Pages of the first file and of the deleted file.
    pub inbox_page: u64,
    pub gone_page: u64,
    /// The super block of the first file.
    pub ext4: u64,
    /// A process.
    pub task: u64,
}

/// Allocates variables of each processor. Returns the next one's address.
struct Variables {
    offsets: [u64; 2],
    next: u64,
}

impl Variables {
    fn take(&mut self, length: u64) -> u64 {
        self.next += length.next_multiple_of(8);
        self.next - length.next_multiple_of(8)
    }
}

/// A tree's entries by index, each with the shift of the number of its pages.
type Entries = [(u64, u32)];

impl Builder<'_> {
    /// A `percpu_counter` with this value; the processors have a part of it.
    fn counter(&mut self, variables: &mut Variables, address: u64, value: i64) {
        let parts = variables.take(4);
        for (offset, part) in variables.offsets.into_iter().zip([7, -9]) {
            self.write(offset.wrapping_add(parts), &i32::to_le_bytes(part));
        }
        self.set(address, "percpu_counter.count", (value + 2) as u64);
        self.set(address, "percpu_counter.counters", parts);
    }

    /// A writer with these counts and files.
    fn writer(
        &mut self,
        variables: &mut Variables,
        bdi: u64,
        counts: (i64, i64),
        files: [&[u64]; 2],
    ) -> u64 {
        let writer = self.make("bdi_writeback");
        self.set(writer, "bdi_writeback.bdi", bdi);
        let counters = self.at(writer, "bdi_writeback.stat");
        let size = self.types.size("percpu_counter");
        self.counter(variables, counters, counts.0);
        self.counter(variables, counters + size, counts.1);
        let lists = [
            "bdi_writeback.b_dirty",
            "bdi_writeback.b_io",
            "bdi_writeback.b_more_io",
            "bdi_writeback.b_dirty_time",
        ];
        for (place, list) in lists.into_iter().enumerate() {
            let inodes = files.get(place).copied().unwrap_or_default();
            let links: Vec<u64> =
                inodes.iter().map(|inode| self.at(*inode, "inode.i_io_list")).collect();
            let head = self.at(writer, list);
            self.chain(list, head, &links);
        }
        self.at(writer, "bdi_writeback.bdi_node")
    }

    /// The `backing_dev_info` of a disk, or of a file system without one.
    fn bdi(&mut self, owner: Option<Device>, name: &str) -> u64 {
        let bdi = self.make("backing_dev_info");
        self.set_text(bdi, "backing_dev_info.dev_name", name);
        let owned = owner.map(|device| self.at(device.device, "block_device.bd_device"));
        self.set(bdi, "backing_dev_info.owner", owned.unwrap_or(0));
        if let Some(device) = owner {
            self.set(device.disk, "gendisk.bdi", bdi);
        }
        bdi
    }

    /// Links the writers of a device to it.
    fn writers(&mut self, bdi: u64, writers: &[u64]) {
        let head = self.at(bdi, "backing_dev_info.wb_list");
        self.chain("backing_dev_info.wb_list", head, writers);
    }

    /// States that a disk consists of a device.
    fn hold(&mut self, disk: u64, device: u64) {
        let holder = self.make("bd_holder_disk");
        if self.shape.recent {
            let folder = self.make("kobject");
            let node = self.at(device, "block_device.bd_device.kobj");
            self.set(folder, "kobject.parent", node);
            self.set(device, "block_device.bd_holder_dir", folder);
            self.set(holder, "bd_holder_disk.holder_dir", folder);
        } else {
            self.set(holder, "bd_holder_disk.bdev", device);
        }
        let link = self.at(holder, "bd_holder_disk.list");
        let head = self.at(disk, "gendisk.slave_bdevs");
        self.chain("gendisk.slave_bdevs", head, &[link]);
    }

    /// A node of a tree. Returns its address.
    fn tree_node(&mut self, tree: u64, parent: u64, shift: u32) -> u64 {
        let node = self.make("xa_node");
        let place = self.at(node, "xa_node.shift");
        self.write(place, &[shift as u8]);
        self.set(node, "xa_node.parent", parent);
        self.set(node, "xa_node.array", tree);
        node
    }

    fn set_slot(&mut self, node: u64, slot: u64, value: u64) {
        let place = self.at(node, "xa_node.slots") + slot * 8;
        self.set_entry(place, "xa_node.slots", value);
    }

    /// The structure of a page that is dirty or not.
    fn flagged_page(&mut self, is_dirty: bool) -> u64 {
        let page = self.room_page();
        let page = self.page(page);
        let bit = if self.shape.recent { 1 << 4 } else { 1 << 3 };
        self.set(page, "page.flags", 0x17_ffff_c000_0020 | if is_dirty { bit } else { 0 });
        page
    }

    /// Marks pages of an inode as dirty, in a tree of this height.
    fn mark(&mut self, inode: u64, height: u32, entries: &Entries) {
        let mapping = self.at(inode, "inode.i_data");
        let tree = self.at(mapping, "address_space.i_pages");
        let any_page = self.flagged_page(true);
        let clean_page = self.flagged_page(false);
        // The address, the shift, the first bits of the indexes, and the marks of each node.
        let mut nodes: Vec<(u64, u32, u64, u64)> = Vec::new();
        let mut root = 0;
        for (index, order) in entries {
            let (mut parent, mut shift) = (0, 6 * (height - 1));
            loop {
                let prefix = index >> (shift + 6);
                let known = nodes.iter().position(|node| (node.1, node.2) == (shift, prefix));
                let place = known.unwrap_or_else(|| {
                    let node = self.tree_node(tree, parent, shift);
                    nodes.push((node, shift, prefix, 0));
                    if parent == 0 {
                        root = node;
                    } else {
                        self.set_slot(parent, prefix & 63, node | 2);
                    }
                    nodes.len() - 1
                });
                let slot = index >> shift & 63;
                nodes[place].3 |= 1 << slot;
                let (node, _, _, marks) = nodes[place];
                self.set(node, "xa_node.marks", marks);
                if shift == 0 {
                    let is_stale = (*index, *order) == STALE;
                    self.set_slot(node, slot, if is_stale { clean_page } else { any_page });
                    for sibling in 1..1_u64 << order {
                        self.set_slot(node, slot + sibling, slot << 2 | 2);
                    }
                    break;
                }
                (parent, shift) = (node, shift - 6);
            }
        }
        self.set(tree, "xarray.xa_head", root | 2);
    }
}

impl Builder<'_> {
    /// A mapping of a process: of a file, or of no file (0).
    fn area(&mut self, memory: u64, range: (u64, u64), flags: u64, inode: u64) -> u64 {
        let area = self.make("vm_area_struct");
        self.set(area, "vm_area_struct.vm_start", range.0);
        self.set(area, "vm_area_struct.vm_end", range.1);
        self.set(area, "vm_area_struct.vm_mm", memory);
        self.set(area, "vm_area_struct.vm_flags", flags);
        let file = if inode == 0 {
            0
        } else {
            let file = self.make("file");
            let mapping = self.at(inode, "inode.i_data");
            self.set(file, "file.f_inode", inode);
            self.set(file, "file.f_mapping", mapping);
            file
        };
        self.set(area, "vm_area_struct.vm_file", file);
        area
    }

    /// A node of a tree of mappings: its entries, each with the last address that it is for. What
    /// follows them is left over from earlier entries.
    fn maple(&mut self, entries: &[(u64, u64)], is_leaf: bool) -> u64 {
        let room = self.room(256, 256);
        let node = self.direct(room);
        let (pivots, slots, kind) = if is_leaf {
            ("maple_range_64.pivot", "maple_range_64.slot", 1)
        } else {
            ("maple_arange_64.pivot", "maple_arange_64.slot", 3)
        };
        self.set(node, "maple_node.parent", 1);
        let (pivots_at, slots_at) = (self.at(node, pivots), self.at(node, slots));
        for (index, (entry, last)) in (0..).zip(entries) {
            let is_last = index as usize + 1 == entries.len();
            self.set_entry(pivots_at + 8 * index, pivots, if is_last { 0 } else { *last });
            self.set_entry(slots_at + 8 * index, slots, *entry);
        }
        let stale = slots_at + 8 * entries.len() as u64;
        self.write(stale, &0x1234_5670_u64.to_le_bytes());
        node | kind << 3 | 4
    }
}

/// Builds a process with mappings of two files.
fn build_process(builder: &mut Builder<'_>, objects: &Objects) {
    const START: u64 = 0x7f00_0000_0000;
    let memory = builder.make("mm_struct");
    builder.set(objects.task, "task_struct.mm", memory);
    let page = |index: u64| START + index * PAGE;
    let shared = builder.area(memory, (page(0), page(3)), 0xb, objects.inbox);
    let private = builder.area(memory, (page(3), page(4)), 0x3, objects.inbox);
    let own = builder.area(memory, (page(5), page(6)), 0xb, 0);
    let gone = builder.area(memory, (page(513), page(514)), 0xb, objects.gone);
    let low = builder.maple(
        &[
            (0, START - 1),
            (shared, page(3) - 1),
            (private, page(4) - 1),
            (0, page(5) - 1),
            (own, page(6) - 1),
        ],
        true,
    );
    let high = builder.maple(&[(0, page(513) - 1), (gone, page(514) - 1), (0, u64::MAX)], true);
    let root = builder.maple(&[(low, page(6) - 1), (high, u64::MAX)], false);
    builder.set(memory, "mm_struct.mm_mt.ma_root", root & !4 | 2);
    // The tables, each with one entry, down to two tables of pages.
    let tables: Vec<u64> = (0..=builder.shape.levels).map(|_| builder.room_page()).collect();
    let directory = builder.direct(tables[0]);
    builder.set(memory, "mm_struct.pgd", directory);
    let mut shift = 12 + 9 * (builder.shape.levels - 1);
    for pair in tables.windows(2).take(builder.shape.levels as usize - 1) {
        let entry = pair[0] + (START >> shift & 511) * 8;
        builder.store.write_u64(entry, pair[1] | 0x67);
        shift -= 9;
        if shift == 12 {
            builder.store.write_u64(entry + 8, tables[tables.len() - 1] | 0x67);
            // Large pages outside all mappings: one that was written and one that was read.
            let large = builder.shape.room.0.next_multiple_of(512 * PAGE);
            builder.store.write_u64(entry + 16, large | 0xe7);
            builder.store.write_u64(entry + 24, large | 0xa7);
        }
    }
    let (first, second) = (tables[tables.len() - 2], tables[tables.len() - 1]);
    let written = 0x67;
    for (entry, page, bits) in [
        (first, objects.inbox_page, written),
        // The same page again, a page that was read, a page of another file, and private memory.
        (first + 8, objects.inbox_page, written),
        (first + 16, objects.gone_page, 0x27),
        (first + 24, objects.inbox_page, written),
        (first + 40, objects.inbox_page, written),
        (second + 8, objects.gone_page, written),
    ] {
        builder.store.write_u64(entry, page | bits);
    }
}

/// Builds the dirty pages.
pub(crate) fn build(builder: &mut Builder<'_>, globals: &Globals, objects: &Objects) {
    // The variables of the first processor are in the direct map, those of the second are not.
    let first = builder.room_page();
    let areas = [builder.direct(first), builder.scattered(PAGE, false)];
    let offsets = areas.map(|area| area.wrapping_sub(VARIABLES));
    let mut variables = Variables { offsets, next: VARIABLES };
    builder.store.write(globals.processor_count, &PROCESSORS.to_le_bytes());
    builder.store.write(globals.node_count, &2_u32.to_le_bytes());
    for (index, offset) in offsets.into_iter().enumerate() {
        builder.store.write_u64(globals.offsets + 8 * index as u64, offset);
    }
    let node = if builder.shape.recent {
        // An array of two nodes, of which only the second exists.
        let node = builder.make("pglist_data");
        builder.store.write_u64(globals.nodes + 8, node);
        node
    } else {
        builder.image(globals.nodes)
    };
    let parts = variables.take(builder.types.size("per_cpu_nodestat"));
    builder.set(node, "pglist_data.per_cpu_nodestats", parts);
    let counts = builder.types.offset("per_cpu_nodestat.vm_node_stat_diff").expect("a member");
    for (offset, (dirty, writeback)) in offsets.into_iter().zip(PARTS) {
        let place = offset.wrapping_add(parts) + counts;
        builder.write(place + 20, &[dirty as u8, writeback as u8]);
    }
    let own = PARTS.iter().map(|parts| i64::from(parts.0)).sum::<i64>();
    assert_eq!(globals.shown.wrapping_add_signed(own), DIRTY.0);

    // The devices.
    let vda = builder.bdi(Some(objects.vda), "254:0");
    let vdb = builder.bdi(Some(objects.vdb), "254:16");
    let dm = builder.bdi(Some(objects.dm), "253:0");
    let vdc = builder.bdi(Some(objects.vdc), "254:32");
    let btrfs = builder.bdi(None, "btrfs-1");
    builder.hold(objects.dm.disk, objects.vdb.device);
    let file_system = builder.make("btrfs_fs_info");
    let devices = builder.make("btrfs_fs_devices");
    let device = builder.make("btrfs_device");
    builder.set(file_system, "btrfs_fs_info.fs_devices", devices);
    builder.set(device, "btrfs_device.bdev", objects.vdc.device);
    let (head, link) = (
        builder.at(devices, "btrfs_fs_devices.devices"),
        builder.at(device, "btrfs_device.dev_list"),
    );
    builder.chain("btrfs_fs_devices.devices", head, &[link]);
    builder.set(objects.btrfs, "super_block.s_fs_info", file_system);
    builder.set(objects.btrfs, "super_block.s_bdi", btrfs);
    let list = [vda, vdb, dm, vdc, btrfs].map(|bdi| builder.at(bdi, "backing_dev_info.bdi_list"));
    builder.chain("backing_dev_info.bdi_list", globals.bdi_list, &list);

    // Two groups write to the first device.
    let Objects { inbox, database, gone, image, data, .. } = *objects;
    let root = builder.writer(&mut variables, vda, (2, 3), [&[inbox], &[]]);
    let group = builder.writer(&mut variables, vda, (18, -1), [&[database], &[gone]]);
    builder.writers(vda, &[root, group]);
    for (bdi, counts, files) in [
        (vdb, (0, 0), &[][..]),
        (dm, (4, 0), &[image]),
        (vdc, (0, 0), &[]),
        (btrfs, (3, 0), &[data]),
    ] {
        let writer = builder.writer(&mut variables, bdi, counts, [files, &[]]);
        builder.writers(bdi, &[writer]);
    }

    builder.set(objects.ext4, "super_block.s_bdi", vda);
    build_process(builder, objects);

    // The files: in one node; in a tree of three levels with a large page; a single page.
    builder.mark(inbox, 1, &[(0, 0), (63, 0)]);
    builder.mark(database, 3, &[(70_000, 0), (4096 + 16, 4), STALE]);
    builder.mark(image, 2, &[(0, 0), (1, 0), (64, 0), (4095, 0)]);
    builder.mark(data, 1, &[(5, 1), (7, 0)]);
    let tree = builder.at(gone, "inode.i_data.i_pages");
    let page = builder.page(objects.gone_page);
    builder.set(tree, "xarray.xa_head", page);
    // In write-back, and dirty again.
    let bits = if builder.shape.recent { 1 << 1 | 1 << 4 } else { 1 << 15 | 1 << 3 };
    builder.set(page, "page.flags", 0x17_ffff_c000_0020 | bits);
}

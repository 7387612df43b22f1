//! The objects of a kernel: file systems, files, devices, control groups and tasks.

use super::builder::Builder;
use super::{PAGE, TICKS};

/// The kinds of inodes.
pub(crate) const REGULAR: u32 = 0o10_0644;
pub(crate) const DIRECTORY: u32 = 0o04_0755;
const BLOCK_DEVICE: u32 = 0o06_0600;

/// The start of a process, in nanoseconds since the guest's boot.
pub(crate) fn start_ns(process_id: u32) -> u64 {
    1_005_000_000 * u64::from(process_id)
}

/// A mounted file system.
#[derive(Clone, Copy)]
pub(crate) struct Mount {
    pub super_block: u64,
    /// The dentry of the root directory.
    pub root: u64,
}

/// A block device.
#[derive(Clone, Copy)]
#[allow(clippy::struct_field_names, reason = "the objects are those of one device")]
pub(crate) struct Device {
    pub device: u64,
    pub inode: u64,
    /// The disk that has it.
    pub disk: u64,
}

/// A control group, and its states in two subsystems.
#[derive(Clone, Copy)]
pub(crate) struct SyntheticGroup {
    pub node: u64,
    pub cgroup: u64,
    /// The state to which bios refer.
    pub block: u64,
    /// The state to which pages refer.
    pub memory: u64,
}

impl Builder<'_> {
    /// A super block that is in no list: `kind` is the file system's type, `id` the name of its
    /// device.
    pub fn super_block(&mut self, kind: &str, id: &str, device: u64) -> u64 {
        let file_system = self.make("file_system_type");
        let name = self.text(kind);
        self.set(file_system, "file_system_type.name", name);
        let super_block = self.make("super_block");
        self.set(super_block, "super_block.s_type", file_system);
        self.set(super_block, "super_block.s_bdev", device);
        self.set(super_block, "super_block.s_fs_info", 0);
        self.set(super_block, "super_block.s_root", 0);
        self.set_text(super_block, "super_block.s_id", id);
        super_block
    }

    /// A file system with its root directory, inode `root`.
    pub fn mount(&mut self, kind: &str, id: &str, device: u64, root: u64) -> Mount {
        let super_block = self.super_block(kind, id, device);
        let inode = self.inode(super_block, root, DIRECTORY, PAGE);
        let root = self.name(0, "/", inode);
        self.set(super_block, "super_block.s_root", root);
        Mount { super_block, root }
    }

    fn fill_inode(&mut self, inode: u64, super_block: u64, number: u64, mode: u32, size: u64) {
        self.set_u32(inode, "inode.i_mode", mode);
        self.set(inode, "inode.i_sb", super_block);
        self.set(inode, "inode.i_ino", number);
        self.set(inode, "inode.i_size", size);
        self.set(inode, "inode.i_dentry", 0);
        self.set(inode, "inode.i_fop", 0);
        self.set_u32(inode, "inode.i_flags", 0);
        self.set_u32(inode, "inode.i_nlink", 1);
        self.set(inode, "inode.i_hash.pprev", super_block);
        self.set(inode, "inode.dirtied_when", TICKS - 750);
        self.set_u32(inode, "inode.i_generation", number as u32 ^ 0x5555);
        let data = self.at(inode, "inode.i_data");
        self.set(inode, "inode.i_mapping", data);
        self.set(data, "address_space.host", inode);
    }

    /// An inode without a dentry.
    pub fn inode(&mut self, super_block: u64, number: u64, mode: u32, size: u64) -> u64 {
        let inode = self.make("inode");
        self.fill_inode(inode, super_block, number, mode, size);
        inode
    }

    /// An inode that is embedded in a Btrfs inode. Returns both addresses, the outer one first.
    pub fn btrfs_inode(&mut self, mount: Mount, number: u64, mode: u32, size: u64) -> (u64, u64) {
        let outer = self.make("btrfs_inode");
        let inode = self.at(outer, "btrfs_inode.vfs_inode");
        self.fill_inode(inode, mount.super_block, number, mode, size);
        let root = self.make("btrfs_root");
        self.set(root, "btrfs_root.root_key.objectid", 5);
        self.set(outer, "btrfs_inode.root", root);
        (outer, inode)
    }

    /// A dentry in the directory `parent` (0 for a root). An inode of 0 stays without a dentry.
    pub fn name(&mut self, parent: u64, text: &str, inode: u64) -> u64 {
        let name = self.make("dentry");
        self.set(name, "dentry.d_parent", if parent == 0 { name } else { parent });
        self.set_u32(name, "dentry.d_flags", 0);
        let letters = if text.len() < 40 {
            self.set_text(name, "dentry.d_iname", text);
            self.at(name, "dentry.d_iname")
        } else {
            self.text(text)
        };
        self.set_u32(name, "dentry.d_name.len", text.len() as u32);
        self.set(name, "dentry.d_name.name", letters);
        self.set(name, "dentry.d_inode", inode);
        // The dentry is in a chain of the hash table.
        self.set(name, "dentry.d_hash.pprev", self.shape.direct + 8);
        if inode != 0 {
            let member = if self.shape.seven { "dentry.d_alias" } else { "dentry.d_u.d_alias" };
            let alias = self.at(name, member);
            self.set(inode, "inode.i_dentry", alias);
        }
        name
    }

    /// Marks a dentry as removed.
    pub fn unlink(&mut self, name: u64) {
        self.set(name, "dentry.d_hash.pprev", 0);
    }

    /// The dentry of an inode that was opened by its handle.
    pub fn open_by_handle(&mut self, inode: u64) -> u64 {
        let name = self.name(0, "/", inode);
        self.set_u32(name, "dentry.d_flags", 1 << 5);
        name
    }

    /// A file in a folder that ignores case, to which no dentry leads yet but its own.
    pub fn new_file(&mut self, mount: Mount, number: u64, is_removed: bool) -> u64 {
        let folder = self.inode(mount.super_block, number, DIRECTORY, PAGE);
        self.set_u32(folder, "inode.i_flags", 1 << 15);
        let folder = self.name(mount.root, "Folder", folder);
        let file = self.inode(mount.super_block, number + 1, REGULAR, PAGE);
        self.set_u32(file, "inode.i_nlink", u32::from(!is_removed));
        let name = self.name(folder, "new", file);
        self.unlink(name);
        file
    }

    /// The dentries of nested directories. Returns the last.
    pub fn directories(&mut self, mount: Mount, path: &str) -> u64 {
        let mut parent = mount.root;
        for part in path.split('/') {
            let inode = self.inode(mount.super_block, 50, DIRECTORY, PAGE);
            parent = self.name(parent, part, inode);
        }
        parent
    }

    /// Files whose dentries say less than they seem to, or more: the name of the request, the
    /// inode, its number, and the path.
    pub fn odd_names(&mut self, mount: Mount) -> [(&'static str, u64, u64, &'static str); 4] {
        let handle = self.inode(mount.super_block, 160, REGULAR, PAGE);
        self.open_by_handle(handle);
        let folder = self.inode(mount.super_block, 161, DIRECTORY, PAGE);
        let folder = self.open_by_handle(folder);
        let inside = self.inode(mount.super_block, 162, REGULAR, PAGE);
        self.name(folder, "inside", inside);
        let new = self.new_file(mount, 163, false);
        let removed = self.new_file(mount, 165, true);
        [
            ("opened by handle", handle, 160, ""),
            ("in a folder opened by handle", inside, 162, ""),
            ("new in a folder without case", new, 164, "/Folder/new"),
            ("removed in a folder without case", removed, 166, "/Folder/new (deleted)"),
        ]
    }

    /// A page of an inode's content that is in write-back.
    pub fn cache(&mut self, inode: u64) -> u64 {
        let page = self.cache_idle(inode);
        let structure = self.page(page);
        let writeback = if self.shape.recent { 1 << 1 } else { 1 << 15 };
        self.set(structure, "page.flags", 0x17_ffff_c000_0020 | writeback);
        page
    }

    /// A page of an inode's content that is being read, or written back, for which entries of the
    /// list at `page_waits` wait: each has a function and its private word.
    pub fn cache_awaited(
        &mut self,
        inode: u64,
        page_waits: u64,
        entries: &[(&str, u64)],
        others: u64,
        is_write: bool,
    ) -> u64 {
        let page = self.cache_idle(inode);
        let structure = self.page(page);
        // Locked and without content, or in write-back; with waiters.
        let bit = match (is_write, self.shape.recent) {
            (false, _) => 0,
            (true, false) => 15,
            (true, true) => 1,
        };
        self.set(structure, "page.flags", 0x17_ffff_c000_0000 | 1 << bit | 1 << 7);
        let number = structure.wrapping_mul(0x61c8_8646_80b5_83eb) >> 56;
        let list = page_waits + 24 * number + 8;
        let wait = |builder: &mut Self, page: u64, function: &str, private: u64| {
            let wait = builder.make("wait_page_queue");
            builder.set(wait, "wait_page_queue.folio", page);
            builder.set_u32(wait, "wait_page_queue.bit_nr", bit);
            builder.set(wait, "wait_page_queue.wait.private", private);
            let function = builder.function(function);
            builder.set(wait, "wait_page_queue.wait.func", function);
            builder.at(wait, "wait_page_queue.wait.entry")
        };
        let foreign = self.page(others);
        let mut links = vec![wait(self, foreign, "wake_page_function", 0)];
        for (function, private) in entries {
            links.push(wait(self, structure, function, *private));
        }
        self.chain("wait_queue_entry.entry", list, &links);
        page
    }

    /// A page of an inode's content that is not being transferred.
    pub fn cache_idle(&mut self, inode: u64) -> u64 {
        let page = self.room_page();
        let mapping = self.at(inode, "inode.i_data");
        self.set_page(page, 0x17_ffff_c000_0020, mapping);
        page
    }

    /// A page of private memory of a process.
    pub fn anonymous(&mut self) -> u64 {
        let page = self.room_page();
        let mapping = self.shape.direct + 0x3000 | 1;
        self.set_page(page, 0x17_ffff_c008_0004, mapping);
        page
    }

    /// A page of a slab, otherwise like a page of a file.
    pub fn slab(&mut self, inode: u64) -> u64 {
        let page = self.room_page();
        let mapping = self.at(inode, "inode.i_data");
        let recent = self.shape.recent;
        self.set_page(page, if recent { 0x17 << 48 } else { 0x17 << 48 | 1 << 9 }, mapping);
        let structure = self.page(page);
        if recent {
            self.set_u32(structure, "page.page_type", 245 << 24);
        }
        page
    }

    /// A compound page of two pages of an inode's content: the facts are in the structure of the
    /// first.
    pub fn cache_large(&mut self, inode: u64) -> u64 {
        let mut first = self.room_page();
        if self.page(first) % 128 != 0 {
            // Only from the next page on does a mask lead from the second page to the first.
            first = self.room_page();
        }
        let second = self.room_page();
        let mapping = self.at(inode, "inode.i_data");
        let bit = if self.shape.recent { 6 } else { 16 };
        self.set_page(first, 0x17_ffff_c000_0022 | 1 << bit, mapping);
        let (head, tail) = (self.page(first), self.page(second));
        self.set_page(second, 0x17 << 48, 0x0dea_d000_0000_0400);
        let word = if self.shape.seven { !0 << 7 | 1 } else { head | 1 };
        self.set(tail, self.compound(), word);
        first
    }

    /// The member that refers to the head of a compound page.
    fn compound(&self) -> &'static str {
        if self.shape.seven { "page.compound_info" } else { "page.compound_head" }
    }

    fn set_page(&mut self, page: u64, flags: u64, mapping: u64) {
        let structure = self.page(page);
        self.set(structure, "page.flags", flags);
        self.set(structure, "page.mapping", mapping);
        self.set(structure, self.compound(), self.shape.direct + 0x2000);
        self.set_u32(structure, "page.page_type", u32::MAX);
        self.set_u32(structure, "page._refcount", 2);
    }

    /// A disk or a partition. The inodes of devices belong to `super_block`.
    pub fn device(&mut self, super_block: u64, name: &str) -> Device {
        let outer = self.make("bdev_inode");
        let inode = self.at(outer, "bdev_inode.vfs_inode");
        let device = self.at(outer, "bdev_inode.bdev");
        self.fill_inode(inode, super_block, 0, BLOCK_DEVICE, 1 << 30);
        let disk = self.disk(name);
        self.set(device, "block_device.bd_disk", disk);
        self.set(disk, "gendisk.part0", device);
        Device { device, inode, disk }
    }

    /// The disk that a driver registers.
    pub fn disk(&mut self, name: &str) -> u64 {
        let disk = self.make("gendisk");
        self.set_text(disk, "gendisk.disk_name", name);
        let lower = self.at(disk, "gendisk.slave_bdevs");
        self.chain("gendisk.slave_bdevs", lower, &[]);
        disk
    }

    /// A control group in the group with the node `parent` (0 for the root).
    pub fn group(&mut self, parent: u64, name: &str, serial: u64) -> SyntheticGroup {
        let node = self.make("kernfs_node");
        let recent = self.shape.recent;
        self.set(node, if recent { "kernfs_node.__parent" } else { "kernfs_node.parent" }, parent);
        let text = self.text(name);
        self.set(node, "kernfs_node.name", text);
        let cgroup = self.make("cgroup");
        self.set(cgroup, "cgroup.kn", node);
        self.set(cgroup, "cgroup.self.cgroup", cgroup);
        self.set(node, "kernfs_node.priv", cgroup);
        let block = self.make("blkcg_gq");
        let state = self.make("blkcg");
        self.set(block, "blkcg_gq.blkcg", state);
        self.set(state, "blkcg.css.cgroup", cgroup);
        self.set(state, "blkcg.css.serial_nr", serial);
        let memory = self.make("mem_cgroup");
        self.set(memory, "mem_cgroup.css.cgroup", cgroup);
        self.set(memory, "mem_cgroup.css.serial_nr", serial + 1);
        SyntheticGroup { node, cgroup, block, memory }
    }

    /// Fills in the task at `task`: a thread of the process of `leader` (0 for a new process).
    pub fn fill_task(&mut self, task: u64, leader: u64, process_id: u32, command: &str) {
        self.set_u32(task, "task_struct.pid", if leader == 0 { process_id } else { 4000 });
        self.set_u32(task, "task_struct.tgid", process_id);
        self.set(task, "task_struct.group_leader", if leader == 0 { task } else { leader });
        self.set_text(task, "task_struct.comm", command);
        self.set_u32(task, "task_struct.flags", 0);
        self.set_u32(task, "task_struct.__state", 0);
        self.set(task, "task_struct.start_boottime", start_ns(process_id));
    }

    /// Lets a thread sleep in `fsync` of an open file, without being woken by signals.
    pub fn sleep_in_fsync(&mut self, thread: u64, file: u64) {
        const STACK: u64 = 16 << 10;
        const FSYNC: u64 = 74;
        let pad = if self.shape.seven { 16 } else { 0 };
        let stack = self.stack();
        self.set(thread, "task_struct.stack", stack);
        self.set_u32(thread, "task_struct.__state", 2);
        let registers = stack + STACK - pad - self.types.size("pt_regs");
        self.set(registers, "pt_regs.cs", 0x33);
        self.set(registers, "pt_regs.orig_ax", FSYNC);
        self.set(registers, "pt_regs.di", 3);
        let files = self.make("files_struct");
        let table = self.make("fdtable");
        let list = self.make("fdtable");
        self.set(files, "files_struct.fdt", table);
        self.set_u32(table, "fdtable.max_fds", 4);
        self.set(table, "fdtable.fd", list);
        self.set(list + 24, "fdtable.max_fds", file);
        self.set(thread, "task_struct.files", files);
    }

    /// Sets an account of I/O to `unit`, twice and three times that.
    pub fn account(&mut self, address: u64, unit: u64) {
        self.set(address, "task_io_accounting.read_bytes", unit);
        self.set(address, "task_io_accounting.write_bytes", 2 * unit);
        self.set(address, "task_io_accounting.cancelled_write_bytes", 3 * unit);
    }

    /// The lists of the threads of processes. Returns the structure that the threads of each share.
    pub fn link_threads(&mut self, processes: &[&[u64]]) -> Vec<u64> {
        let mut signals = Vec::new();
        for threads in processes {
            let signal = self.make("signal_struct");
            let mut nodes = Vec::new();
            for thread in *threads {
                self.set(*thread, "task_struct.signal", signal);
                nodes.push(self.at(*thread, "task_struct.thread_node"));
            }
            let head = self.at(signal, "signal_struct.thread_head");
            self.chain("task_struct.thread_node", head, &nodes);
            signals.push(signal);
        }
        signals
    }

    /// Puts a task into a control group.
    pub fn belong(&mut self, task: u64, group: &SyntheticGroup) {
        let set = self.make("css_set");
        self.set(set, "css_set.dfl_cgrp", group.cgroup);
        self.set(task, "task_struct.cgroups", set);
    }

    /// A `completion` on the new stack of a task, which waits for it, or is about to.
    pub fn stack_completion(&mut self, task: u64, waits: bool) -> u64 {
        const STACK: u64 = 16 << 10;
        let stack = self.stack();
        self.set(task, "task_struct.stack", stack);
        let completion = stack + STACK - 512;
        let waiter = stack + STACK - 256;
        self.set(waiter, "swait_queue.task", task);
        let node = self.at(waiter, "swait_queue.task_list");
        let list = self.at(completion, "completion.wait.task_list");
        let nodes: &[u64] = if waits { &[node] } else { &[] };
        self.chain("swait_queue.task_list", list, nodes);
        completion
    }

    /// Lets a task wait for a `completion`.
    pub fn complete_for(&mut self, completion: u64, task: u64) {
        let waiter = self.make("swait_queue");
        self.set(waiter, "swait_queue.task", task);
        let node = self.at(waiter, "swait_queue.task_list");
        let list = self.at(completion, "completion.wait.task_list");
        self.chain("swait_queue.task_list", list, &[node]);
    }

    /// A task in new room.
    pub fn task(&mut self, leader: u64, process_id: u32, command: &str) -> u64 {
        let task = self.make("task_struct");
        self.fill_task(task, leader, process_id, command);
        task
    }

    /// A control block of I/O to an open file by `io_uring`, for a task.
    pub fn ring_block(&mut self, file: u64, task: u64) -> u64 {
        let request = self.make("io_kiocb");
        if self.shape.recent {
            let context = self.make("io_uring_task");
            self.set(context, "io_uring_task.task", task);
            self.set(request, "io_kiocb.tctx", context);
        } else {
            self.set(request, "io_kiocb.task", task);
        }
        self.block(request, file, "io_complete_rw")
    }

    /// A control block of I/O to an open file by libaio. The context belongs to a process with a
    /// child, which has the ring in its memory, too.
    pub fn context_block(&mut self, file: u64, owner: u64, child: u64) -> u64 {
        let context = self.make("kioctx");
        self.set_u32(context, "kioctx.id", 3);
        let tables = [owner, child].map(|task| {
            let table = self.make("kioctx_table");
            self.set_u32(table, "kioctx_table.nr", 4);
            let memory = self.make("mm_struct");
            self.set(memory, "mm_struct.ioctx_table", table);
            self.set(memory, "mm_struct.owner", task);
            let area = self.make("vm_area_struct");
            self.set(area, "vm_area_struct.vm_mm", memory);
            (table, self.at(area, "vm_area_struct.shared.rb"))
        });
        let [(table, node), (_, root)] = tables;
        self.set(table + 24, "kioctx_table.table", context);
        self.set(root, "rb_node.rb_right", node);
        let mapping = self.make("address_space");
        self.set(mapping, "address_space.i_mmap.rb_root.rb_node", root);
        let ring = self.make("file");
        self.set(ring, "file.f_mapping", mapping);
        self.set(context, "kioctx.aio_ring_file", ring);
        let request = self.make("aio_kiocb");
        self.set(request, "aio_kiocb.ki_ctx", context);
        self.block(request, file, "aio_complete_rw")
    }

    /// The control block of a file system above another one, for that of a program.
    pub fn stacked_block(&mut self, file: u64, original: u64) -> u64 {
        let [structure, own, member, end] = if self.shape.recent {
            ["backing_aio", "backing_aio.iocb", "backing_aio.orig_iocb", "backing_aio_rw_complete"]
        } else {
            ["ovl_aio_req", "ovl_aio_req.iocb", "ovl_aio_req.orig_iocb", "ovl_aio_rw_complete"]
        };
        let request = self.make(structure);
        self.set(request, member, original);
        let block = self.at(request, own);
        self.block(block, file, end)
    }

    fn block(&mut self, block: u64, file: u64, end: &str) -> u64 {
        self.set(block, "kiocb.ki_filp", file);
        let end = self.function(end);
        self.set(block, "kiocb.ki_complete", end);
        block
    }

    /// An open file.
    pub fn open(&mut self, inode: u64) -> u64 {
        let file = self.make("file");
        self.set(file, "file.f_inode", inode);
        file
    }
}

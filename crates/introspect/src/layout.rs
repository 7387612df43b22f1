//! The offsets of members in the kernel's structures, from the kernel's own description.

use crate::btf::{Btf, Member};

/// The longest structure accepted, in bytes.
const STRUCTURE_MAX: u64 = 1 << 20;

/// The descriptions of a kernel and of its modules.
pub(crate) struct Types<'b> {
    pub kernel: &'b Btf<'b>,
    pub modules: Vec<Btf<'b>>,
}

impl Types<'_> {
    fn first<T>(&self, lookup: impl Fn(&Btf<'_>) -> Option<T>) -> Option<T> {
        lookup(self.kernel).or_else(|| self.modules.iter().find_map(lookup))
    }

    fn member(&self, structure: &str, path: &str) -> Option<Member> {
        self.first(|types| types.member(structure, path))
    }

    fn offset(&self, structure: &str, paths: &[&str]) -> Option<u64> {
        let member = paths.iter().find_map(|path| self.member(structure, path))?;
        (member.offset <= STRUCTURE_MAX).then_some(member.offset)
    }

    fn size(&self, structure: &str) -> Option<u64> {
        self.first(|types| types.size(structure)).filter(|size| (1..=STRUCTURE_MAX).contains(size))
    }

    fn points_to(&self, structure: &str, path: &str, expected: &str) -> bool {
        self.first(|types| {
            let member = types.member(structure, path)?;
            Some(types.points_to(member)? == expected.as_bytes())
        })
        .unwrap_or(false)
    }

    /// The value of an enumerator.
    pub fn enumerator(&self, enumeration: &str, name: &str) -> Option<u64> {
        self.first(|types| types.enumerator(enumeration, name))
    }
}

/// Declares offsets in bytes: those that every kernel must have, and those that depend on the
/// kernel's release, its configuration or a module. Alternatives are the names in different
/// releases.
macro_rules! layout {
    (
        required { $($field:ident: $structure:literal $path:literal $(| $other:literal)*;)* }
        optional { $($option:ident: $option_structure:literal $($option_path:literal)|+;)* }
        sizes { $($size:ident: $size_structure:literal;)* }
        optional_sizes { $($own:ident: $own_structure:literal;)* }
    ) => {
        /// Offsets and sizes, in bytes.
        #[derive(Clone, Debug, Default)]
        #[allow(missing_docs)]
        pub(crate) struct Layout {
            $(pub $field: u64,)*
            $(pub $option: Option<u64>,)*
            $(pub $size: u64,)*
            $(pub $own: Option<u64>,)*
            /// Whether `btrfs_bio.inode` points to a `btrfs_inode` rather than to an `inode`.
            pub btrfs_inode_is_own: bool,
            /// The byte, and the bit in it, that mark a `btrfs_bio` as that of a scrub.
            pub btrfs_scrub: Option<(u64, u8)>,
            /// The byte, and the bit in it, with the list of a `blk_flush_queue` whose requests
            /// wait for the flush that runs.
            pub flush_running: Option<(u64, u8)>,
        }

        impl Layout {
            /// Reads the offsets from the descriptions. The error is the name of a missing member.
            pub fn new(types: &Types<'_>) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: types
                        .offset($structure, &[$path, $($other),*])
                        .ok_or(concat!(
                            $structure, ".", $path $(, " or ", $structure, ".", $other)*
                        ))?,)*
                    $($option: types.offset($option_structure, &[$($option_path),+]),)*
                    $($size: types.size($size_structure).ok_or($size_structure)?,)*
                    $($own: types.size($own_structure),)*
                    btrfs_inode_is_own: types.points_to("btrfs_bio", "inode", "btrfs_inode"),
                    btrfs_scrub: types
                        .member("btrfs_bio", "is_scrub")
                        .map(|member| (member.offset, member.bit)),
                    flush_running: types
                        .member("blk_flush_queue", "flush_running_idx")
                        .map(|member| (member.offset, member.bit)),
                })
            }
        }
    };
}

layout! {
    required {
        page_flags: "page" "flags";
        page_mapping: "page" "mapping" | "__folio_mapping";
        page_compound_head: "page" "compound_head" | "compound_info";
        mapping_host: "address_space" "host";
        inode_mode: "inode" "i_mode";
        inode_sb: "inode" "i_sb";
        inode_size: "inode" "i_size";
        inode_number: "inode" "i_ino";
        inode_owner: "inode" "i_uid";
        inode_data: "inode" "i_data";
        inode_dentries: "inode" "i_dentry";
        inode_generation: "inode" "i_generation";
        sb_type: "super_block" "s_type";
        sb_name: "super_block" "s_id";
        sb_device: "super_block" "s_bdev";
        sb_list: "super_block" "s_list";
        type_name: "file_system_type" "name";
        dentry_name: "dentry" "d_name";
        dentry_parent: "dentry" "d_parent";
        dentry_alias: "dentry" "d_u" | "d_alias";
        dentry_hash: "dentry" "d_hash";
        name_length: "qstr" "len";
        name_hash: "qstr" "hash";
        name_text: "qstr" "name";
        request_flags: "request" "cmd_flags";
        request_sector: "request" "__sector";
        request_length: "request" "__data_len";
        request_bio: "request" "bio";
        request_queue: "request" "q";
        queue_disk: "request_queue" "disk";
        disk_name: "gendisk" "disk_name";
        bio_next: "bio" "bi_next";
        bio_sector: "bio" "bi_iter.bi_sector";
        bio_size: "bio" "bi_iter.bi_size";
        bio_end: "bio" "bi_end_io";
        bio_private: "bio" "bi_private";
        bio_vectors: "bio" "bi_io_vec";
        vector_page: "bio_vec" "bv_page";
        bio_vector_index: "bio" "bi_iter.bi_idx";
        task_command: "task_struct" "comm";
        task_process: "task_struct" "tgid";
        task_list: "task_struct" "tasks";
        file_inode: "file" "f_inode";
        kiocb_file: "kiocb" "ki_filp";
        kiocb_complete: "kiocb" "ki_complete";
    }
    optional {
        buffer_end: "buffer_head" "b_end_io";
        buffer_state: "buffer_head" "b_state";
        page_type: "page" "page_type";
        page_index: "page" "index" | "__folio_index";
        page_memcg: "page" "memcg_data";
        inode_write_hint: "inode" "i_write_hint";
        bio_group: "bio" "bi_blkg";
        bio_device: "bio" "bi_bdev";
        bio_vector_done: "bio" "bi_iter.bi_bvec_done" | "bi_iter.bi_offset";
        vector_length: "bio_vec" "bv_len";
        vector_offset: "bio_vec" "bv_offset";
        blkg_blkcg: "blkcg_gq" "blkcg";
        blkcg_state: "blkcg" "css";
        memcg_css: "mem_cgroup" "css";
        css_cgroup: "cgroup_subsys_state" "cgroup";
        css_serial: "cgroup_subsys_state" "serial_nr";
        cgroup_node: "cgroup" "kn";
        cgroup_self: "cgroup" "self";
        node_owner: "kernfs_node" "priv";
        node_name: "kernfs_node" "name";
        node_parent: "kernfs_node" "__parent" | "parent";
        task_leader: "task_struct" "group_leader";
        task_stack: "task_struct" "stack";
        task_signal: "task_struct" "signal";
        task_thread: "task_struct" "thread_node";
        task_start: "task_struct" "start_boottime" | "real_start_time";
        task_state: "task_struct" "__state" | "state";
        task_flags: "task_struct" "flags";
        task_number: "task_struct" "pid";
        task_parent: "task_struct" "real_parent";
        task_files: "task_struct" "files";
        task_account: "task_struct" "ioac";
        task_groups: "task_struct" "cgroups";
        groups_default: "css_set" "dfl_cgrp";
        signal_account: "signal_struct" "ioac";
        account_read: "task_io_accounting" "read_bytes";
        account_dirtied: "task_io_accounting" "write_bytes";
        account_cancelled: "task_io_accounting" "cancelled_write_bytes";
        files_table: "files_struct" "fdt";
        file_count: "fdtable" "max_fds";
        file_list: "fdtable" "fd";
        registers_call: "pt_regs" "orig_ax";
        registers_segment: "pt_regs" "cs";
        registers_first: "pt_regs" "di";
        registers_second: "pt_regs" "si";
        registers_third: "pt_regs" "dx";
        clock_of_core: "tk_data" "timekeeper";
        clock_seconds: "timekeeper" "ktime_sec";
        clock_suspended: "timekeeper" "offs_boot";
        signal_threads: "signal_struct" "thread_head";
        wait_list: "wait_queue_head" "head";
        wait_link: "wait_queue_entry" "entry";
        wait_function: "wait_queue_entry" "func";
        wait_private: "wait_queue_entry" "private";
        page_wait_page: "wait_page_queue" "folio" | "page";
        page_wait_entry: "wait_page_queue" "wait";
        page_wait_bit: "wait_page_queue" "bit_nr";
        request_context: "request" "mq_hctx";
        request_last_bio: "request" "biotail";
        request_flush_link: "request" "flush.list" | "queuelist";
        context_flush: "blk_mq_hw_ctx" "fq";
        flush_request: "blk_flush_queue" "flush_rq";
        flush_lists: "blk_flush_queue" "flush_queue";
        journal_waiters: "journal_s" "j_wait_done_commit";
        xfs_log_waiters: "xlog_in_core" "ic_force_wait";
        f2fs_segments: "f2fs_sb_info" "sm_info";
        f2fs_control: "f2fs_sm_info" "fcc_info";
        f2fs_dispatched: "flush_cmd_control" "dispatch_list";
        f2fs_command_link: "flush_cmd" "llnode";
        f2fs_command_wait: "flush_cmd" "wait";
        completion_waiters: "completion" "wait.task_list";
        waiter_link: "swait_queue" "task_list";
        waiter_task: "swait_queue" "task";
        iomap_dio_iocb: "iomap_dio" "iocb";
        iomap_simple_iocb: "iomap_dio_simple" "iocb";
        iomap_simple_bio: "iomap_dio_simple" "bio";
        iomap_dio_waiter: "iomap_dio" "submit.waiter";
        dio_block: "dio" "iocb";
        dio_inode: "dio" "inode";
        dio_waiter: "dio" "waiter";
        dio_is_async: "dio" "is_async";
        device_dio_waiter: "blkdev_dio" "waiter";
        device_dio_block: "blkdev_dio" "iocb";
        device_dio_bio: "blkdev_dio" "bio";
        ring_task: "io_kiocb" "task";
        ring_context: "io_kiocb" "tctx";
        ring_context_task: "io_uring_task" "task";
        aio_block: "aio_kiocb" "rw";
        aio_context: "aio_kiocb" "ki_ctx";
        context_number: "kioctx" "id";
        context_ring: "kioctx" "aio_ring_file";
        table_count: "kioctx_table" "nr";
        table_entries: "kioctx_table" "table";
        backing_block: "backing_aio" "iocb";
        backing_original: "backing_aio" "orig_iocb";
        overlay_block: "ovl_aio_req" "iocb";
        overlay_original: "ovl_aio_req" "orig_iocb";
        mapping_areas: "address_space" "i_mmap.rb_root.rb_node";
        node_left: "rb_node" "rb_left";
        node_right: "rb_node" "rb_right";
        area_link: "vm_area_struct" "shared.rb";
        memory_contexts: "mm_struct" "ioctx_table";
        memory_owner: "mm_struct" "owner";
        xfs_buffer_ops: "xfs_buf" "b_ops";
        dm_io_clone: "dm_target_io" "clone";
        dm_target_io: "dm_target_io" "io";
        dm_io_original: "dm_io" "orig_bio";
        dm_io_callback: "io" "callback";
        dm_io_context: "io" "context";
        dm_crypt_bio: "dm_crypt_io" "base_bio";
        md_clone: "md_io_clone" "bio_clone";
        md_original: "md_io_clone" "orig_bio";
        md_account_clone: "md_io_acct" "bio_clone";
        md_account_original: "md_io_acct" "orig_bio";
        raid1_master: "r1bio" "master_bio";
        raid10_master: "r10bio" "master_bio";
        bcache_search_closure: "search" "cl";
        bcache_search_original: "search" "orig_bio";
        bcache_search_insert: "search" "iop";
        bcache_insert_closure: "data_insert_op" "cl";
        bcache_detached_end: "detached_dev_io_private" "bi_end_io";
        bcache_detached_private: "detached_dev_io_private" "bi_private";
        bcache_detached_device: "detached_dev_io_private" "orig_bdev";
        bcache_detached_original: "detached_dev_io_private" "orig_bio";
        btrfs_bio_bio: "btrfs_bio" "bio";
        btrfs_bio_inode: "btrfs_bio" "inode";
        btrfs_bio_end: "btrfs_bio" "end_io";
        btrfs_bio_private: "btrfs_bio" "private";
        btrfs_dio_inode: "btrfs_dio_private" "inode";
        btrfs_dio_bio: "btrfs_dio_private" "bio";
        btrfs_compressed_inode: "compressed_bio" "inode";
        btrfs_inode_inode: "btrfs_inode" "vfs_inode";
        btrfs_inode_root: "btrfs_inode" "root";
        btrfs_root_number: "btrfs_root" "root_key.objectid";
        btrfs_stripe_context: "btrfs_io_stripe" "bioc";
        btrfs_context_bio: "btrfs_io_context" "orig_bio";
        block_device_inode: "bdev_inode" "vfs_inode";
        block_device_of: "bdev_inode" "bdev";
        block_device_disk: "block_device" "bd_disk";
        block_device_start: "block_device" "bd_start_sect";
        block_device_holder: "block_device" "bd_holder";
        disk_device: "gendisk" "part0";
        dentry_inode: "dentry" "d_inode";
        dentry_flags: "dentry" "d_flags";
        sb_root: "super_block" "s_root";
        inode_flags: "inode" "i_flags";
        inode_links: "inode" "i_nlink";
        inode_hashed: "inode" "i_hash.pprev";
        inode_dirtied: "inode" "dirtied_when";
        source_factor: "clocksource" "mult";
        source_shift: "clocksource" "shift";
        journal_superblock: "journal_s" "j_sb_buffer";
        ext4_journal: "ext4_sb_info" "s_journal";
        xfs_log: "xfs_mount" "m_log";
        xfs_log_start: "xlog" "l_logBBstart";
        xfs_log_length: "xlog" "l_logBBsize";
        xfs_log_target: "xlog" "l_targ";
        xfs_target_device: "xfs_buftarg" "bt_bdev";
        reiserfs_super: "reiserfs_sb_info" "s_rs";
        reiserfs_block_size: "reiserfs_super_block" "s_v1.s_blocksize";
        reiserfs_journal_start: "reiserfs_super_block" "s_v1.s_journal.jp_journal_1st_block";
        reiserfs_journal_length: "reiserfs_super_block" "s_v1.s_journal.jp_journal_size";
        inode_operations: "inode" "i_fop";
        sb_private: "super_block" "s_fs_info";
        node_parts: "pglist_data" "per_cpu_nodestats";
        node_part_counts: "per_cpu_nodestat" "vm_node_stat_diff";
        bdi_list: "backing_dev_info" "bdi_list";
        bdi_writers: "backing_dev_info" "wb_list";
        bdi_owner: "backing_dev_info" "owner";
        bdi_name: "backing_dev_info" "dev_name";
        writer_list: "bdi_writeback" "bdi_node";
        writer_bdi: "bdi_writeback" "bdi";
        writer_counts: "bdi_writeback" "stat";
        writer_dirty: "bdi_writeback" "b_dirty";
        writer_queued: "bdi_writeback" "b_io";
        writer_postponed: "bdi_writeback" "b_more_io";
        writer_times: "bdi_writeback" "b_dirty_time";
        counter_sum: "percpu_counter" "count";
        counter_parts: "percpu_counter" "counters";
        disk_bdi: "gendisk" "bdi";
        disk_lower: "gendisk" "slave_bdevs";
        holder_list: "bd_holder_disk" "list";
        holder_device: "bd_holder_disk" "bdev";
        holder_directory: "bd_holder_disk" "holder_dir";
        directory_parent: "kobject" "parent";
        block_device_directory: "block_device" "bd_holder_dir";
        block_device_driver: "block_device" "bd_device";
        block_device_node: "block_device" "bd_device.kobj";
        sb_bdi: "super_block" "s_bdi";
        btrfs_info_devices: "btrfs_fs_info" "fs_devices";
        btrfs_devices: "btrfs_fs_devices" "devices";
        btrfs_device_list: "btrfs_device" "dev_list";
        btrfs_device: "btrfs_device" "bdev";
        inode_writers: "inode" "i_io_list";
        mapping_pages: "address_space" "i_pages";
        pages_root: "xarray" "xa_head";
        tree_shift: "xa_node" "shift";
        tree_parent: "xa_node" "parent";
        tree_array: "xa_node" "array";
        tree_slots: "xa_node" "slots";
        tree_marks: "xa_node" "marks";
        task_memory: "task_struct" "mm";
        memory_areas: "mm_struct" "mm_mt.ma_root";
        memory_tables: "mm_struct" "pgd";
        memory_program: "mm_struct" "exe_file";
        node_parent_of: "maple_node" "parent";
        range_pivots: "maple_range_64" "pivot";
        range_slots: "maple_range_64" "slot";
        gaps_pivots: "maple_arange_64" "pivot";
        gaps_slots: "maple_arange_64" "slot";
        area_start: "vm_area_struct" "vm_start";
        area_end: "vm_area_struct" "vm_end";
        area_memory: "vm_area_struct" "vm_mm";
        area_flags: "vm_area_struct" "vm_flags";
        area_file: "vm_area_struct" "vm_file";
        file_mapping: "file" "f_mapping";
        file_position: "file" "f_pos";
    }
    sizes {
        page_size: "page";
        request_size: "request";
        vector_size: "bio_vec";
    }
    optional_sizes {
        counter_size: "percpu_counter";
        wait_list_size: "wait_queue_head";
        registers_size: "pt_regs";
    }
}

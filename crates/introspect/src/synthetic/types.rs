//! The structures of synthetic kernels, similar to those of Linux.
//! [`Description`](super::description::Description) explains the notation.

/// The types of all kernels.
pub(crate) const COMMON: &str = "
    list_head 16: next 0, prev 8
    hlist_node 16: next 0, pprev 8
    -page_words 40: lru 0 list_head, mapping 16, index 24, private 32
    xarray 16: xa_lock 0, xa_flags 4, xa_head 8
    xa_node 576: shift 0, offset 1, parent 8 *xa_node, array 16 *xarray, slots 40, marks 552
    rb_node 24: __rb_parent_color 0, rb_right 8, rb_left 16
    rb_root 8: rb_node 0 *rb_node
    rb_root_cached 16: rb_root 0 rb_root, rb_leftmost 8
    address_space 192: host 0 *inode, i_pages 8 xarray, i_mmap 40 rb_root_cached, a_ops 104
    -inode_lists 16: i_dentry 0, i_rcu 0
    inode 640: i_mode 0, i_uid 4, i_gid 8, i_flags 12, i_sb 40 *super_block, i_mapping 48 *address_space,\
        i_ino 64, i_nlink 72, i_size 80, i_write_hint 143, i_io_list 232 list_head, i_hash 256 hlist_node, dirtied_when 272, - 288 -inode_lists, i_fop 352, i_data 368 address_space, i_generation 568
    super_block 512: s_list 0 list_head, s_dev 16, s_type 40 *file_system_type, s_bdev 96 *block_device,\
        s_bdi 104 *backing_dev_info, s_root 112 *dentry, s_fs_info 176, s_id 200
    file_system_type 72: name 0, fs_flags 8
    -qstr_numbers 8: hash 0, len 4
    -qstr_union 8: - 0 -qstr_numbers, hash_len 0
    qstr 16: - 0 -qstr_union, name 8
    request 256: q 0 *request_queue, mq_hctx 16 *blk_mq_hw_ctx, cmd_flags 24, rq_flags 28, __data_len 44, __sector 48,\
        bio 56 *bio, - 96 -request_lists
    blk_mq_hw_ctx 512: state 0, fq 128 *blk_flush_queue
    blk_flush_queue 64: flush_running_idx 4, flush_queue 16, flush_rq 48 *request
    request_queue 512: queuedata 8, disk 88 *gendisk
    gendisk 512: major 0, disk_name 12, part0 48 *block_device, bdi 64 *backing_dev_info, slave_bdevs 80 list_head
    kobject 64: name 0, parent 24 *kobject
    device 128: kobj 0 kobject, parent 64
    pglist_data 256: node_id 0, per_cpu_nodestats 128
    per_cpu_nodestat 44: stat_threshold 0, vm_node_stat_diff 1
    percpu_counter 40: lock 0, count 8, list 16 list_head, counters 32
    backing_dev_info 1160: id 0, bdi_list 32 list_head, wb_list 904 list_head, dev 1032, dev_name 1040, owner 1104 *device
    bdi_writeback 808: bdi 0 *backing_dev_info, b_dirty 24 list_head, b_io 40 list_head, b_more_io 56 list_head,\
        b_dirty_time 72 list_head, stat 96, bdi_node 576 list_head
    bio 136: bi_next 0 *bio, bi_bdev 8, bi_opf 16, bi_iter 32 bvec_iter, bi_end_io 56, bi_private 64,\
        bi_blkg 72 *blkcg_gq, bi_io_vec 112 *bio_vec
    bio_vec 16: bv_page 0 *page, bv_len 8, bv_offset 12
    task_io_accounting 56: rchar 0, read_bytes 32, write_bytes 40, cancelled_write_bytes 48
    signal_struct 1024: sigcnt 0, thread_head 16 list_head, ioac 512 task_io_accounting
    css_set 256: subsys 0, dfl_cgrp 128 *cgroup
    files_struct 704: count 0, fdt 32 *fdtable
    fdtable 56: max_fds 0, fd 8
    pt_regs 168: r15 0, dx 96, si 104, di 112, orig_ax 120, ip 128, cs 136
    clocksource 128: mult 24, shift 28
    timekeeper 280: ktime_sec 144, offs_boot 168
    task_struct 1024: __state 24, stack 32, flags 44, tasks 256 list_head, real_parent 408 *task_struct, pid 400, tgid 404, group_leader 448 *task_struct,\
        mm 464 *mm_struct, signal 480 *signal_struct, thread_node 496 list_head, start_boottime 560,\
        files 568 *files_struct, ioac 576 task_io_accounting, cgroups 640 *css_set, comm 704
    wait_queue_head 24: lock 0, head 8 list_head
    wait_queue_entry 40: flags 0, private 8, func 16, entry 24 list_head
    wait_page_queue 56: folio 0 *page, bit_nr 8, wait 16 wait_queue_entry
    swait_queue_head 24: lock 0, task_list 8 list_head
    swait_queue 24: task 0 *task_struct, task_list 8 list_head
    completion 32: done 0, wait 8 swait_queue_head
    maple_tree 16: ma_flags 4, ma_root 8
    maple_node 256: parent 0, slot 8
    maple_range_64 256: parent 0, pivot 8, slot 128
    maple_arange_64 248: parent 0, pivot 8, slot 80, gap 160
    mm_struct 256: mm_mt 64 maple_tree, pgd 120, mm_users 132, ioctx_table 136 *kioctx_table, owner 144 *task_struct, exe_file 152 *file
    -area_links 32: rb 0 rb_node, rb_subtree_last 24
    vm_area_struct 176: vm_start 0, vm_end 8, vm_mm 16 *mm_struct, vm_flags 32, shared 48 -area_links, vm_pgoff 120,\
        vm_file 128 *file
    file 232: f_mode 20, f_pos 48, f_mapping 24 *address_space, f_inode 32 *inode
    kiocb 48: ki_filp 0 *file, ki_pos 8, ki_complete 16
    -aio_union 48: ki_filp 0 *file, rw 0 kiocb
    aio_kiocb 192: - 0 -aio_union, ki_ctx 64 *kioctx
    kioctx 640: users 0, aio_ring_file 560 *file, id 568
    kioctx_table 64: rcu 0, nr 16, table 24
    io_uring_task 128: cached_refs 0, task 16 *task_struct
    -iomap_submit 16: iter 0, waiter 8 *task_struct
    -iomap_union 32: submit 0 -iomap_submit, aio 0
    iomap_dio! 96: iocb 0 *kiocb, dops 8, size 24, flags 44, - 48 -iomap_union
    dio 704: inode 8 *inode, iocb 16 *kiocb, waiter 40 *task_struct, is_async 60
    -blkdev_union 8: iocb 0 *kiocb, waiter 0 *task_struct
    blkdev_dio 208: - 0 -blkdev_union, size 8, bio 64 bio
    block_device 320: bd_start_sect 0, bd_disk 24 *gendisk, bd_holder 48, bd_device 64 device, bd_holder_dir 200 *kobject
    bdev_inode 960: bdev 0 block_device, vfs_inode 320 inode
    journal_s 256: j_sb_buffer 24 *buffer_head, j_wait_done_commit 64 wait_queue_head
    f2fs_sb_info 128: sb 0, sm_info 16 *f2fs_sm_info
    f2fs_sm_info 64: sit_info 0, fcc_info 8 *flush_cmd_control
    flush_cmd_control 64: f2fs_issue_flush 0, dispatch_list 40
    flush_cmd 64: wait 0 completion, llnode 32, ret 40
    ext4_sb_info 512: s_desc_size 0, s_journal 200 *journal_s
    cgroup_subsys_state 200: cgroup 0 *cgroup, ss 8, serial_nr 88
    mem_cgroup 512: id 0, css 16 cgroup_subsys_state
    blkcg 512: css 8 cgroup_subsys_state
    blkcg_gq 256: q 0, blkcg 24 *blkcg
    cgroup 1024: self 0 cgroup_subsys_state, flags 200, kn 248 *kernfs_node
    dm_target_io 256: magic 0, io 16 *dm_io, clone 64 bio
    dm_io 320: magic 0, orig_bio 32 *bio
    io 64: error_bits 0, count 8, client 16, callback 24, context 32
    dm_crypt_io 256: cc 0, base_bio 8 *bio
    r1bio 128: remaining 0, master_bio 56 *bio
    r10bio 128: remaining 0, master_bio 48 *bio
    mod_kallsyms 32: symtab 0, num_symtab 8, strtab 16
    module 512: state 0, list 8 list_head, name 24, kallsyms 256 *mod_kallsyms
    btf 128: data 0, nr_types_resolved 40, data_size 44
    btf_module 64: list 0 list_head, btf 16 *btf, module 24 *module
    enum req_flag_bits: __REQ_SYNC 11, __REQ_META 12, __REQ_PRIO 13, __REQ_FUA 17, __REQ_PREFLUSH 18,\
        __REQ_RAHEAD 19, __REQ_BACKGROUND 20, __REQ_SWAP 23
    enum node_stat_item: NR_INACTIVE_ANON 0, NR_FILE_PAGES 19, NR_FILE_DIRTY 20, NR_WRITEBACK 21
    enum zone_stat_item: NR_FREE_PAGES 0
    enum wb_stat_item: WB_RECLAIMABLE 0, WB_WRITEBACK 1, WB_DIRTIED 2, WB_WRITTEN 3
    enum jbd_state_bits: BH_JBD 16, BH_JWrite 17
";

/// The types of kernels up to 7.0.
pub(crate) const BEFORE_SEVEN: &str = "
    -page_union 40: - 0 -page_words, compound_head 0
    -page_counts 4: _mapcount 0, page_type 0
    page 64: flags 0, - 8 -page_union, - 48 -page_counts, _refcount 52, memcg_data 56
    dentry_alias 16: d_alias 0 hlist_node
    dentry 192: d_flags 0, d_hash 8 hlist_node, d_parent 24 *dentry, d_name 32 qstr, d_inode 48 *inode,\
        d_iname 56, d_u 176 dentry_alias
    bvec_iter! 20: bi_sector 0, bi_size 8, bi_idx 12, bi_bvec_done 16
    buffer_head 104: b_state 0, b_page 16, b_blocknr 24, b_bdev 48, b_end_io 56, b_private 64
";

/// The corresponding types of kernels like 7.2.
pub(crate) const SEVEN: &str = "
    -page_union 40: - 0 -page_words, compound_info 0
    -page_counts 4: _mapcount 0, page_type 0
    page 64: flags 0, - 8 -page_union, - 48 -page_counts, _refcount 52, memcg_data 56
    -dentry_alias 16: d_alias 0 hlist_node
    -dentry_name 16: __d_name 0 qstr, d_name 0 qstr
    dentry 192: d_flags 0, d_hash 8 hlist_node, d_parent 24 *dentry, - 32 -dentry_name, d_inode 48 *inode,\
        d_iname 56, - 176 -dentry_alias
    bvec_iter! 20: bi_sector 0, bi_size 8, bi_idx 12, bi_offset 16
    buffer_head 104: b_state 0, b_page 16, b_blocknr 24, b_bdev 48, b_private 64
";

/// The types of kernels like 6.1.
pub(crate) const EARLY: &str = "
    request_flush 32: seq 0, list 8 list_head, saved_end_io 24
    -request_lists 32: flush 0 request_flush
    kernfs_node 128: count 0, parent 8 *kernfs_node, name 16, priv 96
    io_kiocb 232: file 0 *file, opcode 64, task 96 *task_struct
    ovl_aio_req 64: iocb 0 kiocb, ref 48, orig_iocb 56 *kiocb
    md_io_acct 160: orig_bio 0 *bio, start_time 8, bio_clone 16 bio
    bd_holder_disk 32: list 0 list_head, bdev 16 *block_device, refcnt 24
    enum pageflags: PG_locked 0, PG_uptodate 2, PG_dirty 3, PG_waiters 7, PG_slab 9, PG_writeback 15, PG_head 16
";

/// The corresponding types of kernels like 6.12.
pub(crate) const RECENT: &str = "
    -request_lists 32: queuelist 0 list_head
    tk_data 512: seq 0, timekeeper 8 timekeeper
    pcpu_hot 64: preempt_count 0, current_task 8 *task_struct
    kernfs_node 128: count 0, __parent 8 *kernfs_node, name 16, priv 96
    io_kiocb 232: file 0 *file, opcode 64, tctx 104 *io_uring_task
    backing_aio 72: iocb 8 kiocb, ref 56, orig_iocb 64 *kiocb
    md_io_clone 176: mddev 0, orig_bio 8 *bio, bio_clone 32 bio
    bd_holder_disk 32: list 0 list_head, holder_dir 16 *kobject, refcnt 24
    enum pageflags: PG_locked 0, PG_writeback 1, PG_uptodate 3, PG_dirty 4, PG_waiters 7, PG_head 6
    enum64 pagetype: PGTY_buddy 240, PGTY_slab 245
";

/// The module `btrfs` whose bios refer to an inode only through their private structures.
pub(crate) const BTRFS_EARLY: &str = "
    btrfs_bio 320: file_offset 8, end_io 64, private 72, bio 128 bio
    btrfs_dio_private 192: inode 0 *inode, file_offset 8, bio 24 bio
    compressed_bio 128: inode 8 *inode, start 16
";
/// The module `btrfs` whose bios refer to Btrfs's own inode.
pub(crate) const BTRFS_RECENT: &str = "
    btrfs_bio 320: inode 8 *btrfs_inode, file_offset 16, end_io 64, private 72, bio 128 bio
";
/// The same of kernels like 7.2.
pub(crate) const BTRFS_SEVEN: &str = "
    btrfs_bio! 320: inode 8 *btrfs_inode, file_offset 16, end_io 64, private 72, is_scrub 90, bio 128 bio
";
/// The other types of the module `btrfs`.
pub(crate) const BTRFS: &str = "
    btrfs_key 17: objectid 0, type 8, offset 9
    btrfs_root 512: node 0, root_key 48 btrfs_key
    btrfs_inode 1024: root 0 *btrfs_root, location 8, vfs_inode 320 inode
    btrfs_fs_info 512: flags 0, fs_devices 32 *btrfs_fs_devices
    btrfs_fs_devices 256: fsid 0, devices 64 list_head
    btrfs_device 256: dev_list 0 list_head, bdev 24 *block_device
    btrfs_io_stripe 32: dev 0, bioc 16 *btrfs_io_context
    btrfs_io_context 128: refs 0, orig_bio 48 *bio
";
/// The functions of `btrfs`.
pub(crate) const BTRFS_SYMBOLS: &[&str] = &[
    "btrfs_simple_end_io",
    "btrfs_clone_write_end_io",
    "btrfs_end_dio_bio",
    "btrfs_end_super_write",
    "btrfs_end_empty_barrier",
    "end_compressed_bio_read",
    "btrfs_something_else",
];

/// The module `xfs`.
pub(crate) const XFS: &str = "
    xfs_buf 384: b_rhash_key 8, b_ops 296, b_mount 304
    xlog_in_core 512: ic_force_wait 0 wait_queue_head, ic_offset 64
";
/// The functions and operations of `xfs`.
pub(crate) const XFS_SYMBOLS: &[&str] = &[
    "xfs_buf_bio_end_io",
    "xlog_bio_end_io",
    "xfs_end_bio",
    "xfs_dir3_data_buf_ops",
    "xfs_agf_buf_ops",
];

/// The functions of the kernel itself.
pub(crate) const FUNCTIONS: &[&str] = &[
    "ext4_end_bio",
    "mpage_end_io",
    "iomap_dio_bio_end_io",
    "dio_bio_end_io",
    "dio_bio_end_aio",
    "end_bio_bh_io_sync",
    "journal_end_buffer_io_sync",
    "end_buffer_write_sync",
    "end_buffer_async_write",
    "ext4_end_bitmap_read",
    "blkdev_bio_end_io",
    "blkdev_bio_end_io_simple",
    "blkdev_bio_end_io_async",
    "io_complete_rw",
    "wake_page_function",
    "io_async_buf_func",
    "autoremove_wake_function",
    "default_wake_function",
    "__folio_mark_dirty",
    "aio_complete_rw",
    "backing_aio_rw_complete",
    "ovl_aio_rw_complete",
    "end_swap_bio_write",
    "f2fs_write_end_io",
    "clone_endio",
    "crypt_endio",
    "integrity_end_io",
    "endio",
    "write_callback",
    "md_end_clone_io",
    "md_end_io_acct",
    "raid1_end_write_request",
    "raid10_end_read_request",
    "bio_chain_endio",
    "submit_bio_wait_endio",
    "bio_wait_end_io",
    "bh_end_write",
    "bh_end_async_write",
    "super_written",
    "unknown_end_io",
];

//! The activity of a synthetic guest: requests of every known kind in flight, and the true facts
//! about each.

use fathom_insight::{Confidence, InsightSource, Kind};

use super::PAGE;
use super::answer::NamedFacts;
use super::builder::Builder;
use super::dirty;
use super::flushes;
use super::objects::{DIRECTORY, REGULAR};
use super::stage::{Bio, Stage};
use crate::resolver::RequestView;

/// A request in flight.
#[derive(Clone, Debug)]
pub struct SyntheticRequest {
    /// The purpose of the request.
    pub name: &'static str,
    /// The disk's view of the request.
    pub view: RequestView,
    /// The request's memory: guest-physical addresses and lengths.
    pub pieces: Vec<(u64, u64)>,
    /// The true facts about the request, with the processes that wait for its data.
    pub truth: Vec<NamedFacts>,
}

/// Variables of the image.
pub(crate) struct Globals {
    /// The guest-physical address of the pointer to the super block of devices.
    pub device_super: u64,
    pub super_blocks: u64,
    pub init_task: u64,
    /// The operations of an inode that cannot be opened.
    pub no_operations: u64,
    /// The table of the lists of those that wait for pages.
    pub page_waits: u64,
    pub dirty: dirty::Globals,
}

/// The objects of the scene.
pub(crate) struct Scene {
    pub requests: Vec<SyntheticRequest>,
    pub tasks: Vec<(u32, &'static str)>,
    pub cached: Vec<(String, u64)>,
}

/// A name of the greatest length.
const LONG: &str = concat!(
    "0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-",
    "0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-",
    "0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-0123456789-",
    "0123456789-0123456789-01"
);
/// The flags of two requests: metadata with priority, and swap.
const META: u32 = 1 << 12 | 1 << 13;
const SWAP: u32 = 1 << 23;

/// Builds the scene.
#[expect(clippy::too_many_lines, reason = "a flat list of requests")]
pub(crate) fn build(builder: &mut Builder<'_>, globals: &Globals) -> Scene {
    let recent = builder.shape.recent;
    // Devices, and the file systems on them.
    let devices = builder.super_block("bdev", "bdev", 0);
    builder.store.write_u64(globals.device_super, devices);
    let [vda1, vdb, dm0, vdc, vdd] =
        ["vda", "vdb", "dm-0", "vdc", "vdd"].map(|name| builder.device(devices, name));
    let ext4 = builder.mount("ext4", "vda1", vda1.device, 2);
    let xfs = builder.mount("xfs", "dm-0", dm0.device, 128);
    let btrfs = builder.mount("btrfs", "vdc", vdc.device, 256);
    let f2fs = builder.mount("f2fs", "vdd", vdd.device, 3);
    let list: Vec<u64> =
        [devices, ext4.super_block, xfs.super_block, btrfs.super_block, f2fs.super_block]
            .iter()
            .map(|super_block| builder.at(*super_block, "super_block.s_list"))
            .collect();
    builder.chain("super_block.s_list", globals.super_blocks, &list);
    let journal_buffer = builder.make("buffer_head");
    let journal = builder.make("journal_s");
    builder.set(journal, "journal_s.j_sb_buffer", journal_buffer);
    let info = builder.make("ext4_sb_info");
    builder.set(info, "ext4_sb_info.s_journal", journal);
    builder.set(ext4.super_block, "super_block.s_fs_info", info);

    // Files.
    let mail = builder.directories(ext4, "srv/mail");
    let inbox = builder.inode(ext4.super_block, 131, REGULAR, 20_000);
    builder.name(mail, "inbox", inbox);
    builder.set_u32(inbox, "inode.i_uid", 33);
    let outbox = builder.inode(ext4.super_block, 132, REGULAR, 5 << 20);
    builder.name(mail, LONG, outbox);
    let database = builder.inode(ext4.super_block, 140, REGULAR, 1 << 30);
    let db = builder.directories(ext4, "var/lib/db");
    builder.name(db, "main.db", database);
    builder.set_u32(database, "inode.i_write_hint", 0xff02);
    let gone = builder.inode(ext4.super_block, 150, REGULAR, 4096);
    let name = builder.name(ext4.root, "gone", gone);
    builder.unlink(name);
    let reserved = builder.inode(ext4.super_block, 8, REGULAR, 8 << 20);
    let disk_image = builder.inode(xfs.super_block, 200, REGULAR, 3 << 30);
    builder.name(xfs.root, "image", disk_image);
    let (btrfs_outer, btrfs_file) = builder.btrfs_inode(btrfs, 257, REGULAR, 70_000);
    let name = builder.directories(btrfs, "home");
    builder.name(name, "data", btrfs_file);
    // The inode of a balance has a number that another file has too.
    let (moved_outer, moved) = builder.btrfs_inode(btrfs, 257, REGULAR, 1 << 20);
    let (tree_outer, tree) = builder.btrfs_inode(btrfs, 1, 0, 1 << 40);
    let nodes = builder.inode(f2fs.super_block, 1, REGULAR, 1 << 30);
    let directory = builder.inode(f2fs.super_block, 4, DIRECTORY, PAGE);
    builder.name(f2fs.root, "d", directory);
    let flash = builder.inode(f2fs.super_block, 5, REGULAR, 12_000);
    builder.name(f2fs.root, "f", flash);

    // Control groups and tasks.
    let root = builder.group(0, "", 1);
    let web = builder.group(root.node, "web", 3);
    let batch = builder.group(root.node, "batch", 5);
    let job = builder.group(batch.node, "job", 7);
    // A name with arbitrary bytes: a terminal's escape sequences, and invalid text.
    let odd = builder.group(root.node, "o\u{1b}[1md", 9);
    builder.fill_task(globals.init_task, 0, 0, "swapper/0");
    let init = builder.task(0, 1, "systemd");
    let postgres = builder.task(0, 77, "postgres");
    let thread = builder.task(postgres, 77, "worker");
    let worker = builder.task(0, 9, "kworker/0:1");
    builder.set_u32(worker, "task_struct.flags", 0x0020_0000);
    let list = [init, worker, postgres].map(|task| builder.at(task, "task_struct.tasks"));
    let head = builder.at(globals.init_task, "task_struct.tasks");
    builder.chain("task_struct.tasks", head, &list);
    let sleeper = builder.task(postgres, 77, "sleeper");
    let opened = builder.open(database);
    builder.sleep_in_fsync(sleeper, opened);
    let signals = builder.link_threads(&[&[init], &[worker], &[postgres, thread, sleeper]]);
    builder.set(postgres, "task_struct.real_parent", init);
    builder.belong(postgres, &job);
    let accounts = [
        builder.at(postgres, "task_struct.ioac"),
        builder.at(sleeper, "task_struct.ioac"),
        builder.at(signals[2], "signal_struct.ioac"),
    ];
    for (account, unit) in accounts.into_iter().zip([10, 100, 1000]) {
        builder.account(account, unit);
    }

    let queue = builder.make("request_queue");
    builder.set(queue, "request_queue.disk", vda1.disk);
    let mut stage = Stage { builder, queue, sector: 2048, requests: Vec::new() };

    // The true facts.
    let sure = |kind, source| NamedFacts {
        kind,
        source,
        confidence: Confidence::Sure,
        ..NamedFacts::default()
    };
    let with = |reported: &NamedFacts, group: &str| NamedFacts {
        cgroup: group.into(),
        ..reported.clone()
    };
    let on_ext4 = NamedFacts {
        file_system: "ext4".into(),
        device: "vda1".into(),
        ..sure(Kind::Data, InsightSource::Page)
    };
    let inbox_facts = NamedFacts {
        inode: 131,
        file_size: 20_000,
        owner: 33,
        path: "/srv/mail/inbox".into(),
        cgroup: "/web".into(),
        ..on_ext4.clone()
    };
    let outbox_facts = NamedFacts {
        inode: 132,
        file_size: 5 << 20,
        path: format!("/srv/mail/{LONG}"),
        cgroup: "/batch/job".into(),
        ..on_ext4.clone()
    };
    let database_facts = NamedFacts {
        inode: 140,
        file_size: 1 << 30,
        path: "/var/lib/db/main.db".into(),
        write_hint: 2,
        cgroup: "/batch/job".into(),
        ..on_ext4.clone()
    };
    let of_ext4 = NamedFacts { kind: Kind::Metadata, ..on_ext4.clone() };
    let unknown = NamedFacts::default();
    let bio = Bio { group: Some(web), ..Bio::default() };
    let in_job = Bio { group: Some(job), ..Bio::default() };
    let in_root = Bio { group: Some(root), ..Bio::default() };

    // The page cache.
    let inbox_page = stage.builder.cache(inbox);
    stage.one("data", Bio { end: "ext4_end_bio", ..bio }, inbox_page, &inbox_facts);
    let more = [(); 3].map(|()| stage.builder.cache(outbox));
    let pieces: Vec<_> = more.iter().map(|page| (*page, PAGE)).collect();
    let whole = Bio { end: "mpage_end_io", size: 3 * PAGE, ..in_job };
    stage.submit("one file", META, &[whole], &pieces, std::slice::from_ref(&outbox_facts));
    let large = stage.builder.cache_large(database);
    stage.submit(
        "large page",
        0,
        &[Bio { end: "f2fs_write_end_io", size: 2 * PAGE, ..in_job }],
        &[(large, 2 * PAGE)],
        std::slice::from_ref(&database_facts),
    );
    let merged = [
        Bio { end: "ext4_end_bio", size: PAGE, ..bio },
        Bio { end: "ext4_end_bio", size: 2 * PAGE, ..in_job },
        Bio { end: "ext4_end_bio", size: PAGE, ..bio },
    ];
    let pieces = [(inbox_page, PAGE), (more[0], PAGE), (more[1], PAGE), (inbox_page, PAGE)];
    let parts = [(1, &inbox_facts), (2, &outbox_facts), (1, &inbox_facts)]
        .map(|(pages, reported)| NamedFacts { length: pages * PAGE, ..reported.clone() });
    stage.submit("merged", 0, &merged, &pieces, &parts);
    let gone_page = stage.builder.cache(gone);
    let gone_facts = NamedFacts {
        inode: 150,
        file_size: 4096,
        path: "/gone (deleted)".into(),
        ..on_ext4.clone()
    };
    stage.one("deleted", Bio { end: "ext4_end_bio", ..bio }, gone_page, &with(&gone_facts, "/web"));
    for (name, file, inode, path) in stage.builder.odd_names(ext4) {
        let page = stage.builder.cache(file);
        let reported = NamedFacts { inode, file_size: PAGE, path: path.into(), ..on_ext4.clone() };
        stage.one(name, Bio { end: "ext4_end_bio", ..bio }, page, &with(&reported, "/web"));
    }
    let reserved_page = stage.builder.cache(reserved);
    stage.one(
        "own inode",
        Bio { end: "ext4_end_bio", ..bio },
        reserved_page,
        &with(&of_ext4, "/web"),
    );
    // Blocks that are charged to no group, of a page that is charged to one.
    let charged = stage.builder.cache(inbox);
    let structure = stage.builder.page(charged);
    stage.builder.set(structure, "page.memcg_data", web.memory);
    stage.one("charged page", Bio { end: "ext4_end_bio", ..in_root }, charged, &inbox_facts);
    let in_odd = Bio { end: "ext4_end_bio", group: Some(odd), ..Bio::default() };
    let reported = with(&inbox_facts, "/o\u{fffd}[1md");
    stage.one("odd group", in_odd, inbox_page, &reported);
    let free = Bio { end: "ext4_end_bio", ..Bio::default() };
    stage.one("no group", free, inbox_page, &with(&inbox_facts, ""));
    let slab = stage.builder.slab(inbox);
    stage.one("slab", Bio { end: "f2fs_write_end_io", ..in_root }, slab, &with(&unknown, "/"));
    let private = stage.builder.anonymous();
    stage.one("anonymous", Bio { end: "ext4_end_bio", ..bio }, private, &with(&unknown, "/web"));
    let f2fs_facts =
        NamedFacts { file_system: "f2fs".into(), device: "vdd".into(), ..on_ext4.clone() };
    let mixed = [directory, nodes, flash].map(|inode| stage.builder.cache(inode));
    let pieces: Vec<_> = mixed.iter().map(|page| (*page, PAGE)).collect();
    let parts = [
        NamedFacts {
            kind: Kind::Directory,
            inode: 4,
            file_size: PAGE,
            path: "/d".into(),
            ..f2fs_facts.clone()
        },
        NamedFacts { kind: Kind::Metadata, ..f2fs_facts.clone() },
        NamedFacts { inode: 5, file_size: 12_000, path: "/f".into(), ..f2fs_facts.clone() },
    ]
    .map(|reported| NamedFacts { length: PAGE, cgroup: "/web".into(), ..reported });
    let each = Bio { end: "f2fs_write_end_io", size: 3 * PAGE, ..bio };
    stage.submit("mixed pages", 0, &[each], &pieces, &parts);

    // Buffers.
    let device_page = stage.builder.cache(vda1.inode);
    let bio_of = stage.of_buffer("journal_end_buffer_io_sync", in_root);
    let reported = with(&sure(Kind::Journal, InsightSource::Bio), "/");
    stage.one("journal", bio_of, device_page, &reported);
    let reported = NamedFacts { kind: Kind::Journal, ..of_ext4.clone() };
    let bio_of = stage.with_buffer(journal_buffer, "end_buffer_write_sync", in_root);
    stage.one("journal head", bio_of, device_page, &with(&reported, "/"));
    let bio_of = stage.of_buffer("end_buffer_write_sync", in_root);
    stage.one("metadata", bio_of, device_page, &with(&of_ext4, "/"));
    // The bit with which jbd2 marks its own blocks has this meaning only on a file system with
    // jbd2.
    let flash_page = stage.builder.cache(vdd.inode);
    let of_f2fs =
        NamedFacts { file_system: "f2fs".into(), device: "vdd".into(), ..of_ext4.clone() };
    for (name, page, reported) in
        [("journal block", device_page, &reported), ("not jbd2's", flash_page, &of_f2fs)]
    {
        let bio_of = stage.of_buffer("end_buffer_write_sync", in_root);
        stage.builder.set(bio_of.private, "buffer_head.b_state", 1 << 17);
        stage.one(name, bio_of, page, &with(reported, "/"));
    }
    let bio_of = stage.of_buffer("ext4_end_bitmap_read", in_root);
    let reported = with(&sure(Kind::Metadata, InsightSource::Bio), "/");
    stage.one("bitmap", bio_of, device_page, &reported);
    let raw_page = stage.builder.cache(vdb.inode);
    // Pages that are being read, for which a process waits.
    let opened = stage.builder.open(inbox);
    let block = stage.builder.ring_block(opened, thread);
    let read = NamedFacts { process: "postgres".into(), process_id: 77, ..inbox_facts.clone() };
    for (name, entries, reported) in [
        ("a waiter for write-back", &[("wake_page_function", thread)][..], &read),
        ("a reader", &[("wake_page_function", thread)], &read),
        ("a reader by io_uring", &[("io_async_buf_func", block)], &read),
        ("a waiter of another kind", &[("autoremove_wake_function", thread)], &inbox_facts),
        ("no reader", &[], &inbox_facts),
    ] {
        let table = globals.page_waits;
        let is_write = name == "a waiter for write-back";
        let page = stage.builder.cache_awaited(inbox, table, entries, inbox_page, is_write);
        stage.one(name, Bio { end: "mpage_end_io", ..bio }, page, reported);
        stage.requests.last_mut().expect("a request").view.is_write = is_write;
    }

    let bio_of = stage.of_buffer("end_buffer_async_write", in_root);
    let reported = NamedFacts { device: "vdb".into(), ..sure(Kind::Device, InsightSource::Page) };
    stage.one("device", bio_of, raw_page, &with(&reported, "/"));

    // Direct I/O.
    let process = |reported: &NamedFacts| NamedFacts {
        process: "postgres".into(),
        process_id: 77,
        kind: Kind::Direct,
        source: InsightSource::Bio,
        ..reported.clone()
    };
    let file = stage.builder.open(database);
    for (name, waits) in [("iomap", true), ("iomap async", false)] {
        let iocb = stage.holder("kiocb", "kiocb.ki_filp", file);
        let complete = if waits { 0 } else { stage.builder.function("unknown_end_io") };
        stage.builder.set(iocb, "kiocb.ki_complete", complete);
        let dio = stage.holder("iomap_dio", "iomap_dio.iocb", iocb);
        stage.builder.set(dio, "iomap_dio.submit.waiter", thread);
        let reported = process(&database_facts);
        let reported = if waits {
            reported
        } else {
            NamedFacts { process: String::new(), process_id: 0, ..reported }
        };
        stage.one(
            name,
            Bio { end: "iomap_dio_bio_end_io", private: dio, ..in_job },
            private,
            &reported,
        );
    }
    let child = stage.builder.task(0, 78, "child");
    let blocks = [
        ("iomap, io_uring", stage.builder.ring_block(file, thread)),
        ("iomap, libaio", stage.builder.context_block(file, postgres, child)),
    ];
    let stacked = stage.builder.stacked_block(file, blocks[1].1);
    let twice = stage.builder.stacked_block(file, stacked);
    for (name, block) in blocks.into_iter().chain([("iomap, overlay", twice)]) {
        let dio = stage.holder("iomap_dio", "iomap_dio.iocb", block);
        // The rest of a word that others use.
        stage.builder.set(dio, "iomap_dio.submit.waiter", child);
        let bio = Bio { end: "iomap_dio_bio_end_io", private: dio, ..in_job };
        stage.one(name, bio, private, &process(&database_facts));
    }
    let dio = stage.holder("dio", "dio.inode", inbox);
    stage.builder.set(dio, "dio.iocb", blocks[1].1);
    stage.builder.set_u32(dio, "dio.is_async", 1);
    let bio_of = Bio { end: "dio_bio_end_aio", private: dio, ..bio };
    stage.one("direct, libaio", bio_of, more[0], &process(&inbox_facts));
    let of_device = NamedFacts {
        kind: Kind::Device,
        cgroup: "/web".into(),
        confidence: Confidence::Sure,
        ..process(&unknown)
    };
    let dio = stage.holder("blkdev_dio", "blkdev_dio.iocb", blocks[0].1);
    let address = stage.builder.at(dio, "blkdev_dio.bio");
    let bio_of = Bio { end: "blkdev_bio_end_io_async", address, ..bio };
    stage.one("device, io_uring", bio_of, private, &of_device);
    let dio = stage.holder("blkdev_dio", "blkdev_dio.iocb", blocks[1].1);
    let bio_of = Bio { end: "blkdev_bio_end_io", private: dio, ..bio };
    stage.one("device, libaio", bio_of, private, &of_device);
    let dio = stage.holder("dio", "dio.inode", inbox);
    stage.builder.set(dio, "dio.waiter", postgres);
    stage.one(
        "direct",
        Bio { end: "dio_bio_end_io", private: dio, ..bio },
        more[0],
        &process(&inbox_facts),
    );
    let dio = stage.holder("blkdev_dio", "blkdev_dio.waiter", thread);
    let reported = NamedFacts { kind: Kind::Device, cgroup: "/web".into(), ..process(&unknown) };
    let reported = NamedFacts { confidence: Confidence::Sure, ..reported };
    stage.one(
        "device direct",
        Bio { end: "blkdev_bio_end_io", private: dio, ..bio },
        private,
        &reported,
    );
    // A bio on a stack, across the end of a page.
    let stack = stage.builder.scattered(2 * PAGE, false) + PAGE - 64;
    let simple = Bio { end: "blkdev_bio_end_io_simple", private: postgres, address: stack, ..bio };
    stage.one("device simple", simple, private, &reported);

    // Swap.
    let reported = with(&sure(Kind::Swap, InsightSource::Bio), "/");
    stage.one("swap", Bio { end: "end_swap_bio_write", ..in_root }, private, &reported);
    let foreign = Bio { end: "unknown_end_io", size: PAGE, ..in_root };
    let likely = |kind, source| NamedFacts { confidence: Confidence::Likely, ..sure(kind, source) };
    let reported = with(&likely(Kind::Swap, InsightSource::Flags), "/");
    stage.submit("swap by flag", SWAP, &[foreign], &[(private, PAGE)], &[reported]);
    let reported = with(&likely(Kind::Metadata, InsightSource::Flags), "/");
    stage.submit("metadata by flag", META, &[foreign], &[(private, PAGE)], &[reported]);
    let waited = Bio { end: "submit_bio_wait_endio", ..bio };
    let reported = with(&likely(Kind::Device, InsightSource::Bio), "/web");
    stage.one("device waited", waited, private, &reported);
    let completions = [(thread, true), (init, false)];
    let [waits, will_wait] =
        completions.map(|(task, waits)| stage.builder.stack_completion(task, waits));
    let waiter = NamedFacts { process: "postgres".into(), process_id: 77, ..reported.clone() };
    stage.one("device, a waiter", Bio { private: waits, ..waited }, private, &waiter);
    let waiter = NamedFacts { process: "systemd".into(), process_id: 1, ..reported };
    stage.one("device, a task", Bio { private: will_wait, ..waited }, private, &waiter);
    let objects = flushes::Objects {
        vda: vda1,
        vdb,
        vdd,
        f2fs,
        journal,
        web,
        root,
        thread,
        completion: waits,
        worker,
        page: private,
    };
    flushes::build(&mut stage, &objects);
    let foreign = Bio { end: "unknown_end_io", ..bio };
    let reported = NamedFacts { confidence: Confidence::Likely, ..inbox_facts.clone() };
    stage.one("unknown function", foreign, inbox_page, &reported);
    let foreign = Bio { device: vda1.device, ..foreign };
    stage.one("unknown function on its device", foreign, inbox_page, &reported);
    // Pages of a file that a program has mapped and writes to a device: the facts are not the
    // file's.
    let mapped = stage.builder.cache_idle(inbox);
    let of_device = with(&likely(Kind::Device, InsightSource::Bio), "/web");
    for (name, end, device, page, reported) in [
        ("waited, on its device", "bio_wait_end_io", vda1.device, inbox_page, &inbox_facts),
        ("mapped, waited", "bio_wait_end_io", vdb.device, mapped, &of_device),
        ("mapped, waited, its device", "submit_bio_wait_endio", vda1.device, mapped, &of_device),
        ("written back, waited elsewhere", "bio_wait_end_io", vdb.device, inbox_page, &of_device),
        (
            "mapped, unknown function",
            "unknown_end_io",
            vda1.device,
            mapped,
            &with(&unknown, "/web"),
        ),
        ("elsewhere", "unknown_end_io", vdb.device, inbox_page, &with(&unknown, "/web")),
        ("another device's", "bio_wait_end_io", vdb.device, device_page, &of_device),
    ] {
        stage.one(name, Bio { end, device, ..bio }, page, reported);
    }

    // Layers of devices.
    for (name, end) in [("dm-linear", "clone_endio"), ("dm-integrity", "integrity_end_io")] {
        let original = stage.above(&Bio { end: "ext4_end_bio", ..bio });
        let clone = stage.dm_clone(original, Bio { end, ..bio });
        stage.one(name, clone, inbox_page, &inbox_facts);
    }
    let original = stage.above(&Bio { end: "ext4_end_bio", ..bio });
    let mirror = stage.dm_clone(original, Bio { end: "clone_endio", ..bio });
    let mirror = stage.above(&mirror);
    for (name, callback, reported) in [
        ("dm-mirror", "write_callback", &inbox_facts),
        ("dm-io", "unknown_end_io", &with(&likely(Kind::Device, InsightSource::Bio), "/web")),
    ] {
        let io = stage.holder("io", "io.context", mirror);
        let callback = stage.builder.function(callback);
        stage.builder.set(io, "io.callback", callback);
        // The low bits have the number of the mirror's half.
        stage.one(name, Bio { end: "endio", private: io | 1, ..bio }, inbox_page, reported);
    }
    let vectors = stage.vectors(&[more[0]]);
    let original = stage.above(&Bio { end: "mpage_end_io", vectors, ..in_job });
    let crypt = stage.holder("dm_crypt_io", "dm_crypt_io.base_bio", original);
    let crypt = Bio { end: "crypt_endio", private: crypt, ..in_job };
    stage.one("dm-crypt", crypt, private, &outbox_facts);
    for [name, structure, member, end] in [
        ["raid1", "r1bio", "r1bio.master_bio", "raid1_end_write_request"],
        ["raid10", "r10bio", "r10bio.master_bio", "raid10_end_read_request"],
    ] {
        let original = stage.above(&Bio { end: "ext4_end_bio", ..bio });
        let holder = stage.holder(structure, member, original);
        stage.one(name, Bio { end, private: holder, ..bio }, inbox_page, &inbox_facts);
    }
    let original = stage.above(&Bio { end: "ext4_end_bio", ..bio });
    let clone = stage.md_clone(original, bio);
    stage.one("md", clone, inbox_page, &inbox_facts);
    let rest = stage.above(&Bio { end: "ext4_end_bio", ..bio });
    stage.one(
        "split",
        Bio { end: "bio_chain_endio", private: rest, ..bio },
        inbox_page,
        &inbox_facts,
    );
    // A mirror on two encrypted disks.
    let original = stage.above(&Bio { end: "ext4_end_bio", vectors, ..in_job });
    let mirror = stage.holder("r1bio", "r1bio.master_bio", original);
    let half = stage.above(&Bio { end: "raid1_end_write_request", private: mirror, ..in_job });
    let crypt = stage.holder("dm_crypt_io", "dm_crypt_io.base_bio", half);
    // RAID 10, which submits parts of the clone that md accounts.
    let original = stage.above(&Bio { end: "ext4_end_bio", ..bio });
    let clone = stage.md_clone(original, bio);
    let clone = stage.above(&clone);
    let mirror = stage.holder("r10bio", "r10bio.master_bio", clone);
    let part = Bio { end: "raid10_end_read_request", private: mirror, ..bio };
    stage.one("raid10 on md's clone", part, inbox_page, &inbox_facts);
    // The first page of the file system's own bio has the facts.
    let stacked = Bio { end: "crypt_endio", private: crypt, ..in_job };
    stage.one("raid1 on dm-crypt", stacked, private, &outbox_facts);
    let reported = with(&sure(Kind::Device, InsightSource::Bio), "/");
    stage.one("md super block", Bio { end: "super_written", ..in_root }, private, &reported);

    // XFS.
    for (name, operations, kind) in [
        ("xfs directory", "xfs_dir3_data_buf_ops", Kind::Directory),
        ("xfs metadata", "xfs_agf_buf_ops", Kind::Metadata),
    ] {
        let operations = stage.builder.function(operations);
        let buffer = stage.holder("xfs_buf", "xfs_buf.b_ops", operations);
        let bio = Bio { end: "xfs_buf_bio_end_io", private: buffer, ..bio };
        stage.one(name, bio, private, &with(&sure(kind, InsightSource::Bio), "/web"));
    }
    let reported = with(&sure(Kind::Journal, InsightSource::Bio), "/");
    stage.one("xfs log", Bio { end: "xlog_bio_end_io", ..in_root }, private, &reported);
    let image_page = stage.builder.cache(disk_image);
    let reported = NamedFacts {
        inode: 200,
        file_size: 3 << 30,
        path: "/image".into(),
        file_system: "xfs".into(),
        device: "dm-0".into(),
        cgroup: "/web".into(),
        ..sure(Kind::Data, InsightSource::Page)
    };
    stage.one("xfs data", Bio { end: "xfs_end_bio", ..bio }, image_page, &reported);
    let hidden = stage.builder.inode(xfs.super_block, 300, REGULAR, PAGE);
    stage.builder.set(hidden, "inode.i_fop", globals.no_operations);
    let hidden_page = stage.builder.cache(hidden);
    let reported = NamedFacts {
        file_system: "xfs".into(),
        device: "dm-0".into(),
        cgroup: "/web".into(),
        ..sure(Kind::Metadata, InsightSource::Page)
    };
    stage.one("xfs hidden", Bio { end: "xfs_end_bio", ..bio }, hidden_page, &reported);
    // The module has no description of the log here, whose place is unknown.
    for (name, end) in [("xfs recovery", "bio_wait_end_io"), ("xfs chain", "unknown_end_io")] {
        let bio = Bio { end, device: dm0.device, size: PAGE, ..in_root };
        stage.submit(name, META, &[bio], &[(private, PAGE)], &[with(&unknown, "/")]);
    }

    // Btrfs.
    let on_btrfs = NamedFacts {
        file_system: "btrfs".into(),
        device: "vdc".into(),
        cgroup: "/web".into(),
        ..sure(Kind::Data, InsightSource::Bio)
    };
    let data_facts =
        NamedFacts { inode: 257, file_size: 70_000, path: "/home/data".into(), ..on_btrfs.clone() };
    let embedded = |stage: &mut Stage<'_, '_>, outer: u64, end: &str, private: u64| {
        let own = stage.builder.make("btrfs_bio");
        if recent {
            stage.builder.set(own, "btrfs_bio.inode", outer);
        }
        let end = stage.builder.function(end);
        stage.builder.set(own, "btrfs_bio.end_io", end);
        stage.builder.set(own, "btrfs_bio.private", private);
        stage.builder.at(own, "btrfs_bio.bio")
    };
    // The page of a bio that refers to its inode can be any page.
    let simple = Bio { end: "btrfs_simple_end_io", ..bio };
    let source = if recent { InsightSource::Bio } else { InsightSource::Page };
    let page = if recent { private } else { stage.builder.cache(btrfs_file) };
    let address = embedded(&mut stage, btrfs_outer, "btrfs_something_else", 0);
    let data_facts = NamedFacts { source, ..data_facts };
    stage.one("btrfs data", Bio { address, ..simple }, page, &data_facts);
    let cached = stage.builder.cache(btrfs_file);
    let address = embedded(&mut stage, btrfs_outer, "btrfs_something_else", 0);
    stage.one("btrfs cached", Bio { address, ..simple }, cached, &data_facts);
    let tree_page = if recent { private } else { stage.builder.cache(tree) };
    let address = embedded(&mut stage, tree_outer, "btrfs_something_else", 0);
    let reported = NamedFacts { kind: Kind::Metadata, source, ..on_btrfs.clone() };
    stage.one("btrfs metadata", Bio { address, ..simple }, tree_page, &reported);
    let owner = if recent {
        0
    } else {
        stage.holder("btrfs_dio_private", "btrfs_dio_private.inode", btrfs_file)
    };
    let address = embedded(&mut stage, btrfs_outer, "btrfs_end_dio_bio", owner);
    let reported =
        NamedFacts { kind: Kind::Direct, source: InsightSource::Bio, ..data_facts.clone() };
    stage.one("btrfs direct", Bio { address, ..simple }, private, &reported);
    let opened = stage.builder.open(btrfs_file);
    let block = stage.builder.ring_block(opened, thread);
    let mut owner = stage.holder("iomap_dio", "iomap_dio.iocb", block);
    if !recent {
        let whole = stage.holder("btrfs_dio_private", "btrfs_dio_private.inode", btrfs_file);
        let bio = stage.builder.at(whole, "btrfs_dio_private.bio");
        stage.builder.set(bio, "bio.bi_private", owner);
        owner = whole;
    }
    let address = embedded(&mut stage, btrfs_outer, "btrfs_end_dio_bio", owner);
    let reported = process(&data_facts);
    stage.one("btrfs direct, io_uring", Bio { address, ..simple }, private, &reported);
    let owner =
        if recent { 0 } else { stage.holder("compressed_bio", "compressed_bio.inode", btrfs_file) };
    let address = embedded(&mut stage, btrfs_outer, "end_compressed_bio_read", owner);
    let reported = NamedFacts { source: InsightSource::Bio, ..data_facts.clone() };
    stage.one("btrfs compressed", Bio { address, ..simple }, private, &reported);
    let address = embedded(&mut stage, btrfs_outer, "btrfs_something_else", 0);
    let original = stage.above(&Bio { address, ..simple });
    let context = stage.holder("btrfs_io_context", "btrfs_io_context.orig_bio", original);
    let stripe = stage.holder("btrfs_io_stripe", "btrfs_io_stripe.bioc", context);
    let copy = Bio { end: "btrfs_clone_write_end_io", private: stripe, ..bio };
    stage.one("btrfs stripe", copy, page, &data_facts);
    // A balance moves content of others, a scrub copies everything by its place.
    let root = stage.builder.make("btrfs_root");
    stage.builder.set(root, "btrfs_root.root_key.objectid", -9_i64 as u64);
    stage.builder.set(moved_outer, "btrfs_inode.root", root);
    let address = embedded(&mut stage, moved_outer, "btrfs_something_else", 0);
    let page = stage.builder.cache(moved);
    stage.one("btrfs balance", Bio { address, ..simple }, page, &with(&unknown, "/web"));
    if stage.builder.shape.seven {
        let address = embedded(&mut stage, tree_outer, "btrfs_something_else", 0);
        let scrub = address - stage.builder.at(0, "btrfs_bio.bio");
        stage.builder.set_u32(scrub, "btrfs_bio.is_scrub", 1);
        stage.one("btrfs scrub", Bio { address, ..simple }, private, &with(&unknown, "/web"));
    }
    let reported = with(&sure(Kind::Metadata, InsightSource::Bio), "/");
    stage.one("btrfs super", Bio { end: "btrfs_end_super_write", ..in_root }, private, &reported);

    // Copies of pages that may belong to several files: all of them are examined.
    let reported = with(&unknown, "/batch/job");
    for (name, first, reported) in [
        ("dm-crypt of a file", more[0], &outbox_facts),
        ("dm-crypt of two files", inbox_page, &reported),
    ] {
        let vectors = stage.vectors(&[first, more[1]]);
        let size = 2 * PAGE;
        let original = stage.above(&Bio { end: "f2fs_write_end_io", vectors, size, ..in_job });
        let crypt = stage.holder("dm_crypt_io", "dm_crypt_io.base_bio", original);
        let crypt = Bio { end: "crypt_endio", private: crypt, size, ..in_job };
        stage.submit(name, 0, &[crypt], &[(private, size)], std::slice::from_ref(reported));
    }

    // Requests without data, and a torn one.
    let discard = Bio { size: 1 << 20, ..in_job };
    stage.submit("discard", 0, &[discard], &[], &[with(&unknown, "/batch/job")]);
    stage.submit("flush", 0, &[], &[], std::slice::from_ref(&unknown));
    let short = Bio { end: "ext4_end_bio", size: PAGE, ..bio };
    stage.submit("torn", 0, &[short, short], &[(inbox_page, PAGE)], &[]);
    let torn = stage.requests.last_mut().expect("a request");
    torn.truth = vec![
        NamedFacts { length: PAGE, ..inbox_facts.clone() },
        NamedFacts { length: PAGE, ..with(&unknown, "/web") },
    ];

    let objects = dirty::Objects {
        vda: vda1,
        vdb,
        dm: dm0,
        vdc,
        btrfs: btrfs.super_block,
        inbox,
        database,
        gone,
        image: disk_image,
        data: btrfs_file,
        inbox_page,
        gone_page,
        ext4: ext4.super_block,
        task: postgres,
    };
    dirty::build(stage.builder, &globals.dirty, &objects);

    let cached = [
        (format!("/srv/mail/{LONG}"), 3),
        ("/srv/mail/inbox".to_owned(), 3),
        ("/var/lib/db/main.db".to_owned(), 2),
        ("/gone (deleted)".to_owned(), 1),
        ("/d".to_owned(), 1),
        ("/f".to_owned(), 1),
        ("/image".to_owned(), 1),
        ("/home/data".to_owned(), 1 + u64::from(!recent)),
    ];
    let cached = cached.into_iter().filter(|(_, pages)| *pages > 0);
    Scene {
        requests: stage.requests,
        tasks: vec![(1, "systemd"), (9, "kworker/0:1"), (77, "postgres")],
        cached: cached.collect(),
    }
}

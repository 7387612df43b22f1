//! Flushes of the disk, the requests that need them, and the tasks that wait for those.

use fathom_insight::{Confidence, InsightSource, Kind};

use super::answer::NamedFacts;
use super::builder::Builder;
use super::objects::{Device, Mount, SyntheticGroup};
use super::stage::{Bio, Stage};

/// The objects of the scene that flushes need.
pub(super) struct Objects {
    pub vda: Device,
    pub vdb: Device,
    pub vdd: Device,
    pub f2fs: Mount,
    /// The journal of the file system on `vda`.
    pub journal: u64,
    pub web: SyntheticGroup,
    pub root: SyntheticGroup,
    /// A thread of the process 77, and a `completion` on its stack for which it waits.
    pub thread: u64,
    pub completion: u64,
    /// A thread of the kernel, with number 9.
    pub worker: u64,
    /// A page that is written to the journal.
    pub page: u64,
}

/// The lists of a queue of flushes, of which the second runs.
const LISTS: [u64; 2] = [0, 16];

impl Stage<'_, '_> {
    /// Submits a flush that a request with this bio needs, while another request waits for the next
    /// flush.
    fn flush(&mut self, name: &'static str, bio: &Bio, truth: &NamedFacts) {
        let other = Bio { end: "submit_bio_wait_endio", ..Bio::default() };
        let bios = [self.above(&other), self.above(bio)];
        self.submit(name, 0, &[], &[], std::slice::from_ref(truth));
        let header = self.requests.last().expect("a request").view.header;
        let builder = &mut *self.builder;
        let request = builder.direct(header - builder.types.size("request"));
        let queue = builder.make("blk_flush_queue");
        let context = builder.make("blk_mq_hw_ctx");
        builder.set(context, "blk_mq_hw_ctx.fq", queue);
        builder.set(request, "request.mq_hctx", context);
        builder.set(queue, "blk_flush_queue.flush_rq", request);
        builder.set_u32(queue, "blk_flush_queue.flush_running_idx", 1);
        let member = if builder.shape.recent { "request.queuelist" } else { "request.flush.list" };
        for (list, bio) in LISTS.into_iter().zip(bios) {
            let waiting = builder.make("request");
            builder.set(waiting, "request.bio", bio);
            let link = builder.at(waiting, member);
            let head = builder.at(queue, "blk_flush_queue.flush_queue") + list;
            builder.chain(member, head, &[link]);
        }
    }
}

impl Builder<'_> {
    /// Puts a task into a list of those that wait (`wait_queue_head`), behind an entry of another
    /// kind.
    fn wait(&mut self, queue: u64, function: &str, task: u64) {
        let links = [("wake_page_function", 0), (function, task)].map(|(function, task)| {
            let entry = self.make("wait_queue_entry");
            let function = self.function(function);
            self.set(entry, "wait_queue_entry.func", function);
            self.set(entry, "wait_queue_entry.private", task);
            self.at(entry, "wait_queue_entry.entry")
        });
        let head = self.at(queue, "wait_queue_head.head");
        self.chain("wait_queue_entry.entry", head, &links);
    }
}

/// Adds flushes and a write to a journal to the scene.
pub(super) fn build(stage: &mut Stage<'_, '_>, objects: &Objects) {
    let &Objects { thread, worker, .. } = objects;
    let of_web = Bio { group: Some(objects.web), ..Bio::default() };
    let of_root = Bio { group: Some(objects.root), ..Bio::default() };
    let postgres = NamedFacts {
        process: "postgres".into(),
        process_id: 77,
        cgroup: "/web".into(),
        ..NamedFacts::default()
    };
    let journal = NamedFacts {
        kind: Kind::Journal,
        source: InsightSource::Bio,
        confidence: Confidence::Sure,
        cgroup: "/".into(),
        ..postgres.clone()
    };

    let waited = Bio { end: "submit_bio_wait_endio", private: objects.completion, ..of_web };
    stage.flush("flush, a process", &waited, &postgres);

    let waiters = stage.builder.at(objects.journal, "journal_s.j_wait_done_commit");
    stage.builder.wait(waiters, "autoremove_wake_function", thread);
    let in_journal = Bio { device: objects.vda.device, ..of_root };
    let bio = stage.of_buffer("journal_end_buffer_io_sync", in_journal);
    stage.flush("flush, jbd2", &bio, &journal);
    let bio = stage.of_buffer("journal_end_buffer_io_sync", in_journal);
    stage.one("journal, a process", bio, objects.page, &journal);

    let log = stage.builder.make("xlog_in_core");
    let waiters = stage.builder.at(log, "xlog_in_core.ic_force_wait");
    stage.builder.wait(waiters, "default_wake_function", thread);
    let bio = Bio { end: "xlog_bio_end_io", private: log, ..of_root };
    stage.flush("flush, XFS", &bio, &journal);

    // A thread of the kernel flushes for others, or for itself.
    let own = stage.builder.stack_completion(worker, true);
    let control = stage.builder.make("flush_cmd_control");
    let segments = stage.holder("f2fs_sm_info", "f2fs_sm_info.fcc_info", control);
    let info = stage.holder("f2fs_sb_info", "f2fs_sb_info.sm_info", segments);
    let builder = &mut *stage.builder;
    builder.set(objects.f2fs.super_block, "super_block.s_fs_info", info);
    let command = builder.make("flush_cmd");
    let completion = builder.at(command, "flush_cmd.wait");
    builder.complete_for(completion, thread);
    let link = builder.at(command, "flush_cmd.llnode");
    builder.set(control, "flush_cmd_control.dispatch_list", link);
    let waited = Bio { end: "submit_bio_wait_endio", private: own, ..of_web };
    let bio = Bio { device: objects.vdd.device, ..waited };
    stage.flush("flush, F2FS", &bio, &postgres);
    let bio = Bio { device: objects.vdb.device, ..waited };
    let kernel = NamedFacts { process: "kworker/0:1".into(), process_id: 9, ..postgres.clone() };
    stage.flush("flush, a thread of the kernel", &bio, &kernel);

    let completion = stage.builder.make("completion");
    stage.builder.complete_for(completion, thread);
    let bio = Bio { end: "btrfs_end_empty_barrier", private: completion, ..of_web };
    stage.flush("flush, Btrfs", &bio, &postgres);
}

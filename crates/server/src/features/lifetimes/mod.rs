//! How long what guests write lives, which the layer `lifetimes` finds out.
//!
//! A disk does not notice that a file is deleted. A thread looks at the files of each disk with the
//! layer up to five times a second, while the disk is in use. There is no such thread before a disk
//! has had the layer.

pub(crate) mod feature;

use std::sync::{OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{
    DiskLifetimes, ErrorBody, ErrorCode, GroupedBy, LifetimesGroup, LifetimesReport,
};
use fathom_insight::{Name, Names};
use fathom_layers::Lifetimes;
use fathom_layers::lifetimes::{GroupBy, LifetimesSnapshot, Lives};

use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};

/// The shortest and the longest interval between two looks at the files of disks in use.
const INTERVAL_MIN: Duration = Duration::from_millis(200);
/// See [`INTERVAL_MIN`].
const INTERVAL_MAX: Duration = Duration::from_secs(1);
/// The looks take this part of a processor at most, if the longest interval allows it.
const PART: u32 = 100;

/// The thread that looks at files.
#[derive(Default)]
struct Checker {
    daemon: OnceLock<Weak<Daemon>>,
    thread: OnceLock<Option<Thread>>,
}

impl Checker {
    /// Starts the thread, unless it runs, and wakes it.
    fn begin(&self) {
        let Some(daemon) = self.daemon.get() else { return };
        let thread = self.thread.get_or_init(|| {
            let daemon = Weak::clone(daemon);
            match thread::Builder::new().name("lifetimes".into()).spawn(move || run(&daemon)) {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "no deletion is noticed: a thread cannot be started");
                    None
                }
            }
        });
        thread.iter().for_each(Thread::unpark);
    }

    fn wake(&self) {
        self.thread.get().into_iter().flatten().for_each(Thread::unpark);
    }

    /// The thread, if it runs.
    fn thread(&self) -> Option<Thread> {
        self.thread.get().cloned().flatten()
    }
}

fn run(daemon: &Weak<Daemon>) {
    loop {
        let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        let layers: Vec<Lifetimes> = daemon.served().iter().filter_map(|it| of(it)).collect();
        drop(daemon);
        let begun = Instant::now();
        let mut is_in_use = false;
        for layer in &layers {
            let now_ns = Clock::System.now_ns();
            if layer.is_due(now_ns) {
                is_in_use = true;
                layer.check(now_ns);
            }
        }
        // A layer that is removed now shall not stay for that long.
        drop(layers);
        if is_in_use {
            let interval = begun.elapsed() * PART;
            thread::park_timeout(interval.clamp(INTERVAL_MIN, INTERVAL_MAX));
        } else {
            // A write wakes it.
            thread::park();
        }
    }
}

/// The layer `lifetimes` of a disk.
fn of(served: &Served) -> Option<Lifetimes> {
    served.disk.layers().iter().find_map(|layer| Lifetimes::of(&**layer).cloned())
}

impl Daemon {
    /// The lifetimes of all disks with the layer, or of one disk.
    ///
    /// # Errors
    /// When there is no such disk, or it has no such layer.
    fn lifetimes(&self, disk: Option<&str>) -> Result<LifetimesReport, ErrorBody> {
        let served = self.selected(disk)?;
        let time_ns = Clock::System.now_ns();
        let disks: Vec<DiskLifetimes> =
            served.iter().filter_map(|served| of_disk(served, time_ns)).collect();
        if let (Some(name), true) = (disk, disks.is_empty()) {
            return Err(refusal(
                ErrorCode::NotFound,
                format!("the disk {name:?} has no layer `lifetimes`"),
                format!("add it with `fathom disk layer {name} lifetimes`"),
            ));
        }
        Ok(LifetimesReport { time_ns, unix_time_ns: unix_time_ns(), disks })
    }
}

fn of_disk(served: &Served, now_ns: u64) -> Option<DiskLifetimes> {
    let layer = of(served)?;
    layer.check(now_ns);
    let LifetimesSnapshot { begun_ns, share, blocks, files, living, groups } = layer.snapshot();
    let groups = groups.into_iter().map(|(by, lives)| of_group(by, lives, layer.names()));
    Some(DiskLifetimes {
        disk: served.disk.name().to_owned(),
        vm: served.live().definition.vm.clone(),
        begun_ns: begun_ns.unwrap_or(now_ns),
        share,
        blocks,
        files,
        living_bytes: living,
        groups: groups.collect(),
    })
}

fn of_group(by: GroupBy, lives: Lives, names: &Names) -> LifetimesGroup {
    let text = |name: Name| names.text(name).as_deref().unwrap_or_default().to_owned();
    let (by, name) = match by {
        GroupBy::All => (GroupedBy::Disk, String::new()),
        GroupBy::Kind(kind) => (GroupedBy::Kind, kind.name().to_owned()),
        GroupBy::Container(name) => (GroupedBy::Container, text(name)),
        GroupBy::Ending(name) => (GroupedBy::Ending, text(name)),
        GroupBy::OtherContainers => (GroupedBy::Container, "*".to_owned()),
        GroupBy::OtherEndings => (GroupedBy::Ending, "*".to_owned()),
    };
    let [overwritten, truncated, deleted, discarded, reused] = lives.died;
    LifetimesGroup {
        by,
        name,
        born_bytes: lives.born,
        overwritten_bytes: overwritten,
        truncated_bytes: truncated,
        deleted_bytes: deleted,
        discarded_bytes: discarded,
        reused_bytes: reused,
        lifetimes: lives.lifetimes,
        naive_lifetimes: lives.naive,
    }
}

//! What the host's kernel has swapped out of guests' memory, and the needless I/O that the layer
//! `swap-watch` counts.
//!
//! A thread checks the pages of each guest with such a disk about once a second, while the disk is
//! in use and pages are in swap. There is no such thread before a disk has had the layer.
//!
//! What pagers of Fathom's own report is read from the tables of leases when somebody asks.

pub(crate) mod feature;
mod figures;
mod leases;
mod metrics;
mod problems;

use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{ErrorBody, ErrorCode, PageEstimate, PagerDisk, PagerGuest, PagerReport};
use fathom_guest_memory::HostSwap;
use fathom_layers::SwapWatch;
use fathom_layers::guest_pages::{GuestPages, Measured};
use fathom_layers::swap_watch::SampleCount;

use super::guests::DiskGuest;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};

/// The interval between two checks of the pages of guests in use.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time that the counts of all guests of a report, and of a page of metrics, take. The guests
/// that are left then have their last count.
const REPORT_TIME_MAX: Duration = Duration::from_secs(4);
/// See [`REPORT_TIME_MAX`].
const SCRAPE_TIME_MAX: Duration = Duration::from_millis(200);

/// The thread that checks pages.
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
            match thread::Builder::new().name("swap-watch".into()).spawn(move || run(&daemon)) {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "no swapped page is noticed: a thread cannot be started");
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
        let now_ns = Clock::System.now_ns();
        let mut guests: Vec<Arc<GuestPages>> = Vec::new();
        let mut is_in_use = false;
        for served in daemon.served() {
            if !of(&served).is_some_and(|layer| layer.is_due(now_ns)) {
                continue;
            }
            is_in_use = true;
            if let Some(pages) = pages_of(&served) {
                if !guests.iter().any(|other| Arc::ptr_eq(other, &pages)) {
                    guests.push(pages);
                }
            }
        }
        drop(daemon);
        // The thread must not keep guests' memory while it sleeps.
        for pages in guests {
            pages.check();
        }
        if is_in_use {
            thread::park_timeout(INTERVAL);
        } else {
            // A request wakes it.
            thread::park();
        }
    }
}

/// The layer `swap-watch` of a disk.
fn of(served: &Served) -> Option<SwapWatch> {
    served.disk.layers().iter().find_map(|layer| SwapWatch::of(&**layer).cloned())
}

/// The pages of the guest that runs on a disk.
fn pages_of(served: &Served) -> Option<Arc<GuestPages>> {
    served.part::<Arc<DiskGuest>>()?.slot().pages()
}

/// A disk with the layer, whose guest runs.
struct WatchedDisk {
    name: String,
    vm: String,
    measured: Measured,
}

impl Daemon {
    /// The disks with the layer whose guests run.
    fn watched(&self) -> Vec<WatchedDisk> {
        let deadline = Instant::now() + SCRAPE_TIME_MAX;
        let of_disk = |served: &Arc<Served>| {
            of(served)?;
            let pages = pages_of(served)?;
            let is_over = Instant::now() >= deadline;
            let measured = if is_over { pages.last()? } else { pages.measure() };
            let vm = served.live().definition.vm.clone();
            Some(WatchedDisk { name: served.disk.name().to_owned(), vm, measured })
        };
        self.served().iter().filter_map(of_disk).collect()
    }

    /// All disks, or those of the guests with this name or a disk of this name.
    fn selected_disks(&self, selected: Option<&str>) -> Vec<Arc<Served>> {
        let mut served = self.served();
        let Some(name) = selected else { return served };
        let is_named = |it: &Arc<Served>| it.disk.name() == name || it.live().definition.vm == name;
        let named: Vec<Arc<GuestPages>> =
            served.iter().filter(|it| is_named(it)).filter_map(|it| pages_of(it)).collect();
        served.retain(|it| {
            pages_of(it).is_some_and(|pages| named.iter().any(|it| Arc::ptr_eq(it, &pages)))
        });
        served
    }

    /// The memory of all guests that run, or of the one with this name or a disk of this name; with
    /// `pagers_only`, of those with a pager, without a count of pages.
    ///
    /// # Errors
    /// When there is no such guest.
    fn pager(&self, selected: Option<&str>, pagers_only: bool) -> Result<PagerReport, ErrorBody> {
        let deadline = Instant::now() + REPORT_TIME_MAX;
        let mut found: Vec<(Arc<GuestPages>, PagerGuest)> = Vec::new();
        for served in self.selected_disks(selected) {
            let Some(pages) = pages_of(&served) else { continue };
            let place = found.iter().position(|(other, _)| Arc::ptr_eq(other, &pages));
            let place = place.unwrap_or_else(|| {
                let pager = figures::of_pages(&pages);
                let guest =
                    if pagers_only { uncounted(&pages) } else { of_guest(&pages, deadline) };
                found.push((Arc::clone(&pages), PagerGuest { pager, ..guest }));
                found.len() - 1
            });
            let guest = &mut found[place].1;
            if guest.vm.is_empty() {
                guest.vm.clone_from(&served.live().definition.vm);
            }
            guest.disks.push(served.disk.name().to_owned());
            guest.watched.extend(of(&served).map(|layer| of_disk(&served, &layer)));
        }
        let mut guests: Vec<PagerGuest> = found.into_iter().map(|(_, guest)| guest).collect();
        if let Some(name) = selected.filter(|_| guests.is_empty()) {
            return Err(refusal(
                ErrorCode::NotFound,
                format!("no guest is called {name:?}, and none runs on a disk of that name"),
                "`fathom pager` lists the guests on vhost-user disks",
            ));
        }
        guests.retain(|guest| !pagers_only || guest.pager.is_some());
        let swap = HostSwap::now();
        Ok(PagerReport {
            time_ns: Clock::System.now_ns(),
            unix_time_ns: unix_time_ns(),
            host_swap_bytes: swap.total,
            host_swap_used_bytes: swap.used,
            guests,
        })
    }
}

/// A guest whose pages were not counted.
fn uncounted(pages: &GuestPages) -> PagerGuest {
    PagerGuest {
        memory_bytes: pages.length(),
        unknown: "the pages were not counted".into(),
        share: pages.share(),
        ..PagerGuest::default()
    }
}

fn of_guest(pages: &GuestPages, deadline: Instant) -> PagerGuest {
    let is_over = Instant::now() >= deadline;
    let measured = if is_over { pages.last() } else { Some(pages.measure_now()) };
    let Some(Measured { found, at_ns, took_ns }) = measured else {
        let unknown = "the counts of other guests took too long: ask for this guest alone".into();
        return PagerGuest { unknown, ..uncounted(pages) };
    };
    PagerGuest {
        memory_bytes: pages.length(),
        resident_bytes: found.ok().map(|found| found.resident),
        swapped_bytes: found.ok().map(|found| found.swapped),
        unknown: found.err().map(|error| error.to_string()).unwrap_or_default(),
        counted_ns: at_ns,
        count_ns: took_ns,
        share: pages.share(),
        ..PagerGuest::default()
    }
}

fn of_disk(served: &Served, layer: &SwapWatch) -> PagerDisk {
    let counts = layer.snapshot();
    PagerDisk {
        disk: served.disk.name().to_owned(),
        examined_requests: counts.examined,
        stale_read_requests: counts.stale_requests,
        stale_read_bytes: counts.stale_bytes,
        double_paging_requests: counts.double_requests,
        double_paging_bytes: counts.double_bytes,
        swapped_out: estimate(counts.out),
        silent_writes: estimate(counts.silent),
        changed: estimate(counts.changed),
        rereads: estimate(counts.reread),
    }
}

fn estimate(count: SampleCount) -> PageEstimate {
    PageEstimate { sampled_pages: count.pages, bytes: count.bytes }
}

//! Reports on usage, slow requests and guests.

use std::sync::Arc;

use fathom_block::{Clock, Facts};
use fathom_control::{
    DiskSlow, DiskUsage, ErrorBody, FactsStatus, GuestCounters, GuestInfo, GuestList, Histogram,
    InsightState, InsightStatus, PartStatus, SlowReport, SlowRequest, UsageCount, UsageCounts,
    UsageReport, UsageRow,
};
use fathom_insight::{Name, Names, ProcessRole};
use fathom_introspect::{GuestState, GuestStatus};
use fathom_layers::Classify;
use fathom_layers::classify::{
    self, Account, Accounts, Direction, GroupSnapshot, TotalsSnapshot, latency_of_step,
};

use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};
use crate::features::guests::classify::AccountsNumber;
use crate::features::guests::hooks;
use crate::features::guests::{DiskGuest, GuestView, Introspection};

/// The accounts of a disk's control groups, for metrics.
pub(crate) struct DiskGroups {
    pub disk: String,
    pub vm: String,
    /// The counts of whole requests.
    pub totals: TotalsSnapshot,
    pub groups: Vec<GroupSnapshot>,
}

impl Daemon {
    /// The usage of the selected disks.
    pub(crate) fn usage(
        &self,
        disk: Option<&str>,
        vm: Option<&str>,
    ) -> Result<UsageReport, ErrorBody> {
        let mut selected = self.selected(disk)?;
        selected.retain(|served| vm.is_none_or(|vm| served.disk.vm() == vm));
        Ok(UsageReport {
            time_ns: Clock::System.now_ns(),
            unix_time_ns: unix_time_ns(),
            disks: selected.iter().map(|served| usage_of(served)).collect(),
        })
    }

    /// The slowest requests of the selected disks, at most `count` of each.
    pub(crate) fn slow(&self, disk: Option<&str>, count: usize) -> Result<SlowReport, ErrorBody> {
        let (time_ns, unix_time_ns) = (Clock::System.now_ns(), unix_time_ns());
        let selected = self.selected(disk)?;
        let disks = selected.iter().map(|served| {
            let classify = served.part::<Classify>();
            let requests = classify.map(|classify| {
                let to_status = |slow: &classify::SlowRequest| {
                    slow_request(slow, classify.names(), time_ns, unix_time_ns)
                };
                classify.slow(time_ns, count).iter().map(to_status).collect()
            });
            DiskSlow {
                name: served.disk.name().into(),
                vm: served.disk.vm().into(),
                requests: requests.unwrap_or_default(),
            }
        });
        Ok(SlowReport { time_ns, unix_time_ns, disks: disks.collect() })
    }

    /// All guests.
    pub(crate) fn guests(&self) -> GuestList {
        let (served, time_ns) = (self.served(), Clock::System.now_ns());
        let to_status = |view: GuestView| GuestInfo {
            number: view.number,
            vm: vm_of(&served, &view.disks).to_owned(),
            memory_bytes: view.memory_bytes,
            insight: insight_of(view.status),
            counters: view.kernel.map(|kernel| {
                let counters = kernel.counters();
                GuestCounters {
                    dirty_bytes: counters.dirty.unwrap_or(0),
                    writeback_bytes: counters.writeback.unwrap_or(0),
                    file_bytes: counters.file_pages.unwrap_or(0),
                    free_bytes: counters.free.unwrap_or(0),
                    total_bytes: counters.total.unwrap_or(0),
                }
            }),
            disks: view.disks,
            stops: view.writers.as_ref().map(|writers| writers.stops()),
            hooks: view.writers.map_or_else(Vec::new, |writers| hooks::of(&writers, time_ns)),
        };
        GuestList {
            time_ns,
            unix_time_ns: unix_time_ns(),
            guests: self.part::<Arc<Introspection>>().guests().into_iter().map(to_status).collect(),
        }
    }

    /// The accounts of all disks' control groups.
    pub(crate) fn groups(&self) -> Vec<DiskGroups> {
        let of_disk = |served: Arc<Served>| {
            let classify = served.part::<Classify>()?;
            let (totals, groups) = classify.groups();
            let (disk, vm) = (served.disk.name().to_owned(), served.disk.vm().to_owned());
            Some(DiskGroups { disk, vm, totals, groups })
        };
        self.served().into_iter().filter_map(of_disk).collect()
    }

    /// The disk `name`, or all disks.
    pub(crate) fn selected(&self, name: Option<&str>) -> Result<Vec<Arc<Served>>, ErrorBody> {
        match name {
            Some(name) => Ok(vec![self.find(name)?]),
            None => Ok(self.served()),
        }
    }
}

/// The virtual machine of a guest with these disks; empty if none of them names one.
pub(crate) fn vm_of<'a>(served: &'a [Arc<Served>], disks: &[String]) -> &'a str {
    let served = served.iter().filter(|served| disks.iter().any(|name| name == served.disk.name()));
    served.map(|served| served.disk.vm()).find(|vm| !vm.is_empty()).unwrap_or_default()
}

/// The state of the insight into a disk's guest.
pub(crate) fn insight(served: &Served) -> InsightStatus {
    if served.part::<Classify>().is_none() {
        return InsightStatus { state: InsightState::Off, ..InsightStatus::default() };
    }
    served
        .part::<Arc<DiskGuest>>()
        .and_then(|guest| guest.status())
        .map(insight_of)
        .unwrap_or_default()
}

pub(crate) fn insight_of(status: GuestStatus) -> InsightStatus {
    let (state, reason) = match status.state {
        GuestState::Waiting => (InsightState::Waiting, String::new()),
        GuestState::Searching { reason } => (InsightState::Searching, reason),
        GuestState::Attached => (InsightState::Attached, String::new()),
        GuestState::Blind { reason } => (InsightState::Blind, reason),
    };
    InsightStatus {
        state,
        reason,
        release: status.release,
        search_ns: status.search_ns,
        kernels: status.kernels,
        requests: status.requests,
        mismatches: status.mismatches,
        modules: status.modules as u64,
    }
}

fn usage_of(served: &Served) -> DiskUsage {
    let (classify, number) = {
        let live = served.live();
        (live.parts.get::<Classify>(), live.parts.get::<AccountsNumber>())
    };
    let mut usage = DiskUsage {
        name: served.disk.name().into(),
        vm: served.disk.vm().into(),
        instance: number.map_or(0, |AccountsNumber(number)| number),
        counted: classify.is_some(),
        ..DiskUsage::default()
    };
    let Some(classify) = classify else { return usage };
    let snapshot = classify.usage();
    usage.total = counts(&snapshot.totals.all());
    usage.unknown = counts(&snapshot.totals.unknown);
    let [reads, writes, others, flushes] = snapshot.totals.errors;
    usage.errors = [reads, writes, others + flushes];
    usage.folded = counts(&snapshot.others);
    usage.folded_rows = snapshot.folded;
    usage.dropped = snapshot.dropped;
    usage.dropped_bytes = snapshot.dropped_bytes;
    usage.rows = snapshot.rows.into_iter().map(row).collect();
    usage
}

/// The start of a process in nanoseconds, from hundredths of a second.
fn start_ns(start: u32) -> u64 {
    u64::from(start) * 10_000_000
}

fn row(row: classify::UsageRow) -> UsageRow {
    let text = |text: Option<Arc<str>>| text.as_deref().unwrap_or_default().to_owned();
    let subject = row.subject;
    UsageRow {
        kind: subject.kind.name().into(),
        cgroup: text(subject.cgroup),
        process: text(subject.process),
        process_id: subject.process_id.into(),
        process_start_ns: start_ns(subject.process_start),
        file_system: text(subject.file_system),
        device: text(subject.device),
        inode: subject.inode,
        path: text(subject.path),
        file_size_bytes: row.file_size,
        owner: row.owner.into(),
        database_system: subject.database.system.name().into(),
        database_part: subject.database.part.name().into(),
        database_index: subject.database.index.into(),
        instance: row.instance,
        counts: counts(&row.accounts),
    }
}

fn counts(accounts: &Accounts) -> UsageCounts {
    let of = |direction: Direction| count(&accounts[direction as usize]);
    UsageCounts {
        read: of(Direction::Read),
        write: of(Direction::Write),
        flush: of(Direction::Flush),
        other: of(Direction::Other),
    }
}

fn count(account: &Account) -> UsageCount {
    let mut latency = Histogram::default();
    for (step, count) in account.latency.iter().enumerate() {
        latency.record(latency_of_step(step), *count);
    }
    UsageCount {
        requests: account.requests,
        bytes: account.bytes,
        latency_sum_ns: account.latency_sum_ns,
        latency_max_ns: account.latency_max_ns,
        latency,
        cache_requests: account.cache_requests,
        cache_hits: account.cache_hits,
    }
}

fn slow_request(
    slow: &classify::SlowRequest,
    names: &Names,
    time_ns: u64,
    unix_time_ns: u64,
) -> SlowRequest {
    let end_ns = slow.start_ns.saturating_add(slow.latency_ns);
    let course = slow.course;
    // If no layer read the clock between the back end and here, the time above the back end is 0.
    let returned_ns = if course.returned_ns == 0 { end_ns } else { course.returned_ns };
    let reached = course.sent_ns != 0;
    let between = |from: u64, to: u64| reached.then(|| to.saturating_sub(from));
    let insight = &slow.insight;
    SlowRequest {
        id: slow.id,
        queue: slow.queue,
        operation: slow.operation.name().into(),
        offset: slow.offset,
        length: slow.length,
        start_ns: slow.start_ns,
        unix_time_ns: unix_time_ns.saturating_sub(time_ns.saturating_sub(slow.start_ns)),
        latency_ns: slow.latency_ns,
        layers_down_ns: between(slow.start_ns, course.sent_ns),
        backend_ns: between(course.sent_ns, returned_ns),
        layers_up_ns: between(returned_ns, end_ns),
        held_ns: course.held_ns,
        held_by: course.held_by.name().into(),
        cache_hit: course.cache_hit.name().into(),
        ahead: course.ahead.into(),
        error: slow.error.map_or("", |error| error.name()).into(),
        class: insight.class.map(|class| class.0),
        io_priority: insight.io_priority,
        flags: insight.flags.names().map(str::to_owned).collect(),
        facts: facts(&insight.facts, names),
        parts: insight
            .parts
            .iter()
            .map(|part| PartStatus {
                offset: part.offset,
                length: part.length,
                facts: facts(&part.facts, names),
            })
            .collect(),
        parts_left_out: slow.parts_left_out as u64,
    }
}

fn facts(facts: &Facts, names: &Names) -> FactsStatus {
    let text = |name: Name| names.text(name).as_deref().unwrap_or_default().to_owned();
    FactsStatus {
        kind: facts.kind.name().into(),
        source: facts.source.name().into(),
        confidence: facts.confidence.name().into(),
        write_hint: facts.write_hint.into(),
        inode: facts.inode,
        file_size_bytes: facts.file_size,
        owner: facts.owner.into(),
        path: text(facts.path),
        file_system: text(facts.file_system),
        device: text(facts.device),
        cgroup: text(facts.cgroup),
        process: text(facts.process),
        process_id: facts.process_id.into(),
        process_start_ns: start_ns(facts.process_start),
        process_role: match facts.process_role {
            ProcessRole::None => String::new(),
            role => role.name().into(),
        },
        database_system: facts.database.system.name().into(),
        database_part: facts.database.part.name().into(),
        database_index: facts.database.index.into(),
    }
}

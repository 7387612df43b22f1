//! Counts of the guests' dirty pages, made when they are requested.

pub(crate) mod feature;
pub(crate) mod metrics;
pub(crate) mod written;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{
    DeviceDirty, DirtyQuery, DirtyReport, ErrorBody, ErrorCode, FileDirty, FilesDirty, GuestDirty,
    MappedDirty, TablesDirty,
};
use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;
use fathom_introspect::{Dirty, DirtyFile, DiskObject, Kernel, WrittenPages};

use super::dirty::written::{INTERVAL_MAX, Shares, WrittenCount};
use super::guests::select::SelectedGuest;
use super::guests::usage::insight_of;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};
use crate::features::guests::{DiskGuest, GuestView};

/// The most files of a guest in a report.
const FILES_MAX: usize = 10_000;
/// The longest time for which the memory of all guests of a report is searched for page tables.
const TABLES_TIME_MAX: Duration = Duration::from_secs(5);

impl Daemon {
    /// Begins to count what guests write in `interval`. The caller waits for it and hands the
    /// result to [`Self::dirty`].
    pub(crate) fn begin_written(
        &self,
        selected: Option<&str>,
        interval: Duration,
    ) -> Result<WrittenCount, ErrorBody> {
        if interval > INTERVAL_MAX {
            return Err(refusal(
                ErrorCode::Invalid,
                "written pages are counted in at most 60 s",
                "set a shorter time",
            ));
        }
        let guests = self.selected_guests(selected)?;
        let guests =
            guests.into_iter().map(|guest| (guest.view.number, guest.view.memory, guest.disks));
        Ok(WrittenCount::begin(guests.collect()))
    }

    /// Counts the dirty pages of all guests, or of those that the query names. `written` is a count
    /// of what they have written, which ends now.
    pub(crate) fn dirty(
        &self,
        query: &DirtyQuery,
        written: Option<WrittenCount>,
    ) -> Result<DirtyReport, ErrorBody> {
        let views = self.selected_guests(query.guest.as_deref())?;
        let mut written = written.map(WrittenCount::end).unwrap_or_default();
        let mut shares = Shares::new(TABLES_TIME_MAX, views.len());
        let mut guests = Vec::new();
        let kernels: Vec<_> = views.iter().map(|guest| guest.view.kernel.clone()).collect();
        let mut following = kernels.iter().skip(1);
        for SelectedGuest { view, vm, disks } in views {
            // What the next count reads comes while this one is made.
            following.next().into_iter().flatten().for_each(|kernel| kernel.expect_dirty());
            let names = self.names();
            let number = view.number;
            let mut counted = count(view, &vm, &disks, names, query, shares.next());
            counted.written = written.remove(&number);
            guests.push(counted);
        }
        let (time_ns, unix_time_ns) = (Clock::System.now_ns(), unix_time_ns());
        Ok(DirtyReport { time_ns, unix_time_ns, guests })
    }
}

/// Counts the dirty pages of one guest.
fn count(
    view: GuestView,
    vm: &str,
    disks: &[Arc<Served>],
    names: &Names,
    query: &DirtyQuery,
    deadline: Instant,
) -> GuestDirty {
    let objects: Vec<Arc<DiskObject>> = disks
        .iter()
        .filter_map(|served| served.part::<Arc<DiskGuest>>())
        .map(|guest| Arc::clone(guest.slot().object()))
        .collect();
    let mut found = GuestDirty {
        number: view.number,
        vm: vm.to_owned(),
        memory_bytes: view.memory_bytes,
        insight: insight_of(view.status),
        disks: view.disks,
        ..GuestDirty::default()
    };
    let tables = query.tables.map(|stride| {
        let memory = view.memory.clone();
        catch_unwind(AssertUnwindSafe(move || tables_of(&memory, stride, deadline)))
    });
    found.tables = tables.and_then(Result::ok);
    let Some(kernel) = view.kernel else { return found };
    // A failure while one guest's memory is read must not affect the answer about other guests.
    let counted = catch_unwind(AssertUnwindSafe(|| {
        let begun = Instant::now();
        let dirty = kernel.dirty(&objects);
        let count_ns = begun.elapsed().as_nanos() as u64;
        let files = query.files.and_then(|max| files_of(&kernel, names, max.min(FILES_MAX)));
        let mapped = if query.mapped { mapped_of(&kernel) } else { None };
        (dirty, count_ns, files, mapped)
    }));
    let Ok((dirty, count_ns, files, mapped)) = counted else { return found };
    let Dirty { shown, writeback_shown, dirty, writeback, devices } = dirty;
    found.dirty_bytes = dirty;
    found.writeback_bytes = writeback;
    found.shown_dirty_bytes = shown;
    found.shown_writeback_bytes = writeback_shown;
    found.count_ns = count_ns;
    found.files = files;
    found.mapped = mapped;
    found.devices = devices.map(|devices| {
        let of_device = |device: fathom_introspect::DirtyDevice| DeviceDirty {
            name: device.name,
            dirty_bytes: device.dirty,
            writeback_bytes: device.writeback,
            disks: device.disks.iter().map(|place| disks[*place].disk.name().to_owned()).collect(),
            lies_elsewhere: device.lies_elsewhere,
        };
        devices.into_iter().map(of_device).collect()
    });
    found
}

/// The pages that a guest's processes have changed through mappings.
fn mapped_of(kernel: &Kernel) -> Option<MappedDirty> {
    let begun = Instant::now();
    let found = kernel.mapped_dirty()?;
    Some(MappedDirty {
        marked_bytes: found.marked,
        unknown_bytes: found.unknown,
        processes: found.processes,
        is_whole: found.is_whole,
        count_ns: begun.elapsed().as_nanos() as u64,
    })
}

/// The pages that a guest's page tables mark as written.
fn tables_of(memory: &GuestMemory, stride: u64, deadline: Instant) -> TablesDirty {
    let begun = Instant::now();
    // Each sample begins elsewhere, so that the mean of several is more exact.
    let first = Clock::System.now_ns();
    let found = WrittenPages::count(memory, stride, first, &mut || Instant::now() < deadline);
    TablesDirty {
        marked_bytes: found.marked,
        error_bytes: found.error,
        stride: stride.clamp(1, 1 << 20),
        tables: found.tables,
        examined: found.examined,
        is_whole: found.is_whole,
        count_ns: begun.elapsed().as_nanos() as u64,
    }
}

/// The files of a guest with the most dirty pages.
fn files_of(kernel: &Kernel, names: &Names, max: usize) -> Option<FilesDirty> {
    let begun = Instant::now();
    let found = kernel.dirty_files(names, max)?;
    let text = |name| names.text(name).map_or_else(String::new, |text| text.to_string());
    let of_file = |file: DirtyFile| FileDirty {
        kind: file.facts.kind.name().into(),
        path: text(file.facts.path),
        file_system: text(file.facts.file_system),
        device: text(file.facts.device),
        inode: file.facts.inode,
        file_size_bytes: file.facts.file_size,
        dirty_bytes: file.dirty,
    };
    Some(FilesDirty {
        dirty_bytes: found.dirty,
        is_whole: found.is_whole,
        count_ns: begun.elapsed().as_nanos() as u64,
        files: found.files.into_iter().map(of_file).collect(),
    })
}

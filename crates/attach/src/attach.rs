//! The steps by which a pager comes to a VMM. It may die after each of them.
//!
//! | after | what is left of a pager that dies |
//! |---|---|
//! | `Locked` | nothing |
//! | `Recorded` | a record without a descriptor |
//! | `Injected` | a userfaultfd in the VMM that serves nothing; the record tells which one it is |
//! | `Fetched` | the same; the record names it |
//! | `Guarded` | the same, and a guard, which ends, or serves when an earlier one does not any more |
//! | `Serving` | the same |
//! | `Registered`, `Complete` | a guard, which serves while pages are away; then it leaves all faults to the kernel, and ends |

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::counts::PagerStatus;
use crate::evict::{Eviction, count_descriptors};
use crate::frame::SystemCall;
use crate::guard::{self, Guard, StorePlace, Ward};
use crate::inject::InjectReport;
use crate::limit::LimitHandle;
use crate::memory::{self, MappedMemory};
use crate::pager::{Pager, Work};
use crate::publish::Publisher;
use crate::qmp::Monitor;
use crate::record::{self, PagerRecord, RecordPlace};
use crate::refusal::{self, AttachRefusal};
use crate::tripwire::Tripwire;
use crate::userfault::{self, MISSING_SHMEM, UserFault};
use crate::vmm::{ProcessMap, Vmm};

/// How many injectors are tried. On a busy machine one may need longer than it may live.
const INJECTORS_MAX: u32 = 3;
/// A thread makes the call within this time after its injector's death, if it does at all.
const CALL_TIME_MAX: Duration = Duration::from_millis(200);
const CALL_PAUSE: Duration = Duration::from_millis(2);
/// How many guards are tried.
const GUARDS_MAX: u32 = 3;

/// How the injector, the guard and the cleaner are started: this program with other arguments.
#[derive(Clone, Debug)]
pub struct Helpers {
    /// The program.
    pub program: PathBuf,
    /// Its arguments to be an injector; the thread and the system call follow.
    pub injector: Vec<OsString>,
    /// Its arguments to be a guard.
    pub guard: Vec<OsString>,
    /// Its arguments to be a cleaner, which removes what is left of machines that have ended
    /// ([`clean`](crate::clean)); the folder of the tables of leases follows, and perhaps that of
    /// swap files.
    pub cleaner: Vec<OsString>,
}

impl Helpers {
    fn injector(&self, thread: i32, call: SystemCall) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.injector).arg(thread.to_string()).arg(call.number.to_string());
        command.args(call.arguments.map(|argument| argument.to_string()));
        command
    }

    /// Starts a cleaner, for which nobody waits. Without one, the next pager's does it.
    pub(crate) fn clean(&self, leases: &Path, swap: Option<&Path>) {
        let mut command = Command::new(&self.program);
        command.args(&self.cleaner).arg(leases).args(swap);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Ok(mut child) = command.spawn() {
            // Collected when it ends, if that is before the pager does.
            let _ = std::thread::Builder::new().name("clean".into()).spawn(move || child.wait());
        }
    }

    pub(crate) fn guard(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.guard);
        command
    }
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Where the records are.
    pub folder: PathBuf,
    /// A socket of QEMU's machine protocol. Without one, the VMM makes the userfaultfd by itself,
    /// for which it needs the right.
    pub qmp: Option<PathBuf>,
    /// The helpers.
    pub helpers: Helpers,
    /// Do not inject: there has to be a descriptor of an earlier pager.
    pub must_adopt: bool,
}

/// A step of attaching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachStep {
    /// This pager is the only one.
    Locked,
    /// What is about to be injected is recorded.
    Recorded,
    /// The VMM has a userfaultfd of ours.
    Injected,
    /// The pager has it, too, and it is recorded.
    Fetched,
    /// A guard waits for the pager's death.
    Guarded,
    /// No other guard serves.
    Serving,
    /// The guest's memory is registered.
    Registered,
    /// The tripwire is on.
    Complete,
}

/// Attaches to a VMM, or adopts what an earlier pager has left there. `step` is called after each
/// step. Nothing is registered if it fails.
///
/// # Errors
/// A [`AttachRefusal`], with its remedy, and what else may fail, such as the injector.
pub fn attach(
    vmm: Vmm,
    options: &AttachOptions,
    step: &mut dyn FnMut(AttachStep),
) -> Result<Pager, Failure> {
    let place = RecordPlace::lock(&options.folder, &vmm)?;
    step(AttachStep::Locked);
    let device = open_device()?;
    let record = place.read(&vmm)?;
    // Pages that are away have to be served whatever there is now: the pager brings them in then.
    let has_store = record.as_ref().is_some_and(|record| record.store.is_some());
    let maps = if has_store { memory::find(&vmm)? } else { examine(&vmm)? };
    let memory = memory::described(&maps);
    let mut status = PagerStatus {
        process: vmm.process(),
        pager: std::process::id(),
        state: "attached".to_owned(),
        memory_bytes: memory.iter().map(MappedMemory::length).sum(),
        ..PagerStatus::default()
    };
    let mut record = with_descriptor(&vmm, options, (&place, &device), record, &mut status, step)?;
    let faults = fetch(&vmm, &mut record)?;
    record.is_attached = true;
    place.write(&record).map_err(|error| cannot("write the record", &error))?;
    step(AttachStep::Fetched);
    let earlier = record.guard;
    let ward = Ward::of(&vmm, &memory, &place);
    let guard = start_guard(&options.helpers, &faults, &place, &ward, &record)?;
    status.guard = guard.process();
    step(AttachStep::Guarded);
    let begun = serve_from_now(&vmm, &memory, &place, &mut record, (&guard, earlier))
        .and_then(|work| {
            step(AttachStep::Serving);
            Ok((work, begin(&vmm, &faults, &device, &maps, step)?))
        })
        .and_then(|begun| {
            Ok((begun, LimitHandle::new().map_err(|error| cannot("begin", &error))?))
        });
    let ((work, (tripwires, was_tried)), limit) = match begun {
        Ok(begun) => begun,
        Err(failure) => {
            // While pages may be away, the guard serves: this one, or an earlier one.
            if !has_store {
                guard::release(&faults, &memory);
                guard.end();
            }
            return Err(failure);
        }
    };
    status.is_tripwire_tried = was_tried;
    if let Work::Eviction(eviction) = &work {
        status.eviction = eviction.counts();
    }
    Ok(Pager {
        descriptors: count_descriptors(&vmm),
        vmm,
        place,
        record,
        faults,
        memory,
        guard: Some(guard),
        helpers: options.helpers.clone(),
        status: Arc::new(Mutex::new(status)),
        maps,
        tripwires,
        work,
        look: None,
        limit,
        options: None,
        ending: None,
        is_stuck: false,
        publisher: Publisher::default(),
    })
}

/// The record of a VMM that has a userfaultfd of ours: that of an earlier pager, or a new one.
fn with_descriptor(
    vmm: &Vmm,
    options: &AttachOptions,
    (place, device): (&RecordPlace, &OwnedFd),
    record: Option<PagerRecord>,
    status: &mut PagerStatus,
    step: &mut dyn FnMut(AttachStep),
) -> Result<PagerRecord, Failure> {
    let now = userfaults(vmm)?;
    let known = record.as_ref().and_then(|record| record::ours(record, &now));
    status.is_adopted = known.is_some();
    match record {
        Some(record) if known.is_some() => return Ok(record),
        Some(record) if record.store.is_some() => {
            return Err(Failure::new("the VMM has lost its userfaultfd, and pages may be away")
                .advise("restart the machine"));
        }
        _ => {}
    }
    if options.must_adopt {
        let process = vmm.process();
        return Err(Failure::new(format!("no pager has left anything in process {process}"))
            .advise(format!("attach to it: fathom pager attach {process}")));
    }
    let fresh = PagerRecord {
        process: vmm.process(),
        start_ticks: vmm.start_ticks(),
        earlier: now,
        ..PagerRecord::default()
    };
    place.write(&fresh).map_err(|error| cannot("write the record", &error))?;
    step(AttachStep::Recorded);
    status.pause_ns = inject(vmm, options, device)?;
    step(AttachStep::Injected);
    Ok(fresh)
}

/// Starts a guard that has all that it needs. One that dies is replaced: there may be no other.
pub(crate) fn start_guard(
    helpers: &Helpers,
    faults: &UserFault,
    place: &RecordPlace,
    ward: &Ward,
    record: &PagerRecord,
) -> Result<Guard, Failure> {
    let mut attempts = 1;
    loop {
        let started = Guard::start(helpers.guard(), faults, place.guard.as_fd(), ward);
        let told = started.and_then(|mut guard| match StorePlace::of(record) {
            Some(place) => match guard.open_store(&place) {
                Ok(()) => Ok(guard),
                Err(failure) => {
                    // It would take the end of the connection for the pager's.
                    guard.bury();
                    Err(failure)
                }
            },
            None => Ok(guard),
        });
        match told {
            Err(_) if attempts < GUARDS_MAX => attempts += 1,
            told => return told,
        }
    }
}

/// Becomes the one that serves, when the new guard has all that it needs: the earlier guard, a
/// process, ends. Takes up the pages that are away.
fn serve_from_now(
    vmm: &Vmm,
    memory: &[MappedMemory],
    place: &RecordPlace,
    record: &mut PagerRecord,
    (guard, earlier): (&Guard, u32),
) -> Result<Work, Failure> {
    place.take_over(earlier)?;
    record.guard = guard.process();
    place.write(record).map_err(|error| cannot("write the record", &error))?;
    let Some(place) = StorePlace::of(record) else { return Ok(Work::None) };
    let mut away = place.open(vmm, memory)?;
    away.recover();
    away.take_over_counts();
    // Without it, the pager looks what is asked for each time that it wakes.
    let _ = away.listen();
    Ok(Work::Eviction(Box::new(Eviction::new(away, vmm, memory))))
}

/// Leaves the faults of a VMM to the kernel whose pager has died, or whose guard has too. If pages
/// may be away, the VMM has to be [attached](attach) to: `None`.
///
/// # Errors
/// When a pager lives, or there was none.
pub fn detach_orphan(vmm: &Vmm, folder: &Path) -> Result<Option<PagerStatus>, Failure> {
    let place = RecordPlace::lock(folder, vmm)?;
    let none = || {
        Failure::new(format!("process {} has no pager", vmm.process()))
            .advise("give the folder of its records if it is another (--folder)")
    };
    let mut record = place.read(vmm)?.ok_or_else(none)?;
    if !record.is_attached {
        return Err(none());
    }
    if record.store.is_some() {
        return Ok(None);
    }
    let faults = fetch(vmm, &mut record)?;
    place.take_over(record.guard)?;
    let maps = vmm.detailed_mappings().map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    let maps: Vec<ProcessMap> = maps.into_iter().filter(ProcessMap::is_registered).collect();
    let memory = memory::described(&maps);
    guard::release(&faults, &memory);
    record.is_attached = false;
    place.write(&record).map_err(|error| cannot("write the record", &error))?;
    Ok(Some(PagerStatus {
        process: vmm.process(),
        state: "detached".to_owned(),
        memory_bytes: memory.iter().map(MappedMemory::length).sum(),
        ..PagerStatus::default()
    }))
}

/// Whether the VMM may be attached to, and its memory.
fn examine(vmm: &Vmm) -> Result<Vec<ProcessMap>, Failure> {
    let examined = refusal::check_process(vmm).and_then(|()| {
        let maps = memory::find(vmm)?;
        refusal::check_pages(vmm, &maps)?;
        refusal::find_daemons(vmm, &maps)?;
        Ok(maps)
    });
    examined.map_err(|refusal| Failure::from(refusal).about(format!("process {}", vmm.process())))
}

fn open_device() -> Result<OwnedFd, Failure> {
    userfault::open_device().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => AttachRefusal::UserFaultForbidden.into(),
        _ => AttachRefusal::NoUserFault.into(),
    })
}

fn userfaults(vmm: &Vmm) -> Result<Vec<i32>, Failure> {
    Ok(vmm.userfaults().map_err(|error| AttachRefusal::of_access(vmm, &error))?)
}

fn cannot(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!("cannot {what}: {error}"))
}

/// Has the VMM make a userfaultfd. Returns the pause of its main thread in nanoseconds.
fn inject(vmm: &Vmm, options: &AttachOptions, device: &OwnedFd) -> Result<u64, Failure> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let Some(path) = &options.qmp else {
        let call = SystemCall { number: libc::SYS_userfaultfd as u64, arguments: [flags, 0, 0] };
        return run_injector(vmm, options, call);
    };
    let mut monitor = Monitor::connect(path)?;
    monitor
        .hand_over(device.as_fd())
        .map_err(|error| cannot("hand /dev/userfaultfd to QEMU", &error))?;
    let done = (|| {
        let found =
            vmm.devices(device.as_fd()).map_err(|error| AttachRefusal::of_access(vmm, &error))?;
        let number = found.last().copied().ok_or_else(|| {
            Failure::new(format!(
                "the machine protocol at {} is of another process",
                path.display()
            ))
            .advise("give the socket of this VMM (--qmp)")
        })?;
        let arguments = [number as u64, userfault::NEW, flags];
        run_injector(vmm, options, SystemCall { number: libc::SYS_ioctl as u64, arguments })
    })();
    // The device is of no use any more; if QEMU keeps it, the next one takes its place.
    let _ = monitor.take_back();
    done
}

/// Runs injectors until one has succeeded, at most [`INJECTORS_MAX`]. One that dies may have
/// succeeded, too.
fn run_injector(vmm: &Vmm, options: &AttachOptions, call: SystemCall) -> Result<u64, Failure> {
    let earlier = userfaults(vmm)?.len();
    let mut attempts = 1;
    loop {
        let mut command = options.helpers.injector(vmm.process(), call);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let output = command.output().map_err(|error| cannot("start the injector", &error))?;
        let report = serde_json::from_slice::<InjectReport>(&output.stdout);
        let report = report.unwrap_or_else(|_| InjectReport {
            error: format!("the injector has ended ({})", output.status),
            ..InjectReport::default()
        });
        if report.is_forbidden {
            return Err(Failure::from(AttachRefusal::Forbidden));
        }
        match report.result {
            Some(0..) => return Ok(report.pause_ns),
            Some(code) => {
                let error = io::Error::from_raw_os_error(code.unsigned_abs() as i32);
                return Err(cannot("make a userfaultfd in the VMM", &error).advise(
                    "give a socket of QEMU's machine protocol (--qmp), over which this process \
                     hands its own right on",
                ));
            }
            // The thread may be on its way to the call.
            None if appears(vmm, earlier)? => return Ok(report.pause_ns),
            None if attempts < INJECTORS_MAX => attempts += 1,
            None => {
                return Err(Failure::new(format!("nothing was injected: {}", report.error))
                    .advise("try again; the VMM goes on as before"));
            }
        }
    }
}

/// Whether the VMM has more userfaultfds than before, now or soon.
fn appears(vmm: &Vmm, earlier: usize) -> Result<bool, Failure> {
    let begun = Instant::now();
    loop {
        if userfaults(vmm)?.len() > earlier {
            return Ok(true);
        }
        if begun.elapsed() > CALL_TIME_MAX {
            return Ok(false);
        }
        std::thread::sleep(CALL_PAUSE);
    }
}

/// Fetches the userfaultfd of the record from the VMM.
fn fetch(vmm: &Vmm, record: &mut PagerRecord) -> Result<UserFault, Failure> {
    let number = record::ours(record, &userfaults(vmm)?)
        .ok_or_else(|| Failure::new("the VMM's userfaultfd was not found among its descriptors"))?;
    let file = vmm.fetch(number).map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    let faults = UserFault::adopt(file, MISSING_SHMEM)
        .map_err(|error| cannot("use the VMM's userfaultfd", &error))?;
    record.descriptor = Some(number);
    Ok(faults)
}

/// Registers the memory and sets the tripwire. Says whether the tripwire could be tried.
fn begin(
    vmm: &Vmm,
    faults: &UserFault,
    device: &OwnedFd,
    maps: &[ProcessMap],
    step: &mut dyn FnMut(AttachStep),
) -> Result<(Vec<Tripwire>, bool), Failure> {
    for map in maps {
        faults.register(&map.range).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::BUSY) => Failure::from(AttachRefusal::Registered),
            Some(Errno::SRCH) => Failure::from(AttachRefusal::Ended),
            _ => cannot("register the guest's memory", &error),
        })?;
        // Threads whose fault an earlier pager has read, and not served, try again.
        faults.wake(&map.range).map_err(|error| cannot("wake the guest", &error))?;
    }
    step(AttachStep::Registered);
    let mut tripwires = Vec::new();
    let mut was_tried = false;
    for map in maps {
        // The kernel registers no shared mapping that could not become writable.
        let file = vmm
            .open_file(map, OFlags::RDWR)
            .map_err(|error| cannot("open the guest's memory", &error))?;
        let length = map.range.end - map.range.start;
        let tripwire = Tripwire::map(device.as_fd(), file, map.offset, length)
            .map_err(|error| cannot("map the guest's memory", &error))?;
        match tripwire.holds() {
            Ok(Some(true)) => was_tried = true,
            Ok(None) => {}
            Ok(Some(false)) => return Err(Failure::new("a touch of a missing page made zeroes")),
            Err(error) => return Err(cannot("try the tripwire", &error)),
        }
        tripwires.push(tripwire);
    }
    step(AttachStep::Complete);
    Ok((tripwires, was_tried))
}

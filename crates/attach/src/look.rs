//! Who else has the guest's memory: a pager that copies pages or takes them away looks now and
//! then, and asks the daemons for leases.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_guest_memory::PagerLeases;
use parking_lot::Mutex;

use crate::daemon::DaemonProcess;
use crate::hazard;
use crate::isolate;
use crate::refusal::{self, AttachRefusal};
use crate::vmm::{ProcessMap, Vmm};

/// How often a pager looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// The same while the guest does nothing.
const QUIET_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest time between two looks that are made for a reason.
const HURRY_INTERVAL: Duration = Duration::from_millis(200);
/// A look that takes longer is not waited for any more.
const LOOK_TIME_MAX: Duration = Duration::from_secs(5);
/// How often a daemon that takes leases is asked whether pages may leave.
const ASK_INTERVAL: Duration = Duration::from_secs(30);

/// The doubt that ends with the look that is being made.
pub(crate) const LOOKED_AT: &str = "who else has the memory is looked at";

/// Asks the daemons to take leases.
pub(crate) type Ask = Arc<dyn Fn() + Send + Sync>;

/// What a look has found.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The mappings of the VMM, if they could be read.
    pub maps: Option<Vec<ProcessMap>>,
    /// The daemons that map the guest's memory, or what makes it unsafe that pages are away.
    pub daemons: Result<Vec<DaemonProcess>, AttachRefusal>,
    /// Whether the memory has single pages only.
    pub pages: Result<(), AttachRefusal>,
}

/// When a pager looks around.
pub(crate) struct Look {
    ask: Ask,
    /// The thread that asks the daemons.
    asking: Option<JoinHandle<()>>,
    asked: Option<Instant>,
    looked: Option<Instant>,
    /// Whether the next look is made as soon as possible.
    is_hurried: bool,
    /// When the look began that has no result yet. It reads the mappings of all processes, which
    /// may take long, and faults must not wait for it.
    since: Option<Instant>,
    seen: Arc<Mutex<Option<Seen>>>,
    has_seen: bool,
    /// Whether the guest does nothing that needs a look soon.
    pub is_quiet: bool,
    /// Whether the last look was the first that has found a daemon without a place in the table.
    pub is_suspicious: bool,
}

impl std::fmt::Debug for Look {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Look").field("looked", &self.looked).finish_non_exhaustive()
    }
}

impl Look {
    /// Looks that have not begun.
    pub fn new(ask: Ask) -> Self {
        Self {
            ask,
            asking: None,
            asked: None,
            looked: None,
            is_hurried: false,
            since: None,
            seen: Arc::default(),
            has_seen: false,
            is_quiet: false,
            is_suspicious: false,
        }
    }

    /// How often it looks.
    pub fn interval(is_quiet: bool) -> Duration {
        if is_quiet { QUIET_INTERVAL } else { LOOK_INTERVAL }
    }

    /// There is a reason for a look soon.
    pub fn hurry(&mut self) {
        self.is_hurried = true;
    }

    /// Whether it is time to look. If it is, the look is taken to begin now.
    pub fn is_due(&mut self, interval: Duration) -> bool {
        let interval = if self.is_hurried { HURRY_INTERVAL } else { interval };
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= interval);
        if is_due && self.since.is_none() {
            self.looked = Some(Instant::now());
            self.is_hurried = false;
            return true;
        }
        false
    }

    /// Begins a look, in a thread of its own.
    pub fn begin(&mut self, vmm: &Vmm, memory: &[ProcessMap]) {
        self.since = Some(Instant::now());
        let (process, start_ticks, memory) = (vmm.process(), vmm.start_ticks(), memory.to_vec());
        let seen = Arc::clone(&self.seen);
        let look = move || {
            let vmm = Vmm::open(process).ok().filter(|vmm| vmm.start_ticks() == start_ticks);
            let found = match vmm {
                Some(vmm) => Seen {
                    maps: Vmm::mappings_of(process).ok(),
                    daemons: hazard::check_now(&vmm)
                        .and_then(|()| refusal::find_daemons(&vmm, &memory)),
                    pages: refusal::check_pages(&vmm, &memory),
                },
                None => Seen { maps: None, daemons: Err(AttachRefusal::Ended), pages: Ok(()) },
            };
            *seen.lock() = Some(found);
        };
        if std::thread::Builder::new().name("look".into()).spawn(look).is_err() {
            self.since = None;
            self.is_hurried = true;
        }
    }

    /// What a look has found, once.
    pub fn take(&mut self) -> Option<Seen> {
        let seen = self.seen.lock().take()?;
        self.since = None;
        self.has_seen = true;
        Some(seen)
    }

    /// Whether a look is under way.
    pub fn is_looking(&self) -> bool {
        self.since.is_some()
    }

    /// Why it is not known who has the memory; empty if it is.
    pub fn doubt(&self) -> &'static str {
        match self.since {
            _ if self.is_hurried => LOOKED_AT,
            Some(since) if since.elapsed() > LOOK_TIME_MAX => {
                "the mappings of all processes cannot be read: who else has the memory is not known"
            }
            Some(_) if !self.has_seen => LOOKED_AT,
            _ => "",
        }
    }

    /// Has the daemons asked, in a thread of its own: at once if they take no leases, and now and
    /// then if they let no page leave.
    pub fn ask(&mut self, has_leases: bool) {
        let is_asking = self.asking.as_ref().is_some_and(|thread| !thread.is_finished());
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= ASK_INTERVAL);
        if (has_leases && !is_due) || is_asking {
            return;
        }
        self.asked = Some(Instant::now());
        let ask = Arc::clone(&self.ask);
        // The daemon's folder is that of its user, who may keep this thread waiting for ever.
        let isolated = isolate::spawn("ask", None, move |_| ask());
        // Where that is not allowed, as in some containers, it is asked all the same.
        let ask = Arc::clone(&self.ask);
        let plain = |_| std::thread::Builder::new().name("ask".into()).spawn(move || ask());
        self.asking = isolated.or_else(plain).ok();
    }
}

/// Lets the users of `daemons`, which map the guest's memory, use the tables of leases. Each look
/// does it: a daemon of another user may come at any time.
///
/// # Errors
/// Why a user cannot be let in.
pub(crate) fn admit(tables: &[PagerLeases], daemons: &[DaemonProcess]) -> Result<(), String> {
    let users: Vec<u32> = daemons.iter().map(|daemon| daemon.user).collect();
    tables.iter().try_for_each(|table| table.admit(&users)).map_err(|error| {
        let processes: Vec<i32> = daemons.iter().map(|daemon| daemon.process).collect();
        format!(
            "the users of the processes {processes:?} cannot be let in to the tables of leases, \
             whose file system needs access control lists: {error}"
        )
    })
}

/// Whether the processes `daemons`, which map the guest's memory, all take leases from `tables`.
/// Returns why pages may not leave all the same; empty if they may.
///
/// # Errors
/// The first that takes none for some of its accesses.
pub(crate) fn check_holders(
    tables: &[PagerLeases],
    daemons: &[DaemonProcess],
) -> Result<String, String> {
    let mut obstacle = String::new();
    for table in tables {
        if let Some(process) = first_without(table, daemons, PagerLeases::holders)? {
            return Err(format!("process {process} maps the memory and takes no leases"));
        }
        if let Some(process) = first_without(table, daemons, PagerLeases::holders_for_eviction)? {
            obstacle = format!("process {process} is not ready for it");
        }
    }
    Ok(obstacle)
}

/// The first process that maps the guest's memory and has no place in a table, so that it would
/// touch a page that is away.
///
/// # Errors
/// Those of a table.
pub(crate) fn check_members(
    tables: &[PagerLeases],
    daemons: &[DaemonProcess],
) -> Result<(), String> {
    for table in tables {
        if let Some(process) = first_without(table, daemons, PagerLeases::members)? {
            return Err(format!("process {process} maps the memory and takes no leases"));
        }
    }
    Ok(())
}

fn first_without(
    table: &PagerLeases,
    daemons: &[DaemonProcess],
    which: impl Fn(&PagerLeases) -> std::io::Result<Vec<u32>>,
) -> Result<Option<i32>, String> {
    if table.table().is_lost() {
        return Err("the table of leases is lost".into());
    }
    let found = which(table).map_err(|error| error.to_string())?;
    let mut processes = daemons.iter().map(|daemon| daemon.process);
    Ok(processes.find(|process| !found.contains(&(*process as u32))))
}

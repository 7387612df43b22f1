//! Who else has the guest's memory: a pager that copies pages or takes them away looks now and
//! then, and asks the daemons for leases.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_guest_memory::PagerLeases;

/// How often a pager looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// The same while the guest does nothing.
const QUIET_INTERVAL: Duration = Duration::from_secs(10);
/// How often a daemon that takes leases is asked whether pages may leave.
const ASK_INTERVAL: Duration = Duration::from_secs(30);

/// Asks the daemons to take leases.
pub(crate) type Ask = Arc<dyn Fn() + Send + Sync>;

/// When a pager looks around.
pub(crate) struct Look {
    ask: Ask,
    /// The thread that asks the daemons.
    asking: Option<JoinHandle<()>>,
    looked: Option<Instant>,
    asked: Option<Instant>,
}

impl std::fmt::Debug for Look {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Look").field("looked", &self.looked).finish_non_exhaustive()
    }
}

impl Look {
    /// Looks that have not begun.
    pub fn new(ask: Ask) -> Self {
        Self { ask, asking: None, looked: None, asked: None }
    }

    /// How often it looks.
    pub fn interval(is_quiet: bool) -> Duration {
        if is_quiet { QUIET_INTERVAL } else { LOOK_INTERVAL }
    }

    /// The next look is at once.
    pub fn hurry(&mut self) {
        self.looked = None;
    }

    /// Whether it is time to look. If it is, the look is taken to begin now.
    pub fn is_due(&mut self, interval: Duration) -> bool {
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= interval);
        if is_due {
            self.looked = Some(Instant::now());
        }
        is_due
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
        self.asking = std::thread::Builder::new().name("ask".into()).spawn(move || ask()).ok();
    }
}

/// Whether the processes `daemons`, which map the guest's memory, all take leases from `tables`.
/// Returns why pages may not leave all the same; empty if they may.
///
/// # Errors
/// The first that takes none for some of its accesses.
pub(crate) fn check_holders(tables: &[PagerLeases], daemons: &[i32]) -> Result<String, String> {
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
pub(crate) fn check_members(tables: &[PagerLeases], daemons: &[i32]) -> Result<(), String> {
    for table in tables {
        if let Some(process) = first_without(table, daemons, PagerLeases::members)? {
            return Err(format!("process {process} maps the memory and takes no leases"));
        }
    }
    Ok(())
}

fn first_without(
    table: &PagerLeases,
    daemons: &[i32],
    which: impl Fn(&PagerLeases) -> std::io::Result<Vec<u32>>,
) -> Result<Option<i32>, String> {
    if table.table().is_lost() {
        return Err("the table of leases is lost".into());
    }
    let found = which(table).map_err(|error| error.to_string())?;
    Ok(daemons.iter().copied().find(|process| !found.contains(&(*process as u32))))
}

//! Leases for the pagers of guests: the daemon looks for them when a VMM announces its memory, and
//! when a pager asks for it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, LeaseReport};
use fathom_frontend::vhost_user::{LeaseRenewal, NotLeased};
use fathom_guest_memory::GuestLeases;
use parking_lot::{Condvar, Mutex};

use crate::daemon::Daemon;
use crate::daemon::stack::refusal;

/// How long a pager waits for the requests in flight. It asks again.
const WAIT_MAX: Duration = Duration::from_secs(3);

/// How long accesses from before the leases are waited for: looks of introspection, of which each
/// is short, and the layers of queues.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);
const DRAIN_PAUSE: Duration = Duration::from_millis(10);

/// A renewal of the leases. One runs at a time: it may wait for a disk that does not answer.
#[derive(Default)]
pub(super) struct LeaseRenewer {
    state: Arc<(Mutex<Renewed>, Condvar)>,
}

#[derive(Default)]
struct Renewed {
    is_running: bool,
    leased: u64,
    obstacle: String,
}

/// Says to the pagers that pages may leave, as soon as no access from before the leases is left.
/// Returns why not.
fn await_drained(leases: &[Arc<GuestLeases>]) -> String {
    let begun = Instant::now();
    loop {
        match GuestLeases::set_ready_for_eviction(leases) {
            None => return String::new(),
            Some(obstacle) if begun.elapsed() >= DRAIN_TIME_MAX => return obstacle,
            Some(_) => thread::sleep(DRAIN_PAUSE),
        }
    }
}

/// Renews the leases of all disks.
pub(super) fn renew(daemon: &Daemon) -> Result<LeaseReport, ErrorBody> {
    let state = Arc::clone(&daemon.part::<LeaseRenewer>().state);
    let (renewed, changed) = &*state;
    let mut guard = renewed.lock();
    if guard.is_running {
        // It may have looked before the table was there that is meant now.
        return Ok(LeaseReport { is_pending: true, ..LeaseReport::default() });
    }
    let of_disk = |served: &Arc<crate::daemon::Served>| {
        served.live().server.as_ref().map(fathom_frontend::vhost_user::Server::lease_renewal)
    };
    let renewals: Vec<LeaseRenewal> = daemon.served().iter().filter_map(of_disk).collect();
    let work = {
        let state = Arc::clone(&state);
        move || {
            let (mut leases, mut obstacle) = (Vec::new(), String::new());
            let mut without = Vec::new();
            for renewed in renewals.into_iter().flat_map(LeaseRenewal::run) {
                match renewed {
                    Ok(taken) => leases.push(taken),
                    Err(NotLeased { files, reason }) => {
                        without.extend(files);
                        obstacle = reason;
                    }
                }
            }
            // Only when all disks of a guest take leases.
            leases.retain(|leases| !leases.is_on(&without));
            for leases in &leases {
                leases.set_ready();
            }
            let undrained = await_drained(&leases);
            let obstacle = if undrained.is_empty() { obstacle } else { undrained };
            let mut renewed = state.0.lock();
            *renewed = Renewed { is_running: false, leased: leases.len() as u64, obstacle };
            drop(renewed);
            state.1.notify_all();
        }
    };
    if let Err(error) = thread::Builder::new().name("leases".into()).spawn(work) {
        return Err(refusal(
            ErrorCode::Failed,
            format!("a thread cannot be started: {error}"),
            "see whether the daemon may start more threads",
        ));
    }
    guard.is_running = true;
    let deadline = Instant::now() + WAIT_MAX;
    while guard.is_running && !changed.wait_until(&mut guard, deadline).timed_out() {}
    if guard.is_running {
        return Ok(LeaseReport { is_pending: true, ..LeaseReport::default() });
    }
    Ok(LeaseReport { leased: guard.leased, is_pending: false, obstacle: guard.obstacle.clone() })
}

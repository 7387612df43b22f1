//! Makes back ends, layers and front ends from definitions. Each feature adds its own part of a
//! disk ([`Equipment`]).

mod equipment;
mod layers;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Disk, DiskOptions, ErrorKind, Operation};
use fathom_control::{Bytes, DiskDefinition, ErrorBody, ErrorCode, VhostUserDefinition};
use fathom_failure::Failure;
use fathom_frontend::vhost_user;
use fathom_options::Problems;
use fathom_reactor::Reactor;
use rustix::process::{Resource, getrlimit};

pub(crate) use equipment::{Before, Equipment, Fitted, Position};
pub(crate) use layers::{KeyedLayer, LayerKey, finds_device, lacks_device, make_layers, set_layer};

use crate::daemon::parts::Parts;
use crate::process::group::admit;
use crate::stores::kinds::open_store;

/// An error of the control interface.
pub(crate) fn refusal(
    code: ErrorCode,
    message: impl Into<String>,
    remedy: impl Into<String>,
) -> ErrorBody {
    ErrorBody { code, message: message.into(), remedy: remedy.into() }
}

/// The error for an invalid request.
pub(crate) fn invalid(problems: &Problems) -> ErrorBody {
    let messages: Vec<&str> = problems.0.iter().map(|problem| problem.message.as_str()).collect();
    let remedies: Vec<&str> = problems.0.iter().map(|problem| problem.remedy.as_str()).collect();
    refusal(ErrorCode::Invalid, messages.join("; "), remedies.join("; "))
}

/// Opens the back end of `definition`, with its layers above it. `number` is the disk's number in
/// events, `records` the folder for records that outlive the daemon, and
/// `shared` what the features keep.
pub(crate) fn open_disk(
    definition: &DiskDefinition,
    number: u64,
    records: &Path,
    shared: &Parts,
) -> Result<(Arc<Disk>, Parts, Vec<KeyedLayer>), ErrorBody> {
    let home = open_store(definition, records, shared)?;
    let equipment = Equipment::new(definition, (shared, records), &home, number, None)?;
    let (disk, layers) = stack(&equipment).inspect_err(|_| equipment.abandon())?;
    equipment.equipped(&disk);
    let parts = equipment.parts.clone();
    Ok((disk, parts, layers))
}

/// Makes a disk of its store and its layers.
fn stack(equipment: &Equipment<'_>) -> Result<(Arc<Disk>, Vec<KeyedLayer>), ErrorBody> {
    let definition = equipment.definition;
    let made = make_layers(equipment)?;
    let serial = if definition.serial.is_empty() { &definition.name } else { &definition.serial };
    let options = DiskOptions {
        name: definition.name.clone(),
        vm: definition.vm.clone(),
        serial: serial.clone(),
        read_only: definition.read_only,
    };
    let home = Arc::clone(equipment.home);
    let disk = Disk::new(options, made.list(), home).map_err(too_many_layers)?;
    Ok((disk, made.layers))
}

fn too_many_layers(_: ErrorKind) -> ErrorBody {
    let layers_max = fathom_block::LAYERS_MAX;
    refusal(
        ErrorCode::Invalid,
        format!(
            "a disk has at most {layers_max} layers, including `tap`, `classify` and its model"
        ),
        "remove some layers",
    )
}

/// Checks that this process may write a file of `size` bytes.
pub(crate) fn check_file_limit(size: u64, is_file: bool) -> Result<(), Failure> {
    let limit = getrlimit(Resource::Fsize).current;
    let Some(limit) = limit.filter(|limit| is_file && size > *limit) else { return Ok(()) };
    Err(Failure::new(format!(
        "the daemon may write only the first {} of its {} (RLIMIT_FSIZE)",
        Bytes(limit),
        Bytes(size)
    ))
    .advise(
        "raise the limit (`LimitFSIZE=infinity` of the service, or `ulimit -f unlimited`), and \
         restart the daemon",
    ))
}

/// Whether `definition` lists a layer of the kind `name`.
pub(crate) fn names_layer(definition: &DiskDefinition, name: &str) -> bool {
    definition.layers.iter().any(|layer| layer.name() == name)
}

/// Serves `disk` to a VMM. `observer` observes the memory of its guest.
pub(crate) fn start_vhost_user(
    definition: &VhostUserDefinition,
    disk: &Arc<Disk>,
    observer: Option<Arc<dyn vhost_user::GuestObserver>>,
) -> Result<vhost_user::Server, ErrorBody> {
    let mut options = vhost_user::VhostUserOptions::new(&definition.socket);
    options.queues = definition.queues;
    options.threads = definition.threads;
    if let Some(spin) = definition.spin {
        options.spin_ns = spin.0;
    }
    let refused =
        |error: &io::Error| socket_refusal(&definition.socket.display().to_string(), error);
    let disk = Arc::clone(disk);
    let server = match observer {
        Some(observer) => vhost_user::Server::start_observed(options, disk, observer),
        None => vhost_user::Server::start(options, disk),
    };
    let server = server.map_err(|error| refused(&error))?;
    if let Some(group) = &definition.group {
        admit(&definition.socket, group).map_err(|error| refused(&error))?;
    }
    Ok(server)
}

/// The error for a socket that cannot be used.
pub(crate) fn socket_refusal(socket: &str, error: &io::Error) -> ErrorBody {
    match error.kind() {
        io::ErrorKind::AddrInUse => refusal(
            ErrorCode::Conflict,
            format!("another process listens at {socket}"),
            "stop the other daemon, or choose another socket",
        ),
        io::ErrorKind::PermissionDenied => refusal(
            ErrorCode::Failed,
            format!("a socket cannot be made at {socket}: permission denied"),
            "allow the daemon's user to write to that folder, or choose another",
        ),
        io::ErrorKind::AddrNotAvailable => refusal(
            ErrorCode::Failed,
            format!("{socket} is not an address of this host"),
            "choose an address that `ip address` shows",
        ),
        _ => {
            refusal(ErrorCode::Failed, format!("the daemon cannot listen at {socket}: {error}"), "")
        }
    }
}

/// Makes all writes to `disk` durable, within `limit`.
pub(crate) fn flush(disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
    let capabilities = disk.capabilities();
    if !capabilities.write || !capabilities.flush {
        return Ok(());
    }
    let end = Instant::now() + limit;
    let mut reactor = Reactor::new(8)?;
    let mut stack = disk.open_queue(&mut reactor, Clock::System)?;
    // A blank request is a flush.
    let mut request = stack.request();
    request.operation = Operation::Flush;
    stack.submit(request, &mut reactor);
    loop {
        if let Some((request, outcome)) = stack.completed() {
            stack.recycle(request);
            let left = end.saturating_duration_since(Instant::now());
            stack.finish(&mut reactor, left)?;
            return outcome.map_err(io::Error::other);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stack.wait(&mut reactor, Some(left))?;
    }
}

/// Makes the states of a disk's layers and of its store durable that outlive the daemon, within
/// `limit`.
pub(crate) fn save_states(disk: &Arc<Disk>, limit: Duration) {
    let end = Instant::now() + limit;
    let left = || end.saturating_duration_since(Instant::now());
    let report = |part: &str, outcome: io::Result<()>| {
        if let Err(error) = outcome {
            let disk = disk.name();
            tracing::warn!(disk, part, %error, "its state is not complete: the next start has less");
        }
    };
    for layer in disk.layers() {
        report(layer.name(), layer.save_state(disk, left()));
    }
    report(disk.backend().name(), disk.backend().save_state(left()));
}

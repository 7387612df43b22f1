//! Makes back ends, layers and front ends from definitions: the only place that knows all of them
//! by name.

mod layers;

use std::io;
use std::net::ToSocketAddrs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions, Memory, Null, OpenError};
use fathom_block::{Backend, Clock, Disk, DiskOptions, ErrorKind, Layer, Operation};
use fathom_control::{
    BackendDefinition, Bytes, DiskDefinition, ErrorBody, ErrorCode, ImageFormat,
    ListenerDefinition, TlsDefinition, VhostUserDefinition, WhenFull,
};
use fathom_frontend::nbd;
use fathom_frontend::vhost_user;
use fathom_insight::ClassTable;
use fathom_layers::classify::UsageOptions;
use fathom_layers::{Classify, Tap, WaitForRoom, tap};
use fathom_options::Problems;
use fathom_reactor::Reactor;
use fathom_tls::{Certificates, Tls};
use rustix::process::{Resource, getrlimit};

use crate::configuration::{Address, layers as layers_of, parse_address};
use crate::daemon::feature::Parts;
use crate::daemon::placement_within;
use crate::features::background::{BackgroundWork, Scheduled};
use crate::features::cache;
use crate::features::guests::DiskGuest;
use crate::features::log::{DiskLog, LogVolumes};
use crate::process::group::admit;
pub(crate) use layers::{
    KeyedLayer, LayerKey, Place, finds_device, lacks_device, make_layers, set_layer,
};

/// An error of the control interface.
pub(crate) fn refusal(
    code: ErrorCode,
    message: impl Into<String>,
    remedy: impl Into<String>,
) -> ErrorBody {
    ErrorBody { code, message: message.into(), remedy: remedy.into() }
}

/// The message of a text, and the remedy behind its first semicolon.
pub(crate) fn message_and_remedy(text: &str) -> (&str, &str) {
    text.split_once("; ").unwrap_or((text, ""))
}

/// The error for an invalid request.
pub(crate) fn invalid(problems: &Problems) -> ErrorBody {
    let messages: Vec<&str> = problems.0.iter().map(|problem| problem.message.as_str()).collect();
    let remedies: Vec<&str> = problems.0.iter().map(|problem| problem.remedy.as_str()).collect();
    refusal(ErrorCode::Invalid, messages.join("; "), remedies.join("; "))
}

/// The layers of a disk that other components use while it is served.
#[derive(Clone, Default)]
pub(crate) struct Watchers {
    /// Counts and measures requests.
    pub tap: Option<Tap>,
    /// Finds out what requests mean.
    pub classify: Option<Classify>,
    /// Makes writes wait for space.
    pub room: Option<WaitForRoom>,
    /// Makes changes durable in a log first.
    pub log: Option<DiskLog>,
    /// Schedules background work on the disk's devices.
    pub background: Option<Arc<Scheduled>>,
    /// All layers of the disk, the uppermost first.
    pub layers: Vec<KeyedLayer>,
}

impl Watchers {
    /// The layers that a definition can name.
    fn layers(&self) -> Vec<Arc<dyn Layer>> {
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        layers.extend(self.classify.clone().map(|layer| Arc::new(layer) as Arc<dyn Layer>));
        layers.extend(self.tap.clone().map(|layer| Arc::new(layer) as Arc<dyn Layer>));
        layers.extend(self.log.as_ref().map(DiskLog::layer));
        layers
    }
}

/// Opens the back end of `definition`, with its layers above it. `number` is the disk's number in
/// events, `records` the folder for records that outlive the daemon, and
/// `parts` what the features keep.
pub(crate) fn open_disk(
    definition: &DiskDefinition,
    number: u32,
    guest: &DiskGuest,
    records: &Path,
    parts: &Parts,
) -> Result<(Arc<Disk>, Watchers), ErrorBody> {
    let backend = open_backend(definition, records)?;
    let mut watchers = Watchers {
        tap: make_tap(definition, number),
        classify: make_classify(definition, guest)?,
        room: (definition.when_full == WhenFull::Wait).then(WaitForRoom::new),
        log: open_log(definition, &*backend, records, parts)?,
        background: background_of(definition, parts),
        layers: Vec::new(),
    };
    let rejected = cache::reject(definition, records, parts);
    let made =
        rejected.and_then(|()| stack(definition, &mut watchers, guest, parts, (backend, records)));
    let disk = made.inspect_err(|_| {
        if let Some(log) = &watchers.log {
            log.abandon();
        }
    })?;
    if let Some(room) = &watchers.room {
        let weak = Arc::downgrade(&disk);
        room.watch(move || {
            if let Some(disk) = weak.upgrade() {
                disk.failures().call();
            }
        });
    }
    Ok((disk, watchers))
}

/// Opens the log of a disk, if it has one. `home` is the disk's store.
pub(crate) fn open_log(
    definition: &DiskDefinition,
    home: &dyn Backend,
    records: &Path,
    parts: &Parts,
) -> Result<Option<DiskLog>, ErrorBody> {
    parts.of::<LogVolumes>().open(definition, home, records, parts)
}

/// Makes a disk of `backend` and the layers of `definition`.
fn stack(
    definition: &DiskDefinition,
    watchers: &mut Watchers,
    guest: &DiskGuest,
    parts: &Parts,
    (backend, records): (Arc<dyn Backend>, &Path),
) -> Result<Arc<Disk>, ErrorBody> {
    let place = Place { capacity: backend.capacity(), records, is_served: false };
    let made = make_layers(definition, watchers, &[], guest, parts, &place)?;
    let layers = made.list();
    watchers.layers = made.layers;
    let serial = if definition.serial.is_empty() { &definition.name } else { &definition.serial };
    let options = DiskOptions {
        name: definition.name.clone(),
        vm: definition.vm.clone(),
        serial: serial.clone(),
        read_only: definition.read_only,
    };
    let disk = Disk::new(options, layers, backend).map_err(too_many_layers)?;
    cache::note_log(&disk.layers(), watchers.log.as_ref());
    schedule(&disk, watchers);
    Ok(disk)
}

/// How long the search for the devices beneath a new disk may take.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(1);

/// The scheduler of background work for a disk that has such work, or whose devices are shared with one
/// that has. Without a scheduler, work is done when it is due.
pub(crate) fn background_of(definition: &DiskDefinition, parts: &Parts) -> Option<Arc<Scheduled>> {
    let has_work = layers_of::wal(definition).is_some();
    if !has_work && parts.of::<BackgroundWork>().is_empty() {
        return None;
    }
    let placement = placement_within(definition, SEARCH_TIME_MAX);
    let is_known = placement.problem.is_none();
    is_known.then(|| parts.of::<BackgroundWork>().of(&placement, has_work)).flatten()
}

/// Gives a disk the scheduler of its background work. A disk keeps its scheduler.
pub(crate) fn schedule(disk: &Disk, watchers: &Watchers) {
    if let Some(background) = &watchers.background {
        disk.schedule_background(Arc::<Scheduled>::clone(background));
    }
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

pub(crate) fn open_backend(
    definition: &DiskDefinition,
    records: &Path,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let name = &definition.name;
    match definition.backend() {
        Some(BackendDefinition::Image(path)) => {
            let options = FileOptions {
                path,
                direct: definition.direct,
                read_only: definition.read_only,
                block_size: definition.block_size.and_then(|size| u32::try_from(size.0).ok()),
                disk: name.clone(),
                records: Some(records.to_owned()),
                foreign_allowed: definition.format == Some(ImageFormat::Raw),
            };
            let backend = FileBackend::open(&options).map_err(|error| {
                let text = format!("the disk {name:?} cannot be opened: {error}");
                let (message, remedy) = message_and_remedy(&text);
                let code = match error {
                    OpenError::Foreign(..) => ErrorCode::ForeignFormat,
                    _ => ErrorCode::Failed,
                };
                refusal(code, message, remedy)
            })?;
            if !definition.read_only {
                let shown = definition.image.as_deref().unwrap_or(Path::new("")).display();
                check_file_limit(backend.capacity(), backend.name() == "file").map_err(
                    |error| {
                        let text = format!("the image {shown} of the disk {name:?}: {error}");
                        let (message, remedy) = message_and_remedy(&text);
                        refusal(ErrorCode::Failed, message, remedy)
                    },
                )?;
            }
            Ok(Arc::new(backend))
        }
        Some(BackendDefinition::Memory(size)) => {
            let memory = Memory::open(size).map_err(|error| {
                refusal(
                    ErrorCode::Failed,
                    format!("memory for the disk {name:?} cannot be allocated: {error}"),
                    "make it smaller",
                )
            })?;
            Ok(Arc::new(memory))
        }
        Some(BackendDefinition::Null(size)) => Ok(Arc::new(Null::new(size))),
        None => Err(refusal(
            ErrorCode::Invalid,
            format!("the disk {name:?} has no store"),
            "add an image, or a size in memory",
        )),
    }
}

/// Checks that this process may write a file of `size` bytes.
pub(crate) fn check_file_limit(size: u64, is_file: bool) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    let Some(limit) = limit.filter(|limit| is_file && size > *limit) else { return Ok(()) };
    Err(io::Error::other(format!(
        "the daemon may write only the first {} of its {} (RLIMIT_FSIZE); raise the limit (`LimitFSIZE=infinity` of \
         the service, or `ulimit -f unlimited`), and restart the daemon",
        Bytes(limit),
        Bytes(size)
    )))
}

/// Whether `definition` lists a layer of the kind `name`.
pub(crate) fn names_layer(definition: &DiskDefinition, name: &str) -> bool {
    definition.layers.iter().any(|layer| layer.name() == name)
}

/// The tap of a disk, if it has one.
pub(crate) fn make_tap(definition: &DiskDefinition, number: u32) -> Option<Tap> {
    (definition.tap || names_layer(definition, "tap")).then(|| {
        let labels = tap::Labels {
            vm_name: definition.vm.clone(),
            virtual_disk: definition.name.clone(),
            physical_disk: match definition.backend() {
                Some(BackendDefinition::Image(path)) => path.display().to_string(),
                Some(BackendDefinition::Memory(_)) => "memory".into(),
                Some(BackendDefinition::Null(_)) => "null".into(),
                None => String::new(),
            },
        };
        Tap::new(number, labels)
    })
}

/// Whether the disk has a layer that finds out what requests mean.
pub(crate) fn is_classified(definition: &DiskDefinition) -> bool {
    definition.classify || names_layer(definition, "classify")
}

/// The layer that finds out what requests mean, if the disk has one.
pub(crate) fn make_classify(
    definition: &DiskDefinition,
    guest: &DiskGuest,
) -> Result<Option<Classify>, ErrorBody> {
    if !is_classified(definition) {
        return Ok(None);
    }
    let options = UsageOptions { groups_max: guest.groups_max(), ..UsageOptions::default() };
    let (slot, names) = (Arc::clone(guest.slot()), Arc::clone(guest.names()));
    Ok(Some(Classify::new(slot, class_table(definition)?, names, options)))
}

/// The table of I/O classes of a disk.
pub(crate) fn class_table(definition: &DiskDefinition) -> Result<ClassTable, ErrorBody> {
    let Some(bounds) = &definition.class_bounds else { return Ok(ClassTable::default()) };
    ClassTable::new(bounds.iter().map(|bound| bound.0).collect()).map_err(|error| {
        let message = format!("`class_bounds` is not valid: {error}");
        refusal(ErrorCode::Invalid, message, "list sizes in descending order")
    })
}

/// Serves `disk` to a VMM. `guest` observes the memory of its guest.
pub(crate) fn start_vhost_user(
    definition: &VhostUserDefinition,
    disk: &Arc<Disk>,
    guest: &Arc<DiskGuest>,
) -> Result<vhost_user::Server, ErrorBody> {
    let mut options = vhost_user::VhostUserOptions::new(&definition.socket);
    options.queues = definition.queues;
    options.threads = definition.threads;
    if let Some(spin) = definition.spin {
        options.spin_ns = spin.0;
    }
    let refused =
        |error: &io::Error| socket_refusal(&definition.socket.display().to_string(), error);
    let observer: Arc<dyn vhost_user::GuestObserver> = Arc::<DiskGuest>::clone(guest);
    let server = vhost_user::Server::start_observed(options, Arc::clone(disk), observer)
        .map_err(|error| refused(&error))?;
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

/// Serves `exports` to NBD clients.
pub(crate) fn start_listener(
    definition: &ListenerDefinition,
    exports: &Arc<nbd::Exports>,
    budget: &Arc<nbd::Budget>,
) -> Result<nbd::Listener, ErrorBody> {
    let invalid = |message: String| refusal(ErrorCode::Invalid, message, "correct the address");
    let address = match parse_address(&definition.address) {
        Some(Address::Unix(path)) => nbd::Address::Unix(path),
        Some(Address::Tcp(text)) => {
            let mut found = text.to_socket_addrs().map_err(|error| {
                invalid(format!("the address {text} cannot be resolved: {error}"))
            })?;
            let first = found
                .next()
                .ok_or_else(|| invalid(format!("the address {text} cannot be resolved")))?;
            nbd::Address::Tcp(first)
        }
        None => return Err(invalid(format!("{:?} is not an address", definition.address))),
    };
    let mut options = nbd::ListenerOptions::new(address);
    options.plain_allowed = definition.plain_allowed;
    options.budget = Arc::clone(budget);
    options.tls = definition.tls.as_ref().map(make_tls).transpose()?;
    let refused = |error: &io::Error| socket_refusal(&definition.address, error);
    let listener =
        nbd::Listener::new(options, Arc::clone(exports)).map_err(|error| refused(&error))?;
    if let (nbd::Address::Unix(path), Some(group)) = (listener.address(), &definition.group) {
        admit(path, group).map_err(|error| refused(&error))?;
    }
    Ok(listener)
}

/// The keys of a listener, read from their files.
pub(crate) fn make_tls(definition: &TlsDefinition) -> Result<Tls, ErrorBody> {
    let unfit = |error: io::Error| {
        let message = format!("TLS for NBD cannot be set up: {error}");
        refusal(ErrorCode::Failed, message, "correct the files in [nbd.tls]")
    };
    match (&definition.psk, &definition.certificate, &definition.key) {
        (Some(psk), None, None) => Tls::shared_keys(psk).map_err(unfit),
        (None, Some(certificate), Some(key)) => {
            let certificates = Certificates {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: definition.client_ca.clone(),
            };
            Tls::server(&certificates).map_err(unfit)
        }
        _ => Err(refusal(
            ErrorCode::Invalid,
            "TLS requires a certificate and its key, or shared keys",
            "add `certificate` and `key`, or `psk`",
        )),
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

/// The names of the virtio features in `bits`.
pub(crate) fn virtio_features(bits: u64) -> Vec<String> {
    const NAMES: [(u32, &str); 17] = [
        (1, "size-max"),
        (2, "seg-max"),
        (4, "geometry"),
        (5, "read-only"),
        (6, "block-size"),
        (9, "flush"),
        (10, "topology"),
        (11, "write-cache"),
        (12, "multi-queue"),
        (13, "discard"),
        (14, "write-zeroes"),
        (26, "log-all"),
        (28, "indirect"),
        (29, "event-index"),
        (30, "protocol-features"),
        (32, "version-1"),
        (34, "packed"),
    ];
    named(bits, &NAMES)
}

/// The names of the vhost-user protocol features in `bits`.
pub(crate) fn protocol_features(bits: u64) -> Vec<String> {
    const NAMES: [(u32, &str); 12] = [
        (0, "multi-queue"),
        (1, "log-shared-memory"),
        (3, "reply-ack"),
        (5, "backend-request"),
        (9, "config"),
        (10, "backend-send-fd"),
        (12, "inflight-shared-memory"),
        (13, "reset-device"),
        (15, "configure-memory-slots"),
        (16, "status"),
        (18, "shared-object"),
        (19, "device-state"),
    ];
    named(bits, &NAMES)
}

fn named(bits: u64, names: &[(u32, &str)]) -> Vec<String> {
    let name = |bit: u32| match names.iter().find(|(known, _)| *known == bit) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("bit-{bit}"),
    };
    (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(name).collect()
}

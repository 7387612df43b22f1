//! The centre: sends fragments to the hosts that connect, merges their results, and runs the rest
//! of the queries.
//!
//! One thread accepts connections, one thread for each host receives its frames, and the caller of
//! [`Centre::run`] runs the engine. The waiting rows of each host have a memory limit. The centre
//! does not read from a host above its limit, so that the host's own buffer fills.

mod budget;
mod merge;
mod session;
mod status;
mod strangers;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Thread;
use std::time::Duration;

use fathom_cql::plan::Plan;
use fathom_cql::{Hosts, Split, split};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::clock::{SteadyClock, nanoseconds};
use super::plans::{Fragments, is_stream};
use super::rows::Tuple;
use fathom_tls::Tls;

use super::unix_time_ns;
use crate::Engine;
use crate::cluster::{Cluster, ClusterOptions};
use crate::held::{HeldLimit, HeldLimitExceeded};
use crate::replay::{QueryError, RESULT, ResultSink, Script, deliver};
use crate::streams;
use budget::MemoryBudget;
use merge::{Merge, RowsReport};

use strangers::Strangers;

pub use status::{CentreStatus, HostState, HostStatus, Refusal};

/// The most connections.
const CONNECTIONS_MAX: usize = 512;
/// The most connections whose hosts have not identified themselves yet.
const STRANGERS_MAX: usize = 64;
/// The most hosts that the centre remembers.
const HOSTS_MAX: usize = 1024;
/// The most messages that wait for the engine, and the most that it processes before it advances
/// time.
const MESSAGES_MAX: usize = 1024;
/// The longest wait of the engine for messages.
const MESSAGE_WAIT: Duration = Duration::from_millis(10);
/// The name of the state that [`Merge`] holds.
const RELATIONS: &str = "rows of the relations that hosts report";
/// The number of refusals that the status shows.
const REFUSALS_MAX: usize = 16;
/// The pause of the accepting thread when there is no connection to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// The options of a centre.
#[derive(Clone)]
pub struct CentreOptions {
    /// The address to listen at, `host:port`.
    pub address: String,
    /// The encryption of connections; `None` for plain text, in which hosts are not authenticated.
    pub tls: Option<Tls>,
    /// How long the centre waits for slow hosts.
    pub patience: Duration,
    /// The interval between measurements of clocks.
    pub ping: Duration,
    /// The most memory that the waiting rows of a host take, in bytes.
    pub host_memory_max: usize,
    /// The processes that form the centre; `None` for a single process.
    pub cluster: Option<ClusterOptions>,
}

impl CentreOptions {
    /// Options of a centre that accepts plain text.
    pub fn new(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            tls: None,
            patience: Duration::from_secs(2),
            ping: Duration::from_secs(1),
            host_memory_max: 32 << 20,
            cluster: None,
        }
    }
}

/// The fragments that hosts currently run.
struct Current {
    epoch: u32,
    plans: Vec<u8>,
    /// The plans for hosts that have `IOstream` alone, if they differ.
    single: Option<Vec<u8>>,
    fragments: Vec<Plan>,
}

/// The state that the threads share.
struct Shared {
    options: CentreOptions,
    clock: SteadyClock,
    /// A random number that identifies this centre's run.
    run: u64,
    current: RwLock<Arc<Current>>,
    hosts: Mutex<BTreeMap<Arc<str>, Record>>,
    refusals: Mutex<VecDeque<Refusal>>,
    refused: AtomicU64,
    watermark_ns: AtomicU64,
    connections: AtomicUsize,
    strangers: Strangers,
    numbers: AtomicU64,
    ending: AtomicBool,
    /// The engine's thread, if it also waits for other processes.
    waiting: Mutex<Option<Thread>>,
}

/// The record of a host.
struct Record {
    status: HostStatus,
    /// The number of the host's connection, and the request to end it.
    active: Option<(u64, Arc<Eject>)>,
    /// The last epoch of the host, and the last number received in that epoch.
    epoch: u32,
    number: u64,
    /// Whether the centre holds no rows of the host.
    fresh: bool,
    budget: Arc<MemoryBudget>,
}

/// A request of other threads to end a connection.
#[derive(Debug, Default)]
struct Eject {
    requested: AtomicBool,
    reason: Mutex<String>,
}

impl Eject {
    fn request(&self, reason: &str) {
        reason.clone_into(&mut self.reason.lock());
        self.requested.store(true, Ordering::Release);
    }

    fn requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    fn reason(&self) -> String {
        self.reason.lock().clone()
    }
}

impl Shared {
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Record>> {
        self.hosts.lock()
    }

    fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.read())
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Thread>> {
        self.waiting.lock()
    }

    /// Wakes the engine for a message.
    fn wake(&self) {
        if let Some(engine) = &*self.waiting() {
            engine.unpark();
        }
    }

    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    fn refuse(&self, address: &str, reason: String) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let mut refusals = self.refusals.lock();
        if refusals.len() == REFUSALS_MAX {
            refusals.pop_front();
        }
        let address = address.to_owned();
        refusals.push_back(Refusal { unix_ns: unix_time_ns(), address, reason });
    }

    fn status(&self) -> CentreStatus {
        let refusals = self.refusals.lock();
        let refusals = refusals.iter().cloned().collect();
        let hosts = self.hosts().values().map(|record| record.status.clone()).collect();
        CentreStatus {
            watermark_ns: self.watermark_ns.load(Ordering::Relaxed) as i64,
            hosts,
            refused: self.refused.load(Ordering::Relaxed),
            refusals,
        }
    }
}

/// A message from a connection to the engine.
struct Message {
    name: Arc<str>,
    connection: u64,
    epoch: u32,
    kind: MessageKind,
}

enum MessageKind {
    Joined { resumed: bool },
    Rows(RowsReport),
    Watermark { time_ns: i64 },
    Left { permanent: bool },
}

/// A view of the status of a centre's hosts.
#[derive(Clone)]
pub struct Watch(Arc<Shared>);

impl Watch {
    /// The current status.
    pub fn status(&self) -> CentreStatus {
        self.0.status()
    }
}

/// See the module. Connections end when the centre is dropped.
pub struct Centre {
    shared: Arc<Shared>,
    messages: Receiver<Message>,
    address: SocketAddr,
    script: Script,
    merge: Merge,
    engine: Engine,
    limit: HeldLimit,
    /// All results before this instant have been reported; in nanoseconds since 1970.
    reported_ns: i64,
}

impl Centre {
    /// Begins to listen for hosts that run a script's queries. If the centre has several processes,
    /// first connects to the others: `keep_waiting` is then called often with a text for the user,
    /// and returns whether to continue.
    ///
    /// # Errors
    /// If the address is not available, the queries cannot be sent, or another process is not
    /// reached.
    pub fn listen(
        options: CentreOptions,
        script: Script,
        keep_waiting: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<Self> {
        let listener = bind(&options.address)?;
        let (current, merge, engine) = begin(&script, 1, &options, keep_waiting)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            options,
            clock: SteadyClock::new(),
            run: fastrand::u64(1..),
            current: RwLock::new(Arc::new(current)),
            hosts: Mutex::default(),
            refusals: Mutex::default(),
            refused: AtomicU64::new(0),
            watermark_ns: AtomicU64::new(0),
            connections: AtomicUsize::new(0),
            strangers: Strangers::default(),
            numbers: AtomicU64::new(1),
            ending: AtomicBool::new(false),
            waiting: Mutex::default(),
        });
        let (sender, messages) = sync_channel(MESSAGES_MAX);
        let accepting = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || accept(&listener, &accepting, &sender))?;
        let limit = script.held_limit();
        let reported_ns = 0;
        Ok(Self { shared, messages, address, script, merge, engine, limit, reported_ns })
    }

    /// The address at which the centre listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A view of the hosts' status, for any thread.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

    /// Replaces the queries: hosts get other fragments, and the state of the former queries is
    /// dropped.
    ///
    /// # Errors
    /// If the queries cannot be sent, or the centre has several processes.
    pub fn replace(&mut self, script: Script) -> io::Result<()> {
        if self.shared.options.cluster.is_some() {
            let message = "a centre of several processes cannot replace its queries";
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        let epoch = self.shared.current().epoch.wrapping_add(1);
        let (current, merge, engine) = begin(&script, epoch, &self.shared.options, &mut |_| true)?;
        self.limit = script.held_limit();
        (self.script, self.merge, self.engine, self.reported_ns) = (script, merge, engine, 0);
        let mut place = self.shared.current.write();
        *place = Arc::new(current);
        Ok(())
    }

    /// Runs the queries and passes the results to `sink`, until `keep_running` returns false.
    /// `keep_running` is called often, with the instant up to which all results have been reported,
    /// in nanoseconds since 1970 (0: none).
    ///
    /// # Errors
    /// If the results cannot be written, the queries exceed their limit, or another process is
    /// lost.
    pub fn run(
        &mut self,
        sink: &mut dyn ResultSink,
        keep_running: &mut dyn FnMut(i64) -> bool,
    ) -> Result<(), QueryError> {
        self.script.begin(sink)?;
        while keep_running(self.reported_ns) {
            if let Some(message) = self.wait() {
                self.take(message);
                for _ in 1..MESSAGES_MAX {
                    let Ok(message) = self.messages.try_recv() else { break };
                    self.take(message);
                }
            }
            self.advance(sink)?;
            self.check(sink)?;
            if let Some(loss) = self.engine.loss() {
                return Err(QueryError::Lost(loss));
            }
        }
        Ok(())
    }

    /// Checks the size of the state, if a check is due.
    fn check(&mut self, sink: &dyn ResultSink) -> Result<(), HeldLimitExceeded> {
        let beside = [(RESULT, sink.held()), (RELATIONS, self.merge.held())];
        self.limit.check(&self.engine, &beside)
    }

    /// Waits for a message for a short time; in a cluster also for messages of other processes.
    fn wait(&mut self) -> Option<Message> {
        if self.shared.options.cluster.is_none() {
            return self.messages.recv_timeout(MESSAGE_WAIT).ok();
        }
        self.shared.waiting().get_or_insert_with(std::thread::current);
        let message = self.messages.try_recv().ok();
        message.or_else(|| {
            self.engine.wait(MESSAGE_WAIT);
            self.messages.try_recv().ok()
        })
    }

    fn take(&mut self, message: Message) {
        let Message { name, connection, epoch, kind } = message;
        if epoch != self.shared.current().epoch {
            return;
        }
        let now_ns = self.shared.clock.now_ns();
        let engine = &mut self.engine;
        let input = &mut |input: usize, time_ns: i64, row: Tuple, count| {
            engine.change(input, time_ns.max(0) as u64, &row, count);
        };
        let merge = &mut self.merge;
        let done = match kind {
            MessageKind::Joined { resumed } => {
                merge.joined(&name, connection, resumed, now_ns, input);
                Ok(())
            }
            MessageKind::Rows(report) => merge.changes(&name, connection, report, now_ns, input),
            MessageKind::Watermark { time_ns } => {
                merge.watermark(&name, connection, time_ns, now_ns)
            }
            MessageKind::Left { permanent } => {
                // The host's last watermark counts before the host leaves.
                merge.advance(now_ns);
                merge.left(&name, connection, permanent, input);
                Ok(())
            }
        };
        if let Err(reason) = done {
            self.merge.left(&name, connection, true, &mut |input, time_ns, row, count| {
                self.engine.change(input, time_ns.max(0) as u64, &row, count);
            });
            self.eject(&name, connection, reason);
        }
    }

    fn eject(&self, name: &str, connection: u64, reason: &str) {
        let mut hosts = self.shared.hosts();
        let Some(record) = hosts.get_mut(name) else { return };
        record.fresh = true;
        if let Some((_, eject)) = record.active.as_ref().filter(|(active, _)| *active == connection)
        {
            eject.request(reason);
        }
    }

    /// Advances time, and reports the results.
    fn advance(&mut self, sink: &mut dyn ResultSink) -> Result<(), QueryError> {
        let now_ns = self.shared.clock.now_ns();
        self.expire(now_ns);
        self.merge.advance(now_ns);
        let watermark_ns = self.merge.watermark_ns();
        // In a cluster there may be results of other processes' rows.
        if watermark_ns > self.reported_ns || self.shared.options.cluster.is_some() {
            let mut steps = self.limit.steps(&self.engine, watermark_ns as u64);
            while let Some(end_ns) = steps.next(&self.limit) {
                deliver(&mut self.engine, end_ns, sink)?;
                self.check(sink)?;
            }
            sink.flush()?;
            let ended_ns = self.engine.ended_ns();
            self.reported_ns = ended_ns as i64;
            self.merge.release(self.reported_ns);
            self.shared.watermark_ns.store(ended_ns, Ordering::Relaxed);
        }
        self.note(now_ns);
        Ok(())
    }

    /// Expires hosts that have been away for too long.
    fn expire(&mut self, now_ns: i64) {
        let (shared, engine) = (&self.shared, &mut self.engine);
        let mut may_expire = |name: &str| {
            let mut hosts = shared.hosts();
            let Some(record) = hosts.get_mut(name) else { return true };
            // A host that is reconnecting resumes, so its rows are kept.
            record.fresh |= record.active.is_none();
            record.active.is_none()
        };
        self.merge.expire(now_ns, &mut may_expire, &mut |input, time_ns, row, count| {
            engine.change(input, time_ns.max(0) as u64, &row, count);
        });
    }

    /// Copies the state of the merge into the hosts' status.
    fn note(&self, now_ns: i64) {
        for (name, record) in self.shared.hosts().iter_mut() {
            let status = &mut record.status;
            let Some((late, watermark_ns)) = self.merge.of_host(name) else { continue };
            status.late = late;
            let here = status.state != HostState::Away;
            status.lag_ns = watermark_ns.filter(|_| here).map(|of_host| now_ns - of_host);
            let waited = self.merge.is_waited_for(name, now_ns);
            status.state = match status.state {
                HostState::Running if !waited => HostState::Lagging,
                HostState::Lagging if waited => HostState::Running,
                other => other,
            };
        }
    }
}

impl Drop for Centre {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
    }
}

/// Prepares a script's queries: the fragments, the merge, and the engine.
fn begin(
    script: &Script,
    epoch: u32,
    options: &CentreOptions,
    keep_waiting: &mut dyn FnMut(&str) -> bool,
) -> io::Result<(Current, Merge, Engine)> {
    let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidInput, message);
    let known = streams();
    if let Some(other) = script.sources().iter().find(|source| **source >= known.len()) {
        let other = &script.catalog().streams[*other].name;
        let names: Vec<&str> = known.iter().map(|stream| stream.name.as_str()).collect();
        let message = format!("hosts have no stream {other}: query {}", names.join(" or "));
        return Err(invalid(message));
    }
    // Fragments are split from plans over whole rows, so that equal parts of several queries are
    // equal.
    let plans: Vec<Plan> = script.queries().iter().map(|query| query.plan.clone()).collect();
    let Split { fragments, centre } = split(&plans, script.catalog(), Hosts::Many);
    let sent = Fragments::new(fragments, script.catalog());
    let plans = sent.to_bytes().map_err(invalid)?;
    let is_single = sent.others.is_empty() && sent.stream.eq_ignore_ascii_case(&known[0].name);
    let single =
        if is_single { None } else { Some(sent.of_stream(&known[0]).to_bytes().map_err(invalid)?) };
    let are_streams = sent.plans.iter().map(is_stream).collect();
    let merge = Merge::new(nanoseconds(options.patience), are_streams);
    let (merge, engine) = match &options.cluster {
        None => (merge, Engine::new(sent.plans.len(), &centre)),
        Some(cluster) => {
            let cluster = Cluster::join(cluster, &centre, keep_waiting)?;
            let engine = Engine::in_cluster(cluster, sent.plans.len(), &centre);
            (merge.in_cluster(), engine)
        }
    };
    Ok((Current { epoch, plans, single, fragments: sent.plans }, merge, engine))
}

fn bind(address: &str) -> io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    TcpListener::bind(&addresses[..])
}

/// Accepts connections until the centre ends.
fn accept(listener: &TcpListener, shared: &Arc<Shared>, sender: &SyncSender<Message>) {
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    while !shared.is_ending() {
        match listener.accept() {
            Ok((stream, address)) => serve(stream, address, shared, sender),
            // There is no connection, or no descriptor for it.
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}

/// Serves a connection on its own thread. If there are too many, it takes the place of the oldest
/// one whose host has not identified itself, or is refused if there is none.
fn serve(
    stream: TcpStream,
    address: SocketAddr,
    shared: &Arc<Shared>,
    sender: &SyncSender<Message>,
) {
    let connections = shared.connections.fetch_add(1, Ordering::AcqRel);
    let guard = ConnectionGuard(Arc::clone(shared));
    let address_text = address.to_string();
    let is_full = connections >= CONNECTIONS_MAX;
    if is_full || shared.strangers.len() >= STRANGERS_MAX {
        let dropped = shared.strangers.drop_oldest();
        // The threads of those that were dropped before may be about to end.
        let is_too_full = connections >= CONNECTIONS_MAX + STRANGERS_MAX;
        if is_too_full || is_full && dropped.is_none() {
            return shared.refuse(&address_text, "there are too many connections".into());
        }
        if let Some(dropped) = dropped {
            shared.refuse(&dropped.to_string(), "another connection took its place".into());
        }
    }
    let Ok(stranger) = shared.strangers.add(address, &stream) else { return };
    let sender = sender.clone();
    let thread = std::thread::Builder::new().name("host".into());
    let spawned =
        thread.spawn(move || session::serve(stream, stranger, &address_text, &guard.0, &sender));
    if let Err(error) = spawned {
        shared.strangers.remove(stranger);
        shared.refuse("", format!("cannot start a thread: {error}"));
    }
}

/// Counts a connection until it is dropped.
struct ConnectionGuard(Arc<Shared>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

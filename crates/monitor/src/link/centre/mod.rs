//! The centre: hosts connect to it, it gives them fragments, merges what they send, and runs the
//! rest.
//!
//! A thread accepts, a thread for each host reads what it sends, and whoever calls
//! [`Centre::run`] runs the engine. What hosts send waits within a budget of memory for each:
//! whoever is beyond it is not read from, so that its own buffer fills.

mod budget;
mod merge;
mod session;
mod status;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::Thread;
use std::time::Duration;

use fathom_cql::plan::Plan;
use fathom_cql::{Hosts, Split, split};

use super::clock::{SteadyClock, nanoseconds};
use super::plans::{Fragments, is_stream};
use super::rows::Tuple;
use fathom_tls::Tls;

use super::unix_time_ns;
use crate::Engine;
use crate::cluster::{Cluster, ClusterOptions};
use crate::held::HeldLimit;
use crate::replay::{QueryError, RESULT, ResultSink, Script, deliver};
use budget::Budget;
use merge::{Merge, RowsReport};

pub use status::{CentreStatus, HostState, HostStatus, Refusal};

/// The most connections, and the most hosts that are known.
const CONNECTIONS_MAX: usize = 512;
const HOSTS_MAX: usize = 1024;
/// The most messages that wait for the engine, and that it takes before it looks at the time.
const MESSAGES_MAX: usize = 1024;
/// How long the engine waits for messages.
const MESSAGE_WAIT: Duration = Duration::from_millis(10);
/// What the [`Merge`] holds.
const RELATIONS: &str = "rows of the relations that hosts report";
/// The last who were turned away.
const REFUSALS_MAX: usize = 16;
/// How long the one who accepts rests when it cannot, and how often it looks whether to end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How a centre serves.
#[derive(Clone)]
pub struct CentreOptions {
    /// Where it listens, `host:port`.
    pub address: String,
    /// How connections are encrypted; `None` for plain text, in which anybody is who he says.
    pub tls: Option<Tls>,
    /// How long hosts that lag are waited for.
    pub patience: Duration,
    /// How often clocks are measured.
    pub ping: Duration,
    /// The most memory that what waits of a host takes, in bytes.
    pub host_memory_max: usize,
    /// The processes that are the centre together, where it is several.
    pub cluster: Option<ClusterOptions>,
}

impl CentreOptions {
    /// A centre that speaks plain text.
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

/// What hosts are to run now.
struct Current {
    epoch: u32,
    plans: Vec<u8>,
    fragments: Vec<Plan>,
}

/// What the threads share.
struct Shared {
    options: CentreOptions,
    clock: SteadyClock,
    /// Of this centre, and of no other.
    run: u64,
    current: RwLock<Arc<Current>>,
    hosts: Mutex<BTreeMap<Arc<str>, Record>>,
    refusals: Mutex<VecDeque<Refusal>>,
    refused: AtomicU64,
    watermark_ns: AtomicU64,
    connections: AtomicUsize,
    numbers: AtomicU64,
    ending: AtomicBool,
    /// The engine's thread, where it waits for other processes besides.
    waiting: Mutex<Option<Thread>>,
}

/// What is known of a host.
struct Record {
    status: HostStatus,
    /// The connection that is there, and what ends it.
    active: Option<(u64, Arc<Eject>)>,
    /// The epoch that it ran last, and the last number that came of it.
    epoch: u32,
    number: u64,
    /// Whether nothing is held of it.
    fresh: bool,
    budget: Arc<Budget>,
}

/// The end of a connection, as others want it.
#[derive(Debug, Default)]
struct Eject {
    wanted: AtomicBool,
    reason: Mutex<String>,
}

impl Eject {
    fn ask(&self, reason: &str) {
        reason.clone_into(&mut self.reason.lock().unwrap_or_else(PoisonError::into_inner));
        self.wanted.store(true, Ordering::Release);
    }

    fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Record>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Thread>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is a message for the engine.
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
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.len() == REFUSALS_MAX {
            refusals.pop_front();
        }
        let address = address.to_owned();
        refusals.push_back(Refusal { unix_ns: unix_time_ns(), address, reason });
    }

    fn status(&self) -> CentreStatus {
        let refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
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

/// What a connection tells the engine.
struct Message {
    name: Arc<str>,
    connection: u64,
    epoch: u32,
    what: What,
}

enum What {
    Joined { resumed: bool },
    Rows(RowsReport),
    Watermark { time_ns: i64 },
    Left { for_good: bool },
}

/// What is known of a centre's hosts.
#[derive(Clone)]
pub struct Watch(Arc<Shared>);

impl Watch {
    /// All of it, as it is now.
    pub fn status(&self) -> CentreStatus {
        self.0.status()
    }
}

/// See the module. Connections end when it is dropped.
pub struct Centre {
    shared: Arc<Shared>,
    messages: Receiver<Message>,
    address: SocketAddr,
    script: Script,
    merge: Merge,
    engine: Engine,
    limit: HeldLimit,
    /// All results before this have been reported.
    reported_ns: i64,
}

impl Centre {
    /// Begins to listen, for hosts that are to answer a script's queries. Where the centre is
    /// several processes, they are waited for first: `waits` is called often then, with what is
    /// waited for, and says whether to go on.
    ///
    /// # Errors
    /// When the address cannot be listened at, the queries cannot be sent, or the other processes
    /// do not come.
    pub fn listen(
        options: CentreOptions,
        script: Script,
        waits: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<Self> {
        let listener = bind(&options.address)?;
        let (current, merge, engine) = begin(&script, 1, &options, waits)?;
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A view of what is known of the hosts, for any thread.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

    /// Answers other queries from now on: hosts get other fragments, and all that was known is
    /// forgotten.
    ///
    /// # Errors
    /// When the queries cannot be sent, or the centre is several processes.
    pub fn replace(&mut self, script: Script) -> io::Result<()> {
        if self.shared.options.cluster.is_some() {
            let what = "the queries of several processes stay as they are";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let epoch = self.shared.current().epoch.wrapping_add(1);
        let (current, merge, engine) = begin(&script, epoch, &self.shared.options, &mut |_| true)?;
        self.limit = script.held_limit();
        (self.script, self.merge, self.engine, self.reported_ns) = (script, merge, engine, 0);
        let mut place = self.shared.current.write().unwrap_or_else(PoisonError::into_inner);
        *place = Arc::new(current);
        Ok(())
    }

    /// Runs the queries, and tells `sink` what they give, until `goes_on` says no: it is asked
    /// often, with the instant up to which all results have been reported, in nanoseconds since
    /// 1970 (0: none).
    ///
    /// # Errors
    /// When the results cannot be written, too much is held, or another process is not there any
    /// more.
    pub fn run(
        &mut self,
        sink: &mut dyn ResultSink,
        goes_on: &mut dyn FnMut(i64) -> bool,
    ) -> Result<(), QueryError> {
        self.script.begin(sink)?;
        while goes_on(self.reported_ns) {
            if let Some(message) = self.wait() {
                self.take(message);
                for _ in 1..MESSAGES_MAX {
                    let Ok(message) = self.messages.try_recv() else { break };
                    self.take(message);
                }
            }
            self.advance(sink)?;
            let beside = [(RESULT, sink.held()), (RELATIONS, self.merge.held())];
            self.limit.check(&self.engine, &beside)?;
            if let Some(loss) = self.engine.loss() {
                return Err(QueryError::Lost(loss));
            }
        }
        Ok(())
    }

    /// Waits for a message, but not for long; in a cluster also for what other processes say.
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
        let Message { name, connection, epoch, what } = message;
        if epoch != self.shared.current().epoch {
            return;
        }
        let now_ns = self.shared.clock.now_ns();
        let engine = &mut self.engine;
        let input = &mut |input: usize, time_ns: i64, row: Tuple, count| {
            engine.change(input, time_ns.max(0) as u64, &row, count);
        };
        let merge = &mut self.merge;
        let done = match what {
            What::Joined { resumed } => {
                merge.joined(&name, connection, resumed, now_ns, input);
                Ok(())
            }
            What::Rows(report) => merge.changes(&name, connection, report, now_ns, input),
            What::Watermark { time_ns } => merge.watermark(&name, connection, time_ns, now_ns),
            What::Left { for_good } => {
                // Its last report counts before it is not waited for any more.
                merge.advance(now_ns);
                merge.left(&name, connection, for_good, input);
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
            eject.ask(reason);
        }
    }

    /// Moves time on, and tells what results.
    fn advance(&mut self, sink: &mut dyn ResultSink) -> io::Result<()> {
        let now_ns = self.shared.clock.now_ns();
        self.forget(now_ns);
        self.merge.advance(now_ns);
        let watermark_ns = self.merge.watermark_ns();
        // In a cluster something may result of what the others tell.
        if watermark_ns > self.reported_ns || self.shared.options.cluster.is_some() {
            deliver(&mut self.engine, watermark_ns as u64, sink)?;
            sink.flush()?;
            let ended_ns = self.engine.ended_ns();
            self.reported_ns = ended_ns as i64;
            self.merge.release(self.reported_ns);
            self.shared.watermark_ns.store(ended_ns, Ordering::Relaxed);
        }
        self.note(now_ns);
        Ok(())
    }

    /// Forgets hosts that have been away for too long.
    fn forget(&mut self, now_ns: i64) {
        let (shared, engine) = (&self.shared, &mut self.engine);
        let mut may_forget = |name: &str| {
            let mut hosts = shared.hosts();
            let Some(record) = hosts.get_mut(name) else { return true };
            // One that is just coming back goes on with what is held.
            record.fresh |= record.active.is_none();
            record.active.is_none()
        };
        self.merge.forget(now_ns, &mut may_forget, &mut |input, time_ns, row, count| {
            engine.change(input, time_ns.max(0) as u64, &row, count);
        });
    }

    /// Notes what the merge knows of hosts.
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

/// What a script's queries begin with.
fn begin(
    script: &Script,
    epoch: u32,
    options: &CentreOptions,
    waits: &mut dyn FnMut(&str) -> bool,
) -> io::Result<(Current, Merge, Engine)> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let [_] = &script.catalog().streams[..] else {
        return Err(invalid("hosts know of the stream of events only: ask about it".into()));
    };
    // Of whole rows: what several queries need in parts is then found to be the same.
    let plans: Vec<Plan> = script.queries().iter().map(|query| query.plan.clone()).collect();
    let Split { mut fragments, centre } = split(&plans, script.catalog(), Hosts::Many);
    let mut used = fathom_cql::prune(&mut fragments, script.catalog()).into_iter();
    let used = used.next().unwrap_or_default();
    let columns = used.iter().map(|&column| script.schema().columns[column].clone()).collect();
    let stream = script.schema().name.clone();
    let sent = Fragments { stream, columns, plans: fragments };
    let plans = sent.to_bytes().map_err(invalid)?;
    let streams = sent.plans.iter().map(is_stream).collect();
    let merge = Merge::new(nanoseconds(options.patience), streams);
    let (merge, engine) = match &options.cluster {
        None => (merge, Engine::new(sent.plans.len(), &centre)),
        Some(cluster) => {
            let cluster = Cluster::join(cluster, &centre, waits)?;
            let engine = Engine::in_cluster(cluster, sent.plans.len(), &centre);
            (merge.beside_others(), engine)
        }
    };
    Ok((Current { epoch, plans, fragments: sent.plans }, merge, engine))
}

fn bind(address: &str) -> io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    TcpListener::bind(&addresses[..])
}

/// Accepts until the centre ends.
fn accept(listener: &TcpListener, shared: &Arc<Shared>, sender: &SyncSender<Message>) {
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    while !shared.is_ending() {
        match listener.accept() {
            Ok((stream, address)) => serve(stream, &address.to_string(), shared, sender),
            // No connection, or no descriptor for one.
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}

/// Serves a connection on a thread of its own.
fn serve(stream: TcpStream, address: &str, shared: &Arc<Shared>, sender: &SyncSender<Message>) {
    if shared.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        shared.refuse(address, "there are too many connections".into());
        return;
    }
    let seat = Seat(Arc::clone(shared));
    let (sender, address) = (sender.clone(), address.to_owned());
    let thread = std::thread::Builder::new().name("host".into());
    let spawned = thread.spawn(move || session::serve(stream, &address, &seat.0, &sender));
    if let Err(error) = spawned {
        shared.refuse("", format!("there is no thread: {error}"));
    }
}

/// A connection that is counted.
struct Seat(Arc<Shared>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

//! The back end: an export of another server, and the thread that talks to it.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Figure,
    Geometry,
};
use fathom_failure::Failure;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::handshake::{Export, negotiate};
use crate::job::{Job, JobList, ThreadReport};
use crate::queue::RemoteQueue;
use crate::record::{Earlier, ExportRecord};
use crate::session::{End, SILENT, flush_earlier, repeat, run};
use crate::stream::{AnyStream, Secure, connect};
use crate::uri::NbdUri;
use crate::wire::transmission;

/// The time limit of an attempt to connect.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// The pause before another attempt, at first and at most.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a server may be silent because it serves the connection of an earlier daemon only.
const FORMER_TIME_MAX: Duration = Duration::from_secs(2);

/// Which export is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Where it is.
    pub uri: NbdUri,
    /// How long a request is tried before it fails. Meanwhile the server may be started again.
    pub timeout: Duration,
    /// Whether nothing is written, so that the server need not make anything durable.
    pub read_only: bool,
}

impl RemoteOptions {
    /// Requests are tried for 30 s, and may write.
    pub fn new(uri: NbdUri) -> Self {
        Self { uri, timeout: Duration::from_secs(30), read_only: false }
    }
}

/// A disk whose blocks another server has. A server that is started again, even after it was
/// killed, costs time and no write: what it had not made durable is sent again.
pub struct RemoteDisk {
    options: RemoteOptions,
    export: Export,
    shared: Arc<ThreadReport>,
    jobs: UnboundedSender<Job>,
}

impl RemoteDisk {
    /// Connects to the server. Blocks, for at most 10 s.
    ///
    /// # Errors
    /// If the server does not answer, does not offer the export, or cannot make changes durable.
    pub fn open(options: &RemoteOptions) -> Result<Self, Failure> {
        Self::open_recorded(options, None)
    }

    /// As [`open`](Self::open), with a record of what may be lost, for later daemons. What an
    /// earlier one has left is flushed first, which may take as long as a request.
    ///
    /// # Errors
    /// The same, and if the server does not complete the flush. An export that has lost changes
    /// opens, and the loss is among its [problems](Backend::problems).
    pub fn open_recorded(
        options: &RemoteOptions,
        record: Option<Arc<dyn ExportRecord>>,
    ) -> Result<Self, Failure> {
        let secure = options.uri.tls.as_ref().map(Secure::new).transpose()?;
        let (jobs, received) = mpsc::unbounded_channel();
        let (opened, result) = std::sync::mpsc::channel();
        let shared = Arc::new(ThreadReport::new(record));
        let state = JobList::new(Arc::clone(&shared), options.timeout);
        let (thread_options, thread_shared) = (options.clone(), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("nbd-client".into());
        let spawned = thread.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(opened.send(Err(error.into()))),
            };
            runtime.block_on(async move {
                match begin(&thread_options, secure.as_ref(), &thread_shared).await {
                    Ok((stream, export)) => {
                        thread_shared.capacity.store(export.capacity, Ordering::Relaxed);
                        let options = thread_options;
                        let remote = Remote { options, secure, export, shared: thread_shared };
                        if opened.send(Ok(export)).is_ok() {
                            remote.serve(stream, &RefCell::new(state), received).await;
                        }
                        remote.disconnected();
                    }
                    Err(failure) => drop(opened.send(Err(failure))),
                }
            });
            // A look-up of a name may hang.
            runtime.shutdown_background();
        });
        spawned?;
        let ended = || Err(Failure::new("the export's thread ended"));
        let result = result.recv().unwrap_or_else(|_| ended());
        let export =
            result.map_err(|failure| failure.advise_else("check the server, and the URI"))?;
        Ok(Self { options: options.clone(), export, shared, jobs })
    }

    /// Calls `listener` when the server is away, and when it answers again, on the export's thread.
    /// It must not block. It replaces an earlier one.
    pub fn watch(&self, listener: impl Fn() + Send + Sync + 'static) {
        *self.shared.listener.lock() = Some(Box::new(listener));
    }

    /// Ends the connection: nothing is asked any more, and the server is about to end. Requests
    /// that follow fail.
    pub fn leave(&self) {
        self.shared.left.notify_one();
    }

    /// The size that the export has now, in bytes. Blocks, for at most 10 s.
    fn measure(&self) -> Result<u64, Failure> {
        let secure = self.options.uri.tls.as_ref().map(Secure::new).transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let reached = runtime.block_on(async { reach(&self.options, secure.as_ref()).await });
        runtime.shutdown_background();
        reached.map(|(_, _, export)| export.capacity)
    }
}

/// Connects, and agrees on the export. Returns the socket, too.
async fn reach(
    options: &RemoteOptions,
    secure: Option<&Secure>,
) -> Result<(AnyStream, OwnedFd, Export), Failure> {
    let attempt = async {
        let (stream, socket) = connect(&options.uri.transport).await?;
        let (stream, export) = negotiate(stream, &options.uri.export, secure).await?;
        Ok((stream, socket, export))
    };
    let reached = timeout(CONNECT_TIME_MAX, attempt).await;
    let reached = reached.unwrap_or_else(|_| Err(Failure::new(SILENT)))?;
    can_be_used(options, &reached.2)?;
    Ok(reached)
}

/// Whether what a server offers is enough.
fn can_be_used(options: &RemoteOptions, export: &Export) -> Result<(), Failure> {
    let is_written = !options.read_only && !export.has(transmission::READ_ONLY);
    if is_written && !export.has(transmission::SEND_FLUSH) {
        let message = "the server has no flush, so that nothing is durable";
        return Err(Failure::new(message).advise("use another one"));
    }
    Ok(())
}

/// The first connection: what an earlier daemon has left is examined and flushed.
async fn begin(
    options: &RemoteOptions,
    secure: Option<&Secure>,
    shared: &ThreadReport,
) -> Result<(AnyStream, Export), Failure> {
    let Some(record) = &shared.record else {
        return reach(options, secure).await.map(|(stream, _, export)| (stream, export));
    };
    let silent = |_| Failure::new(SILENT);
    let connected = timeout(CONNECT_TIME_MAX, connect(&options.uri.transport)).await;
    let (stream, socket) = connected.map_err(silent)??;
    let earlier = record.examine();
    let negotiated = {
        let negotiated = negotiate(stream, &options.uri.export, secure);
        tokio::pin!(negotiated);
        if let Ok(negotiated) = timeout(FORMER_TIME_MAX, &mut negotiated).await {
            negotiated
        } else {
            // The server may serve one client, and its client is the earlier daemon.
            record.let_go();
            timeout(CONNECT_TIME_MAX, negotiated).await.map_err(silent)?
        }
    };
    let (mut stream, export) = negotiated?;
    can_be_used(options, &export)?;
    record.agreed();
    record.connected(socket.as_fd());
    match earlier {
        Earlier::Nothing => {}
        Earlier::Lost(errno) => shared.lost_earlier(errno),
        Earlier::Unflushed => {
            let limit = options.timeout.max(CONNECT_TIME_MAX);
            let flushed = flush_earlier(&mut stream, limit).await;
            if flushed.map_err(Failure::new)? {
                record.note_unflushed(false);
            } else {
                shared.lose();
            }
        }
    }
    Ok((stream, export))
}

/// What the thread has.
struct Remote {
    options: RemoteOptions,
    secure: Option<Secure>,
    export: Export,
    shared: Arc<ThreadReport>,
}

impl Remote {
    /// The connection has ended, whoever else has its socket.
    fn disconnected(&self) {
        if let Some(record) = &self.shared.record {
            record.disconnected();
        }
    }

    /// Carries out requests until nobody can send more.
    async fn serve(
        &self,
        mut stream: AnyStream,
        state: &RefCell<JobList>,
        mut jobs: UnboundedReceiver<Job>,
    ) {
        loop {
            self.shared.connections.fetch_add(1, Ordering::Relaxed);
            let reason = tokio::select! {
                end = run(stream, state, &mut jobs) => match end {
                    End::Closed => return,
                    End::Failed(reason) => Some(reason),
                },
                () = self.shared.renewed.notified() => None,
                () = self.shared.left.notified() => return state.borrow_mut().close(),
            };
            self.disconnected();
            state.borrow().give_up(false);
            let server = self.options.uri.server();
            if let Some(reason) = reason {
                tracing::warn!(server, "the connection to an NBD server is lost: {reason}");
                self.shared.set_unreachable(Some(format!("{server}: {reason}")));
            }
            match self.reconnect(state, &mut jobs).await {
                Some(next) => stream = next,
                None => return state.borrow_mut().close(),
            }
            tracing::info!(server, "the NBD server answers again");
            self.shared.set_unreachable(None);
        }
    }

    /// Connects again. Requests wait meanwhile, until their time is over. `None` if nobody needs it
    /// any more.
    async fn reconnect(
        &self,
        state: &RefCell<JobList>,
        jobs: &mut UnboundedReceiver<Job>,
    ) -> Option<AnyStream> {
        let attempts = self.attempts(state);
        tokio::pin!(attempts);
        loop {
            let deadline = state.borrow().deadline();
            tokio::select! {
                stream = &mut attempts => return Some(stream),
                job = jobs.recv() => {
                    state.borrow_mut().admit(job?);
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    state.borrow_mut().expire();
                }
            }
        }
    }

    async fn attempts(&self, state: &RefCell<JobList>) -> AnyStream {
        let (mut pause, server) = (PAUSE, self.options.uri.server());
        loop {
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
            match self.attempt(state).await {
                Ok(stream) => return stream,
                Err(reason) => {
                    self.shared.set_unreachable(Some(format!("{server}: {reason}")));
                }
            }
        }
    }

    async fn attempt(&self, state: &RefCell<JobList>) -> Result<AnyStream, String> {
        // The certificates may have been renewed; if they cannot be read now, the known ones are
        // used.
        let renewed = self.options.uri.tls.as_ref().and_then(|files| Secure::new(files).ok());
        let secure = renewed.as_ref().or(self.secure.as_ref());
        let reached = reach(&self.options, secure).await;
        let (mut stream, socket, export) = reached.map_err(|failure| format!("{failure:#}"))?;
        if let Some(difference) = self.difference(&export) {
            return Err(format!("the export is not what it was: {difference}"));
        }
        if let Some(record) = &self.shared.record {
            record.agreed();
        }
        let repeated = repeat(&mut stream, state).await;
        if repeated.is_err() {
            state.borrow().give_up(true);
        }
        repeated?;
        if let Some(record) = &self.shared.record {
            // What is not flushed is at this server now.
            record.connected(socket.as_fd());
        }
        Ok(stream)
    }

    /// Why an export cannot stand in for the one that was opened.
    fn difference(&self, export: &Export) -> Option<String> {
        let (known, capacity) = (self.export, self.shared.capacity());
        if export.capacity < capacity {
            return Some(format!("it has {} bytes, and had {capacity}", export.capacity));
        }
        if export.has(transmission::READ_ONLY) != known.has(transmission::READ_ONLY) {
            let now = if export.has(transmission::READ_ONLY) { "read-only" } else { "writable" };
            return Some(format!("it is {now} now"));
        }
        let offers_less = export.flags & known.flags != known.flags
            || export.length_min > known.length_min
            || export.length_max < known.length_max;
        offers_less.then(|| "it offers less".to_owned())
    }
}

impl Backend for RemoteDisk {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn capacity(&self) -> u64 {
        self.shared.capacity()
    }

    fn geometry(&self) -> Geometry {
        let Export { length_min, length_best, .. } = self.export;
        let block_size = length_min.max(512);
        Geometry {
            block_size,
            physical_block_size: block_size.max(4096),
            optimal_size: length_best,
            alignment: length_min,
        }
    }

    fn capabilities(&self) -> Capabilities {
        let has = |flag| self.export.has(flag);
        let all = Capabilities {
            force_unit_access: has(transmission::SEND_FUA),
            discard: has(transmission::SEND_TRIM),
            write_zeroes: has(transmission::SEND_WRITE_ZEROES),
            rotational: has(transmission::ROTATIONAL),
            extents: false,
            ..Capabilities::ALL
        };
        if has(transmission::READ_ONLY) || self.options.read_only { all.read_only() } else { all }
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let export = (self.export, Arc::clone(&self.shared));
        let (jobs, timeout) = (self.jobs.clone(), self.options.timeout);
        Ok(Box::new(RemoteQueue::open(export, jobs, timeout, context.reactor())?))
    }

    /// The server determines the size: only that of the export is accepted. The server learns
    /// nothing; a new connection begins, because servers keep to the size that they have announced.
    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let found = self.measure().map_err(|_| ErrorKind::Io)?;
        if found != capacity {
            return Err(ErrorKind::Unsupported);
        }
        self.shared.capacity.store(capacity, Ordering::Relaxed);
        self.shared.renewed.notify_one();
        Ok(())
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let lost = self.shared.loss();
        let reason = self.shared.unreachable.lock();
        let unreachable = reason.clone().map(|text| BackendProblem::Unreachable { text });
        lost.into_iter().chain(unreachable).collect()
    }

    fn figures(&self) -> Vec<Figure> {
        let meaning = "The connections to the server so far.";
        let connections = self.shared.connections.load(Ordering::Relaxed);
        vec![Figure::counter("connections_total", meaning, connections)]
    }

    fn losses(&self) -> u64 {
        self.shared.losses()
    }

    fn may_act_late(&self) -> bool {
        self.shared.may_act_late()
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        self.shared.recover()
    }
}

//! Several processes that run queries together.
//!
//! Each process is connected to each other process, over TLS with certificates on both sides. The
//! engine uses timely dataflow's cluster mode, so each process holds a part of the operators'
//! state. A thread copies the bytes of each connection between timely's end and the socket, so that
//! the loss of a process is an error instead of a panic.
//!
//! The number of processes is fixed: the loss of one process ends all.

mod hello;
mod pump;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_cql::plan::Plan;
use timely::communication::allocator::GenericBuilder;
use timely::communication::allocator::process::Process;
use timely::communication::allocator::zero_copy::bytes_slab::BytesRefill;
use timely::communication::allocator::zero_copy::initialize::{
    CommsGuard, initialize_networking_from_sockets,
};

use fathom_tls::Tls;

use crate::link::{Channel, host_of, prepare, reach};
use hello::Hello;
use pump::Fate;

/// The time limit of connecting and of the handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// The pause between attempts to reach other processes.
const PAUSE: Duration = Duration::from_millis(10);
/// The time for which messages of a lost process may still be in flight.
const LAST_MESSAGES_TIME: Duration = Duration::from_secs(1);
/// The most processes.
const PROCESSES_MAX: usize = 64;
/// The number of buffers of a connection that are reused.
const BUFFERS_KEPT: usize = 4;

/// The options of a process of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// The addresses of all processes, `host:port`, in the same order at each process.
    pub addresses: Vec<String>,
    /// The number of this process.
    pub index: usize,
    /// The encryption of incoming and of outgoing connections; `None` for plain text. A process's
    /// certificate must be for the host of its address.
    pub tls: Option<(Tls, Tls)>,
    /// How long to wait for the other processes.
    pub patience: Duration,
    /// Whether each process reports its own part of the results, instead of process 0 all of them.
    /// A row may then be inserted at one process and deleted at another in the same instant.
    pub own_results: bool,
}

/// The connected processes of a cluster, for an [`Engine`](crate::Engine).
pub struct Cluster {
    pub(crate) index: usize,
    pub(crate) own_results: bool,
    addresses: Vec<String>,
    builder: Option<GenericBuilder>,
    fates: Vec<Arc<Fate>>,
    guard: Option<CommsGuard>,
    pumps: Vec<JoinHandle<()>>,
}

impl Cluster {
    /// Connects to the other processes, which must have the same plans. `keep_waiting` is called
    /// often with a text for the user, and returns whether to continue.
    ///
    /// # Errors
    /// If the others are not reached in time, are other programs, or have other queries.
    pub fn join(
        options: &ClusterOptions,
        plans: &[Plan],
        keep_waiting: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<Self> {
        let ClusterOptions { addresses, index, .. } = options;
        let processes = addresses.len();
        if processes == 0 || processes > PROCESSES_MAX || *index >= processes {
            let message = format!("there is no process {index} of {processes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let own_results = options.own_results;
        let hello = Hello::new(*index, processes, own_results, plans);
        let connections = Rendezvous { options, hello, end: Instant::now() + options.patience }
            .connections(keep_waiting)?;
        let (mut fates, mut pumps, mut sockets) = (Vec::new(), Vec::new(), Vec::new());
        for (process, connection) in connections.into_iter().enumerate() {
            let fate = Arc::new(Fate::default());
            fates.push(Arc::clone(&fate));
            let Some(channel) = connection else {
                sockets.push(None);
                continue;
            };
            let (theirs, ours) = UnixStream::pair()?;
            let thread = std::thread::Builder::new().name(format!("process {process}"));
            pumps.push(thread.spawn(move || pump::run(channel, ours, &fate))?);
            sockets.push(Some(theirs));
        }
        let refill = BytesRefill {
            logic: Arc::new(|bytes| Box::new(vec![0; bytes])),
            limit: Some(BUFFERS_KEPT),
        };
        let no_log = Arc::new(|_| None);
        let (builders, guard) =
            initialize_networking_from_sockets::<_, Process>(sockets, *index, 1, refill, no_log)?;
        let builder = builders.into_iter().next().map(GenericBuilder::ZeroCopy);
        let addresses = addresses.clone();
        let guard = Some(guard);
        Ok(Self { index: *index, own_results, addresses, builder, fates, guard, pumps })
    }

    /// The number of processes.
    pub(crate) fn processes(&self) -> usize {
        self.addresses.len()
    }

    /// The builder of the worker; `None` after the first call.
    pub(crate) fn take_builder(&mut self) -> Option<GenericBuilder> {
        self.builder.take()
    }

    /// Returns a function that marks a process as lost because it sends invalid data.
    pub(crate) fn wrong(&self) -> impl Fn(usize) + 'static {
        let fates = self.fates.clone();
        move |process| {
            if let Some(fate) = fates.get(process) {
                fate.lose("it sends invalid data");
            }
        }
    }

    /// A lost process, if there is one, after its last messages have had time to arrive.
    pub(crate) fn loss(&self) -> Option<Loss> {
        let loss = |(address, fate): (&String, &Arc<Fate>)| {
            let reason = fate.after(LAST_MESSAGES_TIME)?.clone();
            Some(Loss { address: address.clone(), reason })
        };
        self.addresses.iter().zip(&self.fates).find_map(loss)
    }
}

/// The loss of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The address of the process.
    pub address: String,
    /// The reason; `None` if the process has ended as intended.
    pub reason: Option<String>,
}

impl fmt::Display for Loss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Some(reason) => write!(formatter, "the process at {} is lost: {reason}", self.address),
            None => write!(formatter, "the process at {} has ended", self.address),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The worker has ended, so all of its messages are in the buffers; they are sent, and the
        // end is announced.
        drop(self.builder.take());
        drop(self.guard.take());
        for pump in self.pumps.drain(..) {
            // The panic hook has already logged a panic of the thread.
            let _ = pump.join();
        }
    }
}

/// The processes while they connect to each other.
struct Rendezvous<'o> {
    options: &'o ClusterOptions,
    hello: Hello,
    end: Instant,
}

impl Rendezvous<'_> {
    /// Connects to the processes before this one, and accepts those after it. Returns the
    /// connections to all processes.
    fn connections(
        self,
        keep_waiting: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<Vec<Option<Channel>>> {
        let ClusterOptions { addresses, index, .. } = self.options;
        let own: Vec<SocketAddr> = resolved(&addresses[*index])?;
        let listener = TcpListener::bind(&own[..]).map_err(|error| {
            io::Error::other(format!("cannot listen at {}: {error}", addresses[*index]))
        })?;
        listener.set_nonblocking(true)?;
        let mut connections: Vec<Option<Channel>> = addresses.iter().map(|_| None).collect();
        let mut problem = None;
        loop {
            let missing = |process: &usize| process != index && connections[*process].is_none();
            let Some(next) = (0..addresses.len()).find(missing) else { return Ok(connections) };
            let address = &addresses[next];
            let waiting = match &problem {
                None => format!("waiting for the process at {address}"),
                Some(problem) => format!("waiting for the process at {address}: {problem}"),
            };
            if !keep_waiting(&waiting) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, waiting));
            }
            if Instant::now() >= self.end {
                return Err(io::Error::new(io::ErrorKind::TimedOut, waiting));
            }
            let connected = if next < *index {
                self.dial(address).map(|(channel, process)| (channel, process, true))
            } else {
                match listener.accept() {
                    Ok((stream, _)) => {
                        self.answer(stream).map(|(channel, process)| (channel, process, false))
                    }
                    Err(error) => Err(error),
                }
            };
            match connected {
                // The process that answers must have the number of its address.
                Ok((_, process, true)) if process != next => {
                    let message = format!("the process at {address} is number {process}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
                Ok((_, process, false)) if process <= *index || connections[process].is_some() => {
                    problem = Some(format!("another process {process} has connected"));
                }
                Ok((channel, process, _)) => {
                    connections[process] = Some(channel);
                    problem = None;
                }
                // Invalid processes do not become valid: no more attempts.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error),
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        problem = Some(error.to_string());
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Connects to a process, and receives its number.
    fn dial(&self, address: &str) -> io::Result<(Channel, usize)> {
        let stream = reach(address, CONNECT_TIME_MAX)?;
        let end = Instant::now() + CONNECT_TIME_MAX;
        let mut channel = match &self.options.tls {
            None => Channel::Plain(stream),
            Some((_, tls)) => {
                Channel::Secure(Box::new(tls.connect(stream, host_of(address), end)?))
            }
        };
        self.hello.send(&mut channel, end)?;
        let process = self.hello.receive(&mut channel, end)?;
        Ok((channel, process))
    }

    /// Accepts a process's connection. Its certificate must be for its host. This process sends its
    /// hello only after this check.
    fn answer(&self, stream: TcpStream) -> io::Result<(Channel, usize)> {
        let stream = prepare(stream)?;
        let end = Instant::now() + CONNECT_TIME_MAX;
        let (mut channel, names) = match &self.options.tls {
            None => (Channel::Plain(stream), None),
            Some((tls, _)) => {
                let (stream, names) = tls.accept(stream, end)?;
                (Channel::Secure(Box::new(stream)), Some(names))
            }
        };
        let process = self.hello.receive(&mut channel, end).inspect_err(|error| {
            // A process with a different hello receives this process's hello, so that it can report
            // the difference.
            if error.kind() == io::ErrorKind::InvalidData {
                let _ = self.hello.send(&mut channel, end);
            }
        })?;
        let address = &self.options.addresses[process];
        let is_for = |name: &String| name.eq_ignore_ascii_case(host_of(address));
        if names.is_some_and(|names| !names.iter().any(is_for)) {
            let message = format!("the certificate of process {process} is not for {address}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        self.hello.send(&mut channel, end)?;
        Ok((channel, process))
    }
}

fn resolved(address: &str) -> io::Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{address}: {error}"))
    })?;
    Ok(found.collect())
}

//! Several processes that answer queries as one.
//!
//! The processes are connected each with each, over TLS with certificates on both sides, and
//! timely dataflow's own cluster mode does the rest: each holds its part of what operators hold.
//! A connection's bytes are pumped between timely's end and the socket, so that the loss of
//! a process is an error that is told, and no panic.
//!
//! There are as many processes as at the beginning, until the end: one that is lost ends all.

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

/// How long a connection may take to be made.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a process rests before it looks for others again.
const PAUSE: Duration = Duration::from_millis(10);
/// How long what a process has said last may be under way.
const LAST_WORDS_TIME: Duration = Duration::from_secs(1);
/// The most processes.
const PROCESSES_MAX: usize = 64;
/// How many buffers of a connection are kept for the next time.
const BUFFERS_KEPT: usize = 4;

/// How a process takes part.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Where each of the processes listens for the others, `host:port`, in the same order at each.
    pub addresses: Vec<String>,
    /// Which of them this is.
    pub index: usize,
    /// How connections are encrypted, to those that connect to this process and to those that it
    /// connects to; `None` for plain text. The certificate of a process is for its host.
    pub tls: Option<(Tls, Tls)>,
    /// How long the others are waited for.
    pub patience: Duration,
    /// Whether each process tells what it has of the results, instead of the first all of them. In
    /// an instant the same row may then come in one process and go in another.
    pub own_results: bool,
}

/// The processes of a cluster, connected. An [`Engine`](crate::Engine) is made of it.
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
    /// Connects to the other processes, which are to answer the same plans. `waits` is called
    /// often, with what is waited for, and says whether to go on.
    ///
    /// # Errors
    /// When the others cannot be reached in time, are somebody else, or answer other queries.
    pub fn join(
        options: &ClusterOptions,
        plans: &[Plan],
        waits: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<Self> {
        let ClusterOptions { addresses, index, .. } = options;
        let processes = addresses.len();
        if processes == 0 || processes > PROCESSES_MAX || *index >= processes {
            let what = format!("there is no process {index} of {processes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let own_results = options.own_results;
        let hello = Hello::new(*index, processes, own_results, plans);
        let connections = Meeting { options, hello, end: Instant::now() + options.patience }
            .connections(waits)?;
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

    /// How many processes there are.
    pub(crate) fn processes(&self) -> usize {
        self.addresses.len()
    }

    /// What the worker is built of, once.
    pub(crate) fn take_builder(&mut self) -> Option<GenericBuilder> {
        self.builder.take()
    }

    /// What ends a process that sends what makes no sense.
    pub(crate) fn wrong(&self) -> impl Fn(usize) + 'static {
        let fates = self.fates.clone();
        move |process| {
            if let Some(fate) = fates.get(process) {
                fate.lose("it sends what makes no sense");
            }
        }
    }

    /// The process that is not there any more, if one is not, when nothing that it has said is under
    /// way any more.
    pub(crate) fn loss(&self) -> Option<Loss> {
        let loss = |(address, fate): (&String, &Arc<Fate>)| {
            let reason = fate.after(LAST_WORDS_TIME)?.clone();
            Some(Loss { address: address.clone(), reason })
        };
        self.addresses.iter().zip(&self.fates).find_map(loss)
    }
}

/// A process that is not there any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Where it listened.
    pub address: String,
    /// Why it is lost; `None` where it has ended in good order.
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
        // The worker is gone: what it has sent is on its way, and the others learn of the end.
        drop(self.builder.take());
        drop(self.guard.take());
        for pump in self.pumps.drain(..) {
            // A panic was told by the hook.
            let _ = pump.join();
        }
    }
}

/// Processes that look for each other.
struct Meeting<'o> {
    options: &'o ClusterOptions,
    hello: Hello,
    end: Instant,
}

impl Meeting<'_> {
    /// The connections to all processes but this one. Each connects to those before it.
    fn connections(self, waits: &mut dyn FnMut(&str) -> bool) -> io::Result<Vec<Option<Channel>>> {
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
            if !waits(&waiting) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, waiting));
            }
            if Instant::now() >= self.end {
                return Err(io::Error::new(io::ErrorKind::TimedOut, waiting));
            }
            let met = if next < *index {
                self.dial(address).map(|(channel, process)| (channel, process, true))
            } else {
                match listener.accept() {
                    Ok((stream, _)) => {
                        self.answer(stream).map(|(channel, process)| (channel, process, false))
                    }
                    Err(error) => Err(error),
                }
            };
            match met {
                // Whoever is connected to is who is asked for.
                Ok((_, process, true)) if process != next => {
                    let what = format!("the process at {address} is number {process}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                Ok((_, process, false)) if process <= *index || connections[process].is_some() => {
                    problem = Some(format!("another process {process} has come"));
                }
                Ok((channel, process, _)) => {
                    connections[process] = Some(channel);
                    problem = None;
                }
                // They will not get better.
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

    /// Connects to a process, and hears which it is.
    fn dial(&self, address: &str) -> io::Result<(Channel, usize)> {
        let stream = reach(address, CONNECT_TIME_MAX)?;
        let end = Instant::now() + CONNECT_TIME_MAX;
        let mut channel = match &self.options.tls {
            None => Channel::Plain(stream),
            Some((_, tls)) => {
                Channel::Secure(Box::new(tls.connect(stream, host_of(address), end)?))
            }
        };
        self.hello.say(&mut channel, end)?;
        let process = self.hello.hear(&mut channel, end)?;
        Ok((channel, process))
    }

    /// Takes a connection of a process, whose certificate is for its host. It is told who this is
    /// when it is known.
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
        let process = self.hello.hear(&mut channel, end).inspect_err(|error| {
            // One that means to belong here learns why it does not.
            if error.kind() == io::ErrorKind::InvalidData {
                let _ = self.hello.say(&mut channel, end);
            }
        })?;
        let address = &self.options.addresses[process];
        let is_for = |name: &String| name.eq_ignore_ascii_case(host_of(address));
        if names.is_some_and(|names| !names.iter().any(is_for)) {
            let what = format!("the certificate of process {process} is not for {address}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        self.hello.say(&mut channel, end)?;
        Ok((channel, process))
    }
}

fn resolved(address: &str) -> io::Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{address}: {error}"))
    })?;
    Ok(found.collect())
}

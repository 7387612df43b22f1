//! A small cluster of this host, for trials and tests. Its nodes listen on the loopback address
//! only, unless a test puts them elsewhere.

use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_failure::Failure;

/// The time limit for a cluster to become ready.
const READY_TIME_MAX: Duration = Duration::from_secs(60);
/// The pause between two looks.
const INTERVAL: Duration = Duration::from_millis(100);
/// The lowest port of a node.
const PORT_MIN: u16 = 10_000;
/// The number of ports that are tried for a node.
const ATTEMPTS_MAX: u32 = 10;
/// The file with the ports of a folder's cluster, so that it can be started again.
const PORTS: &str = "ports";

/// Where nodes run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlace {
    /// The address at which they listen.
    pub address: String,
    /// The command that runs `valkey-server` there, for example `ip netns exec NAME`.
    pub prefix: Vec<String>,
}

/// How a cluster is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalOptions {
    /// The folder for the nodes' files. If a cluster was made there, it is started again.
    pub folder: PathBuf,
    /// The primaries; at least three.
    pub primaries: u16,
    /// The replicas of each primary.
    pub copies: u16,
    /// More options of `valkey-server`.
    pub extra: Vec<String>,
    /// Options with which `valkey-cli` reaches the nodes.
    pub cli: Vec<String>,
    /// Where the nodes run, in turn; the loopback address by default.
    pub places: Vec<NodePlace>,
}

impl LocalOptions {
    /// Three primaries with one replica each.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            primaries: 3,
            copies: 1,
            extra: Vec::new(),
            cli: Vec::new(),
            places: vec![NodePlace { address: "127.0.0.1".into(), prefix: Vec::new() }],
        }
    }
}

/// A running cluster. Its nodes end when it is dropped.
#[derive(Debug)]
pub struct LocalCluster {
    options: LocalOptions,
    nodes: Vec<(u16, Option<Child>)>,
}

impl LocalCluster {
    /// Starts a cluster, and waits until it is ready.
    ///
    /// # Errors
    /// If `valkey-server` or `valkey-cli` is missing or fails.
    pub fn start(options: &LocalOptions) -> io::Result<Self> {
        fs::create_dir_all(&options.folder)?;
        let count = usize::from(options.primaries) * (1 + usize::from(options.copies));
        let known = fs::read_to_string(options.folder.join(PORTS)).unwrap_or_default();
        let known: Vec<u16> =
            known.split_whitespace().filter_map(|port| port.parse().ok()).collect();
        let is_new = known.is_empty();
        let mut options = options.clone();
        if !is_new {
            let replicas = (known.len() / usize::from(options.primaries)).saturating_sub(1);
            options.copies = u16::try_from(replicas).unwrap_or(options.copies);
        }
        let ports = if is_new { vec![None; count] } else { known.into_iter().map(Some).collect() };
        let mut cluster = Self { options, nodes: Vec::new() };
        for port in ports {
            cluster.start_node(port)?;
        }
        if is_new {
            cluster.make()?;
            let ports: Vec<String> =
                cluster.nodes.iter().map(|(port, _)| port.to_string()).collect();
            fs::write(cluster.options.folder.join(PORTS), ports.join(" "))?;
        }
        cluster.wait_until_ready()?;
        Ok(cluster)
    }

    /// The replicas of each primary: those with which the cluster was made.
    pub fn copies(&self) -> u16 {
        self.options.copies
    }

    /// Starts a node that is not running.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&mut self, index: usize) -> io::Result<()> {
        let port = self.nodes[index].0;
        let folder = self.folder(index);
        fs::create_dir_all(&folder)?;
        let log = File::create(folder.join("valkey.log"))?;
        let NodePlace { address, prefix } = self.place(index);
        let mut words = prefix.iter().map(String::as_str).chain(["valkey-server"]);
        let mut command = Command::new(words.next().unwrap_or("valkey-server"));
        command.args(words).current_dir(&folder).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let is_encrypted = self.options.extra.iter().any(|option| option == "--tls-port");
        let plain = if is_encrypted { "0".to_owned() } else { port.to_string() };
        command.args(["--port", &plain, "--bind", address, "--protected-mode", "no"]);
        command.args(["--cluster-port", &bus_port(port).to_string(), "--cluster-enabled", "yes"]);
        command.args(["--cluster-node-timeout", "2000", "--cluster-replica-validity-factor", "0"]);
        command.args(["--cluster-require-full-coverage", "no"]);
        command.args(["--appendonly", "yes", "--appendfsync", "always", "--save", ""]);
        command.args(["--maxmemory-policy", "noeviction"]);
        command.args(
            self.options.extra.iter().map(|option| option.replace("{port}", &port.to_string())),
        );
        let child = command.spawn().map_err(|error| {
            let failure = Failure::new(format!("valkey-server cannot be started ({error})"));
            io::Error::from(failure.advise("install the package valkey-server"))
        })?;
        self.nodes[index].1 = Some(child);
        let end = Instant::now() + READY_TIME_MAX;
        // Another server at this port may answer instead.
        let own = format!("process_id:{}\r", self.process(index));
        while self.ask(index, &["INFO", "server"]).is_none_or(|answer| !answer.contains(&own)) {
            let ended =
                self.nodes[index].1.as_mut().and_then(|node| node.try_wait().ok().flatten());
            if ended.is_some() || Instant::now() > end {
                self.signal(index, "KILL");
                let text = fs::read_to_string(folder.join("valkey.log")).unwrap_or_default();
                let last = text.lines().next_back().unwrap_or("no output").to_owned();
                return Err(io::Error::other(format!("a node does not start: {last}")));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// Starts one more node, at a port or at any free one. A port that was free a moment ago may be
    /// in use when the node binds it, so that it has several attempts.
    fn start_node(&mut self, port: Option<u16>) -> io::Result<()> {
        let index = self.nodes.len();
        for attempt in 1.. {
            let chosen = port.map_or_else(free_port, Ok)?;
            self.nodes.push((chosen, None));
            match self.run(index) {
                Err(_) if port.is_none() && attempt < ATTEMPTS_MAX => self.nodes.truncate(index),
                done => return done,
            }
        }
        unreachable!("the last attempt returns");
    }

    fn make(&self) -> io::Result<()> {
        let (addresses, copies) = (self.addresses(), self.options.copies.to_string());
        let mut arguments = vec!["create"];
        arguments.extend(addresses.iter().map(String::as_str));
        arguments.extend(["--cluster-replicas", &copies, "--cluster-yes"]);
        let made = self.manage(&arguments);
        made.map_err(|error| io::Error::other(format!("the cluster cannot be made: {error}")))?;
        Ok(())
    }

    /// Waits until the nodes have all slots, and each primary its replicas.
    ///
    /// # Errors
    /// If this takes more than a minute.
    pub fn wait_until_ready(&self) -> io::Result<()> {
        let end = Instant::now() + READY_TIME_MAX;
        let copies = format!("connected_slaves:{}", self.options.copies);
        let is_ready = |index: usize| {
            if self.nodes[index].1.is_none() {
                return true;
            }
            let state = self.ask(index, &["CLUSTER", "INFO"]).unwrap_or_default();
            let role = self.ask(index, &["INFO", "replication"]).unwrap_or_default();
            let is_linked = if role.contains("role:master") {
                role.contains(&copies)
            } else {
                role.contains("master_link_status:up")
            };
            state.contains("cluster_state:ok") && is_linked
        };
        while !(0..self.nodes.len()).all(is_ready) {
            if Instant::now() > end {
                return Err(io::Error::other("the cluster does not become ready"));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    fn place(&self, index: usize) -> &NodePlace {
        &self.options.places[index % self.options.places.len()]
    }

    /// The addresses of all nodes.
    pub fn addresses(&self) -> Vec<String> {
        let address = |(index, (port, _)): (usize, &(u16, _))| {
            format!("{}:{port}", self.place(index).address)
        };
        self.nodes.iter().enumerate().map(address).collect()
    }

    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The folder of a node's files.
    pub fn folder(&self, index: usize) -> PathBuf {
        self.options.folder.join(format!("node-{index}"))
    }

    /// The answer of a node to a command; `None` if it has none within a few seconds.
    pub fn ask(&self, index: usize, command: &[&str]) -> Option<String> {
        let port = self.nodes[index].0.to_string();
        let mut cli = Command::new("timeout");
        let address = &self.place(index).address;
        cli.args(["3", "valkey-cli", "-h", address, "-p", &port]).args(&self.options.cli);
        let done = cli.args(command).stdin(Stdio::null()).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
    }

    /// The number of a node's process; 0 if it is not running.
    fn process(&self, index: usize) -> u32 {
        self.nodes[index].1.as_ref().map_or(0, Child::id)
    }

    /// Whether a node is a primary with slots.
    pub fn is_primary(&self, index: usize) -> bool {
        let own = self.ask(index, &["CLUSTER", "NODES"]).unwrap_or_default();
        let line = own.lines().find(|line| line.contains("myself")).unwrap_or_default();
        line.contains("master") && line.split_whitespace().count() > 8
    }

    /// Sends a signal to a node, for example `KILL`, `STOP` or `CONT`.
    pub fn signal(&mut self, index: usize, signal: &str) {
        let Some(child) = &mut self.nodes[index].1 else { return };
        let _ = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
        if signal == "KILL" {
            let _ = child.wait();
            self.nodes[index].1 = None;
        }
    }

    /// Starts another node, which the cluster does not know yet. Returns its index.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn add(&mut self) -> io::Result<usize> {
        self.start_node(None)?;
        Ok(self.nodes.len() - 1)
    }

    /// Runs `valkey-cli --cluster` with arguments.
    ///
    /// # Errors
    /// If it fails.
    pub fn manage(&self, arguments: &[&str]) -> io::Result<String> {
        let mut command = Command::new("valkey-cli");
        command.args(&self.options.cli).arg("--cluster").args(arguments).stdin(Stdio::null());
        let done = command.output()?;
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        if done.status.success() { Ok(text) } else { Err(io::Error::other(text)) }
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        for (_, node) in &mut self.nodes {
            if let Some(node) = node {
                let _ = node.kill();
                let _ = node.wait();
            }
        }
    }
}

/// The port on which nodes talk to each other.
fn bus_port(port: u16) -> u16 {
    port + 1
}

/// A port that is free, and followed by a free one. It lies below the ports that the kernel gives
/// to connections: one of those may be taken at any time.
fn free_port() -> io::Result<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let end = range.split_whitespace().next().and_then(|port| port.parse().ok()).unwrap_or(32768);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let ports = PORT_MIN..end.max(PORT_MIN + 2) - 1;
    let random = RandomState::new().hash_one(0) % u64::from(ports.end - ports.start);
    let first = ports.start + random as u16;
    let mut candidates = (first..ports.end).chain(ports.start..first);
    candidates
        .find(|port| is_free(*port) && is_free(bus_port(*port)))
        .ok_or_else(|| io::Error::other("no port is free on this host"))
}

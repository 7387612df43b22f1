//! The configuration: read from a TOML file or from flags, and checked before anything starts.
//!
//! - `source`: the text of a file, and the places in it.
//! - `table`: a TOML table read key by key, or by serde; what is wrong is noted by line.
//! - `disk`: the tables that describe disks and NBD listeners.
//! - `query`: the queries that the daemon keeps.
//! - `monitor`: the table of the centre.
//! - `layers`: all kinds of layers, and what the options of a disk's layers say.
//! - `check`: what a reader of one table cannot see: files, sockets, and what excludes what.

mod check;
mod disk;
pub(crate) mod layers;
mod monitor;
mod query;
mod source;
mod table;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_control::{Bytes, DiskDefinition, ListenerDefinition, SOCKET_DEFAULT};
use fathom_frontend::nbd::BUDGET_MIN;
use toml::de::DeTable;

pub use check::{Address, check_disk, parse_address};
pub(crate) use check::{image_identity, normal as normal_path};
pub(crate) use disk::check_model;
pub use fathom_options::{Place, Places, Problem, Problems};
pub use monitor::MonitorOptions;

pub use query::{
    ActionDefinition, ActionKind, CommandDefinition, MetricDefinition, MetricKind, On, Period,
    QUERIES_MAX, QUERY_LENGTH_MAX, QueryDefinition, RateLimit, WebhookDefinition,
};
pub(crate) use query::{Command, PreparedQuery, json};

use source::Source;
use table::{Reading, Table};

/// The longest configuration file that is read, in bytes.
const LENGTH_MAX: u64 = 16 << 20;

/// What the daemon is to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// The daemon itself.
    pub daemon: DaemonOptions,
    /// The disks, in the order of the file.
    pub disks: Vec<Placed<DiskDefinition>>,
    /// The NBD listeners, in the order of the file.
    pub listeners: Vec<Placed<ListenerDefinition>>,
    /// The queries that are kept, in the order of the file.
    pub queries: Vec<Placed<QueryDefinition>>,
    /// The centre that this host answers queries of, if any.
    pub monitor: Option<Placed<MonitorOptions>>,
}

/// A definition, and where it was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placed<T> {
    /// The definition.
    pub definition: T,
    /// Where it and its keys are.
    pub places: Places,
}

/// The daemon itself: `[daemon]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonOptions {
    /// The control socket.
    pub control: PathBuf,
    /// Where `/metrics` is had over TCP, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// How many control groups of a disk metrics tell apart.
    pub metrics_cgroups_max: usize,
    /// What is logged.
    pub log: LogLevel,
    /// The memory that the requests of all NBD clients may take, in bytes.
    pub nbd_memory: u64,
    /// The same of one NBD connection.
    pub nbd_client_memory: u64,
    /// How long a shutdown waits for requests in flight.
    pub shutdown_time_max: Duration,
    /// Where the control socket and the metrics address were written.
    pub places: Places,
}

/// The memory of all NBD clients' requests by default, in bytes.
const NBD_MEMORY: u64 = 256 << 20;
/// The same of one connection.
const NBD_CLIENT_MEMORY: u64 = 64 << 20;

impl Default for DaemonOptions {
    fn default() -> Self {
        Self {
            control: SOCKET_DEFAULT.into(),
            metrics: None,
            metrics_cgroups_max: 100,
            log: LogLevel::Info,
            nbd_memory: NBD_MEMORY,
            nbd_client_memory: NBD_CLIENT_MEMORY,
            shutdown_time_max: Duration::from_secs(15),
            places: Places::default(),
        }
    }
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    /// What does not work.
    Error,
    /// And what was refused or is degraded.
    Warning,
    /// And what happens in the course of things.
    #[default]
    Info,
    /// And what helps developers.
    Debug,
}

impl LogLevel {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// A configuration file, and what flags say instead of it.
#[derive(Clone, Debug, Default)]
pub struct ConfigurationFile {
    /// The file.
    pub path: PathBuf,
    /// The control socket.
    pub control: Option<PathBuf>,
    /// The address of `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// What is logged.
    pub log: Option<LogLevel>,
}

impl ConfigurationFile {
    /// Reads and checks it.
    ///
    /// # Errors
    /// Everything that is wrong.
    pub fn load(&self) -> Result<Configuration, Problems> {
        let (mut configuration, mut problems) = read_and_parse(&self.path)?;
        let daemon = &mut configuration.daemon;
        if let Some(control) = &self.control {
            daemon.control.clone_from(control);
            daemon.places.note("control", Place::Flag("--control or $FATHOM_CONTROL"));
        }
        daemon.metrics = self.metrics.or(daemon.metrics);
        daemon.log = self.log.unwrap_or(daemon.log);
        // All at once, so that nobody mends one mistake to be shown the next.
        let tables = configuration.tables();
        let loaded = query::load_files(&mut configuration.queries);
        problems.extend_with(loaded.err().unwrap_or_default(), &tables);
        problems.extend_with(configuration.check().err().unwrap_or_default(), &tables);
        problems.none_or()?;
        Ok(configuration)
    }
}

impl Configuration {
    /// Where its tables begin.
    fn tables(&self) -> Vec<Place> {
        let mut tables = vec![self.daemon.places.whole()];
        tables.extend(self.disks.iter().map(|placed| placed.places.whole()));
        tables.extend(self.listeners.iter().map(|placed| placed.places.whole()));
        tables.extend(self.queries.iter().map(|placed| placed.places.whole()));
        tables.extend(self.monitor.iter().map(|placed| placed.places.whole()));
        tables
    }
}

fn read_and_parse(path: &Path) -> Result<(Configuration, Problems), Problems> {
    let text = read(path).map_err(|error| {
        let (message, remedy) = match error.kind() {
            std::io::ErrorKind::NotFound => (
                format!("{}: no such file", path.display()),
                "name the configuration with --config; `fathom serve --help` shows how to do \
                 without one",
            ),
            std::io::ErrorKind::InvalidData => {
                (format!("{}: not a text in UTF-8", path.display()), "")
            }
            _ => (format!("{}: {error}", path.display()), ""),
        };
        Problems(vec![Problem::new(Place::Request, message, remedy)])
    })?;
    parse_all(&text, path)
}

fn read(path: &Path) -> std::io::Result<String> {
    let length = std::fs::metadata(path)?.len();
    if length > LENGTH_MAX {
        return Err(std::io::Error::other("this is too large to be a configuration"));
    }
    std::fs::read_to_string(path)
}

/// Reads the text of a configuration, without a look at anything beyond it. `path` is for messages
/// and for relative paths, which are taken from its folder.
///
/// # Errors
/// Everything that is wrong with it.
pub fn parse(text: &str, path: &Path) -> Result<Configuration, Problems> {
    let (configuration, problems) = parse_all(text, path)?;
    problems.none_or()?;
    Ok(configuration)
}

/// The same; where single keys are wrong, with what is right besides.
fn parse_all(text: &str, path: &Path) -> Result<(Configuration, Problems), Problems> {
    let source = Source::new(text, path);
    let document = DeTable::parse(text).map_err(|error| {
        let place = source.place(error.span().map_or(0, |span| span.start));
        let message = error.message().replace('\n', ", ");
        let remedy = "a configuration is TOML: https://toml.io shows how it is written";
        Problems(vec![Problem::new(place, message, remedy)])
    })?;
    let reading = Reading { source, problems: RefCell::default() };
    let configuration = document_of(&reading, document.get_ref(), document.span());
    let mut problems = reading.problems.into_inner();
    problems.sort_by_key(|problem| problem.place.position());
    Ok((configuration, Problems(problems)))
}

fn document_of(
    reading: &Reading<'_>,
    document: &DeTable<'_>,
    span: std::ops::Range<usize>,
) -> Configuration {
    let mut root = Table::new(reading, "the configuration", "", document, &span);
    let mut configuration = Configuration::default();
    if let Some(table) = root.table("daemon", "[daemon]") {
        configuration.daemon = daemon(table);
    }
    for table in root.tables("disk", "[[disk]]") {
        let (definition, places) = disk::disk(table.without_prefix());
        configuration.disks.push(Placed { definition, places });
    }
    for table in root.tables("nbd", "[[nbd]]") {
        let (definition, places) = disk::listener(table.without_prefix());
        configuration.listeners.push(Placed { definition, places });
    }
    for table in root.tables("query", "[[query]]") {
        let (definition, places) = query::query(table.without_prefix());
        configuration.queries.push(Placed { definition, places });
    }
    if let Some(table) = root.table("monitor", "[monitor]") {
        let (definition, places) = monitor::monitor(table);
        configuration.monitor = Some(Placed { definition, places });
    }
    root.finish();
    configuration
}

fn daemon(table: Table<'_>) -> DaemonOptions {
    let mut table = table.without_prefix();
    let mut options = DaemonOptions::default();
    if let Some(control) = table.path("control") {
        options.control = control;
    }
    if let Some(text) = table.string("metrics") {
        match parse_metrics(&text) {
            Some(address) => options.metrics = Some(address),
            None => table.problem(
                table.place_of("metrics"),
                format!("{text:?} is no address for metrics"),
                "write it like `metrics = \"127.0.0.1:9560\"`, or only the port for this host",
            ),
        }
    }
    if let Some(count) = table.integer("metrics_cgroups_max", 0..10_001) {
        options.metrics_cgroups_max = count as usize;
    }
    let levels = [
        ("error", LogLevel::Error),
        ("warning", LogLevel::Warning),
        ("info", LogLevel::Info),
        ("debug", LogLevel::Debug),
    ];
    options.log = table.word("log", &levels).unwrap_or_default();
    if let Some(size) = table.bytes("nbd_memory") {
        options.nbd_memory = size;
        if size < BUDGET_MIN {
            table.problem(
                table.place_of("nbd_memory"),
                format!("{} are too little for the longest requests of NBD", Bytes(size)),
                &format!("choose {} or more", Bytes(BUDGET_MIN)),
            );
        }
    }
    if let Some(size) = table.bytes("nbd_client_memory") {
        options.nbd_client_memory = size;
    }
    if let Some(time) = table.nanoseconds("shutdown_time_max") {
        options.shutdown_time_max = Duration::from_nanos(time);
    }
    options.places = table.finish();
    options
}

/// An address for metrics: `127.0.0.1:9560`, `[::1]:9560`, or a port of the loopback.
pub fn parse_metrics(text: &str) -> Option<SocketAddr> {
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return Some(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    text.replacen("localhost:", "127.0.0.1:", 1).parse().ok()
}

#[cfg(test)]
mod tests;

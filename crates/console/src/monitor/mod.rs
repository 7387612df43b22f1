//! `fathom monitor`: standing queries over the events of many hosts.
mod status;

use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clap::{Args, value_parser};
use fathom_control::Nanoseconds;
use fathom_cql::Value;
use fathom_monitor::{
    HELD_MAX,
    cluster::ClusterOptions,
    link::{Centre, CentreOptions},
    replay::Script,
    span_text,
};
use fathom_tls::{Certificates, Tls};

use crate::{
    failure::{CommandResult, Failure, reason},
    query::{
        parameter,
        running::{Printing, finish, prepare, warn},
        script,
    },
};
use status::StatusPrinter;

/// Options of `fathom monitor`.
#[derive(Debug, Args)]
#[command(after_help = "\
The daemons of the hosts connect to this address, which [monitor] in their configuration names. Each
has a certificate for its name, signed by the authority, and receives the part of the queries that
can run at a host.

The rows of a stream are printed as they arrive. Of a relation each change is printed, with its time
in nanoseconds since 1970 and + or -. With --status a table of the hosts goes to standard error.

With --cluster the centre is several processes, on one machine or on several. Hosts may connect to
any of them. All have the same queries; the first prints the results. When one process ends, all
end.

Examples:
  fathom monitor --listen 0.0.0.0:10810 --certificate centre.pem --key centre.key \\
    --authority ca.pem 'select VMName, count(*) from IOstream [range 1 minute] group by VMName'
  fathom monitor --listen 0.0.0.0:10810 --certificate centre.pem --key centre.key \\
    --authority ca.pem --file slow.cql --param limit=20000 --json --status 10s
  fathom monitor --listen 0.0.0.0:10810 --cluster one:10820,two:10820 --process 1 \\
    --certificate two.pem --key two.key --authority ca.pem --file slow.cql
  fathom monitor --listen 127.0.0.1:10810 --plain 'select * from IOstream where Type = \"E\"'")]
pub struct MonitorOptions {
    /// The queries
    #[arg(value_name = "CQL", required_unless_present = "file", conflicts_with = "file")]
    text: Option<String>,
    /// Read the queries from this file
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The address to which hosts connect
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// The centre's certificate, followed by its chain
    #[arg(long, value_name = "FILE", required_unless_present = "plain", requires = "key")]
    certificate: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE", requires = "authority")]
    key: Option<PathBuf>,
    /// The authority that has signed the hosts' certificates
    #[arg(long, value_name = "FILE", requires = "certificate")]
    authority: Option<PathBuf>,
    /// Use plain text: only for trusted networks
    #[arg(long, conflicts_with = "certificate")]
    plain: bool,
    /// Wait at most this long for slow hosts; their later data is dropped
    #[arg(long, value_name = "TIME", default_value = "2s")]
    patience: Nanoseconds,
    /// End with an error when more rows, groups and values are held
    #[arg(
        long,
        value_name = "N",
        default_value_t = HELD_MAX,
        value_parser = value_parser!(u64).range(1..)
    )]
    limit_held: u64,
    /// The addresses at which the processes of the centre listen for each other
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',', requires = "process")]
    cluster: Vec<String>,
    /// The number of this process, from 0
    #[arg(long, value_name = "NUMBER", requires = "cluster")]
    process: Option<usize>,
    /// Print this process's part of the results; by default the first process prints all results
    #[arg(long, requires = "cluster")]
    own_results: bool,
    /// Show the hosts on standard error at this interval; with --json as one object each time
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "5s")]
    status: Option<Nanoseconds>,
    /// End after this time, with the results of all events up to then
    #[arg(long = "for", value_name = "TIME")]
    time: Option<Nanoseconds>,
    /// Interpret the queries as STREAM did: a second of a window is a microsecond
    #[arg(long)]
    stream_compat: bool,
    /// Set $NAME in the queries: a number, true, false, null, or a text
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, Value)>,
    #[command(flatten)]
    printing: Printing,
}

impl MonitorOptions {
    fn tls_files(&self) -> Option<Certificates> {
        let (certificate, key) = (self.certificate.clone()?, self.key.clone()?);
        Some(Certificates { certificate, key, authority: Some(self.authority.clone()?) })
    }

    /// TLS for incoming connections, and for connections to other processes.
    fn tls(&self) -> CommandResult<Option<(Tls, Tls)>> {
        let Some(files) = self.tls_files() else { return Ok(None) };
        let both =
            Tls::mutual_server(&files).and_then(|centre| Ok((centre, Tls::mutual_client(&files)?)));
        both.map(Some).map_err(|error| Failure::new(reason(&error)))
    }

    fn cluster(&self, tls: Option<(Tls, Tls)>) -> CommandResult<Option<ClusterOptions>> {
        let Some(index) = self.process else { return Ok(None) };
        let addresses = self.cluster.clone();
        if index >= addresses.len() {
            let last = addresses.len() - 1;
            return Err(Failure::usage(format!("there is no process {index}: the last is {last}")));
        }
        let (patience, own_results) = (CLUSTER_PATIENCE, self.own_results);
        Ok(Some(ClusterOptions { addresses, index, tls, patience, own_results }))
    }

    fn centre(&self, script: Script) -> CommandResult<Centre> {
        let mut options = CentreOptions::new(&self.listen);
        let tls = self.tls()?;
        options.cluster = self.cluster(tls.clone())?;
        options.tls = tls.map(|(centre, _)| centre);
        options.patience = Duration::from_nanos(self.patience.0);
        let mut shown = String::new();
        let mut wait = |waiting: &str| {
            if shown != waiting {
                note!("{waiting}");
                waiting.clone_into(&mut shown);
            }
            true
        };
        Centre::listen(options, script, &mut wait).map_err(|error| {
            let message = format!("cannot serve hosts at {}: {}", self.listen, reason(&error));
            match error.kind() {
                io::ErrorKind::AddrInUse => {
                    Failure::new(message).advise("choose another port with --listen")
                }
                _ => Failure::new(message),
            }
        })
    }
}

/// How long to wait for the other processes of the centre.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(120);

/// Carries out the command.
pub fn run(options: &MonitorOptions) -> CommandResult {
    let text = script(options.file.as_deref(), options.text.as_deref())?;
    let script = prepare(&text, &options.parameters, options.stream_compat)?
        .with_held_max(Some(options.limit_held));
    warn(&text, &script);
    let mut sink = options.printing.live_printer(&script);
    // The instants of a centre are those since 1970.
    sink.show_times(options.printing.times(0));
    let mut centre = options.centre(script)?;
    note!("listening for hosts at {}", centre.address());
    let watch = centre.watch();
    let interval = options.status.map(|time| Duration::from_nanos(time.0));
    let mut printer = interval.map(|interval| StatusPrinter::new(interval, options.printing.json));
    let end = options.time.map(|time| End::after(Duration::from_nanos(time.0)));
    let patience = Duration::from_nanos(options.patience.0) + END_MARGIN;
    let mut last_ns = 0;
    let mut continues = |reported_ns| {
        if let Some(printer) = &mut printer {
            printer.print_if_due(&watch);
        }
        last_ns = reported_ns;
        end.is_none_or(|end| !end.is_over(reported_ns, patience))
    };
    let ran = centre.run(&mut sink, &mut continues);
    if let Some(missing) = end.and_then(|end| end.missing(last_ns)).filter(|_| ran.is_ok()) {
        note!("the hosts have not sent all events of the last {}", span_text(missing));
    }
    finish(sink, &text, ran).map(drop)
}

/// How much longer than its patience with slow hosts a centre waits for the events of its time.
const END_MARGIN: Duration = Duration::from_secs(1);

/// The end of the time of a centre.
#[derive(Clone, Copy)]
struct End {
    at: Instant,
    /// The same in nanoseconds since 1970.
    unix_ns: i64,
}

impl End {
    fn after(time: Duration) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + time;
        let unix_ns = i64::try_from(unix.as_nanos()).unwrap_or(i64::MAX);
        Self { at: Instant::now() + time, unix_ns }
    }

    /// Whether the centre ends: at this time, and with the results of all events up to then, or
    /// after having waited for them for `patience`. `reported_ns` is the instant up to which all
    /// results have been reported; 0 without a host.
    fn is_over(&self, reported_ns: i64, patience: Duration) -> bool {
        let late = Instant::now().saturating_duration_since(self.at);
        let is_waiting = self.missing(reported_ns).is_some() && late < patience;
        Instant::now() >= self.at && !is_waiting
    }

    /// The time before the end whose results have not been reported, in nanoseconds.
    fn missing(&self, reported_ns: i64) -> Option<u64> {
        let missing = u64::try_from(self.unix_ns.saturating_sub(reported_ns)).ok()?;
        (reported_ns > 0 && missing > 0).then_some(missing)
    }
}

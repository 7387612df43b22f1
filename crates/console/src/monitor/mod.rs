//! `fathom monitor`: standing queries over the events of many hosts.
mod status;

use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::{Args, value_parser};
use fathom_control::Nanoseconds;
use fathom_cql::Value;
use fathom_monitor::{
    HELD_MAX,
    cluster::ClusterOptions,
    link::{Centre, CentreOptions},
    replay::Script,
};
use fathom_tls::{Certificates, Tls};

use crate::{
    failure::{Failure, Outcome, reason},
    query::{
        asking::{Printing, finish, prepare, warn},
        parameter, script,
    },
};
use status::StatusPrinter;

/// Options of `fathom monitor`.
#[derive(Debug, Args)]
#[command(after_help = "\
The daemons of the hosts connect to this address: [monitor] in their configuration names it. Each
has a certificate for its name, signed by the authority, and is given the part of the queries that
it can do by itself.

A stream's rows are printed as they come, and of a relation each change, with its time in
nanoseconds since 1970 and + or -. With --status a table of the hosts goes to standard error.

With --cluster the centre is several processes, on one machine or on several, each of which hosts
may connect to. They have the same queries; the first of them prints what results. When one ends,
all do.

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
    /// Where hosts connect to
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// This side's certificate, and the chain behind it
    #[arg(long, value_name = "FILE", required_unless_present = "plain", requires = "key")]
    certificate: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE", requires = "authority")]
    key: Option<PathBuf>,
    /// The authority that the hosts' certificates are signed by
    #[arg(long, value_name = "FILE", requires = "certificate")]
    authority: Option<PathBuf>,
    /// Speak plain text: for networks where everybody is trusted
    #[arg(long, conflicts_with = "certificate")]
    plain: bool,
    /// Wait so long for hosts that lag; what comes later does not count
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
    /// Where each of the processes listens for the others, where the centre is several
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',', requires = "process")]
    cluster: Vec<String>,
    /// Which of the processes this is; 0 is the first
    #[arg(long, value_name = "NUMBER", requires = "cluster")]
    process: Option<usize>,
    /// Print what this process has of the results; without it the first prints all of them
    #[arg(long, requires = "cluster")]
    own_results: bool,
    /// Show the hosts on standard error, so often; with --json as an object a look
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "5s")]
    status: Option<Nanoseconds>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME")]
    time: Option<Nanoseconds>,
    /// Understand the queries as STREAM did: a second of a window is a microsecond
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

    /// TLS with those who connect, and with those that are connected to.
    fn tls(&self) -> Outcome<Option<(Tls, Tls)>> {
        let Some(files) = self.tls_files() else { return Ok(None) };
        let both =
            Tls::mutual_server(&files).and_then(|centre| Ok((centre, Tls::mutual_client(&files)?)));
        both.map(Some).map_err(|error| Failure::new(reason(&error)))
    }

    fn cluster(&self, tls: Option<(Tls, Tls)>) -> Outcome<Option<ClusterOptions>> {
        let Some(index) = self.process else { return Ok(None) };
        let addresses = self.cluster.clone();
        if index >= addresses.len() {
            let last = addresses.len() - 1;
            return Err(Failure::usage(format!("there is no process {index}: the last is {last}")));
        }
        let (patience, own_results) = (CLUSTER_PATIENCE, self.own_results);
        Ok(Some(ClusterOptions { addresses, index, tls, patience, own_results }))
    }

    fn centre(&self, script: Script) -> Outcome<Centre> {
        let mut options = CentreOptions::new(&self.listen);
        let tls = self.tls()?;
        options.cluster = self.cluster(tls.clone())?;
        options.tls = tls.map(|(centre, _)| centre);
        options.patience = Duration::from_nanos(self.patience.0);
        let mut told = String::new();
        let mut waits = |waiting: &str| {
            if told != waiting {
                eprintln!("{waiting}");
                waiting.clone_into(&mut told);
            }
            true
        };
        Centre::listen(options, script, &mut waits).map_err(|error| {
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

/// How long the other processes are waited for.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(120);

/// Carries out the command.
pub fn run(options: &MonitorOptions) -> Outcome {
    let text = script(options.file.as_deref(), options.text.as_deref())?;
    let script = prepare(&text, &options.parameters, options.stream_compat)?
        .with_held_max(Some(options.limit_held));
    warn(&text, &script);
    let mut sink = options.printing.live_printer(&script);
    let mut centre = options.centre(script)?;
    eprintln!("hosts are served at {}", centre.address());
    let watch = centre.watch();
    let interval = options.status.map(|time| Duration::from_nanos(time.0));
    let mut printer = interval.map(|interval| StatusPrinter::new(interval, options.printing.json));
    let end = options.time.map(|time| Instant::now() + Duration::from_nanos(time.0));
    let mut goes_on = |_| {
        if let Some(printer) = &mut printer {
            printer.look(&watch);
        }
        end.is_none_or(|end| Instant::now() < end)
    };
    let ran = centre.run(&mut sink, &mut goes_on);
    finish(sink, &text, ran).map(drop)
}

//! `fathom bench`: a quick measurement of a disk, without a guest.

mod report;
mod server;

use std::{
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use fathom_control::{Bytes, FrontendStatus, ImageFormat, Nanoseconds};

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    load::{BlockOrder, DEPTH_MAX, LoadError, LoadOptions, Waiting, load},
    output::{
        self, Format,
        style::{self, Style},
    },
};
use report::{Measurement, Report, ServerKind, Workload};
use server::{BenchSubject, Peer};

/// Options of `fathom bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk is driven over its vhost-user socket as a guest drives it, so no guest may use it at the
same time. Reads do not change the disk. CPU is the server's CPU time per request.

Examples:
  fathom bench data                             reads, at depth 1 and 32
  fathom bench data --write --depth 32          also writes, which destroy the disk's data
  fathom bench --image test.img --peer          compared with qemu-storage-daemon on the same image
  fathom bench --image test.img --write --verify --range 1G

Exit status: 0 measured, 1 failed requests or wrong data, 2 invalid command line.")]
pub struct BenchOptions {
    /// A disk of the running daemon by name, or a vhost-user socket
    #[arg(value_name = "NAME|SOCKET", required_unless_present = "image")]
    disk: Option<String>,
    /// Serve this image for the measurement
    #[arg(long, value_name = "PATH", conflicts_with = "disk")]
    image: Option<PathBuf>,
    /// Serve the image's bytes as they are (raw), even if they look like another format
    #[arg(long = "format", value_name = "FORMAT", requires = "image")]
    image_format: Option<ImageFormat>,
    /// Bypass the host's page cache for the image
    #[arg(long, requires = "image")]
    direct: bool,
    /// Serve the image without measuring its requests
    #[arg(long, requires = "image")]
    no_tap: bool,
    /// Measure qemu-storage-daemon on the same image too, in alternation
    #[arg(long, requires = "image")]
    peer: bool,
    /// Measure writes too: THIS DESTROYS THE DISK'S DATA
    #[arg(long)]
    write: bool,
    /// Compare the data read with the data written
    #[arg(long, requires = "write")]
    verify: bool,
    /// Make so many percent of the 4 KiB units of writes equal to others
    #[arg(long, value_name = "PERCENT", default_value_t = 0, requires = "write",
          value_parser = clap::value_parser!(u8).range(..=100), conflicts_with = "verify")]
    duplicates: u8,
    /// Requests in flight on each queue; several values are measured one after the other
    #[arg(long, short, value_name = "N,…", value_delimiter = ',', default_value = "1,32")]
    depth: Vec<u16>,
    /// Queues, each driven by a thread
    #[arg(long, short, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Size of a request
    #[arg(long, short, value_name = "SIZE", default_value = "4K")]
    block_size: Bytes,
    /// Duration of each measurement
    #[arg(long, short = 't', value_name = "TIME", default_value = "3s")]
    duration: Nanoseconds,
    /// Duration of the load before each measurement
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    warmup: Nanoseconds,
    /// Number of measurements; medians are shown
    #[arg(long, short, value_name = "N", default_value_t = 1)]
    rounds: u16,
    /// Announce all memory in one table, as to a server without memory slots
    #[arg(long)]
    memory_table: bool,
    /// Run the server on one processor and the client on another
    #[arg(long)]
    pin: bool,
    /// Access the blocks one after the other
    #[arg(long)]
    sequential: bool,
    /// Use only the first bytes of the disk, up to this size
    #[arg(long, value_name = "SIZE")]
    range: Option<Bytes>,
    /// How the client waits for completions
    #[arg(long, value_enum, default_value = "event")]
    wait: Wait,
    /// Seed of block numbers and data
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// How the client waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Wait {
    /// Sleep until the server signals, as guests do
    Event,
    /// Spin, which occupies a processor
    Poll,
}

/// Carries out the command.
pub fn run(options: &BenchOptions) -> CommandResult {
    check(options)?;
    if options.write {
        let style = Style::stderr();
        let target = options.image.as_ref().map_or_else(
            || options.disk.clone().unwrap_or_default(),
            |image| image.display().to_string(),
        );
        note!("{} writing to {target}: its data is lost", style.paint(style::BAD, "!"));
    }
    let workloads = workloads(options);
    let is_socket = options.disk.as_ref().is_some_and(|disk| disk.contains('/'));
    let kind = if is_socket { ServerKind::Socket } else { ServerKind::Fathom };
    let mut report = Report::new(options.rounds);
    for round in 0..options.rounds {
        let subject = subject(options)?;
        let outcome = measure(options, kind, &subject.socket, &workloads, round, &mut report);
        subject.end();
        outcome?;
        if let (true, Some(image)) = (options.peer, &options.image) {
            let peer = Peer::start(image, options.write, options.direct, options.queues)?;
            let kind = ServerKind::Peer;
            let outcome = measure(options, kind, peer.socket(), &workloads, round, &mut report);
            peer.end();
            outcome?;
        }
    }
    if options.format.json {
        output::json(&report)?;
    } else {
        output::text_line(&report.text(output::width()))?;
    }
    report.verdict()
}

fn check(options: &BenchOptions) -> CommandResult {
    if options.depth.iter().any(|&depth| depth == 0 || depth > DEPTH_MAX) {
        return Err(Failure::usage(format!("a depth is from 1 to {DEPTH_MAX}")));
    }
    for (option, value) in [("--rounds", options.rounds), ("--queues", options.queues)] {
        if value == 0 {
            return Err(Failure::usage(format!("{option} must be at least 1")));
        }
    }
    if options.duration.0 < 1_000_000 {
        return Err(Failure::usage("--duration must be at least 1ms"));
    }
    if options.block_size.0 > 16 << 20 {
        return Err(Failure::usage("a request has at most 16 MiB"));
    }
    Ok(())
}

fn workloads(options: &BenchOptions) -> Vec<Workload> {
    let order = if options.sequential { BlockOrder::Sequential } else { BlockOrder::Random };
    let make = |read_percent, depth| Workload {
        order,
        read_percent,
        depth,
        queues: options.queues,
        block_size: options.block_size.0 as u32,
    };
    let percents: &[u8] = if options.write { &[100, 0] } else { &[100] };
    let each =
        percents.iter().flat_map(|&percent| options.depth.iter().map(move |&d| (percent, d)));
    each.map(|(percent, depth)| make(percent, depth)).collect()
}

/// The server to measure: the running daemon, or a new daemon that serves the image.
fn subject(options: &BenchOptions) -> CommandResult<BenchSubject> {
    if let Some(image) = &options.image {
        return BenchSubject::start(image, options);
    }
    let word = options.disk.as_deref().unwrap_or_default();
    if word.contains('/') {
        return Ok(BenchSubject::running(PathBuf::from(word)));
    }
    // A guest that has just ended may still be connected for a moment.
    let patience = Instant::now() + Duration::from_secs(2);
    let socket = loop {
        let status = options.control.client().disk(word)?;
        let socket = status.frontends.into_iter().find_map(|frontend| match frontend {
            FrontendStatus::VhostUser(status) => Some(status),
            FrontendStatus::Nbd(_) => None,
        });
        let in_use = socket.as_ref().is_some_and(|socket| socket.connected);
        if !in_use || Instant::now() > patience {
            break socket;
        }
        thread::sleep(Duration::from_millis(50));
    };
    match socket {
        None => Err(Failure::new(format!("disk {word:?} has no vhost-user socket"))
            .advise("measure a disk that has one, or an image with --image")),
        Some(socket) if socket.connected => {
            Err(Failure::new(format!("disk {word:?} is used by a guest"))
                .advise("stop the guest first, or measure another disk"))
        }
        Some(socket) => Ok(BenchSubject::running(PathBuf::from(&socket.socket))),
    }
}

fn measure(
    options: &BenchOptions,
    server: ServerKind,
    socket: &Path,
    workloads: &[Workload],
    round: u16,
    report: &mut Report,
) -> CommandResult {
    for workload in workloads {
        if !options.format.json {
            let part = format!("round {} of {}", round + 1, options.rounds);
            note!("Measuring {}: {workload}, {part}", server.name());
        }
        let load_options = LoadOptions {
            order: workload.order,
            read_percent: workload.read_percent,
            block_size: workload.block_size,
            depth: workload.depth,
            queues: workload.queues,
            duration: Duration::from_nanos(options.duration.0),
            warmup: Duration::from_nanos(options.warmup.0),
            waiting: match options.wait {
                Wait::Event => Waiting::Event,
                Wait::Poll => Waiting::Poll,
            },
            range: options.range.map(|range| Range { start: 0, end: range.0 }),
            verify: options.verify && workload.read_percent < 100,
            seed: options.seed + u64::from(round),
            duplicate_percent: options.duplicates,
            memory_table: options.memory_table,
            pin: options.pin,
            ..LoadOptions::new(socket)
        };
        let result = load(&load_options).map_err(|error| explain(&error))?;
        report.add(Measurement { server, workload: *workload, round, report: result });
    }
    Ok(())
}

fn explain(error: &LoadError) -> Failure {
    let message = error.to_string();
    match error {
        LoadError::Option(_) => Failure::usage(message),
        LoadError::Connect(..) => Failure::new(message)
            .advise("is the path a vhost-user-blk socket, and no guest connected to it?"),
        LoadError::Closed | LoadError::Stalled(_) => {
            Failure::new(message).advise("see the server's log")
        }
        LoadError::System(..) => Failure::new(message),
    }
}

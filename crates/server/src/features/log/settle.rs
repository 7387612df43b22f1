//! `fathom log`: what becomes of a log that was refused. The daemon that tries to serve the disk
//! carries it out, between two attempts; without one, the command does.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use fathom_control::{
    Client, ClientError, DiskDefinition, ErrorBody, ErrorCode, LogAnswer, LogDecision,
    SOCKET_DEFAULT, SOCKET_VARIABLE,
};
use fathom_failure::Failure;
use fathom_failure::text::harmless;
use fathom_image::LogMark;
use fathom_layers::wal::{Held, Settlement};

use crate::configuration::{Configuration, ConfigurationFile, normal_path};
use crate::daemon::parts::Parts;
use crate::daemon::records_folder;
use crate::daemon::stack::refusal;
use crate::features::FEATURES;
use crate::features::log::LogVolumes;
use crate::stores::clusters::Clusters;
use crate::stores::kinds::open_store;

/// The folder of the service's state.
const SERVICE_STATE: &str = "/var/lib/fathom";
/// The configuration of the service.
const CONFIGURATION: &str = "/etc/fathom/fathom.toml";

const CONTROL_HELP: &str = "The daemon's control socket [default: $FATHOM_CONTROL, or the socket of \
                            the configuration file, or /run/fathom/control.sock]";

/// The commands for logs that were refused.
#[derive(Clone, Debug, Subcommand)]
pub enum LogCommand {
    /// Keep the changes of a refused log: they belong to the disk's image
    #[command(after_help = "\
The daemon then serves the disk with these changes, at once. Other disks stay served. Without a
daemon, the disk is served with them at the next start. Of a damaged log, those in front of the
damage are kept.

Example:
  fathom log keep root")]
    Keep(KeepOptions),
    /// Discard the changes of a refused or lost log
    #[command(after_help = "\
The image is used as it is: without these changes it is an earlier state of the disk, or a torn one.
The daemon then serves the disk at once. Other disks stay served. Without a daemon, the disk is
served at the next start.

Examples:
  fathom log discard root
  fathom log discard --image root.img    an image of which no disk is left: the log stays as it is")]
    Discard(DiscardOptions),
}

/// The options of `keep`.
#[derive(Args, Clone, Debug)]
pub struct KeepOptions {
    /// The disk's name
    disk: String,

    #[command(flatten)]
    log: LogOptions,
}

/// The options of `discard`.
#[derive(Args, Clone, Debug)]
pub struct DiscardOptions {
    /// The disk's name
    #[arg(required_unless_present = "image")]
    disk: Option<String>,

    /// An image that no disk of a daemon has any more, instead of a disk
    #[arg(long, value_name = "IMAGE", conflicts_with = "disk")]
    image: Option<PathBuf>,

    /// The `key` that the disk had, if the image is a device without a lasting name of its own
    #[arg(long, value_name = "NAME", requires = "image")]
    key: Option<String>,

    #[command(flatten)]
    log: LogOptions,
}

/// The options of both.
#[derive(Args, Clone, Debug)]
pub struct LogOptions {
    /// The configuration file of the daemon [default: /etc/fathom/fathom.toml]
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,

    #[arg(long, value_name = "SOCKET", help = CONTROL_HELP)]
    control: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

impl LogOptions {
    /// The control socket that the user names.
    fn control(&self) -> Option<PathBuf> {
        let named = || std::env::var_os(SOCKET_VARIABLE).filter(|socket| !socket.is_empty());
        self.control.clone().or_else(|| named().map(PathBuf::from))
    }

    /// The configuration file.
    fn file(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(CONFIGURATION))
    }
}

/// Runs `fathom log`.
pub fn settle_log(command: &LogCommand) -> ExitCode {
    let (options, settled) = match command {
        LogCommand::Keep(KeepOptions { disk, log }) => (log, settle(disk, log, LogDecision::Keep)),
        LogCommand::Discard(DiscardOptions { image: Some(image), key, log, .. }) => {
            (log, settle_image(image, key.as_deref(), log))
        }
        LogCommand::Discard(DiscardOptions { disk, log, .. }) => {
            (log, settle(disk.as_deref().unwrap_or_default(), log, LogDecision::Discard))
        }
    };
    match settled {
        Ok(answer) if options.json => match serde_json::to_string_pretty(&answer) {
            Ok(text) => print(&text),
            Err(_) => ExitCode::FAILURE,
        },
        Ok(answer) => print(&text(&answer)),
        Err(refused) => {
            eprintln!("{}", harmless(&refused.message));
            if !refused.remedy.is_empty() {
                eprintln!("  → {}", harmless(&refused.remedy));
            }
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> ExitCode {
    println!("{}", harmless(text));
    ExitCode::SUCCESS
}

/// Tells the user what has become of a log.
fn text(answer: &LogAnswer) -> String {
    let disk = &answer.disk;
    let held = Held {
        records: answer.records,
        bytes: answer.bytes,
        first_ns: answer.first_unix_time_ns,
        last_ns: answer.last_unix_time_ns,
    };
    let settled = match answer.decision {
        LogDecision::Keep => format!("kept: {held}. They are written home when {disk:?} is served"),
        LogDecision::Discard if answer.found => {
            format!("discarded: {held}. The image is used as it is; check its file system")
        }
        LogDecision::Discard => "the image is used as it is: it is not marked any more".into(),
    };
    let LogAnswer { message, remedy, .. } = answer;
    match (answer.served, remedy.is_empty()) {
        (true, _) => format!("{settled}\n{disk:?} is served"),
        (false, _) if message.is_empty() => settled,
        (false, true) => format!("{settled}\n{disk:?} is still not served: {message}"),
        (false, false) => {
            format!("{settled}\n{disk:?} is still not served: {message}\n  → {remedy}")
        }
    }
}

fn settle(name: &str, options: &LogOptions, decision: LogDecision) -> Result<LogAnswer, ErrorBody> {
    let file =
        ConfigurationFile { path: options.file().to_owned(), ..ConfigurationFile::default() };
    let configuration = match file.load() {
        // A daemon may serve disks without a file.
        Err(_) if options.config.is_none() && !options.file().exists() => None,
        loaded => {
            Some(loaded.map_err(|problems| refusal(ErrorCode::Invalid, problems.to_string(), ""))?)
        }
    };
    let described = configuration.as_ref().map(|it| it.daemon.definition.control.clone());
    let control = options.control().or(described).unwrap_or_else(|| PathBuf::from(SOCKET_DEFAULT));
    let find = |configuration: &Configuration| {
        let mut disks = configuration.disks.iter().map(|disk| &disk.definition);
        disks.find(|disk| disk.name == name).cloned()
    };
    let definition = configuration.as_ref().and_then(find);
    if let Some(answer) = ask_daemon(&control, name, definition.as_ref(), decision)? {
        return Ok(answer);
    }
    let Some((configuration, definition)) = configuration.zip(definition) else {
        let message = format!(
            "{} has no disk {name:?}, and no daemon at {} has it",
            options.file().display(),
            control.display()
        );
        let remedy = "name one of its disks, another file with `--config`, or the socket of the daemon with `--control`";
        return Err(refusal(ErrorCode::NotFound, message, remedy));
    };
    let image = definition.image.as_deref().unwrap_or(Path::new(""));
    let folder = folder(image, definition.key.as_deref(), &control);
    let parts = Parts::of_features(None);
    parts.of::<Clusters>().set(configuration.all());
    settle_disk(&definition, &folder, &parts, decision)
}

/// Removes the marks of an image that no disk has any more. The log that they name is left as it
/// is. `key` is the operator's name of a device.
fn settle_image(
    image: &Path,
    key: Option<&str>,
    options: &LogOptions,
) -> Result<LogAnswer, ErrorBody> {
    let image = normal_path(image);
    let control = options.control().unwrap_or_else(|| PathBuf::from(SOCKET_DEFAULT));
    let folder = folder(&image, key, &control);
    let unreadable = |error: io::Error| {
        let message = format!("{} cannot be examined: {error}", image.display());
        refusal(ErrorCode::Failed, message, "name an image that exists, or try again as root")
    };
    let mark = LogMark::open_named(&image, &folder, key).map_err(unreadable)?;
    if matches!(mark.read(), Ok(None)) {
        let message = format!("{} has no mark of a log", image.display());
        let remedy = match (mark.lacks_key(), key) {
            (Some(_), None) => "if its disk had a `key`, name it with `--key`",
            _ => "nothing is to be done",
        };
        return Err(refusal(ErrorCode::NotFound, message, remedy));
    }
    let (name, key) = (image.display().to_string(), key.map(str::to_owned));
    let definition = DiskDefinition { name, image: Some(image), key, ..DiskDefinition::default() };
    settle_disk(&definition, &folder, &Parts::of_features(None), LogDecision::Discard)
}

/// Lets a daemon decide that has the disk. `None` if none runs, or if it has no such disk: then no
/// daemon holds the image, which the caller makes sure of. `definition` is the disk in the
/// configuration file, if it has one.
fn ask_daemon(
    control: &Path,
    name: &str,
    definition: Option<&DiskDefinition>,
    decision: LogDecision,
) -> Result<Option<LogAnswer>, ErrorBody> {
    let refused = |error: ClientError| ErrorBody::from(Failure::from(error));
    let client = Client::new(control);
    let disks = match client.disks() {
        Err(ClientError::Unreachable { source, .. })
            if matches!(
                source.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        disks => disks.map_err(refused)?,
    };
    let has = disks.disks.iter().any(|disk| disk.name == name);
    let unserved = disks.unserved.iter().find(|disk| disk.name == name);
    if !has && unserved.is_none() {
        return Ok(None);
    }
    // The daemon at this socket may have another configuration, with another disk of this name.
    let wanted = definition.and_then(|definition| definition.image.as_deref()).map(normal_path);
    let image = unserved.and_then(|disk| disk.image.as_deref());
    if let (Some(wanted), Some(image)) = (wanted, image) {
        if wanted != normal_path(Path::new(image)) {
            return Ok(None);
        }
    }
    client.decide_log(name, decision).map(Some).map_err(refused)
}

/// Settles the log of a disk that nobody serves. `records` is the folder with the daemon's marks.
/// Blocks.
pub(crate) fn settle_disk(
    definition: &DiskDefinition,
    records: &Path,
    parts: &Parts,
    decision: LogDecision,
) -> Result<LogAnswer, ErrorBody> {
    let name = &definition.name;
    let image = definition.image.as_deref().unwrap_or(Path::new(""));
    let shown = image.display();
    // It has the image's lock, so that no daemon serves the disk.
    let home = open_store(definition, records, parts)?;
    // A cache may have what the log loses now, and would return it.
    for feature in FEATURES {
        feature.forget_home(definition, records, parts)?;
    }
    let settlement = match decision {
        LogDecision::Keep => Settlement::Keep,
        LogDecision::Discard => Settlement::Discard,
    };
    let log =
        parts.of::<LogVolumes>().settle(definition, (&home, true), records, parts, settlement)?;
    if log.is_none() && decision == LogDecision::Keep {
        let message = format!("the disk {name:?} has no log in the configuration");
        return Err(refusal(ErrorCode::Invalid, message, "add the layer with the log"));
    }
    let held = log.as_ref().map(|log| log.wal.held()).unwrap_or_default();
    if let Some(log) = log.as_ref().filter(|_| decision == LogDecision::Discard) {
        log.discard().map_err(|error| {
            let message = format!(
                "the log has no changes any more, but the mark of {shown} that names it, or the record of its lost \
                 writes, cannot be removed: {error}"
            );
            let remedy = "make the folder of the image and the store of the log writable, or try again as root";
            refusal(ErrorCode::Failed, message, remedy)
        })?;
    }
    Ok(LogAnswer {
        disk: name.clone(),
        decision,
        found: log.is_some(),
        records: held.records,
        bytes: held.bytes,
        first_unix_time_ns: held.first_ns,
        last_unix_time_ns: held.last_ns,
        served: false,
        message: String::new(),
        remedy: String::new(),
    })
}

/// The folder with the daemon's marks: that in which the image is marked.
fn folder(image: &Path, key: Option<&str>, control: &Path) -> PathBuf {
    let own = records_folder(control);
    let is_marked = |folder: &Path| {
        LogMark::open_named(image, folder, key).is_ok_and(|mark| !matches!(mark.read(), Ok(None)))
    };
    let service = Path::new(SERVICE_STATE);
    if !is_marked(&own) && is_marked(service) { service.to_owned() } else { own }
}

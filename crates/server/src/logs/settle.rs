//! `fathom log`: what becomes of a log that the daemon does not serve with its disk.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use fathom_control::{ErrorBody, ErrorCode};
use fathom_image::LogMark;
use fathom_layers::wal::Settlement;

use crate::configuration::ConfigurationFile;
use crate::daemon::records_folder;
use crate::wiring::{Common, open_backend, refusal};

/// The folder of the service's state.
const SERVICE_STATE: &str = "/var/lib/fathom";
/// The configuration of the service.
const CONFIGURATION: &str = "/etc/fathom/fathom.toml";

/// The commands for logs that were refused.
#[derive(Clone, Debug, Subcommand)]
pub enum LogCommand {
    /// Keep the changes of a refused log: they belong to the disk's image
    #[command(after_help = "\
The disk is served with these changes when the daemon serves it again. Of a damaged log, those in
front of the damage are kept. No daemon must serve the disk, or another one with a log in the same
volume.

Example:
  fathom log keep root")]
    Keep(LogOptions),
    /// Discard the changes of a refused or lost log
    #[command(after_help = "\
The image is used as it is: without these changes it is an earlier state of the disk, or a torn one.
No daemon must serve the disk, or another one with a log in the same volume.

Example:
  fathom log discard root")]
    Discard(LogOptions),
}

/// The options of both.
#[derive(Args, Clone, Debug)]
pub struct LogOptions {
    /// The disk's name in the configuration
    disk: String,

    /// The configuration file
    #[arg(long, short, value_name = "FILE", default_value = CONFIGURATION)]
    config: PathBuf,
}

/// Runs `fathom log`.
pub fn settle_log(command: &LogCommand) -> ExitCode {
    let (options, settlement) = match command {
        LogCommand::Keep(options) => (options, Settlement::Keep),
        LogCommand::Discard(options) => (options, Settlement::Discard),
    };
    match settle(options, settlement) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(refused) => {
            eprintln!("{}", refused.message);
            if !refused.remedy.is_empty() {
                eprintln!("  → {}", refused.remedy);
            }
            ExitCode::FAILURE
        }
    }
}

fn settle(options: &LogOptions, settlement: Settlement) -> Result<String, ErrorBody> {
    let path = options.config.clone();
    let file = ConfigurationFile { path, ..ConfigurationFile::default() };
    let configuration =
        file.load().map_err(|problems| refusal(ErrorCode::Invalid, problems.to_string(), ""))?;
    let name = &options.disk;
    let found = configuration.disks.iter().find(|disk| disk.definition.name == *name);
    let definition = found.map(|disk| &disk.definition).ok_or_else(|| {
        let message = format!("{} has no disk {name:?}", options.config.display());
        refusal(
            ErrorCode::NotFound,
            message,
            "name one of its disks, or another file with `--config`",
        )
    })?;
    let image = definition.image.as_deref().unwrap_or(Path::new(""));
    let folder = folder(image, &configuration.daemon.definition.control);
    // It has the image's lock, so that no daemon serves the disk.
    let home = open_backend(definition, &folder)?;
    let common = Common::default();
    common.clusters.set(&configuration.clusters);
    let log = common.logs.settle(definition, &*home, &folder, &common, settlement)?;
    let shown = image.display();
    let Some(log) = log else {
        let message = format!("the disk {name:?} has no log in the configuration");
        return match settlement {
            Settlement::Discard => {
                Ok(format!("{shown} is used as it is: it is not marked any more"))
            }
            _ => Err(refusal(ErrorCode::Invalid, message, "add the layer with the log")),
        };
    };
    let held = log.wal.held();
    if settlement == Settlement::Discard {
        log.end().map_err(|error| {
            let message =
                format!("the mark of {shown} that names the log cannot be removed: {error}");
            refusal(ErrorCode::Failed, message, "make its folder writable, or try again as root")
        })?;
        return Ok(format!("discarded: {held}. {shown} is used as it is; check its file system"));
    }
    Ok(format!("kept: {held}. They are written home when {name:?} is served"))
}

/// The folder with the daemon's marks: that in which the image is marked.
fn folder(image: &Path, control: &Path) -> PathBuf {
    let own = records_folder(control);
    let is_marked = |folder: &Path| {
        LogMark::open(image, folder).is_ok_and(|mark| !matches!(mark.read(), Ok(None)))
    };
    let service = Path::new(SERVICE_STATE);
    if !is_marked(&own) && is_marked(service) { service.to_owned() } else { own }
}

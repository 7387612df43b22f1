//! The configuration: read from a TOML file or from flags, and checked before anything starts.
//!
//! - `source`: the text of a file, and the places in it.
//! - `table`: TOML tables, each read by serde as a whole; problems have their lines.
//! - `daemon`: the settings of the daemon itself.
//! - `disk`: the tables that describe disks and NBD listeners.
//! - `section`: the tables that belong to features, which define them.
//! - `layers`: the kinds of layers, and the options of a disk's layers.
//! - `order`: the order of a disk's layers.
//! - `check`: checks that concern more than one table: sockets, names, combinations of keys.
//! - `host`: checks of what a configuration names on its host: images, folders, groups.
//!
//! Each table is one type ([`fathom_options::Section`]), which has the keys of its documentation.

mod check;
mod daemon;
mod disk;
mod host;
pub(crate) mod layers;
pub(crate) mod order;
mod section;
mod source;
mod table;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use fathom_control::{DiskDefinition, ListenerDefinition};
use toml::de::DeTable;

pub use check::{Address, check_disk, parse_address};
pub(crate) use check::{Extent, NAME_MAX, the_other};
pub use daemon::{DaemonOptions, Keepsakes, LogLevel, parse_metrics};
pub(crate) use disk::check_model;
pub use fathom_options::{Origin, Origins, Problem, Problems};
pub(crate) use host::{check_files, image_identity, normal as normal_path, plain};
pub(crate) use section::{FeatureSection, SectionKind};
pub(crate) use table::{Reading, Table, checked};

use section::Sections;
use source::ConfigurationText;
use table::Document;

use crate::features::FEATURES;

/// The longest configuration file that is read, in bytes.
const LENGTH_MAX: u64 = 16 << 20;
/// The default limit of the rows, groups and values that queries may hold.
pub(crate) const HELD_MAX: NonZeroU64 = NonZeroU64::new(fathom_monitor::HELD_MAX).unwrap();

/// The configuration of the daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// The settings of the daemon itself.
    pub daemon: Placed<DaemonOptions>,
    /// The disks, in the order of the file.
    pub disks: Vec<Placed<DiskDefinition>>,
    /// The NBD listeners, in the order of the file.
    pub listeners: Vec<Placed<ListenerDefinition>>,
    /// The tables of features.
    sections: Sections,
}

/// A definition, and its places in the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placed<T> {
    /// The definition.
    pub definition: T,
    /// The places of the definition and its keys.
    pub origins: Origins,
}

/// A configuration file, and the flags that override it.
#[derive(Clone, Debug, Default)]
pub struct ConfigurationFile {
    /// The file.
    pub path: PathBuf,
    /// The control socket.
    pub control: Option<PathBuf>,
    /// The address of `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// The log level.
    pub log: Option<LogLevel>,
}

impl ConfigurationFile {
    /// Reads the configuration, and checks what it says. Whether this host has what it names is
    /// seen when that is used: an image that is missing or that hangs must not keep the others from
    /// being served.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn load(&self) -> Result<Configuration, Problems> {
        self.load_with(Configuration::check_text)
    }

    /// Reads and checks the configuration, with the images and other files that it names.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn load_strictly(&self) -> Result<Configuration, Problems> {
        self.load_with(Configuration::check)
    }

    fn load_with(
        &self,
        check: fn(&Configuration) -> Result<(), Problems>,
    ) -> Result<Configuration, Problems> {
        let (mut configuration, mut problems) = read_and_parse(&self.path)?;
        let Placed { definition: daemon, origins } = &mut configuration.daemon;
        if let Some(control) = &self.control {
            daemon.control.clone_from(control);
            origins.note("control", Origin::Flag("--control or $FATHOM_CONTROL"));
        }
        daemon.metrics = self.metrics.or(daemon.metrics);
        daemon.log = self.log.unwrap_or(daemon.log);
        // Reports all problems together, so that one run shows them all.
        let tables = configuration.tables();
        problems.extend_with(configuration.sections.load(), &tables);
        problems.extend_with(check(&configuration).err().unwrap_or_default(), &tables);
        problems.none_or()?;
        Ok(configuration)
    }
}

impl Configuration {
    /// The tables that a feature reads as `T`, in the order of the file.
    pub(crate) fn all<T: FeatureSection>(&self) -> &[Placed<T>] {
        self.sections.all()
    }

    /// The table that a feature reads as `T`, of which there is at most one.
    pub(crate) fn one<T: FeatureSection>(&self) -> Option<&Placed<T>> {
        self.all().first()
    }

    /// The number of a feature's tables `[name]` or `[[name]]`.
    pub fn count(&self, name: &str) -> usize {
        self.sections.count(name)
    }

    /// The places where its tables begin.
    fn tables(&self) -> Vec<Origin> {
        let mut tables = vec![self.daemon.origins.whole()];
        tables.extend(self.disks.iter().map(|placed| placed.origins.whole()));
        tables.extend(self.listeners.iter().map(|placed| placed.origins.whole()));
        tables.extend(self.sections.origins());
        tables
    }
}

fn read_and_parse(path: &Path) -> Result<(Configuration, Problems), Problems> {
    let text = read(path).map_err(|error| {
        let (message, remedy) = match error.kind() {
            std::io::ErrorKind::NotFound => (
                format!("{}: no such file", path.display()),
                "name the configuration with --config; `fathom serve --help` shows flags that \
                 replace it",
            ),
            std::io::ErrorKind::InvalidData => (format!("{}: not UTF-8 text", path.display()), ""),
            _ => (format!("{}: {error}", path.display()), ""),
        };
        Problems(vec![Problem::new(Origin::Request, message, remedy)])
    })?;
    parse_all(&text, path)
}

fn read(path: &Path) -> std::io::Result<String> {
    let length = std::fs::metadata(path)?.len();
    if length > LENGTH_MAX {
        return Err(std::io::Error::other("the file is too large for a configuration"));
    }
    std::fs::read_to_string(path)
}

/// Reads the text of a configuration, and no other file. `path` is for messages, and its folder is
/// the one to which relative paths refer.
///
/// # Errors
/// All problems that were found.
pub fn parse(text: &str, path: &Path) -> Result<Configuration, Problems> {
    let (configuration, problems) = parse_all(text, path)?;
    problems.none_or()?;
    Ok(configuration)
}

/// Reads the text of a configuration. If single keys are invalid, returns the problems with the
/// rest of the configuration.
fn parse_all(text: &str, path: &Path) -> Result<(Configuration, Problems), Problems> {
    let source = ConfigurationText::new(text, path);
    let document = DeTable::parse(text).map_err(|error| {
        let origin = source.origin(error.span().map_or(0, |span| span.start));
        let message = error.message().replace('\n', ", ");
        let remedy = "a configuration has the syntax of TOML: see https://toml.io";
        Problems(vec![Problem::new(origin, message, remedy)])
    })?;
    let reading = Reading { source, problems: RefCell::default() };
    let configuration = document_of(&reading, document.get_ref());
    let mut problems = reading.problems.into_inner();
    problems.0.sort_by_key(|problem| problem.origin.position());
    Ok((configuration, problems))
}

fn document_of(reading: &Reading<'_>, document: &DeTable<'_>) -> Configuration {
    let mut document = Document::new(reading, document);
    let mut configuration = Configuration::default();
    if let Some(table) = document.table("daemon") {
        configuration.daemon = table.read();
    }
    for table in document.tables("disk") {
        configuration.disks.push(disk::disk(table, reading));
    }
    for table in document.tables("nbd") {
        configuration.listeners.push(disk::listener(table, reading));
    }
    let kinds = FEATURES.iter().flat_map(|feature| feature.sections());
    configuration.sections = Sections::read(kinds, &mut document, reading);
    document.finish();
    configuration
}

#[cfg(test)]
pub(crate) mod page;
#[cfg(test)]
pub(crate) mod tests;

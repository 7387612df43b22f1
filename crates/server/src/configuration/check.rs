//! Checks that concern more than one table: files, sockets, names, and combinations of keys.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use fathom_block::{SECTOR_SIZE, SERIAL_LENGTH};
use fathom_control::{BackendDefinition, DiskDefinition, ExportsDefinition};
use fathom_image::ForeignFormat;
use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::disk::check_parts;
use super::layers::check_layers;
use super::query::check_queries;
use super::{Configuration, Placed};
use fathom_options::suggestion;
use fathom_options::{Place, Places, Problems};

/// The longest path of a Unix socket, in bytes: `sun_path` without its terminator.
const SOCKET_PATH_MAX: usize = 107;
/// The longest name of a disk, in bytes.
pub(super) const NAME_MAX: usize = 128;

/// The address of an NBD listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
}

/// Reads `unix:/path` or `host:port`.
pub fn parse_address(text: &str) -> Option<Address> {
    if let Some(path) = text.strip_prefix("unix:") {
        return path.starts_with('/').then(|| Address::Unix(path.into()));
    }
    let (host, port) = text.rsplit_once(':')?;
    let sound = !host.is_empty()
        && !host.contains(char::is_whitespace)
        && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'))
        && port.parse::<u16>().is_ok();
    sound.then(|| Address::Tcp(text.to_owned()))
}

impl Configuration {
    /// Checks the configuration as far as that is possible without starting anything.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn check(&self) -> Result<(), Problems> {
        let mut problems = Problems::default();
        for disk in &self.disks {
            check_disk_into(&disk.definition, &disk.places, &mut problems);
        }
        self.check_listeners(&mut problems);
        self.check_names(&mut problems);
        self.check_sockets(&mut problems);
        self.check_images(&mut problems);
        super::guest::check_guests(&self.guests, &mut problems);
        super::cluster::check_clusters(&self.clusters, &mut problems);
        check_queries(&self.queries, &mut problems);
        if let Some(Placed { definition, places }) = &self.monitor {
            super::monitor::check_files(definition, places, &mut problems);
        }
        problems.none_or()
    }

    /// Checks the kept queries, which requires only their texts.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn check_queries(&self) -> Result<(), Problems> {
        let mut problems = Problems::default();
        check_queries(&self.queries, &mut problems);
        problems.none_or()
    }

    fn check_names(&self, problems: &mut Problems) {
        let mut names: BTreeMap<&str, &Places> = BTreeMap::new();
        for Placed { definition, places } in &self.disks {
            if definition.name.is_empty() {
                continue;
            }
            if let Some(first) = names.get(definition.name.as_str()) {
                problems.add(
                    places.of("name"),
                    format!("there are two disks called {:?}", definition.name),
                    format!("give each a different name{}", the_other(&first.of("name"))),
                );
            } else {
                names.insert(&definition.name, places);
            }
        }
        for Placed { definition, places } in &self.listeners {
            let ExportsDefinition::Named(exports) = &definition.exports else { continue };
            for export in exports {
                if !names.contains_key(export.as_str()) {
                    let known: Vec<&str> = names.keys().copied().collect();
                    problems.add(
                        places.of("exports"),
                        format!("there is no disk {export:?} to export"),
                        suggestion(export, &known),
                    );
                }
            }
        }
    }

    fn check_sockets(&self, problems: &mut Problems) {
        let Placed { definition: daemon, places } = &self.daemon;
        let control = (daemon.control.clone(), places.of("control"), "control");
        let mut sockets = vec![control];
        for Placed { definition, places } in &self.disks {
            if let Some(vhost_user) = &definition.vhost_user {
                let place = places.of("vhost_user.socket");
                sockets.push((vhost_user.socket.clone(), place, "vhost_user"));
            }
        }
        for Placed { definition, places } in &self.listeners {
            if let Some(Address::Unix(path)) = parse_address(&definition.address) {
                sockets.push((path, places.of("address"), "nbd"));
            }
        }
        let mut seen: BTreeMap<PathBuf, Place> = BTreeMap::new();
        for (path, place, _) in &sockets {
            if path.as_os_str().is_empty() {
                continue;
            }
            check_socket(path, place, problems);
            if let Some(first) = seen.get(&normal(path)) {
                problems.add(
                    place.clone(),
                    format!("the socket {} is used twice", path.display()),
                    format!("give each a different socket{}", the_other(first)),
                );
            } else {
                seen.insert(normal(path), place.clone());
            }
        }
        let mut addresses: BTreeMap<&str, Place> = BTreeMap::new();
        for Placed { definition, places } in &self.listeners {
            if let Some(Address::Tcp(address)) = parse_address(&definition.address) {
                let place = places.of("address");
                if let Some(first) = addresses.get(definition.address.as_str()) {
                    problems.add(
                        place,
                        format!("the address {address} is used twice"),
                        format!("give each listener a different address{}", the_other(first)),
                    );
                } else {
                    addresses.insert(&definition.address, place);
                }
            }
        }
    }

    fn check_images(&self, problems: &mut Problems) {
        let mut seen: BTreeMap<(u64, u64), (&Placed<DiskDefinition>, bool)> = BTreeMap::new();
        for disk in &self.disks {
            let Some(image) = &disk.definition.image else { continue };
            let Some(identity) = image_identity(image) else { continue };
            let writes = !disk.definition.read_only;
            match seen.get(&identity) {
                Some((first, other_writes)) if writes || *other_writes => problems.add(
                    disk.places.of("image"),
                    format!(
                        "the image {} is also that of the disk {:?}, and a writer cannot share \
                         it",
                        image.display(),
                        first.definition.name
                    ),
                    format!(
                        "give each disk a different image, or make both `read_only = true`{}",
                        the_other(&first.places.of("image"))
                    ),
                ),
                Some(_) => {}
                None => {
                    seen.insert(identity, (disk, writes));
                }
            }
        }
    }

    /// Finds the images whose content looks like another format than raw. [`check`](Self::check)
    /// does not do that, because a guest can write such content, which must not prevent the daemon
    /// from starting with the other disks.
    ///
    /// # Errors
    /// A problem for each such image.
    pub fn check_formats(&self) -> Result<(), Problems> {
        let mut problems = Problems::default();
        for Placed { definition, places } in &self.disks {
            let (Some(image), None) = (&definition.image, definition.format) else { continue };
            if let Some(format) = foreign_format(image) {
                let shown = image.display();
                problems.add(
                    places.of("image"),
                    format!("{shown} looks like a {format} image, not a raw one"),
                    format!(
                        "convert it with `fathom disk import {shown} NEW.img`, or add \
                         {} if the guest has to see these bytes unchanged",
                        match places.whole() {
                            Place::Flag(_) => "--format raw",
                            Place::File { .. } | Place::Request => "`format = \"raw\"`",
                        }
                    ),
                );
            }
        }
        problems.none_or()
    }

    fn check_listeners(&self, problems: &mut Problems) {
        for Placed { definition, places } in &self.listeners {
            let address = parse_address(&definition.address);
            if address.is_none() {
                problems.add(
                    places.of("address"),
                    format!("{:?} is not an address of an NBD listener", definition.address),
                    "write it like `address = \"unix:/run/fathom/nbd.sock\"` or \
                     `address = \"127.0.0.1:10809\"`",
                );
            }
            check_group(definition.group.as_deref(), || places.of("group"), problems);
            if let Some(tls) = &definition.tls {
                let certificates = tls.certificate.is_some() || tls.key.is_some();
                let place = places.of("tls");
                if certificates && tls.psk.is_some() {
                    problems.add(
                        place,
                        "[nbd.tls] has both certificates and shared keys",
                        "keep `certificate` and `key`, or `psk`",
                    );
                } else if tls.psk.is_none() && (tls.certificate.is_none() || tls.key.is_none()) {
                    problems.add(
                        place,
                        "[nbd.tls] has no certificate and key",
                        "add `certificate = \"…\"` and `key = \"…\"`, or `psk = \"…\"`",
                    );
                }
                let files = [
                    ("certificate", &tls.certificate),
                    ("key", &tls.key),
                    ("client_ca", &tls.client_ca),
                    ("psk", &tls.psk),
                ];
                for (key, path) in files {
                    let Some(path) = path else { continue };
                    if let Err(error) = std::fs::metadata(path) {
                        problems.add(
                            places.of(&format!("tls.{key}")),
                            format!("{}: {}", path.display(), plain(&error)),
                            "name a file that the daemon may read",
                        );
                    }
                }
            } else if matches!(address, Some(Address::Tcp(_))) && !definition.plain_allowed {
                problems.add(
                    places.of("address"),
                    format!(
                        "the listener at {} would serve disks over TCP in plain text",
                        definition.address
                    ),
                    "add [nbd.tls], or `plain_allowed = true` if the network is trusted",
                );
            }
        }
    }
}

/// Checks one disk without the others.
///
/// # Errors
/// All problems that were found.
pub fn check_disk(disk: &DiskDefinition, places: &Places) -> Result<(), Problems> {
    let mut problems = Problems::default();
    check_disk_into(disk, places, &mut problems);
    if let Some(vhost_user) = &disk.vhost_user {
        if !vhost_user.socket.as_os_str().is_empty() {
            check_socket(&vhost_user.socket, &places.of("vhost_user.socket"), &mut problems);
        }
    }
    problems.none_or()
}

fn check_disk_into(disk: &DiskDefinition, places: &Places, problems: &mut Problems) {
    check_name(disk, places, problems);
    if disk.serial.len() > SERIAL_LENGTH {
        problems.add(
            places.of("serial"),
            format!("the serial {:?} is longer than {SERIAL_LENGTH} bytes", disk.serial),
            "shorten it: a virtio disk has no space for more",
        );
    }
    check_backend(disk, places, problems);
    check_layers(disk, places, problems);
    check_parts(disk, places, problems);
    if let Some(vhost_user) = &disk.vhost_user {
        check_group(vhost_user.group.as_deref(), || places.of("vhost_user.group"), problems);
    }
}

fn check_name(disk: &DiskDefinition, places: &Places, problems: &mut Problems) {
    if disk.name.is_empty() {
        problems.add(places.of("name"), "a disk has no name", "add `name = \"…\"`");
    } else if disk.name.len() > NAME_MAX || disk.name.contains(|c: char| c.is_control() || c == '/')
    {
        problems.add(
            places.of("name"),
            format!("a disk cannot be called {:?}", disk.name.chars().take(40).collect::<String>()),
            format!("choose a name of at most {NAME_MAX} bytes, without slashes"),
        );
    }
    if disk.vm.len() > NAME_MAX || disk.vm.contains(char::is_control) {
        problems.add(
            places.of("vm"),
            "this is not a valid name of a virtual machine",
            format!("choose a name of at most {NAME_MAX} bytes"),
        );
    }
}

fn check_backend(disk: &DiskDefinition, places: &Places, problems: &mut Problems) {
    let choices = [
        ("image", disk.image.is_some()),
        ("memory", disk.memory.is_some()),
        ("null", disk.null.is_some()),
    ];
    let chosen: Vec<&str> =
        choices.iter().filter(|choice| choice.1).map(|choice| choice.0).collect();
    let title =
        if disk.name.is_empty() { "a disk".into() } else { format!("the disk {:?}", disk.name) };
    if chosen.len() > 1 {
        problems.add(
            places.of(chosen[1]),
            format!("{title} has `{}` and `{}`", chosen[0], chosen[1]),
            "keep one of them: a disk has only one store",
        );
    }
    match disk.backend() {
        None if chosen.is_empty() => problems.add(
            places.whole(),
            format!("{title} has no store"),
            "add `image = \"disk.img\"`, or `memory = \"1G\"` for a disk in memory",
        ),
        None => {}
        Some(BackendDefinition::Image(image)) => check_image(&image, disk, places, problems),
        Some(BackendDefinition::Memory(size)) => check_size("memory", size, disk, places, problems),
        Some(BackendDefinition::Null(size)) => check_size("null", size, disk, places, problems),
    }
    if disk.format.is_some() && disk.image.is_none() {
        problems.add(
            places.of("format"),
            "`format` is for images only",
            "leave it out: this disk has no image",
        );
    }
    if let Some(size) = disk.block_size {
        if disk.image.is_none() {
            problems.add(
                places.of("block_size"),
                "`block_size` is for images only",
                "leave it out: this disk has blocks of 512 bytes",
            );
        } else if !matches!(size.0, 512 | 4096) {
            problems.add(
                places.of("block_size"),
                format!("a disk cannot have blocks of {} bytes", size.0),
                "choose 512 or 4096",
            );
        }
    }
    if disk.direct && disk.image.is_none() {
        problems.add(
            places.of("direct"),
            "`direct` is for images only",
            "leave it out: this disk does not use the page cache",
        );
    }
}

fn check_size(
    key: &str,
    size: u64,
    disk: &DiskDefinition,
    places: &Places,
    problems: &mut Problems,
) {
    if size == 0 || size % SECTOR_SIZE != 0 || i64::try_from(size).is_err() {
        problems.add(
            places.of(key),
            format!("the disk {:?} cannot have a size of {size} bytes", disk.name),
            format!("choose a multiple of {SECTOR_SIZE}, for example `{key} = \"1G\"`"),
        );
    }
}

fn check_image(image: &Path, disk: &DiskDefinition, places: &Places, problems: &mut Problems) {
    let place = places.of("image");
    if !image.is_absolute() && place == Place::Request {
        let message = format!("the image {} is not an absolute path", image.display());
        problems.add(place, message, "begin it with a slash: the daemon runs in another folder");
        return;
    }
    let shown = image.display();
    match std::fs::metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => problems.add(
            place,
            format!("there is no image {shown}"),
            format!("make one with `fathom disk create {shown} 10G`, or correct the path"),
        ),
        Err(error) => problems.add(
            place,
            format!("the image {shown} cannot be examined: {}", plain(&error)),
            "give the daemon's user access to it and to the folders above",
        ),
        Ok(metadata) => check_image_file(image, &metadata, disk, place, problems),
    }
}

fn check_image_file(
    image: &Path,
    metadata: &Metadata,
    disk: &DiskDefinition,
    place: Place,
    problems: &mut Problems,
) {
    let shown = image.display();
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        problems.add(
            place,
            format!("{shown} is neither a file nor a block device"),
            "name a raw image",
        );
    } else if kind.is_file() && metadata.len() == 0 {
        problems.add(
            place,
            format!("the image {shown} is empty"),
            format!("give it a size with `fathom disk resize {shown} 10G`"),
        );
    } else if !accessible(image, !disk.read_only) {
        problems.add(
            place,
            format!(
                "the daemon may not {} the image {shown}",
                if disk.read_only { "read" } else { "write" }
            ),
            if disk.read_only {
                "give the daemon's user access to it"
            } else {
                "give the daemon's user access to it, or add `read_only = true`"
            },
        );
    }
}

/// The format that a regular file's content looks like. Devices are examined only when they are
/// opened.
fn foreign_format(image: &Path) -> Option<ForeignFormat> {
    let metadata = std::fs::metadata(image).ok().filter(Metadata::is_file)?;
    let file = std::fs::File::open(image).ok()?;
    ForeignFormat::of(&file, metadata.len()).ok()?
}

/// Whether the file may be opened for reading, or for writing too. Does not open it, because some
/// devices act on an open.
fn accessible(path: &Path, write: bool) -> bool {
    let mode = if write { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
    accessat(CWD, path, mode, AtFlags::EACCESS).is_ok()
}

fn check_socket(path: &Path, place: &Place, problems: &mut Problems) {
    let shown = path.display();
    if !path.is_absolute() && *place == Place::Request {
        problems.add(
            place.clone(),
            format!("the socket {shown} is not an absolute path"),
            "begin it with a slash: the daemon runs in another folder",
        );
        return;
    }
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        problems.add(
            place.clone(),
            format!("the socket's path is longer than {SOCKET_PATH_MAX} bytes: {shown}"),
            "choose a shorter one, for example in /run/fathom",
        );
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match std::fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => {}
        // The daemon makes this folder itself.
        Err(_) if path == Path::new(fathom_control::SOCKET_DEFAULT) => {}
        Ok(_) => problems.add(
            place.clone(),
            format!("{} is not a folder, so a socket cannot be in it", folder.display()),
            "choose another path",
        ),
        Err(error) => problems.add(
            place.clone(),
            format!("the socket {shown} cannot be made: {}: {}", folder.display(), plain(&error)),
            format!("make the folder with `mkdir -p {}`, or choose another", folder.display()),
        ),
    }
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            problems.add(
                place.clone(),
                format!("{shown} exists and is not a socket"),
                "choose another path, or remove it if it is not needed",
            );
        }
    }
}

fn check_group(name: Option<&str>, place: impl Fn() -> Place, problems: &mut Problems) {
    let Some(name) = name else { return };
    if crate::group::id(name).is_none() {
        problems.add(
            place(),
            format!("there is no group {name:?}"),
            format!("make it with `groupadd --system {name}`, or leave `group` out"),
        );
    }
}

/// The identity of an image: that of the file, or of the device.
pub(crate) fn image_identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        return Some((u64::MAX, metadata.rdev()));
    }
    Some((metadata.dev(), metadata.ino()))
}

/// Normalises a path as far as its folders exist, so that two spellings of it are equal.
pub(crate) fn normal(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            folder.canonicalize().unwrap_or_else(|_| folder.to_owned()).join(name)
        }
        _ => path.to_owned(),
    }
}

/// Finds files that do not exist, or are in folders that may not be searched. Each has the name of its key.
pub(super) fn check_files(
    files: &[(&str, &Option<PathBuf>)],
    places: &Places,
    problems: &mut Problems,
) {
    for (key, path) in files {
        let Some(path) = path else { continue };
        if let Err(error) = std::fs::metadata(path) {
            problems.add(
                places.of(key),
                format!("{}: {}", path.display(), plain(&error)),
                "name a file that the daemon may read",
            );
        }
    }
}

/// The text of an error of the operating system, without its number.
pub(super) fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or folder".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    }
}

pub(super) fn the_other(place: &Place) -> String {
    match place {
        Place::File { line, .. } => format!(" (the other is in line {line})"),
        Place::Flag(_) | Place::Request => String::new(),
    }
}

//! Checks that concern more than one table: files, sockets, names, and combinations of keys.

use std::collections::BTreeMap;
use std::path::PathBuf;

use fathom_block::{SECTOR_SIZE, SERIAL_LENGTH};
use fathom_control::{DiskDefinition, ExportsDefinition};
use fathom_image::ChainFormat;
use fathom_nbd::NbdUri;
use fathom_options::{Origin, Origins, Problems, suggestion};

use super::disk::check_parts;
use super::host::{
    ImageKey, check_group, check_image, check_socket, foreign_format, normal, plain,
};
use super::layers::check_layers;
use super::{Configuration, Placed};
use crate::stores::exports;
use crate::stores::kinds::StoreKind;
use crate::stores::qemu;

/// The longest name of a disk, in bytes.
pub(crate) const NAME_MAX: usize = 128;

/// The time limits that requests to an NBD server can have, in nanoseconds.
const TIMEOUT_RANGE: std::ops::RangeInclusive<u64> = 1_000_000_000..=3_600_000_000_000;

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

/// How far a configuration is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// What it says, whatever the host has. Accesses no image, so that an image that hangs delays
    /// nothing.
    Text,
    /// Also what it names on this host: images, folders of sockets, groups, certificates.
    Host,
}

impl Configuration {
    /// Checks the configuration as far as that is possible without starting anything, with the
    /// images and other files that it names.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn check(&self) -> Result<(), Problems> {
        self.check_to(Extent::Host)
    }

    /// Checks what the configuration says, but not whether this host has what it names. Accesses no
    /// image.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn check_text(&self) -> Result<(), Problems> {
        self.check_to(Extent::Text)
    }

    fn check_to(&self, extent: Extent) -> Result<(), Problems> {
        let mut problems = Problems::default();
        for disk in &self.disks {
            check_disk_into(&disk.definition, &disk.origins, extent, &mut problems);
        }
        self.check_listeners(extent, &mut problems);
        self.check_names(&mut problems);
        self.check_sockets(extent, &mut problems);
        self.check_groups(extent, &mut problems);
        self.check_images(extent, &mut problems);
        self.sections.check(extent, &mut problems);
        problems.none_or()
    }

    /// Checks what the tables of features say.
    ///
    /// # Errors
    /// All problems that were found.
    pub fn check_sections(&self) -> Result<(), Problems> {
        let mut problems = Problems::default();
        self.sections.check(Extent::Text, &mut problems);
        problems.none_or()
    }

    fn check_groups(&self, extent: Extent, problems: &mut Problems) {
        if extent == Extent::Text {
            return;
        }
        let Placed { definition, origins } = &self.daemon;
        for (key, group) in
            [("control_group", &definition.control_group), ("view_group", &definition.view_group)]
        {
            check_group(group.as_deref(), || origins.of(key), problems);
        }
    }

    fn check_names(&self, problems: &mut Problems) {
        let mut names: BTreeMap<&str, &Origins> = BTreeMap::new();
        for Placed { definition, origins } in &self.disks {
            if definition.name.is_empty() {
                continue;
            }
            if let Some(first) = names.get(definition.name.as_str()) {
                problems.add(
                    origins.of("name"),
                    format!("there are two disks called {:?}", definition.name),
                    format!("give each a different name{}", the_other(&first.of("name"))),
                );
            } else {
                names.insert(&definition.name, origins);
            }
        }
        for Placed { definition, origins } in &self.listeners {
            let ExportsDefinition::Named(exports) = &definition.exports else { continue };
            for export in exports {
                if !names.contains_key(export.as_str()) {
                    let known: Vec<&str> = names.keys().copied().collect();
                    problems.add(
                        origins.of("exports"),
                        format!("there is no disk {export:?} to export"),
                        suggestion(export, &known),
                    );
                }
            }
        }
    }

    fn check_sockets(&self, extent: Extent, problems: &mut Problems) {
        let Placed { definition: daemon, origins } = &self.daemon;
        let control = (daemon.control.clone(), origins.of("control"), "control");
        let mut sockets = vec![control];
        for Placed { definition, origins } in &self.disks {
            if let Some(vhost_user) = &definition.vhost_user {
                let origin = origins.of("vhost_user.socket");
                sockets.push((vhost_user.socket.clone(), origin, "vhost_user"));
            }
        }
        for Placed { definition, origins } in &self.listeners {
            if let Some(Address::Unix(path)) = parse_address(&definition.address) {
                sockets.push((path, origins.of("address"), "nbd"));
            }
        }
        let mut seen: BTreeMap<PathBuf, Origin> = BTreeMap::new();
        for (path, origin, _) in &sockets {
            if path.as_os_str().is_empty() {
                continue;
            }
            check_socket(path, origin, extent, problems);
            if let Some(first) = seen.get(&normal(path)) {
                problems.add(
                    origin.clone(),
                    format!("the socket {} is used twice", path.display()),
                    format!("give each a different socket{}", the_other(first)),
                );
            } else {
                seen.insert(normal(path), origin.clone());
            }
        }
        let mut addresses: BTreeMap<&str, Origin> = BTreeMap::new();
        for Placed { definition, origins } in &self.listeners {
            if let Some(Address::Tcp(address)) = parse_address(&definition.address) {
                let origin = origins.of("address");
                if let Some(first) = addresses.get(definition.address.as_str()) {
                    problems.add(
                        origin,
                        format!("the address {address} is used twice"),
                        format!("give each listener a different address{}", the_other(first)),
                    );
                } else {
                    addresses.insert(&definition.address, origin);
                }
            }
        }
    }

    fn check_images(&self, extent: Extent, problems: &mut Problems) {
        let mut seen: BTreeMap<ImageKey, (&Placed<DiskDefinition>, bool)> = BTreeMap::new();
        for disk in &self.disks {
            let Some((key, shown, identity)) = content_of(&disk.definition, extent) else {
                continue;
            };
            let what = if key == "nbd" { "export" } else { key };
            let writes = !disk.definition.read_only;
            match seen.get(&identity) {
                Some((first, other_writes)) if writes || *other_writes => problems.add(
                    disk.origins.of(key),
                    format!(
                        "the {shown} is also that of the disk {:?}, and a writer cannot share it",
                        first.definition.name
                    ),
                    format!(
                        "give each disk a different {what}, or make both `read_only = true`{}",
                        the_other(&first.origins.of(key))
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
        for Placed { definition, origins } in &self.disks {
            let (Some(image), None) = (&definition.image, definition.format) else { continue };
            if let Some(format) = foreign_format(image) {
                let shown = image.display();
                problems.add(
                    origins.of("image"),
                    format!("{shown} looks like a {format} image, not a raw one"),
                    format!(
                        "{}convert it with `fathom disk import {shown} NEW.img`, or add \
                         {} if the guest has to see these bytes unchanged",
                        match ChainFormat::of_name(format.qemu_name()) {
                            Some(_) => format!(
                                "add `format = \"{}\"` if you know that it is one, ",
                                format.qemu_name()
                            ),
                            None => String::new(),
                        },
                        match origins.whole() {
                            Origin::Flag(_) => "--format raw",
                            Origin::File { .. } | Origin::Request => "`format = \"raw\"`",
                        }
                    ),
                );
            }
        }
        problems.none_or()
    }

    fn check_listeners(&self, extent: Extent, problems: &mut Problems) {
        for Placed { definition, origins } in &self.listeners {
            let address = parse_address(&definition.address);
            if address.is_none() {
                problems.add(
                    origins.of("address"),
                    format!("{:?} is not an address of an NBD listener", definition.address),
                    "write it like `address = \"unix:/run/fathom/nbd.sock\"` or \
                     `address = \"127.0.0.1:10809\"`",
                );
            }
            if extent == Extent::Host {
                check_group(definition.group.as_deref(), || origins.of("group"), problems);
            }
            if let Some(tls) = &definition.tls {
                let certificates = tls.certificate.is_some() || tls.key.is_some();
                let origin = origins.of("tls");
                if certificates && tls.psk.is_some() {
                    problems.add(
                        origin,
                        "[nbd.tls] has both certificates and shared keys",
                        "keep `certificate` and `key`, or `psk`",
                    );
                } else if tls.psk.is_none() && (tls.certificate.is_none() || tls.key.is_none()) {
                    problems.add(
                        origin,
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
                    let Some(path) = path.as_ref().filter(|_| extent == Extent::Host) else {
                        continue;
                    };
                    if let Err(error) = std::fs::metadata(path) {
                        problems.add(
                            origins.of(&format!("tls.{key}")),
                            format!("{}: {}", path.display(), plain(&error)),
                            "name a file that the daemon may read",
                        );
                    }
                }
            } else if matches!(address, Some(Address::Tcp(_))) && !definition.plain_allowed {
                problems.add(
                    origins.of("address"),
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

/// What has a disk's bytes, for disks with an image or an export: the key that names it, what it
/// is called in messages, and what tells it from others.
fn content_of(disk: &DiskDefinition, extent: Extent) -> Option<(&'static str, String, ImageKey)> {
    if let Some(image) = &disk.image {
        let identity = ImageKey::of(image, extent)?;
        return Some(("image", format!("image {}", image.display()), identity));
    }
    let place = exports::place(disk)?;
    Some(("nbd", format!("export {place}"), ImageKey::Export(place)))
}

/// Checks one disk without the others.
///
/// # Errors
/// All problems that were found.
pub fn check_disk(disk: &DiskDefinition, origins: &Origins) -> Result<(), Problems> {
    let mut problems = Problems::default();
    let extent = Extent::Host;
    check_disk_into(disk, origins, extent, &mut problems);
    if let Some(vhost_user) = &disk.vhost_user {
        let socket = &vhost_user.socket;
        if !socket.as_os_str().is_empty() {
            check_socket(socket, &origins.of("vhost_user.socket"), extent, &mut problems);
        }
    }
    problems.none_or()
}

fn check_disk_into(
    disk: &DiskDefinition,
    origins: &Origins,
    extent: Extent,
    problems: &mut Problems,
) {
    check_name(disk, origins, problems);
    if disk.serial.len() > SERIAL_LENGTH {
        problems.add(
            origins.of("serial"),
            format!("the serial {:?} is longer than {SERIAL_LENGTH} bytes", disk.serial),
            "shorten it: a virtio disk has no space for more",
        );
    }
    check_backend(disk, origins, extent, problems);
    check_layers(disk, origins, problems);
    check_parts(disk, origins, problems);
    if let Some(vhost_user) = disk.vhost_user.as_ref().filter(|_| extent == Extent::Host) {
        check_group(vhost_user.group.as_deref(), || origins.of("vhost_user.group"), problems);
    }
}

fn check_name(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    if disk.name.is_empty() {
        problems.add(origins.of("name"), "a disk has no name", "add `name = \"…\"`");
    } else if disk.name.len() > NAME_MAX || disk.name.contains(|c: char| c.is_control() || c == '/')
    {
        problems.add(
            origins.of("name"),
            format!("a disk cannot be called {:?}", disk.name.chars().take(40).collect::<String>()),
            format!("choose a name of at most {NAME_MAX} bytes, without slashes"),
        );
    }
    if disk.vm.len() > NAME_MAX || disk.vm.contains(char::is_control) {
        problems.add(
            origins.of("vm"),
            "this is not a valid name of a virtual machine",
            format!("choose a name of at most {NAME_MAX} bytes"),
        );
    }
}

fn check_backend(
    disk: &DiskDefinition,
    origins: &Origins,
    extent: Extent,
    problems: &mut Problems,
) {
    let chosen: Vec<&StoreKind> = StoreKind::all_in(disk).collect();
    let title =
        if disk.name.is_empty() { "a disk".into() } else { format!("the disk {:?}", disk.name) };
    if chosen.len() > 1 {
        problems.add(
            origins.of(chosen[1].key),
            format!("{title} has `{}` and `{}`", chosen[0].key, chosen[1].key),
            "keep one of them: a disk has only one store",
        );
    }
    if chosen.is_empty() {
        problems.add(
            origins.whole(),
            format!("{title} has no store"),
            "add `image = \"disk.img\"`, or `memory = \"1G\"` for a disk in memory",
        );
    }
    if let [kind] = chosen[..] {
        if let Some(image) = &disk.image {
            check_image(image, disk, origins, extent, problems);
        }
        if let Some(export) = &disk.nbd {
            check_export(export, origins, problems);
        }
        if let Some(size) = kind.size(&mut disk.clone()) {
            check_size(kind.key, size.0, disk, origins, problems);
        }
    }
    check_timeout(disk, origins, problems);
    if disk.format.is_some() && disk.image.is_none() {
        problems.add(
            origins.of("format"),
            "`format` is for images only",
            "leave it out: this disk has no image",
        );
    }
    if !disk.backing_folders.is_empty() && qemu::format(disk).is_none() {
        problems.add(
            origins.of("backing_folders"),
            "`backing_folders` is for images with a `format` other than raw",
            "leave it out: a raw image has no backing files",
        );
    }
    if let Some(size) = disk.block_size {
        if disk.image.is_none() || qemu::format(disk).is_some() {
            problems.add(
                origins.of("block_size"),
                "`block_size` is for raw images only",
                "leave it out: this disk has the smallest blocks that its store allows",
            );
        } else if !matches!(size.0, 512 | 4096) {
            problems.add(
                origins.of("block_size"),
                format!("a disk cannot have blocks of {} bytes", size.0),
                "choose 512 or 4096",
            );
        }
    }
    if disk.direct && disk.image.is_none() && disk.store.is_none() {
        problems.add(
            origins.of("direct"),
            "`direct` is for images and stores only",
            "leave it out: this disk does not use the page cache",
        );
    }
}

/// Checks the URI of an export.
fn check_export(export: &str, origins: &Origins, problems: &mut Problems) {
    match NbdUri::parse(export) {
        Err(failure) => problems.add(origins.of("nbd"), failure.message, failure.remedy),
        Ok(uri) => {
            if let Some(path) = uri.relative_path() {
                problems.add(
                    origins.of("nbd"),
                    format!("the path {:?} in the URI is not absolute", path.display().to_string()),
                    "begin it with a slash: the daemon may run in another folder",
                );
            }
        }
    }
}

fn check_timeout(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    let Some(timeout) = disk.timeout else { return };
    if disk.nbd.is_none() && qemu::format(disk).is_none() {
        problems.add(
            origins.of("timeout"),
            "`timeout` is for disks on NBD servers and for images that are not raw",
            "leave it out: the host's kernel decides how long requests of this disk are tried",
        );
    } else if !TIMEOUT_RANGE.contains(&timeout.0) {
        problems.add(
            origins.of("timeout"),
            "requests to a server cannot have this time limit",
            "choose one from 1s to 1h",
        );
    }
}

fn check_size(
    key: &str,
    size: u64,
    disk: &DiskDefinition,
    origins: &Origins,
    problems: &mut Problems,
) {
    if size == 0 || size % SECTOR_SIZE != 0 || i64::try_from(size).is_err() {
        problems.add(
            origins.of(key),
            format!("the disk {:?} cannot have a size of {size} bytes", disk.name),
            format!("choose a multiple of {SECTOR_SIZE}, for example `{key} = \"1G\"`"),
        );
    }
}

pub(crate) fn the_other(origin: &Origin) -> String {
    match origin {
        Origin::File { line, .. } => format!(" (the other is in line {line})"),
        Origin::Flag(_) | Origin::Request => String::new(),
    }
}

//! The tables that describe a disk and an NBD listener.

use fathom_control::{DiskDefinition, ListenerDefinition, ModelDefinition, ModelKind};
use fathom_options::{Check, Origins, Problems};

use super::table::{Reading, Table};
use super::{Placed, layers};

/// The most queues of a disk: one for each CPU of a large guest.
const QUEUES_MAX: u16 = 256;
/// The longest name of a block device, in bytes.
const KEY_LENGTH_MAX: usize = 64;
/// The longest time that a ring may be polled, in nanoseconds.
const SPIN_NS_MAX: u64 = 1_000_000;

/// Reads a `[[disk]]` table.
pub(super) fn disk(table: Table<'_>, reading: &Reading<'_>) -> Placed<DiskDefinition> {
    let mut disk: Placed<DiskDefinition> = table.read();
    let (folder, mut problems) = (Some(reading.folder()), Problems::default());
    layers::complete(&mut disk.definition.layers, &disk.origins, folder, &mut problems);
    reading.extend(problems);
    disk
}

/// Reads a `[[nbd]]` table.
pub(super) fn listener(table: Table<'_>, reading: &Reading<'_>) -> Placed<ListenerDefinition> {
    let mut listener: Placed<ListenerDefinition> = table.read();
    let address = &mut listener.definition.address;
    if let Some(path) = address.strip_prefix("unix:") {
        *address = format!("unix:{}", reading.folder().join(path).display());
    }
    listener
}

/// Checks the name of a disk's block device.
fn check_key(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    let Some(key) = &disk.key else { return };
    let is_sound = (1..=KEY_LENGTH_MAX).contains(&key.len())
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if !is_sound {
        problems.add(
            origins.of("key"),
            format!("the key {key:?} cannot name a device"),
            format!("use 1 to {KEY_LENGTH_MAX} of a to z, A to Z, 0 to 9, `.`, `_` and `-`"),
        );
    } else if disk.image.is_none() {
        problems.add(
            origins.of("key"),
            "a key names the block device of a disk, and this disk has no image",
            "remove `key`, or add an `image`",
        );
    }
}

/// Checks the volume of a disk in a pool.
fn check_volume(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    match (&disk.store, &disk.volume) {
        (Some(_), None) => problems.add(
            origins.of("store"),
            "the disk has a store and no volume in it",
            "add `volume = \"NAME\"`; `fathom store list` shows the volumes",
        ),
        (None, Some(_)) => problems.add(
            origins.of("volume"),
            "the disk has a volume and no store",
            "add `store`, the pool with the volume",
        ),
        _ => {}
    }
}

/// Checks the sub-tables of a disk, and the name of its device.
pub(super) fn check_parts(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    check_key(disk, origins, problems);
    check_volume(disk, origins, problems);
    if let Some(model) = &disk.model {
        check_model(model, &mut Check::new(origins, "", problems));
    }
    let Some(vhost_user) = &disk.vhost_user else { return };
    if vhost_user.socket.as_os_str().is_empty() {
        problems.add(
            origins.of("vhost_user"),
            "[disk.vhost_user] has no socket",
            "add a line like `socket = \"/run/fathom/disk.sock\"`",
        );
    }
    if vhost_user.queues == 0 || vhost_user.queues > QUEUES_MAX {
        problems.add(
            origins.of("vhost_user.queues"),
            format!("a disk cannot have {} queues", vhost_user.queues),
            format!("choose a number from 1 to {QUEUES_MAX}: one for each of the guest's CPUs"),
        );
    }
    if vhost_user.threads.is_some_and(|threads| threads == 0 || threads > QUEUES_MAX) {
        problems.add(
            origins.of("vhost_user.threads"),
            "a disk's queues cannot be served by this number of threads",
            format!("choose a number from 1 to {QUEUES_MAX}, or leave it out"),
        );
    }
    if vhost_user.spin.is_some_and(|spin| spin.0 > SPIN_NS_MAX) {
        problems.add(
            origins.of("vhost_user.spin"),
            "a ring cannot be polled for that long",
            "choose at most 1ms: the thread should sleep during longer waits",
        );
    }
}

/// The sizes that a modelled device can have, in bytes.
const SIZES: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 60;

/// Finds options that belong to another kind of model, and options that contradict each other.
pub(crate) fn check_model(model: &ModelDefinition, check: &mut Check<'_>) {
    let is_hdd = model.kind == ModelKind::Hdd;
    let keys = [
        ("spanning", model.spanning && !is_hdd),
        ("write_cache", model.write_cache.is_some() && !is_hdd),
        ("power_loss_protected", model.power_loss_protected && is_hdd),
    ];
    if model.offset.is_some() && model.device.is_empty() {
        check.problem(
            "model.offset",
            "`offset` needs `device`",
            "name the modelled device that the disk shares with others, or leave it out",
        );
    }
    if model.spanning && !model.device.is_empty() && model.size.is_none() {
        check.problem(
            "model.spanning",
            "a device that several disks share has no single image",
            "replace `spanning` by the `size` of all of its disks",
        );
    }
    if model.size.is_some_and(|size| !SIZES.contains(&size.0)) {
        check.problem(
            "model.size",
            "a modelled device has from 1 MiB to 1 EiB",
            "choose another size",
        );
    }
    for (key, _) in keys.iter().filter(|(_, is_of_another)| *is_of_another) {
        let (kinds, kind) = if is_hdd { ("`ssd` and `sata-ssd`", "hdd") } else { ("`hdd`", "ssd") };
        check.problem(
            &format!("model.{key}"),
            format!("a model of the kind `{kind}` has no `{key}`"),
            format!("leave it out: it is for {kinds}"),
        );
    }
}

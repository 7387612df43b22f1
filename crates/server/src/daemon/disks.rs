//! Disks added, changed and removed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fathom_block::ErrorKind;
use fathom_control::{
    BackendDefinition, Bytes, DiskChange, DiskDefinition, DiskStatus, Done, ErrorBody, ErrorCode,
    LayerDefinition,
};

use super::{Daemon, Live, Served};
use crate::configuration::{Places, Problems, check_disk, image_identity, normal_path};
use crate::introspection::DiskGuest;
use crate::wiring::{self, Watchers, refusal};

/// How long the removal of a disk waits for its last flush.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(30);

impl Daemon {
    /// Serves one disk more, by request.
    pub(crate) fn add_disk(&self, definition: DiskDefinition) -> Result<DiskStatus, ErrorBody> {
        let _change = self.change()?;
        check_disk(&definition, &Places::default()).map_err(|problems| invalid(&problems))?;
        let name = definition.name.clone();
        self.serve_disk(definition, None)?;
        tracing::info!(disk = name.as_str(), "added");
        self.disk_status(&name)
    }

    /// Opens a disk and offers it to guests and clients. Whoever calls has checked it by itself;
    /// here it is held against what is served already.
    pub(super) fn serve_disk(
        &self,
        definition: DiskDefinition,
        configured: Option<DiskDefinition>,
    ) -> Result<(), ErrorBody> {
        self.check_against_others(&definition)?;
        let number = self.instance();
        let wanted = wiring::is_classified(&definition);
        let guest = DiskGuest::new(&self.introspection, &definition.name, wanted);
        let (disk, watchers) = wiring::open_disk(&definition, number as u32, &guest)?;
        let server = match &definition.vhost_user {
            Some(vhost_user) => Some(wiring::start_vhost_user(vhost_user, &disk, &guest)?),
            None => None,
        };
        let name = definition.name.clone();
        let live = Live {
            definition,
            configured,
            watchers,
            instance: number,
            usage_instance: number,
            server,
        };
        let served = Arc::new(Served { disk: Arc::clone(&disk), guest, live: Mutex::new(live) });
        self.with_state(|state| state.disks.insert(name, served));
        self.export_disk(&disk);
        Ok(())
    }

    fn check_against_others(&self, definition: &DiskDefinition) -> Result<(), ErrorBody> {
        let conflict =
            |message: String, remedy: &str| Err(refusal(ErrorCode::Conflict, message, remedy));
        let socket = definition.vhost_user.as_ref().map(|guest| normal_path(&guest.socket));
        if socket.is_some() && socket == Some(normal_path(&self.options.control)) {
            return conflict("this is the control socket".into(), "choose another socket");
        }
        let identity = definition.image.as_deref().and_then(image_identity);
        for served in self.served() {
            // A copy, so that nobody waits for a file system that hangs.
            let other = served.live().definition.clone();
            if other.name == definition.name {
                return conflict(
                    format!("there is a disk {:?} already", other.name),
                    "choose another name, or remove that disk first",
                );
            }
            let other_socket = other.vhost_user.as_ref().map(|guest| normal_path(&guest.socket));
            if socket.is_some() && socket == other_socket {
                return conflict(
                    format!("the disk {:?} has this socket", other.name),
                    "choose another socket, or remove that disk first",
                );
            }
            let shares =
                identity.is_some() && identity == other.image.as_deref().and_then(image_identity);
            if shares && !(definition.read_only && other.read_only) {
                return conflict(
                    format!(
                        "the disk {:?} has this image, and a writer shares with nobody",
                        other.name
                    ),
                    "choose another image, or make both disks read-only",
                );
            }
        }
        Ok(())
    }

    /// Changes a disk while it is in use.
    pub(crate) fn change_disk(
        &self,
        name: &str,
        change: &DiskChange,
    ) -> Result<DiskStatus, ErrorBody> {
        let _change = self.change()?;
        let served = self.find(name)?;
        if change.tap.is_some() || change.classify.is_some() || change.layers.is_some() {
            let mut definition = served.live().definition.clone();
            if let Some(tap) = change.tap {
                definition.tap = tap;
                if !tap && change.layers.is_none() {
                    definition.layers.retain(|layer| !matches!(layer, LayerDefinition::Tap));
                }
            }
            if let Some(classify) = change.classify {
                definition.classify = classify;
                if !classify && change.layers.is_none() {
                    definition.layers.retain(|layer| !matches!(layer, LayerDefinition::Classify));
                }
            }
            if let Some(layers) = &change.layers {
                definition.layers.clone_from(layers);
            }
            check_disk(&definition, &Places::default()).map_err(|problems| invalid(&problems))?;
            self.restack(&served, definition)?;
        }
        if let Some(capacity) = change.capacity {
            resize(&served, capacity.0, change.shrink)?;
        }
        self.disk_status(name)
    }

    /// Gives a disk the layers of `definition`. What counts and stays goes on counting.
    pub(super) fn restack(
        &self,
        served: &Served,
        definition: DiskDefinition,
    ) -> Result<(), ErrorBody> {
        let (kept, mut instance, mut usage_instance) = {
            let live = served.live();
            (live.watchers.clone(), live.instance, live.usage_instance)
        };
        let number = self.instance();
        let mut watchers = Watchers {
            tap: wiring::make_tap(&definition, number as u32),
            classify: wiring::make_classify(&definition, &served.guest)?,
        };
        match (kept.tap, &mut watchers.tap) {
            (Some(kept), Some(tap)) => *tap = kept,
            _ => instance = number,
        }
        match (kept.classify, &mut watchers.classify) {
            (Some(kept), Some(classify)) => {
                kept.set_table(wiring::class_table(&definition)?);
                *classify = kept;
            }
            _ => usage_instance = number,
        }
        let capacity = served.disk.capacity();
        let layers = wiring::make_layers(&definition, &watchers, &served.guest, capacity)?;
        served.disk.restack(layers).map_err(|error| {
            refusal(ErrorCode::Failed, format!("the layers cannot be changed: {error}"), "")
        })?;
        served.guest.set_wanted(watchers.classify.is_some());
        let mut live = served.live();
        live.definition = definition;
        live.watchers = watchers;
        live.instance = instance;
        live.usage_instance = usage_instance;
        drop(live);
        tracing::info!(disk = served.disk.name(), "has other layers");
        Ok(())
    }

    /// Serves a disk no more: clients are let go once what they have in flight is done, and the
    /// back end is flushed.
    pub(crate) fn remove_disk(&self, name: &str) -> Result<Done, ErrorBody> {
        let _change = self.change()?;
        self.withdraw_disk(name)?;
        Ok(Done { message: format!("the disk {name:?} is served no more") })
    }

    pub(super) fn withdraw_disk(&self, name: &str) -> Result<(), ErrorBody> {
        let served = self.find(name)?;
        for listening in self.listening() {
            listening.exports.remove(name);
        }
        let server = served.live().server.take();
        if let Some(server) = server {
            server.shutdown();
        }
        let flushed = wiring::flush(&served.disk, FLUSH_TIME_MAX);
        self.with_state(|state| state.disks.remove(name));
        if let Err(error) = flushed {
            tracing::error!(disk = name, %error, "could not be flushed at its removal");
            return Err(refusal(
                ErrorCode::Failed,
                format!("the disk {name:?} is served no more, but its last flush failed: {error}"),
                "do not trust what was written to it last",
            ));
        }
        tracing::info!(disk = name, "removed");
        Ok(())
    }
}

/// What a request that makes no sense gets.
fn invalid(problems: &Problems) -> ErrorBody {
    let messages: Vec<&str> = problems.0.iter().map(|problem| problem.message.as_str()).collect();
    let remedies: Vec<&str> = problems.0.iter().map(|problem| problem.remedy.as_str()).collect();
    refusal(ErrorCode::Invalid, messages.join("; "), remedies.join("; "))
}

fn resize(served: &Served, capacity: u64, shrink: bool) -> Result<(), ErrorBody> {
    let disk = &served.disk;
    let (name, before) = (disk.name(), disk.capacity());
    let unit = u64::from(disk.geometry().block_size.max(disk.geometry().alignment));
    if capacity == 0 || capacity % unit != 0 {
        return Err(refusal(
            ErrorCode::Invalid,
            format!("the disk {name:?} cannot have a size of {capacity} bytes"),
            format!("choose a multiple of {unit}"),
        ));
    }
    if capacity < before && !shrink {
        return Err(refusal(
            ErrorCode::Conflict,
            format!(
                "the disk {name:?} has {}, and what lies behind {} would be lost",
                Bytes(before),
                Bytes(capacity)
            ),
            "shrink the file system first, then ask with --shrink",
        ));
    }
    disk.resize(capacity).map_err(|error| match error {
        ErrorKind::Unsupported => refusal(
            ErrorCode::Unsupported,
            format!("the size of the disk {name:?} is given by the device beneath"),
            "resize that device to this size, then ask again",
        ),
        ErrorKind::ReadOnly => refusal(
            ErrorCode::Unsupported,
            format!("the disk {name:?} is read-only"),
            "resize the image with `fathom disk resize` while nobody serves it",
        ),
        ErrorKind::NoSpace | ErrorKind::OutOfRange => refusal(
            ErrorCode::Failed,
            format!("there is no room for {} beneath the disk {name:?}", Bytes(capacity)),
            "choose a smaller size",
        ),
        _ => {
            refusal(ErrorCode::Failed, format!("the disk {name:?} cannot be resized: {error}"), "")
        }
    })?;
    let mut live = served.live();
    match live.definition.backend() {
        Some(BackendDefinition::Memory(_)) => live.definition.memory = Some(Bytes(capacity)),
        Some(BackendDefinition::Null(_)) => live.definition.null = Some(Bytes(capacity)),
        Some(BackendDefinition::Image(_)) | None => {}
    }
    drop(live);
    tracing::info!(disk = name, "resized from {} to {}", Bytes(before), Bytes(capacity));
    Ok(())
}

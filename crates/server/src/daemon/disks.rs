//! Adding, changing and removing disks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{CHANGE_TIME_MAX, Disk, Layer, RestackError};
use fathom_control::{
    Bytes, DiskChange, DiskDefinition, DiskStatus, Done, ErrorBody, ErrorCode, FrontendStatus,
};
use fathom_insight::change::{Author, ChangeKind};
use fathom_layers::WaitForRoom;
use parking_lot::Mutex;

use super::changes::{Claims, stopping};
use super::edits::{check_request, edit_layers, with_capacity};
use super::lasting::RecordedChange;
use super::resize::resize;
use super::unserved::Ticket;
use super::withdrawal::{Standing, Withdrawal};
use super::{Daemon, Live, Served};
use crate::configuration::{image_identity, layers, normal_path};
use crate::daemon::change_log::Note;
use crate::daemon::parts::Parts;
use crate::daemon::stack::{self, Before, Equipment, KeyedLayer, refusal};
use crate::features::{FEATURES, cache};

/// How long a request to remove a disk waits for the removal.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(20);

/// Gives a disk's queues its new layers with `restack`, and returns these.
pub(crate) fn exchange(
    disk: &Arc<Disk>,
    equipment: &Equipment<'_>,
    restack: impl FnOnce(Vec<Arc<dyn Layer>>) -> Result<(), RestackError>,
) -> Result<Vec<KeyedLayer>, ErrorBody> {
    equipment.exchanging();
    let made = stack::make_layers(equipment)?;
    let list = made.list();
    let is_same = |(old, new): (&Arc<dyn Layer>, &Arc<dyn Layer>)| Arc::ptr_eq(old, new);
    let before = disk.layers();
    if before.len() != list.len() || !before.iter().zip(&list).all(is_same) {
        check_room(disk, equipment)?;
    }
    restack(list).map_err(|error| {
        let remedy = match &error {
            RestackError::Leave(..) => {
                "repair the store beneath, then try again; the disk is served as before"
            }
            RestackError::Hangs => {
                "find out which storage beneath it hangs; the disk is served as before"
            }
            _ => "the disk is served as before",
        };
        let message = format!("the disk {:?} keeps its layers: {error}", disk.name());
        refusal(ErrorCode::Failed, message, remedy)
    })?;
    made.apply();
    Ok(made.layers)
}

/// Checks that no request of a disk waits for space: queues get other layers when they have nothing
/// in flight, and nobody knows when that will be.
fn check_room(disk: &Disk, equipment: &Equipment<'_>) -> Result<(), ErrorBody> {
    let room = equipment.parts.find::<WaitForRoom>();
    if room.is_none_or(|room| room.waiting() == 0) {
        return Ok(());
    }
    let message = format!(
        "the disk {:?} keeps its layers: its requests wait for space, and cannot change over to others",
        disk.name()
    );
    Err(refusal(ErrorCode::Conflict, message, "free some space, then try again"))
}

impl Daemon {
    /// Serves a new disk, by request.
    pub(crate) fn add_disk(
        &self,
        mut definition: DiskDefinition,
        is_temporary: bool,
    ) -> Result<DiskStatus, ErrorBody> {
        check_request(&mut definition)?;
        let name = definition.name.clone();
        let _change = self.change(&name)?;
        let image = definition.image.as_deref().and_then(image_identity);
        let recording = self.lasting.begin(&name, image, Some(&definition), is_temporary)?;
        self.serve_disk(definition, None, None)?;
        recording.done()?;
        tracing::info!(disk = name.as_str(), "added");
        self.disk_status(&name)
    }

    /// Opens a disk and offers it to guests and clients. The caller has checked the definition;
    /// this function checks it against the disks that are served already. A disk of the
    /// configuration has a `ticket`: it is not served if the configuration no longer has it when it
    /// has been opened.
    pub(crate) fn serve_disk(
        &self,
        definition: DiskDefinition,
        configured: Option<DiskDefinition>,
        ticket: Option<&Ticket>,
    ) -> Result<(), ErrorBody> {
        let claims = Claims::new(&definition);
        let entry = ticket.map_or_else(|| self.instance(), Ticket::number);
        let _entry = self.begin_opening(claims.clone(), entry)?;
        let number = self.instance();
        self.note_log(&definition);
        let records = self.records_folder();
        let (disk, parts, layers) = stack::open_disk(&definition, number, &records, &self.parts)?;
        let opened = parts.clone();
        let abandon = |refused: ErrorBody| {
            for feature in FEATURES.iter().rev() {
                feature.unopened(&opened);
            }
            refused
        };
        let server = match &definition.vhost_user {
            Some(vhost_user) => {
                Some(stack::start_vhost_user(vhost_user, &disk, parts.get()).map_err(abandon)?)
            }
            None => None,
        };
        let name = definition.name.clone();
        let live = Live { definition, configured, parts, layers, server };
        let served = Arc::new(Served {
            disk,
            claims: Mutex::new(claims),
            health: Mutex::default(),
            live: Mutex::new(live),
            withdrawal: Mutex::default(),
        });
        self.watch_disk(&served);
        let lacks_device = served.lacks_device();
        let refused = self.with_state(|state| {
            // Checked under the lock under which the shutdown takes the list.
            if self.is_stopping() {
                return Some(stopping());
            }
            if !self.unserved.take(&name, ticket) {
                return Some(superseded(&name));
            }
            state.disks.insert(name, Arc::clone(&served));
            None
        });
        if let Some(refused) = refused {
            let server = served.live().server.take();
            drop(server);
            return Err(abandon(refused));
        }
        let opened = served.live().definition.clone();
        self.note_open_log(&opened);
        let author = if ticket.is_some() { Author::Configuration } else { Author::Control };
        self.note_change(&Note::new(ChangeKind::DiskAdded, author).of(&opened));
        for feature in FEATURES {
            feature.opened(self, &served);
            feature.stacked(self, &served);
        }
        if lacks_device {
            self.wake_watch();
        }
        Ok(())
    }

    /// Enters the claims of a disk that is being opened, under a number of its own.
    pub(crate) fn begin_opening(
        &self,
        claims: Claims,
        number: u64,
    ) -> Result<OpeningClaim<'_>, ErrorBody> {
        let control = normal_path(&self.options.control);
        self.with_state(|state| {
            let served: Vec<Claims> = state.disks.values().map(|served| served.claims()).collect();
            claims.check(&control, served.iter().chain(state.opening.values()))?;
            state.opening.insert(number, claims);
            Ok(OpeningClaim { daemon: self, number })
        })
    }

    /// Changes a disk while it is in use.
    pub(crate) fn change_disk(
        &self,
        name: &str,
        change: &DiskChange,
    ) -> Result<DiskStatus, ErrorBody> {
        let _change = self.change(name)?;
        let served = self.find(name)?;
        if served.withdrawal().is_some() {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk {name:?} is being removed"),
                "add it again when it has been removed",
            ));
        }
        if change.set_layer.is_none() && (change.above.is_some() || change.below.is_some()) {
            return Err(refusal(
                ErrorCode::Invalid,
                "`above` and `below` are for `set_layer`",
                "add `set_layer`, or leave them out",
            ));
        }
        let changes_layers = change.tap.is_some()
            || change.classify.is_some()
            || change.layers.is_some()
            || change.set_layer.is_some()
            || change.remove_layer.is_some();
        if changes_layers {
            let image = served.claims().image();
            let made = served.live().layers.clone();
            let mut definition = served.live().definition.clone();
            // A list of layers, and a removal, say what becomes of a cache.
            let replacement = change
                .set_layer
                .as_ref()
                .filter(|_| change.layers.is_none() && change.remove_layer.is_none());
            let replaced = replacement.and_then(|layer| cache::replaced(&definition, layer, &made));
            edit_layers(&mut definition, change, &made)?;
            let lasting = self.lasting.of(name).filter(|_| !change.temporary);
            let lasting = match lasting.map(|mut it| (edit_layers(&mut it, change, &made), it)) {
                // What is removed was temporary.
                Some((Err(refused), _)) if refused.code == ErrorCode::NotFound => None,
                Some((edited, lasting)) => edited.map(|()| Some(lasting))?,
                None => None,
            };
            let recording = self.lasting.begin(name, image, lasting.as_ref(), lasting.is_none())?;
            let before = served.live().definition.clone();
            match replaced {
                Some(other) => {
                    self.replace_cache(&served, &other, definition, change.replace)?;
                }
                None => self.restack(&served, definition)?,
            }
            self.note_layers(&served, &before, Author::Control);
            recording.done()?;
        }
        if let Some(capacity) = change.capacity {
            let image = served.claims().image();
            let lasting = self.lasting.of(name).filter(|_| !change.temporary);
            let resized = lasting.and_then(|lasting| with_capacity(lasting, capacity));
            let recording = resized
                .map(|resized| self.lasting.begin(name, image, Some(&resized), false))
                .transpose()?;
            let before = served.disk.capacity();
            resize(&served, capacity.0, change.shrink)?;
            let text = format!("from {} to {capacity}", Bytes(before));
            let definition = served.live().definition.clone();
            let resized = Note::new(ChangeKind::DiskResized, Author::Control).of(&definition);
            self.note_change(&resized.with_text(&text));
            recording.map_or(Ok(()), RecordedChange::done)?;
        }
        self.disk_status(name)
    }

    /// The folder for records that outlive the daemon.
    pub(crate) fn records_folder(&self) -> PathBuf {
        records_folder(&self.options.control)
    }

    /// Gives a disk the layers of `definition`. Counters and accounts of layers that stay continue.
    pub(crate) fn restack(
        &self,
        served: &Served,
        definition: DiskDefinition,
    ) -> Result<(), ErrorBody> {
        let before = {
            let live = served.live();
            Before {
                disk: &served.disk,
                definition: live.definition.clone(),
                parts: live.parts.clone(),
                layers: live.layers.clone(),
            }
        };
        if layers::wal(&before.definition).is_none() {
            self.note_log(&definition);
        }
        let (records, number) = (self.records_folder(), self.instance());
        let (home, shared) = (served.disk.backend(), (&self.parts, &*records));
        let equipment = Equipment::new(&definition, shared, &home, number, Some(before))?;
        let restack = |layers| served.disk.restack(layers, CHANGE_TIME_MAX);
        let exchanged = exchange(&served.disk, &equipment, restack);
        let made = exchanged.inspect_err(|_| equipment.abandon())?;
        equipment.equipped(&served.disk);
        let parts = equipment.parts.clone();
        drop(equipment);
        if layers::wal(&definition).is_none() {
            self.forget_log(&definition);
        }
        self.note_open_log(&definition);
        self.adopt(served, definition, parts, made);
        let layers = served.disk.layers();
        let names: Vec<&str> = layers.iter().map(|layer| layer.name()).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        tracing::info!(disk = served.disk.name(), layers = names, "its layers were changed");
        Ok(())
    }

    /// A disk is as this definition says, with these parts and layers.
    pub(crate) fn adopt(
        &self,
        served: &Served,
        definition: DiskDefinition,
        parts: Parts,
        layers: Vec<KeyedLayer>,
    ) {
        let mut live = served.live();
        live.definition = definition;
        live.parts = parts;
        live.layers = layers;
        drop(live);
        for feature in FEATURES {
            feature.stacked(self, served);
        }
    }

    /// Withdraws a disk. One that is not served is no longer tried. Clients are disconnected once
    /// their requests in flight have completed, and the back end is flushed. Waits for that up to a
    /// limit; the removal continues beyond it. A disk with a connected VMM or NBD client is removed
    /// only with `force`.
    pub(crate) fn remove_disk(
        self: &Arc<Self>,
        name: &str,
        force: bool,
        is_temporary: bool,
    ) -> Result<Done, ErrorBody> {
        let (served, withdrawal, recording) = {
            let _change = self.change(name)?;
            let is_temporary = is_temporary || self.lasting.of(name).is_none();
            if self.unserved.reason(name).is_some() {
                let recording = self.lasting.begin(name, None, None, is_temporary)?;
                if let Some(done) = self.give_up_serving(name) {
                    return recording.done().map(|()| done);
                }
            }
            if !force {
                refuse_if_used(&self.disk_status(name)?)?;
            }
            let served = self.find(name)?;
            let recording =
                self.lasting.begin(name, served.claims().image(), None, is_temporary)?;
            let withdrawal = self.withdraw(&served, Author::Control);
            (served, withdrawal, recording)
        };
        // The right to change the disk is free during the wait.
        let end = Instant::now() + REMOVAL_TIME_MAX;
        let outcome = removed(name, &withdrawal, end);
        let Ok(_change) = self.change(name) else {
            recording.leave_pending();
            return outcome.map(|()| done_removing(name));
        };
        // Without a thread for its withdrawal, it is still served.
        if self.find(name).is_ok_and(|now| Arc::ptr_eq(&now, &served))
            && served.withdrawal().is_none()
        {
            drop(recording);
            return outcome.map(|()| done_removing(name));
        }
        match withdrawal.wait(Instant::now()) {
            Standing::Clean | Standing::Unflushed(_) => recording.done()?,
            // A log that is not home is a reason to serve the disk at the next start. So is a
            // withdrawal that hangs.
            Standing::Behind(_) | Standing::Flushing | Standing::Draining => {
                recording.leave_pending();
            }
        }
        outcome.map(|()| done_removing(name))
    }
}

fn done_removing(name: &str) -> Done {
    Done { message: format!("the disk {name:?} is no longer served") }
}

/// The folder for records that outlive the daemon: systemd's state folder of this service, else the
/// folder of the control socket.
pub(crate) fn records_folder(control: &Path) -> PathBuf {
    let state = std::env::var_os("STATE_DIRECTORY").filter(|state| !state.is_empty());
    let beside = || control.parent().unwrap_or(Path::new(".")).to_owned();
    state.map_or_else(beside, PathBuf::from)
}

/// The claims of a disk that is being opened; given up when dropped.
pub(crate) struct OpeningClaim<'d> {
    daemon: &'d Daemon,
    number: u64,
}

impl Drop for OpeningClaim<'_> {
    fn drop(&mut self) {
        self.daemon.with_state(|state| state.opening.remove(&self.number));
    }
}

/// The error of an attempt to serve a disk that the configuration no longer has.
fn superseded(name: &str) -> ErrorBody {
    refusal(
        ErrorCode::Conflict,
        format!("the configuration no longer has this disk {name:?}"),
        "nothing needs to be done",
    )
}

/// Waits until `end` for a disk to be removed.
pub(crate) fn removed(name: &str, withdrawal: &Withdrawal, end: Instant) -> Result<(), ErrorBody> {
    let refused = |message: String, remedy: &str| Err(refusal(ErrorCode::Failed, message, remedy));
    match withdrawal.wait(end) {
        Standing::Clean => Ok(()),
        Standing::Unflushed(error) => refused(
            format!("the disk {name:?} is no longer served, but its last flush failed: {error}"),
            "do not rely on its last writes",
        ),
        Standing::Behind(error) => refused(
            format!(
                "the disk {name:?} is no longer served, but its log was not completely written back: \
                 {error}"
            ),
            "no data is lost: the rest is in the log. Serve the disk with its log again, and do not \
             use its image without the log",
        ),
        standing => {
            let what = match standing {
                Standing::Flushing => "its last flush has",
                _ => "its requests in flight have",
            };
            let seconds = withdrawal.age().as_secs();
            refused(
                format!(
                    "the disk {name:?} accepts no new requests, but {what} not completed for \
                     {seconds} s: the storage beneath it hangs"
                ),
                "it is removed as soon as they complete; until then `fathom disk list` shows it",
            )
        }
    }
}

/// Rejects the removal of a disk that is in use.
pub(crate) fn refuse_if_used(status: &DiskStatus) -> Result<(), ErrorBody> {
    let (mut machines, mut clients) = (0, 0);
    for frontend in &status.frontends {
        match frontend {
            FrontendStatus::VhostUser(guest) => machines += u64::from(guest.connected),
            FrontendStatus::Nbd(export) => clients += export.connections,
        }
    }
    let user = match (machines, clients) {
        (0, 0) => return Ok(()),
        (0, 1) => "an NBD client".to_owned(),
        (0, _) => format!("{clients} NBD clients"),
        _ if status.vm.is_empty() => "a virtual machine".to_owned(),
        _ => format!("the virtual machine {:?}", status.vm),
    };
    Err(refusal(
        ErrorCode::Conflict,
        format!("the disk {:?} is in use by {user}", status.name),
        "end that use first, or remove the disk with --force (`force=true`): requests then fail or \
         hang",
    ))
}

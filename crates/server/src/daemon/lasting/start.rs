//! The disks of a start: which definition of each applies, and logs that it does not have.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, LayerDefinition};
use fathom_image::{LogMark, MarkedLog};
use fathom_persistence::Identity;

use super::RecordedChange;
use crate::configuration::{Configuration, layers};
use crate::daemon::overlay::{
    ChangeRecord, Damage, DefinitionChoice, RecordKind, RecordProgress, choose, is_unchanged, stem,
};
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};
use crate::features::log::{LogVolumes, WalDefinition, is_named, is_same_log};

/// The time between two attempts to write a log home that the definition of its disk does not have.
const DRAIN_INTERVAL: Duration = Duration::from_secs(10);

impl Daemon {
    /// Lets the thread that writes logs home find the daemon.
    pub(crate) fn begin_lasting(self: &Arc<Self>) {
        let _ = self.lasting.daemon.set(Arc::downgrade(self));
    }

    /// The disks to serve at a start: those of the file in its order, and those of the records.
    /// Which definition of a changed disk applies is decided when it is served
    /// ([`Self::serve_planned`]), because that may need its image.
    pub(crate) fn planned(&self, configuration: &Configuration) -> Vec<DiskDefinition> {
        let (mut planned, mut edited) = (Vec::new(), Vec::new());
        self.lasting.with(|records| {
            let mut stems = BTreeSet::new();
            for entry in configuration.disks.iter().map(|disk| &disk.definition) {
                let name = &entry.name;
                stems.insert(stem(name));
                let change = records.changes.get(name).filter(|it| is_unchanged(Some(entry), it));
                match change.map(|change| (&change.after, change.state)) {
                    Some((Some(after), _)) => planned.push(after.clone()),
                    Some((None, RecordProgress::Done)) => {
                        tracing::info!(
                            disk = name.as_str(),
                            "is not served: it was removed in use"
                        );
                    }
                    _ => planned.push(entry.clone()),
                }
            }
            for (name, change) in &records.changes {
                if records.entries.contains_key(name) {
                    continue;
                }
                match change.after.as_ref().or(change.before.as_ref()) {
                    Some(known) if is_unchanged(None, change) => planned.push(known.clone()),
                    _ => edited.push(name.clone()),
                }
            }
            // Disks that a request added, of which nothing but the name is known.
            let unknown = records.damaged.keys().filter(|stem| !stems.contains(*stem));
            let unknown = unknown
                .map(|stem| DiskDefinition { name: stem.clone(), ..DiskDefinition::default() });
            planned.extend(unknown);
        });
        self.part::<LogVolumes>().know(planned.iter());
        for name in edited {
            tracing::warn!(
                disk = name.as_str(),
                "its change in use is set aside: the file has no such disk any more"
            );
            log_failure(&name, self.lasting.set_aside(&name));
        }
        planned
    }

    /// Why a disk whose record is damaged is not served.
    fn damaged(&self, name: &str, damage: &Damage) -> ErrorBody {
        let file = self.lasting.folder.file(RecordKind::Change, name);
        let message = format!(
            "the record of the changes of {name:?} in use, {}, cannot be used: {damage}",
            file.display()
        );
        let first = match damage {
            Damage::Newer(_) => "use that version of Fathom",
            _ => "restore the record",
        };
        let remedy = format!(
            "{first}, or run `fathom config revert {name}`: the disk is then served as in the file, and the record is \
             kept. A log that its image needs is found by the image's mark"
        );
        refusal(ErrorCode::Failed, message, remedy)
    }

    /// Decides how a planned disk is served. `None`: not at all.
    fn settled(&self, planned: &DiskDefinition) -> Result<Option<DiskDefinition>, ErrorBody> {
        let name = &planned.name;
        let (entry, change, damage) = self.lasting.with(|records| {
            let damage = records.damaged.get(&stem(name)).cloned();
            (records.entries.get(name).cloned(), records.changes.get(name).cloned(), damage)
        });
        if let Some(damage) = damage {
            return Err(self.damaged(name, &damage));
        }
        let Some(change) = change else { return Ok(Some(planned.clone())) };
        let (before, after) = (change.before.clone(), change.after.clone());
        let known = after.clone().or_else(|| before.clone());
        let marked = || known.as_ref().map_or(Ok(None), |known| self.marked_log(known));
        let has_changes = |log: &WalDefinition| {
            // To open a volume in a cluster takes it from whoever has it: as the log of the disk,
            // and not to ask.
            let has = |known: &DiskDefinition| self.has_changes(known, log) == Some(true);
            log.cluster.is_some() || known.as_ref().is_some_and(has)
        };
        let definition = match choose(entry.as_ref(), &change, marked, has_changes)? {
            DefinitionChoice::File => {
                let moved = entry.as_ref().and_then(|entry| self.lasting.moved_entry(entry));
                if let (Some(entry), Some(moved)) = (&entry, moved) {
                    log_failure(name, self.lasting.follow_entry(entry, &moved));
                    return Ok(Some(moved));
                }
                tracing::warn!(
                    disk = name.as_str(),
                    "its change in use is set aside: its entry in the file was edited since"
                );
                log_failure(name, self.lasting.set_aside(name));
                return Ok(entry);
            }
            DefinitionChoice::Before => before,
            DefinitionChoice::After => after,
        };
        if change.state == RecordProgress::Pending {
            tracing::info!(
                disk = name.as_str(),
                "a change in use was not completed: {}",
                if definition == change.after { "it is in effect" } else { "it is not in effect" }
            );
            let settled = ChangeRecord { after: definition.clone(), ..change };
            let lasting = &self.lasting;
            // Also if the record cannot be completed now: the next change begins with what is
            // served.
            lasting.change(|records| records.changes.insert(name.clone(), settled.clone()));
            let recording = RecordedChange::new(lasting, name, Some(settled), None);
            log_failure(name, recording.done());
        }
        Ok(definition)
    }

    /// The definition with which [`Self::serve_planned`] opens a disk now. `None`: it is not to be
    /// served.
    pub(crate) fn definition_to_open(
        &self,
        planned: &DiskDefinition,
    ) -> Result<Option<DiskDefinition>, ErrorBody> {
        let Some(definition) = self.settled(planned)? else { return Ok(None) };
        Ok(Some(match self.layers_with_marked_log(&definition) {
            Some(layers) => DiskDefinition { layers, ..definition },
            None => definition,
        }))
    }

    /// The log that the mark of a disk's image names, if it has a mark.
    fn marked_log(&self, definition: &DiskDefinition) -> Result<Option<MarkedLog>, ErrorBody> {
        let Some(image) = &definition.image else { return Ok(None) };
        let key = definition.key.as_deref();
        let mark = LogMark::open_named(image, &self.records_folder(), key);
        let read = |mark: LogMark| {
            // The mark of another image, of which opening the disk reports more.
            if mark.is_foreign()? {
                Ok(Some(MarkedLog {
                    identity: Identity::NONE,
                    age: None,
                    offset: 0,
                    path: String::new(),
                }))
            } else {
                mark.read()
            }
        };
        mark.and_then(read).map_err(|error| {
            let shown = image.display();
            let message = format!("it is unknown whether {shown} has changes in a log: {error}");
            refusal(ErrorCode::Failed, message, "check its file system")
        })
    }

    /// Whether a log has changes of the image of a disk that has no mark. Waits for the log for a
    /// limited time. `None` if it does not answer.
    fn has_changes(&self, definition: &DiskDefinition, log: &WalDefinition) -> Option<bool> {
        let image = definition.image.as_ref()?;
        let (folder, key) = (self.records_folder(), definition.key.as_deref());
        let home = LogMark::open_named(image, &folder, key).ok()?.home();
        self.part::<LogVolumes>().has_changes(log, (&definition.name, image, &home))
    }

    /// Serves a disk of the file or of the records with `serve`, which gets the definition and the
    /// entry of the file. If the image needs a log that the definition does not have, the disk is
    /// first served with that log, which is written home and removed while the disk is used.
    /// Returns false if the disk is not to be served.
    pub(crate) fn serve_planned(
        &self,
        planned: &DiskDefinition,
        serve: impl FnOnce(DiskDefinition, Option<DiskDefinition>) -> Result<(), ErrorBody>,
    ) -> Result<bool, ErrorBody> {
        let Some(definition) = self.settled(planned)? else { return Ok(false) };
        let configured = self.lasting.entry(&definition.name);
        let Some(layers) = self.layers_with_marked_log(&definition) else {
            let is_changed = configured.as_ref() != Some(&definition);
            let name = definition.name.clone();
            serve(definition, configured)?;
            if is_changed {
                tracing::info!(disk = name.as_str(), "is served as it was changed in use");
            }
            return Ok(true);
        };
        serve(DiskDefinition { layers, ..definition.clone() }, configured)?;
        let name = definition.name.clone();
        tracing::warn!(
            disk = name.as_str(),
            "is served with a log that its definition does not have, until that is written home"
        );
        if let Some(daemon) = self.lasting.daemon.get().cloned() {
            let ours = name.clone();
            let work = move || drain(&daemon, &ours);
            if let Err(error) = thread::Builder::new().name("drain".into()).spawn(work) {
                tracing::error!(disk = name.as_str(), %error, "its log stays: a thread cannot be started");
            }
        }
        Ok(true)
    }

    /// The layers with which the log was opened that the mark of the image names, if the definition
    /// has another log or none.
    fn layers_with_marked_log(&self, definition: &DiskDefinition) -> Option<Vec<LayerDefinition>> {
        let noted =
            self.lasting.with(|records| records.logs.get(&definition.name)?.after.clone())?;
        let log = layers::wal(&noted)?;
        let wanted = layers::wal(definition);
        if wanted.is_some_and(|wanted| is_same_log(&log, &wanted))
            || noted.image != definition.image
            || definition.read_only
        {
            return None;
        }
        let marked = self.marked_log(definition).ok()?;
        if let Some(marked) = marked.as_ref().filter(|marked| marked.identity != Identity::NONE) {
            return is_named(&log, marked).then_some(noted.layers);
        }
        // A volume in a cluster is not taken from whoever has it only to ask it.
        if log.cluster.is_some() {
            return None;
        }
        // The image may have lost its mark, for example because it is a copy. With its log, it is
        // refused.
        let has_changes = self.has_changes(definition, &log)?;
        if !has_changes && marked.is_none() {
            self.lasting.forget_log(&definition.name);
        }
        has_changes.then_some(noted.layers)
    }

    /// Forgets the log that a disk had, unless its image still needs it.
    pub(in super::super) fn forget_log(&self, definition: &DiskDefinition) {
        let is_noted = self.lasting.with(|records| records.logs.contains_key(&definition.name));
        if is_noted && self.marked_log(definition).is_ok_and(|marked| marked.is_none()) {
            self.lasting.forget_log(&definition.name);
        }
    }

    /// Notes the place of a log before it is opened, if the image needs no log yet. A log that the
    /// image needs is noted when it has been opened ([`Self::note_open_log`]): it may be another
    /// one.
    pub(crate) fn note_log(&self, definition: &DiskDefinition) {
        if layers::wal(definition).is_some()
            && self.marked_log(definition).is_ok_and(|it| it.is_none())
        {
            self.lasting.note_log(definition);
        }
    }

    /// Notes the place of a log that has been opened.
    pub(crate) fn note_open_log(&self, definition: &DiskDefinition) {
        self.lasting.note_log(definition);
    }

    /// Gives a disk the layers of `wanted`. If these have another log than the disk has, that is
    /// written home and removed first.
    pub(crate) fn restack_over(
        &self,
        served: &Served,
        wanted: DiskDefinition,
    ) -> Result<(), ErrorBody> {
        let mut without = served.live().definition.clone();
        let (had, has) = (layers::wal(&without), layers::wal(&wanted));
        if had.zip(has).is_some_and(|(had, has)| !is_same_log(&had, &has)) {
            without.layers.retain(|layer| !layers::has_any_log(layer));
            self.restack(served, without)?;
        }
        self.restack(served, wanted)
    }
}

fn log_failure<T>(name: &str, result: Result<T, ErrorBody>) {
    if let Err(refused) = result {
        tracing::error!(disk = name, "{}; {}", refused.message, refused.remedy);
    }
}

/// Writes the log of a disk home that its definition does not have, and gives the disk the layers
/// of that.
fn drain(daemon: &Weak<Daemon>, name: &str) {
    loop {
        let Some(daemon) = daemon.upgrade() else { return };
        let drained = daemon.change(name).and_then(|_change| {
            // A request may have removed or changed the disk meanwhile.
            let Ok(served) = daemon.find(name) else { return Ok(()) };
            let Some(wanted) = daemon.lasting.of(name) else { return Ok(()) };
            if served.withdrawal().is_some() {
                return Ok(());
            }
            daemon.restack_over(&served, wanted)?;
            tracing::info!(
                disk = name,
                "the log that its definition does not have is home and removed"
            );
            Ok(())
        });
        match drained {
            Ok(()) => return,
            Err(_) if daemon.is_stopping() => return,
            Err(refused) => tracing::warn!(
                disk = name,
                "a log that its definition does not have is not home yet: {}",
                refused.message
            ),
        }
        drop(daemon);
        thread::sleep(DRAIN_INTERVAL);
    }
}

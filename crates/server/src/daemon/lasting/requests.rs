//! The differences between the file and the running daemon, and the way back to the file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_control::{
    ConfigurationReport, Deviation, DeviationKind, DiskDefinition, ErrorBody, ErrorCode,
    KeyDeviation, ReloadReport, SetAside,
};
use fathom_insight::change::Author;
use serde_json::{Map, Value};

use super::{Lasting, RecordedChange, entries_of};
use crate::daemon::disks::{refuse_if_used, removed};
use crate::daemon::overlay::{
    ChangeRecord, RecordKind, RecordProgress, as_recorded, is_as_in_file, stem,
};
use crate::daemon::stack::refusal;
use crate::daemon::unserved::{ServingOutcome, still_opening};
use crate::daemon::{Daemon, Served};

/// How long the way back to the file waits for a disk that is removed.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(20);
/// How long it waits for a disk that is served again.
const SERVE_TIME_MAX: Duration = Duration::from_secs(10);

impl Lasting {
    /// Whether a disk has a change in use, lasting or not.
    pub(crate) fn has_change(&self, name: &str) -> bool {
        self.with(|records| {
            records.changes.contains_key(name)
                || records.temporary.contains(name)
                || records.damaged.contains_key(&stem(name))
        })
    }

    /// Sets aside the change of a disk that the file describes. Adds a line to the report if there
    /// was one. `keys` are those that differed.
    pub(crate) fn undo(&self, name: &str, keys: &str, report: &mut ReloadReport) {
        let change = self.with(|records| records.changes.get(name).cloned());
        let what = match &change {
            Some(ChangeRecord { after: None, .. }) => "its removal".to_owned(),
            Some(ChangeRecord { entry: None, .. }) => "its addition".to_owned(),
            _ if keys.is_empty() => "its change".to_owned(),
            _ => format!("the change of its {keys}"),
        };
        match self.set_aside(name) {
            Ok(true) => report.changed.push(format!("the disk {name:?}: undone, {what}")),
            Ok(false) => {}
            Err(refused) => report.refused.push(refused.to_string()),
        }
    }

    /// The file has what was changed in use.
    pub(crate) fn adopt(&self, name: &str, report: &mut ReloadReport) {
        let recording = self.with(|records| {
            let entry = records.entries.get(name).cloned();
            let change = records.changes.get(name)?;
            let pending = ChangeRecord {
                after: entry.clone(),
                entry,
                state: RecordProgress::Done,
                ..change.clone()
            };
            Some(RecordedChange::new(self, name, Some(pending), None))
        });
        self.change(|records| records.temporary.remove(name));
        if let Some(Err(refused)) = recording.map(RecordedChange::done) {
            report.refused.push(refused.to_string());
        }
    }

    /// Whether a request has added a disk that the file did not have.
    pub(crate) fn is_added(&self, name: &str) -> bool {
        let is_added = |change: &ChangeRecord| change.entry.is_none() && change.after.is_some();
        self.with(|records| records.changes.get(name).is_some_and(is_added))
    }

    /// Sets aside the changes of disks that the file no longer has and that are not served any
    /// more.
    pub(crate) fn undo_missing(&self, is_served: impl Fn(&str) -> bool, report: &mut ReloadReport) {
        let missing: Vec<String> = self.with(|records| {
            let changes = records.changes.iter();
            let missing = changes.filter(|(name, change)| {
                change.entry.is_some() && !records.entries.contains_key(*name)
            });
            missing.map(|(name, _)| name.clone()).collect()
        });
        for name in missing.into_iter().filter(|name| !is_served(name)) {
            if let Err(refused) = self.set_aside(&name) {
                report.refused.push(refused.to_string());
            }
        }
    }
}

/// What a definition has otherwise than the file.
fn key_deviations(
    file: Option<&DiskDefinition>,
    now: Option<&DiskDefinition>,
) -> Vec<KeyDeviation> {
    let object = |disk: Option<&DiskDefinition>| -> Map<String, Value> {
        let value = disk.map(|disk| serde_json::to_value(as_recorded(disk)).unwrap_or_default());
        value.and_then(|value| value.as_object().cloned()).unwrap_or_default()
    };
    let (file, mut now) = (object(file), object(now));
    let mut keys = Vec::new();
    for (key, before) in file {
        let after = now.remove(&key).unwrap_or_default();
        if before != after {
            keys.push(KeyDeviation { key, file: before, running: after });
        }
    }
    keys.extend(now.into_iter().map(|(key, running)| KeyDeviation {
        key,
        file: Value::Null,
        running,
    }));
    keys
}

/// What differs between two definitions, in words.
pub(crate) fn differing_keys(file: &DiskDefinition, now: &DiskDefinition) -> String {
    let keys = key_deviations(Some(file), Some(now));
    keys.iter().map(|it| format!("`{}`", it.key)).collect::<Vec<_>>().join(", ")
}

impl Daemon {
    /// How the running daemon differs from the file as it is now.
    pub(crate) fn configuration_report(&self) -> ConfigurationReport {
        let (file, file_problem) = match self.file.as_ref().map(|file| (file, file.load())) {
            None => (None, String::new()),
            Some((file, Ok(new))) => (Some((file, Some(entries_of(&new)))), String::new()),
            Some((file, Err(problems))) => (Some((file, None)), problems.to_string()),
        };
        let path = file.as_ref().map(|(file, _)| file.path.display().to_string());
        let entries = file.and_then(|(_, entries)| entries);
        let entries = entries.unwrap_or_else(|| self.lasting.with(|it| it.entries.clone()));
        let running: BTreeMap<String, DiskDefinition> = self
            .served()
            .iter()
            .filter(|served| served.withdrawal().is_none())
            .map(|served| (served.disk.name().to_owned(), served.live().definition.clone()))
            .collect();
        let names: BTreeSet<&String> = entries.keys().chain(running.keys()).collect();
        let mut deviations = Vec::new();
        for name in names {
            let (entry, now) = (entries.get(name), running.get(name));
            let lasting = self.lasting.of(name);
            // A disk that cannot be served now was not removed.
            let is_temporary = self.lasting.with(|records| records.temporary.contains(name));
            let is_unserved = now.is_none() && lasting.is_some() && !is_temporary;
            if is_unserved || is_as_in_file(entry, now) {
                continue;
            }
            deviations.push(Deviation {
                disk: name.clone(),
                kind: match (entry, now) {
                    (None, _) => DeviationKind::Added,
                    (_, None) => DeviationKind::Removed,
                    _ => DeviationKind::Changed,
                },
                lasting: is_as_in_file(lasting.as_ref(), now),
                keys: if entry.is_some() && now.is_some() {
                    key_deviations(entry, now)
                } else {
                    Vec::new()
                },
                definition: now.cloned(),
            });
        }
        let folder = self.lasting.folder();
        let set_aside = |change: &ChangeRecord| SetAside {
            disk: change.name.clone(),
            record: folder.file(RecordKind::Aside, &change.name).display().to_string(),
            definition: change.after.clone(),
        };
        let (aside, damaged) = self.lasting.with(|records| {
            let aside = records.aside.values().map(set_aside).collect();
            let damaged = records.damaged.iter();
            (aside, damaged.map(|(stem, damage)| (stem.clone(), damage.to_string())).collect())
        });
        ConfigurationReport {
            file: path,
            file_problem,
            folder: folder.path().display().to_string(),
            folder_problem: folder.problem().unwrap_or_default(),
            disks: deviations,
            set_aside: aside,
            damaged,
        }
    }

    /// Brings a disk, or all, back to what the file had when it was read last.
    pub(crate) fn revert(
        self: &Arc<Self>,
        disk: Option<&str>,
        force: bool,
    ) -> Result<ReloadReport, ErrorBody> {
        let names: Vec<String> = self.lasting.with(|records| {
            let known = records.changes.keys().chain(&records.temporary).cloned();
            let mut names: Vec<String> = known.chain(records.damaged.keys().cloned()).collect();
            names.sort_unstable();
            names.dedup();
            names
        });
        let mut report = ReloadReport::default();
        match disk {
            Some(name) => {
                if !names.iter().any(|it| it == name || *it == stem(name)) {
                    if !self.lasting.with(|records| records.entries.contains_key(name)) {
                        self.find(name)?;
                    }
                    return Err(refusal(
                        ErrorCode::Conflict,
                        format!("the disk {name:?} has no change in use"),
                        "it is as in the file",
                    ));
                }
                self.revert_disk(name, force, &mut report)?;
            }
            None => {
                for name in &names {
                    if let Err(refused) = self.revert_disk(name, force, &mut report) {
                        report.refused.push(refused.to_string());
                    }
                }
            }
        }
        for line in &report.changed {
            tracing::info!("reverted: {line}");
        }
        Ok(report)
    }

    fn revert_disk(
        self: &Arc<Self>,
        name: &str,
        force: bool,
        report: &mut ReloadReport,
    ) -> Result<(), ErrorBody> {
        let change = self.change(name)?;
        if self.lasting.has_moved(name) {
            return Err(super::has_moved(name));
        }
        let entry = self.lasting.entry(name);
        let served = self.find(name).ok().filter(|served| served.withdrawal().is_none());
        match (entry, served) {
            (Some(entry), Some(served)) => {
                let live = served.live().definition.clone();
                let what = differing_keys(&entry, &live);
                self.restack_to(&served, &entry)?;
                let after = served.live().definition.clone();
                let fixed = differing_keys(&entry, &after);
                self.lasting.undo(name, &what, report);
                if !fixed.is_empty() {
                    report.refused.push(format!(
                        "the disk {name:?} keeps its {fixed} until it is served again: `fathom disk remove {name}`, \
                         then reload"
                    ));
                }
            }
            (Some(entry), None) => {
                self.lasting.undo(name, "", report);
                self.serve_again(&entry, report);
            }
            (None, Some(served)) => {
                if !force {
                    refuse_if_used(&self.disk_status(name)?)?;
                }
                self.lasting.undo(name, "", report);
                let withdrawal = self.withdraw(&served, Author::Control);
                drop(change);
                removed(name, &withdrawal, Instant::now() + REMOVAL_TIME_MAX)?;
            }
            (None, None) => {
                self.lasting.undo(name, "", report);
                self.forget_unserved(|other| other != name);
            }
        }
        Ok(())
    }

    /// Serves a disk of the file that a change in use has removed, or whose record could not be
    /// used.
    fn serve_again(self: &Arc<Self>, entry: &DiskDefinition, report: &mut ReloadReport) {
        let ticket = self.begin_serving(entry);
        match self.unserved.wait(&ticket, Some(Instant::now() + SERVE_TIME_MAX)) {
            ServingOutcome::Gone => {
                report.changed.push(format!("the disk {:?} is served again", entry.name));
            }
            ServingOutcome::Refused(refused) => report.refused.push(refused.to_string()),
            ServingOutcome::Opening => report.refused.push(still_opening(&entry.name).to_string()),
        }
    }

    /// Gives a served disk what an entry of the file has, as far as that can change in use. Returns
    /// whether anything differed.
    pub(crate) fn restack_to(
        &self,
        served: &Served,
        entry: &DiskDefinition,
    ) -> Result<bool, ErrorBody> {
        let mut next = served.live().definition.clone();
        next.tap = entry.tap;
        // Used when the image is opened again.
        next.format = entry.format;
        next.classify = entry.classify;
        next.class_bounds.clone_from(&entry.class_bounds);
        next.layers.clone_from(&entry.layers);
        next.model.clone_from(&entry.model);
        if next == served.live().definition {
            return Ok(false);
        }
        let before = served.live().definition.clone();
        self.restack_over(served, next)?;
        self.note_layers(served, &before, Author::Configuration);
        Ok(true)
    }

    /// Whether a served disk is as the file's entry says. Then it has no change in use any more.
    pub(crate) fn adopts_entry(
        &self,
        served: &Served,
        entry: &DiskDefinition,
        report: &mut ReloadReport,
    ) -> bool {
        let mut live = served.live();
        if !is_as_in_file(Some(entry), Some(&live.definition)) {
            return false;
        }
        live.configured = Some(entry.clone());
        drop(live);
        self.lasting.adopt(&entry.name, report);
        true
    }
}

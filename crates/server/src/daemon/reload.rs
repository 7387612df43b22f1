//! Reads the configuration again and applies the differences.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ReloadReport, count};
use fathom_insight::change::{Author, ChangeKind};

use super::disks::{refuse_if_used, removed};
use super::lasting::differing_keys;
use super::stop::{Task, run};
use super::unserved::{ServingOutcome, Ticket, still_opening};
use super::{Daemon, Served};
use crate::configuration::Configuration;
use crate::daemon::change_log::Note;
use crate::daemon::stack::refusal;
use crate::features::FEATURES;
use crate::stores::qemu;

/// How long a reload waits for disks and listeners that are removed. Beyond it the removals
/// continue, and the reload reports them.
const REMOVALS_TIME_MAX: Duration = Duration::from_secs(20);

/// How long a reload waits for disks that are opened or changed. Beyond it that continues, and the
/// reload reports it.
const DISKS_TIME_MAX: Duration = Duration::from_secs(10);

/// What a reload does with a disk.
enum Work {
    /// It stays as it is.
    None,
    /// It is being opened.
    Serving(Ticket),
    /// It is being changed, which gives this report.
    Changing(mpsc::Receiver<ReloadReport>),
}

impl Daemon {
    /// Reads the configuration file again and applies the differences. Settings that cannot change
    /// while the daemon runs stay as they are, and the report names them. So do disks and listeners
    /// that the file no longer has while somebody uses them, unless with `force`: the file may be
    /// empty or cut off.
    ///
    /// # Errors
    /// If there is no file, or if it is invalid; nothing is changed then.
    pub(crate) fn reload(self: &Arc<Self>, force: bool) -> Result<ReloadReport, ErrorBody> {
        let _change = self.change_configuration()?;
        let Some(file) = &self.file else {
            return Err(refusal(
                ErrorCode::Unsupported,
                "the daemon was started without a configuration file",
                "start it with --config, or change disks with `fathom disk`",
            ));
        };
        let new = file.load().map_err(|problems| {
            let remedy = "correct the file and reload: nothing was changed";
            refusal(ErrorCode::Invalid, problems.to_string(), remedy)
        })?;
        new.log_warnings();
        self.lasting.set_entries(&new);
        let mut report = ReloadReport::default();
        self.reload_daemon(&new, &mut report);
        self.reload_removals(&new, force, &mut report);
        // A disk in use stays, and so does its record.
        self.lasting.undo_missing(|name| self.find(name).is_ok(), &mut report);
        for feature in FEATURES {
            feature.reread(self, &new, &mut report);
        }
        self.reload_disks(&new, &mut report);
        for feature in FEATURES {
            feature.reload(self, &new, &mut report);
        }
        self.refresh(&mut report);
        self.lasting.folder().accept();
        let lines = report.changed.iter().chain(&report.refused);
        let text = lines.map(String::as_str).collect::<Vec<_>>().join("; ");
        let reload = Note::new(ChangeKind::Reload, Author::Control);
        self.note_change(&reload.with_text(&text));
        for line in &report.changed {
            tracing::info!("reload: {line}");
        }
        for line in &report.refused {
            tracing::warn!("reload: {line}");
        }
        Ok(report)
    }

    fn reload_daemon(self: &Arc<Self>, new: &Configuration, report: &mut ReloadReport) {
        let refuse = |key: &str| {
            format!("`{key}` of [daemon] cannot change while the daemon runs: restart it")
        };
        let (wanted, options) = (&new.daemon.definition, &self.options);
        let fixed = [
            ("cache_index_percent", wanted.cache_index_percent != options.cache_index_percent),
            ("control", wanted.control != options.control),
            ("control_group", wanted.control_group != options.control_group),
            ("idle_requests", wanted.idle_requests != options.idle_requests),
            ("idle_time", wanted.idle_time != options.idle_time),
            ("keepsakes", wanted.keepsakes != options.keepsakes),
            ("metrics", wanted.metrics != options.metrics),
            ("metrics_cgroups_max", wanted.metrics_cgroups_max != options.metrics_cgroups_max),
            ("nbd_memory", wanted.nbd_memory != options.nbd_memory),
            ("nbd_client_memory", wanted.nbd_client_memory != options.nbd_client_memory),
            ("store_index_memory", wanted.store_index_memory != options.store_index_memory),
            ("shutdown_time_max", wanted.shutdown_time_max != options.shutdown_time_max),
            ("view_group", wanted.view_group != options.view_group),
        ];
        for (key, _) in fixed.iter().filter(|(_, differs)| *differs) {
            report.refused.push(refuse(key));
        }
        if self.journal.set_level(wanted.log) {
            report.changed.push("another level of the log".into());
        }
    }

    fn reload_removals(
        self: &Arc<Self>,
        new: &Configuration,
        force: bool,
        report: &mut ReloadReport,
    ) {
        let mut leaving = Vec::new();
        let stays = |name: &str| new.disks.iter().any(|disk| disk.definition.name == name);
        // Disks that were added by request do not depend on the file.
        self.forget_unserved(|name| stays(name) || self.lasting.is_added(name));
        for served in self.served() {
            let name = served.disk.name();
            // Disks that were added by request do not depend on the file.
            if stays(name) || served.live().configured.is_none() {
                continue;
            }
            let _change = match self.change(name) {
                Ok(change) => change,
                Err(refused) => {
                    report.refused.push(refused.message);
                    continue;
                }
            };
            let used = self.disk_status(name).and_then(|status| refuse_if_used(&status));
            match used {
                Err(ErrorBody { code: ErrorCode::Conflict, message, .. }) if !force => {
                    report.refused.push(format!(
                        "{message}, and stays although the file no longer has it: end that use and reload, or \
                         remove it with `fathom disk remove {name} --force`"
                    ));
                }
                _ => leaving.push((name.to_owned(), self.withdraw(&served, Author::Configuration))),
            }
        }
        let end = Instant::now() + REMOVALS_TIME_MAX;
        for (name, withdrawal) in leaving {
            match removed(&name, &withdrawal, end) {
                Ok(()) => report.changed.push(format!("the disk {name:?} was removed")),
                Err(refused) => report.refused.push(refused.message),
            }
        }
        for listening in self.listening() {
            let definition = listening.definition();
            let mut others = new.listeners.iter().map(|listener| &listener.definition);
            if others.any(|other| other.address == definition.address) {
                continue;
            }
            let clients = {
                let listener = listening.listener();
                listener.as_ref().map_or(0, |listener| listener.connections().len())
            };
            if clients > 0 && !force {
                report.refused.push(format!(
                    "the listener at {} has {}, and stays although the file no longer has it: end them and \
                     reload, or reload with `force=true`",
                    definition.address,
                    count(clients, "client")
                ));
                continue;
            }
            let listener = listening.take_listener();
            let name = format!("the listener at {}", definition.address);
            let close = Task::new(name, move || {
                drop(listener);
                Ok(())
            });
            let unfinished = run(vec![close], end);
            self.with_state(|state| {
                state.listeners.retain(|other| !Arc::ptr_eq(other, &listening));
            });
            report.changed.push(format!("the listener at {} was closed", definition.address));
            report.refused.extend(unfinished);
        }
    }

    /// Serves new disks and changes others, each in a thread of its own: one whose storage hangs
    /// delays no other.
    fn reload_disks(self: &Arc<Self>, new: &Configuration, report: &mut ReloadReport) {
        let end = Instant::now() + DISKS_TIME_MAX;
        for disk in &new.disks {
            let name = &disk.definition.name;
            if self.find(name).is_err() && !self.lasting.has_moved(name) {
                self.lasting.undo(name, "", report);
            }
        }
        let begun: Vec<_> =
            new.disks.iter().map(|disk| self.begin_reload(&disk.definition)).collect();
        for (disk, work) in new.disks.iter().zip(begun) {
            let name = &disk.definition.name;
            match work {
                Work::None => {}
                Work::Serving(ticket) => match self.unserved.wait(&ticket, Some(end)) {
                    ServingOutcome::Gone => {
                        report.changed.push(format!("the disk {name:?} was added"));
                    }
                    ServingOutcome::Refused(refused) => report.refused.push(refused.to_string()),
                    ServingOutcome::Opening => report.refused.push(still_opening(name).to_string()),
                },
                Work::Changing(outcome) => {
                    let left = end.saturating_duration_since(Instant::now());
                    let change = outcome.recv_timeout(left).unwrap_or_else(|_| {
                        let message = format!(
                            "the change of the disk {name:?} has not ended: its storage does not answer. It \
                             continues, and the log shows when it ends"
                        );
                        ReloadReport { changed: Vec::new(), refused: vec![message] }
                    });
                    report.changed.extend(change.changed);
                    report.refused.extend(change.refused);
                }
            }
        }
    }

    /// Begins to serve a disk of the file, or to give it the definition of the file.
    fn begin_reload(self: &Arc<Self>, definition: &DiskDefinition) -> Work {
        if self.find(&definition.name).is_err() {
            let asked = if self.is_unserved(definition) {
                self.ask_to_serve(&definition.name)
            } else {
                None
            };
            return Work::Serving(asked.unwrap_or_else(|| self.begin_serving(definition)));
        }
        let configured = self.find(&definition.name).map(|it| it.live().configured.clone());
        let is_changed = self.lasting.has_change(&definition.name);
        if !is_changed && configured.is_ok_and(|it| it.as_ref() == Some(definition)) {
            return Work::None;
        }
        let (sender, outcome) = mpsc::channel();
        let (daemon, definition) = (Arc::clone(self), definition.clone());
        let change = move || {
            let mut report = ReloadReport::default();
            daemon.reload_disk(&definition, &mut report);
            let _ = sender.send(report);
        };
        if let Err(error) = std::thread::Builder::new().name("reload".into()).spawn(change) {
            // The channel is closed.
            tracing::error!(%error, "a disk is not changed: a thread cannot be started");
        }
        Work::Changing(outcome)
    }

    /// Gives a served disk the definition of the file.
    fn reload_disk(&self, definition: &DiskDefinition, report: &mut ReloadReport) {
        let name = &definition.name;
        let (_change, served) = match self.change(name).and_then(|it| Ok((it, self.find(name)?))) {
            Ok(found) => found,
            Err(refused) => {
                report.refused.push(refused.message);
                return;
            }
        };
        if self.adopts_entry(&served, definition, report) {
            return;
        }
        if let Some(moved) = self.lasting.moved_entry(definition) {
            return self.reload_moved(&served, definition, &moved, report);
        }
        let before = served.live().configured.clone();
        let Some(before) = before else {
            report.refused.push(format!(
                "the disk {name:?} was added by request and is not changed: remove it with \
                 `fathom disk remove {name}`, then reload"
            ));
            return;
        };
        let is_changed = self.lasting.has_change(name);
        if before == *definition && !is_changed {
            return;
        }
        let live = served.live().definition.clone();
        let fixed = differences(&live, definition);
        if !fixed.is_empty() {
            report.refused.push(format!(
                "the disk {name:?} cannot change its {} while it is served: remove it with \
                 `fathom disk remove {name}`, then reload",
                fixed.join(", ")
            ));
        }
        match self.restack_to(&served, definition) {
            Ok(true) => {
                report.changed.push(format!("the layers of the disk {name:?} were changed"));
            }
            Ok(false) => {}
            Err(refused) => {
                report.refused.push(refused.to_string());
                return;
            }
        }
        if is_changed {
            self.lasting.undo(name, &differing_keys(definition, &live), report);
        }
        if let Some(configured) = &mut served.live().configured {
            configured.tap = definition.tap;
            configured.format = definition.format;
            configured.classify = definition.classify;
            configured.class_bounds.clone_from(&definition.class_bounds);
            configured.layers.clone_from(&definition.layers);
            configured.model.clone_from(&definition.model);
        }
    }
}

impl Daemon {
    /// Gives a disk that has moved what the file says of the rest. `moved` is the entry of the file
    /// with the disk's store.
    fn reload_moved(
        &self,
        served: &Served,
        entry: &DiskDefinition,
        moved: &DiskDefinition,
        report: &mut ReloadReport,
    ) {
        let name = &entry.name;
        match self.restack_to(served, moved) {
            Ok(true) => {
                report.changed.push(format!("the layers of the disk {name:?} were changed"));
            }
            Ok(false) => {}
            Err(refused) => return report.refused.push(refused.to_string()),
        }
        let live = served.live().definition.clone();
        let fixed = differences(&live, moved);
        if !fixed.is_empty() {
            let fixed = fixed.join(", ");
            report
                .refused
                .push(format!("the disk {name:?} cannot change its {fixed} while it is served"));
        }
        if let Err(refused) = self.lasting.follow_entry(entry, moved) {
            report.refused.push(refused.to_string());
        }
        served.live().configured = Some(entry.clone());
        report.changed.push(format!(
            "the disk {name:?} keeps the store to which it has moved: write it into the file \
             (`fathom config save` shows it)"
        ));
    }
}

/// The keys that differ between two definitions of a disk and that apply only when it is opened.
fn differences(before: &DiskDefinition, after: &DiskDefinition) -> Vec<&'static str> {
    let mut keys = Vec::new();
    let mut compare = |key, same: bool| {
        if !same {
            keys.push(key);
        }
    };
    compare("vm", before.vm == after.vm);
    compare("serial", before.serial == after.serial);
    compare("image", before.image == after.image);
    // Whether a raw image may look like another format is no matter of the open one.
    let is_raw = |it: &DiskDefinition| qemu::format(it).is_none();
    compare("format", before.format == after.format || is_raw(before) && is_raw(after));
    compare("backing_folders", before.backing_folders == after.backing_folders);
    compare("key", before.key == after.key);
    compare("store", before.store == after.store);
    compare("volume", before.volume == after.volume);
    compare("nbd", before.nbd == after.nbd);
    compare("timeout", before.timeout == after.timeout);
    compare("memory", before.memory == after.memory);
    compare("null", before.null == after.null);
    compare("direct", before.direct == after.direct);
    compare("read_only", before.read_only == after.read_only);
    compare("when_full", before.when_full == after.when_full);
    compare("block_size", before.block_size == after.block_size);
    compare("vhost_user", before.vhost_user == after.vhost_user);
    keys
}

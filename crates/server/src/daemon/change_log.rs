//! What operators, the configuration and the daemon itself changed, for those who listen.
//!
//! A change is noted where it has been made. While nobody listens, that costs one load of a word.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::Clock;
use fathom_control::{DiskDefinition, Problem};
use fathom_insight::Ring;
use fathom_insight::change::{Author, Change, ChangeKind};
use parking_lot::{Mutex, MutexGuard};

use super::{Daemon, Served};
use crate::stores::kinds::StoreKind;

/// The most changes that wait to be collected.
const RING_CHANGES: usize = 1024;

/// The changes on their way to the reader.
#[derive(Default)]
pub(crate) struct ChangeLog {
    /// Whether a reader is attached.
    listening: AtomicBool,
    ring: OnceLock<Ring<Change>>,
    /// Held while a change is put into the ring, which has one writer at a time.
    writing: Mutex<()>,
    /// Called when a change has been noted.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl ChangeLog {
    /// The ring; it is made when a reader is attached for the first time.
    fn ring(&self) -> &Ring<Change> {
        self.ring.get_or_init(|| Ring::new(RING_CHANGES))
    }

    fn writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock()
    }

    /// Sets what is called when a change has been noted.
    pub fn on_change(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Box::new(wake));
    }

    /// Begins to collect changes. Returns the number of those dropped before; `None` while there is
    /// a reader.
    pub fn attach(&self) -> Option<u64> {
        let _writing = self.writing();
        if self.listening.load(Ordering::Relaxed) {
            return None;
        }
        self.ring().clear();
        self.listening.store(true, Ordering::Release);
        Some(self.ring().dropped())
    }

    /// Ends the collection.
    pub fn detach(&self) {
        self.listening.store(false, Ordering::Relaxed);
    }

    /// Moves the collected changes into `changes`. Only the reader calls this.
    pub fn drain(&self, changes: &mut Vec<Change>) {
        self.ring().drain(changes);
    }

    /// The number of changes dropped since the daemon began.
    pub fn dropped(&self) -> u64 {
        self.ring().dropped()
    }

    /// Whether changes are collected.
    pub fn is_heard(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }
}

/// A change to be noted. Empty texts are unknown.
pub(crate) struct Note<'a> {
    pub kind: ChangeKind,
    pub author: Author,
    /// The disk, if the change is of one.
    pub disk: Option<&'a DiskDefinition>,
    /// The kind of the layer.
    pub layer: &'a str,
    /// The kind of the problem.
    pub problem: &'a str,
    /// A description for people.
    pub text: &'a str,
}

impl<'a> Note<'a> {
    /// A change of the whole daemon.
    pub fn new(kind: ChangeKind, author: Author) -> Self {
        Self { kind, author, disk: None, layer: "", problem: "", text: "" }
    }

    /// The change of a disk.
    pub fn of(self, disk: &'a DiskDefinition) -> Self {
        Self { disk: Some(disk), ..self }
    }

    /// The change with a description.
    pub fn with_text(self, text: &'a str) -> Self {
        Self { text, ..self }
    }
}

impl Daemon {
    /// Notes a change that has been made.
    pub(crate) fn note_change(&self, note: &Note<'_>) {
        let log = &self.change_log;
        if !log.is_heard() {
            return;
        }
        let number = |text: &str| self.names().number(text).0;
        let mut change = Change {
            layer: number(note.layer),
            problem: number(note.problem),
            text: number(note.text),
            kind: note.kind as u8,
            author: note.author as u8,
            ..Change::default()
        };
        if let Some(disk) = note.disk {
            change.vm_name = number(&disk.vm);
            change.virtual_disk = number(&disk.name);
            change.physical_disk = number(&physical_disk(disk));
        }
        let writing = log.writing();
        // Read under the lock, so that the times of the ring are in order.
        change.change_ts = Clock::System.now_ns();
        log.ring().push(change);
        drop(writing);
        if let Some(wake) = log.wake.get() {
            wake();
        }
    }

    /// Notes the differences between the layers that a disk had and those that it has.
    pub(crate) fn note_layers(&self, served: &Served, before: &DiskDefinition, author: Author) {
        let after = served.live().definition.clone();
        for (kind, layer) in differences(before, &after) {
            self.note_change(&Note { layer: &layer, ..Note::new(kind, author).of(&after) });
        }
    }

    /// Notes that a problem has begun or ended. `disk` is `None` for a problem of the daemon.
    pub(crate) fn note_problem(&self, kind: ChangeKind, disk: Option<String>, problem: &Problem) {
        if !self.change_log.is_heard() {
            return;
        }
        let disk = disk.map(|name| match self.find(&name) {
            Ok(served) => served.live().definition.clone(),
            Err(_) => DiskDefinition { name, ..DiskDefinition::default() },
        });
        self.note_change(&Note {
            disk: disk.as_ref(),
            problem: problem.kind.name(),
            text: &problem.message,
            ..Note::new(kind, Author::Daemon)
        });
    }
}

/// The label `PDisk` of a disk, as its tap has it.
pub(crate) fn physical_disk(definition: &DiskDefinition) -> String {
    if let Some(image) = &definition.image {
        return image.display().to_string();
    }
    if let Some(export) = &definition.nbd {
        return export.clone();
    }
    StoreKind::of(definition).map_or_else(String::new, |kind| kind.key.into())
}

/// The layers of a definition: for each kind the options of its layers, from the front end down.
fn layers(definition: &DiskDefinition) -> BTreeMap<String, Vec<String>> {
    let mut layers: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for layer in &definition.layers {
        let options = serde_json::to_string(&layer.options).unwrap_or_default();
        layers.entry(layer.kind.clone()).or_default().push(options);
    }
    for (kind, is_there) in [("tap", definition.tap), ("classify", definition.classify)] {
        if is_there && !layers.contains_key(kind) {
            layers.insert(kind.to_owned(), vec![String::new()]);
        }
    }
    layers
}

/// The layers that were added, removed or changed between two definitions of a disk.
fn differences(before: &DiskDefinition, after: &DiskDefinition) -> Vec<(ChangeKind, String)> {
    let (before, after) = (layers(before), layers(after));
    let mut found = Vec::new();
    let mut kinds: Vec<&String> = before.keys().chain(after.keys()).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let of =
            |layers: &BTreeMap<String, Vec<String>>| layers.get(kind).cloned().unwrap_or_default();
        let (old, new) = (of(&before), of(&after));
        for _ in old.len()..new.len() {
            found.push((ChangeKind::LayerAdded, kind.clone()));
        }
        for _ in new.len()..old.len() {
            found.push((ChangeKind::LayerRemoved, kind.clone()));
        }
        let changed = if old.len() == new.len() {
            old.iter().zip(&new).filter(|(old, new)| old != new).count()
        } else {
            0
        };
        for _ in 0..changed {
            found.push((ChangeKind::LayerChanged, kind.clone()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use fathom_control::LayerDefinition;
    use serde_json::json;

    use super::*;

    #[test]
    fn differences_of_layers_are_found() {
        let with = |layers: &[(&str, serde_json::Value)]| DiskDefinition {
            tap: true,
            layers: layers
                .iter()
                .map(|(kind, of)| LayerDefinition::new(kind, of.clone()))
                .collect(),
            ..DiskDefinition::default()
        };
        let none = with(&[]);
        let slow = with(&[("delay", json!({ "time": "1ms" })), ("limit", json!({}))]);
        let slower = with(&[("delay", json!({ "time": "2ms" })), ("limit", json!({}))]);
        let named = |found: Vec<(ChangeKind, String)>| -> Vec<String> {
            let name = |(kind, layer): (ChangeKind, String)| {
                format!("{} {layer}", ChangeKind::NAMES[kind as usize - 1])
            };
            found.into_iter().map(name).collect()
        };
        assert_eq!(named(differences(&none, &slow)), ["layer-added delay", "layer-added limit"]);
        assert_eq!(named(differences(&slow, &slower)), ["layer-changed delay"]);
        let untapped = DiskDefinition { tap: false, ..slow.clone() };
        assert_eq!(named(differences(&slow, &untapped)), ["layer-removed tap"]);
        assert_eq!(named(differences(&slow, &slow)), [""; 0]);
        // A tap that is named as a layer is the same tap.
        let placed = with(&[("tap", json!({}))]);
        let placed = DiskDefinition { tap: false, ..placed };
        assert_eq!(named(differences(&placed, &with(&[("tap", json!({}))]))), [""; 0]);
    }
}

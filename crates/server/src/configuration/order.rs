//! The order of a disk's layers: one for the file, the commands and the requests.
//!
//! The kinds have ranks ([`Rank`]). A layer that is added to a disk is put where its rank says,
//! unless the request names another place. A list that is written out is kept as it is. It gets a
//! warning if a layer is beneath one that it should be above.

use fathom_control::{DiskDefinition, LayerDefinition};
use fathom_layers::{LayerKind, Rank};
use fathom_options::{Origin, Origins, Problems, suggestion};
use serde_json::Value;

use super::Configuration;
use super::layers::kinds;

fn kind_of(layer: &LayerDefinition) -> Option<LayerKind> {
    kinds().find(|kind| kind.name == layer.kind)
}

fn rank_of(layer: &LayerDefinition) -> Rank {
    kind_of(layer).map_or(Rank::Trial, |kind| kind.rank)
}

/// Whether a layer has copies or changes of the disk's data.
pub(crate) fn holds_data(layer: &LayerDefinition) -> bool {
    rank_of(layer) >= Rank::Cache
}

/// Where a layer is put that a request adds or moves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside<'a> {
    /// Above the first layer of this kind.
    pub above: Option<&'a str>,
    /// Below the last layer of this kind.
    pub below: Option<&'a str>,
}

impl Beside<'_> {
    /// Whether no place is named.
    pub(crate) fn is_none(&self) -> bool {
        self.above.is_none() && self.below.is_none()
    }
}

/// The index at which the rank of `layer` puts it among `layers`.
fn ranked(layers: &[LayerDefinition], layer: &LayerDefinition) -> usize {
    let rank = rank_of(layer);
    let later = |other: &LayerDefinition| rank_of(other) > rank;
    // Layers of the rank `Trial` and before may be anywhere: their places say nothing about others.
    let earlier = |other: &LayerDefinition| (Rank::Limit..=rank).contains(&rank_of(other));
    let first_later = layers.iter().position(later);
    first_later
        .or_else(|| layers.iter().rposition(earlier).map(|index| index + 1))
        .unwrap_or(layers.len())
}

/// Puts `layer` into the list of a disk that has no such layer.
///
/// # Errors
/// If the disk has no layer of a kind that `beside` names.
pub(crate) fn insert(
    disk: &mut DiskDefinition,
    layer: &LayerDefinition,
    beside: Beside<'_>,
) -> Result<(), Problems> {
    if beside.is_none() {
        let index = ranked(&disk.layers, layer);
        disk.layers.insert(index, layer.clone());
        return Ok(());
    }
    let is_watcher = |kind: Option<&str>| kind.is_some_and(|kind| WATCHERS.contains(&kind));
    if is_watcher(beside.above) || is_watcher(beside.below) {
        list_watchers(disk);
    }
    let find = |kind: Option<&str>, last: bool| {
        let Some(kind) = kind else { return Ok(None) };
        let is = |layer: &LayerDefinition| layer.kind == kind;
        let found =
            if last { disk.layers.iter().rposition(is) } else { disk.layers.iter().position(is) };
        found.map(Some).ok_or_else(|| {
            let names: Vec<&str> = disk.layers.iter().map(LayerDefinition::name).collect();
            let shown: String = kind.chars().take(60).collect();
            let message = format!("the disk {:?} has no layer {shown:?}", disk.name);
            let mut problems = Problems::default();
            problems.add(Origin::Request, message, suggestion(&shown, &names));
            problems
        })
    };
    let (above, below) = (find(beside.above, false)?, find(beside.below, true)?);
    if above.zip(below).is_some_and(|(above, below)| above <= below) {
        let mut problems = Problems::default();
        let message = "no place is above the one and below the other";
        problems.add(Origin::Request, message, "name one of the two kinds");
        return Err(problems);
    }
    let index = above.or(below.map(|index| index + 1)).unwrap_or(disk.layers.len());
    disk.layers.insert(index, layer.clone());
    Ok(())
}

/// The layers that a disk has above those that it lists, unless it lists them.
const WATCHERS: [&str; 2] = ["classify", "tap"];

/// Lists the layers `classify` and `tap` where a disk has them without listing them.
fn list_watchers(disk: &mut DiskDefinition) {
    let wanted = [disk.classify, disk.tap];
    let mut listed = Vec::new();
    for (kind, is_wanted) in WATCHERS.into_iter().zip(wanted) {
        if is_wanted && !disk.layers.iter().any(|layer| layer.kind == kind) {
            listed.push(LayerDefinition::new(kind, Value::Null));
        }
    }
    disk.layers.splice(0..0, listed);
}

/// Reports layers that are beneath layers which they should be above.
pub(crate) fn check(disk: &DiskDefinition, origins: &Origins, warnings: &mut Problems) {
    for (index, layer) in disk.layers.iter().enumerate() {
        let Some(kind) = kind_of(layer) else { continue };
        let Some(reason) = kind.beneath else { continue };
        let above = disk.layers[..index].iter().find(|other| rank_of(other) > kind.rank);
        let Some(above) = above else { continue };
        warnings.add(
            origins.of(&format!("layers.{index}")),
            format!(
                "the disk {:?} has the layer `{}` beneath `{}`: {reason}",
                disk.name, kind.name, above.kind
            ),
            format!("list `{}` before `{}`", kind.name, above.kind),
        );
    }
}

/// Logs what `check` reports on a disk of a request.
pub(crate) fn warn(disk: &DiskDefinition) {
    let mut warnings = Problems::default();
    check(disk, &Origins::default(), &mut warnings);
    log(&warnings);
}

fn log(warnings: &Problems) {
    for warning in &warnings.0 {
        tracing::warn!("{}{}; {}", warning.origin, warning.message, warning.remedy);
    }
}

impl Configuration {
    /// What is allowed but rarely intended.
    pub fn warnings(&self) -> Problems {
        let mut warnings = Problems::default();
        for disk in &self.disks {
            check(&disk.definition, &disk.origins, &mut warnings);
        }
        warnings
    }

    /// Logs the warnings.
    pub(crate) fn log_warnings(&self) {
        log(&self.warnings());
    }
}

/// The order as the documentation has it.
#[cfg(test)]
pub(super) fn in_words() -> String {
    let mut all: Vec<LayerKind> = kinds().collect();
    all.sort_by_key(|kind| kind.rank);
    let ranks = all.chunk_by(|one, other| one.rank == other.rank);
    let words = ranks.map(|kinds| {
        kinds.iter().map(|kind| format!("`{}`", kind.name)).collect::<Vec<_>>().join(" or ")
    });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(kinds: &[&str]) -> DiskDefinition {
        let layers = kinds.iter().map(|kind| LayerDefinition::new(kind, Value::Null)).collect();
        DiskDefinition { name: "a".into(), layers, ..DiskDefinition::default() }
    }

    fn with(kinds: &[&str], kind: &str, beside: Beside<'_>) -> Result<Vec<String>, String> {
        let mut disk = disk(kinds);
        insert(&mut disk, &LayerDefinition::new(kind, Value::Null), beside)
            .map_err(|problems| problems.to_string())?;
        Ok(disk.layers.into_iter().map(|layer| layer.kind).collect())
    }

    #[test]
    fn layers_are_put_where_their_ranks_say() {
        let all = ["delay", "limit", "schedule", "cache", "wal"];
        // Each order of additions leads to the same list.
        for start in 0..all.len() {
            for step in 1..all.len() {
                let mut disk = disk(&[]);
                for index in 0..all.len() {
                    let kind = all[(start + index * step) % all.len()];
                    let layer = LayerDefinition::new(kind, Value::Null);
                    insert(&mut disk, &layer, Beside::default()).unwrap();
                }
                let found: Vec<&str> = disk.layers.iter().map(|it| it.kind.as_str()).collect();
                assert_eq!(found, all);
            }
        }
        let ranked = |kinds: &[&str], kind| with(kinds, kind, Beside::default()).unwrap();
        assert_eq!(ranked(&["offload"], "limit"), ["limit", "offload"]);
        assert_eq!(ranked(&["limit"], "limit"), ["limit", "limit"]);
        // A delay that imitates a slow disk stays beneath a log.
        assert_eq!(ranked(&["cache", "delay"], "wal"), ["cache", "wal", "delay"]);
        assert_eq!(ranked(&["delay"], "wal"), ["delay", "wal"]);
        assert_eq!(ranked(&["log", "wal"], "tap"), ["tap", "log", "wal"]);
        // A list out of order is not changed further than necessary.
        assert_eq!(ranked(&["wal", "limit"], "cache"), ["cache", "wal", "limit"]);
    }

    #[test]
    fn a_request_may_name_another_place() {
        let above = |kind| Beside { above: Some(kind), below: None };
        let below = |kind| Beside { above: None, below: Some(kind) };
        assert_eq!(with(&["cache", "wal"], "delay", below("wal")).unwrap()[2], "delay");
        assert_eq!(with(&["cache", "wal"], "limit", above("wal")).unwrap()[1], "limit");
        assert_eq!(with(&["wal"], "log", above("tap")).unwrap(), ["classify", "log", "tap", "wal"]);
        let wrong = with(&["wal"], "log", above("walk")).unwrap_err();
        assert!(wrong.contains("has no layer \"walk\"") && wrong.contains("`wal`"), "{wrong}");
        let both = Beside { above: Some("cache"), below: Some("wal") };
        assert!(with(&["cache", "wal"], "limit", both).is_err());
    }

    #[test]
    fn a_list_out_of_order_gets_a_warning() {
        let warnings = |kinds: &[&str]| {
            let mut warnings = Problems::default();
            check(&disk(kinds), &Origins::default(), &mut warnings);
            warnings.0.len()
        };
        assert_eq!(warnings(&["log", "delay", "limit", "schedule", "cache", "wal", "fault"]), 0);
        assert_eq!(warnings(&["cache", "schedule", "tap"]), 0);
        for wrong in [["wal", "limit"], ["schedule", "limit"], ["offload", "cache"]] {
            assert_eq!(warnings(&wrong), 1, "{wrong:?}");
        }
    }
}

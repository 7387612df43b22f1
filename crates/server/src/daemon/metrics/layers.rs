//! The figures of the disks' layers and stores: one family for each figure.

use std::collections::BTreeMap;

use fathom_control::{DiskList, DiskStatus, LayerFigure};

use super::MetricsText;

/// The labels of a sample, and its figure.
type Sample<'a> = (Vec<(&'static str, &'a str)>, &'a LayerFigure);

/// The families, each with its samples.
#[derive(Default)]
struct Families<'a>(BTreeMap<String, Vec<Sample<'a>>>);

impl<'a> Families<'a> {
    /// Adds the figures of a `part`, which is a layer or a store of this kind. `layer` is the layer
    /// of a store; empty for the disk's own store.
    fn add(
        &mut self,
        disk: &'a DiskStatus,
        part: &str,
        kind: &str,
        layer: Option<&'a str>,
        figures: &'a [LayerFigure],
    ) {
        let kind = kind.replace('-', "_");
        for figure in figures {
            let mut labels = vec![("disk", disk.name.as_str()), ("vm", disk.vm.as_str())];
            labels.extend(layer.map(|layer| ("layer", layer)));
            let family = format!("fathom_{part}_{kind}_{}", in_seconds(&figure.name));
            self.0.entry(family).or_default().push((labels, figure));
        }
    }
}

pub(crate) fn of_layers(page: &mut MetricsText, disks: &DiskList) {
    let mut families = Families::default();
    for disk in &disks.disks {
        for layer in &disk.layers {
            families.add(disk, "layer", &layer.name, None, &layer.figures);
            for store in &layer.stores {
                families.add(disk, "store", &store.name, Some(&layer.name), &store.figures);
            }
        }
        families.add(disk, "store", &disk.backend.name, Some(""), &disk.backend.figures);
    }
    for (family, samples) in &families.0 {
        let kind = if family.ends_with("_total") { "counter" } else { "gauge" };
        let meaning = samples.first().map_or("", |(_, figure)| &figure.meaning);
        page.family(family, kind, meaning);
        for (labels, figure) in samples {
            if in_seconds(&figure.name) == figure.name {
                page.sample(family, labels, figure.value);
            } else {
                page.sample(family, labels, figure.value as f64 / 1e9);
            }
        }
    }
}

/// The name of a figure in the metrics: Prometheus has times in seconds.
fn in_seconds(name: &str) -> String {
    name.replace("_nanoseconds", "_seconds")
}

//! The figures of the disks' layers: one family for each figure.

use std::collections::BTreeMap;

use fathom_control::{DiskList, DiskStatus, LayerFigure};

use super::{Page, disk_labels};

pub(crate) fn of_layers(page: &mut Page, disks: &DiskList) {
    let mut families: BTreeMap<String, Vec<(&DiskStatus, &LayerFigure)>> = BTreeMap::new();
    for disk in &disks.disks {
        for layer in &disk.layers {
            for figure in &layer.figures {
                let name = layer.name.replace('-', "_");
                let family = format!("fathom_layer_{name}_{}", in_seconds(&figure.name));
                families.entry(family).or_default().push((disk, figure));
            }
        }
    }
    for (family, samples) in &families {
        let kind = if family.ends_with("_total") { "counter" } else { "gauge" };
        let meaning = samples.first().map_or("", |(_, figure)| &figure.meaning);
        page.family(family, kind, meaning);
        for (disk, figure) in samples {
            let labels = disk_labels(&disk.name, &disk.vm);
            if in_seconds(&figure.name) == figure.name {
                page.sample(family, &labels, figure.value);
            } else {
                page.sample(family, &labels, figure.value as f64 / 1e9);
            }
        }
    }
}

/// The name of a figure in the metrics: Prometheus has times in seconds.
fn in_seconds(name: &str) -> String {
    name.replace("_nanoseconds", "_seconds")
}

//! What is wrong with the layers of a disk.

use std::path::Path;

use fathom_block::LAYERS_MAX;
use fathom_control::{DiskDefinition, LayerDefinition, WalDefinition};
use fathom_insight::ClassTable;

use super::problem::{Place, Places, Problems};
use super::table::suggestion;

pub(super) fn check_layers(disk: &DiskDefinition, places: &Places, problems: &mut Problems) {
    let taps = disk.layers.iter().filter(|layer| matches!(layer, LayerDefinition::Tap)).count();
    if taps > 1 {
        problems.add(
            places.of("layers"),
            format!("the disk {:?} has {taps} taps", disk.name),
            "keep one: it would count everything twice",
        );
    }
    let classifies =
        disk.layers.iter().filter(|layer| matches!(layer, LayerDefinition::Classify)).count();
    if classifies > 1 {
        problems.add(
            places.of("layers"),
            format!("the disk {:?} has {classifies} layers `classify`", disk.name),
            "keep one: it would account for everything twice",
        );
    }
    if let Some(bounds) = &disk.class_bounds {
        if let Err(error) = ClassTable::new(bounds.iter().map(|bound| bound.0).collect()) {
            problems.add(
                places.of("class_bounds"),
                format!("these are no bounds of classes: {error}"),
                "write them like `class_bounds = [\"14M\", \"10M\", \"5M\", \"2M\", \"1M\"]`",
            );
        }
    }
    let count = disk.layers.len()
        + usize::from(disk.tap && taps == 0)
        + usize::from(disk.classify && classifies == 0);
    if count > LAYERS_MAX {
        problems.add(
            places.of("layers"),
            format!("the disk {:?} has {count} layers", disk.name),
            format!("keep {LAYERS_MAX} at most, `tap` and `classify` among them"),
        );
    }
    for layer in &disk.layers {
        let place = || places.of("layers");
        match layer {
            LayerDefinition::Delay(delay) => check_operations(&delay.operations, place, problems),
            LayerDefinition::Fault(fault) => {
                check_operations(&fault.operations, place, problems);
                if !(0.0..=1.0).contains(&fault.rate) {
                    problems.add(
                        place(),
                        format!("a rate of {} is no share", fault.rate),
                        "choose a number from 0 to 1: 0.01 strikes one request in a hundred",
                    );
                }
                if fault.offset.0.checked_add(fault.length.0).is_none() {
                    problems.add(place(), "`offset` and `length` lead too far", "shorten them");
                }
            }
            LayerDefinition::Log(log) => {
                if let Some(file) = &log.file {
                    check_log_file(file, &place(), problems);
                }
            }
            LayerDefinition::Wal(wal) => check_wal(disk, wal, &place(), problems),
            LayerDefinition::Tap | LayerDefinition::Classify => {}
        }
    }
}

fn check_wal(disk: &DiskDefinition, wal: &WalDefinition, place: &Place, problems: &mut Problems) {
    let name = &disk.name;
    let is_wal = |layer: &&LayerDefinition| matches!(layer, LayerDefinition::Wal(_));
    if disk.layers.iter().filter(is_wal).count() > 1 {
        problems.add(place.clone(), format!("the disk {name:?} has several logs"), "keep one");
    }
    if disk.image.is_none() || disk.read_only {
        let message = format!("the disk {name:?} has a log, but no image that is written");
        problems.add(place.clone(), message, "leave the layer out, or name an `image`");
    }
    let shown = wal.log.display();
    if wal.log.as_os_str().is_empty() {
        let message = "the layer `wal` has no log volume";
        problems.add(place.clone(), message, "add `log`, a file or a block device");
    } else if !wal.log.is_absolute() && *place == Place::Request {
        let message = format!("the log volume {shown} is no absolute path");
        let remedy = "begin it with a slash: the daemon has a folder of its own";
        problems.add(place.clone(), message, remedy);
    } else if wal.log.is_dir() || !wal.log.parent().is_some_and(Path::is_dir) {
        let message = format!("there can be no log at {shown}");
        problems.add(place.clone(), message, "name a file in a folder that exists");
    }
    if wal.offset.0 % 4096 != 0 {
        let message = "the log begins at no multiple of 4 KiB";
        problems.add(place.clone(), message, "correct `offset`");
    }
}

/// A file that lines are added to: it need not exist.
fn check_log_file(path: &Path, place: &Place, problems: &mut Problems) {
    let shown = path.display();
    if !path.is_absolute() && *place == Place::Request {
        let message = format!("the file {shown} is no absolute path");
        problems.add(
            place.clone(),
            message,
            "begin it with a slash: the daemon has a folder of its own",
        );
    } else if path.is_dir() || !path.parent().is_some_and(Path::is_dir) {
        problems.add(
            place.clone(),
            format!("no lines can be added to {shown}"),
            "name a file in a folder that exists",
        );
    }
}

fn check_operations(names: &[String], place: impl Fn() -> Place, problems: &mut Problems) {
    let known: Vec<&str> = fathom_block::Operation::ALL.iter().map(|o| o.name()).collect();
    for name in names {
        if !known.contains(&name.as_str()) {
            problems.add(place(), format!("{name:?} is no operation"), suggestion(name, &known));
        }
    }
}

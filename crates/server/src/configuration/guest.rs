//! `[[guest]]`: what the daemon may do with a guest.

use std::path::PathBuf;

use fathom_control::FlushWay;
use fathom_options::{Check, Key, Problems, Section};
use serde::Deserialize;

use super::Placed;

/// What the daemon may do with the guest of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuestOptions {
    /// The virtual machine.
    pub vm: String,
    /// The allowed ways to make the guest write its dirty data, in order of preference.
    pub flush: Vec<FlushWay>,
    /// QEMU's socket for its machine protocol (QMP).
    pub qmp: Option<PathBuf>,
}

impl Section for GuestOptions {
    const KEYS: &'static [Key] = &[
        Key::new("vm", "", "required: the `vm` of the guest's disks"),
        Key::new(
            "flush",
            "[]",
            "the ways in which the guest may be made to write its dirty data: `\"sysrq\"`, \
             `\"tunables\"`. The first is the default of `fathom flush`",
        ),
        Key::new(
            "qmp",
            "",
            "a socket for QEMU's machine protocol that no other program uses, for `\"sysrq\"`",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        let is_twice = |(index, way): (usize, &FlushWay)| self.flush[..index].contains(way);
        if self.flush.iter().enumerate().any(is_twice) {
            check.problem("flush", "a way to flush is named twice", "name each way once");
        }
        if self.flush.contains(&FlushWay::Sysrq) && self.qmp.is_none() {
            check.problem(
                "flush",
                "the way \"sysrq\" needs QEMU's machine protocol",
                "start QEMU with `-qmp unix:PATH,server=on,wait=off`, and add `qmp = \"PATH\"`",
            );
        }
    }
}

/// Finds missing and duplicate names.
pub(super) fn check_guests(guests: &[Placed<GuestOptions>], problems: &mut Problems) {
    for (index, Placed { definition, places }) in guests.iter().enumerate() {
        let is_same = |other: &Placed<GuestOptions>| other.definition.vm == definition.vm;
        if definition.vm.is_empty() {
            let remedy = "add `vm = \"…\"`, the `vm` of its disks";
            problems.add(places.of("vm"), "a guest has no virtual machine", remedy);
        } else if guests[..index].iter().any(is_same) {
            problems.add(
                places.of("vm"),
                format!("there are two guests of the virtual machine {:?}", definition.vm),
                "write one table for each virtual machine",
            );
        }
    }
}

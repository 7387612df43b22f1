//! `[[guest]]`: what the daemon may do with a guest.

use std::path::PathBuf;

use fathom_control::{Bytes, FlushWay, Nanoseconds};
use fathom_options::{Check, Key, Problems, Section};
use serde::Deserialize;

use crate::configuration::{Extent, FeatureSection, Placed};

/// The longest time for which a snapshot may freeze a guest: Windows' shadow copies give up then.
const FREEZE_TIME_MAX: Nanoseconds = Nanoseconds(10_000_000_000);
const FREEZE_TIME_MIN: Nanoseconds = Nanoseconds(100_000_000);

/// What the daemon may do with the guest of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuestOptions {
    /// The virtual machine.
    pub vm: String,
    /// The allowed ways to make the guest write its dirty data, in order of preference.
    pub flush: Vec<FlushWay>,
    /// QEMU's socket for its machine protocol (QMP).
    pub qmp: Option<PathBuf>,
    /// The socket of the QEMU guest agent.
    pub agent: Option<PathBuf>,
    /// How long a snapshot may freeze the guest's file systems.
    pub freeze_time_max: Nanoseconds,
    /// The memory that the balloon leaves to the guest, in bytes.
    pub balloon_floor: Option<Bytes>,
    /// Whether the guest is made to write its dirty data while the device beneath is idle.
    pub flush_when_idle: bool,
    /// The least dirty data for which it is made to, in bytes.
    pub flush_min: Bytes,
    /// The shortest time between two such flushes.
    pub flush_interval: Nanoseconds,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            vm: String::new(),
            flush: Vec::new(),
            qmp: None,
            agent: None,
            freeze_time_max: FREEZE_TIME_MAX,
            balloon_floor: None,
            flush_when_idle: false,
            flush_min: Bytes(16 << 20),
            flush_interval: Nanoseconds(30_000_000_000),
        }
    }
}

impl Section for GuestOptions {
    const KEYS: &'static [Key] = &[
        Key::new("vm", "", "required: the `vm` of the guest's disks"),
        Key::new(
            "flush",
            "[]",
            "the ways in which the guest may be made to write its dirty data: `\"sysrq\"`, \
             `\"tunables\"`, `\"agent\"`, `\"balloon\"`. The first is the default of `fathom flush`",
        ),
        Key::new(
            "qmp",
            "",
            "a socket for QEMU's machine protocol that no other program uses, for `\"sysrq\"` and \
             `\"balloon\"`",
        ),
        Key::new(
            "agent",
            "",
            "QEMU's socket of the guest agent, which no other program uses, for `\"agent\"` and for \
             snapshots with frozen file systems",
        ),
        Key::new(
            "freeze_time_max",
            "\"10s\"",
            "how long a snapshot may freeze the guest's file systems, at most `\"10s\"`. Then they are thawed in any case",
        ),
        Key::new("balloon_floor", "", "the memory that `\"balloon\"` leaves to the guest"),
        Key::new(
            "flush_when_idle",
            "false",
            "make the guest write its dirty data while the device beneath its disks is idle, by the \
             first way of `flush`. The guest with the most dirty data for the device is first",
        ),
        Key::new("flush_min", "\"16M\"", "the least dirty data for which it is made to"),
        Key::new("flush_interval", "\"30s\"", "the shortest time between two such flushes"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if !(FREEZE_TIME_MIN.0..=FREEZE_TIME_MAX.0).contains(&self.freeze_time_max.0) {
            let message = "a guest's file systems cannot be frozen for such a time";
            check.problem("freeze_time_max", message, "choose one from 100ms to 10s");
        }
        if self.flush_when_idle && self.flush.is_empty() {
            check.problem(
                "flush_when_idle",
                "no way to flush the guest is allowed",
                "add `flush = [\"tunables\"]`, or remove `flush_when_idle`",
            );
        }
        let is_twice = |(index, way): (usize, &FlushWay)| self.flush[..index].contains(way);
        if self.flush.iter().enumerate().any(is_twice) {
            check.problem("flush", "a way to flush is named twice", "name each way once");
        }
        for way in [FlushWay::Sysrq, FlushWay::Balloon] {
            if self.flush.contains(&way) && self.qmp.is_none() {
                check.problem(
                    "flush",
                    format!("the way \"{way}\" needs QEMU's machine protocol"),
                    "start QEMU with `-qmp unix:PATH,server=on,wait=off`, and add `qmp = \"PATH\"`",
                );
            }
        }
        if self.flush.contains(&FlushWay::Agent) && self.agent.is_none() {
            check.problem(
                "flush",
                "the way \"agent\" needs the socket of the QEMU guest agent",
                "add `agent = \"PATH\"`: the path of QEMU's `-chardev socket` for the agent",
            );
        }
        let has_floor = self.balloon_floor.is_some_and(|floor| floor.0 > 0);
        if self.flush.contains(&FlushWay::Balloon) && !has_floor {
            check.problem(
                "flush",
                "the way \"balloon\" needs the least memory of the guest",
                "add, for example, `balloon_floor = \"1G\"`: enough for the programs of the guest",
            );
        }
    }
}

impl FeatureSection for GuestOptions {
    const NAME: &'static str = "guest";
    const IS_LIST: bool = true;

    fn check_all(guests: &[Placed<Self>], _extent: Extent, problems: &mut Problems) {
        check_names(guests, problems);
    }
}

/// Finds missing and duplicate names.
fn check_names(guests: &[Placed<GuestOptions>], problems: &mut Problems) {
    for (index, Placed { definition, origins }) in guests.iter().enumerate() {
        let is_same = |other: &Placed<GuestOptions>| other.definition.vm == definition.vm;
        if definition.vm.is_empty() {
            let remedy = "add `vm = \"…\"`, the `vm` of its disks";
            problems.add(origins.of("vm"), "a guest has no virtual machine", remedy);
        } else if guests[..index].iter().any(is_same) {
            problems.add(
                origins.of("vm"),
                format!("there are two guests of the virtual machine {:?}", definition.vm),
                "write one table for each virtual machine",
            );
        }
    }
}

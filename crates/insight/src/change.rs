//! A change: what an operator or the daemon changed.

use crate::record::record;

/// The values that all changes of a daemon have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostLabels {
    /// `Host`: the name of the daemon's host.
    pub host: String,
}

/// What was changed. Its number in the record is its position here plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    /// A disk was added, or is served after a start.
    DiskAdded = 1,
    /// Options of a disk were changed, or it accepts writes again after some were lost.
    DiskChanged,
    /// A disk was resized.
    DiskResized,
    /// A disk was removed.
    DiskRemoved,
    /// A layer was added to a disk.
    LayerAdded,
    /// A layer of a disk has other options, or another place.
    LayerChanged,
    /// A layer of a disk was removed.
    LayerRemoved,
    /// A problem began.
    ProblemBegan,
    /// A problem ended.
    ProblemEnded,
    /// The configuration was read again.
    Reload,
    /// The daemon has started.
    Start,
    /// The daemon stops.
    Stop,
}

impl ChangeKind {
    /// The names, in the order of the numbers.
    pub const NAMES: [&'static str; 12] = [
        "disk-added",
        "disk-changed",
        "disk-resized",
        "disk-removed",
        "layer-added",
        "layer-changed",
        "layer-removed",
        "problem-began",
        "problem-ended",
        "reload",
        "start",
        "stop",
    ];
}

/// Who made a change. Its number in the record is its position here plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Author {
    /// A request to the control interface: an operator, a program, or the action of a query.
    Control = 1,
    /// The configuration, at the start or when it was read again.
    Configuration,
    /// The daemon itself.
    Daemon,
}

impl Author {
    /// The names, in the order of the numbers.
    pub const NAMES: [&'static str; 3] = ["control", "configuration", "daemon"];
}

record! {
    /// One record of 40 bytes, described in `docs/events.md`. Texts are numbers of
    /// [`Names`](crate::Names); 0 is none.
    Change {
        /// `ChangeTS`: the time of the change, in nanoseconds of `CLOCK_MONOTONIC`.
        change_ts: u64,
        /// `VMName`: the virtual machine of the disk.
        vm_name: u32,
        /// `VDisk`: the disk.
        virtual_disk: u32,
        /// `PDisk`: the image or device that stores the disk.
        physical_disk: u32,
        /// `Layer`: the kind of the layer.
        layer: u32,
        /// `Problem`: the kind of the problem.
        problem: u32,
        /// `Text`: a description for people.
        text: u32,
        /// `Change`: the number of the [`ChangeKind`].
        kind: u8,
        /// `ChangedBy`: the number of the [`Author`].
        author: u8,
        /// 0, for later use.
        spare: u16,
        /// 0, for later use.
        spare_word: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;

    #[test]
    fn words_keep_every_field() {
        let change = Change {
            change_ts: 1,
            vm_name: 2,
            virtual_disk: 3,
            physical_disk: 4,
            layer: 5,
            problem: 6,
            text: 7,
            kind: 8,
            author: 9,
            spare: 0x0a0b,
            spare_word: 0x0c0d_0e0f,
        };
        assert_eq!(Change::from_words(change.to_words()), change);
    }

    #[test]
    fn the_numbers_are_the_positions_of_the_names() {
        assert_eq!(ChangeKind::NAMES[ChangeKind::LayerRemoved as usize - 1], "layer-removed");
        assert_eq!(ChangeKind::NAMES.len(), ChangeKind::Stop as usize);
        assert_eq!(Author::NAMES.len(), Author::Daemon as usize);
    }
}

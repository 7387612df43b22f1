//! The report of a layer to the operator: its figures and its problems.

/// The kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// It only grows while the layer lives.
    Counter,
    /// It can grow and shrink.
    Gauge,
}

/// A figure of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Its name, as in the metrics: lower case, with the unit at the end (`used_bytes`). The name
    /// of a counter also ends in `_total`.
    pub name: &'static str,
    /// Its meaning, as a sentence.
    pub meaning: &'static str,
    /// Its kind.
    pub kind: FigureKind,
    /// Its current value.
    pub value: u64,
}

impl Figure {
    /// A counter.
    pub const fn counter(name: &'static str, meaning: &'static str, value: u64) -> Self {
        Self { name, meaning, kind: FigureKind::Counter, value }
    }

    /// A gauge.
    pub const fn gauge(name: &'static str, meaning: &'static str, value: u64) -> Self {
        Self { name, meaning, kind: FigureKind::Gauge, value }
    }
}

/// What a problem of a layer is. The set is closed: a layer has at most one problem of each cause,
/// which is logged when it begins and when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerCause {
    /// The volume of the log fails.
    VolumeFailed,
    /// The volume of the log works again, and the log rejects changes until it is empty.
    VolumeEmptied,
    /// What is in the log cannot be written home.
    NotWrittenBack,
    /// The image has a mark of an earlier opening.
    MarkOld,
    /// The image cannot be marked.
    MarkNotWritten,
    /// The mark of the image cannot be removed.
    MarkNotRemoved,
    /// The layer is out of service because its store has failed.
    OutOfService,
    /// The store of the layer does not answer.
    NotAnswering,
    /// The store has missed changes while it did not answer.
    ChangesMissed,
    /// The layer could not be opened, and the disk is served without it.
    NotUsed,
    /// The devices beneath the disk were not found.
    DevicesUnknown,
}

impl LayerCause {
    /// The name in the control interface and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::VolumeFailed => "volume-failed",
            Self::VolumeEmptied => "volume-emptied",
            Self::NotWrittenBack => "not-written-back",
            Self::MarkOld => "mark-old",
            Self::MarkNotWritten => "mark-not-written",
            Self::MarkNotRemoved => "mark-not-removed",
            Self::OutOfService => "out-of-service",
            Self::NotAnswering => "not-answering",
            Self::ChangesMissed => "changes-missed",
            Self::NotUsed => "not-used",
            Self::DevicesUnknown => "devices-unknown",
        }
    }
}

/// A problem of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProblem {
    /// What it is, for programs.
    pub cause: LayerCause,
    /// The problem, as a sentence without its subject, which is the disk.
    pub message: String,
    /// The remedy.
    pub remedy: String,
}

/// The state of a layer. The status, the metrics and the list of problems show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Its figures: always the same figures in the same order.
    pub figures: Vec<Figure>,
    /// Its current problems. The daemon's monitor of the disk logs the beginning and the end of
    /// each.
    pub problems: Vec<LayerProblem>,
}

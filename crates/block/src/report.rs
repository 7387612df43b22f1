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

/// A problem of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProblem {
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

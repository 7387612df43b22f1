//! What a layer says of itself, for whoever looks on: figures, and what does not work.

/// How a figure behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// It only grows while the layer lives.
    Counter,
    /// It is what it is now.
    Gauge,
}

/// A figure of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Its name, as metrics have it: lower case, with the unit at the end (`used_bytes`), and
    /// `_total` behind the name of a counter.
    pub name: &'static str,
    /// What it is, in a sentence.
    pub meaning: &'static str,
    /// How it behaves.
    pub kind: FigureKind,
    /// Its value now.
    pub value: u64,
}

impl Figure {
    /// A figure that only grows.
    pub const fn counter(name: &'static str, meaning: &'static str, value: u64) -> Self {
        Self { name, meaning, kind: FigureKind::Counter, value }
    }

    /// A figure of now.
    pub const fn gauge(name: &'static str, meaning: &'static str, value: u64) -> Self {
        Self { name, meaning, kind: FigureKind::Gauge, value }
    }
}

/// What does not work in a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProblem {
    /// What, in a sentence without its subject, the disk.
    pub message: String,
    /// What to do.
    pub remedy: String,
}

/// How a layer is. Everything that shows disks shows it: the status, the metrics, the problems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Its figures, always the same ones in the same order.
    pub figures: Vec<Figure>,
    /// What does not work now. Whoever watches over the disk logs the beginning and the end.
    pub problems: Vec<LayerProblem>,
}

//! The kinds of marks of an image, and what each asks of a command that changes the image. A
//! command loops over all of them, so that none is forgotten.

/// A kind of mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// Changes of the image are in a log ([`LogMark`](crate::LogMark)).
    Log,
    /// A cache has blocks of the image ([`CacheMark`](crate::CacheMark)).
    Cache,
    /// Writes of the image are lost ([`LossRecord`](crate::LossRecord)).
    Loss,
}

/// A change of an image by a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageChange {
    /// All content is given up, and the file stays.
    Empty,
    /// Another file takes the image's name.
    Replace,
    /// The end is cut off.
    Shrink,
    /// The image gets a longer end of zeroes.
    Grow,
}

/// What a mark asks of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The mark stays as it is.
    Keep,
    /// The change is refused while there is the mark.
    Refuse,
    /// The mark is removed durably before the image changes.
    ClearBefore,
    /// The mark is removed once the change is durable.
    ClearAfter,
}

impl MarkKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Log, Self::Cache, Self::Loss];

    /// What a mark of this kind asks of a change.
    pub fn demand(self, change: ImageChange) -> Demand {
        use ImageChange::{Empty, Grow, Replace, Shrink};
        match (self, change) {
            // The log's changes would appear in the new image, or beyond the new end after a
            // growth.
            (Self::Log, Empty | Replace | Shrink) => Demand::Refuse,
            // The cache would return blocks of what is gone.
            (Self::Cache, Empty | Replace | Shrink) => Demand::ClearBefore,
            // Nothing is left that could lack writes. Until then, the old content lacks them.
            (Self::Loss, Empty) => Demand::ClearAfter,
            (Self::Log | Self::Cache, Grow) | (Self::Loss, Replace | Shrink | Grow) => Demand::Keep,
        }
    }
}

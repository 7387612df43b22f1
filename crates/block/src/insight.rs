//! What is known about a request's meaning.

/// The kind of data that a request moves, as the guest's kernel would name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Nothing is known.
    #[default]
    Unknown,
    /// A file's content.
    Data,
    /// A file system's own structures.
    Metadata,
    /// A file system's journal.
    Journal,
    /// Swapped memory.
    Swap,
    /// I/O past the page cache.
    Direct,
}

impl Kind {
    /// The name used in events, metrics and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Data => "data",
            Self::Metadata => "metadata",
            Self::Journal => "journal",
            Self::Swap => "swap",
            Self::Direct => "direct",
        }
    }
}

/// A priority for caching: 0 (large files) to 5 (metadata), or 32 (unique data, not worth
/// deduplicating). The default policy is Table 6 of the Sky paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoClass(pub u8);

/// A hint about one request. It rides on the request; the layers below may read it, and none may
/// trust it for correctness: a wrong insight may cost time, never data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Insight {
    /// The kind of data.
    pub kind: Kind,
    /// The caching priority, where something is known.
    pub class: Option<IoClass>,
    /// The I/O priority that the guest gave (`ioprio` of the virtio header); 0 is none.
    pub io_priority: u16,
}

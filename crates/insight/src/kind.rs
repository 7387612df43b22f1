//! The kinds of data, and the sources and the confidence of an insight.

/// The kind of data that a request moves, in the terms of the guest's kernel.
///
/// The numbers are those of the event's column `Kind`; they never change their meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Nothing is known.
    #[default]
    Unknown = 0,
    /// A file's content, through the page cache.
    Data = 1,
    /// A file system's own structures.
    Metadata = 2,
    /// A file system's journal.
    Journal = 3,
    /// Swapped memory.
    Swap = 4,
    /// A file's content, without the page cache (direct I/O).
    Direct = 5,
    /// A directory's blocks, if the file system distinguishes them from other metadata.
    Directory = 6,
    /// I/O on the block device itself: `mkfs`, `dd`.
    Device = 7,
}

impl Kind {
    /// Every kind, in the order of its number.
    pub const ALL: [Self; 8] = [
        Self::Unknown,
        Self::Data,
        Self::Metadata,
        Self::Journal,
        Self::Swap,
        Self::Direct,
        Self::Directory,
        Self::Device,
    ];

    /// The name used in events, metrics and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Data => "data",
            Self::Metadata => "metadata",
            Self::Journal => "journal",
            Self::Swap => "swap",
            Self::Direct => "direct",
            Self::Directory => "directory",
            Self::Device => "device",
        }
    }

    /// The kind with a number; [`Kind::Unknown`] if there is none.
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }

    /// Whether the data is a file's content.
    pub fn is_content(self) -> bool {
        matches!(self, Self::Data | Self::Direct)
    }

    /// Whether the data are structures of a file system, with its journal.
    pub fn is_structure(self) -> bool {
        matches!(self, Self::Metadata | Self::Journal | Self::Directory)
    }
}

/// The source of an insight, from the weakest to the strongest. If two sources contradict each
/// other, the stronger one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum InsightSource {
    /// No source.
    #[default]
    None = 0,
    /// The flags of the guest kernel's request.
    Flags = 1,
    /// The page of memory that holds the data.
    Page = 2,
    /// The completion of the guest kernel's bio, and the structures that the bio belongs to.
    Bio = 3,
    /// Observed system calls.
    Calls = 4,
    /// The application itself.
    Application = 5,
}

impl InsightSource {
    /// Every source, in the order of its number.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Flags, Self::Page, Self::Bio, Self::Calls, Self::Application];

    /// The name used in logs and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Flags => "flags",
            Self::Page => "page",
            Self::Bio => "bio",
            Self::Calls => "calls",
            Self::Application => "application",
        }
    }
}

/// The confidence in an insight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Confidence {
    /// No evidence.
    #[default]
    None = 0,
    /// One structure supports it, without a second one to check it.
    Likely = 1,
    /// Several structures that agree with each other support it.
    Sure = 2,
}

impl Confidence {
    /// Every confidence, in the order of its number.
    pub const ALL: [Self; 3] = [Self::None, Self::Likely, Self::Sure];

    /// The name used in logs and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Likely => "likely",
            Self::Sure => "sure",
        }
    }
}

/// What the process of a request has to do with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProcessRole {
    /// The process is unknown.
    #[default]
    None = 0,
    /// It submitted the request, by direct I/O or a flush of its own.
    Submitter = 1,
    /// It waits for the request: for data that it reads, or for data or a journal that it has asked
    /// to be written.
    Waiter = 2,
    /// It wrote the data, perhaps long before the guest's kernel wrote it back.
    Writer = 3,
}

impl ProcessRole {
    /// Every role, in the order of its number.
    pub const ALL: [Self; 4] = [Self::None, Self::Submitter, Self::Waiter, Self::Writer];

    /// The name used in events, logs and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Submitter => "submitter",
            Self::Waiter => "waiter",
            Self::Writer => "writer",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_places_in_the_lists() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
            assert_eq!(Kind::from_number(number as u8), kind);
        }
        assert_eq!(Kind::from_number(200), Kind::Unknown);
        for (number, source) in InsightSource::ALL.into_iter().enumerate() {
            assert_eq!(source as usize, number);
        }
        for (number, confidence) in Confidence::ALL.into_iter().enumerate() {
            assert_eq!(confidence as usize, number);
        }
        for (number, role) in ProcessRole::ALL.into_iter().enumerate() {
            assert_eq!(role as usize, number);
        }
    }
}

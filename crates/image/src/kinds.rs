//! The marks of an image as one table: their kinds, what each asks of a command that changes the
//! image, and how it is read and removed. A command loops over all of them, so that none is
//! forgotten; a new kind does not compile until each command handles it.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::cached::{CacheMark, MarkedCache};
use crate::mark::{LogMark, MarkedLog};
use crate::moved::{MarkedMove, MoveMark};
use crate::record::{Loss, LossRecord};

/// A kind of mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// Changes of the image are in a log ([`LogMark`]).
    Log,
    /// A cache has blocks of the image ([`CacheMark`]).
    Cache,
    /// Writes of the image are lost ([`LossRecord`]).
    Loss,
    /// The image is not the current content of a disk that moves or has moved ([`MoveMark`]).
    Move,
}

/// A mark of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Changes of the image are in this log.
    Log(MarkedLog),
    /// This cache has blocks of the image.
    Cache(MarkedCache),
    /// Writes of the image are lost.
    Loss(Loss),
    /// The image is a side of this move.
    Move(MarkedMove),
}

/// An image whose marks are examined, and where they may be.
#[derive(Clone, Copy, Debug)]
pub struct MarkedImage<'a> {
    /// The path of the image.
    pub path: &'a Path,
    /// The image.
    pub file: &'a File,
    /// The folders of daemons: those of lost writes, and, in earlier versions, of block devices'
    /// marks.
    pub folders: &'a [PathBuf],
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
    /// The operator accepts the content as it is, although writes are lost, or a disk has moved.
    Recover,
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
    pub const ALL: [Self; 4] = [Self::Log, Self::Cache, Self::Loss, Self::Move];

    /// What a mark of this kind asks of a change.
    pub fn demand(self, change: ImageChange) -> Demand {
        use ImageChange::{Empty, Grow, Recover, Replace, Shrink};
        match (self, change) {
            // The log's changes would appear in the new image, or beyond the new end after a
            // growth.
            (Self::Log, Empty | Replace | Shrink) => Demand::Refuse,
            // The cache would return blocks of what is gone.
            (Self::Cache, Empty | Replace | Shrink | Recover) => Demand::ClearBefore,
            // Nothing is left that could lack writes, or the lack is known. Until then, the old
            // content lacks them.
            (Self::Loss | Self::Move, Empty | Recover) => Demand::ClearAfter,
            (Self::Log | Self::Cache, Grow)
            | (Self::Log, Recover)
            | (Self::Loss | Self::Move, Replace | Shrink | Grow) => Demand::Keep,
        }
    }

    /// The mark of this kind that an image has.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(self, image: &MarkedImage<'_>) -> io::Result<Option<Mark>> {
        let MarkedImage { path, file, folders } = *image;
        match self {
            Self::Loss => Ok(LossRecord::new(file, path, folders)?.read(file).map(Mark::Loss)),
            Self::Log => first(folders, |folder| LogMark::open(path, folder)?.read())
                .map(|found| found.map(Mark::Log)),
            Self::Cache => first(folders, |folder| CacheMark::open(path, folder)?.read())
                .map(|found| found.map(Mark::Cache)),
            Self::Move => first(folders, |folder| MoveMark::open(path, folder, None)?.read())
                .map(|found| found.map(Mark::Move)),
        }
    }

    /// Removes the mark of this kind, if there is one. On return, that is durable.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn clear(self, image: &MarkedImage<'_>) -> io::Result<()> {
        let MarkedImage { path, file, folders } = *image;
        match self {
            Self::Loss => LossRecord::new(file, path, folders)?.clear(file),
            Self::Log => folders.iter().try_for_each(|it| LogMark::open(path, it)?.clear()),
            Self::Cache => folders.iter().try_for_each(|it| CacheMark::open(path, it)?.clear()),
            Self::Move => folders.iter().try_for_each(|it| MoveMark::open(path, it, None)?.clear()),
        }
    }
}

/// The first mark that is found with one of the folders.
fn first<T>(
    folders: &[PathBuf],
    read: impl Fn(&Path) -> io::Result<Option<T>>,
) -> io::Result<Option<T>> {
    let mut found = folders.iter().filter_map(|folder| read(folder).transpose());
    found.next().transpose()
}

/// What an image with a mark of this kind has.
impl fmt::Display for MarkKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Log => "changes in a log",
            Self::Cache => "blocks in a cache",
            Self::Loss => "lost writes",
            Self::Move => "the content of a disk that moves or has moved",
        })
    }
}

//! The mark of an image that is not the current content of a disk, because the disk moves or has
//! moved.
//!
//! The target of a move is marked before the first byte is copied, and the mark is removed when the
//! copy is complete and durable. The source is marked when the disk has its content at the target,
//! before the first change there is acknowledged. So neither is served by mistake: not after a
//! crash, nor by an older configuration.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use crate::place::{MarkLocation, end_of, remove};

/// The extended attribute.
const ATTRIBUTE: &CStr = c"user.fathom.move";
/// The suffix of the file beside an image.
const SUFFIX: &str = ".fathom-move";

/// What an image has of a disk that moves or has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveSide {
    /// It is the target: a copy that is not complete.
    Incomplete,
    /// It is the source: the disk has its content elsewhere, and has perhaps changed it there.
    Left,
}

impl MoveSide {
    const ALL: [Self; 2] = [Self::Incomplete, Self::Left];

    /// The word in the mark.
    const fn word(self) -> &'static str {
        match self {
            Self::Incomplete => "incomplete",
            Self::Left => "left",
        }
    }
}

/// A move that an image is or was a side of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedMove {
    /// Which side the image is.
    pub side: MoveSide,
    /// When the mark was written, in seconds since 1970.
    pub unix_s: u64,
    /// The other side, for messages: a path, or a pool and a volume. Of a long text, the end is
    /// kept.
    pub other: String,
}

/// The place of the mark of one image or device.
pub struct MoveMark {
    place: MarkLocation,
}

impl MoveMark {
    /// The mark of the image at `path`. `folder` is the daemon's folder. `key` is the operator's
    /// name of a block device, if any.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open(path: &Path, folder: &Path, key: Option<&str>) -> io::Result<Self> {
        Ok(Self { place: MarkLocation::open(path, folder, key, ATTRIBUTE, SUFFIX)? })
    }

    /// Why the image can have no mark: it is a block device without a name that is lasting and its
    /// own, and the operator has given none. `None` for others.
    pub fn lacks_key(&self) -> Option<&str> {
        self.place.lacks_key()
    }

    /// The move that the image is a side of; `None` if it is none, or if the mark was written for
    /// another image or device.
    ///
    /// # Errors
    /// When the mark cannot be read or is damaged.
    pub fn read(&self) -> io::Result<Option<MarkedMove>> {
        let Some(found) = self.place.read()?.filter(|found| !found.is_foreign) else {
            return Ok(None);
        };
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the mark is damaged");
        parse(&found.text).map(Some).ok_or_else(damaged)
    }

    /// Marks the image. On return, the mark is durable.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub fn write(&self, marked: &MarkedMove) -> io::Result<()> {
        let mut text = format!("{} {} ", marked.side.word(), marked.unix_s);
        text.push_str(end_of(&marked.other, text.len()));
        self.place.write(text.as_bytes())
    }

    /// Removes the file that has the mark of an image at `path` which is gone, if there is one.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_beside(path: &Path) -> io::Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(SUFFIX);
        remove(Path::new(&beside))
    }

    /// Removes the mark, if there is one. On return, that is durable.
    ///
    /// # Errors
    /// When the mark cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        self.place.clear()
    }
}

fn parse(text: &[u8]) -> Option<MarkedMove> {
    let (word, rest) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    let (unix_s, other) = rest.split_once(' ')?;
    let side = MoveSide::ALL.into_iter().find(|side| side.word() == word)?;
    Some(MarkedMove { side, unix_s: unix_s.parse().ok()?, other: other.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_or_refused() {
        for has_attributes in [true, false] {
            let folder = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = folder.path().join("a.img");
            File::create(&path).unwrap();
            let open = || {
                let mark = MoveMark::open(&path, folder.path(), None).unwrap();
                if has_attributes {
                    mark
                } else {
                    MoveMark { place: mark.place.without_attributes() }
                }
            };
            assert_eq!(open().read().unwrap(), None);
            for side in MoveSide::ALL {
                let marked = MarkedMove { side, unix_s: 1_700_000_000, other: "/b c/d.img".into() };
                open().write(&marked).unwrap();
                assert_eq!(open().read().unwrap(), Some(marked.clone()));
                let long = MarkedMove { other: "\u{e4}".repeat(2000), ..marked };
                open().write(&long).unwrap();
                let found = open().read().unwrap().unwrap();
                assert!(found.side == side && long.other.ends_with(&found.other));
            }
            for wrong in ["", "left", "left 7", "left x /a", "right 7 /a", "\u{0}"] {
                open().place.write(wrong.as_bytes()).unwrap();
                assert!(open().read().is_err(), "{wrong:?}");
            }
            open().clear().unwrap();
            assert_eq!(open().read().unwrap(), None);
        }
    }
}

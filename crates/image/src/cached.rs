//! The mark of an image that names the state which a cache has blocks of.
//!
//! A cache that outlives the daemon belongs to one state of the image. The mark names the cache and
//! the state's age, which the cache has too. Each opening of the cache draws another one, so that
//! an older copy of the cache does not fit. Before the image is served without the cache, the
//! mark is removed. What other programs do to the image is seen by its modification time.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use fathom_persistence::{Identity, Stamp};

use crate::place::{MarkLocation, end_of};

/// The extended attribute.
const ATTRIBUTE: &CStr = c"user.fathom.cache";
/// The suffix of the file beside an image.
const SUFFIX: &str = ".fathom-cache";

/// A cache that has blocks of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedCache {
    /// The cache, and the state of the image that the blocks belong to.
    pub stamp: Stamp,
    /// The path of the cache when the mark was written, for messages. Of a long path, the end is
    /// kept.
    pub path: String,
}

/// The place of the mark of one image or device.
pub struct CacheMark {
    place: MarkLocation,
}

impl CacheMark {
    /// The mark of the image at `path`. `folder` is the daemon's folder, which had the marks of
    /// block devices in earlier versions.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open(path: &Path, folder: &Path) -> io::Result<Self> {
        Self::open_named(path, folder, None)
    }

    /// The same for a block device to which the operator has given the name `key`, if any.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open_named(path: &Path, folder: &Path, key: Option<&str>) -> io::Result<Self> {
        Ok(Self { place: MarkLocation::open(path, folder, key, ATTRIBUTE, SUFFIX)? })
    }

    /// Why the image can have no mark: it is a block device without a name that is lasting and its
    /// own, and the operator has given none. `None` for others.
    pub fn lacks_key(&self) -> Option<&str> {
        self.place.lacks_key()
    }

    /// The name of the image for those that belong to it: its path, or, of a block device, `device`
    /// and its key.
    pub fn home(&self) -> String {
        self.place.home()
    }

    /// The cache that has blocks of the image; `None` if there is none, or if the mark is damaged
    /// or was written for another image or device: such a mark fits no cache.
    ///
    /// # Errors
    /// When the mark cannot be read.
    pub fn read(&self) -> io::Result<Option<MarkedCache>> {
        let own = self.place.read()?.filter(|found| !found.is_foreign);
        Ok(own.and_then(|found| parse(&found.text)))
    }

    /// Whether there is a mark, even a damaged one.
    ///
    /// # Errors
    /// When the mark cannot be read.
    pub fn exists(&self) -> io::Result<bool> {
        Ok(self.place.read()?.is_some())
    }

    /// Marks the image. On return, the mark is durable.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub fn write(&self, cache: &MarkedCache) -> io::Result<()> {
        let mut text = format!("{} {:016x} ", cache.stamp.identity, cache.stamp.age);
        text.push_str(end_of(&cache.path, text.len()));
        self.place.write(text.as_bytes())
    }

    /// Removes the mark: no cache fits the image any more. On return, that is durable.
    ///
    /// # Errors
    /// When the mark cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        self.place.clear()
    }

    /// The modification time of the image, in nanoseconds since 1970. Every later change of the
    /// image gives it another one. 0 if that is not certain: the image is a block device, or it was
    /// changed just now.
    ///
    /// # Errors
    /// When the image's metadata cannot be read.
    pub fn modified_ns(&self) -> io::Result<u64> {
        self.place.modified_ns()
    }
}

fn parse(text: &[u8]) -> Option<MarkedCache> {
    let text = std::str::from_utf8(text).ok()?;
    let (hex, rest) = text.split_once(' ')?;
    let (age, path) = rest.split_once(' ')?;
    if age.len() != 16 {
        return None;
    }
    let age = u64::from_str_radix(age, 16).ok()?;
    let stamp = Stamp { identity: Identity::parse(hex)?, age };
    Some(MarkedCache { stamp, path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn a_mark_names_one_state_until_it_is_removed() {
        for has_attributes in [true, false] {
            let folder = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = folder.path().join("a.img");
            File::create(&path).unwrap();
            let open = || {
                let mark = CacheMark::open(&path, folder.path()).unwrap();
                if has_attributes {
                    mark
                } else {
                    CacheMark { place: mark.place.without_attributes() }
                }
            };
            assert_eq!(open().read().unwrap(), None);
            let stamp = Stamp { identity: Identity([0xab; 16]), age: 7 };
            let cache = MarkedCache { stamp, path: "/a b".into() };
            open().write(&cache).unwrap();
            // The text is that which earlier builds have written.
            let text = format!("{} 0000000000000007 /a b", "ab".repeat(16));
            assert_eq!(open().place.read().unwrap().unwrap().text, text.into_bytes());
            assert_eq!(open().read().unwrap(), Some(cache.clone()));
            let long = MarkedCache { path: "\u{e4}".repeat(2000), ..cache };
            open().write(&long).unwrap();
            let found = open().read().unwrap().unwrap();
            assert!(found.stamp == stamp && long.path.ends_with(&found.path));
            open().place.write(b"ab 7 /a").unwrap();
            assert!(open().read().unwrap().is_none() && open().exists().unwrap());
            open().clear().unwrap();
            assert!(!open().exists().unwrap());
            open().clear().unwrap();
        }
    }

    #[test]
    fn a_mark_in_a_file_fits_no_other_image() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().join("a.img");
        let open = || {
            let mark = CacheMark::open(&path, folder.path()).unwrap();
            CacheMark { place: mark.place.without_attributes() }
        };
        File::create(&path).unwrap();
        let stamp = Stamp { identity: Identity([1; 16]), age: 7 };
        open().write(&MarkedCache { stamp, path: "/a".into() }).unwrap();
        assert_eq!(open().read().unwrap().unwrap().stamp, stamp);
        std::thread::sleep(Duration::from_millis(30));
        std::fs::rename(&path, folder.path().join("old.img")).unwrap();
        File::create(&path).unwrap();
        assert!(open().read().unwrap().is_none() && open().exists().unwrap());
    }

    #[test]
    fn every_change_has_another_stamp() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().join("a.img");
        let file = File::create(&path).unwrap();
        let mark = CacheMark::open(&path, folder.path()).unwrap();
        let mut times = vec![0];
        for count in 0..20 {
            file.write_all_at(&[count], 0).unwrap();
            if count == 0 {
                assert_eq!(mark.modified_ns().unwrap(), 0, "it was changed just now");
            }
            let modified_ns = loop {
                match mark.modified_ns().unwrap() {
                    0 => std::thread::sleep(Duration::from_millis(1)),
                    modified_ns => break modified_ns,
                }
            };
            assert!(!times.contains(&modified_ns));
            times.push(modified_ns);
        }
        // A time in the future is a time, too.
        file.set_modified(SystemTime::now() + Duration::from_secs(1000)).unwrap();
        assert!(mark.modified_ns().unwrap() > *times.last().unwrap());
    }
}

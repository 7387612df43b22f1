//! Which folder of records a daemon has, so that another one, or an older copy, is noticed at a
//! start.
//!
//! The folder has an identity, drawn when its first record is written, and an age, which counts its
//! changes. The host's folder of the marks has a note of both. A change is durable in the folder
//! first, then its age, then the note; only then is the change acknowledged. So the note is never
//! ahead of the folder that it was written for. A folder in memory has no note, because it is lost
//! with the host.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use fathom_image::{NotedState, StateNote, replace_file};
use fathom_persistence::{Identity, Stamp};

/// The file with the identity and the age.
const FILE: &str = "identity";
/// Its draft. No record has this name, because that of a draft ends with `.new`.
const DRAFT: &str = "identity.draft";
/// The most bytes of the file that are read.
const LENGTH_MAX: u64 = 2048;
/// The types of file systems in memory (`statfs.f_type`): tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Why a folder is not the one that the configuration had before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Strange {
    /// There is none, and there was one at this path.
    Missing(String),
    /// It is another one. Contains the path of the earlier one.
    Other(String),
    /// It is an older copy.
    Older,
}

/// The identity of a folder, and the note of it.
pub(super) struct Lineage {
    note: StateNote,
    /// The identity and the age of the folder, if it has any.
    own: Option<NotedState>,
    /// The age in the note, of whichever folder.
    noted_age: u64,
}

impl Lineage {
    /// Compares the folder at `path` with the note about it.
    pub(super) fn compare(note: StateNote, path: &Path) -> (Self, Option<Strange>) {
        let own = read(&path.join(FILE)).ok().and_then(|text| NotedState::parse(&text));
        // A note that cannot be read is none.
        let noted = note.read().ok().flatten();
        let strange = noted.as_ref().and_then(|noted| match &own {
            Some(own) if own.stamp.identity != noted.stamp.identity => {
                Some(Strange::Other(noted.path.clone()))
            }
            Some(own) => (own.stamp.age < noted.stamp.age).then_some(Strange::Older),
            None if path.exists() => Some(Strange::Other(noted.path.clone())),
            None => Some(Strange::Missing(noted.path.clone())),
        });
        (Self { note, own, noted_age: noted.map_or(0, |noted| noted.stamp.age) }, strange)
    }

    /// The folder at `path` has another record, or one less: it gets the next age, which is noted.
    /// On return, that is durable.
    pub(super) fn advance(&mut self, path: &Path) -> io::Result<()> {
        if IN_MEMORY.contains(&rustix::fs::statfs(path)?.f_type) {
            return Ok(());
        }
        let own = match &self.own {
            Some(own) => own.stamp,
            None => Stamp { identity: Identity::draw()?, age: 0 },
        };
        let stamp = Stamp { age: own.age.max(self.noted_age) + 1, ..own };
        let next = NotedState { stamp, path: path.display().to_string() };
        replace_file(&path.join(FILE), &path.join(DRAFT), next.text().as_bytes(), false)?;
        self.own = Some(next.clone());
        self.note.write(&next)?;
        self.noted_age = stamp.age;
        Ok(())
    }

    /// Forgets the folder that was noted.
    pub(super) fn forget(&mut self) -> io::Result<()> {
        self.note.clear()?;
        self.noted_age = 0;
        Ok(())
    }
}

fn read(path: &Path) -> io::Result<String> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut text = String::new();
    file.take(LENGTH_MAX).read_to_string(&mut text)?;
    Ok(text)
}

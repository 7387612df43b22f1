//! Where the table of a memory file is: in a folder of its own, which decides who may use it.
//!
//! ```text
//! leases/                0711; the pager's user
//!   DEVICE-INODE/        0700, with an access control list for the users of daemons
//!     owner              the VMM: its process, when that started, the namespace of its number
//!     table              0666
//! ```
//! A process that may write to a file can hold its lock in the kernel for as long as it likes: it
//! writes from memory whose page never comes. Whoever removes or renames that file, or changes its
//! rights, waits then, cannot be killed, and keeps the lock of the folder meanwhile. So a pager
//! does nothing of that to a table that others have: the folder has the access control list, which
//! its users may search only, and a table that is not needed any more is put aside with its folder,
//! by a new name. To remove it is for another process ([`remove_ended`]). The owner is in a file
//! that only the pager may write: what a table says is not believed.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};

use super::admission;
use super::table::MemoryFile;

/// Where tables are: in memory. Not in the folder of the daemon's unit, which goes when that stops.
pub const LEASE_FOLDER: &str = "/run/fathom-pager/leases";

/// What the names of folders begin with that were put aside, and of those that are not complete.
const ASIDE: &str = ".ended-";
const BEGUN: &str = ".new-";
/// The most bytes of an owner.
const OWNER_BYTES_MAX: u64 = 80;

/// A process that no other can be mistaken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOwner {
    /// Its number.
    pub process: u32,
    /// When it started, in ticks of the kernel's clock since the boot.
    pub start_ticks: u64,
    /// The namespace of its number: the inode of `/proc/self/ns/pid`.
    pub namespace: u64,
}

/// The folder of a table.
#[derive(Clone, Debug)]
pub(super) struct TableFolder {
    all: PathBuf,
    name: String,
    path: PathBuf,
}

impl TableFolder {
    /// That of a memory file in the folder of all tables.
    pub fn of(all: &Path, memory: MemoryFile) -> Self {
        let name = format!("{:x}-{:x}", memory.device, memory.inode);
        Self { all: all.to_owned(), path: all.join(&name), name }
    }

    fn named(&self, prefix: &str, suffix: &str) -> PathBuf {
        self.all.join(format!("{prefix}{}{suffix}", self.name))
    }

    /// The folder itself.
    #[cfg(test)]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The table in it.
    pub fn table(&self) -> PathBuf {
        self.path.join("table")
    }

    /// The VMM; `None` if that is not known.
    pub fn owner(&self) -> Option<TableOwner> {
        read_owner(&self.path)
    }

    /// Begins a new folder, which nobody else may use. What another pager has begun is removed.
    pub fn begin(&self, owner: TableOwner) -> io::Result<Self> {
        // Others may find out whether there is a table, and not list the tables.
        if self.all.symlink_metadata().is_err() {
            DirBuilder::new().recursive(true).mode(0o711).create(&self.all)?;
        }
        let path = self.named(BEGUN, "");
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(&path)?;
        let mut file = File::options().write(true).create_new(true).open(path.join("owner"))?;
        // Whatever the mask of this process is.
        file.set_permissions(Permissions::from_mode(0o644))?;
        let TableOwner { process, start_ticks, namespace } = owner;
        file.write_all(format!("{process} {start_ticks} {namespace}\n").as_bytes())?;
        Ok(Self { path, ..self.clone() })
    }

    /// Puts a folder that was begun in this one's place.
    pub fn complete(&self, begun: &Self) -> io::Result<()> {
        self.put_aside()?;
        fs::rename(&begun.path, &self.path)
    }

    /// Gives the folder another name, if there is one.
    pub fn put_aside(&self) -> io::Result<()> {
        /// Distinguishes those of a process.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let found = match self.path.symlink_metadata() {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if !found.is_dir() {
            return Err(of_earlier_version(&self.path));
        }
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = self.named(ASIDE, &format!("-{}-{count}", std::process::id()));
            match fs::rename(&self.path, name) {
                // One of an earlier process with the same number.
                Err(error) if is_taken(&error) => {}
                renamed => return renamed,
            }
        }
    }

    /// Lets daemons of these users use what is in the folder.
    ///
    /// # Errors
    /// Those of [`admission::admit`].
    pub fn admit(&self, users: &[u32]) -> io::Result<()> {
        admission::admit(&self.path, users)
    }
}

/// The error for a table that is a file of its own.
pub(super) fn of_earlier_version(path: &Path) -> io::Error {
    let text = format!(
        "{} is of an earlier version: detach with that version, stop the daemon, and remove it",
        path.display()
    );
    io::Error::new(ErrorKind::InvalidData, text)
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty)
}

fn read_owner(folder: &Path) -> Option<TableOwner> {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let mut text = String::new();
    let file = options.open(folder.join("owner")).ok()?;
    file.take(OWNER_BYTES_MAX).read_to_string(&mut text).ok()?;
    let mut numbers = text.strip_suffix('\n')?.split(' ');
    let process = numbers.next()?.parse().ok()?;
    let start_ticks = numbers.next()?.parse().ok()?;
    let namespace = numbers.next()?.parse().ok()?;
    numbers.next().is_none().then_some(TableOwner { process, start_ticks, namespace })
}

/// See [`PagerLeases::remove_ended`](super::PagerLeases::remove_ended).
pub(super) fn remove_ended(all: &Path, has_ended: impl Fn(TableOwner) -> bool) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder && !name.starts_with(ASIDE) && read_owner(&path).is_some_and(&has_ended) {
            // Where it is, a new one may be wanted while this one cannot be removed.
            let name = name.strip_prefix(BEGUN).unwrap_or(&name).to_owned();
            let place = TableFolder { all: all.to_owned(), name, path };
            let _ = place.put_aside();
        }
    }
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(ASIDE) {
            continue;
        }
        // One process for each folder: another may wait for its table for ever.
        let path = entry.path();
        let Ok(folder) = File::open(&path) else { continue };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

//! Who may use a table of leases: the user of the pager, and the users of daemons that the pager
//! admits.
//!
//! Each of them has an entry in the access control list of the table's folder (POSIX, as that of
//! `setfacl`), which lets them search it. The folder stays the pager's own: a user who owned it
//! could let others in; and a group may have further members. The list outlives pagers and daemons,
//! as the table does: a daemon of the same user that is started again gets in at once.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};
use rustix::io::Errno;

use super::table::HOLDERS;

/// The attribute with the list.
const ATTRIBUTE: &str = "system.posix_acl_access";
/// The version of its format.
const VERSION: u32 = 2;
/// The bytes of its header, and of an entry: the kind, the rights, a user or group.
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The most users that are admitted: as many as processes have a place in the table.
const USERS_MAX: usize = HOLDERS;
/// The owner, a user, the owner's group, the most that users have, and everybody else.
const OWNER: u16 = 1;
const USER: u16 = 2;
const GROUP: u16 = 4;
const MASK: u16 = 16;
const OTHER: u16 = 32;
/// The user of an entry that names none.
const NO_USER: u32 = u32::MAX;

/// What the owner may do with the folder: all.
const ALL: u16 = 7;
/// What admitted users may: search it.
const SEARCH: u16 = 1;

/// Lets `users` search the folder at `path`. Users that were admitted before stay, as long as there
/// are no more than [`USERS_MAX`]. Everybody else but the owner has no right.
///
/// # Errors
/// When the folder does not exist or is a symbolic link, its file system has no such lists, or this
/// user may not change it.
pub(super) fn admit(path: &Path, users: &[u32]) -> io::Result<()> {
    let owner = path.symlink_metadata()?.uid();
    let mut wanted: Vec<u32> = users.iter().copied().filter(|user| *user != owner).collect();
    wanted.sort_unstable();
    wanted.dedup();
    wanted.truncate(USERS_MAX);
    // A file system without lists is enough for the owner.
    if wanted.is_empty() {
        return Ok(());
    }
    let mut bytes = [0; HEADER_BYTES + 2 * (USERS_MAX + 4) * ENTRY_BYTES];
    let admitted = match lgetxattr(path, ATTRIBUTE, &mut bytes) {
        Ok(length) => decode(&bytes[..length]),
        // Without a list, or with one of somebody else.
        Err(Errno::NODATA | Errno::RANGE) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    if wanted.iter().all(|user| admitted.contains(user)) {
        return Ok(());
    }
    let stay = admitted.into_iter().filter(|user| !wanted.contains(user)).collect::<Vec<u32>>();
    wanted.extend(stay.into_iter().take(USERS_MAX - wanted.len()));
    wanted.sort_unstable();
    Ok(lsetxattr(path, ATTRIBUTE, &encode(&wanted), XattrFlags::empty())?)
}

/// The list for these users, in ascending order.
fn encode(users: &[u32]) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    let mut entry = |kind: u16, rights: u16, user: u32| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(user.to_le_bytes());
    };
    entry(OWNER, ALL, NO_USER);
    for user in users {
        entry(USER, SEARCH, *user);
    }
    entry(GROUP, 0, NO_USER);
    entry(MASK, SEARCH, NO_USER);
    entry(OTHER, 0, NO_USER);
    bytes
}

/// The users of a list who may search.
fn decode(bytes: &[u8]) -> Vec<u32> {
    let entries = bytes.get(HEADER_BYTES..).unwrap_or_default().chunks_exact(ENTRY_BYTES);
    let numbers = entries.map(|entry| {
        let half = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        let user = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        (half(0), half(2), user)
    });
    let is_user = |&(kind, has, _): &(u16, u16, u32)| kind == USER && has == SEARCH;
    numbers.filter(is_user).map(|(_, _, user)| user).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The users of a folder's list. `None` where there are no lists.
    fn admitted(path: &Path) -> Option<Vec<u32>> {
        let mut bytes = [0; 256];
        let length = lgetxattr(path, ATTRIBUTE, &mut bytes).ok()?;
        Some(decode(&bytes[..length]))
    }

    #[test]
    fn as_many_users_are_admitted_as_have_a_place_and_the_latest_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        let owner = path.metadata().unwrap().uid();
        let mode = || path.metadata().unwrap().permissions().mode() & 0o777;
        admit(&path, &[owner]).unwrap();
        assert_eq!(mode(), 0o700, "the owner needs no list");
        if let Err(error) = admit(&path, &[65_534]) {
            println!("Skipped: no access control lists here: {error}");
            return;
        }
        // The group's bits are the mask now; the group itself has none.
        assert_eq!(mode(), 0o710);
        let users = || admitted(&path).unwrap();
        assert_eq!(users(), [65_534]);
        admit(&path, &[owner, 977, 65_534]).unwrap();
        admit(&path, &[977]).unwrap();
        assert_eq!(users(), [977, 65_534]);
        admit(&path, &[5]).unwrap();
        assert_eq!(users(), [5, 977]);
        admit(&path, &[9, 8, 7, 8]).unwrap();
        assert_eq!(users(), [7, 8]);
        // Whoever had other rights gets these.
        let mut other = encode(&[7]);
        other[HEADER_BYTES + ENTRY_BYTES + 2] = 6;
        lsetxattr(&path, ATTRIBUTE, &other, XattrFlags::empty()).unwrap();
        assert!(users().is_empty());
        admit(&path, &[7]).unwrap();
        assert_eq!(users(), [7]);
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::create_dir(&target).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let before = target.metadata().unwrap().permissions();
        admit(&link, &[65_534]).unwrap_err();
        assert_eq!(target.metadata().unwrap().permissions(), before);
        assert_eq!(admitted(&target), None);
        admit(&folder.path().join("none"), &[1]).unwrap_err();
    }

    #[test]
    fn rubbish_admits_nobody() {
        for length in 0..32 {
            assert!(decode(&vec![0xff; length]).is_empty());
        }
        let list = encode(&[3, 4]);
        assert_eq!(decode(&list), [3, 4]);
        assert_eq!(decode(&list[..HEADER_BYTES + 3 * ENTRY_BYTES - 1]), [3]);
    }
}

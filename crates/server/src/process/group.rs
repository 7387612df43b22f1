//! Grants a group access to sockets, because a VMM seldom runs as the daemon's user.

#![expect(unsafe_code, reason = "only the C library can look up groups")]

use std::ffi::CString;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

/// The longest group entry that is read, in bytes. The entry lists all members.
const ENTRY_MAX: usize = 1 << 20;

/// The ID of the group `name`.
pub(crate) fn id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 4096];
    loop {
        // SAFETY: all zeroes is a valid value of that plain structure.
        let mut group: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: the name is a C string; the structure, the buffer of the length given, and the
        // place for the result live through the call.
        let result = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &raw mut group,
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        };
        if result == libc::ERANGE && buffer.len() < ENTRY_MAX {
            buffer.resize(buffer.len() * 4, 0);
            continue;
        }
        return (result == 0 && !found.is_null()).then_some(group.gr_gid);
    }
}

/// Lets the socket's owner and the members of the group `name` use the socket at `path`.
pub(crate) fn admit(path: &Path, name: &str) -> io::Result<()> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("there is no group {name:?}"));
    // Change the group before the mode: in the other order, the old group could connect for a
    // moment.
    chown(path, None, Some(id(name).ok_or_else(missing)?))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name() {
        assert_eq!(id("root"), Some(0));
        assert_eq!(id("no such group"), None);
        assert_eq!(id("nul\0"), None);
    }
}

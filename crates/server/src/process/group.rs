//! Groups and users of the host, by name and number. Grants a group access to sockets, because a
//! VMM seldom runs as the daemon's user.

#![expect(unsafe_code, reason = "only the C library can look up groups and users")]

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

/// The longest group entry that is read, in bytes. The entry lists all members.
const ENTRY_MAX: usize = 1 << 20;

/// The ID of the group `name`.
pub(crate) fn id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    look_up(|buffer| {
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
        (result, (!found.is_null()).then_some(group.gr_gid))
    })
}

/// The name of the user with the number `id`. Waits as long as the host's service of names does.
pub(crate) fn user_name(id: u32) -> Option<String> {
    look_up(|buffer| {
        // SAFETY: all zeroes is a valid value of that plain structure.
        let mut user: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: the structure, the buffer of the length given, and the place for the result live
        // through the call.
        let result = unsafe {
            libc::getpwuid_r(id, &raw mut user, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        };
        if result != 0 || found.is_null() || user.pw_name.is_null() {
            return (result, None);
        }
        // SAFETY: the call has succeeded, so the name is a C string in the buffer.
        let name = unsafe { CStr::from_ptr(user.pw_name) };
        (result, Some(name.to_string_lossy().into_owned()))
    })
}

/// Calls `entry` with larger and larger buffers until what it looks up fits. It returns the result
/// of the C library, and what it has found.
fn look_up<T>(mut entry: impl FnMut(&mut [libc::c_char]) -> (i32, Option<T>)) -> Option<T> {
    let mut buffer = vec![0; 4096];
    loop {
        match entry(&mut buffer) {
            (0, found) => return found,
            (libc::ERANGE, _) if buffer.len() < ENTRY_MAX => buffer.resize(buffer.len() * 4, 0),
            _ => return None,
        }
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
    fn users_are_found_by_number() {
        assert_eq!(user_name(0).as_deref(), Some("root"));
        assert_eq!(user_name(u32::MAX - 7), None);
    }

    #[test]
    fn groups_are_found_by_name() {
        assert_eq!(id("root"), Some(0));
        assert_eq!(id("no such group"), None);
        assert_eq!(id("nul\0"), None);
    }
}

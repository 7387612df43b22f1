//! Small files of `/sys` and `/proc`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The most bytes read from a file of `/sys`.
const FILE_LENGTH_MAX: u64 = 4096;

/// Reads a small file as text, up to `length_max` bytes. Bytes that are not UTF-8 are replaced.
pub(crate) fn read_to(path: &Path, length_max: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(length_max).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads a file of `/sys` without the white space at its ends.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    Ok(read_to(path, FILE_LENGTH_MAX)?.trim().to_owned())
}

/// Reads a file of `/sys` that holds one number.
pub(crate) fn number(path: &Path) -> Option<u64> {
    read(path).ok()?.parse().ok()
}

/// Whether `name` can be the name of a device in `/sys`: it becomes a part of paths, labels and
/// tables.
pub(crate) fn is_device_name(name: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-!.:".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_valid) && !name.starts_with('.')
}

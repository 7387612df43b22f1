//! The level of QEMU's interface for plugins.
//!
//! QEMU refuses a plugin that was made for another level than its own. The functions that this
//! plugin uses are the same at each of these levels, so it takes the level of the QEMU that loads
//! it, before QEMU looks.

use std::fs::File;
use std::io::Read;

/// The text before the version in QEMU's program.
const MARK: &[u8] = b"QEMU emulator version ";
/// The level of QEMU 9.2 and 10.0, for a program without a version.
const LEVEL_DEFAULT: i32 = 4;
const PART: usize = 1 << 20;

/// The level of a release of QEMU.
fn level_of(major: u32, minor: u32) -> i32 {
    match (major, minor) {
        (..=8, _) => 2,
        (9, ..=1) => 3,
        (9, _) | (10, 0) => 4,
        (10, _) => 5,
        (11, 0) => 6,
        (11.., _) => 7,
    }
}

/// The release in a text such as `10.0.2 (Debian …)`.
fn release(text: &[u8]) -> Option<(u32, u32)> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
    let mut numbers = std::str::from_utf8(&text[..end]).ok()?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The level of the program that runs.
pub fn current() -> i32 {
    let found = || {
        let mut program = File::open("/proc/self/exe").ok()?;
        let mut bytes = Vec::with_capacity(PART + 256);
        loop {
            // The end of the part before, in which the text may begin.
            let kept = bytes.len().min(MARK.len() + 64);
            bytes.drain(..bytes.len() - kept);
            let read = program.by_ref().take(PART as u64).read_to_end(&mut bytes).ok()?;
            if let Some(place) = bytes.windows(MARK.len()).position(|window| window == MARK) {
                if let Some(release) = release(&bytes[place + MARK.len()..]) {
                    return Some(level_of(release.0, release.1));
                }
            }
            if read == 0 {
                return None;
            }
        }
    };
    found().unwrap_or(LEVEL_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_levels() {
        let level =
            |text: &str| release(text.as_bytes()).map(|(major, minor)| level_of(major, minor));
        assert_eq!(level("10.0.2 (Debian 1:10.0.2+ds-2)\n"), Some(4));
        assert_eq!(level("10.1.0\n"), Some(5));
        assert_eq!(level("10.2.91%s\n"), Some(5));
        assert_eq!(level("11.0.0\0"), Some(6));
        assert_eq!(level("11.1.0\0"), Some(7));
        assert_eq!(level("%s\n"), None);
        assert_eq!(current(), LEVEL_DEFAULT);
    }
}

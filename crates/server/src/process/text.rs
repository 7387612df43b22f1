//! The code that only the start needs.
//!
//! A start runs through much of the program once: options, the configuration, each feature. The
//! kernel maps sixteen pages around each one that is used, and counts them as memory of the daemon
//! until it ends, although nothing uses most of them again.

#![expect(unsafe_code, reason = "only the C library has the call")]

use std::ffi::c_void;

/// Takes the pages of code out of the daemon's memory. Those that are used again come back from the
/// kernel's page cache, with about a microsecond for each sixteen.
pub(crate) fn give_back() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    for (begin, length) in maps.lines().filter_map(code) {
        // SAFETY: the mapping has code of a file, which no one writes: the pages that are dropped
        // are read from the file again. An error changes nothing.
        unsafe { libc::madvise(begin as *mut c_void, length, libc::MADV_DONTNEED) };
    }
}

/// The first byte and the length of a mapping, if it has code of a file that cannot be written.
fn code(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    // The offset, the device and the inode are between.
    let path = fields.nth(3)?;
    if rights != "r-xp" || !path.starts_with('/') {
        return None;
    }
    let (begin, end) = range.split_once('-')?;
    let begin = usize::from_str_radix(begin, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    Some((begin, end.checked_sub(begin)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_given_back() {
        let line = "7f6a1000-7f6a4000 r-xp 00026000 fe:00 326591     /usr/lib/libc.so.6";
        assert_eq!(code(line), Some((0x7f6a_1000, 0x3000)));
        for other in [
            line.replace("r-xp", "r--p"),
            line.replace("r-xp", "rwxp"),
            line.replace("r-xp", "r-xs"),
            "7ffd1000-7ffd3000 r-xp 00000000 00:00 0   [vdso]".into(),
            "7ffd1000-7ffd3000 r-xp 00000000 00:00 0".into(),
            "7ffd3000-7ffd1000 r-xp 00000000 fe:00 1 /bin/x".into(),
            "7f6a1000 r-xp".into(),
            String::new(),
        ] {
            assert_eq!(code(&other), None, "{other}");
        }
    }

    #[test]
    fn code_that_was_given_back_still_runs() {
        let resident = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let (mut is_code, mut kib) = (false, 0);
            for line in maps.lines() {
                if let Some(size) = line.strip_prefix("Rss:").filter(|_| is_code) {
                    kib += size.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
                }
                // The first word of a mapping is its range, and those of its figures end so.
                if !line.split(' ').next().unwrap().ends_with(':') {
                    is_code = code(line).is_some();
                }
            }
            kib
        };
        let before = resident();
        give_back();
        let after = resident();
        assert!(after < before, "{before} {after}");
    }
}

//! The list of mounts, `/proc/self/mountinfo`.

use std::path::PathBuf;

/// The most bytes read from the list of mounts.
pub(crate) const LENGTH_MAX: u64 = 16 << 20;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The type of the file system, for example `ext4` or `fuse.sshfs`.
    pub file_system: String,
    /// The mounted source: usually the path of a device.
    pub source: String,
    /// The options of the file system, separated by commas.
    options: String,
}

impl Mount {
    /// The value of the option `name=…`.
    pub(crate) fn option(&self, name: &str) -> Option<String> {
        let options = split(&self.options, ',');
        let mut values = options.iter().filter_map(|option| {
            let (key, value) = option.split_once('=')?;
            (key == name).then(|| value.to_owned())
        });
        values.next()
    }
}

/// The mount with the number `id` in the text of a mountinfo file.
pub(crate) fn find(text: &str, id: u64) -> Option<Mount> {
    text.lines().find_map(|line| {
        let (first, rest) = line.split_once(' ')?;
        if first.parse() != Ok(id) {
            return None;
        }
        // Optional fields end with a dash.
        let (_, rest) = rest.split_once(" - ")?;
        let mut fields = rest.split(' ');
        Some(Mount {
            file_system: unescape(fields.next()?),
            source: unescape(fields.next()?),
            options: unescape(fields.next().unwrap_or("")),
        })
    })
}

/// Replaces the octal escapes of spaces, tabs, line ends and backslashes.
fn unescape(field: &str) -> String {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|_| *first == b'\\');
        let value = digits.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        bytes.push(value.unwrap_or(*first));
        rest = if value.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Splits `text` at each `separator` that no backslash precedes, and removes these backslashes.
pub(crate) fn split(text: &str, separator: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character == separator {
            parts.push(String::new());
            continue;
        }
        let last = parts.len() - 1;
        let escapes = |next: &char| [separator, '\\'].contains(next);
        match character {
            '\\' if characters.peek().is_some_and(escapes) => {
                parts[last].extend(characters.next());
            }
            _ => parts[last].push(character),
        }
    }
    parts
}

/// The folders in which a file of an overlay may lie: the upper one if the overlay is writable, or
/// else the lower ones.
pub(crate) fn overlay_folders(mount: &Mount) -> Vec<PathBuf> {
    if let Some(upper) = mount.option("upperdir") {
        return vec![upper.into()];
    }
    let mut folders = Vec::new();
    if let Some(lower) = mount.option("lowerdir") {
        // A folder of data only is separated by two colons.
        folders.extend(split(&lower, ':').into_iter().filter(|path| !path.is_empty()));
    }
    // Newer kernels list each lower folder as an option of its own.
    folders.extend(mount.option("lowerdir+"));
    folders.into_iter().map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_their_number_whatever_the_lines_are() {
        let text = "garbage\n\
            36 35 98:0 /m1 /m\\0402 rw,noatime shared:1 master:2 - ext4 /dev/my\\040disk rw,a=b\n\
            37 35 0:50 / /o rw - overlay overlay rw,lowerdir=/a\\134:b:/c,upperdir=/u\\134,p,x\n\
            38\n39 - \n40 1 - xfs\n18446744073709551616 1 - a b c\n";
        let found = find(text, 36).unwrap();
        assert_eq!((&*found.file_system, &*found.source), ("ext4", "/dev/my disk"));
        assert_eq!(found.option("a").as_deref(), Some("b"));
        assert_eq!(found.option("b"), None);
        let overlay = find(text, 37).unwrap();
        assert_eq!(overlay.option("upperdir").as_deref(), Some("/u,p"));
        assert_eq!(overlay_folders(&overlay), [PathBuf::from("/u,p")]);
        assert_eq!(split("/a\\:b:/c", ':'), ["/a:b", "/c"]);
        for absent in [1, 38, 39, 40, 0] {
            assert_eq!(find(text, absent), None, "{absent}");
        }
        assert_eq!(unescape("\\04\\999\\"), "\\04\\999\\");
    }
}

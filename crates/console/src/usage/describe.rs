//! Texts for the subjects of requests.
use fathom_control::{FactsStatus, UsageRow};

use super::group::{FLUSHES, FOLDED};
use crate::output::text::clean;

/// The file, or the kind of data without a file: `/srv/a`, `journal of ext4 on vda`.
pub fn object(row: &UsageRow) -> String {
    of(&row.kind, &row.path, row.inode, &row.file_system, &row.device)
}

/// A part of a database, after its file: `/srv/shop.db index 17`.
pub fn database(row: &UsageRow) -> String {
    let number =
        if row.database_index == 0 { String::new() } else { format!(" {}", row.database_index) };
    format!("{} {}{number}", object(row), clean(&row.database_part))
}

/// The same for a request's facts.
pub fn facts(facts: &FactsStatus) -> String {
    of(&facts.kind, &facts.path, facts.inode, &facts.file_system, &facts.device)
}

/// Whether the data belongs to a single file with a name or a number.
pub fn is_file(kind: &str, path: &str, inode: u64) -> bool {
    !path.is_empty() || inode != 0 && matches!(kind, "data" | "direct" | "swap")
}

fn of(kind: &str, path: &str, inode: u64, file_system: &str, device: &str) -> String {
    if !path.is_empty() {
        return clean(path);
    }
    let mut text = match kind {
        "" | "unknown" => "(unknown)".to_owned(),
        FLUSHES => "(flushes)".to_owned(),
        FOLDED => "(evicted files)".to_owned(),
        "device" => "the device itself".to_owned(),
        "data" | "direct" | "swap" if inode != 0 => format!("inode {inode}"),
        "data" | "direct" => "a file".to_owned(),
        "directory" => "directories".to_owned(),
        kind => kind.to_owned(),
    };
    if !file_system.is_empty() {
        text += &format!(" of {file_system}");
    }
    if !device.is_empty() {
        text += &format!(" on {device}");
    }
    clean(&text)
}

/// A control group's name for display: a container's long number is cut to its first twelve digits,
/// as container engines do.
pub fn container(cgroup: &str) -> String {
    const LONG: usize = 32;
    const SHORT: usize = 12;
    let mut text = String::with_capacity(cgroup.len());
    let mut rest = cgroup;
    while !rest.is_empty() {
        let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        let digits = rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
        let shown = if digits >= LONG { SHORT } else { digits };
        text.push_str(&rest[..shown]);
        let next = rest[digits..].find(is_digit).map_or(rest.len(), |at| digits + at);
        text.push_str(&rest[digits..next]);
        rest = &rest[next..];
    }
    clean(&text)
}

/// A process's name and number.
pub fn process(command: &str, id: u64) -> String {
    if command.is_empty() { "(unknown)".into() } else { format!("{} {id}", clean(command)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_without_a_path_is_described() {
        assert_eq!(of("data", "/a", 1, "ext4", "vda"), "/a");
        assert_eq!(of("data", "", 7, "ext4", "vda"), "inode 7 of ext4 on vda");
        assert_eq!(of("data", "", 0, "ext4", ""), "a file of ext4");
        assert_eq!(of("journal", "", 0, "", ""), "journal");
        assert_eq!(of("device", "", 0, "", "vdb"), "the device itself on vdb");
        assert_eq!(of("unknown", "", 0, "", ""), "(unknown)");
        assert_eq!(of("data", "/a\u{202e}b", 1, "", ""), "/a\u{fffd}b");
    }

    #[test]
    fn containers_have_short_numbers() {
        let number = "3f1a2b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708";
        assert_eq!(
            container(&format!("/system.slice/docker-{number}.scope")),
            "/system.slice/docker-3f1a2b4c5d6e.scope"
        );
        assert_eq!(container(&format!("/docker/{number}")), "/docker/3f1a2b4c5d6e");
        assert_eq!(container("/web"), "/web");
        assert_eq!(container("/décafé/ab12"), "/décafé/ab12");
        assert_eq!(process("fio", 12), "fio 12");
    }
}

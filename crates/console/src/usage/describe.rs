//! What requests are about, in words.
use fathom_control::{FactsStatus, UsageRow};

/// The file, or what of a file system it is: `/srv/a`, `journal of ext4 on vda`.
pub fn object(row: &UsageRow) -> String {
    of(&row.kind, &row.path, row.inode, &row.file_system, &row.device)
}

/// The same of a request's facts.
pub fn facts(facts: &FactsStatus) -> String {
    of(&facts.kind, &facts.path, facts.inode, &facts.file_system, &facts.device)
}

fn of(kind: &str, path: &str, inode: u64, file_system: &str, device: &str) -> String {
    if !path.is_empty() {
        return path.to_owned();
    }
    let mut text = match kind {
        "" | "unknown" => "unknown".to_owned(),
        "flushes" => "(flushes)".to_owned(),
        "folded" => "(files that made room)".to_owned(),
        "device" => "the device itself".to_owned(),
        "data" | "direct" if inode != 0 => format!("inode {inode}"),
        kind => kind.to_owned(),
    };
    if !file_system.is_empty() {
        text += &format!(" of {file_system}");
    }
    if !device.is_empty() {
        text += &format!(" on {device}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_path_is_described() {
        assert_eq!(of("data", "/a", 1, "ext4", "vda"), "/a");
        assert_eq!(of("data", "", 7, "ext4", "vda"), "inode 7 of ext4 on vda");
        assert_eq!(of("journal", "", 0, "", ""), "journal");
        assert_eq!(of("device", "", 0, "", "vdb"), "the device itself on vdb");
        assert_eq!(of("unknown", "", 0, "", ""), "unknown");
    }
}

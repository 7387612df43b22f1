//! A request in words that an operator understands.
use fathom_control::{Bytes, FactsStatus, SlowRequest, count};

use super::{describe, group::container_name};
use crate::output::{latency, text::clean};

/// From this part of a request's time on, one place has almost all of it.
const ALMOST_ALL: f64 = 0.9;

/// What bytes are of: `/srv/a`, `ext4's journal on vda`.
pub fn object(facts: &FactsStatus) -> String {
    if describe::is_file(&facts.kind, &facts.path, facts.inode) {
        let text = describe::facts(facts);
        return if facts.kind == "swap" { format!("the swap file {text}") } else { text };
    }
    let whose = |what: &str| {
        if facts.file_system.is_empty() {
            format!("a file system's {what}")
        } else {
            format!("{}'s {what}", facts.file_system)
        }
    };
    let text = match facts.kind.as_str() {
        "journal" => whose("journal"),
        "metadata" => whose("metadata"),
        "directory" => whose("directories"),
        "swap" => "swap".into(),
        "device" => "the device itself".into(),
        "data" | "direct" => "a file whose name is not known".into(),
        _ => return "something unknown".into(),
    };
    let device =
        if facts.device.is_empty() { String::new() } else { format!(" on {}", facts.device) };
    clean(&(text + &device))
}

/// What a request does, to what, and for whom.
fn deed(request: &SlowRequest) -> String {
    let size = Bytes(request.length);
    let several = match request.parts.len() as u64 + request.parts_left_out {
        0 | 1 => String::new(),
        parts => format!(" and {}", count(parts - 1, "other place")),
    };
    let object = object(&request.facts) + &several;
    let mut text = match request.operation.as_str() {
        "read" => format!("A read of {size} from {object}"),
        "write" => format!("A write of {size} to {object}"),
        "flush" => "A flush of the disk's cache".into(),
        "discard" => format!("A discard of {size}"),
        "write-zeroes" => format!("Zeroing {size}"),
        operation => format!("The operation {operation}"),
    };
    let facts = &request.facts;
    if !facts.process.is_empty() {
        text += &format!(", by process {}", describe::process(&facts.process, facts.process_id));
    }
    match facts.cgroup.as_str() {
        "" => {}
        "/" => text += ", for no container (the root group /)",
        cgroup => text += &format!(", for container {}", container_name(cgroup)),
    }
    text
}

/// Where the time of a request went; empty where that is not known.
fn course(request: &SlowRequest) -> String {
    let Some(backend) = request.backend_ns else { return String::new() };
    let down = request.layers_down_ns.unwrap_or(0);
    let up = request.layers_up_ns.unwrap_or(0);
    let places = [
        (down, "in Fathom's layers on the way down"),
        (backend, "in the back end (the image, or the device beneath it)"),
        (up, "on the way back to the guest"),
    ];
    let all = (down + backend + up).max(1) as f64;
    let (most, place) = places.into_iter().max_by_key(|place| place.0).unwrap_or_default();
    match most as f64 / all {
        _ if most == 0 => String::new(),
        share if share >= ALMOST_ALL => format!("almost all of it {place}"),
        _ => format!("{} of it {place}", latency(most)),
    }
}

/// One sentence or two for an operator.
pub fn sentence(request: &SlowRequest) -> String {
    let mut text = deed(request);
    let failed = !request.error.is_empty();
    let comma = if text.contains(", ") { "," } else { "" };
    text += &format!(
        "{comma} {} {}",
        if failed { "failed after" } else { "took" },
        latency(request.latency_ns)
    );
    if failed {
        text += &format!(" ({})", request.error);
    }
    let course = course(request);
    if !course.is_empty() {
        text += &format!("; {course}");
    }
    match request.ahead {
        0 => {}
        1 => text += ". One other request was under way in its queue when it came",
        ahead => text += &format!(". {ahead} others were under way in its queue when it came"),
    }
    text + "."
}

/// What a flag of the guest's kernel says.
pub fn flag(name: &str) -> String {
    let meaning = match name {
        "meta" => "a file system's structures",
        "prio" => "to be done before others",
        "sync" => "somebody waits for it",
        "read-ahead" => "nobody waits for it yet",
        "swap" => "memory is swapped",
        "fua" => "durable when it is done",
        "flush" => "a flush goes before it",
        "background" => "nobody waits for it",
        _ => return name.to_owned(),
    };
    format!("{name} ({meaning})")
}

/// Where facts were learnt, and how sure they are.
pub fn source(facts: &FactsStatus) -> String {
    let source = match facts.source.as_str() {
        "" | "none" => return String::new(),
        "flags" => "the flags of the guest kernel's request",
        "page" => "the guest's page that the data is in",
        "bio" => "the guest kernel's own description of the I/O",
        "calls" => "the guest's system calls",
        "application" => "the application itself",
        other => other,
    };
    let confidence = match facts.confidence.as_str() {
        "sure" => "sure: structures that check each other agree",
        "likely" => "likely: one structure says so",
        _ => "not sure",
    };
    format!("{source}; {confidence}")
}

/// The I/O priority that the guest gave, as `ionice` names it; empty where it gave none.
pub fn priority(priority: u16) -> String {
    let level = priority & 7;
    match priority >> 13 {
        0 => String::new(),
        1 => format!("real-time, level {level}"),
        2 => format!("best-effort, level {level}"),
        3 => "idle".into(),
        _ => format!("{priority:#x}"),
    }
}

/// How long the application expects its data to live; empty where it said nothing.
pub fn lifetime(write_hint: u64) -> &'static str {
    match write_hint {
        2 => "short",
        3 => "medium",
        4 => "long",
        5 => "extreme",
        _ => "",
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A slow write of the journal.
    pub fn request() -> SlowRequest {
        SlowRequest {
            id: 17_592_186_044_417,
            operation: "write".into(),
            offset: 1 << 20,
            length: 45_056,
            start_ns: 5_000_000_000,
            latency_ns: 12_300_000,
            backend_ns: Some(12_000_000),
            layers_down_ns: Some(1000),
            layers_up_ns: Some(1000),
            ahead: 3,
            flags: vec!["meta".into(), "sync".into()],
            facts: FactsStatus {
                kind: "journal".into(),
                source: "bio".into(),
                confidence: "sure".into(),
                file_system: "ext4".into(),
                device: "vda".into(),
                cgroup: "/".into(),
                ..FactsStatus::default()
            },
            ..SlowRequest::default()
        }
    }

    #[test]
    fn a_request_in_one_sentence() {
        assert_eq!(
            sentence(&request()),
            "A write of 44 KiB to ext4's journal on vda, for no container (the root group /), \
             took 12.3 ms; almost all of it in the back end (the image, or the device beneath \
             it). 3 others were under way in its queue when it came."
        );
        let mut read = SlowRequest {
            operation: "read".into(),
            facts: FactsStatus {
                kind: "direct".into(),
                inode: 12,
                path: "/srv/table.dat".into(),
                cgroup: "/database".into(),
                process: "fio".into(),
                process_id: 489,
                ..FactsStatus::default()
            },
            layers_down_ns: Some(8_000_000),
            backend_ns: Some(4_300_000),
            ahead: 0,
            ..request()
        };
        assert_eq!(
            sentence(&read),
            "A read of 44 KiB from /srv/table.dat, by process fio 489, for container /database, \
             took 12.3 ms; 8.0 ms of it in Fathom's layers on the way down."
        );
        read.error = "input/output error".into();
        read.facts = FactsStatus::default();
        (read.backend_ns, read.ahead) = (None, 1);
        assert_eq!(
            sentence(&read),
            "A read of 44 KiB from something unknown failed after 12.3 ms (input/output error). \
             One other request was under way in its queue when it came."
        );
        read.operation = "flush".into();
        assert!(sentence(&read).starts_with("A flush of the disk's cache failed after"));
    }

    #[test]
    fn what_is_no_file_has_a_name_too() {
        let of = |kind: &str, file_system: &str, device: &str| {
            let (kind, file_system, device) = (kind.into(), file_system.into(), device.into());
            object(&FactsStatus { kind, file_system, device, ..FactsStatus::default() })
        };
        assert_eq!(of("journal", "", ""), "a file system's journal");
        assert_eq!(of("metadata", "xfs", "vdb1"), "xfs's metadata on vdb1");
        assert_eq!(of("device", "", "vdb"), "the device itself on vdb");
        assert_eq!(of("data", "", ""), "a file whose name is not known");
        assert_eq!(of("", "", ""), "something unknown");
    }

    #[test]
    fn flags_and_priorities_have_meanings() {
        assert_eq!(flag("sync"), "sync (somebody waits for it)");
        assert_eq!(flag("new"), "new");
        assert_eq!(priority(0), "");
        assert_eq!(priority(2 << 13 | 4), "best-effort, level 4");
        assert!(source(&request().facts).contains("sure"));
        assert_eq!(source(&FactsStatus::default()), "");
    }
}

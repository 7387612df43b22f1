//! Describes a request in sentences for operators.
use fathom_control::{Bytes, FactsStatus, SlowRequest, count};
use fathom_insight::{IoClass, class_of_hint};

use super::{describe, group::container_name};
use crate::output::{latency, text::clean};

/// The share of a request's time from which on one place counts as the cause of almost all of it.
const ALMOST_ALL: f64 = 0.9;

/// The subject of a part: `/srv/a`, `ext4's journal on vda`.
pub fn object(facts: &FactsStatus) -> String {
    if describe::is_file(&facts.kind, &facts.path, facts.inode) {
        let text = describe::facts(facts);
        return if facts.kind == "swap" { format!("the swap file {text}") } else { text };
    }
    let of_system = |what: &str| {
        if facts.file_system.is_empty() {
            format!("a file system's {what}")
        } else {
            format!("{}'s {what}", facts.file_system)
        }
    };
    let text = match facts.kind.as_str() {
        "journal" => of_system("journal"),
        "metadata" => of_system("metadata"),
        "directory" => of_system("directories"),
        "swap" => "swap".into(),
        "device" => "the device itself".into(),
        "data" | "direct" => "a file whose name is not known".into(),
        _ => return "something unknown".into(),
    };
    let device =
        if facts.device.is_empty() { String::new() } else { format!(" on {}", facts.device) };
    clean(&(text + &device))
}

/// The operation, its subject and its container.
fn action(request: &SlowRequest) -> String {
    let size = Bytes(request.length);
    let several = match request.parts.len() as u64 + request.parts_left_out {
        0 | 1 => String::new(),
        parts => format!(" and {}", count(parts - 1, "other place")),
    };
    let object = object(&request.facts) + &several;
    let mut text = match request.operation.as_str() {
        "read" => format!("A read of {size} from {object}"),
        "write" => format!("A write of {size} to {object}"),
        "flush" if request.facts.kind == "journal" && request.facts.inode == 0 => {
            "A flush of the disk's cache for a journal".into()
        }
        "flush" if request.facts.inode != 0 => {
            format!("A flush of the disk's cache, most likely for {object}")
        }
        "flush" => "A flush of the disk's cache".into(),
        "discard" => format!("A discard of {size}"),
        "write-zeroes" => format!("Zeroing {size}"),
        operation => format!("The operation {operation}"),
    };
    let facts = &request.facts;
    if !facts.process.is_empty() {
        let process = describe::process(&facts.process, facts.process_id);
        text += &match facts.process_role.as_str() {
            "waiter" => format!(", for which process {process} waits"),
            "writer" => format!(", written by process {process}"),
            _ => format!(", by process {process}"),
        };
    }
    match facts.cgroup.as_str() {
        "" => {}
        "/" => text += ", for no container (the root group /)",
        cgroup => text += &format!(", for container {}", container_name(cgroup)),
    }
    text
}

/// The place where a request spent most of its time; empty if it is not known.
fn slowest_place(request: &SlowRequest) -> String {
    let Some(backend) = request.backend_ns else { return String::new() };
    let held = request.held_ns;
    let down = request.layers_down_ns.unwrap_or(0).saturating_sub(held);
    let up = request.layers_up_ns.unwrap_or(0);
    let held_back = format!("held back by the layer `{}`", request.held_by);
    let places = [
        (down, "in Fathom's layers on the way down"),
        (held, &held_back),
        (backend, "in the back end (the image, or the device beneath it)"),
        (up, "on the way back to the guest"),
    ];
    let all = (down + held + backend + up).max(1) as f64;
    let (most, place) = places.into_iter().max_by_key(|place| place.0).unwrap_or_default();
    match most as f64 / all {
        _ if most == 0 => String::new(),
        share if share >= ALMOST_ALL => format!("almost all of it {place}"),
        _ => format!("{} of it {place}", latency(most)),
    }
}

/// A description of a request in one or two sentences.
pub fn sentence(request: &SlowRequest) -> String {
    let mut text = action(request);
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
    let place = slowest_place(request);
    if !place.is_empty() {
        text += &format!("; {place}");
    }
    text += match request.cache_hit.as_str() {
        "hit" => ". The cache had all of its data",
        "part" => ". The cache had a part of its data",
        "miss" => ". The cache had none of its data",
        _ => "",
    };
    match request.ahead {
        0 => {}
        1 => text += ". One other request was in flight in its queue when it started",
        ahead => text += &format!(". {ahead} others were in flight in its queue when it started"),
    }
    text + "."
}

/// A flag of the guest's kernel with its meaning.
pub fn flag(name: &str) -> String {
    let meaning = match name {
        "meta" => "a file system's structures",
        "prio" => "has priority",
        "sync" => "a process waits for it",
        "read-ahead" => "no process waits for it yet",
        "swap" => "memory is swapped",
        "fua" => "durable on completion",
        "flush" => "preceded by a flush",
        "background" => "no process waits for it",
        _ => return name.to_owned(),
    };
    format!("{name} ({meaning})")
}

/// The source of facts, and their confidence.
pub fn source(facts: &FactsStatus) -> String {
    let source = match facts.source.as_str() {
        "" | "none" => return String::new(),
        "flags" => "the flags of the guest kernel's request",
        "page" => "the guest's page with the data",
        "bio" => "the guest kernel's own description of the I/O",
        "calls" => "the guest's system calls",
        "application" => "the application itself",
        other => other,
    };
    let confidence = match facts.confidence.as_str() {
        "sure" => "sure: structures that check each other agree",
        "likely" => "likely: based on one structure",
        _ => "not sure",
    };
    format!("{source}; {confidence}")
}

/// The I/O priority set by the guest, as `ionice` names it, or the class that an application asks
/// for; empty if none is set.
pub fn priority(priority: u16) -> String {
    match class_of_hint(priority) {
        Some(IoClass::UNIQUE) => return "the application writes unique content".into(),
        Some(IoClass(class)) => return format!("the application asks for class {class}"),
        None => {}
    }
    let level = priority & 7;
    match priority >> 13 {
        0 => String::new(),
        1 => format!("real-time, level {level}"),
        2 => format!("best-effort, level {level}"),
        3 => "idle".into(),
        _ => format!("{priority:#x}"),
    }
}

/// The expected lifetime of the data, as set by the application; empty if none is set.
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
             it). 3 others were in flight in its queue when it started."
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
             One other request was in flight in its queue when it started."
        );
        read.operation = "flush".into();
        assert!(sentence(&read).starts_with("A flush of the disk's cache failed after"));
    }

    #[test]
    fn data_without_a_file_has_a_name() {
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
        assert_eq!(flag("sync"), "sync (a process waits for it)");
        assert_eq!(flag("new"), "new");
        assert_eq!(priority(0), "");
        assert_eq!(priority(2 << 13 | 4), "best-effort, level 4");
        let hint = |class: u16| priority(2 << 13 | (1 << 9 | class) << 3 | 4);
        assert_eq!(hint(3), "the application asks for class 3");
        assert_eq!(hint(32), "the application writes unique content");
        assert!(source(&request().facts).contains("sure"));
        assert_eq!(source(&FactsStatus::default()), "");
    }
}

//! Texts on how far guests are understood.
use fathom_control::{Bytes, GuestInfo, InsightState, InsightStatus};

use crate::output::text::clean;

/// The display name of a guest: its machine's name, or its disks' names.
pub fn guest_name(guest: &GuestInfo) -> String {
    clean(&if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() })
}

/// The guest of a machine, or of a disk without a machine's name.
pub fn guest_of<'a>(guests: &'a [GuestInfo], machine: &str) -> Option<&'a GuestInfo> {
    let is_its = |guest: &&GuestInfo| {
        guest.vm == machine || guest.vm.is_empty() && guest.disks.iter().any(|name| name == machine)
    };
    // During a migration there are two guests of a machine; the newer one is the destination.
    guests.iter().rev().find(is_its)
}

/// How far the guest is understood, in a word or two: `Linux 6.1.0`, `searching`.
pub fn short(insight: &InsightStatus) -> String {
    match insight.state {
        InsightState::Attached => format!("Linux {}", clean(&insight.release)),
        InsightState::NoGuest => "no guest".into(),
        state => state.name().into(),
    }
}

/// How far the guest is understood, with the reason.
pub fn long(insight: &InsightStatus) -> String {
    match insight.state {
        InsightState::Waiting => "waiting for its first request".into(),
        _ if insight.reason.is_empty() => short(insight),
        _ => format!("{}: {}", short(insight), clean(&insight.reason)),
    }
}

/// The guest kernel's counts of data that will be written.
pub fn counters(guest: &GuestInfo) -> String {
    let Some(counters) = &guest.counters else { return String::new() };
    format!(
        "{} dirty, {} being written",
        Bytes(counters.dirty_bytes),
        Bytes(counters.writeback_bytes)
    )
}

/// All guests on one line, those that are not understood first.
pub fn summary(guests: &[GuestInfo]) -> String {
    if guests.is_empty() {
        return "no guest is connected".into();
    }
    let describe = |guest: &GuestInfo| format!("{}: {}", guest_name(guest), long(&guest.insight));
    let is_open = |guest: &&GuestInfo| guest.insight.state != InsightState::Attached;
    let mut parts: Vec<String> = guests.iter().filter(is_open).map(describe).collect();
    let known: Vec<&GuestInfo> = guests.iter().filter(|guest| !is_open(guest)).collect();
    match &known[..] {
        [] => {}
        [guest] => parts.push(describe(guest)),
        known => parts.push(format!("{} guests are understood", known.len())),
    }
    parts.join("; ")
}

/// A remedy for a guest that is not understood; empty if there is none.
pub fn remedy(insight: &InsightStatus) -> &'static str {
    let contains = |text: &str| insight.reason.contains(text);
    match insight.state {
        InsightState::Off => {
            "set `classify = true` for its disks in the configuration, then `systemctl reload \
             fathom`"
        }
        InsightState::Attached | InsightState::NoGuest | InsightState::Waiting => "",
        _ if contains("too old") => {
            "its disks work nevertheless; insight needs Linux 6.0 or later in the guest"
        }
        _ if contains("32-bit") => {
            "its disks work nevertheless; insight needs a 64-bit kernel in the guest"
        }
        _ if contains("describe its types") => {
            "its disks work nevertheless; insight needs a kernel with CONFIG_DEBUG_INFO_BTF, as \
             distributions build theirs"
        }
        _ if contains("swiotlb") => {
            "its disks work nevertheless; if this state lasts, check whether the guest runs \
             with encrypted memory (SEV, TDX) or swiotlb=force: such guests are not understood"
        }
        _ if contains("no Linux kernel") => {
            "its disks work nevertheless; this is normal while it boots. Encrypted memory (SEV, \
             TDX) and other systems than Linux on x86-64 are not understood"
        }
        _ => "its disks work nevertheless; docs/introspection.md lists the requirements",
    }
}

#[cfg(test)]
mod tests {
    use fathom_introspect::{AttachError, COPIED_REQUESTS};

    use super::*;

    fn guest(vm: &str, state: InsightState, reason: &str) -> GuestInfo {
        let insight = InsightStatus {
            state,
            reason: reason.into(),
            release: "6.1".into(),
            ..Default::default()
        };
        GuestInfo { vm: vm.into(), disks: vec!["root".into()], insight, ..GuestInfo::default() }
    }

    #[test]
    fn guests_are_reported_and_those_not_understood_come_first() {
        let shop = guest("shop", InsightState::Attached, "");
        let old =
            guest("old", InsightState::Blind, "Linux 5.10 is too old: 6.0 or later is needed");
        assert_eq!(summary(&[]), "no guest is connected");
        assert_eq!(summary(std::slice::from_ref(&shop)), "shop: Linux 6.1");
        assert_eq!(
            summary(&[shop.clone(), old.clone(), shop.clone()]),
            "old: blind: Linux 5.10 is too old: 6.0 or later is needed; 2 guests are understood"
        );
        assert!(remedy(&old.insight).contains("6.0"));
        assert_eq!(remedy(&shop.insight), "");
        let nameless = guest("", InsightState::Searching, "no Linux kernel yet");
        assert_eq!(guest_of(&[shop.clone(), nameless.clone()], "root"), Some(&nameless));
        assert_eq!(guest_of(&[nameless, shop.clone()], "shop"), Some(&shop));
    }

    #[test]
    fn each_reason_of_the_daemon_has_its_remedy() {
        let release = || "6.1".to_owned();
        let cases = [
            (AttachError::NoKernel.to_string(), "normal while it boots"),
            (AttachError::TooOld(release()).to_string(), "needs Linux 6.0"),
            (AttachError::ThirtyTwoBits(release()).to_string(), "needs a 64-bit kernel"),
            (AttachError::Stale(release()).to_string(), "swiotlb=force"),
            (COPIED_REQUESTS.to_owned(), "swiotlb=force"),
            (AttachError::NoTypes(release()).to_string(), "needs a kernel with CONFIG_DEBUG_INFO"),
            (
                AttachError::Torn { release: release(), what: "list" }.to_string(),
                "introspection.md",
            ),
            (
                AttachError::Missing { release: release(), what: "bio" }.to_string(),
                "introspection.md",
            ),
        ];
        for (reason, part) in cases {
            let found = remedy(&guest("shop", InsightState::Blind, &reason).insight);
            assert!(found.contains(part), "{reason}: {found}");
        }
    }
}

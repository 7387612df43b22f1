//! The names of snapshots that rules take: `auto.RULE.20261129T120000Z`. Nobody else gives such
//! names ([`PoolRefusal::Reserved`](fathom_store::PoolRefusal)).

use fathom_control::RULE_PREFIX;
use fathom_layers::wal::Utc;

/// The most snapshots of a rule in a second: a clock that is set back comes to the same second.
const SAME_TIME_MAX: u32 = 100;

/// The beginning of the names of a rule's snapshots.
fn beginning(rule: &str) -> String {
    format!("{RULE_PREFIX}{rule}.")
}

/// A name for a snapshot that is taken at `time_s`, in seconds since 1970, which is not taken.
pub(super) fn name(rule: &str, time_s: u64, is_taken: impl Fn(&str) -> bool) -> Option<String> {
    let time = Utc(time_s.saturating_mul(1_000_000_000)).to_string();
    let time = time.replace(['-', ':'], "").replace(" UTC", "Z").replace(' ', "T");
    let first = format!("{}{time}", beginning(rule));
    let further = (2..SAME_TIME_MAX).map(|number| format!("{first}-{number}"));
    std::iter::once(first.clone()).chain(further).find(|name| !is_taken(name))
}

/// Whether a snapshot was taken by a rule. The name of one may begin with that of another.
pub(super) fn is_of(rule: &str, snapshot: &str) -> bool {
    snapshot.strip_prefix(&beginning(rule)).is_some_and(|time| {
        let is_plain = |byte: u8| byte.is_ascii_digit() || b"TZ-".contains(&byte);
        time.len() >= "20261129T120000Z".len() && time.bytes().all(is_plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_knows_its_own_snapshots() {
        let first = name("web", 1_795_807_445, |_| false).unwrap();
        assert_eq!(first, "auto.web.20261127T192405Z");
        let second = name("web", 1_795_807_445, |name| name == first).unwrap();
        assert_eq!(second, "auto.web.20261127T192405Z-2");
        assert_eq!(name("web", 1, |_| true), None);
        assert!(is_of("web", &first) && is_of("web", &second));
        let longer = name("web.20261127T192405Z", 7, |_| false).unwrap();
        assert!(!is_of("web", &longer) && is_of("web.20261127T192405Z", &longer));
        for other in
            ["web.20261127T192405Z", "auto.webs.20261127T192405Z", "auto.web.", "auto.web.Z"]
        {
            assert!(!is_of("web", other), "{other}");
        }
        assert!(fathom_store::is_name(&name(&"a".repeat(64), u64::MAX, |_| false).unwrap()));
    }
}

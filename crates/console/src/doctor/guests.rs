//! Checks how far the daemon's guests are understood.
use fathom_control::{DiskStatus, GuestInfo, GuestPagerState, InsightState, PagerGuest, count};

use super::Finding;
use crate::{connection::ControlOptions, output::short_number, pager, usage::insight};

/// One mismatch in this number of requests is not reported.
const REQUESTS_PER_MISMATCH: u64 = 1000;

/// A finding for each guest, and one for the disks without introspection.
pub fn findings(control: &ControlOptions, disks: &[DiskStatus]) -> Vec<Finding> {
    // An unreachable daemon has already been reported.
    let guests = control.client().guests().map(|list| list.guests).unwrap_or_default();
    let off: Vec<&str> = disks
        .iter()
        .filter(|disk| disk.insight.state == InsightState::Off)
        .map(|disk| disk.name.as_str())
        .collect();
    let mut findings: Vec<Finding> = guests.iter().map(finding).collect();
    if !off.is_empty() {
        let text = format!("requests are not classified on: {}", off.join(", "));
        let remedy = "`classify = true` in the configuration shows files and containers in `fathom \
                      top`; then `systemctl reload fathom`";
        findings.push(Finding { remedy: remedy.into(), ..Finding::ok("insight", text) });
    }
    findings
}

/// A finding for each guest with a pager that works. Others are problems of the daemon.
pub fn pagers(control: &ControlOptions) -> Vec<Finding> {
    let report = control.client().guest_pagers().unwrap_or_default();
    report.guests.iter().filter_map(of_pager).collect()
}

fn of_pager(guest: &PagerGuest) -> Option<Finding> {
    let pager = guest.pager.as_ref()?;
    let is_at_work = matches!(pager.state, GuestPagerState::Attached | GuestPagerState::Detaching);
    let subject = format!("pager of {}", pager::guest_name(guest));
    is_at_work.then(|| Finding::ok(subject, pager::summary(pager)))
}

fn finding(guest: &GuestInfo) -> Finding {
    let subject = format!("guest {}", insight::guest_name(guest));
    let status = &guest.insight;
    match status.state {
        InsightState::Attached if is_odd(guest) => Finding::warn(
            subject,
            format!("understood: {}", counts(guest)),
            "many requests did not match the kernel's structures: a modified kernel, or a guest \
             that gives false data; docs/introspection.md lists what is not recognised",
        ),
        InsightState::Attached => Finding::ok(subject, format!("understood: {}", counts(guest))),
        InsightState::Off | InsightState::NoGuest | InsightState::Waiting => {
            let text = format!("connected: {}", insight::long(status));
            Finding { remedy: insight::remedy(status).into(), ..Finding::ok(subject, text) }
        }
        InsightState::Searching | InsightState::Blind => {
            let text = format!("not understood: {}", insight::long(status));
            Finding::warn(subject, text, insight::remedy(status))
        }
    }
}

/// Whether too many requests of a guest were not understood.
fn is_odd(guest: &GuestInfo) -> bool {
    guest.insight.mismatches.saturating_mul(REQUESTS_PER_MISMATCH)
        > guest.insight.requests.max(10_000)
}

fn counts(guest: &GuestInfo) -> String {
    let status = &guest.insight;
    let missed = match status.mismatches {
        0 => "all of them understood".to_owned(),
        missed => format!("{} of them not understood", short_number(missed as f64)),
    };
    let kernels = match status.kernels {
        0 | 1 => String::new(),
        kernels => format!(", {kernels} kernels since it was connected"),
    };
    let removals = match guest.hooks.iter().map(|hook| hook.removals).sum() {
        0 => String::new(),
        removals => format!(", hooks taken away {}", count(removals, "time")),
    };
    format!(
        "{}, found in {} ms, {}, {} requests, {missed}{kernels}{removals}",
        insight::short(status),
        status.search_ns / 1_000_000,
        count(status.modules, "module"),
        short_number(status.requests as f64)
    )
}

#[cfg(test)]
mod tests {
    use fathom_control::HookInfo;

    use super::{super::CheckOutcome, *};

    #[test]
    fn a_guest_that_is_not_understood_is_no_failure() {
        let mut info = GuestInfo { vm: "web".into(), ..GuestInfo::default() };
        info.insight.state = InsightState::Blind;
        info.insight.reason = "Linux 5.10 is too old: 6.0 or later is needed".into();
        let found = finding(&info);
        assert_eq!((found.subject.as_str(), found.state), ("guest web", CheckOutcome::Warn));
        assert!(found.text.contains("5.10") && found.remedy.contains("6.0"), "{found:?}");
        info.insight.state = InsightState::Attached;
        info.insight.release = "6.1.0".into();
        info.insight.requests = 100_000;
        info.insight.mismatches = 3;
        let found = finding(&info);
        assert_eq!(found.state, CheckOutcome::Ok);
        assert!(
            found.text.contains("Linux 6.1.0") && found.text.contains("3 of them"),
            "{found:?}"
        );
        info.hooks = vec![HookInfo { removals: 2, ..HookInfo::default() }; 2];
        assert!(finding(&info).text.ends_with("hooks taken away 4 times"));
        info.insight.mismatches = 1000;
        assert_eq!(finding(&info).state, CheckOutcome::Warn);
        info.insight.state = InsightState::Waiting;
        assert_eq!(finding(&info).state, CheckOutcome::Ok);
    }
}

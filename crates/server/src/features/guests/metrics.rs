//! Metrics of the insight into guests, and of their control groups by kind of data.

use fathom_control::{DiskList, InsightState, InsightStatus};
use fathom_insight::Kind;
use fathom_layers::classify::{Account, Direction, GroupAccount};

use super::usage::DiskGroups;
use crate::daemon::metrics::{Family, MetricsText, disk_labels};

/// The value of a family for one account.
type Sum = fn(&GroupAccount) -> f64;

const STATES: [InsightState; 6] = [
    InsightState::Off,
    InsightState::NoGuest,
    InsightState::Waiting,
    InsightState::Searching,
    InsightState::Attached,
    InsightState::Blind,
];

/// The state of the insight into each disk's guest.
pub(crate) fn of_insight(page: &mut MetricsText, disks: &DiskList) {
    let state = "fathom_insight_state";
    page.family(
        state,
        "gauge",
        "The state of the insight into the guest: 1 for the current state.",
    );
    for disk in &disks.disks {
        for of in STATES {
            let labels = [("disk", disk.name.as_str()), ("vm", &disk.vm), ("state", of.name())];
            page.sample(state, &labels, u8::from(disk.insight.state == of));
        }
    }
    let families: [Family<'_, InsightStatus>; 4] = [
        (
            "fathom_insight_requests_total",
            "counter",
            "Requests examined, on all disks of the disk's guest.",
            |insight| insight.requests,
        ),
        (
            "fathom_insight_mismatches_total",
            "counter",
            "Examined requests that did not match the kernel's structures.",
            |insight| insight.mismatches,
        ),
        ("fathom_insight_kernels_total", "counter", "Kernels found in the guest.", |insight| {
            insight.kernels
        }),
        (
            "fathom_insight_modules",
            "gauge",
            "Kernel modules of the guest that were read.",
            |insight| insight.modules,
        ),
    ];
    let guests = disks
        .disks
        .iter()
        .filter(|disk| !matches!(disk.insight.state, InsightState::Off | InsightState::NoGuest));
    let guests = guests.map(|disk| (disk_labels(&disk.name, &disk.vm), &disk.insight));
    page.families(&families, &guests);
}

/// The accounts of control groups, by kind.
pub(crate) fn of_groups(page: &mut MetricsText, disks: &[DiskGroups]) {
    let families: [(&str, &str, Sum); 3] = [
        (
            "fathom_usage_bytes_total",
            "Bytes by control group of the guest and kind of data.",
            |account| account.bytes as f64,
        ),
        (
            "fathom_usage_requests_total",
            "Requests by control group of the guest and kind of data.",
            |account| account.requests as f64,
        ),
        (
            "fathom_usage_request_seconds_total",
            "Time that requests took, by control group of the guest and kind of data.",
            |account| account.latency_sum_ns as f64 / 1e9,
        ),
    ];
    for (name, help, sum) in families {
        page.family(name, "counter", help);
        for disk in disks {
            let mut sample = |cgroup: &str, kind: Kind, direction: Direction, of: &GroupAccount| {
                if of.requests > 0 {
                    let labels = [
                        ("disk", disk.disk.as_str()),
                        ("vm", disk.vm.as_str()),
                        ("cgroup", cgroup),
                        ("kind", kind.name()),
                        ("operation", direction.name()),
                    ];
                    page.sample(name, &labels, sum(of));
                }
            };
            // Requests without a known meaning, and parts of requests without one.
            let nameless = disk.groups.iter().find(|group| group.cgroup.is_empty());
            for direction in Direction::ALL {
                let mut unknown = of_whole(&disk.totals.unknown[direction as usize]);
                if let Some(group) = nameless {
                    unknown.merge(&group.accounts[Kind::Unknown as usize][direction as usize]);
                }
                sample("", Kind::Unknown, direction, &unknown);
            }
            for group in &disk.groups {
                for kind in Kind::ALL {
                    if kind == Kind::Unknown && group.cgroup.is_empty() {
                        continue;
                    }
                    for direction in Direction::ALL {
                        let account = &group.accounts[kind as usize][direction as usize];
                        sample(&group.cgroup, kind, direction, account);
                    }
                }
            }
        }
    }
}

fn of_whole(account: &Account) -> GroupAccount {
    GroupAccount {
        requests: account.requests,
        bytes: account.bytes,
        latency_sum_ns: account.latency_sum_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_layers::classify::{GroupSnapshot, TotalsSnapshot};

    #[test]
    fn known_groups_and_unknown_requests_have_separate_samples() {
        let mut group = GroupSnapshot { cgroup: "/web".into(), accounts: Default::default() };
        let account = &mut group.accounts[Kind::Journal as usize][Direction::Write as usize];
        *account = GroupAccount { requests: 2, bytes: 8192, latency_sum_ns: 1_500_000_000 };
        let mut totals = TotalsSnapshot::default();
        totals.unknown[Direction::Read as usize].requests = 1;
        totals.unknown[Direction::Read as usize].bytes = 512;
        let disk = DiskGroups { disk: "a".into(), vm: "v".into(), totals, groups: vec![group] };
        let mut page = MetricsText::default();
        of_groups(&mut page, &[disk]);
        let web = "disk=\"a\",vm=\"v\",cgroup=\"/web\",kind=\"journal\",operation=\"write\"";
        for line in [
            format!("fathom_usage_bytes_total{{{web}}} 8192\n"),
            format!("fathom_usage_requests_total{{{web}}} 2\n"),
            format!("fathom_usage_request_seconds_total{{{web}}} 1.5\n"),
            "cgroup=\"\",kind=\"unknown\",operation=\"read\"} 512\n".to_owned(),
        ] {
            assert!(page.text.contains(&line), "{line}\n{}", page.text);
        }
        assert_eq!(page.text.matches("fathom_usage_bytes_total{").count(), 2);
    }
}

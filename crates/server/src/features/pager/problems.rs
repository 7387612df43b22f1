//! Problems of the pagers of guests.

use fathom_control::{
    Bytes, EXISTING_PAGES_MAX, GuestPagerHold, GuestPagerState, ProblemKind, count,
};

use super::figures::PagedMachine;
use crate::daemon::problems::FoundProblem;

/// How long a reason for which no page leaves lasts before it is a problem. A daemon that has just
/// started is one for a few seconds.
const HELD_TIME_NS: u64 = 30_000_000_000;

/// The problems of a machine because of its pager.
pub(super) fn of_machine(machine: &PagedMachine) -> Vec<FoundProblem> {
    let pager = &machine.pager;
    let (name, process) = (machine.name(), pager.process);
    let away = Bytes(pager.away_bytes);
    let mut found = Vec::new();
    let mut add = |kind, message, remedy: String| {
        let problem = FoundProblem::new(kind, message, remedy);
        found.push(FoundProblem { cause: name.clone(), ..problem });
    };
    if pager.has_detached() {
        return Vec::new();
    }
    if pager.damaged_pages > 0 {
        let message = format!(
            "of the memory of guest {name}, {} cannot come back: the guest gets an error where it \
             touches one",
            count(pager.damaged_pages as usize, "damaged page")
        );
        let remedy = "examine the memory of the host (the journal of the kernel), and restart the \
                      guest: what was in these pages is lost";
        add(ProblemKind::PagerDamaged, message, remedy.into());
    }
    if pager.existing_pages > EXISTING_PAGES_MAX {
        let message = format!(
            "{} of guest {name} existed when they came back: another process has touched them, and \
             the guest may have read zeroes",
            count(pager.existing_pages as usize, "page")
        );
        let remedy = format!(
            "find the process that maps the memory of process {process} beside its VMM and Fathom, \
             and restart the guest"
        );
        add(ProblemKind::PagerExisting, message, remedy);
    }
    let is_silent = pager.state == GuestPagerState::Silent;
    if (is_silent || pager.state == GuestPagerState::Orphaned) && pager.away_bytes > 0 {
        let what = if is_silent {
            let seconds = pager.age_ns / 1_000_000_000;
            format!("has not reported for {}", count(seconds as usize, "second"))
        } else {
            "has ended".to_owned()
        };
        let message = format!(
            "the pager of guest {name} {what}, and {away} of its memory are away: its guard brings \
             in what is touched"
        );
        let remedy = format!(
            "see what there is with `fathom pager list`; `fathom pager adopt {process}` is the next \
             pager"
        );
        add(ProblemKind::PagerSilent, message, remedy);
    }
    let held = match pager.hold {
        GuestPagerHold::Obstacle => "no page leaves",
        GuestPagerHold::Retreat => "all pages come in",
        _ => "",
    };
    let is_over = pager.limit_bytes > 0 && pager.resident_bytes > pager.limit_bytes;
    let is_at_work = pager.state == GuestPagerState::Attached;
    if !held.is_empty() && is_over && is_at_work && pager.held_ns >= HELD_TIME_NS {
        let message = format!(
            "guest {name} has {} in memory, above its limit of {}: {held}",
            Bytes(pager.resident_bytes),
            Bytes(pager.limit_bytes)
        );
        let remedy = "`fathom pager list` shows the reason".to_owned();
        add(ProblemKind::PagerLimit, message, remedy);
    }
    found
}

#[cfg(test)]
mod tests {
    use fathom_control::GuestPager;

    use super::*;

    fn machine(mut pager: GuestPager) -> PagedMachine {
        pager.process = 4711;
        PagedMachine { vm: "web".into(), pager }
    }

    fn sound() -> GuestPager {
        GuestPager {
            state: GuestPagerState::Attached,
            hold: GuestPagerHold::None,
            limit_bytes: 100 << 20,
            resident_bytes: 99 << 20,
            away_bytes: 1 << 20,
            existing_pages: 64,
            ..GuestPager::default()
        }
    }

    fn kinds(pager: GuestPager) -> Vec<ProblemKind> {
        of_machine(&machine(pager)).into_iter().map(|problem| problem.kind).collect()
    }

    #[test]
    fn a_pager_at_work_is_none_and_each_of_its_faults_is_one() {
        assert_eq!(kinds(sound()), []);
        assert_eq!(kinds(GuestPager { damaged_pages: 1, ..sound() }), [ProblemKind::PagerDamaged]);
        let existing = GuestPager { existing_pages: 65, ..sound() };
        assert_eq!(kinds(existing), [ProblemKind::PagerExisting]);
        // Silence matters while pages are away.
        let silent = |away_bytes| GuestPager {
            state: GuestPagerState::Silent,
            age_ns: 45_900_000_000,
            away_bytes,
            ..sound()
        };
        assert_eq!(kinds(silent(0)), []);
        let found = of_machine(&machine(silent(300 << 20)));
        assert_eq!((found[0].kind, found[0].cause.as_str()), (ProblemKind::PagerSilent, "web"));
        let text = &found[0].message;
        assert!(text.contains("not reported for 45 seconds, and 300 MiB"), "{text}");
        let nameless = PagedMachine { vm: String::new(), ..machine(silent(1)) };
        assert_eq!(of_machine(&nameless)[0].cause, "4711");
        let orphaned = GuestPager { state: GuestPagerState::Orphaned, ..sound() };
        assert_eq!(kinds(orphaned), [ProblemKind::PagerSilent]);
    }

    #[test]
    fn a_limit_that_does_not_hold_is_one_once_its_reason_has_lasted() {
        let over = |hold, held_s: u64| GuestPager {
            resident_bytes: 101 << 20,
            hold,
            held_ns: held_s * 1_000_000_000,
            ..sound()
        };
        for hold in [GuestPagerHold::Obstacle, GuestPagerHold::Retreat] {
            assert_eq!(kinds(over(hold, 29)), []);
            assert_eq!(kinds(over(hold, 30)), [ProblemKind::PagerLimit]);
            assert_eq!(kinds(GuestPager { limit_bytes: 0, ..over(hold, 99) }), []);
            assert_eq!(kinds(GuestPager { resident_bytes: 100 << 20, ..over(hold, 99) }), []);
        }
        for hold in [GuestPagerHold::None, GuestPagerHold::Looking, GuestPagerHold::Unknown] {
            assert_eq!(kinds(over(hold, 99)), []);
        }
        // After a detach its figures are of the past.
        let detached = GuestPager {
            state: GuestPagerState::Detached,
            damaged_pages: 3,
            existing_pages: u64::MAX,
            ..over(GuestPagerHold::Retreat, 99)
        };
        assert_eq!(kinds(detached), []);
        let hostile = GuestPager {
            damaged_pages: u64::MAX,
            existing_pages: u64::MAX,
            age_ns: u64::MAX,
            away_bytes: u64::MAX,
            state: GuestPagerState::Silent,
            ..sound()
        };
        assert_eq!(kinds(hostile).len(), 3);
    }
}

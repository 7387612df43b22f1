//! The hooks that interceptors take away because guests stop too often at them.

use fathom_control::{ProblemKind, count};
use fathom_intercept::{Hook, HookState, Writers};

use crate::daemon::problems::FoundProblem;
use crate::features::guests::hooks::kind;

/// How long a hook that is back in place remains a problem: it may be taken away again soon.
const DOUBT_TIME_NS: u64 = 60_000_000_000;

/// The problems of a guest's disk because of hooks that are away, or were lately.
pub(super) fn problems(writers: &Writers, stops_max: u64, now_ns: u64) -> Vec<FoundProblem> {
    let states = Hook::ALL.into_iter().map(|hook| (hook, writers.hook(hook)));
    states.filter_map(|(hook, state)| problem(hook, state, stops_max, now_ns)).collect()
}

fn problem(hook: Hook, state: HookState, stops_max: u64, now_ns: u64) -> Option<FoundProblem> {
    let HookState { removals, is_away, return_ns, .. } = state;
    if removals == 0 || now_ns.saturating_sub(return_ns) >= DOUBT_TIME_NS && !is_away {
        return None;
    }
    let (what, does) = match hook {
        Hook::Pages => ("who writes the guest's pages is unknown", "marks pages as dirty"),
        Hook::Calls => ("system calls of the guest are not noted", "begins and ends system calls"),
    };
    let seconds = return_ns.saturating_sub(now_ns).div_ceil(1_000_000_000);
    let (what, now) = if is_away {
        (what.to_owned(), format!("; the next attempt is in {}", count(seconds, "second")))
    } else {
        (what.replacen(" is ", " was ", 1).replacen(" are ", " were ", 1), String::new())
    };
    let message = format!(
        "{what}: its kernel {does} more than {stops_max} times a second, so its interceptor has \
         taken the hook away {}{now}",
        count(removals, "time")
    );
    let remedy = match hook {
        Hook::Pages => {
            "find the program in the guest that does it (`fathom top --by process`), or \
                        set a higher `stops_max` in [intercept]"
        }
        Hook::Calls => {
            "find the program in the guest that does it (`fathom processes`), or set a \
                        higher `stops_max` in [intercept]"
        }
    };
    let mut problem =
        FoundProblem::new(ProblemKind::InterceptionPaused, message, remedy.to_owned());
    kind(hook).name().clone_into(&mut problem.cause);
    Some(problem)
}

#[cfg(test)]
mod tests {
    use fathom_control::HookKind;

    use super::*;
    use crate::features::guests::hooks::of;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_hook_that_is_away_is_a_problem_until_it_has_been_back_for_a_while() {
        let (writers, _file) = Writers::create(1 << 20).unwrap();
        let found = |now_s: u64| problems(&writers, 1000, now_s * SECOND);
        assert!(found(5).is_empty() && of(&writers, 5).len() == 1);
        writers.take_away(Hook::Calls, 12 * SECOND);
        let away = found(10);
        let text = "system calls of the guest are not noted: its kernel begins and ends system calls \
                    more than 1000 times a second, so its interceptor has taken the hook away 1 time; \
                    the next attempt is in 2 seconds";
        assert_eq!((&*away[0].message, &*away[0].cause, away.len()), (text, "calls", 1));
        let info = of(&writers, 10 * SECOND);
        assert_eq!(
            (info[1].of, info[1].removals, info[1].away_ns),
            (HookKind::Calls, 1, 2 * SECOND)
        );
        // Who never puts it back has a problem without an end.
        assert_eq!(found(10_000).len(), 1);
        writers.put_back(Hook::Calls, 13 * SECOND);
        assert!(found(20)[0].message.starts_with("system calls of the guest were not noted: its"));
        assert!(!of(&writers, 20 * SECOND)[1].is_away);
        assert_eq!((found(72).len(), found(73).len()), (1, 0));
        writers.take_away(Hook::Pages, 100 * SECOND);
        writers.take_away(Hook::Calls, 100 * SECOND);
        let causes: Vec<_> = found(80).into_iter().map(|problem| problem.cause).collect();
        assert_eq!(causes, ["writers", "calls"]);
        // The other side may write anything.
        writers.postpone(Hook::Pages, u64::MAX);
        assert_eq!(found(80).len(), 2);
    }
}

//! The hooks of a guest's interceptor, as the control interface shows them.

use fathom_control::{HookInfo, HookKind};
use fathom_intercept::{Hook, Writers};

/// What a hook is for.
pub(crate) fn kind(hook: Hook) -> HookKind {
    match hook {
        Hook::Pages => HookKind::Writers,
        Hook::Calls => HookKind::Calls,
    }
}

/// The hooks of a guest at which it has stopped or that were taken away.
pub(crate) fn of(writers: &Writers, now_ns: u64) -> Vec<HookInfo> {
    let hooks = Hook::ALL.into_iter().map(|hook| (hook, writers.hook(hook)));
    let used = hooks
        .filter(|(hook, state)| *hook == Hook::Pages || (state.stops, state.removals) != (0, 0));
    used.map(|(hook, state)| HookInfo {
        of: kind(hook),
        stops: state.stops,
        removals: state.removals,
        is_away: state.is_away,
        away_ns: if state.is_away { state.return_ns.saturating_sub(now_ns) } else { 0 },
    })
    .collect()
}

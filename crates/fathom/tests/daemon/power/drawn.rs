//! How often each kind of event was drawn, so that none is silently never drawn.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// All kinds of changes, faults and damages.
pub const KINDS: [&str; 36] = [
    "a byte rots in a cache",
    "a byte rots in a log",
    "a byte rots in the image",
    "a device fails writes",
    "a device fails flushes",
    "a kill while a device fails",
    "add log",
    "an old cache",
    "an old log",
    "an old folder of the state",
    "an old image",
    "attach",
    "copy with attributes",
    "copy without attributes",
    "detach",
    "discard",
    "evict",
    "fill cache",
    "fill home",
    "fill log",
    "fill state",
    "kill",
    "limit",
    "lose the mark of a device",
    "make room",
    "mode",
    "offload start",
    "offload stop",
    "power loss",
    "reload",
    "remove and add",
    "remove log",
    "rename",
    "replace",
    "resize",
    "restart",
];

static COUNTS: Mutex<BTreeMap<&str, usize>> = Mutex::new(BTreeMap::new());

/// An event of this kind has been drawn.
pub fn note(kind: &str) {
    let kind = KINDS.into_iter().find(|known| *known == kind);
    *COUNTS.lock().entry(kind.expect("a known kind")).or_default() += 1;
}

/// One of the possible events, of which `kind` is the kind: at random, or one that was drawn least.
pub fn choose<T>(
    mut possible: Vec<T>,
    kind: impl Fn(&T) -> &'static str,
    random: &mut fastrand::Rng,
) -> Option<T> {
    random.shuffle(&mut possible);
    if random.u8(0..3) > 0 {
        let counts = COUNTS.lock();
        possible.sort_by_key(|it| counts.get(kind(it)).copied().unwrap_or(0));
    }
    possible.into_iter().next()
}

/// The counts, a line each, and the kinds that were never drawn.
pub fn report() -> (String, Vec<&'static str>) {
    let counts = COUNTS.lock();
    let lines = counts.iter().map(|(kind, count)| format!("{count:6} {kind}"));
    let never = KINDS.into_iter().filter(|kind| !counts.contains_key(kind)).collect();
    (lines.collect::<Vec<_>>().join("\n"), never)
}

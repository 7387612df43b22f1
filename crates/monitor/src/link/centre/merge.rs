//! What hosts send, brought together: up to when everything is known, and what came too late.
//!
//! Time goes on to the least watermark of the hosts that are waited for. A host is waited for
//! while its watermark is younger than the patience, connected or not, so that a short cut loses
//! nothing; one that joins is waited for once, for its first watermark. What comes from before the
//! watermark is late: rows of a stream are left out, changes of a relation count from now on,
//! because without them it would be wrong for ever.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::rows::{Changes, RELATION_BYTES_MAX, RELATION_ROWS_MAX, Tuple, row_bytes};
use super::budget::Lease;

/// Why a host is let go of whose relations take too much.
const TOO_MANY_ROWS: &str = "its relations have more than 1048576 rows: group by fewer keys, or \
                             shorten the windows of the queries";
const TOO_MANY_BYTES: &str = "its relations take more than 256 MiB: select shorter texts, group by \
                              fewer keys, or shorten the windows of the queries";
/// Of more hosts, those that are gone are not remembered.
const MEMBERS_MAX: usize = 1024;
/// A host that joins is waited for only so many patiences after the last time.
const HOLD_REST: i64 = 10;
/// How far ahead of the centre's clock times may be, in nanoseconds.
const FUTURE_MAX_NS: i64 = 5_000_000_000;

/// Takes changes of the centre's inputs: which, when, the row, and how often more it is there.
pub type Input<'i> = dyn FnMut(usize, i64, Tuple, i64) + 'i;

/// What a host says of a fragment.
pub struct RowsReport {
    pub fragment: u16,
    /// Whether it begins to tell all of a relation.
    pub reset: bool,
    pub changes: Changes,
    /// The memory that these take.
    pub lease: Lease,
}

/// A host, as far as its rows are concerned.
struct Member {
    /// The connection whose rows count.
    connection: Option<u64>,
    /// It has left for good, or is forgotten: the centre does not wait for it.
    gone: bool,
    watermark_ns: Option<i64>,
    /// It is waited for until then, whatever its watermark is.
    hold_until_ns: i64,
    /// What each relation holds of it.
    relations: BTreeMap<u16, Held>,
    relation_rows: usize,
    /// The memory that these take, in bytes, about.
    relation_bytes: usize,
    late: u64,
    /// What has gone into the engine and is not over: until when, and its memory.
    pending: VecDeque<(i64, Lease)>,
}

/// What a relation holds of a host.
#[derive(Default)]
struct Held {
    /// How often each row is there.
    rows: BTreeMap<Tuple, i64>,
    /// The instant of the last change.
    last_ns: i64,
}

/// See the module.
pub struct Merge {
    patience_ns: i64,
    /// Whether time advances when there is no host to wait for.
    goes_alone: bool,
    watermark_ns: i64,
    is_stream: Vec<bool>,
    members: BTreeMap<Arc<str>, Member>,
}

impl Merge {
    /// Merges inputs, of which it is said whether each is a stream.
    pub fn new(patience_ns: i64, is_stream: Vec<bool>) -> Self {
        let members = BTreeMap::new();
        Self { patience_ns, goes_alone: false, watermark_ns: 0, is_stream, members }
    }

    /// The same, for one of several processes: without hosts it is behind by the patience, so that
    /// the others can go on.
    pub fn beside_others(self) -> Self {
        Self { goes_alone: true, ..self }
    }

    /// How many rows of relations are held.
    pub fn held(&self) -> usize {
        self.members.values().map(|member| member.relation_rows).sum()
    }

    /// Everything before this is over, in nanoseconds since 1970.
    pub fn watermark_ns(&self) -> i64 {
        self.watermark_ns
    }

    /// A host runs the fragments. Where it does not go on with what it ran before, what it said of
    /// relations is taken back.
    pub fn joined(
        &mut self,
        name: &Arc<str>,
        connection: u64,
        resumed: bool,
        now_ns: i64,
        input: &mut Input<'_>,
    ) {
        let (patience_ns, watermark_ns) = (self.patience_ns, self.watermark_ns);
        let member = self.members.entry(Arc::clone(name)).or_insert_with(|| Member {
            connection: None,
            gone: true,
            watermark_ns: None,
            hold_until_ns: i64::MIN / 2,
            relations: BTreeMap::new(),
            relation_rows: 0,
            relation_bytes: 0,
            late: 0,
            pending: VecDeque::new(),
        });
        (member.connection, member.gone) = (Some(connection), false);
        if !resumed {
            member.take_back(watermark_ns, input);
            member.watermark_ns = None;
        }
        if now_ns.saturating_sub(member.hold_until_ns) >= patience_ns.saturating_mul(HOLD_REST) {
            member.hold_until_ns = now_ns.saturating_add(patience_ns);
        }
    }

    fn member(&mut self, name: &str, connection: u64) -> Option<&mut Member> {
        self.members.get_mut(name).filter(|member| member.connection == Some(connection))
    }

    /// A host sends changes of a fragment.
    ///
    /// # Errors
    /// When the host is not to be listened to any more.
    pub fn changes(
        &mut self,
        name: &str,
        connection: u64,
        report: RowsReport,
        now_ns: i64,
        input: &mut Input<'_>,
    ) -> Result<(), &'static str> {
        let RowsReport { fragment, reset, changes, lease } = report;
        let watermark_ns = self.watermark_ns;
        let is_stream = self.is_stream.get(usize::from(fragment)).copied();
        let Some(member) = self.member(name, connection) else { return Ok(()) };
        let Some(is_stream) = is_stream else { return Err("it sends rows of no fragment") };
        if reset {
            member.take_back_one(fragment, watermark_ns, input);
        }
        let rows = changes.rows;
        let last_ns = rows.iter().map(|(time_ns, ..)| *time_ns).max().unwrap_or(0);
        if last_ns > now_ns.saturating_add(FUTURE_MAX_NS) {
            return Err("it sends rows of the future: its clock is wrong");
        }
        if last_ns >= watermark_ns {
            member.pending.push_back((last_ns, lease));
        }
        for (time_ns, row, count) in rows {
            let is_late = time_ns < watermark_ns;
            member.late += u64::from(is_late);
            if is_stream && is_late {
                continue;
            }
            let mut time_ns = time_ns.max(watermark_ns);
            if !is_stream {
                time_ns = member.hold(fragment, &row, time_ns, count)?;
            }
            input(usize::from(fragment), time_ns, row, count);
        }
        Ok(())
    }

    /// A host has reported everything from before an instant.
    ///
    /// # Errors
    /// See [`changes`](Self::changes).
    pub fn watermark(
        &mut self,
        name: &str,
        connection: u64,
        time_ns: i64,
        now_ns: i64,
    ) -> Result<(), &'static str> {
        let Some(member) = self.member(name, connection) else { return Ok(()) };
        if time_ns > now_ns.saturating_add(FUTURE_MAX_NS) {
            return Err("it has told the future: its clock is wrong");
        }
        member.watermark_ns = Some(member.watermark_ns.unwrap_or(0).max(time_ns));
        Ok(())
    }

    /// A connection is over; with `for_good` the host does not come back soon.
    pub fn left(&mut self, name: &str, connection: u64, for_good: bool, input: &mut Input<'_>) {
        let watermark_ns = self.watermark_ns;
        let Some(member) = self.member(name, connection) else { return };
        member.connection = None;
        if for_good {
            member.gone = true;
            member.take_back(watermark_ns, input);
        }
    }

    /// Forgets the hosts that have been away for longer than the patience, if `may_forget` agrees.
    /// What they said of relations is taken back.
    pub fn forget(
        &mut self,
        now_ns: i64,
        may_forget: &mut dyn FnMut(&str) -> bool,
        input: &mut Input<'_>,
    ) {
        let (patience_ns, watermark_ns) = (self.patience_ns, self.watermark_ns);
        for (name, member) in &mut self.members {
            let away = member.connection.is_none() && !member.gone;
            if away && member.waited_at(now_ns, patience_ns).is_none() && may_forget(name) {
                member.gone = true;
                member.take_back(watermark_ns, input);
            }
        }
        if self.members.len() > MEMBERS_MAX {
            self.members.retain(|_, member| !member.gone || !member.pending.is_empty());
        }
    }

    /// Moves time on as far as the hosts allow.
    pub fn advance(&mut self, now_ns: i64) {
        let (patience_ns, watermark_ns) = (self.patience_ns, self.watermark_ns);
        let waited = self.members.values().filter(|member| !member.gone);
        let least = waited.filter_map(|member| member.waited_at(now_ns, patience_ns)).min();
        let alone = self.goes_alone.then(|| now_ns.saturating_sub(patience_ns));
        if let Some(least) = least.map(|least| least.min(now_ns)).or(alone) {
            self.watermark_ns = watermark_ns.max(least);
        }
    }

    /// What is from before an instant does not wait any more: its memory is free.
    pub fn release(&mut self, over_ns: i64) {
        for member in self.members.values_mut() {
            while member.pending.front().is_some_and(|(until_ns, _)| *until_ns < over_ns) {
                member.pending.pop_front();
            }
        }
    }

    /// What came too late of a host, and its watermark.
    pub fn of_host(&self, name: &str) -> Option<(u64, Option<i64>)> {
        self.members.get(name).map(|member| (member.late, member.watermark_ns))
    }

    /// Whether a host is waited for.
    pub fn is_waited_for(&self, name: &str, now_ns: i64) -> bool {
        let member = self.members.get(name).filter(|member| !member.gone);
        member.is_some_and(|member| member.waited_at(now_ns, self.patience_ns).is_some())
    }
}

impl Member {
    /// The instant up to which it lets time advance; `None` if the centre does not wait for it.
    fn waited_at(&self, now_ns: i64, patience_ns: i64) -> Option<i64> {
        let young = |watermark_ns: &i64| now_ns.saturating_sub(*watermark_ns) <= patience_ns;
        if let Some(watermark_ns) = self.watermark_ns.filter(young) {
            return Some(watermark_ns);
        }
        (now_ns < self.hold_until_ns).then_some(0)
    }

    /// Notes a change of a relation, and gives the instant at which it counts: at each instant no
    /// row is there less than not at all, whatever the host says.
    fn hold(
        &mut self,
        fragment: u16,
        row: &Tuple,
        time_ns: i64,
        count: i64,
    ) -> Result<i64, &'static str> {
        let relation = self.relations.entry(fragment).or_default();
        let before = relation.rows.get(row).copied().unwrap_or(0);
        let after = before.saturating_add(count);
        if after < 0 {
            return Err("it takes rows back that it has not told");
        }
        if before == 0 {
            let bytes = row_bytes(row);
            if self.relation_rows >= RELATION_ROWS_MAX {
                return Err(TOO_MANY_ROWS);
            }
            if self.relation_bytes + bytes > RELATION_BYTES_MAX {
                return Err(TOO_MANY_BYTES);
            }
            self.relation_rows += 1;
            self.relation_bytes += bytes;
        }
        if after == 0 {
            relation.rows.remove(row);
            self.relation_rows -= 1;
            self.relation_bytes -= row_bytes(row);
        } else {
            relation.rows.insert(Tuple::clone(row), after);
        }
        relation.last_ns = relation.last_ns.max(time_ns);
        Ok(relation.last_ns)
    }

    fn take_back_one(&mut self, fragment: u16, time_ns: i64, input: &mut Input<'_>) {
        let Some(relation) = self.relations.get_mut(&fragment) else { return };
        let rows = std::mem::take(&mut relation.rows);
        relation.last_ns = relation.last_ns.max(time_ns);
        self.relation_rows -= rows.len();
        self.relation_bytes -= rows.keys().map(|row| row_bytes(row)).sum::<usize>();
        for (row, count) in rows {
            input(usize::from(fragment), relation.last_ns, row, count.saturating_neg());
        }
    }

    fn take_back(&mut self, time_ns: i64, input: &mut Input<'_>) {
        let fragments: Vec<u16> = self.relations.keys().copied().collect();
        for fragment in fragments {
            self.take_back_one(fragment, time_ns, input);
        }
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::Value;

    use super::super::budget::Budget;
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    /// A merge of a stream and a relation, and what goes into the engine.
    struct Case {
        merge: Merge,
        budget: Arc<Budget>,
        inputs: Vec<(usize, i64, i64, i64)>,
    }

    impl Case {
        fn new() -> Self {
            let merge = Merge::new(2 * SECOND, vec![true, false]);
            Self { merge, budget: Arc::new(Budget::new(1000)), inputs: Vec::new() }
        }

        fn with<T>(&mut self, work: impl FnOnce(&mut Merge, &mut Input<'_>) -> T) -> T {
            let inputs = &mut self.inputs;
            work(&mut self.merge, &mut |input, time_ns, row, count| {
                let [Value::Integer(value)] = row[..] else { panic!("{row:?}") };
                inputs.push((input, time_ns, value, count));
            })
        }

        fn join(&mut self, name: &str, connection: u64, resumed: bool, now_ns: i64) {
            self.with(|merge, input| {
                merge.joined(&name.into(), connection, resumed, now_ns, input);
            });
        }

        fn send(
            &mut self,
            of: (&str, u64),
            fragment: u16,
            rows: &[(i64, i64, i64)],
            now_ns: i64,
        ) -> Result<(), &'static str> {
            let row = |&(time_ns, value, count): &(i64, i64, i64)| -> (i64, Tuple, i64) {
                (time_ns, [Value::Integer(value)].into(), count)
            };
            let changes = Changes { rows: rows.iter().map(row).collect(), weight: 100 };
            let lease = self.budget.take(100, &|| true).unwrap();
            let report = RowsReport { fragment, reset: false, changes, lease };
            self.with(|merge, input| merge.changes(of.0, of.1, report, now_ns, input))
        }

        fn watermark(&mut self, of: (&str, u64), time_ns: i64, now_ns: i64) -> i64 {
            self.merge.watermark(of.0, of.1, time_ns, now_ns).unwrap();
            self.merge.advance(now_ns);
            self.merge.release(self.merge.watermark_ns());
            self.merge.watermark_ns()
        }

        fn taken(&mut self) -> Vec<(usize, i64, i64, i64)> {
            std::mem::take(&mut self.inputs)
        }
    }

    #[test]
    fn time_goes_on_with_the_slowest_that_is_waited_for() {
        let mut case = Case::new();
        let (a, b) = (("a", 1), ("b", 2));
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.join("b", 2, false, now);
        // The one that has just joined is waited for.
        assert_eq!(case.watermark(a, now + 5, now + 10), 0);
        assert_eq!(case.watermark(b, now + 3, now + 10), now + 3);
        assert_eq!(case.watermark(b, now + 9, now + 10), now + 5);
        // It lags: all wait for it for two seconds, and not longer.
        assert_eq!(case.watermark(b, now + 2 * SECOND, now + 2 * SECOND), now + 5);
        let later = now + 2 * SECOND + 6;
        assert!(case.merge.is_waited_for("b", later) && !case.merge.is_waited_for("a", later));
        assert_eq!(case.watermark(b, later, later), later);
        // What it sends is late, and it alone.
        case.send(a, 0, &[(now + 7, 1, 1), (later, 2, 1)], later).unwrap();
        case.send(b, 0, &[(later, 3, 1)], later).unwrap();
        assert_eq!(case.taken(), [(0, later, 2, 1), (0, later, 3, 1)]);
        assert_eq!(case.merge.of_host("a").unwrap().0, 1);
        assert_eq!(case.merge.of_host("b").unwrap().0, 0);
        // Once it has caught up it is waited for again.
        case.watermark(a, later + 1, later + 3);
        assert_eq!(case.watermark(b, later + 3, later + 3), later + 1);
    }

    #[test]
    fn nobody_holds_all_for_ever_by_coming_again_and_again() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        for step in 1..=15 {
            let now = now + step * SECOND;
            case.join("b", 1 + step as u64, false, now);
            case.watermark(("a", 1), now, now);
        }
        assert!(case.merge.watermark_ns() >= now + 12 * SECOND);
    }

    #[test]
    fn a_short_cut_is_waited_for_and_a_long_one_forgotten() {
        let mut case = Case::new();
        let (a, b) = (("a", 1), ("b", 2));
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.join("b", 2, false, now);
        case.watermark(a, now, now);
        case.watermark(b, now, now);
        case.send(b, 1, &[(now, 7, 2), (now, 8, 1)], now).unwrap();
        case.taken();
        case.with(|merge, input| merge.left("b", 2, false, input));
        assert_eq!(case.watermark(a, now + SECOND, now + SECOND), now);
        case.join("b", 3, true, now + SECOND);
        // Words of the connection that is over count no more.
        case.send(b, 0, &[(now + 1, 1, 1)], now + SECOND).unwrap();
        case.send(("b", 3), 0, &[(now + 1, 2, 1)], now + SECOND).unwrap();
        assert_eq!(case.taken(), [(0, now + 1, 2, 1)]);
        assert_eq!(case.watermark(("b", 3), now + SECOND, now + SECOND), now + SECOND);
        // A long one.
        case.with(|merge, input| merge.left("b", 3, false, input));
        let later = now + 10 * SECOND;
        case.with(|merge, input| merge.forget(later, &mut |_| false, input));
        assert_eq!(case.taken(), []);
        case.with(|merge, input| merge.forget(later, &mut |name| name == "b", input));
        assert_eq!(case.taken(), [(1, now + SECOND, 7, -2), (1, now + SECOND, 8, -1)]);
        assert_eq!(case.watermark(a, later, later), later);
    }

    #[test]
    fn relations_take_late_changes_and_are_taken_back() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.watermark(("a", 1), now, now);
        case.send(("a", 1), 1, &[(now - 5, 7, 1), (now + 1, 7, -1), (now + 1, 9, 1)], now).unwrap();
        assert_eq!(case.taken(), [(1, now, 7, 1), (1, now + 1, 7, -1), (1, now + 1, 9, 1)]);
        // A host that begins anew.
        case.join("a", 2, false, now + 2);
        assert_eq!(case.taken(), [(1, now + 1, 9, -1)]);
        case.send(("a", 2), 1, &[(now + 3, 4, 1)], now + 3).unwrap();
        case.with(|merge, input| merge.left("a", 2, true, input));
        assert_eq!(case.taken(), [(1, now + 3, 4, 1), (1, now + 3, 4, -1)]);
    }

    #[test]
    fn no_row_of_a_relation_is_there_less_than_not_at_all() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        // Instants that go back do not.
        case.send(("a", 1), 1, &[(now + 9, 7, 2), (now + 5, 7, -1), (now + 7, 8, 1)], now).unwrap();
        assert_eq!(case.taken(), [(1, now + 9, 7, 2), (1, now + 9, 7, -1), (1, now + 9, 8, 1)]);
        let problem = case.send(("a", 1), 1, &[(now + 9, 7, -1), (now + 9, 7, -1)], now);
        assert!(problem.unwrap_err().contains("not told"));
        case.with(|merge, input| merge.left("a", 1, true, input));
        assert_eq!(case.taken(), [(1, now + 9, 7, -1), (1, now + 9, 8, -1)]);
    }

    /// Few rows of giant texts take as much memory as many.
    #[test]
    fn a_host_of_giant_texts_is_let_go_of_and_its_memory_is_free_again() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        let giant: Arc<str> = "x".repeat(1 << 20).into();
        let budget = Arc::clone(&case.budget);
        let send = |merge: &mut Merge, number: i64, count: i64| {
            // The text is one, so that the test takes no such memory.
            let text = if number < 0 { "".into() } else { Arc::clone(&giant) };
            let row: Tuple = vec![Value::Text(text), Value::Integer(number)].into();
            let changes = Changes { rows: vec![(now + 1, row, count)], weight: 100 };
            let lease = budget.take(100, &|| true).unwrap();
            let report = RowsReport { fragment: 1, reset: false, changes, lease };
            let sent = merge.changes("a", 1, report, now, &mut |_, _, _, _| ());
            merge.release(now + 2);
            sent
        };
        let mut sent = 0;
        let refused = loop {
            // What comes and goes takes nothing.
            send(&mut case.merge, -1, 1).and_then(|()| send(&mut case.merge, -1, -1)).unwrap();
            match send(&mut case.merge, sent, 1) {
                Ok(()) => sent += 1,
                Err(refused) => break refused,
            }
            assert!(sent < 300, "nothing bounds the bytes");
        };
        assert!(refused.contains("256 MiB") && refused.contains("shorten"), "{refused}");
        assert!(sent >= 250, "{sent}");
        let member = |merge: &Merge| {
            let member = &merge.members["a"];
            (member.relation_rows, member.relation_bytes)
        };
        assert_eq!(member(&case.merge).0, 255);
        case.merge.left("a", 1, true, &mut |_, _, _, _| ());
        assert_eq!(member(&case.merge), (0, 0));
    }

    #[test]
    fn who_makes_no_sense_is_refused_and_what_is_over_makes_room() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        assert!(case.send(("a", 1), 2, &[], now).is_err());
        assert!(case.send(("a", 1), 0, &[(now + 60 * SECOND, 1, 1)], now).is_err());
        assert!(case.merge.watermark("a", 1, now + 60 * SECOND, now).is_err());
        let mut case = Case::new();
        case.join("a", 1, false, now);
        for time_ns in [now + 1, now + 2, now + 3] {
            case.send(("a", 1), 0, &[(time_ns, 1, 1)], now).unwrap();
        }
        assert_eq!(case.budget.taken(), 300);
        case.watermark(("a", 1), now + 3, now + 10);
        assert_eq!(case.budget.taken(), 100);
        // What is late takes no room.
        case.send(("a", 1), 0, &[(now, 1, 1)], now).unwrap();
        assert_eq!(case.budget.taken(), 100);
    }
}

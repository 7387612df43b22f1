//! Merges the rows of hosts: computes the watermark of all hosts, and detects late rows.
//!
//! Time advances to the least watermark of the hosts that the centre waits for. The centre waits
//! for a host while the host's watermark is younger than the patience, connected or not, so that a
//! short loss of the connection loses no rows. It waits once for a host that joins, until the
//! host's first watermark. Rows from before the centre's watermark are late. Late rows of a stream
//! are dropped. Late changes of a relation count from the watermark on, because the relation would
//! stay wrong without them.
//!
//! If all hosts are behind by more than the patience, the centre waits for none. When that has been
//! so for the patience, time follows the connected host that is ahead, and those within the
//! patience behind it. Without this rule, the rows of the hosts would keep their memory, and a host
//! whose memory is used up would wait for ever.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::rows::{RELATION_BYTES_MAX, RELATION_ROWS_MAX, RowChanges, Tuple, row_bytes};
use super::budget::Lease;

/// Why a host whose relations take too much memory is disconnected.
const TOO_MANY_ROWS: &str = "its relations have more than 1048576 rows: group by fewer keys, or \
                             shorten the windows of the queries";
const TOO_MANY_BYTES: &str = "its relations take more than 256 MiB: select shorter texts, group by \
                              fewer keys, or shorten the windows of the queries";
/// The number of hosts beyond which hosts that have left are removed.
const MEMBERS_MAX: usize = 1024;
/// The centre waits again for a host that joins only after this multiple of the patience.
const HOLD_REST: i64 = 10;
/// The most by which times may be ahead of the centre's clock, in nanoseconds.
const FUTURE_MAX_NS: i64 = 5_000_000_000;

/// Receives the changes of the centre's inputs: the input, the instant in nanoseconds, the row, and
/// the change of the row's count.
pub type InputSink<'i> = dyn FnMut(usize, i64, Tuple, i64) + 'i;

/// A host's message about a fragment's rows.
pub struct RowsReport {
    pub fragment: u16,
    /// Whether a complete relation follows, which replaces the host's rows.
    pub reset: bool,
    pub changes: RowChanges,
    /// The memory of the changes.
    pub lease: Lease,
}

/// The state of a host's rows.
struct Member {
    /// The connection whose rows are accepted.
    connection: Option<u64>,
    /// The host has left or has expired: the centre does not wait for it.
    has_left: bool,
    watermark_ns: Option<i64>,
    /// The centre waits for the host until this instant, whatever its watermark is.
    hold_until_ns: i64,
    /// The host's rows of each relation.
    relations: BTreeMap<u16, Held>,
    relation_rows: usize,
    /// The memory that these rows take, in bytes, approximately.
    relation_bytes: usize,
    late: u64,
    /// The memory of rows that the engine holds until an instant, with that instant.
    pending: VecDeque<(i64, Lease)>,
}

/// A host's rows of a relation.
#[derive(Default)]
struct Held {
    /// The count of each row.
    rows: BTreeMap<Tuple, i64>,
    /// The instant of the last change.
    last_ns: i64,
}

/// See the module.
pub struct Merge {
    patience_ns: i64,
    /// Whether time advances while there is no host to wait for.
    advances_alone: bool,
    /// Since when there is no host to wait for.
    unwaited_since_ns: Option<i64>,
    watermark_ns: i64,
    is_stream: Vec<bool>,
    members: BTreeMap<Arc<str>, Member>,
}

impl Merge {
    /// Merges inputs. `is_stream` has for each input whether it is a stream.
    pub fn new(patience_ns: i64, is_stream: Vec<bool>) -> Self {
        let members = BTreeMap::new();
        Self {
            patience_ns,
            advances_alone: false,
            unwaited_since_ns: None,
            watermark_ns: 0,
            is_stream,
            members,
        }
    }

    /// Makes it a merge for one process of a cluster: without hosts, its watermark stays behind the
    /// clock by the patience, so that the other processes can continue.
    pub fn in_cluster(self) -> Self {
        Self { advances_alone: true, ..self }
    }

    /// The number of rows of relations.
    pub fn held(&self) -> usize {
        self.members.values().map(|member| member.relation_rows).sum()
    }

    /// The watermark: all rows before it have been received or are late. In nanoseconds since 1970.
    pub fn watermark_ns(&self) -> i64 {
        self.watermark_ns
    }

    /// A host has accepted the fragments. Unless it resumes the same ones, its rows of relations
    /// are retracted.
    pub fn joined(
        &mut self,
        name: &Arc<str>,
        connection: u64,
        resumed: bool,
        now_ns: i64,
        input: &mut InputSink<'_>,
    ) {
        let (patience_ns, watermark_ns) = (self.patience_ns, self.watermark_ns);
        let member = self.members.entry(Arc::clone(name)).or_insert_with(|| Member {
            connection: None,
            has_left: true,
            watermark_ns: None,
            hold_until_ns: i64::MIN / 2,
            relations: BTreeMap::new(),
            relation_rows: 0,
            relation_bytes: 0,
            late: 0,
            pending: VecDeque::new(),
        });
        (member.connection, member.has_left) = (Some(connection), false);
        if !resumed {
            member.retract(watermark_ns, input);
            member.watermark_ns = None;
        }
        if now_ns.saturating_sub(member.hold_until_ns) >= patience_ns.saturating_mul(HOLD_REST) {
            member.hold_until_ns = now_ns.saturating_add(patience_ns);
        }
    }

    fn member(&mut self, name: &str, connection: u64) -> Option<&mut Member> {
        self.members.get_mut(name).filter(|member| member.connection == Some(connection))
    }

    /// Passes the changes of a fragment of a host to `input`.
    ///
    /// # Errors
    /// If the host has to be disconnected.
    pub fn changes(
        &mut self,
        name: &str,
        connection: u64,
        report: RowsReport,
        now_ns: i64,
        input: &mut InputSink<'_>,
    ) -> Result<(), &'static str> {
        let RowsReport { fragment, reset, changes, lease } = report;
        let watermark_ns = self.watermark_ns;
        let is_stream = self.is_stream.get(usize::from(fragment)).copied();
        let Some(member) = self.member(name, connection) else { return Ok(()) };
        let Some(is_stream) = is_stream else { return Err("it sends rows of no fragment") };
        if reset {
            member.retract_fragment(fragment, watermark_ns, input);
        }
        let rows = changes.rows;
        let last_ns = rows.iter().map(|(time_ns, ..)| *time_ns).max().unwrap_or(0);
        if last_ns > now_ns.saturating_add(FUTURE_MAX_NS) {
            return Err("it sends rows from the future: its clock is wrong");
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

    /// Sets the watermark of a host.
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
            return Err("its watermark is in the future: its clock is wrong");
        }
        member.watermark_ns = Some(member.watermark_ns.unwrap_or(0).max(time_ns));
        Ok(())
    }

    /// A connection has ended. If `permanent`, the centre does not wait for the host to return.
    pub fn left(
        &mut self,
        name: &str,
        connection: u64,
        permanent: bool,
        input: &mut InputSink<'_>,
    ) {
        let watermark_ns = self.watermark_ns;
        let Some(member) = self.member(name, connection) else { return };
        member.connection = None;
        if permanent {
            member.has_left = true;
            member.retract(watermark_ns, input);
        }
    }

    /// Expires the hosts that have been away for longer than the patience, if `may_expire` agrees.
    /// Their rows of relations are retracted.
    pub fn expire(
        &mut self,
        now_ns: i64,
        may_expire: &mut dyn FnMut(&str) -> bool,
        input: &mut InputSink<'_>,
    ) {
        let (patience_ns, watermark_ns) = (self.patience_ns, self.watermark_ns);
        for (name, member) in &mut self.members {
            let away = member.connection.is_none() && !member.has_left;
            if away && member.time_limit_ns(now_ns, patience_ns).is_none() && may_expire(name) {
                member.has_left = true;
                member.retract(watermark_ns, input);
            }
        }
        if self.members.len() > MEMBERS_MAX {
            self.members.retain(|_, member| !member.has_left || !member.pending.is_empty());
        }
    }

    /// Advances the watermark as far as the hosts allow.
    pub fn advance(&mut self, now_ns: i64) {
        let patience_ns = self.patience_ns;
        let waited = self.members.values().filter(|member| !member.has_left);
        let least = waited.filter_map(|member| member.time_limit_ns(now_ns, patience_ns)).min();
        let target = if let Some(least) = least {
            self.unwaited_since_ns = None;
            Some(least)
        } else if self.advances_alone {
            Some(now_ns.saturating_sub(patience_ns))
        } else {
            let since_ns = *self.unwaited_since_ns.get_or_insert(now_ns);
            // Messages of a moment in which the centre itself did not run may still wait.
            let is_over = now_ns.saturating_sub(since_ns) >= patience_ns;
            is_over.then(|| self.time_of_laggards_ns(now_ns)).flatten()
        };
        if let Some(target) = target {
            self.watermark_ns = self.watermark_ns.max(target.min(now_ns));
        }
    }

    /// The time that the connected hosts allow if all of them are far behind.
    fn time_of_laggards_ns(&self, now_ns: i64) -> Option<i64> {
        let patience_ns = self.patience_ns;
        let connected = || self.members.values().filter(|member| member.connection.is_some());
        let watermarks = || connected().filter_map(|member| member.watermark_ns);
        let first = watermarks().max().map(|first| first.saturating_sub(patience_ns));
        let least = watermarks().filter(|of_host| Some(*of_host) >= first).min();
        // Rows from after the host's own watermark may have used up its memory. When the first of
        // them are over, there is room.
        let stuck = connected().filter_map(|member| {
            let (until_ns, lease) = member.pending.front()?;
            let over_ns = until_ns.saturating_add(1).min(now_ns.saturating_sub(patience_ns));
            lease.is_waited_for().then_some(over_ns)
        });
        least.filter(|least| *least > self.watermark_ns).or(stuck.min())
    }

    /// Releases the memory of rows from before `over_ns`.
    pub fn release(&mut self, over_ns: i64) {
        for member in self.members.values_mut() {
            while member.pending.front().is_some_and(|(until_ns, _)| *until_ns < over_ns) {
                member.pending.pop_front();
            }
        }
    }

    /// The number of late rows of a host, and its watermark.
    pub fn of_host(&self, name: &str) -> Option<(u64, Option<i64>)> {
        self.members.get(name).map(|member| (member.late, member.watermark_ns))
    }

    /// Whether the centre waits for a host.
    pub fn is_waited_for(&self, name: &str, now_ns: i64) -> bool {
        let member = self.members.get(name).filter(|member| !member.has_left);
        member.is_some_and(|member| member.time_limit_ns(now_ns, self.patience_ns).is_some())
    }
}

impl Member {
    /// The instant up to which the host lets time advance; `None` if the centre does not wait for
    /// it.
    fn time_limit_ns(&self, now_ns: i64, patience_ns: i64) -> Option<i64> {
        let young = |watermark_ns: &i64| now_ns.saturating_sub(*watermark_ns) <= patience_ns;
        if let Some(watermark_ns) = self.watermark_ns.filter(young) {
            return Some(watermark_ns);
        }
        (now_ns < self.hold_until_ns).then_some(0)
    }

    /// Applies a change of a relation, and returns its instant, which never decreases. So no row
    /// has a negative count at any instant, even if the host sends changes in another order.
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
            return Err("it deletes rows that it has not sent");
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

    fn retract_fragment(&mut self, fragment: u16, time_ns: i64, input: &mut InputSink<'_>) {
        let Some(relation) = self.relations.get_mut(&fragment) else { return };
        let rows = std::mem::take(&mut relation.rows);
        relation.last_ns = relation.last_ns.max(time_ns);
        self.relation_rows -= rows.len();
        self.relation_bytes -= rows.keys().map(|row| row_bytes(row)).sum::<usize>();
        for (row, count) in rows {
            input(usize::from(fragment), relation.last_ns, row, count.saturating_neg());
        }
    }

    fn retract(&mut self, time_ns: i64, input: &mut InputSink<'_>) {
        let fragments: Vec<u16> = self.relations.keys().copied().collect();
        for fragment in fragments {
            self.retract_fragment(fragment, time_ns, input);
        }
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::Value;

    use super::super::budget::MemoryBudget;
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    /// A merge of a stream and a relation, and the changes that it passes to the engine.
    struct Case {
        merge: Merge,
        budget: Arc<MemoryBudget>,
        inputs: Vec<(usize, i64, i64, i64)>,
    }

    impl Case {
        fn new() -> Self {
            let merge = Merge::new(2 * SECOND, vec![true, false]);
            Self { merge, budget: Arc::new(MemoryBudget::new(1000)), inputs: Vec::new() }
        }

        fn with<T>(&mut self, work: impl FnOnce(&mut Merge, &mut InputSink<'_>) -> T) -> T {
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
            let changes = RowChanges { rows: rows.iter().map(row).collect(), weight: 100 };
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
    fn time_follows_the_slowest_host_that_the_centre_waits_for() {
        let mut case = Case::new();
        let (a, b) = (("a", 1), ("b", 2));
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.join("b", 2, false, now);
        // The centre waits for the host that has just joined.
        assert_eq!(case.watermark(a, now + 5, now + 10), 0);
        assert_eq!(case.watermark(b, now + 3, now + 10), now + 3);
        assert_eq!(case.watermark(b, now + 9, now + 10), now + 5);
        // The centre waits for the slow host for two seconds, and no longer.
        assert_eq!(case.watermark(b, now + 2 * SECOND, now + 2 * SECOND), now + 5);
        let later = now + 2 * SECOND + 6;
        assert!(case.merge.is_waited_for("b", later) && !case.merge.is_waited_for("a", later));
        assert_eq!(case.watermark(b, later, later), later);
        // Only rows of the slow host are late.
        case.send(a, 0, &[(now + 7, 1, 1), (later, 2, 1)], later).unwrap();
        case.send(b, 0, &[(later, 3, 1)], later).unwrap();
        assert_eq!(case.taken(), [(0, later, 2, 1), (0, later, 3, 1)]);
        assert_eq!(case.merge.of_host("a").unwrap().0, 1);
        assert_eq!(case.merge.of_host("b").unwrap().0, 0);
        // After it has caught up, the centre waits for it again.
        case.watermark(a, later + 1, later + 3);
        assert_eq!(case.watermark(b, later + 3, later + 3), later + 1);
    }

    #[test]
    fn time_follows_the_first_of_hosts_that_are_all_far_behind() {
        let mut case = Case::new();
        let (a, b) = (("a", 1), ("b", 2));
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.join("b", 2, false, now);
        let later = now + 60 * SECOND;
        case.watermark(a, now + 1, later);
        // The centre itself may have stood still.
        assert_eq!(case.watermark(b, now + SECOND, later + SECOND), 0);
        let later = later + 2 * SECOND;
        assert_eq!(case.watermark(b, now + SECOND, later), now + 1);
        assert_eq!(case.watermark(b, now + 5 * SECOND, later), now + 5 * SECOND);
        // A host that is up to date decides alone again.
        assert_eq!(case.watermark(a, later, later), later);
    }

    /// The rows from after the watermark of a host use up its memory, so that its next watermark
    /// is not read.
    #[test]
    fn a_host_whose_memory_is_used_up_is_not_stuck() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.watermark(("a", 1), now - 1, now);
        for number in 0..10 {
            case.send(("a", 1), 0, &[(now + number, 1, 1)], now).unwrap();
        }
        let budget = Arc::clone(&case.budget);
        let waits = std::thread::spawn(move || budget.take(100, &|| true).map(|_| ()));
        let mut later = now;
        while case.budget.taken() == 1000 {
            later += SECOND;
            case.merge.advance(later);
            case.merge.release(case.merge.watermark_ns());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        waits.join().unwrap().unwrap();
        assert!(later > now + 2 * SECOND, "it has the patience to send its watermark");
    }

    #[test]
    fn a_host_that_reconnects_repeatedly_does_not_stop_time() {
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
    fn the_centre_waits_for_a_host_after_a_short_cut_and_expires_it_after_a_long_one() {
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
        // Frames of an ended connection are ignored.
        case.send(b, 0, &[(now + 1, 1, 1)], now + SECOND).unwrap();
        case.send(("b", 3), 0, &[(now + 1, 2, 1)], now + SECOND).unwrap();
        assert_eq!(case.taken(), [(0, now + 1, 2, 1)]);
        assert_eq!(case.watermark(("b", 3), now + SECOND, now + SECOND), now + SECOND);
        // A long cut.
        case.with(|merge, input| merge.left("b", 3, false, input));
        let later = now + 10 * SECOND;
        case.with(|merge, input| merge.expire(later, &mut |_| false, input));
        assert_eq!(case.taken(), []);
        case.with(|merge, input| merge.expire(later, &mut |name| name == "b", input));
        assert_eq!(case.taken(), [(1, now + SECOND, 7, -2), (1, now + SECOND, 8, -1)]);
        assert_eq!(case.watermark(a, later, later), later);
    }

    #[test]
    fn relations_take_late_changes_and_are_retracted() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        case.watermark(("a", 1), now, now);
        case.send(("a", 1), 1, &[(now - 5, 7, 1), (now + 1, 7, -1), (now + 1, 9, 1)], now).unwrap();
        assert_eq!(case.taken(), [(1, now, 7, 1), (1, now + 1, 7, -1), (1, now + 1, 9, 1)]);
        // The host starts again.
        case.join("a", 2, false, now + 2);
        assert_eq!(case.taken(), [(1, now + 1, 9, -1)]);
        case.send(("a", 2), 1, &[(now + 3, 4, 1)], now + 3).unwrap();
        case.with(|merge, input| merge.left("a", 2, true, input));
        assert_eq!(case.taken(), [(1, now + 3, 4, 1), (1, now + 3, 4, -1)]);
    }

    #[test]
    fn no_row_of_a_relation_has_a_negative_count() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        // A decreasing instant is raised to the previous one.
        case.send(("a", 1), 1, &[(now + 9, 7, 2), (now + 5, 7, -1), (now + 7, 8, 1)], now).unwrap();
        assert_eq!(case.taken(), [(1, now + 9, 7, 2), (1, now + 9, 7, -1), (1, now + 9, 8, 1)]);
        let problem = case.send(("a", 1), 1, &[(now + 9, 7, -1), (now + 9, 7, -1)], now);
        assert!(problem.unwrap_err().contains("not sent"));
        case.with(|merge, input| merge.left("a", 1, true, input));
        assert_eq!(case.taken(), [(1, now + 9, 7, -1), (1, now + 9, 8, -1)]);
    }

    /// A few rows with giant texts take as much memory as many small rows.
    #[test]
    fn a_host_with_giant_texts_is_rejected_and_its_memory_is_released() {
        let mut case = Case::new();
        let now = 100 * SECOND;
        case.join("a", 1, false, now);
        let giant: Arc<str> = "x".repeat(1 << 20).into();
        let budget = Arc::clone(&case.budget);
        let send = |merge: &mut Merge, number: i64, count: i64| {
            // All rows share one text, so that the test takes little memory.
            let text = if number < 0 { "".into() } else { Arc::clone(&giant) };
            let row: Tuple = vec![Value::Text(text), Value::Integer(number)].into();
            let changes = RowChanges { rows: vec![(now + 1, row, count)], weight: 100 };
            let lease = budget.take(100, &|| true).unwrap();
            let report = RowsReport { fragment: 1, reset: false, changes, lease };
            let sent = merge.changes("a", 1, report, now, &mut |_, _, _, _| ());
            merge.release(now + 2);
            sent
        };
        let mut sent = 0;
        let refused = loop {
            // A row that is inserted and deleted takes no memory.
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
    fn invalid_rows_are_rejected_and_processed_rows_release_memory() {
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
        // Late rows take no memory.
        case.send(("a", 1), 0, &[(now, 1, 1)], now).unwrap();
        assert_eq!(case.budget.taken(), 100);
    }
}

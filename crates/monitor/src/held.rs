//! A limit on the state that queries hold.
//!
//! Measuring takes time in proportion to the size of some states. So the state is not measured
//! after each batch, but once a second, and earlier if the events since the last measurement may
//! have filled it to the limit. The growth per event is an estimate from the last interval only,
//! because a join makes many rows of one. So the number of events between measurements begins
//! small, at most doubles, and shrinks near the limit.

use std::fmt;
use std::time::{Duration, Instant};

use crate::Engine;

/// The default limit, in rows. A row of a window takes about 50 bytes, a group at most about 500,
/// and each 512 bytes of long texts count as one row. So the limit is half a gigabyte to five
/// gigabytes.
pub const HELD_MAX: u64 = 10_000_000;

/// The number of bytes of long texts that count as a row.
const TEXT_BYTES: usize = 512;

/// The longest interval between measurements while events arrive.
const INTERVAL: Duration = Duration::from_secs(1);
/// The part of the limit that gives the number of events before the first measurement.
const FIRST_PART: u64 = 1024;
/// The part of the remaining room that may be filled between two measurements.
const ROOM_PART: u64 = 8;
/// The part of the limit that may be filled between two measurements even if less room remains.
const LEAST_PART: u64 = 32;
/// The number of events that may wait for their instants without being counted. They are held
/// briefly, and the queries may drop most of them.
const WAITING_FREE: usize = 1 << 20;

/// The limit on the state of an engine, and when the state is measured.
#[derive(Clone, Debug)]
pub struct HeldLimit {
    limit: Option<u64>,
    /// The state at the last measurement, in rows, and the number of events at that time.
    held: u64,
    events: u64,
    /// The number of events until the next measurement.
    step: u64,
    measured: Instant,
}

/// The queries hold more than their limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldLimitExceeded {
    /// The number of rows, groups and values.
    pub held: u64,
    /// The limit.
    pub limit: u64,
    /// The operator, or other place, that holds most of them.
    pub place: String,
}

impl fmt::Display for HeldLimitExceeded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, limit, place } = self;
        write!(formatter, "{held} rows, groups and values are held, most in {place}: ")?;
        write!(formatter, "more than {limit}")
    }
}

impl std::error::Error for HeldLimitExceeded {}

impl HeldLimit {
    /// A limit in rows, groups and values; `None` for no limit.
    pub fn new(limit: Option<u64>) -> Self {
        let step = limit.map_or(u64::MAX, |limit| (limit / FIRST_PART).max(1));
        Self { limit, held: 0, events: 0, step, measured: Instant::now() }
    }

    /// Measures the state of an engine if a measurement is due. `beside` is state that others hold
    /// for it, each with its name.
    ///
    /// # Errors
    /// If the state exceeds the limit.
    pub fn check(
        &mut self,
        engine: &Engine,
        beside: &[(&str, usize)],
    ) -> Result<(), HeldLimitExceeded> {
        let Some(limit) = self.limit else { return Ok(()) };
        // An event changes the state when its instant ends.
        let waiting = engine.waiting().min(WAITING_FREE) as u64;
        let events = engine.statistics().events.saturating_sub(waiting);
        if events.saturating_sub(self.events) < self.step && self.measured.elapsed() < INTERVAL {
            return Ok(());
        }
        let beside_held: usize = beside.iter().map(|(_, held)| held).sum();
        let held = engine.held() + beyond_free(engine) + long_texts(engine) + beside_held;
        self.measured = Instant::now();
        self.note(limit, held as u64, events);
        if self.held <= limit {
            return Ok(());
        }
        Err(HeldLimitExceeded { held: self.held, limit, place: place(engine, beside) })
    }

    /// The steps in which an engine gets to `time_ns`, so that a measurement can follow each step
    /// in time. Without them all events since the last call could exceed the limit by far.
    pub fn steps(&self, engine: &Engine, time_ns: u64) -> HeldSteps {
        let is_one = engine.is_in_cluster() || engine.waiting() as u64 <= self.step;
        let times_ns = if is_one { Vec::new() } else { engine.waiting_before(time_ns) };
        HeldSteps { times_ns, at: 0, end_ns: Some(time_ns) }
    }

    /// Records a measurement after this number of events, and computes when the next one is due.
    fn note(&mut self, limit: u64, held: u64, events: u64) {
        let new_events = events.saturating_sub(self.events).max(1);
        let by_event = held.saturating_sub(self.held).div_ceil(new_events).max(1);
        let room = (limit.saturating_sub(held) / ROOM_PART).max(limit / LEAST_PART);
        self.step = (room / by_event).min(self.step.saturating_mul(2)).max(1);
        (self.held, self.events) = (held, events);
    }

    /// The state at the last measurement, in rows.
    pub fn held(&self) -> u64 {
        self.held
    }
}

/// The steps of an engine to an instant. Each has at most as many events as are due until the next
/// measurement, or those of one instant.
#[derive(Debug)]
pub struct HeldSteps {
    /// The instants of the waiting events, in their order; empty if one step is enough.
    times_ns: Vec<u64>,
    /// The first of them in the next step.
    at: usize,
    end_ns: Option<u64>,
}

impl HeldSteps {
    /// The end of the next step; `None` after the last one.
    pub fn next(&mut self, limit: &HeldLimit) -> Option<u64> {
        let end_ns = self.end_ns?;
        let rest = &self.times_ns[self.at..];
        let events = usize::try_from(limit.step).unwrap_or(usize::MAX);
        let Some(&next_ns) = rest.get(events) else {
            self.end_ns = None;
            return Some(end_ns);
        };
        let step_ns = if next_ns > rest[0] { next_ns } else { next_ns + 1 };
        self.at += rest.partition_point(|time_ns| *time_ns < step_ns);
        Some(step_ns.min(end_ns))
    }
}

/// The waiting events that count.
fn beyond_free(engine: &Engine) -> usize {
    engine.waiting().saturating_sub(WAITING_FREE)
}

/// The number of rows that long texts count as.
fn long_texts(engine: &Engine) -> usize {
    engine.text_bytes() / TEXT_BYTES
}

/// The name of the operator, or other place, that holds most.
fn place(engine: &Engine, beside: &[(&str, usize)]) -> String {
    let operators =
        engine.state().map(|state| (format!("the operator `{}`", state.operator), state.rows));
    let waiting = ("events whose instant has not ended".to_owned(), beyond_free(engine));
    let beside = beside.iter().map(|&(name, held)| (name.to_owned(), held));
    let texts = ("long texts".to_owned(), long_texts(engine));
    let all = operators.chain([waiting, texts]).chain(beside);
    all.max_by_key(|(_, held)| *held).map(|(name, _)| name).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fathom_cql::{ParseOptions, Value};

    use super::*;
    use crate::replay::Script;

    const LIMIT: u64 = 20_000;

    /// The engine of a script, its source, and the number of columns of the source's rows.
    fn engine(text: &str) -> (Engine, usize, usize) {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let columns = script.wanted().iter().filter(|wanted| **wanted).count();
        (script.engine(), 0, columns)
    }

    /// Pushes events, one an instant, until the limit is exceeded. Returns the error, the number of
    /// events and the number of measurements.
    fn run(text: &str, events: u64) -> (Option<HeldLimitExceeded>, u64, u64) {
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(Some(LIMIT));
        let mut measured = 0;
        for event in 1..=events {
            engine.push(source, event, &vec![Value::Integer(event as i64); columns]);
            engine.advance(event + 1, &mut |_| {});
            let before = limit.events;
            let checked = limit.check(&engine, &[]);
            measured += u64::from(limit.events != before);
            if let Err(exceeded) = checked {
                return (Some(exceeded), event, measured);
            }
        }
        (None, events, measured)
    }

    #[test]
    fn growth_is_found_near_the_limit_with_few_measurements() {
        let text = "select Size, count(*) from IOstream group by Size";
        let (exceeded, events, measured) = run(text, 2 * LIMIT);
        let exceeded = exceeded.unwrap();
        assert!((LIMIT + 1..LIMIT + LIMIT / LEAST_PART + 2).contains(&events), "{events}");
        assert_eq!((exceeded.held, exceeded.limit), (events, LIMIT));
        assert!(measured < 100, "{measured}");
        let text = exceeded.to_string();
        assert!(text.contains("most in the operator `groups`: more than 20000"), "{text}");
    }

    #[test]
    fn many_events_at_once_exceed_the_limit_by_no_more_than_a_few() {
        let text = "select Size, count(*) from IOstream group by Size";
        for spread in [1, 3, 100_000] {
            let (mut engine, source, columns) = engine(text);
            let mut limit = HeldLimit::new(Some(LIMIT));
            let events = 3 * LIMIT;
            for event in 0..events {
                // Their order is not that of their instants.
                let time = (event ^ 1023) * spread / 3;
                engine.push(source, time, &vec![Value::Integer(event as i64); columns]);
            }
            let mut steps = limit.steps(&engine, events * spread);
            let mut ends = Vec::new();
            let exceeded = loop {
                let end = steps.next(&limit).expect("the limit is exceeded before the end");
                engine.advance(end, &mut |_| {});
                ends.push(end);
                if let Err(exceeded) = limit.check(&engine, &[]) {
                    break exceeded;
                }
            };
            assert!(exceeded.held <= LIMIT + LIMIT / LEAST_PART + 3, "{exceeded:?} {spread}");
            assert!(ends.is_sorted_by(|a, b| a < b) && ends.len() > 10, "{ends:?}");
        }
        // Without growth all events pass, the last step ends at the given instant, and events of
        // one instant are one step.
        let (mut engine, source, columns) = engine("select Size from IOstream");
        let mut limit = HeldLimit::new(Some(LIMIT));
        for event in 0..LIMIT {
            let time = if event < 10_000 { 7 } else { event };
            engine.push(source, time, &vec![Value::Null; columns]);
        }
        let mut steps = limit.steps(&engine, 1 << 40);
        let mut ends = Vec::new();
        while let Some(end) = steps.next(&limit) {
            engine.advance(end, &mut |_| {});
            limit.check(&engine, &[]).unwrap();
            ends.push(end);
        }
        assert_eq!((ends[0], ends.last()), (8, Some(&(1 << 40))));
        assert_eq!((engine.waiting(), steps.next(&limit)), (0, None));
        let mut idle = limit.steps(&engine, 1 << 41);
        assert_eq!((idle.next(&limit), idle.next(&limit)), (Some(1 << 41), None));
    }

    #[test]
    fn one_event_may_add_many_rows() {
        // Each row joins with all previous rows: the set of pairs grows by the square.
        let text = "select distinct a.BlktapTS, b.Size from IOstream as a, IOstream as b";
        let (exceeded, events, _) = run(text, 2000);
        let exceeded = exceeded.unwrap();
        assert!(exceeded.held < LIMIT + LIMIT / 4, "{exceeded:?} after {events}");
        assert!(exceeded.place.contains("distinct"), "{exceeded:?}");
    }

    #[test]
    fn long_texts_count_by_their_bytes() {
        let text = "select Path, count(*) from IOstream [range 1 hour] group by Path";
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(Some(LIMIT));
        let mut pushed = 0;
        let exceeded = loop {
            pushed += 1;
            let path: Arc<str> = format!("{pushed:08192}").into();
            engine.push(source, pushed, &vec![Value::Text(path); columns]);
            engine.advance(pushed + 1, &mut |_| {});
            if let Err(exceeded) = limit.check(&engine, &[]) {
                break exceeded;
            }
            assert!(pushed < LIMIT / 8, "{} bytes are too much", engine.text_bytes());
        };
        assert_eq!(exceeded.place, "long texts");
        assert!(engine.text_bytes() < LIMIT as usize * TEXT_BYTES * 5 / 4);
        // A text in many rows is held once. It leaves with the window, except that an operator
        // keeps the last texts that it looked up.
        let (mut engine, source, columns) = self::engine(text);
        for time in 1..=1000 {
            let path: Arc<str> = format!("{:08192}", time / 100).into();
            for _ in 0..3 {
                engine.push(source, time, &vec![Value::Text(Arc::clone(&path)); columns]);
            }
        }
        engine.advance(2000, &mut |_| {});
        assert_eq!(engine.text_bytes(), 1000 * 8192);
        engine.advance(3_700_000_000_000, &mut |_| {});
        assert!(engine.text_bytes() <= 2 * 8192, "{}", engine.text_bytes());
    }

    #[test]
    fn queries_below_the_limit_continue() {
        let text = "select count(*) from IOstream [range 18000 nanoseconds]";
        let (exceeded, _, measured) = run(text, 3 * LIMIT);
        assert_eq!(exceeded, None);
        assert!((10..200).contains(&measured), "{measured}");
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(None);
        for event in 0..1000 {
            engine.push(source, event, &vec![Value::Null; columns]);
            limit.check(&engine, &[("a result", usize::MAX / 2)]).unwrap();
        }
    }

    #[test]
    fn waiting_events_and_state_elsewhere_count_too() {
        let (mut engine, source, columns) = engine("select Size from IOstream");
        let mut limit = HeldLimit::new(Some(10));
        let push = |engine: &mut Engine, events: usize| {
            let column = || (0..events).map(|_| Value::Integer(1)).collect();
            let columns = (0..columns).map(|_| column()).collect();
            engine.push_columns(source, vec![0; events], columns);
        };
        push(&mut engine, WAITING_FREE + 10);
        limit.check(&engine, &[]).unwrap();
        push(&mut engine, 1);
        let exceeded = limit.check(&engine, &[]).unwrap_err();
        assert_eq!((exceeded.held, limit.held()), (11, 11));
        assert_eq!(exceeded.place, "events whose instant has not ended");
        engine.advance(1, &mut |_| {});
        assert_eq!((engine.held(), engine.waiting()), (0, 0));
        engine.push(source, 11, &vec![Value::Null; columns]);
        let mut limit = HeldLimit::new(Some(10));
        let exceeded = limit.check(&engine, &[("the result", 11)]).unwrap_err();
        assert_eq!((exceeded.held, exceeded.place.as_str()), (11, "the result"));
    }

    #[test]
    fn a_dropped_engine_frees_its_state() {
        let queries = "select a.Path, count(*) from IOstream [range 1 hour] as a, IOstream as b \
                       where a.Size = b.Size group by a.Path; select distinct Path from IOstream";
        let (mut engine, source, columns) = engine(queries);
        let text: Arc<str> = "a path".into();
        for time_ns in 0..10 {
            engine.push(source, time_ns, &vec![Value::Text(Arc::clone(&text)); columns]);
        }
        engine.advance(10, &mut |_| {});
        assert!(engine.held() > 10, "{}", engine.held());
        assert!(Arc::strong_count(&text) > 1);
        drop(engine);
        assert_eq!(Arc::strong_count(&text), 1);
    }
}

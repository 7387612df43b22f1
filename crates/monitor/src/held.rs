//! A bound on what queries hold.
//!
//! To measure takes time with the size of some states, so it is not done whenever something comes,
//! but once a second, and before so many events as could bring what is held to the bound. How much
//! an event adds is known from the last time only: a join makes many rows of one. So the number of
//! events begins small and at most doubles, and gets smaller as the bound comes near.

use std::fmt;
use std::time::{Duration, Instant};

use crate::Engine;

/// How much queries may hold where nobody says how much. A row of a window is some 50 bytes, a group
/// some 500 at most, and so many bytes of long texts count as one more, so that it is half a gigabyte
/// to five.
pub const HELD_MAX: u64 = 10_000_000;

/// So many bytes of long texts count as a row.
const TEXT_BYTES: usize = 512;

/// How often it is measured at least, while something happens.
const INTERVAL: Duration = Duration::from_secs(1);
/// The part of the bound that may come before it is measured first, and, as far as is known how much
/// an event adds, between two times when the bound is near.
const FIRST_PART: u64 = 1024;
const LEAST_PART: u64 = 32;
/// The part of what there is still room for that may come between two times.
const ROOM_PART: u64 = 8;
/// So many events may wait for their instants and not count: they come and go in a moment, and most
/// may be of no interest to the queries.
const WAITING_FREE: usize = 1 << 20;

/// How much an engine may hold, and when it is looked whether it does.
#[derive(Clone, Debug)]
pub struct HeldLimit {
    most: Option<u64>,
    /// What was held when it was measured last, after so many events.
    held: u64,
    events: u64,
    /// So many events may come before it is measured again.
    step: u64,
    measured: Instant,
}

/// What queries hold is beyond the bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooMuchHeld {
    /// How many rows, groups and values are held.
    pub held: u64,
    /// How many may be.
    pub most: u64,
    /// Where most of them are.
    pub place: String,
}

impl fmt::Display for TooMuchHeld {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, most, place } = self;
        write!(formatter, "{held} rows, groups and values are held, most in {place}: ")?;
        write!(formatter, "more than {most}")
    }
}

impl std::error::Error for TooMuchHeld {}

impl HeldLimit {
    /// A bound; without one nothing is ever too much.
    pub fn new(most: Option<u64>) -> Self {
        let step = most.map_or(u64::MAX, |most| (most / FIRST_PART).max(1));
        Self { most, held: 0, events: 0, step, measured: Instant::now() }
    }

    /// Measures what an engine holds, if it is time. `beside` is what others hold for it, each with
    /// its name.
    ///
    /// # Errors
    /// When it is too much.
    pub fn check(&mut self, engine: &Engine, beside: &[(&str, usize)]) -> Result<(), TooMuchHeld> {
        let Some(most) = self.most else { return Ok(()) };
        // What an event adds is there once its instant is over.
        let waiting = engine.waiting().min(WAITING_FREE) as u64;
        let events = engine.statistics().events.saturating_sub(waiting);
        if events.saturating_sub(self.events) < self.step && self.measured.elapsed() < INTERVAL {
            return Ok(());
        }
        let beside_held: usize = beside.iter().map(|(_, held)| held).sum();
        let held = engine.held() + beyond_free(engine) + long_texts(engine) + beside_held;
        self.measured = Instant::now();
        self.note(most, held as u64, events);
        if self.held <= most {
            return Ok(());
        }
        Err(TooMuchHeld { held: self.held, most, place: place(engine, beside) })
    }

    /// Notes what is held after so many events, and finds out when it is to be measured again.
    fn note(&mut self, most: u64, held: u64, events: u64) {
        let came = events.saturating_sub(self.events).max(1);
        let by_event = held.saturating_sub(self.held).div_ceil(came).max(1);
        let room = (most.saturating_sub(held) / ROOM_PART).max(most / LEAST_PART);
        self.step = (room / by_event).min(self.step.saturating_mul(2)).max(1);
        (self.held, self.events) = (held, events);
    }

    /// What was held when it was measured last.
    pub fn held(&self) -> u64 {
        self.held
    }
}

/// The events that wait and count.
fn beyond_free(engine: &Engine) -> usize {
    engine.waiting().saturating_sub(WAITING_FREE)
}

/// The rows that long texts count as.
fn long_texts(engine: &Engine) -> usize {
    engine.text_bytes() / TEXT_BYTES
}

/// Where most of what is held is.
fn place(engine: &Engine, beside: &[(&str, usize)]) -> String {
    let operators =
        engine.state().map(|state| (format!("the operator `{}`", state.operator), state.rows));
    let waiting = ("events whose instant is not over".to_owned(), beyond_free(engine));
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

    const MOST: u64 = 20_000;

    fn engine(text: &str) -> (Engine, usize, usize) {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let columns = script.wanted().iter().filter(|wanted| **wanted).count();
        let (engine, source) = script.engine();
        (engine, source, columns)
    }

    /// Pushes events until it is too much, one an instant, and says how many came before, and how
    /// often it was measured.
    fn run(text: &str, events: u64) -> (Option<TooMuchHeld>, u64, u64) {
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(Some(MOST));
        let mut measured = 0;
        for event in 1..=events {
            engine.push(source, event, &vec![Value::Integer(event as i64); columns]);
            engine.advance(event + 1, &mut |_| {});
            let before = limit.events;
            let checked = limit.check(&engine, &[]);
            measured += u64::from(limit.events != before);
            if let Err(too_much) = checked {
                return (Some(too_much), event, measured);
            }
        }
        (None, events, measured)
    }

    #[test]
    fn what_grows_is_found_near_the_bound_and_is_seldom_measured() {
        let text = "select Size, count(*) from IOstream group by Size";
        let (too_much, events, measured) = run(text, 2 * MOST);
        let too_much = too_much.unwrap();
        assert!((MOST + 1..MOST + MOST / LEAST_PART + 2).contains(&events), "{events}");
        assert_eq!((too_much.held, too_much.most), (events, MOST));
        assert!(measured < 100, "{measured}");
        let text = too_much.to_string();
        assert!(text.contains("most in the operator `groups`: more than 20000"), "{text}");
    }

    #[test]
    fn one_event_may_add_much() {
        // Each row meets all that came before: the set of pairs grows by the square.
        let text = "select distinct a.BlktapTS, b.Size from IOstream as a, IOstream as b";
        let (too_much, events, _) = run(text, 2000);
        let too_much = too_much.unwrap();
        assert!(too_much.held < MOST + MOST / 4, "{too_much:?} after {events}");
        assert!(too_much.place.contains("distinct"), "{too_much:?}");
    }

    #[test]
    fn long_texts_count_by_their_bytes() {
        let text = "select Path, count(*) from IOstream [range 1 hour] group by Path";
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(Some(MOST));
        let mut pushed = 0;
        let too_much = loop {
            pushed += 1;
            let path: Arc<str> = format!("{pushed:08192}").into();
            engine.push(source, pushed, &vec![Value::Text(path); columns]);
            engine.advance(pushed + 1, &mut |_| {});
            if let Err(too_much) = limit.check(&engine, &[]) {
                break too_much;
            }
            assert!(pushed < MOST / 8, "{} bytes are too much", engine.text_bytes());
        };
        assert_eq!(too_much.place, "long texts");
        assert!(engine.text_bytes() < MOST as usize * TEXT_BYTES * 5 / 4);
        // The same text in many rows is there once, and gone with the window, but for what an
        // operator has met last.
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
    fn what_stays_below_the_bound_goes_on() {
        let text = "select count(*) from IOstream [range 18000 nanoseconds]";
        let (too_much, _, measured) = run(text, 3 * MOST);
        assert_eq!(too_much, None);
        assert!((10..200).contains(&measured), "{measured}");
        let (mut engine, source, columns) = engine(text);
        let mut limit = HeldLimit::new(None);
        for event in 0..1000 {
            engine.push(source, event, &vec![Value::Null; columns]);
            limit.check(&engine, &[("a result", usize::MAX / 2)]).unwrap();
        }
    }

    #[test]
    fn what_waits_and_what_others_hold_counts_too() {
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
        let too_much = limit.check(&engine, &[]).unwrap_err();
        assert_eq!((too_much.held, limit.held()), (11, 11));
        assert_eq!(too_much.place, "events whose instant is not over");
        engine.advance(1, &mut |_| {});
        assert_eq!((engine.held(), engine.waiting()), (0, 0));
        engine.push(source, 11, &vec![Value::Null; columns]);
        let mut limit = HeldLimit::new(Some(10));
        let too_much = limit.check(&engine, &[("the result", 11)]).unwrap_err();
        assert_eq!((too_much.held, too_much.place.as_str()), (11, "the result"));
    }

    #[test]
    fn an_engine_that_goes_gives_up_what_it_holds() {
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

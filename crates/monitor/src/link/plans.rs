//! Fragments as bytes, in CBOR, which preserves the values of all numbers.

use fathom_cql::catalog::{Catalog, Column, StreamSchema};
use fathom_cql::check::check;
use fathom_cql::plan::{Output, Plan};
use serde::{Deserialize, Serialize};

use super::frame::FRAGMENTS_MAX;
use crate::recording::COLUMNS_MAX;

/// The most fragments.
pub const FRAGMENTS_COUNT_MAX: usize = 256;
/// The deepest nesting of encoded plans, in levels of CBOR. Each operator takes two or three.
const DEPTH_MAX: usize = 768;
/// A stack that suffices for plans of this depth, in bytes.
pub const STACK: usize = 64 << 20;

/// The fragments that hosts run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fragments {
    /// The stream of events that the plans read.
    pub stream: String,
    /// The columns of the events' rows, in the stream's order.
    pub columns: Vec<Column>,
    /// The plans.
    pub plans: Vec<Plan>,
}

impl Fragments {
    /// Encodes the fragments.
    ///
    /// # Errors
    /// If there are too many, or they are too long or nested too deeply, so that hosts would refuse
    /// them.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let failed = || "the queries cannot be sent".to_owned();
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || self.checked_bytes());
            thread.map_err(|_| failed())?.join().map_err(|_| failed())?
        })
    }

    fn checked_bytes(&self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        ciborium::into_writer(self, &mut bytes).map_err(|error| error.to_string())?;
        // The frame has a few numbers before the fragments.
        if bytes.len() > FRAGMENTS_MAX - 64 {
            return Err("the queries are too long to be sent".into());
        }
        let read = Self::from_bytes(&bytes)?;
        if read.plans.len() == self.plans.len() {
            Ok(bytes)
        } else {
            Err("the queries cannot be sent".into())
        }
    }

    /// Decodes untrusted bytes.
    ///
    /// # Errors
    /// If the bytes are not fragments, or the fragments cannot be run.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let read: Self = ciborium::de::from_reader_with_recursion_limit(bytes, DEPTH_MAX)
            .map_err(|_| "the fragments cannot be read: another version wrote them, or they are nested too deeply")?;
        if read.plans.len() > FRAGMENTS_COUNT_MAX {
            return Err(format!("there are more than {FRAGMENTS_COUNT_MAX} fragments"));
        }
        if read.columns.len() > COLUMNS_MAX {
            return Err("the events have too many columns".into());
        }
        let catalog = read.catalog();
        for plan in &read.plans {
            // One column is the count.
            if plan.columns.len() >= COLUMNS_MAX {
                return Err("a fragment has too many columns".into());
            }
            check(plan, &catalog).map_err(|wrong| format!("a fragment is invalid: {wrong}"))?;
        }
        Ok(read)
    }

    /// A catalogue with the stream, which has only the columns of the events' rows.
    fn catalog(&self) -> Catalog {
        let stream = StreamSchema {
            name: self.stream.clone(),
            columns: self.columns.clone(),
            aliases: Vec::new(),
            values: Vec::new(),
        };
        Catalog { streams: vec![stream] }
    }

    /// For each column of a stream whether the events' rows have it.
    ///
    /// # Errors
    /// If a column is missing, or the columns have another order.
    pub fn wanted(&self, schema: &StreamSchema) -> Result<Vec<bool>, String> {
        if !self.stream.eq_ignore_ascii_case(&schema.name) {
            return Err(format!("there is no stream {:?} here", short(&self.stream)));
        }
        let mut wanted = vec![false; schema.columns.len()];
        let mut before = None;
        for column in &self.columns {
            let place = schema.columns.iter().position(|known| known == column);
            let place = place.filter(|place| before.is_none_or(|before| before < *place));
            let Some(place) = place else {
                return Err(format!("the events here have no column {:?}", short(&column.name)));
            };
            wanted[place] = true;
            before = Some(place);
        }
        Ok(wanted)
    }
}

/// Whether a plan's result is a stream.
pub fn is_stream(plan: &Plan) -> bool {
    matches!(plan.output, Output::Stream(_))
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use fathom_cql::plan::{Expression, Relation, Stream, Window};
    use fathom_cql::{ParseOptions, Value};

    use super::*;
    use crate::io_stream;
    use crate::replay::Script;

    fn fragments(text: &str) -> Fragments {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let schema = io_stream();
        let plans = script.queries().iter().map(|query| query.plan.clone()).collect();
        Fragments { stream: schema.name, columns: schema.columns, plans }
    }

    #[test]
    fn plans_and_their_numbers_are_read_as_they_were_written() {
        let mut all = fragments(
            "select VDisk, percentile(Size, 99.5), sum(Size) * 0.1 from IOstream [range 1 second]
             where Path like '%é%' and Size > 9223372036854775807 group by VDisk;
             select histogram(Size), histogram(Size, 0.1), histogram(Size, 7), top_k(Path, 1000),
             approx_count_distinct(Path, 16) from IOstream [now];
             select * from IOstream where Type = 'Q'",
        );
        for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 5e-324, -0.0] {
            let window = Relation::Window(Window::Unbounded, Box::new(Stream::Source(0)));
            let value = Expression::Literal(Value::Float(number));
            let columns = vec![Column { name: "x".into(), kind: fathom_cql::Type::Float }];
            let output = Output::Relation(Relation::Project(Box::new(window), vec![value]));
            all.plans.push(Plan { output, columns });
        }
        let bytes = all.to_bytes().unwrap();
        assert_eq!(Fragments::from_bytes(&bytes), Ok(all.clone()));
        assert_eq!(all.wanted(&io_stream()), Ok(vec![true; all.columns.len()]));
        for cut in 0..bytes.len() {
            assert!(Fragments::from_bytes(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn invalid_fragments_are_refused() {
        let mut wrong = fragments("select Size from IOstream where Size > 1");
        wrong.columns.truncate(2);
        assert!(wrong.to_bytes().unwrap_err().contains("no column"));
        let mut other = fragments("select Size from IOstream");
        other.columns.swap(0, 1);
        assert!(other.wanted(&io_stream()).is_err());
        other.stream = "else".into();
        assert!(other.wanted(&io_stream()).is_err());
        assert!(Fragments::from_bytes(b"").is_err());
        assert!(Fragments::from_bytes(&vec![0x9f; 1 << 20]).is_err());
    }

    /// Kinds and sizes of aggregates that the language does not have.
    #[test]
    fn strange_aggregates_are_refused() {
        let refused = |text: &str, good: &[u8], wrong: &[u8]| {
            let text = format!("select {text} as x from IOstream [now]");
            let bytes = fragments(&text).to_bytes().unwrap();
            let at = bytes.windows(good.len()).position(|part| part == good).unwrap();
            let mut strange = bytes.clone();
            strange[at..at + wrong.len()].copy_from_slice(wrong);
            assert!(Fragments::from_bytes(&bytes).is_ok());
            Fragments::from_bytes(&strange).unwrap_err()
        };
        let of = |name: &str, number: u8| [name.as_bytes(), &[number]].concat();
        let top = refused("top_k(Path, 9)", &of("MostFrequent", 9), &of("MostFrequent", 0));
        assert!(top.contains("number of values: 0"), "{top}");
        let width = refused("histogram(Size, 9)", &of("Integers", 9), &of("Integers", 0));
        assert!(width.contains("cannot be read"), "{width}");
        let of_pair = |bits| [b"ApproximateDistinct\x82", &[bits][..]].concat();
        let precision = refused("approx_count_distinct(Path, 9)", &of_pair(9), &of_pair(3));
        assert!(precision.contains("cannot be read"), "{precision}");
        // A partial aggregate is a text.
        let sum = refused("histogram(Size)", b"Whole", b"Merge");
        assert!(sum.contains("Integer"), "{sum}");
    }

    /// A plan with the deepest nesting that fits into a frame is refused and does not overflow the
    /// stack.
    #[test]
    fn deep_plans_are_refused() {
        let nested = |depth: usize| {
            let mut all = fragments("select * from IOstream where Size > 1");
            let mut relation = Relation::Window(Window::Unbounded, Box::new(Stream::Source(0)));
            for _ in 0..depth {
                relation = Relation::Distinct(Box::new(relation));
            }
            all.plans[0].output = Output::Relation(relation);
            all.to_bytes()
        };
        let work = move || {
            assert!(nested(200).is_ok());
            assert!(nested(5000).is_err());
            // The longest chain that the language allows.
            let chain: Vec<String> = (0..250).map(|size| format!("Size = {size}")).collect();
            let chain = fragments(&format!("select * from IOstream where {}", chain.join(" or ")));
            assert_eq!(Fragments::from_bytes(&chain.to_bytes().unwrap()), Ok(chain));
        };
        std::thread::Builder::new().stack_size(STACK).spawn(work).unwrap().join().unwrap();
    }
}

//! Fragments as bytes, in CBOR, which preserves the values of all numbers.

use fathom_cql::Value;
use fathom_cql::ast::ToStream;
use fathom_cql::catalog::{Catalog, Column, StreamSchema};
use fathom_cql::check::check;
use fathom_cql::plan::{Expression, Output, Plan, Relation, Stream, Window};
use serde::{Deserialize, Serialize};

use super::frame::FRAGMENTS_MAX;
use crate::read::WantedStream;
use crate::recording::{COLUMNS_MAX, STREAMS_MAX};

/// The most fragments.
pub const FRAGMENTS_COUNT_MAX: usize = 256;
/// The deepest nesting of encoded plans, in levels of CBOR. Each operator takes two or three.
const DEPTH_MAX: usize = 768;
/// A stack that suffices for plans of this depth, in bytes.
pub const STACK: usize = 64 << 20;

/// The fragments that hosts run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fragments {
    /// The first stream that the plans read.
    pub stream: String,
    /// The columns of its rows, in the stream's order.
    pub columns: Vec<Column>,
    /// The other streams that the plans read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<FragmentStream>,
    /// The plans. Their inputs are the first stream, then the others.
    pub plans: Vec<Plan>,
}

/// A stream that fragments read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FragmentStream {
    /// The name.
    pub stream: String,
    /// The columns of its rows, in the stream's order.
    pub columns: Vec<Column>,
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
        if read.others.len() >= STREAMS_MAX {
            return Err("the fragments read too many streams".into());
        }
        if read.streams().any(|(_, columns)| columns.len() > COLUMNS_MAX) {
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

    /// The fragments of some plans over a catalogue. Only the streams and columns that the plans
    /// read remain.
    pub fn new(mut plans: Vec<Plan>, catalog: &Catalog) -> Self {
        let used = fathom_cql::prune(&mut plans, catalog);
        let mut sources: Vec<usize> = fathom_cql::sources(&plans).into_iter().collect();
        if sources.is_empty() {
            sources.push(0);
        }
        fathom_cql::place_sources(&mut plans, &sources);
        let stream = |&source: &usize| {
            let schema = &catalog.streams[source];
            let columns = used[source].iter().map(|&column| schema.columns[column].clone());
            FragmentStream { stream: schema.name.clone(), columns: columns.collect() }
        };
        let mut streams: Vec<FragmentStream> = sources.iter().map(stream).collect();
        let FragmentStream { stream, columns } = streams.remove(0);
        Self { stream, columns, others: streams, plans }
    }

    /// The fragments for a host that has one stream alone. A fragment that reads another gives no
    /// rows.
    #[must_use]
    pub fn of_stream(&self, schema: &StreamSchema) -> Self {
        let of = self.streams().position(|(name, _)| name.eq_ignore_ascii_case(&schema.name));
        let columns = of.and_then(|of| self.streams().nth(of)).map(|(_, columns)| columns.to_vec());
        let plan = |plan: &Plan| {
            let sources = fathom_cql::sources(std::slice::from_ref(plan));
            if sources.iter().all(|source| Some(*source) == of) {
                let mut plan = plan.clone();
                fathom_cql::map_sources(&mut plan, &|_| 0);
                return plan;
            }
            without_rows(plan)
        };
        Self {
            stream: schema.name.clone(),
            columns: columns.unwrap_or_default(),
            others: Vec::new(),
            plans: self.plans.iter().map(plan).collect(),
        }
    }

    /// The streams and the columns of their rows.
    pub fn streams(&self) -> impl Iterator<Item = (&str, &[Column])> {
        let others = self.others.iter().map(|other| (&*other.stream, &*other.columns));
        std::iter::once((&*self.stream, &*self.columns)).chain(others)
    }

    /// A catalogue with the streams, which have only the columns of the events' rows.
    fn catalog(&self) -> Catalog {
        let stream = |(name, columns): (&str, &[Column])| StreamSchema {
            name: name.to_owned(),
            columns: columns.to_vec(),
            aliases: Vec::new(),
            values: Vec::new(),
        };
        Catalog { streams: self.streams().map(stream).collect() }
    }

    /// The streams and columns of the events' rows, out of the streams that a host has.
    ///
    /// # Errors
    /// If a stream or a column is missing, or the columns have another order.
    pub fn wanted(&self, known: &[StreamSchema]) -> Result<Vec<WantedStream>, String> {
        self.streams().map(|(name, columns)| wanted(name, columns, known)).collect()
    }
}

fn wanted(name: &str, columns: &[Column], known: &[StreamSchema]) -> Result<WantedStream, String> {
    let Some(schema) = known.iter().find(|schema| schema.name.eq_ignore_ascii_case(name)) else {
        return Err(format!("there is no stream {:?} here", short(name)));
    };
    let mut wanted = vec![false; schema.columns.len()];
    let mut before = None;
    for column in columns {
        let place = schema.columns.iter().position(|known| known == column);
        let place = place.filter(|place| before.is_none_or(|before| before < *place));
        let Some(place) = place else {
            return Err(format!("the events here have no column {:?}", short(&column.name)));
        };
        wanted[place] = true;
        before = Some(place);
    }
    Ok(WantedStream { schema: schema.clone(), columns: wanted })
}

/// A plan over the first stream with the same columns that never has a row.
fn without_rows(plan: &Plan) -> Plan {
    let all = Relation::Window(Window::Unbounded, Box::new(Stream::Source(0)));
    let none = Relation::Filter(Box::new(all), Expression::Literal(Value::Boolean(false)));
    let nulls = plan.columns.iter().map(|_| Expression::Literal(Value::Null)).collect();
    let relation = Relation::Project(Box::new(none), nulls);
    let output = match plan.output {
        Output::Stream(_) => Output::Stream(Stream::Of(ToStream::Insertions, Box::new(relation))),
        Output::Relation(_) => Output::Relation(relation),
    };
    Plan { output, columns: plan.columns.clone() }
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
    use fathom_cql::{Hosts, ParseOptions, split};

    use super::*;
    use crate::replay::Script;
    use crate::{io_stream, streams};

    fn fragments(text: &str) -> Fragments {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let schema = io_stream();
        let plans = script.queries().iter().map(|query| query.plan.clone()).collect();
        Fragments { stream: schema.name, columns: schema.columns, others: Vec::new(), plans }
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
        assert_eq!(all.wanted(&streams()), Ok(vec![WantedStream::whole(&io_stream())]));
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
        assert!(other.wanted(&streams()).is_err());
        other.stream = "else".into();
        assert!(other.wanted(&streams()).is_err());
        assert!(Fragments::from_bytes(b"").is_err());
        assert!(Fragments::from_bytes(&vec![0x9f; 1 << 20]).is_err());
    }

    #[test]
    fn a_host_with_one_stream_gets_no_part_of_the_others() {
        let text = "select c.Change, count(*) as n from Changes [range 10 seconds] as c,
                    IOstream [range 1 second] as i where c.VDisk = i.VDisk group by c.Change;
                    select Size from IOstream where Size > 8; select ChangeTS from Changes";
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        let plans: Vec<Plan> = script.queries().iter().map(|query| query.plan.clone()).collect();
        let parts = split(&plans, script.catalog(), Hosts::Many);
        let all = Fragments::new(parts.fragments, script.catalog());
        let names: Vec<&str> = all.streams().map(|(name, _)| name).collect();
        assert_eq!(names, ["IOstream", "Changes"]);
        let bytes = all.to_bytes().unwrap();
        assert_eq!(Fragments::from_bytes(&bytes), Ok(all.clone()));
        let wanted = all.wanted(&streams()).unwrap();
        assert_eq!(wanted.len(), 2);
        assert!(all.wanted(&[io_stream()]).unwrap_err().contains("no stream \"Changes\""));
        let single = all.of_stream(&io_stream());
        assert!(single.others.is_empty() && single.wanted(&[io_stream()]).is_ok());
        assert_eq!(Fragments::from_bytes(&single.to_bytes().unwrap()), Ok(single.clone()));
        assert_eq!(single.plans.len(), all.plans.len());
        for (one, of_all) in single.plans.iter().zip(&all.plans) {
            let reads = fathom_cql::sources(std::slice::from_ref(of_all));
            assert_eq!((one == of_all, &one.columns), (!reads.contains(&1), &of_all.columns));
        }
        // Hosts of several streams have no stream of a script's own.
        let changes = Fragments::new(vec![all.plans[0].clone()], &all.catalog());
        let other = Fragments { stream: "Else".into(), ..changes };
        assert!(other.wanted(&streams()).is_err());
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

//! `fathom explain`: shows how queries in CQL run.

use std::path::PathBuf;

use clap::Args;
use fathom_cql::{
    Diagnostic, PlannedQuery, Value, catalog,
    plan::{Output, Plan},
    prune, sources,
};
use fathom_monitor::{
    ReplaySummary,
    measure::{Traffic, measure},
    replay::Script,
};
use serde::Serialize;

use super::{
    Reading, diagnostics, failure, parameter, report_summary,
    running::prepare,
    script,
    split::{self, SplitExplanation},
};
use crate::{
    failure::CommandResult,
    output::{self, Format},
};

/// Options of `fathom explain`.
#[derive(Debug, Args)]
#[command(after_help = "\
For each query, this shows the result, the operators, the columns of the streams that they read, and
the state that grows without bound while the query runs. Then it shows how the queries are split
between many hosts and a centre: what each host runs, what the centre runs, and the bytes that are
sent. The bytes are estimates (8 for a number, 16 for a text), or with --replay they are counted.

Examples:
  fathom explain 'select VDisk, count(*) from IOstream group by VDisk'
  fathom explain --file response-time.cql --stream-compat
  fathom explain --file slow.cql --param limit=20000 --json | jq '.queries[].reads'
  fathom explain --file slow.cql --param limit=20000 --replay web.rec")]
pub struct ExplainOptions {
    /// The queries
    #[arg(value_name = "CQL", required_unless_present = "file", conflicts_with = "file")]
    text: Option<String>,
    /// Read the queries from this file
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Interpret the queries as STREAM did: a second of a window is a microsecond
    #[arg(long)]
    stream_compat: bool,
    /// Set $NAME in the queries: a number, true, false, null, or a text
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, Value)>,
    /// Count the bytes that would be sent for the events in this file (-: standard input)
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    format: Format,
}

/// The description of a query.
#[derive(Serialize)]
struct Explained {
    /// `stream` or `relation`.
    result: &'static str,
    columns: Vec<ResultColumn>,
    /// The tree of operators.
    plan: String,
    /// The first stream that the query reads.
    stream: String,
    /// The columns that the query reads from that stream.
    reads: Vec<String>,
    /// The other streams that the query reads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    also: Vec<Reads>,
    /// State that grows without bound.
    unbounded: Vec<Remark>,
    /// Probable mistakes.
    warnings: Vec<Remark>,
}

/// A stream that a query reads.
#[derive(Serialize)]
struct Reads {
    stream: String,
    /// The columns that the query reads.
    reads: Vec<String>,
}

impl Reads {
    fn print(&self) -> String {
        let reads = match (self.reads.len(), self.reads.join(", ")) {
            (0, _) => "no column".to_owned(),
            (_, names) => names,
        };
        format!("reads from {}: {reads}\n", self.stream)
    }
}

/// The streams that a plan reads, at least one.
fn reads(script: &Script, plan: &Plan) -> Vec<Reads> {
    let catalog = script.catalog();
    let used = prune(&mut [plan.clone()], catalog);
    let read = sources(std::slice::from_ref(plan));
    let sources = script.sources().iter().copied();
    let own: Vec<usize> = sources.clone().filter(|source| read.contains(source)).collect();
    // A plan without an input reads no column of the first stream.
    let own = if own.is_empty() { sources.take(1).collect() } else { own };
    let reads = |source: usize| {
        let schema = &catalog.streams[source];
        let reads = used[source].iter().map(|&at| schema.columns[at].name.clone()).collect();
        Reads { stream: schema.name.clone(), reads }
    };
    own.into_iter().map(reads).collect()
}

/// A column of a result.
#[derive(Serialize)]
pub struct ResultColumn {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
}

impl ResultColumn {
    /// Describes a column.
    pub fn new(column: &catalog::Column) -> Self {
        Self { name: column.name.clone(), kind: column.kind.name() }
    }
}

#[derive(Serialize)]
struct Remark {
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    help: Option<String>,
    /// The message with its help and its place in the script.
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct Report {
    queries: Vec<Explained>,
    /// The split of the queries between many hosts and a centre.
    split: SplitExplanation,
}

impl Explained {
    fn new(text: &str, script: &Script, query: &PlannedQuery) -> Self {
        let (plan, catalog) = (&query.plan, script.catalog());
        let mut also = reads(script, plan);
        let Reads { stream, reads } = also.remove(0);
        let remarks = |all: &[Diagnostic]| all.iter().map(|one| Remark::new(text, one)).collect();
        Self {
            result: match plan.output {
                Output::Stream(_) => "stream",
                Output::Relation(_) => "relation",
            },
            columns: plan.columns.iter().map(ResultColumn::new).collect(),
            plan: fathom_cql::explain(plan, catalog),
            stream,
            reads,
            also,
            unbounded: remarks(&query.unbounded),
            warnings: remarks(&query.warnings),
        }
    }

    fn print(&self) -> String {
        let first = Reads { stream: self.stream.clone(), reads: self.reads.clone() };
        let mut text = format!("{}\n{}", self.plan, first.print());
        self.also.iter().for_each(|other| text += &other.print());
        match self.unbounded.len() {
            0 => text += "nothing grows without bound\n",
            _ => text += "grows without bound:\n",
        }
        for remark in &self.unbounded {
            text += &remark.print();
        }
        if !self.warnings.is_empty() {
            text += "warnings:\n";
        }
        for remark in &self.warnings {
            text += &remark.print();
        }
        text
    }
}

impl Remark {
    fn new(script: &str, diagnostic: &Diagnostic) -> Self {
        Self {
            message: diagnostic.message.clone(),
            help: diagnostic.help.clone(),
            text: diagnostics::remark(script, diagnostic),
        }
    }

    fn print(&self) -> String {
        let mut text = String::new();
        for line in self.text.lines() {
            text += &format!("  {line}\n");
        }
        text
    }
}

/// The bytes that hosts would send for the events of a file; `None` without a file.
fn traffic(
    options: &ExplainOptions,
    text: &str,
    script: &Script,
    fragments: &[Plan],
) -> CommandResult<Option<Traffic>> {
    let Some(file) = &options.replay else { return Ok(None) };
    let read = options.reading.times.options(options.stream_compat);
    let traffic = measure(script, fragments, file, &read, options.reading.lateness_ns())
        .map_err(|error| failure(text, error))?;
    let (late, late_ns) = (traffic.late, traffic.late_ns);
    report_summary(&ReplaySummary { read: traffic.read.clone(), late, late_ns });
    Ok(Some(traffic))
}

/// Carries out the command.
pub fn explain(options: &ExplainOptions) -> CommandResult {
    let text = script(options.file.as_deref(), options.text.as_deref())?;
    let script = prepare(&text, &options.parameters, options.stream_compat)?;
    let queries = script.queries().iter();
    let queries: Vec<_> = queries.map(|query| Explained::new(&text, &script, query)).collect();
    let parts = split::parts(&script);
    let traffic = traffic(options, &text, &script, &parts.fragments)?;
    let split = SplitExplanation::new(&script, &parts, traffic.as_ref());
    if options.format.json {
        return output::json(&Report { queries, split });
    }
    let several = queries.len() > 1;
    let mut shown = Vec::with_capacity(queries.len());
    for (at, query) in queries.iter().enumerate() {
        let head = if several { format!("query {}: ", at + 1) } else { String::new() };
        shown.push(head + &query.print());
    }
    shown.push(format!("with many hosts:\n{}", split.print()));
    output::text_line(shown.join("\n").trim_end())
}

//! Common parts of the commands that run queries: the preparation of the queries, and the output of
//! their results.

use std::io::{self, BufWriter, Stdout, Write};

use clap::Args;
use fathom_cql::{ParseOptions, Value, plan};
use fathom_monitor::{
    QueryError,
    replay::Script,
    write::{Form, Printer, PrinterOptions, ShownTimes},
};

use super::{diagnostics, failure};
use crate::failure::CommandResult;
use crate::output::{screen::DataOutput, time};

/// Where results go.
type Output = BufWriter<DataOutput<Stdout>>;

/// The format of results.
#[derive(Debug, Args)]
pub struct Printing {
    /// Print each row as a JSON object
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,
    /// Print CSV
    #[arg(long)]
    csv: bool,
    /// Print each change, with its time and sign
    #[arg(long)]
    deltas: bool,
}

impl Printing {
    fn form(&self) -> Form {
        match (self.json, self.csv) {
            (true, _) => Form::Json,
            (false, true) => Form::Csv,
            (false, false) => Form::Table,
        }
    }

    /// The times of changes, of which the instants are so long before those since 1970.
    pub fn times(&self, wall_offset_ns: i64) -> ShownTimes {
        shown_times(self.form(), wall_offset_ns, false)
    }

    /// Prints to standard output; of a relation, its rows at the end.
    pub fn printer(&self) -> Printer<Output> {
        self.printer_of(self.deltas)
    }

    /// A printer for events without an end: it prints a relation's changes.
    pub fn live_printer(&self, script: &Script) -> Printer<Output> {
        let mut queries = script.queries().iter();
        let relation = queries.any(|query| matches!(query.plan.output, plan::Output::Relation(_)));
        self.printer_of(self.deltas || relation)
    }

    fn printer_of(&self, deltas: bool) -> Printer<Output> {
        let options = PrinterOptions { form: self.form(), deltas };
        Printer::new(BufWriter::new(DataOutput::stdout()), options)
    }
}

/// How rows of `form` have their times, of which the instants are `wall_offset_ns` before those
/// since 1970: people read local time, and files and programs ISO 8601.
pub fn shown_times(form: Form, wall_offset_ns: i64, of_all_rows: bool) -> ShownTimes {
    let text = if form == Form::Table { time::precise } else { time::iso };
    ShownTimes { wall_offset_ns, text, of_all_rows }
}

/// Parses and plans queries.
pub fn prepare(
    text: &str,
    parameters: &[(String, Value)],
    stream_compat: bool,
) -> CommandResult<Script> {
    let parse = ParseOptions { stream_compat, ..ParseOptions::default() };
    Script::prepare(text, parameters, parse).map_err(|error| failure(text, error))
}

/// Reports probable mistakes in the queries on standard error.
pub fn warn_of_mistakes(text: &str, script: &Script) {
    for remark in script.queries().iter().flat_map(|query| &query.warnings) {
        note!("warning: {}", diagnostics::remark(text, remark));
    }
}

/// Reports on standard error probable mistakes in the queries, and state that grows without bound.
pub fn warn(text: &str, script: &Script) {
    warn_of_mistakes(text, script);
    for remark in script.queries().iter().flat_map(|query| &query.unbounded) {
        note!("{}", diagnostics::remark(text, remark));
    }
}

/// Prints the remaining results, also after an error of the queries. Returns the result of the run;
/// `None` if the run ended early without a failure.
pub fn finish<W: Write, T>(
    printer: Printer<W>,
    text: &str,
    ran: Result<T, QueryError>,
) -> CommandResult<Option<T>> {
    let finished = printer.finish().map(drop).map_err(QueryError::Write);
    match ran.and_then(|result| finished.map(|()| result)) {
        Ok(result) => Ok(Some(result)),
        // A broken pipe is no failure.
        Err(QueryError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
        // The orderly end of one of several processes is no failure.
        Err(QueryError::Lost(loss)) if loss.reason.is_none() => {
            note!("{loss}");
            Ok(None)
        }
        Err(error) => Err(failure(text, error)),
    }
}

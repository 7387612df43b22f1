//! What commands that answer queries as events come have in common: how queries are prepared, and
//! how their results are printed.

use std::io::{self, BufWriter, StdoutLock, Write};

use clap::Args;
use fathom_cql::{ParseOptions, Value, plan::Output};
use fathom_monitor::{
    QueryError,
    replay::Script,
    write::{Form, Printer, PrinterOptions},
};

use super::{failure, place};
use crate::failure::Outcome;

/// How results are printed.
#[derive(Debug, Args)]
pub struct Printing {
    /// Print an object of JSON a row
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

    /// Prints to standard output; of a relation what it holds at the end.
    pub fn printer(&self) -> Printer<BufWriter<StdoutLock<'static>>> {
        self.printer_of(self.deltas)
    }

    /// The same for events that have no end: a relation's changes are printed.
    pub fn live_printer(&self, script: &Script) -> Printer<BufWriter<StdoutLock<'static>>> {
        let mut queries = script.queries().iter();
        let relation = queries.any(|query| matches!(query.plan.output, Output::Relation(_)));
        self.printer_of(self.deltas || relation)
    }

    fn printer_of(&self, deltas: bool) -> Printer<BufWriter<StdoutLock<'static>>> {
        let options = PrinterOptions { form: self.form(), deltas };
        Printer::new(BufWriter::new(io::stdout().lock()), options)
    }
}

/// Parses and plans queries.
pub fn prepare(text: &str, parameters: &[(String, Value)], stream_compat: bool) -> Outcome<Script> {
    let parse = ParseOptions { stream_compat, ..ParseOptions::default() };
    Script::prepare(text, parameters, parse).map_err(|error| failure(text, error))
}

/// Says on standard error what is odd in the queries.
pub fn warn_odd(text: &str, script: &Script) {
    for remark in script.queries().iter().flat_map(|query| &query.warnings) {
        eprintln!("warning: {}", place::remark(text, remark));
    }
}

/// Says on standard error what is odd in the queries, and what grows without bound while they stand.
pub fn warn(text: &str, script: &Script) {
    warn_odd(text, script);
    for remark in script.queries().iter().flat_map(|query| &query.unbounded) {
        eprintln!("{}", place::remark(text, remark));
    }
}

/// Prints what is left, also where an error ended the queries. Gives what came of them; nothing
/// where they ended before their end, which is no failure.
pub fn finish<W: Write, T>(
    printer: Printer<W>,
    text: &str,
    ran: Result<T, QueryError>,
) -> Outcome<Option<T>> {
    let finished = printer.finish().map(drop).map_err(QueryError::Write);
    match ran.and_then(|result| finished.map(|()| result)) {
        Ok(result) => Ok(Some(result)),
        // A reader who has left is no failure.
        Err(QueryError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
        // Nor is one of several processes that ends.
        Err(QueryError::Lost(loss)) if loss.reason.is_none() => {
            eprintln!("{loss}");
            Ok(None)
        }
        Err(error) => Err(failure(text, error)),
    }
}

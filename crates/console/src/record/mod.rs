//! `fathom record`: writes the events of the daemon's disks to a file, and exports such a file.
mod export;
mod live;
mod output;
mod text;

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use fathom_control::{Bytes, Nanoseconds};
use fathom_insight::STREAMS;
use fathom_monitor::read::ReadError;

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure, reason},
    query::Times,
};

/// Options of `fathom record`.
#[derive(Debug, Args)]
#[command(after_help = "\
Ctrl-C completes the recording. `fathom query --replay FILE` runs queries over it.
If events arrive faster than they are written, some are dropped; the recording shows where.

A Parquet file gets its name when it is complete: it cannot be read while it is written.

Examples:
  fathom record -o all.rec                         all disks, until Ctrl-C
  fathom record web-root web-data -o web.rec --for 30s --limit 1G
  fathom record -o web.parquet --for 30s           for DuckDB, pandas, Spark
  fathom record -o web.csv --for 30s               or .jsonl
  fathom record -o - | fathom query --file slow.cql --replay -
  fathom record --export web.rec -o web.parquet    or .csv, .jsonl; - is CSV
  fathom record --export trace.bz2 -o trace.parquet")]
pub struct RecordOptions {
    #[command(flatten)]
    control: ControlOptions,
    /// The disks [default: all]
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// Write to this file (-: standard output)
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// A stream of events; may be repeated for a recording [default: all streams for a recording,
    /// otherwise `IOstream`]
    #[arg(long = "stream", value_name = "NAME", value_parser = stream_name)]
    streams: Vec<&'static str>,
    /// The format [default: by the file name, .parquet, .csv or .jsonl, else a recording]
    #[arg(long, value_enum, value_name = "FORM")]
    format: Option<FileForm>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME")]
    time: Option<Nanoseconds>,
    /// End when the file has about this size
    #[arg(long, value_name = "SIZE")]
    limit: Option<Bytes>,
    /// Write the events of this file (-: standard input), in any format that `fathom query
    /// --replay` reads
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "time", "limit", "control"])]
    export: Option<PathBuf>,
    #[command(flatten)]
    times: Times,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

/// Parses the name of a stream.
fn stream_name(text: &str) -> Result<&'static str, String> {
    let names = STREAMS.iter().map(|stream| stream.name);
    let known = names.clone().find(|name| name.eq_ignore_ascii_case(text));
    known.ok_or_else(|| format!("choose among {}", names.collect::<Vec<_>>().join(", ")))
}

impl RecordOptions {
    /// The names of the streams to write, at least one.
    fn stream_names(&self, form: FileForm) -> CommandResult<Vec<&'static str>> {
        match (form, &self.streams[..]) {
            (FileForm::Recording, []) => Ok(STREAMS.iter().map(|stream| stream.name).collect()),
            (FileForm::Recording, names) | (_, names @ [_]) => Ok(names.to_vec()),
            (_, []) => Ok(vec![STREAMS[0].name]),
            (_, _) => Err(Failure::usage("a file of this format has one stream")
                .advise("give --stream once, or record first and export each stream")),
        }
    }
}

/// The format of a file of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FileForm {
    /// A recording, which `fathom query --replay` reads, also while it is written
    Recording,
    /// Parquet
    Parquet,
    /// CSV
    Csv,
    /// A JSON object per line
    Jsonl,
}

impl FileForm {
    /// The format that the extension of a file name determines.
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "parquet" => Some(Self::Parquet),
            "csv" => Some(Self::Csv),
            "jsonl" | "ndjson" | "json" => Some(Self::Jsonl),
            _ => None,
        }
    }
}

/// Carries out the command.
pub fn run(options: &RecordOptions) -> CommandResult {
    let to = &options.output;
    let Some(file) = &options.export else {
        if options.times.are_given() {
            return Err(Failure::usage("--time-unit and --time-column require --export"));
        }
        let form = options.format.or(FileForm::of(to)).unwrap_or(FileForm::Recording);
        return live::record(options, form);
    };
    match options.format.or(FileForm::of(to)) {
        Some(FileForm::Recording) => Err(Failure::usage("events are not exported as a recording")
            .advise("choose parquet, csv or jsonl")),
        Some(form) => export::export(options, file, form),
        None if to.as_os_str() == "-" => export::export(options, file, FileForm::Csv),
        None => Err(Failure::usage(format!("{} has no extension of a known format", to.display()))
            .advise(
                "name a file that ends in .parquet, .csv or .jsonl, or use --format; - is CSV",
            )),
    }
}

/// The reason why a recording ends early.
enum Broken {
    Read(ReadError),
    Write(io::Error),
    /// The daemon's stream ends without an end item.
    CutOff,
    /// A signal was received.
    Interrupted,
}

impl From<Broken> for Failure {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Read(error) => error.into(),
            Broken::Write(error) => {
                let failure = Self::new(format!("cannot write the events: {}", reason(&error)));
                match error.kind() {
                    io::ErrorKind::StorageFull => failure.advise("make room on that file system"),
                    _ => failure,
                }
            }
            Broken::CutOff => Self::new("the events are cut off: the daemon ended abruptly")
                .advise("the events written so far can be read; see the daemon's log"),
            Broken::Interrupted => Self::new("interrupted: the file was not written"),
        }
    }
}

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}
